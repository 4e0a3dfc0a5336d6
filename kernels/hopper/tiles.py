"""Tiles of MMA results in registers and of operands in shared memory: halves, places in memory, zeroed rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def halves(x):
    """The left and the right half of the columns. No data moves between threads."""
    HALF: gl.constexpr = x.shape[1] // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, x.type.layout.instr_shape[2]])
    left, right = x.reshape([64, 2, HALF]).permute([0, 2, 1]).split()
    return gl.convert_layout(left, LAYOUT, assert_trivial=True), gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def places(acc):
    """A place in memory for each of the sums acc [64, columns], such that a warp's stores are contiguous."""
    LAYOUT: gl.constexpr = acc.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    return (row // 8 % 2 * 256 + row // 16 * 64 + row % 8 * 8) + (column // 8 * 512 + column % 8)


@gluon.jit
def zero_rows_from(tile, limit, STEP: gl.constexpr):
    """Zero the rows of a tile of V from row `limit` on, STEP rows at a time.

    A page may hold NaN there, and a probability of zero times NaN is NaN.
    """
    ROWS: gl.constexpr = tile.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // tile.shape[1], tile.shape[1] // 8], [4, 1], [1, 0])
    row = gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT))[:, None]
    for i in gl.static_range(0, ROWS, STEP):
        if i + STEP > limit:
            part = tile.slice(i, STEP)
            x = part.load(LAYOUT)
            part.store(gl.where(i + row < limit, x, gl.zeros_like(x)))


@gluon.jit
def zero_rows_before(tile, first, STEP: gl.constexpr):
    """Zero the rows of a tile of V before row `first`, STEP rows at a time, as `zero_rows_from` does those at the end."""
    ROWS: gl.constexpr = tile.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // tile.shape[1], tile.shape[1] // 8], [4, 1], [1, 0])
    row = gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT))[:, None]
    for i in gl.static_range(0, ROWS, STEP):
        if i < first:
            part = tile.slice(i, STEP)
            x = part.load(LAYOUT)
            part.store(gl.where(i + row < first, gl.zeros_like(x), x))
