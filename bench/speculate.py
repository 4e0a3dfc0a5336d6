"""`minirt bench speculate`: requests with drafts and without, one after the other, and whether their texts are the same."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from minirt.bench.summary import summarize
from minirt.generator import Generator
from minirt.outputs import Completion
from minirt.sampling_params import SamplingParams

Request = tuple[str, list[int], SamplingParams]  # name in the results, prompt, parameters
Timed = tuple[list[Completion], list[float]]  # completions of a request, and seconds from the call to their end, by repeat


def run(generator: Generator, requests: Sequence[Request], repeats: int, progress: Callable[[str], None]) -> list[Timed]:
    """Run each request alone, `repeats` times. The first request runs once before, which is not counted."""
    what = "without drafts" if generator.speculative is None else "with drafts"
    generator.generate([requests[0][1]], [requests[0][2]])
    timed = []
    for name, tokens, params in requests:
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            result = generator.generate([tokens], [params])[0]
            seconds.append(time.perf_counter() - start)
        timed.append((result.outputs, seconds))
        progress(f"{name} {what}: {statistics.median(seconds):.2f} s")
    return timed


def rows(requests: Sequence[Request], drafts: Sequence[Timed], plain: Sequence[Timed]) -> list[dict[str, Any]]:
    """A result for each request, then one for all of them. Counts of drafts and tokens are those of the last repeat."""
    pairs = list(zip(drafts, plain, strict=True))
    return [*(_row(name, [pair]) for (name, *_), pair in zip(requests, pairs, strict=True)), _row("all", pairs)]


def _row(test: str, pairs: Sequence[tuple[Timed, Timed]]) -> dict[str, Any]:
    outputs = [output for (drafted, _), _ in pairs for output in drafted]
    tokens, accepted = sum(len(output.token_ids) for output in outputs), sum(output.num_accepted_tokens for output in outputs)
    seconds, plain_s = ([sum(each) for each in zip(*(pair[i][1] for pair in pairs), strict=True)] for i in (0, 1))
    same = sum([output.token_ids for output in a] == [output.token_ids for output in b] for (a, _), (b, _) in pairs)
    return {
        "test": test, "output_tokens": tokens, "num_draft_tokens": sum(output.num_draft_tokens for output in outputs),
        "num_accepted_tokens": accepted, "acceptance_length": tokens / (tokens - accepted) if tokens > accepted else 1.0,
        "seconds": summarize(seconds), "plain_s": summarize(plain_s),
        "speedup": statistics.median(plain_s) / statistics.median(seconds), "texts": len(pairs), "same_texts": same,
    }  # fmt: skip
