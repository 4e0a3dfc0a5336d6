"""The epilogue of the linear kernels: from fp32 sums to outputs, the sum of the parts of a split K, and what adapters add.

Triton and Gluon kernels call the same functions, as these contain nothing that depends on a layout. `ep` is a `Product`'s
`Epilogue`. Sums are [rows of the weight, tokens] or [tokens, rows]: loaded values broadcast with the index tensors `n` and `t`.
"""

import triton
import triton.language as tl

from minirt.kernels.argmax import MAX_INT, pack, sortable
from minirt.kernels.arrival import arrive_last


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """SiLU or GELU (erf or tanh form) of an fp32 tensor."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh", "unknown activation")
        # 0.5 · (1 + tanh(y)) is sigmoid(2y)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def tanh(x):
    """tanh of an fp32 tensor. Near 0, where 1 − e^(−2|x|) loses digits, its series."""
    square = x * x
    series = 0.1333333333 + square * (-0.0539682540 + square * 0.0218694885)
    near = x + x * square * (-0.3333333333 + square * series)
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(square < 0.0625, near, tl.where(x < 0, -far, far))


@triton.jit
def _load(ptr, at, inside):
    """(values in fp32,), or () without a pointer: a Triton function cannot return None."""
    if ptr is None:
        return ()
    else:
        return (tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32),)


@triton.jit
def load_rows(ep, n, inside, N, SCALED: tl.constexpr = True):
    """What the epilogue has for weight rows `n` and, with an activation, for rows N + n: (scale, bias, scale of up, bias of up).

    Loaded before the products, nothing waits for it after them. SCALED: whether `ep.scale` is one for each row.
    """
    GATED: tl.constexpr = ep.activation is not None
    scale, bias = _load(ep.scale if SCALED else None, n, inside), _load(ep.bias, n, inside)
    up_scale = _load(ep.scale if SCALED and GATED else None, N + n, inside)
    return scale, bias, up_scale, _load(ep.bias if GATED else None, N + n, inside)


@triton.jit
def load_tokens(ep, t, inside, SCALED: tl.constexpr = True):
    """The scales of tokens `t`, if the product has one for each token."""
    return _load(ep.x_scale if SCALED else None, t, inside)


@triton.jit
def load_residual(ep, at, inside):
    return _load(ep.residual, at, inside)


@triton.jit
def _half(acc, scale, bias, x_scale):
    if len(scale) > 0:
        acc *= scale[0] * x_scale[0] if len(x_scale) > 0 else scale[0]
    if len(bias) > 0:
        acc += bias[0]
    return acc


@triton.jit
def _clamped_swiglu(gate, up, limit, alpha):
    """As `reference.gated` has it. NaN stays NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return (up + 1.0) * gate * tl.sigmoid(alpha * gate)


@triton.jit
def finish(acc, acc_up, rows, x_scale, residual, ep):
    """The output in fp32, from the sums (of gate and of up) and what the functions above loaded."""
    acc = _half(acc, rows[0], rows[1], x_scale)
    if ep.limit is not None:
        acc = _clamped_swiglu(acc, _half(acc_up, rows[2], rows[3], x_scale), ep.limit, ep.alpha)
    elif ep.activation is not None:
        acc = activate(acc, ep.activation) * _half(acc_up, rows[2], rows[3], x_scale)
    if len(residual) > 0:
        acc += residual[0]
    if ep.multiplier is not None:
        acc *= ep.multiplier
    if ep.softcap is not None:
        acc = ep.softcap * tanh(acc / ep.softcap)
    return acc


@triton.jit
def store_packed_maxima(top, row, t, T, ep, tile):
    """Store row maxima of a tile with the weight rows that they are of, as `argmax.pack` does. row -1: NaN, the largest."""
    packed = pack(tl.where(row < 0, MAX_INT, sortable(top)), tl.maximum(row, 0))
    tl.store(ep.row_maxima + tile + t.to(tl.int64) * ep.row_maxima_stride, packed, mask=t < T)


@triton.jit
def store_row_maxima(acc, n, t, N, T, ep, tile):
    """Store the largest value of each column of acc [n, t] with its row. NaN counts as the largest."""
    x = tl.where(n[:, None] < N, acc, float("-inf"))
    top = tl.max(x, 0)
    row = tl.min(tl.where(x == top[None, :], n[:, None], tl.where(x < top[None, :], MAX_INT, -1)), 0)
    store_packed_maxima(top, row, t, T, ep, tile)


@triton.jit
def store_part(acc, at, inside, sums_ptr, part):
    """Store the sums of one part of a split K for the other parts' programs.

    at: place of each sum in the tile. inside: which are stored; None: all. sums_ptr: of this tile, in the workspace.
    """
    # Past L1, because programs on different SMs exchange the sums through L2.
    tl.store(sums_ptr + part * (acc.shape[0] * acc.shape[1]) + at, acc, mask=inside, cache_modifier=".cg")


@triton.jit
def load_part(acc, at, inside, sums_ptr, part):
    """What `store_part` stored for sums of acc's shape."""
    return tl.load(sums_ptr + part * (acc.shape[0] * acc.shape[1]) + at, mask=inside, cache_modifier=".cg")


@triton.jit
def add_parts(acc, at, inside, sums_ptr, counter_ptr, part, SPLIT: tl.constexpr):
    """Store a part's sums. The last program of a tile to arrive returns the sum of all parts, in their order, and True."""
    store_part(acc, at, inside, sums_ptr, part)
    last = arrive_last(counter_ptr, SPLIT)
    if last:
        acc = load_part(acc, at, inside, sums_ptr, 0)
        for i in tl.static_range(1, SPLIT):
            acc += load_part(acc, at, inside, sums_ptr, i)
    return acc, last


@triton.jit
def low_rank_step(added, i, t, n, T, N, first, COLUMNS: tl.constexpr):
    """y [rows t, COLUMNS] and b [rows first + n, COLUMNS] of step i. Rows past T and N repeat the last ones."""
    c = tl.arange(0, COLUMNS)
    y = tl.load(added.y + tl.minimum(t, T - 1).to(tl.int64)[:, None] * added.y_stride + (i * COLUMNS + c)[None, :])
    rows, column = _low_rank_rows(added, i, n, N, first, COLUMNS)
    column += c
    return y, tl.load(rows[:, None] + column[None, :], mask=(column < added.b_stride)[None, :], other=0.0)


@triton.jit
def _low_rank_rows(added, i, n, N, first, COLUMNS: tl.constexpr):
    """Rows first + n of b, and the first column of step i."""
    row = (first + tl.minimum(n, N - 1)).to(tl.int64)
    return added.b + row * added.b_stride, tl.load(added.steps + 1 + i) * COLUMNS


@triton.jit
def touch_low_rank(added, i, n, N, first, COLUMNS: tl.constexpr):
    """Prefetch what `low_rank_step` will load of b."""
    rows, column = _low_rank_rows(added, i, n, N, first, COLUMNS)
    touch(rows + column)


@triton.jit
def touch(ptrs):
    """Prefetch the cache lines at `ptrs` into L2, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
