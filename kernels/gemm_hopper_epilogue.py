"""What the multiplying groups of `gemm_hopper_kernel.py` do with a tile's sums: scale, activate, add, store, find the largest."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from minirt.kernels.hopper import put


@gluon.jit
def _activate(x, ACTIVATION: gl.constexpr):
    """SiLU, or GELU in its erf or tanh form, of an fp32 tensor."""
    if ACTIVATION == "silu":
        return x / (1.0 + gl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    else:
        return x / (1.0 + gl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@gluon.jit
def _scaled(acc, x_scale_ptr, scale_ptr, bias_ptr, t, n, T, inside):
    if scale_ptr is not None:
        acc *= gl.load(x_scale_ptr + t, mask=t < T, other=0.0)[:, None]
        acc *= gl.load(scale_ptr + n, mask=inside, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += gl.load(bias_ptr + n, mask=inside, other=0.0).to(gl.float32)[None, :]
    return acc


@gluon.jit
def _halves(x):
    """The left and the right half of the columns, which each thread has already."""
    HALF: gl.constexpr = x.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, x.type.layout.instr_shape[2]])
    left, right = x.reshape([64, 2, HALF]).permute([0, 2, 1]).split()
    return gl.convert_layout(left, LAYOUT, assert_trivial=True), gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def _store(out, value, t, n, staging, PIECE: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Store what is, from PIECE on, the next pieces of a pair of strips, by the group's buffers in turn.

    At a pair's start nothing is in them that is still to be stored.
    """
    COLUMNS: gl.constexpr = out.block_type.shape[1]
    BUFFERS: gl.constexpr = staging.shape[0] // GROUPS
    if value.shape[1] > COLUMNS:
        left, right = _halves(value)
        _store(out, left, t, n, staging, PIECE, GROUP, GROUPS)
        _store(out, right, t, n + left.shape[1], staging, PIECE + left.shape[1] // COLUMNS, GROUP, GROUPS)
    else:
        if PIECE >= BUFFERS:
            tma.store_wait(BUFFERS - 1)
        buffer = staging.index(BUFFERS * GROUP + PIECE % BUFFERS)
        buffer.store(value.to(out.dtype))
        fence_async_shared()
        put(out, [t, n], buffer)


@gluon.jit
def _finish_pair(
    acc, out, staging, x_scale_ptr, scale_ptr, bias_ptr, first_t, first_n, T, N, ACTIVATION: gl.constexpr,
    RESIDUAL: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Scale, activate or add, and store a pair of strips. With RESIDUAL that is in the group's two buffers."""
    STRIP: gl.constexpr = acc.shape[1] // 2
    left, right = _halves(acc)
    HALF: gl.constexpr = left.type.layout
    t = first_t + gl.arange(0, 64, gl.SliceLayout(1, HALF))
    n = first_n + gl.arange(0, STRIP, gl.SliceLayout(0, HALF))
    left = _scaled(left, x_scale_ptr, scale_ptr, bias_ptr, t, n, T, n < N)
    if ACTIVATION is not None:
        right = _scaled(right, x_scale_ptr, scale_ptr, bias_ptr, t, n + N, T, n < N)
        _store(out, _activate(left, ACTIVATION) * right, first_t, first_n, staging, 0, GROUP, GROUPS)
    else:
        PIECES: gl.constexpr = STRIP // out.block_type.shape[1]
        right = _scaled(right, x_scale_ptr, scale_ptr, bias_ptr, t, n + STRIP, T, n + STRIP < N)
        if RESIDUAL:
            left += staging.index(2 * GROUP).load(HALF).to(gl.float32)
        _store(out, left, first_t, first_n, staging, 0, GROUP, GROUPS)
        if RESIDUAL:
            right += staging.index(2 * GROUP + 1).load(HALF).to(gl.float32)
        _store(out, right, first_t, first_n + STRIP, staging, PIECES, GROUP, GROUPS)


@gluon.jit
def finish_tile(
    acc, more, out, more_out, staging, more_staging, x_scale_ptr, scale_ptr, bias_ptr, t, n, T, N,
    ACTIVATION: gl.constexpr, RESIDUAL: gl.constexpr, MORE: gl.constexpr, FIRST: gl.constexpr, GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    _finish_pair(acc, out, staging, x_scale_ptr, scale_ptr, bias_ptr, t, n, T, N, ACTIVATION, RESIDUAL, GROUP, GROUPS)
    if MORE != 0:
        _finish_pair(
            more, more_out, more_staging, x_scale_ptr, scale_ptr, bias_ptr, t, n + FIRST, T, N, ACTIVATION, RESIDUAL, GROUP,
            GROUPS,
        )  # fmt: skip


@gluon.jit
def _better(top, column, other_top, other_column):
    """The larger of two values, the first of equals, and its column; a NaN, whose column is -1, before anything."""
    other = (column >= 0) & ((other_column < 0) | (other_top > top))
    return gl.where(other, other_top, top), gl.where(other, other_column, column)


@gluon.jit
def _peaks(acc, x_scale_ptr, scale_ptr, bias_ptr, first_t, first_n, T, N, ROWS: gl.constexpr):
    """The largest value of each of 64 rows, and its column, in the layout ROWS: by halves of few columns, to spare registers."""
    if acc.shape[1] > 64:
        left, right = _halves(acc)
        top, column = _peaks(left, x_scale_ptr, scale_ptr, bias_ptr, first_t, first_n, T, N, ROWS)
        first_n += left.shape[1]
        other_top, other_column = _peaks(right, x_scale_ptr, scale_ptr, bias_ptr, first_t, first_n, T, N, ROWS)
        return _better(top, column, other_top, other_column)
    else:
        t = first_t + gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
        n = first_n + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        x = _scaled(acc, x_scale_ptr, scale_ptr, bias_ptr, t, n, T, n < N)
        x = gl.where((n < N)[None, :], x, float("-inf"))
        top = gl.max(x, 1)
        column = gl.min(gl.where(x == top[:, None], n[None, :], gl.where(x < top[:, None], 2147483647, -1)), 1)
        return gl.convert_layout(top, ROWS), gl.convert_layout(column, ROWS)


@gluon.jit
def leave_peaks(
    acc, more, peaks_ptr, stride, x_scale_ptr, scale_ptr, bias_ptr, first_t, n, T, N, MORE: gl.constexpr, COLUMNS: gl.constexpr
):
    """The largest value of each row of a tile and its column, packed as by `sampling_select.pack`."""
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    top, column = _peaks(acc, x_scale_ptr, scale_ptr, bias_ptr, first_t, n, T, N, ROWS)
    if MORE != 0:
        more_top, more_column = _peaks(more, x_scale_ptr, scale_ptr, bias_ptr, first_t, n + acc.shape[1], T, N, ROWS)
        top, column = _better(top, column, more_top, more_column)
    bits = top.to(gl.int32, bitcast=True)
    key = gl.where(top == 0, 0, gl.where(column < 0, 2147483647, bits ^ ((bits >> 31) & 2147483647)))
    packed = (key.to(gl.int64) << 32) | (gl.maximum(column, 0) ^ 2147483647).to(gl.int64)
    t = first_t + gl.arange(0, 64, ROWS)
    gl.store(peaks_ptr + t.to(gl.int64) * stride + n // COLUMNS, packed, mask=t < T)
