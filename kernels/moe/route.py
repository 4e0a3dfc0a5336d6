"""The router's choice of experts, and the tokens sorted by expert: what the products by expert work through.

Two or three kernels, all on the device: the choice (one program for each token), with many tokens the number of tokens of each
expert, and the list of tiles. A further kernel copies the tokens in the order of the list. All shapes depend only on the number
of tokens, so CUDA graphs can hold them. A pair is a token and one of its k experts: pair t · k + j is token t with its j-th
expert.

With PDL, every kernel triggers after its wait. So a kernel that starts later finds the lists complete before its own wait.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.checks import check_activations
from minirt.kernels.fp8 import finite_magnitude, fp8_scale, to_fp8
from minirt.kernels.launch import launch_options, next_power_of_2
from minirt.kernels.pdl import wait_for_input
from minirt.kernels.prepared import prepared

CASES = [
    {"T": 1, "E": 5, "k": 2},
    {"T": 5, "E": 128, "k": 8},
    {"T": 19, "E": 60, "k": 4},
    {"T": 37, "E": 3, "k": 3},
]

_BLOCK = 1024  # pairs that a program reads at a time
FEW = 128  # up to so many tokens, a program reads all pairs at once


class Routing(NamedTuple):
    """What each token's experts are, and which tiles the products by expert compute.

    Attributes:
        weights: [T, k] in the dtype of the logits.
        experts: [T, k] int32.
        order: [T · k] int32, the pairs sorted by expert; those of one expert are in ascending order.
        tiles: [3, n] int32, see `reference.expert_tiles`. n is the most there can be; unused ones are −1.
        used: [1] int32, the number of used tiles.
        block_t: rows of a tile.
    """

    weights: Tensor
    experts: Tensor
    order: Tensor
    tiles: Tensor
    used: Tensor
    block_t: int


@triton.jit
def shares_of(logits_ptr, e, E, CACHE: tl.constexpr):
    """Softmax in fp32 over the experts of one token, and keys that order experts: the larger share first, then the lower expert.

    With a NaN, all shares are NaN, and the lowest experts come first. Experts past the last one have the key -1.
    """
    logits = tl.load(logits_ptr + e, mask=e < E, other=float("-inf"), cache_modifier=CACHE).to(tl.float32)
    shares = tl.exp(logits - tl.max(logits, 0))
    total = tl.sum(shares, 0)
    shares = tl.div_rn(shares, tl.broadcast(total, shares)[0])
    bits = tl.where(total == total, shares, 0.0).to(tl.int32, bitcast=True)  # ordered like the shares, which are not negative
    return shares, tl.where(e < E, (bits.to(tl.int64) << 32) | (0x7FFFFFFF - e), -1)


@prepared
@triton.jit
def _choose_kernel(
    logits_ptr, weights_ptr, experts_ptr, E, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token: its TOP_K largest shares, the lower expert of equal ones first."""
    t = tl.program_id(0).to(tl.int64)
    if PDL:
        wait_for_input(False)
    e = tl.arange(0, BLOCK_E)
    j = tl.arange(0, BLOCK_K)
    shares, keys = shares_of(logits_ptr + t * E, e, E, "")
    weights = tl.zeros((BLOCK_K,), tl.float32)
    experts = tl.zeros((BLOCK_K,), tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        weights = tl.where(j == i, (best >> 32).to(tl.int32).to(tl.float32, bitcast=True), weights)
        experts = tl.where(j == i, (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32), experts)
        keys = tl.where(keys == best, -1, keys)
    any_nan = tl.sum((shares != shares).to(tl.int32), 0) > 0
    weights = tl.where((j < TOP_K) & any_nan, float("nan"), weights)
    if NORMALIZE:
        weights = tl.div_rn(weights, tl.broadcast(tl.sum(weights, 0), weights)[0])
    at = t * TOP_K + j
    tl.store(weights_ptr + at, weights.to(weights_ptr.dtype.element_ty), mask=j < TOP_K)
    tl.store(experts_ptr + at, experts, mask=j < TOP_K)


@prepared
@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(experts_ptr, counts_ptr, pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Count the pairs of one expert."""
    e = tl.program_id(0)
    if PDL:
        wait_for_input(False)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        count += (tl.load(experts_ptr + pair, mask=pair < pairs, other=-1) == e).to(tl.int32)
    tl.store(counts_ptr + e, tl.sum(count, 0))


@prepared
@triton.jit(do_not_specialize=["pairs", "most"])
def _place_kernel(
    experts_ptr, counts_ptr, order_ptr, tiles_ptr, used_ptr, pairs, most, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the pairs and the tiles of one expert behind those of lower experts. Program 0 marks the unused tiles.

    Without `counts_ptr`, there are at most BLOCK pairs, and every program counts those of all experts.
    """
    e = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    every = tl.arange(0, BLOCK_E)
    if PDL:
        wait_for_input(False)
    if counts_ptr is None:
        counts = tl.histogram(tl.load(experts_ptr + lane, mask=lane < pairs, other=0), BLOCK_E, mask=lane < pairs)
    else:
        counts = tl.load(counts_ptr + every, mask=every < E, other=0)
    tiles = (counts + BLOCK_T - 1) // BLOCK_T
    first = tl.sum(tl.where(every < e, counts, 0), 0)
    count = tl.sum(tl.where(every == e, counts, 0), 0)
    first_tile = tl.sum(tl.where(every < e, tiles, 0), 0)
    own_tiles = (count + BLOCK_T - 1) // BLOCK_T
    for start in range(0, own_tiles, BLOCK):
        i = start + lane
        inside = i < own_tiles
        at = tiles_ptr + first_tile + i
        tl.store(at, tl.zeros((BLOCK,), tl.int32) + e, mask=inside)
        tl.store(at + most, first + i * BLOCK_T, mask=inside)
        tl.store(at + 2 * most, tl.zeros((BLOCK,), tl.int32) + first + count, mask=inside)
    if e == 0:
        tl.store(used_ptr, tl.sum(tiles, 0))
        for start in range(tl.sum(tiles, 0), most, BLOCK):
            i = start + lane
            for row in tl.static_range(3):
                tl.store(tiles_ptr + row * most + i, tl.full((BLOCK,), -1, tl.int32), mask=i < most)
    place = first
    for start in range(0, pairs, BLOCK):
        pair = start + lane
        own = (tl.load(experts_ptr + pair, mask=pair < pairs, other=-1) == e).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(own, 0) - 1, pair, mask=own == 1)
        place += tl.sum(own, 0)


@prepared
@triton.jit
def _gather_kernel(
    x_ptr, order_ptr, out_ptr, scale_ptr, H, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Copy the token of one place, quantized if `scale_ptr` is given."""
    place = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    inside = h < H
    if PDL:
        wait_for_input(False)
    t = (tl.load(order_ptr + place) // TOP_K).to(tl.int64)
    x = tl.load(x_ptr + t * H + h, mask=inside, other=0.0)
    if scale_ptr is not None:
        scale = fp8_scale(tl.max(finite_magnitude(x), 0))
        tl.store(scale_ptr + place, scale)
        x = to_fp8(x, scale).to(tl.float8e4nv, bitcast=True)
    tl.store(out_ptr + place * H + h, x, mask=inside)


def most_tiles(pairs: int, num_experts: int, block_t: int) -> int:
    """The most tiles of `block_t` rows that so many pairs can have, each tile of one expert."""
    touched = min(pairs, num_experts)
    return (pairs + touched * (block_t - 1)) // block_t


def route(
    logits: Tensor, top_k: int, normalize: bool, block_t: int, *, pdl: bool = False, check: bool = True
) -> Routing:
    """Choose each token's experts and sort the tokens by expert: logits [T, E] → `Routing`, see `reference.route`.

    Args:
        top_k: k, the experts of a token.
        normalize: divide a token's weights by their sum.
        block_t: rows of a tile.
        pdl: whether to overlap with the kernel before it in the stream (see `minirt.kernels.pdl`).
    """
    if check:
        check_activations("logits", logits)
        if not 1 <= top_k <= logits.shape[1]:
            raise InputError("wrong number", where="top_k", expected=f"from 1 to {logits.shape[1]}", found=top_k)
    (T, E), device = logits.shape, logits.device
    pairs = T * top_k
    most = most_tiles(pairs, E, block_t)
    weights = torch.empty(T, top_k, dtype=logits.dtype, device=device)
    experts = torch.empty(T, top_k, dtype=torch.int32, device=device)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    tiles = torch.empty(3, most, dtype=torch.int32, device=device)
    used = torch.empty(1, dtype=torch.int32, device=device)
    if T:
        few, block_e = T <= FEW, next_power_of_2(E)
        block = next_power_of_2(FEW * top_k) if few else _BLOCK
        _choose_kernel[(T,)](
            logits, weights, experts, E, TOP_K=top_k, NORMALIZE=normalize, BLOCK_E=block_e,
            BLOCK_K=next_power_of_2(top_k), **launch_options(1 if block_e <= 256 else 4, 1, pdl),
        )  # fmt: skip
        counts = None
        if not few:
            counts = torch.empty(E, dtype=torch.int32, device=device)
            _count_kernel[(E,)](experts, counts, pairs, BLOCK=block, **launch_options(4, 1, pdl))
        _place_kernel[(E,)](
            experts, counts, order, tiles, used, pairs, most, E, BLOCK_T=block_t, BLOCK_E=block_e, BLOCK=block,
            **launch_options(4, 1, pdl),
        )  # fmt: skip
    return Routing(weights, experts, order, tiles, used, block_t)


def gather(x: Tensor, routing: Routing, quantized: bool, *, pdl: bool = False) -> tuple[Tensor, Tensor | None]:
    """Tokens in the order of `routing.order`: x [T, H] → [T · k, H], quantized also their scales [T · k], see `quantize`."""
    pairs, H = routing.order.shape[0], x.shape[1]
    out = torch.empty(pairs, H, dtype=torch.float8_e4m3fn if quantized else x.dtype, device=x.device)
    scale = torch.empty(pairs, dtype=torch.float32, device=x.device) if quantized else None
    block = next_power_of_2(H)
    _gather_kernel[(pairs,)](
        x, routing.order, out, scale, H, TOP_K=routing.weights.shape[1], BLOCK_H=block,
        **launch_options(min(8, max(1, block // 512)), 1, pdl),
    )  # fmt: skip
    return out, scale


def cost(T: int, E: int, k: int, itemsize: int) -> tuple[int, int]:
    """(bytes read and written, floating-point operations) of the choice and the lists, tiles apart."""
    return T * (E + k) * itemsize + T * k * 12, T * E * (4 + k)
