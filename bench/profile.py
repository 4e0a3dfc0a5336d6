"""The report of `minirt profile`, from what `Generator.profile` has measured."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from minirt.bench import picture
from minirt.bench.picture import Panel, Series
from minirt.bench.report import Row, heading, markdown_table
from minirt.profiling.profile import Part, Profile, by_kind, together


def rows_of(result: Profile, bytes_per_s: float, impl: str | None = None) -> list[Row]:
    """A row for each part. `bytes_per_s`: of reading memory, for `of_limit`, the share of the time that the reads would take.
    `impl`: what the step is beside the first one, which has None."""
    return [
        {
            "step": result.step, "impl": impl, "step_s": result.step_s, "traced_s": result.traced_s,
            "name": part.name, "kind": part.kind,
            "seconds": part.seconds, "share": part.seconds / result.traced_s, "launches": part.launches,
            "read_bytes": part.read_bytes, "kernels": part.kernels,
            "of_limit": part.read_bytes / bytes_per_s / part.seconds if part.read_bytes and part.seconds else None,
        }
        for part in result.parts
    ]  # fmt: skip


def draw(shared: Row, rows: list[Row], target: Path) -> None:
    """Write a picture of a report's context and rows: for each step, each part's time by kernel, and the limit of its reads.

    Raises:
        MinirtError: the file cannot be written.
    """
    steps = dict.fromkeys(row["step"] for row in rows)
    panels = [[_panel(step, [row for row in rows if row["step"] == step and row["impl"] is None])] for step in steps]
    width = max(6.0, 0.16 * len(rows) / len(panels) + 3)
    title = f"{shared['model']} · {shared['device']} · minirt {shared['versions']['minirt']}"
    picture.draw(panels, title, target, (width, 4.5 * len(panels)))


def _panel(step: str, rows: list[Row]) -> Panel:
    sums = defaultdict[str, float](float)
    for row in rows:
        for kernel, seconds in row["kernels"].items():
            sums[kernel] += seconds
    series, bases = list[Series](), [0.0] * len(rows)
    for kernel in [*sorted(sums, key=lambda name: -sums[name])[:8], None]:  # None: all others, or the time of a part on a CPU
        rest = "other" if sums else "time"
        values = [
            row["seconds"] * 1e6 - base if kernel is None else row["kernels"].get(kernel, 0.0) * 1e6
            for row, base in zip(rows, bases, strict=True)
        ]
        series.append(Series(rest if kernel is None else kernel[:40], values, width=0.8, bases=bases))
        bases = [base + value for base, value in zip(bases, values, strict=True)]
    limits = [None if row["of_limit"] is None else row["of_limit"] * row["seconds"] * 1e6 for row in rows]
    series += [Series("the limit of its reads", limits, style="k_")]
    return Panel(series, step, ylabel="µs", ticks=[row["name"] for row in rows], rotation=90, legend="right")


def markdown(shared: Row, rows: list[Row]) -> str:
    """The report: for each step a table by kind of layer, then by kernel."""
    lines = heading(shared)
    for step in dict.fromkeys(row["step"] for row in rows):
        of_step = [row for row in rows if row["step"] == step and row["impl"] is None]
        others = [row for row in rows if row["step"] == step and row["impl"] is not None]
        parts = [Part(*(row[name] for name in Part._fields)) for row in of_step]
        whole, measured = of_step[0]["traced_s"], of_step[0]["step_s"]
        lines += ["", f"**{step}**: {measured * 1e3:.3f} ms; together {whole * 1e3:.3f} ms", ""]
        cells = [
            [kind if count == 1 else f"{count} × {kind}", f"{part.seconds * 1e6:,.0f}", f"{part.seconds / whole:.1%}",
             f"{part.seconds / count * 1e6:,.1f}", f"{part.read_bytes / 1e6:,.1f}" if part.read_bytes else "-",
             _share(of_step, kind), str(part.launches) if part.launches else "-"]
            for kind, count, part in by_kind(parts)
        ]  # fmt: skip
        heads = ["part", "µs", "share", "µs each", "MB of weights", "of the limit", "launches"]
        lines += markdown_table(heads, cells, 1)
        lines += ["", *_beside(parts, others)] if others else []
        kernels = together("all", parts).kernels
        if kernels:
            top = sorted(kernels.items(), key=lambda item: -item[1])[:12]
            cells = [[f"`{kernel[:60]}`", f"{took * 1e6:,.0f}", f"{took / whole:.1%}"] for kernel, took in top]
            lines += ["", *markdown_table(["kernel", "µs", "share"], cells, 1)]
    return "\n".join(lines) + "\n"


def _beside(parts: Sequence[Part], others: Sequence[Row]) -> list[str]:
    """A table of the parts with another implementation."""
    impl, whole = others[0]["impl"], sum(part.seconds for part in parts)
    kinds = {kind: part for kind, _, part in by_kind(Part(*(row[name] for name in Part._fields)) for row in others)}
    pairs = [(kind, part.seconds, kinds[kind].seconds) for kind, _, part in by_kind(parts) if kind in kinds]
    pairs.append(("together", whole, others[0]["traced_s"]))
    cells = [[kind, f"{a * 1e6:,.0f}", f"{b * 1e6:,.0f}", f"{b / a:.2f} ×" if a else "-"] for kind, a, b in pairs]
    return markdown_table(["part", "µs", f"{impl}, µs", "as long"], cells, 1)


def _share(rows: Sequence[Row], kind: str) -> str:
    shares = [(row["of_limit"], row["seconds"]) for row in rows if row["kind"] == kind and row["of_limit"] is not None]
    total = sum(seconds for _, seconds in shares)
    return f"{sum(share * seconds for share, seconds in shares) / total:.0%}" if total else "-"
