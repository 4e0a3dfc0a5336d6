"""`Metrics`: counters and histograms of the front, and the engine's state, under vLLM's names.

The front counts in plain attributes, because it counts every token. `exposition` writes them in Prometheus' text format.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from minirt.engine.request import EngineStats

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

# vLLM's bounds, in seconds.
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Histogram:
    """Counts of values between bounds."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._name, self._help, self._bounds = name, help_text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def metric(self, model: str) -> Metric:
        bounds = (*map(str, map(float, self._bounds)), "+Inf")
        family = HistogramMetricFamily(f"vllm:{self._name}", self._help, labels=["model_name"])
        family.add_metric([model], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        return family


class Metrics:
    """What the front has counted since its start. `model`: the value of the label `model_name`."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.prompt_tokens = self.generation_tokens = 0
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        what = "From the arrival of a request to its first token."
        self.time_to_first_token = Histogram("time_to_first_token_seconds", what, _FIRST_TOKEN)
        self.inter_token_latency = Histogram("inter_token_latency_seconds", "Between two tokens of a request.", _TOKEN)
        what = "From the arrival of a request to its last token."
        self.e2e_latency = Histogram("e2e_request_latency_seconds", what, _REQUEST)
        self.queue_time = Histogram("request_queue_time_seconds", "Until the first step of a request.", _REQUEST)
        self.request_prompt_tokens = Histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.request_generation_tokens = Histogram("request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        self._registry = CollectorRegistry()
        self._registry.register(self)  # type: ignore[arg-type]  # a collector is anything with `collect`
        self._engine: EngineStats | None = None

    def exposition(self, engine: EngineStats | None) -> bytes:
        """All metrics as text. Without the engine's state, those that it knows are left out."""
        self._engine = engine
        if engine is not None:  # the front hears of the tokens of requests that are not streamed when they end
            self.generation_tokens = engine.generation_tokens
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        def metric(kind: Any, name: str, help_text: str, value: Any, label: str | None = None) -> Metric:
            """One value, or with a `label` those of a dict by the label's values."""
            family = kind(f"vllm:{name}", help_text, labels=["model_name", *([label] if label else [])])
            for labels, number in [([str(key)], n) for key, n in value.items()] if label else [([], value)]:
                family.add_metric([self.model, *labels], number)
            return family

        if (engine := self._engine) is not None:
            yield metric(Gauge, "num_requests_running", "Requests that hold KV pages.", engine.num_running)
            yield metric(Gauge, "num_requests_waiting", "Requests that wait.", engine.num_waiting)
            yield metric(Gauge, "kv_cache_usage_perc", "Share of KV pages in use; 1 is all.", engine.kv_cache_usage)
            what = "Running requests that lost their KV pages to others."
            yield metric(Counter, "num_preemptions", what, engine.num_preemptions)
            yield metric(Counter, "prefix_cache_queries", "Tokens looked up in the prefix cache.", engine.prefix_cache_queries)
            yield metric(Counter, "prefix_cache_hits", "Tokens found in the prefix cache.", engine.prefix_cache_hits)
            if engine.adapter_requests:
                yield metric(Counter, "lora_requests", "Requests, by adapter.", engine.adapter_requests, "lora_name")
            if engine.prefix_cache_recomputed is not None:
                what = "Tokens whose KV pages were found, computed again for want of a state of recurrent layers."
                yield metric(Counter, "prefix_cache_recomputed", what, engine.prefix_cache_recomputed)
            if (drafts := engine.drafts).num_accepted_per_position:  # speculative decoding is on
                yield metric(Counter, "spec_decode_num_drafts", "How often drafts of a request were verified.", drafts.num_drafts)
                yield metric(Counter, "spec_decode_num_draft_tokens", "Drafts that were verified.", drafts.num_draft_tokens)
                yield metric(Counter, "spec_decode_num_accepted_tokens", "Drafts that were accepted.", drafts.num_accepted_tokens)
                places, what = dict(enumerate(drafts.num_accepted_per_position)), "Accepted drafts, by their place in a step."
                yield metric(Counter, "spec_decode_num_accepted_tokens_per_pos", what, places, "position")
        yield metric(Counter, "prompt_tokens", "Tokens of prompts.", self.prompt_tokens)
        yield metric(Counter, "generation_tokens", "Generated tokens.", self.generation_tokens)
        yield metric(Counter, "request_success", "Finished requests, by reason.", self.finished, "finished_reason")
        yield from (value.metric(self.model) for value in vars(self).values() if isinstance(value, Histogram))
