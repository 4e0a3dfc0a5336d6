"""The products of a mixture of experts: tiles of the tokens of one expert, gathered and scattered by the lists of `route`.

The first product writes act(gate) · up for each pair, in the order of the tiles; the second writes each pair to a separate row;
`combine` adds a token's rows, each times its weight, in a fixed order. So no result depends on the order of programs, and none
needs atomics. Experts that no token uses are not read.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.compile.tuning import Family
from minirt.kernels.fp8 import require_one_scale
from minirt.kernels.launch import Gpu, cdiv, fit_stages, launch_options, next_power_of_2, shared_limit
from minirt.kernels.linear.epilogue import finish, load_rows, load_tokens
from minirt.kernels.linear.gemm import PROMOTE_AFTER, GemmConfig, tile_sums
from minirt.kernels.linear.product import Product, ProductFacts
from minirt.kernels.moe.mixture import SharedOutput
from minirt.kernels.moe.route import FEW, Routing, token_regime
from minirt.kernels.pdl import wait_for_input
from minirt.kernels.prepared import compile_time, prepared

CASES = [
    {"T": 1, "E": 7, "k": 3, "H": 72, "I": 40}, {"T": 5, "E": 9, "k": 2, "H": 64, "I": 67},
    {"T": 21, "E": 4, "k": 1, "H": 97, "I": 64}, {"T": 66, "E": 3, "k": 3, "H": 33, "I": 17},
]  # fmt: skip


def block_t(T: int) -> int:
    """Rows of a tile for a step of T tokens. It changes only where `route.last_tokens` ends."""
    return 16 if T <= 64 else 32 if T <= 256 else 64 if T <= 1024 else 128


def rule(facts: ProductFacts, gpu: Gpu) -> GemmConfig:
    rows, itemsize, gated = block_t(facts.T), facts.itemsize, facts.gated
    if itemsize == 4:
        return GemmConfig(rows, 32, 32, 4, 1)
    columns, block_k = (64 if gated or rows == 16 else 128), 128 // itemsize
    stage_bytes = (rows + columns * (2 if gated else 1)) * block_k * itemsize
    stages = fit_stages(stage_bytes, shared_limit(gpu.capability) - 4096, 4)
    return GemmConfig(rows, columns, block_k, 8 if rows == 128 else 4, stages)


FAMILY = Family("experts", GemmConfig, (__file__,), ("T", "itemsize", "gated"), rule, tokens=token_regime)


@compile_time
class _Constants(NamedTuple):
    """What a launch compiles in. PROMOTE: steps in K after which sums are added in fp32; 0: never."""

    K: int
    TOP_K: int
    SCALE_ROWS: int | None
    BLOCK_T: int
    BLOCK_N: int
    BLOCK_K: int
    PROMOTE: int


@prepared
@triton.jit(do_not_specialize=["most"])
def _experts_kernel(x_ptr, weight_ptr, ep, out_ptr, routing, most, N, C):
    """Compute one tile. With an activation: rows of x are tokens, of the output places; the weight [E, 2N, K] is gate and up.
    Without: rows of x are places, of the output pairs.

    With SCALE_ROWS, the scales are those of blocks: [E, ⌈rows / SCALE_ROWS⌉, ⌈K / 128⌉], and of x [rows of x, ⌈K / 128⌉].
    """
    GATED: tl.constexpr = ep.activation is not None
    ROW_SCALES: tl.constexpr = C.SCALE_ROWS is None
    ROWS: tl.constexpr = 2 if GATED else 1  # of the weight, for each output
    columns = tl.cdiv(N, C.BLOCK_N)
    tile = tl.program_id(0) // columns
    expert = tl.load(routing.tiles + tile)
    if expert < 0:
        return
    first_n = tl.program_id(0) % columns * C.BLOCK_N
    place = tl.load(routing.tiles + most + tile) + tl.arange(0, C.BLOCK_T)
    end = tl.load(routing.tiles + 2 * most + tile)
    valid = place < end
    place = tl.minimum(place, end - 1)  # rows past the end repeat the last one; they are not stored
    pair = tl.load(routing.order + place)
    row = (pair // C.TOP_K if GATED else place).to(tl.int64)
    n = first_n + tl.arange(0, C.BLOCK_N)
    k = tl.arange(0, C.BLOCK_K)
    offset = expert.to(tl.int64) * N * ROWS  # rows of the weight before this expert's
    x_ptrs = x_ptr + row[:, None] * C.K + k[None, :]
    w_ptrs = weight_ptr + (offset + tl.minimum(n, N - 1))[None, :] * C.K + k[:, None]
    scale_ptr, x_scales = ep.scale, ep.x_scale
    if not ROW_SCALES:
        COLUMNS: tl.constexpr = (C.K + 127) // 128
        scale_ptr += expert * tl.cdiv(N * ROWS, C.SCALE_ROWS) * COLUMNS
        x_scales += row * COLUMNS
    acc, acc_up = tile_sums(x_ptrs, w_ptrs, x_scales, scale_ptr, 0, first_n, N, C, C.BLOCK_N, GATED, False)
    rows = load_rows(ep, offset + n[None, :], n[None, :] < N, N, ROW_SCALES)
    acc = finish(acc, acc_up, rows, load_tokens(ep, row[:, None], valid[:, None], ROW_SCALES), (), ep)
    out_row = (place if GATED else pair).to(tl.int64)
    at = out_row[:, None] * N + n[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (n < N)[None, :])


@prepared
@triton.jit
def _sum_experts_kernel(
    x_ptr, rows_ptr, weights_ptr, shared, out_ptr, H, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out = x + the sum of a token's rows times their weights, in order, + sigmoid(gate) · shared, for some of its channels.

    Without x, it is 0.
    """
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = h < H
    if PDL:
        wait_for_input(EARLY)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for j in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + t * TOP_K + j).to(tl.float32)
        total += weight * tl.load(rows_ptr + (t * TOP_K + j) * H + h, mask=inside, other=0.0).to(tl.float32)
    if shared is not None:
        gate = tl.sigmoid(tl.load(shared.gate + t).to(tl.float32))
        total += gate * tl.load(shared.output + t * H + h, mask=inside, other=0.0).to(tl.float32)
    if x_ptr is not None:
        total += tl.load(x_ptr + t * H + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * H + h, total.to(out_ptr.dtype.element_ty), mask=inside)


def launch(product: Product, routing: Routing, config: GemmConfig | None = None) -> Tensor:
    """With an activation: act(gate) · up of each pair, x [T, H] → out [T · k, I], in the order of `routing.order`.
    Without: x [T · k, I] in that order → out [T · k, H], rows in the order of pairs.

    The weight is [E, rows, K]; FP8 scales are [E, rows] and [rows of x], or of blocks [E, ⌈rows / g⌉, ⌈K / 128⌉] and [rows of x,
    ⌈K / 128⌉]. `product.pdl` has no effect.
    """
    x, (T, top_k), (_, N, K), scale_rows = product.x, routing.weights.shape, product.shape, product.scale_rows
    c, most = config or FAMILY.lookup(x.device, product.facts(token_regime(T))), routing.tiles.shape[1]
    require_one_scale(scale_rows, c.block_k)
    promote = PROMOTE_AFTER // c.block_k if x.dtype == torch.float8_e4m3fn and scale_rows is None else 0
    _experts_kernel[(most * cdiv(N, c.block_n),)](
        x, product.weight, product.epilogue, product.out, routing, most, N,
        C=_Constants(K, top_k, scale_rows, c.block_t, c.block_n, c.block_k, promote), num_warps=c.num_warps,
        num_stages=c.num_stages,
    )  # fmt: skip
    return product.out


def combine(
    x: Tensor | None, rows: Tensor, weights: Tensor, out: Tensor, shared: SharedOutput | None = None, *, pdl: bool = False
) -> Tensor:
    """out = x + Σ_j weights[t, j] · rows[t, j] + sigmoid(shared.gate) · shared.output: x, out [T, H], rows [T · k, H].

    x None: 0.
    """
    T, H = out.shape
    block = min(1024, next_power_of_2(H))
    _sum_experts_kernel[(T, cdiv(H, block))](
        x, rows, weights, shared, out, H, TOP_K=rows.shape[0] // T, BLOCK_H=block, EARLY=T <= FEW,
        **launch_options(max(1, block // 256), 1, pdl),
    )  # fmt: skip
    return out
