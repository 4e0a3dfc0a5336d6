"""The pictures of README.md and docs/, drawn from stored results. They need matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from minirt.bench import picture
from minirt.bench.compare.report import draw as draw_layers
from minirt.bench.picture import Panel, Series
from minirt.bench.tools.results import (
    BESIDE_VLLM,
    FORMATS,
    IN_PROCESS,
    Records,
    Result,
    format_of,
    mark,
    points_of,
    run_of,
)

_MOST_KERNELS = 9  # of a picture; others are summed
_RATIO_TITLE = "×: how many times as fast minirt is"
_STEP_TITLE = "{}: decode step at a context of 128 tokens, ms (lower is better)"
_PROMPT_TITLE = "{}: time to the first token, µs per prompt token (lower is better)"


def engines(records: Records, target: Path, note: str) -> None:
    """Draw decode steps and times to the first token of minirt and vLLM on cards of one type.

    If vLLM was measured twice, the picture shows the faster time.
    """
    record, older = records[BESIDE_VLLM], records[IN_PROCESS]
    peer = f"vLLM {run_of(record, 'vLLM', 'bf16').build}"

    def panel(kind: str, title: str, form: str) -> Panel:
        points = {key: point for key, point in points_of(records, form).items() if key[0] == kind and point.ours and point.theirs}
        names = {key: _step(*key[1:]) if kind == "step" else f"{key[1]:,} tokens" for key in points}
        scales = [1e3 if kind == "step" else 1e6 / key[1] for key in points]
        ours = [point.ours[0] * scale for point, scale in zip(points.values(), scales, strict=True)]
        theirs = [point.theirs[0] * scale for point, scale in zip(points.values(), scales, strict=True)]
        labels = [names[key] + "‡" * point.in_process for key, point in points.items()]
        return _bars(title.format(form), labels, ours, theirs, peer)

    rows = [[panel(*kind, form) for form in FORMATS] for kind in (("step", _STEP_TITLE), ("prompt", _PROMPT_TITLE))]
    title = f"{record['model']} shapes, random weights · {record['device']}, a card for each · {record['date']} · {_RATIO_TITLE}"
    title += f"\n‡: vLLM in the caller's process, {older['date']}"
    title += f" · {record['correctness']['why']}" * bool(mark(record))
    picture.draw(rows, title, target, (10.0, 5.0), note)


def _step(batch: int, context: int) -> str:
    return f"batch {batch}" + (f"\ncontext {context:,}" if context != 128 else "")


def _bars(title: str, labels: Sequence[str], ours: Sequence[float], theirs: Sequence[float], peer: str) -> Panel:
    """Two bars for each label, and above them how many times as fast the first one is."""
    series = [
        Series("minirt", ours, color="C1", width=0.4, shift=-0.2), Series(peer, theirs, color="C7", width=0.4, shift=0.2)
    ]  # fmt: skip
    notes = [(i, max(a, b), f"{b / a:.2f} ×") for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
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
