"""Qwen3-MoE (30B-A3B, 235B-A22B, Coder): Qwen3 with a mixture of experts instead of the MLP in all or some layers."""

from minirt.modeling.config import Fields, ModelConfig
from minirt.models.decoder import MOE_WINDOW_OFF_BY_DEFAULT, decoder_config, moe_config


def config(fields: Fields) -> ModelConfig:
    """`attention_bias` adds a bias to all four attention projections. An absent head_dim follows from the hidden size."""
    return decoder_config(
        fields, model_type="qwen3_moe", classes=("Qwen3MoeForCausalLM",), max_positions=32768, kv_heads=4,
        attention_bias=False, qk_norm=True, moe=moe_config(fields), window=MOE_WINDOW_OFF_BY_DEFAULT,
    )  # fmt: skip
