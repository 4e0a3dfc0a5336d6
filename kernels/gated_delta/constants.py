"""What the kernels of gated DeltaNet share: compile-time constants, the convolution, the gates."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from minirt.kernels.attention.online_softmax import INTERPRETED, inverse
from minirt.kernels.gated_delta import operands
from minirt.kernels.gated_delta.operands import GatedDeltaInput
from minirt.kernels.prepared import compile_time

WIDTH = tl.constexpr(operands.WIDTH)
_L2_EPS = tl.constexpr(operands.L2_EPS)


@compile_time
class Constants(NamedTuple):
    """What a launch compiles in.

    Args:
        HK, HV, DK, DV: heads of q and k, of v; channels of each. GROUP: heads of v for each of k.
        KEYS, VALUES, CHANNELS: channels of all heads of k, of v, and of q, k and v together.
        RING: rows of a slot's ring of inputs.
        DRAFTS: the most tokens of a step that can be undone; 0: none can.
        MOST: the most new tokens of a sequence that `decode` computes; `chunk` computes the others.
        BLOCK_B: sequences that are searched at once.
        BLOCK_V: channels of v of a program.
        CHUNK: tokens of a chunk.
        PRECISION: of products of two fp32 matrices: "ieee" or "tf32".
        SPLIT: a product of bf16 and fp32 splits the fp32 matrix into two of bf16. Otherwise both become fp32.
    """

    HK: int
    HV: int
    DK: int
    DV: int
    GROUP: int
    KEYS: int
    VALUES: int
    CHANNELS: int
    RING: int
    DRAFTS: int
    MOST: int
    BLOCK_B: int = 0
    BLOCK_V: int = 0
    CHUNK: int = 0
    PRECISION: str = "ieee"
    SPLIT: bool = False

    @classmethod
    def of(cls, a: GatedDeltaInput, **others: Any) -> "Constants":
        """The constants of a launch on these operands. `others`: from BLOCK_B on, what its kernels need."""
        (Hk, Hv, Dk, Dv), (_, ring, channels), drafts = a.head_shape, a.state.conv.shape, a.state.drafts
        return cls(Hk, Hv, Dk, Dv, Hv // Hk, Hk * Dk, Hv * Dv, channels, ring, drafts, max(1, drafts), **others)


@triton.jit
def convolve(x_ptr, x_stride, ring_ptr, weight_ptr, channels, position, start, inside, C):
    """SiLU of the causal convolution at `position`, for `channels`; the two broadcast with each other.

    Args:
        x_ptr: the row of the sequence's first new token, which is at position `start`.
        ring_ptr: of the sequence's slot.
    """
    y = position * 0.0 + channels * 0.0
    for j in tl.static_range(WIDTH):
        before = position - (WIDTH - 1 - j)
        x_ptrs = x_ptr + (before - start).to(tl.int64) * x_stride + channels
        ring_ptrs = ring_ptr + (before + C.RING) % C.RING * C.CHANNELS + channels  # also of a negative position
        # New inputs are in x, older ones in the ring; before position 0 they are zeros.
        new = tl.load(x_ptrs, mask=inside & (before >= start), other=0.0)
        old = tl.load(ring_ptrs, mask=inside & (before < start) & (before >= 0), other=0.0)
        y += tl.where(before >= start, new, old).to(tl.float32) * tl.load(weight_ptr + channels * WIDTH + j).to(tl.float32)
    return silu(y)


@triton.jit
def silu(x):
    """x · sigmoid(x); 0 for x below −87. `tl.sigmoid` also handles denormal numbers, which takes twice as many instructions."""
    if INTERPRETED:
        return x * tl.sigmoid(x)
    else:
        return x * inverse(1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def unit(x, AXIS: tl.constexpr):
    """x divided by its length along an axis."""
    return x * tl.expand_dims(tl.rsqrt(tl.sum(x * x, AXIS) + _L2_EPS), AXIS)


@triton.jit
def gates(b, a, A_log, dt_bias):
    """(g, beta) in fp32."""
    x = a.to(tl.float32) + dt_bias
    y = tl.exp(tl.minimum(x, 20.0))
    # log(1 + y) of a small y: what 1 + y rounds away is put back by the factor y / ((1 + y) − 1).
    u = 1.0 + y
    softplus = tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0)))
    g = -tl.exp(A_log) * tl.where(x > 20.0, x, softplus)
    return g, tl.sigmoid(b.to(tl.float32))


@triton.jit
def gated_norm(o, z, weight, eps, AXIS: tl.constexpr, D: tl.constexpr):
    """RMSNorm of o along an axis, times SiLU of z. All in fp32."""
    normed = o * tl.expand_dims(tl.rsqrt(tl.sum(o * o, AXIS) / D + eps), AXIS)
    return normed * weight * silu(z)


@triton.jit
def _round_to_tf32(x):
    return tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def product(a, b, C):
    """a · b in fp32.

    Tensor cores cut the lower bits of TF32 operands off, and that adds up, so they are rounded first. An fp32 matrix beside one
    of bf16 is split into high and low parts of bf16, which together hold 16 of its 24 bits.
    """
    if C.SPLIT and a.dtype == tl.bfloat16 and b.dtype == tl.bfloat16:
        return tl.dot(a, b)
    elif C.SPLIT and a.dtype == tl.bfloat16:
        high = b.to(tl.bfloat16)
        return tl.dot(a, (b - high.to(tl.float32)).to(tl.bfloat16), tl.dot(a, high))
    elif C.SPLIT and b.dtype == tl.bfloat16:
        high = a.to(tl.bfloat16)
        return tl.dot((a - high.to(tl.float32)).to(tl.bfloat16), b, tl.dot(high, b))
    else:
        a, b = a.to(tl.float32), b.to(tl.float32)
        if C.PRECISION == "tf32":
            a, b = _round_to_tf32(a), _round_to_tf32(b)
        return tl.dot(a, b, input_precision=C.PRECISION)
