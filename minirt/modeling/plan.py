"""`Plan`: which implementation each layer runs, and why. `parse_impl` reads the `--impl` choices that decide it."""

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from minirt.errors import UnsupportedError, printable
from minirt.sizes import format_size, ranges
from minirt.wording import worded

_COLUMNS = ("layer", "impl", "why", "dtype", "weights")
_WIDTH = 80  # of a table that is not for a terminal
_SHORT = 24  # characters of a reason that stands in the table; longer ones stand below it


@dataclass(frozen=True)
class PlanRow:
    """How one layer runs.

    `dtype` is the dtype of the activations, `formats` are those of quantized weights. `bytes` is the size of the layer's weights;
    weights that several layers share count for the first of them. `capturable`: whether a CUDA graph can hold the layer.
    """

    layer: str
    kind: str
    implementation: str
    reason: str
    dtype: str
    formats: tuple[str, ...]
    bytes: int
    capturable: bool

    @property
    def dtypes(self) -> str:
        """As printed: "bfloat16 · fp8"."""
        return " · ".join((self.dtype, *self.formats))


@dataclass(frozen=True)
class Plan:
    """One row per layer, in execution order.

    `not_capturable` is the reason why no step of the model can run as a CUDA graph, or None if small steps can. `checkpoint` is
    the quantized format of the checkpoint, None if its weights are not quantized; `notes` say what differs from that format, and
    what the model does not have.
    `model_type` and `num_parameters` are those of the model. `print(plan)` and a notebook show the table of `minirt plan`.
    """

    rows: tuple[PlanRow, ...]
    device: str
    not_capturable: str | None
    checkpoint: str | None = None
    notes: tuple[str, ...] = ()
    model_type: str = ""
    num_parameters: int = 0
    sharded: bool = False

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of quantized weights, each once."""
        return tuple(sorted({name for row in self.rows for name in row.formats}))

    def with_cuda_graphs(self, used: bool) -> "Plan":
        """The plan of an engine that has the option `--no-cuda-graphs`, unless `used`."""
        return self if used else replace(self, not_capturable=self.not_capturable or f"{worded('--no-cuda-graphs')} is given")

    @property
    def weight_bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def title(self) -> str:
        """"qwen2 · 494.0 M parameters · cpu"."""
        count = f"{self.num_parameters / 1e6:,.1f} M parameters{' in the share of a rank' * self.sharded}"
        return printable(f"{self.model_type} · {count} · {self.device}")

    @property
    def remarks(self) -> list[str]:
        """Lines below the table: the checkpoint's format, what differs from it, and on a GPU whether there are CUDA graphs."""
        lines = [] if self.checkpoint is None else [f"Checkpoint: {self.checkpoint}"]
        lines += [f"Note: {note}" for note in self.notes]
        if self.device.startswith("cuda"):
            reason = self.not_capturable
            lines.append("CUDA graphs: small steps" if reason is None else f"CUDA graphs: none, since {reason}")
        return list(map(printable, lines))

    def _cells(self) -> list[tuple[str, ...]]:
        """The cells of the table. Layers that differ only in their number are one row, at the place of the first."""
        groups: dict[tuple, list[PlanRow]] = {}
        for row in self.rows:
            prefix, _, suffix = _parts(row.layer)
            groups.setdefault((prefix, suffix, row.implementation, row.reason, row.dtypes, row.bytes), []).append(row)
        rows = []
        for (prefix, suffix, *cells, size), same in groups.items():
            name = f"{prefix}{ranges([number for row in same if (number := _parts(row.layer)[1]) is not None])}{suffix}"
            times = f" × {len(same)}" if len(same) > 1 else ""
            name = name.replace(",", ", ") if len(name) > _SHORT else name  # a table is wrapped between numbers
            rows.append((name, *map(str, cells), format_size(size) + times))
        return [tuple(map(printable, row)) for row in [*rows, ("total", "", "", "", format_size(self.weight_bytes))]]

    def render(self, name: str = "", *, terminal: bool = False) -> str:
        """The plan as a table of text. `name`: of the model, for the title. `terminal`: with colours, as wide as the terminal."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        table, rows, below = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False), self._cells(), list[str]()
        for column, values in zip(_COLUMNS, zip(*rows, strict=True), strict=True):
            wrapped = column in ("layer", "why") or max(map(len, values)) > _WIDTH // 2
            word = max(len(word) for value in (column, *values) for word in value.split(" "))  # is not cut if it is short enough
            table.add_column(
                column, justify="right" if column == "weights" else "left", overflow="fold", no_wrap=not wrapped,
                min_width=word if wrapped and word <= _WIDTH // 2 else None,
            )  # fmt: skip
        for layer, implementation, reason, *cells in rows:
            if len(reason) > _SHORT:
                below += [] if reason in below else [reason]
                reason = f"[{below.index(reason) + 1}]"
            table.add_row(layer, implementation, reason, *cells)
        printed, width = io.StringIO(), None if terminal else _WIDTH
        console = Console(file=printed, width=width, force_terminal=terminal, markup=False, emoji=False, highlight=False)
        console.print(" · ".join(filter(None, (printable(name), self.title))))
        console.print(table)
        for line in (*(f"[{i}] {reason}" for i, reason in enumerate(below, 1)), *self.remarks):
            console.print(line)
        return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())

    def __str__(self) -> str:
        return self.render()

    def html(self, name: str = "") -> str:
        """The plan as an HTML table, for notebooks."""
        title = " · ".join(filter(None, (printable(name), self.title)))
        head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>" for cells in self._cells())
        below = "".join(f"<p>{escape(line)}</p>" for line in self.remarks)
        return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"

    def _repr_html_(self) -> str:
        return self.html()


def _parts(layer: str) -> tuple[str, int | None, str]:
    """"layers.3.mlp" → ("layers.", 3, ".mlp"); a name without a number: (name, None, "")."""
    match = re.fullmatch(r"(\D*\.)?([0-9]{1,9})(\..*)?", layer)
    return (match[1] or "", int(match[2]), match[3] or "") if match else (layer, None, "")


def not_capturable(rows: Sequence[PlanRow], device: str) -> str | None:
    """Why steps through these layers cannot run as CUDA graphs, or None if they can."""
    if not device.startswith("cuda"):
        return f"the device is {device}"
    blocking = [row for row in rows if not row.capturable]
    if not blocking:
        return None if any(row.implementation == "triton" for row in rows) else "no layer runs on Triton"
    if all(row.implementation == "eager" for row in rows):
        return "every layer is eager"
    first, count = blocking[0], len(blocking) - 1
    others = f" ({count} more layer{'s' * (count > 1)} like it)" if count else ""
    if first.implementation == "eager":
        return f"{first.layer} is eager, and CUDA graphs hold no eager layers{others}"
    return f"{first.layer} runs as {first.implementation!r}, which is not registered as capturable{others}"


def parse_impl(impl: str | Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Split implementation choices into (default, [(glob, name), …]). Later rules take precedence.

    Args:
        impl: "auto", "eager", "triton" or a registered name, for all layers; or 'glob=name', for the layers whose names
            match; or a sequence of these.
    Raises:
        UnsupportedError: a choice is malformed, or there are two different defaults.
    """
    default, rules, chosen = "auto", [], False
    items = [impl] if isinstance(impl, str) else list(impl) if isinstance(impl, Iterable) else [impl]
    for item in items:
        if not isinstance(item, str):
            expected = "a string, or a sequence of strings"
            raise UnsupportedError("not an implementation choice", where="impl", expected=expected, found=type(item).__name__)
        pattern, equals, name = item.rpartition("=")
        if not name or (equals and not pattern):
            raise UnsupportedError("not an implementation choice", where=f"--impl {item!r}", expected="NAME or GLOB=NAME")
        if equals:
            rules.append((pattern, name))
        elif chosen and name != default:
            raise UnsupportedError("two different defaults", where="--impl", found=f"{default} and {name}", hint="use GLOB=NAME")
        else:
            default, chosen = name, True
    return default, rules
