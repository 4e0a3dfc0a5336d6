"""Mistral 7B, Nemo and Small: Llama without biases. Version 0.1 has a sliding window in all layers."""

from minirt.modeling.config import Fields, ModelConfig
from minirt.models.decoder import Window, decoder_config


def config(fields: Fields) -> ModelConfig:
    """An absent `sliding_window` means 4096, as in transformers; null means none. A window is in all layers."""
    window = Window(4096, used=None)
    classes = ("MistralForCausalLM",)
    return decoder_config(fields, model_type="mistral", classes=classes, max_positions=131072, kv_heads=8, window=window)
