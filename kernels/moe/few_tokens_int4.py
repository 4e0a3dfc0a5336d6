"""The experts of few tokens with 4-bit weights: as in `few_tokens`, with the arithmetic of `linear.gemv_int4`.

`gate_up`: a program computes ROWS outputs of one expert. It prepares x while it looks for its expert. It triggers after the loads
of its words, because the compiler moves no load across the trigger, so all of them are in flight.

`down`: the rows of a token's experts for one output are read as one long row, so tiles may reach from one expert to the next, and
each thread multiplies by the scale and the share of the expert that its words belong to. A program prepares all rows of x, which
takes as long as one or two outputs; so it computes several. Words and scales are loaded before the PDL wait.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.compile.tuning import Family
from minirt.kernels.launch import Gpu, cdiv, launch_options, most_registers, next_power_of_2, sm_count
from minirt.kernels.linear.epilogue import finish, load_rows
from minirt.kernels.linear.gemv import GemvConfig
from minirt.kernels.linear.gemv_int4 import load_words, load_x, row_sum, row_words
from minirt.kernels.linear.int4_words import group_words, scale_words
from minirt.kernels.linear.product import Product, ProductFacts
from minirt.kernels.moe import few_tokens
from minirt.kernels.moe.few_tokens import chosen, expert_of, expert_shares, finish_down
from minirt.kernels.moe.mixture import Mixture, SharedOutput
from minirt.kernels.prepared import compile_time, prepared
from minirt.kernels.reference import INT4_CHUNK, SharedExpert

MOST = 3  # tokens; with more of them, tiles of tensor cores unpack each expert's weights once for all
_WARP_PAIRS = 128  # pairs of words of a row in one load of a warp

CASES = [  # group: columns of a scale; "mx": MXFP4
    {"E": 7, "k": 3, "H": 72, "I": 40, "group": 32}, {"E": 40, "k": 8, "H": 136, "I": 24, "group": 64},
    {"E": 5, "k": 1, "H": 97, "I": 33, "group": 128}, {"E": 4, "k": 3, "H": 24, "I": 136, "group": 128},
    {"E": 7, "k": 4, "H": 136, "I": 72, "group": "mx"},
]  # fmt: skip


@compile_time
class _Constants(NamedTuple):
    """What a launch of either kernel compiles in.

    Args:
        GROUP: groups have 32 · GROUP columns.
        BLOCK: pairs of words of a row in a tile.
        MANY: whether there are several tokens.
    """

    K: int
    TOP_K: int
    GROUP: int
    BLOCK_E: int
    ROWS: int
    BLOCK: int
    TILES: int
    MANY: bool


@triton.jit
def _rows_side_by_side(sums, ROWS: tl.constexpr):
    """ROWS tensors [n], a power of two up to 8, as one [n, ROWS]. No value changes its thread."""
    for _ in tl.static_range(3):
        if len(sums) > 1:
            pairs = ()
            for r in tl.static_range(len(sums) // 2):
                pairs += (tl.join(sums[r], sums[r + len(sums) // 2]),)
            sums = pairs
    return tl.reshape(sums[0], [sums[0].shape[0], ROWS])


@triton.jit
def _gate_up_tile(weight_ptr, scale_ptr, stride, first, i: tl.constexpr, N, C):
    """(Words, scale words) of tile i, for each row of gate, then of up, of an expert. Rows past the end are the last one."""
    word = tl.max_contiguous(tl.arange(0, C.BLOCK), 4)
    chunk = (i * C.BLOCK + 4 * tl.arange(0, C.BLOCK // 4)) // 16  # of each thread
    tile = ()
    for r in tl.static_range(2 * C.ROWS):
        row = tl.minimum(first + r % C.ROWS, N - 1) + (N if r >= C.ROWS else 0)
        tile += ((row_words(weight_ptr, row, word, i, C), group_words(scale_ptr, stride, chunk, C.K, C.GROUP, row)),)
    return tile


@prepared
@triton.jit
def _few_gate_up_int4_kernel(
    x_ptr, norm, logits_ptr, weight_ptr, ep, out_ptr, scale_expert, scale_group, E, N, C, PDL: tl.constexpr
):  # fmt: skip
    """ROWS values of out [T · k, N]: act(gate) · up of norm(x) by the j-th expert of token t.

    t = program_id(0), j = program_id(2). `scale_expert`, `scale_group`: from the scale words of an expert, or of a group, to
    those of the next.
    """
    WIDTH: tl.constexpr = (C.K + 127) // 128 * 16
    COUNT: tl.constexpr = (WIDTH + C.BLOCK - 1) // C.BLOCK
    t = tl.program_id(0) if C.MANY else 0
    j = tl.program_id(2)
    first = tl.program_id(1) * C.ROWS
    word = tl.max_contiguous(tl.arange(0, C.BLOCK), 4)
    if PDL:
        tl.extra.cuda.gdc_wait()
    squares = tl.zeros((C.BLOCK // 4,), tl.float32)
    xs = ()  # loaded while the program looks for its expert
    for i in tl.static_range(COUNT):
        chunk = (i * C.BLOCK + word) // 16
        low, high, totals, squares = load_x(
            x_ptr, norm, chunk, word, t * C.K, squares, C.K, C.GROUP, 8 * (i + 1) * C.BLOCK <= C.K
        )  # fmt: skip
        xs += ((low, high, totals),)
    expert = expert_of(logits_ptr + t * E, E, j, C)
    weight_ptr += expert.to(tl.int64) * 2 * N * WIDTH
    scale_ptr = ep.scale + expert.to(tl.int64) * scale_expert
    tiles = ()
    for i in tl.static_range(C.TILES):
        tiles += (_gate_up_tile(weight_ptr, scale_ptr, scale_group, first, i, N, C),)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    sums = ()
    for _ in tl.static_range(2 * C.ROWS):
        sums += (tl.zeros((C.BLOCK // 4,), tl.float32),)
    for i in tl.static_range(COUNT):
        if i + C.TILES < COUNT:
            tiles += (_gate_up_tile(weight_ptr, scale_ptr, scale_group, first, i + C.TILES, N, C),)
        low, high, totals = xs[i]
        added = ()
        for r in tl.static_range(2 * C.ROWS):
            w, scales = tiles[i][r]
            added += (row_sum(sums[r], w, scales, low, high, totals, C.GROUP),)
        sums = added
    inverse_rms = 1.0
    if norm is not None:
        inverse_rms = tl.rsqrt(tl.sum(squares, 0) / C.K + norm.eps)
    both = tl.join(_rows_side_by_side(sums[: C.ROWS], C.ROWS), _rows_side_by_side(sums[C.ROWS :], C.ROWS))
    gate, up = tl.split(tl.sum(both, 0) * (2.0**53 * inverse_rms))
    n = first + tl.arange(0, C.ROWS)
    out = finish(gate, up, load_rows(ep, expert.to(tl.int64) * 2 * N + n, n < N, N, False), (), (), ep)
    tl.store(out_ptr + (t * C.TOP_K + j) * N + n, out.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _slots(place, C):
    """Which of a token's experts a pair of words belongs to, and the pair's chunk in the expert's row.

    place: of the pair in the long row. Places past its end belong to the last expert, past the end of its row.
    """
    CHUNKS: tl.constexpr = (C.K + 127) // 128
    slot = tl.minimum(place // (16 * CHUNKS), C.TOP_K - 1)
    return slot, place // 16 - slot * CHUNKS


@triton.jit
def _of_slots(values, slot, i: tl.constexpr, C):
    """Of the values of a token's experts those of `slot`, places of tile i. A scalar, if the tile has one expert."""
    PAIRS: tl.constexpr = (C.K + 127) // 128 * 16  # of an expert
    FIRST: tl.constexpr = min(i * C.BLOCK // PAIRS, C.TOP_K - 1)
    LAST: tl.constexpr = min(((i + 1) * C.BLOCK - 1) // PAIRS, C.TOP_K - 1)
    value = values[FIRST]
    for j in tl.static_range(FIRST + 1, LAST + 1):
        value = tl.where(slot >= j, values[j], value)
    return value


@triton.jit
def _down_tile(weight_ptr, ep, scale_expert, scale_group, experts, first, i: tl.constexpr, N, C):
    """(Words, scale words) of tile i of each output's long row. Rows past the end are the last one again."""
    WIDTH: tl.constexpr = (C.K + 127) // 128 * 16
    place = i * C.BLOCK + tl.arange(0, C.BLOCK)
    slot, _ = _slots(place, C)
    expert = _of_slots(experts, slot, i, C).to(tl.int64)
    start = expert * N * WIDTH - slot * WIDTH  # of an expert's words, minus the places before them in the long row
    of_thread, chunk = _slots(i * C.BLOCK + 4 * tl.arange(0, C.BLOCK // 4), C)
    scale_ptrs = ep.scale + _of_slots(experts, of_thread, i, C).to(tl.int64) * scale_expert
    tile = ()
    for r in tl.static_range(C.ROWS):
        row = tl.minimum(first + r, N - 1)
        at = tl.max_contiguous(tl.multiple_of(start + row.to(tl.int64) * WIDTH + place, 4), 4)
        w = load_words(weight_ptr + at, place, C.TOP_K * WIDTH, (i + 1) * C.BLOCK)
        tile += ((w, group_words(scale_ptrs, scale_group, chunk, C.K, C.GROUP, row)),)
    return tile


@prepared
@triton.jit
def _few_down_int4_kernel(
    x_ptr, logits_ptr, factors_ptr, weight_ptr, ep, shared, out_ptr, scale_expert, scale_group, E, N, C, NORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ROWS values of out [T, N], x [T · k, K], of token t = program_id(0), as `few_tokens._few_down_kernel` defines it.

    `scale_expert`, `scale_group`: as for gate and up.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    CHUNKS: tl.constexpr = (C.K + 127) // 128
    COUNT: tl.constexpr = (C.TOP_K * CHUNKS * 16 + C.BLOCK - 1) // C.BLOCK
    t = tl.program_id(0) if C.MANY else 0
    first = tl.program_id(1) * C.ROWS
    word = tl.max_contiguous(tl.arange(0, C.BLOCK), 4)
    experts, weights = chosen(logits_ptr + t * E, E, C.TOP_K, C.BLOCK_E)
    tiles = ()
    for i in tl.static_range(C.TILES):
        tiles += (_down_tile(weight_ptr, ep, scale_expert, scale_group, experts, first, i, N, C),)
    shares = expert_shares(experts, weights, factors_ptr, logits_ptr.dtype.element_ty, C.TOP_K, NORMALIZE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums = ()
    for _ in tl.static_range(C.ROWS):
        sums += (tl.zeros((C.BLOCK // 4,), tl.float32),)
    unused = tl.zeros((C.BLOCK // 4,), tl.float32)
    for i in tl.static_range(COUNT):
        if i + C.TILES < COUNT:
            tiles += (_down_tile(weight_ptr, ep, scale_expert, scale_group, experts, first, i + C.TILES, N, C),)
        slot, chunk = _slots(i * C.BLOCK + word, C)
        start = (t * C.TOP_K + slot) * C.K
        low, high, totals, _ = load_x(
            x_ptr, None, chunk, word, start, unused, C.K, C.GROUP, C.K % 128 == 0 and 8 * (i + 1) * C.BLOCK <= C.TOP_K * C.K
        )  # fmt: skip
        of_thread, _ = _slots(i * C.BLOCK + 4 * tl.arange(0, C.BLOCK // 4), C)
        share = _of_slots(shares, of_thread, i, C)
        added = ()
        for r in tl.static_range(C.ROWS):
            w, scales = tiles[i][r]
            added += (row_sum(sums[r], w, scales, low, high, totals, C.GROUP, share),)
        sums = added
    n = first + tl.arange(0, C.ROWS)
    value = tl.sum(_rows_side_by_side(sums, C.ROWS), 0) * 2.0**53
    value = finish_down(value, ep, shared, experts, shares, t, n, N)
    tl.store(out_ptr + t * N + n, value.to(out_ptr.dtype.element_ty), mask=n < N)


def _rows(most: int, outputs: int, gpu: Gpu) -> int:
    """Outputs of a program: a power of two up to `most`, with which each SM has at least three programs, for equal work."""
    fitting = max(1, min(most, outputs // (3 * gpu.sms)))
    return 1 << (fitting.bit_length() - 1)


def rule(facts: ProductFacts, gpu: Gpu) -> GemvConfig:
    """It does not depend on T.

    A program of gate/up keeps x in registers, so a row is two tiles where 8 warps suffice. Those of down have about three. Words
    in flight have up to 64 registers of a thread.
    """
    pairs = cdiv(facts.K, INT4_CHUNK) * 16
    if facts.gated:
        warps = min(8, next_power_of_2(cdiv(pairs, 2 * _WARP_PAIRS)))
        return GemvConfig(_rows(4, facts.k * facts.N, gpu), warps, 1)
    rows, warps = _rows(4, facts.N, gpu), min(8, next_power_of_2(cdiv(facts.k * pairs, 3 * _WARP_PAIRS)))
    return GemvConfig(rows, warps, 16 // rows)


FAMILY = Family("experts_few_tokens_int4", GemvConfig, (__file__,), ("E", "k", "N", "K", "itemsize", "gated"), rule)


def suits(m: Mixture) -> bool:
    """As `few_tokens.suits`. Activations and norm weights of 16 bits are also loaded in pairs."""
    addresses = m.h.data_ptr() | (0 if m.norm is None else m.norm.weight.data_ptr())
    return addresses % 4 == 0 and few_tokens.suits(m)


def _constants(product: Product, c: GemvConfig, group: int, top_k: int, T: int) -> _Constants:
    K, rows, block = product.x.shape[1], 1 if product.gated else top_k, _WARP_PAIRS * c.num_warps  # rows: of a long row
    return _Constants(
        K, top_k, group // 32, next_power_of_2(product.weight.shape[0]), c.block_n, block,
        min(c.tiles, cdiv(rows * cdiv(K, INT4_CHUNK) * 16, block)), T > 1,
    )  # fmt: skip


def _registers(c: GemvConfig, gated: bool, device: torch.device, programs: int) -> int:
    """The most registers of a thread, with which all programs of one token fit on the SMs at once.

    At least what it needs: for the words in flight, for a tile of x, and 64 others.
    """
    needed = 4 * c.block_n * (2 if gated else 1) * c.tiles + 32 + 64
    return max(min(needed, 255), most_registers(32 * c.num_warps * cdiv(programs, sm_count(device))))


def gate_up(
    product: Product, logits: Tensor, top_k: int, shared: SharedExpert | None = None, config: GemvConfig | None = None
) -> None:
    """As `few_tokens.gate_up`: x [T, H], weight words [E, 2I, ⌈H / 128⌉ · 32], scale words [E, groups, 2I] → out [T · k, I]."""
    if shared is not None:
        raise InputError("its kernels are those of linear layers", where="shared", expected="None", found="an expert")
    weight, out, T, N = product.weight, product.out, len(logits), product.out.shape[1]
    E, (scale, group) = weight.shape[0], scale_words(product)
    c = config or FAMILY.lookup(out.device, product.facts(T, E, top_k))
    if config is None and scale.dtype == torch.uint32:  # MXFP4: two tiles of x would leave its decoder no registers
        c = replace(c, num_warps=min(8, next_power_of_2(cdiv(weight.shape[2], 2 * _WARP_PAIRS))))
    programs = cdiv(N, c.block_n)
    _few_gate_up_int4_kernel[(T, programs, top_k)](
        product.x, product.norm, logits, weight.view(torch.int32), product.epilogue, out, scale.stride(0), scale.stride(1), E, N,
        C=_constants(product, c, group, top_k, T), maxnreg=_registers(c, True, out.device, programs * top_k),
        **launch_options(c.num_warps, 1, product.pdl),
    )  # fmt: skip


def down(
    product: Product, logits: Tensor, top_k: int, normalize: bool, shared: SharedExpert | SharedOutput | None = None,
    gate: Tensor | None = None, config: GemvConfig | None = None, factors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `few_tokens.down`: x [T · k, I], weight words [E, H, ⌈I / 128⌉ · 32], scale words [E, groups, H] → [T, H]."""
    x, weight, out, T, N = product.x, product.weight, product.out, len(logits), product.out.shape[1]
    E, (scale, group) = weight.shape[0], scale_words(product)
    c = config or FAMILY.lookup(out.device, product.facts(T, E, top_k))
    programs = cdiv(N, c.block_n)
    _few_down_int4_kernel[(T, programs)](
        x, logits, factors, weight.view(torch.int32), product.epilogue, shared, out, scale.stride(0), scale.stride(1), E, N,
        C=_constants(product, c, group, top_k, T), NORMALIZE=normalize, maxnreg=_registers(c, False, out.device, programs),
        **launch_options(c.num_warps, 1, product.pdl),
    )  # fmt: skip
    return out
