"""Linear layers with what is fused around them, for any number of tokens: norm + linear, norm + gate/up, linear + residual.

`REGIMES` says which kernel computes a product, by its number of tokens, the format of the weight and the GPU. Kernels for one
token also compute the norm. With two or more tokens, the norm is a separate kernel before the product.

Weights have the dtype of the activations, or are float8_e4m3fn with a `scale` fp32 (compute capability 8.9 and later): [N], one
for each row, or [⌈N / g⌉, ⌈K / 128⌉], one for each block of g rows and 128 columns. With FP8 weights, the activations of two or
more tokens are quantized too, with a scale for each token or, if the weight has blocks, for each token and 128 channels; a single
token keeps 16-bit activations (`reference.linear_fp8`, `linear_fp8_blocks`). 4-bit weights are words with scale words
(`int4_words`), and activations are not quantized.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.checks import check_activations, check_arguments, check_tensor
from minirt.kernels.compile.tuning import Family
from minirt.kernels.launch import Workspace, capability
from minirt.kernels.linear import (
    gemm,
    gemm_int4,
    gemm_int4_sm90,
    gemm_int4_small_sm90,
    gemm_sm90,
    gemm_small,
    gemv,
    gemv_int4,
    gemv_int4_sm90,
)
from minirt.kernels.linear.product import Epilogue, LowRank, Norm, Product, RowMaxima
from minirt.kernels.norm import rms_norm, rms_norm_quantize
from minirt.kernels.quantize import quantize
from minirt.kernels.regimes import Limits, Regime, SumOrder, covering
from minirt.kernels.special_limits import SPECIAL


@dataclass(frozen=True, eq=False, kw_only=True)
class LinearRegime(Regime):
    """A regime of the linear layers.

    Args:
        launch: runs the kernel on operands that `accepts` does not refuse.
        accepts: whether the kernel can compute this product, whose weight has a format that `limits` declares.
        family: how the kernel gets its launch configuration. None: it has none.
        row_maxima_tiles: how many row maxima the kernel stores for a row of an LM head's logits; 0: none.
        fetches_early: whether the kernel gains by an early start, because it fetches weights while it waits for its input.
    """

    launch: Callable[..., None]
    accepts: Callable[[Product], bool] = lambda product: True
    family: Family[Any] | None = None
    row_maxima_tiles: Callable[[Product], int] = lambda product: 0
    fetches_early: bool = False


def _of(launch: Callable[..., None], family: Family[Any], first: int, last: int | None = None, **rest: Any) -> LinearRegime:
    """The regime of a family's kernel, on the axis of tokens."""
    return LinearRegime(family.name, "tokens", first, last, launch=launch, family=family, **rest)


# The first regime that covers the tokens, declares the weight's format and accepts the product computes it. Those of one token
# also compute the norm; with more tokens, kernels before the product normalize and quantize x (`_prepared`).
_GEMM_SM90_TOKENS = 65  # from this many tokens on, `gemm_sm90` is faster than `gemm_small`
_FP8 = ("fp8", "fp8_blocks")
_INT4 = ("int4", "int4_fp32")
REGIMES = (
    _of(
        gemv_int4_sm90.gemv_int4_sm90, gemv_int4_sm90.FAMILY, 1, 1, capability=90, accepts=gemv_int4_sm90.accepts,
        limits=SPECIAL[90].linear["gemv_int4_sm90"], sums=SumOrder("warps"),
    ),
    _of(
        gemm_int4_small_sm90.gemm_int4_small_sm90, gemm_int4_small_sm90.FAMILY, 1, gemm_int4_small_sm90.MAX_TOKENS, capability=90,
        limits=SPECIAL[90].linear["gemm_int4_small_sm90"], sums=SumOrder("warps"),
    ),
    _of(
        gemm_int4_sm90.gemm_int4_sm90, gemm_int4_sm90.FAMILY, gemm_int4_small_sm90.MAX_TOKENS + 1, capability=90,
        accepts=gemm_int4_sm90.accepts, variant=gemm_int4_sm90.token_regime, padded=gemm_int4_sm90.padded_tokens,
        limits=SPECIAL[90].linear["gemm_int4_sm90"], sums=SumOrder("steps", splits=True, by_tokens=True),
    ),
    _of(gemv_int4.gemv_int4, gemv_int4.FAMILY, 1, 1, limits=Limits(_INT4, norm=True), sums=SumOrder("threads")),
    _of(
        gemm_int4.gemm_int4, gemm_int4.FAMILY, 1, gemm_int4.MAX_TOKENS, variant=gemm_int4.token_block,
        padded=gemm_int4.token_block, limits=Limits(_INT4),
        sums=SumOrder("steps", splits=True, by_tokens=True, invariant=True),
    ),
    LinearRegime(  # its order is that of the kernel that multiplies the unpacked weight
        "gemm_unpacked", "tokens", gemm_int4.MAX_TOKENS + 1, launch=lambda product: gemm_int4.gemm_unpacked(product, launch),
        limits=Limits(_INT4), sums=SumOrder("steps", splits=True, by_tokens=True, invariant=True),
    ),
    _of(gemv.gemv, gemv.FAMILY, 1, 1, limits=Limits(("fp16", "fp32", *_FP8), norm=True), sums=SumOrder("threads")),
    _of(
        gemm_sm90.gemm_sm90, gemm_sm90.FAMILY, _GEMM_SM90_TOKENS, capability=90, accepts=gemm_sm90.accepts,
        variant=gemm_sm90.token_regime, padded=gemm_sm90.padded_tokens, row_maxima_tiles=gemm_sm90.row_maxima_tiles,
        fetches_early=True, limits=SPECIAL[90].linear["gemm_sm90"],
        sums=SumOrder("steps", splits=True, by_tokens=True, accumulator="fp32 steps", invariant=True),
    ),
    _of(
        gemm_small.gemm_small, gemm_small.FAMILY, 1, gemm_small.MAX_TOKENS, variant=gemm_small.token_block,
        padded=gemm_small.token_block, row_maxima_tiles=gemm_small.row_maxima_tiles,
        limits=Limits(("fp16", "fp32", *_FP8), row_maxima=True),
        sums=SumOrder("steps", splits=True, by_tokens=True, accumulator="fp32 steps", invariant=True),
    ),
    _of(
        gemm.gemm, gemm.FAMILY, gemm_small.MAX_TOKENS + 1, variant=gemm.token_regime, limits=Limits(("fp16", "fp32", *_FP8)),
        sums=SumOrder("steps", accumulator="fp32 steps", invariant=True),
    ),
)  # fmt: skip
# Steps in which the norm (or quantization) before a product triggers before it waits. With few tokens, the product's programs
# are then placed on SMs earlier. Programs of `gemm_sm90`, one for each SM, start to fetch weights. In other steps, the
# product's programs would crowd onto the SMs that become idle first.
EARLY = (Regime("few tokens", "tokens", 1, 32), Regime("gemm_sm90", "tokens", _GEMM_SM90_TOKENS, 256, capability=90))

LowRankOf = Callable[[torch.Tensor, Norm | None], LowRank]  # y of x, and of the norm that a product of one token computes itself

CASES = [
    {"T": T, "N": N, "K": K}
    for T, N, K in (
        (1, 96, 576), (1, 131, 97), (1, 24, 1100), (2, 17, 64), (3, 131, 577),
        (16, 96, 1536), (17, 192, 576), (77, 67, 208), (128, 80, 128), (129, 40, 96),
    )
]  # fmt: skip


def norm_linear(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None = None,
    out: Tensor | None = None, *, scale: Tensor | None = None, workspace: Workspace | None = None,
    out_dtype: torch.dtype | None = None, row_maxima: RowMaxima | None = None, multiplier: float = 1.0,
    softcap: float = 0.0, adapters: LowRankOf | None = None, pdl: bool = False, check: bool = True,
) -> Tensor:  # fmt: skip
    """rms_norm(x) · weightᵀ + bias: x [T, K], norm_weight [K] or None (no norm), weight [N, K], bias [N] → [T, N].

    The output has x's dtype unless `out` or `out_dtype` says otherwise. Without a workspace, K is not split. `row_maxima`
    receives the largest fp32 value of each row in each tile; its width must be `row_maxima_tiles` for T rows. With `pdl`, the
    kernels overlap with the kernel before them in the stream (sm_90 and later).

    For an LM head: the logits are multiplied by `multiplier`, then bounded by softcap · tanh(y / softcap), unless `softcap` is 0.
    """
    if check:
        check_arguments("norm_linear", x=x, norm_weight=norm_weight, weight=weight, bias=bias, scale=scale)
    epilogue = Epilogue(scale, None, bias)
    if multiplier != 1.0 or softcap != 0.0 or row_maxima is not None:
        factor, cap = None if multiplier == 1.0 else float(multiplier), None if softcap == 0.0 else float(softcap)
        maxima = () if row_maxima is None else (row_maxima.values, row_maxima.values.stride(0), row_maxima.logits_needed)
        epilogue = Epilogue(scale, None, bias, None, None, factor, cap, *maxima)
    out = _output(x, weight, out_dtype or x.dtype) if out is None else out
    norm = None if norm_weight is None else Norm(norm_weight, eps)
    product = Product(x, weight, out, norm, epilogue, workspace, pdl)
    if check:
        _check_logits(product)
    return linear(product, adapters)


def norm_gate_up(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor, activation: str, out: Tensor | None = None,
    bias: Tensor | None = None, *, scale: Tensor | None = None, workspace: Workspace | None = None,
    adapters: LowRankOf | None = None, pdl: bool = False, check: bool = True,
) -> Tensor:  # fmt: skip
    """act(gate) · up of rms_norm(x) [T, K]: weight [2I, K] and bias [2I], gate rows first → [T, I]."""
    if check:
        check_arguments(
            "norm_gate_up", x=x, norm_weight=norm_weight, weight=weight, activation=activation, bias=bias, scale=scale, out=out
        )
    out = _output(x, weight, x.dtype, 2) if out is None else out
    norm = None if norm_weight is None else Norm(norm_weight, eps)
    return linear(Product(x, weight, out, norm, Epilogue(scale, None, bias, activation), workspace, pdl), adapters)


def linear_residual(
    x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *,
    scale: Tensor | None = None, workspace: Workspace | None = None, adapters: LowRankOf | None = None, pdl: bool = False,
    check: bool = True,
) -> Tensor:  # fmt: skip
    """x · weightᵀ + bias + residual: x [T, K], weight [N, K] → [T, N]. `out` may be `residual`."""
    if check:
        check_arguments("linear_residual", x=x, weight=weight, residual=residual, bias=bias, scale=scale, out=out)
    out = _output(x, weight, x.dtype) if out is None else out
    return linear(Product(x, weight, out, None, Epilogue(scale, None, bias, None, residual), workspace, pdl), adapters)


def linear(product: Product, adapters: LowRankOf | None = None) -> Tensor:
    """Compute a product, its norm and its epilogue, without checks. x is neither normalized nor quantized yet. Returns `out`."""
    T = product.x.shape[0]
    if T:
        if T > 1 or product.invariant:
            product = _prepared(product)
        if adapters is not None:
            if product.format not in ("fp16", "fp32"):
                what, hint = "no kernel adds adapters to this product", "use `add_adapters` after it"
                raise InputError(what, where="adapters", expected="a weight of 16 or 32 bits", found=product.format, hint=hint)
            product = product._replace(low_rank=adapters(product.x, product.norm))
        regime(product).launch(product)
    return product.out


def regime(product: Product, cc: int | None = None) -> LinearRegime:
    """The regime of a product. With two or more tokens, or if it is invariant, its x is already normalized and, if the weight is
    fp8, quantized.

    Args:
        cc: compute capability. None: that of the weight's device.
    Raises:
        InputError: no kernel computes the product.
    """
    cc, T, format = capability(product.weight.device) if cc is None else cc, product.x.shape[0], product.format
    for candidate in covering(REGIMES, T, cc, format, product.invariant):
        if candidate.accepts(product):
            return candidate
    raise InputError("no kernel computes this product", where="regime", found=f"{T} tokens, a weight in {format}")


def launch(product: Product) -> None:
    """Write the output of a product, without checks. Its x must be as for `regime`."""
    regime(product).launch(product)


def row_maxima_tiles(
    rows: int, weight: Tensor, dtype: torch.dtype, scale: Tensor | None = None, workspace: Workspace | None = None
) -> int:
    """The width of `RowMaxima.values`: how many row maxima an LM head stores for each of `rows` rows of fp32 logits. 0: none.

    Args:
        weight: the LM head's weight [V, H], of `dtype` or fp8.
        dtype: dtype of the activations.
        scale: that of an fp8 weight.
        workspace: the product's, if it is invariant.
    """
    if rows == 0 or gemm_int4.is_int4(weight):
        return 0
    # The regimes look only at shapes, dtypes and addresses, so tensors on the meta device will do.
    invariant = workspace is not None and workspace.invariant
    x = torch.empty(rows, weight.shape[1], dtype=weight.dtype if rows > 1 or invariant else dtype, device="meta")
    out = torch.empty(rows, weight.shape[0], dtype=torch.float32, device="meta")
    product = Product(x, weight, out, epilogue=Epilogue(scale), workspace=workspace if invariant else None)
    return regime(product).row_maxima_tiles(product)


def fetches_early(tokens: int, device: torch.device) -> bool:
    """Whether a product of `tokens` tokens fetches weights while the kernel before it runs, if that kernel triggers early."""
    return _fetches_early(tokens, capability(device))


@lru_cache(4096)
def _fetches_early(tokens: int, cc: int) -> bool:
    return any(regime.fetches_early for regime in covering(REGIMES, tokens, cc))


def _output(x: Tensor, weight: Tensor, dtype: torch.dtype, rows: int = 1) -> Tensor:
    """`rows`: of the weight, for each output."""
    return x.new_empty(x.shape[0], weight.shape[0] // rows, dtype=dtype)


def _prepared(product: Product) -> Product:
    """The product with x normalized and quantized, each if asked for, by kernels that run before it."""
    x, norm, ep, pdl = product.x, product.norm, product.epilogue, product.pdl
    if ep.scale is None or gemm_int4.is_int4(product.weight):
        if norm is None:
            return product
        return product.with_x(rms_norm(x, norm.weight, norm.eps, early=triggers_early(x), pdl=pdl, check=False))
    blocks, early = ep.scale.ndim == 2, triggers_early(x)
    if norm is None:
        x, x_scale = quantize(x, blocks=blocks, early=early, pdl=pdl, check=False)
    else:
        x, x_scale = rms_norm_quantize(x, norm.weight, norm.eps, blocks=blocks, early=early, pdl=pdl, check=False)
    return product.with_x(x, x_scale)


def triggers_early(x: Tensor) -> bool:
    """Whether a norm, or quantization, of x [T, …] triggers before it waits, because a product follows."""
    return bool(covering(EARLY, x.shape[0], capability(x.device)))


def _check_logits(product: Product) -> None:
    """Check what only an LM head has: an output of another dtype than x, a cap, row maxima."""
    x, weight, out, ep = product.x, product.weight, product.out, product.epilogue
    check_activations("out", out)
    check_tensor("out", out, (x.shape[0], weight.shape[0]), out.dtype, x.device)
    if ep.multiplier is not None and not isfinite(ep.multiplier):
        raise InputError("not finite", where="multiplier", found=ep.multiplier)
    if ep.softcap is not None and not 0 < ep.softcap < inf:
        raise InputError("not a cap", where="softcap", expected="a positive number, or 0 for no cap", found=ep.softcap)
    if ep.row_maxima is None:
        return
    values, tiles = ep.row_maxima, row_maxima_tiles(x.shape[0], weight, x.dtype, ep.scale)
    if not tiles:
        what, shown = "no kernel stores row maxima of this product", f"{x.shape[0]} rows of {x.dtype}"
        raise InputError(what, where="row_maxima", expected="None", found=shown)
    if (values.dtype, tuple(values.shape), values.stride(-1)) != (torch.int64, (x.shape[0], tiles), 1):
        expected, shown = f"int64 [{x.shape[0]}, {tiles}], rows contiguous", f"{values.dtype} {list(values.shape)}"
        raise InputError("wrong tensor", where="row_maxima.values", expected=expected, found=shown)
    if ep.logits_needed is None:
        raise InputError("missing", where="row_maxima.logits_needed", expected="an int32 tensor of one value")
    check_tensor("row_maxima.logits_needed", ep.logits_needed, (1,), torch.int32, x.device)


def cost(
    T: int, N: int, K: int, itemsize: int, *, weight_itemsize: int | None = None, gated: bool = False, residual: bool = False
) -> tuple[int, int]:
    """(bytes read and written, floating-point operations) of x [T, K] by weight [N, K] (gated: [2N, K]) → [T, N].

    `itemsize` is the item size of the activations, and of the weight unless `weight_itemsize` is given.
    """
    rows = 2 * N if gated else N
    weights = rows * K * (weight_itemsize or itemsize)
    return weights + T * (K + N * (2 if residual else 1)) * itemsize, 2 * T * rows * K
