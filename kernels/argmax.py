"""The largest logit and its token as one int64 (`pack`), so that a maximum of integers finds both, in any order of programs."""

import triton
import triton.language as tl

MAX_INT = tl.constexpr(2**31 - 1)
LOWEST = tl.constexpr(-(2**63))  # below every packed logit


@triton.jit
def sortable(x):
    """fp32 → int32 in the same order; -0 and 0 become equal, and NaN becomes the largest."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == 0, 0, tl.where(x == x, bits ^ ((bits >> 31) & MAX_INT), MAX_INT))


@triton.jit
def logit_of(packed):
    """The fp32 logit in the upper half of a packed maximum."""
    key = (packed >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & MAX_INT)).to(tl.float32, bitcast=True)


@triton.jit
def token_of(packed):
    """The index in the lower half of a packed maximum."""
    return (packed & MAX_INT) ^ MAX_INT


@triton.jit
def greedy_token(packed):
    """The token of a row whose largest logit, packed, this is: int64; -1 if it is NaN or infinite."""
    return tl.where(tl.abs(logit_of(packed)) < float("inf"), token_of(packed), -1)


@triton.jit
def pack(key, v):
    """Key and index v as one int64. The largest has the largest key and, among equal keys, the lowest index."""
    return (key.to(tl.int64) << 32) | (v ^ MAX_INT).to(tl.int64)
