"""What the prefix cache brings and costs: `python bench/tools/prefix_cache.py MODEL`. Random weights; prints JSON.

- Time to the first token of NEW tokens behind SHARED cached ones, and the GPU's own time for a step with such a chunk.
- Requests that share nothing: the time of a batch with the cache divided by the time without; both engines take turns. It is the
  median of all pairs, with a 95% confidence interval.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

from minirt.bench.tools.paired import interval
from minirt.bench.tools.step_time import step_seconds

SHARED, NEW, FIRST_TOKENS = 8192, 64, 12
REQUESTS, PROMPT, OUTPUT, PAIRS = 64, 256, 32, 30
KV_BYTES = 4 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    options = parser.parse_args()
    from minirt import Generator, SamplingParams
    from minirt.bench.report import machine

    serial = 0

    def tokens(count: int) -> list[int]:
        nonlocal serial
        serial += 1
        return [(serial * 7919 + t * 31) % 30000 for t in range(count)]

    common: dict[str, Any] = {"random_weights": True, "kv_cache_memory": KV_BYTES}
    common |= {"max_num_seqs": REQUESTS, "max_model_len": 2 * SHARED}
    with Generator.from_pretrained(options.model, **common) as cached:
        one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        shared, firsts = tokens(SHARED), []
        cached.generate(shared, one)
        for _ in range(FIRST_TOKENS):
            completion = cached.generate(shared + tokens(NEW), one)
            if completion.cached_tokens < SHARED - 64:  # with recurrent layers, a state up to 64 tokens before the end
                sys.exit(f"only {completion.cached_tokens} tokens came from the cache")
            firsts.append(completion.time_to_first_token_s)
        first, chunk = statistics.median(firsts[2:]), step_seconds(cached, SHARED, NEW)
        row = {"shared": SHARED, "new": NEW, "first_token_s": first, "chunk_s": chunk}
        with Generator.from_pretrained(options.model, prefix_cache=False, **common) as uncached:
            params, ratios = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True), []
            for pair in range(-1, PAIRS):
                taken = {}
                for generator in (cached, uncached)[:: 1 if pair % 2 else -1]:
                    asked = [tokens(PROMPT) for _ in range(REQUESTS)]
                    started = time.perf_counter()
                    generator.generate(asked, params)
                    taken[generator] = time.perf_counter() - started
                ratios += [taken[cached] / taken[uncached]] if pair >= 0 else []
        low, high = interval(ratios)
        row |= {"ratio_without_hits": statistics.median(ratios), "low": low, "high": high}
        record = machine("prefix", cached.device, ["python", "bench/tools/prefix_cache.py", *sys.argv[1:]], None)
    print(json.dumps(record | {"model": options.model, "results": [row]}, indent=1))


if __name__ == "__main__":
    main()
