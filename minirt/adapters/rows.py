"""`StepAdapters`: the adapters of a step's rows, and what layers add for them."""

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from minirt.device import is_nvidia
from minirt.kernels.adapters import reference
from minirt.kernels.adapters.operands import AdapterRows, AdapterWeights, most_steps
from minirt.kernels.launch import Workspace
from minirt.kernels.step.table import ADAPTER, StepTensors
from minirt.modeling.parameters import PackedLinear

if TYPE_CHECKING:
    from minirt.adapters.adapters import Adapters
    from minirt.kernels.linear.dispatch import LowRankOf


class LinearAdapters(NamedTuple):
    """What a `PackedLinear` has as `adapters`.

    Args:
        weights: of all adapters on the device.
        selected: whether it gets the rows that need logits, after `Select`.
        workspace: if its layer runs on Triton, see `LayerContext`, as for `pdl`; else None.
    """

    weights: AdapterWeights
    selected: bool
    workspace: Workspace | None
    pdl: bool


class BatchAdapters(NamedTuple):
    """What layers add to the outputs of their linears, in a step with adapters. `tokens`, `rows`: before and after `Select`."""

    tokens: AdapterRows
    rows: AdapterRows

    def of(self, linear: PackedLinear) -> "LowRankOf | None":
        """What the linear's product takes; None: there is no adapter, or `add` comes after the product."""
        adapters: LinearAdapters | None = linear.adapters
        if adapters is None or (workspace := adapters.workspace) is None or linear.format is not None:
            return None
        from minirt.kernels.adapters.shrink import low_rank

        rows, (weights, _, _, pdl) = self.rows if adapters.selected else self.tokens, adapters
        return partial(low_rank, weights=weights, rows=rows, workspace=workspace, pdl=pdl)

    def add(
        self, linear: PackedLinear, out: Tensor, x: Tensor, norm: Tensor | None = None, eps: float = 0.0,
        activation: str | None = None,
    ) -> Tensor:  # fmt: skip
        """Add to `out` [T, N], which is written, for the linear's input rms_norm(x) [T, K]. With an activation: see
        `add_adapters`, for a linear with `adapters`."""
        adapters: LinearAdapters | None = linear.adapters
        if adapters is None:
            return out
        rows, (weights, _, workspace, pdl) = self.rows if adapters.selected else self.tokens, adapters
        if workspace is None:
            return reference.add_adapters(x, weights, rows, out, norm, eps, activation)
        from minirt.kernels.adapters.expand import add_adapters

        return add_adapters(x, weights, rows, out, norm, eps, activation, workspace=workspace, pdl=pdl, check=False)


class StepAdapters:
    """Static buffers for the adapters of a step's rows. On a GPU, CUDA graphs fill them by kernels.

    Args:
        adapters: of the model.
        tokens, rows: of the largest step, padding included: tokens, and rows of logits.
    """

    def __init__(self, adapters: "Adapters", tokens: int, rows: int, device: torch.device) -> None:
        self._modules, self._of = range(1, adapters.most_modules + 1), (adapters.rank, adapters.places)
        self._kernels: Any = None
        if is_nvidia(device):
            from minirt.kernels.adapters import rows as kernels

            self._kernels = kernels
            self._adapters, self._of_rows = (torch.zeros(n, dtype=torch.int32, device=device) for n in (tokens, rows))
            most = most_steps(adapters.most_modules, *self._of)
            self._steps = torch.zeros(2, adapters.most_modules, 1 + most, dtype=torch.int32, device=device)
            self._by_modules = [dict(zip(self._modules, steps, strict=True)) for steps in self._steps]

    def of(self, tokens: int, rows: int) -> BatchAdapters:
        """The buffers of a step of this size. On a GPU."""
        buffers = self._adapters[:tokens], self._of_rows[:rows]
        return BatchAdapters(*map(AdapterRows, buffers, self._by_modules))

    def begin(self, table: Tensor, step: StepTensors) -> BatchAdapters:
        """The rows of a step, from the table of slots and the step's input. On a GPU, they are in the buffers."""
        tokens, rows = len(step.tokens), len(step.logits_indices)
        if self._kernels is None:
            adapters = reference.adapters_of(table, ADAPTER, step.seq_slots, step.query_starts, tokens)
            return BatchAdapters(self._rows(adapters), self._rows(adapters[step.logits_indices]))
        view = self.of(tokens, rows)
        adapters = view.tokens.adapters
        self._kernels.adapters_of(table, ADAPTER, step.seq_slots, step.query_starts, adapters)
        self._kernels.used_steps(adapters, step.logits_indices, view.rows.adapters, *self._of, self._steps)
        return view

    def _rows(self, adapters: Tensor) -> AdapterRows:
        return AdapterRows(adapters, {count: reference.used_steps(adapters, count, *self._of) for count in self._modules})
