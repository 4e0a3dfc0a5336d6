"""FP8 activations: rows of 16- or 32-bit values as e4m3 with one fp32 scale each, before the linears with fp8 weights.

The definition is `minirt.kernels.reference.quantize_fp8`, but that it multiplies by 1 / scale: a quotient half way between two
codes may take the other one, where its last bit decides.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.common import check_activations, check_tensor, launch_options, processors, require_fp8
from minirt.kernels.reference import FP8_MAX

CASES = [
    {"T": 1, "K": 16},
    {"T": 3, "K": 97},
    {"T": 17, "K": 576},
    {"T": 129, "K": 1536},
    {"T": 2, "K": 29568},
]

_MAX = tl.constexpr(FP8_MAX)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_INF_BITS = tl.constexpr(0x7F800000)
_NAN_BITS = tl.constexpr(0x7FF00000)  # NaN also to Triton's interpreter, which casts by the leading bits
_BLOCK = 4096  # values at once
_EARLY_TOKENS = 32


def starts_next_early(T: int) -> bool:
    """Whether programs of the next kernel may start before these have anything to do (with programmatic dependent launch).

    With a few tokens they only find their places earlier. With more, they crowd on the processors that the kernel before leaves
    first.
    """
    return T <= _EARLY_TOKENS


@triton.jit
def wait_for_input(EARLY: tl.constexpr):
    """Under programmatic dependent launch: wait for the kernel before and let the next one start, in either order."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    if not EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def finite_magnitude(wide):
    """Absolute values of fp32, 0 for what is not finite, as int32, which are in the same order."""
    bits = wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits < _INF_BITS, bits, 0)


@triton.jit
def fp8_scale(peak):
    """The scale that maps `peak`, of `finite_magnitude`, to 448; 1 for zero."""
    peak = peak.to(tl.float32, bitcast=True)
    return tl.where(peak > 0, tl.maximum(tl.div_rn(peak, _MAX), _TINY), 1.0)


@triton.jit
def to_fp8(wide, scale):
    """wide / scale as e4m3, to the nearest, ties to even; what is not finite becomes NaN.

    Rounded by hand, to what the format can hold: the cast itself drops carries in Triton's interpreter. 448 is not passed.
    """
    values = wide * tl.div_rn(1.0, scale)
    bits = values.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = ((values + 24576.0) - 24576.0).to(tl.int32, bitcast=True)  # subnormal: multiples of 2⁻⁹
    bits = tl.where(tl.abs(values) < 0.015625, small, normal)
    finite = (wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < _INF_BITS
    return tl.where(finite, bits, _NAN_BITS).to(tl.float32, bitcast=True).to(tl.float8e4nv)


@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, scale_ptr, K: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One of PARTS parts of a row: each of its programs looks through the whole row for the scale and writes its own part."""
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    k = tl.arange(0, BLOCK_K)
    x_ptr += t * K
    out_ptr += t * K
    if PDL:
        wait_for_input(EARLY)
    row = ()  # all loads before the first use
    for i in tl.static_range(BLOCKS):
        row += (tl.load(x_ptr + i * BLOCK_K + k, mask=i * BLOCK_K + k < K, other=0.0),)
    highest = tl.zeros((BLOCK_K,), tl.int32)
    for i in tl.static_range(BLOCKS):
        highest = tl.maximum(highest, finite_magnitude(row[i].to(tl.float32)))
    scale = fp8_scale(tl.max(highest, 0))
    for i in tl.static_range((BLOCKS + PARTS - 1) // PARTS):
        at = (i * PARTS + part) * BLOCK_K + k
        x = row[i] if PARTS == 1 else tl.load(x_ptr + at, mask=at < K, other=0.0)  # again, from L1
        tl.store(out_ptr + at, to_fp8(x.to(tl.float32), scale), mask=at < K)
    if part == 0:
        tl.store(scale_ptr + t, scale)


def quantized_buffers(x: Tensor, out: Tensor | None, scale: Tensor | None, check: bool) -> tuple[Tensor, Tensor]:
    """Where x [T, K] goes: values [T, K] e4m3 and scales [T] fp32, new or as given."""
    T, K = x.shape
    if out is None:
        out = torch.empty(T, K, dtype=torch.float8_e4m3fn, device=x.device)
    elif check:
        check_tensor("out", out, (T, K), torch.float8_e4m3fn, x.device)
    if scale is None:
        scale = torch.empty(T, dtype=torch.float32, device=x.device)
    elif check:
        check_tensor("scale", scale, (T,), torch.float32, x.device)
    return out, scale


def quantize(
    x: Tensor, out: Tensor | None = None, scale: Tensor | None = None, *, pdl: bool = False, check: bool = True
) -> tuple[Tensor, Tensor]:
    """x [T, K] → values [T, K] e4m3 and scale [T] fp32, so that values · scale ≈ x: one pass (compute capability 8.9 and later).

    The scale maps a row's largest finite magnitude to 448 and is 1 for a row of zeros; NaN and infinities become NaN. `out` and
    `scale` take the results' place. `pdl`: overlap with the kernel before it in the stream (sm_90 and later).
    """
    if check:
        check_activations("x", x)
    require_fp8(x.device)
    out, scale = quantized_buffers(x, out, scale, check)
    T, K = x.shape
    if T and K:
        block = min(_BLOCK, triton.next_power_of_2(K))
        # Few tokens leave processors for several programs a row; by powers of two, so that few forms are compiled.
        regime = max(16, triton.next_power_of_2(T))
        parts = max(1, min(triton.cdiv(K, block), processors(x.device) // regime))
        options = launch_options(max(1, block // 256), 1, pdl)
        _quantize_kernel[(T, parts)](
            x, out, scale, K=K, BLOCK_K=block, PARTS=parts, EARLY=starts_next_early(T), **options
        )
    return out, scale


def cost(T: int, K: int, itemsize: int) -> tuple[int, int]:
    """(bytes read and written, floating-point operations)."""
    return T * (K * (itemsize + 1) + 4), 4 * T * K
