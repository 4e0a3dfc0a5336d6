"""`Product`: the operands of a matrix product, the norm before it and the epilogue after it. Every linear kernel takes one.

`Epilogue` goes to the kernels as it is. They read its fields by name and hand it on to the functions of `epilogue`, so a new
field of an epilogue is a field here and its computation there.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from minirt.kernels.launch import Workspace, cdiv
from minirt.kernels.reference import block_rows, weight_format

# Names, because every launch looks them up.
_new = tuple.__new__
_LONGEST_PART = 2048  # elements of K: Hopper's tensor cores add fp8 products with about 14 bits
_PROGRAMS = 320  # that read at full bandwidth. A constant: the order of sums must not depend on the GPU
_MOST_PARTS = 8
LOW_RANK_BLOCK = 64  # columns of `LowRank.b` of a step


class RowMaxima(NamedTuple):
    """Where an LM head stores the largest logit of each row in each tile of columns, so that greedy sampling reads no logits.

    `values` [T, P] int64: a logit and its column, packed by `argmax.pack`; P is `dispatch.row_maxima_tiles` for T
    rows. A head that stores row maxima writes the logits only if `logits_needed` [1] int32, on the device, is not 0.
    """

    values: Tensor
    logits_needed: Tensor


class Norm(NamedTuple):
    """RMSNorm of x before a product: `weight` [K] of x's dtype, and the epsilon under the root."""

    weight: Tensor
    eps: float


class LowRank(NamedTuple):
    """What a product adds for the LoRA adapters of its rows: y · bᵀ, as if K had more columns. `kernels/adapters` makes it.

    The columns of `b` are those of one place of an adapter after the other. A step takes `LOW_RANK_BLOCK` of them.

    Attributes:
        y: [T, columns of all steps], of x's dtype, 0 in columns of other adapters than the row's.
        b: [rows of the weight, places · width], as `AdapterWeights.b`, finite.
        adapters: [T] int32, the place of each row's adapter; −1: none.
        steps: int32: how many steps there are, then the block of columns of `b` of each.
        width: columns of `b` of one place. y_stride, b_stride: of rows.
    """

    y: Tensor
    b: Tensor
    adapters: Tensor
    steps: Tensor
    width: int
    y_stride: int
    b_stride: int


class Epilogue(NamedTuple):
    """What turns the sums of a product into its output, in the order of the fields. None: nothing.

    Attributes:
        scale: of a weight in FP8, fp32: one for each row, or [⌈rows / g⌉, ⌈K / 128⌉] for blocks of g rows and 128 columns. Of a
            weight in 4 bits: scale words. Scales of rows multiply the sums, others the products or the weights.
        x_scale: of an x in FP8, fp32: one for each token; for a weight in blocks [T, ⌈K / 128⌉].
        bias: one for each row of the weight.
        activation: "silu" or another name in `kernels/activations.py`: the output is act(gate) · up of the sums' two halves.
        residual: [T, N], is added.
        multiplier: of logits. softcap: logits become softcap · tanh(logits / softcap). Both before the row maxima.
        row_maxima, row_maxima_stride, logits_needed: `RowMaxima`, and the distance of its rows.
        limit, alpha: of a clamped SwiGLU, which replaces act(gate) · up (`reference.gated`).
    """

    scale: Tensor | None = None
    x_scale: Tensor | None = None
    bias: Tensor | None = None
    activation: str | None = None
    residual: Tensor | None = None
    multiplier: float | None = None
    softcap: float | None = None
    row_maxima: Tensor | None = None
    row_maxima_stride: int = 0
    logits_needed: Tensor | None = None
    limit: float | None = None
    alpha: float | None = None


class ProductFacts(NamedTuple):
    """What the launch configuration of a product may depend on. Each family of kernels reads some of these facts.

    Attributes:
        T: tokens, rounded up to the most that use the same configuration.
        N, K: number of outputs, and of values of x that each sums up. With an activation, the weight has 2N rows.
        itemsize: bytes of a value of the weight; if that has 4 bits, of x.
        gated, residual: whether there is an activation; a residual.
        blocks: whether an FP8 weight has scales of blocks.
        out_itemsize: bytes of a value of the output.
        splits: whether K may be split: there is a workspace, and no row maxima are stored.
        E, k: number of experts, and how many of them a token uses.
        rows: of a tile of the tokens of one expert; 0: not tiled by expert.
        part: elements of K whose products are added by themselves, before their sum is added to that of the parts before (see
            `part_of`); 0: the kernel chooses.
    """

    T: int
    N: int
    K: int
    itemsize: int
    gated: bool = False
    residual: bool = False
    blocks: bool = False
    out_itemsize: int = 2
    splits: bool = True
    E: int = 1
    k: int = 1
    rows: int = 0
    part: int = 0


class Product(NamedTuple):
    """out = epilogue(norm(x) · weightᵀ).

    Attributes:
        x: [T, K]. In FP8 if the weight is, but for the kernels of one token, or of few.
        weight: [N, K], with an activation [2N, K], gate rows first. Of x's dtype, or float8_e4m3fn, or words (`int4_words`).
        out: [T, N]; may be the residual.
        norm: applied to x; only kernels of one token, or of few, take it. None: no norm.
        workspace: without one, K is not split.
        pdl: whether to overlap with the kernel before it in the stream (see `minirt.kernels.pdl`).
        low_rank: of adapters; only kernels for weights of 16 or 32 bits take it. With one token, the norm's root mean square
            divides its sums too.
    """

    x: Tensor
    weight: Tensor
    out: Tensor
    norm: Norm | None = None
    epilogue: Epilogue = Epilogue()
    workspace: Workspace | None = None
    pdl: bool = False
    low_rank: LowRank | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(T, N, K). N is the number of output columns."""
        T, K = self.x.shape
        return T, self.out.shape[1], K

    @property
    def gated(self) -> bool:
        return self.epilogue.activation is not None

    @property
    def format(self) -> str:
        """The format of the weight, as in `minirt.kernels.regimes.Limits.formats`."""
        return weight_format(self.weight, self.epilogue.scale, self.x.element_size())

    @property
    def invariant(self) -> bool:
        """Whether the order of sums must not depend on the number of tokens."""
        return self.workspace is not None and self.workspace.invariant

    def facts(self, tokens: int, E: int = 1, k: int = 1, rows: int = 0) -> ProductFacts:
        """What its launch configuration may depend on. The arguments are fields of `ProductFacts`, `tokens` is T."""
        x, out, ep, itemsize = self.x, self.out, self.epilogue, self.weight.element_size()
        itemsize = itemsize if itemsize == 1 else x.element_size()  # 4-bit words have 2 bytes
        gated, blocks = ep.activation is not None, ep.scale is not None and self.scale_rows is not None
        part = part_of(out.shape[1], x.shape[1], itemsize, gated, blocks) if self.invariant else 0
        # Every launch asks, and a call of the class takes several times as long.
        return _new(ProductFacts, (
            tokens, out.shape[1], x.shape[1], itemsize, gated, ep.residual is not None, blocks, out.element_size(),
            self.workspace is not None and ep.row_maxima is None, E, k, rows, part,
        ))  # fmt: skip

    def with_x(self, x: Tensor, x_scale: Tensor | None = None) -> "Product":
        """The product of x that is normalized already and, if it has a scale, quantized."""
        ep = self.epilogue
        if x_scale is not None:
            ep = _new(Epilogue, (ep.scale, x_scale, *ep[2:]))  # `_replace` takes several times as long
        return _new(Product, (x, self.weight, self.out, None, ep, *self[5:]))

    @property
    def scale_rows(self) -> int | None:
        return scale_rows(self.weight, self.epilogue.scale)


@lru_cache(4096)
def part_of(N: int, K: int, itemsize: int, gated: bool, blocks: bool) -> int:
    """The one order of a product, for any number of tokens: the elements of K in a part of its sum, by the weight's shape alone.

    Within a part, and from part to part, sums are added in ascending order, in fp32. In a part, results of tensor cores depend
    neither on the tile nor on the length of a step, in 16 bits not on the instruction either (`tests/kernels/test_invariant.py`).
    A split of K for few tokens needs as many parts as fill a GPU.
    """
    if itemsize == 4 or blocks:
        return K
    step = 256 // itemsize
    parts = 1 if gated else max(1, min(_MOST_PARTS, _PROGRAMS // cdiv(N, 64), K // (2 * step)))
    if itemsize == 1:
        parts = max(parts, cdiv(K, _LONGEST_PART))
    return K if parts == 1 else cdiv(cdiv(K, parts), step) * step


def scale_rows(weight: Tensor, scale: Tensor | None) -> int | None:
    """g, the rows of the blocks of an fp8 weight [N, K] or [E, N, K]: a power of two up to 128; None: it has no blocks."""
    if scale is None or scale.ndim < weight.ndim or scale.dtype != torch.float32:  # the scales of 4-bit weights are words
        return None
    return block_rows(weight.shape[-2], scale.shape[-2])
