"""The epilogue of Triton's linear kernels: what turns fp32 sums into outputs, and the sum of the parts of a split K.

Gluon kernels for Hopper have the same in `gemm_sm90`. `ep` is a `Product`'s `Epilogue`. Sums may lie either way, [rows of the
weight, tokens] or [tokens, rows]: what is loaded broadcasts with the index tensors `n` and `t` that it is loaded with.
"""

import triton
import triton.language as tl

from minirt.kernels.sampling.filters import MAX_INT, pack, sortable


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """SiLU or GELU (erf or tanh form) of an fp32 tensor."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # 0.5 · (1 + tanh(y)) is sigmoid(2y)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _load(ptr, at, inside):
    """Values in fp32; None without a pointer."""
    if ptr is None:
        return None
    else:
        return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_rows(ep, n, inside, N, SCALED: tl.constexpr = True):
    """What the epilogue has for weight rows `n` and, with an activation, for rows N + n: (scale, bias, scale of up, bias of up).

    Loaded before the products, nothing waits for it after them. SCALED: whether `ep.scale` is one for each row.
    """
    scale = _load(ep.scale if SCALED else None, n, inside)
    bias = _load(ep.bias, n, inside)
    if ep.activation is not None:
        return scale, bias, _load(ep.scale if SCALED else None, N + n, inside), _load(ep.bias, N + n, inside)
    else:
        return scale, bias, None, None


@triton.jit
def load_tokens(ep, t, inside, SCALED: tl.constexpr = True):
    """The scales of tokens `t`, if the product has one for each token."""
    return _load(ep.x_scale if SCALED else None, t, inside)


@triton.jit
def load_residual(ep, at, inside):
    return _load(ep.residual, at, inside)


@triton.jit
def _half(acc, scale, bias, x_scale):
    if scale is not None:
        if x_scale is not None:
            scale *= x_scale
        acc *= scale
    if bias is not None:
        acc += bias
    return acc


@triton.jit
def finish(acc, acc_up, rows, x_scale, residual, ep):
    """The output in fp32, from the sums (of gate and of up) and what the functions above loaded."""
    scale, bias, up_scale, up_bias = rows
    acc = _half(acc, scale, bias, x_scale)
    if ep.activation is not None:
        acc = activate(acc, ep.activation) * _half(acc_up, up_scale, up_bias, x_scale)
    if residual is not None:
        acc += residual
    return acc


@triton.jit
def store_row_maxima(acc, n, t, N, T, ep, tile):
    """Store the largest value of each column of acc [n, t] with its row, as `filters.pack` does. NaN counts as the largest."""
    x = tl.where(n[:, None] < N, acc, float("-inf"))
    top = tl.max(x, 0)
    row = tl.min(tl.where(x == top[None, :], n[:, None], tl.where(x < top[None, :], MAX_INT, -1)), 0)
    packed = pack(tl.where(row < 0, MAX_INT, sortable(top)), tl.maximum(row, 0))
    tl.store(ep.row_maxima + tile + t.to(tl.int64) * ep.row_maxima_stride, packed, mask=t < T)


@triton.jit
def add_parts(acc, at, inside, sums_ptr, counter_ptr, part, SPLIT: tl.constexpr):
    """Store this part's sums. The last program of a tile to arrive returns the sum of all parts, and True.

    Args:
        at: place of each value in the tile. inside: mask, or None.
        sums_ptr, counter_ptr: of this tile, in the workspace.
    """
    TILE: tl.constexpr = acc.shape[0] * acc.shape[1]
    # Stores and loads bypass L1, because programs on different SMs exchange the sums through L2.
    tl.store(sums_ptr + part * TILE + at, acc, mask=inside, cache_modifier=".cg")
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if last:
        acc = tl.zeros_like(acc)
        for i in tl.static_range(SPLIT):
            part_at = sums_ptr + i * TILE + at
            if inside is None:
                acc += tl.load(part_at, cache_modifier=".cg")
            else:
                acc += tl.load(part_at, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(counter_ptr, 0)
    return acc, last


@triton.jit
def touch(ptrs):
    """Prefetch the cache lines at `ptrs` into L2, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
