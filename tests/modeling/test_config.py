"""config.json: accepted fields in both dialects of transformers, and refused fields, which errors name."""

import copy
import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.config_files import DECODER, num_parameters
from support.raising import raises

from minirt.errors import ConfigError, UnsupportedError
from minirt.modeling.config import Fields, ModelConfig, check_token_ids
from minirt.models import parse_config
from minirt.models.decoder import decoder_config

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 96}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def raw_config(model_type: str = "llama", **fields: Any) -> dict[str, Any]:
    """A small valid config.json. A field given as `...` is removed."""
    raw = {"model_type": model_type} | DECODER | {"num_hidden_layers": 3}
    del raw["head_dim"]
    if model_type == "mistral":
        raw["sliding_window"] = None
    if model_type == "gpt_oss":
        raw |= {"num_experts": 12, "num_experts_per_tok": 3}
    if model_type.endswith("_moe"):
        raw |= {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    if model_type == "qwen2_moe":
        raw["shared_expert_intermediate_size"] = 56
    raw |= fields
    return {name: value for name, value in raw.items() if value is not ...}


CLASSES = {
    "llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config,
    "mistral": transformers.MistralConfig, "qwen2_moe": transformers.Qwen2MoeConfig, "qwen3_moe": transformers.Qwen3MoeConfig,
    "granite": transformers.GraniteConfig, "gpt_oss": transformers.GptOssConfig,
}  # fmt: skip
# Options of transformers' classes. Each option has a non-default value in at least one entry.
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}), ("llama", {"attention_bias": True, "num_key_value_heads": None, "dtype": "bfloat16", "rms_norm_eps": 1e-5}),
    ("llama", {"mlp_bias": True, "head_dim": 10, "hidden_act": "gelu", "tie_word_embeddings": True, "dtype": "float16"}),
    ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 20000.0}}),
    ("qwen2", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "dtype": "bfloat16"}),
    ("qwen2", {"rope_parameters": YARN | {"rope_theta": 1e6}, "hidden_act": "gelu_new"}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}),
    ("qwen3", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16, "truncate": False}}),
    ("qwen3", {"attention_bias": True, "head_dim": 64, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 511}),
    ("mistral", {"head_dim": 32, "num_key_value_heads": 3}),
    ("qwen3_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [0], "head_dim": 32}),
    ("qwen3_moe", {"num_experts": ..., "num_local_experts": 7, "num_experts_per_tok": 7, "mlp_only_layers": None}),
    ("qwen2_moe", {"qkv_bias": False, "norm_topk_prob": True}),
    ("mistral", {"rope_parameters": YARN | {"attention_factor": 1.25, "beta_slow": 2.0}, "hidden_act": "swish"}),
]  # fmt: skip


def check_against(parsed: ModelConfig, theirs: Any) -> None:
    """Compare each field with transformers' config object of the same file."""
    for name in ("model_type", "hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(parsed, name) == getattr(theirs, name)
    assert parsed.max_position_embeddings == theirs.max_position_embeddings
    assert parsed.num_layers == theirs.num_hidden_layers
    assert parsed.num_heads == theirs.num_attention_heads
    assert parsed.num_kv_heads == theirs.num_key_value_heads
    assert parsed.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    gelu = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu"}
    assert parsed.hidden_act == gelu.get(theirs.hidden_act, theirs.hidden_act)
    assert parsed.dtype == str(theirs.dtype or "float32").removeprefix("torch.")
    assert parsed.rope.kind == theirs.rope_parameters["rope_type"]
    assert parsed.rope.theta == theirs.rope_parameters["rope_theta"]
    assert parsed.rope.factor == theirs.rope_parameters.get("factor", 1.0)


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_both_dialects_mean_the_same(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Catches a field of a file that transformers writes, in either dialect, which means something else here."""
    theirs = CLASSES[kind](**raw_config(kind, **copy.deepcopy(options)))
    theirs.save_pretrained(tmp_path)
    check_against(parse_config(json.loads((tmp_path / "config.json").read_text())), theirs)
    check_against(parse_config(json.loads(json.dumps(theirs.to_dict()))), theirs)
    new = raw_config(kind, **options)
    old = copy.deepcopy(new)
    rope = old.pop("rope_parameters", {})
    if "rope_theta" in rope:
        old["rope_theta"] = rope.pop("rope_theta")
    if rope.get("rope_type", "default") == "default":
        old["rope_scaling"] = None
    else:
        old["rope_scaling"] = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    if "dtype" in old:
        old["torch_dtype"] = old.pop("dtype")
    assert parse_config(old) == parse_config(new)
    check_against(parse_config(old), CLASSES[kind](**copy.deepcopy(old)))
    # transformers 5 may write both the old and the new keys
    assert parse_config(new | {"rope_theta": parse_config(new).rope.theta}) == parse_config(new)
    assert parse_config(old | new | {"rope_scaling": old["rope_scaling"]}) == parse_config(new)


def test_absent_fields_take_transformers_defaults() -> None:
    optional = {"num_key_value_heads": ..., "max_position_embeddings": ...}
    for kind, theirs in CLASSES.items():
        if kind == "gpt_oss":  # whose files state no dtype
            continue
        heads = {"llama": 6, "mistral": 16, "qwen2_moe": 16}.get(kind, 32)
        raw = raw_config(kind, num_attention_heads=heads, hidden_size=heads * 16, **optional)
        check_against(parse_config(raw), theirs(**raw))
    # null means num_attention_heads, even if the class has another default (Mistral's class no longer accepts null)
    for kind, theirs in CLASSES.items():
        raw = raw_config(kind, num_key_value_heads=None)
        assert parse_config(raw).num_kv_heads == 6
        if kind not in ("mistral", "qwen2_moe", "qwen3_moe", "gpt_oss"):  # transformers' classes refuse null, or fail on it
            check_against(parse_config(raw), theirs(**raw))
    assert parse_config(raw_config("qwen3")).head_dim == 128  # not 96 / 6
    assert parse_config(raw_config("llama", head_dim=None)).head_dim == 16


@pytest.mark.parametrize(("kind", "fields", "stated"), [
    ("llama", {}, ""), ("llama", {"attention_bias": True}, "qkv o"), ("llama", {"mlp_bias": True}, "mlp"), ("qwen2", {}, "qkv"),
    ("qwen2", {"attention_bias": False}, "qkv"),  # transformers has no such option
    ("qwen3", {}, "norm"), ("qwen3", {"attention_bias": True}, "qkv o norm"),
    ("qwen3_moe", {"attention_bias": True}, "qkv o norm"), ("qwen2_moe", {}, "qkv"), ("qwen2_moe", {"qkv_bias": False}, ""),
    ("mistral", {"attention_bias": False, "mlp_bias": False}, ""),
])  # fmt: skip
def test_architectures_have_their_biases(kind: str, fields: dict[str, Any], stated: str) -> None:
    """Catches a bias or a norm of another architecture."""
    c = parse_config(raw_config(kind, **fields))
    parts = {"qkv": c.qkv_bias, "o": c.o_bias, "mlp": c.mlp_bias, "norm": c.qk_norm}
    assert [name for name, has in parts.items() if has] == stated.split()


def test_dtype() -> None:
    """Of either name; "auto" is as if it were absent."""
    for new, old, dtype in (
        (..., ..., "float32"), (None, "float16", "float16"), ("float16", "float16", "float16"), ("float16", None, "float16"),
        ("bfloat16", "torch.bfloat16", "bfloat16"), (..., "auto", "float32"),
    ):  # fmt: skip
        assert parse_config(raw_config(dtype=new, torch_dtype=old)).dtype == dtype
    raises(r"torch_dtype.*float64", parse_config, raw_config(torch_dtype="torch.float64"), error=UnsupportedError)


# Published releases, and two common forms of files that tools have changed: config.json, and facts from the model cards.
REAL: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("real_configs.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", REAL)
def test_real_config(name: str) -> None:
    """Each loads, with the published facts and as transformers reads it, and without a warning unless one is stated."""
    facts, raw = dict(REAL[name]["facts"]), REAL[name]["config"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parsed = parse_config(copy.deepcopy(raw))
        check_token_ids(raw, "config.json", parsed.vocab_size)
    expected = facts.pop("warning", None)
    assert [expected in str(warning.message) for warning in caught] == ([True] if expected else [])
    assert num_parameters(parsed) / 1e9 == pytest.approx(facts.pop("billions"), rel=2e-3)
    values = {name: getattr(parsed, name) for name in ModelConfig.__dataclass_fields__}
    values |= {f"rope_{name}": getattr(parsed.rope, name) for name in ("kind", "theta", "factor")}
    values |= {"context_len": parsed.context_len, "tied": parsed.tie_word_embeddings}
    assert {name: values[name] for name in facts} == facts
    check_against(parsed, CLASSES[raw["model_type"]](**copy.deepcopy(raw)))


def test_gpt_oss_without_a_dtype() -> None:
    """Its official files do not state one. Catches weights of twice the size."""
    raw = {name: value for name, value in REAL["gpt-oss-20b"]["config"].items() if name != "torch_dtype"}
    assert parse_config(raw).dtype == "bfloat16"


GPT_OSS = REAL["gpt-oss-20b"]["config"]
BAD_GPT_OSS: list[tuple[dict[str, Any], str]] = [
    ({"num_experts_per_tok": 33}, "num_experts_per_tok: .*expected an integer from 1 to 32; found 33"),
    ({"initial_context_length": 8192}, "initial_context_length: another length than .*original.*; expected 4096; found 8192"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 32.0}}, "initial_context_length: another .*expected 131072; found 4096"),
    ({"experts_per_token": 2}, "experts_per_token: another number of experts; expected 4; found 2"),
    ({"num_experts": 16}, "num_experts and num_local_experts contradict each other; found .*16.*32"),
    ({"swiglu_limit": None}, "swiglu_limit: .*expected a number from .*; found null"),
    ({"swiglu_alpha": "1.7"}, "swiglu_alpha: .*expected a number from .*; found '1.7'"),
    ({"sliding_window": 128.5}, "sliding_window: .*expected an integer .*; found 128.5"),
    ({"sliding_window": None}, "layer_types: .*expected full_attention, or a sliding_window .*; found sliding_attention"),
    ({"layer_types": GPT_OSS["layer_types"][:-1]}, "layer_types: .*expected 24, one for each layer; found 23"),
    ({"rope_scaling": GPT_OSS["rope_scaling"] | {"truncate": 0}}, "rope_scaling.truncate: .*expected true or false; found 0"),
    ({"hidden_act": "gelu"}, "hidden_act: experts have a SwiGLU; expected 'silu'; found 'gelu'"),
    ({"quantization_config": {"quant_method": "MXFP4"}}, "quant_method: .* or mxfp4; found 'MXFP4'"),
    ({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": "lm_head"}},
     "modules_to_not_convert: .*expected a list of strings; found 'lm_head'"),
    ({"torch_dtype": "mxfp4"}, "torch_dtype: .*expected float32 or bfloat16 or float16; found 'mxfp4'"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), BAD_GPT_OSS)
def test_wrong_fields_of_gpt_oss(fields: dict[str, Any], words: str) -> None:
    """Catches a field that is ignored or believed, and a message that does not say what is expected there."""
    raises(f"^some/config.json.*{words}", parse_config, GPT_OSS | fields, file="some/config.json", error=ConfigError)


HUGE = 10**400
SIZES = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
OPTIONAL_SIZES = ["num_key_value_heads", "max_position_embeddings", "head_dim"]
BAD: list[tuple[str, Any]] = [
    *[(name, value) for name in SIZES for value in (..., None)],
    *[(name, value) for name in SIZES + OPTIONAL_SIZES for value in (0, -2, 8.0, "8", True, [8], {}, HUGE, math.nan)],
    ("hidden_size", 65538),  # even, so that no other rule refuses it
    ("hidden_size", 97),  # not a multiple of num_attention_heads, and there is no head_dim
    ("head_dim", 15),  # rotary pairs
    ("rope_theta", 1),  # yarn divides by log(1) = 0, and all frequencies are equal
    *[
        (name, value)
        for name, values in {
            "num_hidden_layers": (1025,), "num_attention_heads": (1026,), "intermediate_size": ((1 << 20) + 1,),
            "vocab_size": ((4 << 20) + 1,), "max_position_embeddings": ((16 << 20) + 1, None), "head_dim": (1026,),
            "num_key_value_heads": (4, 12),  # of 6 query heads
            "rms_norm_eps": (0, -1e-6, 1, math.nan, math.inf, "1e-6", None, True), "tie_word_embeddings": (1, None, "false"),
            "attention_bias": ("no",), "mlp_bias": (0,), "hidden_act": (None, 3), "dtype": (16,), "torch_dtype": (["float32"],),
            "layer_types": ("full_attention", ["full_attention", 1]), "architectures": ("LlamaForCausalLM", [None]),
            "partial_rotary_factor": ("1",), "rope_scaling": ("linear", [1]),
            "rope_theta": (0, -10000.0, None, math.inf, "10000", HUGE), "rope_parameters": (True,),
        }.items()
        for value in values
    ],
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda v: str(v)[:20])
def test_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw_config(**{name: value}), file="some/config.json")
    assert name in str(caught.value)
    assert "some/config.json" in str(caught.value)
    assert not isinstance(caught.value, UnsupportedError)
    assert len(str(caught.value)) < 400


BAD_ROPE: list[tuple[str, dict[str, Any]]] = [
    ("factor", {"rope_type": "linear"}),
    *[("factor", {"rope_type": "linear", "factor": value}) for value in (None, 0.5, "2", math.inf)],
    ("factor", {"rope_type": "yarn", "original_max_position_embeddings": 64}),
    ("factor", YARN | {"factor": None, "original_max_position_embeddings": 257}),  # it would follow as less than 1
    *[(name, {k: v for k, v in LLAMA3.items() if k != name}) for name in ("low_freq_factor", "high_freq_factor")],
    ("high_freq_factor", LLAMA3 | {"high_freq_factor": 1.0}),  # equal to low_freq_factor: 0 / 0 in the blend
    *[(name, LLAMA3 | {name: value}) for name, value in (("factor", math.nan), ("original_max_position_embeddings", 0))],
    ("beta_fast", YARN | {"beta_fast": 1, "beta_slow": 32}),
    ("mscale_all_dim", YARN | {"attention_factor": 1.0, "mscale_all_dim": []}),  # checked even though it is not used
    *[
        (name, YARN | {name: value})
        for name, value in (
            ("factor", 0.99), ("original_max_position_embeddings", 64.0), ("beta_fast", -1), ("beta_slow", "1"),
            ("attention_factor", -1.0), ("mscale", math.nan), ("truncate", 1),
        )
    ],
    ("rope_theta", {"rope_type": "default", "rope_theta": None}), ("rope_type", {"rope_type": None}), ("type", {"type": 7}),
]  # fmt: skip


@pytest.mark.parametrize("dialect", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(("name", "rope"), BAD_ROPE)
def test_bad_rope_value_is_named(name: str, rope: dict[str, Any], dialect: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw_config(**{dialect: rope}))
    assert f"{dialect}.{name}" in str(caught.value)
    assert not isinstance(caught.value, UnsupportedError)


ROPE1, ROPE2 = {"rope_theta": 5e5, "rope_type": "default"}, {"rope_theta": 1e6, "rope_type": "default"}
# Fields that contradict each other, and the words of the refusal.
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e6}},
        "rope_scaling and rope_parameters contradict",
    ),
    ({"num_local_experts": 11}, "num_experts and num_local_experts contradict"),
    ({"num_experts_per_tok": 13}, "num_experts_per_tok: .* from 1 to 12; found 13"),
    ({"mlp_only_layers": [-1]}, "mlp_only_layers: .*a list of integers from 0"),
    ({"mlp_only_layers": [0, 99]}, "mlp_only_layers: .*does not have; expected numbers from 0 to .*found 99"),
    ({"rope_theta": 1e6, "rope_parameters": ROPE1}, r"rope_theta: .* 500000\.0, as in rope_parameters\.rope_theta; found 1"),
    ({"rope_theta": 1e6, "rope_scaling": ROPE1}, "field rope_theta: .*contradicts"),
    ({"rope_theta": 1e6, "rope_parameters": ROPE1, "rope_scaling": ROPE1}, "field rope_theta: .*contradicts"),
    ({"rope_parameters": ROPE1, "rope_scaling": ROPE2}, "contradict each other"),
    ({"rope_scaling": LLAMA3 | {"type": "yarn"}}, r"rope_scaling\.type: type and rope_type contradict.*llama3.*yarn"),
    ({"rope_scaling": YARN, "original_max_position_embeddings": 65}, r"rope_scaling\.original_max_position_embeddings.*65.*64"),
    ({"dtype": "bfloat16", "torch_dtype": "float16"}, "dtype and torch_dtype contradict.*bfloat16.*float16"),
    ({"layer_types": ["full_attention"] * 2}, r"layer_types: .*3, one for each layer; found 2"),
    ({"layer_types": ["full_attention"] * 4}, r"layer_types: .*found 4"),
    ({"rope_parameters": {"rope_type": "default", "type": "mrope"}}, r"rope_parameters\.type: type and rope_type contradict"),
    ({"layer_types": []}, r"layer_types: .*found 0"),
]


@pytest.mark.parametrize(("fields", "words"), CONTRADICTIONS)
def test_contradictions_are_refused(fields: dict[str, Any], words: str) -> None:
    """Catches one of two statements that silently wins."""
    kind = "qwen3_moe" if "experts" in words or "mlp_only" in words else "llama"
    raises(words, parse_config, raw_config(kind, **fields), error=ConfigError)


@pytest.mark.parametrize("fields", [
    {"rope_theta": 5e5, "rope_parameters": ROPE1},
    {"rope_theta": 500000, "rope_parameters": ROPE1},  # an integer of the same value
    {"rope_theta": None, "rope_parameters": ROPE1},
    {"rope_theta": 5e5, "rope_parameters": ROPE1, "rope_scaling": None},
    {"rope_theta": 5e5, "rope_scaling": {"type": "default", "rope_type": "default"}},
])  # fmt: skip
def test_values_at_two_places_may_agree(fields: dict[str, Any]) -> None:
    assert parse_config(raw_config(**fields)).rope.theta == 5e5


BAD_MOE = {
    "num_experts": [..., 0, 1025], "num_experts_per_tok": [...], "moe_intermediate_size": [...], "norm_topk_prob": [None],
    "decoder_sparse_step": [0], "mlp_only_layers": [[True], 1], "shared_expert_intermediate_size": [..., 0],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_MOE.items() for value in values])
def test_bad_fields_of_experts_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}: the field is missing" if value is ... else name):
        parse_config(raw_config("qwen2_moe" if name.startswith("shared") else "qwen3_moe", **{name: value}))


def test_which_layers_are_mixtures() -> None:
    """Catches a step or a list of dense layers that begins at another layer."""

    def mixtures(**fields: Any) -> list[int]:
        parsed = parse_config(raw_config("qwen3_moe", num_hidden_layers=6, **fields))
        return [i for i in range(6) if parsed.is_mixture(i)]

    assert mixtures() == [0, 1, 2, 3, 4, 5]
    assert mixtures(decoder_sparse_step=2) == [1, 3, 5]
    assert mixtures(decoder_sparse_step=2, mlp_only_layers=[0, 3]) == [1, 5]
    assert mixtures(decoder_sparse_step=7) == []
    assert not parse_config(raw_config("qwen3")).is_mixture(1)


OTHER_CLASSES = {
    "llama": (
        "LlamaForSequenceClassification", "LlamaForTokenClassification", "LlamaModel", "LlamaForCausalLMEagle",
        "MistralForCausalLM",
    ),
    "qwen3_moe": ("Qwen3ForCausalLM",), "qwen2": ("Qwen2ForRewardModel",), "qwen3": ("Qwen2ForCausalLM",),
    "mistral": ("MistralModel", ""),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in OTHER_CLASSES.items() for name in names])
def test_other_classes_are_refused(kind: str, name: str) -> None:
    """Catches a head of another kind, or another architecture, that is computed as a causal model."""
    known = CLASSES[kind].__name__.replace("Config", "ForCausalLM")
    words = f"architectures: .*{kind}.*{known}.*found {name!r}"
    raises(words, parse_config, raw_config(kind, architectures=[name]), error=UnsupportedError)
    raises("architectures", parse_config, raw_config(kind, architectures=[known, name]), error=UnsupportedError)
    for accepted in ([known], [], None, ...):
        assert parse_config(raw_config(kind, architectures=accepted)).model_type == kind


VOCABULARY = 131
BAD_IDS = [131, 10**30, -1, True, 1.0, "1", {"a": 1}]


BAD_TOKENS = [(name, value, "from 0 to 130; found") for name in ("eos_token_id", "bos_token_id") for value in BAD_IDS]
BAD_TOKENS += [("eos_token_id", [0, value], "from 0 to 130; found") for value in BAD_IDS]
BAD_TOKENS += [("pad_token_id", value, "") for value in (-2, 10**30, "131", True, [0], 1.5)]


@pytest.mark.parametrize(("name", "value", "words"), BAD_TOKENS, ids=lambda v: str(v)[:20])
def test_special_token_outside_the_vocabulary(name: str, value: Any, words: str) -> None:
    """Catches an id that the model cannot have."""
    words = rf"^g\.json, field {name}: .*{words}"
    raises(words, check_token_ids, {name: value}, "g.json", VOCABULARY, error=ConfigError)


def test_usual_special_tokens() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for pad in (None, -1, 0, 130, 131):
            check_token_ids({"pad_token_id": pad, "bos_token_id": None, "eos_token_id": [0, 130]}, "g.json", VOCABULARY)
        check_token_ids({"bos_token_id": 130, "eos_token_id": []}, "g.json", VOCABULARY)
        check_token_ids({"eos_token_id": None}, "g.json", VOCABULARY)
    with pytest.warns(UserWarning, match=r"g\.json, field pad_token_id: 132 is outside the vocabulary of 131"):
        check_token_ids({"pad_token_id": 132}, "g.json", VOCABULARY)


UNSUPPORTED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("llama", {"quantization_config": {"quant_method": "aqlm", "bits": 2}}, ["quantization_config", "aqlm"]),
    ("llama", {"quantization_config": {}}, ["quantization_config", "unnamed"]),
    ("qwen2", {"compression_config": {"quant_method": "compressed-tensors"}}, ["compressed-tensors"]),
    ("llama", {"hidden_act": "relu"}, ["hidden_act", "relu"]), ("llama", {"dtype": "float64"}, ["dtype", "float64"]),
    ("llama", {"torch_dtype": "float8_e4m3fn"}, ["torch_dtype", "float8_e4m3fn"]),
    ("llama", {"num_local_experts": 8}, ["num_local_experts", "8"]), ("qwen3", {"num_experts": 128}, ["num_experts", "128"]),
    ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5", "passes partial_rotary=True to decoder_config"]),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.25}}, ["rope_parameters.partial_rotary_factor"]),
    ("llama", {"rope_parameters": {"rope_type": "axial", "factor": 2.0}}, ["rope_parameters.rope_type", "axial"]),
    ("llama", {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}}, ["rope_parameters.mrope_section"]),
    ("mamba2", {}, ["mamba2"]),
    ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, ["mrope"]),
    ("qwen3", {"rope_scaling": YARN | {"attn_factor": 0.8}}, ["attn_factor", "yarn"]),
    ("qwen3", {"rope_scaling": YARN | {"extrapolation_factor": 0.5}}, ["extrapolation_factor", "yarn"]),
    ("mistral", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}, ["llama_4_scaling_beta", "yarn"]),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "attn_factor": True}}, ["attn_factor", "linear"]),
    ("llama", {"rope_parameters": LLAMA3 | {"beta_fast": 32}}, ["beta_fast", "llama3"]),
    ("llama", {"rope_parameters": {"rope_type": "default", "factor": 2.0}}, ["factor", "default"]),
    ("llama", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, ["sliding_attention"]),
    ("qwen3", {"layer_types": ["sliding_attention"] * 3, "sliding_window": 64}, ["layer_types", "sliding_attention"]),
    ("llama", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, ["linear_attention"]),
    ("llama", {"layer_types": ["chunked_attention"] * 3, "sliding_window": 64}, ["chunked_attention"]),
    ("qwen2", {"is_causal": False}, ["is_causal", "embedding model"]),
    ("mixtral", {}, ["mixtral", "llama", "qwen2", "qwen3", "mistral"]), ("gemma3", {}, ["gemma3", "qwen3"]), ("", {}, ["''"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "words"), UNSUPPORTED)
def test_unsupported_is_refused_by_name(kind: str, fields: dict[str, Any], words: list[str]) -> None:
    """Catches a model that is computed as another one."""
    with pytest.raises(UnsupportedError, match="".join(f"(?=.*{re.escape(word)})" for word in words)):
        parse_config(raw_config(kind, **fields))


@pytest.mark.parametrize(("kind", "fields"), [
    ("llama", {"pretraining_tp": 4, "num_local_experts": 0, "quantization_config": None, "layer_types": None}),
    ("llama", {"hidden_size": 97, "head_dim": 16}), ("llama", {"partial_rotary_factor": 1}),
    ("mistral", {"unknown_field": {"x": [1]}}),
])  # fmt: skip
def test_harmless_is_taken(kind: str, fields: dict[str, Any]) -> None:
    assert parse_config(raw_config(kind, **fields)).num_layers == 3


# Architecture, fields, the window, None if no layer has one, and the layers that have it.
FULL, SLIDING = ["full_attention"] * 3, ["full_attention", "sliding_attention", "full_attention"]
WINDOWS: list[tuple[str, dict[str, Any], int | None, set[int]]] = [
    ("mistral", {"sliding_window": 64}, 64, {0, 1, 2}),
    ("mistral", {"sliding_window": ...}, 4096, {0, 1, 2}),
    ("mistral", {"sliding_window": None}, None, set()),
    ("mistral", {"sliding_window": 64, "layer_types": FULL}, 64, {0, 1, 2}),  # transformers' Mistral does not read layer_types
    ("mistral", {"sliding_window": 64, "use_sliding_window": False}, 64, {0, 1, 2}),  # nor use_sliding_window
    ("llama", {}, None, set()),
    ("llama", {"sliding_window": 64}, 64, {0, 1, 2}),
    ("llama", {"sliding_window": 64, "use_sliding_window": False}, None, set()),
    ("llama", {"sliding_window": 64, "layer_types": FULL}, None, set()),
    ("llama", {"sliding_window": 64, "layer_types": SLIDING}, 64, {1}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, 64, {2}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, 4096, {2}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}, None, set()),  # no layer from 3 on
    ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, None, set()),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0}, None, set()),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 0}, None, set()),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 0, "layer_types": FULL}, None, set()),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "layer_types": SLIDING}, 64, {1}),
    ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 3}, 4096, {0, 1, 2}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, None, set()),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, 64, {0}),
]


@pytest.mark.parametrize(("kind", "fields", "window", "layers"), WINDOWS)
def test_windows(kind: str, fields: dict[str, Any], window: int | None, layers: str) -> None:
    """Catches a window that is not seen, seen where no layer has one, or in other layers than it should be."""
    parsed = parse_config(raw_config(kind, **fields))
    windows = [parsed.attention(i).window for i in range(3)]
    assert parsed.sliding_window == window
    assert windows == [window if i in layers else None for i in range(3)]


def test_a_window_of_the_served_length_is_none() -> None:
    """Catches Mistral 7B v0.1 served with a window that is ignored, or with one that no sequence reaches."""
    parsed = parse_config(REAL["mistralai/Mistral-7B-v0.1"]["config"])
    windows = [parsed.within(length).attention(31).window for length in (1, 4095, 4096, 4097, 32768)]
    assert windows == [None, None, None, 4096, 4096]


def test_a_used_window_needs_a_size() -> None:
    """Catches a used window whose missing or impossible size counts as none."""
    with pytest.raises(ConfigError, match=r"sliding_window: the field is missing; .*use_sliding_window"):
        parse_config(raw_config("llama", use_sliding_window=True))
    for kind in ("mistral", "qwen3_moe", "llama"):
        with pytest.raises(ConfigError, match=r"sliding_window: .*from 1 to .*; found 0"):
            parse_config(raw_config(kind, use_sliding_window=True, sliding_window=0))


RECORDS: list[dict[str, Any]] = [
    YARN | {"finetuned": True, "attn_factor": None}, YARN | {"attn_factor": 1, "extrapolation_factor": 1.0},
    LLAMA3 | {"finetuned": False}, {"rope_type": "default", "original_max_position_embeddings": 128, "factor": 1.0},
    {"rope_type": "linear", "factor": 2.0, "finetuned": True},
]  # fmt: skip


@pytest.mark.parametrize("rope", RECORDS)
def test_rope_keys_that_enter_no_formula(rope: dict[str, Any]) -> None:
    """Catches a refusal of keys that record the training (in files of NousResearch and of LongAlpaca), or that are neutral."""
    plain = {key: value for key, value in rope.items() if key in {*LLAMA3, *YARN}}
    if rope["rope_type"] == "default":
        plain = {"rope_type": "default"}
    for dialect in ("rope_scaling", "rope_parameters"):
        assert parse_config(raw_config(**{dialect: rope})) == parse_config(raw_config(**{dialect: plain}))


def test_dynamic_rope_stretches_the_context_if_asked() -> None:
    """Catches a default length that has other frequencies than the model was trained with, and a missing factor."""
    parsed = parse_config(raw_config(rope_scaling={"type": "dynamic", "factor": 2.5, "original_max_position_embeddings": 9}))
    assert (parsed.rope.kind, parsed.rope.original_max_position) == ("dynamic", 256)  # the key is a record, as in transformers
    assert (parsed.context_len, parsed.max_context_len) == (256, 640)
    raises(r"rope_scaling\.factor", parse_config, raw_config(rope_scaling={"type": "dynamic"}), error=ConfigError)
    with pytest.raises(ConfigError, match=r"rope_scaling\.rope_type: .*4 rotated channels or more; found 2"):
        parse_config(raw_config(rope_scaling={"type": "dynamic", "factor": 2.0}, head_dim=2))


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2] * 8, "original_max_position_embeddings": 64}
BAD_LONG: list[tuple[dict[str, Any], str]] = [
    ({"short_factor": ...}, r"short_factor: the field is missing; expected a list of 8 numbers"),
    ({"long_factor": [2.0] * 7}, r"long_factor: the list has another length; expected 8, one for each channel pair; found 7"),
    ({"long_factor": [2.0] * 7 + ["2"]}, r"long_factor: .*a list of 8 numbers"),
    ({"short_factor": [0.0] * 8}, r"short_factor: .*a list of 8 numbers from 1e-06"),
    ({"short_factor": 1.0}, r"short_factor: .*a list of 8 numbers"), ({"factor": 0.5}, r"factor: "),
    ({"attention_factor": 0}, r"attention_factor: "),
    ({"original_max_position_embeddings": 1}, r"original_max_position_embeddings: its logarithm is 0"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), BAD_LONG)
def test_bad_longrope_is_named(changes: dict[str, Any], words: str) -> None:
    """Catches lists that do not fit the head, which would give wrong frequencies or an error of PyTorch."""
    rope = {name: value for name, value in (LONG | changes).items() if value is not ...}
    raises(words, parse_config, raw_config(rope_scaling=rope), error=ConfigError)
    assert parse_config(raw_config(rope_scaling=LONG)).rope.long_factor == (2.0,) * 8


def test_linear_rope_stretches_the_context_if_asked() -> None:
    """Catches a length up to factor × positions that is refused, or becomes the default: many files' positions include it."""

    def lengths(**rope: Any) -> tuple[int, int]:
        parsed = parse_config(raw_config(rope_scaling={"type": "linear", **rope}))
        return parsed.context_len, parsed.max_context_len

    assert lengths(factor=4.0) == (256, 1024)
    assert lengths(factor=2.5) == (256, 640)
    assert lengths(factor=4.0, original_max_position_embeddings=64) == (256, 256)  # the positions include the factor
    assert lengths(factor=8.0, original_max_position_embeddings=64) == (256, 512)


@pytest.mark.parametrize("kind", CLASSES)
def test_the_prefix_of_fsdp_is_ignored(kind: str) -> None:
    """Catches a refusal of a class that PyTorch's FSDP2 has renamed before the file was written."""
    known = CLASSES[kind].__name__.replace("Config", "ForCausalLM")
    with pytest.warns(UserWarning, match=f"architectures: FSDP{known}: the prefix FSDP is ignored"):
        assert parse_config(raw_config(kind, architectures=[f"FSDP{known}"])) == parse_config(raw_config(kind))
    for wrong in ("FSDP", "FSDPFSDP" + known, "FSDPGemmaForCausalLM", "fsdp" + known, "DDP" + known):
        with pytest.raises(UnsupportedError, match=f"architectures: .*found '{wrong}'"):
            parse_config(raw_config(kind, architectures=[wrong]))


def test_own_code_of_a_model_is_told() -> None:
    """Catches Python code in a repository that is silently not run: it may compute something else."""
    with pytest.warns(UserWarning, match=r"auto_map: the model's own code is not run; .* 'llama'"):
        parse_config(raw_config(auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parse_config(raw_config(auto_map={"AutoConfig": "configuration_own.OwnConfig"}, trust_remote_code=True))


@pytest.mark.parametrize(("raw", "words"), [
    *((raw, "an object") for raw in (None, [], "llama", 3)),
    *((raw_config() | {"model_type": kind}, "model_type") for kind in (None, 7, ["llama"])), ({"hidden_size": 8}, "model_type"),
    (raw_config(hidden_size=65536, num_attention_heads=4), r"head_dim.*up to 1024; found 16384"),
])  # fmt: skip
def test_what_is_no_config(raw: Any, words: str) -> None:
    """Catches an error of Python, and a size that is derived and not bounded."""
    raises(words, parse_config, raw, error=ConfigError)


def test_fields_name_the_nested_place() -> None:
    fields = Fields({"a": {"b": {"c": 1.5}}}, "x.json")
    with pytest.raises(ConfigError, match=r"^x.json, field a.b.c: .* from 1 to 9; found 1.5$"):
        fields.nested("a").nested("b").integer("c", maximum=9)
    with pytest.raises(ConfigError, match=r"^x.json, field a.b: not a JSON object; .* found 4$"):
        Fields({"a": {"b": 4}}, "x.json").nested("a").nested("b")


def test_an_architecture_with_windows_of_its_own() -> None:
    """Catches a window that limits the length, or a kind of layer that is refused, though the architecture computes it."""
    raw = raw_config(sliding_window=64, layer_types=["sliding_attention", "linear_attention", "full_attention"])
    options = {"model_type": "llama", "classes": (), "max_positions": 256, "window": None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decoder_config(Fields(raw), **options).sliding_window is None
