"""The router's choice of experts, and the tokens sorted by expert: what the products by expert work through.

With few tokens, one program chooses the experts and makes the lists: it compares each pair with each. With more tokens, these are
two kernels: the choice (one program for each token), which also counts the pairs of each expert by integer atomics, and the lists
(one program for each expert). A last kernel copies each token to its places in the order of experts, normalized and quantized on
the way. All shapes depend only on the number of tokens, so CUDA graphs can hold them. A pair is a token and one of its k experts:
pair t · k + j is token t with its j-th expert.

With PDL, the copy triggers after its wait: so the kernel after it finds the lists complete before its wait. The program that
makes both choice and lists also triggers after its wait: so the copy may read the tokens before its wait. The two kernels trigger
before their wait, unless there are many tokens, so that the next programs are placed earlier.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.checks import check_activations
from minirt.kernels.fp8 import finite_magnitude, fp8_scale, to_fp8
from minirt.kernels.launch import cdiv, launch_options, next_power_of_2
from minirt.kernels.linear.product import Norm
from minirt.kernels.moe.router import ALONE, LogitParts
from minirt.kernels.pdl import wait_for_input
from minirt.kernels.prepared import compile_time, prepared
from minirt.kernels.quantize import group_scales
from minirt.kernels.reference import FP8_BLOCK
from minirt.kernels.regimes import up_to

CASES = [
    {"T": 1, "E": 5, "k": 2},
    {"T": 5, "E": 128, "k": 8},
    {"T": 8, "E": 300, "k": 10},
    {"T": 4, "E": 33, "k": 6},
    {"T": 3, "E": 40, "k": 17},
    {"T": 9, "E": 270, "k": 3},
    {"T": 19, "E": 60, "k": 4},
    {"T": 37, "E": 3, "k": 3},
]

_LANES = tl.constexpr(32)  # of a warp
_BLOCK = 4096  # pairs that a program reads at a time, with many tokens
_LAST_ALONE = (4, ALONE)  # tokens up to which one program makes all lists; it has as many warps
_MOST_ALONE = 16  # experts of a token up to which it does so
_LAST_FEW = (16, 64, 128)  # tokens up to which other steps of few tokens read equally many pairs
FEW = _LAST_FEW[-1]  # up to so many tokens, a program reads all pairs at once
_LAST = (*_LAST_FEW, 256, 512, 1024)
# T → the largest step that launches the same compiled kernels, those of either kind of products included.
last_tokens = up_to(*_LAST_ALONE, *_LAST)
_last_of_products = up_to(*_LAST)


def token_regime(T: int) -> int:
    """T rounded up to the end of the variant of its products, or to twice the last one's."""
    return _last_of_products(T) or 2 * _LAST[-1]


def _alone(T: int, top_k: int) -> bool:
    """Whether one program chooses the experts of T tokens and makes the lists."""
    return T <= ALONE and top_k <= _MOST_ALONE


class Routing(NamedTuple):
    """What each token's experts are, and which tiles the products by expert compute.

    Attributes:
        weights: [T, k] in the dtype of the logits.
        experts: [T, k] int32.
        order: [T · k] int32, the pairs sorted by expert; those of one expert are in ascending order.
        places: [T · k] int32, the place of each pair in `order`.
        tiles: [3, n] int32, see `reference.expert_tiles`. n is the most there can be; unused ones are −1.
        used: [1] int32, the number of used tiles.
        block_t: rows of a tile.
    """

    weights: Tensor
    experts: Tensor
    order: Tensor
    places: Tensor
    tiles: Tensor
    used: Tensor
    block_t: int


@compile_time
class _ChooseConstants(NamedTuple):
    """What a choice compiles in.

    Args:
        PARTS: of the logits; 0: they are whole.
        E: experts.
        ROWS: tokens of a program.
        GROUPS: of 32 experts.
        BLOCK_K: places for a token's experts in a program.
        EARLY: as in `wait_for_input`.
    """

    PARTS: int
    TOP_K: int
    NORMALIZE: bool
    E: int
    ROWS: int
    GROUPS: int
    BLOCK_K: int
    EARLY: bool


@compile_time
class _PlaceConstants(NamedTuple):
    """What the lists compile in. BLOCK_T: rows of a tile. BLOCK: pairs that are read at a time; FEW: these are all."""

    BLOCK_T: int
    BLOCK_E: int
    BLOCK: int
    FEW: bool


@triton.jit
def _load_groups(logits_ptr, row, inside, lane, C):
    """Logits of tokens, or a part of them: GROUPS tensors [ROWS, 32]."""
    values = ()
    for group in tl.static_range(C.GROUPS):
        e = lane + group * _LANES
        values += (tl.load(logits_ptr + row * C.E + e, mask=inside & (e < C.E), other=0.0),)
    return values


@triton.jit
def _choose(logits_ptr, squares_ptr, H, eps, routing, T, C):
    """Choose the experts of a program's ROWS tokens: each one's TOP_K largest shares, the lower expert of equal ones first.

    Stores them with their weights. Returns (t, j, experts), [ROWS, 1], [1, BLOCK_K] and both.

    A program has as many warps as tokens, and a token's experts are GROUPS tensors [ROWS, 32]. So each warp has all experts of a
    token, in registers, and none waits for another. One tensor would be divided among the warps.
    """
    lane = tl.arange(0, _LANES)[None, :]
    t = tl.program_id(0).to(tl.int64) * C.ROWS + tl.arange(0, C.ROWS)[:, None]
    if C.PARTS == 0:
        logits = _load_groups(logits_ptr, t, t < T, lane, C)
    else:
        parts = ()
        for part in tl.static_range(C.PARTS):
            parts += (_load_groups(logits_ptr, part * T + t, t < T, lane, C),)
        if squares_ptr is not None:
            squares = tl.load(squares_ptr + t * C.PARTS + lane, mask=(t < T) & (lane < C.PARTS), other=0.0)
            scale = tl.rsqrt(tl.sum(squares, 1) / H + eps)[:, None]
        logits = ()
        for group in tl.static_range(C.GROUPS):
            total = parts[0][group]
            for part in tl.static_range(1, C.PARTS):
                total += parts[part][group]
            if squares_ptr is not None:
                total *= scale
            logits += (total.to(routing.weights.dtype.element_ty),)
    wide, most = (), tl.full((C.ROWS, _LANES), float("-inf"), tl.float32)
    for group in tl.static_range(C.GROUPS):
        wide += (tl.where(lane + group * _LANES < C.E, logits[group].to(tl.float32), float("-inf")),)
        most = tl.maximum(most, wide[group])
    most = tl.max(most, 1)[:, None]
    exps, total = (), tl.zeros((C.ROWS, _LANES), tl.float32)
    for group in tl.static_range(C.GROUPS):
        exps += (tl.exp(wide[group] - most),)
        total += exps[group]
    total = tl.sum(total, 1)[:, None]
    # Shares as integers have the same order. With a NaN, all shares of the token are NaN, and taken as equal.
    is_nan = total != total
    bits = ()
    for group in tl.static_range(C.GROUPS):
        share = tl.div_rn(exps[group], tl.broadcast(total, exps[group])[0])
        share = tl.where(is_nan, 0, share.to(tl.int32, bitcast=True))
        bits += (tl.where(lane + group * _LANES < C.E, share, -1),)
    j = tl.arange(0, C.BLOCK_K)[None, :]
    weights = tl.zeros((C.ROWS, C.BLOCK_K), tl.float32)
    experts = tl.zeros((C.ROWS, C.BLOCK_K), tl.int32)
    for i in tl.static_range(C.TOP_K):
        # Two reductions of 32 bits are single instructions of a warp; one of 64 bits is a chain of shuffles.
        best = bits[0]
        for group in tl.static_range(1, C.GROUPS):
            best = tl.maximum(best, bits[group])
        best = tl.max(best, 1)[:, None]
        expert = tl.full(bits[0].shape, C.GROUPS * _LANES, tl.int32)
        for group in tl.static_range(C.GROUPS):
            expert = tl.where(bits[C.GROUPS - 1 - group] == best, lane + (C.GROUPS - 1 - group) * _LANES, expert)
        expert = tl.min(expert, 1)[:, None]
        weights = tl.where(j == i, best.to(tl.float32, bitcast=True), weights)
        experts = tl.where(j == i, expert, experts)
        left = ()
        for group in tl.static_range(C.GROUPS):
            left += (tl.where(lane + group * _LANES == expert, -1, bits[group]),)
        bits = left
    weights = tl.where((j < C.TOP_K) & is_nan, float("nan"), weights)
    if C.NORMALIZE:
        weights = tl.div_rn(weights, tl.broadcast(tl.sum(weights, 1)[:, None], weights)[0])
    stored = (t < T) & (j < C.TOP_K)
    tl.store(routing.weights + t * C.TOP_K + j, weights.to(routing.weights.dtype.element_ty), mask=stored)
    tl.store(routing.experts + t * C.TOP_K + j, experts, mask=stored)
    return t, j, experts


@prepared
@triton.jit(do_not_specialize=["T", "most"])
def _route_few_kernel(logits_ptr, squares_ptr, H, eps, routing, T, most, C, BLOCK_T: tl.constexpr, PDL: tl.constexpr):
    """The choice and the lists of up to ROWS tokens, in one program. BLOCK_T: rows of a tile."""
    K: tl.constexpr = triton.next_power_of_2(C.TOP_K)
    PAIRS: tl.constexpr = C.ROWS * K
    if PDL:
        wait_for_input(C.EARLY)
    t, j, experts = _choose(logits_ptr, squares_ptr, H, eps, routing, T, C)
    # Keys that order the pairs by expert. There are gaps if k is no power of two: places behind all experts.
    experts = tl.where((t < T) & (j < C.TOP_K), experts, tl.where(j < K, C.GROUPS * _LANES, 0))
    experts = tl.reshape(tl.max(tl.reshape(experts, (C.ROWS, C.BLOCK_K // K, K)), 1), (PAIRS,))
    p = tl.arange(0, PAIRS)
    keys = experts * PAIRS + p
    # Each pair is compared with each, along the first axis. Three numbers of up to 1023 are added at once: of pairs before this
    # one, of those of lower experts, and of these and this pair's expert.
    tl.static_assert(PAIRS <= 1023)
    others, own = keys[:, None], (keys // PAIRS * PAIRS)[None, :]
    before = others < keys[None, :]
    sums = before.to(tl.int32) + tl.where(others < own, 1 << 10, 0) + tl.where(others < own + PAIRS, 1 << 20, 0)
    sums = tl.sum(sums, 0)
    place, first, end = sums & 1023, sums >> 10 & 1023, sums >> 20
    used = (p // K < T) & (p % K < C.TOP_K)
    begins = used & ((place - first) % BLOCK_T == 0)  # a tile
    sums = tl.sum(tl.where(begins[:, None], tl.where(before, 1 + (1 << 16), 1 << 16), 0), 0)
    tile, tiles = sums & 65535, sums >> 16  # tiles before this pair, and all
    pair = p // K * C.TOP_K + p % K
    tl.store(routing.order + place, pair, mask=used)
    tl.store(routing.places + pair, place, mask=used)
    tl.store(routing.tiles + tile, keys // PAIRS, mask=begins)
    tl.store(routing.tiles + most + tile, place, mask=begins)
    tl.store(routing.tiles + 2 * most + tile, end, mask=begins)
    for row in tl.static_range(3):
        tl.store(routing.tiles + row * most + p, tl.full((PAIRS,), -1, tl.int32), mask=(p >= tiles) & (p < most))
    tl.store(routing.used + p, tiles, mask=p == 0)


@prepared
@triton.jit(do_not_specialize=["T"])
def _choose_kernel(logits_ptr, squares_ptr, H, eps, routing, counts_ptr, T, C, PDL: tl.constexpr):
    """Choose the experts of one token, and count them."""
    if PDL:
        wait_for_input(C.EARLY)
    _t, j, experts = _choose(logits_ptr, squares_ptr, H, eps, routing, T, C)
    tl.atomic_add(counts_ptr + experts, 1, mask=j < C.TOP_K, sem="relaxed")


@prepared
@triton.jit(do_not_specialize=["pairs", "most"])
def _place_kernel(routing, counts_ptr, pairs, most, E, C, PDL: tl.constexpr):
    """Write the pairs and the tiles of one expert behind those of lower experts. Program 0 marks the unused tiles."""
    e = tl.program_id(0)
    lane = tl.arange(0, C.BLOCK)
    every = tl.arange(0, C.BLOCK_E)
    if PDL:
        wait_for_input(C.FEW)
    if C.FEW:
        chosen = tl.load(routing.experts + lane, mask=lane < pairs, other=-1) == e
    counts = tl.load(counts_ptr + every, mask=every < E, other=0)
    tiles = (counts + C.BLOCK_T - 1) // C.BLOCK_T
    first = tl.sum(tl.where(every < e, counts, 0), 0)
    count = tl.sum(tl.where(every == e, counts, 0), 0)
    first_tile = tl.sum(tl.where(every < e, tiles, 0), 0)
    tiles_of_expert = (count + C.BLOCK_T - 1) // C.BLOCK_T
    for start in range(0, tiles_of_expert, 128):
        i = start + tl.arange(0, 128)
        inside = i < tiles_of_expert
        at = routing.tiles + first_tile + i
        tl.store(at, tl.zeros((128,), tl.int32) + e, mask=inside)
        tl.store(at + most, first + i * C.BLOCK_T, mask=inside)
        tl.store(at + 2 * most, tl.zeros((128,), tl.int32) + first + count, mask=inside)
    if e == 0:
        tl.store(routing.used, tl.sum(tiles, 0))
        for start in range(tl.sum(tiles, 0), most, 128):
            i = start + tl.arange(0, 128)
            for row in tl.static_range(3):
                tl.store(routing.tiles + row * most + i, tl.full((128,), -1, tl.int32), mask=i < most)
    place = first
    if C.FEW:
        place += tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(routing.order + place, lane, mask=chosen)
        tl.store(routing.places + lane, place, mask=chosen)
    else:
        for start in range(0, pairs, C.BLOCK):
            pair = start + lane
            chosen = tl.load(routing.experts + pair, mask=pair < pairs, other=-1) == e
            ranks = tl.cumsum(chosen.to(tl.int32), 0)
            tl.store(routing.order + place + ranks - 1, pair, mask=chosen)
            tl.store(routing.places + pair, place + ranks - 1, mask=chosen)
            place += tl.sum(chosen.to(tl.int32), 0)


@prepared
@triton.jit
def _gather_kernel(
    x_ptr, norm, places_ptr, out_ptr, scale_ptr, H, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr, GROUP: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy one token to its places, normalized if `norm` is given, and quantized if `scale_ptr` is.

    It has one scale or, if GROUP, one for each GROUP channels. With AHEAD, the kernel before triggers after its wait, so what was
    before it has ended, and the token is read before the wait: past L1, which may hold what was there earlier.
    """
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    inside = h < H
    if norm is not None:
        weight = tl.load(norm.weight + h, mask=inside, other=0.0)
    if PDL and not AHEAD:
        wait_for_input(False)
    x = tl.load(x_ptr + t * H + h, mask=inside, other=0.0, cache_modifier=".cg" if AHEAD else "")
    if norm is not None:  # as `norm.py` does
        wide = x.to(tl.float32)
        x = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + norm.eps)).to(x.dtype) * weight
    if GROUP is not None:
        x, scales = group_scales(x, GROUP)
        x = tl.reshape(to_fp8(x, scales[:, None]).to(tl.float8e4nv, bitcast=True), [BLOCK_H])
        groups = (H + GROUP - 1) // GROUP
        group = tl.arange(0, BLOCK_H // GROUP)
    elif scale_ptr is not None:
        scale = fp8_scale(tl.max(finite_magnitude(x), 0))
        x = to_fp8(x, scale).to(tl.float8e4nv, bitcast=True)
    if PDL and AHEAD:
        wait_for_input(False)
    for j in tl.static_range(TOP_K):
        place = tl.load(places_ptr + t * TOP_K + j).to(tl.int64)
        if GROUP is not None:
            tl.store(scale_ptr + place * groups + group, scales, mask=group < groups)
        elif scale_ptr is not None:
            tl.store(scale_ptr + place, scale)
        tl.store(out_ptr + place * H + h, x, mask=inside)


def most_tiles(pairs: int, num_experts: int, block_t: int) -> int:
    """The most tiles of `block_t` rows that so many pairs can have, each tile of one expert."""
    touched = min(pairs, num_experts)
    return (pairs + touched * (block_t - 1)) // block_t


@lru_cache
def _choice(count: int, top_k: int, normalize: bool, E: int, rows: int, early: bool) -> _ChooseConstants:
    """`count`: parts of the logits. `rows`: tokens of a program."""
    lanes = _LANES.value
    return _ChooseConstants(count, top_k, normalize, E, rows, cdiv(E, lanes), max(lanes, next_power_of_2(top_k)), early)


def route(
    logits: Tensor | LogitParts, top_k: int, normalize: bool, block_t: int, *, pdl: bool = False, check: bool = True
) -> Routing:
    """Choose each token's experts and sort the tokens by expert: logits [T, E] → `Routing`, see `reference.route`.

    Args:
        logits: [T, E], or their parts.
        top_k: k, the experts of a token.
        normalize: divide a token's weights by their sum.
        block_t: rows of a tile.
        pdl: whether to overlap with the kernel before it in the stream (see `minirt.kernels.pdl`).
    """
    parts = None
    if isinstance(logits, LogitParts):
        parts, given, dtype = logits, logits.sums, logits.dtype
        count, T, E = given.shape
    else:
        if check:
            check_activations("logits", logits)
        (T, E), given, dtype, count = logits.shape, logits, logits.dtype, 0
    if check and not 1 <= top_k <= E:
        raise InputError("wrong number", where="top_k", expected=f"from 1 to {E}", found=top_k)
    pairs = T * top_k
    most = most_tiles(pairs, E, block_t)

    def ints(*shape: int) -> Tensor:
        return given.new_empty(*shape, dtype=torch.int32)

    weights = given.new_empty(T, top_k, dtype=dtype)
    routing = Routing(weights, ints(T, top_k), ints(pairs), ints(pairs), ints(3, most), ints(1), block_t)
    if T:
        squares, hidden, eps = (None, 1, 0.0) if parts is None else (parts.squares, parts.hidden, parts.eps)
        if _alone(T, top_k):
            rows = next(n for n in _LAST_ALONE if n >= T)
            _route_few_kernel[(1,)](
                given, squares, hidden, eps, routing, T, most, C=_choice(count, top_k, normalize, E, rows, False),
                BLOCK_T=block_t, **launch_options(rows, 1, pdl),
            )  # fmt: skip
            return routing
        counts = None
        if parts is not None:
            counts, parts.counts = parts.counts, None
        if counts is None:
            counts = given.new_zeros(E, dtype=torch.int32)
        few = T <= FEW
        block = next(n for n in _LAST_FEW if n >= T) * next_power_of_2(top_k) if few else _BLOCK
        _choose_kernel[(T,)](
            given, squares, hidden, eps, routing, counts, T, C=_choice(count, top_k, normalize, E, 1, few),
            **launch_options(1, 1, pdl),
        )  # fmt: skip
        _place_kernel[(E,)](
            routing, counts, pairs, most, E, C=_PlaceConstants(block_t, next_power_of_2(E), block, few),
            **launch_options(4 if few else 16, 1, pdl),
        )  # fmt: skip
    return routing


def gather(
    x: Tensor, routing: Routing, quantized: bool, norm: Norm | None = None, *, blocks: bool = False, pdl: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Tokens in the order of `routing.order`: x [T, H] → [T · k, H], quantized also their scales [T · k], see `quantize`.

    With a norm, the tokens are normalized first, as `rms_norm` does. With `blocks`, the scales are [T · k, ⌈H / 128⌉], one for
    each 128 channels.
    """
    pairs, (T, H), top_k = routing.order.shape[0], x.shape, routing.weights.shape[1]
    out = x.new_empty(pairs, H, dtype=torch.float8_e4m3fn if quantized else x.dtype)
    group = FP8_BLOCK if quantized and blocks else None
    shape = (pairs,) if group is None else (pairs, cdiv(H, group))
    scale = x.new_empty(*shape, dtype=torch.float32) if quantized else None
    block = max(group or 1, next_power_of_2(H))
    _gather_kernel[(T,)](
        x, norm, routing.places, out, scale, H, TOP_K=top_k, BLOCK_H=block, GROUP=group, AHEAD=_alone(T, top_k),
        **launch_options(min(16, max(1, block // 512)), 1, pdl),
    )  # fmt: skip
    return out, scale


def cost(T: int, E: int, k: int, itemsize: int) -> tuple[int, int]:
    """(bytes read and written, floating-point operations) of the choice and the lists, tiles apart."""
    return T * (E + k) * itemsize + T * k * 12, T * E * (4 + k)
