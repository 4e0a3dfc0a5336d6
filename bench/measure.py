"""Prompts of random token ids, timed runs of them through `Generator.generate`, and the statistics of the times."""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from minirt.engine.kv_cache import PAGE_SIZE
from minirt.errors import ContextLengthError, InputError, MinirtError
from minirt.generator import Generator
from minirt.outputs import Completion
from minirt.sampling_params import SamplingParams

Clock = Callable[[], float]  # seconds, as time.perf_counter
_SLEEPS = (400_000, 1_600_000, 6_400_000, 25_600_000)  # cycles: 0.2 ms to 15 ms


def random_prompts(rng: random.Random, lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """A prompt of uniform token ids for each length. Others at each call, so that no prefix can be shared with a run before."""
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def timed_run(
    generator: Generator, prompts: Sequence[list[int]], params: Sequence[SamplingParams], clock: Clock = time.perf_counter
) -> tuple[float, list[Completion]]:
    """Seconds from the call until the last token of the last prompt is in Python, and the completions.

    Raises:
        MinirtError: a completion has not as many tokens as were asked for; its time would be that of something else.
    """
    started = clock()
    completions = generator.generate(list(prompts), list(params))
    seconds = clock() - started
    for completion, asked in zip(completions, params, strict=True):
        if len(completion.token_ids) != asked.max_tokens:
            raise MinirtError(
                "a measured run ended early", where=f"a prompt of {len(completion.prompt_token_ids)} tokens",
                expected=f"{asked.max_tokens} tokens", found=f"{len(completion.token_ids)} ({completion.finish_reason})",
            )
    return seconds, completions


def check_room(generator: Generator, batch_size: int, length: int) -> None:
    """Refuse, before anything is measured, a batch that cannot run as one.

    Args:
        batch_size: sequences at once, each of `length` tokens, prompt and completion together.
    Raises:
        InputError: more sequences than --max-num-seqs. ContextLengthError: too long, or more than the KV pages hold.
    """
    check_rooms(generator, [(batch_size, length)])


def check_rooms(generator: Generator, sequences: Sequence[tuple[int, int]]) -> None:
    """`check_room` of sequences of several lengths: (how many, tokens of each)."""
    batch_size, length = sum(count for count, _ in sequences), max(tokens for _, tokens in sequences)
    what = "a batch of " + " and ".join(f"{count} sequences of {tokens} tokens" for count, tokens in sequences)
    if batch_size > generator.max_num_seqs:
        hint = f"raise --max-num-seqs to {batch_size}"
        expected = f"at most {generator.max_num_seqs} sequences"
        raise InputError(f"{what} is too large", expected=expected, found=batch_size, hint=hint)
    if length > generator.max_len:
        hint = "choose shorter prompts or outputs, or raise --max-model-len or --kv-cache-memory if model and memory allow"
        expected = f"at most {generator.max_len} tokens in a sequence"
        raise ContextLengthError(f"{what} is too long", expected=expected, found=length, hint=hint)
    page = generator.kv_bytes_per_token * PAGE_SIZE
    needed = sum(count * math.ceil(tokens / PAGE_SIZE) for count, tokens in sequences)
    there = generator.kv_cache_bytes // page if page else math.inf
    if needed > there:
        hint = f"--kv-cache-memory {needed * page} would do, or take a smaller batch"
        what += " does not fit the KV cache"
        raise ContextLengthError(what, expected=f"at most {there} pages of {PAGE_SIZE} tokens", found=needed, hint=hint)


def gpu_seconds(run: Callable[[], object], before: Callable[[], object] | None = None) -> float:
    """Seconds of what `run` launches on the current GPU, after what `before` launches.

    All of it is queued while the GPU sleeps, so that the host's time does not count; where the host was not done by then, it is
    done again after a longer sleep. What itself waits for the GPU is timed with the host's part.
    """
    for cycles in _SLEEPS:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        if before is not None:
            before()
        start.record()
        run()
        end.record()
        queued = not start.query()
        end.synchronize()
        if queued:
            break
    return start.elapsed_time(end) / 1e3


def forget_peak_memory(device: torch.device) -> None:
    """What was allocated and freed before (the reference, a ceiling's buffer) shall not count. Of a CPU it cannot be undone."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def summarize(values: Sequence[float]) -> dict[str, float | list[float] | None]:
    """Median, minimum and standard deviation (of a sample; None of a single value), and the values themselves."""
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"median": statistics.median(values), "min": min(values), "stddev": spread, "all": list(values)}


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, linear between neighbours (NumPy's default; Hyndman & Fan type 7)."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
