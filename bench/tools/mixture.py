"""A mixture of experts: start-up, decode steps, prompts and GPU time by kernel, measured in one process that loads once.

python bench/tools/mixture.py MODEL [--fp8]     random weights, greedy; prints JSON

Beside each time stands the number of distinct experts that a layer of the step uses, because that is what it reads.
"""

import json
import sys
from typing import Any

import torch

from minirt import Generator
from minirt.bench import decode, prefill
from minirt.bench.ceiling import datasheet_bandwidth, matmul_ceiling, read_ceiling
from minirt.bench.experts import in_prompt
from minirt.bench.report import context
from minirt.bench.tools.gpu_trace import trace
from minirt.device import pick_device

BATCHES, PROMPTS, TRACED = (1, 3, 8, 24, 64, 100, 256), (512, 2048), (1, 8, 64)
CONTEXT = 128
_STEPS = 32  # of a timed run
_REPEATS = 3
_GREEDY = {"temperature": 0.0}
_WHY = "its parts are: tests/kernels/moe compares every regime with fp64, tests/test_parity.py the model with transformers"


def measure(model: str, fp8: bool) -> dict[str, Any]:
    """Load once and measure everything."""
    device, kind = pick_device("auto"), "fp8" if fp8 else None
    ceiling, products = read_ceiling(device), matmul_ceiling(device, torch.float8_e4m3fn if fp8 else torch.bfloat16)
    sizes: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": max(BATCHES), "prefix_cache": False}
    with Generator.from_pretrained(model, random_weights=True, quantization=kind, **sizes) as generator:
        start = {"load_s": generator.load_time_s, "warm_up_s": generator.warm_up_time_s}
        steps = decode.run(
            generator, BATCHES, (CONTEXT,), repeats=_REPEATS, sampling=_GREEDY, seed=0, ceiling=ceiling, products=products,
            datasheet=datasheet_bandwidth(device), progress=note, count=_STEPS,
        )  # fmt: skip
        prompts = prefill.run(
            generator, PROMPTS, repeats=5, sampling=_GREEDY, seed=0, ceiling=products, progress=note
        )
        for row in prompts:
            use = in_prompt(generator, row["input_len"], 0)
            read = generator.step_read_bytes(row["input_len"], None if use is None else use.touched())
            row["limit_s"] = max(read / ceiling.bytes_per_s, row["flops"] / products.flops_per_s)
            row["share_of_limit"] = row["limit_s"] / row["time_to_first_token_s"]["median"]
        traces = [trace(generator, batch, CONTEXT, _GREEDY) for batch in TRACED]
        shared = context(
            "mixture", generator, name=model, command=["python", "bench/tools/mixture.py", *sys.argv[1:]],
            correctness={"checked": False, "why": f"the whole model is not checked here; {_WHY}"}, ceiling=ceiling,
            products=products,
        )  # fmt: skip
    return shared | {"quantization": kind, "start": start, "results": steps, "prompts": prompts, "traces": traces}


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], "--fp8" in sys.argv), indent=1, ensure_ascii=False))
