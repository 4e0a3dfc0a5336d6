"""Llama 2 and 3, SmolLM2 and all other models with `"model_type": "llama"`."""

from minirt.modeling.config import Fields, ModelConfig
from minirt.models.decoder import decoder_config


def config(fields: Fields) -> ModelConfig:
    """`attention_bias` adds a bias to all four attention projections, `mlp_bias` to all three MLP projections."""
    return decoder_config(
        fields, model_type="llama", classes=("LlamaForCausalLM", "LLaMAForCausalLM"), max_positions=2048,
        attention_bias=False, mlp_bias=fields.boolean("mlp_bias", default=False),
    )  # fmt: skip
