"""`Select`: keeps only the rows of the residual stream that need logits. Placed after the last attention layer."""

import torch
from torch import Tensor

from minirt.layers.base import Forward, Layer, register, triton_unsupported
from minirt.step.batch import Batch


class Select(Layer):
    """x[batch.logits_indices]: x [T, H] → [R, H]; x itself if all rows are kept in order. Has no weights."""

    kind = "select"
    residual, selects_rows = False, True

    def returns(self, x: Tensor, batch: Batch) -> tuple[tuple[int, ...], torch.dtype]:
        return (batch.logits_indices.shape[0], x.shape[1]), x.dtype


@register("select", "eager")
def eager(layer: Select) -> Forward:
    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        return x if batch.every_row else x[batch.logits_indices]

    return forward


@register("select", "triton", unsupported=triton_unsupported, capturable=True)
def triton(layer: Select) -> Forward:
    """Uses the embedding kernel, with the residual stream as the table."""
    from minirt.kernels.embedding import embedding

    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        return x if batch.every_row else embedding(batch.logits_indices, x, check=False)

    return forward
