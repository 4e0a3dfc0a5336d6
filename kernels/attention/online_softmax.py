"""Shared code of the attention kernels: the slots of tokens in the pages, and one step of the online softmax.

The online softmax is in fp32, with powers of two (Milakov & Gimelshein 2018; Dao et al. 2022). Its `state` is (row maximum,
total, sums) of rows of queries. Every kernel computes its scores by `score` and `hide`, also those for Hopper, as these functions
contain nothing that depends on a layout.
"""

import torch
import triton
import triton.language as tl

from minirt.kernels.attention.operands import AttentionInput
from minirt.kernels.fp8 import INTERPRETED


@triton.jit
def page_slots(table_ptr, first, limit, C):
    """The tokens t = first + [0, BLOCK_N) of a sequence, and their slots as (base, offsets).

    Token t[i] is in slot base + offsets[i]. `first` is a multiple of BLOCK_N.
    """
    n = tl.arange(0, C.BLOCK_N)
    t = first + n
    if C.PAGE_SIZE % C.BLOCK_N == 0:
        page = tl.load(table_ptr + first // C.PAGE_SIZE).to(tl.int64)
        return t, page * C.PAGE_SIZE + first % C.PAGE_SIZE, n
    else:
        page = tl.load(table_ptr + t // C.PAGE_SIZE, mask=t < limit, other=0).to(tl.int64)
        return t, tl.full((), 0, tl.int64), page * C.PAGE_SIZE + t % C.PAGE_SIZE


@triton.jit
def load_channels(ptrs, d, WIDTH: tl.constexpr):
    """Load channels d [1, N] of heads; zeros from channel WIDTH on, if N is larger."""
    if d.shape[1] == WIDTH:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=d < WIDTH, other=0)


@triton.jit
def store_channels(ptrs, x, d, WIDTH: tl.constexpr):
    """Store channels d [1, N] of heads, in the dtype of the memory; those from WIDTH on are not stored."""
    x = x.to(ptrs.dtype.element_ty)
    if d.shape[1] == WIDTH:
        tl.store(ptrs, x)
    else:
        tl.store(ptrs, x, mask=d < WIDTH)


@triton.jit
def existing(inside, d, WIDTH: tl.constexpr):
    """The mask `inside` of rows, without the channels d [1, N] from WIDTH on, if N is larger."""
    if d.shape[1] == WIDTH:
        return inside
    else:
        return inside & (d < WIDTH)


@triton.jit
def gate_output(out, results, token, head, d, inside):
    """Outputs of the heads `head` of `token`, channels d, times the sigmoid of the gate, if there is one. `inside`: the mask."""
    if results.gate is None:
        return out
    else:
        at = token * results.gate_token + head * results.gate_head + d
        gate = tl.load(results.gate + at, mask=inside, other=0.0)
        return out * tl.sigmoid(gate.to(tl.float32))


@triton.jit
def close(total, row_max, results, head, inside):
    """The denominator of a finished softmax: `total` and, if heads have a sink, its term, which carries no value.

    Added once, when no further token follows: by the kernel that divides. head: of each row; `inside`: the mask, or True.
    """
    if results.sinks is None:
        return total
    else:
        sink = tl.load(results.sinks + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634  # in base 2
        return total + tl.exp2(sink - row_max)


@triton.jit
def score(products, factor, scores):
    """The scores of products of queries and keys, and the factor, positive, by which the caller multiplies them.

    Where the factor comes late, its product is fused with an addition. factor: `scores.scale`, and K's scales.
    """
    return products, factor


@triton.jit
def hide(s, t, row_limit, row_oldest=None):
    """Scores s of the tokens t; −inf for those that a row does not see: from row_limit on, and before row_oldest, if given.

    The arguments broadcast.
    """
    seen = t < row_limit
    if row_oldest is not None:
        seen = seen & (t >= row_oldest)
    return tl.where(seen, s, float("-inf"))


@triton.jit
def oldest_seen(length, new, window):
    """The oldest token that one of the last `new` of `length` tokens sees."""
    return tl.maximum(length - new - window + 1, 0)


@triton.jit
def _loaded(t, limit, oldest):
    """Which of the tokens t are before `limit` and, if it is given, not before `oldest`."""
    if oldest is None:
        return t < limit
    else:
        return (t < limit) & (t >= oldest)


@triton.jit
def base_of(row_max, row_oldest, C):
    """The numbers to subtract from scores: the row maxima or, if all of a row so far may be hidden, 0 in place of −inf."""
    if row_oldest is None and not C.INVARIANT:
        return row_max
    else:
        return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def hide_before(s, t, row_first):
    """Scores s of the tokens t; −inf for tokens before row_first, which a window hides. The arguments broadcast."""
    return tl.where(t >= row_first, s, float("-inf"))


@triton.jit
def split_channels(x):
    """The even and the odd channels of x [M, D], [M, D/2] each. FP8 pages are read in this order."""
    return tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))


@triton.jit
def prepare(q, FP8: tl.constexpr):
    """Queries [M, D] in the form that `attend` takes. For pages that are not FP8: unchanged.

    For FP8 pages: (even channels, odd channels, factor [M, 1]). 16-bit queries are converted to fp16, because one instruction
    converts e4m3 to fp16. Each row is divided by a power of two, its factor, so that it fits the range of fp16.
    """
    if FP8:
        unit = tl.full((q.shape[0], 1), 1.0, tl.float32)
        if q.dtype != tl.float32:
            largest = tl.max(tl.abs(q.to(tl.float32)), 1)[:, None]
            exponent = tl.minimum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 0x7E800000)
            unit = exponent.to(tl.float32, bitcast=True)
            q = (q.to(tl.float32) * (0x7F000000 - exponent).to(tl.float32, bitcast=True)).to(tl.float16)
        even, odd = split_channels(q)
        return even, odd, unit
    else:
        return (q,)


@triton.jit
def no_queries(M: tl.constexpr, D: tl.constexpr, dtype: tl.constexpr, FP8: tl.constexpr):
    """The result of `prepare` for zeros."""
    if FP8:
        half = tl.zeros((M, D // 2), tl.float32 if dtype == tl.float32 else tl.float16)
        return half, half, tl.full((M, 1), 1.0, tl.float32)
    else:
        return (tl.zeros((M, D), dtype),)


def block_n(a: AttentionInput) -> int:
    """Tokens of a step in every kernel of an invariant step."""
    if a.out.element_size() == 4:
        return 32 if a.out.shape[2] <= 128 else 16
    return 64 if a.out.shape[2] <= 128 else 32


@triton.jit
def blank(M: tl.constexpr, D: tl.constexpr, FP8: tl.constexpr, INVARIANT: tl.constexpr = False):
    """The state of M rows before the first step. INVARIANT: the total is [M, 16] equal columns, see `_add_weights`."""
    row_max = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M, 16) if INVARIANT else (M,), tl.float32)
    if FP8:
        return row_max, total, (tl.zeros((M, D // 2), tl.float32), tl.zeros((M, D // 2), tl.float32))
    else:
        return row_max, total, (tl.zeros((M, D), tl.float32),)


@triton.jit
def total_of(total):
    """The total of each row [M], also if it is in columns."""
    if len(total.shape) == 2:
        return tl.max(total, 1)
    else:
        return total


@triton.jit
def _add_weights(total, rescale, weights, p, C):
    """The total after a step. In an invariant step, tensor cores add the weights, rounded as `p` if they are that.

    Their order is one for all shapes of tiles. That of a sum over a row depends on the layout.
    """
    if C.INVARIANT:
        ones = tl.full((p.shape[1], 16), 1.0, p.dtype)
        return tl.dot(p, ones, total * rescale[:, None], input_precision="ieee")
    else:
        return total * rescale + tl.sum(weights, 1)


@triton.jit
def add_split(state, part):
    """The state of two KV splits, the later one as `part`. Row maxima are integers, so only the additions round."""
    row_max, total, acc = state
    part_max, part_total, part_acc = part
    new_row_max = tl.maximum(row_max, part_max)
    base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    old, new = tl.exp2(row_max - base)[:, None], tl.exp2(part_max - base)[:, None]
    total = total * old + part_total * new
    if len(acc) == 2:
        return new_row_max, total, (acc[0] * old + part_acc[0] * new, acc[1] * old + part_acc[1] * new)
    else:
        return new_row_max, total, (acc[0] * old + part_acc[0] * new,)


@triton.jit
def whole(acc):
    """Sums [M, D] in the order of the channels."""
    if len(acc) == 2:
        even, odd = acc
        return tl.join(even, odd).reshape(even.shape[0], even.shape[1] * 2)
    else:
        return acc[0]


@triton.jit
def widen(pairs, dtype: tl.constexpr):
    """Convert the e4m3 values in the lower and in the upper bytes of int16 values, exactly."""
    if INTERPRETED:
        lower = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        upper = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        lower, upper = tl.inline_asm_elementwise(
            """{
            .reg .b32 a;
            .reg .b16 b, c;
            prmt.b32 a, $2, 0, 0x3120;
            mov.b32 {b, c}, a;
            cvt.rn.f16x2.e4m3x2 $0, b;
            cvt.rn.f16x2.e4m3x2 $1, c;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return lower.to(dtype), upper.to(dtype)


@triton.jit
def log2(x):
    """log₂ of normal numbers. To handle other numbers would take most of the instructions."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def inverse(x):
    """1 / x, of normal numbers."""
    if INTERPRETED:
        return 1 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


def fuses(dtype: torch.dtype) -> bool:
    """Whether kernels that call `attend` may fuse multiplications with additions. In fp32 they may not. There, a sum over a row
    adds the products of neighbouring lanes. A lane that fuses its product into the addition of its neighbour's rounded one
    gets another sum than that neighbour, but both store it as the same number.
    """
    return dtype != torch.float32


@triton.jit
def rounded(row_max, C):
    """Row maxima; rounded up in an invariant step, so that rescaling by their differences is exact."""
    if C.INVARIANT:
        return tl.ceil(row_max)
    else:
        return row_max


@triton.jit
def _settle(x):
    """Return x [N], but computed only once. Otherwise the compiler uses the layout of the scores, in which every thread loads
    and computes most of x again. The sum prevents this.
    """
    return tl.sum(tl.where(tl.arange(0, 2)[None, :] == 0, x[:, None], 0.0), 1)


@triton.jit
def _load_rows(ptrs, inside, d, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Rows of K or V, channels d: zeros from channel WIDTH on and, if MASKED, where not `inside`."""
    if MASKED:
        return tl.load(ptrs, mask=existing(inside, d, WIDTH), other=0)
    else:
        return load_channels(ptrs, d, WIDTH)


@triton.jit
def attend(q, state, pages, base, slot, t, limit, row_limit, scores, C, MASKED: tl.constexpr, oldest=None, row_oldest=None):
    """One step of the online softmax, for queries q [M, D] (from `prepare`) and the tokens t [N] of one KV head.

    The tokens are in rows base + NKV · slot [N] of the pages, seen as [P · page_size · NKV, D]. `scores`: `Scores.in_base_2`.
    MASKED: some tokens are hidden. Tokens from `limit` on are past the sequence's end: the page may hold NaN there, and a NaN
    in V would survive a probability of zero, so these tokens are not loaded. Row m sees only tokens below row_limit[m]. With a
    window, it sees them from row_oldest[m] on. Those before `oldest`, which no row sees, are not loaded: their page may be freed.

    FP8 pages are read as int16, a pair of channels each, because loads for the tensor cores can transpose only 16-bit values. K's
    scales multiply the scores. V's scales multiply the probabilities, as a term of their exponents. These products are scaled so
    that the largest is at most 2^15, which keeps their precision in fp16.
    """
    row_max, total, acc = state
    inside = _loaded(t, limit, oldest)[:, None]
    if row_oldest is not None:
        row_oldest = row_oldest[:, None]
    if pages.k_scale is None:
        d = tl.arange(0, C.BLOCK_D)[None, :]
        at = slot[:, None] * (C.NKV * C.D) + d
        k_ptr = pages.k + base * C.D
        v_ptr = pages.v + base * C.D
        k = _load_rows(k_ptr + at, inside, d, C.D, MASKED)
        s, factor = score(tl.dot(q[0], tl.trans(k), input_precision="ieee"), scores.scale, scores)
        if MASKED:
            s = hide(s, t[None, :], row_limit[:, None], row_oldest)
        new_row_max = tl.maximum(row_max, rounded(tl.max(s, 1) * factor, C))
        subtracted = base_of(new_row_max, row_oldest, C)
        p = tl.exp2(s * factor - subtracted[:, None])
        rescale = tl.exp2(row_max - subtracted)
        total = _add_weights(total, rescale, p, p.to(pages.v.dtype.element_ty), C)
        v = _load_rows(v_ptr + at, inside, d, C.D, MASKED)
        return new_row_max, total, (tl.dot(p.to(v.dtype), v, acc[0] * rescale[:, None], input_precision="ieee"),)
    else:
        dtype: tl.constexpr = q[0].dtype
        d = tl.arange(0, C.BLOCK_D // 2)[None, :]
        at = slot[:, None] * (C.NKV * C.D // 2) + d
        k_ptr = pages.k + base * (C.D // 2)
        v_ptr = pages.v + base * (C.D // 2)
        k = _load_rows(k_ptr + at, inside, d, C.D // 2, MASKED)
        k_factor = tl.load(pages.k_scale + base + slot * C.NKV, mask=_loaded(t, limit, oldest), other=1.0) * scores.scale
        v_scale = tl.load(pages.v_scale + base + slot * C.NKV, mask=_loaded(t, limit, oldest), other=1.0)
        exponent, per_scale = log2(v_scale), inverse(v_scale)
        if q[0].shape[0] > 16:
            k_factor, exponent, per_scale = _settle(k_factor), _settle(exponent), _settle(per_scale)
        k_even, k_odd = widen(k, dtype)
        s = tl.dot(q[0], tl.trans(k_even), input_precision="ieee")
        s = tl.dot(q[1], tl.trans(k_odd), s, input_precision="ieee")
        s, factor = score(s * q[2], k_factor[None, :], scores)
        s = s * factor + exponent[None, :]
        if MASKED:
            s = hide(s, t[None, :], row_limit[:, None], row_oldest)
        new_row_max = tl.maximum(row_max, rounded(tl.max(s, 1) - 15, C))
        subtracted = base_of(new_row_max, row_oldest, C)
        p = tl.exp2(s - subtracted[:, None])
        rescale = tl.exp2(row_max - subtracted)
        weights = p * per_scale[None, :]  # may be too large for fp16
        summed: tl.constexpr = tl.float32 if dtype == tl.float32 or INTERPRETED else tl.bfloat16
        total = _add_weights(total, rescale, weights, weights.to(summed), C)
        v = _load_rows(v_ptr + at, inside, d, C.D // 2, MASKED)
        v_even, v_odd = widen(v, dtype)
        p = p.to(dtype)
        even = tl.dot(p, v_even, acc[0] * rescale[:, None], input_precision="ieee")
        return new_row_max, total, (even, tl.dot(p, v_odd, acc[1] * rescale[:, None], input_precision="ieee"))


@triton.jit
def attend_context(q, pages, table_ptr, kv_head, begin, seen_by_all, end, limit, row_limit, scores, C):
    """The state of the online softmax after the tokens begin … end - 1 of a sequence, BLOCK_N at a time.

    Every row sees the tokens below `seen_by_all`, a multiple of BLOCK_N. The tokens from there on are masked, see `attend`. With
    a window, blocks that no row sees are left out, and the first ones, which some rows do not see, are masked, too.
    """
    state = blank(C.BLOCK_M, C.BLOCK_D, pages.k_scale is not None, C.INVARIANT)
    if scores.window is not None:
        row_oldest = row_limit - scores.window
        oldest = tl.maximum(tl.min(row_oldest, 0), 0)
        begin = tl.maximum(begin, oldest // C.BLOCK_N * C.BLOCK_N)
        whole_from = tl.maximum(begin, (tl.max(row_oldest, 0) + C.BLOCK_N - 1) // C.BLOCK_N * C.BLOCK_N)
        if C.INVARIANT:  # the tokens are those of one KV split
            whole_from = tl.minimum(whole_from, end)
        for first in range(begin, whole_from, C.BLOCK_N):
            t, base, slot = page_slots(table_ptr, first, limit, C)
            state = attend(
                q, state, pages, base * C.NKV + kv_head, slot, t, limit, row_limit, scores, C, True, oldest, row_oldest
            )
        begin, seen_by_all = whole_from, tl.maximum(seen_by_all, whole_from)
    for first in range(begin, seen_by_all, C.BLOCK_N):
        t, base, slot = page_slots(table_ptr, first, limit, C)
        state = attend(q, state, pages, base * C.NKV + kv_head, slot, t, limit, row_limit, scores, C, False)
    for first in range(seen_by_all, end, C.BLOCK_N):
        t, base, slot = page_slots(table_ptr, first, limit, C)
        state = attend(q, state, pages, base * C.NKV + kv_head, slot, t, limit, row_limit, scores, C, True)
    return state
