"""Linear layers of many tokens with 4-bit weights (see `int4_words`) for Hopper, warp-specialized: unpacked in registers.

One warp fetches words and x by TMA. Two groups of four warps unpack 64 rows each into registers, which are the left operand of
`wgmma`; the tokens are on its N side. While one group unpacks, the other one multiplies. So unpacked weights are never stored.

Up to 128 tokens in a tile, a group's products are added first and then multiplied by the scale, in fp32. In wider tiles, and with
groups of 32 columns, the scale multiplies the weights, which rounds them to 16 bits.

Each program has a tile. In the last round there are fewer tiles than SMs, so several programs share each of them: they divide K,
and the last one to arrive adds their sums in a fixed order.

With a gated activation, the rows of gate and up alternate in eights, so that a thread has both sums of an output.

ptxas before CUDA 13.3 may overwrite registers that `wgmma` still reads (triton#11781). So the left operand is also a result of
the wait for the products, which keeps its registers alive until then.
"""

from dataclasses import dataclass
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minirt.kernels.compile.tuning import Family
from minirt.kernels.hopper.ring import release, ring_barriers, wait_empty, wait_full
from minirt.kernels.hopper.tiles import places
from minirt.kernels.hopper.tma import tma_load, tma_tile
from minirt.kernels.launch import MOST_SUMS, Gpu, cdiv, even_parts, launch_options, next_power_of_2, sm_count
from minirt.kernels.linear.epilogue import add_parts, finish, load_residual, load_rows, touch
from minirt.kernels.linear.int4_words import (
    SMALL,
    factor,
    group_words,
    large_powers,
    offset,
    scale_words,
    small_e2m1,
    times_power,
    unpack,
    unpack_e2m1,
    unpack_symmetric,
    weights,
)
from minirt.kernels.linear.product import Product, ProductFacts
from minirt.kernels.linear.tile_order import tile_origin
from minirt.kernels.prepared import Tiled, compile_time, prepared
from minirt.kernels.reference import INT4_CHUNK

_ROWS = 128  # weight rows of a tile: 64 for each group of warps
_WIDEST = 256  # tokens of a tile
_SHARED = 227 * 1024
_MOST_PARTS = 8
_STEP = {32: 0.35, 64: 0.45, 128: 0.8, 256: 1.32}  # microseconds of a chunk, by the tokens of a tile
_ROUND, _ROUND_OF_TOKEN = 1.0, 0.012  # microseconds of a tile besides its chunks, and for each of its tokens


@dataclass(frozen=True)
class Int4Sm90Config:
    """A launch configuration of `gemm_int4_sm90`.

    Args:
        block_t: tokens of a tile: 32, 64, 128 or 256.
        num_stages: chunks of 128 columns in flight.
        split: number of parts of K, for the tiles of the last round of programs, if that is not full.
    """

    block_t: int
    num_stages: int
    split: int = 1


@compile_time
class _Constants(NamedTuple):
    """What a launch compiles in. QUANTUM: groups have 32 · QUANTUM columns. SPLIT: programs that share one of the last tiles."""

    K: int
    GATED: bool
    QUANTUM: int
    BLOCK_T: int
    STAGES: int
    SPLIT: int


@gluon.jit
def _side_by_side(left, right):
    """[64, 32] twice → [64, 64]. No data moves between threads."""
    both = gl.join(left, right).permute((0, 2, 1)).reshape([64, 64])
    return gl.convert_layout(both, left.type.layout, assert_trivial=True)


@gluon.jit
def _alternating(w):
    """Rows of gate, then of up → eight rows of gate, eight of up, and so on: the layout's tile has both in one thread."""
    return w.reshape([2, 4, 8, w.shape[1]]).permute((1, 0, 2, 3)).reshape([64, w.shape[1]])


@gluon.jit
def of_pairs(acc):
    """The sums of gate and of up, [32, tokens] each, of alternating rows."""
    gate, up = acc.reshape([4, 2, 8, acc.shape[1]]).permute((0, 2, 3, 1)).split()
    return gate.reshape([32, acc.shape[1]]), up.reshape([32, acc.shape[1]])


@gluon.jit
def fetch_words(weight, n, N, chunk, bar, tile, GATED: gl.constexpr):
    """The words of a chunk for both groups of warps; if gated, half of a group's rows are gate's and half up's."""
    if GATED:
        for i in gl.static_range(4):
            tma_load(weight, [n + i // 2 * 32 + (N if i % 2 else 0), chunk * 32], bar, tile.slice(32 * i, 32))
    else:
        tma_load(weight, [n, chunk * 32], bar, tile)


@gluon.jit
def fetch_x(x, t, chunk, bar, x_tiles, stage):
    tma_load(x, [t, chunk * 128], bar, x_tiles.index(2 * stage))
    tma_load(x, [t, chunk * 128 + 64], bar, x_tiles.index(2 * stage + 1))


@gluon.jit
def touch_scales(scale_ptr, n, N, stride, chunk, C):
    """Prefetch the scale words of a chunk into L2, so that no group of warps waits for memory. A lane has four rows."""
    GROUPS: gl.constexpr = (C.K + 32 * C.QUANTUM - 1) // (32 * C.QUANTUM)
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    row = gl.minimum(n + lane * 4, N - 1)
    if C.GATED:
        row = gl.minimum(n + lane % 16 * 4, N - 1) + gl.where(lane < 16, 0, N)
    for j in gl.static_range(4 // C.QUANTUM):
        group = gl.minimum(chunk * (4 // C.QUANTUM) + j, GROUPS - 1)
        touch(scale_ptr + (group.to(gl.int64) * stride + row))


@gluon.jit
def _fetch(x, weight, ring, scale_ptr, sizes, C, PDL: gl.constexpr):
    """Task of the fetching warp."""
    x_tiles, w_tiles, full, empty = ring
    _, N, _ = sizes
    BYTES: gl.constexpr = C.BLOCK_T * 128 * 2 + 128 * 64
    t, n, first, last, _, _ = _work_item(sizes, C)
    ahead = min(C.STAGES, last - first)
    for i in range(ahead):
        mbarrier.expect(full.index(i), BYTES)
        fetch_words(weight, n, N, first + i, full.index(i), w_tiles.index(i), C.GATED)
    for i in range(ahead):
        touch_scales(scale_ptr, n, N, 2 * N if C.GATED else N, first + i, C)
    if PDL:
        gdc_wait()  # the kernel before may still write x, but never weights
    for i in range(ahead):
        fetch_x(x, t, first + i, full.index(i), x_tiles, i)
    for i in range(ahead, last - first):
        stage = wait_empty(empty, i)
        mbarrier.expect(full.index(stage), BYTES)
        fetch_words(weight, n, N, first + i, full.index(stage), w_tiles.index(stage), C.GATED)
        fetch_x(x, t, first + i, full.index(stage), x_tiles, stage)
        touch_scales(scale_ptr, n, N, 2 * N if C.GATED else N, first + i, C)
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def _work_item(sizes, C):
    """This program's first token, output column, chunk, and the chunk after its last; its tile and part of those in parts.

    The first programs have whole tiles. The others share the remaining tiles, SPLIT of them each; else the part is -1.
    """
    T, N, whole = sizes
    CHUNKS: gl.constexpr = (C.K + 127) // 128
    PART: gl.constexpr = (CHUNKS + C.SPLIT - 1) // C.SPLIT
    WIDTH: gl.constexpr = 64 if C.GATED else 128
    tile = gl.program_id(0)
    shared, part = tile - whole, 0 * tile
    if C.SPLIT > 1:
        part = gl.where(shared >= 0, shared % C.SPLIT, -1)
        shared = shared // C.SPLIT
        tile = gl.where(part >= 0, whole + shared, tile)
    first = gl.maximum(part, 0) * PART
    last = min(first + PART, CHUNKS)
    if C.SPLIT > 1:
        last = gl.where(part >= 0, last, CHUNKS)
    t, n = tile_origin(tile, T, (N + WIDTH - 1) // WIDTH, C.BLOCK_T, WIDTH)
    return t, n, first, last, shared, part


@gluon.jit
def _unpacked(w, words, x_dtype: gl.constexpr):
    if words.dtype == gl.uint32:
        return unpack_e2m1(w, x_dtype)
    elif words.dtype != gl.int32:
        return unpack_symmetric(w, x_dtype)
    else:
        zero, _ = gl.broadcast(offset(words, x_dtype)[:, None], w)
        return unpack(w, zero)


@gluon.jit
def _outputs(t0, n0, T, N, acc):
    """Offsets in the output for sums acc [columns, tokens], and which of them exist."""
    LAYOUT: gl.constexpr = acc.type.layout
    n = n0 + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    t = t0 + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    return t.to(gl.int64) * N + n, (n < N) & (t < T)


@gluon.jit
def weight_rows(n, N, C, LEFT: gl.constexpr):
    """The rows of gate and up, or of the weight, that a group of warps multiplies for outputs from n on. Past N, the last."""
    r = gl.arange(0, 64, gl.SliceLayout(1, LEFT))
    if C.GATED:
        return gl.minimum(n + r // 16 * 8 + r % 8, N - 1) + gl.where(r // 8 % 2 == 1, N, 0)
    else:
        return gl.minimum(n + r, N - 1)


@gluon.jit
def add_chunks(ring, scales, stride, words, acc, step, first, last, MX: gl.constexpr, C, GROUP: gl.constexpr):
    """acc + the products of chunks `first` … `last` − 1, from a step of the ring on, for a group of warps' 64 rows.

    scales: pointers to the rows' first scale words; `stride`: to those of the next group of columns. words: of the first chunk.
    """
    x_tiles, w_tiles, full, empty = ring
    EXACT: gl.constexpr = C.BLOCK_T <= 128 and C.QUANTUM > 1 and not MX
    SHIFTED: gl.constexpr = MX and x_tiles.dtype == gl.bfloat16  # sums are too small until the end
    WIDE: gl.constexpr = acc.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    if SHIFTED:
        acc *= 1.0 / SMALL
    for i in range(last - first):
        stage = wait_full(full, step + i)
        rows_of_group = w_tiles.index(stage).slice(64 * GROUP, 64)
        if C.GATED:
            STORED: gl.constexpr = (
                gl.zeros([64, 32], gl.int16, LEFT).reshape([4, 2, 8, 32]).permute((1, 0, 2, 3)).reshape([64, 32]).type.layout
            )
            w = gl.convert_layout(_alternating(rows_of_group.load(STORED)), LEFT, assert_trivial=True)
        else:
            w = rows_of_group.load(LEFT)
        fence_async_shared()  # TMA overwrites words that threads have read
        # Loaded a step before they are used (past the end, the last ones again), and after the fence, which waits for loads.
        following = group_words(scales, stride, first + i + 1, C.K, C.QUANTUM)
        left_x, right_x = x_tiles.index(2 * stage).permute((1, 0)), x_tiles.index(2 * stage + 1).permute((1, 0))
        q = small_e2m1(w) if SHIFTED else _unpacked(w, words[0], x_tiles.dtype)
        if EXACT:
            a = _side_by_side(q[0], q[1])
            if C.QUANTUM == 2:
                q = _unpacked(w, words[1], x_tiles.dtype)
            b = _side_by_side(q[2], q[3])
            part = gl.zeros([64, C.BLOCK_T], gl.float32, WIDE)
            part = warpgroup_mma(a, left_x, part, use_acc=False, is_async=True)
            scale = gl.convert_layout(factor(words[0]), gl.SliceLayout(1, WIDE), assert_trivial=True)
            if C.QUANTUM == 4:
                part = warpgroup_mma(b, right_x, part, is_async=True)
                part, a, b = warpgroup_mma_wait(0, deps=[part, a, b])
                release(empty, step + i)
                acc += part * scale[:, None]
            else:
                part, a = warpgroup_mma_wait(0, deps=[part, a])
                acc += part * scale[:, None]
                part = warpgroup_mma(b, right_x, part, use_acc=False, is_async=True)
                scale = gl.convert_layout(factor(words[1]), gl.SliceLayout(1, WIDE), assert_trivial=True)
                part, b = warpgroup_mma_wait(0, deps=[part, b])
                release(empty, step + i)
                acc += part * scale[:, None]
        else:
            parts, powers = (), large_powers(words[0]) if SHIFTED else ()
            for j in gl.static_range(4):
                if (C.QUANTUM == 1 and j > 0) or (C.QUANTUM == 2 and j == 2):
                    q = _unpacked(w, words[j // C.QUANTUM], x_tiles.dtype)
                if MX:
                    scale = (powers[j] if SHIFTED else factor(words[0], j))[:, None]
                    parts += (times_power(q[j], scale),)  # type: ignore[assignment]
                else:
                    parts += (weights(q[j], words[j // C.QUANTUM]),)  # type: ignore[assignment]
            a, b = _side_by_side(parts[0], parts[1]), _side_by_side(parts[2], parts[3])  # type: ignore[misc]
            acc = warpgroup_mma(a, left_x, acc, is_async=True)
            acc = warpgroup_mma(b, right_x, acc, is_async=True)
            acc, a, b = warpgroup_mma_wait(0, deps=[acc, a, b])
            release(empty, step + i)
        words = following
    if SHIFTED:
        acc *= SMALL
    return acc


@gluon.jit
def _multiply(ring, ep, out_ptr, workspace, sizes, C, PDL: gl.constexpr, GROUP: gl.constexpr):
    """Task of one group of four warps: 64 of the tile's weight rows."""
    T, N, _ = sizes
    MX: gl.constexpr = ep.scale.dtype.element_ty == gl.uint32  # a chunk has four scales
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_T, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    t0, n0, first, last, shared, part_of_tile = _work_item(sizes, C)
    n0 += (32 if C.GATED else 64) * GROUP
    all_rows = 2 * N if C.GATED else N
    scales = ep.scale + weight_rows(n0, N, C, LEFT)
    words = group_words(scales, all_rows, first, C.K, C.QUANTUM)
    if PDL:
        gdc_wait()  # these warps write the output, and the fetching warp's wait does not cover them
    acc = gl.zeros([64, C.BLOCK_T], gl.float32, WIDE)
    if ep.residual is not None and not C.GATED:  # here, where registers are free for all loads at once
        at, inside = _outputs(t0, n0, T, N, acc)
        if C.SPLIT > 1:
            inside = inside & (part_of_tile <= 0)
        acc = load_residual(ep, at, inside)[0]
    acc = add_chunks(ring, scales, all_rows, words, acc, 0, first, last, MX, C, GROUP)
    mine = True
    if C.SPLIT > 1:  # noqa: SIM102 (SPLIT is a constant)
        if part_of_tile >= 0:
            sums_ptr, counters_ptr = workspace
            pair = shared * 2 + GROUP
            sums_ptr += pair * (C.SPLIT * 64 * C.BLOCK_T)
            acc, mine = add_parts(acc, places(acc), None, sums_ptr, counters_ptr + pair, part_of_tile, C.SPLIT)
    if mine:
        gate, up = acc, acc
        if C.GATED:
            gate, up = of_pairs(acc)
        n = n0 + gl.arange(0, gate.shape[0], gl.SliceLayout(1, gate.type.layout))[:, None]
        at, stored = _outputs(t0, n0, T, N, gate)
        rows = load_rows(ep, n, n < N, N, False)
        residual = load_residual(ep, at, stored) if C.GATED else ()  # else it is in the sums
        result = finish(gate, up, rows, (), residual, ep)
        gl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=stored)


@prepared
@gluon.jit(do_not_specialize=["T", "N", "whole"])
def _gemm_int4_sm90_kernel(x, weight, ep, out_ptr, sums_ptr, counters_ptr, T, N, whole, C, PDL: gl.constexpr):
    """A tile of out [T, N]. With an activation, the weight has 2N rows: gate, then up. The first `whole` tiles are not shared."""
    x_tiles = gl.allocate_shared_memory(x.dtype, [2 * C.STAGES, C.BLOCK_T, 64], x.layout)
    w_tiles = gl.allocate_shared_memory(gl.int16, [C.STAGES, 128, 32], weight.layout)
    full, empty = ring_barriers(C.STAGES, 2)
    fence_async_shared()
    ring = (x_tiles, w_tiles, full, empty)
    workspace = (sums_ptr, counters_ptr)
    sizes = (T, N, whole)
    gl.warp_specialize(
        [
            (_multiply, (ring, ep, out_ptr, workspace, sizes, C, PDL, 0)),
            (_multiply, (ring, ep, out_ptr, workspace, sizes, C, PDL, 1)),
            (_fetch, (x, weight, ring, ep.scale, sizes, C, PDL)),
        ],
        [4, 1],
        [240, 24],
    )


def tile_tokens(T: int) -> int:
    """The tokens of a tile, by the number of tokens."""
    return 32 if T <= 32 else 64 if T <= 64 else 128 if T <= 128 else _WIDEST


def token_regime(T: int) -> int:
    """T padded to whole tiles, up to 512, else to a power of two."""
    return padded_tokens(T) if T <= 2 * _WIDEST else next_power_of_2(T)


def padded_tokens(T: int) -> int:
    """T padded to whole tiles."""
    return cdiv(T, tile_tokens(T)) * tile_tokens(T)


def stages(block_t: int) -> int:
    """The chunks that fit in shared memory."""
    return min(6, (_SHARED - 1024) // (block_t * 256 + _ROWS * 64))


def accepts(product: Product) -> bool:
    """Whether TMA can move x: rows and addresses aligned to 16 bytes."""
    x, weight = product.x, product.weight
    return (x.data_ptr() | weight.data_ptr() | x.shape[1] * 2) % 16 == 0


def candidates(facts: ProductFacts, gpu: Gpu) -> list[Int4Sm90Config]:
    """The configurations worth considering: tiles as wide as T, up to 256, or half as wide; each with the most parts of K."""
    T, N, gated, num_sms = facts.T, facts.N, facts.gated, gpu.sms
    widest, chunks, configs = tile_tokens(T), cdiv(facts.K, INT4_CHUNK), []
    for block_t in (widest, widest // 2):
        if block_t in _STEP:
            shared = cdiv(T, block_t) * cdiv(N, _ROWS // (2 if gated else 1)) % num_sms
            programs = min(num_sms, MOST_SUMS // (_ROWS * block_t))
            most = 1 if shared == 0 else max(1, min(programs // shared, _MOST_PARTS, chunks // 4))
            splits = sorted({even_parts(chunks, split) for split in range(1, most + 1)})
            configs += [Int4Sm90Config(block_t, stages(block_t), split) for split in splits]
    return configs


def predicted(c: Int4Sm90Config, facts: ProductFacts, num_sms: int) -> float:
    """Predicted microseconds: full rounds of programs, then the last one, whose programs may share tiles."""
    tiles, chunks = cdiv(facts.T, c.block_t) * cdiv(facts.N, _ROWS // (2 if facts.gated else 1)), cdiv(facts.K, INT4_CHUNK)
    full, shared = divmod(tiles, num_sms)
    ends = _ROUND + _ROUND_OF_TOKEN * c.block_t
    time = full * (chunks * _STEP[c.block_t] + ends)
    if shared:
        time += cdiv(chunks, c.split) * _STEP[c.block_t] + ends
        time += 0.0 if c.split == 1 else 0.5 + c.split * (c.block_t / 128) ** 2
    return time


def rule(facts: ProductFacts, gpu: Gpu) -> Int4Sm90Config:
    """The candidate with the least predicted time, for a T that is a token regime."""
    return min(candidates(facts, gpu), key=lambda c: predicted(c, facts, gpu.sms))


def share_tiles(c: Int4Sm90Config, T: int, N: int, gated: bool, num_sms: int) -> tuple[int, int]:
    """(tiles of one program each, tiles that several programs share).

    A configuration is for the most tokens of its regime. With fewer, more tiles may be left over than can be shared.
    """
    tiles = cdiv(T, c.block_t) * cdiv(N, _ROWS // (2 if gated else 1))
    shared = tiles % num_sms
    if shared * c.split > min(num_sms, MOST_SUMS // (_ROWS * c.block_t)):
        shared = 0
    return tiles - shared, shared


def gemm_int4_sm90(product: Product, config: Int4Sm90Config | None = None) -> None:
    """Write the output of a product that `accepts` does not refuse. Without a workspace, K is not split."""
    x, ep, workspace, T = product.x, product.epilogue, product.workspace, product.x.shape[0]
    _, group = scale_words(product)
    facts = product.facts(token_regime(T))
    N, K, gated, c = facts.N, facts.K, facts.gated, config or FAMILY.lookup(x.device, facts)
    whole, shared = share_tiles(c, T, N, gated, sm_count(x.device))
    split, sums, counters = 1, None, None
    if workspace is not None and c.split > 1:
        split = even_parts(cdiv(K, INT4_CHUNK), c.split)
        sums, counters = workspace.sums(shared * split * _ROWS * c.block_t), workspace.counters(2 * shared)
    else:
        whole, shared = whole + shared, 0
    x_tiles, w_tiles = tma_tile(c.block_t, 64, 2), tma_tile(32 if gated else _ROWS, 32, 2)
    constants = _Constants(K, gated, group // 32, c.block_t, c.num_stages, split)
    _gemm_int4_sm90_kernel[(whole + shared * split,)](
        Tiled(x, x_tiles), Tiled(product.weight, w_tiles), ep, product.out, sums, counters, T, N, whole, C=constants,
        **launch_options(4, 1, product.pdl),
    )  # fmt: skip


FAMILY = Family("gemm_int4_sm90", Int4Sm90Config, (__file__,), ("T", "N", "K", "gated"), rule, candidates, token_regime)
