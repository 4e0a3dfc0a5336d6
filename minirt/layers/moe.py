"""`MoE`: the residual layer of a mixture of experts (Shazeer et al. 2017), with a shared expert or without; `MLPAndMoE`."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minirt.device import compute_capability, is_gpu
from minirt.errors import ConfigError
from minirt.kernels import reference
from minirt.kernels.reference import SharedExpert
from minirt.layers.base import Forward, Layer, LinearOp, checkpoint_names, register, triton_unsupported
from minirt.modeling.config import ModelConfig
from minirt.modeling.parameters import OF_ADDED, NormWeight, PackedExperts, PackedLinear, Part, Shard, Values
from minirt.step.batch import Batch

if TYPE_CHECKING:
    from minirt.kernels.side_stream import SideStream


class MoE(Layer):
    """x + Σ_j w_j · expert_j(norm(x)) over the k experts that the router chooses for a token, x [T, H], or [R, H] after `Select`.

    An expert is a gated MLP, without biases unless `config.moe` has them, as it has the sizes. The router and the gate of the
    shared expert are never quantized.

    Args:
        norm: checkpoint name of the norm of the layer's input.
        prefix: checkpoint prefix of the router's weight `gate` [E, H] and of `experts`. Each expert has the parts `gate_proj`,
            `up_proj` and `down_proj`, or the checkpoint has tensors of all experts: `gate_up_proj` [E, 2I, H] and `down_proj`
            [E, H, I]. `shared_expert`, if the config has one, is an expert that every token uses, and `shared_expert_gate` its
            gate [1, H]: it adds sigmoid(shared_expert_gate(norm(x))) · shared_expert(norm(x)).
        names: see `Attention`.
    """

    kind = "moe"

    def __init__(self, config: ModelConfig, *, name: str, norm: str, prefix: str, names: Mapping[str, str] | None = None) -> None:
        super().__init__(config, name)
        moe, h = config.moe, config.hidden_size
        if moe is None:
            raise ConfigError("the model has no mixtures of experts", where=name)
        router, experts, shared, shared_gate = checkpoint_names(prefix, "gate experts shared_expert shared_expert_gate", names)
        self.moe = moe
        self.norm = NormWeight(norm, h, config.zero_centered_norms)
        self.router = PackedLinear([Part(router, moe.num_experts)], h, moe.bias, quantizable=False)
        i, shared_i = moe.intermediate_size, moe.shared_intermediate_size
        gate_up = [Part("gate_proj", i), Part("up_proj", i)]
        self.gate_up = PackedExperts(experts, gate_up, h, moe.num_experts, "gate_up_proj", moe.bias)
        self.down = PackedExperts(experts, [Part("down_proj", h)], i, moe.num_experts, "down_proj", moe.bias)
        self.shared_gate_up: PackedLinear | None = None
        self.shared_down: PackedLinear | None = None
        self.shared_gate: PackedLinear | None = None
        if shared_i:
            self.shared_gate_up = PackedLinear([Part(f"{shared}.{part.name}", shared_i) for part in gate_up], h)
            self.shared_down = PackedLinear([Part(f"{shared}.down_proj", h)], shared_i)
            self.shared_gate = PackedLinear([Part(shared_gate, 1)], h, quantizable=False)

    @property
    def norm_of_router(self) -> Values:
        """The norm of the router's input."""
        return self.norm

    def shard(self, shard: Shard) -> None:
        """By the channels within each expert. Every rank chooses the same experts."""
        pairs: list[tuple[PackedLinear, PackedLinear]] = [(self.gate_up, self.down)]
        if self.shared_gate_up is not None and self.shared_down is not None:
            pairs.append((self.shared_gate_up, self.shared_down))
        for gate_up, down in pairs:
            width = down.in_features
            share = shard.of(width, "neurons of an expert", self.name)
            gate_up.shard_rows((*share, width))
            down.shard_columns(shard.rank, *share, width)
        self.sharded = True

    def linear_ops(self) -> Sequence[LinearOp]:
        experts = self.moe.num_experts, self.moe.experts_per_token
        ops = [LinearOp(self.router), LinearOp(self.gate_up, gated=True, experts=experts), LinearOp(self.down, experts=experts)]
        if self.shared_gate_up is not None and self.shared_down is not None:
            ops += [LinearOp(self.shared_gate_up, gated=True), LinearOp(self.shared_down)]
        return ops

    def decode_read_bytes(self, dtype: torch.dtype) -> int:
        """Of the experts, those that the token uses."""
        of_experts = self.gate_up.nbytes(dtype) + self.down.nbytes(dtype)
        return super().decode_read_bytes(dtype) - of_experts + of_experts * self.moe.experts_per_token // self.moe.num_experts

    @property
    def activation_values(self) -> int:
        """With the tokens in the order of experts, once for each of their experts."""
        return super().activation_values + self.moe.experts_per_token * self.config.hidden_size


def _shared_expert(layer: MoE) -> SharedExpert | None:
    gate_up, down, gate = layer.shared_gate_up, layer.shared_down, layer.shared_gate
    if gate_up is None or down is None or gate is None:
        return None
    return SharedExpert(gate_up.weight, down.weight, gate.weight, gate_up.scale, down.scale)


@register("moe", "eager")
def eager(layer: MoE) -> Forward:
    eps, activation, moe = layer.config.rms_norm_eps, layer.config.hidden_act, layer.moe
    norm, router, shared = layer.norm, layer.router, _shared_expert(layer)
    (gate_up, gate_up_scale), (down, down_scale) = layer.gate_up.stacked, layer.down.stacked
    stored, biases = (gate_up, down, gate_up_scale, down_scale), (layer.gate_up.stacked_bias, layer.down.stacked_bias)

    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        h = reference.rms_norm(x, norm.weight, eps)
        weights, experts = reference.route(reference.linear(h, router.weight, router.bias), moe.experts_per_token, moe.normalize)
        rest = gate_up_scale, down_scale, None, *biases, moe.limit, moe.alpha
        y = reference.mixture(h, weights, experts, gate_up, down, activation, *rest)
        if shared is not None:
            joins_experts = reference.computes_shared(len(x), moe.experts_per_token, *stored, shared)
            y = y + reference.shared_expert(h, shared, activation, False if joins_experts else None)
        return x + layer.summed(y)

    return forward


def _triton_unsupported(layer: Layer, device: torch.device) -> str | None:
    format = layer.gate_up.format if isinstance(layer, MoE) else None
    if isinstance(layer, MoE) and layer.context.invariant and format is not None and format.rounds_activations:
        sizes = layer.config.hidden_size, layer.moe.intermediate_size
        hopper = is_gpu(device) and compute_capability(device) == (9, 0)
        if not hopper or layer.context.dtype.itemsize != 2 or math.gcd(*sizes) % 64:
            needed = "compute capability 9.0, 16-bit activations and sizes that are multiples of 64"
            return f"batch-invariant experts in FP8 need {needed}; these have {sizes[0]} and {sizes[1]}"
    return triton_unsupported(layer, device)


@register("moe", "triton", unsupported=_triton_unsupported, capturable=True, batch_invariant=True)
def triton(layer: MoE) -> Forward:
    """Norm · router · the experts, with the residual. Few tokens have a shared expert as one more. Of more tokens, and in an
    invariant step, it and its gate are products like those of `MLP`, in CUDA graphs beside the experts."""
    from minirt.kernels.linear.dispatch import norm_gate_up, norm_linear
    from minirt.kernels.moe.dispatch import mixture_residual, router_logits
    from minirt.kernels.moe.mixture import SharedOutput

    eps, activation, moe = layer.config.rms_norm_eps, layer.config.hidden_act, layer.moe
    norm, router, pdl, invariant = layer.norm, layer.router, layer.context.pdl, layer.context.invariant
    expert = _shared_expert(layer)  # the shared one
    side, top_k = None if expert is None else layer.context.side_stream, moe.experts_per_token
    (gate_up, gate_up_scale), (down, down_scale) = layer.gate_up.stacked, layer.down.stacked
    stored, four_bits = (gate_up, down, gate_up_scale, down_scale), gate_up.dtype == torch.int16
    gate_up_bias, down_bias = layer.gate_up.stacked_bias, layer.down.stacked_bias

    def output(x: Tensor, expert: SharedExpert, side: "SideStream") -> SharedOutput:
        """The shared expert's, beside the kernels that follow."""
        with side.fork():
            h = norm_gate_up(
                x, norm.weight, eps, expert.gate_up, activation, scale=expert.gate_up_scale,
                workspace=side.workspace if invariant else None, pdl=pdl, check=False,
            )  # fmt: skip
            y = norm_linear(h, None, 0.0, expert.down, scale=expert.down_scale, workspace=side.workspace, pdl=pdl, check=False)
            gate = norm_linear(x, norm.weight, eps, expert.gate, workspace=side.workspace, pdl=pdl, check=False)
            return SharedOutput(y, gate)

    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:  # each kernel that reads x normalizes it
        shared: SharedExpert | SharedOutput | None = expert
        joins = expert is not None and not invariant and reference.computes_shared(len(x), top_k, *stored, expert)
        if expert is not None and side is not None and not joins:
            shared = output(x, expert, side)
        logits = router_logits(
            x, norm.weight, eps, router.weight, top_k, bias=router.bias, four_bits=four_bits, invariant=invariant, pdl=pdl
        )
        y = mixture_residual(
            x, logits, gate_up, down, None if layer.sharded else x, top_k, moe.normalize, activation, norm_weight=norm.weight,
            eps=eps, gate_up_scale=gate_up_scale, down_scale=down_scale, gate_up_bias=gate_up_bias, down_bias=down_bias,
            limit=moe.limit, alpha=moe.alpha, shared=shared, side=side, invariant=invariant, pdl=pdl, check=False,
        )  # fmt: skip
        return layer.added(x, y) if layer.sharded else y

    return forward


class _RouterScale(Values):
    """The weights of the router's norm: those of the checkpoint times H^(-1/2), rounded once."""

    def load(self, name: str, source: Tensor, first: int = 0) -> None:
        self.weight.copy_(source.float() * self.shape[0] ** -0.5)


class MLPAndMoE(MoE):
    """factor · (x + post(post_1(mlp(pre(x))) + post_2(Σ_j w_j · expert_j(pre_2(x))))), as in Gemma 4; x [T, H] or [R, H].

    All of post, pre, and so on are RMSNorms, and the router has another. A token's weights, divided by their sum, are multiplied
    by a factor of each expert.

    Args:
        prefix: checkpoint prefix of all parts: `mlp` with those of `MLP`, `router.proj`, `router.scale` of its norm, `experts`
            as for `MoE`, `router.per_expert_scale`, `layer_scalar` (the factor) and the norms. `names`: see `Attention`.
    """

    kind = "mlp_and_moe"

    def __init__(self, config: ModelConfig, *, name: str, prefix: str, names: Mapping[str, str] | None = None) -> None:
        names, norm, h = {"gate": "router.proj"} | dict(names or {}), "feedforward_layernorm", config.hidden_size
        super().__init__(config, name=name, norm=f"{prefix}.pre_{norm}_2", prefix=prefix, names=names)
        gate, up, down = checkpoint_names(f"{prefix}.mlp", "gate_proj up_proj down_proj", names)
        self.mlp_norm = NormWeight(f"{prefix}.pre_{norm}", h)
        self.mlp_gate_up = PackedLinear([Part(gate, config.intermediate_size), Part(up, config.intermediate_size)], h)
        self.mlp_down = PackedLinear([Part(down, h)], config.intermediate_size)
        self.router_norm = _RouterScale(f"{prefix}.router.scale", (h,), (0.5 * h**-0.5, 1.5 * h**-0.5))
        self.factors = Values(f"{prefix}.router.per_expert_scale", (self.moe.num_experts,), (0.5, 1.5))
        self.mlp_post, self.experts_post = (NormWeight(f"{prefix}.post_{norm}_{i}", h) for i in (1, 2))
        self.post_norm = NormWeight(f"{prefix}.post_{norm}", h, typical=OF_ADDED)
        self.factor = Values(f"{prefix}.layer_scalar", (1,), (0.9, 1.1))

    @property
    def norm_of_router(self) -> Values:
        return self.router_norm

    def shard(self, shard: Shard) -> None:
        width = self.mlp_down.in_features
        share = shard.of(width, "neurons", self.name)
        super().shard(shard)
        self.mlp_gate_up.shard_rows((*share, width))
        self.mlp_down.shard_columns(shard.rank, *share, width)

    def linear_ops(self) -> Sequence[LinearOp]:
        return [*super().linear_ops(), LinearOp(self.mlp_gate_up, gated=True), LinearOp(self.mlp_down)]


@register("mlp_and_moe", "eager")
def mlp_and_moe_eager(layer: MLPAndMoE) -> Forward:
    eps, activation, moe = layer.config.rms_norm_eps, layer.config.hidden_act, layer.moe
    router, first, last = layer.router, layer.mlp_gate_up, layer.mlp_down
    (gate_up, gate_up_scale), (down, down_scale) = layer.gate_up.stacked, layer.down.stacked

    def normalized(x: Tensor, norm: Values) -> Tensor:
        return reference.rms_norm(x, norm.weight, eps)

    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        h = reference.gated(reference.linear(normalized(x, layer.mlp_norm), first.weight, scale=first.scale), activation)
        dense = normalized(layer.summed(reference.linear(h, last.weight, scale=last.scale)), layer.mlp_post)
        logits = reference.linear(normalized(x, layer.router_norm), router.weight)
        weights, experts = reference.route(logits, moe.experts_per_token, moe.normalize, layer.factors.weight)
        h = normalized(x, layer.norm)
        y = layer.summed(reference.mixture(h, weights, experts, gate_up, down, activation, gate_up_scale, down_scale))
        y = reference.norm_residual(y, layer.experts_post.weight, eps, dense)
        return reference.norm_residual(y, layer.post_norm.weight, eps, x, layer.factor.weight)

    return forward


@register("mlp_and_moe", "triton", unsupported=triton_unsupported, capturable=True)
def mlp_and_moe_triton(layer: MLPAndMoE) -> Forward:
    """The MLP, in CUDA graphs beside norm · router · experts; then the norms after both and after their sum, and the residual."""
    from minirt.kernels.linear.dispatch import norm_gate_up, norm_linear, triggers_early
    from minirt.kernels.moe.dispatch import mixture_residual, router_logits
    from minirt.kernels.norm import Branch, norm_residual

    eps, activation, moe, pdl = layer.config.rms_norm_eps, layer.config.hidden_act, layer.moe, layer.context.pdl
    router, first, last, side = layer.router, layer.mlp_gate_up, layer.mlp_down, layer.context.side_stream
    (gate_up, gate_up_scale), (down, down_scale) = layer.gate_up.stacked, layer.down.stacked
    four_bits = gate_up.dtype == torch.int16

    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        with side.fork():
            h = norm_gate_up(
                x, layer.mlp_norm.weight, eps, first.weight, activation, scale=first.scale, workspace=side.workspace, pdl=pdl,
                check=False,
            )  # fmt: skip
            dense = norm_linear(h, None, 0.0, last.weight, scale=last.scale, workspace=side.workspace, pdl=pdl, check=False)
        logits = router_logits(
            x, layer.router_norm.weight, eps, router.weight, moe.experts_per_token, four_bits=four_bits, pdl=pdl
        )
        y = mixture_residual(
            x, logits, gate_up, down, None, moe.experts_per_token, moe.normalize, activation, norm_weight=layer.norm.weight,
            eps=eps, gate_up_scale=gate_up_scale, down_scale=down_scale, factors=layer.factors.weight, pdl=pdl, check=False,
        )  # fmt: skip
        side.join()
        if layer.sharded:
            dense, y = layer.summed(dense), layer.summed(y)
        branch = Branch(layer.experts_post.weight, dense, layer.mlp_post.weight)
        return norm_residual(
            y, layer.post_norm.weight, eps, x, out=y, factor=layer.factor.weight, branch=branch, early=triggers_early(x), pdl=pdl,
            check=False,
        )  # fmt: skip

    return forward
