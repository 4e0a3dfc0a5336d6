"""`replay_times`: how long the CUDA graph of a decode step takes, without the rest of the step."""

from itertools import pairwise

import torch

from minirt.engine.engine import Engine
from minirt.errors import UnsupportedError
from minirt.generator import Generator
from minirt.profiling.planned import planned_step


def replay_times(generator: Generator, batch_size: int, context_len: int, repeats: int = 20) -> list[float]:
    """Seconds of each of `repeats` replays, by CUDA events, after the same number of uncounted replays.

    Each sequence has `context_len` tokens, the new one included. The cached values are arbitrary. The sequences have different
    tokens, so that a mixture uses different experts for them.

    Raises:
        UnsupportedError: there is no CUDA graph: on a CPU, or with a layer that is not on Triton.
        InputError, ContextLengthError: not a step of this engine; the cache has no room for that many tokens.
        EngineError: requests are open.
    """
    return generator._engine.call(lambda engine: _replay(engine, batch_size, context_len, repeats))


def _replay(engine: Engine, batch_size: int, context_len: int, repeats: int) -> list[float]:
    runner = engine._runner
    with planned_step(engine, batch_size, context_len, "replay_times") as plan:
        graphs, bucket = runner.graphs.captured, runner.graphs.find_or_capture(plan)
        if graphs is None or bucket is None:
            what = "there is no CUDA graph to time; it needs a GPU and every layer on Triton"
            raise UnsupportedError(what, where="replay_times", found=f"device {engine._device}")
        runner.forward(plan)  # the step's input, and the CUDA graph if there is none yet
        for _ in range(repeats):
            graphs.replay(bucket)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            graphs.replay(bucket)
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
