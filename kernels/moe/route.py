"""The router's choice of experts, and the tokens sorted by expert: what the products by expert work through.

Two kernels: the choice (one program for each token), which also counts the pairs of each expert by integer atomics, and the lists
(one program for each expert). A third kernel copies each token to its places in the order of experts, normalized and quantized.
All shapes depend only on the number of tokens, so CUDA graphs can hold them. A pair is a token and one of its k experts: pair
t · k + j is token t with its j-th expert.

With PDL and few tokens, the choice and the lists trigger before their wait, so that the next programs are placed earlier. The
copy triggers after its wait: so the kernel after it finds the lists complete before its wait.
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
from minirt.kernels.moe.router import LogitParts
from minirt.kernels.pdl import wait_for_input
from minirt.kernels.prepared import compile_time, prepared
from minirt.kernels.quantize import group_scales
from minirt.kernels.reference import FP8_BLOCK
from minirt.kernels.regimes import up_to

CASES = [{"T": 1, "E": 5, "k": 2}, {"T": 5, "E": 128, "k": 8}, {"T": 19, "E": 60, "k": 4}, {"T": 37, "E": 3, "k": 3}]

_BLOCK = 4096  # pairs that a program reads at a time, with many tokens
_LAST_FEW = (16, 64, 128)  # tokens up to which steps of few tokens read equally many pairs
FEW = _LAST_FEW[-1]  # the most tokens with which a program reads all pairs at once
_LAST = (*_LAST_FEW, 256, 512, 1024)
# T → the largest step that launches the same compiled kernels, those of either kind of products included.
last_tokens = up_to(*_LAST)


def token_regime(T: int) -> int:
    """T rounded up to the end of its variant, or to twice the last one's."""
    return last_tokens(T) or 2 * _LAST[-1]


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


@triton.jit
def shares_of(logits, e, E):
    """Softmax in fp32 over the experts of one token, and its bits as integers, which have the same order.

    With a NaN, all shares are NaN, and all bits 0. Experts past the last one have the bits -1.
    """
    logits = tl.where(e < E, logits.to(tl.float32), float("-inf"))
    shares = tl.exp(logits - tl.max(logits, 0))
    total = tl.sum(shares, 0)
    shares = tl.div_rn(shares, tl.broadcast(total, shares)[0])
    bits = tl.where(total == total, shares, 0.0).to(tl.int32, bitcast=True)
    return shares, tl.where(e < E, bits, -1)


@compile_time
class _ChooseConstants(NamedTuple):
    """What the choice compiles in. PARTS: of the logits; 0: they are whole. EARLY: as in `wait_for_input`."""

    PARTS: int
    TOP_K: int
    NORMALIZE: bool
    BLOCK_E: int
    BLOCK_K: int
    BLOCK_P: int
    EARLY: bool


@compile_time
class _PlaceConstants(NamedTuple):
    """What the lists compile in. BLOCK_T: rows of a tile. BLOCK: pairs that are read at a time; FEW: these are all."""

    BLOCK_T: int
    BLOCK_E: int
    BLOCK: int
    FEW: bool


@triton.jit
def _sum_parts(parts_ptr, squares_ptr, bias_ptr, H, eps, t, e, T, E, C, DTYPE: tl.constexpr):
    """One token's logits from their parts, see `LogitParts`."""
    logits = tl.zeros(e.shape, tl.float32)
    for part in tl.static_range(C.PARTS):
        logits += tl.load(parts_ptr + (part * T + t) * E + e, mask=e < E, other=0.0)
    if squares_ptr is not None:
        part = tl.arange(0, C.BLOCK_P)
        squares = tl.sum(tl.load(squares_ptr + part * T + t, mask=part < C.PARTS, other=0.0), 0)
        logits *= tl.rsqrt(squares / H + eps)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    return logits.to(DTYPE)


@prepared
@triton.jit(do_not_specialize=["T"])
def _choose_kernel(logits_ptr, squares_ptr, bias_ptr, factors_ptr, H, eps, routing, counts_ptr, T, E, C, PDL: tl.constexpr):
    """Choose the experts of one token: its TOP_K largest shares, the lower expert of equal ones first. Count them."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, C.BLOCK_E)
    j = tl.arange(0, C.BLOCK_K)
    if PDL:
        wait_for_input(C.EARLY)
    if C.PARTS == 0:
        logits = tl.load(logits_ptr + t * E + e, mask=e < E, other=0.0)
    else:
        logits = _sum_parts(logits_ptr, squares_ptr, bias_ptr, H, eps, t, e, T, E, C, routing.weights.dtype.element_ty)
    shares, bits = shares_of(logits, e, E)
    weights = tl.zeros((C.BLOCK_K,), tl.float32)
    experts = tl.zeros((C.BLOCK_K,), tl.int32)
    for i in tl.static_range(C.TOP_K):
        # Two reductions of 32 bits are single instructions of a warp; one of 64 bits is a chain of shuffles.
        best = tl.max(bits, 0)
        expert = tl.min(tl.where(bits == best, e, C.BLOCK_E), 0)
        weights = tl.where(j == i, best.to(tl.float32, bitcast=True), weights)
        experts = tl.where(j == i, expert, experts)
        bits = tl.where(e == expert, -1, bits)
    any_nan = tl.sum((shares != shares).to(tl.int32), 0) > 0
    weights = tl.where((j < C.TOP_K) & any_nan, float("nan"), weights)
    if C.NORMALIZE:
        weights = tl.div_rn(weights, tl.broadcast(tl.sum(weights, 0), weights)[0])
    if factors_ptr is not None:
        weights *= tl.load(factors_ptr + experts, mask=j < C.TOP_K, other=0.0).to(tl.float32)
    at = t * C.TOP_K + j
    tl.store(routing.weights + at, weights.to(routing.weights.dtype.element_ty), mask=j < C.TOP_K)
    tl.store(routing.experts + at, experts, mask=j < C.TOP_K)
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
    PDL: tl.constexpr,
):  # fmt: skip
    """Copy one token to its places, normalized if `norm` is given, and quantized if `scale_ptr` is.

    It has one scale or, if GROUP, one for each GROUP channels.
    """
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    inside = h < H
    if norm is not None:
        weight = tl.load(norm.weight + h, mask=inside, other=0.0)
    if PDL:
        wait_for_input(False)
    x = tl.load(x_ptr + t * H + h, mask=inside, other=0.0)
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
    for j in tl.static_range(TOP_K):
        place = tl.load(places_ptr + t * TOP_K + j).to(tl.int64)
        if GROUP is not None:
            tl.store(scale_ptr + place * groups + group, scales, mask=group < groups)
        elif scale_ptr is not None:
            tl.store(scale_ptr + place, scale)
        tl.store(out_ptr + place * H + h, x, mask=inside)


def most_tiles(pairs: int, num_experts: int, block_t: int) -> int:
    """The most tiles of `block_t` rows, each of one expert, that `pairs` pairs can have."""
    touched = min(pairs, num_experts)
    return (pairs + touched * (block_t - 1)) // block_t


@lru_cache
def _constants(
    count: int, top_k: int, normalize: bool, E: int, block_t: int, few: int
) -> tuple[_ChooseConstants, _PlaceConstants]:
    """`count`: parts of the logits. `few`: few tokens, rounded up; 0: many."""
    block_e, block = next_power_of_2(E), next_power_of_2(few * top_k) if few else _BLOCK
    parts, early = next_power_of_2(max(1, count)), few > 0
    choose = _ChooseConstants(count, top_k, normalize, block_e, next_power_of_2(top_k), parts, early)
    return choose, _PlaceConstants(block_t, block_e, block, early)


def route(
    logits: Tensor | LogitParts, top_k: int, normalize: bool, block_t: int, *, factors: Tensor | None = None, pdl: bool = False,
    check: bool = True,
) -> Routing:  # fmt: skip
    """Choose each token's experts and sort the tokens by expert: logits [T, E] or parts → `Routing`, see `reference.route`.

    top_k: k, the experts of a token. normalize: divide a token's weights by their sum. block_t: rows of a tile.
    factors: [E], of the weights.
    """
    parts = logits if isinstance(logits, LogitParts) else None
    given = logits.sums if isinstance(logits, LogitParts) else logits
    if check and parts is None:
        check_activations("logits", given)
    (T, E), count = given.shape[-2:], 0 if parts is None else given.shape[0]
    if check and not 1 <= top_k <= E:
        raise InputError("wrong number", where="top_k", expected=f"from 1 to {E}", found=top_k)
    pairs = T * top_k
    most = most_tiles(pairs, E, block_t)

    def ints(*shape: int) -> Tensor:
        return given.new_empty(*shape, dtype=torch.int32)

    weights = given.new_empty(T, top_k, dtype=logits.dtype)
    routing = Routing(weights, ints(T, top_k), ints(pairs), ints(pairs), ints(3, most), ints(1), block_t)
    if T:
        counts, squares, bias, hidden, eps = None, None, None, 1, 0.0
        if parts is not None:
            counts, parts.counts = parts.counts, None
            squares, bias, hidden, eps = parts.squares, parts.bias, parts.hidden, parts.eps
        if counts is None:
            counts = given.new_zeros(E, dtype=torch.int32)
        few = T <= FEW
        choose, place = _constants(count, top_k, normalize, E, block_t, next(n for n in _LAST_FEW if n >= T) if few else 0)
        _choose_kernel[(T,)](
            given, squares, bias, factors, hidden, eps, routing, counts, T, E,
            C=choose, **launch_options(1 if choose.BLOCK_E <= 256 else 4, 1, pdl),
        )  # fmt: skip
        _place_kernel[(E,)](routing, counts, pairs, most, E, C=place, **launch_options(4 if few else 16, 1, pdl))
    return routing


def gather(
    x: Tensor, routing: Routing, quantized: bool, norm: Norm | None = None, *, blocks: bool = False, pdl: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Tokens in the order of `routing.order`: x [T, H] → [T · k, H], quantized also their scales [T · k], see `quantize`.

    With a norm, the tokens are normalized first. With `blocks`, the scales are [T · k, ⌈H / 128⌉].
    """
    pairs, (T, H) = routing.order.shape[0], x.shape
    out = x.new_empty(pairs, H, dtype=torch.float8_e4m3fn if quantized else x.dtype)
    group = FP8_BLOCK if quantized and blocks else None
    shape = (pairs,) if group is None else (pairs, cdiv(H, group))
    scale = x.new_empty(*shape, dtype=torch.float32) if quantized else None
    block = max(group or 1, next_power_of_2(H))
    _gather_kernel[(T,)](
        x, norm, routing.places, out, scale, H, TOP_K=routing.weights.shape[1], BLOCK_H=block, GROUP=group,
        **launch_options(min(16, max(1, block // 512)), 1, pdl),
    )  # fmt: skip
    return out, scale


def cost(T: int, E: int, k: int, itemsize: int) -> tuple[int, int]:
    """(bytes read and written, floating-point operations) of the choice and the lists, tiles apart."""
    return T * (E + k) * itemsize + T * k * 12, T * E * (4 + k)
