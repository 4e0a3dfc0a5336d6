"""The picture of a sweep of `minirt bench serve`: latencies and throughput by request rate. Needs matplotlib."""

from pathlib import Path

from minirt.bench.compare.picture import save
from minirt.bench.report import Row, build
from minirt.bench.serve.report import shown_rate

_PANELS = (("ttft", "time to first token"), ("tpot", "time per output token"), ("e2el", "end-to-end latency"))


def draw(shared: Row, rows: list[Row], target: Path) -> None:
    """Write the picture of a report's context and rows. The suffix of `target` sets the format. Does nothing if no request was
    successful.

    The x axis is the rate that was served, since the requested rate may be infinite. Points of the throughput are labelled with
    the requested rate.

    Raises:
        MinirtError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # pyplot would open windows and keep state
    from matplotlib.ticker import LogFormatter

    rows = sorted((row for row in rows if row["completed"]), key=lambda row: row["request_throughput"])
    if not rows:
        return
    figure = Figure(figsize=(10.0, 7.0), layout="constrained")
    panels = figure.subplots(2, 2).flat
    rates = [row["request_throughput"] for row in rows]
    for axes, (name, title) in zip(panels, _PANELS, strict=False):
        keys = [key for key in rows[0] if key.endswith(f"_{name}_ms") and key[0] in "pm" and "mean" not in key]
        for key in keys:
            values = [float("nan") if row[key] is None else row[key] for row in rows]
            axes.plot(rates, values, marker=".", label=key.removesuffix(f"_{name}_ms"))
        axes.set(ylabel="ms", title=title)
        if name == "tpot":
            axes.set_ylim(0, None)
        else:  # waiting times grow by orders of magnitude where the server is saturated
            axes.set_yscale("log")
            for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                formatted(LogFormatter(minor_thresholds=(2.0, 0.5)))  # plain numbers instead of powers of 10
    throughput = panels[3]
    throughput.plot(rates, [row["output_throughput"] for row in rows], marker=".", color="k", label="output tokens/s")
    throughput.set(ylabel="tokens/s", title="throughput", ylim=(0, None))
    if any(row["request_goodput"] is not None for row in rows):
        limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in (rows[0]["goodput_limits_ms"] or {}).items())
        right = throughput.twinx()
        right.plot(rates, [row["request_goodput"] for row in rows], marker=".", color="C3", label=f"goodput ({limits})")
        right.set(ylabel="requests/s within the limits", ylim=(0, None))
        right.legend(fontsize=7, loc="lower right")
    for row in rows:
        place = (row["request_throughput"], row["output_throughput"])
        throughput.annotate(shown_rate(row), place, fontsize=6, xytext=(0, 4), textcoords="offset points")
    for axes in panels:
        axes.set_xlabel("requests/s served")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="best")
    figure.suptitle(f"{shared['model_id']} · {shared['base_url']} · minirt {build(shared)}", fontsize=9)
    save(figure, target)
