"""The picture of `minirt compare`: error and time of each layer, with one column for each step. Needs matplotlib."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from minirt.bench.report import Row, build
from minirt.errors import MinirtError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")


def require_matplotlib() -> None:
    """Raise MinirtError with the install command if matplotlib is missing. Called before any work for a picture."""
    if find_spec("matplotlib") is None:
        raise MinirtError("a picture needs matplotlib, which is not installed", hint="pip install matplotlib")


def draw(shared: Row, rows: list[Row], target: Path, note: str = "") -> None:
    """Write the picture of a report's context and rows. The suffix of `target` sets the format.

    The upper row shows the relative error of what each layer adds (for embedding, select and head: of the output), PyTorch's
    error in the same dtype, and the limit. The lower row shows the times of both implementations, unless nothing was timed.

    Args:
        note: see `save`.
    Raises:
        MinirtError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # pyplot would open windows and keep state

    steps = list(dict.fromkeys(row["step"] for row in rows))
    timed = rows[0]["eager_s"] is not None
    width = max(5.0, 0.16 * len(rows) / len(steps) + 2.5)
    figure = Figure(figsize=(width * len(steps), 7.5 if timed else 4.5), layout="constrained")
    axes = figure.subplots(1 + timed, len(steps), squeeze=False, sharex="col")
    for column, step in enumerate(steps):
        own = [row for row in rows if row["step"] == step]
        _errors(axes[0][column], own, step)
        if timed:
            _times(axes[1][column], own)
        axes[-1][column].set_xticks(range(len(own)), [row["layer"] for row in own], rotation=90, fontsize=6)
    warning = f"\n{shared['no_speed']}" if shared["no_speed"] else ""
    title = f"{shared['model']} {shared['dtype']} · {shared['device']} · minirt {build(shared)}{warning}"
    figure.suptitle(title, fontsize=9)
    save(figure, target, note)


def save(figure: "Figure", target: Path, note: str = "") -> None:
    """Write a figure with `note` in its metadata. The same figure always gives the same bytes.

    Raises:
        MinirtError: the file cannot be written.
    """
    import matplotlib

    svg = target.suffix == ".svg"
    try:
        with matplotlib.rc_context({"svg.hashsalt": "minirt"}):
            figure.savefig(target, dpi=150, metadata={"Description": note} | ({"Date": None} if svg else {}))
    except OSError as error:
        raise MinirtError(f"cannot write the picture: {error.strerror}", where=target) from error


def _errors(axes: "Axes", rows: list[Row], step: str) -> None:
    where = range(len(rows))
    for name, side, style in (("limit", "limit", "k_"), ("eager", "torch", "C0o"), (_names(rows), "error", "C1x")):
        values = [row["out" if row["added"]["torch"]["relative"] is None else "added"][side]["relative"] for row in rows]
        axes.plot(where, [value or float("nan") for value in values], style, label=name, markersize=5)  # a log axis has no 0
    axes.set_yscale("log")
    axes.set_title(step, fontsize=9)
    axes.set_ylabel("relative error of what the layer adds")
    _legend(axes)


def _times(axes: "Axes", rows: list[Row]) -> None:
    for shift, name, label in ((-0.2, "eager_s", "eager"), (0.2, "candidate_s", _names(rows))):
        axes.bar([i + shift for i in range(len(rows))], [row[name] * 1e6 for row in rows], 0.4, label=label)
    if rows[0]["limit_s"] is not None:
        axes.plot(range(len(rows)), [row["limit_s"] * 1e6 for row in rows], "k_", label="the hardware's limit")
    axes.set_yscale("log")
    axes.set_ylabel("µs")
    _legend(axes)


def _legend(axes: "Axes") -> None:
    """Place the legend in one row above the data of a logarithmic axis."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.12)
    axes.legend(fontsize=7, ncols=3, loc="upper center")


def _names(rows: list[Row]) -> str:
    return ", ".join(dict.fromkeys(row["implementation"] for row in rows))
