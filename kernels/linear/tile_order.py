"""The order in which programs take the tiles of a product, for Triton and for Gluon kernels."""

import triton
import triton.language as tl

_GROUP = tl.constexpr(8)  # tiles of rows


@triton.jit
def tile_origin(tile, T, tiles_n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first row and the first column of a tile of ROWS × COLUMNS. `tiles_n` tiles span the columns of the output.

    Programs take tiles in groups of 8 tiles of rows, column by column, so that neighbouring tiles share weights in the L2 cache.
    """
    group = tile // (_GROUP * tiles_n)
    rest = tile % (_GROUP * tiles_n)
    group_rows = min((T + ROWS - 1) // ROWS - group * _GROUP, _GROUP)
    return (group * _GROUP + rest % group_rows) * ROWS, rest // group_rows * COLUMNS
