"""OLMo 3 (7B, 32B): norms only of what layers add, QK-norm over all heads at once, and windows in three of four layers."""

from dataclasses import replace
from typing import TYPE_CHECKING

from minirt.modeling.config import Fields, ModelConfig, read_rope
from minirt.models.decoder import POST_NORMS, Window, decoder_config, decoder_layers

if TYPE_CHECKING:
    from minirt.layers import Layer

_KINDS = ("full_attention", "sliding_attention")


def config(fields: Fields) -> ModelConfig:
    """`rope_parameters` has those of each kind of layer; `rope_scaling` is that of layers without a window.

    Without `layer_types`, all layers but every fourth have a window.
    """
    ropes, kinds = fields.nested("rope_parameters"), [dict(fields.raw) for _ in _KINDS]
    kinds[1]["rope_scaling"] = None
    if stated := ropes.raw.keys() & set(_KINDS):
        for other in ropes.raw.keys() - stated:
            ropes.only(other)
        for raw, kind in zip(kinds, _KINDS, strict=True):
            raw["rope_parameters"] = ropes.raw.get(kind)
    full, windowed = map(fields.over, kinds)
    alternate = [i for i in range(fields.integer("num_hidden_layers")) if (i + 1) % 4]
    parsed = decoder_config(
        full, model_type="olmo3", classes=("Olmo3ForCausalLM",), max_positions=2048, attention_bias=False, theta=5e5, eps=1e-5,
        qk_norm=True, window=Window(4096, layers=alternate),
    )  # fmt: skip
    return replace(parsed, window_rope=read_rope(windowed, parsed.max_position_embeddings, parsed.head_dim, theta=5e5))


def layers(config: ModelConfig) -> "list[Layer]":
    return decoder_layers(config, lambda i: replace(config.attention(i), qk_norm="weighted_all"), norms=POST_NORMS)
