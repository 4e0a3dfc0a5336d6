"""Attention on the paged KV cache: `attention`, the public functions, and which kernel computes what.

If each sequence has one new token, `decode` computes attention, fused with QK-norm, rotary embedding and the KV write. In other
steps `rope_write` writes K and V. If no sequence has more than 1 + MAX_DRAFTS new tokens, as when drafts are verified,
`decode_few` computes all of them. In steps with prompts, `decode` computes the sequences with one new token, `partial` those with
few new tokens on a long context, and `prefill` the others. `combine` adds the KV splits of `decode` and `decode_few`. FP8 pages
are copied to 16 bits for `prefill_sm90` (`widen_kv`). The tables below state which steps each kernel is for.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.attention import (
    decode,
    decode_few,
    decode_fp8_sm90,
    decode_sm90,
    partial,
    prefill,
    prefill_sm90,
    rope_write,
    widen_kv,
)
from minirt.kernels.attention.checks import check_attention, check_decode, check_decode_few
from minirt.kernels.attention.combine import combine
from minirt.kernels.attention.limits import ANY, KV_SPLIT, MAX_WIDENED_TOKENS
from minirt.kernels.attention.operands import (
    AttentionInput,
    KVPages,
    Rope,
    Scores,
    Sequences,
    decode_lookup_size,
    prefill_lookup_size,
)
from minirt.kernels.attention.work_items_sm90 import MOST_SEQUENCES
from minirt.kernels.launch import Workspace, capability
from minirt.kernels.regimes import AttentionLimits, Regime, SumOrder, covering
from minirt.kernels.special_limits import SPECIAL

# Kernels for one new token also take raw heads, and limit the split.
_DECODE = replace(ANY, raw=None, split=1024)
_SPLITS = SumOrder("steps", splits=True)
_INVARIANT = replace(_SPLITS, invariant=True)
_INVARIANT_PROMPTS = SumOrder("steps", invariant=True)


@dataclass(frozen=True, eq=False)
class AttentionRegime(Regime):
    """`launch` runs the kernel on operands that `accepts` does not refuse."""

    launch: Callable[[AttentionInput], None] = decode.launch
    limits: AttentionLimits = _DECODE
    sums: SumOrder = _SPLITS

    def accepts(self, a: AttentionInput) -> bool:
        """Whether operands that `check_attention` has not refused are within the kernel's limits."""
        limits = self.limits
        if a.format not in limits.formats or limits.raw is (a.rope is None):
            return False
        if limits.split is not None and a.split > limits.split:
            return False
        if not limits.turned_v and a.rope is not None and (a.rope.normalize_v or a.rope.v_is_k):
            return False
        Nq, Nkv, D = a.head_shape
        if D not in limits.head_dims:
            return False
        if limits.tile_queries is not None and min(Nkv, 128 // D) * (Nq // Nkv) > limits.tile_queries:
            return False
        return limits.alignment == 1 or a.aligned(limits.alignment)


# The first regime that covers the sequences or tokens, and accepts the operands, computes them.
DECODE = (
    AttentionRegime(
        "decode_sm90", "sequences", 1, MOST_SEQUENCES, variant=decode_lookup_size, capability=90, launch=decode_sm90.launch,
        limits=SPECIAL[90].attention["decode_sm90"],
    ),
    AttentionRegime(
        "decode_fp8_sm90", "sequences", 1, MOST_SEQUENCES, variant=decode_fp8_sm90.variant, capability=90,
        launch=decode_fp8_sm90.launch, limits=SPECIAL[90].attention["decode_fp8_sm90"],
    ),
    AttentionRegime("decode", "sequences", 1, variant=decode_lookup_size, sums=_INVARIANT),
)  # fmt: skip
FEW = (  # steps in which no sequence has more than 1 + MAX_DRAFTS new tokens, and some have several
    AttentionRegime(
        "decode_few", "sequences", 1, variant=decode_lookup_size, launch=decode_few.launch, limits=replace(_DECODE, raw=False),
        sums=_INVARIANT,
    ),
)  # fmt: skip
_SM90 = AttentionRegime(
    "prefill_sm90", "tokens", 1, capability=90, launch=prefill_sm90.launch, limits=SPECIAL[90].attention["prefill_sm90"],
    sums=SumOrder("steps"),
)  # fmt: skip
PREFILL = (  # docs/decisions/attention-prefill.md
    replace(_SM90, first=512, limits=replace(_SM90.limits, head_dims=(128,)), sums=_INVARIANT_PROMPTS),
    replace(_SM90, first=512, limits=replace(_SM90.limits, head_dims=(256, 512))),
    replace(_SM90, first=1024, limits=replace(_SM90.limits, head_dims=(64,)), sums=_INVARIANT_PROMPTS),
    AttentionRegime("prefill", "tokens", 1, launch=prefill.launch, limits=ANY, sums=_INVARIANT_PROMPTS),
)
PREFILL_SEQUENCES = (Regime("prefill and partial", "sequences", 1, variant=prefill_lookup_size),)
# Steps of one sequence in which `partial` runs beside `prefill`. (With several sequences it always does, since only the device
# knows how many new tokens each one has.) A step of one sequence is padded at most to the next multiple of 128 tokens, so the
# last size is `partial`'s bound.
PARTIAL = (
    AttentionRegime(
        "partial", "tokens", 2, partial.MOST.value, launch=partial.launch, limits=ANY,
        sums=replace(_SPLITS, by_tokens=True),
    ),
)  # fmt: skip


def attention(a: AttentionInput) -> Tensor:
    """All kernels of one attention layer's step: with `rope`, QK-norm, rotary embedding and KV write; then attention.

    Returns:
        `a.out`. If each sequence has one token and `max_seq_len` is at most `split`, it is not written for padding.
    """
    if a.invariant:  # the kernels that write K and V themselves compute the new token's score in another order
        a = _written(a)
    if a.sequences.query_starts is None:
        return _by_splits(a, DECODE)
    few = a.max_query_len is not None and 1 < a.max_query_len <= decode_few.QUERIES
    a = a if few else a._replace(max_seq_len=None, pdl=False)  # PDL gains nothing in steps with prompts
    if few or a.num_seqs <= 1:
        a = _written(a)
        return _by_splits(a, FEW, decode_few.QUERIES) if few else _prefill(a)
    # Sequences with one new token, whose contexts are split, depend on no kernel of the others.
    if a.side is None:
        _by_splits(a, DECODE)
        return _prefill(_written(a)._replace(shortest=2))
    with a.side.fork():
        _by_splits(a._replace(workspace=a.side.workspace), DECODE)
    _prefill(_written(a)._replace(shortest=2))
    a.side.join()
    return a.out


def _written(a: AttentionInput) -> AttentionInput:
    """Queries, rotated, in place of raw heads, whose K and V are in the pages then."""
    if a.rope is None:
        return a
    if a.positions is None or a.slots is None:
        raise InputError("missing", where="positions, slots", expected="those of the new tokens, with query_starts")
    q = torch.empty_like(a.out)
    rope_write.launch(a.heads, a.rope, a.pages, a.positions, a.slots, q, a.pdl, a.invariant)
    return a._replace(heads=q, rope=None)


def paged_attention_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, seq_lens: Tensor, split_starts: Tensor,
    max_splits: int, scale: float, workspace: Workspace, out: Tensor | None = None, *,
    query_starts: Tensor | None = None, k_scales: Tensor | None = None, v_scales: Tensor | None = None,
    split: int = KV_SPLIT, max_seq_len: int | None = None, pdl: bool = False, window: int | None = None, check: bool = True,
) -> Tensor:  # fmt: skip
    """Attention of one new token per sequence on all cached tokens of the sequence, itself included: q [B, Nq, D] → [B, Nq, D].

    Args:
        k_pages, v_pages: [P, page_size, Nkv, D], of q's dtype. With k_scales, v_scales [P, page_size, Nkv] fp32: float8_e4m3fn.
        block_tables: [B, pages] int32.
        seq_lens: [B] int32; 0: padding, whose result is 0.
        split_starts: [B + 1] int32: `decode.splits_before` of the same lengths, split and window.
        max_splits: upper bound of split_starts[B]. It sizes the grid and the workspace.
        scale: factor of the scores, positive.
        query_starts: [B + 1] int32. If given, q is [T, Nq, D] and has query_starts[b + 1] - query_starts[b] rows for sequence b.
            Only sequences with one row are computed. `paged_attention_prefill` with shortest=2 computes the others.
        split: tokens of a KV split, a power of two from 64 to 1024. Results depend on it by rounding, but not on the rest of the
            batch.
        max_seq_len: upper bound of seq_lens. If it is at most `split`, nothing is combined, and `out` is not written for padding.
        pdl: overlap with the kernel before it in the stream (sm_90 and later). That kernel must not write int32 tensors above.
        window: a token sees itself and the window − 1 tokens before it. Older ones are not read: their pages may hold anything.
    Raises:
        InputError: tensors do not fit each other. Whether lengths, starts and bounds agree is not checked, because that needs a
            read from the device.
    """
    out = torch.empty_like(q) if out is None else out
    a = AttentionInput(
        q, KVPages(k_pages, v_pages, k_scales, v_scales), Sequences(block_tables, seq_lens, split_starts, query_starts),
        Scores(scale, window), out, workspace=workspace, max_splits=max_splits, max_seq_len=max_seq_len, split=split, pdl=pdl,
    )  # fmt: skip
    if check:
        check_decode(a)
    return _by_splits(a, DECODE)


def paged_attention_decode_few(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, query_starts: Tensor, seq_lens: Tensor,
    split_starts: Tensor, max_splits: int, max_query_len: int, scale: float, workspace: Workspace,
    out: Tensor | None = None, *, k_scales: Tensor | None = None, v_scales: Tensor | None = None, split: int = KV_SPLIT,
    max_seq_len: int | None = None, pdl: bool = False, window: int | None = None, check: bool = True,
) -> Tensor:  # fmt: skip
    """Causal attention of up to 8 new tokens of each sequence on all its cached tokens, including the new ones → [T, Nq, D].

    K and V are read in splits, as in `paged_attention_decode`. The result of a token depends on neither the other sequences nor
    the number of new tokens after it.

    Args:
        q: [T, Nq, D], one sequence after the other. Rows after the last sequence's are padding; `out` is not written there.
        query_starts: [B + 1] int32, ascending; the first is 0, the last at most T. A sequence without rows is padding.
        seq_lens: [B] int32, including the new tokens.
        max_query_len: upper bound of a sequence's rows, from 1 to 8.

    The other arguments and errors are those of `paged_attention_decode`.
    """
    out = torch.empty_like(q) if out is None else out
    a = AttentionInput(
        q, KVPages(k_pages, v_pages, k_scales, v_scales), Sequences(block_tables, seq_lens, split_starts, query_starts),
        Scores(scale, window), out, workspace=workspace, max_splits=max_splits, max_seq_len=max_seq_len,
        max_query_len=max_query_len, split=split, pdl=pdl,
    )  # fmt: skip
    if check:
        check_decode_few(a)
    return _by_splits(a, FEW, decode_few.QUERIES)


def rope_paged_attention_decode(
    qkv: Tensor, cos_sin: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, seq_lens: Tensor,
    split_starts: Tensor, max_splits: int, scale: float, workspace: Workspace, Nq: int, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, eps: float = 1e-6, out: Tensor | None = None, *, k_scales: Tensor | None = None,
    v_scales: Tensor | None = None, split: int = KV_SPLIT, max_seq_len: int | None = None, pdl: bool = False,
    window: int | None = None, check: bool = True,
) -> Tensor:  # fmt: skip
    """`qk_norm_rope_kv_write` and `paged_attention_decode` in one kernel: qkv [B, (Nq + 2·Nkv)·D] → [B, Nq, D].

    Args:
        cos_sin: [L, R] fp32 (cosines | sines): the first R channels of a head are rotated.
        seq_lens: [B] int32, including the new token: its position is seq_lens − 1, and block_tables has its page. If it is 0,
            nothing is written to the pages.
        q_norm, k_norm: [D].
        pdl: the kernel before must not write to the pages either, because older tokens are read while it runs.

    The other arguments and errors are those of `paged_attention_decode`.
    """
    D = k_pages.shape[-1]
    out = torch.empty(qkv.shape[0], Nq, D, dtype=qkv.dtype, device=qkv.device) if out is None else out
    rope = Rope(cos_sin, q_norm, k_norm, eps)
    a = AttentionInput(
        qkv, KVPages(k_pages, v_pages, k_scales, v_scales), Sequences(block_tables, seq_lens, split_starts),
        Scores(scale, window), out, rope, workspace=workspace, max_splits=max_splits, max_seq_len=max_seq_len, split=split,
        pdl=pdl,
    )  # fmt: skip
    if check:
        check_decode(a, Nq)
    return _by_splits(a, DECODE)


def paged_attention_prefill(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, query_starts: Tensor, seq_lens: Tensor,
    scale: float, out: Tensor | None = None, *, k_scales: Tensor | None = None, v_scales: Tensor | None = None,
    shortest: int = 1, workspace: Workspace | None = None, max_splits: int = 0, split: int = KV_SPLIT,
    window: int | None = None, check: bool = True,
) -> Tensor:  # fmt: skip
    """Causal attention of each sequence's new tokens on all its cached tokens, including the new ones → [T, Nq, D].

    The launch depends on shapes alone, so a CUDA graph of it serves any batch that is padded to T and B.

    Args:
        q: [T, Nq, D], one sequence after the other. Rows after the last sequence's are padding; `out` is not written there.
        query_starts: [B + 1] int32, ascending; the first is 0, the last at most T. A sequence without rows is padding.
        seq_lens: [B] int32, including the new tokens.
        shortest: sequences with fewer new tokens are not computed.
        workspace: if given, few new tokens on a long context are computed in parts (`partial`).
        max_splits: upper bound of the KV splits (of `split` tokens) of all sequences, incomplete ones included; 0: unknown. If
            it is known, prompts on FP8 pages are computed on a 16-bit copy where that is faster (Hopper).

    The other arguments and errors are those of `paged_attention_decode`. With a workspace, max_splits is needed.
    """
    out = torch.empty_like(q) if out is None else out
    a = AttentionInput(
        q, KVPages(k_pages, v_pages, k_scales, v_scales), Sequences(block_tables, seq_lens, query_starts=query_starts),
        Scores(scale, window), out, workspace=workspace, max_splits=max_splits, split=split, shortest=shortest,
    )  # fmt: skip
    if check:
        check_attention(a)
        if workspace is not None and max_splits < 1:
            raise InputError("not positive", where="max_splits", expected="a bound, with a workspace", found=max_splits)
        if workspace is not None and shortest > 2:
            raise InputError("too large", where="shortest", expected="at most 2, with a workspace", found=shortest)
    return _prefill(a)


def regime(table: tuple[AttentionRegime, ...], size: int, a: AttentionInput) -> AttentionRegime:
    """The regime of a table that computes these operands. size: of the step, on the table's axis."""
    regimes = covering(table, size, capability(a.out.device), None, a.invariant)
    for candidate in regimes[:-1]:
        if candidate.accepts(a):
            return candidate
    return regimes[-1]  # it takes the rest: what no kernel takes was refused before


def _by_splits(a: AttentionInput, table: tuple[AttentionRegime, ...], queries: int = 1) -> Tensor:
    """Attention of the sequences with one new token, or of sequences with at most `queries` each."""
    if a.num_seqs == 0 or a.heads.shape[0] == 0:
        return a.out
    regime(table, a.num_seqs, a).launch(a)
    if a.max_seq_len is None or a.max_seq_len > a.split:
        # It also fills the rows of empty sequences. Only the device knows whether a sequence has several splits.
        combine(a, queries)
    return a.out


def _prefill(a: AttentionInput) -> Tensor:
    """Attention of the sequences with `a.shortest` new tokens or more."""
    tokens = a.heads.shape[0]
    if tokens == 0 or a.num_seqs == 0:
        return a.out
    long = a.workspace is not None and a.max_splits > 1 and tokens > 1 and (a.num_seqs > 1 or PARTIAL[0].covers(tokens))
    if long and not a.invariant:
        a = a._replace(partial=a.split)
        PARTIAL[0].launch(a)
    chosen = regime(PREFILL, tokens, a)
    widened = 0 < a.max_splits * a.split <= MAX_WIDENED_TOKENS and not a.invariant
    if a.pages.k_scale is not None and chosen.launch is prefill.launch and widened:
        # No kernel of this GPU alone takes FP8 pages. They are widened if one accepts the copies.
        special = regime(PREFILL, tokens, a._replace(pages=KVPages(a.heads, a.heads)))
        if special.launch is not prefill.launch:
            chosen, a = special, widen_kv.widen(a)
    chosen.launch(a)
    return a.out
