"""Qwen3 (dense): Llama with an RMSNorm on every query and key head, and a head_dim independent of the hidden size."""

from minirt.modeling.config import Fields, ModelConfig
from minirt.models.decoder import WINDOW_OFF_BY_DEFAULT, decoder_config


def config(fields: Fields) -> ModelConfig:
    """`attention_bias` adds a bias to all four attention projections. An absent head_dim means 128."""
    return decoder_config(
        fields, model_type="qwen3", classes=("Qwen3ForCausalLM",), max_positions=32768, kv_heads=32, head_dim=128,
        attention_bias=False, qk_norm=True, window=WINDOW_OFF_BY_DEFAULT,
    )  # fmt: skip
