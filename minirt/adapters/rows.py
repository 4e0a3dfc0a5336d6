"""`StepAdapters`: the rows of a step by adapter, and what layers add for them."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from minirt.device import is_nvidia
from minirt.kernels.adapters import reference
from minirt.kernels.adapters.operands import AdapterWeights, Groups, most_tiles, tile_rows
from minirt.kernels.step.table import ADAPTER, StepTensors
from minirt.modeling.parameters import PackedLinear

if TYPE_CHECKING:
    from minirt.kernels.linear.product import Expansion


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


class BatchAdapters(NamedTuple):
    """What layers add to the outputs of their linears, in a step with adapters. `tokens`, `rows`: before and after `Select`."""

    tokens: Groups
    rows: Groups

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

        return add_adapters(x, adapters.weights, groups, out, norm, eps, activation, pdl=adapters.pdl, check=False)


    def before(self, linear: PackedLinear, x: Tensor, norm: Tensor | None = None) -> "Expansion | None":
        """What the product of one token adds itself; None: `add` comes after it."""
        adapters: LinearAdapters | None = linear.adapters
        if adapters is None or not adapters.triton or len(x) != 1 or linear.format is not None:
            return None
        from minirt.kernels.adapters.add import expansion

        groups = self.rows if adapters.selected else self.tokens
        return expansion(x, adapters.weights, groups, norm, pdl=adapters.pdl)


class StepAdapters:
    """Static buffers for the rows of a step. On a GPU, CUDA graphs fill them by kernels.

    Args:
        places: adapters on the device.
        tokens, rows: of the largest step, padding included: tokens, and rows of logits.
        triton: whether any layer runs on Triton, whose tiles have few rows.
    """

    def __init__(self, places: int, tokens: int, rows: int, device: torch.device, *, triton: bool) -> None:
        self._places, self._triton = places, triton
        self._kernels: Any = None
        self._views: dict[tuple[int, int], BatchAdapters] = {}
        if is_nvidia(device):
            from minirt.kernels.adapters import groups

            self._kernels = groups
            self._adapters = torch.zeros(tokens, dtype=torch.int32, device=device)
            most = [max(most_tiles(n, places) for n in (size, min(size, 256))) for size in (tokens, rows)]
            self._buffers = [
                (torch.zeros(size, dtype=torch.int32, device=device), torch.zeros(count, 3, dtype=torch.int32, device=device))
                for size, count in zip((tokens, rows), most, strict=True)
            ]

    def of(self, tokens: int, rows: int) -> BatchAdapters:
        """The buffers of a step of this size. On a GPU."""
        if (view := self._views.get((tokens, rows))) is None:
            parts = [
                Groups(order[:size], tiles[: most_tiles(size, self._places)], tile_rows(size))
                for (order, tiles), size in zip(self._buffers, (tokens, rows), strict=True)
            ]
            view = self._views[tokens, rows] = BatchAdapters(*parts)
        return view

    def begin(self, table: Tensor, step: StepTensors) -> BatchAdapters:
        """The rows of a step, from the table of slots and the step's input. On a GPU, they are in the buffers."""
        tokens, rows = len(step.tokens), len(step.logits_indices)
        if self._kernels is None:
            adapters = reference.adapters_of(table, ADAPTER, step.seq_slots, step.query_starts, tokens)
            return BatchAdapters(self._grouped(adapters), self._grouped(adapters[step.logits_indices]))
        view = self.of(tokens, rows)
        adapters = self._kernels.adapters_of(table, ADAPTER, step.seq_slots, step.query_starts, self._adapters[:tokens])
        self._kernels.group_rows(adapters, self._places, view.tokens)
        if rows:
            self._kernels.group_rows(adapters, self._places, view.rows, step.logits_indices)
        return view

    def _grouped(self, adapters: Tensor) -> Groups:
        return reference.group_rows(adapters, self._places, tile_rows(len(adapters)) if self._triton else max(1, len(adapters)))
