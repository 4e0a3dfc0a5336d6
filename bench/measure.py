"""Timed runs of random prompts through `Generator.generate` (`Runs`), memory checks and GPU timing."""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minirt.errors import ContextLengthError, InputError, MinirtError
from minirt.generator import Generator
from minirt.outputs import Completion
from minirt.sampling_params import SamplingParams
from minirt.sizes import format_size
from minirt.step.kv_cache import PAGE_SIZE

Clock = Callable[[], float]  # returns seconds, like time.perf_counter
Timed = tuple[float, list[Completion]]  # seconds, and what was generated
_LONG = 10.0  # seconds after which a user wants to know how long it takes
_SLEEPS = (400_000, 1_600_000, 6_400_000, 25_600_000)  # cycles: 0.2 ms to 15 ms


def random_prompts(rng: random.Random, lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Return a prompt of uniformly random token ids for each length. Each call draws new ids, so runs share no prefix."""
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def silent(text: str) -> None:
    """A `progress` that shows nothing."""


@dataclass(frozen=True)
class Runs:
    """Runs of random prompts through one generator.

    Attributes:
        repeats: number of runs that count.
        sampling: fields of SamplingParams.
        progress: called with a line of text now and then.
    """

    generator: Generator
    repeats: int
    sampling: dict[str, Any]
    seed: int = 0
    progress: Callable[[str], None] = silent
    clock: Clock = time.perf_counter

    def announce(self, test: str, seconds: float, count: int) -> None:
        """After a run that is not counted: say how long the `count` runs after it take, if that is long."""
        if seconds * count >= _LONG:
            self.progress(f"{test}: about {seconds * count:,.0f} s for {count} more runs")

    def repeated(self, test: str, run: Callable[[], "Timed"]) -> list["Timed"]:
        """The results of as many runs as count, after one that does not."""
        self.announce(test, run()[0], self.repeats)
        return [run() for _ in range(self.repeats)]

    def timed(self, rng: random.Random, input_lens: Sequence[int], output_lens: Sequence[int]) -> "Timed":
        """Return the seconds from the call until the last token of the last prompt is in Python, and the completions.

        Raises:
            MinirtError: a completion has fewer tokens than requested, so the time would not be comparable.
        """
        shared: dict[str, Any] = {"ignore_eos": True, "repetition_penalty": 1.0, **self.sampling}
        prompts = random_prompts(rng, input_lens, self.generator.config.vocab_size)
        params = [SamplingParams(max_tokens=length, **shared) for length in output_lens]
        started = self.clock()
        completions = self.generator.generate(prompts, params)
        seconds = self.clock() - started
        for completion, length in zip(completions, output_lens, strict=True):
            if len(completion.token_ids) != length:
                raise MinirtError(
                    "a measured run ended early", where=f"a prompt of {len(completion.prompt_token_ids)} tokens",
                    expected=f"{length} tokens", found=f"{len(completion.token_ids)} ({completion.finish_reason})",
                )
        return seconds, completions


def check_room(generator: Generator, *sequences: tuple[int, int]) -> None:
    """Refuse a batch whose sequences cannot all run at the same time, before anything is measured.

    Args:
        sequences: pairs of (number of sequences, tokens of each, prompt and completion together).
    Raises:
        InputError: more sequences than --max-num-seqs.
        ContextLengthError: a sequence is too long, or the batch does not fit the KV cache.
    """
    batch_size, length = sum(count for count, _ in sequences), max(tokens for _, tokens in sequences)
    what = " and ".join(f"{count} sequence{'s' * (count > 1)} of {tokens} tokens" for count, tokens in sequences)
    what = what if batch_size == 1 else f"a batch of {what}"
    if batch_size > generator.max_num_seqs:
        hint = f"raise --max-num-seqs to {batch_size}"
        expected = f"at most {generator.max_num_seqs} sequences"
        raise InputError(f"{what} is too large", expected=expected, found=batch_size, hint=hint)
    if length > generator.max_len:
        longest, hint = generator.config.max_context_len, "choose shorter prompts or outputs"
        if length > longest:
            hint += f": the model itself takes at most {longest} tokens"
        else:
            hint += ", or raise --max-model-len or --kv-cache-memory if the memory allows"
        expected = f"at most {generator.max_len} tokens in a sequence, prompt and output together"
        raise ContextLengthError(f"{what} is too long", expected=expected, found=length, hint=hint)
    page = generator.memory.page
    needed = sum(count * math.ceil(tokens / PAGE_SIZE) for count, tokens in sequences)
    there = generator.memory.pages if page else math.inf
    if needed > there:
        hint = f"--kv-cache-memory {format_size(needed * page, up=True)} is enough, or choose a smaller batch"
        what += " does not fit the KV cache"
        raise ContextLengthError(what, expected=f"at most {there} pages of {PAGE_SIZE} tokens", found=needed, hint=hint)


def gpu_seconds(run: Callable[[], object], before: Callable[[], object] | None = None) -> float:
    """Return the GPU seconds of the work that `run` launches on the current GPU; the launches of `before` come first, untimed.

    The host queues all launches while the GPU sleeps, so host time does not count. If the host takes longer than the sleep, the
    measurement is repeated with a longer sleep. If `run` itself waits for the GPU, its host time counts too.
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


def host_seconds(run: Callable[[], object]) -> float:
    """Return the seconds of one call on a CPU."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def forget_peak_memory(device: torch.device) -> None:
    """Reset the peak memory of a GPU, so that earlier, freed allocations do not count. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
