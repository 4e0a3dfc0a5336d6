"""Qwen3-VL: Qwen3 in a model with a vision encoder. Computes text only, where M-RoPE equals RoPE."""

from minirt.modeling.config import MROPE_KEYS, Fields, ModelConfig
from minirt.models.decoder import decoder_config
from minirt.models.vision import text_fields

CLASSES = ("Qwen3VLForConditionalGeneration",)
decoder_fields = text_fields


def config(fields: Fields) -> ModelConfig:
    """`attention_bias` adds a bias to all four attention projections."""
    return decoder_config(
        fields, model_type="qwen3_vl", classes=(), max_positions=128000, kv_heads=32, head_dim=128, theta=5e5,
        attention_bias=False, qk_norm=True, rope_keys=MROPE_KEYS,
    )  # fmt: skip
