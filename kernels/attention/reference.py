"""The eager PyTorch definition of the attention operations on KV pages. Their parts are in `minirt.kernels.reference`.

Arguments are those of the operations of the same names. Lengths are read from the device.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from minirt.kernels.reference import paged_attention, rms_norm, rope, write_kv


def qk_norm_rope_kv_write(
    qkv: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, k_pages: Tensor, v_pages: Tensor, Nq: int, Nkv: int,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6, *, k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """RMSNorm of q and k, rotary embedding, KV write; returns q."""
    q, k, v = qkv.unflatten(1, (-1, k_pages.shape[-1])).split((Nq, Nkv, Nkv), 1)
    q = q if q_norm is None else rms_norm(q, q_norm, eps)
    k = k if k_norm is None else rms_norm(k, k_norm, eps)
    q, k = rope(q, cos_sin[positions]), rope(k, cos_sin[positions])
    stored = slots >= 0
    write_kv(k[stored], k_pages, slots[stored], k_scales)
    write_kv(v[stored], v_pages, slots[stored], v_scales)
    return q


def paged_attention_prefill(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, query_starts: Tensor, seq_lens: Tensor, scale: float, *,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None, window: int | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of each sequence's new tokens; rows of padding are 0."""
    out, starts = torch.zeros_like(q), query_starts.tolist()
    if starts[-1]:
        new = [end - start for start, end in pairwise(starts)]
        rest = (block_tables, new, seq_lens.tolist(), scale, k_scales, v_scales, window)
        out[: starts[-1]] = paged_attention(q[: starts[-1]], k_pages, v_pages, *rest)
    return out


def paged_attention_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float, *,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None, window: int | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one new token per sequence; 0 for a sequence of length 0."""
    out, some = torch.zeros_like(q), seq_lens > 0
    lens = seq_lens[some].tolist()
    if lens:
        rest = (block_tables[some], [1] * len(lens), lens, scale, k_scales, v_scales, window)
        out[some] = paged_attention(q[some], k_pages, v_pages, *rest)
    return out


def rope_paged_attention_decode(
    qkv: Tensor, cos_sin: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, seq_lens: Tensor, scale: float, Nq: int,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6, *, window: int | None = None, **scales: Any,
) -> Tensor:  # fmt: skip
    """`qk_norm_rope_kv_write` of one new token per sequence, then `paged_attention_decode`."""
    page_size, Nkv = k_pages.shape[1:3]
    at = (seq_lens.long() - 1).clamp(min=0)
    slots = block_tables.gather(1, at[:, None] // page_size).squeeze(1).long() * page_size + at % page_size
    slots = torch.where(seq_lens > 0, slots, -1)
    q = qk_norm_rope_kv_write(qkv, cos_sin, at, slots, k_pages, v_pages, Nq, Nkv, q_norm, k_norm, eps, **scales)
    return paged_attention_decode(q, k_pages, v_pages, block_tables, seq_lens, scale, window=window, **scales)
