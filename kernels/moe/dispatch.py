"""`mixture_residual`: the experts of a mixture, for any number of tokens.

`REGIMES` says which kernels compute them. A single token: `one_token`, which also normalizes it. More tokens: they are sorted by
expert (`route`), and each expert that a token uses is read once, or once for each tile of its tokens: by `experts_sm90` on
Hopper, else by `products`. `logits` is the router's product before that.
"""

import torch
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.checks import ACTIVATIONS, check_activations, check_scale, check_tensor
from minirt.kernels.launch import Workspace, capability, require_fp8
from minirt.kernels.linear.dispatch import norm_linear
from minirt.kernels.moe import experts_sm90, one_token, products, router
from minirt.kernels.moe.route import gather, route
from minirt.kernels.moe.router import LogitParts
from minirt.kernels.norm import rms_norm, rms_norm_quantize
from minirt.kernels.quantize import quantize
from minirt.kernels.regimes import Regime

REGIMES = (
    Regime("experts_one_token", "tokens", 1, 1),
    Regime("experts_sm90", "tokens", 2, variant=experts_sm90.last_tokens, capability=90),
    Regime("experts", "tokens", 2, variant=products.last_tokens),
)

ROUTER = (Regime("router", "tokens", 2, variant=router.last_tokens),)  # of one token: the linear layers' kernel


def router_logits(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor, *, workspace: Workspace | None = None, pdl: bool = False
) -> Tensor | LogitParts:
    """rms_norm(x) · weightᵀ, for `mixture_residual`: x [T, H], norm_weight [H] or None (no norm), weight [E, H] → [T, E].

    With two or more tokens, K is split and the partial sums are not added yet (`LogitParts`).
    `workspace`, `pdl`: as for the linear layers.
    """
    if x.shape[0] > 1:
        return router.router_logits(x, norm_weight, eps, weight, pdl=pdl)
    return norm_linear(x, norm_weight, eps, weight, workspace=workspace, pdl=pdl, check=False)


def mixture_residual(
    h: Tensor,
    logits: Tensor | LogitParts,
    gate_up: Tensor,
    down: Tensor,
    residual: Tensor,
    top_k: int,
    normalize: bool,
    activation: str,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    pdl: bool = False,
    check: bool = True,
) -> Tensor:
    """residual + Σ_j w_j · expert_j(h) + sigmoid(shared_gate) · shared → [T, H]; see `reference.route` and `reference.mixture`.

    Nothing waits for the device, and all shapes depend only on T. With FP8 weights, the activations of two or more tokens are
    quantized, each token with its own scale or, if the weights have scales of blocks, with one for each 128 channels.

    Args:
        h: [T, H], the normalized activations; with `norm_weight`, they are normalized first. residual: [T, H].
        logits: [T, E], of the router, or their parts (`router_logits`).
        gate_up: [E, 2I, H], gate rows first. down: [E, H, I].
        norm_weight, eps: [H], of RMSNorm, or None.
        gate_up_scale, down_scale: [E, 2I] and [E, H] fp32 of FP8 weights. Of weights in blocks of g rows and 128 columns
            [E, 2I / g, ⌈H / 128⌉] and [E, ⌈H / g⌉, ⌈I / 128⌉]; each has its own g, a power of two up to 128.
        shared, shared_gate: [T, H] and [T, 1], the output of an expert that every token uses, and its gate; or None.
        pdl: whether the kernels overlap with the kernel before them in the stream (see `minirt.kernels.pdl`).
    """
    if check:
        _check(h, logits, gate_up, down, residual, top_k, activation, gate_up_scale, down_scale, shared, shared_gate)
        if norm_weight is not None:
            check_tensor("norm_weight", norm_weight, (h.shape[1],), h.dtype, h.device)
    T, H = h.shape
    out = torch.empty_like(residual)
    if T == 0:
        return out
    pairs, inter, cc = T * top_k, down.shape[2], capability(h.device)
    inner = torch.empty(pairs, inter, dtype=h.dtype, device=h.device)
    if isinstance(logits, Tensor) and T == 1:
        one_token.gate_up(h, norm_weight, eps, logits, gate_up, activation, inner, gate_up_scale, pdl)
        return one_token.down(inner, logits, down, residual, out, normalize, down_scale, shared, shared_gate, pdl)
    quantized = gate_up_scale is not None
    blocks = gate_up_scale is not None and gate_up_scale.ndim == 3
    rows = torch.empty(pairs, H, dtype=h.dtype, device=h.device)
    if cc == 90 and experts_sm90.accepts(H, inter, h.dtype, gate_up, down, gate_up_scale, down_scale):
        block_t = experts_sm90.block_t(T, max(H, inter), gate_up.element_size(), blocks)
        routing = route(logits, top_k, normalize, block_t, pdl=pdl, check=False)
        x, x_scale = gather(h, routing, quantized, norm_weight, eps, blocks=blocks, pdl=pdl)
        experts_sm90.launch(x, gate_up, inner, routing, None, activation, gate_up_scale, x_scale, pdl)
        # Early: the next kernel fetches weights, by lists that are complete, while this one waits.
        inner, inner_scale = _quantized(inner, quantized, blocks, pdl, early=True)
        experts_sm90.launch(inner, down, rows, routing, None, None, down_scale, inner_scale, pdl)
    else:
        routing = route(logits, top_k, normalize, products.block_t(T), pdl=pdl, check=False)
        x, x_scale = _normalized(h, norm_weight, eps, quantized, blocks, pdl)
        first = products.choose_config(T, x.element_size(), True, cc)
        products.gate_up(x, gate_up, routing, activation, inner, first, gate_up_scale, x_scale)
        inner, inner_scale = _quantized(inner, quantized, blocks, pdl)
        second = products.choose_config(T, x.element_size(), False, cc)
        products.down(inner, down, routing, rows, second, down_scale, inner_scale)
    return products.combine(residual, rows, routing.weights, out, shared, shared_gate, pdl=pdl)


def _quantized(
    h: Tensor, quantized: bool, blocks: bool, pdl: bool, early: bool = False
) -> tuple[Tensor, Tensor | None]:
    """h quantized, if asked for, and its scales."""
    return quantize(h, blocks=blocks, early=early, pdl=pdl, check=False) if quantized else (h, None)


def _normalized(
    h: Tensor, norm_weight: Tensor | None, eps: float, quantized: bool, blocks: bool, pdl: bool
) -> tuple[Tensor, Tensor | None]:
    """h normalized and quantized, each if asked for, and its scales."""
    if norm_weight is None:
        return _quantized(h, quantized, blocks, pdl)
    if quantized:
        return rms_norm_quantize(h, norm_weight, eps, blocks=blocks, pdl=pdl, check=False)
    return rms_norm(h, norm_weight, eps, pdl=pdl, check=False), None


def _check(
    h: Tensor, logits: Tensor | LogitParts, gate_up: Tensor, down: Tensor, residual: Tensor, top_k: int, activation: str,
    gate_up_scale: Tensor | None, down_scale: Tensor | None, shared: Tensor | None, shared_gate: Tensor | None,
) -> None:  # fmt: skip
    check_activations("h", h)
    (T, H), dtype, device = h.shape, h.dtype, h.device
    if isinstance(logits, LogitParts):
        check_tensor("logits.sums", logits.sums, (None, T, None), torch.float32, device)
        E = logits.sums.shape[2]
    else:
        check_tensor("logits", logits, (T, None), dtype, device)
        E = logits.shape[1]
    if not 1 <= top_k <= E:
        raise InputError("wrong number", where="top_k", expected=f"from 1 to {E}", found=top_k)
    if activation not in ACTIVATIONS:
        raise InputError("unknown activation", where="activation", expected=" or ".join(ACTIVATIONS), found=activation)
    if (gate_up_scale is None) != (down_scale is None):
        raise InputError("both scales belong to FP8 experts", where="gate_up_scale, down_scale", found="one of them")
    stored = dtype if gate_up_scale is None else torch.float8_e4m3fn
    check_tensor("down", down, (E, H, None), stored, device)
    inter = down.shape[2]
    check_tensor("gate_up", gate_up, (E, 2 * inter, H), stored, device)
    check_tensor("residual", residual, (T, H), dtype, device)
    if gate_up_scale is not None and down_scale is not None:
        require_fp8(device)
        if gate_up_scale.ndim != down_scale.ndim:
            found = f"{list(gate_up_scale.shape)}, {list(down_scale.shape)}"
            raise InputError("both scales are of rows or of blocks", where="gate_up_scale, down_scale", found=found)
        for name, scale, rows, K in (("gate_up_scale", gate_up_scale, 2 * inter, H), ("down_scale", down_scale, H, inter)):
            rest = (None,) * (scale.ndim - 1)
            check_tensor(name, scale, (E, *rest), torch.float32, device)
            check_scale(f"{name}[0]", scale[0], rows, K, name == "gate_up_scale")
    if (shared is None) != (shared_gate is None):
        raise InputError("a shared expert has an output and a gate", where="shared, shared_gate", found="one of them")
    if shared is not None and shared_gate is not None:
        check_tensor("shared", shared, (T, H), dtype, device)
        check_tensor("shared_gate", shared_gate, (T, 1), dtype, device)


def cost(T: int, k: int, touched: int, H: int, inter: int, itemsize: int, weight_itemsize: int) -> tuple[int, int]:
    """(bytes read and written, floating-point operations) of T tokens with k experts each, `touched` distinct ones in all."""
    return 3 * touched * H * inter * weight_itemsize + 3 * T * H * itemsize, 6 * T * k * H * inter
