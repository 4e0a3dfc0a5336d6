"""`minirt bench prefill`: the time from a prompt to its first token, and how long prompts slow down other requests.

The limit is a prompt's arithmetic at the rate of PyTorch's large matrix products, measured in the same run.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from minirt.bench.ceiling import MatmulCeiling
from minirt.bench.experts import expected, in_prompt
from minirt.bench.flops import prompt_flops
from minirt.bench.measure import Clock, announce, check_room, check_rooms, random_prompts, silent, timed_run
from minirt.bench.summary import percentile, summarize
from minirt.device import peak_memory
from minirt.errors import InputError
from minirt.generator import Generator
from minirt.sampling_params import SamplingParams

LONG_PROMPTS = 8  # prompts of `beside`, which the engine computes one after the other
_CONTEXT = 128  # tokens of the decoding requests' own prompts


def check(generator: Generator, input_lens: Sequence[int], beside: int) -> None:
    """Refuse what cannot be measured; see `check_rooms`.

    At any time, the KV cache holds the decoding requests, the prompts of one step, and a partly computed prompt.

    Raises:
        InputError: too many sequences, or prompts too short for `beside`.
        ContextLengthError: too long, or too large for the KV cache.
    """
    check_room(generator, 1, max(input_lens) + 1)
    if not beside:
        return
    if beside + 1 > generator.max_num_seqs:
        what, expected = "no sequence is left for a prompt beside the decoding requests", f"--max-num-seqs {beside + 1} or more"
        raise InputError(what, where="--beside", expected=expected, found=generator.max_num_seqs)
    for length in input_lens:
        decoding = _CONTEXT + _steps(generator, length, beside)
        most = min(LONG_PROMPTS, generator.max_num_seqs - beside, generator.max_num_batched_tokens // length + 2)
        check_rooms(generator, [(beside, decoding), (most, length + 1)])
    if LONG_PROMPTS * min(input_lens) <= generator.max_num_batched_tokens:
        expected = f"{LONG_PROMPTS} prompts that together exceed --max-num-batched-tokens ({generator.max_num_batched_tokens})"
        raise InputError("too short to delay other requests", where="--input-len", expected=expected, found=min(input_lens))


def run(
    generator: Generator,
    input_lens: Sequence[int],
    *,
    repeats: int,
    sampling: dict[str, Any],
    seed: int,
    ceiling: MatmulCeiling,
    progress: Callable[[str], None],
    clock: Clock = time.perf_counter,
) -> list[dict[str, Any]]:
    """Measure the time to first token of single prompts.

    Returns:
        a result for each prompt length: seconds from the call to the first token, over `repeats` runs, after two runs that are
        not counted.
    """
    rng, results = random.Random(seed), []
    params = [SamplingParams(max_tokens=1, ignore_eos=True, repetition_penalty=1.0, **sampling)]
    for length in input_lens:
        prompts = [random_prompts(rng, [length], generator.config.vocab_size) for _ in range(repeats + 2)]
        first = timed_run(generator, prompts[0], params, clock)[0]
        announce(progress, f"pp{length}", first, repeats + 1)
        times = [timed_run(generator, prompt, params, clock)[0] for prompt in prompts[1:]][1:]
        flops, use = prompt_flops(generator.config, length), in_prompt(generator, length, seed)
        rate = flops / statistics.median(times)
        results.append(
            {
                "test": f"pp{length}",
                "input_len": length,
                "time_to_first_token_s": summarize(times),
                "tokens_per_s": length / statistics.median(times),
                "flops": flops,
                "flops_per_s": rate,
                "share_of_matmul_ceiling": rate / ceiling.flops_per_s,
                "experts": use and use.summary(expected(generator.config, length)),
                "inter_token_s": None,
                "peak_memory_bytes": peak_memory(generator.device),
            }
        )
        progress(f"pp{length}: {statistics.median(times) * 1e3:.3f} ms to the first token")
    return results


def beside(
    generator: Generator,
    input_len: int,
    count: int,
    *,
    repeats: int,
    sampling: dict[str, Any],
    seed: int,
    progress: Callable[[str], None] = silent,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Measure how LONG_PROMPTS prompts of `input_len` tokens slow down `count` requests that decode meanwhile.

    All requests are added at the same time. The decoding requests have short prompts of their own and decode until all long
    prompts are computed.

    Returns:
        a result of `repeats` runs, after one that is not counted. `time_to_first_token_s` is that of the long prompts, with the
        time they wait for other prompts. `tokens_per_s` divides the tokens of all prompts, also the short ones, by the time until
        the last first token; it is the median over the runs. `inter_token_s` is the time between two tokens of a decoding
        request while long prompts are computed: p50, p99 and the longest.
    """
    rng, firsts, gaps, rates = random.Random(seed), [], [], []
    steps, shared = _steps(generator, input_len, count), {"ignore_eos": True, "repetition_penalty": 1.0, **sampling}
    params = [SamplingParams(max_tokens=steps, **shared)] * count
    params += [SamplingParams(max_tokens=1, **shared)] * LONG_PROMPTS
    for i in range(repeats + 1):
        prompts = random_prompts(rng, [_CONTEXT] * count + [input_len] * LONG_PROMPTS, generator.config.vocab_size)
        seconds, completions = timed_run(generator, prompts, params, clock)
        if i == 0:
            announce(progress, f"pp{input_len} beside {count}", seconds, repeats)
            continue
        began = max(completion.token_times_s[0] for completion in completions[:count])
        own = [completion.token_times_s[0] for completion in completions[count:]]
        firsts += own
        rates.append(sum(map(len, prompts)) / max(own))
        gaps += [
            later - earlier
            for completion in completions[:count]
            for earlier, later in pairwise(completion.token_times_s)
            if began < later <= max(own)
        ]
    return {
        "test": f"{LONG_PROMPTS} × pp{input_len} beside {count}",
        "input_len": input_len,
        "decoding": count,
        "max_num_batched_tokens": generator.max_num_batched_tokens,
        "time_to_first_token_s": summarize(firsts),
        "tokens_per_s": statistics.median(rates),
        "flops": None,
        "flops_per_s": None,
        "share_of_matmul_ceiling": None,
        "experts": None,
        "inter_token_s": {"p50": percentile(gaps, 50), "p99": percentile(gaps, 99), "max": max(gaps)} if gaps else None,
        "peak_memory_bytes": peak_memory(generator.device),
    }


def _steps(generator: Generator, input_len: int, count: int) -> int:
    """Return how many tokens each of `count` requests must generate to decode until all long prompts are computed."""
    chunks = -(-input_len // max(1, generator.max_num_batched_tokens - count))
    return LONG_PROMPTS * (chunks + 1) + 16
