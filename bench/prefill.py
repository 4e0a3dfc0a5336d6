"""The prompts of `minirt bench speed`: the time from a prompt to its first token, and how long prompts slow down other requests.

The limit is a prompt's arithmetic at the rate of PyTorch's large matrix products, measured in the same run.
"""

import random
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from minirt.bench.ceiling import MatmulCeiling
from minirt.bench.experts import expected, in_prompt
from minirt.bench.flops import prompt_flops
from minirt.bench.measure import Runs, check_room
from minirt.bench.summary import named_percentiles, summarize
from minirt.device import peak_memory
from minirt.errors import InputError
from minirt.generator import Generator

LONG_PROMPTS = 8  # prompts of `beside`, which the engine computes one after the other
_CONTEXT = 128  # tokens of the decoding requests' own prompts


def check(generator: Generator, input_lens: Sequence[int], beside: int) -> None:
    """Refuse what cannot be measured; see `check_room`.

    At any time, the KV cache holds the decoding requests, the prompts of one step, and a partly computed prompt.

    Raises:
        InputError: too many sequences, or prompts too short for `beside`.
        ContextLengthError: too long, or too large for the KV cache.
    """
    check_room(generator, (1, max(input_lens) + 1))
    if not beside:
        return
    if beside + 1 > generator.max_num_seqs:
        what, expected = "no sequence is left for a prompt beside the decoding requests", f"--max-num-seqs {beside + 1} or more"
        raise InputError(what, where="--beside", expected=expected, found=generator.max_num_seqs)
    for length in input_lens:
        decoding = _CONTEXT + _steps(generator, length, beside)
        most = min(LONG_PROMPTS, generator.max_num_seqs - beside, generator.max_num_batched_tokens // length + 2)
        check_room(generator, (beside, decoding), (most, length + 1))
    if LONG_PROMPTS * min(input_lens) <= generator.max_num_batched_tokens:
        expected = f"{LONG_PROMPTS} prompts that together exceed --max-num-batched-tokens ({generator.max_num_batched_tokens})"
        raise InputError("too short to delay other requests", where="--input-len", expected=expected, found=min(input_lens))


def run(runs: Runs, input_lens: Sequence[int], ceiling: MatmulCeiling) -> list[dict[str, Any]]:
    """Measure the time to first token of single prompts.

    Returns:
        a result for each prompt length: seconds from the call to the first token, after two runs that are not counted.
    """
    rng, generator = random.Random(runs.seed), runs.generator
    results = []
    for length in input_lens:
        test = f"pp{length}"
        runs.announce(test, runs.timed(rng, [length], [1])[0], runs.repeats + 1)
        times = [runs.timed(rng, [length], [1])[0] for _ in range(runs.repeats + 1)][1:]
        flops, use = prompt_flops(generator.config, length), in_prompt(generator, length, runs.seed)
        rate = flops / statistics.median(times)
        rates = {"flops": flops, "flops_per_s": rate, "share_of_matmul_ceiling": rate / ceiling.flops_per_s}
        results.append(_row(runs, length, times, length / statistics.median(times)) | rates)
        results[-1]["experts"] = use and use.summary(expected(generator.config, length))
        runs.progress(f"{test}: {statistics.median(times) * 1e3:.3f} ms to the first token")
    return results


def _row(runs: Runs, input_len: int, first_tokens: Sequence[float], tokens_per_s: float) -> dict[str, Any]:
    """What both kinds of results have, and null for what only `run` measures."""
    measured = {"test": f"pp{input_len}", "input_len": input_len, "time_to_first_token_s": summarize(first_tokens)}
    missing = dict.fromkeys(("flops", "flops_per_s", "share_of_matmul_ceiling", "experts", "inter_token_s"))
    return measured | {"tokens_per_s": tokens_per_s} | missing | {"peak_memory_bytes": peak_memory(runs.generator.device)}


def beside(runs: Runs, input_len: int, count: int) -> dict[str, Any]:
    """Measure how LONG_PROMPTS prompts of `input_len` tokens slow down `count` requests that decode meanwhile.

    All requests are added at the same time. The decoding requests have short prompts of their own and decode until all long
    prompts are computed.

    Returns:
        a result, after one run that is not counted. `time_to_first_token_s` is that of the long prompts, with the time they wait
        for other prompts. `tokens_per_s` divides the tokens of all prompts, also the short ones, by the time until the last first
        token; it is the median over the runs. `inter_token_s` is the time between two tokens of a decoding request while long
        prompts are computed: p50, p99 and the longest.
    """
    rng, firsts, gaps, rates = random.Random(runs.seed), list[float](), list[float](), []
    inputs = [_CONTEXT] * count + [input_len] * LONG_PROMPTS
    outputs = [_steps(runs.generator, input_len, count)] * count + [1] * LONG_PROMPTS
    for _, completions in runs.repeated(f"pp{input_len} beside {count}", lambda: runs.timed(rng, inputs, outputs)):
        decoding = [completion.token_times_s for completion in completions[:count]]
        began = max(times[0] for times in decoding)
        prompts = [completion.token_times_s[0] for completion in completions[count:]]
        firsts += prompts
        rates.append(sum(inputs) / max(prompts))
        gaps += [b - a for times in decoding for a, b in pairwise(times) if began < b <= max(prompts)]
    row = _row(runs, input_len, firsts, statistics.median(rates))
    return row | {
        "test": f"{LONG_PROMPTS} × pp{input_len} beside {count}", "decoding": count,
        "max_num_batched_tokens": runs.generator.max_num_batched_tokens,
        "inter_token_s": named_percentiles(gaps, 50, 99) | {"max": max(gaps)} if gaps else None,
    }


def _steps(generator: Generator, input_len: int, count: int) -> int:
    """Return how many tokens each of `count` requests must generate to decode until all long prompts are computed."""
    chunks = -(-input_len // max(1, generator.max_num_batched_tokens - count))
    return LONG_PROMPTS * (chunks + 1) + 16
