"""Qwen2.5-VL: Qwen2 in a model with a vision encoder. Computes text only, where M-RoPE equals RoPE."""

from functools import partial

from minirt.modeling.config import MROPE_KEYS, Fields, ModelConfig
from minirt.models.decoder import Window, decoder_config
from minirt.models.vision import text_fields

CLASSES = ("Qwen2_5_VLForConditionalGeneration",)
decoder_fields = partial(text_fields, flat=True)  # older files have the decoder's fields at the top level


def config(fields: Fields) -> ModelConfig:
    return decoder_config(
        fields, model_type="qwen2_5_vl", classes=(), max_positions=32768, kv_heads=8, theta=1e6, eps=1e-5, qkv_bias=True,
        rope_keys=MROPE_KEYS, window=Window(4096, used=False, first=80),
    )  # fmt: skip
