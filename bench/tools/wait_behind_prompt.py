"""Measures how long a short request waits for its first token beside a long prompt, which is computed in chunks, on a GPU.

python bench/tools/wait_behind_prompt.py [MODEL] [--tokens 120000]     random weights; prints JSON

The short request arrives after the host has started three chunks of the long prompt. The fewer chunks the host queues ahead, the
sooner the short request gets into a step. Runs with older builds, too, whose engine belongs to the calling thread.
"""

import argparse
import json
import time
from typing import Any

import torch

from minirt import Generator, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="Qwen2.5-7B")
    parser.add_argument("--tokens", type=int, default=120_000)
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

        for repeat in range(3):
            torch.cuda.synchronize()
            long = [(repeat * 13 + t * 7919) % vocab for t in range(min(options.tokens, generator.max_len - 8))]
            first = add(10 * repeat, long)
            started = time.perf_counter()
            for _ in range(3):
                engine.step()
            queued = time.perf_counter() - started
            short, arrived, waited = add(10 * repeat + 1, [repeat + 1, 2, 3]), time.perf_counter(), None
            while waited is None:
                if any(output.request_id == short for output in engine.step()):
                    waited = time.perf_counter() - arrived
            engine.abort(first)
            engine.abort(short)
            while engine.has_work or engine._in_flight:
                engine.step()
            print(json.dumps({"three_steps_s": queued, "first_token_of_the_short_request_s": waited}), flush=True)


if __name__ == "__main__":
    main()
