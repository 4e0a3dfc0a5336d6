"""`minirt bench latency`: seconds until the last token of a batch of prompts, reported as `vllm bench latency` reports them."""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from minirt.bench.measure import Clock, announce, random_prompts, silent, timed_run
from minirt.bench.summary import percentile, summarize
from minirt.device import peak_memory
from minirt.generator import Generator
from minirt.sampling_params import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


def run(
    generator: Generator,
    batch_size: int,
    input_len: int,
    output_len: int,
    *,
    repeats: int,
    sampling: dict[str, Any],
    seed: int,
    progress: Callable[[str], None] = silent,
    clock: Clock = time.perf_counter,
) -> list[dict[str, Any]]:
    """Measure one batch.

    Returns:
        a list of one result. Times are in seconds and come from `repeats` runs, after one run that is not counted.
    """
    rng = random.Random(seed)
    params = [SamplingParams(max_tokens=output_len, ignore_eos=True, repetition_penalty=1.0, **sampling)] * batch_size
    times, first_tokens = [], []
    test = f"latency b{batch_size} in{input_len} out{output_len}"
    for i in range(repeats + 1):
        prompts = random_prompts(rng, [input_len] * batch_size, generator.config.vocab_size)
        seconds, completions = timed_run(generator, prompts, params, clock)
        if i == 0:
            announce(progress, test, seconds, repeats)
        times.append(seconds)
        first_tokens.append(max(completion.time_to_first_token_s for completion in completions))
    times, first_tokens = times[1:], first_tokens[1:]
    mean = statistics.fmean(times)
    return [
        {
            "test": test,
            "batch_size": batch_size,
            "input_len": input_len,
            "output_len": output_len,
            "latency_s": summarize(times) | {"mean": mean} | {f"p{p}": percentile(times, p) for p in PERCENTILES},
            "output_tokens_per_s": batch_size * output_len / mean,
            "time_to_first_token_s": statistics.median(first_tokens),
            "peak_memory_bytes": peak_memory(generator.device),
        }
    ]
