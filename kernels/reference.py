"""The eager-PyTorch form of every kernel: what the eager layers run, and what tests and benchmarks compare with.

Torch only, so that it works where Triton is absent. Rounding follows Hugging Face transformers: norms normalize in fp32,
cast to the activation dtype, then scale; rotary embedding rotates halves in the activation dtype; softmax is in fp32.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_MAX = 448.0  # the largest finite e4m3 value; the format has NaN and no infinity


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Rows of `table` [V, H] for `tokens` [T] → [T, H]."""
    return F.embedding(tokens, table)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang & Sennrich 2019) over the last dimension of `x` [..., H] with `weight` [H]."""
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """x [T, K] · weightᵀ [N, K] + bias [N] → [T, N]. With `scale` [N] fp32 the weights are fp8, see `linear_fp8`."""
    return F.linear(x, weight, bias) if scale is None else linear_fp8(x, weight, scale, bias)


def linear_fp8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] · (weight · scale)ᵀ + bias [N] → [T, N]: weight [N, K] e4m3, scale [N] fp32.

    Two tokens or more are quantized first, each with a scale of its own (`quantize_fp8`), for the tensor cores multiply fp8 by
    fp8. A single token is not: it leaves them nothing to win, and its product is computed from 16-bit activations.
    """
    dtype = torch.float32 if x.dtype == torch.float16 else x.dtype  # 448 · 448 is more than fp16 holds
    if x.shape[0] > 1:
        values, x_scale = quantize_fp8(x)
        scale = scale * x_scale.unsqueeze(1)
    else:
        values = x
    y = (F.linear(values.to(dtype), weight.to(dtype)).float() * scale).to(x.dtype)  # e4m3 is exact in either dtype
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


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K], any float → values [..., K] e4m3 and scales [...] fp32, so that values · scale ≈ x.

    The scale maps a row's largest finite magnitude to 448 and is 1 for a row of zeros. NaN and infinities become NaN (and do not
    count for the scale), so that they show instead of turning into numbers. Nothing syncs.
    """
    wide = x.float()
    finite = torch.isfinite(wide)
    largest = torch.where(finite, wide, 0).abs().amax(-1)
    # By a tensor: by a number, PyTorch multiplies with the inverse on a GPU, which may differ in the last bit.
    scale = torch.where(largest > 0, largest / largest.new_full((), FP8_MAX), 1.0).clamp(min=torch.finfo(torch.float32).tiny)
    # Rounding may carry the quotient past 448, which the cast would turn into NaN.
    values = (wide / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return torch.where(finite, values, torch.nan).to(torch.float8_e4m3fn), scale


def write_kv(x: Tensor, pages: Tensor, slots: Tensor, scales: Tensor | None = None) -> None:
    """Store x [T, Nkv, D], of K or of V, at `slots` [T] of the pages [P, page_size, Nkv, D]; those of fp8 take a scale for each
    token and head, `scales` [P, page_size, Nkv] fp32."""
    if scales is not None:
        x, own = quantize_fp8(x)
        scales.view(-1, scales.shape[-1]).index_copy_(0, slots, own)
        x, pages = x.view(torch.uint8), pages.view(torch.uint8)  # bytes: not every operation knows the type
    pages.view(-1, *x.shape[1:]).index_copy_(0, slots, x)


def _gather(pages: Tensor, scales: Tensor | None, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """What the pages hold at `slots` [...] → [..., Nkv, D] in `dtype`."""
    if scales is None:
        return pages.flatten(0, 1)[slots]
    values = pages.view(torch.uint8).flatten(0, 1)[slots].view(pages.dtype)
    return (values.float() * scales.flatten(0, 1)[slots].unsqueeze(-1)).to(dtype)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    scale: float,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence's new tokens on all that it has cached, themselves included.

    q [T, Nq, D] holds `query_lens` [B] new tokens, sequence after sequence; pages are [P, page_size, Nkv, D];
    `block_tables` [B, pages]; `seq_lens` [B] counts the cached tokens, new ones included → [T, Nq, D]. Sequences with one
    new token are computed together over their padded contexts, the others one by one. Pages of fp8 have scales, see `write_kv`.
    """
    out = torch.empty_like(q)
    starts = list(accumulate(query_lens, initial=0))
    cached = (k_pages, k_scales), (v_pages, v_scales)
    single = [i for i, n in enumerate(query_lens) if n == 1]
    if single:
        everyone = len(single) == len(seq_lens)
        rows = slice(None) if everyone else [starts[i] for i in single]
        tables = block_tables if everyone else block_tables[single]
        slots, mask = _slots(tables, [seq_lens[i] for i in single], k_pages.shape[1])
        k, v = (_gather(*pages, slots, q.dtype).transpose(1, 2) for pages in cached)
        out[rows] = _attention(q[rows].unsqueeze(2), k, v, scale, mask).squeeze(2)
    for i, new in enumerate(query_lens):
        if new > 1:
            rows, total = slice(starts[i], starts[i] + new), seq_lens[i]
            slots, _ = _slots(block_tables[i : i + 1], [total], k_pages.shape[1])
            k, v = (_gather(*pages, slots, q.dtype).transpose(1, 2) for pages in cached)
            mask = None if new == total else torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
            own = q[rows].transpose(0, 1).unsqueeze(0)
            out[rows] = _attention(own, k, v, scale, mask, causal=mask is None)[0].transpose(0, 1)
    return out


def _slots(tables: Tensor, lens: list[int], page_size: int) -> tuple[Tensor, Tensor | None]:
    """Slots [B, longest] of each sequence's tokens, and the mask [B, 1, 1, longest] of those that are there; None: all.

    Where a sequence ends before the longest, its last token stands in, masked: what the rest of a page holds from before may be
    NaN, which a mask does not stop.
    """
    longest = max(lens)
    t, mask = torch.arange(longest, device=tables.device).unsqueeze(0), None
    if min(lens) < longest:
        ends = torch.tensor(lens, device=tables.device).unsqueeze(1)
        mask = (t < ends)[:, None, None, :]
        t = torch.minimum(t, ends - 1)
    else:
        t = t.expand(len(lens), -1)
    return tables.gather(1, t // page_size).long() * page_size + t % page_size, mask


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool = False) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
