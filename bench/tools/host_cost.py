"""What the host does in a step: decode steps of a model that computes nothing, on the CPU, through the public API.

python bench/tools/host_cost.py [--sequences 1,64,256] [--steps 200] [--repeats 5]   JSON lines

Processor time of all threads of the process for one step, the callers' included: `generate` in one call, and as many open
streams of one event loop. The embedded model gives the tokenizer; its layers do not run. The least of `--repeats` runs counts,
because other processes only add. Prefill, and what a request costs once, are left out: the difference of two lengths is taken.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from minirt import AsyncGenerator, Generator, SamplingParams

SHORT = 32  # tokens of the shorter of two runs
VOCAB = 128


class Nothing:
    """A model whose logits are always the same, and few: to look for the largest is not the host's work."""

    def __init__(self, rows: int) -> None:
        self._logits = torch.zeros(rows, VOCAB)
        self._logits[:, VOCAB - 1] = 1

    def __call__(self, batch: Any, cache: Any) -> torch.Tensor:
        return self._logits[: len(batch.logits_indices)]


def generate(generator: Generator, sequences: int, tokens: int) -> None:
    """One call for all sequences."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    generator.generate([[5 + i % 100, 7] for i in range(sequences)], params)


def streams(generator: Generator, sequences: int, tokens: int) -> None:
    """As many streams of one event loop."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    async def one(server: AsyncGenerator, i: int) -> None:
        async for _ in server.stream([5 + i % 100, 7], params):
            pass

    async def all_of_them() -> None:
        server = AsyncGenerator(generator)
        await asyncio.gather(*(one(server, i) for i in range(sequences)))

    asyncio.run(all_of_them())


def milliseconds(run: Callable[[int], None], steps: int, repeats: int) -> float:
    """Processor time of a step: of the steps that a longer run has more."""

    def seconds(tokens: int) -> float:
        started = time.process_time()
        run(tokens)
        return time.process_time() - started

    seconds(SHORT)
    return (min(seconds(SHORT + steps) for _ in range(repeats)) - min(seconds(SHORT) for _ in range(repeats))) / steps * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=lambda text: [int(n) for n in text.split(",")], default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    most = max(arguments.sequences)
    limits = {"max_num_seqs": most, "max_num_batched_tokens": 2 * most, "max_model_len": SHORT + arguments.steps + 8}
    with Generator.from_pretrained(device="cpu", kv_cache_memory=4 << 30, **limits) as generator:
        nothing = Nothing(2 * most)
        generator._engine.call(lambda engine: setattr(engine._runner, "_model", nothing))
        for sequences in arguments.sequences:
            for kind in (generate, streams):
                cost = milliseconds(lambda tokens: kind(generator, sequences, tokens), arguments.steps, arguments.repeats)  # noqa: B023
                print(json.dumps({"callers": kind.__name__, "sequences": sequences, "ms": round(cost, 3)}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
