"""`minirt bench throughput`: prompts of given or random lengths through the engine at once, to the last token of all."""

import random
import statistics
from typing import Any

from minirt.bench.measure import Runs
from minirt.bench.summary import named_percentiles, shown_range, summarize
from minirt.device import peak_memory

PERCENTILES = (10, 25, 50, 75, 90, 99)  # of the times of whole runs, as `vllm bench latency` reports them


def run(runs: Runs, num_prompts: int, input_range: tuple[int, int], output_range: tuple[int, int]) -> list[dict[str, Any]]:
    """Measure all prompts at once.

    Lengths are drawn uniformly from the ranges, both ends included. Every run has the same lengths but different tokens. All
    prompts arrive at the start, so the time to first token includes waiting. The time per output token is the mean of one
    request after its first token; requests of one token have none.

    Returns:
        a list of one result. Times are in seconds. Rates are those of the median run. One run before the others is not counted.
    """
    rng = random.Random(runs.seed)
    inputs = [rng.randint(*input_range) for _ in range(num_prompts)]
    outputs = [rng.randint(*output_range) for _ in range(num_prompts)]
    test = f"throughput n{num_prompts} in{shown_range(input_range)} out{shown_range(output_range)}"
    measured = runs.repeated(test, lambda: runs.timed(rng, inputs, outputs))
    times, counted = [seconds for seconds, _ in measured], [one for _, completions in measured for one in completions]
    median = statistics.median(times)
    rates = [completion.decode_tokens_per_s for completion in counted if completion.decode_tokens_per_s > 0]
    ends = {"mean": statistics.fmean(times)} | named_percentiles(times, *PERCENTILES)
    return [
        {
            "test": test, "num_prompts": num_prompts, "input_tokens": sum(inputs), "output_tokens": sum(outputs),
            "seconds": summarize(times) | ends, "requests_per_s": num_prompts / median,
            "total_tokens_per_s": (sum(inputs) + sum(outputs)) / median, "output_tokens_per_s": sum(outputs) / median,
            "time_to_first_token_s": named_percentiles([completion.time_to_first_token_s for completion in counted], 50, 99),
            "time_per_output_token_s": named_percentiles([1 / rate for rate in rates], 50, 99) if rates else None,
            "peak_memory_bytes": peak_memory(runs.generator.device),
        }
    ]
