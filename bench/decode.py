"""`minirt bench decode`: the time of one decode step, beside the least that memory and arithmetic allow.

A step's time is the difference of two runs that differ by nothing but 128 steps, both through `Generator.generate` with
every token reaching Python; the prompts' own time cancels.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from minirt.bench.ceiling import Ceiling, MatmulCeiling
from minirt.bench.flops import linear_flops
from minirt.bench.measure import Clock, check_room, random_prompts, summarize, timed_run
from minirt.device import peak_memory
from minirt.errors import InputError, MinirtError, UnsupportedError
from minirt.generator import Generator
from minirt.sampling_params import SamplingParams

STEPS = 128


def prefill_steps(batch_size: int, context_len: int, max_num_batched_tokens: int) -> int:
    """Engine steps, at most, until every prompt has its first token: one where all prompts fit the token budget of a step.

    Else the first sequences decode already while the last prompts are computed, each taking a token of the budget.
    """
    if batch_size > max_num_batched_tokens:
        what, expected = "the batch does not fit one decode step", f"at most {max_num_batched_tokens} sequences"
        raise InputError(what, where="--batch-size", expected=expected, found=batch_size)
    if batch_size * context_len <= max_num_batched_tokens:
        return 1
    return -(-batch_size * context_len // (max_num_batched_tokens - (batch_size - 1)))


def check(generator: Generator, batch_sizes: Sequence[int], context_lens: Sequence[int]) -> None:
    """Refuse what cannot be measured; see `check_room`."""
    for batch_size in batch_sizes:
        for context_len in context_lens:
            first = prefill_steps(batch_size, context_len, generator.max_num_batched_tokens)
            check_room(generator, batch_size, context_len + first + STEPS)


def step_times(
    generator: Generator,
    batch_size: int,
    context_len: int,
    *,
    repeats: int,
    sampling: dict[str, Any],
    seed: int = 0,
    clock: Clock = time.perf_counter,
) -> tuple[list[float], list[float], int]:
    """Seconds of a decode step with the whole batch running, one value a repeat, after a run that is not counted.

    With t(n) the time in which every prompt gets n tokens, a step takes (t(f + 128) - t(f)) / 128, where f is
    `prefill_steps`. f = 1 where the prompts fit one step. Where they take more, sequences start one after the other
    and end so as well; with at least f tokens each, both runs hold the same beginning and the same end, and what
    they differ by is 128 steps of the full batch.

    Returns:
        the step times; for each repeat the seconds until the last prompt had its first token; f.
    """
    first = prefill_steps(batch_size, context_len, generator.max_num_batched_tokens)
    rng = random.Random(seed)

    def run(new_tokens: int) -> tuple[float, float]:
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, **sampling)
        prompts = random_prompts(rng, [context_len] * batch_size, generator.config.vocab_size)
        seconds, completions = timed_run(generator, prompts, [params] * batch_size, clock)
        return seconds, max(completion.time_to_first_token_s for completion in completions)

    run(first + STEPS)
    steps, first_tokens = [], []
    for _ in range(repeats):
        short, first_token = run(first)
        long, _ = run(first + STEPS)
        if long <= short:
            found = f"{long:.6f} s against {short:.6f} s"
            raise MinirtError(f"{STEPS} more steps took no more time", expected="a quieter machine", found=found)
        steps.append((long - short) / STEPS)
        first_tokens.append(first_token)
    return steps, first_tokens, first


def run(
    generator: Generator,
    batch_sizes: Sequence[int],
    context_lens: Sequence[int],
    *,
    repeats: int,
    sampling: dict[str, Any],
    seed: int,
    ceiling: Ceiling,
    products: MatmulCeiling,
    datasheet: float | None,
    progress: Callable[[str], None],
    clock: Clock = time.perf_counter,
) -> list[dict[str, Any]]:
    """A result for each context length and batch size. Bytes are those that must be read: weights once, and the KV of each
    sequence; times in seconds, rates in bytes or tokens a second. The limit is the time to read the weights at `ceiling` or to
    multiply all tokens by them at the rate of `products`, whichever is longer, and then to read the KV."""
    results = []
    for context_len in context_lens:
        for batch_size in batch_sizes:
            steps, first_tokens, first = step_times(
                generator, batch_size, context_len, repeats=repeats, sampling=sampling, seed=seed, clock=clock
            )
            seen = context_len + first + (STEPS - 1) / 2  # positions that a step attends to, on average
            kv = round(batch_size * seen * generator.kv_bytes_per_token)
            speed = (generator.decode_read_bytes + kv) / statistics.median(steps)
            flops = linear_flops(generator.config, batch_size, batch_size)
            weights = max(generator.decode_read_bytes / ceiling.bytes_per_s, flops / products.flops_per_s)
            limit = weights + kv / ceiling.bytes_per_s
            results.append(
                {
                    "test": f"tg{STEPS} b{batch_size} @ d{context_len}",
                    "batch_size": batch_size,
                    "context_len": context_len,
                    "tokens_before": first,
                    "step_s": summarize(steps),
                    "tokens_per_s": summarize([batch_size / step for step in steps]),
                    "graph_replay_s": replay_time(generator, batch_size, round(seen)),
                    "weight_bytes_read": generator.decode_read_bytes,
                    "kv_bytes_read": kv,
                    "read_bytes_per_s": speed,
                    "share_of_read_ceiling": speed / ceiling.bytes_per_s,
                    "share_of_datasheet": speed / datasheet if datasheet else None,
                    "flops": flops,
                    "limit_s": limit,
                    "share_of_limit": limit / statistics.median(steps),
                    "time_to_first_token_s": statistics.median(first_tokens),
                    "peak_memory_bytes": peak_memory(generator.device),
                }
            )
            progress(f"{results[-1]['test']}: {statistics.median(steps) * 1e3:.3f} ms a step")
    return results


def replay_time(generator: Generator, batch_size: int, context_len: int) -> float | None:
    """Median seconds of the bare CUDA-graph replay of such a step; None where there are no graphs."""
    try:
        return statistics.median(generator.replay_times(batch_size, context_len))
    except UnsupportedError:
        return None
