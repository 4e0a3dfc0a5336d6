"""Times of both implementations of each kind of layer, and of whole decode steps.

On a GPU each side is a CUDA graph, so that no host time counts, and replays of the two take turns. The layers of one kind follow
each other in the graph, each with its own weights: where those do not fit the L2, every layer finds it cold, as in a model. On a
CPU the Triton side runs in its interpreter: times of single calls are kept, and none of them is a speed. What needs a GPU wants
it to be the current device.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from minirt.bench.compare.layers import Place, Step, stream
from minirt.engine.kv_cache import LayerKV
from minirt.engine.step_input import Batch
from minirt.layers import Forward

REPEATS = 20
_CALLS = 64  # of layers in one graph, at least: a graph of a few kernels would be timed with its launch


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one call of a layer in each form. `calls` of them were timed together; `cold`: what they read in turn is more
    than twice the L2."""

    eager_s: float
    candidate_s: float
    calls: int
    cold: bool


class Stopwatch:
    """A forward that keeps the seconds of its last call; for a CPU."""

    def __init__(self, forward: Forward) -> None:
        self._forward, self.seconds = forward, 0.0

    def __call__(self, x: Tensor, batch: Batch, kv: LayerKV | None) -> Tensor:
        started = time.perf_counter()
        out = self._forward(x, batch, kv)
        self.seconds = time.perf_counter() - started
        return out


def timed(place: Place) -> tuple[Place, Stopwatch, Stopwatch]:
    """The place with both forms under a stopwatch: that of eager, that of the candidate."""
    eager, candidate = Stopwatch(place.eager), Stopwatch(place.candidate)
    return replace(place, eager=eager, candidate=candidate), eager, candidate


def captured(work: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """`work` as a CUDA graph, after one run of it outside (which compiles, and lets libraries allocate what they need)."""
    beside = torch.cuda.Stream(device)
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):
        work()
    torch.cuda.current_stream(device).wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replays(graphs: Sequence[torch.cuda.CUDAGraph], repeats: int = REPEATS) -> list[float]:
    """Median seconds of each graph; they take turns, after a round that is not counted."""
    rounds = []
    for _ in range(repeats + 1):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
        events[0].record()
        for graph, event in zip(graphs, events[1:], strict=True):
            graph.replay()
            event.record()
        rounds.append(events)
    torch.cuda.synchronize()
    return [
        statistics.median(events[i].elapsed_time(events[i + 1]) / 1e3 for events in rounds[1:]) for i in range(len(graphs))
    ]


@torch.inference_mode()
def layer_times(sequence: Sequence[Place], step: Step, nbytes: int) -> LayerTime:
    """Seconds of a layer, the mean over `sequence`: places of one kind. On a GPU; `nbytes` is what all of them read."""
    device = step.batch.flat.device
    rounds = -(-_CALLS // len(sequence))
    calls = rounds * len(sequence)

    def chain(forwards: Sequence[Forward]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(rounds):
                for forward, place in zip(forwards, sequence, strict=True):
                    kv = None if place.pages is None else step.cache.layers[place.pages]
                    forward(step.inputs[place.index], step.batch, kv)

        return run

    graphs = [captured(chain([getattr(p, side) for p in sequence]), device) for side in ("eager", "candidate")]
    eager, candidate = replays(graphs)
    cold = nbytes > 2 * torch.cuda.get_device_properties(device).L2_cache_size
    return LayerTime(eager / calls, candidate / calls, calls, cold)


@torch.inference_mode()
def step_times(variants: Mapping[str, Sequence[Forward]], sequence: Sequence[Place], step: Step) -> dict[str, float]:
    """Median seconds of the whole decode step, one CUDA graph for each variant (a forward a place). On a GPU.

    The eager attention takes the lengths from the host, so its graph holds for this one context length; all variants run
    the same step.
    """
    device = step.batch.flat.device
    runs = (partial(stream, forwards, sequence, step.batch, step.cache) for forwards in variants.values())
    return dict(zip(variants, replays([captured(run, device) for run in runs]), strict=True))


@torch.inference_mode()
def launched_time(forwards: Sequence[Forward], sequence: Sequence[Place], step: Step) -> float:
    """Median seconds of the step as Python launches it, kernel by kernel, on a GPU."""
    seconds = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        stream(forwards, sequence, step.batch, step.cache)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])
