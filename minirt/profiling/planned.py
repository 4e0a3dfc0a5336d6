"""Steps that no scheduler has made, to measure them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from minirt.engine.engine import Engine
from minirt.engine.plan_step import plan_step
from minirt.engine.request import Request
from minirt.engine.schedule.scheduler import PromptChunk, ScheduledPrompt, ScheduledStep
from minirt.engine.schedule.windows import Windows
from minirt.engine.state.sequence import Sequence
from minirt.engine.state.slots import HostSlots
from minirt.errors import ContextLengthError, EngineError, InputError, UnsupportedError
from minirt.sampling_params import SamplingParams, resolve
from minirt.step.plan import PlannedSequences, StepPlan


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
    """Context with the plan of a greedy step that no scheduler has made, and with its pages.

    Args:
        where: what asks, for messages.
        prompts: the sequences are prompts of `context_len` tokens; False: a decode step, in which each has one new token.
    Raises:
        InputError, ContextLengthError: not a step of this engine; the cache has no room for that many tokens.
        EngineError: requests are open.
        UnsupportedError: several ranks run the steps.
    """
    if engine.ranks is not None:
        raise UnsupportedError("single steps of several GPUs are not measured", where=where, hint="load the model on one GPU")
    if engine.has_work:
        raise EngineError("requests are open", where=where, hint="wait until they have ended")
    if not 1 <= batch_size <= engine.limits.max_num_seqs or not 1 <= context_len <= engine.max_len:
        expected = f"1 to {engine.limits.max_num_seqs} sequences of 1 to {engine.max_len} tokens"
        step = f"{batch_size} of {context_len}"
        raise InputError("not a step of this engine", where=where, expected=expected, found=step)
    new, most = context_len if prompts else 1, engine.limits.max_num_batched_tokens
    if batch_size * new > most:
        expected, hint = f"at most max_num_batched_tokens={most}", "measure fewer or shorter prompts"
        raise InputError("too many tokens for one step", where=where, expected=expected, found=batch_size * new, hint=hint)
    pages, allocator, vocab = engine._cache.pages_for(context_len), engine._cache.allocator, engine._vocab_size
    if batch_size * pages > allocator.num_free:
        expected = f"{batch_size * pages} free pages"
        raise ContextLengthError("too few KV pages", where=where, expected=expected, found=allocator.num_free)
    cache, windows = engine._cache, None
    if cache.window_allocators:
        windows = Windows(cache.window_allocators, cache.page_size, engine.limits.max_num_seqs, pages)
    host, sequences = HostSlots(engine.limits, pages, windows), list[Sequence]()
    greedy = resolve(SamplingParams(temperature=0.0), None)
    try:
        for i in range(batch_size):
            tokens = [(i + 31 * t) % vocab for t in range(context_len)]
            sequence = Sequence(Request(-1, tokens, greedy), context_len)
            sequence.take_slot(host, allocator.allocate(pages))
            sequences.append(sequence)
            if windows is not None:
                windows.skip(sequence.slot, context_len - new)
                if not windows.reserve(sequence.slot, context_len):
                    raise ContextLengthError("too few KV pages of layers with a window", where=where, hint="pin fewer prompts")
        values = [(sequence.slot, context_len - new, new, 1, 1, context_len) for sequence in sequences]
        yield plan_step(scheduled(sequences, values, host), host, engine._runner.columns, vocab)
    finally:
        for sequence in sequences:
            allocator.release(sequence.pages.tolist())
            if windows is not None:
                windows.release(sequence.slot)
