"""`PatchTable`: what `patch` replaced in a model, what not, and why."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from minirt.sizes import format_size, ranges

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Change:
    """What happened to one module.

    Attributes:
        module: its name in the model; "" is the model itself.
        kind: the name of its class.
        replaced: whether minirt computes it now, all or in part.
        what: what computes it now, or why it was left alone.
    """

    module: str
    kind: str
    replaced: bool
    what: str


@dataclass(frozen=True)
class PatchTable:
    """The result of `patch`. `print(table)` shows it, with one line for modules that differ only in their numbers.

    Attributes:
        changes: one for each module that has weights or is replaced.
        fp8: whether the weights of the replaced products are FP8.
        fp8_bytes: bytes of the FP8 weights and their scales; 0 without FP8.
        original_bytes: bytes of the original weights that `keep_original` holds beside the FP8 weights; else 0.
    """

    changes: tuple[Change, ...]
    fp8: bool = False
    fp8_bytes: int = 0
    original_bytes: int = 0

    @property
    def replaced(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.replaced)

    @property
    def kept(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if not change.replaced)

    def as_dict(self) -> dict[str, Any]:
        """The table as plain values, for JSON."""
        return asdict(self) | {"changes": [asdict(change) for change in self.changes]}

    def __str__(self) -> str:
        rows = [(name, change.kind, "yes" if change.replaced else "no", change.what) for name, change in self._grouped()]
        rows.insert(0, ("module", "class", "replaced", "how, or why not"))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows]
        if self.fp8:
            lines.append(f"FP8 weights: {format_size(self.fp8_bytes)}")
        if self.original_bytes:
            lines.append(f"Original weights, held for unpatch: {format_size(self.original_bytes)}")
        return "\n".join(lines)

    def _grouped(self) -> Iterator[tuple[str, Change]]:
        """A name and a change for each group of modules whose names differ only in their numbers."""
        groups: dict[tuple[Any, ...], list[Change]] = {}
        for change in self.changes:
            groups.setdefault((_NUMBER.sub("#", change.module), change.kind, change.replaced, change.what), []).append(change)
        for (pattern, *_), changes in groups.items():
            numbers = [_NUMBER.findall(change.module) for change in changes]
            name = changes[0].module or "(the model)"
            if len(changes) > 1 and all(len(of_name) == 1 for of_name in numbers):
                name = pattern.replace("#", ranges([int(number) for number, in numbers]))
            elif len(changes) > 1:
                name = f"{pattern.replace('#', '*')} ({len(changes)})"
            yield name, changes[0]
