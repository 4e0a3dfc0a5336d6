"""Fields of other architectures: those that would change the model are refused by name in every architecture."""

import json
import re
import warnings
from typing import Any

import pytest
import transformers
from support.config_files import DECODER, INNER, as_file

from minirt.errors import ConfigError, UnsupportedError
from minirt.models import ARCHITECTURES, parse_config
from minirt.models.foreign_fields import FOREIGN_FIELDS

FIELDS = {name: neutral for table in FOREIGN_FIELDS.values() for name, neutral in table.items()}


SHARED = ("qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")  # with a shared expert


def raw_config(model_type: str, **fields: Any) -> dict[str, Any]:
    raw = {"model_type": model_type} | DECODER
    if model_type in (*SHARED, "qwen3_moe", "gpt_oss"):
        raw |= {"num_experts": 12, "num_experts_per_tok": 3}
    if model_type in (*SHARED, "qwen3_moe"):
        raw["moe_intermediate_size"] = 40
    if model_type in SHARED:
        raw["shared_expert_intermediate_size"] = 56
    return as_file(raw | fields)


# Fields of the table that an architecture reads itself.
OF_QWEN3_5 = {
    "attn_output_gate", "full_attention_interval", "linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim",
    "text_config",
}  # fmt: skip
OF_MIXTURES = {"num_experts", "num_local_experts"}
OF_SHARED = OF_MIXTURES | {"shared_expert_intermediate_size"}
OF_MUSE = {"layer_rope_theta", "qk_scale_factor", "output_multiplier", "final_logit_softcapping", "post_norm_eps"}
OF_GEMMA = {
    "attention_k_eq_v", "num_kv_shared_layers", "use_bidirectional_attention", "per_layer_config", "enable_moe_block",
    "hidden_size_per_layer_input", "use_double_wide_mlp", "final_logit_softcapping", "text_config",
}  # fmt: skip
OWN = {
    "qwen3_5": OF_QWEN3_5, "qwen3_5_text": OF_QWEN3_5, "qwen3_5_moe": OF_QWEN3_5 | OF_SHARED,
    "qwen3_5_moe_text": OF_QWEN3_5 | OF_SHARED, "qwen3_next": OF_QWEN3_5 - {"text_config"} | OF_SHARED,
    "qwen2_moe": OF_SHARED, "qwen3_moe": OF_MIXTURES, "smollm3": {"no_rope_layers", "no_rope_layer_interval"},
    "hunyuan_v1_dense": {"cla_share_factor"}, "gpt_oss": OF_MIXTURES | {"swiglu_limit", "swiglu_alpha"},
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), OF_GEMMA),
    "muse_glimmer": OF_MUSE | {"text_config"}, "muse_glimmer_text": OF_MUSE | {"text_config"},
    "granite": {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"},
}  # fmt: skip


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_refused_in_every_architecture(name: str, kind: str) -> None:
    """Catches a field that an architecture ignores: the model would be computed as another one, without an error."""
    if name in OWN.get(kind, ()):
        return
    with pytest.raises(UnsupportedError) as caught:
        parse_config(raw_config(kind, **{name: 77}), file="some/config.json")
    place = f"text_config.{name}" if kind in INNER else name
    assert str(caught.value).startswith(f"some/config.json, field {place}: the field means ")
    assert "found 77" in str(caught.value)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_neutral_values_are_taken(kind: str) -> None:
    """Catches a refusal of a value with which a field changes nothing."""
    plain = parse_config(raw_config(kind))
    for name, neutral in FIELDS.items():
        for value in (None, [], {}, *neutral, [*neutral, *neutral]):
            if name not in OWN.get(kind, ()):
                assert parse_config(raw_config(kind, **{name: value})) == plain, (name, value)


CHANGES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("llama", {"no_rope_layers": [1, 1, 1, 0]}, ["no_rope_layers", "another position embedding", "'llama'", "found a list"]),
    ("llama", {"no_rope_layer_interval": 4}, ["no_rope_layer_interval", "found 4"]),
    ("qwen3", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "scores of attention", "found 50.0"]),
    ("llama", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping", "a factor or a bound"]),
    ("llama", {"query_pre_attn_scalar": 256}, ["query_pre_attn_scalar", "expected no field or 16; found 256"]),
    ("llama", {"attention_multiplier": 0.5}, ["attention_multiplier", "expected no field or 0.25; found 0.5"]),
    ("llama", {"embedding_multiplier": True}, ["embedding_multiplier", "found true"]),
    ("llama", {"mlp_multipliers": [1.0, 0.5]}, ["mlp_multipliers"]),
    ("llama", {"kv_channels": 32}, ["kv_channels", "expected no field or 16"]),
    ("llama", {"hidden_activation": "gelu"}, ["hidden_activation", "'silu' or 'swish'; found 'gelu'"]),
    ("llama", {"use_qk_norm": True}, ["use_qk_norm", "expected no field or false; found true"]),
    ("qwen3", {"use_qk_norm": False}, ["use_qk_norm", "expected no field or true; found false"]),
    ("mistral", {"attention_bias": True}, ["attention_bias", "found true"]),
    ("mistral", {"mlp_bias": True}, ["mlp_bias", "found true"]), ("qwen2", {"mlp_bias": True}, ["mlp_bias", "found true"]),
    ("qwen2", {"qkv_bias": False}, ["qkv_bias", "expected no field or true"]),
    ("llama", {"qkv_bias": True}, ["qkv_bias", "expected no field or false"]),
    ("qwen3", {"attention_bias": True, "attention_out_bias": False}, ["attention_out_bias", "found false"]),
    ("llama", {"use_rope": False}, ["use_rope", "found false"]),
    ("qwen3_moe", {"shared_expert_intermediate_size": 56}, ["shared_expert_intermediate_size", "found 56"]),
    ("qwen3_moe", {"scoring_func": "sigmoid"}, ["scoring_func", "'softmax'; found 'sigmoid'"]),
    ("qwen3_moe", {"first_k_dense_replace": 1}, ["first_k_dense_replace"]),
    ("llama", {"kv_lora_rank": 512}, ["kv_lora_rank", "latent attention"]),
    ("llama", {"text_config": {"hidden_size": 8}}, ["text_config", "found an object"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "words"), CHANGES)
def test_what_changes_the_model_is_refused(kind: str, fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedError, match="".join(f"(?=.*{re.escape(word)})" for word in words)):
        parse_config(raw_config(kind, **fields))


@pytest.mark.parametrize(("kind", "fields"), [
    ("llama", {"query_pre_attn_scalar": 16, "attention_multiplier": 0.25, "rotary_dim": 16, "kv_channels": 16}),
    ("llama", {"no_rope_layers": [1, True, 1, 1], "logit_scale": 1.0, "residual_multiplier": 1, "rope_interleaved": False}),
    ("llama", {"attention_bias": True, "attention_out_bias": True, "use_qkv_bias": True, "dim_model_base": 96}),
    ("llama", {"hidden_act": "gelu_new", "hidden_activation": "gelu_pytorch_tanh", "rotary_emb_base": 10000}),
    ("qwen2", {"attention_bias": True, "qkv_bias": True}),  # transformers' Qwen2 has the same biases with either value
    ("qwen2", {"attention_bias": False, "mlp_bias": False}),
    ("qwen3", {"use_qk_norm": True, "qk_norm": True, "attention_bias": False}),
    ("qwen3_moe", {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "scoring_func": "softmax"}),
    ("qwen3_moe", {"n_shared_experts": 0, "unpadded_vocab_size": 131}),
    ("mistral", {"attention_bias": False, "mlp_bias": False, "attention_sinks": False}),
])  # fmt: skip
def test_values_that_say_what_the_architecture_computes_anyway(kind: str, fields: dict[str, Any]) -> None:
    """Catches a refusal of a field that repeats what the architecture computes."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse_config(raw_config(kind, **fields)).num_layers == 4


# Configuration classes of transformers, and a field that tells them from Llama. As a "llama" file, their defaults are refused.
OTHERS = {
    "SmolLM3": "no_rope_layer", "Llama4Text": "attention_chunk_size", "Gemma2": "attn_logit_softcapping",
    "Gemma3Text": "query_pre_attn_scalar",
    "Gemma3nText": "laurel_rank", "Cohere": "logit_scale", "Cohere2": "logit_scale", "DeepseekV2": "kv_lora_rank",
    "DeepseekV3": "kv_lora_rank", "Glm4Moe": "n_routed_experts", "GptOss": "swiglu_limit", "FalconH1": "mamba_d",
    "GPTNeoX": "use_parallel_residual", "Starcoder2": "use_bias", "Qwen3Next": "linear_num",
    "Qwen2Moe": "shared_expert", "Bamba": "mamba_d_state", "Jamba": "attn_layer_period", "Lfm2": "conv_L_cache",
    "GraniteMoeHybrid": "mamba", "Zamba2": "mamba", "RecurrentGemma": "lru_width", "Doge": "keep_window_size",
    "DiffLlama": "lambda_std_dev", "Ernie4_5_Moe": "moe_num_experts", "LongcatFlash": "kv_lora_rank",
}  # fmt: skip


@pytest.mark.parametrize("family", OTHERS)
def test_other_architectures_as_llama(family: str) -> None:
    """Catches a missing entry: the defaults of these classes would plan as a Llama that fits."""
    theirs = getattr(transformers, f"{family}Config")().to_dict()
    known = set(raw_config("llama")) | {"dtype", "architectures", "rope_parameters", "hidden_act", "layer_types"}
    with pytest.raises(UnsupportedError):
        parse_config(raw_config("llama", **{name: value for name, value in theirs.items() if name not in known}))
    named = {name for name in theirs if re.search(OTHERS[family], name)}
    assert named, "the field has another name"
    for name in named & FIELDS.keys():
        if theirs[name] is not None:
            with pytest.raises(UnsupportedError, match=name):
                parse_config(raw_config("llama", **{name: theirs[name]}))


def unread(raw: dict[str, Any]) -> list[str]:
    """The warnings of unknown fields."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parse_config(raw, "c.json")
    return [str(warning.message) for warning in caught if "unknown, and ignored" in str(warning.message)]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_field_that_nobody_reads_is_named(kind: str) -> None:
    """Catches a field that is ignored without a word, also in `text_config`; and a name that was read at another level."""
    (message,) = unread(raw_config(kind, factor=2.0, new_gate=False, quiet=None, empty=[], temperature=1.0, top_p=0.9))
    inner = "text_config." if kind in INNER else ""
    assert message.startswith(f"c.json: fields {inner}factor, {inner}new_gate, {inner}top_p are unknown, and ignored")
    (message,) = unread(raw_config(kind) | {"new_gate": 0})
    assert message.startswith("c.json: field new_gate is unknown")


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_files_of_transformers_have_no_unknown_fields(kind: str) -> None:
    """Catches a warning for a field that transformers writes into each file of a supported architecture."""
    theirs = json.loads(json.dumps(transformers.AutoConfig.for_model(kind).to_dict(), default=str))
    for level in (theirs, theirs.get("text_config") or {}):
        if "hidden_size_per_layer_input" in level:  # the default of gemma4 is a model that is refused
            level["hidden_size_per_layer_input"] = 0
    assert unread(theirs) == []


@pytest.mark.parametrize(("fields", "place", "expected"), [
    ({"layer_norm_epsilon": 1e-3}, "layer_norm_epsilon", "rms_norm_eps"), ({"rope_base": 1e6}, "rope_base", "rope_theta"),
    ({"num_key_value_heads": None, "num_kv_heads": 2}, "num_kv_heads", "num_key_value_heads"),
])  # fmt: skip
def test_another_name_of_a_field_with_a_default_is_refused(fields: dict[str, Any], place: str, expected: str) -> None:
    """Catches a default in place of the value that the file states under the name of another runtime."""
    with pytest.raises(ConfigError, match=f"field {place}: the field has another name here; expected {expected}; found "):
        parse_config(raw_config("llama", **fields))
    assert unread(raw_config("llama", **fields | {expected: {"rms_norm_eps": 1e-3}.get(expected, 2)})) != []
