"""Attention on the paged KV cache: the public functions, their checks, and which kernel computes what.

`decode` computes attention of one new token for each sequence; in pure decode steps it is fused with QK-norm, rotary embedding
and the KV write. `prefill` computes prompts and chunks of them. `partial` computes few new tokens on a long context, which it
divides into parts. On Hopper, `decode_sm90`, `decode_fp8_sm90` and `prefill_sm90` take over where they can; FP8 pages are
copied to 16 bits for `prefill_sm90` (`widen_kv`). The tables below state which steps each kernel is for.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.attention import decode, decode_fp8_sm90, decode_sm90, partial, prefill, prefill_sm90, widen_kv
from minirt.kernels.attention.combine import combine
from minirt.kernels.attention.limits import HEAD_DIMS, KV_SPLIT, MAX_GROUP, MAX_WIDENED_TOKENS
from minirt.kernels.attention.operands import (
    Decode,
    KVPages,
    Prefill,
    Rope,
    Scratch,
    decode_lookup_size,
    prefill_lookup_size,
)
from minirt.kernels.attention.rope_write import check_pages
from minirt.kernels.attention.work_items_sm90 import MOST_SEQUENCES
from minirt.kernels.checks import check_activations, check_tensor
from minirt.kernels.launch import Workspace, capability
from minirt.kernels.linear.dispatch import fetches_early
from minirt.kernels.regimes import Regime, covering

_SPLITS = (64, 128, 256, 512, 1024)


@dataclass(frozen=True, eq=False)
class DecodeRegime(Regime):
    """`launch` runs the kernel on operands that `accepts` does not refuse."""

    launch: Callable[[Decode], None] = decode.launch
    accepts: Callable[[Decode], bool] = lambda decode: True


@dataclass(frozen=True, eq=False)
class PrefillRegime(Regime):
    """For heads of `head_dim` channels (None: any). `launch` runs the kernel on operands that `accepts` does not refuse."""

    head_dim: int | None = None
    launch: Callable[[Prefill], None] = prefill.launch
    accepts: Callable[[Prefill], bool] = lambda prefill: True


# The first regime that covers the sequences and accepts the operands computes them.
DECODE = (
    DecodeRegime(
        "decode_sm90", "sequences", 1, MOST_SEQUENCES, variant=decode_lookup_size, capability=90, launch=decode_sm90.launch,
        accepts=decode_sm90.accepts,
    ),
    DecodeRegime(
        "decode_fp8_sm90", "sequences", 1, MOST_SEQUENCES, variant=decode_fp8_sm90.variant, capability=90,
        launch=decode_fp8_sm90.launch, accepts=decode_fp8_sm90.accepts,
    ),
    DecodeRegime("decode", "sequences", 1, variant=decode_lookup_size),
)  # fmt: skip
# TFLOP/s of `prefill_sm90` and of `prefill` for prompts on an H200: with head size 128, 139 and 108 at 512 tokens (the fewest
# that were measured); with head size 64, 44 and 53 at 512 tokens, 123 and 115 at 1024.
_SM90 = PrefillRegime("prefill_sm90", "tokens", 1, capability=90, launch=prefill_sm90.launch, accepts=prefill_sm90.accepts)
PREFILL = (
    replace(_SM90, first=512, head_dim=128),
    replace(_SM90, first=1024, head_dim=64),
    PrefillRegime("prefill", "tokens", 1),
)
PREFILL_SEQUENCES = (Regime("prefill and partial", "sequences", 1, variant=prefill_lookup_size),)
# Steps of one sequence in which `partial` runs beside `prefill`. (With several sequences it always does, since only the device
# knows how many new tokens each one has.) A step of one sequence is padded at most to the next multiple of 128 tokens, so the
# last size is `partial`'s own bound.
PARTIAL = (Regime("partial", "tokens", 2, partial.MOST.value),)


def paged_attention_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    split_starts: Tensor,
    max_splits: int,
    scale: float,
    workspace: Workspace,
    out: Tensor | None = None,
    *,
    query_starts: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    split: int = KV_SPLIT,
    max_seq_len: int | None = None,
    pdl: bool = False,
    check: bool = True,
    config: decode.DecodeConfig | None = None,
) -> Tensor:
    """Attention of one new token per sequence on all cached tokens of the sequence, itself included: q [B, Nq, D] → [B, Nq, D].

    Args:
        k_pages, v_pages: [P, page_size, Nkv, D], of q's dtype. With k_scales, v_scales [P, page_size, Nkv] fp32: float8_e4m3fn.
        block_tables: [B, pages] int32.
        seq_lens: [B] int32; 0: padding, whose result is 0.
        split_starts: [B + 1] int32: `decode.splits_before` of the same lengths and split.
        max_splits: upper bound of split_starts[B]. It sizes the grid and the workspace.
        scale: factor of the scores, positive.
        query_starts: [B + 1] int32. If given, q is [T, Nq, D] and has query_starts[b + 1] - query_starts[b] rows for sequence b.
            Only sequences with one row are computed. `paged_attention_prefill` with shortest=2 computes the others.
        split: tokens of a KV split, a power of two from 64 to 1024. Results depend on it by rounding, but not on the rest of the
            batch.
        max_seq_len: upper bound of seq_lens. If it is at most `split`, nothing is combined, and `out` is not written for padding.
        pdl: overlap with the kernel before it in the stream (sm_90 and later). That kernel must not write block_tables, seq_lens
            or split_starts.
        config: configuration of `decode`, which then runs even where another kernel would take over.
    Raises:
        InputError: tensors do not fit each other. Whether lengths, starts and bounds agree is not checked, because that needs a
            read from the device.
    """
    if check:
        check_activations("q", q, 3)
        _check_scale(scale)
        _check(q, k_pages, v_pages, k_scales, v_scales, block_tables, seq_lens, split_starts, q.shape[1], q.shape[2], out, split)
        if query_starts is None:
            check_tensor("seq_lens", seq_lens, (q.shape[0],), torch.int32, q.device)
        else:
            check_tensor("query_starts", query_starts, (seq_lens.shape[0] + 1,), torch.int32, q.device)
    out = torch.empty_like(q) if out is None else out
    pages, scratch = KVPages(k_pages, v_pages, k_scales, v_scales), Scratch.of(workspace, max_splits * q.shape[1], q.shape[2])
    operands = Decode(
        q, None, pages, block_tables, seq_lens, split_starts, query_starts, out, *scratch, max_splits, scale, split, pdl, False
    )
    return _decode(operands, max_seq_len, config)


def rope_paged_attention_decode(
    qkv: Tensor,
    cos_sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    split_starts: Tensor,
    max_splits: int,
    scale: float,
    workspace: Workspace,
    Nq: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    split: int = KV_SPLIT,
    max_seq_len: int | None = None,
    pdl: bool = False,
    check: bool = True,
    config: decode.DecodeConfig | None = None,
) -> Tensor:
    """`qk_norm_rope_kv_write` and `paged_attention_decode` in one kernel: qkv [B, (Nq + 2·Nkv)·D] → [B, Nq, D].

    Args:
        cos_sin: [L, D] fp32 (cosines | sines).
        seq_lens: [B] int32, including the new token: its position is seq_lens − 1, and block_tables has its page. If it is 0,
            nothing is written to the pages.
        q_norm, k_norm: [D].
        pdl: as in `paged_attention_decode`. The kernel before must not write to the pages either, because older tokens are read
            while it runs.

    The other arguments and errors are those of `paged_attention_decode`.
    """
    Nkv, D = k_pages.shape[2], k_pages.shape[3]
    B = qkv.shape[0]
    if check:
        check_activations("qkv", qkv)
        _check_scale(scale)
        check_tensor("seq_lens", seq_lens, (B,), torch.int32, qkv.device)
        _check(qkv, k_pages, v_pages, k_scales, v_scales, block_tables, seq_lens, split_starts, Nq, D, out, split)
        check_tensor("qkv", qkv, (None, (Nq + 2 * Nkv) * D), qkv.dtype, qkv.device)
        check_tensor("cos_sin", cos_sin, (None, D), torch.float32, qkv.device)
        for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
            if norm is not None:
                check_tensor(name, norm, (D,), qkv.dtype, qkv.device)
    out = torch.empty(B, Nq, D, dtype=qkv.dtype, device=qkv.device) if out is None else out
    pages, scratch = KVPages(k_pages, v_pages, k_scales, v_scales), Scratch.of(workspace, max_splits * Nq, D)
    operands = Decode(
        qkv, Rope(cos_sin, q_norm, k_norm, eps), pages, block_tables, seq_lens, split_starts, None, out, *scratch, max_splits,
        scale, split, pdl, fetches_early(B, out.device),
    )  # fmt: skip
    return _decode(operands, max_seq_len, config)


def paged_attention_prefill(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    out: Tensor | None = None,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    shortest: int = 1,
    workspace: Workspace | None = None,
    max_splits: int = 0,
    split: int = KV_SPLIT,
    check: bool = True,
    config: prefill.AttentionConfig | None = None,
) -> Tensor:
    """Causal attention of each sequence's new tokens on all its cached tokens, including the new ones → [T, Nq, D].

    The launch depends on shapes alone, so a CUDA graph of it serves any batch that is padded to T and B.

    Args:
        q: [T, Nq, D], one sequence after the other. Rows after the last sequence's are padding; `out` is not written there.
        k_pages, v_pages: [P, page_size, Nkv, D], of q's dtype. With k_scales, v_scales [P, page_size, Nkv] fp32: float8_e4m3fn.
        block_tables: [B, pages] int32.
        query_starts: [B + 1] int32, ascending; the first is 0, the last at most T. A sequence without rows is padding.
        seq_lens: [B] int32, including the new tokens.
        scale: factor of the scores, positive.
        shortest: sequences with fewer new tokens are not computed.
        workspace: if given, few new tokens on a long context are computed in parts (`partial`).
        max_splits: upper bound of the KV splits (of `split` tokens) of all sequences, incomplete ones included; 0: unknown. If
            it is known, prompts on FP8 pages are computed on a 16-bit copy where that is faster (Hopper).
        config: configuration of `prefill`, which then runs even where another kernel would take over.
    Raises:
        InputError: tensors do not fit each other, or there is a workspace but no max_splits.
    """
    B = seq_lens.shape[0]
    if check:
        check_activations("q", q, 3)
        _check_pages(q, k_pages, v_pages, k_scales, v_scales, block_tables, seq_lens, q.shape[1], q.shape[2])
        if out is not None:
            check_tensor("out", out, tuple(q.shape), q.dtype, q.device)
        check_tensor("query_starts", query_starts, (B + 1,), torch.int32, q.device)
        _check_scale(scale)
        if workspace is not None and max_splits < 1:
            raise InputError("not positive", where="max_splits", expected="a bound, with a workspace", found=max_splits)
        if workspace is not None and shortest > 2:
            raise InputError("too large", where="shortest", expected="at most 2, with a workspace", found=shortest)
    out = torch.empty_like(q) if out is None else out
    tokens = q.shape[0]
    if tokens == 0 or B == 0:
        return out
    pages, parts = KVPages(k_pages, v_pages, k_scales, v_scales), 0
    if workspace is not None and max_splits > 1 and tokens > 1 and (B > 1 or PARTIAL[0].covers(tokens)):
        parts = split
    operands = Prefill(q, pages, block_tables, query_starts, seq_lens, out, scale, shortest, parts, max_splits)
    if workspace is not None and parts:
        partial.launch(operands, workspace)
    if config is not None:
        prefill.launch(operands, config)
        return out
    # `prefill_sm90` takes only 16-bit pages. FP8 pages are widened if it would accept the copies.
    widens = pages.k_scale is not None and 0 < max_splits * split <= MAX_WIDENED_TOKENS
    own = prefill_regime(operands._replace(pages=KVPages(q, q)) if widens else operands)
    if widens and own.launch is not prefill.launch:
        operands = widen_kv.widen(operands, split)
    own.launch(operands)
    return out


def decode_regime(operands: Decode) -> DecodeRegime:
    """The regime that computes decode attention."""
    found = covering(DECODE, operands.num_seqs, capability(operands.out.device))
    return next(own for own in found if own.accepts(operands))


def prefill_regime(operands: Prefill) -> PrefillRegime:
    """The regime that computes the attention of prompts."""
    tokens, _, head_dim = operands.q.shape
    found = covering(PREFILL, tokens, capability(operands.q.device))
    return next(own for own in found if own.head_dim in (None, head_dim) and own.accepts(operands))


def _decode(operands: Decode, max_seq_len: int | None, config: decode.DecodeConfig | None) -> Tensor:
    out = operands.out
    if operands.num_seqs == 0:
        return out
    if config is not None:
        decode.launch(operands, config)
    else:
        decode_regime(operands).launch(operands)
    if max_seq_len is None or max_seq_len > operands.split:
        # It also fills the rows of empty sequences. Only the device knows whether a sequence has several splits.
        combine(operands)
    return out


def _check_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    Nq: int,
    D: int,
) -> None:
    """Raise InputError unless pages, tables and lengths fit each other, and q's dtype, device and Nq heads of size D."""
    if D not in HEAD_DIMS:
        raise InputError("unsupported head size", where="q", expected="64 or 128", found=D)
    check_pages(k_pages, v_pages, k_scales, v_scales, None, D, q)
    page_size, Nkv = k_pages.shape[1:3]
    if page_size < 16 or page_size & (page_size - 1):
        raise InputError("unsupported page size", where="k_pages", expected="a power of two from 16", found=page_size)
    if Nq % Nkv or Nq // Nkv > MAX_GROUP:
        what = f"a multiple of {Nkv} KV heads, at most {MAX_GROUP} times as many"
        raise InputError("unsupported number of query heads", where="q", expected=what, found=Nq)
    check_tensor("seq_lens", seq_lens, (None,), torch.int32, q.device)
    check_tensor("block_tables", block_tables, (seq_lens.shape[0], None), torch.int32, q.device)


def _check_scale(scale: float) -> None:
    """Raise InputError unless the factor of the scores is positive: the row maximum is computed before the factor is applied."""
    if not scale > 0:
        raise InputError("not positive", where="scale", found=scale)


def _check(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, k_scales: Tensor | None, v_scales: Tensor | None, block_tables: Tensor,
    seq_lens: Tensor, split_starts: Tensor, Nq: int, D: int, out: Tensor | None, split: int,
) -> None:  # fmt: skip
    _check_pages(q, k_pages, v_pages, k_scales, v_scales, block_tables, seq_lens, Nq, D)
    check_tensor("split_starts", split_starts, (seq_lens.shape[0] + 1,), torch.int32, q.device)
    if out is not None:
        check_tensor("out", out, (q.shape[0], Nq, D), q.dtype, q.device)
    if split not in _SPLITS:
        raise InputError("not a power of two from 64 to 1024", where="split", found=split)
