"""`mixture_residual`: the experts of a mixture, for any number of tokens.

`REGIMES` says which kernels compute them. Those for few tokens also normalize them. For the others, tokens are sorted by expert
(`route`), and each expert that a token uses is read once, or once for each tile of its tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels import reference
from minirt.kernels.checks import check_arguments, check_tensor
from minirt.kernels.launch import capability
from minirt.kernels.linear.gemv import gemv
from minirt.kernels.linear.product import Epilogue, Norm, Product
from minirt.kernels.moe import experts_int4_sm90, experts_sm90, few_tokens, few_tokens_int4, products, products_int4, router
from minirt.kernels.moe.mixture import Mixture, SharedOutput
from minirt.kernels.moe.route import gather, last_tokens, route
from minirt.kernels.moe.router import LogitParts
from minirt.kernels.norm import rms_norm, rms_norm_quantize
from minirt.kernels.quantize import quantize
from minirt.kernels.reference import SharedExpert
from minirt.kernels.regimes import Limits, Regime, SumOrder, covering, up_to
from minirt.kernels.side_stream import SideStream
from minirt.kernels.special_limits import SPECIAL


@dataclass(frozen=True, eq=False, kw_only=True)
class MixtureRegime(Regime):
    """A regime of the mixtures of experts.

    Args:
        launch: writes the output of a mixture that `accepts` does not refuse.
        suits: what the kernels need besides `limits`.
    """

    launch: Callable[[Mixture], None]
    limits: Limits
    sums: SumOrder
    suits: Callable[[Mixture], bool] = lambda mixture: True

    def accepts(self, m: Mixture) -> bool:
        """Whether the kernels can compute this mixture."""
        limits = self.limits
        return m.format in limits.formats and (limits.alignment == 1 or m.aligned(limits.alignment)) and self.suits(m)


def _few_tokens(m: Mixture, kernels: ModuleType = few_tokens) -> None:
    T, _, inter = m.sizes
    logits = cast("Tensor", m.logits)  # as `few_tokens.suits` says
    expert = m.shared if isinstance(m.shared, SharedExpert) else None
    inner = m.h.new_empty(T * (m.top_k + (expert is not None)), inter)
    gate = kernels.gate_up(m.first_product(m.h, inner, m.norm), logits, m.top_k, expert)
    down = m.second_product(inner, m.out, residual=m.residual)
    shared = m.shared_output() if expert is None else expert
    kernels.down(down, logits, m.top_k, m.normalize, shared, gate, factors=m.factors)


def _sm90(m: Mixture) -> None:
    T, H, inter = m.sizes
    kernels: ModuleType = experts_int4_sm90 if m.four_bits else experts_sm90
    if m.four_bits:
        block_t = experts_int4_sm90.block_t(T, m.top_k, len(m.gate_up))
    else:
        block_t = experts_sm90.block_t(T, max(H, inter), m.gate_up.element_size(), m.blocks)
    routing = route(m.logits, m.top_k, m.normalize, block_t, factors=m.factors, pdl=m.pdl, check=False)
    x, x_scale = gather(m.h, routing, m.quantized, m.norm, blocks=m.blocks, pdl=m.pdl)
    h = kernels.launch(m.first_product(x, m.h.new_empty(T * m.top_k, inter), x_scale=x_scale), routing)
    # Early: the next kernel fetches weights, by lists that are complete, while this one waits.
    h, h_scale = _quantized(m, h, early=True)
    rows = kernels.launch(m.second_product(h, m.h.new_empty(T * m.top_k, H), h_scale), routing)
    products.combine(m.residual, rows, routing.weights, m.out, m.shared_output(), pdl=m.pdl)


def _tiles(m: Mixture, kernels: ModuleType = products) -> None:
    T, H, inter = m.sizes
    routing = route(m.logits, m.top_k, m.normalize, kernels.block_t(T), factors=m.factors, pdl=m.pdl, check=False)
    x, x_scale = _normalized(m)
    h = kernels.launch(m.first_product(x, m.h.new_empty(T * m.top_k, inter), x_scale=x_scale), routing)
    h, h_scale = _quantized(m, h)
    rows = kernels.launch(m.second_product(h, m.h.new_empty(T * m.top_k, H), h_scale), routing)
    products.combine(m.residual, rows, routing.weights, m.out, m.shared_output(), pdl=m.pdl)


def _quantized(m: Mixture, h: Tensor, early: bool = False) -> tuple[Tensor, Tensor | None]:
    """h quantized, if the experts are FP8, and its scales."""
    return quantize(h, blocks=m.blocks, early=early, pdl=m.pdl, check=False) if m.quantized else (h, None)


def _normalized(m: Mixture) -> tuple[Tensor, Tensor | None]:
    """The activations normalized and quantized, each if asked for, and their scales."""
    if m.norm is None:
        return _quantized(m, m.h)
    if m.quantized:
        return rms_norm_quantize(m.h, m.norm.weight, m.norm.eps, blocks=m.blocks, pdl=m.pdl, check=False)
    return rms_norm(m.h, m.norm.weight, m.norm.eps, pdl=m.pdl, check=False), None


# The first regime that covers the tokens and accepts the mixture computes it.
_ALL = ("fp16", "fp32", "fp8", "fp8_fp32", "fp8_blocks", "fp8_blocks_fp32")
_INT4 = ("int4", "int4_fp32")
REGIMES = (
    MixtureRegime(
        "experts_few_tokens", "tokens", 1, few_tokens.MOST, variant=few_tokens.last_tokens, launch=_few_tokens,
        suits=few_tokens.suits, limits=Limits(_ALL, norm=True), sums=SumOrder("threads"),
    ),
    MixtureRegime(
        "experts_few_tokens_int4", "tokens", 1, few_tokens_int4.MOST, variant=up_to(1, few_tokens_int4.MOST),
        launch=partial(_few_tokens, kernels=few_tokens_int4), suits=few_tokens_int4.suits,
        limits=Limits(_INT4, norm=True, alignment=16), sums=SumOrder("threads"),
    ),
    MixtureRegime(
        "experts_sm90", "tokens", 1, variant=last_tokens, capability=90, launch=_sm90, suits=experts_sm90.suits,
        limits=SPECIAL[90].experts["experts_sm90"], sums=SumOrder("steps", accumulator="fp32 steps", invariant=True),
    ),
    MixtureRegime(
        "experts_int4_sm90", "tokens", 1, variant=last_tokens, capability=90, launch=_sm90,
        limits=SPECIAL[90].experts["experts_int4_sm90"], sums=SumOrder("steps", invariant=True),
    ),
    MixtureRegime(
        "experts_int4", "tokens", 1, variant=last_tokens, launch=partial(_tiles, kernels=products_int4),
        limits=Limits(_INT4), sums=SumOrder("steps", invariant=True),
    ),
    MixtureRegime(  # in FP8, tiles of few rows use an instruction that adds in another order
        "experts", "tokens", 1, variant=last_tokens, launch=_tiles, limits=Limits(_ALL),
        suits=lambda m: not (m.invariant and m.quantized), sums=SumOrder("steps", accumulator="fp32 steps", invariant=True),
    ),
)  # fmt: skip
ROUTER = (
    Regime(
        "gemv", "tokens", 1, few_tokens.MOST, variant=up_to(1, few_tokens.MOST), limits=Limits(("fp16", "fp32"), norm=True),
        sums=SumOrder("threads"),
    ),
    Regime(
        "router", "tokens", 1, variant=router.last_tokens, limits=Limits(("fp16", "fp32"), norm=True),
        sums=SumOrder("steps", splits=True, by_tokens=True, invariant=True),
    ),
)  # fmt: skip


def router_logits(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor, top_k: int, *, bias: Tensor | None = None,
    four_bits: bool = False, invariant: bool = False, pdl: bool = False,
) -> Tensor | LogitParts:  # fmt: skip
    """rms_norm(x) · weightᵀ + bias, for `mixture_residual`: x [T, H], norm_weight [H] or None (no norm), weight [E, H] → [T, E].

    If the kernels of few tokens do not take the step, K is split, and the partial sums are not added yet (`LogitParts`).

    top_k: experts of a token. four_bits: whether the experts have 4 bits. invariant: as of `Mixture`. pdl: as for the linear
    layers.
    """
    T, E = x.shape[0], weight.shape[0]
    if invariant or not reference.few_tokens(T, top_k, E) or (four_bits and few_tokens_int4.MOST < T):
        return router.router_logits(x, norm_weight, eps, weight, bias=bias, pdl=pdl, invariant=invariant)
    logits = x.new_empty(T, E)
    if T:
        epilogue = Epilogue() if bias is None else Epilogue(bias=bias)
        gemv(Product(x, weight, logits, None if norm_weight is None else Norm(norm_weight, eps), epilogue, pdl=pdl))
    return logits


def mixture_residual(
    h: Tensor, logits: Tensor | LogitParts, gate_up: Tensor, down: Tensor, residual: Tensor | None, top_k: int,
    normalize: bool, activation: str, *, norm_weight: Tensor | None = None, eps: float = 0.0,
    gate_up_scale: Tensor | None = None, down_scale: Tensor | None = None,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, limit: float = 0.0, alpha: float = 1.0,
    shared: SharedExpert | SharedOutput | None = None, side: SideStream | None = None, factors: Tensor | None = None,
    invariant: bool = False, pdl: bool = False, check: bool = True,
) -> Tensor:  # fmt: skip
    """residual + Σ_j w_j · expert_j(h) + sigmoid(gate) · shared → [T, H]: `mixture` of separate operands. residual None: 0.

    norm_weight, eps: [H], of the RMSNorm of h, or None: h is normalized. The others are the fields of `Mixture`.
    """
    norm = None if norm_weight is None else Norm(norm_weight, eps)
    return mixture(
        Mixture(
            h, logits, gate_up, down, residual, torch.empty_like(h), top_k, normalize, activation, norm, gate_up_scale,
            down_scale, shared, side, pdl, gate_up_bias, down_bias, limit, alpha, factors, invariant,
        ),
        check=check,
    )  # fmt: skip


def mixture(m: Mixture, *, check: bool = True) -> Tensor:
    """Compute a mixture of experts, see `reference.route` and `reference.mixture`. Returns `m.out`.

    All shapes depend only on T. With FP8 weights, the activations of more than `reference.few_tokens` are quantized, each token
    with a separate scale or, if the weights have scales of blocks, with one for each 128 channels.

    Raises:
        InputError: the operands do not fit each other. Only with `check`.
    """
    if check:
        _check(m)
    if m.h.shape[0]:
        regime(m).launch(m)
    return m.out


def regime(m: Mixture) -> MixtureRegime:
    """The regime of a mixture.

    Raises:
        InputError: no kernel computes it in the order of an invariant step.
    """
    regimes = covering(REGIMES, m.h.shape[0], capability(m.h.device), None, m.invariant)
    for candidate in regimes:
        if candidate.accepts(m):
            return candidate
    raise InputError("no kernel computes this mixture", where="mixture", found=f"{m.format}, invariant={m.invariant}")


def _check(m: Mixture) -> None:
    logits = m.logits
    if isinstance(logits, LogitParts):
        check_tensor("logits.sums", logits.sums, (None, None, None), torch.float32, m.h.device)
        logits = m.h.new_empty(logits.sums.shape[1:])
    check_arguments(
        "mixture_residual",
        **m._asdict() | {
            "logits": logits, "norm_weight": None if m.norm is None else m.norm.weight,
            "residual": m.h if m.residual is None else m.residual,
        },
    )  # fmt: skip
    (T, H), dtype, device = m.h.shape, m.h.dtype, m.h.device
    if m.factors is not None:
        check_tensor("factors", m.factors, (len(m.gate_up),), dtype, device)
    if isinstance(m.shared, SharedExpert) and (m.limit or m.gate_up_bias is not None or m.down_bias is not None):
        what = "experts with biases or a limit do not compute it"
        raise InputError(what, where="shared", expected="its output", found="a SharedExpert")
    if isinstance(m.shared, SharedOutput):
        check_tensor("shared.output", m.shared.output, (T, H), dtype, device)
        check_tensor("shared.gate", m.shared.gate, (T, 1), dtype, device)
    elif m.shared is not None:
        weights = m.gate_up, m.down, m.gate_up_scale, m.down_scale
        if not reference.computes_shared(T, m.top_k, *weights, m.shared):
            raise InputError("these experts do not compute it", where="shared", expected="its output", found="a SharedExpert")
        check_tensor("shared.gate", m.shared.gate, (1, H), dtype, device)
        for name, tensor in m.shared._asdict().items():
            if tensor is not None:
                check_tensor(f"shared.{name}", tensor, tensor.shape, tensor.dtype, device)


def cost(T: int, k: int, touched: int, H: int, inter: int, itemsize: int, weight_itemsize: int) -> tuple[int, int]:
    """(bytes read and written, floating-point operations) of T tokens with k experts each, `touched` distinct ones in all."""
    return 3 * touched * H * inter * weight_itemsize + 3 * T * H * itemsize, 6 * T * k * H * inter
