"""Mistral 7B from version 0.2 on, Nemo and Small: Llama without biases. Version 0.1, with its sliding window, is refused."""

from minirt.errors import UnsupportedError
from minirt.modeling.config import MAX_POSITIONS, Fields, ModelConfig
from minirt.models.decoder import decoder_config, decoder_layers

layers = decoder_layers


def config(fields: Fields) -> ModelConfig:
    """`sliding_window` must be null. An absent field means 4096, as in transformers."""
    window = fields.integer_or_none("sliding_window", default=4096, maximum=MAX_POSITIONS)
    if window is not None:
        raise UnsupportedError(
            "sliding-window attention is not supported",
            where=fields.place("sliding_window"),
            expected="null",
            found=window if "sliding_window" in fields.raw else f"no field, which means {window}",
        )
    return decoder_config(fields, model_type="mistral", classes=("MistralForCausalLM",), max_positions=131072, kv_heads=8)
