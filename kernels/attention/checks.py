"""Argument checks of the attention functions. Errors name the wrong argument. This file imports no Triton.

The ops are declared in `minirt.kernels.operations`. `AttentionInput` has more fields than an op has arguments, so its tensors are
declared here.
"""

from typing import Any

import torch
from torch import Tensor

from minirt.device import is_gpu
from minirt.errors import InputError, UnsupportedError
from minirt.kernels.attention.limits import MAX_GROUP
from minirt.kernels.attention.operands import AttentionInput, Rope
from minirt.kernels.checks import check_tensor, tensor_checker
from minirt.kernels.declaration import Declaration
from minirt.kernels.launch import capability
from minirt.kernels.speculative.limits import MAX_DRAFTS

_TENSORS = (
    "k_pages: [P, page_size: page, Nkv, D: head] of {0} or fp8 with k_scales, v_pages: [P, page_size, Nkv, D] of k_pages, "
    "block_tables: [B, pages] int32, seq_lens: [B] int32, k_scales?: [P, page_size, Nkv] fp32 together with v_scales, "
    "v_scales?: [P, page_size, Nkv] fp32, cos_sin?: [L, R] fp32, q_scales?: [L] fp32, q_norm?: [D] of {0}, k_norm?: [D] of {0}, "
    "split_starts?: [B + 1] int32, query_starts?: [B + 1] int32, out: [T, Nq, D] of {0}, gate?: [T, Nq, D] of {0} rows apart"
)
_check_heads = tensor_checker(Declaration("q: [T, Nq, D: head] activations, " + _TENSORS.format("q")))
_check_raw_heads = tensor_checker(
    Declaration("qkv: [T, (Nq + 2 * Nkv) * D] activations rows apart, Nq: int, " + _TENSORS.format("qkv"))
)


def check_attention(a: AttentionInput, raw_queries: int | None = None) -> None:
    """Raise InputError unless pages, tables, lengths and `out` fit each other, and the dtype and device of `heads`.

    Args:
        raw_queries: number of query heads among raw heads.
    """
    pages, rope = a.pages, Rope(None) if a.rope is None or raw_queries is None else a.rope
    values = a.sequences._asdict() | rope._asdict() | {
        "k_pages": pages.k, "v_pages": pages.v, "k_scales": pages.k_scale, "v_scales": pages.v_scale, "scale": a.scores.scale,
        "window": a.scores.window, "out": a.out, "gate": a.gate,
    }  # fmt: skip
    if raw_queries is None:
        sizes = _check_heads(values | {"q": a.heads})
    else:
        sizes = _check_raw_heads(values | {"qkv": a.heads, "Nq": raw_queries})
    check_settings(sizes, **values)


def check_settings(
    sizes: dict[str, int], k_pages: Tensor, scale: float, k_scales: Tensor | None = None, cos_sin: Tensor | None = None,
    window: int | None = None, **rest: Any,
) -> None:  # fmt: skip
    """What the declarations of attention cannot say: of the scale, the window, query heads, and as in `check_write`."""
    if not scale > 0:
        raise InputError("not positive", where="scale", found=scale)
    if window is not None and window < 1:
        raise InputError("not positive", where="window", found=window)
    Nq, Nkv = sizes["Nq"], sizes["Nkv"]
    if Nq % Nkv or Nq // Nkv > MAX_GROUP:
        what = f"a multiple of {Nkv} KV heads, at most {MAX_GROUP} times as many"
        raise InputError("unsupported number of query heads", where="q", expected=what, found=Nq)
    check_write(sizes, k_pages, k_scales, cos_sin)


def check_write(
    sizes: dict[str, int], k_pages: Tensor, k_scales: Tensor | None = None, cos_sin: Tensor | None = None, **rest: Any
) -> None:
    """What declarations cannot say of FP8 pages on a GPU without FP8, and of rotated channels."""
    if k_scales is not None and is_gpu(k_pages.device) and capability(k_pages.device) < 89:
        raise UnsupportedError(
            "no fp8 KV pages on this GPU", expected="compute capability 8.9 or later", found=capability(k_pages.device) / 10,
            hint="use pages of the activations' dtype",
        )  # fmt: skip
    if cos_sin is not None and (not 0 < sizes["R"] <= sizes["D"] or sizes["R"] % 2):
        expected = f"an even number up to {sizes['D']}, those of a head"
        raise InputError("wrong number of rotated channels", where="cos_sin", expected=expected, found=sizes["R"])


def check_decode(a: AttentionInput, raw_queries: int | None = None) -> None:
    """`check_attention`, and what only `decode` needs."""
    check_attention(a, raw_queries)
    if a.sequences.query_starts is None:
        check_tensor("seq_lens", a.sequences.seq_lens, (a.heads.shape[0],), torch.int32, a.heads.device)
    if not 64 <= a.split <= 1024 or a.split & (a.split - 1):
        raise InputError("not a power of two from 64 to 1024", where="split", found=a.split)


def check_decode_few(a: AttentionInput) -> None:
    """`check_decode`, and what only `decode_few` needs."""
    for name, value in (("query_starts", a.sequences.query_starts), ("split_starts", a.sequences.split_starts)):
        if value is None:
            raise InputError("missing", where=name, expected="those of the sequences")
    check_decode(a)
    if a.max_query_len is None or not 1 <= a.max_query_len <= 1 + MAX_DRAFTS:
        expected = f"a bound from 1 to {1 + MAX_DRAFTS}"
        raise InputError("unsupported number of new tokens", where="max_query_len", expected=expected, found=a.max_query_len)
