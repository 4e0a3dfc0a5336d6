"""`StepAdapters`: the rows of a step by adapter, and what layers add for them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from minirt.device import is_nvidia
from minirt.errors import InputError
from minirt.kernels.adapters import reference
from minirt.kernels.adapters.operands import AdapterWeights, Groups, most_tiles, tile_rows
from minirt.kernels.step.table import ADAPTER, StepTensors
from minirt.modeling.parameters import PackedLinear

if TYPE_CHECKING:
    from minirt.kernels.linear.product import TokenAdapter


class LinearAdapters(NamedTuple):
    """What a `PackedLinear` has as `adapters`.

    Args:
        weights: of all adapters on the device.
        selected: whether it gets the rows that need logits, after `Select`.
        triton: whether its layer runs on Triton. `pdl`: see `LayerContext`.
    """

    weights: AdapterWeights
    selected: bool
    triton: bool
    pdl: bool


def padded_marks(count: int) -> int:
    """Words that so many marks take: whole cache lines."""
    return -(-count // 32) * 32


class Marks:
    """Words of −1, by which programs of a kernel wait for others of it. Each use of a linear in a step takes its own."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._words, self._taken = torch.full((size,), -1, dtype=torch.int32, device=device), 0

    def begin(self) -> None:
        """Of a step. Words of an earlier one would be waited for without end."""
        self._taken = 0
        self._words.fill_(-1)

    def take(self, count: int) -> Tensor:
        start, self._taken = self._taken, self._taken + padded_marks(count)
        if self._taken > len(self._words):
            raise InputError("a step uses more linears than the model has", where="Marks.take", expected=len(self._words))
        return self._words[start : start + count]


class BatchAdapters(NamedTuple):
    """What layers add to the outputs of their linears, in a step with adapters. `tokens`, `rows`: before and after `Select`."""

    tokens: Groups
    rows: Groups
    marks: Marks

    def add(
        self, linear: PackedLinear, out: Tensor, x: Tensor, norm: Tensor | None = None, eps: float = 0.0,
        activation: str | None = None,
    ) -> Tensor:  # fmt: skip
        """Add to `out` [T, N], which is written, for the linear's input rms_norm(x) [T, K]. With an activation: see
        `add_adapters`, for a linear with `adapters`."""
        adapters: LinearAdapters | None = linear.adapters
        if adapters is None:
            return out
        groups = self.rows if adapters.selected else self.tokens
        if not adapters.triton:
            return reference.add_adapters(x, adapters.weights, groups, out, norm, eps, activation)
        from minirt.kernels.adapters.add import add_adapters

        marks = self.marks.take(len(groups.tiles))
        return add_adapters(x, adapters.weights, groups, out, norm, eps, activation, marks=marks, pdl=adapters.pdl, check=False)

    def before(self, linear: PackedLinear, x: Tensor) -> "TokenAdapter | None":
        """What the product of one token adds itself; None: `add` comes after it."""
        adapters: LinearAdapters | None = linear.adapters
        if adapters is None or not adapters.triton or len(x) != 1 or linear.format is not None:
            return None
        from minirt.kernels.linear.product import TokenAdapter

        w, tiles = adapters.weights, (self.rows if adapters.selected else self.tokens).tiles
        y = self.marks.take(w.a.shape[1] * w.a.shape[2])
        return TokenAdapter(w.a, w.b, w.scales, w.modules, tiles, y, w.scales.stride(0))


class StepAdapters:
    """Static buffers for the rows of a step. On a GPU, CUDA graphs fill them by kernels.

    Args:
        places: adapters on the device.
        tokens, rows: of the largest step, padding included: tokens, and rows of logits.
        triton: whether any layer runs on Triton, whose tiles have few rows.
        linears: P · R of each linear with adapters, once for each of its uses.
    """

    def __init__(
        self, places: int, tokens: int, rows: int, device: torch.device, *, triton: bool, linears: Sequence[int]
    ) -> None:
        self._places, self._triton = places, triton
        most = max(most_tiles(n, places) for size in (tokens, rows) for n in (size, min(size, 256)))
        self._marks = Marks(sum(padded_marks(max(most, count)) for count in linears) if triton else 0, device)
        self._kernels: Any = None
        self._views: dict[tuple[int, int], BatchAdapters] = {}
        if is_nvidia(device):
            from minirt.kernels.adapters import groups

            self._kernels = groups
            self._adapters = torch.zeros(tokens, dtype=torch.int32, device=device)
            self._buffers = [
                (torch.zeros(size, dtype=torch.int32, device=device), torch.zeros(most, 3, dtype=torch.int32, device=device))
                for size in (tokens, rows)
            ]

    def of(self, tokens: int, rows: int) -> BatchAdapters:
        """The buffers of a step of this size, which begins. On a GPU."""
        if (view := self._views.get((tokens, rows))) is None:
            tokens_of, rows_of = (
                Groups(order[:size], tiles[: most_tiles(size, self._places)], tile_rows(size))
                for (order, tiles), size in zip(self._buffers, (tokens, rows), strict=True)
            )
            view = self._views[tokens, rows] = BatchAdapters(tokens_of, rows_of, self._marks)
        self._marks.begin()
        return view

    def begin(self, table: Tensor, step: StepTensors) -> BatchAdapters:
        """The rows of a step, from the table of slots and the step's input. On a GPU, they are in the buffers."""
        tokens, rows = len(step.tokens), len(step.logits_indices)
        if self._kernels is None:
            self._marks.begin()
            adapters = reference.adapters_of(table, ADAPTER, step.seq_slots, step.query_starts, tokens)
            return BatchAdapters(self._grouped(adapters), self._grouped(adapters[step.logits_indices]), self._marks)
        view = self.of(tokens, rows)
        adapters = self._kernels.adapters_of(table, ADAPTER, step.seq_slots, step.query_starts, self._adapters[:tokens])
        self._kernels.group_rows(adapters, self._places, view.tokens)
        if rows:
            self._kernels.group_rows(adapters, self._places, view.rows, step.logits_indices)
        return view

    def _grouped(self, adapters: Tensor) -> Groups:
        return reference.group_rows(adapters, self._places, tile_rows(len(adapters)) if self._triton else max(1, len(adapters)))
