"""`Product`: the operands of a matrix product with its epilogue, which every linear kernel takes."""

from typing import NamedTuple

from torch import Tensor

from minirt.kernels.launch import Workspace
from minirt.kernels.reference import block_rows


class RowMaxima(NamedTuple):
    """Where an LM head stores the largest logit of each row in each tile of columns, so that greedy sampling reads no logits.

    `values` [T, P] int64: a logit and its column, packed by `sampling.filters.pack`; P is `dispatch.row_maxima_tiles` for T
    rows. A head that stores row maxima writes the logits only if `logits_needed` [1] int32, on the device, is not 0.
    """

    values: Tensor
    logits_needed: Tensor


class Product(NamedTuple):
    """out = x · weightᵀ + bias + residual, or with an activation act(gate) · up of the product's two halves.

    Attributes:
        x: [T, K].
        weight: [N, K], with an activation [2N, K], gate rows first. Of x's dtype, or float8_e4m3fn with a `scale`.
        out: [T, N]; may be `residual`.
        bias: one for each row of the weight, or None.
        residual: [T, N], or None.
        activation: "silu", "gelu" or "gelu_tanh", or None.
        scale: fp32, of an fp8 weight: one for each row, or [⌈rows / g⌉, ⌈K / 128⌉] for blocks of g rows and 128 columns.
        x_scale: fp32, of an fp8 x: one for each token; for a weight in blocks [T, ⌈K / 128⌉].
        workspace: without one, K is not split.
        row_maxima: receives the largest value of each row in each tile, from the kernels that store them.
        pdl: whether to overlap with the kernel before it in the stream (see `minirt.kernels.pdl`).
    """

    x: Tensor
    weight: Tensor
    out: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    activation: str | None = None
    scale: Tensor | None = None
    x_scale: Tensor | None = None
    workspace: Workspace | None = None
    row_maxima: RowMaxima | None = None
    pdl: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """(T, N, K). N is the number of output columns."""
        return self.x.shape[0], self.out.shape[1], self.x.shape[1]

    @property
    def scale_rows(self) -> int | None:
        """g, the rows of the blocks of an fp8 weight: a power of two up to 128; None: the weight has no blocks."""
        scale = self.scale
        in_blocks = scale is not None and scale.ndim == 2 and scale.dtype == torch.float32
        return block_rows(self.weight.shape[0], scale.shape[0]) if in_blocks else None
