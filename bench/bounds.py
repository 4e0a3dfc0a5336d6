"""The error bounds of kernels, defined once for the kernel tests and for `minirt compare`.

The truth is the same formula in fp64 on the same inputs. The error of a kernel may be at most FACTOR times PyTorch's error in the
same dtype, plus a floor for cases where PyTorch's error happens to be 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FACTOR = 2.0
_FLIPPED_CODE = 2.0**-7, 2.0**-4  # see `floor`


class Errors(NamedTuple):
    """Errors of a tensor against the truth. They are NaN if a value is not finite.

    Attributes:
        relative: Frobenius norm of the difference, divided by that of the truth.
        worst_row: the largest such ratio of a single row (last dimension). It reveals one wrong token among many.
        largest: the largest |difference|, divided by the largest |truth|.
        cosine: cosine of the angle between the two tensors.
    """

    relative: float
    worst_row: float
    largest: float
    cosine: float


class Floor(NamedTuple):
    """The error that is allowed where PyTorch's error is 0: of the whole tensor, and of its worst row."""

    relative: float
    worst_row: float


def floor(dtype: torch.dtype, quantized_activations: bool = False) -> Floor:
    """Return the floor for outputs of `dtype`.

    For bf16 and fp16 it is one rounding of the output, half a unit in the last place: 3.9e-3 and 4.9e-4. For fp32 it is 2e-6,
    because two effects are larger than rounding: the order of sums, and the GPU's exp2 (2 units in the last place, on scores that
    are themselves rounded).

    Activations quantized to e4m3 need a larger floor. A rounding can move a value from one e4m3 code to the next, which changes
    it by 2⁻⁴ to 2⁻³ of its size. In bf16 and fp16 PyTorch's own result has many such jumps. In fp32 a step has a few, and one of
    two implementations may have none. One jump changes a row of a few large values by about 2⁻⁴, and a row of 64 values of
    similar size by about 2⁻⁷.

    Args:
        dtype: of the output.
        quantized_activations: whether activations are rounded to e4m3.
    """
    rounding = max(torch.finfo(dtype).eps / 2, 2e-6)
    if not quantized_activations:
        return Floor(rounding, rounding)
    whole, row = _FLIPPED_CODE
    return Floor(max(rounding, whole), max(rounding, row))


def errors(value: Tensor, truth: Tensor) -> Errors:
    """Return the errors of `value` [..., N], of any float dtype, against `truth` [..., N], computed in fp64."""
    wide, exact = value.double(), truth.double()
    difference = wide - exact
    tiny = 1e-300
    whole = difference.norm() / exact.norm().clamp_min(tiny)
    row = (difference.norm(dim=-1) / exact.norm(dim=-1).clamp_min(tiny)).max()
    largest = difference.abs().max() / exact.abs().max().clamp_min(tiny)
    cosine = (wide * exact).sum() / (wide.norm() * exact.norm()).clamp_min(tiny)
    return Errors(whole.item(), row.item(), largest.item(), cosine.item())


def limits(theirs: Errors, least: Floor) -> Floor:
    """Return the largest errors allowed for a kernel when PyTorch's errors in the same dtype are `theirs`."""
    return Floor(FACTOR * theirs.relative + least.relative, FACTOR * theirs.worst_row + least.worst_row)


def fault(ours: Errors, theirs: Errors, least: Floor) -> str | None:
    """Describe the broken bound with both errors and the limit, or return None if all bounds hold. NaN breaks a bound."""
    whats = "relative error", "relative error of the worst row"
    for what, mine, reference, limit in zip(whats, ours[:2], theirs[:2], limits(theirs, least), strict=True):
        if not mine <= limit:
            return f"{what} {mine:.2e}, PyTorch's {reference:.2e}, limit {limit:.2e}"
    return None
