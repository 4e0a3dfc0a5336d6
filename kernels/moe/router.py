"""The router's logits of more than few tokens, as sums over parts of the hidden size, with the norm folded in.

The router's weight is small: with 128 experts, one program for each tile of the output leaves most SMs idle. So the hidden size
is split, and each program stores fp32 sums of one part. `route` adds the parts, in order, when it chooses the experts.

The norm is folded in: its weight multiplies the router's weight, and the inverse of a token's root mean square multiplies its
logits, once `route` has added the sums of squares as well. So no kernel stores the normalized tokens for the router.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.launch import cdiv, launch_options, next_power_of_2
from minirt.kernels.pdl import wait_for_input
from minirt.kernels.prepared import compile_time, prepared
from minirt.kernels.regimes import up_to

CASES = [{"T": 2, "E": 5, "H": 40}, {"T": 17, "E": 60, "H": 97}, {"T": 33, "E": 130, "H": 528}, {"T": 70, "E": 128, "H": 264}]

_INVARIANT = 128  # every step is split as one of so many tokens
_EARLY = 128  # the most tokens with which `route` may start before this kernel has its input


@dataclass(eq=False)
class LogitParts:
    """The logits of T tokens, still in parts.

    Args:
        sums: [P, T, E] fp32. Their sum over P, times the inverse of the token's root mean square, are the logits.
        counts: [E] int32, zeros, in which `route` counts the tokens of each expert. It takes them: they are used once.
        squares: [P, T] fp32, a token's sum of squares of each part of the hidden size; None: there is no norm.
        hidden, eps: the hidden size, and what is added to a mean square.
        dtype: to which the logits are rounded.
        bias: [E], is added to the logits; None: there is none.
    """

    sums: Tensor
    counts: Tensor | None
    squares: Tensor | None
    hidden: int
    eps: float
    dtype: torch.dtype
    bias: Tensor | None = None


@compile_time
class _Constants(NamedTuple):
    """What a launch compiles in. H: the hidden size. PART: channels of a part. EARLY: as in `wait_for_input`."""

    H: int
    PART: int
    BLOCK_T: int
    BLOCK_E: int
    BLOCK_K: int
    EARLY: bool


@prepared
@triton.jit(do_not_specialize=["T"])
def _router_kernel(x_ptr, norm_ptr, weight_ptr, sums_ptr, counts_ptr, squares_ptr, T, E, C, PDL: tl.constexpr):
    """A part of the logits of BLOCK_T tokens and BLOCK_E experts: over PART channels from part · PART on."""
    part = tl.program_id(2)
    t = tl.program_id(0) * C.BLOCK_T + tl.arange(0, C.BLOCK_T)
    e = tl.program_id(1) * C.BLOCK_E + tl.arange(0, C.BLOCK_E)
    k = part * C.PART + tl.arange(0, C.BLOCK_K)
    # Rows past the end repeat the last one; they are not stored.
    w_ptrs = weight_ptr + tl.minimum(e, E - 1)[:, None] * C.H
    x_ptrs = x_ptr + tl.minimum(t, T - 1).to(tl.int64)[None, :] * C.H
    acc = tl.zeros((C.BLOCK_E, C.BLOCK_T), tl.float32)
    squares = tl.zeros((C.BLOCK_T,), tl.float32)
    w = _weight(w_ptrs, norm_ptr, k, C.H)  # of the first step: read before the wait
    if PDL:
        wait_for_input(C.EARLY)
    tl.store(counts_ptr + e, tl.zeros((C.BLOCK_E,), tl.int32), mask=e < E)  # every program of these experts writes the same
    for i in tl.static_range(C.PART // C.BLOCK_K):
        at = k + i * C.BLOCK_K
        x = tl.load(x_ptrs + at[:, None], mask=at[:, None] < C.H, other=0.0)
        if squares_ptr is not None:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if i + 1 < C.PART // C.BLOCK_K:
            w = _weight(w_ptrs, norm_ptr, at + C.BLOCK_K, C.H)
    stored = (e < E)[:, None] & (t < T)[None, :]
    tl.store(sums_ptr + (part * T + t).to(tl.int64)[None, :] * E + e[:, None], acc, mask=stored)
    if squares_ptr is not None:
        tl.store(squares_ptr + part * T + t, squares, mask=t < tl.where(tl.program_id(1) == 0, T, 0))


@triton.jit
def _weight(ptrs, norm_ptr, k, H: tl.constexpr):
    """Columns k of the router's weight, times the norm's weight."""
    w = tl.load(ptrs + k[None, :], mask=k[None, :] < H, other=0.0)
    if norm_ptr is not None:
        w *= tl.load(norm_ptr + k, mask=k < H, other=0.0)[None, :]
    return w


last_tokens = up_to(64, _EARLY, 512)  # T → the largest step that launches the same compiled kernel


def _split(T: int, invariant: bool = False) -> tuple[int, int]:
    """(tokens of a program, parts of the hidden size). Sums of squares follow the layout of the tile, so `invariant` has one."""
    T = _INVARIANT if invariant else T
    return (16, 16) if T <= 64 else (64, 16) if T <= 512 else (64, 4)


def router_logits(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor, *, bias: Tensor | None = None, pdl: bool = False,
    invariant: bool = False,
) -> LogitParts:  # fmt: skip
    """Parts of rms_norm(x) · weightᵀ + bias: x [T, H], norm_weight [H] or None (no norm), weight [E, H], bias [E] or None.
    invariant: in an order that does not depend on T."""
    (T, H), E = x.shape, weight.shape[0]
    (block_t, parts), block_k = _split(T, invariant), 256 // x.element_size()
    part = cdiv(cdiv(H, parts), block_k) * block_k
    parts = cdiv(H, part)
    sums = torch.empty(parts, T, E, dtype=torch.float32, device=x.device)
    squares = None if norm_weight is None else torch.empty(parts, T, dtype=torch.float32, device=x.device)
    counts = torch.empty(E, dtype=torch.int32, device=x.device)
    block_e = min(128, max(16, next_power_of_2(E)))
    _router_kernel[(cdiv(T, block_t), cdiv(E, block_e), parts)](
        x, norm_weight, weight, sums, counts, squares, T, E, C=_Constants(H, part, block_t, block_e, block_k, T <= _EARLY),
        **launch_options(4 if block_t == 16 else 8, 1, pdl),
    )  # fmt: skip
    return LogitParts(sums, counts, squares, H, eps, x.dtype, bias)


def cost(T: int, E: int, H: int, itemsize: int) -> tuple[int, int]:
    """(bytes read and written, floating-point operations)."""
    return (E + T) * H * itemsize + _split(T)[1] * T * E * 4, 2 * T * E * H
