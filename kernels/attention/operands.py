"""`AttentionInput`: the operands of one attention layer's step. Every attention kernel's launch takes one.

Kernels take `KVPages`, `Rope`, `Sequences`, `Scores` and `Results` whole and read their fields by name. So a new setting of the
scores is a field of `Scores`, and its computation in `online_softmax.score` or `hide`. This file imports no Triton.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.kernels.launch import Workspace
from minirt.kernels.side_stream import SideStream

FEW_SEQS = 32  # up to this many sequences, decode kernels use a small lookup
_LOG2_E = 1.4426950408889634


def first_split(seq_len: int, new: int, window: int | None, split: int = KV_SPLIT) -> int:
    """The first KV split that one of the last `new` of `seq_len` tokens sees."""
    return 0 if window is None else max(0, seq_len - new - window + 1) // split


def decode_lookup_size(num_seqs: int) -> int:
    """How many sequences the decode kernels search at once for that of a work item. A compile-time size, so it has few values."""
    return 1 if num_seqs == 1 else FEW_SEQS if num_seqs <= FEW_SEQS else max(512, 1 << (num_seqs - 1).bit_length())


def prefill_lookup_size(num_seqs: int) -> int:
    """`decode_lookup_size` for the prefill kernels."""
    return max(256, 1 << (num_seqs - 1).bit_length())


class KVPages(NamedTuple):
    """Pages of K and V of one attention layer: k, v [P, page_size, Nkv, D] of the queries' dtype.

    FP8 pages (float8_e4m3fn) have a scale for each token and head: k_scale, v_scale [P, page_size, Nkv] fp32.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[2]

    def for_kernel(self, dtype: torch.dtype) -> "KVPages":
        """The pages, FP8 as integers of `dtype`, which every GPU and every Triton version can load and store."""
        return self if self.k_scale is None else KVPages(self.k.view(dtype), self.v.view(dtype), *self[2:])


class Rope(NamedTuple):
    """What turns raw heads into q and k, in this order: QK-norm, rotary embedding, a scale of q. Each is optional.

    Attributes:
        cos_sin: [L, R] fp32, a row (cosines | sines) for each position. The first R channels of a head are rotated, by halves of
            R; R is even, at most D. None: nothing is rotated.
        q_norm, k_norm: [D], weights of RMSNorm.
        eps: of the norms.
        normalize: q and k are normalized also without weights.
        q_scales: [L] fp32, a factor of the rotated q for each position (Llama 4).
        normalize_v: v has an RMSNorm without weights.
        v_is_k: v is made from the heads of k, before their norm and rotation. Raw heads have none of v.
    """

    cos_sin: Tensor | None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6
    normalize: bool = False
    q_scales: Tensor | None = None
    normalize_v: bool = False
    v_is_k: bool = False

    @property
    def channels(self) -> int:
        """R, the channels of a head that are rotated."""
        return 0 if self.cos_sin is None else self.cos_sin.shape[1]


class Sequences(NamedTuple):
    """The sequences of a step: their pages and lengths, all int32.

    Attributes:
        block_tables: [B, pages].
        seq_lens: [B], cached tokens, including the new ones. 0: padding.
        split_starts: [B + 1]: for each sequence, the number of KV splits of the sequences before it; last, that of all. With
            `Scores.window`, only those that the new tokens see, from `first_split` on. None: not needed, as only the kernels of
            prompts run.
        query_starts: [B + 1]: for each sequence, the number of new tokens of the sequences before it; last, that of all. None:
            each sequence has one new token.
    """

    block_tables: Tensor
    seq_lens: Tensor
    split_starts: Tensor | None = None
    query_starts: Tensor | None = None


class Scores(NamedTuple):
    """What turns products of queries and keys into scores, in the order of the fields.

    Attributes:
        scale: factor of the products, positive, because the row maximum is computed before the factor is applied.
        window: a token sees itself and the window − 1 tokens before it (sliding-window attention, Beltagy et al. 2020); None: all
            tokens before it.
    """

    scale: float
    window: int | None = None

    def in_base_2(self) -> "Scores":
        """The settings as kernels take them: scores are exponents of 2."""
        return Scores(self.scale * _LOG2_E, *self[1:])


class Results(NamedTuple):
    """Where kernels store results: `out` [T, Nq, D], and partial results in fp32.

    Each part of a context has for each head `sums` [D], and in `row_stats` a row maximum and a total. `out` is multiplied by the
    sigmoid of `gate`, whose tokens and heads are `gate_token` and `gate_head` values apart. `sinks` [Nq]: see `AttentionInput`.
    """

    out: Tensor
    sums: Tensor | None = None
    row_stats: Tensor | None = None
    gate: Tensor | None = None
    gate_token: int | None = None
    gate_head: int | None = None
    sinks: Tensor | None = None


class AttentionFacts(NamedTuple):
    """What the launch configuration of an attention kernel may depend on. Each family of kernels reads some of these facts.

    Attributes:
        T: sequences of one new token, rounded up to the most that use the same configuration; 0: it does not depend on them.
        Nq, Nkv, D: heads of q, heads of K and V, and channels of a head.
        itemsize: bytes of a value of q.
        fp8: whether the pages are FP8.
        split: tokens of a KV split.
    """

    T: int
    Nq: int
    Nkv: int
    D: int
    itemsize: int
    fp8: bool
    split: int


class AttentionInput(NamedTuple):
    """Attention of the new tokens of B sequences on all their cached tokens, the new ones included.

    Attributes:
        heads: q [T, Nq, D]; with `rope`, raw heads [T, (Nq + 2·Nkv)·D] of q, k and v (none of v with `Rope.v_is_k`). Their k
            and v are not in the pages yet. Rows of raw heads may be any distance apart.
        out: [T, Nq, D].
        positions, slots: [T] int64: rows of `cos_sin`, and the new tokens' slots. Only needed with `rope` and `query_starts`.
        workspace: of partial results. None: contexts of several new tokens are not divided, and no sequence has a single one.
        max_splits: upper bound of the number of KV splits of all sequences, incomplete ones included; 0: unknown.
        max_seq_len: upper bound of the sequences' lengths; None: unknown.
        max_query_len: upper bound of a sequence's new tokens, with `query_starts`; None: unknown.
        split: tokens of a KV split, a power of two.
        pdl: see `minirt.kernels.pdl`.
        shortest: of several kernels, this one leaves out the sequences with fewer new tokens.
        partial: tokens of a KV split if `partial` computes the sequences with few new tokens on a long context; 0: it does not.
        gate: [T, Nq, D] of q's dtype, channels contiguous: `out` is multiplied by its sigmoid, in fp32, before it is rounded.
        side: in CUDA graphs of steps with prompts, sequences with one new token are computed beside the others, else before them.
        sinks: [Nq], of q's dtype: a further score of each head, of a token whose V is 0 (attention sinks, Xiao et al. 2024).
    """

    heads: Tensor
    pages: KVPages
    sequences: Sequences
    scores: Scores
    out: Tensor
    rope: Rope | None = None
    positions: Tensor | None = None
    slots: Tensor | None = None
    workspace: Workspace | None = None
    max_splits: int = 0
    max_seq_len: int | None = None
    max_query_len: int | None = None
    split: int = KV_SPLIT
    pdl: bool = False
    shortest: int = 1
    partial: int = 0
    gate: Tensor | None = None
    side: SideStream | None = None
    sinks: Tensor | None = None

    @property
    def invariant(self) -> bool:
        """Whether a token's result must not depend on how many tokens are computed at once. All kernels then take the tokens of a
        KV split in blocks of `online_softmax.block_n`, and add the splits in their order."""
        return self.workspace is not None and self.workspace.invariant

    @property
    def num_seqs(self) -> int:
        return self.sequences.seq_lens.shape[0]

    @property
    def table_width(self) -> int:
        return self.sequences.block_tables.shape[1]

    @property
    def head_shape(self) -> tuple[int, int, int]:
        """(Nq, Nkv, D)."""
        _, Nq, D = self.out.shape
        return Nq, self.pages.k.shape[2], D

    @property
    def format(self) -> str:
        """The format of the pages, as `regimes.AttentionLimits` names it."""
        wide = self.heads.element_size() == 4
        if self.pages.k.element_size() == 1:
            return "fp8_fp32" if wide else "fp8"
        return "fp32" if wide else "fp16"

    def aligned(self, n: int) -> bool:
        """Whether the addresses of rows of heads, of pages, their scales and `out` are multiples of n, a power of two."""
        addresses = self.heads.data_ptr() | self.out.data_ptr() | self.heads.stride(0) * self.heads.element_size()
        for x in self.pages:
            if x is not None:
                addresses |= x.data_ptr()
        return addresses % n == 0

    def facts(self, tokens: int = 0) -> AttentionFacts:
        """What its launch configuration may depend on. `tokens`: `AttentionFacts.T`."""
        Nq, Nkv, D = self.head_shape
        fp8 = self.pages.k_scale is not None
        return AttentionFacts._make((tokens, Nq, Nkv, D, self.out.element_size(), fp8, self.split))

    def results(self, parts: int | None = None) -> Results:
        """`out`, and views of the workspace for partial results: of `parts` parts of contexts (or parts × tokens), if any."""
        _, Nq, D = self.out.shape
        sums, row_stats = None, None
        if parts is not None:
            if self.workspace is None:
                raise InputError("missing", where="workspace", expected="room for partial results")
            sums, row_stats = self.workspace.sums_and_stats(parts * Nq * D, 2 * parts * Nq)
        if self.gate is None:
            return Results(self.out, sums, row_stats, sinks=self.sinks)
        return Results(self.out, sums, row_stats, self.gate, self.gate.stride(0), self.gate.stride(1), self.sinks)
