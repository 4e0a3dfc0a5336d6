"""The result of a run, in the terms and field names of `vllm bench serve`, and whether the clients limited it."""

import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, chain
from math import inf
from typing import Any

from minirt.bench.serve.client import Outcome
from minirt.bench.serve.run import Run
from minirt.bench.serve.worker import Usage
from minirt.bench.summary import percentiles

Row = dict[str, Any]
LIMITS = {"ttft": "ttft", "tpot": "tpot", "e2el": "latency"}  # what goodput can limit → the attribute of an outcome
# The lists of a detailed result, with this attribute of each request.
_DETAILS = {
    "input_lens": "prompt_tokens", "output_lens": "output_len", "ttfts": "ttft", "itls": "itls", "latencies": "latency",
    "start_times": "start", "queue_times": "delay", "errors": "error",
}  # fmt: skip
BUSY = 0.7  # share of a CPU above which a client process may be the limit
_SHOWN_ERRORS = 5


def result(run: Run, percents: Sequence[float], goodput: dict[str, float], detailed: bool) -> Row:
    """Return the result of a run.

    Times per output token (TPOT) are (latency - TTFT) / (output tokens - 1), of requests with more than one. Inter-token
    latencies (ITL) are times between events; a server may send several tokens in one.

    Args:
        percents: percentiles of each metric.
        goodput: limits in milliseconds, by the name of a metric of LIMITS. Goodput counts requests that keep all of them.
        detailed: whether to add a list for each quantity of a request.
    """
    good = [outcome for outcome in run.outcomes if not outcome.error]
    duration = max([*(outcome.end for outcome in run.outcomes), 1e-9])
    inputs = sum(outcome.prompt_tokens or 0 for outcome in good)
    outputs = sum(outcome.output_len for outcome in good)
    samples = _samples(run, good)
    row: Row = {
        "request_rate": "inf" if run.rate == inf else run.rate, "burstiness": 1.0, "max_concurrency": run.max_concurrency,
        "duration": duration, "completed": len(good), "failed": len(run.outcomes) - len(good), "total_input_tokens": inputs,
        "total_output_tokens": outputs, "request_throughput": len(good) / duration,
        "request_goodput": _within(good, goodput) / duration if goodput else None, "goodput_limits_ms": goodput or None,
        "output_throughput": outputs / duration, "total_token_throughput": (inputs + outputs) / duration,
        "max_output_tokens_per_s": _peak_rate(good), "max_concurrent_requests": _peak_concurrency(good),
    }
    for name, seconds in samples.items():
        row |= _statistics(name, seconds, percents)
    row |= {"client": client(run.usages, run)}
    row["token_counts"] = "usage" if all(outcome.output_tokens is not None for outcome in good) else "events"
    errors = Counter(outcome.error for outcome in run.outcomes if outcome.error)
    row["error_counts"] = dict(errors.most_common(_SHOWN_ERRORS))
    if detailed:
        row |= {name: [getattr(outcome, attribute) for outcome in run.outcomes] for name, attribute in _DETAILS.items()}
    return row


def client(usages: Sequence[Usage], run: Run) -> Row:
    """Return how busy the client processes were. Shares are of one CPU, of the busiest process.

    `headroom` is what was left of a CPU in the busiest second of any process. `send_delay` is how late requests were sent; with a
    limit of concurrency they wait on purpose, so it is None.
    """
    lags = [lag for usage in usages for lag in usage.lags] or [0.0]
    busiest = max((usage.busiest_share for usage in usages), default=0.0)
    lag, delay = percentiles(lags, [50, 99]), percentiles([outcome.delay for outcome in run.outcomes], [99])[0]
    return {
        "processes": len(usages), "cpu_seconds": sum(usage.cpu_seconds for usage in usages),
        "cpu_share": max((usage.cpu_seconds / usage.seconds for usage in usages if usage.seconds), default=0.0),
        "cpu_share_busiest_second": busiest, "headroom": 1 - busiest,
        "us_per_event": 1e6 * sum(usage.cpu_seconds for usage in usages) / max(1, sum(o.events for o in run.outcomes)),
        "p50_loop_lag_ms": lag[0] * 1e3, "p99_loop_lag_ms": lag[1] * 1e3, "max_loop_lag_ms": max(lags) * 1e3,
        "p99_send_delay_ms": None if run.max_concurrency is not None else delay * 1e3,
    }


def warnings(row: Row, asked_output_tokens: int | None) -> list[str]:
    """Sentences about what makes a result doubtful. `asked_output_tokens`: those of all requests, if none may end early."""
    sentences, load_client = [], row["client"]
    if load_client["headroom"] < 1 - BUSY:
        share = f"{load_client['cpu_share_busiest_second']:.0%}"
        sentences.append(f"the client may be the limit: a process used {share} of a CPU in its busiest second; raise --processes")
    itl = row.get("median_itl_ms") or 0.0
    if load_client["p99_loop_lag_ms"] > max(5.0, itl / 2):
        lag = f"{load_client['p99_loop_lag_ms']:.1f} ms"
        advice = "raise --processes, or use another machine"
        sentences.append(f"the client measures late: event loops lagged by {lag} (p99); {advice}")
    if row["token_counts"] == "events":
        sentences.append("the server does not count tokens: each event counts as one, and prompts as none")
    elif not row["failed"] and asked_output_tokens is not None and row["total_output_tokens"] != asked_output_tokens:
        counts = f"{row['total_output_tokens']:,} tokens came instead of {asked_output_tokens:,}"
        sentences.append(f"{counts}: does the server take ignore_eos?")
    return sentences


def _samples(run: Run, good: Sequence[Outcome]) -> dict[str, list[float]]:
    """The values of each metric, in seconds."""
    samples = {
        "ttft": [outcome.ttft for outcome in good], "tpot": [outcome.tpot for outcome in good if outcome.output_len > 1],
        "itl": [itl for outcome in good for itl in outcome.itls], "e2el": [outcome.latency for outcome in good],
    }
    if run.max_concurrency is not None:
        samples["client_queue_time"] = [outcome.delay for outcome in good]
        if run.rate != inf:
            samples["e2el_including_client_queue"] = [outcome.latency + outcome.delay for outcome in good]
    return samples


def _within(good: Sequence[Outcome], limits: dict[str, float]) -> int:
    """How many requests keep all limits."""
    return sum(all(getattr(outcome, LIMITS[name]) * 1e3 <= limit for name, limit in limits.items()) for outcome in good)


def _statistics(name: str, seconds: Sequence[float], percents: Sequence[float]) -> Row:
    """Mean, median, standard deviation and percentiles in milliseconds; None without values."""
    keys = [f"p{percent:g}_{name}_ms" for percent in percents]
    if not seconds:
        return dict.fromkeys([f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", *keys])
    values = [value * 1e3 for value in seconds]
    median, *others = percentiles(values, [50, *percents])
    row = {f"mean_{name}_ms": statistics.fmean(values), f"median_{name}_ms": median}
    return row | {f"std_{name}_ms": statistics.pstdev(values)} | dict(zip(keys, others, strict=True))


def _peak_rate(good: Sequence[Outcome]) -> float:
    """The most events with tokens in one second, counted from the first request."""
    first = min((outcome.start for outcome in good), default=0.0)
    times = (accumulate(outcome.itls, initial=outcome.start + outcome.ttft - first) for outcome in good)
    seconds = Counter(map(int, chain.from_iterable(times)))
    return float(max(seconds.values(), default=0))


def _peak_concurrency(good: Sequence[Outcome]) -> int:
    """The most requests in flight at once; one that ends when another starts does not count."""
    changes = [(outcome.start, 1) for outcome in good] + [(outcome.start + outcome.latency, -1) for outcome in good]
    count = peak = 0
    for _, change in sorted(changes):
        count += change
        peak = max(peak, count)
    return peak
