"""Phi-3 (mini, medium), Phi-4 and Phi-4-mini: Llama, whose files have one linear for q, k and v, and one for gate and up."""

from typing import TYPE_CHECKING

from minirt.modeling.config import Fields, ModelConfig
from minirt.models.decoder import Window, decoder_config, decoder_layers

if TYPE_CHECKING:
    from minirt.layers import Layer

_NAMES = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"), **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")}


def config(fields: Fields) -> ModelConfig:
    """A window, if any, is in all layers. `original_max_position_embeddings` is of longrope, and 4096 if it is absent."""
    original = "original_max_position_embeddings"
    fields = fields.over({**fields.raw, original: fields.integer(original, default=4096)})
    return decoder_config(
        fields, model_type="phi3", classes=("Phi3ForCausalLM",), max_positions=4096, eps=1e-5, partial_rotary=True,
        window=Window(used=None),
    )  # fmt: skip


def layers(config: ModelConfig) -> "list[Layer]":
    return decoder_layers(config, names=_NAMES)
