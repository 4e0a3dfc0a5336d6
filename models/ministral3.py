"""Ministral 3 (3B, 8B, 14B) and Devstral 2: Mistral with yarn, and with queries scaled by their position."""

from minirt.modeling.config import Fields, ModelConfig
from minirt.models.decoder import Window, decoder_config


def config(fields: Fields) -> ModelConfig:
    """`rope_parameters` must have `llama_4_scaling_beta`. A window, if any, is in all layers."""
    return decoder_config(
        fields, model_type="ministral3", classes=("Ministral3ForCausalLM",), max_positions=262144, kv_heads=8, head_dim=128,
        eps=1e-5, rope_keys=("llama_4_scaling_beta", "max_position_embeddings"), window=Window(used=None),
    )  # fmt: skip
