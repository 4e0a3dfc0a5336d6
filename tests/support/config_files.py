"""config.json of an architecture from fields of a decoder: those of a model with a vision encoder stand in `text_config`."""

from typing import Any

from minirt.modeling.config import ModelConfig

INNER = {"mistral3": "ministral3", "qwen2_5_vl": "qwen2_5_vl_text", "qwen3_vl": "qwen3_vl_text"}
DECODER: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "vocab_size": 131, "max_position_embeddings": 256, "head_dim": 16,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def num_parameters(config: ModelConfig) -> int:
    """Number of weights of the architecture's layers; shared ones count once."""
    from minirt.modeling.model import Model
    from minirt.models import build

    return Model(config, build(config)).num_parameters


def as_file(raw: dict[str, Any]) -> dict[str, Any]:
    """The content of a valid file: `raw`, with what its `model_type` needs."""
    kind = raw["model_type"]
    if kind == "mistral":
        raw = {"sliding_window": None} | raw
    if kind in ("gemma4", "gemma4_text"):  # absent, it means a model with per-layer inputs
        raw = {"hidden_size_per_layer_input": 0} | raw
    if "ministral3" in (kind, INNER.get(kind)):
        raw = {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1}} | raw
    if kind in INNER:
        return {"model_type": kind, "text_config": raw | {"model_type": INNER[kind]}, "vision_config": {"hidden_size": 32}}
    return raw
