"""What the host does in a step: decode steps of a model that computes nothing, on the CPU, through the public API.

python bench/tools/host_cost.py [--sequences 1,64,256] [--waiting 0] [--steps 200] [--repeats 5]   JSON lines

`ms`: processor time of all threads of the process for one step, the callers' included: `generate` in one call, and as many open
streams of one event loop. The least of `--repeats` runs counts, because other processes only add. `calls`: calls of functions,
in Python and in C, in the engine's thread for one step. `--waiting`: requests that wait behind those that run. The embedded model
gives the tokenizer; its layers do not run.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from minirt import AsyncGenerator, Generator, SamplingParams
from minirt.engine.request import Request
from minirt.sampling_params import resolve

BEFORE = 32  # steps before the first one that counts: prompts, and the first tokens
VOCAB = 128


class Nothing:
    """A model whose logits are always the same, and few: to look for the largest is not the host's work.

    Attributes:
        acts: what is called in a step, by its number.
    """

    def __init__(self, rows: int) -> None:
        self._logits = torch.zeros(rows, VOCAB)
        self._logits[:, VOCAB - 1] = 1
        self.acts: dict[int, Callable[[], Any]] = {}
        self._step = 0

    def begin(self, acts: dict[int, Callable[[], Any]]) -> None:
        """From the next step on, count from 0."""
        self.acts, self._step = acts, 0

    def __call__(self, batch: Any, cache: Any) -> torch.Tensor:
        if (act := self.acts.get(self._step)) is not None:
            act()
        self._step += 1
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


Kind = Callable[[Generator, int, int], None]


class Cost:
    """Measures steps of `sequences` sequences, as many as can run at once, while `waiting` requests wait for a slot."""

    def __init__(self, generator: Generator, sequences: int, waiting: int, steps: int) -> None:
        self._generator, self._sequences, self._steps = generator, sequences, steps
        self._thread = generator._engine
        self._nothing = Nothing(2 * sequences)
        self._thread.call(lambda engine: setattr(engine._runner, "model", self._nothing))
        greedy = resolve(SamplingParams(temperature=0.0, max_tokens=1), None)
        self._waiting = [Request(self._thread.new_id(), [5, 7], greedy) for _ in range(waiting)]

    def milliseconds(self, kind: Kind) -> float:
        """Processor time of a step."""
        stamps: list[float] = []
        stamp = lambda: stamps.append(time.process_time())  # noqa: E731
        self._run(kind, stamp, stamp)
        return (stamps[1] - stamps[0]) / self._steps * 1e3

    def calls(self, kind: Kind) -> float:
        """Calls of functions in the engine's thread for a step."""
        count = 0

        def profile(frame: Any, event: str, _: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        self._run(kind, lambda: sys.setprofile(profile), lambda: sys.setprofile(None))
        return count / self._steps

    def _run(self, kind: Kind, first: Callable[[], Any], last: Callable[[], Any]) -> None:
        """`first` and `last` are called in the engine's thread, `steps` steps apart. In between, the requests wait."""
        start = BEFORE + 8  # the requests are added and sorted before
        end = start + self._steps
        acts = {start: first, end: last}
        if self._waiting:
            acts[BEFORE] = lambda: self._thread.submit(self._waiting, SimpleQueue())
            acts[end + 1] = lambda: self._thread.abort([request.id for request in self._waiting])
        self._nothing.begin(acts)
        kind(self._generator, self._sequences, end + 8)


def load(sequences: int, steps: int) -> Generator:
    """A generator in which `sequences` sequences can run for `steps` measured steps."""
    length = BEFORE + steps + 24
    limits: dict[str, Any] = {"max_num_seqs": sequences, "max_num_batched_tokens": 2 * sequences, "max_model_len": length}
    return Generator.from_pretrained(device="cpu", kv_cache_memory=4 << 30, **limits)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=lambda text: [int(n) for n in text.split(",")], default=[1, 64, 256])
    parser.add_argument("--waiting", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for sequences in arguments.sequences:
        with load(sequences, arguments.steps) as generator:
            cost = Cost(generator, sequences, arguments.waiting, arguments.steps)
            for kind in (generate, streams):
                ms = min(cost.milliseconds(kind) for _ in range(arguments.repeats))
                row = {"callers": kind.__name__, "sequences": sequences, "waiting": arguments.waiting, "ms": round(ms, 3)}
                print(json.dumps(row | {"calls": round(cost.calls(kind), 1)}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
