"""The pictures of `minirt bench kernels`: a roofline plot, and each kernel's share of the limit by shape. Needs matplotlib."""

from pathlib import Path
from typing import TYPE_CHECKING

from minirt.bench.compare.picture import save
from minirt.bench.report import Row, build

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMS = {"eager": "C0", "compiled": "C2", "library": "C3", "library_fast": "C4", "triton": "C1"}
_MARKERS = "osD^vP*X<>hd"


def draw(shared: Row, rows: list[Row], folder: Path) -> None:
    """Write roofline.svg (only for a GPU) and sweep.svg from a report's context and rows. Does nothing without timed rows.

    Raises:
        MinirtError: a file cannot be written.
    """
    timed = [row for row in rows if row["seconds"]]
    if not timed:
        return
    if shared["backend"] == "CUDA":
        _roofline(shared, timed, folder / "roofline.svg")
    _sweeps(shared, timed, folder / "sweep.svg")


def _title(shared: Row) -> str:
    note = f"\n{shared['no_speed']}" if shared["no_speed"] else ""
    return f"{shared['device']} · minirt {build(shared)}{note}"


def _roofline(shared: Row, rows: list[Row], target: Path) -> None:
    from matplotlib.figure import Figure  # pyplot would open windows and keep state

    rows = [row for row in rows if row["flops"]]
    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    axes = figure.subplots()
    intensity = [row["flops"] / row["bytes"] for row in rows]
    reach = [min(intensity) / 2, max(intensity) * 2]
    bandwidth = shared["read_ceiling"]["bytes_per_s"]
    for product in shared["matmul_ceilings"]:
        roof = product["flops_per_s"]
        knee = roof / bandwidth
        x = sorted({reach[0], min(max(knee, reach[0]), reach[1]), reach[1]})
        axes.plot(x, [min(roof, bandwidth * i) / 1e12 for i in x], "k-", linewidth=1)
        axes.annotate(f"{roof / 1e12:,.0f} TFLOP/s", (reach[1], roof / 1e12), ha="right", va="bottom", fontsize=7)
    names = list(dict.fromkeys(row["kernel"] for row in rows))
    for i, name in enumerate(names):
        own = [row for row in rows if row["kernel"] == name]
        axes.plot(
            [row["flops"] / row["bytes"] for row in own], [row["flops_per_s"] / 1e12 for row in own],
            _MARKERS[i // 10 % len(_MARKERS)], color=f"C{i % 10}", label=name, markersize=5,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s of the Triton kernels")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5), ncols=1 + len(names) // 30)
    figure.suptitle(f"{_title(shared)} · reads {bandwidth / 1e12:.2f} TB/s", fontsize=9)
    save(figure, target)


def _sweeps(shared: Row, rows: list[Row], target: Path) -> None:
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["kernel"] for row in rows))
    columns = min(5, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(3.0 * columns, 2.6 * lines + 0.6), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    for place, name in zip(axes.flat, names, strict=False):
        _sweep(place, [row for row in rows if row["kernel"] == name])
        place.set_title(name, fontsize=8)
    for place in axes.flat[len(names) :]:
        place.set_visible(False)
    measure = "share of the limit" if shared["backend"] == "CUDA" else "ms"
    figure.suptitle(f"{_title(shared)} · {measure} by tokens (@ context)", fontsize=9)
    save(figure, target)


def _sweep(axes: "Axes", rows: list[Row]) -> None:
    """Plot every implementation of one kernel: its share of the limit on a GPU, its time on a CPU."""
    limited = rows[0]["limit_s"] is not None
    several = len({row["model"] for row in rows}) > 1
    labels = []
    for row in rows:
        context = "" if row["context"] is None else f" @ {row['context']}"
        labels.append(f"{row['tokens']}{context}" + (f" {row['model']}" if several else ""))
    for form, color in _FORMS.items():
        where = [i for i, row in enumerate(rows) if form in row["seconds"]]
        if where:
            times = [rows[i]["seconds"][form]["median"] for i in where]
            values = [rows[i]["limit_s"] / t if limited else t * 1e3 for i, t in zip(where, times, strict=True)]
            axes.plot(where, values, color=color, marker=".", label=form, linewidth=1)
    axes.set_xticks(range(len(rows)), labels, rotation=60, fontsize=6, ha="right")
    axes.tick_params(axis="y", labelsize=6)
    if limited:
        axes.set_ylim(0, 1.1)
        axes.axhline(1.0, color="k", linewidth=0.5)
    else:
        axes.set_yscale("log")
    axes.legend(fontsize=5)
