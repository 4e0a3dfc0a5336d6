"""`replay_times`: how long the CUDA graph of a decode step takes, without the rest of the step."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from minirt.engine.engine import Engine
from minirt.engine.plan_step import plan_step
from minirt.engine.request import Request
from minirt.engine.schedule.scheduler import PromptChunk, ScheduledPrompt, ScheduledStep
from minirt.engine.state.sequence import Sequence
from minirt.engine.state.slots import HostSlots
from minirt.errors import ContextLengthError, EngineError, InputError, UnsupportedError
from minirt.generator import Generator
from minirt.sampling_params import SamplingParams, resolve
from minirt.step.plan import PlannedSequences, StepPlan


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


def scheduled(
    sequences: Iterable[Sequence], values: Iterable[tuple[int, int, int, int, int, int]], host: HostSlots
) -> ScheduledStep:
    """A step that no scheduler has made: the last sequences are prompts. `values`: those of `PlannedSequences`, for each."""
    planned, prompts = PlannedSequences.of(values), list(sequences)
    first = len(planned.slots) - len(prompts)
    chunks = [PromptChunk(*column) for column in planned.values[:, first:].T.tolist()]
    known = [ScheduledPrompt(first + i, *item) for i, item in enumerate(zip(prompts, chunks, strict=True))]
    return ScheduledStep(planned, host.epochs[planned.slots], known)


@contextmanager
def planned_step(
    engine: Engine, batch_size: int, context_len: int, where: str, *, prompts: bool = False
) -> Iterator[StepPlan]:  # fmt: skip
    """Context with the plan of a greedy step that no scheduler has made, and with its pages. Raises as `replay_times` does.

    Args:
        where: what asks, for messages.
        prompts: the sequences are prompts of `context_len` tokens; False: a decode step, in which each has one new token.
    """
    if engine.has_work:
        raise EngineError("requests are open", where=where, hint="wait until they have ended")
    if not 1 <= batch_size <= engine.limits.max_num_seqs or not 1 <= context_len <= engine.max_len:
        expected = f"1 to {engine.limits.max_num_seqs} sequences of 1 to {engine.max_len} tokens"
        step = f"{batch_size} of {context_len}"
        raise InputError("not a step of this engine", where=where, expected=expected, found=step)
    pages, allocator, vocab = engine._cache.pages_for(context_len), engine._cache.allocator, engine._vocab_size
    if batch_size * pages > allocator.num_free:
        expected = f"{batch_size * pages} free pages"
        raise ContextLengthError("too few KV pages", where=where, expected=expected, found=allocator.num_free)
    greedy, host, sequences = resolve(SamplingParams(temperature=0.0), None), HostSlots(engine.limits, pages), list[Sequence]()
    try:
        for i in range(batch_size):
            tokens = [(i + 31 * t) % vocab for t in range(context_len)]
            sequence = Sequence(Request(-1, tokens, greedy), context_len)
            sequence.take_slot(host, allocator.allocate(pages))
            sequences.append(sequence)
        new = context_len if prompts else 1
        values = [(sequence.slot, context_len - new, new, 1, 1, context_len) for sequence in sequences]
        yield plan_step(scheduled(sequences, values, host), host, engine._runner.columns, vocab)
    finally:
        for sequence in sequences:
            allocator.release(sequence.pages.tolist())


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
