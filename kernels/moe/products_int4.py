"""The products of a mixture of experts with 4-bit weights: as in `products`, with the tiles of `linear.gemm_int4`.

The rows of an expert's weight are the tensor cores' left operand, its tokens the right one. Each group's sum is multiplied by its
scale in fp32, so no weight is rounded, and a token's result does not depend on the other tokens. Scales of MXFP4 are powers of
two, so they multiply the weights.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from minirt.device import interpreting
from minirt.kernels.compile.tuning import Family
from minirt.kernels.launch import Gpu, cdiv, shared_limit
from minirt.kernels.linear.epilogue import finish, load_rows
from minirt.kernels.linear.gemm_int4 import CHUNK, DTYPES, load_chunk, multiply_chunk
from minirt.kernels.linear.int4_words import group_words, scale_words
from minirt.kernels.linear.product import Product, ProductFacts
from minirt.kernels.moe import products
from minirt.kernels.moe.route import Routing, token_regime
from minirt.kernels.prepared import compile_time, prepared

CASES = [  # group: columns of a scale; "mx": MXFP4
    {"T": 1, "E": 5, "k": 3, "H": 72, "I": 40, "group": 32}, {"T": 7, "E": 4, "k": 2, "H": 320, "I": 136, "group": 64},
    {"T": 70, "E": 3, "k": 2, "H": 200, "I": 67, "group": 128}, {"T": 5, "E": 4, "k": 2, "H": 200, "I": 72, "group": "mx"},
]  # fmt: skip


@dataclass(frozen=True)
class ExpertsInt4Config:
    """A launch configuration: rows of the weight and tokens of a tile, warps and pipeline stages."""

    block_n: int
    block_t: int
    num_warps: int
    num_stages: int


def block_t(T: int) -> int:
    """Rows of a tile for a step of T tokens. More than 64 would leave no registers for the sums of a group."""
    return min(products.block_t(T), 64)


def rule(facts: ProductFacts, gpu: Gpu) -> ExpertsInt4Config:
    """The tiles of `linear.gemm_int4` for as many tokens. They were not tuned for experts."""
    tokens = block_t(facts.T)
    if facts.itemsize == 4:
        return ExpertsInt4Config(32, tokens, 4, 1)
    block_n, warps = (64, 8 if tokens == 64 else 4) if facts.gated else (128, 8 if tokens > 16 else 4)
    step = (block_n * 64 + 8 * block_n) * (2 if facts.gated else 1) + tokens * 2 * CHUNK  # bytes: words, scales, tokens
    return ExpertsInt4Config(block_n, tokens, warps, max(1, min(3, (shared_limit(gpu.capability) - 4096) // step)))


FAMILY = Family("experts_int4", ExpertsInt4Config, (__file__,), ("T", "itemsize", "gated"), rule, tokens=token_regime)


@compile_time
class _Constants(NamedTuple):
    """What a launch compiles in. GROUP and ASM: as in `linear.gemm_int4`."""

    K: int
    TOP_K: int
    GROUP: int
    DTYPE: tl.dtype
    BLOCK_N: int
    BLOCK_T: int
    STAGES: int
    ASM: bool


@prepared
@triton.jit(do_not_specialize=["most"])
def _experts_int4_kernel(x_ptr, weight_ptr, ep, out_ptr, routing, most, scale_expert, scale_group, N, C):
    """Compute one tile [BLOCK_N, BLOCK_T]. With an activation: rows of x are tokens, of the output places; the weight is gate and
    up. Without: rows of x are places, of the output pairs.

    `scale_expert`, `scale_group`: from the scale words of an expert, or of a group, to those of the next.
    """
    GATED: tl.constexpr = ep.activation is not None
    ROWS: tl.constexpr = 2 if GATED else 1  # of the weight, for each output
    CHUNKS: tl.constexpr = (C.K + 128 - 1) // 128
    EXACT: tl.constexpr = ep.scale.dtype.element_ty != tl.uint32
    columns = tl.cdiv(N, C.BLOCK_N)
    tile = tl.program_id(0) // columns
    expert = tl.load(routing.tiles + tile)
    if expert < 0:
        return
    place = tl.load(routing.tiles + most + tile) + tl.arange(0, C.BLOCK_T)
    end = tl.load(routing.tiles + 2 * most + tile)
    valid = place < end
    place = tl.minimum(place, end - 1)  # places past the end repeat the last one, as rows do; they are not stored
    pair = tl.load(routing.order + place)
    n = tl.program_id(0) % columns * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
    row = tl.minimum(n, N - 1)
    s = tl.arange(0, 32)
    x_rows = (pair // C.TOP_K if GATED else place).to(tl.int64)
    x_ptrs = x_ptr + x_rows[:, None] * C.K + s[None, :]
    w_ptrs = weight_ptr + ((expert.to(tl.int64) * N * ROWS + row) * (CHUNKS * 32))[:, None] + s[None, :]
    up = tl.cast(N, tl.int64) * (CHUNKS * 32)
    scales = ep.scale + expert.to(tl.int64) * scale_expert + row
    acc = tl.zeros((C.BLOCK_N, C.BLOCK_T), tl.float32)
    acc_up = acc
    for chunk in tl.range(0, CHUNKS, num_stages=C.STAGES):
        k = chunk * 128
        x = load_chunk(x_ptrs, k, C.K)
        words = group_words(scales, scale_group, chunk, C.K, C.GROUP, WIDE=C.ASM)
        acc = multiply_chunk(tl.load(w_ptrs + k // 4), words, x, acc, C.GROUP, EXACT, C.DTYPE, C.ASM)
        if GATED:
            words = group_words(scales + N, scale_group, chunk, C.K, C.GROUP, WIDE=C.ASM)
            w = tl.load(w_ptrs + (k // 4 + up))
            acc_up = multiply_chunk(w, words, x, acc_up, C.GROUP, EXACT, C.DTYPE, C.ASM)
    of_rows = load_rows(ep, expert.to(tl.int64) * N * ROWS + n[:, None], n[:, None] < N, N, False)
    acc = finish(acc, acc_up, of_rows, (), (), ep)
    at = (place if GATED else pair).to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & valid[None, :])


def launch(product: Product, routing: Routing, config: ExpertsInt4Config | None = None) -> Tensor:
    """As `products.launch`, of words [E, rows, ⌈K / 128⌉ · 32] and scale words [E, groups, rows], see `int4_words`."""
    x, ep, (T, top_k), (_, N, K) = product.x, product.epilogue, routing.weights.shape, product.shape
    scale, group = scale_words(product)
    c, most = config or FAMILY.lookup(x.device, product.facts(token_regime(T))), routing.tiles.shape[1]
    constants = _Constants(
        K, top_k, group // 32, DTYPES[x.dtype], c.block_n, c.block_t, c.num_stages,
        ASM=x.element_size() == 2 and not interpreting(),
    )  # fmt: skip
    _experts_int4_kernel[(most * cdiv(N, c.block_n),)](
        x, product.weight, ep, product.out, routing, most, scale.stride(0), scale.stride(1), N, C=constants,
        num_warps=c.num_warps, num_stages=c.num_stages,
    )  # fmt: skip
    return product.out
