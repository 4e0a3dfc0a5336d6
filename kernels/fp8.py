"""What kernels that write fp8 share: the scale of a row and its values as e4m3, as `reference.quantize_fp8` defines them."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def finite_magnitude(x):
    """|x| in fp32, and 0 for what is not finite."""
    x = tl.abs(x.to(tl.float32))
    return tl.where(x < float("inf"), x, 0.0)


@triton.jit
def fp8_scale(largest):
    """The scale that maps `largest`, a row's largest finite magnitude, to 448; 1 for zero."""
    return tl.maximum(tl.where(largest > 0, tl.div_rn(largest, 448.0), 1.0), 1.1754943508222875e-38)


@triton.jit
def to_fp8(x, scale):
    """x / scale as bytes of e4m3, rounded to even; what is not finite becomes NaN. `scale` is of a shape that broadcasts."""
    x = x.to(tl.float32)
    inverse = tl.div_rn(1.0, scale)
    # As a division would round, with one more step of Newton's and without its special cases (Markstein 1990). From infinity it
    # makes NaN.
    y = x * inverse
    scale, inverse = tl.broadcast(scale, y)[0], tl.broadcast(inverse, y)[0]
    y = tl.fma(tl.fma(-y, scale, x), inverse, y)
    if INTERPRETED:
        # Its conversion knows neither the largest value nor NaN and drops carries; the GPU's instruction does all that.
        finite = tl.abs(y) < float("inf")
        y = tl.minimum(tl.maximum(y, -448.0), 448.0)
        bits = y.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        y = tl.where(tl.abs(y) < 0.015625, (y + 24576.0) - 24576.0, normal)
        return tl.where(finite, y.to(tl.float8e4nv).to(tl.uint8, bitcast=True), 0x7F)
    else:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
