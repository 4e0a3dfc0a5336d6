"""Qwen2 and Qwen2.5: Llama with biases on q, k and v.

A file may state layers of multi-token prediction, with the fields and tensors of Qwen3.5: the embedded model has such layers.
"""

from minirt.modeling.config import Fields, ModelConfig
from minirt.models.decoder import WINDOW_OFF_BY_DEFAULT, decoder_config, read_mtp
from minirt.models.decoder import draft_layers as draft_layers


def config(fields: Fields) -> ModelConfig:
    """The file has no setting for biases: q, k and v always have one, the output projection never."""
    return decoder_config(
        fields, model_type="qwen2", classes=("Qwen2ForCausalLM",), max_positions=32768, kv_heads=32, qkv_bias=True,
        window=WINDOW_OFF_BY_DEFAULT, mtp=None if fields.get("mtp_num_hidden_layers") is None else read_mtp(fields),
    )  # fmt: skip
