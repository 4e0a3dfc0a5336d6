"""Where the GPU's time goes in decode steps, through the engine: a profiler's trace of steps in the steady state.

python -P bench/gpu_trace.py MODEL [BATCH …]     random weights, greedy and with top-p 0.95; prints JSON

`idle_between_steps`: the share of the time in which nothing runs between a step's last kernel and the next one's first.
`idle`: that, and the gaps between the kernels of a step.
The sequences start one after the other, so that when the trace begins the first has about twice as many new tokens as there
are sequences: with a large batch, attention's time is that of contexts longer than `context`.
"""

import json
import statistics
import sys
import time

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from minirt import Generator, SamplingParams
from minirt.bench.report import machine

STEPS = 40


def trace(generator: Generator, batch: int, context: int, params: SamplingParams) -> dict:
    """One trace of STEPS decode steps of `batch` sequences with `context` tokens."""
    prompts = [[(7 * i + j) % 1000 for j in range(context)] for i in range(batch)]
    running = [generator.stream_completion(prompt, params) for prompt in prompts]
    for stream in running:
        next(stream)
    times = []
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(STEPS):
            start = time.perf_counter()
            for stream in running:
                next(stream)
            times.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    for stream in running:
        stream.close()
    events = [e for e in trace.events() if e.device_type == DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    busy, end = 0.0, spans[0][0]
    gaps = []
    for start, stop in spans:
        gaps.append(max(0.0, start - end))
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    total = end - spans[0][0]
    largest = sorted(gaps)[-STEPS:]  # one between each step and the next
    by_kernel: dict[str, float] = {}
    for e in events:
        by_kernel[e.name] = by_kernel.get(e.name, 0.0) + e.time_range.elapsed_us() / STEPS
    return {
        "batch": batch,
        "context": context,
        "step_ms": round(1e3 * statistics.median(times[5:]), 4),
        "idle": round(1 - busy / total, 4),
        "idle_between_steps": round(sum(largest) / total, 4),
        "us_a_step_by_kernel": {n[:60]: round(t, 1) for n, t in sorted(by_kernel.items(), key=lambda i: -i[1])[:12]},
    }


def main() -> None:
    model, batches = sys.argv[1], [int(n) for n in sys.argv[2:]] or [1, 64, 256]
    results = []
    with Generator.from_pretrained(model, random_weights=True, max_model_len=4096, max_num_seqs=max(batches)) as generator:
        for batch in batches:
            for temperature in (0.0, 0.8):
                params = SamplingParams(max_tokens=300, ignore_eos=True, temperature=temperature, top_p=0.95, seed=1)
                results.append({"temperature": temperature} | trace(generator, batch, 128, params))
        shared = machine("trace", generator.device, ["python", "-P", "bench/gpu_trace.py", *sys.argv[1:]], None)
    print(json.dumps(shared | {"model": model, "results": results}, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
