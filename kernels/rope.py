"""Rotary embedding of q and k in the layout of transformers' models, with the RMSNorm of each head before it (Qwen3).

minirt's own layers use `attention.rope_write` and `attention.decode`, which also write to the KV pages.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.checks import check_arguments
from minirt.kernels.launch import cdiv, next_power_of_2
from minirt.kernels.prepared import compile_time, prepared

CASES = [
    {"B": 1, "Nq": 1, "Nk": 1, "T": 1, "D": 2}, {"B": 3, "Nq": 7, "Nk": 1, "T": 1, "D": 64},
    {"B": 2, "Nq": 4, "Nk": 2, "T": 17, "D": 96}, {"B": 1, "Nq": 3, "Nk": 3, "T": 37, "D": 128},
]  # fmt: skip


class _Heads(NamedTuple):
    """Heads [B, N, T, D], where they go, the weight of their norm or None, and the strides of both."""

    x: Tensor
    out: Tensor
    norm: Tensor | None
    x_b: int
    x_n: int
    x_t: int
    x_d: int
    out_b: int
    out_n: int
    out_t: int
    out_d: int


@compile_time
class _Constants(NamedTuple):
    N: int  # heads of the first of the two tensors
    D: int
    BLOCK_D: int
    BLOCK_T: int


@prepared
@triton.jit(do_not_specialize=["T", "tiles"])
def _norm_rope_kernel(q, k, cos_ptr, sin_ptr, table_b, eps, T, tiles, C):
    """One head of BLOCK_T tokens of one sequence. `table_b`: the stride of sequences in cos and sin; 0 if they share them."""
    head = tl.program_id(1)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    t = (tl.program_id(0) % tiles).to(tl.int64) * C.BLOCK_T + tl.arange(0, C.BLOCK_T)
    if head < C.N:
        _rotate(q, head, b, t, cos_ptr + b * table_b, sin_ptr + b * table_b, eps, T, C)
    else:
        _rotate(k, head - C.N, b, t, cos_ptr + b * table_b, sin_ptr + b * table_b, eps, T, C)


@triton.jit
def _rotate(heads, n, b, t, cos_ptr, sin_ptr, eps, T, C):
    HALF: tl.constexpr = C.D // 2
    d = tl.arange(0, C.BLOCK_D)[None, :]
    inside = (t < T)[:, None] & (d < HALF)
    x_ptr = heads.x + b * heads.x_b + n.to(tl.int64) * heads.x_n + t[:, None] * heads.x_t + d * heads.x_d
    lower = tl.load(x_ptr, mask=inside, other=0.0)
    upper = tl.load(x_ptr + HALF * heads.x_d, mask=inside, other=0.0)
    first, second = lower.to(tl.float32), upper.to(tl.float32)
    if heads.norm is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / C.D + eps)[:, None]
        # Round before the weight is multiplied, as transformers does.
        first = (first * scale).to(lower.dtype).to(tl.float32) * tl.load(heads.norm + d, mask=d < HALF, other=0.0)
        second = (second * scale).to(lower.dtype).to(tl.float32) * tl.load(heads.norm + HALF + d, mask=d < HALF, other=0.0)
    at = t[:, None] * C.D + d
    cos, sin = tl.load(cos_ptr + at, mask=inside, other=0.0), tl.load(sin_ptr + at, mask=inside, other=0.0)
    cos_2 = tl.load(cos_ptr + at + HALF, mask=inside, other=0.0)  # usually equal to the first half, but transformers reads both
    sin_2 = tl.load(sin_ptr + at + HALF, mask=inside, other=0.0)
    out_ptr = heads.out + b * heads.out_b + n.to(tl.int64) * heads.out_n + t[:, None] * heads.out_t + d * heads.out_d
    tl.store(out_ptr, (first * cos - second * sin).to(lower.dtype), mask=inside)
    tl.store(out_ptr + HALF * heads.out_d, (second * cos_2 + first * sin_2).to(lower.dtype), mask=inside)


def norm_rope(
    x: Tensor, cos: Tensor, sin: Tensor, norm_weight: Tensor | None = None, eps: float = 1e-6, *, check: bool = True
) -> Tensor:
    """RMSNorm of each head, then rotary embedding of halves (Su et al. 2021), as transformers' `apply_rotary_pos_emb`.

    Args:
        x: [B, N, T, D] with any strides. D is even, at most 1024.
        cos, sin: [B, T, D], or [1, T, D] for all sequences; of x's dtype or fp32.
        norm_weight: [D], or None: no norm. eps: that of the norm.
    Returns:
        [B, N, T, D], its dimensions in memory in x's order.
    """
    if check:
        check_arguments("norm_rope", x=x, cos=cos, sin=sin, norm_weight=norm_weight)
    out = torch.empty_like(x)
    heads = _heads(x, out, norm_weight)
    _launch(heads, heads, x.shape[1], cos, sin, eps)
    return out


def qk_norm_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None = None, k_norm: Tensor | None = None,
    eps: float = 1e-6, *, check: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`norm_rope` of q [B, Nq, T, D] and k [B, Nk, T, D] in one launch. q_norm, k_norm: [D], or None for both."""
    if check:
        check_arguments("qk_norm_rope", q=q, k=k, cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm)
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    _launch(_heads(q, q_out, q_norm), _heads(k, k_out, k_norm), q.shape[1] + k.shape[1], cos, sin, eps)
    return q_out, k_out


def _heads(x: Tensor, out: Tensor, norm: Tensor | None) -> _Heads:
    return _Heads(x, out, norm, *x.stride(), *out.stride())


def _launch(q: _Heads, k: _Heads, heads: int, cos: Tensor, sin: Tensor, eps: float) -> None:
    B, N, T, D = q.x.shape
    if not B * T * heads:
        return
    tokens = B * T
    # Few tokens need small tiles to have enough programs, see `attention.rope_write.REGIMES`.
    block_t = min(next_power_of_2(T), 1 if tokens <= 16 else 8 if tokens <= 1024 else 32)
    tiles = cdiv(T, block_t)
    _norm_rope_kernel[(B * tiles, heads)](
        q, k, cos, sin, cos.stride(0) if cos.shape[0] > 1 else 0, eps, T, tiles,
        C=_Constants(N, D, next_power_of_2(D // 2), block_t), num_warps=1 if block_t == 1 else 4,
    )  # fmt: skip
