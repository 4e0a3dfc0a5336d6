"""What penalties, log-probabilities and structured output cost: `python bench/tools/sampling_cost.py PRESET [--fp8]`.

Random weights, and a tokenizer with as many made-up tokens as the model's, because masks cover the vocabulary. Prints JSON. All
cases sample at temperature 1 and take turns. A case's cost is its step's time divided by that of plain sampling: the median of
all pairs, with a 95% confidence interval. For structured output, also how long the host takes for the masks of a step.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minirt.bench.tools.paired import interval
from minirt.bench.tools.served import write_model

BATCHES, PROMPT, STEPS, PAIRS = (1, 64), 100, 64, 10
# An array that is never complete, of objects with everything that makes masks expensive.
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["person", "company", "other"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,8}$"}, "maxItems": 5},
        "since": {"type": "string", "format": "date"},
        "note": {"anyOf": [{"type": "null"}, {"type": "string"}]},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "logprobs": {"logprobs": 5},
    "structured": {"structured_outputs": {"json": {"type": "array", "items": _ITEM, "minItems": 1000}}},
}


def time_masks() -> list[float]:
    """A list to which every call that computes the masks of a step adds its seconds."""
    from minirt.structured.constraints import Constraints

    compute, seconds = Constraints.fill, list[float]()

    def timed(self: Constraints, masks: Any, rows: Any) -> Any:
        started = time.perf_counter()
        failed = compute(self, masks, rows)
        seconds.append(time.perf_counter() - started)
        return failed

    Constraints.fill = timed  # type: ignore[method-assign]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", metavar="PRESET")
    parser.add_argument("--fp8", action="store_true")
    options = parser.parse_args()
    from minirt import Generator, SamplingParams
    from minirt.bench.report import machine

    rows, masks = [], time_masks()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.model)
        quantization = "fp8" if options.fp8 else None
        facts: dict[str, Any] = {"random_weights": True, "quantization": quantization, "max_num_seqs": max(BATCHES)}
        with Generator.from_pretrained(folder, **facts) as generator:
            device, last, serial = generator.device, generator.config.vocab_size - 1000, 0

            def seconds(batch: int, tokens: int, own: dict[str, Any]) -> float:
                nonlocal serial
                serial += 1  # new tokens in each call
                starts = [serial * 7919 + i * 104729 for i in range(batch)]
                prompts: list[Sequence[int]] = [[(start + t * 31) % last for t in range(PROMPT)] for start in starts]
                started = time.perf_counter()
                ends: dict[str, Any] = {} if "structured_outputs" in own else {"ignore_eos": True}
                found = generator.generate(prompts, SamplingParams(max_tokens=tokens, seed=serial, **own, **ends))
                if any(len(completion.token_ids) != tokens for completion in found):
                    sys.exit("a request ended early")
                return time.perf_counter() - started

            def step(batch: int, name: str) -> float:
                own = CASES[name]
                return (seconds(batch, 8 + STEPS, own) - seconds(batch, 8, own)) / STEPS

            for batch in BATCHES:
                times: dict[str, list[float]] = {name: [] for name in CASES}
                masks.clear()
                for pair in range(-1, PAIRS):
                    for name in list(CASES)[:: 1 if pair % 2 else -1]:
                        found = step(batch, name)
                        times[name] += [found] if pair >= 0 else []  # the first turn is a warm-up
                for name, own in times.items():
                    ratios = [mine / plain for mine, plain in zip(own, times["plain"], strict=True)]
                    low, high = interval(ratios)
                    ratio = {"ratio": statistics.median(ratios), "low": low, "high": high}
                    rows.append({"batch_size": batch, "case": name, "step_s": statistics.median(own)} | ratio)
                    if name == "structured":
                        rows[-1]["masks_s"] = {"mean": statistics.mean(masks), "deciles": statistics.quantiles(masks, n=10)}
    shared = machine("sampling", device, ["python", "bench/tools/sampling_cost.py", *sys.argv[1:]], None)
    own_facts = {"model": options.model, "quantization": quantization}
    print(json.dumps(shared | own_facts | {"results": rows}, indent=1))


if __name__ == "__main__":
    main()
