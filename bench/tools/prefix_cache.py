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
from itertools import pairwise
from typing import Any

from minirt.bench.tools.paired import interval

SHARED, NEW, FIRST_TOKENS = 8192, 64, 12
REQUESTS, PROMPT, OUTPUT, PAIRS = 64, 256, 32, 30
KV_BYTES = 4 << 30


def chunk_seconds(generator: Any) -> float:
    """The GPU's time for a step with a chunk of NEW tokens behind SHARED tokens, as a CUDA graph."""
    import torch

    from minirt.engine.step_input import Chunk

    runner = generator._engine.engine._runner
    model, cache = runner._model, runner._cache
    pages = cache.allocator.allocate(cache.pages_for(SHARED + NEW))
    try:
        with torch.inference_mode():
            batch = runner._batch([Chunk(list(range(1, NEW + 1)), SHARED, pages)]).to(generator.device)
            for _ in range(2):
                model(batch, cache)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                model(batch, cache)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
            for event in events:
                graph.replay()
                event.record()
            torch.cuda.synchronize()
            return statistics.median(a.elapsed_time(b) for a, b in pairwise(events)) / 1e3
    finally:
        cache.allocator.release(pages)


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
            if completion.cached_tokens < SHARED:
                sys.exit(f"only {completion.cached_tokens} tokens came from the cache")
            firsts.append(completion.time_to_first_token_s)
        row = {"shared": SHARED, "new": NEW, "first_token_s": statistics.median(firsts[2:]), "chunk_s": chunk_seconds(cached)}
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
