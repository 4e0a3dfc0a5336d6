"""The operands of adapters: the weights of one linear for all adapters on the device, and the rows of a step by adapter."""

from typing import NamedTuple

from torch import Tensor

TILE_N = 256  # rows of B; `AdapterWeights.tiles` has them
_FEW = 256  # rows up to which tiles have 16 rows


class AdapterWeights(NamedTuple):
    """The adapters of one linear [N, K] with P modules in S places, with ranks up to R, a multiple of 16.

    Args:
        a: [S, P, R, K], b: [S, N, R], zero beyond an adapter's rank.
        scales: [S, P] fp32, ranks: [S, P] int32, with any row stride. Rank 0: the adapter does not change the module.
        modules: [N] int32, of each row of B.
        tiles: [n, 4] int32, the rows of B by tiles of one module: first row, end, module, and the last module. With an
            activation, the first half are the rows of gate, and the last module is that of up.
    """

    a: Tensor
    b: Tensor
    scales: Tensor
    ranks: Tensor
    modules: Tensor
    tiles: Tensor


class Groups(NamedTuple):
    """The T rows of a step, by adapter.

    Args:
        order: [T] int32, the rows without an adapter first, then those of each adapter in ascending order.
        tiles: [n, 3] int32, parts of `order` with one adapter: the adapter (−1: none), first, number of rows. 0: an unused tile.
        block: the most rows of a tile.
    """

    order: Tensor
    tiles: Tensor
    block: int


def tile_rows(rows: int) -> int:
    """Rows of a tile in a step of so many."""
    return 16 if rows <= _FEW else 64


def most_tiles(rows: int, places: int) -> int:
    """The most tiles that rows of a step have, with adapters in `places` places."""
    return min(rows, rows // tile_rows(rows) + places + 1)


def tiles_of(parts: list[tuple[int, int, int]]) -> list[tuple[int, int, int, int]]:
    """`AdapterWeights.tiles` of (first row, end, module) of each part of a linear."""
    last = parts[-1][2]
    return [
        (first, min(first + TILE_N, end), module, last) for start, end, module in parts for first in range(start, end, TILE_N)
    ]
