"""Shared code of the decode attention kernels for Hopper: finding work items, fetching their pages by TMA, and RMSNorm and rotary
embedding of the new token.

A ring is (tiles, full, empty), see `hopper.ring`. `sizes` is (B, table_width). Of the kernels' constants `C`, STRIDE is that of
`find_firsts`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from minirt.kernels.hopper.ring import wait_empty
from minirt.kernels.hopper.tma import CHANNELS, tma_load

BLOCK_N = gl.constexpr(64)  # tokens of a block: the M side of a product
PROGRAMS = 2  # programs that share an SM
REGISTERS = gl.constexpr(64)  # of a thread of the fetching warp; the other warps share the rest
BOX = 16  # tokens of one TMA load
LONGEST = 256  # most tokens of a split, because all its scores are kept
MOST_SEQUENCES = 1024  # two steps of 32 lanes can search this many


@gluon.jit
def lanes():
    """The numbers 0 to 31, in every warp."""
    return gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def find_firsts(sequences, B, C):
    """The first work items of every STRIDE-th sequence."""
    index = lanes() * C.STRIDE
    return gl.load(sequences.split_starts + index, mask=index < B, other=2**31 - 1)


@gluon.jit
def find_candidates(item, firsts, sequences, B, C):
    """32 sequences, one of which has the work item: the number of the first, and all their first items and lengths.

    Called one item ahead, because to wait for a load takes as long as the attention of a short sequence.
    """
    base = 0
    if C.STRIDE > 1:  # else there are at most 32 sequences
        base = (gl.sum((firsts <= item).to(gl.int32), 0) - 1) * C.STRIDE
    index = base + lanes()
    starts = gl.load(sequences.split_starts + index, mask=index < B, other=2**31 - 1)
    return base, starts, gl.load(sequences.seq_lens + index, mask=index < B, other=0)


@gluon.jit
def find_place(item, candidates):
    """The sequence of a work item, its length, and the number of the split in it; as `decode._find_work_item`."""
    base, starts, lens = candidates
    index = gl.sum((starts <= item).to(gl.int32), 0) - 1  # the last sequence that starts at or before the item
    found = lanes() == index
    length, first = gl.sum(gl.where(found, lens, 0), 0), gl.sum(gl.where(found, starts, 0), 0)
    return (base + index).to(gl.int64), length, item - first


@gluon.jit
def count_blocks(split, length, SPLIT: gl.constexpr):
    """The number of blocks of a split's tokens that are in the pages. The sequence's last token is new and not in them."""
    tokens = gl.minimum(length - 1 - split * SPLIT, SPLIT)
    return (tokens + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def fetch_items(k_pages, v_pages, ring, sequences, sizes, C):
    """Task of the fetching warp: for one item after the other, fetch the blocks of K, then those of V.

    Past a sequence's end, its last rows are fetched again. The warp does not wait for the kernel before, because that kernel
    writes no page, and the new token is not fetched.
    """
    BOX: gl.constexpr = k_pages.block_type.shape[0]
    TILES: gl.constexpr = C.D // CHANNELS
    NKV: gl.constexpr = C.NKV
    PAGE_SIZE: gl.constexpr = C.PAGE_SIZE
    SPLIT: gl.constexpr = C.SPLIT
    tiles, full, empty = ring
    B, table_width = sizes
    programs = gl.num_programs(0)
    items = gl.load(sequences.split_starts + B)
    firsts = find_firsts(sequences, B, C)
    candidates = find_candidates(gl.program_id(0) // NKV, firsts, sequences, B, C)
    step = 0
    for pair in range(gl.program_id(0), items * NKV, programs):
        b, length, split = find_place(pair // NKV, candidates)
        blocks = count_blocks(split, length, SPLIT)
        column = pair % NKV * C.D
        table_ptr = sequences.block_tables + b * table_width
        rows = ()  # rows of the pages; all loads are issued before the first use
        for i in gl.static_range(0, SPLIT, BOX):
            t = gl.maximum(gl.minimum(split * SPLIT + i, length - 2), 0) // BOX * BOX
            rows += (gl.load(table_ptr + t // PAGE_SIZE) * PAGE_SIZE + t % PAGE_SIZE,)  # type: ignore[assignment]
        candidates = find_candidates((pair + programs) // NKV, firsts, sequences, B, C)
        for IS_V in gl.static_range(2):
            for i in gl.static_range(SPLIT // BLOCK_N):
                if i < blocks:
                    stage = wait_empty(empty, step)
                    bar = full.index(stage)
                    mbarrier.expect(bar, BLOCK_N * C.D * 2)
                    for c in gl.static_range(TILES):
                        tile = tiles.index(stage * TILES + c)
                        for j in gl.static_range(BLOCK_N // BOX):
                            at = [rows[i * (BLOCK_N // BOX) + j], column + c * CHANNELS]
                            tma_load(v_pages if IS_V else k_pages, at, bar, tile.slice(j * BOX, BOX))
                    step += 1


@gluon.jit
def turn(x, y, norm, cos, sin, eps, D: gl.constexpr):
    """Heads, given as the halves x and y of their channels, after RMSNorm (if `norm` has weights) and rotary embedding."""
    dtype: gl.constexpr = x.dtype
    x, y = x.to(gl.float32), y.to(gl.float32)
    if len(norm) == 2:
        scale = gl.rsqrt(gl.sum(x * x + y * y, len(x.shape) - 1) / D + eps)
        if len(x.shape) == 2:
            scale = scale[:, None]
        x = (x * scale).to(dtype).to(gl.float32) * norm[0]
        y = (y * scale).to(dtype).to(gl.float32) * norm[1]
    return (x * cos - y * sin).to(dtype), (y * cos + x * sin).to(dtype)


@gluon.jit
def in_rows(norm):
    """The halves of a norm's weights, as rows that broadcast to heads."""
    if len(norm) == 0:
        return ()
    else:
        return norm[0][None, :], norm[1][None, :]


@gluon.jit
def norm_halves(ptr, d, D: gl.constexpr):
    """A norm's weights for both halves of a head's channels; empty without a norm."""
    if ptr is None:
        return ()
    else:
        return gl.load(ptr + d).to(gl.float32), gl.load(ptr + D // 2 + d).to(gl.float32)
