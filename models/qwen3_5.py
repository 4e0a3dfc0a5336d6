"""Qwen3.5, 3.6 and 3.8 (dense): three of four layers have gated DeltaNet instead of attention, and attention has an output gate.

Official files are those of a model that also sees images (`Qwen3_5ForConditionalGeneration`): the decoder's fields are in
`text_config`, its tensors below `model.language_model.`. The vision encoder is skipped. The layers of multi-token prediction
(`mtp.*`) are those of a draft model, if drafts are asked for.
"""

from collections.abc import Collection
from functools import partial

from minirt.modeling.config import MROPE_KEYS, Fields, GatedDeltaNetConfig, ModelConfig, MoEConfig
from minirt.models.decoder import decoder_config, read_layer_types, read_mtp
from minirt.models.decoder import draft_layers as draft_layers
from minirt.models.vision import text_fields

_KINDS = ("linear_attention", "full_attention")
# Fields that have one value in every file, and the only one that is computed.
_ONLY = {
    "attn_output_gate": True, "linear_conv_kernel_dim": 4, "hidden_act": "silu", "mamba_ssm_dtype": "float32",
    "output_gate_type": "swish", "use_sliding_window": False,
}  # fmt: skip


CLASSES = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
decoder_fields = partial(text_fields, flat=True)  # the decoder alone is `qwen3_5_text`


def config(fields: Fields) -> ModelConfig:
    return hybrid_config(fields, model_type="qwen3_5")


def hybrid_config(
    fields: Fields, *, model_type: str, classes: Collection[str] = (), moe: MoEConfig | None = None, grouped: bool = False
) -> ModelConfig:
    """The config of a decoder with gated DeltaNet layers. `grouped`: see `GatedDeltaNetConfig`; the others: `decoder_config`.

    As in transformers, a quarter of a head's channels is rotated if nothing else is stated.
    """
    ropes = [fields.nested(name).raw for name in ("rope_parameters", "rope_scaling")]
    if not any("partial_rotary_factor" in level for level in (fields.raw, *ropes)):
        fields = fields.over({**fields.raw, "partial_rotary_factor": 0.25})
    for name, value in _ONLY.items():
        fields.only(name, value, what="the value is not supported")
    gated_delta_net = _gated_delta_net(fields, fields.integer("num_hidden_layers"), grouped)
    return decoder_config(
        fields, model_type=model_type, classes=classes, max_positions=32768, kv_heads=4, head_dim=256, attention_bias=False,
        qk_norm=True, zero_centered_norms=True, attention_gate="q_proj", partial_rotary=True, rope_keys=MROPE_KEYS, moe=moe,
        window=None, gated_delta_net=gated_delta_net, mtp=read_mtp(fields),
    )  # fmt: skip


def _gated_delta_net(fields: Fields, num_layers: int, grouped: bool) -> GatedDeltaNetConfig:
    kinds = read_layer_types(fields, num_layers, _KINDS, " or ".join(_KINDS))
    interval = fields.integer_or_none("full_attention_interval", default=4) or 4
    kinds = kinds or [_KINDS[(i + 1) % interval == 0] for i in range(num_layers)]
    keys = fields.integer("linear_num_key_heads", default=16)
    values = fields.integer("linear_num_value_heads", default=32)
    if values % keys:
        what = "the value heads cannot be divided evenly among the key heads"
        raise fields.wrong("linear_num_value_heads", what, f"a multiple of linear_num_key_heads ({keys})", found=values)
    key_dim, value_dim = (fields.integer(f"linear_{what}_head_dim", default=128) for what in ("key", "value"))
    linear = frozenset(i for i, kind in enumerate(kinds) if kind == _KINDS[0])
    return GatedDeltaNetConfig(keys, values, key_dim, value_dim, linear, grouped)
