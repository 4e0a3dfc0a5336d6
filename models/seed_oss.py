"""Seed-OSS (36B): Llama with biases on q, k and v, and a head_dim independent of the hidden size."""

from minirt.modeling.config import Fields, ModelConfig
from minirt.models.decoder import decoder_config


def config(fields: Fields) -> ModelConfig:
    """`attention_bias` is the bias of q, k and v, by default true, and `attention_out_bias` that of the output projection."""
    qkv_bias, o_bias = fields.boolean("attention_bias", default=True), fields.boolean("attention_out_bias", default=False)
    return decoder_config(
        fields, model_type="seed_oss", classes=("SeedOssForCausalLM",), max_positions=524288, kv_heads=8, head_dim=128,
        qkv_bias=qkv_bias, o_bias=o_bias, mlp_bias=fields.boolean("mlp_bias", default=False),
    )  # fmt: skip
