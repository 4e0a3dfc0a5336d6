"""The operands of the attention kernels, as `dispatch` has checked them."""

from typing import NamedTuple

from torch import Tensor

from minirt.kernels.launch import Workspace

FEW_SEQS = 32  # up to this many sequences, decode kernels use a small lookup


def decode_lookup_size(num_seqs: int) -> int:
    """How many sequences the decode kernels search at once for that of a work item. A compile-time size, so it has few values."""
    return 1 if num_seqs == 1 else FEW_SEQS if num_seqs <= FEW_SEQS else max(512, 1 << (num_seqs - 1).bit_length())


def prefill_lookup_size(num_seqs: int) -> int:
    """`decode_lookup_size` for the prefill kernels."""
    return max(256, 1 << (num_seqs - 1).bit_length())


class KVPages(NamedTuple):
    """Pages of K and V: k, v [P, page_size, Nkv, D] of the queries' dtype; or float8_e4m3fn, with k_scale, v_scale
    [P, page_size, Nkv] fp32."""

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


class Rope(NamedTuple):
    """The rotary table cos_sin [L, D] fp32 (cosines | sines), and the weights [D] of QK-norm, if the model has it."""

    cos_sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


class Decode(NamedTuple):
    """Attention of one new token for each sequence.

    Attributes:
        heads: q [T, Nq, D]; with `rope`, raw heads [B, (Nq + 2·Nkv)·D] of q, k and v. Their k and v are not in the pages yet.
        rope: norm and rotation that turn raw heads into q, k and v; None: `heads` are q.
        block_tables: [B, pages] int32.
        seq_lens: [B] int32, cached tokens, including the new one.
        split_starts: [B + 1] int32: for each sequence, the number of KV splits of the sequences before it; last, that of all.
        query_starts: [B + 1] int32: the first row of each sequence in q, if some sequences have several new tokens; None: each
            sequence has one row.
        out: [T, Nq, D].
        sums, row_stats: fp32 scratch memory. For each split and head: D sums; a row maximum and a total.
        max_splits: upper bound of the number of KV splits of all sequences.
        scale: the factor of the scores.
        split: tokens of a KV split.
        pdl, early: see `minirt.kernels.pdl`.
    """

    heads: Tensor
    rope: Rope | None
    pages: KVPages
    block_tables: Tensor
    seq_lens: Tensor
    split_starts: Tensor
    query_starts: Tensor | None
    out: Tensor
    sums: Tensor
    row_stats: Tensor
    max_splits: int
    scale: float
    split: int
    pdl: bool
    early: bool

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]


class Prefill(NamedTuple):
    """Attention of any number of new tokens for each sequence.

    Attributes:
        q: [T, Nq, D], one sequence after the other.
        block_tables: [B, pages] int32.
        query_starts: [B + 1] int32: for each sequence, the number of rows of q before it; last, that of all.
        seq_lens: [B] int32, cached tokens, including the new ones.
        out: [T, Nq, D].
        scale: the factor of the scores.
        shortest: sequences with fewer new tokens are not computed.
        partial: tokens of a KV split if `partial` computes the sequences with few new tokens on a long context; 0: it does not.
        max_splits: upper bound of the number of KV splits of all sequences; 0: unknown.
    """

    q: Tensor
    pages: KVPages
    block_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    out: Tensor
    scale: float
    shortest: int = 1
    partial: int = 0
    max_splits: int = 0

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]


class Scratch(NamedTuple):
    """fp32 views of a workspace. For each partial result: `sums` [D]; `row_stats`, a row maximum and a total."""

    sums: Tensor
    row_stats: Tensor

    @classmethod
    def of(cls, workspace: Workspace, results: int, head_dim: int) -> "Scratch":
        """Views for `results` partial results; each head has its own."""
        sums = workspace.sums(results * (head_dim + 2))
        return cls(sums, sums[results * head_dim :])
