"""What the shorter files of families refuse, and what their fields mean, beyond what parity tests of tiny models show."""

from typing import Any

import pytest
from support.config_files import DECODER

from minirt.errors import ConfigError, UnsupportedError
from minirt.models import parse_config

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWED = {"sliding_window": 64}


def raw(kind: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": kind} | DECODER | ({"hidden_size_per_layer_input": 0} if kind == "gemma4_text" else {}) | fields


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("granite", {"residual_multiplier": 0}, "residual_multiplier: .*from 1e-06"),
    ("granite", {"logits_scaling": "8"}, "logits_scaling"),
    ("granite", WINDOWED | {"layer_types": ["linear_attention"] * 4}, "layer_types: .*found 'linear_attention'"),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}}, "rope_scaling.type: .*'su'"),
    ("phi3", {"attention_bias": True}, "attention_bias: .*found true"),
    ("seed_oss", {"attention_out_bias": 1}, "attention_out_bias: .*true or false"),
    ("hunyuan_v1_dense", {"use_cla": True}, "use_cla: .*found true"),
    ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm: .*found false"),
    ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": 9.0, "short_factor": [1.0]}}, "rope_scaling.short_factor"),
    ("hunyuan_v1_dense", {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 9.0}}, "rope_scaling.alpha"),
    ("olmo3", WINDOWED | {"rope_parameters": {FULL: {"rope_type": "default"}, "rope_theta": 1e4}}, "rope_parameters.rope_theta"),
    ("olmo3", WINDOWED | {"rope_parameters": {SLIDING: {"rope_type": "axial"}}}, "rope_type.*'axial'"),
    ("olmo3", {"sliding_window": None, "layer_types": [SLIDING] * 4}, "layer_types: .*sliding_attention"),
    ("exaone4", WINDOWED | {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern: .*an integer"),
    ("exaone4", WINDOWED | {"attention_bias": True}, "attention_bias: .*found true"),
    ("muse_glimmer_text", {"attention_bias": True}, "attention_bias: .*found true"),
    ("muse_glimmer_text", {"layer_rope_theta": [0, 1e4, 5e5, 1e4]}, "layer_rope_theta: another theta.*0 or 10000.*found 500000"),
    ("muse_glimmer_text", {"layer_rope_theta": [0, 1e4]}, "layer_rope_theta: .*expected 4, one for each layer; found 2"),
    ("muse_glimmer_text", {"hidden_activation": "gelu"}, "hidden_activation: .*found 'gelu'"),
    ("muse_glimmer_text", {"final_logit_softcapping": 0}, "final_logit_softcapping: .*from 1e-06"),
    ("gemma4_text", {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input: .*E2B, E4B.*expected 0; found 256"),
    ("gemma4_unified_text", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input: .*found 8"),
    ("gemma4_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers: .*found 2"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: .*found 'all'"),
    ("gemma4_text", {"rope_parameters": {SLIDING: {"rope_type": "default"}}}, "rope_parameters.full_attention: .*missing"),
    ("gemma4_text", {"num_global_key_value_heads": 4, "attention_k_eq_v": True}, "global_head_dim: .*4 KV heads of 512"),
    ("gemma4_text", {"per_layer_config": {"3": {"head_dim": 32}, "1": {"head_dim": 32}}}, "per_layer_config: .*each full layer"),
    ("gemma4_text", {"per_layer_config": {"3": {"sliding_window": 32}}}, "per_layer_config: .*each full layer"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "words"), REFUSED)
def test_refused_by_name(kind: str, fields: dict[str, Any], words: str) -> None:
    """Catches a value that no layer computes, and that is taken for another one or dropped."""
    with pytest.raises((ConfigError, UnsupportedError), match=words):
        parse_config(raw(kind, **fields))


def test_ropes_of_olmo3_in_both_dialects() -> None:
    """Catches yarn in layers with a window, and a theta of one kind of layer that the other one takes."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    older = parse_config(raw("olmo3", rope_theta=3e5, rope_scaling=yarn))
    newer = parse_config(raw("olmo3", rope_parameters={
        FULL: yarn | {"rope_theta": 3e5}, SLIDING: {"rope_type": "default", "rope_theta": 3e5},
    }))  # fmt: skip
    assert older == newer
    ropes = [older.attention(i).rope for i in range(4)]
    assert [(rope.kind, rope.theta) for rope in ropes if rope] == [("default", 3e5)] * 3 + [("yarn", 3e5)]
    assert older.within(256).attention(0).rope == ropes[0], "a window that changes nothing leaves the rope"


def test_layers_without_rope() -> None:
    """Catches EXAONE without windows that loses its rope, or with windows that keeps it; Muse-Glimmer counted from the first."""
    kinds = [SLIDING, FULL, SLIDING, FULL]
    parsed = parse_config(raw("exaone4", layer_types=kinds, sliding_window=9, sliding_window_pattern="LG"))
    assert [parsed.attention(i).rope is None for i in range(4)] == [False, True, False, True]
    assert not parse_config(raw("exaone4", sliding_window=None, sliding_window_pattern=None)).no_rope_layers
    assert parse_config(raw("exaone4", sliding_window=9, layer_types=[FULL] * 4)).no_rope_layers == {0, 1, 2, 3}
    muse = parse_config(raw("muse_glimmer_text", num_hidden_layers=6))
    assert (muse.no_rope_layers, muse.window_layers, muse.sliding_window) == ({1, 5}, {0, 2, 3, 4}, 2048)


def test_heads_of_gemma4_in_both_dialects() -> None:
    """Catches full layers with the heads of the others, an absent field that is not the default of an E model, and a last layer
    with a window."""
    fields = {"num_key_value_heads": 2, "head_dim": 16, "layer_types": [SLIDING, FULL, SLIDING, FULL], "attention_k_eq_v": True}
    older = parse_config(raw("gemma4_text", global_head_dim=32, num_global_key_value_heads=1, **fields))
    heads = {"head_dim": 32, "num_key_value_heads": 1}
    newer = parse_config(raw("gemma4_text", per_layer_config={"1": heads, "3": heads}, **fields))
    assert older == newer
    shapes = [(s.num_kv_heads, s.head_dim, s.v_is_k, s.window) for s in map(older.attention, range(4))]
    assert shapes == [(2, 16, False, 512), (1, 32, True, None)] * 2
    ropes = [older.attention(i).rope for i in range(2)]
    assert [(rope.kind, rope.theta, older.attention(i).rotary_dim) for i, rope in enumerate(ropes) if rope] == [
        ("default", 1e4, 16), ("proportional", 1e6, 32),
    ]  # fmt: skip
    apart = parse_config(raw("gemma4_unified_text", num_global_key_value_heads=1, num_key_value_heads=2, head_dim=16))
    assert (apart.full_kv_heads, apart.full_head_dim, apart.window_layers, apart.sliding_window) == (2, 512, {0, 1, 2}, 1024)
    with pytest.raises(UnsupportedError, match=r"hidden_size_per_layer_input: .*E2B, E4B.*found 256"):
        parse_config({"model_type": "gemma4_text"} | DECODER)


def test_rope_with_alpha() -> None:
    """Catches a base that depends on the length, and one of a wrong exponent."""
    rope = {"type": "dynamic", "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0}
    parsed = parse_config(raw("hunyuan_v1_dense", rope_theta=1e4, rope_scaling=rope))
    assert (parsed.rope.kind, parsed.max_context_len) == ("default", 256)
    assert parsed.rope.theta == pytest.approx(1e4 * 1000 ** (16 / 14))
