"""`MLP`: the gated feed-forward residual layer (SwiGLU, Shazeer 2020)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minirt.kernels import reference
from minirt.layers.base import Forward, Layer, LinearOp, checkpoint_names, register, triton_unsupported
from minirt.modeling.config import ModelConfig
from minirt.modeling.parameters import OF_ADDED, NormWeight, PackedLinear, Part, Shard, Values, stacked
from minirt.step.batch import Batch

if TYPE_CHECKING:
    from minirt.layers.attention import Attention


class MLP(Layer):
    """factor · (x + residual_multiplier · post_norm(down(act(gate(norm(x))) · up(norm(x))))), x [T, H], or [R, H] after `Select`.

    Gate and up are packed into one matrix, gate first.

    Args:
        norm: checkpoint name of the norm of the layer's input; None: there is none.
        prefix: checkpoint prefix of the parts `gate_proj`, `up_proj` and `down_proj`. `names`: see `Attention`.
        post_norm: checkpoint name of a norm of what is added to x (a sandwich norm); None: there is none.
        post_norm_eps: its eps; None: that of the config.
        residual_multiplier: a factor of what is added to x.
        factor: checkpoint name of a factor [1] of the sum; None: there is none.
    """

    kind, adaptable = "mlp", ("gate_up", "down")

    def __init__(
        self, config: ModelConfig, *, name: str, norm: str | None, prefix: str, post_norm: str | None = None,
        post_norm_eps: float | None = None, residual_multiplier: float = 1.0, names: Mapping[str, str] | None = None,
        factor: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, name)
        h, i = config.hidden_size, config.intermediate_size
        gate, up, down = checkpoint_names(prefix, "gate_proj up_proj down_proj", names)
        self.norm = NormWeight(norm, h, config.zero_centered_norms) if norm else None
        self.post_norm = NormWeight(post_norm, h, config.zero_centered_norms, typical=OF_ADDED) if post_norm else None
        self.post_norm_eps = config.rms_norm_eps if post_norm_eps is None else post_norm_eps
        self.residual_multiplier = residual_multiplier
        self.factor = Values(factor, (1,), (0.9, 1.1)) if factor else None
        self.gate_up = PackedLinear(stacked(Part(gate, i), Part(up, i)), h, config.mlp_bias)
        self.down = PackedLinear([Part(down, h)], i, config.mlp_bias)
        self.inner = "neurons", i

    def linear_ops(self) -> tuple[LinearOp, ...]:
        residual = self.post_norm is None and self.residual_multiplier == 1 and self.factor is None and not self.sharded
        return LinearOp(self.gate_up, gated=True), LinearOp(self.down, residual=residual)

    def shard(self, shard: Shard) -> None:
        width = self.down.in_features
        share = shard.of(width, "neurons", self.name)
        self.gate_up.shard_rows((*share, width))
        self.down.shard_columns(shard.rank, *share, width)
        self.inner, self.sharded = ("neurons", share[1]), True


@register("mlp", "eager")
def eager(layer: MLP) -> Forward:
    eps, activation = layer.config.rms_norm_eps, layer.config.hidden_act
    norm, gate_up, down, post_norm, post_norm_eps = layer.norm, layer.gate_up, layer.down, layer.post_norm, layer.post_norm_eps
    factor = layer.factor

    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        h = x if norm is None else reference.rms_norm(x, norm.weight, eps)
        both = reference.linear(h, gate_up.weight, gate_up.bias, gate_up.scale)
        if batch.adapters is not None:
            batch.adapters.add(gate_up, both, h)
        h = layer.hooked(reference.gated(both, activation), batch)
        y = reference.linear(h, down.weight, down.bias, down.scale)
        if batch.adapters is not None:
            batch.adapters.add(down, y, h)
        y = layer.summed(y)
        y = y if post_norm is None else reference.rms_norm(y, post_norm.weight, post_norm_eps)
        x = reference.add_residual(x, y, layer.residual_multiplier)
        return x if factor is None else x * factor.weight

    return forward


def triton_add(layer: "MLP | Attention", x: Tensor, y: Tensor) -> Tensor:
    """factor · (x + residual_multiplier · post_norm(y)) where the product y does not add to x itself. It writes to y. Of shards,
    y is summed first."""
    from minirt.kernels.linear.dispatch import triggers_early
    from minirt.kernels.norm import norm_residual, rms_norm

    post_norm, eps, pdl, values = layer.post_norm, layer.post_norm_eps, layer.context.pdl, getattr(layer, "factor", None)
    factor = None if values is None else values.weight
    if layer.sharded and post_norm is None and layer.residual_multiplier == 1:
        y = layer.added(x, y)
        return y if factor is None else y.mul_(factor)
    y = layer.summed(y)
    if post_norm is not None and layer.residual_multiplier == 1:
        early = triggers_early(x)
        return norm_residual(y, post_norm.weight, eps, x, out=y, factor=factor, early=early, pdl=pdl, check=False)
    y = y if post_norm is None else rms_norm(y, post_norm.weight, eps, out=y, pdl=pdl, check=False)
    y = torch.add(x, y, alpha=layer.residual_multiplier, out=y)
    return y if factor is None else y.mul_(factor)


@register("mlp", "triton", unsupported=triton_unsupported, capturable=True, batch_invariant=True)
def triton(layer: MLP) -> Forward:
    """Two fused operations: norm + gate/up + activation, and down + residual.

    With a norm or a factor of what is added, the second is two: down; `triton_add`.
    """
    from minirt.kernels.linear.dispatch import linear_residual, norm_gate_up, norm_linear

    eps, activation = layer.config.rms_norm_eps, layer.config.hidden_act
    norm, gate_up, down, residual_product = layer.norm, layer.gate_up, layer.down, layer.linear_ops()[-1].residual
    workspace, pdl = layer.context.workspace, layer.context.pdl

    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        weight = norm.weight if norm else None
        added = None if batch.adapters is None else batch.adapters.of(gate_up)
        if batch.adapters is None or gate_up.adapters is None or added is not None:
            h = norm_gate_up(
                x, weight, eps, gate_up.weight, activation, bias=gate_up.bias, scale=gate_up.scale, workspace=workspace,
                adapters=added, pdl=pdl, check=False,
            )  # fmt: skip
        else:
            both = norm_linear(
                x, weight, eps, gate_up.weight, gate_up.bias, scale=gate_up.scale, workspace=workspace, pdl=pdl, check=False
            )
            h = batch.adapters.add(gate_up, both, x, weight, eps, activation)
        h = layer.hooked(h, batch)
        if residual_product:
            added = None if batch.adapters is None else batch.adapters.of(down)
            if batch.adapters is not None and added is None:
                batch.adapters.add(down, x, h)
            return linear_residual(
                h, down.weight, x, down.bias, scale=down.scale, workspace=workspace, adapters=added, pdl=pdl, check=False
            )
        y = norm_linear(h, None, 0.0, down.weight, down.bias, scale=down.scale, workspace=workspace, pdl=pdl, check=False)
        if batch.adapters is not None:
            batch.adapters.add(down, y, h)
        return triton_add(layer, x, y)

    return forward
