"""GPU time of decode steps by kernel, and idle time, from a profiler trace of `Generator` in the steady state.

python bench/tools/gpu_trace.py MODEL [BATCH …]     random weights, greedy and with top-p 0.95; prints JSON

`idle_between_steps`: share of the time between the last kernel of a step and the first kernel of the next.
`idle`: `idle_between_steps` plus the gaps between the kernels of a step.
"""

import statistics
import sys
from itertools import pairwise
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from minirt import Generator, SamplingParams
from minirt.bench.tools.results import print_record

STEPS = 40
_AROUND = 10  # steps left out before the traced ones (prompts, and some until times settle) and after them


def trace(generator: Generator, batch: int, context: int, sampling: dict) -> dict:
    """Trace STEPS decode steps in the middle of a run of `batch` prompts of `context` tokens."""
    prompts = [[(7 * i + j) % 1000 for j in range(context)] for i in range(batch)]
    params = SamplingParams(max_tokens=1 + STEPS + 2 * _AROUND, ignore_eos=True, repetition_penalty=1.0, seed=1, **sampling)
    generator.generate(prompts, params)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        generator.generate(prompts, params)
        torch.cuda.synchronize()
    events = [e for e in trace.events() if e.device_type == DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    # A step ends where its tokens are copied to the host.
    ends = [i for i, e in enumerate(events) if "DtoH" in e.name][-STEPS - _AROUND - 1 : -_AROUND]
    start = events[ends[0]].time_range.end
    steps = [events[a + 1 : b + 1] for a, b in pairwise(ends)]
    times = [events[b].time_range.end - events[a].time_range.end for a, b in pairwise(ends)]
    busy, between, end = 0.0, 0.0, start
    by_kernel: dict[str, float] = {}
    for step in steps:
        between += max(0.0, step[0].time_range.start - end)
        for e in step:
            busy += max(0.0, e.time_range.end - max(e.time_range.start, end))
            end = max(end, e.time_range.end)
            by_kernel[e.name] = by_kernel.get(e.name, 0.0) + e.time_range.elapsed_us() / STEPS
    return {
        "batch": batch, "context": context, "step_ms": round(statistics.median(times) / 1e3, 4),
        "idle": round(1 - busy / sum(times), 4), "idle_between_steps": round(between / sum(times), 4),
        "us_a_step_by_kernel": {n[:60]: round(t, 1) for n, t in sorted(by_kernel.items(), key=lambda i: -i[1])[:12]},
    }  # fmt: skip


def main() -> None:
    model, batches = sys.argv[1], [int(n) for n in sys.argv[2:]] or [1, 64, 256]
    results = []
    load: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": max(batches), "prefix_cache": False, "warm_up": "full"}
    with Generator.from_pretrained(model, random_weights=True, **load) as generator:
        for batch in batches:
            for temperature in (0.0, 0.8):
                sampling = {"temperature": temperature, "top_p": 0.95}
                results.append({"temperature": temperature} | trace(generator, batch, 128, sampling))
    print_record("trace", model=model, results=results)


if __name__ == "__main__":
    main()
