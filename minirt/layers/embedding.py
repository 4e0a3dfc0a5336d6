"""The layers that read tokens: `Embedding`, and `DraftInput` of a draft model."""

import torch
from torch import Tensor

from minirt.errors import ConfigError
from minirt.kernels import reference
from minirt.kernels.speculative import reference as drafts
from minirt.layers.base import Forward, Layer, LinearOp, register, triton_unsupported
from minirt.modeling.config import ModelConfig
from minirt.modeling.parameters import NormWeight, PackedLinear, Part, Shard
from minirt.step.batch import Batch


class Embedding(Layer):
    """Gathers the rows of the table [V, H] for batch.input_ids [T] → [T, H]. Ignores its input x.

    Args:
        multiplier: a factor of the rows.
        normalized: whether the rows have an RMSNorm without weights, before the factor.
        rounded: whether the factor is rounded to the rows' dtype first.
    """

    kind = "embedding"
    residual, reads_tokens = False, True

    def __init__(
        self, config: ModelConfig, *, name: str = "embedding", weight: str = "model.embed_tokens", multiplier: float = 1.0,
        normalized: bool = False, rounded: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(config, name)
        self.multiplier, self.normalized, self.rounded = multiplier, normalized, rounded
        self.table = PackedLinear([Part(weight, config.vocab_size)], config.hidden_size, quantizable=False)  # it is looked up
        if config.moe is not None and not config.tie_word_embeddings:
            # Random embeddings with values of about 4. With small ones, what layers add makes all tokens of a sequence nearly
            # equal after a few layers, and random routers send them to the same experts: benchmarks would read too few.
            self.table.random_gain = 4 * (2 * config.hidden_size) ** 0.5

    def shard(self, shard: Shard) -> None:
        """Nothing: each rank does the same."""

    def decode_read_bytes(self, dtype: torch.dtype) -> int:
        """0: a row for each token does not count."""
        return 0

    def returns(self, x: Tensor, batch: Batch) -> tuple[tuple[int, ...], torch.dtype]:
        return (batch.num_tokens, self.config.hidden_size), self.table.weight.dtype


def _scaled(layer: Embedding, x: Tensor) -> Tensor:
    if layer.multiplier == 1.0:
        return x
    return x * (torch.tensor(layer.multiplier, dtype=x.dtype, device="cpu").item() if layer.rounded else layer.multiplier)


@register("embedding", "eager")
def eager(layer: Embedding) -> Forward:
    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        x = reference.embedding(batch.input_ids, layer.table.weight)
        return _scaled(layer, reference.rms_norm(x, None, layer.config.rms_norm_eps) if layer.normalized else x)

    return forward


@register("embedding", "triton", unsupported=triton_unsupported, capturable=True, batch_invariant=True)
def triton(layer: Embedding) -> Forward:
    from minirt.kernels.embedding import embedding
    from minirt.kernels.norm import rms_norm

    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        x = embedding(batch.input_ids, layer.table.weight, check=False)
        return _scaled(layer, rms_norm(x, None, layer.config.rms_norm_eps, out=x, check=False) if layer.normalized else x)

    return forward


class DraftInput(Embedding):
    """The first layer of a draft model that continues from the target's hidden states (multi-token prediction).

    fc([norm_embedding(embedding(input_ids)) | norm_hidden(hidden)]): [T] ids and `batch.hidden` [T, H] → [T, H].

    Row p has the token at position p + 1 and the target's hidden state at position p, as in DeepSeek-V3 (2024) and Qwen3.5. The
    embedding is the target's. `fc` is never quantized, as in checkpoints with FP8 weights.

    Args:
        embedding, norm_embedding, norm_hidden, fc: checkpoint names.
    """

    kind = "draft_input"

    def __init__(
        self, config: ModelConfig, *, name: str, norm_embedding: str, norm_hidden: str, fc: str,
        embedding: str = "model.embed_tokens",
    ) -> None:  # fmt: skip
        super().__init__(config, name=name, weight=embedding)
        h, centered = config.hidden_size, config.zero_centered_norms
        self.norm_embedding = NormWeight(norm_embedding, h, centered)
        self.norm_hidden = NormWeight(norm_hidden, h, centered)
        self.fc = PackedLinear([Part(fc, h)], 2 * h, quantizable=False)

    def linear_ops(self) -> tuple[LinearOp, ...]:
        return (LinearOp(self.fc),)

    def decode_read_bytes(self, dtype: torch.dtype) -> int:
        return self.fc.nbytes(dtype)

    @property
    def activation_values(self) -> int:
        return 3 * self.config.hidden_size

    def require(self, hidden: Tensor | None) -> Tensor:
        if hidden is None:
            raise ConfigError("a draft model needs the hidden states of its target", where=self.name)
        return hidden


@register("draft_input", "eager")
def draft_eager(layer: DraftInput) -> Forward:
    eps, table, fc = layer.config.rms_norm_eps, layer.table, layer.fc
    norm_embedding, norm_hidden = layer.norm_embedding, layer.norm_hidden

    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        hidden = layer.require(batch.hidden)
        both = drafts.draft_input(batch.input_ids, table.weight, hidden, norm_embedding.weight, norm_hidden.weight, eps)
        return reference.linear(both, fc.weight)

    return forward


@register("draft_input", "triton", unsupported=triton_unsupported, capturable=True)
def draft_triton(layer: DraftInput) -> Forward:
    """Kernels: embedding and both norms; the product."""
    from minirt.kernels.linear.dispatch import norm_linear
    from minirt.kernels.speculative.draft_input import draft_input

    eps, table, fc, context = layer.config.rms_norm_eps, layer.table, layer.fc, layer.context
    workspace, pdl = context.workspace, context.pdl
    norm_embedding, norm_hidden = layer.norm_embedding, layer.norm_hidden

    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        hidden = layer.require(batch.hidden)
        both = draft_input(batch.input_ids, table.weight, hidden, norm_embedding.weight, norm_hidden.weight, eps, check=False)
        return norm_linear(both, None, 0.0, fc.weight, workspace=workspace, pdl=pdl, check=False)

    return forward
