"""The operands of adapters: the weights of one linear for all adapters on the device, and the adapters of a step's rows."""

from collections.abc import Mapping
from math import gcd
from typing import NamedTuple

from torch import Tensor

from minirt.kernels.launch import cdiv
from minirt.kernels.linear.product import LOW_RANK_BLOCK


class AdapterWeights(NamedTuple):
    """The adapters of one linear [N, K] with P modules in S places, with ranks up to R, a multiple of 16.

    Args:
        a: [S, P, R, K]. b: [N, S · P · R], finite; 0 beyond an adapter's rank, and in rows of other modules.
        scales: [S, P] fp32, with any row stride. 0: the adapter does not change the module, which may have old weights.
    """

    a: Tensor
    b: Tensor
    scales: Tensor


class AdapterRows(NamedTuple):
    """The adapters of a step.

    Args:
        adapters: [T] int32, the place of each row's adapter; −1: none.
        steps: `LowRank.steps` of these rows, by the number of modules of a linear.
    """

    adapters: Tensor
    steps: Mapping[int, Tensor]


def most_steps(modules: int, rank: int, places: int, rows: int | None = None) -> int:
    """The most blocks of columns that are used by adapters of so many rows."""
    width = modules * rank
    all_blocks = cdiv(places * width, LOW_RANK_BLOCK)
    of_place = cdiv(width + LOW_RANK_BLOCK - gcd(width, LOW_RANK_BLOCK), LOW_RANK_BLOCK)
    return all_blocks if rows is None else min(all_blocks, rows * of_place)
