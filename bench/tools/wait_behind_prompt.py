"""Measures how long a short request waits for its first token after a long prompt, which is computed in chunks, was aborted.

python bench/tools/wait_behind_prompt.py [MODEL] [--tokens 120000]     random weights; prints JSON

The abort and the short request arrive after the host has started STEPS chunks of the long prompt, on a GPU. The fewer chunks the
host queues ahead, the sooner the short request gets its token. Runs with older builds, too, whose engine belongs to the calling
thread.
"""

import argparse
import json
import time
from typing import Any

import torch

from minirt import Generator, SamplingParams

STEPS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="Qwen2.5-7B")
    parser.add_argument("--tokens", type=int, default=120_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with Generator.from_pretrained(options.model, random_weights=True, max_num_seqs=4) as generator:
        engine: Any = getattr(generator._engine, "engine", generator._engine)
        sampling = generator.effective_sampling(SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        vocab = generator.config.vocab_size

        def add(number: int, tokens: list[int]) -> int:
            try:
                from minirt.engine.engine import Request
            except ImportError:
                return engine.add(tokens, sampling)
            engine.add(Request(number, tokens, sampling))
            return number

        for repeat in range(options.repeats):
            torch.cuda.synchronize()
            long = [(repeat * 13 + t * 7919) % vocab for t in range(min(options.tokens, generator.max_len - 8))]
            first = add(10 * repeat, long)
            started = time.perf_counter()
            for _ in range(STEPS):
                engine.step()
            queued = time.perf_counter() - started
            arrived, waited = time.perf_counter(), None
            engine.abort(first)
            short = add(10 * repeat + 1, [repeat + 1, 2, 3])
            while waited is None:
                if any(output.request_id == short for output in engine.step()):
                    waited = time.perf_counter() - arrived
            engine.abort(short)
            while engine.has_work or engine._in_flight:
                engine.step()
            print(json.dumps({"steps_s": queued, "first_token_of_the_short_request_s": waited}), flush=True)


if __name__ == "__main__":
    main()
