"""gpt-oss (20b, 120b): windows in every second layer, attention sinks, and experts with biases and a clamped SwiGLU.

The router's softmax over the chosen experts is that over all of them, divided by the sum of the chosen.
"""

from typing import TYPE_CHECKING

from minirt.modeling.config import Fields, ModelConfig, MoEConfig
from minirt.models.decoder import Window, decoder_config, decoder_layers, num_experts

if TYPE_CHECKING:
    from minirt.layers import Layer

_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def config(fields: Fields) -> ModelConfig:
    """Without `layer_types`, the first layer and every second one after it have a window; without rope parameters, transformers'
    defaults hold."""
    count, experts = fields.integer("num_hidden_layers"), num_experts(fields)
    moe = MoEConfig(
        experts, fields.integer("num_experts_per_tok", default=4, maximum=experts), fields.integer("intermediate_size"),
        bias=True, limit=fields.number("swiglu_limit", default=7.0), alpha=fields.number("swiglu_alpha", default=1.702),
    )  # fmt: skip
    fields.only("experts_per_token", moe.experts_per_token, what="another number of experts")
    if not fields.get("rope_parameters") and not fields.get("rope_scaling"):
        fields = fields.over({**fields.raw, "rope_parameters": _YARN})
    if not fields.get("dtype") and not fields.get("torch_dtype"):  # official files do not say it
        fields = fields.over({**fields.raw, "dtype": "bfloat16"})
    fields.only("hidden_act", "silu", what="experts have a SwiGLU")
    parsed = decoder_config(
        fields, model_type="gpt_oss", classes=("GptOssForCausalLM",), max_positions=131072, kv_heads=8, head_dim=64,
        attention_bias=True, theta=150000.0, eps=1e-5, moe=moe, attention_sinks=True,
        window=Window(128, layers=frozenset(range(0, count, 2))),
    )  # fmt: skip
    if original := parsed.rope.original_max_position:
        what = "another length than the rotary embedding's original_max_position_embeddings"
        fields.only("initial_context_length", original, what=what, hint="correct the wrong one")
    return parsed


def layers(config: ModelConfig) -> "list[Layer]":
    return decoder_layers(config, names={"gate": "router"})
