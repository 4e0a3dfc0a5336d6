"""The requests of `minirt bench serve` do not depend on how they are sent; results are those of hand-made outcomes.

Catches a load that changes with the number of processes, arrivals that are not a Poisson process, and wrong percentiles.
"""

import json
import random
from math import inf

import numpy as np
import pytest
from scipy import stats

from minirt.bench.serve import metrics
from minirt.bench.serve.client import Outcome
from minirt.bench.serve.run import Run
from minirt.bench.serve.worker import Usage
from minirt.bench.serve.workload import Workload, arrivals, assign, shares

LOAD = Workload(300, (3, 90), (2, 40), seed=5, text=False, vocab_size=50, chat=False, fields={"model": "m", "top_k": 3})


def test_lengths_and_bodies() -> None:
    inputs, outputs = LOAD.lengths()
    assert len(inputs) == len(outputs) == 300
    assert (min(inputs), max(inputs), min(outputs), max(outputs)) == (3, 90, 2, 40)
    body = json.loads(LOAD.body(7, inputs[7], outputs[7]))
    prompt = body.pop("prompt")
    assert len(prompt) == inputs[7]
    assert set(prompt) <= set(range(50))
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    assert body == {"max_tokens": outputs[7], "model": "m", "top_k": 3, **stream}
    ids = [token for i in range(300) for token in json.loads(LOAD.body(i, inputs[i], outputs[i]))["prompt"]]
    assert stats.chisquare(np.bincount(ids, minlength=50)).pvalue > 1e-3


def test_lengths_are_those_of_bench_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that served and offline throughput of the same options can be compared."""
    from types import SimpleNamespace

    from minirt.bench import throughput
    from minirt.bench.measure import Runs

    seen: list[tuple[int, int]] = []

    def timed(runs, rng, inputs, outputs):
        seen.extend(zip(inputs, outputs, strict=True))
        return 1.0, []

    monkeypatch.setattr(Runs, "timed", timed)
    monkeypatch.setattr(throughput, "named_percentiles", lambda values, *percents: {})
    monkeypatch.setattr(throughput, "peak_memory", lambda device: 0)
    throughput.run(Runs(SimpleNamespace(device=None), 1, {}, 5), 300, (3, 90), (2, 40))  # type: ignore[arg-type]
    assert seen[:300] == list(zip(*LOAD.lengths(), strict=True))


def test_no_two_prompts_share_a_beginning_in_a_cache() -> None:
    """Also those of the other runs of a sweep, and of warm-up."""
    from dataclasses import replace

    bodies = [replace(LOAD, part=part).body(i, 20, 3) for part in range(3) for i in range(-2, 50)]
    assert len({tuple(json.loads(body)["prompt"][:16]) for body in bodies}) == len(bodies)
    assert LOAD.body(4, 20, 3) == replace(LOAD).body(4, 20, 3)


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_of_words(chat: bool) -> None:
    load = Workload(1, (40, 40), (7, 7), seed=1, text=True, vocab_size=9, chat=chat, fields={})
    body = json.loads(load.body(0, 40, 7))
    text = body["messages"][0]["content"] if chat else body["prompt"]
    assert len(text.split()) == 40
    assert body["max_completion_tokens" if chat else "max_tokens"] == 7
    assert ("prompt" in body, "max_tokens" in body) == (not chat, not chat)


@pytest.mark.parametrize("rate", [0.3, 7.0])
def test_arrivals_are_a_poisson_process(rate: float) -> None:
    times = arrivals(2000, rate, seed=3)
    gaps = np.diff([0.0, *times])
    assert times[-1] == pytest.approx(2000 / rate)
    assert (gaps > 0).all()
    assert stats.kstest(gaps * rate, "expon").pvalue > 0.01
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.06
    assert arrivals(2000, rate, seed=3) == times != arrivals(2000, rate, seed=4)
    assert arrivals(3, inf, 0) == [0.0] * 3


def test_processes_share_the_load_evenly() -> None:
    assert shares(None, 3) == [None] * 3
    assert shares(256, 3) == [86, 85, 85]
    assert shares(3, 3) == [1, 1, 1]
    _, outputs = LOAD.lengths()
    for limits in ([None] * 4, [64] * 4, [86, 85, 85], [3, 2]):
        owners = assign(outputs, limits)
        tokens = [sum(n for n, owner in zip(outputs, owners, strict=True) if owner == i) for i in range(len(limits))]
        loads = [count / (limit or 1) for count, limit in zip(tokens, limits, strict=True)]
        assert max(loads) - min(loads) <= max(outputs) / min(limit or 1 for limit in limits)


# --- results ---


def outcomes() -> list[Outcome]:
    rng = random.Random(9)
    made = []
    for i in range(41):
        count = rng.choice([1, 2, 5, 30])
        itls = [rng.choice([0.0, 0.01, 0.03]) + rng.random() * 1e-3 for _ in range(count - 1)]
        ttft, start = 0.01 + rng.random(), i * 0.1 + rng.random() * 0.01
        latency = ttft + sum(itls)
        outcome = Outcome(i, i * 0.1, start, ttft, itls, latency, start + latency, rng.randint(3, 90), count, count)
        if i % 10 == 3:
            outcome.error = "HTTP 500" if i != 13 else "gone"
            outcome.end += 5
        made.append(outcome)
    return made


def row(**changes) -> tuple[dict, list[Outcome]]:
    made = outcomes()
    usages = changes.pop("usages", [Usage(4, 1, 0.5, [0.001] * 50)])
    run = Run(changes.pop("rate", 10.0), changes.pop("limit", None), made, usages)
    options = {"percents": [25, 99.9], "goodput": {}, "detailed": False} | changes
    return metrics.result(run, **options), [o for o in made if not o.error]


def test_statistics() -> None:
    result, good = row()
    values = {
        "ttft": [o.ttft for o in good],
        "tpot": [(o.latency - o.ttft) / (o.output_tokens - 1) for o in good if o.output_tokens > 1],
        "itl": [itl for o in good for itl in o.itls], "e2el": [o.latency for o in good],
    }  # fmt: skip
    for name, seconds in values.items():
        ms = np.array(seconds) * 1e3
        assert result[f"mean_{name}_ms"] == pytest.approx(ms.mean())
        assert result[f"median_{name}_ms"] == pytest.approx(np.median(ms))
        assert result[f"std_{name}_ms"] == pytest.approx(ms.std())
        assert result[f"p25_{name}_ms"] == pytest.approx(np.percentile(ms, 25))
        assert result[f"p99.9_{name}_ms"] == pytest.approx(np.percentile(ms, 99.9))
    assert "p25_client_queue_time_ms" not in result
    duration = max(o.end for o in outcomes())
    assert (result["duration"], result["completed"], result["failed"]) == (duration, 37, 4)
    tokens = [sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)]
    assert [result["total_input_tokens"], result["total_output_tokens"]] == tokens
    rates = [result[name] * duration for name in ("request_throughput", "output_throughput", "total_token_throughput")]
    assert rates == pytest.approx([37, tokens[1], sum(tokens)])
    assert result["error_counts"] == {"HTTP 500": 3, "gone": 1}
    assert list(result["error_counts"]) == ["HTTP 500", "gone"]
    assert result["request_goodput"] is None
    json.dumps(result, allow_nan=False)


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    result, good = row(goodput={"ttft": 500.0, "tpot": 15.0, "e2el": 700.0})
    kept = 0
    for o in good:
        tpot = (o.latency - o.ttft) / (o.output_tokens - 1) if o.output_tokens > 1 else 0.0
        kept += o.ttft <= 0.5 and tpot <= 0.015 and o.latency <= 0.7
    assert 0 < kept < len(good)
    assert result["request_goodput"] * result["duration"] == pytest.approx(kept)
    exact = Outcome(0, 0.0, 0.0, 0.2, [], 0.2, 0.2, 1, 1, 1)
    assert metrics.result(Run(inf, None, [exact], []), [], {"ttft": 200.0}, False)["request_goodput"] == 5.0


def test_peaks() -> None:
    made = [Outcome(0, 0, 10.0, 0.5, [0.4, 0.2], 1.1, 11.1), Outcome(1, 0, 11.1, 0.1, [], 0.1, 11.2)]
    made.append(Outcome(2, 0, 10.2, 0.5, [], 0.5, 10.7))
    result = metrics.result(Run(inf, None, made, []), [], {}, False)
    assert result["max_concurrent_requests"] == 2  # the second starts when the first ends
    assert result["max_output_tokens_per_s"] == 3.0  # from 10.0 to 11.0: 10.5, 10.9, 10.7; then 11.1 and 11.2


def test_waiting_for_a_place_is_reported_apart() -> None:
    result, good = row(limit=4)
    waits = [o.start - o.planned for o in good]
    assert result["median_client_queue_time_ms"] == pytest.approx(np.median(waits) * 1e3)
    both = [o.latency + wait for o, wait in zip(good, waits, strict=True)]
    assert result["p25_e2el_including_client_queue_ms"] == pytest.approx(np.percentile(both, 25) * 1e3)
    assert result["client"]["p99_send_delay_ms"] is None
    assert "p25_e2el_including_client_queue_ms" not in row(limit=4, rate=inf)[0]


def test_without_any_success_everything_is_null_but_there() -> None:
    failed = Outcome(0, 0.0, 0.0, end=2.0, error="x")
    result = metrics.result(Run(1.0, None, [failed], []), [99], {"ttft": 1.0}, True)
    assert (result["completed"], result["p99_ttft_ms"], result["mean_itl_ms"], result["request_goodput"]) == (0, None, None, 0.0)
    assert result["errors"] == ["x"]


def test_a_client_without_headroom_says_so() -> None:
    calm, busy = Usage(10, 1, 0.3, [0.001] * 99), Usage(10, 6, 0.95, [0.0] * 98 + [0.2] * 2)
    result = row(usages=[calm, busy, calm])[0]
    clients = result["client"]
    assert (clients["processes"], clients["cpu_seconds"]) == (3, 8)
    assert (clients["cpu_share"], clients["cpu_share_busiest_second"]) == (0.6, 0.95)
    assert clients["headroom"] == pytest.approx(0.05)
    assert clients["max_loop_lag_ms"] == 200.0
    assert clients["us_per_event"] == pytest.approx(8e6 / sum(o.events for o in outcomes()))
    assert clients["p99_send_delay_ms"] == pytest.approx(np.percentile([o.start - o.planned for o in outcomes()], 99) * 1e3)
    (warning,) = metrics.warnings(result, None)
    assert "95% of a CPU" in warning
    assert metrics.warnings(row(usages=[calm])[0], None) == []
    (lagging,) = metrics.warnings(row(usages=[Usage(10, 1, 0.3, [0.05] * 99)])[0], None)
    assert "lagged by 50.0 ms" in lagging


def test_lengths_that_differ_from_what_was_asked_are_named() -> None:
    outcome = Outcome(0, 0.0, 0.0, 0.1, [0.1], 0.2, 0.2, 5, 2, 2)
    result = metrics.result(Run(inf, None, [outcome], []), [], {}, False)
    assert metrics.warnings(result, 2) == []
    assert "2 tokens came instead of 9" in metrics.warnings(result, 9)[0]
    outcome.output_tokens = outcome.prompt_tokens = None
    result = metrics.result(Run(inf, None, [outcome], []), [], {}, False)
    assert (result["total_output_tokens"], result["token_counts"]) == (2, "events")
    assert "does not count tokens" in metrics.warnings(result, 2)[0]
