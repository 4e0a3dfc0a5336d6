"""The pictures of README.md and docs/, drawn from stored results. They need matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from minirt.bench import picture
from minirt.bench.compare.report import draw as draw_layers
from minirt.bench.picture import Panel, Series
from minirt.bench.tools.results import BESIDE_VLLM, FORMATS, OFFLINE, Point, Records, Result, format_of, mark, points_of, run_of

_MOST_KERNELS = 9  # of a picture; others are summed
_RATIO_TITLE = "×: how many times as fast minirt is"
_STEP_TITLE = "{}: decode step, ms (lower is better)"
_RATE_TITLE = "offline: output tokens/s (higher is better)"


def engines(records: Records, target: Path, note: str) -> None:
    """Draw decode steps and offline throughput of minirt and vLLM on cards of one type, where vLLM ran as it does by default.

    If vLLM was measured twice, the picture shows the faster time.
    """
    record = records[BESIDE_VLLM]
    peer = f"vLLM {run_of(record, 'vLLM', 'bf16').build}"

    def bars(title: str, points: Mapping[str, Point], scale: float, rate: bool = False) -> Panel:
        points = {label: point for label, point in points.items() if point.ours and point.theirs and not point.in_process}
        ours, theirs = ([getattr(point, side)[0] * scale for point in points.values()] for side in ("ours", "theirs"))
        return _bars(title, list(points), ours, theirs, peer, rate)

    panels = []
    for form in FORMATS:
        steps = {_step(*key[1:]): point for key, point in points_of(records, form).items() if key[0] == "step"}
        panels.append(bars(_STEP_TITLE.format(form), steps, 1e3))
    panels.append(bars(_RATE_TITLE, {form: points_of(records, form)[OFFLINE] for form in FORMATS}, 1, rate=True))
    title = f"{record['model']} shapes · {record['device']}, a card for each · {record['date']} · {_RATIO_TITLE}"
    title += "\nrandom weights; at batch 1 of fp8, minirt computes with 16-bit activations"
    title += f" · {record['correctness']['why']}" * bool(mark(record))
    picture.draw([panels], title, target, (10.0, 3.2), note)


def _step(batch: int, context: int) -> str:
    return f"batch {batch}" + (f"\ncontext {context:,}" if context != 128 else "")


def _bars(title: str, labels: Sequence[str], ours: Sequence[float], theirs: Sequence[float], peer: str, rate: bool) -> Panel:
    """Two bars for each label, and above them how many times as fast the first one is. `rate`: they are rates, not times."""
    series = [Series("minirt", ours, color="C1", width=0.4, shift=-0.2), Series(peer, theirs, color="C7", width=0.4, shift=0.2)]
    notes = [(i, max(a, b), f"{a / b if rate else b / a:.2f} ×") for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    return Panel(series, title, ticks=labels, notes=notes)


def layers(records: Records, target: Path, note: str) -> None:
    """Draw the error and the time of each layer of the embedded model."""
    (record,) = records.values()
    draw_layers(record, record["results"], target, note)


def mixture(records: Records, target: Path, note: str) -> None:
    """Draw each kernel's share of a mixture's decode steps, by batch size."""
    traces = {format_of(record): [_shares(trace) for trace in record["traces"]] for record in records.values()}
    most: dict[str, float] = {}
    for kernel, share in (pair for rows in traces.values() for shares in rows for pair in shares.items()):
        most[kernel] = max(share, most.get(kernel, 0.0))
    shown = sorted(most, key=lambda kernel: -most[kernel])[:_MOST_KERNELS]
    panels: list[Panel] = []
    for record in records.values():
        rows, series = traces[format_of(record)], list[Series]()
        bases = [0.0] * len(rows)
        for i, kernel in enumerate([*shown, "others"]):
            shares = [row.get(kernel, 0.0) for row in rows]
            if kernel == "others":
                shares = [sum(share for name, share in row.items() if name not in shown) for row in rows]
            label = kernel.lstrip("_")  # legends leave out labels that begin with an underscore
            color = "lightgray" if kernel == "others" else f"C{i}"
            series.insert(0, Series(label, shares, color=color, width=0.7, bases=bases))
            bases = [base + share for base, share in zip(bases, shares, strict=True)]
        ticks = [f"batch {trace['batch']}\n{trace['step_ms']:.2f} ms" for trace in record["traces"]]
        legend = "right" if len(panels) + 1 == len(records) else ""
        about = "share of the kernels' summed time, %"
        panels.append(Panel(series, format_of(record), ylabel=about, ticks=ticks, legend=legend))
    first = next(iter(records.values()))
    commits = ", ".join(dict.fromkeys(record["commit"] for record in records.values()))
    title = f"{first['model']} shapes, decode step by kernel · {first['device']} · minirt {commits}"
    picture.draw([panels], title, target, (10.0, 4.5), note)


def _shares(trace: Result) -> dict[str, float]:
    """Percent of the kernels' summed time, by kernel."""
    times = trace["us_a_step_by_kernel"]
    return {kernel: 100 * us / sum(times.values()) for kernel, us in times.items()}
