"""The decode steps of `minirt bench speed`: the time of one step, and the least time that memory bandwidth and arithmetic allow.

Two runs of `Generator.generate` differ only by 128 decode steps. Their difference, divided by 128, is the time of a step: the
time of the prompts cancels out. Every token reaches Python.
"""

import random
import statistics
from collections.abc import Sequence
from typing import Any

from minirt.bench.ceiling import Ceiling, MatmulCeiling, datasheet_bandwidth
from minirt.bench.experts import expected, in_decode
from minirt.bench.flops import linear_flops
from minirt.bench.measure import Runs, check_room
from minirt.bench.replay import replay_times
from minirt.bench.summary import summarize
from minirt.device import peak_memory
from minirt.errors import InputError, MinirtError, UnsupportedError
from minirt.generator import Generator
from minirt.profiling.read_bytes import kv_read_bytes, step_read_bytes

STEPS = 128


def prefill_steps(batch_size: int, context_len: int, max_num_batched_tokens: int) -> int:
    """Return an upper bound on the engine steps until every prompt has its first token.

    It is 1 if all prompts fit the token budget of one step. Otherwise the first sequences already decode while the last prompts
    are computed, and each of them takes one token of the budget.

    Raises:
        InputError: the batch is larger than the token budget of a step.
    """
    if batch_size > max_num_batched_tokens:
        what, expected = "the batch does not fit one decode step", f"at most {max_num_batched_tokens} sequences"
        raise InputError(what, where="--batch-size", expected=expected, found=batch_size)
    if batch_size * context_len <= max_num_batched_tokens:
        return 1
    return -(-batch_size * context_len // (max_num_batched_tokens - (batch_size - 1)))


def check(generator: Generator, batch_sizes: Sequence[int], context_lens: Sequence[int], count: int = STEPS) -> None:
    """Refuse batch sizes and contexts that cannot be measured; see `check_room` for the errors."""
    for batch_size in batch_sizes:
        for context_len in context_lens:
            first = prefill_steps(batch_size, context_len, generator.max_num_batched_tokens)
            check_room(generator, (batch_size, context_len + first + count))


def test_name(batch_size: int, context_len: int, count: int) -> str:
    """Return the name of a measurement, in the style of llama-bench."""
    return f"tg{count} b{batch_size} @ d{context_len}"


def step_times(runs: Runs, batch_size: int, context_len: int, count: int = STEPS) -> tuple[list[float], list[float], int]:
    """Measure a decode step of the whole batch, after one run that is not counted.

    Let t(n) be the time until every prompt has n tokens, f the result of `prefill_steps`, and c the `count` of timed steps. A
    step takes (t(f + c) - t(f)) / c. If the prompts need several steps, sequences start and end one after the other. With at
    least f tokens for each sequence, both runs start and end in the same way, and they differ by c steps of the full batch.

    Returns:
        the seconds of a step, one value for each repeat; the seconds until the last prompt had its first token, one value for
        each repeat; f.
    Raises:
        MinirtError: the longer run took no more time than the shorter one.
    """
    first = prefill_steps(batch_size, context_len, runs.generator.max_num_batched_tokens)
    rng = random.Random(runs.seed)

    def run(new_tokens: int) -> tuple[float, float]:
        seconds, completions = runs.timed(rng, [context_len] * batch_size, [new_tokens] * batch_size)
        return seconds, max(completion.time_to_first_token_s for completion in completions)

    runs.announce(test_name(batch_size, context_len, count), sum(run(first + count)), runs.repeats)
    steps, first_tokens = [], []
    for _ in range(runs.repeats):
        short, first_token = run(first)
        long, _ = run(first + count)
        if long <= short:
            times = f"{long:.6f} s against {short:.6f} s"
            raise MinirtError(f"{count} more steps took no more time", expected="a quieter machine", found=times)
        steps.append((long - short) / count)
        first_tokens.append(first_token)
    return steps, first_tokens, first


def run(
    runs: Runs, batch_sizes: Sequence[int], context_lens: Sequence[int], ceiling: Ceiling, products: MatmulCeiling,
    count: int = STEPS,
) -> list[dict[str, Any]]:
    """Measure every combination of context length and batch size, each by `count` steps.

    Bytes count what a step must move: the weights once (of a mixture, the experts that steps of this run use, see
    `bench.experts`), the KV cache of each sequence, and the states of recurrent layers, which are read and written. Times are in
    seconds, rates in bytes or tokens per second. The limit is the sum of two times: the time to move the KV cache and the states
    at `ceiling`, and the longer of the time to read the weights at `ceiling` and the time to multiply all tokens by them at the
    rate of `products`.

    Returns:
        a result for each combination.
    """
    return [_row(runs, n, length, ceiling, products, count) for length in context_lens for n in batch_sizes]


def _row(
    runs: Runs, batch_size: int, context_len: int, ceiling: Ceiling, products: MatmulCeiling, count: int
) -> dict[str, Any]:
    generator, test = runs.generator, test_name(batch_size, context_len, count)
    steps, first_tokens, first = step_times(runs, batch_size, context_len, count)
    seen = context_len + first + (count - 1) / 2  # mean context of the measured steps
    kv = batch_size * kv_read_bytes(generator.model, seen)
    states = batch_size * generator.step_state_bytes
    use = in_decode(generator, batch_size, context_len, runs.seed)
    read = step_read_bytes(generator.model, batch_size, None if use is None else use.touched())
    step, datasheet = statistics.median(steps), datasheet_bandwidth(generator.device)
    speed = (read + kv + states) / step
    flops = linear_flops(generator.config, batch_size, batch_size)
    weights = max(read / ceiling.bytes_per_s, flops / products.flops_per_s)
    limit = weights + (kv + states) / ceiling.bytes_per_s
    row = {
        "test": test, "batch_size": batch_size, "context_len": context_len, "tokens_before": first,
        "step_s": summarize(steps), "tokens_per_s": summarize([batch_size / seconds for seconds in steps]),
        "graph_replay_s": replay_time(generator, batch_size, round(seen)), "weight_bytes_read": read, "kv_bytes_read": kv,
        "state_bytes_moved": states, "read_bytes_per_s": speed, "share_of_read_ceiling": speed / ceiling.bytes_per_s,
        "share_of_datasheet": speed / datasheet if datasheet else None, "flops": flops, "limit_s": limit,
        "share_of_limit": limit / step, "weight_bytes_if_uniform": step_read_bytes(generator.model, batch_size),
        "experts": use and use.summary(expected(generator.config, batch_size)),
        "time_to_first_token_s": statistics.median(first_tokens), "peak_memory_bytes": peak_memory(generator.device),
    }
    runs.progress(f"{test}: {step * 1e3:.3f} ms a step")
    return row


def replay_time(generator: Generator, batch_size: int, context_len: int) -> float | None:
    """Return the median seconds of replaying a decode step's CUDA graph, or None if the step has no CUDA graph."""
    try:
        return statistics.median(replay_times(generator, batch_size, context_len))
    except UnsupportedError:
        return None
