"""Hunyuan dense (0.5B to 7B, translation models): Llama with an RMSNorm on every query and key head after the rotation."""

from dataclasses import replace
from typing import TYPE_CHECKING

from minirt.modeling.config import Fields, ModelConfig
from minirt.models.decoder import decoder_config, decoder_layers

if TYPE_CHECKING:
    from minirt.layers import Layer

_NTK_KEYS = {"type", "rope_type", "rope_theta", "alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}


def config(fields: Fields) -> ModelConfig:
    """`attention_bias` adds a bias to all four attention projections."""
    fields.get("cla_share_factor")  # says nothing without `use_cla`, which is refused
    return decoder_config(
        _static_rope(fields), model_type="hunyuan_v1_dense", classes=("HunYuanDenseV1ForCausalLM",), max_positions=2048, eps=1e-5,
        attention_bias=False, qk_norm=True,
    )  # fmt: skip


def layers(config: ModelConfig) -> "list[Layer]":
    names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
    return decoder_layers(config, lambda i: replace(config.attention(i), qk_norm="weighted_after_rope"), names=names)


def _static_rope(fields: Fields) -> Fields:
    """The type dynamic with a fixed `alpha` is default rope with theta · alpha^(D / (D − 2)), whatever the length.

    Its other keys enter no formula.
    """
    changed = dict(fields.raw)
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.nested(name)
        if rope.raw.get("alpha") is None or "dynamic" not in (rope.get("rope_type"), rope.get("type")):
            continue
        for unknown in rope.raw.keys() - _NTK_KEYS:
            rope.only(unknown)
        size = fields.integer_or_none("head_dim") or fields.integer("hidden_size") // fields.integer("num_attention_heads")
        theta = (rope if "rope_theta" in rope.raw else fields).number("rope_theta", default=10000.0)
        changed.pop("rope_theta", None)
        changed[name] = {"rope_type": "default", "rope_theta": theta * rope.number("alpha") ** (size / (size - 2))}
    return fields.over(changed)
