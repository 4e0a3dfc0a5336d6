"""`Head`: the final norm and the LM head, for the rows that `Select` kept."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minirt.kernels import reference
from minirt.layers.base import Forward, Layer, LinearOp, register, triton_unsupported
from minirt.modeling.config import ModelConfig
from minirt.modeling.parameters import NormWeight, PackedLinear, Part, Shard, SomeRows
from minirt.step.batch import Batch

if TYPE_CHECKING:
    from minirt.kernels.linear.product import RowMaxima


class Head(Layer):
    """softcap · tanh(multiplier · lm_head(norm(x)) / softcap): x [R, H] → logits [R, V] fp32.

    Args:
        multiplier: a factor of the logits.
        softcap: the bound of the logits' magnitude, as in Gemma 2; 0: there is none.
        centered: whether the checkpoint stores the norm's weight minus 1; None: as the config says.
        rows: how many ids it has logits for, of the V of the vocabulary (a reduced draft vocabulary). The ids are those of
            `lm_head.ids`. None: all.
    """

    kind = "head"
    residual, makes_logits = False, True

    def __init__(
        self, config: ModelConfig, *, name: str = "head", norm: str = "model.norm", weight: str = "lm_head",
        multiplier: float = 1.0, softcap: float = 0.0, centered: bool | None = None, rows: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, name)
        self.multiplier, self.softcap = multiplier, softcap
        self.norm = NormWeight(norm, config.hidden_size, config.zero_centered_norms if centered is None else centered)
        part = Part(weight, config.vocab_size)
        self.lm_head = PackedLinear([part], config.hidden_size) if rows is None else SomeRows(part, config.hidden_size, rows)

    def shard(self, shard: Shard) -> None:
        """By ids, if their number can be divided and all have logits. Each rank gets the logits of all."""
        vocab = self.config.vocab_size
        if vocab % shard.ranks == 0 and not isinstance(self.lm_head, SomeRows):
            self.lm_head.shard_rows((*shard.of(vocab, "ids", self.name), vocab))
            self.sharded = True

    def gathered(self, logits: Tensor, batch: Batch, maxima: "RowMaxima | None" = None) -> Tensor:
        """The logits of all ids; of a share with row maxima, those of all ranks, and the logits as they are (`whole`). Without
        ranks, as in plans, nobody reads them."""
        if not self.sharded:
            return logits
        if (reduction := self.context.reduction) is None:
            return logits.new_empty(len(logits), self.config.vocab_size) if batch.logits is None else batch.logits
        if maxima is None or batch.row_maxima is None:
            return reduction.gather(logits, batch.logits)
        reduction.maxima(maxima.values, self.lm_head.out_features, batch.row_maxima.values)
        return logits

    def whole(self, logits: Tensor) -> Tensor:
        """The logits of all ids [R, V], from the first R rows of what a step with row maxima has left in `logits`: those of this
        rank's ids, row after row, from the tensor's beginning on. All ranks call it."""
        (rows, width), part = logits.shape, self.lm_head.out_features
        whole = logits if width == self.config.vocab_size else None
        return self.context.reduction.gather(logits.view(-1)[: rows * part].view(rows, part), whole)

    def outputs(self, batch: Batch, rows: int) -> "tuple[Tensor | None, RowMaxima | None]":
        """Where the product writes logits, None: a new tensor; and where it stores row maxima."""
        logits, maxima = batch.logits, batch.row_maxima
        if not self.sharded or maxima is None:
            return None if self.sharded else logits, maxima
        part, tiles = self.lm_head.out_features, self._tiles(rows)
        values = maxima.values.new_empty(rows, tiles)
        return None if logits is None else logits.view(-1)[: rows * part].view(rows, part), maxima._replace(values=values)

    def linear_ops(self) -> tuple[LinearOp, ...]:
        return (LinearOp(self.lm_head, logits=True),)

    def row_maxima_tiles(self, rows: int) -> int:
        if self.implementation != "triton":
            return 0
        tiles = self._tiles(rows)
        if not self.sharded or not tiles:
            return tiles
        return 0 if self.context.reduction is None else self.context.reduction.ranks  # a rank's largest is one

    def _tiles(self, rows: int) -> int:
        from minirt.kernels.linear.dispatch import row_maxima_tiles

        lm_head = self.lm_head
        return row_maxima_tiles(rows, lm_head.weight, self.norm.weight.dtype, lm_head.scale, self.context.workspace)

    def returns(self, x: Tensor, batch: Batch) -> tuple[tuple[int, ...], torch.dtype]:
        return (x.shape[0], self.config.vocab_size if self.sharded else self.lm_head.out_features), torch.float32


@register("head", "eager")
def eager(layer: Head) -> Forward:
    eps, norm, lm_head = layer.config.rms_norm_eps, layer.norm, layer.lm_head
    multiplier, softcap = layer.multiplier, layer.softcap

    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        logits = reference.linear(reference.rms_norm(x, norm.weight, eps), lm_head.weight, scale=lm_head.scale).float()
        logits = reference.cap_logits(logits, multiplier, softcap)
        return layer.gathered(logits, batch)

    return forward


@register("head", "triton", unsupported=triton_unsupported, capturable=True, batch_invariant=True)
def triton(layer: Head) -> Forward:
    """One fused operation: norm + LM head."""
    from minirt.kernels.linear.dispatch import norm_linear

    eps, norm, lm_head = layer.config.rms_norm_eps, layer.norm, layer.lm_head
    multiplier, softcap, workspace, pdl = layer.multiplier, layer.softcap, layer.context.workspace, layer.context.pdl

    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        out, row_maxima = layer.outputs(batch, len(x))
        logits = norm_linear(
            x, norm.weight, eps, lm_head.weight, scale=lm_head.scale, out=out, workspace=workspace, out_dtype=torch.float32,
            row_maxima=row_maxima, multiplier=multiplier, softcap=softcap, pdl=pdl, check=False,
        )  # fmt: skip
        return layer.gathered(logits, batch, row_maxima)

    return forward
