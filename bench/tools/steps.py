"""The times of decode steps' CUDA graphs and of prompts, in seconds of GPU time for a model, not minutes.

python bench/tools/steps.py PRESET [--quantize fp8|int4 | --stored FORMAT] [--set NAME=NUMBER …]     random weights; prints JSON

A step is the replay of its CUDA graph alone: `minirt bench speed` also measures Python's part. A prompt is one request for one
token, in Python. A step that does not fit into memory has no time, and says why. The limit of a step is the time to read the
weights and the KV cache, at the measured bandwidth. Of a mixture, the weights of the expected number of experts count, if all
are equally likely.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from minirt.bench.tools.results import print_record
from minirt.bench.tools.stored_format import add_options, chosen_model
from minirt.errors import ContextLengthError, InputError

BATCHES, PROMPTS, CONTEXT, REPEATS = (1, 3, 8, 24, 64, 100, 256), (512, 2048), 128, 5

_WHY = "tests/kernels/linear compares the kernels of each format with fp64, tests/loading the weights with other projects' tools"


def measure(model: str, quantization: str | None) -> None:
    from minirt import Generator
    from minirt.bench.ceiling import read_ceiling
    from minirt.bench.measure import Runs
    from minirt.bench.replay import replay_times
    from minirt.bench.summary import summarize
    from minirt.device import pick_device
    from minirt.profiling.read_bytes import kv_read_bytes, step_read_bytes

    sizes: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": max(BATCHES), "max_num_batched_tokens": max(PROMPTS)}
    results: list[dict[str, Any]] = []
    with Generator.from_pretrained(model, random_weights=True, quantization=quantization, warm_up="full", **sizes) as generator:
        ceiling = read_ceiling(pick_device("cuda"))
        cached = kv_read_bytes(generator.model, CONTEXT)
        for batch in BATCHES:
            read = step_read_bytes(generator.model, batch) + batch * (cached + generator.step_state_bytes)
            limit = read / ceiling.bytes_per_s
            row: dict[str, Any] = {"batch_size": batch, "context_len": CONTEXT, "step_s": None, "limit_s": limit}
            try:
                row["step_s"] = summarize(replay_times(generator, batch, CONTEXT))
            except (ContextLengthError, InputError) as error:  # fewer sequences run at once, or there are fewer pages
                row["left_out"] = str(error)
            results.append(row | {"share_of_limit": row["step_s"] and limit / row["step_s"]["median"]})
        runs, draw = Runs(generator, REPEATS, {"temperature": 0.0}), random.Random(0)
        for length in PROMPTS:
            seconds = [runs.timed(draw, [length], [1])[0] for _ in range(REPEATS + 2)]
            results.append({"input_len": length, "time_to_first_token_s": summarize(seconds[2:])})
    about = {"model": Path(model).name, "quantization": quantization, "correctness": {"checked": False, "why": _WHY}}
    print_record("steps", "cuda", ceiling, **about, results=results)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("--quantize", choices=("fp8", "int4", "mxfp4"))
    options = parser.parse_args(words)
    if options.quantize and options.stored:
        parser.error("--quantize is for 16-bit weights; --stored weights are quantized already")
    with chosen_model(options) as model:
        measure(model, options.quantize)


if __name__ == "__main__":
    main(sys.argv[1:])
