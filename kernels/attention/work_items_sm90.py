"""Shared code of the decode attention kernels for Hopper: work items, their pages by TMA, and QK-norm and RoPE of the new token.

A ring is (tiles, full, empty), see `hopper.ring`. `sizes` is (B, table_width), and `window` is `Scores.window`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from minirt.errors import InputError
from minirt.kernels.attention.operands import AttentionInput, decode_lookup_size
from minirt.kernels.hopper.ring import wait_empty
from minirt.kernels.hopper.tma import CHANNELS, tma_load
from minirt.kernels.linear.dispatch import fetches_early
from minirt.kernels.prepared import compile_time

BLOCK_N = gl.constexpr(64)  # tokens of a block: the M side of a product
PROGRAMS = 2  # programs that share an SM, with heads of up to 128 channels
BOX = 16  # tokens of one TMA load
_new = tuple.__new__
MOST_SEQUENCES = 1024  # two steps of 32 lanes can search this many


@compile_time
class Constants(NamedTuple):
    """What a launch compiles in.

    Args:
        GROUP: query heads that share a KV head.
        PIECES: of a head in registers; WIDTH: channels of one.
        R, ROW: as in `constants.Constants`.
        STRIDE: that of `find_firsts`.
        EARLY: whether the next kernel is triggered before the work.
        N: queries of an item, padded. STAGES: of the ring.
        UNITS: items of all KV heads of a split. These and the following only on FP8 pages.
        TILES: tiles of an item; HEADS: its KV heads; SIDE: tiles of a stage of the ring.
        SLOTS: of scales. REGISTERS: of a thread of the fetching warp.
    """

    NQ: int
    NKV: int
    D: int
    GROUP: int
    PIECES: int
    WIDTH: int
    R: int
    ROW: int
    PAGE_SIZE: int
    SPLIT: int
    STRIDE: int
    EARLY: bool
    N: int
    STAGES: int
    UNITS: int
    TILES: int
    HEADS: int
    SIDE: int
    SLOTS: int
    REGISTERS: int


def constants_of(
    a: AttentionInput, shape: tuple[int, int, int], B: int, n: int, stages: int, of_fp8: tuple[int, ...] = (0,) * 6
) -> Constants:
    """The constants of a launch for B sequences and heads of this shape. n, stages, of_fp8: the fields from N on."""
    if a.rope is None:
        raise InputError("missing", where="rope", expected="raw heads", hint="`decode` takes queries")
    Nq, Nkv, D = shape
    pieces = 4 if D > 128 else 2
    # Every launch asks, and a call of the class takes several times as long.
    return _new(Constants, (
        Nq, Nkv, D, Nq // Nkv, pieces, D // pieces, a.rope.channels, a.heads.stride(0), a.pages.k.shape[1], a.split,
        max(1, decode_lookup_size(B) // 32), a.pdl and fetches_early(B, a.out.device), n, stages, *of_fp8,
    ))  # fmt: skip


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
    """32 sequences, one of which has the work item: the number of the first, and all their first items, lengths and tokens.

    A sequence's token is the number of its new token in the step; -1 if it has another number of new tokens than one. Called one
    item ahead, because to wait for a load takes as long as the attention of a short sequence.
    """
    base = 0
    if C.STRIDE > 1:  # else there are at most 32 sequences
        base = (gl.sum((firsts <= item).to(gl.int32), 0) - 1) * C.STRIDE
    index = base + lanes()
    starts = gl.load(sequences.split_starts + index, mask=index < B, other=2**31 - 1)
    lens, tokens = gl.load(sequences.seq_lens + index, mask=index < B, other=0), index
    if sequences.query_starts is not None:
        tokens = gl.load(sequences.query_starts + index, mask=index < B, other=0)
        end = gl.load(sequences.query_starts + index + 1, mask=index < B, other=0)
        tokens = gl.where(end == tokens + 1, tokens, -1)
    return base, starts, lens, tokens


@gluon.jit
def find_place(item, candidates, sequences, window, C):
    """Of a work item: the sequence, its new token (see `find_candidates`), its length, and the number of the split in it.

    An item without a token is left out: its length is such that it has nothing but a new token, which the caller does not store.
    """
    base, starts, lens, tokens = candidates
    index = gl.sum((starts <= item).to(gl.int32), 0) - 1  # the last sequence that starts at or before the item
    chosen = lanes() == index
    length, first = gl.sum(gl.where(chosen, lens, 0), 0), gl.sum(gl.where(chosen, starts, 0), 0)
    b, split = (base + index).to(gl.int64), item - first
    token = b
    if sequences.query_starts is not None:
        token = gl.sum(gl.where(chosen, tokens, 0), 0).to(gl.int64)
    if window is not None:  # items start at `operands.first_split`; those without a token may count from 0
        split += gl.where(token < 0, 0, gl.maximum(length - window, 0) // C.SPLIT)
    if sequences.query_starts is not None:
        length = gl.where(token < 0, gl.minimum(length, split * C.SPLIT + 1), length)
    return b, token, length, split


@gluon.jit
def find_blocks(split, length, window, SPLIT: gl.constexpr):
    """The blocks of a split that are in the pages and not hidden by the window: the first one's first token, and their number.

    The sequence's last token is new and not in the pages. Also returns how many tokens of the first block are hidden.
    """
    begin, hidden = split * SPLIT, 0
    tokens = gl.minimum(length - 1 - split * SPLIT, SPLIT)
    blocks = (tokens + BLOCK_N - 1) // BLOCK_N
    if window is not None:
        hidden = gl.maximum(length - window - begin, 0)
        begin, blocks, hidden = begin + hidden // BLOCK_N * BLOCK_N, blocks - hidden // BLOCK_N, hidden % BLOCK_N
    return begin, blocks, hidden


@gluon.jit
def end_of_first(length, window, SPLIT: gl.constexpr):
    """The first token past the first split that a sequence's new token sees. A sequence that ends before has no other split."""
    if window is None:
        return SPLIT
    else:
        return (gl.maximum(length - window, 0) // SPLIT + 1) * SPLIT


@gluon.jit
def fetch_items(k_pages, v_pages, ring, sequences, sizes, window, C):
    """Task of the fetching warp: for one item after the other, fetch the blocks of K, then those of V.

    Past a sequence's end, its last rows are fetched again. The warp does not wait for the kernel before, because that kernel
    writes no page, and the new token is not fetched.
    """
    BOX: gl.constexpr = k_pages.block_type.shape[0]
    TILES: gl.constexpr = C.D // CHANNELS
    tiles, full, empty = ring
    B, table_width = sizes
    programs = gl.num_programs(0)
    items = gl.load(sequences.split_starts + B)
    firsts = find_firsts(sequences, B, C)
    candidates = find_candidates(gl.program_id(0) // C.NKV, firsts, sequences, B, C)
    step = 0
    for pair in range(gl.program_id(0), items * C.NKV, programs):
        b, _, length, split = find_place(pair // C.NKV, candidates, sequences, window, C)
        begin, blocks, _ = find_blocks(split, length, window, C.SPLIT)
        column = pair % C.NKV * C.D
        table_ptr = sequences.block_tables + b * table_width
        rows = ()  # rows of the pages; all loads are issued before the first use
        for i in gl.static_range(0, C.SPLIT, BOX):
            t = gl.maximum(gl.minimum(begin + i, length - 2), 0) // BOX * BOX
            rows += (gl.load(table_ptr + t // C.PAGE_SIZE) * C.PAGE_SIZE + t % C.PAGE_SIZE,)  # type: ignore[assignment]
        candidates = find_candidates((pair + programs) // C.NKV, firsts, sequences, B, C)
        for IS_V in gl.static_range(2):
            for i in gl.static_range(C.SPLIT // BLOCK_N):
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


# The new token's heads are in registers in pieces: the halves of 64 or 128 channels, the quarters of 256. If whole heads are
# rotated, a channel's partner is in another piece. Else partners are loaded once more, for the pieces with rotated channels.


@gluon.jit
def load_pieces(ptrs, d, C):
    """The pieces of heads. ptrs: of their first channels. d: the channels of a piece. Both broadcast to its shape."""
    pieces = ()
    for i in gl.static_range(C.PIECES):
        pieces += (gl.load(ptrs + i * C.WIDTH + d),)  # type: ignore[assignment]
    return pieces


@gluon.jit
def load_partners(ptrs, d, C):
    """The partners of the channels in pieces with rotated ones; () if whole heads are rotated. Arguments of `load_pieces`."""
    partners = ()
    if C.R != C.D:
        for first in gl.static_range(0, C.R, C.WIDTH):
            at = first + d
            partners += (gl.load(ptrs + gl.where(at < C.R, (at + C.R // 2) % C.R, at)),)  # type: ignore[assignment]
    return partners


@gluon.jit
def load_angles(rope, position, d, C):
    """Cosines and sines at a position, alternately, for the pieces of the lower half if whole heads are rotated, else for those
    with rotated channels."""
    angles = ()
    if C.R == C.D:
        for first in gl.static_range(0, C.R // 2, C.WIDTH):
            angles_ptr = rope.cos_sin + position.to(gl.int64) * C.R + first + d
            angles += (gl.load(angles_ptr), gl.load(angles_ptr + C.R // 2))  # type: ignore[assignment]
    elif C.R > 0:
        for first in gl.static_range(0, C.R, C.WIDTH):
            angle = gl.where(first + d < C.R, (first + d) % (C.R // 2), 0)
            angles_ptr = rope.cos_sin + position.to(gl.int64) * C.R + angle
            angles += (gl.load(angles_ptr), gl.load(angles_ptr + C.R // 2))  # type: ignore[assignment]
    return angles


@gluon.jit
def load_scale(rope, position):
    """The factor of q at a position; () without one."""
    if rope.q_scales is None:
        return ()
    else:
        return (gl.load(rope.q_scales + position),)


@gluon.jit
def load_norm(ptr, d, C):
    """A norm's weights for the pieces of a head and then for their partners; () without a norm."""
    if ptr is None:
        return ()
    else:
        weights = ()
        loaded = load_pieces(ptr, d, C) + load_partners(ptr, d, C)
        for i in gl.static_range(len(loaded)):
            weights += (loaded[i].to(gl.float32),)  # type: ignore[assignment]
        return weights


@gluon.jit
def _like(row, x):
    """A row of channels, in the shape that broadcasts to heads x [N, channels] or [channels]."""
    if len(x.shape) == 2:
        return row[None, :]
    else:
        return row


@gluon.jit
def _normalized(x, inverse_rms, norm, i):
    """x · inverse_rms in fp32, rounded to the dtype of x, times the weights norm[i], if there are any."""
    y = (x.to(gl.float32) * inverse_rms).to(x.dtype).to(gl.float32)
    if len(norm) > 0:
        y = y * _like(norm[i], x)
    return y


@gluon.jit
def of_pieces(pieces, rope, C):
    """The inverse root mean square of each head, in pieces."""
    square = pieces[0].to(gl.float32) * pieces[0].to(gl.float32)
    for i in gl.static_range(1, C.PIECES):
        square = square + pieces[i].to(gl.float32) * pieces[i].to(gl.float32)
    return gl.rsqrt(gl.sum(square, len(square.shape) - 1) / C.D + rope.eps)


@gluon.jit
def times(pieces, factor):
    """Each piece times a number, in its dtype."""
    done = ()
    for i in gl.static_range(len(pieces)):
        done += ((pieces[i].to(gl.float32) * factor).to(pieces[i].dtype),)  # type: ignore[assignment]
    return done


@gluon.jit
def turn(pieces, partners, norm, angles, scale, d, rope, C):
    """Heads, in pieces, after RMSNorm (if there are weights, or all heads are normalized), rotary embedding and a scale."""
    dtype: gl.constexpr = pieces[0].dtype
    x, y = (), ()
    if len(norm) > 0 or rope.normalize:
        inverse_rms = of_pieces(pieces, rope, C)
        if len(pieces[0].shape) == 2:
            inverse_rms = inverse_rms[:, None]
        for i in gl.static_range(C.PIECES):
            x += (_normalized(pieces[i], inverse_rms, norm, i),)  # type: ignore[assignment]
        for i in gl.static_range(len(partners)):
            y += (_normalized(partners[i], inverse_rms, norm, C.PIECES + i),)  # type: ignore[assignment]
    else:
        for i in gl.static_range(C.PIECES):
            x += (pieces[i].to(gl.float32),)  # type: ignore[assignment]
        for i in gl.static_range(len(partners)):
            y += (partners[i].to(gl.float32),)  # type: ignore[assignment]
    done = ()
    for i in gl.static_range(C.PIECES):
        z = x[i]
        if C.R == C.D:
            other = x[(i + C.PIECES // 2) % C.PIECES]
            cos, sin = _like(angles[2 * (i % (C.PIECES // 2))], z), _like(angles[2 * (i % (C.PIECES // 2)) + 1], z)
            z = z * cos - other * sin if i < C.PIECES // 2 else z * cos + other * sin
        elif i * C.WIDTH < C.R:
            at = i * C.WIDTH + d
            cos, sin = _like(angles[2 * i], z), _like(angles[2 * i + 1], z)
            turned = z * cos + gl.where(_like(at < C.R // 2, z), -y[i], y[i]) * sin
            z = gl.where(_like(at < C.R, z), turned, z)  # an infinity times a sine of zero is NaN
        if len(scale) > 0:
            z = z * scale[0]
        done += (z.to(dtype),)  # type: ignore[assignment]
    return done
