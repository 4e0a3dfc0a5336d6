"""How far a kernel may be from the truth: the one definition, for the tests of the kernels and for `minirt compare`.

The truth is the same mathematics in fp64 on the same inputs. What is computed in a smaller dtype errs, PyTorch too; a kernel may
err at most FACTOR times as much as PyTorch in the same dtype, plus a floor for where PyTorch happens to err by nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FACTOR = 2.0
_FLIPPED_CODE = 2.0**-7, 2.0**-4  # see `floor`


class Errors(NamedTuple):
    """Of a tensor against the truth.

    relative: Frobenius norm of the difference over that of the truth; worst_row: the largest such ratio of a row (last
    dimension), so that one wrong token among many shows; largest: the largest |difference| over the largest |truth|; cosine: of
    the angle between the two. NaN where a value is not finite.
    """

    relative: float
    worst_row: float
    largest: float
    cosine: float


class Floor(NamedTuple):
    """The error to allow of the whole tensor, and of its worst row, where PyTorch has none."""

    relative: float
    worst_row: float


def floor(dtype: torch.dtype, quantized_activations: bool = False) -> Floor:
    """One rounding of the output, half a unit in the last place (bf16 3.9e-3, fp16 4.9e-4); in fp32, where sums in another order
    and the GPU's exp2 (2 units in the last place, on scores that are rounded themselves) matter more than rounding, 2e-6.

    Activations that are quantized to e4m3 jump: a value between two codes, nudged by a rounding, takes the other one, 2⁻³ to
    2⁻⁴ of it away. In bf16 and fp16 PyTorch itself has many such jumps; in fp32 there are a few in a step, and by chance none in
    one of two implementations. One jump moves a row of a few large values by about 2⁻⁴, one of 64 even ones by 2⁻⁷.
    """
    rounding = max(torch.finfo(dtype).eps / 2, 2e-6)
    if not quantized_activations:
        return Floor(rounding, rounding)
    whole, row = _FLIPPED_CODE
    return Floor(max(rounding, whole), max(rounding, row))


def errors(value: Tensor, truth: Tensor) -> Errors:
    """The errors of `value` [..., N], of any float dtype, against `truth` [..., N]; computed in fp64."""
    wide, exact = value.double(), truth.double()
    difference = wide - exact
    tiny = 1e-300
    whole = difference.norm() / exact.norm().clamp_min(tiny)
    row = (difference.norm(dim=-1) / exact.norm(dim=-1).clamp_min(tiny)).max()
    largest = difference.abs().max() / exact.abs().max().clamp_min(tiny)
    cosine = (wide * exact).sum() / (wide.norm() * exact.norm()).clamp_min(tiny)
    return Errors(whole.item(), row.item(), largest.item(), cosine.item())


def limits(theirs: Errors, least: Floor) -> Floor:
    """What a kernel may err at most where PyTorch in the same dtype errs by `theirs`."""
    return Floor(FACTOR * theirs.relative + least.relative, FACTOR * theirs.worst_row + least.worst_row)


def fault(found: Errors, theirs: Errors, least: Floor) -> str | None:
    """What breaks the bound, with both figures; None: it holds. NaN breaks it."""
    most = limits(theirs, least)
    for what, mine, reference, limit in (
        ("relative error", found.relative, theirs.relative, most.relative),
        ("relative error of the worst row", found.worst_row, theirs.worst_row, most.worst_row),
    ):
        if not mine <= limit:
            return f"{what} {mine:.2e}, PyTorch's {reference:.2e}, limit {limit:.2e}"
    return None
