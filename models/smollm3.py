"""SmolLM3: Llama, with some layers without rotary embedding."""

from minirt.modeling.config import Fields, ModelConfig
from minirt.models.decoder import Window, decoder_config, read_no_rope_layers


def config(fields: Fields) -> ModelConfig:
    """Without `no_rope_layers`, the last of every `no_rope_layer_interval` layers has no rotary embedding.

    Without `layer_types`, these are also the layers that have a window, if `use_sliding_window` is true.
    """
    without = read_no_rope_layers(fields)
    return decoder_config(
        fields, model_type="smollm3", classes=("SmolLM3ForCausalLM",), max_positions=32768, kv_heads=4, theta=2e6,
        attention_bias=False, mlp_bias=fields.boolean("mlp_bias", default=False), tie_word_embeddings=True,
        no_rope_layers=without, window=Window(used=False, layers=without),
    )  # fmt: skip
