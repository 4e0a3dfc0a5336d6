"""4-bit weights inside kernels: the packed layout, words to numbers, and scale words. For Triton and for Gluon kernels.

A weight [N, K] is stored as words [N, ⌈K / 128⌉ · 32] of 16 bits and `scale` [groups, N] int32. In each chunk of 128 columns,
word s holds the columns s, 32 + s, 64 + s and 96 + s, the lowest four bits first. So two neighbouring words are one register of
the tensor cores' left operand four times over, and unpacking moves no value between threads. A scale is an fp32 number with the
group's zero point in its four lowest bits; see `reference.dequantize_int4`. A group has 32, 64 or 128 columns. Scale words of 16
bits are the scales of symmetric weights, bf16 or fp16, whose zero points are 8.

MXFP4 (OCP Microscaling, Rouhani et al. 2023) has the same words, of E2M1 codes. Its scale words, uint32 [⌈K / 128⌉, N], have an
E8M0 byte 2^(byte − 127) for each 32 columns of a chunk, the first one lowest. The dtype of the scale words says which decoder a
kernel compiles; the loops are the same.
"""

import triton
import triton.language as tl
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.linear.product import Product
from minirt.kernels.reference import int4_group

# Words ($4) to numbers in bf16: 128 + q, then − (128 + z). $5: what `offset` returns.
_TO_BF16 = tl.constexpr("""{
    .reg .b32 w1, w2, w3, n0, n1, n2, n3, one;
    shr.u32 w1, $4, 4;
    shr.u32 w2, $4, 8;
    shr.u32 w3, $4, 12;
    lop3.b32 n0, $4, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 n1, w1, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 n2, w2, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 n3, w3, 0x000f000f, 0x43004300, 0xea;
    mov.b32 one, 0x3f803f80;
    fma.rn.bf16x2 $0, n0, one, $5;
    fma.rn.bf16x2 $1, n1, one, $5;
    fma.rn.bf16x2 $2, n2, one, $5;
    fma.rn.bf16x2 $3, n3, one, $5;
    }""")
# In fp16: 1024 + q, then − (1024 + z); and 1024 + 16q, a sixteenth of it, then − (64 + z).
_TO_FP16 = tl.constexpr("""{
    .reg .b32 w2, n0, n1, n2, n3, sixteenth, rest, more;
    shr.u32 w2, $4, 8;
    lop3.b32 n0, $4, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 n1, $4, 0x00f000f0, 0x64006400, 0xea;
    lop3.b32 n2, w2, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 n3, w2, 0x00f000f0, 0x64006400, 0xea;
    mov.b32 sixteenth, 0x2c002c00;
    mov.b32 more, 0x63806380;
    add.rn.f16x2 rest, $5, more;
    add.rn.f16x2 $0, n0, $5;
    fma.rn.f16x2 $1, n1, sixteenth, rest;
    add.rn.f16x2 $2, n2, $5;
    fma.rn.f16x2 $3, n3, sixteenth, rest;
    }""")
_OF_8 = "{ .reg .b32 of_8; mov.b32 of_8,"  # $5 for z = 8
_TO_BF16_SYMMETRIC = tl.constexpr(_TO_BF16.value.replace("$5", "of_8").replace("{", f"{_OF_8} 0xc308c308;"))
_TO_FP16_SYMMETRIC = tl.constexpr(_TO_FP16.value.replace("$5", "of_8").replace("{", f"{_OF_8} 0xe408e408;"))
# m0 … m3: the nibbles of the words $4 as `small_e2m1` returns them.
_E2M1 = tl.constexpr("""
    .reg .b32 s0, s1, s2, m0, m1, m2, m3;
    shl.b32 s0, $4, 12;
    shl.b32 s1, $4, 8;
    shl.b32 s2, $4, 4;
    shl.b32 m0, $4, 6;
    shl.b32 m1, $4, 2;
    shr.u32 m2, $4, 2;
    shr.u32 m3, $4, 6;
    and.b32 m0, m0, 0x01c001c0;
    and.b32 m1, m1, 0x01c001c0;
    and.b32 m2, m2, 0x01c001c0;
    and.b32 m3, m3, 0x01c001c0;
    lop3.b32 m0, s0, 0x80008000, m0, 0xea;
    lop3.b32 m1, s1, 0x80008000, m1, 0xea;
    lop3.b32 m2, s2, 0x80008000, m2, 0xea;
    lop3.b32 m3, $4, 0x80008000, m3, 0xea;
    """)
SMALL = tl.constexpr(2.0**62)  # `small_e2m1` times `large_powers`, by which a weight is too small. Both are exact


@triton.jit
def factor(words, J: tl.constexpr = 0):
    """The scale of each scale word, fp32; of MXFP4, that of its J-th 32 columns. A byte of 0 is a denormal number, 2^−127."""
    if words.dtype == tl.uint32:
        return tl.maximum(((words >> (8 * J)) & 0xFF).to(tl.int32) << 23, 0x00400000).to(tl.float32, bitcast=True)
    elif words.dtype == tl.int32:
        return (words & -16).to(tl.float32, bitcast=True)
    else:
        return words.to(tl.float32)


@triton.jit
def zero_point(words):
    """The zero point of each scale word, fp32."""
    if words.dtype == tl.int32:
        return (words & 15).to(tl.float32)
    else:
        return tl.full(words.shape, 8.0, tl.float32)


@triton.jit
def offset(words, DTYPE: tl.constexpr):
    """What `unpack` takes of scale words: −(128 + z) in bf16, −(1024 + z) in fp16. z is in the lowest bits of the mantissa."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        return ((words & 15) | 0xC300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return ((words & 15) | 0xE400).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def group_words(ptrs, stride, chunk, K: tl.constexpr, GROUP: tl.constexpr, row=0, WIDE: tl.constexpr = False):
    """The scale words of the groups of a chunk, a tuple. Groups past the last one repeat it.

    ptrs: of the first group's, for each row; `row` is added to them. stride: from a group to the next. GROUP: groups have
    32 · GROUP columns. WIDE: words of 16 bits are loaded with the other half of 32 bits, which may lie past the tensor's
    end, because no copy to shared memory has fewer.
    """
    GROUPS: tl.constexpr = (K + 32 * GROUP - 1) // (32 * GROUP)
    words = ()
    for i in tl.static_range(4 // GROUP):
        group = tl.minimum(chunk * (4 // GROUP) + i, GROUPS - 1)
        at = ptrs + group.to(tl.int64) * stride + row
        if WIDE and at.dtype.element_ty.primitive_bitwidth == 16:
            address = at.to(tl.int64)
            both = tl.load((address & -4).to(tl.pointer_type(tl.int32)))
            half = (both >> ((address & 2) * 8).to(tl.int32)).to(tl.int16)
            words += (half.to(at.dtype.element_ty, bitcast=True),)  # type: ignore[assignment]
        else:
            words += (tl.load(at),)  # type: ignore[assignment]
    return words


@triton.jit
def unpack(w, zero):
    """Words → the four tiles q − z of their nibbles, exact in the dtype of `zero`, which is what `offset` returns."""
    if zero.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _TO_BF16, "=r,=r,=r,=r,r,r", [w, zero], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _TO_FP16, "=r,=r,=r,=r,r,r", [w, zero], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def unpack_symmetric(w, DTYPE: tl.constexpr):
    """Words → the four tiles q − 8 of their nibbles, exact in DTYPE. (A constant for `unpack` would keep Triton from
    unpacking in the layout of `tl.dot`.)"""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        return tl.inline_asm_elementwise(
            _TO_BF16_SYMMETRIC, "=r,=r,=r,=r,r", [w], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _TO_FP16_SYMMETRIC, "=r,=r,=r,=r,r", [w], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def e2m1_bits(w, J: tl.constexpr):
    """Nibble J of both 16-bit words of each 32-bit integer, E2M1, as bf16 numbers that are 2^126 too small (0.5 is denormal)."""
    magnitude = w << (6 - 4 * J) if J < 2 else w >> (4 * J - 6)
    return ((w << (12 - 4 * J)) & -2147450880) | (magnitude & 0x01C001C0)


@triton.jit
def e2m1(w, J: tl.constexpr):
    """Nibble J of each word, E2M1, in fp32."""
    return (e2m1_bits(w.to(tl.int32), J) << 16).to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def small_e2m1(w):
    """Words → the four tiles of their nibbles, E2M1, as bf16 numbers that are 2^126 too small, as `e2m1_bits` has them."""
    return tl.inline_asm_elementwise(
        "{" + _E2M1 + "mov.b32 $0, m0; mov.b32 $1, m1; mov.b32 $2, m2; mov.b32 $3, m3; }",
        "=r,=r,=r,=r,r", [w], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def large_powers(words):
    """The four scales of each scale word of MXFP4 as bf16 numbers that are 2^64 too large, see `SMALL`. Bytes up to 190."""
    even = (words & 0x00FF00FF) * 128 + 0x20002000
    odd = ((words >> 8) & 0x00FF00FF) * 128 + 0x20002000
    return _half(even, 0), _half(odd, 0), _half(even, 1), _half(odd, 1)


@triton.jit
def _half(words, HIGH: tl.constexpr):
    """The low or the high 16 bits as bf16."""
    return ((words >> 16) if HIGH else words).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def unpack_e2m1(w, DTYPE: tl.constexpr):
    """Words → the four tiles of their nibbles, E2M1, exact in DTYPE: bits are moved to where DTYPE has them, then scaled."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        return tl.inline_asm_elementwise(
            "{" + _E2M1 + """
            .reg .b32 unit, zero;
            mov.b32 unit, 0x7e807e80;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, m0, unit, zero;
            fma.rn.bf16x2 $1, m1, unit, zero;
            fma.rn.bf16x2 $2, m2, unit, zero;
            fma.rn.bf16x2 $3, m3, unit, zero;
            }""",
            "=r,=r,=r,=r,r", [w], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 s0, s1, s2, m0, m1, m2, m3, unit;
            shl.b32 s0, $4, 12;
            shl.b32 s1, $4, 8;
            shl.b32 s2, $4, 4;
            shl.b32 m0, $4, 9;
            shl.b32 m1, $4, 5;
            shl.b32 m2, $4, 1;
            shr.u32 m3, $4, 3;
            and.b32 m0, m0, 0x0e000e00;
            and.b32 m1, m1, 0x0e000e00;
            and.b32 m2, m2, 0x0e000e00;
            and.b32 m3, m3, 0x0e000e00;
            lop3.b32 m0, s0, 0x80008000, m0, 0xea;
            lop3.b32 m1, s1, 0x80008000, m1, 0xea;
            lop3.b32 m2, s2, 0x80008000, m2, 0xea;
            lop3.b32 m3, $4, 0x80008000, m3, 0xea;
            mov.b32 unit, 0x74007400;
            mul.rn.f16x2 $0, m0, unit;
            mul.rn.f16x2 $1, m1, unit;
            mul.rn.f16x2 $2, m2, unit;
            mul.rn.f16x2 $3, m3, unit;
            }""",
            "=r,=r,=r,=r,r", [w], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def weights(q, words):
    """q · the scale of each row's scale word, not MXFP4, rounded once to the 16-bit dtype of q."""
    if words.dtype == q.dtype:
        return times_power(q, words[:, None])
    else:
        return _scaled(q, factor(words)[:, None])


@triton.jit
def _scaled(q, scale):
    """q · scale, rounded once to 16 bits: `scale` fp32 [rows, 1] is split into a high and a low part."""
    high = scale.to(q.dtype)
    low = (scale - high.to(tl.float32)).to(q.dtype)
    high, _ = tl.broadcast(high, q)
    low, _ = tl.broadcast(low, q)
    if q.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 rest, zero;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 rest, $1, $3, zero;
            fma.rn.bf16x2 $0, $1, $2, rest;
            }""",
            "=r,r,r,r", [q, high, low], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 rest;
            mul.rn.f16x2 rest, $1, $3;
            fma.rn.f16x2 $0, $1, $2, rest;
            }""",
            "=r,r,r,r", [q, high, low], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def times_power(q, power):
    """q · power, a number of 16 bits, rounded once: of a power of two exact, unless the result leaves the range."""
    power, _ = tl.broadcast(power.to(q.dtype), q)
    if q.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
            "=r,r,r", [q, power], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [q, power], tl.float16, is_pure=True, pack=2)


def scale_words(product: Product) -> tuple[Tensor, int]:
    """(Scale words, columns of a group) of a product with 4-bit weights, or of experts. InputError if it has none."""
    scale = product.epilogue.scale
    if scale is None:
        raise InputError("missing", where="scale", expected="scale words")
    return scale, int4_group(product.x.shape[1], scale.shape[-2])
