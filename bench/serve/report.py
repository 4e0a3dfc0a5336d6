"""The report of `minirt bench serve`: the table of `vllm bench serve` for each rate, or one line for each rate."""

import platform
from dataclasses import dataclass
from typing import Any

import minirt
from minirt.bench.report import Column, Report, Row, as_text, build, commit, date, table
from minirt.threads import usable_cpus

FORMATS = ("text", "md", "csv", "json", "jsonl")
_WIDTH = 50
_TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}


@dataclass(frozen=True)
class ServeReport(Report):
    """Results of one run or of a sweep: the context that they share, and for each rate the result of `metrics.result`."""

    def render(self, form: str) -> str:
        return self._text() if form == "text" else super().render(form)

    def _text(self) -> str:
        blocks = [_block(row) for row in self.results]
        summary = as_text("\n".join(table(_COLUMNS, self.results, left=1))) if len(blocks) > 1 else ""
        return "".join(f"{line}\n" for block in blocks for line in block) + summary

    def _markdown(self) -> str:
        shared = self.context
        version = f" ({shared['server_version']})" if shared["server_version"] else ""
        sizes = f"{shared['num_prompts']} requests of {shared['input_len_range']} + {shared['output_len_range']} tokens"
        facts = [f"{shared['model_id']} at {shared['base_url']}{version}", sizes, f"clients on {shared['client_cpu']}"]
        lines = [" · ".join([*facts, f"minirt {build(shared)}", shared["date"]])]
        return "\n".join([*lines, "", *table(_COLUMNS, self.results, left=1)]) + "\n"


def context(**own: Any) -> Row:
    """Return what all results of a command share: `own`, and the client's machine and versions."""
    return {
        "schema": 1,
        "benchmark": "serve",
        "versions": {"python": platform.python_version(), "minirt": minirt.__version__},
        "commit": commit(),
        "date": date(),
        "client_cpu": f"{platform.machine()}, {usable_cpus()} CPUs",
        **own,
    }


def _block(row: Row) -> list[str]:
    """The table of `vllm bench serve`, with a part about the client."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]

    def add(label: str, value: Any, digits: int = 2) -> None:
        lines.append(f"{label:<40} {value if isinstance(value, int | str) else f'{value:.{digits}f}':<10}".rstrip())

    add("Successful requests:", row["completed"])
    add("Failed requests:", row["failed"])
    if row["max_concurrency"] is not None:
        add("Maximum request concurrency:", row["max_concurrency"])
    if row["request_rate"] != "inf":
        add("Request rate configured (RPS):", float(row["request_rate"]))
    add("Benchmark duration (s):", row["duration"])
    add("Total input tokens:", row["total_input_tokens"])
    add("Total generated tokens:", row["total_output_tokens"])
    add("Request throughput (req/s):", row["request_throughput"])
    if row["request_goodput"] is not None:
        add("Request goodput (req/s):", row["request_goodput"])
    add("Output token throughput (tok/s):", row["output_throughput"])
    add("Peak output token throughput (tok/s):", row["max_output_tokens_per_s"])
    add("Peak concurrent requests:", float(row["max_concurrent_requests"]))
    add("Total token throughput (tok/s):", row["total_token_throughput"])
    for name, (short, title) in _TITLES.items():
        keys = [key for key in row if key.endswith(f"_{name}_ms") and not key.startswith("std_")]
        values = [(key.removesuffix(f"_{name}_ms"), row[key]) for key in keys if row[key] is not None]
        if values:
            lines.append(f"{title:-^{_WIDTH}}")
        for kind, value in values:
            add(f"{kind.capitalize()} {short} (ms):", value)
    own = row["client"]
    lines.append(f"{'Load Client':-^{_WIDTH}}")
    add("Processes:", own["processes"])
    add("CPU share, busiest process (%):", own["cpu_share"] * 100)
    add("CPU share, busiest second (%):", own["cpu_share_busiest_second"] * 100)
    add("CPU headroom (%):", own["headroom"] * 100)
    add("CPU time per event (µs):", own["us_per_event"])
    add("P99 event loop lag (ms):", own["p99_loop_lag_ms"])
    if own["p99_send_delay_ms"] is not None:
        add("P99 send delay (ms):", own["p99_send_delay_ms"])
    return [*lines, "=" * _WIDTH]


def shown_rate(row: Row) -> str:
    """The requested rate of a result: 2.5, 8, inf."""
    return row["request_rate"] if isinstance(row["request_rate"], str) else f"{row['request_rate']:g}"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _ends(name: str) -> Column:
    """The column with median and highest percentile of a metric."""

    def cell(row: Row) -> str:
        last = [key for key in row if key.startswith("p") and key.endswith(f"_{name}_ms")][-1:]
        return " / ".join(_number(row[key]) for key in (f"median_{name}_ms", *last))

    return f"{_TITLES[name][0]} ms", cell


_COLUMNS: list[Column] = [
    ("rate", lambda r: shown_rate(r) + (f", {r['max_concurrency']} at once" if r["max_concurrency"] else "")),
    ("requests/s", lambda r: _number(r["request_throughput"])),
    ("goodput", lambda r: _number(r["request_goodput"])),
    ("output t/s", lambda r: _number(r["output_throughput"], 1)),
    ("total t/s", lambda r: _number(r["total_token_throughput"], 1)),
    _ends("ttft"),
    _ends("tpot"),
    _ends("itl"),
    _ends("e2el"),
    ("failed", lambda r: str(r["failed"])),
    ("client headroom", lambda r: f"{r['client']['headroom']:.0%}"),
]
