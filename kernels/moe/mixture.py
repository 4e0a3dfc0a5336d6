"""`Mixture`: the operands of a mixture of experts. Its two products are `Product`s, whose weights are those of all experts."""

from typing import NamedTuple

import torch
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.linear.product import Epilogue, Norm, Product
from minirt.kernels.moe.router import LogitParts
from minirt.kernels.reference import SharedExpert, weight_format
from minirt.kernels.side_stream import SideStream


class SharedOutput(NamedTuple):
    """What an expert that every token uses has computed: `output` [T, H], and `gate` [T, 1], before its sigmoid."""

    output: Tensor
    gate: Tensor


class Mixture(NamedTuple):
    """out = residual + Σ_j w_j · expert_j(norm(h)) + sigmoid(gate) · shared, over a token's `top_k` experts j.

    Attributes:
        h: [T, H]. residual, out: [T, H]; they may be the same tensor. residual None: 0.
        logits: [T, E], of the router, or their parts (`dispatch.router_logits`).
        gate_up: [E, 2I, H], gate rows first. down: [E, H, I]. Of h's dtype, or float8_e4m3fn, or words of 4-bit weights
            (`int4_words`) instead of the last dimension.
        top_k, normalize: experts of a token, and whether to divide their weights by the sum.
        activation: "silu" or another name in `kernels/activations.py`.
        norm: of h. None: h is normalized.
        gate_up_scale, down_scale: [E, 2I] and [E, H] fp32 of FP8 weights. Of weights in blocks of g rows and 128 columns
            [E, 2I / g, ⌈H / 128⌉] and [E, ⌈H / g⌉, ⌈I / 128⌉]; each has a separate g, a power of two up to 128. Of 4-bit weights
            scale words [E, groups, 2I] and [E, groups, H] int32, only the last dimension contiguous.
        shared: an expert that every token uses, where `reference.computes_shared` says so, or its output; or None.
        side: the stream that computes `SharedOutput`, to be joined before it is read; None: this one.
        factors: [E], of the weights w of experts; None: 1.
        pdl: whether to overlap with the kernel before it in the stream (see `minirt.kernels.pdl`).
        gate_up_bias, down_bias: [E, 2I] and [E, H], of h's dtype; None: there are none.
        limit, alpha: of a clamped SwiGLU instead of the activation, see `reference.gated`; a limit of 0: there is none.
        invariant: whether the order of sums must not depend on the number of tokens, see `SumOrder.invariant`.
    """

    h: Tensor
    logits: Tensor | LogitParts
    gate_up: Tensor
    down: Tensor
    residual: Tensor | None
    out: Tensor
    top_k: int
    normalize: bool
    activation: str
    norm: Norm | None = None
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    shared: SharedExpert | SharedOutput | None = None
    side: SideStream | None = None
    pdl: bool = False
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    limit: float = 0.0
    alpha: float = 1.0
    factors: Tensor | None = None
    invariant: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(T, H, I)."""
        return *self.h.shape, self.gate_up.shape[1] // 2

    def shared_output(self) -> SharedOutput | None:
        """To be called right before the launch of the kernel that reads it."""
        if isinstance(self.shared, SharedExpert):
            raise InputError("these kernels take its output", where="shared", found="a SharedExpert")
        if self.side is not None:
            self.side.join()
        return self.shared

    @property
    def format(self) -> str:
        """The format of the experts' weights, as `regimes.Limits` names it."""
        itemsize = self.h.element_size()
        form = weight_format(self.gate_up, self.gate_up_scale, itemsize)
        return f"{form}_fp32" if itemsize == 4 and form.startswith("fp8") else form

    def aligned(self, n: int) -> bool:
        """Whether the addresses of the experts' weights and their rows, in bytes, are multiples of n, a power of two."""
        _, H, inter = self.sizes
        return (self.gate_up.data_ptr() | self.down.data_ptr() | (H | inter) * self.down.element_size()) % n == 0

    @property
    def quantized(self) -> bool:
        """Whether the experts are FP8."""
        return self.gate_up_scale is not None and not self.four_bits

    @property
    def four_bits(self) -> bool:
        return self.gate_up.dtype == torch.int16

    @property
    def blocks(self) -> bool:
        """Whether FP8 experts have scales of blocks."""
        return self.gate_up_scale is not None and self.gate_up_scale.ndim == 3 and not self.four_bits

    def first_product(self, x: Tensor, out: Tensor, norm: Norm | None = None, x_scale: Tensor | None = None) -> Product:
        """act(gate) · up of the rows of x."""
        epilogue = Epilogue(self.gate_up_scale, x_scale, self.gate_up_bias, self.activation)
        if self.limit:
            epilogue = epilogue._replace(limit=self.limit, alpha=self.alpha)
        return Product(x, self.gate_up, out, norm, epilogue, None, self.pdl)

    def second_product(self, x: Tensor, out: Tensor, x_scale: Tensor | None = None, residual: Tensor | None = None) -> Product:
        epilogue = Epilogue(self.down_scale, x_scale, self.down_bias, None, residual)
        return Product(x, self.down, out, None, epilogue, None, self.pdl)
