"""EXAONE 4 (1.2B, 32B): norms only of what layers add, QK-norm, and no rotary embedding in layers without a window."""

from dataclasses import replace
from typing import TYPE_CHECKING

from minirt.modeling.config import Fields, ModelConfig
from minirt.models.decoder import POST_NORMS, Window, decoder_config, decoder_layers

if TYPE_CHECKING:
    from minirt.layers import Layer


def config(fields: Fields) -> ModelConfig:
    """If `sliding_window` is null, no layer has a window, and all have rotary embedding.

    Without `layer_types`, all layers but the last of every `sliding_window_pattern` have a window.
    """
    count, among = fields.integer("num_hidden_layers"), list[int]()
    windows, pattern = fields.get("sliding_window", 4096) is not None, fields.get("sliding_window_pattern", 4)
    if windows and fields.get("layer_types") is None:
        pattern = fields.integer("sliding_window_pattern", default=4, maximum=1024)
        among = [i for i in range(count) if (i + 1) % pattern]
    parsed = decoder_config(
        fields, model_type="exaone4", classes=("Exaone4ForCausalLM",), max_positions=2048, kv_heads=32, eps=1e-5, qk_norm=True,
        window=Window(4096, layers=among),
    )  # fmt: skip
    return replace(parsed, no_rope_layers=frozenset(range(count)) - parsed.window_layers if windows else frozenset())


def layers(config: ModelConfig) -> "list[Layer]":
    return decoder_layers(config, norms=POST_NORMS)
