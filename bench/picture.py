"""Pictures of results: panels of series as data, and `draw`, the only code that knows matplotlib."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from minirt.errors import MinirtError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")


@dataclass(frozen=True)
class Series:
    """Values beside each other: points, a line, or bars.

    Attributes:
        label: in the legend; "": not there.
        values: None where there is none.
        x: where they stand; None: 0, 1, 2 and so on.
        style: of points and lines, as matplotlib writes it: marker and line, with the color if there is no `color`.
        width: of bars; 0: points or a line.
        shift: of bars along x.
        bases: where bars begin; None: at 0.
    """

    label: str
    values: Sequence[float | None]
    x: Sequence[float] | None = None
    style: str = "."
    color: str | None = None
    width: float = 0
    shift: float = 0
    bases: Sequence[float] | None = None


@dataclass(frozen=True)
class Panel:
    """One diagram.

    Attributes:
        ticks: labels of x = 0, 1, 2 and so on; empty: numbers. `rotation`: their angle.
        log: the axes with logarithmic scales, of "xy". Other y axes begin at 0.
        notes: texts at points, as (x, y, text).
        level: a horizontal line.
        legend: "top": in rows above the values; "right": outside; "best": where there is room; "": none.
    """

    series: Sequence[Series]
    title: str = ""
    xlabel: str = ""
    ylabel: str = ""
    ticks: Sequence[str] = ()
    rotation: float = 0
    log: str = ""
    notes: Sequence[tuple[float, float, str]] = ()
    level: float | None = None
    legend: str = "top"


def require_matplotlib() -> None:
    """Raise MinirtError with the install command if matplotlib is missing. Called before any work for a picture."""
    if find_spec("matplotlib") is None:
        raise MinirtError("a picture needs matplotlib, which is not installed", hint="pip install matplotlib")


def draw(rows: Sequence[Sequence[Panel]], title: str, target: Path, size: tuple[float, float], note: str = "") -> None:
    """Write rows of panels. The suffix of `target` sets the format, `size` the inches.

    Args:
        note: see `save`.
    Raises:
        MinirtError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # pyplot would open windows and keep state

    figure = Figure(figsize=size, layout="constrained")
    for places, panels in zip(figure.subplots(len(rows), max(map(len, rows)), squeeze=False), rows, strict=True):
        for axes, panel in zip_longest(places, panels):
            if panel is None:
                axes.set_visible(False)
            else:
                _draw_panel(axes, panel)
    figure.suptitle(title, fontsize=9)
    save(figure, target, note)


def save(figure: "Figure", target: Path, note: str = "") -> None:
    """Write a figure with `note` in its metadata. The same figure always gives the same bytes.

    Raises:
        MinirtError: the file cannot be written.
    """
    import matplotlib

    dates = {"Date": None} if target.suffix == ".svg" else {}
    try:
        with matplotlib.rc_context({"svg.hashsalt": "minirt"}):
            figure.savefig(target, dpi=150, metadata={"Description": note} | dates)
    except OSError as error:
        raise MinirtError(f"cannot write the picture: {error.strerror}", where=target) from error


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    for series in panel.series:
        x = range(len(series.values)) if series.x is None else series.x
        values = [math.nan if value is None or ("y" in panel.log and value == 0) else value for value in series.values]
        label = series.label or None
        if series.width:
            places = [at + series.shift for at in x]
            axes.bar(places, values, series.width, bottom=series.bases or 0, label=label, color=series.color)
        else:
            axes.plot(x, values, (series.color or "") + series.style, label=label, markersize=5, linewidth=1)
    for at, value, text in panel.notes:
        axes.annotate(text, (at, value), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    if panel.level is not None:
        axes.axhline(panel.level, color="k", linewidth=0.5)
    for axis, scale in (("x", axes.set_xscale), ("y", axes.set_yscale)):
        if axis in panel.log:
            scale("log")
    low, high = axes.get_ylim()
    top = 0.15 if panel.legend == "top" else 0.0
    axes.set_ylim((low, high * (high / low) ** top) if "y" in panel.log else (0, high * (1 + 2 * top)))
    if panel.ticks:
        side = "right" if 0 < panel.rotation < 90 else "center"
        axes.set_xticks(range(len(panel.ticks)), panel.ticks, rotation=panel.rotation, fontsize=7, ha=side)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_title(panel.title, fontsize=9)
    axes.set_xlabel(panel.xlabel)
    axes.set_ylabel(panel.ylabel)
    if panel.legend == "right":
        columns = 1 + len(panel.series) // 30
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), ncols=columns)
    elif panel.legend:
        axes.legend(fontsize=6, loc="upper left" if top else "best", ncols=3 if top else 1)
