"""The products of a mixture of experts: tiles of the tokens of one expert, gathered and scattered by the lists of `route`.

`gate_up` writes act(gate) · up for each pair, in the order of the tiles; `down` writes each pair to its own row; `combine` adds a
token's rows, each times its weight, in a fixed order. So no result depends on the order of programs, and none needs
atomics. Experts that no token uses are not read.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.fp8 import block_scales, expert_scale_rows
from minirt.kernels.launch import cdiv, fit_stages, launch_options, next_power_of_2, shared_limit
from minirt.kernels.linear.epilogue import activate
from minirt.kernels.moe.route import FEW, Routing
from minirt.kernels.pdl import wait_for_input
from minirt.kernels.prepared import prepared
from minirt.kernels.reference import FP8_BLOCK

CASES = [
    {"T": 1, "E": 7, "k": 3, "H": 72, "I": 40},
    {"T": 5, "E": 9, "k": 2, "H": 64, "I": 67},
    {"T": 21, "E": 4, "k": 1, "H": 97, "I": 64},
    {"T": 66, "E": 3, "k": 3, "H": 33, "I": 17},
]

# Hopper's tensor cores add fp8 products with about 14 bits. After this many elements of K, the sum is added to one in fp32.
_PROMOTE = 512


@dataclass(frozen=True)
class ExpertsConfig:
    """A launch configuration: rows and columns of a tile, the step in K, warps and pipeline stages."""

    block_t: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def block_t(T: int) -> int:
    """Rows of a tile for a step of T tokens. `last_tokens` says up to which T it is the same."""
    return 16 if T <= 64 else 32 if T <= 256 else 64 if T <= 1024 else 128


def last_tokens(T: int) -> int | None:
    """The largest step that launches the same compiled kernels as one of T tokens, those of `route` included; None: no limit."""
    return next((last for last in (16, 64, 128, 256, 512, 1024) if last >= T), None)


def choose_config(T: int, itemsize: int, gated: bool, cc: int) -> ExpertsConfig:
    """The configuration for T tokens. `itemsize` is that of the activations."""
    rows = block_t(T)
    if itemsize == 4:
        return ExpertsConfig(rows, 32, 32, 4, 1)
    columns, block_k = (64 if gated or rows == 16 else 128), 128 // itemsize
    stage_bytes = (rows + columns * (2 if gated else 1)) * block_k * itemsize
    return ExpertsConfig(rows, columns, block_k, 8 if rows == 128 else 4, fit_stages(stage_bytes, shared_limit(cc) - 4096, 4))


@triton.jit
def _accumulate(
    x_ptrs, w_ptrs, up_offset, first_k, last_k, K: tl.constexpr, GATED: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x · weightᵀ from `first_k` to `last_k`; GATED: of gate and of up, whose rows are `up_offset` values further."""
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    acc_up = acc
    for start in range(first_k, last_k, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(x_ptrs + start)
            b = tl.load(w_ptrs + start)
        else:
            a = tl.load(x_ptrs + start, mask=start + k[None, :] < K, other=0.0)
            b = tl.load(w_ptrs + start, mask=start + k[:, None] < K, other=0.0)
        acc = tl.dot(a, b.to(a.dtype), acc, input_precision="ieee")
        if GATED:
            if K % BLOCK_K == 0:
                b = tl.load(w_ptrs + up_offset + start)
            else:
                b = tl.load(w_ptrs + up_offset + start, mask=start + k[:, None] < K, other=0.0)
            acc_up = tl.dot(a, b.to(a.dtype), acc_up, input_precision="ieee")
    return acc, acc_up


@triton.jit
def _accumulate_blocks(
    x_ptrs, w_ptrs, up_offset, x_scales, scale_ptr, first_n, N, K: tl.constexpr, GATED: tl.constexpr, SCALE_ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`_accumulate` of all of K with scales of blocks, which multiply the products of each step before they are added.

    `scale_ptr`: the scales of this expert. `x_scales`: those of the first 128 channels of each row of x.
    """
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    acc_up = acc
    for start in range(0, K, BLOCK_K):
        block = start // 128
        token = tl.load(x_scales + block)[:, None]
        factor = token * block_scales(scale_ptr, 0, first_n, block, N, K, SCALE_ROWS, BLOCK_N, 0)
        if GATED:
            factor_up = token * block_scales(scale_ptr, N, first_n, block, N, K, SCALE_ROWS, BLOCK_N, 0)
        if K % BLOCK_K == 0:
            a = tl.load(x_ptrs + start)
            b = tl.load(w_ptrs + start)
        else:
            a = tl.load(x_ptrs + start, mask=start + k[None, :] < K, other=0.0)
            b = tl.load(w_ptrs + start, mask=start + k[:, None] < K, other=0.0)
        acc += tl.dot(a, b) * factor
        if GATED:
            if K % BLOCK_K == 0:
                b = tl.load(w_ptrs + up_offset + start)
            else:
                b = tl.load(w_ptrs + up_offset + start, mask=start + k[:, None] < K, other=0.0)
            acc_up += tl.dot(a, b) * factor_up
    return acc, acc_up


@prepared
@triton.jit(do_not_specialize=["most"])
def _experts_kernel(
    x_ptr, weight_ptr, out_ptr, order_ptr, tiles_ptr, x_scale_ptr, scale_ptr, most, N, K: tl.constexpr,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, SCALE_ROWS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PROMOTE: tl.constexpr,
):  # fmt: skip
    """Compute one tile. With ACTIVATION: rows of x are tokens, of the output places; the weight [E, 2N, K] is gate and up.
    Without: rows of x are places, of the output pairs.

    With SCALE_ROWS, the scales are those of blocks: [E, ⌈rows / SCALE_ROWS⌉, ⌈K / 128⌉], and of x [rows of x, ⌈K / 128⌉].
    """
    GATED: tl.constexpr = ACTIVATION is not None
    columns = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // columns
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    first_n = tl.program_id(0) % columns * BLOCK_N
    place = tl.load(tiles_ptr + most + tile) + tl.arange(0, BLOCK_T)
    end = tl.load(tiles_ptr + 2 * most + tile)
    valid = place < end
    place = tl.minimum(place, end - 1)  # rows past the end repeat the last one; they are not stored
    pair = tl.load(order_ptr + place)
    row = (pair // TOP_K if GATED else place).to(tl.int64)
    n = first_n + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = expert.to(tl.int64) * N * (2 if GATED else 1)  # of the weight, before this expert's
    x_ptrs = x_ptr + row[:, None] * K + k[None, :]
    w_ptrs = weight_ptr + (rows + tl.minimum(n, N - 1))[None, :] * K + k[:, None]
    up_offset = N.to(tl.int64) * K
    if SCALE_ROWS is not None:
        COLUMNS: tl.constexpr = (K + 127) // 128
        own = expert * tl.cdiv(N * (2 if GATED else 1), SCALE_ROWS) * COLUMNS  # before this expert's scales
        acc, acc_up = _accumulate_blocks(
            x_ptrs, w_ptrs, up_offset, x_scale_ptr + row * COLUMNS, scale_ptr + own, first_n, N, K, GATED, SCALE_ROWS, BLOCK_T,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
    elif PROMOTE == 0:
        acc, acc_up = _accumulate(x_ptrs, w_ptrs, up_offset, 0, K, K, GATED, BLOCK_T, BLOCK_N, BLOCK_K)
    else:
        acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        acc_up = acc
        for first_k in range(0, K, PROMOTE * BLOCK_K):
            last_k = tl.minimum(first_k + PROMOTE * BLOCK_K, K)
            part, part_up = _accumulate(x_ptrs, w_ptrs, up_offset, first_k, last_k, K, GATED, BLOCK_T, BLOCK_N, BLOCK_K)
            acc += part
            acc_up += part_up
    if scale_ptr is not None and SCALE_ROWS is None:
        acc *= tl.load(scale_ptr + rows + n, mask=n < N, other=0.0)[None, :]
        if GATED:
            acc_up *= tl.load(scale_ptr + rows + N + n, mask=n < N, other=0.0)[None, :]
    if x_scale_ptr is not None and SCALE_ROWS is None:
        x_scale = tl.load(x_scale_ptr + row)[:, None]
        acc *= x_scale
        acc_up *= x_scale
    if GATED:
        acc = activate(acc, ACTIVATION) * acc_up
        out_row = place.to(tl.int64)
    else:
        out_row = pair.to(tl.int64)
    at = out_row[:, None] * N + n[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (n < N)[None, :])


@prepared
@triton.jit
def _sum_experts_kernel(
    x_ptr, rows_ptr, weights_ptr, shared_ptr, gate_ptr, out_ptr, H, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = x + the sum of a token's rows times their weights, in order, + sigmoid(gate) · shared, for some of its channels."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = h < H
    if PDL:
        wait_for_input(EARLY)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for j in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + t * TOP_K + j).to(tl.float32)
        total += weight * tl.load(rows_ptr + (t * TOP_K + j) * H + h, mask=inside, other=0.0).to(tl.float32)
    if shared_ptr is not None:
        gate = tl.sigmoid(tl.load(gate_ptr + t).to(tl.float32))
        total += gate * tl.load(shared_ptr + t * H + h, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(x_ptr + t * H + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * H + h, total.to(out_ptr.dtype.element_ty), mask=inside)


def gate_up(
    x: Tensor, weight: Tensor, routing: Routing, activation: str, out: Tensor, config: ExpertsConfig,
    scale: Tensor | None = None, x_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """act(gate) · up of each pair, in the order of `routing.order`: x [T, H], weight [E, 2I, H] → out [T · k, I].

    FP8: `scale` [E, 2I] and `x_scale` [T], or of blocks [E, 2I / g, ⌈H / 128⌉] and [T, ⌈H / 128⌉].
    """
    return _launch(x, weight, out, routing, config, activation, scale, x_scale)


def down(
    h: Tensor, weight: Tensor, routing: Routing, out: Tensor, config: ExpertsConfig, scale: Tensor | None = None,
    h_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """h · weightᵀ: h [T · k, I] in the order of `routing.order`, weight [E, H, I] → out [T · k, H].

    FP8: `scale` [E, H] and `h_scale` [T · k], or of blocks [E, ⌈H / g⌉, ⌈I / 128⌉] and [T · k, ⌈I / 128⌉].
    """
    return _launch(h, weight, out, routing, config, None, scale, h_scale)


def _launch(
    x: Tensor, weight: Tensor, out: Tensor, routing: Routing, config: ExpertsConfig, activation: str | None,
    scale: Tensor | None, x_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    N, c, most = out.shape[1], config, routing.tiles.shape[1]
    rows = expert_scale_rows(weight, scale)
    if rows is not None and FP8_BLOCK % c.block_k:
        raise InputError("a step in K has one scale", where="config.block_k", expected="a divisor of 128", found=c.block_k)
    _experts_kernel[(most * cdiv(N, c.block_n),)](
        x, weight, out, routing.order, routing.tiles, x_scale, scale, most, N, K=x.shape[1],
        TOP_K=routing.weights.shape[1], ACTIVATION=activation, SCALE_ROWS=rows, BLOCK_T=c.block_t, BLOCK_N=c.block_n,
        BLOCK_K=c.block_k, PROMOTE=_PROMOTE // c.block_k if x.dtype == torch.float8_e4m3fn else 0, num_warps=c.num_warps,
        num_stages=c.num_stages,
    )  # fmt: skip
    return out


def combine(
    x: Tensor, rows: Tensor, weights: Tensor, out: Tensor, shared: Tensor | None = None, gate: Tensor | None = None, *,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    """out = x + Σ_j weights[t, j] · rows[t, j] + sigmoid(gate) · shared.

    x, shared, out: [T, H]. rows: [T · k, H]. weights: [T, k]. gate: [T, 1].
    """
    T, H = x.shape
    block = min(1024, next_power_of_2(H))
    _sum_experts_kernel[(T, cdiv(H, block))](
        x, rows, weights, shared, gate, out, H, TOP_K=rows.shape[0] // T, BLOCK_H=block, EARLY=T <= FEW,
        **launch_options(max(1, block // 256), 1, pdl),
    )  # fmt: skip
    return out
