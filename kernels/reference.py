"""The eager-PyTorch form of every kernel: what the eager layers run, and what tests and benchmarks compare with.

Torch only, so that it works where Triton is absent. Rounding follows Hugging Face transformers: norms normalize in fp32,
cast to the activation dtype, then scale; rotary embedding rotates halves in the activation dtype; softmax is in fp32.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Rows of `table` [V, H] for `tokens` [T] → [T, H]."""
    return F.embedding(tokens, table)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang & Sennrich 2019) over the last dimension of `x` [..., H] with `weight` [H]."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """x [T, K] · weightᵀ [N, K] + bias [N] → [T, N]. With `scale` [N] fp32 the weights are fp8 and stand for weight · scale."""
    if scale is None:
        return F.linear(x, weight, bias)
    y = (F.linear(x, weight.to(x.dtype)).float() * scale).to(x.dtype)  # e4m3 is exact in any of the dtypes
    return y if bias is None else y + bias


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) · up for `gate_up` [T, 2I], gate in the first half → [T, I] (SwiGLU: Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021), half-split as in Llama: x [T, N, D], cos_sin [T, D] fp32 (cos | sin) → [T, N, D]."""
    cos, sin = cos_sin.to(x.dtype).unsqueeze(1).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Store k, v [T, Nkv, D] at `slots` [T] of the pages [P, page_size, Nkv, D]."""
    k_pages.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
    v_pages.view(-1, *v.shape[1:]).index_copy_(0, slots, v)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    scale: float,
) -> Tensor:
    """Causal attention of each sequence's new tokens on all that it has cached, themselves included.

    q [T, Nq, D] holds `query_lens` [B] new tokens, sequence after sequence; pages are [P, page_size, Nkv, D];
    `block_tables` [B, pages]; `seq_lens` [B] counts the cached tokens, new ones included → [T, Nq, D]. Sequences with one
    new token are computed together over their padded contexts, the others one by one.
    """
    out = torch.empty_like(q)
    starts = list(accumulate(query_lens, initial=0))
    single = [i for i, n in enumerate(query_lens) if n == 1]
    if single:
        everyone = len(single) == len(seq_lens)
        rows = slice(None) if everyone else [starts[i] for i in single]
        tables = block_tables if everyone else block_tables[single]
        out[rows] = _attend_single(q[rows], k_pages, v_pages, tables, [seq_lens[i] for i in single], scale)
    for i, new in enumerate(query_lens):
        if new > 1:
            rows = slice(starts[i], starts[i] + new)
            out[rows] = _attend_prompt(q[rows], k_pages, v_pages, block_tables[i], seq_lens[i], scale)
    return out


def _attend_single(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, lens: list[int], scale: float
) -> Tensor:
    longest, page_size = max(lens), k_pages.shape[1]
    if min(lens) == longest:
        tables = tables[:, : -(-longest // page_size)]
        k, v = (pages[tables].flatten(1, 2)[:, :longest] for pages in (k_pages, v_pages))
        mask = None
    else:
        # Where a sequence ends before the longest, its last token stands in, masked: what the rest of a page holds from
        # before may be NaN, which a mask does not stop.
        ends = torch.tensor(lens, device=q.device).unsqueeze(1)
        t = torch.arange(longest, device=q.device).unsqueeze(0)
        mask = (t < ends)[:, None, None, :]
        t = torch.minimum(t, ends - 1)
        slots = tables.gather(1, t // page_size).long() * page_size + t % page_size
        k, v = (pages.flatten(0, 1)[slots] for pages in (k_pages, v_pages))
    return _attention(q.unsqueeze(2), k.transpose(1, 2), v.transpose(1, 2), scale, mask).squeeze(2)


def _attend_prompt(q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, total: int, scale: float) -> Tensor:
    new = q.shape[0]
    pages = table[: -(-total // k_pages.shape[1])]
    k = k_pages[pages].flatten(0, 1)[:total].transpose(0, 1).unsqueeze(0)
    v = v_pages[pages].flatten(0, 1)[:total].transpose(0, 1).unsqueeze(0)
    mask = None
    if new != total:
        mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
    return _attention(q.transpose(0, 1).unsqueeze(0), k, v, scale, mask, causal=mask is None)[0].transpose(0, 1)


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool = False) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
