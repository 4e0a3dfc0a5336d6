"""What `minirt tune` tries for the linear layers: each family's own rule and configurations around it."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minirt.errors import NumericsError
from minirt.kernels import reference
from minirt.kernels.compile.tuning import Case, LinearShape, Tunable, bucket, register
from minirt.kernels.launch import Workspace, capability, cdiv, fit_stages, shared_limit
from minirt.kernels.linear import (
    gemm_sm90,
    gemm_small,
    gemv,
    gemv_int4,
    gemv_int4_sm90,
    int4,
    int4_sm90,
    int4_small_sm90,
)
from minirt.kernels.linear.dispatch import REGIMES
from minirt.kernels.linear.product import Epilogue, Product
from minirt.kernels.quantize import quantize
from minirt.kernels.reference import FP8_BLOCK

TUNABLES = (
    gemv.TUNABLE, gemm_small.TUNABLE, gemm_sm90.TUNABLE, gemv_int4.TUNABLE, gemv_int4_sm90.TUNABLE, int4.TUNABLE,
    int4_small_sm90.TUNABLE, int4_sm90.TUNABLE,
)  # fmt: skip
_FOUR_BITS = (gemv_int4_sm90.accepts, int4.accepts, int4_small_sm90.accepts, int4_sm90.accepts)  # of the regimes of 4-bit weights
_COLD = 256 << 20  # bytes of weights that launches use in turn: more than any L2 holds
_TOLERANCE = 2e-2  # relative error of bf16 outputs: larger than any order of sums causes, much smaller than a wrong tile does


def gemv_cases(shapes: Sequence[LinearShape], tokens: Sequence[int], device: torch.device) -> Iterator[Case]:
    """Steps of one token."""
    for shape in _single(shapes) if 1 in tokens else ():
        itemsize = 1 if shape.fp8 else shape.dtype.itemsize
        key = bucket(N=shape.N, K=shape.K, itemsize=itemsize, gated=shape.gated, blocks=shape.blocks)
        rule = gemv.choose_gemv_config(shape.N, shape.K, itemsize, shape.gated, _sm_count(device), shape.blocks)
        around = [
            gemv.GemvConfig(n, warps, tiles, registers)
            for n in _around(rule.block_n, 8) for warps in _around(rule.num_warps, 8) for tiles in _around(rule.tiles, 16)
            for registers in {None, rule.registers}
        ]  # fmt: skip
        yield _case(gemv.TUNABLE, key, rule, around, shape, 1, device)


def gemm_small_cases(shapes: Sequence[LinearShape], tokens: Sequence[int], device: torch.device) -> Iterator[Case]:
    """Steps with the token counts of `gemm_small`, one case for each power of two that they are padded to."""
    blocks = sorted({gemm_small.token_block(T) for T in tokens if _kernel(T, device) == "gemm_small"})
    for block_t, shape in itertools.product(blocks, _single(shapes)):
        itemsize = 1 if shape.fp8 else shape.dtype.itemsize
        key = bucket(T=block_t, N=shape.N, K=shape.K, itemsize=itemsize, gated=shape.gated, blocks=shape.blocks)
        cc = capability(device)
        facts = (itemsize, shape.gated, cc, _sm_count(device), shape.blocks)
        rule = gemm_small.choose_gemm_small_config(block_t, shape.N, shape.K, *facts)
        around = []
        # With enough tiles for several rounds, splitting K gains nothing, and the workspace has no room for the sums.
        parts = (1,) if shape.gated or cdiv(shape.N, rule.block_n) > 8 * _sm_count(device) else (1, 2, 3, 4, 6)
        steps = _around(rule.block_k, FP8_BLOCK if shape.blocks else 256)
        for programs, block_k, split in itertools.product((1, 2, 3, 4) if shape.blocks else (1, 2, 3), steps, parts):
            row = (rule.block_n * (2 if shape.gated else 1) + block_t) * itemsize
            stages = fit_stages(row * block_k, shared_limit(cc) // programs - 2048, 8)
            if stages > 1:
                around.append(replace(rule, block_k=block_k, num_stages=stages, split=split, programs=programs))
        yield _case(gemm_small.TUNABLE, key, rule, around, shape, block_t, device)


def gemm_cases(shapes: Sequence[LinearShape], tokens: Sequence[int], device: torch.device) -> Iterator[Case]:
    """Steps of more tokens on Hopper, one case for each regime. Leaves out the LM head, which uses no tuned configuration."""
    regimes = sorted({gemm_sm90.token_regime(T) for T in tokens if _kernel(T, device) == "gemm_sm90"})
    for regime, shape in itertools.product(regimes, _single(shapes)):
        itemsize = 1 if shape.fp8 else shape.dtype.itemsize
        if itemsize > 2 or shape.logits:
            continue
        facts = {"N": shape.N, "K": shape.K, "itemsize": itemsize, "gated": shape.gated, "residual": shape.residual}
        facts |= {"blocks": shape.blocks}
        sizes = (regime, shape.N, shape.K, itemsize, shape.gated, shape.residual, _sm_count(device))
        rule = gemm_sm90.choose_gemm_sm90_config(*sizes, splits=True, blocks=shape.blocks)
        around = gemm_sm90.candidates(*sizes, splits=True, blocks=shape.blocks)
        yield _case(gemm_sm90.TUNABLE, bucket(T=regime, **facts), rule, around, shape, regime, device)


def gemv_int4_cases(shapes: Sequence[LinearShape], tokens: Sequence[int], device: torch.device) -> Iterator[Case]:
    """Steps of one token with 4-bit weights."""
    for shape in shapes if 1 in tokens and _kernel(1, device, four_bits=True) == "gemv_int4" else ():
        if shape.int4:
            key = bucket(N=shape.N, K=shape.K, gated=shape.gated)
            rule = gemv_int4.choose_gemv_int4_config(shape.N, shape.K, shape.gated, _sm_count(device))
            around = [
                gemv_int4.GemvInt4Config(rows, warps, tiles, registers)
                for rows in _around(rule.rows, 8) for warps in _around(rule.num_warps, 8) for tiles in _around(rule.tiles, 4)
                for registers in {None, 128, rule.registers}
            ]  # fmt: skip
            yield _case(gemv_int4.TUNABLE, key, rule, around, shape, 1, device)


def gemv_int4_sm90_cases(shapes: Sequence[LinearShape], tokens: Sequence[int], device: torch.device) -> Iterator[Case]:
    """Steps of one token with 4-bit weights on Hopper, for the weights that are large enough."""
    for shape in shapes if 1 in tokens and _kernel(1, device, four_bits=True) == "gemv_int4_sm90" else ():
        rows = 2 * shape.N if shape.gated else shape.N
        if shape.int4 and shape.dtype.itemsize == 2 and gemv_int4_sm90.worthwhile(rows, shape.K, shape.residual):
            key = bucket(N=shape.N, K=shape.K, gated=shape.gated)
            rule = gemv_int4_sm90.choose_gemv_int4_sm90_config(shape.N, shape.K, shape.gated, _sm_count(device))
            around = gemv_int4_sm90.candidates(shape.N, shape.K, shape.gated)
            yield _case(gemv_int4_sm90.TUNABLE, key, rule, around, shape, 1, device)


def int4_small_cases(shapes: Sequence[LinearShape], tokens: Sequence[int], device: torch.device) -> Iterator[Case]:
    """Steps of few tokens with 4-bit weights on Hopper."""
    few = [T for T in tokens if "gemm_int4_small_sm90" in _kernels(T, device)]
    for shape in shapes if few else ():
        if shape.int4 and shape.dtype.itemsize == 2:
            key = bucket(N=shape.N, K=shape.K, gated=shape.gated)
            rule = int4_small_sm90.choose_int4_small_sm90_config(shape.N, shape.K, shape.gated, _sm_count(device))
            around = [
                int4_small_sm90.Int4SmallSm90Config(16, warps, tiles, registers, chains)
                for warps in _around(rule.num_warps, 8) for tiles in (2, 4, 7) for registers in {None, 128, rule.registers}
                for chains in (1, 2)
            ]  # fmt: skip
            yield _case(int4_small_sm90.TUNABLE, key, rule, around, shape, min(few), device)


def int4_sm90_cases(shapes: Sequence[LinearShape], tokens: Sequence[int], device: torch.device) -> Iterator[Case]:
    """Steps of more tokens with 4-bit weights on Hopper, one case for each regime."""
    many = [T for T in tokens if _kernel(T, device, four_bits=True) == "gemm_int4_sm90"]
    regimes = sorted({int4_sm90.token_regime(T) for T in many})
    for regime, shape in itertools.product(regimes, [s for s in shapes if s.int4 and s.dtype.itemsize == 2]):
        key = bucket(T=regime, N=shape.N, K=shape.K, gated=shape.gated)
        rule = int4_sm90.choose_int4_sm90_config(regime, shape.N, shape.K, shape.gated, _sm_count(device))
        around = int4_sm90.candidates(regime, shape.N, shape.K, shape.gated, _sm_count(device))
        yield _case(int4_sm90.TUNABLE, key, rule, around, shape, regime, device)


def gemm_int4_cases(shapes: Sequence[LinearShape], tokens: Sequence[int], device: torch.device) -> Iterator[Case]:
    """Steps of several tokens with 4-bit weights, one case for each power of two that they are padded to."""
    blocks = sorted({int4.token_block(T) for T in tokens if _kernel(T, device, four_bits=True) == "gemm_int4"})
    for block_t, shape in itertools.product(blocks, [shape for shape in shapes if shape.int4]):
        key = bucket(T=block_t, N=shape.N, K=shape.K, itemsize=shape.dtype.itemsize, gated=shape.gated)
        sizes = (block_t, shape.N, shape.K, shape.dtype.itemsize, shape.gated, capability(device), _sm_count(device))
        rule = int4.choose_int4_config(*sizes)
        parts = (1,) if shape.gated or cdiv(shape.N, rule.block_n) > 8 * _sm_count(device) else (1, 2, 3, 4, 6, 9)
        around = [
            replace(rule, block_n=block_n, num_warps=warps, num_stages=stages, programs=programs, split=split)
            for block_n, warps in ((64, 4), (128, 4), (128, 8)) for stages in (3, 4) for programs in (1, 2, 3) for split in parts
            if programs * warps <= 12
        ]  # fmt: skip
        yield _case(int4.TUNABLE, key, rule, around, shape, block_t, device)


def _single(shapes: Sequence[LinearShape]) -> list[LinearShape]:
    """The layers that are neither those of experts, which `moe.tuning` tunes, nor have weights of 4 bits."""
    return [shape for shape in shapes if shape.experts is None and not shape.int4]


def _kernel(tokens: int, device: torch.device, four_bits: bool = False) -> str:
    """The kernel for this number of tokens, for weights of 4 bits or for others."""
    return _kernels(tokens, device, four_bits)[0]


def _kernels(tokens: int, device: torch.device, four_bits: bool = True) -> list[str]:
    """The kernels for this number of tokens; each but the last refuses some products."""
    fitting = [own for own in REGIMES if own.covers(tokens, capability(device))]
    return [own.kernel for own in fitting if (own.accepts in _FOUR_BITS) == four_bits]


def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _around(value: int, most: int) -> list[int]:
    """Half of `value`, `value` and twice `value`, if from 1 to `most`."""
    return sorted({n for n in (value // 2, value, 2 * value) if 1 <= n <= most})


def _case(
    tunable: Tunable, key: str, rule: Any, around: Sequence[Any], shape: LinearShape, T: int, device: torch.device
) -> Case:
    return Case(tunable, key, rule, tuple(around), lambda: _prepare(shape, T, device, type(rule)), T)


def _prepare(
    shape: LinearShape, T: int, device: torch.device, config_type: type
) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
    rows = 2 * shape.N if shape.gated else shape.N
    random = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=shape.dtype, generator=random)

    x, residual = normal(T, shape.K), normal(T, shape.N) if shape.residual else None
    itemsize = 0.5 if shape.int4 else 1 if shape.fp8 else shape.dtype.itemsize
    copies = max(2, cdiv(_COLD, int(rows * shape.K * itemsize)))
    weights: list[tuple[Tensor, Tensor | None]] = []
    for _ in range(copies):
        weight = normal(rows, shape.K) / shape.K**0.5
        weights.append(_int4(weight) if shape.int4 else fp8_weight(weight, shape) if shape.fp8 else (weight, None))
    activation = "silu" if shape.gated else None
    h, x_scale = quantize(x, blocks=shape.blocks) if shape.fp8 and T > 1 else (x, None)
    out_dtype = torch.float32 if shape.logits else shape.dtype
    out, workspace = torch.empty(T, shape.N, device=device, dtype=out_dtype), Workspace(device)
    turn, pdl = itertools.count(), capability(device) >= 90

    epilogue = Epilogue(x_scale=x_scale, activation=activation, residual=residual)
    base = Product(h, weights[0][0], out, workspace=workspace, pdl=pdl)
    kernels: dict[type, Callable[..., None]] = {
        gemv.GemvConfig: gemv.gemv, gemm_small.GemmSmallConfig: gemm_small.gemm_small, gemm_sm90.GemmSm90Config:
        gemm_sm90.gemm_sm90, gemv_int4.GemvInt4Config: gemv_int4.gemv_int4, int4.Int4Config: int4.gemm_int4,
        gemv_int4_sm90.GemvInt4Sm90Config: gemv_int4_sm90.gemv_int4_sm90,
        int4_small_sm90.Int4SmallSm90Config: int4_small_sm90.gemm_int4_small_sm90,
        int4_sm90.Int4Sm90Config: int4_sm90.gemm_int4_sm90,
    }  # fmt: skip
    kernel = kernels[config_type]

    def run(weight: Tensor, scale: Tensor | None, config: Any) -> None:
        kernel(base._replace(weight=weight, epilogue=epilogue._replace(scale=scale)), config=config)

    expected = reference.linear(x, weights[0][0], None, weights[0][1])
    expected = expected if activation is None else reference.gated(expected, activation)
    expected = expected if residual is None else expected + residual

    def launch(config: Any) -> None:
        weight, scale = weights[next(turn) % copies]
        run(weight, scale, config)

    def check(config: Any) -> None:
        out.fill_(torch.nan)
        run(weights[0][0], weights[0][1], config)
        error = ((out.float() - expected.float()).norm() / expected.float().norm()).item()
        if not error < _TOLERANCE:
            raise NumericsError("a configuration computes something else", expected=f"below {_TOLERANCE}", found=f"{error:.1e}")

    return launch, check


def fp8_weight(weight: Tensor, shape: LinearShape) -> tuple[Tensor, Tensor]:
    """The weight of a layer, or of one of its experts, in FP8, and the scales of its rows or blocks."""
    if not shape.blocks:
        return reference.quantize_fp8(weight)
    block_rows = math.gcd(FP8_BLOCK, shape.N) if shape.gated or shape.experts else FP8_BLOCK
    values, scale = reference.quantize_fp8_blocks(weight, cdiv(len(weight), block_rows))
    return values.contiguous(), scale


def _int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Words and scale words of a weight, rounded to the nearest: how good the scales are does not change the time."""
    groups = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % reference.INT4_CHUNK))
    groups = groups.unflatten(1, (-1, reference.INT4_CHUNK))
    scale = groups.abs().amax(2, keepdim=True).clamp(min=1e-9) / 7.5
    codes = ((groups / scale).round().clamp(-8, 7) + reference.INT4_ZERO).flatten(1)[:, : weight.shape[1]]
    return reference.pack_int4(codes), reference.pack_int4_scale(scale.squeeze(2))


register("gemv", gemv_cases)
register("gemv_int4", gemv_int4_cases)
register("gemv_int4_sm90", gemv_int4_sm90_cases)
register("gemm_int4_small", int4_small_cases)
register("gemm_int4_sm90", int4_sm90_cases)
register("gemm_int4", gemm_int4_cases)
register("gemm_small", gemm_small_cases)
register("gemm_sm90", gemm_cases)
