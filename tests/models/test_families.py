"""What the shorter files of families refuse, and what their fields mean, beyond what parity tests of tiny models show."""

from typing import Any

import pytest
from support.config_files import DECODER

from minirt.errors import ConfigError, UnsupportedError
from minirt.models import parse_config

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWED = {"sliding_window": 64}


def raw(kind: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": kind} | DECODER | fields


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


def test_rope_with_alpha() -> None:
    """Catches a base that depends on the length, and one of a wrong exponent."""
    rope = {"type": "dynamic", "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0}
    parsed = parse_config(raw("hunyuan_v1_dense", rope_theta=1e4, rope_scaling=rope))
    assert (parsed.rope.kind, parsed.max_context_len) == ("default", 256)
    assert parsed.rope.theta == pytest.approx(1e4 * 1000 ** (16 / 14))
