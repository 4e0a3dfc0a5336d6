"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from minirt.modeling.config import Fields, ModelConfig
from minirt.models.decoder import WINDOW_OFF_BY_DEFAULT, decoder_config, decoder_layers

layers = decoder_layers


def config(fields: Fields) -> ModelConfig:
    """The file has no setting for biases: q, k and v always have one, the output projection never."""
    return decoder_config(
        fields,
        model_type="qwen2",
        classes=("Qwen2ForCausalLM",),
        max_positions=32768,
        kv_heads=32,
        qkv_bias=True,
        window=WINDOW_OFF_BY_DEFAULT,
    )
