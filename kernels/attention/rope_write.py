"""Between the QKV projection and attention, in one kernel: per-head RMSNorm (Qwen3), rotary embedding, KV write."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.attention.constants import Constants
from minirt.kernels.attention.limits import FORMATS, HEAD_DIMS
from minirt.kernels.attention.online_softmax import existing
from minirt.kernels.attention.operands import KVPages, Rope
from minirt.kernels.checks import check_arguments
from minirt.kernels.fp8 import finite_magnitude, fp8_scale, to_fp8
from minirt.kernels.launch import cdiv, launch_options, next_power_of_2
from minirt.kernels.prepared import prepared
from minirt.kernels.regimes import AttentionLimits, Regime, SumOrder

CASES = [
    {"T": 1, "Nq": 7, "Nkv": 1, "D": 64, "page_size": 16}, {"T": 3, "Nq": 4, "Nkv": 4, "D": 128, "page_size": 16},
    {"T": 9, "Nq": 3, "Nkv": 1, "D": 512, "page_size": 16},
    {"T": 17, "Nq": 6, "Nkv": 2, "D": 64, "page_size": 32}, {"T": 40, "Nq": 16, "Nkv": 2, "D": 128, "page_size": 64},
]  # fmt: skip


_LIMITS = AttentionLimits(FORMATS, HEAD_DIMS, raw=True)
_SUMS = SumOrder("threads")  # of the norm


@dataclass(frozen=True, eq=False)
class WriteRegime(Regime):
    """`block_t`: tokens of a program. Small batches need few tokens per program to have enough programs."""

    block_t: int = 1
    limits: AttentionLimits = _LIMITS
    sums: SumOrder = _SUMS


REGIMES = (
    WriteRegime("rope_write", "tokens", 1, 16, block_t=1), WriteRegime("rope_write", "tokens", 17, 1024, block_t=8),
    WriteRegime("rope_write", "tokens", 1025, block_t=32),
)  # fmt: skip


_INVARIANT = 8  # `block_t` of all invariant steps


@prepared
@triton.jit(do_not_specialize=["T"])
def _kv_write_kernel(heads, rope, pages, positions_ptr, slots_ptr, q_ptr, T, C, PDL: tl.constexpr):
    """One head (of q, k or v) of BLOCK_M tokens."""
    head = tl.program_id(1)
    t = tl.program_id(0).to(tl.int64) * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    inside = t < T
    d, step, pair = _pairs(C)
    loaded = existing(inside[:, None], pair, C.D // 2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if rope.v_is_k:
        heads_ptrs = heads + (t * C.ROW + tl.where(head < C.NQ + C.NKV, head, head - C.NKV) * C.D)[:, None] + d
    elif C.ROW == (C.NQ + 2 * C.NKV) * C.D:
        heads_ptrs = heads + (t * (C.NQ + 2 * C.NKV) + head)[:, None] * C.D + d
    else:
        heads_ptrs = heads + (t * C.ROW + head * C.D)[:, None] + d
    lower = tl.load(heads_ptrs, mask=loaded, other=0.0)
    upper = tl.load(heads_ptrs + step, mask=loaded, other=0.0)
    if head < C.NQ + C.NKV:
        position = tl.load(positions_ptr + t, mask=inside, other=0)[:, None]
        if head < C.NQ:
            lower, upper = _rotate(lower, upper, rope.q_norm, rope, position, rope.q_scales, C)
        else:
            lower, upper = _rotate(lower, upper, rope.k_norm, rope, position, None, C)
    if head < C.NQ:
        ptrs = q_ptr + (t * C.NQ + head)[:, None] * C.D + d
        tl.store(ptrs, lower, mask=loaded)
        tl.store(ptrs + step, upper, mask=loaded)
    else:
        # A negative slot marks a token of padding in a CUDA graph. It is not stored.
        slot = tl.load(slots_ptr + t, mask=inside, other=-1)[:, None]
        if head < C.NQ + C.NKV:
            _store(lower, upper, slot, head - C.NQ, pages.k, pages.k_scale, C)
        else:
            if rope.normalize_v:
                a, b = lower.to(tl.float32), upper.to(tl.float32)
                scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / C.D + rope.eps)[:, None]
                lower, upper = (a * scale).to(lower.dtype), (b * scale).to(upper.dtype)
            _store(lower, upper, slot, head - C.NQ - C.NKV, pages.v, pages.v_scale, C)


@triton.jit
def _pairs(C):
    """The lower channels of pairs, how far above them the upper ones are, and the pairs' numbers: [1, BLOCK_D/2], or one number.

    Rotated channels are R/2 apart. Those that are not rotated make up the pairs behind, (D − R)/2 apart.
    """
    pair = tl.arange(0, C.BLOCK_D // 2)[None, :]
    if C.R == C.D or C.R == 0:
        return pair, C.D // 2, pair
    else:
        rotated = pair < C.R // 2
        return pair + tl.where(rotated, 0, C.R // 2), tl.where(rotated, C.R // 2, (C.D - C.R) // 2), pair


@triton.jit
def _store(lower, upper, slot, kv_head, pages_ptr, scales_ptr, C):
    """Store heads, given as the channels of pairs [M, D/2], in their slots [M, 1]; quantized to FP8 if there are scales."""
    row = slot * C.NKV + kv_head
    if scales_ptr is not None:
        scale = fp8_scale(tl.max(tl.maximum(finite_magnitude(lower), finite_magnitude(upper)), 1))[:, None]
        lower, upper = to_fp8(lower, scale), to_fp8(upper, scale)
        tl.store(scales_ptr + row, scale, mask=slot >= 0)
    d, step, pair = _pairs(C)
    stored = existing(slot >= 0, pair, C.D // 2)
    ptrs = pages_ptr + row * C.D + d
    tl.store(ptrs, lower, mask=stored)
    tl.store(ptrs + step, upper, mask=stored)


@triton.jit
def _rotate(lower, upper, norm_ptr, rope, position, scales_ptr, C):
    """RMSNorm (if norm_ptr is given, or all heads are normalized), rotary embedding and a scale (if scales_ptr is given).

    lower, upper: [M, D/2], the first and second half of the channels of M heads; position: [M, 1].
    """
    dtype: tl.constexpr = lower.dtype
    d, step, pair = _pairs(C)
    a, b = lower.to(tl.float32), upper.to(tl.float32)
    if norm_ptr is not None or rope.normalize:
        square = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        scale = tl.rsqrt(square / C.D + rope.eps)[:, None]
        a = (a * scale).to(dtype).to(tl.float32)
        b = (b * scale).to(dtype).to(tl.float32)
    if norm_ptr is not None:
        a = a * _load_pairs(norm_ptr + d, pair, C.D // 2, 0.0).to(tl.float32)
        b = b * _load_pairs(norm_ptr + step + d, pair, C.D // 2, 0.0).to(tl.float32)
    if C.R > 0:
        angles_ptrs = rope.cos_sin + position * C.R + pair
        cos, sin = _load_pairs(angles_ptrs, pair, C.R // 2, 1.0), _load_pairs(angles_ptrs + C.R // 2, pair, C.R // 2, 0.0)
        turned, turned_partner = a * cos - b * sin, b * cos + a * sin
        if C.R == C.D:
            a, b = turned, turned_partner
        else:  # an infinity times a sine of zero is NaN
            a, b = tl.where(pair < C.R // 2, turned, a), tl.where(pair < C.R // 2, turned_partner, b)
    if scales_ptr is not None:
        factor = tl.load(scales_ptr + position)
        a, b = a * factor, b * factor
    return a.to(dtype), b.to(dtype)


@triton.jit
def _load_pairs(ptrs, pair, COUNT: tl.constexpr, other: tl.constexpr):
    """Load what belongs to each pair; `other` for those from COUNT on, if there are more."""
    if pair.shape[1] == COUNT:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=pair < COUNT, other=other)


def qk_norm_rope_kv_write(
    qkv: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, k_pages: Tensor, v_pages: Tensor, Nq: int, Nkv: int,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6, q_out: Tensor | None = None, *,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None, pdl: bool = False, check: bool = True,
) -> Tensor:  # fmt: skip
    """Normalize (if q_norm and k_norm are given) and rotate q and k, write k and v to the pages, and return q.

    Args:
        qkv: [T, (Nq + 2·Nkv)·D], the heads of q, then of k, then of v. D is one of `limits.HEAD_DIMS`. Rows may lie apart.
        cos_sin: [L, R] fp32 (cosines | sines): the first R channels of a head are rotated.
        positions: [T] int64 in [0, L), rows of cos_sin.
        slots: [T] int64, page · page_size + offset. If negative, k and v are not stored.
        k_pages, v_pages: [P, page_size, Nkv, D], of qkv's dtype. With k_scales, v_scales [P, page_size, Nkv] fp32: float8_e4m3fn;
            V and the rotated K are then quantized as in `reference.quantize_fp8`, with a scale for each token and head.
        q_norm, k_norm: [D].
        q_out: [T, Nq, D], for the result.
        pdl: overlap with the kernel before it in the stream (sm_90 and later).
    Returns:
        q [T, Nq, D].
    Raises:
        InputError: tensors do not fit each other.
        UnsupportedError: FP8 pages on a GPU without FP8.
    """
    if check:
        check_arguments(
            "qk_norm_rope_kv_write", qkv=qkv, cos_sin=cos_sin, positions=positions, slots=slots, k_pages=k_pages, v_pages=v_pages,
            Nq=Nq, Nkv=Nkv, q_norm=q_norm, k_norm=k_norm, k_scales=k_scales, v_scales=v_scales, q_out=q_out,
        )  # fmt: skip
    T, D = qkv.shape[0], k_pages.shape[-1]
    rope, pages = Rope(cos_sin, q_norm, k_norm, eps), KVPages(k_pages, v_pages, k_scales, v_scales)
    q_out = torch.empty(T, Nq, D, dtype=qkv.dtype, device=qkv.device) if q_out is None else q_out
    launch(qkv, rope, pages, positions, slots, q_out, pdl)
    return q_out


def launch(
    heads: Tensor, rope: Rope, pages: KVPages, positions: Tensor, slots: Tensor, q_out: Tensor, pdl: bool = False,
    invariant: bool = False,
) -> None:  # fmt: skip
    """`qk_norm_rope_kv_write` of operands that were checked before. invariant: one order of a norm's sum for any T."""
    (T, Nq, D), Nkv = q_out.shape, pages.num_kv_heads
    if T == 0:
        return
    block_t = _INVARIANT if invariant else next(regime.block_t for regime in REGIMES if regime.covers(T))
    _kv_write_kernel[(cdiv(T, block_t), Nq + 2 * Nkv)](
        heads, rope, pages.for_kernel(torch.uint8), positions, slots, q_out, T,
        C=Constants(Nq, Nkv, D, pages.page_size, next_power_of_2(D), True, heads.stride(0), rope.channels, BLOCK_M=block_t),
        **launch_options(1 if block_t == 1 else 4, 1, pdl),
    )  # fmt: skip


def cost(T: int, Nq: int, Nkv: int, D: int, itemsize: int, fp8: bool = False) -> tuple[int, int]:
    """(bytes read and written, floating-point operations). `fp8`: the pages are FP8, with a scale for each token and head."""
    head = D + 4 if fp8 else D * itemsize
    return T * ((2 * Nq + 2 * Nkv) * D * itemsize + 2 * Nkv * head + 4 * D + 16), 3 * T * (Nq + Nkv) * D
