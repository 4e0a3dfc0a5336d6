"""Times of both implementations of each kind of layer, and of whole decode steps.

On a GPU each implementation is a CUDA graph, so host time does not count, and the replays of the two take turns. A CUDA graph
runs all layers of one kind, each with its own weights. If the weights are larger than the L2 cache, every layer finds a cold L2,
as it does in a model. The GPU must be the current device. On a CPU nothing is timed, since Triton runs
in its interpreter.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from minirt.bench.compare.layers import EagerStep, Place, cached, stream
from minirt.bench.measure import host_seconds
from minirt.layers import Forward

REPEATS = 20
_CALLS = 64  # least layer calls in one CUDA graph; with few kernels in it, the launch of the CUDA graph would dominate


def captured(work: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """Capture `work` as a CUDA graph. One run before the capture compiles kernels and lets libraries allocate memory."""
    beside = torch.cuda.Stream(device)
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):
        work()
    torch.cuda.current_stream(device).wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replays(graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
    """Return the median seconds of each CUDA graph. The graphs take turns; a first round is not counted."""
    rounds = []
    for _ in range(REPEATS + 1):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
        events[0].record()
        for graph, event in zip(graphs, events[1:], strict=True):
            graph.replay()
            event.record()
        rounds.append(events)
    torch.cuda.synchronize()
    return [statistics.median(events[i].elapsed_time(events[i + 1]) / 1e3 for events in rounds[1:]) for i in range(len(graphs))]


@torch.inference_mode()
def layer_times(sequence: Sequence[Place], step: EagerStep, nbytes: int) -> tuple[float, float, bool]:
    """Time the layers of one kind on a GPU.

    Args:
        sequence: places of one kind.
        nbytes: bytes that all of them read together.
    Returns:
        the mean seconds of a call of the eager implementation and of the candidate, and whether the layers of the CUDA graph
        read more than twice the size of the L2 cache.
    """
    device = step.batch.device
    rounds = -(-_CALLS // len(sequence))
    calls = rounds * len(sequence)

    def chain(forwards: Sequence[Forward]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(rounds):
                for forward, place in zip(forwards, sequence, strict=True):
                    forward(step.inputs[place.index], step.batch, cached(place, step.cache))

        return run

    graphs = [captured(chain([getattr(p, side) for p in sequence]), device) for side in ("eager", "candidate")]
    eager, candidate = replays(graphs)
    cold = nbytes > 2 * torch.cuda.get_device_properties(device).L2_cache_size
    return eager / calls, candidate / calls, cold


@torch.inference_mode()
def step_times(variants: Mapping[str, Sequence[Forward]], sequence: Sequence[Place], step: EagerStep) -> dict[str, float]:
    """Return the median seconds of the whole decode step for each variant, as a CUDA graph on a GPU.

    Eager attention reads the lengths on the host, so its CUDA graph is valid only for this context length. All variants run the
    same step.

    Args:
        variants: one forward for each place, by name of the variant.
    """
    device = step.batch.device
    runs = (partial(stream, forwards, sequence, step.batch, step.cache) for forwards in variants.values())
    return dict(zip(variants, replays([captured(run, device) for run in runs]), strict=True))


@torch.inference_mode()
def launched_time(forwards: Sequence[Forward], sequence: Sequence[Place], step: EagerStep) -> float:
    """Return the median seconds of the step on a GPU, launched kernel by kernel from Python."""

    def run() -> None:
        stream(forwards, sequence, step.batch, step.cache)
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return statistics.median([host_seconds(run) for _ in range(REPEATS + 1)][1:])
