"""`Select`: keeps the rows of the residual stream that need logits, after the last attention layer. `Tap`: hands rows over."""

import torch
from torch import Tensor

from minirt.kernels import reference
from minirt.layers.base import Forward, Layer, register, triton_unsupported
from minirt.modeling.config import ModelConfig
from minirt.modeling.parameters import NormWeight, Shard
from minirt.step.batch import Batch


class Select(Layer):
    """x[batch.logits_indices]: x [T, H] → [R, H]; x itself if all rows are kept in order. Has no weights."""

    kind = "select"
    residual, selects_rows = False, True

    def shard(self, shard: Shard) -> None:
        """Nothing: each rank does the same."""

    def returns(self, x: Tensor, batch: Batch) -> tuple[tuple[int, ...], torch.dtype]:
        return (batch.logits_indices.shape[0], x.shape[1]), x.dtype


@register("select", "eager")
def eager(layer: Select) -> Forward:
    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        return x if batch.every_row else x[batch.logits_indices]

    return forward


@register("select", "triton", unsupported=triton_unsupported, capturable=True, batch_invariant=True)
def triton(layer: Select) -> Forward:
    """Uses the embedding kernel, with the residual stream as the table."""
    from minirt.kernels.embedding import embedding

    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        return x if batch.every_row else embedding(batch.logits_indices, x, check=False)

    return forward


class Tap(Layer):
    """Hands the hidden states over to a draft model: x, unchanged; norm(x) is written to `batch.taps`.

    Without it, as in steps whose states nobody reads, nothing is computed.

    Args:
        norm: checkpoint name of the norm, such as the final one. Its weight is shared.
        every_row: it hands over the states of all tokens, so that `Select` comes after it. False: those of the rows it gets.
    """

    kind = "tap"
    residual = False

    def __init__(self, config: ModelConfig, *, norm: str, name: str = "tap", every_row: bool = True) -> None:
        super().__init__(config, name)
        self.needs_every_row = every_row
        self.norm = NormWeight(norm, config.hidden_size, config.zero_centered_norms)

    def shard(self, shard: Shard) -> None:
        """Nothing: each rank does the same."""

    def decode_read_bytes(self, dtype: torch.dtype) -> int:
        """0: the head reads the same weight."""
        return 0


@register("tap", "eager")
def tap_eager(layer: Tap) -> Forward:
    norm, eps = layer.norm, layer.config.rms_norm_eps

    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        if batch.taps is not None:
            batch.taps.copy_(reference.rms_norm(x, norm.weight, eps))
        return x

    return forward


@register("tap", "triton", unsupported=triton_unsupported, capturable=True, batch_invariant=True)
def tap_triton(layer: Tap) -> Forward:
    from minirt.kernels.norm import rms_norm

    norm, eps, pdl = layer.norm, layer.config.rms_norm_eps, layer.context.pdl

    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        if batch.taps is not None:
            rms_norm(x, norm.weight, eps, out=batch.taps, pdl=pdl, check=False)
        return x

    return forward
