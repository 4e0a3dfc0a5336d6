"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with a mixture of experts, and an expert that every token uses, instead of the MLP."""

from minirt.modeling.config import Fields, ModelConfig
from minirt.models.decoder import Window, decoder_config, moe_config


def config(fields: Fields) -> ModelConfig:
    """`qkv_bias` is the bias of q, k and v, by default true; the output projection has none.

    If windows are used, every second layer before `max_window_layers` has one, unless `layer_types` says which.
    """
    windows = range(0, min(fields.integer("num_hidden_layers"), fields.integer("max_window_layers", default=28)), 2)
    return decoder_config(
        fields, model_type="qwen2_moe", classes=("Qwen2MoeForCausalLM",), max_positions=32768, kv_heads=16,
        qkv_bias=fields.boolean("qkv_bias", default=True), moe=moe_config(fields, shared_expert=True),
        window=Window(4096, used=False, layers=windows),
    )  # fmt: skip
