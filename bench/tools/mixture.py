"""A mixture of experts: start-up, decode steps, prompts and GPU time by kernel, measured in one process that loads once.

python bench/tools/mixture.py PRESET [--fp8 | --stored FORMAT] [--no-warmup] [--skip-check] [--set NAME=NUMBER …]

Random weights, greedy; prints JSON. First, logits and tokens are compared with those of the eager layers (`bench/check.py`).
`--stored` gives the checkpoint a format that is quantized, a key of `stored_format.FORMATS`. `--set` changes a field of
config.json, for numbers of experts and widths that are no multiple of a tile. Without warm-up, a
step's first run compiles its kernels; it is not timed.

Beside each time stands the number of distinct experts that a layer of the step uses, because that is what it reads.
"""

import argparse
import json
import sys
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from minirt import Generator
from minirt.bench import check, decode, prefill
from minirt.bench.ceiling import matmul_ceiling, read_ceiling
from minirt.bench.experts import in_prompt
from minirt.bench.measure import Runs
from minirt.bench.replay import replay_times
from minirt.bench.report import context
from minirt.bench.tools.stored_format import add_options, changes, chosen_model
from minirt.device import pick_device
from minirt.profiling.read_bytes import step_read_bytes

BATCHES, PROMPTS, TRACED = (1, 3, 8, 24, 64, 100, 256), (512, 2048), (1, 8, 64)
CONTEXT = 128
_STEPS = 24  # of a timed run
_GREEDY = {"temperature": 0.0}
_WHY = "tests/kernels/moe compares the kernels of every regime with fp64, tests/test_parity.py the model with transformers"


def measure(model: str, fp8_products: bool, skip_check: bool = False, **options: Any) -> dict[str, Any]:
    """Load once, check and measure everything. options: further ones of the load.

    `fp8_products`: whether the limit of products is that of FP8.

    Raises:
        NumericsError: the model does not agree with its eager layers.
    """
    device = pick_device(options.get("device", "auto"))
    on_gpu = device.type == "cuda"
    ceiling = read_ceiling(device)
    products = matmul_ceiling(device, torch.float8_e4m3fn if fp8_products and on_gpu else torch.bfloat16)
    sizes: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": max(BATCHES), "prefix_cache": False}
    sizes |= {"random_weights": True} | options
    expected = None
    if not skip_check:
        with Generator.from_pretrained(model, **sizes | {"impl": "eager", "warm_up": "none"}) as eager:
            expected = check.reference(eager, max(PROMPTS))
    with Generator.from_pretrained(model, **sizes) as generator:
        correctness: dict[str, Any] = {"checked": False, "why": f"not checked here: {_WHY}"}
        if expected is not None:
            correctness = check.compare(generator, expected, BATCHES)
        start = {"load_s": generator.load_time_s, "warm_up_s": generator.warm_up_time_s or None}
        steps = decode.run(Runs(generator, 2, _GREEDY, progress=note), BATCHES, (CONTEXT,), ceiling, products, _STEPS)
        prompts = prefill.run(Runs(generator, 5, _GREEDY, progress=note), PROMPTS, products)
        for row in prompts:
            use = in_prompt(generator, row["input_len"], 0)
            read = step_read_bytes(generator.model, row["input_len"], None if use is None else use.touched())
            row["limit_s"] = max(read / ceiling.bytes_per_s, row["flops"] / products.flops_per_s)
            row["share_of_limit"] = row["limit_s"] / row["time_to_first_token_s"]["median"]
        traces = [by_kernel(generator, batch) for batch in TRACED if on_gpu]
        shared = context(
            "mixture", generator, name=model, command=["python", "bench/tools/mixture.py", *sys.argv[1:]],
            correctness=correctness, ceiling=ceiling, products=products,
        )  # fmt: skip
    shared |= {"quantization": options.get("quantization"), "start": start}
    return shared | {"results": steps, "prompts": prompts, "traces": traces}


def by_kernel(generator: Generator, batch: int) -> dict[str, Any]:
    """Microseconds of each kernel in a replay of a decode step's CUDA graph, by PyTorch's profiler."""
    seconds = decode.replay_time(generator, batch, CONTEXT)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        replay_times(generator, batch, CONTEXT, 5)
        torch.cuda.synchronize()
    rows = [e for e in trace.key_averages() if e.self_device_time_total > 0]
    replays = next(e.count for e in rows if "embedding" in e.key)  # once in a step
    times = {e.key[:60]: round(e.self_device_time_total / replays, 1) for e in rows}
    return {
        "batch": batch, "context": CONTEXT, "step_ms": seconds and seconds * 1e3,
        "us_a_step_by_kernel": dict(sorted(times.items(), key=lambda item: -item[1])[:16]),
    }  # fmt: skip


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--no-warmup", dest="warm_up", action="store_const", const="none", default="full")
    parser.add_argument("--skip-check", action="store_true")
    options = parser.parse_args()
    if options.fp8 and options.stored:
        parser.error("--fp8 quantizes 16-bit weights; --stored weights are quantized already")
    load: dict[str, Any] = {"warm_up": options.warm_up} | ({"quantization": "fp8"} if options.fp8 else {})
    fp8_products = options.fp8 or (options.stored or "").startswith("fp8")
    with chosen_model(options) as model:
        record = measure(model, fp8_products, options.skip_check, **load)
    record |= {"model": options.model, "changed": changes(options), "stored": options.stored}
    print(json.dumps(record, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
