"""Matrix times vector: the linear layers of one token, where reading the weights is all the work.

Products by FMA, in fp32. RMSNorm of the input is folded in, gated activation, bias and residual are the epilogue. A program
computes a few whole rows, so that nothing is summed between programs and the same input gives the same bits.

What it takes to read at the speed of memory: enough bytes on their way at every moment, also while one kernel ends and the next
begins. So a program keeps `tiles` loads in registers and asks for one more whenever it has used one; and with programmatic
dependent launch it asks for the first ones before it waits for the kernel that computes its input.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.compile.tuning import Tunable, bucket, cached_lookup
from minirt.kernels.launch import launch_options, require_fp8, sm_count
from minirt.kernels.linear.activation import activate
from minirt.kernels.linear.product import Product

WARP = 32


@dataclass(frozen=True)
class GemvConfig:
    """Rows a program computes (twice as many where gated), warps along K, tiles in flight, registers at most."""

    block_n: int
    num_warps: int
    tiles: int
    registers: int | None = None


TUNABLE = Tunable("gemv", GemvConfig, (__file__,))


@triton.jit
def _load_tile(ptrs, k, i: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, EVICT: tl.constexpr):
    """Tile i of rows whose first one is at `ptrs`; checked against K only where it may reach past it."""
    if (i + 1) * BLOCK_K <= K:
        return tl.load(ptrs + i * BLOCK_K, eviction_policy=EVICT)
    else:
        return tl.load(ptrs + i * BLOCK_K, mask=k + i * BLOCK_K < K, other=0.0, eviction_policy=EVICT)


@triton.jit
def _products(w, x, CHUNK: tl.constexpr):
    """w [BLOCK_N, BLOCK_K] times x [BLOCK_K], summed over the CHUNK neighbours that one thread holds."""
    products = w.to(tl.float32) * x[None, :]
    return tl.sum(tl.reshape(products, [w.shape[0], w.shape[1] // CHUNK, CHUNK]), 2)


@triton.jit
def _row_results(sums, inverse_rms, scale, bias_ptr, row, valid):
    result = tl.sum(sums, 1) * inverse_rms
    if scale is not None:
        result *= scale
    if bias_ptr is not None:
        result += tl.load(bias_ptr + row, mask=valid, other=0.0).to(tl.float32)
    return result


@triton.jit
def _gemv_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    N,
    eps,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N values of out [N] of one token; with ACTIVATION the weight has 2N rows, gate and up."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # waiting programs only take the room that ending ones leave
    COUNT: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = n < N
    # One warp reads neighbouring chunks of one row, in the order in which x is loaded too: nothing moves between threads.
    k = tl.max_contiguous(tl.arange(0, BLOCK_K), CHUNK)
    # Rows past the end read the last row again instead of being masked; they are not stored.
    gate_ptrs = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    up_ptrs = gate_ptrs + tl.cast(N, tl.int64) * K
    gate, up = (), ()
    for i in tl.static_range(TILES):
        gate += (_load_tile(gate_ptrs, k[None, :], i, K, BLOCK_K, "evict_first"),)
        if ACTIVATION is not None:
            up += (_load_tile(up_ptrs, k[None, :], i, K, BLOCK_K, "evict_first"),)
    gate_scale, up_scale = None, None
    if scale_ptr is not None:
        gate_scale = tl.load(scale_ptr + n, mask=valid, other=0.0)
        if ACTIVATION is not None:
            up_scale = tl.load(scale_ptr + N + n, mask=valid, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    residual = tl.zeros((BLOCK_N,), tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + n, mask=valid, other=0.0).to(tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    gate_sums = tl.zeros((BLOCK_N, BLOCK_K // CHUNK), tl.float32)
    up_sums = gate_sums
    for i in tl.static_range(COUNT):
        x = _load_tile(x_ptr + k, k, i, K, BLOCK_K, "").to(tl.float32)
        if norm_ptr is not None:
            # The rows' sums are divided by the root mean square in the end, so it need not be known before.
            squares += x * x
            x *= _load_tile(norm_ptr + k, k, i, K, BLOCK_K, "").to(tl.float32)
        gate_sums += _products(gate[i], x, CHUNK)
        if i + TILES < COUNT:
            gate += (_load_tile(gate_ptrs, k[None, :], i + TILES, K, BLOCK_K, "evict_first"),)
        if ACTIVATION is not None:
            up_sums += _products(up[i], x, CHUNK)
            if i + TILES < COUNT:
                up += (_load_tile(up_ptrs, k[None, :], i + TILES, K, BLOCK_K, "evict_first"),)
    inverse_rms = 1.0
    if norm_ptr is not None:
        inverse_rms = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    result = _row_results(gate_sums, inverse_rms, gate_scale, bias_ptr, n, valid)
    if ACTIVATION is not None:
        result = activate(result, ACTIVATION) * _row_results(up_sums, inverse_rms, up_scale, bias_ptr, N + n, valid)
    tl.store(out_ptr + n, (result + residual).to(out_ptr.dtype.element_ty), mask=valid)


def choose_gemv_config(N: int, K: int, itemsize: int, gated: bool, num_sms: int) -> GemvConfig:
    """The configuration for a shape, by what sweeps over the layers of five models have in common (docs/decisions).

    A row is about four tiles long. With a few rows a program has 8 to 16 loads on their way, half of a row or all of it.
    """
    fp8 = itemsize == 1
    chunks = triton.cdiv(K, WARP * chunk_size(itemsize))
    at_once = not gated and 64 * num_sms >= N  # all programs find room together
    num_warps = min(8, _nearest_power_of_two(chunks / (5.5 if at_once and fp8 else 4)))
    count = triton.cdiv(chunks, num_warps)
    if num_warps == 8:
        # Long rows, of which an SM takes four programs. Where more of them share x, x is read less often (for fp8 that
        # counts more: x costs more instructions than the weights); but the last round should be nearly a full one.
        rows, fewest, full = (2 if gated else 4), *((2, 0.8) if fp8 else (1, 0.9))
        while rows > fewest and (rounds := triton.cdiv(N, rows) / (4 * num_sms)) < full * math.ceil(rounds):
            rows //= 2
        loads = (16 if fp8 else 10) // (2 * rows if gated else rows)  # in 64 registers
        return GemvConfig(rows, 8, min(triton.cdiv(count, 2), loads), 64)
    if at_once:
        few = fp8 or 24 * num_sms > N
        return GemvConfig(4, num_warps, 4) if few else GemvConfig(8, num_warps, 2)
    if fp8:
        return GemvConfig(4 if gated else 8, num_warps, 4)
    return GemvConfig(2 if gated else 4, num_warps, triton.cdiv(count, 2))


@cached_lookup
def lookup_gemv_config(device: torch.device, N: int, K: int, itemsize: int, gated: bool) -> GemvConfig:
    """The configuration that was tuned for a shape, or else the rule's."""
    tuned = TUNABLE.find(device, bucket(N=N, K=K, itemsize=itemsize, gated=gated))
    return tuned or choose_gemv_config(N, K, itemsize, gated, sm_count(device))


def _nearest_power_of_two(x: float) -> int:
    return 1 << max(0, round(math.log2(x)))


def chunk_size(itemsize: int) -> int:
    """Weights that a thread loads at once: 16 bytes, but of fp8 8, as many as it loads of x."""
    return min(8, 16 // itemsize)


def gemv(
    product: Product, norm_weight: Tensor | None = None, eps: float = 0.0, config: GemvConfig | None = None
) -> None:
    """Write the output of a product of one token, x normalized first if `norm_weight` [K] is given. Unchecked, see `dispatch`.

    x is not quantized: an fp8 weight multiplies 16- or 32-bit activations.
    """
    x, weight, out, bias, residual, activation, scale, *_ = product
    K, N = x.shape[1], out.shape[1]
    if weight.dtype == torch.float8_e4m3fn:
        require_fp8(x.device)
    if config is None:
        config = lookup_gemv_config(x.device, N, K, weight.element_size(), activation is not None)
    chunk = chunk_size(weight.element_size())
    block_k = chunk * WARP * config.num_warps
    if K % chunk or weight.data_ptr() % 16:
        chunk = 1  # a thread's values are no neighbours then
    _gemv_kernel[(triton.cdiv(N, config.block_n),)](
        x, norm_weight, weight, scale, bias, residual, out, N, eps, K=K, ACTIVATION=activation,
        BLOCK_N=config.block_n, BLOCK_K=block_k, CHUNK=chunk, TILES=min(config.tiles, triton.cdiv(K, block_k)),
        maxnreg=config.registers, **launch_options(config.num_warps, 1, product.pdl),
    )  # fmt: skip
