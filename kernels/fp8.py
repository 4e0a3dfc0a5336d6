"""FP8 inside kernels: scale and e4m3 values of a row, as `reference.quantize_fp8` defines them; scales of blocks of weights."""

import triton
import triton.language as tl

from minirt.errors import InputError
from minirt.kernels.reference import FP8_BLOCK

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def finite_magnitude(x):
    """|x| in fp32; 0 where x is not finite."""
    x = tl.abs(x.to(tl.float32))
    return tl.where(x < float("inf"), x, 0.0)


@triton.jit
def fp8_scale(largest):
    """The scale that maps `largest`, a row's largest finite magnitude, to 448; 1 if `largest` is 0."""
    return tl.maximum(tl.where(largest > 0, tl.div_rn(largest, 448.0), 1.0), 1.1754943508222875e-38)


@triton.jit
def to_fp8(x, scale):
    """x / scale as e4m3 bytes, rounded to nearest even; NaN where x is not finite. `scale` must broadcast with x."""
    x = x.to(tl.float32)
    inverse = tl.div_rn(1.0, scale)
    # A product with the inverse and one Newton step: rounds like a division, without its special cases (Markstein 1990).
    # Infinity becomes NaN.
    y = x * inverse
    scale, inverse = tl.broadcast(scale, y)[0], tl.broadcast(inverse, y)[0]
    y = tl.fma(tl.fma(-y, scale, x), inverse, y)
    if INTERPRETED:
        # The interpreter's conversion does not saturate, loses NaN and drops carries. The GPU's instruction handles all three.
        finite = tl.abs(y) < float("inf")
        y = tl.minimum(tl.maximum(y, -448.0), 448.0)
        bits = y.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        y = tl.where(tl.abs(y) < 0.015625, (y + 24576.0) - 24576.0, normal)
        return tl.where(finite, y.to(tl.float8e4nv).to(tl.uint8, bitcast=True), 0x7F)
    else:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def block_scales(ptr, first, n0, block, N, K: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr, AXIS: tl.constexpr):
    """The scales of COUNT weight rows from first + n0 on in the block of columns `block`.

    One value if all rows lie in one block, else a vector that has an axis AXIS of length 1. Rows past N repeat the last one.

    Args:
        ptr: fp32 [⌈rows / ROWS⌉, ⌈K / 128⌉].
        first: the first row of the weight (of gate: 0, of up: N), a multiple of ROWS. N: its number of rows.
        n0: a multiple of COUNT, a power of two.
    """
    BLOCKS: tl.constexpr = (K + 127) // 128
    if ROWS % COUNT == 0:
        return tl.load(ptr + (first + n0) // ROWS * BLOCKS + block)
    else:
        n = first + tl.minimum(n0 + tl.arange(0, COUNT), N - 1)
        return tl.expand_dims(tl.load(ptr + n // ROWS * BLOCKS + block), AXIS)


def require_one_scale(scale_rows: int | None, block_k: int) -> None:
    """Raise InputError if `block_k` columns, a step in K, may lie in two blocks. `scale_rows`: rows of a block; None: none."""
    if scale_rows is not None and FP8_BLOCK % block_k:
        raise InputError("a step in K has one scale", where="config.block_k", expected="a divisor of 128", found=block_k)
