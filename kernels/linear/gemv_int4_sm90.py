"""Linear layers of one token with 4-bit weights (see `int4_words`) for Hopper: words reach tensor cores through shared memory.

As in `gemm_int4_small_sm90`, a program computes 16 rows, its warps divide K, words are the left operand of `mma.sync`, and a
group's sum is multiplied by its scale in fp32. There, ptxas moves loads to where the words are used, so few bytes are in
flight. Here, copies (`cp.async`) fetch words and scales into a ring of shared memory, several chunks of 128 columns ahead.
Copies use no registers, stay where they are written, and complete in order.

Each warp has a separate ring and waits for nothing but its copies, so the loop has no barrier of the program. Gluon would put one
before each read of shared memory that copies write. So the ring is declared, written and read by inline assembly.

x is multiplied by the norm's weight once, when it is put into shared memory, and its squares are added there. Without a norm, x
may go through the ring too, which takes less shared memory.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minirt.kernels.compile.tuning import Family, cached_lookup
from minirt.kernels.launch import Gpu, cdiv, launch_options, next_power_of_2
from minirt.kernels.linear.epilogue import finish
from minirt.kernels.linear.gemm_int4_small_sm90 import first_chunk, multiply, times
from minirt.kernels.linear.int4_words import scale_words
from minirt.kernels.linear.product import Product, ProductFacts
from minirt.kernels.prepared import compile_time, prepared
from minirt.kernels.reference import INT4_CHUNK

ROWS = gl.constexpr(16)  # of a program: the rows of the MMA
_COLUMNS = gl.constexpr(8)  # of the MMA, all of them copies of the token
_MOST_SHARED = 46 * 1024  # bytes: a kernel may declare 48 KiB, and the sums over warps take up to 2
_MOST_NORMED = 12288  # columns that fit into shared memory beside a ring
# Bytes of a weight from which the ring pays: in smaller ones, a program's start and the first latency take most of the time.
# Without a norm, a program starts sooner.
_FEWEST_BYTES, _FEWEST_BYTES_WITH_RESIDUAL = 10 << 20, 3 << 20


@dataclass(frozen=True)
class GemvInt4Sm90Config:
    """A launch configuration of `gemv_int4_sm90`.

    Args:
        num_warps: warps of a program, each with a separate part of K.
        stages: chunks of 128 columns in flight for each warp.
        unroll: chunks in a step of the loop. Divides `stages`, unless a warp's whole part is in flight.
        registers: the most registers of a thread; None for no limit.
        x_in_ring: whether x goes through the ring. It cannot if there is a norm.
        line: whether a copy of 64 bytes of a row also brings the rest of its 128 bytes into L2.
    """

    num_warps: int
    stages: int
    unroll: int
    registers: int | None = None
    x_in_ring: bool = False
    line: bool = False


@compile_time
class _Constants(NamedTuple):
    """What a launch compiles in. GROUP: groups have 32 · GROUP columns. The others: as in `GemvInt4Sm90Config`."""

    K: int
    GROUP: int
    WARPS: int
    STAGES: int
    UNROLL: int
    X_IN_RING: bool
    LINE: bool


@gluon.jit
def _shared(BYTES: gl.constexpr):
    """The address of new shared memory of the program."""
    return gl.inline_asm_elementwise(
        f".shared .align 16 .b8 ring[{BYTES}]; mov.u32 $0, ring;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _commit():
    """End a group of copies."""
    gl.inline_asm_elementwise("cp.async.commit_group; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait(LEFT: gl.constexpr):
    """Wait until all but the last LEFT groups of the warp's copies are complete."""
    gl.inline_asm_elementwise(
        f"cp.async.wait_group {LEFT}; bar.warp.sync -1; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _sync_warp():
    gl.inline_asm_elementwise("bar.warp.sync -1; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _copy(to, start, count, OFFSET: gl.constexpr, LINE: gl.constexpr):
    """Copy `count` bytes, at most 16, from each address `start` to `to` + OFFSET, and fill 16 bytes with zeros."""
    L2: gl.constexpr = ".L2::128B" if LINE else ""
    gl.inline_asm_elementwise(
        f"cp.async.cg.shared.global{L2} [$1 + {OFFSET}], [$2], 16, $3; // $0", "=r,r,l,r", [to, start, count], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _copy_some(to, start, count, wanted, OFFSET: gl.constexpr, SIZE: gl.constexpr):
    """As `_copy`, SIZE bytes for each thread where `wanted` is not 0."""
    CACHE: gl.constexpr = "cg" if SIZE == 16 else "ca"
    gl.inline_asm_elementwise(
        f"""{{
        .reg .pred p;
        setp.ne.s32 p, $4, 0;
        @p cp.async.{CACHE}.shared.global [$1 + {OFFSET}], [$2], {SIZE}, $3;
        // $0
        }}""",
        "=r,r,l,r,r", [to, start, count, wanted], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _read(at, OFFSET: gl.constexpr):
    """Eight neighbouring words of 16 bits from shared memory. `at`: an address for each, which is that of the first."""
    return gl.inline_asm_elementwise(
        f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {OFFSET}];", "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [at], dtype=gl.int16,
        is_pure=False, pack=8,
    )  # fmt: skip


@gluon.jit
def _read_word(at, OFFSET: gl.constexpr, WORD: gl.constexpr):
    BITS: gl.constexpr = WORD.primitive_bitwidth
    LOAD: gl.constexpr = f"ld.shared.b{BITS} $0, [$1 + {OFFSET}];"
    if BITS == 16:
        word = gl.inline_asm_elementwise(LOAD, "=h,r", [at], dtype=gl.int16, is_pure=False, pack=1)
    else:
        word = gl.inline_asm_elementwise(LOAD, "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1)
    return word.to(WORD, bitcast=True)


@gluon.jit
def _write(at, x, OFFSET: gl.constexpr):
    """Four neighbouring values of 16 bits to shared memory."""
    gl.inline_asm_elementwise(
        f"st.shared.v2.b32 [$1 + {OFFSET}], {{$5, $6}}; // $0", "=r,r,r,r,r,r,r", [at, x], dtype=gl.int8, is_pure=False, pack=4
    )


@gluon.jit
def _load_early(ptrs):
    """16 bits from each address, loaded here and not where they are used."""
    bits = gl.inline_asm_elementwise(
        "ld.global.b16 $0, [$1];", "=h,l", [ptrs.to(gl.int64)], dtype=gl.int16, is_pure=False, pack=1
    )
    return bits.to(ptrs.dtype.element_ty, bitcast=True)


@gluon.jit
def _fetch(
    ring, sources, i, mine, first, SLOT: gl.constexpr, C, GATED: gl.constexpr, ACROSS: gl.constexpr, WITH_X: gl.constexpr
):  # fmt: skip
    """Start the copies of chunk i of each warp into a slot of the ring, and commit them. Zeros past a warp's last chunk.

    ACROSS: groups whose scale words the lanes of a warp copy at once.
    """
    words_to, entries_to = ring
    words, up, scales, scale_step, x = sources
    GROUPS: gl.constexpr = (C.K + 32 * C.GROUP - 1) // (32 * C.GROUP)
    MOST: gl.constexpr = 4 // C.GROUP  # groups of a chunk
    ENTRIES: gl.constexpr = 32 * MOST // ACROSS  # copies
    SCALES: gl.constexpr = SLOT + (2048 if GATED else 1024)
    mine_words, mine_entries = mine
    count = gl.where(i < mine_words, 16, 0)
    start = words + i * 64
    _copy(words_to, start, count, SLOT, C.LINE)
    if GATED:
        _copy(words_to, start + up, count, SLOT + 1024, C.LINE)
    lane = gl.arange(0, 32, gl.SliceLayout(0, scales.type.layout))[None, :]
    lane, _ = gl.broadcast(lane, entries_to)
    for part in gl.static_range((ENTRIES + 31) // 32):
        at = ACROSS * part  # the first group
        valid = i < mine_entries
        if GROUPS % MOST != 0:
            valid = valid & ((first + i) * MOST + at + (0 if ACROSS == 1 else lane // (32 // ACROSS)) < GROUPS)
        start_scales = scales + (i * MOST + at).to(gl.int64) * scale_step
        bytes_ = gl.where(valid, 4, 0)
        wanted = (lane < ENTRIES).to(gl.int32)
        _copy_some(entries_to + lane * 4, start_scales, bytes_, wanted, SCALES + 128 * part, 4)
    if WITH_X:
        left = gl.minimum(gl.maximum(2 * (C.K - (first + i) * 128) - lane * 16, 0), 16)
        left = gl.where(i < mine_entries, left, 0)
        _copy_some(entries_to + lane * 16, x + i * 256, left, (lane < 16).to(gl.int32), SCALES + 4 * ENTRIES, 16)
    _commit()


@gluon.jit
def _load_end(ptr, at):
    """What `finish` takes: (values in fp32,), or () without a pointer."""
    if ptr is None:
        return ()
    else:
        return (_load_early(ptr + at).to(gl.float32),)


@gluon.jit
def _of_token(acc):
    """The sums of the token's column of the MMA: [warps, 16]."""
    SUMS: gl.constexpr = acc.type.layout
    column = gl.arange(0, _COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))[None, None, :]
    return gl.sum(gl.where(column == 0, acc, 0.0), 2)


@gluon.jit
def _now(x):
    """x, computed here and not where it is used."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@prepared
@gluon.jit(do_not_specialize=["N"])
def _gemv_int4_sm90_kernel(x_ptr, norm, weight_ptr, ep, out_ptr, N, C, PDL: gl.constexpr):
    """16 values of out [1, N]. With an activation, the weight has 2N rows: gate, then up."""
    if PDL:
        gdc_launch_dependents()  # at the start, see `pdl`
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [C.WARPS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    GATED: gl.constexpr = ep.activation is not None
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    WORD: gl.constexpr = ep.scale.dtype.element_ty
    CHUNKS: gl.constexpr = (C.K + 127) // 128
    COUNT: gl.constexpr = (CHUNKS + C.WARPS - 1) // C.WARPS  # chunks of a warp
    MORE: gl.constexpr = CHUNKS - C.WARPS * (COUNT - 1)  # warps that have COUNT chunks
    MOST: gl.constexpr = 4 // C.GROUP  # groups of a chunk
    TILES: gl.constexpr = 2 if GATED else 1
    # A copy of 4 bytes has the scale word of a row or, if they have 16 bits, of two.
    WORD_BYTES: gl.constexpr = WORD.primitive_bitwidth // 8
    PAIR: gl.constexpr = 4 // WORD_BYTES
    COPIES: gl.constexpr = 16 // PAIR  # of the rows of gate, or of up
    ACROSS: gl.constexpr = 32 // (COPIES * TILES)
    # A slot of the ring: words of 16 rows, twice if gated, their scale words, and 128 columns of x.
    SLOT_X: gl.constexpr = (1024 + 16 * WORD_BYTES * MOST) * TILES
    SLOT: gl.constexpr = SLOT_X + (256 if C.X_IN_RING else 0)
    RING: gl.constexpr = C.STAGES * SLOT
    ALL_X: gl.constexpr = 0 if C.X_IN_RING else COUNT * 256
    all_rows = TILES * N.to(gl.int64)
    n0 = gl.program_id(0) * ROWS
    base = _shared(C.WARPS * (RING + ALL_X))

    # Where a thread copies words from and to: 16 bytes of two rows. Rows past the end repeat the last one and are not stored.
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 8, 4], [C.WARPS, 1, 1], [2, 1, 0])
    warp = gl.arange(0, C.WARPS, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None]
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))[None, :, None]
    part = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    mine_words = COUNT - (warp >= MORE).to(gl.int32)
    words_to = base + (warp * RING + row * 64 + part * 16)
    at = gl.minimum(n0 + row, N - 1).to(gl.int64) * (CHUNKS * 32) + (first_chunk(warp, CHUNKS, C.WARPS) * 32 + part * 8)
    words = (weight_ptr + at).to(gl.int64)
    mine_words, _ = gl.broadcast(mine_words, words)

    # Scale words, 4 bytes for each lane: of rows of gate, then of up, and so on for the next group.
    ENTRY: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [C.WARPS, 1], [1, 0])
    entry_warp = gl.arange(0, C.WARPS, gl.SliceLayout(1, ENTRY))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, ENTRY))[None, :]
    first = first_chunk(entry_warp, CHUNKS, C.WARPS)
    entry_row = gl.minimum(n0 + PAIR * (lane % COPIES), N - PAIR)
    if GATED:
        entry_row += (lane // COPIES if ACROSS == 1 else lane // COPIES % 2) * N
    entry = entry_row.to(gl.int64) + (first * MOST + (0 if ACROSS == 1 else lane // (32 // ACROSS))).to(gl.int64) * all_rows
    scales = (ep.scale + entry).to(gl.int64)
    entries_to = base + entry_warp * RING
    mine_entries = COUNT - (entry_warp >= MORE).to(gl.int32)
    x_from = (x_ptr + (first * 128 + lane * 8)).to(gl.int64)
    first, _ = gl.broadcast(first, scales)
    entries_to, _ = gl.broadcast(entries_to, scales)
    mine_entries, _ = gl.broadcast(mine_entries, scales)
    mine = (mine_words, mine_entries)
    sources = (words, N.to(gl.int64) * (CHUNKS * 64), scales, all_rows * WORD_BYTES, x_from)
    for i in gl.static_range(C.STAGES):
        # The kernel before may still write x, so the first chunks of x come later.
        _fetch((words_to, entries_to), sources, gl.to_tensor(i), mine, first, i * SLOT, C, GATED, ACROSS, False)

    # Bias and residual, for the threads that store outputs.
    ENDS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, SUMS))
    n = n0 + gl.arange(0, 16, ENDS)
    inside = gl.minimum(n, N - 1)
    rows = (), _load_end(ep.bias, inside), (), _load_end(ep.bias if GATED else None, N + inside)

    # x, normalized but for its root mean square, into shared memory: all of it, or the chunks that the ring has slots for.
    COLUMNS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [C.WARPS, 1], [1, 0])
    STAGED: gl.constexpr = C.STAGES if C.X_IN_RING else COUNT
    column_warp = gl.arange(0, C.WARPS, gl.SliceLayout(1, COLUMNS))[:, None]
    column = gl.arange(0, 128, gl.SliceLayout(0, COLUMNS))[None, :]
    k = first_chunk(column_warp, CHUNKS, C.WARPS) * 128 + column
    limit = gl.where(column_warp < MORE, C.K, gl.minimum(C.K, (first_chunk(column_warp, CHUNKS, C.WARPS) + COUNT - 1) * 128))
    norms = ()
    if norm is not None:
        for i in gl.static_range(STAGED):
            norms += (gl.load(norm.weight + k + 128 * i, mask=k + 128 * i < limit, other=0.0),)  # type: ignore[assignment]
    if PDL:
        gdc_wait()
    xs = ()
    for i in gl.static_range(STAGED):
        if i < COUNT - 2:
            xs += (gl.load(x_ptr + k + 128 * i),)  # type: ignore[assignment]
        else:
            xs += (gl.load(x_ptr + k + 128 * i, mask=k + 128 * i < limit, other=0.0),)  # type: ignore[assignment]
    residual = _load_end(ep.residual, inside)
    FOUR: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [C.WARPS, 1, 1], [2, 1, 0])
    XS: gl.constexpr = 256 if not C.X_IN_RING else SLOT  # bytes from a chunk of x to the next
    X0: gl.constexpr = 0 if not C.X_IN_RING else SLOT_X
    XSLOTS: gl.constexpr = C.STAGES if C.X_IN_RING else COUNT
    X_WARP: gl.constexpr = ALL_X if not C.X_IN_RING else RING
    x_base = base if C.X_IN_RING else base + C.WARPS * RING
    x_to = gl.arange(0, C.WARPS, gl.SliceLayout(1, gl.SliceLayout(2, FOUR)))[:, None, None] * X_WARP
    x_to += gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, FOUR)))[None, :, None] * 8
    x_to = x_base + x_to + gl.zeros([C.WARPS, 32, 4], gl.int32, FOUR)
    x_to = gl.convert_layout(x_to.reshape([C.WARPS, 128]), COLUMNS, assert_trivial=True)
    squares = gl.zeros([C.WARPS, 128], gl.float32, COLUMNS)
    for i in gl.static_range(STAGED):
        columns = xs[i]
        if norm is not None:
            wide = columns.to(gl.float32)
            squares += wide * wide
            columns = times(columns, norms[i])
        _write(x_to, columns, X0 + i * XS)

    inverse_rms = 1.0
    if norm is not None:
        inverse_rms = gl.rsqrt(gl.sum(_now(gl.sum(squares, 1)), 0) / C.K + norm.eps)

    # Where a thread reads its operands: the words of two rows, and 8 columns of x four times.
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [1, 8, 4, 1], [C.WARPS, 1, 1, 1], [3, 2, 1, 0])
    words_at = gl.convert_layout(words_to - base, gl.SliceLayout(3, WORDS), assert_trivial=True)[:, :, :, None]
    words_at = base + words_at + gl.zeros([C.WARPS, 16, 4, 8], gl.int32, WORDS)
    words_at = gl.convert_layout(words_at.reshape([C.WARPS, 16, 32]), LEFT, assert_trivial=True)
    EIGHT: gl.constexpr = gl.BlockedLayout([1, 1, 8, 1], [1, 4, 1, 8], [C.WARPS, 1, 1, 1], [2, 1, 3, 0])
    THIRD: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, EIGHT))
    x_at = gl.arange(0, C.WARPS, gl.SliceLayout(1, THIRD))[:, None, None, None] * X_WARP
    x_at += gl.arange(0, 4, gl.SliceLayout(0, THIRD))[None, :, None, None] * 16
    x_at = x_base + x_at + gl.zeros([C.WARPS, 4, 8, 8], gl.int32, EIGHT)
    x_at = gl.convert_layout(x_at.reshape([C.WARPS, 32, 8]), RIGHT, assert_trivial=True)
    SCALES: gl.constexpr = gl.SliceLayout(2, SUMS)
    scales_at = gl.arange(0, C.WARPS, gl.SliceLayout(1, SCALES))[:, None] * RING
    scales_at = base + (scales_at + gl.arange(0, 16, gl.SliceLayout(0, SCALES))[None, :] * WORD_BYTES)

    acc = gl.zeros([C.WARPS, 16, _COLUMNS], gl.float32, SUMS)
    acc_up = acc
    for step in range(COUNT // C.UNROLL):
        slot = 0
        if C.STAGES > C.UNROLL:
            slot = (step if C.STAGES == COUNT else step % (C.STAGES // C.UNROLL)) * (C.UNROLL * SLOT)
        for u in gl.static_range(C.UNROLL):
            _wait(C.STAGES - 1)
            x_slot = slot if C.X_IN_RING else step * (C.UNROLL * 256)
            gate, up, x = _chunk(
                words_at + slot, scales_at + slot, x_at + x_slot, u * SLOT, X0 + u * XS, MOST, GATED, DTYPE, WORD
            )  # fmt: skip
            if C.STAGES < COUNT:
                _sync_warp()  # all lanes have read the slot
                ring = (words_to + slot, entries_to + slot)
                next_one = step * C.UNROLL + (u + C.STAGES)
                _fetch(ring, sources, next_one, mine, first, u * SLOT, C, GATED, ACROSS, C.X_IN_RING)
            else:
                _commit()
            acc = multiply(gate, x, acc, C.GROUP, 1)
            if GATED:
                acc_up = multiply(up, x, acc_up, C.GROUP, 1)
    for i in gl.static_range(COUNT // C.UNROLL * C.UNROLL, COUNT):
        _wait(C.STAGES - 1)
        gate, up, x = _chunk(
            words_at, scales_at, x_at, i % C.STAGES * SLOT, X0 + (i % XSLOTS) * XS, MOST, GATED, DTYPE, WORD
        )
        _commit()
        acc = multiply(gate, x, acc, C.GROUP, 1)
        if GATED:
            acc_up = multiply(up, x, acc_up, C.GROUP, 1)
    _wait(0)

    if GATED:
        gate, up = gl.sum(gl.join(_of_token(acc), _of_token(acc_up)), 0).split()
        gate = gl.convert_layout(gate, ENDS, assert_trivial=True) * inverse_rms
        up = gl.convert_layout(up, ENDS, assert_trivial=True) * inverse_rms
    else:
        gate = gl.sum(_of_token(acc), 0) * inverse_rms
        up = gate
    result = finish(gate, up, rows, (), residual, ep)
    gl.store(out_ptr + n, result.to(out_ptr.dtype.element_ty), mask=n < N)


@gluon.jit
def _chunk(
    words_at, scales_at, x_at, SLOT: gl.constexpr, X_SLOT: gl.constexpr, MOST: gl.constexpr, GATED: gl.constexpr,
    DTYPE: gl.constexpr, WORD: gl.constexpr,
):  # fmt: skip
    """A chunk of each warp: gate's tile, up's tile (as for `multiply`; empty if not gated), and x."""
    TILES: gl.constexpr = 2 if GATED else 1
    ROWS_BYTES: gl.constexpr = 16 * WORD.primitive_bitwidth // 8  # the scale words of 16 rows
    gate, up = (_read(words_at, SLOT),), ()
    for g in gl.static_range(MOST):
        gate += (_read_word(scales_at, SLOT + (1024 + ROWS_BYTES * g) * TILES, WORD),)  # type: ignore[assignment]
    if GATED:
        up += (_read(words_at, SLOT + 1024),)
        for g in gl.static_range(MOST):
            up += (_read_word(scales_at, SLOT + 2048 + ROWS_BYTES * (2 * g + 1), WORD),)  # type: ignore[assignment]
    x = ()
    for j in gl.static_range(4):
        x += (_read(x_at, X_SLOT + 64 * j).to(DTYPE, bitcast=True),)  # type: ignore[assignment]
    return gate, up, x


def worthwhile(rows: int, K: int, residual: bool) -> bool:
    """Whether a weight is large enough for bytes in flight to matter, and x, unless there is a residual, fits into shared memory.

    Only without a residual may x have to be normalized.
    """
    fewest = _FEWEST_BYTES_WITH_RESIDUAL if residual else _FEWEST_BYTES
    return rows * K // 2 >= fewest and (residual or K <= _MOST_NORMED)


def accepts(product: Product) -> bool:
    """Whether the kernel should compute this product: a large weight, 16-byte alignment, whole copies of scale words."""
    x, weight, scale = product.x, product.weight, product.epilogue.scale
    if (x.data_ptr() | weight.data_ptr()) % 16:
        return False
    if scale is not None and scale.element_size() == 2 and (scale.data_ptr() % 4 or product.shape[1] % 2):
        return False
    return worthwhile(weight.shape[0], x.shape[1], product.epilogue.residual is not None)


def shared_bytes(config: GemvInt4Sm90Config, K: int, group: int, gated: bool) -> int:
    """Shared memory that a program declares, with scale words of 32 bits."""
    count = cdiv(cdiv(K, INT4_CHUNK), config.num_warps)
    slot = (1024 + 64 * (128 // group)) * (2 if gated else 1)
    of_warp = config.stages * (slot + 256) if config.x_in_ring else config.stages * slot + 256 * count
    return config.num_warps * of_warp


def fitting(config: GemvInt4Sm90Config, K: int, group: int, gated: bool, normed: bool) -> GemvInt4Sm90Config:
    """The configuration with as many stages as there are chunks and as fit into shared memory."""
    count = cdiv(cdiv(K, INT4_CHUNK), config.num_warps)
    unroll = min(config.unroll, count)
    c = replace(config, unroll=unroll, stages=min(max(config.stages, unroll), count), x_in_ring=config.x_in_ring and not normed)
    if not normed and shared_bytes(c, K, group, gated) > _MOST_SHARED:
        c = replace(c, x_in_ring=True)
    while True:
        if c.stages < count and c.stages % c.unroll:
            c = replace(c, stages=c.stages // c.unroll * c.unroll)
        if shared_bytes(c, K, group, gated) <= _MOST_SHARED:
            return c
        if c.stages == c.unroll == 1:
            c = replace(c, num_warps=c.num_warps // 2)
            continue
        c = replace(c, stages=c.stages - 1, unroll=min(c.unroll, c.stages - 1))


def rule(facts: ProductFacts, gpu: Gpu) -> GemvInt4Sm90Config:
    """From sweeps (docs/decisions/int4.md)."""
    chunks = cdiv(facts.K, INT4_CHUNK)
    if facts.gated:
        return GemvInt4Sm90Config(min(2, chunks), 4, 2, 112, line=True)  # eight programs on an SM
    if chunks >= 64:
        return GemvInt4Sm90Config(8, 4, 4, 128, x_in_ring=True, line=True)
    return GemvInt4Sm90Config(min(8, next_power_of_2(chunks)), 4, 4, 128)


def candidates(facts: ProductFacts, gpu: Gpu) -> list[GemvInt4Sm90Config]:
    """The configurations that `minirt tune` compares."""
    chunks = cdiv(facts.K, INT4_CHUNK)
    return [
        GemvInt4Sm90Config(warps, stages, unroll, registers, chunks >= 64, line=line)
        for warps in (1, 2, 4, 8) if warps <= chunks
        for stages, unroll in ((3, 1), (4, 2), (4, 4), (6, 2), (7, 7)) for registers in (112, 128) for line in (False, True)
    ]  # fmt: skip


@cached_lookup
def _lookup_fitting(device: torch.device, facts: ProductFacts, group: int, normed: bool) -> GemvInt4Sm90Config:
    return fitting(FAMILY.lookup(device, facts), facts.K, group, facts.gated, normed)


def gemv_int4_sm90(product: Product, config: GemvInt4Sm90Config | None = None) -> None:
    """Write the output of a product of one token."""
    ep, facts = product.epilogue, product.facts(1)
    _, group = scale_words(product)
    N, K, gated, normed = facts.N, facts.K, facts.gated, product.norm is not None
    c = fitting(config, K, group, gated, normed) if config else _lookup_fitting(product.x.device, facts, group, normed)
    constants = _Constants(K, group // 32, c.num_warps, c.stages, c.unroll, c.x_in_ring, c.line)
    _gemv_int4_sm90_kernel[(cdiv(N, 16),)](
        product.x, product.norm, product.weight, ep, product.out, N, C=constants, maxnreg=c.registers,
        **launch_options(c.num_warps, 1, product.pdl),
    )  # fmt: skip


FAMILY = Family("gemv_int4_sm90", GemvInt4Sm90Config, (__file__,), ("N", "K", "gated"), rule, candidates)
