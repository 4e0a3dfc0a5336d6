"""Argument checks of the attention functions. Errors name the wrong argument. This file imports no Triton."""

import torch
from torch import Tensor

from minirt.errors import InputError, UnsupportedError
from minirt.kernels.attention.limits import ANY, MAX_GROUP
from minirt.kernels.attention.operands import AttentionInput, KVPages, Rope
from minirt.kernels.checks import check_activations, check_tensor
from minirt.kernels.launch import capability
from minirt.kernels.speculative.limits import MAX_DRAFTS


def check_pages(pages: KVPages, Nkv: int | None, D: int, x: Tensor) -> None:
    """Check pages [P, page_size, Nkv, D]: on x's device; of x's dtype, or with scales for each token and head of float8_e4m3fn.

    Raises:
        InputError: they are not.
        UnsupportedError: the GPU has no float8_e4m3fn.
    """
    k, v, k_scale, v_scale = pages
    if (k_scale is None) != (v_scale is None):
        raise InputError("scales for one of K and V only", where="k_scales, v_scales", expected="both or none")
    check_tensor("k_pages", k, (None, None, Nkv, D), x.dtype if k_scale is None else torch.float8_e4m3fn, x.device)
    check_tensor("v_pages", v, tuple(k.shape), k.dtype, x.device)
    if k_scale is not None and v_scale is not None:
        if x.device.type == "cuda" and capability(x.device) < 89:
            raise UnsupportedError(
                "no fp8 KV pages on this GPU", expected="compute capability 8.9 or later", found=capability(x.device) / 10,
                hint="use pages of the activations' dtype",
            )  # fmt: skip
        check_tensor("k_scales", k_scale, tuple(k.shape[:3]), torch.float32, x.device)
        check_tensor("v_scales", v_scale, tuple(k.shape[:3]), torch.float32, x.device)


def check_rope(rope: Rope, D: int, x: Tensor) -> None:
    """Raise InputError unless the rotary table and the norms' weights fit heads of size D and of x's dtype and device."""
    if rope.cos_sin is not None:
        check_tensor("cos_sin", rope.cos_sin, (None, None), torch.float32, x.device)
        if not 0 < rope.channels <= D or rope.channels % 2:
            expected = f"an even number up to {D}, those of a head"
            raise InputError("wrong number of rotated channels", where="cos_sin", expected=expected, found=rope.channels)
    if rope.q_scales is not None:
        check_tensor("q_scales", rope.q_scales, (None,), torch.float32, x.device)
        if rope.cos_sin is not None and len(rope.cos_sin) != len(rope.q_scales):
            expected = f"{len(rope.cos_sin)} positions, those of cos_sin"
            raise InputError("wrong length", where="q_scales", expected=expected, found=len(rope.q_scales))
    for name, norm in (("q_norm", rope.q_norm), ("k_norm", rope.k_norm)):
        if norm is not None:
            check_tensor(name, norm, (D,), x.dtype, x.device)


def check_kv_write(
    qkv: Tensor, rope: Rope, pages: KVPages, positions: Tensor, slots: Tensor, Nq: int, Nkv: int
) -> None:
    """Raise InputError unless raw heads qkv [T, (Nq + 2·Nkv)·D] fit the pages, the rotary table and their positions and slots."""
    D = pages.k.shape[-1]
    _check_head_dim("k_pages", D)
    _check_raw_heads(qkv, (Nq + 2 * Nkv) * D)
    check_tensor("positions", positions, (qkv.shape[0],), torch.int64, qkv.device)
    check_tensor("slots", slots, (qkv.shape[0],), torch.int64, qkv.device)
    check_pages(pages, Nkv, D, qkv)
    check_rope(rope, D, qkv)


def check_decode(a: AttentionInput, raw_queries: int | None = None) -> None:
    """`check_attention`, and what only `decode` needs."""
    check_attention(a, raw_queries)
    x, (_, seq_lens, split_starts, query_starts) = a.heads, a.sequences
    for name, starts in (("split_starts", split_starts), ("query_starts", query_starts)):
        if starts is not None:
            check_tensor(name, starts, (a.num_seqs + 1,), torch.int32, x.device)
    if query_starts is None:
        check_tensor("seq_lens", seq_lens, (x.shape[0],), torch.int32, x.device)
    if not 64 <= a.split <= 1024 or a.split & (a.split - 1):
        raise InputError("not a power of two from 64 to 1024", where="split", found=a.split)
    if a.rope is not None and raw_queries is not None:
        check_rope(a.rope, a.pages.k.shape[-1], x)


def check_decode_few(a: AttentionInput) -> None:
    """`check_decode`, and what only `decode_few` needs."""
    for name, value in (("query_starts", a.sequences.query_starts), ("split_starts", a.sequences.split_starts)):
        if value is None:
            raise InputError("missing", where=name, expected="those of the sequences")
    check_decode(a)
    if a.max_query_len is None or not 1 <= a.max_query_len <= 1 + MAX_DRAFTS:
        expected = f"a bound from 1 to {1 + MAX_DRAFTS}"
        raise InputError("unsupported number of new tokens", where="max_query_len", expected=expected, found=a.max_query_len)


def check_attention(a: AttentionInput, raw_queries: int | None = None) -> None:
    """Raise InputError unless pages, tables, lengths and `out` fit each other, and the dtype and device of `heads`.

    Args:
        raw_queries: number of query heads among raw heads.
    """
    x, pages, sequences = a.heads, a.pages, a.sequences
    if raw_queries is None:
        check_activations("q", x, 3)
        _, Nq, D = x.shape
    else:
        Nq, D = raw_queries, pages.k.shape[-1]
        _check_raw_heads(x, (Nq + 2 * pages.num_kv_heads) * D)
    if not a.scores.scale > 0:
        raise InputError("not positive", where="scale", found=a.scores.scale)
    _check_head_dim("q", D)
    check_pages(pages, None, D, x)
    page_size, Nkv = pages.page_size, pages.num_kv_heads
    if page_size < ANY.page_size or page_size & (page_size - 1):
        expected = f"a power of two from {ANY.page_size}"
        raise InputError("unsupported page size", where="k_pages", expected=expected, found=page_size)
    if Nq % Nkv or Nq // Nkv > MAX_GROUP:
        what = f"a multiple of {Nkv} KV heads, at most {MAX_GROUP} times as many"
        raise InputError("unsupported number of query heads", where="q", expected=what, found=Nq)
    check_tensor("seq_lens", sequences.seq_lens, (None,), torch.int32, x.device)
    check_tensor("block_tables", sequences.block_tables, (a.num_seqs, None), torch.int32, x.device)
    check_tensor("out", a.out, (x.shape[0], Nq, D), x.dtype, x.device)
    if a.gate is not None:
        check_tensor("gate", a.gate, (x.shape[0], Nq, D), x.dtype, x.device, strided=True)


def _check_raw_heads(qkv: Tensor, width: int) -> None:
    """Raise InputError unless raw heads are [T, width], in a dtype of activations. Their rows may be any distance apart."""
    check_activations("qkv", qkv, strided=True)
    check_tensor("qkv", qkv, (None, width), qkv.dtype, qkv.device, strided=True)


def _check_head_dim(name: str, D: int) -> None:
    if D not in ANY.head_dims:
        expected = f"one of {', '.join(map(str, ANY.head_dims))}"
        raise InputError("unsupported head size", where=name, expected=expected, found=D)
