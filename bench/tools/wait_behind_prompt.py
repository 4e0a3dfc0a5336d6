"""How long a short request waits for its first token beside a long prompt, and what that costs the long prompt.

python bench/tools/wait_behind_prompt.py [MODEL] [--tokens 40000] [--pairs 7] [--beside 16]     random weights; prints JSON

A pair is the long prompt without the short request, and with it: one of a few tokens, for one token, that arrives after a number
of steps that differs between pairs. The long prompt's time ends at its first token. Pairs are measured alone, and beside
sequences that go on decoding. Steps are counted from the arrival up to the step that returns the token, on a GPU one later than
the step that computes it. Older builds can run it, too.
"""

import argparse
import json
import statistics
import time
from typing import Any

from minirt import Generator, SamplingParams
from minirt.bench.summary import summarize
from minirt.bench.tools.paired import interval
from minirt.engine.engine import Engine, Request

SHORT = (1, 2, 3, 4, 5)


class Prompts:
    """Measures on the engine's thread. `tokens`: of the long prompt."""

    def __init__(self, generator: Generator, engine: Engine, tokens: int) -> None:
        self._generator, self._engine, self._tokens, self._id = generator, engine, tokens, 0

    def add(self, prompt: list[int], new: int = 1) -> int:
        """Add a request for so many tokens. Each prompt begins differently, so that the prefix cache has nothing of it."""
        self._id, vocab = self._id + 1, self._generator.config.vocab_size
        sampling = self._generator.effective_sampling(SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True))
        self._engine.add(Request(self._id, [self._id % vocab, *(token % vocab for token in prompt)], sampling))
        return self._id

    def run(self, arrival: int | None = None) -> tuple[float, int, float, int]:
        """The seconds and steps of the long prompt, and those of the short request that arrives after `arrival` steps."""
        long, steps, began = self.add([i * 7919 for i in range(self._tokens - 1)]), 0, time.perf_counter()
        seconds, came, short, arrived = dict[int, float](), dict[int, int](), -1, (0, 0.0)
        while long not in seconds or (arrival is not None and short not in seconds):
            if steps == arrival:
                arrived, short = (steps, time.perf_counter()), self.add(list(SHORT))
            for output in self._engine.step():
                seconds.setdefault(output.request_id, time.perf_counter())
                came.setdefault(output.request_id, steps + 1)
            steps += 1
        long_s = seconds[long] - began
        if arrival is None:
            return long_s, came[long], 0.0, 0
        return long_s, came[long], seconds[short] - arrived[1], came[short] - arrived[0]

    def pairs(self, count: int) -> dict[str, Any]:
        _, steps, *_ = self.run()  # not counted
        without, beside = list[Any](), list[Any]()
        for pair in range(count):
            arrival = 1 + pair % max(1, steps - 2)
            for kind in (False, True) if pair % 2 else (True, False):
                (beside if kind else without).append(self.run(arrival if kind else None))
        ratios = [one[0] / other[0] for one, other in zip(beside, without, strict=True)]
        return {
            "long_s": summarize([own[0] for own in without]), "long_steps": steps,
            "long_beside_short_s": summarize([own[0] for own in beside]),
            "ratio": statistics.median(ratios), "ratio_interval": interval(ratios),
            "short_s": summarize([own[2] for own in beside]), "short_steps": [own[3] for own in beside],
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="Qwen2.5-7B")
    parser.add_argument("--tokens", type=int, default=40_000)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--beside", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, help="Default: as for all commands.")
    options = parser.parse_args()
    if options.pairs < 6:
        parser.error("--pairs: at least 6, for an interval of 95%")
    limits = {"max_num_seqs": options.beside + 4, "max_num_batched_tokens": options.max_num_batched_tokens}
    with Generator.from_pretrained(options.model, random_weights=True, **limits) as generator:
        tokens = min(options.tokens, generator.max_len - 8)

        def measure(engine: Engine) -> dict[str, Any]:
            own = Prompts(generator, engine, tokens)
            rows = {"alone": own.pairs(options.pairs)}
            if options.beside:
                going_on = [own.add(list(SHORT), generator.max_len - 8) for _ in range(options.beside)]
                while not all(map(engine.num_tokens, going_on)):
                    engine.step()
                rows["beside"] = own.pairs(options.pairs)
                for request in going_on:
                    engine.abort(request)
            while engine.has_work or engine._in_flight:
                engine.step()
            return rows

        rows = generator._engine.call(measure)
        sizes = {"tokens": tokens, "step_tokens": generator.max_num_batched_tokens, "sequences_beside": options.beside}
        print(json.dumps({"model": options.model, "device": str(generator.device)} | sizes | rows))


if __name__ == "__main__":
    main()
