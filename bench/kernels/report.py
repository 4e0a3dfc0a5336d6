"""The report of `minirt bench kernels`: a table row for each kernel and shape, then broken bounds and regressions; pictures."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from minirt.bench import picture
from minirt.bench.compare.report import NO_SPEED
from minirt.bench.picture import Panel, Series
from minirt.bench.report import LIMIT, Column, Row, build, heading, table

FORMS = {
    "eager": "eager µs", "compiled": "torch.compile µs", "library": "PyTorch's kernel µs", "library_fast": "fast accumulation µs",
}  # fmt: skip


def markdown(shared: Row, rows: list[Row]) -> str:
    """The report of `minirt bench kernels`. `shared` comes from the function `context` of this module."""
    lines = heading(shared)
    if shared["event_s"] is not None:
        lines += [f"Every time includes {shared['event_s'] * 1e6:.1f} µs for the measurement itself.", ""]
    columns = _columns(rows, timed=not shared["no_speed"])
    lines += table(columns, rows, left=4)
    lines += ["", LIMIT] if any(title == "of the limit" for title, _ in columns) else []
    lacks = {f"{row['kernel']}: {what}" for row in rows for name, what in row["lacks"].items() if name in row["seconds"]}
    if lacks:
        lines += ["", r"\* PyTorch's kernel does not compute everything; it lacks " + "; ".join(sorted(lacks)) + "."]
    left_out = {f"{_place(row)}: {name}: {why}" for row in rows for name, why in row["left_out"].items()}
    lines += ["", *(f"- Not measured: {text}" for text in sorted(left_out))] if left_out else []
    return "\n".join([*lines, "", *_verdict(shared)]) + "\n"


def _place(row: Row) -> str:
    context = "" if row["context"] is None else f" @ {row['context']}"
    return f"{row['kernel']} {row['model']} {row['tokens']}{context}"


def faults(rows: list[Row]) -> list[str]:
    """Return the broken bounds, each with its kernel and shape."""
    return [f"{_place(row)}: {row['fault']}" for row in rows if row["fault"]]


def context(shared: Row, rows: list[Row], slower: list[str], products: list[Row], event_s: float | None) -> Row:
    """Return the context of the report.

    Args:
        shared: from `report.machine`.
        slower: the regressions, from `benchmark.compare`.
        products: measured rates of matrix products.
        event_s: seconds that measuring adds to every time; None on a CPU.
    """
    return shared | {
        "no_speed": None if shared["backend"] == "CUDA" else NO_SPEED, "matmul_ceilings": products, "event_s": event_s,
        "correctness": {"checked": True, "against": "the eager forms in fp64 on the same inputs"}, "faults": faults(rows),
        "slower": slower,
    }


def _verdict(shared: Row) -> list[str]:
    lines = []
    if shared["faults"]:
        lines += [f"**{len(shared['faults'])} checks failed; nothing was timed there:**", ""]
        lines += [f"- {text}" for text in shared["faults"]]
    else:
        lines += ["Every kernel is within its bound."]
    if shared["slower"]:
        lines += ["", "**Slower than the baseline:**", "", *(f"- {text}" for text in shared["slower"])]
    return lines


def _columns(rows: list[Row], timed: bool) -> list[Column]:
    """Return the columns of the table, without those that are empty in every row; without times unless `timed`."""
    forms = {name for row in rows for name in row["seconds"]} if timed else set()
    columns: list[Column] = [
        ("kernel", lambda r: r["kernel"]), ("model", lambda r: f"{r['model']} {r['dtype']}"),
        ("shape", lambda r: r["shape"] or ""),
        ("tokens", lambda r: f"{r['tokens']:,}" + ("" if r["context"] is None else f" @ {r['context']:,}")),
        ("error / eager's", _errors),
    ]  # fmt: skip
    columns += [(title, partial(_micros, name)) for name, title in FORMS.items() if name in forms]
    columns += [("Triton µs", partial(_micros, "triton"))] if timed else []
    if any(row["limit_s"] for row in rows):
        columns += [
            ("speedup", _speedup), ("TB/s · TFLOP/s", _rate),
            ("of the limit", lambda r: _text(r["share_of_limit"], lambda v: f"{v:.0%} ({r['bound']})")),
            ("lost µs", lambda r: _text(r["lost_s"], lambda v: f"{v * 1e6:,.1f}")),
        ]  # fmt: skip
    if any(row.get("baseline") for row in rows):
        columns.append(("since the baseline", _since))
    return columns


def _text(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)


def _errors(row: Row) -> str:
    if row["fault"]:
        return "**broken**"
    return " / ".join(f"{row['errors'][name]['relative']:.1e}" for name in ("triton", "eager")) if row["errors"] else "-"


def _micros(name: str, row: Row) -> str:
    times = row["seconds"].get(name)
    if times is None:
        return "-"
    spread = f" ± {times['stddev'] * 1e6:,.1f}" if name == "triton" and times["stddev"] is not None else ""
    return f"{times['median'] * 1e6:,.1f}{spread}" + ("\\*" if name in row["lacks"] else "")


def _speedup(row: Row) -> str:
    """Format the speedup over the fastest other implementation of the whole operation, with that implementation's name."""
    others = {name: times["median"] for name, times in row["seconds"].items() if name != "triton" and name not in row["lacks"]}
    if not others:
        return "-"
    name = min(others, key=lambda name: others[name])
    return f"{others[name] / row['seconds']['triton']['median']:.2f} × {FORMS[name].removesuffix(' µs')}"


def _rate(row: Row) -> str:
    if row["bytes_per_s"] is None:
        return "-"
    return f"{row['bytes_per_s'] / 1e12:.2f} · {row['flops_per_s'] / 1e12:,.1f}"


def _since(row: Row) -> str:
    baseline = row.get("baseline")
    if not baseline:
        return "-"
    mark = "**" * baseline["regressed"]
    return f"{mark}{baseline['ratio'] - 1:+.1%}{mark}"


_COLORS = {"eager": "C0", "compiled": "C2", "library": "C3", "library_fast": "C4", "triton": "C1"}
_MARKERS = "osD^vP*X<>hd"


def draw(shared: Row, rows: list[Row], folder: Path) -> None:
    """Write roofline.svg (only for a GPU) and sweep.svg from a report's context and rows. Does nothing without timed rows.

    Raises:
        MinirtError: a file cannot be written.
    """
    timed = [row for row in rows if row["seconds"]]
    if not timed:
        return
    warning = f"\n{shared['no_speed']}" if shared["no_speed"] else ""
    title, cuda = f"{shared['device']} · minirt {build(shared)}{warning}", shared["backend"] == "CUDA"
    kernels: dict[str, list[Row]] = {}
    for row in timed:
        kernels.setdefault(row["kernel"], []).append(row)
    if cuda:
        bandwidth = shared["read_ceiling"]["bytes_per_s"]
        panel = _roofline(shared, kernels, bandwidth)
        about = f"{title} · reads {bandwidth / 1e12:.2f} TB/s"
        picture.draw([[panel]], about, folder / "roofline.svg", (9.0, 6.0))
    panels = [_sweep(*kernel) for kernel in kernels.items()]
    columns = min(5, len(panels))
    lines = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    about = f"{title} · {'share of the limit' if cuda else 'ms'} by tokens (@ context)"
    picture.draw(lines, about, folder / "sweep.svg", (3.0 * columns, 2.6 * len(lines) + 0.6))


def _roofline(shared: Row, kernels: dict[str, list[Row]], bandwidth: float) -> Panel:
    kernels = {name: [row for row in rows if row["flops"]] for name, rows in kernels.items()}
    reach = [row["flops"] / row["bytes"] for rows in kernels.values() for row in rows]
    low, high = min(reach) / 2, max(reach) * 2
    series, notes = [], []
    for product in shared["matmul_ceilings"]:
        roof = product["flops_per_s"]
        x = sorted({low, min(max(roof / bandwidth, low), high), high})
        series.append(Series("", [min(roof, bandwidth * at) / 1e12 for at in x], x, "k-"))
        notes.append((high, roof / 1e12, f"{roof / 1e12:,.0f} TFLOP/s"))
    for i, (name, rows) in enumerate(kernels.items()):
        rates, x = [row["flops_per_s"] / 1e12 for row in rows], [row["flops"] / row["bytes"] for row in rows]
        series.append(Series(name, rates, x, _MARKERS[i // 10 % len(_MARKERS)], f"C{i % 10}"))
    units = "operations per byte", "TFLOP/s of the Triton kernels"
    return Panel(series, "", *units, log="xy", notes=notes, legend="right")


def _sweep(kernel: str, rows: list[Row]) -> Panel:
    """Every implementation of one kernel: its share of the limit on a GPU, its time on a CPU."""
    limited, several = rows[0]["limit_s"] is not None, len({row["model"] for row in rows}) > 1
    labels = [
        f"{row['tokens']}" + ("" if row["context"] is None else f" @ {row['context']}") + (f" {row['model']}" if several else "")
        for row in rows
    ]
    series = []
    for form, color in _COLORS.items():
        times = [row["seconds"][form]["median"] if form in row["seconds"] else None for row in rows]
        values = [s and (row["limit_s"] / s if limited else s * 1e3) for s, row in zip(times, rows, strict=True)]
        series += [Series(form, values, style=".-", color=color)] if any(times) else []
    return Panel(series, kernel, ticks=labels, rotation=60, log="" if limited else "y", level=1.0 if limited else None)
