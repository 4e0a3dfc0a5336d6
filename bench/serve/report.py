"""The report of `minirt bench serve`: the table of `vllm bench serve` for each rate, or one line for each rate; the picture."""

import platform
from pathlib import Path
from typing import Any

import minirt
from minirt.bench import picture
from minirt.bench.picture import Panel, Series
from minirt.bench.report import Column, Row, as_text, build, commit, date, number, table
from minirt.threads import usable_cpus

_WIDTH = 50
_TITLES = {
    "ttft": ("TTFT", "Time to First Token"), "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"), "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}


def text(shared: Row, rows: list[Row]) -> str:
    """The table of `vllm bench serve` for each rate, and of a sweep one line for each rate."""
    summary = as_text("\n".join(table(_COLUMNS, rows, left=1))) if len(rows) > 1 else ""
    return "".join(f"{line}\n" for row in rows for line in _block(row)) + summary


def markdown(shared: Row, rows: list[Row]) -> str:
    """What the server and the load were, and one line for each rate. `rows`: results of `metrics.result`."""
    version = f" ({shared['server_version']})" if shared["server_version"] else ""
    sizes = f"{shared['num_prompts']} requests of {shared['input_len_range']} + {shared['output_len_range']} tokens"
    facts = [f"{shared['model_id']} at {shared['base_url']}{version}", sizes, f"clients on {shared['client_cpu']}"]
    lines = [" · ".join([*facts, f"minirt {build(shared)}", shared["date"]])]
    return "\n".join([*lines, "", *table(_COLUMNS, rows, left=1)]) + "\n"


def context(**facts: Any) -> Row:
    """Return what all results of a command share: `facts`, and the client's machine and versions."""
    return {
        "schema": 1, "benchmark": "serve", "versions": {"python": platform.python_version(), "minirt": minirt.__version__},
        "commit": commit(), "date": date(), "client_cpu": f"{platform.machine()}, {usable_cpus()} CPUs", **facts,
    }


def _block(row: Row) -> list[str]:
    """The table of `vllm bench serve`, with a part about the client."""
    client, rate, places = row["client"], row["request_rate"], row["max_concurrent_requests"]
    parts = {
        f"{' Serving Benchmark Result ':=^{_WIDTH}}": {
            "Successful requests:": row["completed"], "Failed requests:": row["failed"],
            "Maximum request concurrency:": row["max_concurrency"],
            "Request rate configured (RPS):": None if rate == "inf" else float(rate),
            "Benchmark duration (s):": row["duration"], "Total input tokens:": row["total_input_tokens"],
            "Total generated tokens:": row["total_output_tokens"], "Request throughput (req/s):": row["request_throughput"],
            "Request goodput (req/s):": row["request_goodput"], "Output token throughput (tok/s):": row["output_throughput"],
            "Peak output token throughput (tok/s):": row["max_output_tokens_per_s"], "Peak concurrent requests:": float(places),
            "Total token throughput (tok/s):": row["total_token_throughput"],
        }
    }
    for name, (short, title) in _TITLES.items():
        keys = [key for key in row if key.endswith(f"_{name}_ms") and not key.startswith("std_")]
        parts[f"{title:-^{_WIDTH}}"] = {
            f"{key.removesuffix(f'_{name}_ms').capitalize()} {short} (ms):": row[key] for key in keys
        }
    parts[f"{'Load Client':-^{_WIDTH}}"] = {
        "Processes:": client["processes"], "CPU share, busiest process (%):": client["cpu_share"] * 100,
        "CPU share, busiest second (%):": client["cpu_share_busiest_second"] * 100,
        "CPU headroom (%):": client["headroom"] * 100, "CPU time per event (µs):": client["us_per_event"],
        "P99 event loop lag (ms):": client["p99_loop_lag_ms"], "P99 send delay (ms):": client["p99_send_delay_ms"],
    }
    lines = []
    for head, values in parts.items():
        known = {label: value for label, value in values.items() if value is not None}
        texts = (f"{value if isinstance(value, int) else f'{value:.2f}':<10}" for value in known.values())
        lines += [*[head] * bool(known), *(f"{label:<40} {text}".rstrip() for label, text in zip(known, texts, strict=True))]
    return [*lines, "=" * _WIDTH]


def shown_rate(row: Row) -> str:
    """The requested rate of a result: 2.5, 8, inf."""
    return row["request_rate"] if isinstance(row["request_rate"], str) else f"{row['request_rate']:g}"


def _ends(name: str) -> Column:
    """The column with median and highest percentile of a metric."""

    def cell(row: Row) -> str:
        last = [key for key in row if key.startswith("p") and key.endswith(f"_{name}_ms")][-1:]
        return " / ".join(number(row[key]) for key in (f"median_{name}_ms", *last))

    return f"{_TITLES[name][0]} ms", cell


_COLUMNS: list[Column] = [
    ("rate", lambda r: shown_rate(r) + (f", {r['max_concurrency']} at once" if r["max_concurrency"] else "")),
    ("requests/s", lambda r: number(r["request_throughput"])), ("goodput", lambda r: number(r["request_goodput"])),
    ("output t/s", lambda r: number(r["output_throughput"], digits=1)),
    ("total t/s", lambda r: number(r["total_token_throughput"], digits=1)), *map(_ends, ("ttft", "tpot", "itl", "e2el")),
    ("failed", lambda r: str(r["failed"])), ("client headroom", lambda r: f"{r['client']['headroom']:.0%}"),
]  # fmt: skip


def draw(shared: Row, rows: list[Row], target: Path) -> None:
    """Draw latencies and throughput by request rate. The suffix of `target` sets the format. Does nothing if no request was
    successful.

    The x axis is the rate that was served, since the requested rate may be infinite. Points of the throughput are labelled with
    the requested rate.

    Raises:
        MinirtError: the file cannot be written.
    """
    rows = sorted((row for row in rows if row["completed"]), key=lambda row: row["request_throughput"])
    if not rows:
        return
    rates, xlabel = [row["request_throughput"] for row in rows], "requests/s served"
    panels = []
    for name in ("ttft", "tpot", "e2el"):
        keys = [key for key in rows[0] if key.endswith(f"_{name}_ms") and key[0] in "pm" and "mean" not in key]
        lines = [Series(key.removesuffix(f"_{name}_ms"), [row[key] for row in rows], rates, ".-") for key in keys]
        log = "" if name == "tpot" else "y"  # waiting times grow by orders of magnitude where the server is saturated
        panels.append(Panel(lines, _TITLES[name][1].lower(), xlabel, "ms", log=log, legend="best"))
    line = Series("output tokens/s", [row["output_throughput"] for row in rows], rates, "k.-")
    notes = [(rate, row["output_throughput"], shown_rate(row)) for rate, row in zip(rates, rows, strict=True)]
    panels.append(Panel([line], "throughput", xlabel, "tokens/s", notes=notes, legend="best"))
    if any(row["request_goodput"] is not None for row in rows):
        limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in (rows[0]["goodput_limits_ms"] or {}).items())
        line = Series(f"goodput ({limits})", [row["request_goodput"] for row in rows], rates, "C3.-")
        panels.append(Panel([line], "goodput", xlabel, "requests/s within the limits", legend="best"))
    title = f"{shared['model_id']} · {shared['base_url']} · minirt {build(shared)}"
    picture.draw([panels[:2], panels[2:]], title, target, (5.0 * (len(panels) + 1 >> 1), 7.0))
