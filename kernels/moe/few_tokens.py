"""The experts of few tokens, limited by the time to read their weights. Two kernels, with the FMAs and tiles of `gemv.py`.

Every pair of a token and one of its experts reads the expert's weights, since few tokens rarely have an expert in common. If two
have, their programs run at the same time, and the second one to read finds the weights in L2. A token's result does not depend on
the other tokens, nor on T.

Every program, and each of its warps, derives the experts from the router's logits, which takes less time than a kernel between
the router and the experts. Each warp has a copy of the logits, in pieces of 32, so no maximum over them needs another warp.

`gate_up` cannot load weights before it has the logits. `down` can: `gate_up` triggers after its wait, so when programs of `down`
start, the logits are complete. Both kernels may therefore follow the router's in a chain of PDL launches.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.compile.tuning import Family
from minirt.kernels.launch import Gpu, cdiv, launch_options, most_registers, next_power_of_2, sm_count
from minirt.kernels.linear.epilogue import finish, load_residual, load_rows
from minirt.kernels.linear.gemv import chunk_products, chunk_scales, chunk_size, load_tile
from minirt.kernels.linear.product import Epilogue, Product, ProductFacts
from minirt.kernels.moe.mixture import Mixture, SharedOutput
from minirt.kernels.prepared import compile_time, prepared
from minirt.kernels.reference import FEW_TOKENS, SharedExpert, few_tokens

MOST = FEW_TOKENS  # tokens; with more of them, pairs have too many experts in common
_REGISTERS = 128  # of a thread, so that 16 warps fit on an SM

CASES = [
    {"E": 7, "k": 3, "H": 72, "I": 40}, {"E": 128, "k": 8, "H": 40, "I": 12}, {"E": 60, "k": 1, "H": 97, "I": 33},
    {"E": 3, "k": 2, "H": 20, "I": 300},
]  # fmt: skip


@dataclass(frozen=True)
class FewTokensConfig:
    """A launch configuration of one of the two kernels.

    Args:
        block_n: outputs that a program computes at a time.
        num_warps: warps of a program.
        block_k: elements of K in one load of a program's rows.
        tiles: loads in flight.
        blocks: how many times `block_n` outputs a program computes, one after the other.
    """

    block_n: int
    num_warps: int
    block_k: int
    tiles: int
    blocks: int = 1


@triton.jit
def chosen(logits_ptr, E, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr):
    """The token's TOP_K experts and their shares, as `route` orders them: by share, equal ones by expert."""
    PIECE: tl.constexpr = min(BLOCK_E, 32)
    PIECES: tl.constexpr = BLOCK_E // PIECE
    lane = tl.arange(0, PIECE)
    logits = ()
    for i in tl.static_range(PIECES):
        e = i * PIECE + lane
        # Past L1, which may hold an earlier layer's logits: `down` reads them before its PDL wait.
        loaded = tl.load(logits_ptr + e, mask=e < E, other=float("-inf"), cache_modifier=".cg")
        logits += (loaded.to(tl.float32),)
    top = tl.full((PIECE,), float("-inf"), tl.float32)
    for i in tl.static_range(PIECES):
        top = tl.maximum(top, logits[i])
    top = tl.max(top, 0)
    sums = tl.zeros((PIECE,), tl.float32)
    shares = ()
    for i in tl.static_range(PIECES):
        shares += (tl.exp(logits[i] - top),)
        sums += shares[i]
    total = tl.sum(sums, 0)
    bits = ()  # of the shares, ordered like them; 0 if one is NaN
    for i in tl.static_range(PIECES):
        share = tl.div_rn(shares[i], tl.broadcast(total, shares[i])[0])
        share = tl.where(total == total, share, 0.0).to(tl.int32, bitcast=True)
        bits += (tl.where(i * PIECE + lane < E, share, -1),)
    experts, weights = (), ()
    for _ in tl.static_range(TOP_K):
        best = tl.full((PIECE,), -1, tl.int32)
        for i in tl.static_range(PIECES):
            best = tl.maximum(best, bits[i])
        best = tl.max(best, 0)
        at = tl.full((PIECE,), BLOCK_E, tl.int32)
        for i in tl.static_range(PIECES):
            at = tl.minimum(at, tl.where(bits[i] == best, i * PIECE + lane, BLOCK_E))
        expert = tl.min(at, 0)
        left = ()
        for i in tl.static_range(PIECES):
            left += (tl.where(i * PIECE + lane == expert, -1, bits[i]),)
        bits = left
        experts += (expert,)
        weights += (tl.where(total == total, best.to(tl.float32, bitcast=True), total),)
    return experts, weights


@triton.jit
def expert_shares(experts, weights, factors_ptr, DTYPE: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr):
    """The shares that `chosen` found, divided by their sum if NORMALIZE, times the experts' factors, if there are any, rounded as
    `route` stores them. fp32."""
    total = 0.0
    for j in tl.static_range(TOP_K):
        total += weights[j]
    shares = ()
    for j in tl.static_range(TOP_K):
        share = weights[j]
        if NORMALIZE:
            share = tl.div_rn(share, total)
        if factors_ptr is not None:
            share *= tl.load(factors_ptr + experts[j]).to(tl.float32)
        shares += (share.to(DTYPE).to(tl.float32),)
    return shares


@triton.jit
def finish_down(value, ep, shared, experts, shares, t, n, N):
    """Outputs n of token t, from the sums over its experts: with their biases, what a shared expert has computed, and the
    residual, if there are any."""
    at, valid = t * N + n, n < N
    if ep.bias is not None:
        for j in tl.static_range(len(experts)):
            bias = tl.load(ep.bias + experts[j].to(tl.int64) * N + n, mask=valid, other=0.0)
            value += shares[j] * bias.to(tl.float32)
    if shared is not None:
        output = tl.load(shared.output + at, mask=valid, other=0.0).to(tl.float32)
        value += tl.sigmoid(tl.load(shared.gate + t).to(tl.float32)) * output
    residual = load_residual(ep, at, valid)
    if len(residual) > 0:
        value += residual[0]
    return value


@compile_time
class _Constants(NamedTuple):
    """What a launch of either kernel compiles in.

    Args:
        SCALE_ROWS: rows of the blocks of an fp8 weight, which have a scale each. None: there are no blocks.
        ROWS: rows of an expert's weight for each output: 2 of gate and up, else 1.
        BLOCKS: blocks of BLOCK_N outputs of a round.
        PARTS: tiles of BLOCK_K columns of a row. TILES: of them in flight.
        MANY: whether there are several tokens.
        SHARED: 1 if these kernels compute a shared expert, which is then the last one of each token; else 0.
    """

    K: int
    TOP_K: int
    SCALE_ROWS: int | None
    ROWS: int
    BLOCK_E: int
    BLOCK_N: int
    BLOCK_K: int
    PARTS: int
    CHUNK: int
    BLOCKS: int
    TILES: int
    MANY: bool
    SHARED: int


@triton.jit
def _rows(expert, n, N, block: tl.constexpr, C):
    """Rows of an expert's weight, which has ROWS · N, for a block of outputs. Rows past the end are the last one again."""
    return expert.to(tl.int64) * C.ROWS * N + tl.minimum(n + block * C.BLOCK_N, N - 1)


@triton.jit
def _scales(ep, expert, first, n0, N, block: tl.constexpr, i: tl.constexpr, C):
    """`chunk_scales` of tile i of an expert's rows, for a block of outputs; n0: the first output of the program.

    Blocks of outputs past the end have the scales of the last row.
    """
    offset = expert * ((C.ROWS * N + C.SCALE_ROWS - 1) // C.SCALE_ROWS) * ((C.K + 127) // 128)
    n = tl.minimum(n0 + block * C.BLOCK_N, N - 1)
    return chunk_scales(ep.scale + offset, first, n, N, i, C)


@triton.jit
def _gate_up_tile(weight_ptr, ep, expert, n0, N, i: tl.constexpr, C):
    """Tile i of a round's blocks, from output n0 on: of gate and up, and their scales, or ()."""
    n = n0 + tl.arange(0, C.BLOCK_N)
    k = tl.max_contiguous(tl.arange(0, C.BLOCK_K), C.CHUNK)
    up_offset = tl.cast(N, tl.int64) * C.K
    ptrs = weight_ptr + _rows(expert, n, N, i // C.PARTS, C)[:, None] * C.K + k[None, :]
    gate = load_tile(ptrs, k[None, :], i % C.PARTS, C, "evict_first")
    up = load_tile(ptrs + up_offset, k[None, :], i % C.PARTS, C, "evict_first")
    gate_scales, up_scales = (), ()
    if C.SCALE_ROWS is not None:
        gate_scales = _scales(ep, expert, 0, n0, N, i // C.PARTS, i % C.PARTS, C)
        up_scales = _scales(ep, expert, N, n0, N, i // C.PARTS, i % C.PARTS, C)
    return gate, up, gate_scales, up_scales


@triton.jit
def _gate_up_tiles(weight_ptr, ep, expert, n0, N, C):
    """The first TILES tiles of a round's blocks, in flight."""
    tiles = ()
    for i in tl.static_range(C.TILES):
        tiles += (_gate_up_tile(weight_ptr, ep, expert, n0, N, i, C),)
    return tiles


@triton.jit
def _gate_up_round(tiles, xs, inverse_rms, weight_ptr, ep, out_ptr, pair, expert, n0, N, C):
    """BLOCKS · BLOCK_N values of a pair's row of out, from n0 on. `tiles`: `_gate_up_tiles`."""
    SCALED: tl.constexpr = C.SCALE_ROWS is not None
    n = n0 + tl.arange(0, C.BLOCK_N)
    gate_sums = tl.zeros((C.BLOCK_N, C.BLOCK_K // C.CHUNK), tl.float32)
    up_sums = gate_sums
    for i in tl.static_range(C.BLOCKS * C.PARTS):
        column = n + i // C.PARTS * C.BLOCK_N
        if i % C.PARTS == 0:  # of this block: loaded before its products, used after them
            rows = load_rows(ep, _rows(expert, n, N, i // C.PARTS, C), True, N, not SCALED)
        gate, up, gate_scales, up_scales = tiles[i]
        products = chunk_products(gate, xs[i % C.PARTS], C.CHUNK)
        gate_sums += products * gate_scales if SCALED else products
        products = chunk_products(up, xs[i % C.PARTS], C.CHUNK)
        up_sums += products * up_scales if SCALED else products
        if i + C.TILES < C.BLOCKS * C.PARTS:
            tiles += (_gate_up_tile(weight_ptr, ep, expert, n0, N, i + C.TILES, C),)
        if i % C.PARTS == C.PARTS - 1:
            out = finish(tl.sum(gate_sums, 1) * inverse_rms, tl.sum(up_sums, 1) * inverse_rms, rows, (), (), ep)
            tl.store(out_ptr + pair * N + column, out.to(out_ptr.dtype.element_ty), mask=column < N)
            gate_sums = tl.zeros((C.BLOCK_N, C.BLOCK_K // C.CHUNK), tl.float32)
            up_sums = gate_sums


@triton.jit
def _gate_up(raw, norm, weight_ptr, ep, out_ptr, pair, expert, n0, rounds, N, C):
    """A pair's values of out, from n0 on, from its token's tiles `raw`.

    Returns the tiles times the norm's weight, and the token's inverse root mean square.
    """
    k = tl.max_contiguous(tl.arange(0, C.BLOCK_K), C.CHUNK)
    tiles = _gate_up_tiles(weight_ptr, ep, expert, n0, N, C)
    squares = tl.zeros((C.BLOCK_K,), tl.float32)
    xs = ()
    for i in tl.static_range(C.PARTS):
        x = raw[i].to(tl.float32)
        if norm is not None:
            squares += x * x
            x *= load_tile(norm.weight + k, k, i, C, "").to(tl.float32)
        xs += (x,)
    inverse_rms = 1.0
    if norm is not None:
        inverse_rms = tl.rsqrt(tl.sum(squares, 0) / C.K + norm.eps)
    _gate_up_round(tiles, xs, inverse_rms, weight_ptr, ep, out_ptr, pair, expert, n0, N, C)
    if C.MANY:
        for _ in range(1, rounds):
            n0 += C.BLOCKS * C.BLOCK_N
            tiles = _gate_up_tiles(weight_ptr, ep, expert, n0, N, C)
            _gate_up_round(tiles, xs, inverse_rms, weight_ptr, ep, out_ptr, pair, expert, n0, N, C)
    return xs, inverse_rms


@triton.jit
def expert_of(logits_ptr, E, j, C):
    """A token's j-th expert."""
    experts, _ = chosen(logits_ptr, E, C.TOP_K, C.BLOCK_E)
    expert = experts[0]
    for i in tl.static_range(1, C.TOP_K):
        expert = tl.where(j == i, experts[i], expert)
    return expert


@triton.jit
def _store_gate(xs, inverse_rms, weight_ptr, out_ptr, C):
    """The gate of the shared expert of one token, before its sigmoid."""
    k = tl.max_contiguous(tl.arange(0, C.BLOCK_K), C.CHUNK)
    sums = tl.zeros((C.BLOCK_K,), tl.float32)
    for i in tl.static_range(C.PARTS):
        sums += xs[i] * load_tile(weight_ptr + k, k, i, C, "").to(tl.float32)
    tl.store(out_ptr, (tl.sum(sums, 0) * inverse_rms).to(out_ptr.dtype.element_ty))


@prepared
@triton.jit(do_not_specialize=["rounds"])
def _few_gate_up_kernel(
    x_ptr, norm, logits_ptr, weight_ptr, ep, shared_ptr, shared_ep, gate_weight_ptr, gate_ptr, out_ptr, E, N, rounds, C,
    PDL: tl.constexpr,
):  # fmt: skip
    """rounds · BLOCKS · BLOCK_N values of out [T · (k + SHARED), N]: act(gate) · up of norm(x) by the j-th expert of token t.

    t = program_id(0), j = program_id(1). With SCALE_ROWS, the scales are those of blocks, as in `gemv.py`: they multiply the sum
    of each chunk of products. With SHARED, expert k is the shared one, and its gate [T] is computed, too.
    """
    t = tl.program_id(0) if C.MANY else 0
    j = tl.program_id(1)
    n0 = tl.program_id(2) * rounds * C.BLOCKS * C.BLOCK_N
    k = tl.max_contiguous(tl.arange(0, C.BLOCK_K), C.CHUNK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    raw = ()  # loaded while the program looks for its expert
    for i in tl.static_range(C.PARTS):
        raw += (load_tile(x_ptr + t * C.K + k, k, i, C, ""),)
    pair = t * (C.TOP_K + C.SHARED) + j
    if C.SHARED == 1:
        if j == C.TOP_K:
            xs, inverse_rms = _gate_up(raw, norm, shared_ptr, shared_ep, out_ptr, pair, j - C.TOP_K, n0, rounds, N, C)
            if n0 == 0:
                _store_gate(xs, inverse_rms, gate_weight_ptr, gate_ptr + t, C)
        else:
            expert = expert_of(logits_ptr + t * E, E, j, C)
            _gate_up(raw, norm, weight_ptr, ep, out_ptr, pair, expert, n0, rounds, N, C)
    else:
        expert = expert_of(logits_ptr + t * E, E, j, C)
        _gate_up(raw, norm, weight_ptr, ep, out_ptr, pair, expert, n0, rounds, N, C)


@triton.jit
def _down_tile(weight_ptr, ep, shared, experts, n0, N, i: tl.constexpr, C):
    """Tile i of a round's blocks, from output n0 on, and its scales, or 0."""
    COUNT: tl.constexpr = (C.TOP_K + C.SHARED) * C.PARTS
    J: tl.constexpr = i % COUNT // C.PARTS
    n = n0 + tl.arange(0, C.BLOCK_N)
    k = tl.max_contiguous(tl.arange(0, C.BLOCK_K), C.CHUNK)
    expert = experts[J]
    scales = 0.0
    if J == C.TOP_K:
        ptrs = shared[0] + _rows(expert, n, N, i // COUNT, C)[:, None] * C.K + k[None, :]
        if C.SCALE_ROWS is not None:
            scales = _scales(shared[1], expert, 0, n0, N, i // COUNT, i % C.PARTS, C)
    else:
        ptrs = weight_ptr + _rows(expert, n, N, i // COUNT, C)[:, None] * C.K + k[None, :]
        if C.SCALE_ROWS is not None:
            scales = _scales(ep, expert, 0, n0, N, i // COUNT, i % C.PARTS, C)
    return load_tile(ptrs, k[None, :], i % C.PARTS, C, "evict_first"), scales


@triton.jit
def _down_tiles(weight_ptr, ep, shared, experts, n0, N, C):
    """The first TILES tiles of a round's blocks, in flight, and their scales."""
    tiles = ()
    for i in tl.static_range(C.TILES):
        tiles += (_down_tile(weight_ptr, ep, shared, experts, n0, N, i, C),)
    return tiles


@triton.jit
def _down_round(tiles, experts, shares, x_ptr, weight_ptr, ep, shared, output, out_ptr, t, n0, N, C):
    """BLOCKS · BLOCK_N values of token t's out [N], from n0 on. `tiles`: `_down_tiles`."""
    COUNT: tl.constexpr = (C.TOP_K + C.SHARED) * C.PARTS
    SCALED: tl.constexpr = C.SCALE_ROWS is not None
    n = n0 + tl.arange(0, C.BLOCK_N)
    k = tl.max_contiguous(tl.arange(0, C.BLOCK_K), C.CHUNK)
    out = tl.zeros((C.BLOCK_N, C.BLOCK_K // C.CHUNK), tl.float32)
    sums = out
    for i in tl.static_range(C.BLOCKS * COUNT):
        if ep.scale is not None and not SCALED and i % COUNT == 0:  # of this block: all loads before the first use
            row_scales = ()
            for j in tl.static_range(C.TOP_K):
                row_scales += (tl.load(ep.scale + _rows(experts[j], n, N, i // COUNT, C)),)
            if C.SHARED == 1:
                row_scales += (tl.load(shared[1].scale + _rows(experts[C.TOP_K], n, N, i // COUNT, C)),)
        x = load_tile(x_ptr + i % COUNT // C.PARTS * C.K + k, k, i % C.PARTS, C, "").to(tl.float32)
        w, scales = tiles[i]
        products = chunk_products(w, x, C.CHUNK)
        sums += products * scales if SCALED else products
        if i + C.TILES < C.BLOCKS * COUNT:
            tiles += (_down_tile(weight_ptr, ep, shared, experts, n0, N, i + C.TILES, C),)
        if i % C.PARTS == C.PARTS - 1:  # an expert's last tile. Each thread adds its sums; one reduction at the end is enough.
            if ep.scale is not None and not SCALED:
                sums *= row_scales[i % COUNT // C.PARTS][:, None]
            out += sums * shares[i % COUNT // C.PARTS]
            sums = tl.zeros((C.BLOCK_N, C.BLOCK_K // C.CHUNK), tl.float32)
        if i % COUNT == COUNT - 1:
            column = n + i // COUNT * C.BLOCK_N
            value = finish_down(tl.sum(out, 1), ep, output, experts, shares, t, column, N)
            tl.store(out_ptr + t * N + column, value.to(out_ptr.dtype.element_ty), mask=column < N)
            out = tl.zeros((C.BLOCK_N, C.BLOCK_K // C.CHUNK), tl.float32)


@prepared
@triton.jit(do_not_specialize=["rounds"])
def _few_down_kernel(
    x_ptr, logits_ptr, factors_ptr, weight_ptr, ep, shared_ptr, shared_ep, gate_ptr, output, out_ptr, E, N, rounds, C,
    NORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """rounds · BLOCKS · BLOCK_N values of out [T, N], x [T · (k + SHARED), K], of token t = program_id(0):

    out[t] = residual[t] + Σ_j w_j · (weight[e_j] · x[t, j]) + sigmoid(gate[t]) · the shared expert's: computed here from x[t, k],
    with SHARED, or `output`.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0) if C.MANY else 0
    n0 = tl.program_id(1) * rounds * C.BLOCKS * C.BLOCK_N
    experts, weights = chosen(logits_ptr + t * E, E, C.TOP_K, C.BLOCK_E)
    if C.SHARED == 1:
        experts += (experts[0] * 0,)
    shared = (shared_ptr, shared_ep)
    tiles = _down_tiles(weight_ptr, ep, shared, experts, n0, N, C)
    if PDL:
        tl.extra.cuda.gdc_wait()
    shares = expert_shares(experts, weights, factors_ptr, logits_ptr.dtype.element_ty, C.TOP_K, NORMALIZE)
    if C.SHARED == 1:
        shares += (tl.sigmoid(tl.load(gate_ptr + t).to(tl.float32)),)
    x_ptr += t * (C.TOP_K + C.SHARED) * C.K
    _down_round(tiles, experts, shares, x_ptr, weight_ptr, ep, shared, output, out_ptr, t, n0, N, C)
    if C.MANY:
        for _ in range(1, rounds):
            n0 += C.BLOCKS * C.BLOCK_N
            tiles = _down_tiles(weight_ptr, ep, shared, experts, n0, N, C)
            _down_round(tiles, experts, shares, x_ptr, weight_ptr, ep, shared, output, out_ptr, t, n0, N, C)


def last_tokens(T: int) -> int:
    """The largest step that takes these kernels where one of T tokens does: T rounded up to a power of two, or to `MOST`."""
    return min(MOST, next_power_of_2(T))


def rule(facts: ProductFacts, gpu: Gpu) -> FewTokensConfig:
    """It does not depend on the tokens, so no order of sums does.

    A program looks for its experts before it loads weights. So all programs of gate/up for one token run at once, and each
    computes several blocks of outputs. A program of down is one warp, so no sum needs a barrier: it keeps half of one output's
    weights in flight, or with FP8 all of them.
    """
    if facts.gated:
        block_k, blocks = min(512, next_power_of_2(facts.K)), cdiv(facts.k * facts.N, 4 * 4 * gpu.sms)
        return FewTokensConfig(2, 2, block_k, 4, min(8, blocks))
    return FewTokensConfig(1, 1, min(256, next_power_of_2(facts.K)), 24 // facts.itemsize)


def candidates(facts: ProductFacts, gpu: Gpu) -> list[FewTokensConfig]:
    """Configurations worth trying for rows of K values; a row of `down` is that of k experts."""
    K, itemsize, gated, configs = facts.K, facts.itemsize, facts.gated, []
    for block_n, num_warps, block_k in itertools.product((2, 4, 8, 16), (2, 4, 8), (256, 512, 1024, 2048)):
        count = cdiv(K, block_k) * (1 if gated else facts.k)
        elements = block_n * block_k * (2 if gated else 1) // (32 * num_warps)  # of a thread in one load
        if block_k >= 2 * K or elements < 8:
            continue
        for blocks in (1, 2, 3, 4) if gated else (1,):
            most = min(count * blocks, 256 // itemsize // elements)  # 64 registers of 4 bytes
            configs += [FewTokensConfig(block_n, num_warps, block_k, tiles, blocks) for tiles in sorted({most, most // 2} - {0})]
    return configs


FAMILY = Family(
    "experts_few_tokens", FewTokensConfig, (__file__,), ("E", "k", "N", "K", "itemsize", "gated", "blocks"), rule, candidates
)


def _rounds(c: FewTokensConfig, N: int, T: int, rows: int, device: torch.device) -> int:
    """How often a program computes `blocks` outputs, so that all programs run at once. `rows`: rows of out, of N values each."""
    at_once = 16 // c.num_warps * sm_count(device)
    return 1 if T == 1 else cdiv(cdiv(N, c.block_n * c.blocks), max(1, at_once // rows))


def _chunk(weight: Tensor, c: FewTokensConfig) -> int:
    """Values of the weight in one load of a thread. Rows that are not aligned are loaded value by value.

    If a row's tile is one load of all threads, each thread needs only the values of x that it loads itself.
    """
    chunk, share = chunk_size(weight.element_size()), c.block_k // (32 * c.num_warps)
    chunk = share if 8 <= share < chunk else min(chunk, c.block_k)
    return chunk if weight.shape[2] % chunk == 0 and weight.data_ptr() % 16 == 0 else 1


def _registers(c: FewTokensConfig, device: torch.device, T: int, programs: int) -> int:
    """The most registers of a thread. Programs of one warp get more for a single token, if all fit on the SMs at once."""
    at_once = most_registers(32 * cdiv(programs, sm_count(device)))
    return _REGISTERS if T > 1 or c.num_warps > 1 else max(_REGISTERS, at_once)


def suits(m: Mixture) -> bool:
    """Whether there are few tokens for this number of experts. The logits must be whole: every program chooses by itself."""
    return isinstance(m.logits, Tensor) and few_tokens(m.h.shape[0], m.top_k, m.logits.shape[1])


def _constants(product: Product, c: FewTokensConfig, top_k: int, shared: bool, T: int) -> _Constants:
    weight = product.weight
    parts = cdiv(weight.shape[2], c.block_k)
    tiles = c.blocks * parts * (1 if product.gated else top_k + shared)  # of a round in all
    return _Constants(
        weight.shape[2], top_k, product.scale_rows, 2 if product.gated else 1, next_power_of_2(weight.shape[0]),
        c.block_n, c.block_k, parts, _chunk(weight, c), c.blocks, min(c.tiles, tiles), T > 1, int(shared),
    )  # fmt: skip


def gate_up(
    product: Product, logits: Tensor, top_k: int, shared: SharedExpert | None = None, config: FewTokensConfig | None = None
) -> Tensor | None:
    """act(gate) · up of norm(x) by each token's experts: x [T, H], weight [E, 2I, H] → out [T · k, I], a token's rows together.

    With a shared expert, one of which `reference.computes_shared` is true, `out` is [T · (k + 1), I], and its gate [T], before
    its sigmoid, is returned. `product` has an activation; the scales of FP8 weights are [E, 2I], or of blocks [E, 2I / g, ⌈H /
    128⌉].
    logits: [T, E].
    """
    weight, out = product.weight, product.out
    E, (pairs, N), T = weight.shape[0], out.shape, len(logits)
    c = config or FAMILY.lookup(out.device, product.facts(1, E, pairs // T))
    rounds = _rounds(c, N, T, pairs, out.device)
    programs = cdiv(N, c.block_n * c.blocks * rounds)
    constants = _constants(product, c, top_k, shared is not None, T)
    gate, weights = None, (None,) * 3
    if shared is not None:
        gate, of_up = out.new_empty(T), Epilogue(shared.gate_up_scale, activation=product.epilogue.activation)
        weights = shared.gate_up, of_up, shared.gate
    _few_gate_up_kernel[(T, pairs // T, programs)](
        product.x, product.norm, logits, weight, product.epilogue, *weights, gate, out, E, N, rounds, C=constants,
        maxnreg=_registers(c, out.device, T, programs * pairs), **launch_options(c.num_warps, 1, product.pdl),
    )  # fmt: skip
    return gate


def down(
    product: Product, logits: Tensor, top_k: int, normalize: bool,
    shared: SharedExpert | SharedOutput | None = None, gate: Tensor | None = None, config: FewTokensConfig | None = None,
    factors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """residual + Σ_j w_j · expert_j's down projection + sigmoid(gate) · shared: x of `gate_up`, weight [E, H, I] → out [T, H].

    With PDL, the kernel that wrote the logits must have ended before the kernel before this one triggered. `product` may
    have a residual; the scales of FP8 weights are [E, H], or of blocks [E, ⌈H / g⌉, ⌈I / 128⌉]. logits: [T, E]. shared: the
    expert that `gate_up` took, with the `gate` that it returned; or the output of other kernels. factors: of `Mixture`.
    """
    x, weight, out = product.x, product.weight, product.out
    (E, N, _), T = weight.shape, len(logits)
    c = config or FAMILY.lookup(out.device, product.facts(1, E, x.shape[0] // T))
    rounds = _rounds(c, N, T, T, out.device)
    programs = cdiv(N, c.block_n * c.blocks * rounds)
    expert = shared if isinstance(shared, SharedExpert) else None
    weights = (None,) * 3 if expert is None else (expert.down, Epilogue(expert.down_scale), gate)
    constants = _constants(product, c, top_k, expert is not None, T)
    _few_down_kernel[(T, programs)](
        x, logits, factors, weight, product.epilogue, *weights, shared if expert is None else None, out, E, N, rounds,
        C=constants, NORMALIZE=normalize, maxnreg=_registers(c, out.device, T, programs),
        **launch_options(c.num_warps, 1, product.pdl),
    )  # fmt: skip
    return out


