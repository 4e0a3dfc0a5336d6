"""Where the time of a step goes: by layer and by kernel, with the launches, the bytes that are read, and the gaps.

On a GPU the timeline of one trace is divided: each moment counts once, for the kernel that began first of those that run, or as a
gap. Which layer has launched a kernel is known from a run of the same step, layer by layer; the kernels of each name come in the
same order. On a CPU each layer is timed by itself.
"""

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from minirt.engine.engine import Engine
from minirt.engine.execute.runner import Runner
from minirt.errors import UnsupportedError
from minirt.modeling.model import Model
from minirt.profiling.planned import planned_step
from minirt.profiling.read_bytes import layer_read_bytes
from minirt.step.plan import StepPlan

GAPS, INPUT, DRAW, OTHER = "gaps", "input of the step", "draw", "other"
_MARK = "spin_kernel"  # the kernel of `torch.cuda._sleep`, which no layer launches


class Kernel(NamedTuple):
    """A kernel or copy in a trace, in µs."""

    name: str
    start: float
    end: float


class Part(NamedTuple):
    """What a layer, or another part of a step, takes.

    Args:
        kind: of the layer; of other parts, their name.
        read_bytes: of weights.
        kernels: seconds by name.
    """

    name: str
    kind: str
    seconds: float
    launches: int
    read_bytes: int
    kernels: dict[str, float]


class Profile(NamedTuple):
    """A step's parts, in order; together they take `traced_s`. `step_s`: of the same step without a trace."""

    step: str
    step_s: float
    traced_s: float
    parts: list[Part]


def profile(engine: Engine, batch_size: int, context_len: int, prompt: bool, repeats: int) -> Profile:
    """What `Generator.profile` does, in the engine's thread."""
    step = f"{batch_size} prompt{'s' * (batch_size > 1)} of {context_len} tokens"
    if not prompt:
        step = f"decode step, batch {batch_size}, context {context_len}"
    runner, model = engine._runner, engine._runner.model
    if not isinstance(model, Model):
        raise UnsupportedError("only a model of layers can be profiled", where="profile", found=type(model).__name__)
    with planned_step(engine, batch_size, context_len, "profile", prompts=prompt) as plan, runner._inference, runner._on_device:
        on_gpu = engine._device.type == "cuda"
        step_s, parts = (_on_gpu if on_gpu else _on_cpu)(runner, model, plan, repeats)
    return Profile(step, step_s, sum(part.seconds for part in parts), parts)


def _parts(model: Model, plan: StepPlan) -> list[tuple[str, str, int]]:
    """Name, kind and bytes of weights of each part of a step, in order."""
    tokens = plan.sequences.total_tokens
    layers = [(layer.name, layer.kind, layer_read_bytes(layer, model.dtype, tokens)) for layer in model.layers]
    return [(INPUT, INPUT, 0), *layers, (DRAW, DRAW, 0)]


def _on_cpu(runner: Runner, model: Model, plan: StepPlan, repeats: int) -> tuple[float, list[Part]]:
    times, whole = defaultdict[int, list[float]](list), list[float]()
    for _ in range(repeats + 1):
        began = time.perf_counter()
        runner.start(plan).result()
        whole.append(time.perf_counter() - began)
        stamps = [time.perf_counter()]
        runner.buffers.send(plan)
        view, batch = runner._without_cuda_graph(plan)
        stamps.append(time.perf_counter())
        x = torch.empty(0)
        for layer, kv in model._with_cache(runner.cache):
            x = layer(x, batch, kv)
            stamps.append(time.perf_counter())
        runner.buffers.commit(view, runner.sampler.draw(x, None, view, plan)[0])
        stamps.append(time.perf_counter())
        for place, (a, b) in enumerate(pairwise(stamps)):
            times[place].append(b - a)
    medians = (statistics.median(values[1:]) for values in times.values())
    return statistics.median(whole[1:]), [
        Part(name, kind, seconds, 0, read, {}) for (name, kind, read), seconds in zip(_parts(model, plan), medians, strict=True)
    ]


def _on_gpu(runner: Runner, model: Model, plan: StepPlan, repeats: int) -> tuple[float, list[Part]]:
    for _ in range(3):
        runner.start(plan).result()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(repeats):
        started = runner.start(plan)
    events[1].record()
    started.result()
    torch.cuda.synchronize()
    step_s = events[0].elapsed_time(events[1]) / 1e3 / repeats
    launched = split(_traced(lambda: _by_layer(runner, model, plan)))
    steps = steps_of(_traced(lambda: [runner.start(plan) for _ in range(repeats + 2)][-1].result()))
    return step_s, divided(_parts(model, plan), launched, steps)


def _by_layer(runner: Runner, model: Model, plan: StepPlan) -> None:
    """The step that CUDA graphs have captured, part by part, with a mark before each."""
    bucket = runner.graphs.find_or_capture(plan)
    torch.cuda._sleep(100)
    runner.buffers.send(plan, greedy=True)
    if bucket is None:
        view, batch = runner._without_cuda_graph(plan)
    else:
        view, batch = runner.graphs.static(bucket)
        runner.buffers.prepare(view, one_token=bucket.one_token)
    runner.buffers.sent()
    x = torch.empty(0, device=model.device)
    for layer, kv in model._with_cache(runner.cache):
        torch.cuda._sleep(100)
        x = layer(x, batch, kv)
    torch.cuda._sleep(100)
    if bucket is None:
        runner.buffers.commit(view, runner.sampler.draw(x, None, view, plan)[0])
    else:
        runner.graphs._commit_greedy(view, batch)
    runner.buffers.to_host(view)


def _traced(work: Any) -> list[Kernel]:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace_of

    torch.cuda.synchronize()
    with trace_of(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:  # without it, PyTorch warns of cycles
        work()
        torch.cuda.synchronize()
    events = [e for e in trace.events() if e.device_type == DeviceType.CUDA]
    return sorted((Kernel(e.name, e.time_range.start, e.time_range.end) for e in events), key=lambda kernel: kernel.start)


def split(kernels: Iterable[Kernel]) -> list[list[str]]:
    """The names of the kernels after each mark."""
    parts = list[list[str]]()
    for kernel in kernels:
        if _MARK in kernel.name:
            parts.append([])
        elif parts:
            parts[-1].append(kernel.name)
    return parts


def steps_of(kernels: Sequence[Kernel]) -> list[tuple[list[Kernel], float, float]]:
    """The kernels of each step of a trace but the first, with its beginning and its end. A step ends where its tokens have been
    copied to the host."""
    ends = [i for i, kernel in enumerate(kernels) if "DtoH" in kernel.name]
    return [(list(kernels[a + 1 : b + 1]), kernels[a].end, kernels[b].end) for a, b in pairwise(ends)]


def divided(
    parts: Sequence[tuple[str, str, int]], launched: Sequence[Sequence[str]], steps: Sequence[tuple[list[Kernel], float, float]]
) -> list[Part]:
    """The parts of a step, from the names of the kernels that each has launched and from the timelines of several steps."""
    seconds, kernels = defaultdict[str, float](float), defaultdict[str, dict[str, float]](lambda: defaultdict(float))
    counts = defaultdict[str, int](int)
    for step, begin, end in steps:
        queues = defaultdict[str, deque[str]](deque)
        for (name, _, _), launches in zip(parts, launched, strict=True):
            for launch in launches:
                queues[launch].append(name)
        cursor = begin
        for kernel in step:
            owner = queues[kernel.name].popleft() if queues[kernel.name] else OTHER
            seconds[GAPS] += max(0.0, kernel.start - cursor) / 1e6
            cursor = max(cursor, kernel.start)
            alone = max(0.0, kernel.end - cursor) / 1e6
            seconds[owner] += alone
            kernels[owner][kernel.name] += alone / len(steps)
            counts[owner] += 1
            cursor = max(cursor, kernel.end)
        seconds[GAPS] += max(0.0, end - cursor) / 1e6
    every = [*parts, (OTHER, OTHER, 0), (GAPS, GAPS, 0)]
    return [
        Part(name, kind, seconds[name] / len(steps), round(counts[name] / len(steps)), read, dict(kernels[name]))
        for name, kind, read in every if seconds[name] or (name, kind, read) in parts
    ]  # fmt: skip


def by_kind(parts: Iterable[Part]) -> list[tuple[str, int, Part]]:
    """(kind, number of parts, their sum) of each kind, in the order of their first part."""
    kinds = dict[str, list[Part]]()
    for part in parts:
        kinds.setdefault(part.kind, []).append(part)
    return [(kind, len(same), together(kind, same)) for kind, same in kinds.items()]


def together(name: str, parts: Sequence[Part]) -> Part:
    """The sum of some parts."""
    kernels = defaultdict[str, float](float)
    for part in parts:
        for kernel, seconds in part.kernels.items():
            kernels[kernel] += seconds
    seconds, launches, read = (sum(column) for column in zip(*(part[2:5] for part in parts), strict=True))
    return Part(name, name, seconds, int(launches), int(read), dict(kernels))
