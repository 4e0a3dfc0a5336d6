"""Attention of one new token per sequence on the paged KV cache, alone or fused with what comes before it: per-head
RMSNorm, rotary embedding and the write of the new K and V.

Each sequence is cut into splits of a fixed number of tokens (Flash-Decoding, Dao et al. 2023), which do not depend on
the batch; a second kernel combines them in order, unless no sequence can have more than one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.attention import LOG2_E, MAX_GROUP, AttentionConfig, attend, check_inputs
from minirt.kernels.common import Workspace, check_activations, check_tensor, launch_options

CASES = [
    {"Nq": 4, "Nkv": 4, "D": 64, "page_size": 16, "seq_lens": (1, 2, 0), "split": 64},
    {"Nq": 3, "Nkv": 1, "D": 128, "page_size": 16, "seq_lens": (65, 64, 63, 129), "split": 64},
    {"Nq": 7, "Nkv": 1, "D": 64, "page_size": 64, "seq_lens": (500, 0, 7), "split": 128},
    {"Nq": 14, "Nkv": 2, "D": 64, "page_size": 128, "seq_lens": (257, 1100), "split": 256},
    {"Nq": 16, "Nkv": 2, "D": 128, "page_size": 32, "seq_lens": (100,), "split": 256},
    {"Nq": 16, "Nkv": 1, "D": 64, "page_size": 64, "seq_lens": (1300,), "split": 64},
]


@triton.jit
def _rotated(head_ptrs, norm_ptr, cos_sin_ptr, eps, D: tl.constexpr):
    """Whole heads [M, D] after RMSNorm (if norm_ptr is given) and rotary embedding, in fp32; head_ptrs [M, 1]."""
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, D)[None, :]
    partner = (d + HALF) % D  # channel d turns with channel d ± D/2: each is loaded in both places
    raw = tl.load(head_ptrs + d)
    x, y = raw.to(tl.float32), tl.load(head_ptrs + partner).to(tl.float32)
    if norm_ptr is not None:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = (x * scale).to(raw.dtype).to(tl.float32) * tl.load(norm_ptr + d).to(tl.float32)
        y = (y * scale).to(raw.dtype).to(tl.float32) * tl.load(norm_ptr + partner).to(tl.float32)
    cos, sin = tl.load(cos_sin_ptr + d % HALF), tl.load(cos_sin_ptr + HALF + d % HALF)
    return (x * cos + tl.where(d < HALF, -y, y) * sin).to(raw.dtype)


@triton.jit
def _decode_kernel(
    q_ptr,
    cos_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    seq_lens_ptr,
    out_ptr,
    sums_ptr,
    peaks_ptr,
    table_width,
    scale,
    eps,
    NQ: tl.constexpr,
    NKV: tl.constexpr,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """SPLIT tokens of one sequence for one KV head. A sequence of one split is finished here.

    With cos_sin_ptr q_ptr holds raw q, k and v heads, and the new token is not in the pages yet.
    """
    GROUP: tl.constexpr = NQ // NKV
    STRIDE: tl.constexpr = NKV * D
    HEADS: tl.constexpr = NQ if cos_sin_ptr is None else NQ + 2 * NKV
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, kv_head, split = tl.program_id(0) // NKV, tl.program_id(0) % NKV, tl.program_id(1)
    limit = tl.load(seq_lens_ptr + b)
    begin = split * SPLIT
    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)[None, :]
    b = b.to(tl.int64)
    head = kv_head * GROUP + tl.minimum(row, GROUP - 1)  # rows past the group repeat its last head and are not stored
    valid = row < GROUP
    out_row = b * NQ + head
    if begin < limit:
        k_ptr += kv_head * D
        v_ptr += kv_head * D
        table_ptr = tables_ptr + b * table_width
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, D), tl.float32)
        q_ptrs = q_ptr + ((b * HEADS + head) * D)[:, None]
        if cos_sin_ptr is None:
            q = tl.load(q_ptrs + d)
        else:
            limit -= 1  # the new token's position; from here on, the number of tokens in the pages
            cos_sin_ptr += limit.to(tl.int64) * D
            q = _rotated(q_ptrs, q_norm_ptr, cos_sin_ptr, eps, D)
            if limit < begin + SPLIT:
                # The last split: the online softmax starts with the new token, which nobody else reads.
                new_ptrs = q_ptr + (b * HEADS + NQ + kv_head) * D + tl.zeros((1, 1), tl.int32)
                k = _rotated(new_ptrs, k_norm_ptr, cos_sin_ptr, eps, D)
                v = tl.load(new_ptrs + NKV * D + d)
                page = tl.load(table_ptr + limit // PAGE_SIZE).to(tl.int64)
                at = (page * PAGE_SIZE + limit % PAGE_SIZE) * STRIDE + d
                tl.store(k_ptr + at, k)
                tl.store(v_ptr + at, v)
                peak = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
                total += 1.0
                acc += v.to(tl.float32)
        row_limit = tl.zeros((BLOCK_M,), tl.int32) + limit
        for first in range(begin, tl.minimum(begin + SPLIT, limit), BLOCK_N):
            peak, total, acc = attend(
                q, peak, total, acc, k_ptr, v_ptr, table_ptr, first, limit, row_limit, scale,
                STRIDE, PAGE_SIZE, D, BLOCK_N, True,
            )  # fmt: skip
        if tl.load(seq_lens_ptr + b) <= SPLIT:
            out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_row[:, None] * D + d, out, mask=valid[:, None])
        else:
            part = out_row * tl.num_programs(1) + split
            tl.store(sums_ptr + part[:, None] * D + d, acc, mask=valid[:, None])
            tl.store(peaks_ptr + 2 * part, peak, mask=valid)
            tl.store(peaks_ptr + 2 * part + 1, total, mask=valid)
    elif split == 0:  # an empty sequence: padding of a batch
        zeros = tl.zeros((BLOCK_M, D), out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_row[:, None] * D + d, zeros, mask=valid[:, None])


@triton.jit
def _combine_kernel(
    seq_lens_ptr,
    out_ptr,
    sums_ptr,
    peaks_ptr,
    num_splits,
    NQ: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weighted mean of the splits of one head of one sequence, BLOCK_S at a time, in order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    limit = tl.load(seq_lens_ptr + tl.program_id(0) // NQ)
    if limit > SPLIT:
        row = tl.program_id(0).to(tl.int64)
        d = tl.arange(0, D)[None, :]
        splits = tl.cdiv(limit, SPLIT)
        peak = tl.full((1,), float("-inf"), tl.float32)
        total = tl.zeros((1,), tl.float32)
        acc = tl.zeros((1, D), tl.float32)
        for first in range(0, splits, BLOCK_S):
            s = first + tl.arange(0, BLOCK_S)
            part = row * num_splits + s
            peaks = tl.load(peaks_ptr + 2 * part, mask=s < splits, other=float("-inf"))
            totals = tl.load(peaks_ptr + 2 * part + 1, mask=s < splits, other=0.0)
            sums = tl.load(sums_ptr + part[:, None] * D + d, mask=(s < splits)[:, None], other=0.0)
            new_peak = tl.maximum(peak, tl.max(peaks, 0))
            rescale = tl.exp2(peak - new_peak)
            weights = tl.exp2(peaks - new_peak)
            total = total * rescale + tl.sum(weights * totals, 0)
            acc = acc * rescale[:, None] + tl.sum(weights[:, None] * sums, 0)[None, :]
            peak = new_peak
        tl.store(out_ptr + row * D + d, (acc / total[:, None]).to(out_ptr.dtype.element_ty))


def choose_config(itemsize: int) -> AttentionConfig:
    """The configuration for an element size. Three of the five stages only hide the look-up of the page."""
    block_n, num_warps = (32, 8) if itemsize == 4 else (64, 4)
    return AttentionConfig(MAX_GROUP, block_n, num_warps, num_stages=5)


def split_size(max_context: int) -> int:
    """Tokens a split for a cache of sequences up to `max_context` tokens: 256, or what makes at most 64 splits.

    A property of the cache, never of a batch: the same sequence is cut in the same way whatever it is batched with.
    """
    return max(256, triton.next_power_of_2(triton.cdiv(max_context, 64)))


def workspace_floats(B: int, Nq: int, D: int, max_seq_len: int, split: int) -> int:
    """fp32 values that decoding keeps in the workspace."""
    splits = triton.cdiv(max_seq_len, split)
    return B * Nq * splits * (D + 2) if splits > 1 else 0


def paged_attention_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    workspace: Workspace,
    out: Tensor | None = None,
    *,
    split: int = 256,
    pdl: bool = False,
    check: bool = True,
    config: AttentionConfig | None = None,
) -> Tensor:
    """Attention of one token per sequence on all its cached ones, itself included: q [B, Nq, D] → [B, Nq, D].

    pages [P, page_size, Nkv, D]; block_tables [B, pages] int32; seq_lens [B] int32, 0: padding, whose result is 0.
    max_seq_len bounds seq_lens and sizes the grid (programs past a sequence's end return at once); that it does is not
    checked, which would need a read from the device. split: tokens a program reads, a power of two, see `split_size`.
    `pdl`: overlap with the kernel before it in the stream (sm_90 and later).
    """
    if check:
        check_activations("q", q, 3)
        _check(q, k_pages, v_pages, block_tables, seq_lens, q.shape[1], q.shape[2], out, split)
    out = torch.empty_like(q) if out is None else out
    cache = (k_pages, v_pages, block_tables, seq_lens)
    return _launch((q, None, None, None), cache, out, max_seq_len, scale, 0.0, workspace, split, pdl, config)


def rope_paged_attention_decode(
    qkv: Tensor,
    cos_sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    workspace: Workspace,
    Nq: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
    *,
    split: int = 256,
    pdl: bool = False,
    check: bool = True,
    config: AttentionConfig | None = None,
) -> Tensor:
    """`qk_norm_rope_kv_write` and `paged_attention_decode` in one kernel: qkv [B, (Nq + 2·Nkv)·D] → [B, Nq, D].

    seq_lens counts the new token, whose position is therefore seq_lens − 1 and whose page block_tables names; where
    seq_lens is 0 nothing is written. cos_sin [L, D] fp32 (cosines | sines); q_norm, k_norm [D]; the rest as in
    `paged_attention_decode`.
    """
    Nkv, D = k_pages.shape[2], k_pages.shape[3]
    B = qkv.shape[0]
    if check:
        check_activations("qkv", qkv)
        _check(qkv, k_pages, v_pages, block_tables, seq_lens, Nq, D, out, split)
        check_tensor("qkv", qkv, (None, (Nq + 2 * Nkv) * D), qkv.dtype, qkv.device)
        check_tensor("cos_sin", cos_sin, (None, D), torch.float32, qkv.device)
        for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
            if norm is not None:
                check_tensor(name, norm, (D,), qkv.dtype, qkv.device)
    out = torch.empty(B, Nq, D, dtype=qkv.dtype, device=qkv.device) if out is None else out
    cache = (k_pages, v_pages, block_tables, seq_lens)
    return _launch((qkv, cos_sin, q_norm, k_norm), cache, out, max_seq_len, scale, eps, workspace, split, pdl, config)


def _launch(
    inputs: tuple[Tensor | None, ...],
    cache: tuple[Tensor, Tensor, Tensor, Tensor],
    out: Tensor,
    max_seq_len: int,
    scale: float,
    eps: float,
    workspace: Workspace,
    split: int,
    pdl: bool,
    config: AttentionConfig | None,
) -> Tensor:
    k_pages, _, block_tables, seq_lens = cache
    (B, Nq, D), (page_size, Nkv) = out.shape, k_pages.shape[1:3]
    if B == 0:
        return out
    config = config or choose_config(out.element_size())
    splits = max(1, triton.cdiv(max_seq_len, split))
    sums = workspace.sums(workspace_floats(B, Nq, D, max_seq_len, split))
    peaks = sums[B * Nq * splits * D :] if splits > 1 else sums
    _decode_kernel[(B * Nkv, splits)](
        *inputs, *cache, out, sums, peaks, block_tables.shape[1], scale * LOG2_E, eps,
        NQ=Nq, NKV=Nkv, D=D, PAGE_SIZE=page_size, SPLIT=split, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        **launch_options(config.num_warps, config.num_stages, pdl),
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(B * Nq,)](
            seq_lens, out, sums, peaks, splits, NQ=Nq, D=D, SPLIT=split, BLOCK_S=16, **launch_options(4, 1, pdl)
        )
    return out


def _check(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    Nq: int,
    D: int,
    out: Tensor | None,
    split: int,
) -> None:
    check_inputs(q, k_pages, v_pages, block_tables, seq_lens, Nq, D)
    B = q.shape[0]
    check_tensor("seq_lens", seq_lens, (B,), torch.int32, q.device)
    if out is not None:
        check_tensor("out", out, (B, Nq, D), q.dtype, q.device)
    if split < 64 or split & (split - 1):
        raise InputError("not a power of two from 64", where="split", found=split)
