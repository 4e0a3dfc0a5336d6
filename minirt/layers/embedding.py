"""`Embedding`: token ids to the residual stream."""

import torch
from torch import Tensor

from minirt.kernels import reference
from minirt.layers.base import Forward, Layer, register, triton_unsupported
from minirt.modeling.config import ModelConfig
from minirt.modeling.parameters import PackedLinear, Part
from minirt.step.batch import Batch


class Embedding(Layer):
    """Gathers the rows of the table [V, H] for batch.input_ids [T] → [T, H]. Ignores its input x."""

    kind = "embedding"
    residual, reads_tokens = False, True

    def __init__(self, config: ModelConfig, *, name: str = "embedding", weight: str = "model.embed_tokens") -> None:
        super().__init__(config, name)
        self.table = PackedLinear([Part(weight, config.vocab_size)], config.hidden_size, quantizable=False)  # it is looked up
        if config.moe is not None and not config.tie_word_embeddings:
            # Random embeddings with values of about 4. With small ones, what layers add makes all tokens of a sequence nearly
            # equal after a few layers, and random routers send them to the same experts: benchmarks would read too few.
            self.table.random_gain = 4 * (2 * config.hidden_size) ** 0.5

    def decode_read_bytes(self, dtype: torch.dtype) -> int:
        """0: a row for each token does not count."""
        return 0

    def returns(self, x: Tensor, batch: Batch) -> tuple[tuple[int, ...], torch.dtype]:
        return (batch.num_tokens, self.config.hidden_size), self.table.weight.dtype


@register("embedding", "eager")
def eager(layer: Embedding) -> Forward:
    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        return reference.embedding(batch.input_ids, layer.table.weight)

    return forward


@register("embedding", "triton", unsupported=triton_unsupported, capturable=True)
def triton(layer: Embedding) -> Forward:
    from minirt.kernels.embedding import embedding

    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        return embedding(batch.input_ids, layer.table.weight, check=False)

    return forward
