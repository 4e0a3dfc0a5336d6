"""Decoders inside models with a vision encoder: where their fields and tensors are, and what is refused."""

import json
import warnings
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.checkpoints import config as read_config
from support.checkpoints import distance, load, logits, one_warning, refused, restate, rewrite
from support.config_files import DECODER, INNER, as_file
from support.hybrids import truth
from support.model_cases import make
from support.raising import raises

from minirt.errors import ConfigError, UnsupportedError
from minirt.models import decoder_fields, parse_config

PROMPT = [5, 99, 3, 170, 42, 8]
CLASSES = {
    "mistral3": "Mistral3ForConditionalGeneration", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}  # fmt: skip


def raw_config(kind: str, **text: Any) -> dict[str, Any]:
    return as_file({"model_type": kind} | DECODER | text)


@pytest.mark.parametrize("kind", INNER)
def test_fields_as_transformers_reads_them(kind: str) -> None:
    """Catches a default of another architecture, and fields of the top level that are not taken over."""
    sizes = {"num_attention_heads": 32, "hidden_size": 512}
    absent = ("num_key_value_heads", "max_position_embeddings", "head_dim")
    for options in ({}, {"dtype": "bfloat16"}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}):
        raw = raw_config(kind, **sizes) | options
        raw["text_config"] = {name: value for name, value in raw["text_config"].items() if name not in absent}
        theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(raw)))
        text, parsed = theirs.text_config, parse_config(raw)
        assert parsed.tie_word_embeddings == theirs.tie_word_embeddings
        assert parsed.dtype == options.get("dtype", "float32")
        assert parsed.num_kv_heads == text.num_key_value_heads
        assert parsed.head_dim == (getattr(text, "head_dim", None) or 16)
        assert parsed.rms_norm_eps == text.rms_norm_eps
        assert parsed.max_position_embeddings == text.max_position_embeddings
        assert (parsed.rope.kind, parsed.rope.theta) == (text.rope_parameters["rope_type"], text.rope_parameters["rope_theta"])


def test_what_the_levels_state() -> None:
    """Catches quantization or token ids of a level that nobody reads, and a place in a message that is not the field's."""
    raw = raw_config("qwen3_vl", eos_token_id=7, torch_dtype="float16")
    raw |= {"eos_token_id": 9, "bos_token_id": 8, "dtype": "bfloat16", "quantization_config": {"quant_method": "aqlm"}}
    fields = decoder_fields(raw)
    assert (fields["eos_token_id"], fields["bos_token_id"], fields["dtype"]) == (7, 8, "bfloat16")
    assert "torch_dtype" not in fields
    raises(r"field quantization_config\.quant_method: ", parse_config, raw, error=UnsupportedError)
    with pytest.raises(UnsupportedError, match=r"field dtype: .*found 'float64'"):
        parse_config(raw_config("qwen3_vl") | {"dtype": "float64"})
    raises(r"field text_config\.rms_norm_eps: ", parse_config, raw_config("qwen3_vl", rms_norm_eps=-1.0), error=ConfigError)
    for inner, outer, tied in ((True, False, True), (False, True, True), (False, None, False), (True, None, True)):
        raw = raw_config("mistral3", tie_word_embeddings=inner) | {"tie_word_embeddings": outer}
        assert parse_config(raw).tie_word_embeddings == tied


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("qwen3_vl", {"text_config": None}, {}, r"field text_config: the field is missing"),
    ("mistral3", {"text_config": {}}, {}, r"field text_config: the field is missing"),
    ("mistral3", {"text_config": 5}, {}, r"field text_config: not a JSON object"),
    ("mistral3", {}, {"model_type": "ministral4"}, r"text_config\.model_type: .*ministral3 or mistral"),
    ("mistral3", {"architectures": ["MistralForCausalLM"]}, {}, r"field architectures: .*Mistral3ForConditionalGeneration"),
    ("qwen2_5_vl", {"architectures": ["Qwen2_5_VLModel"]}, {}, r"field architectures: "),
    ("qwen3_vl", {"hidden_size": 64}, {}, r"field hidden_size: the value contradicts text_config; expected 96; found 64"),
    ("qwen3_vl", {"final_logit_softcapping": 20.0}, {}, r"field final_logit_softcapping: "),
    ("qwen3_vl", {}, {"final_logit_softcapping": 20.0}, r"field text_config\.final_logit_softcapping: "),
    ("qwen3_vl", {}, {"no_rope_layers": [1, 1, 1, 0]}, r"field text_config\.no_rope_layers: "),
    ("qwen3_vl", {}, {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 4]}}, r"mrope_section: .*the sum 8"),
    ("qwen3_vl", {}, {"rope_scaling": {"rope_type": "default", "mrope_section": [8]}}, r"mrope_section: .*three numbers"),
    ("qwen3_vl", {}, {"rope_scaling": {"rope_type": "default", "mrope_interleaved": 1}}, r"mrope_interleaved: "),
    ("qwen2_5_vl", {}, {"layer_types": ["full_attention"] * 3}, r"text_config\.layer_types: .*expected 4, .*found 3"),
    ("qwen2_5_vl", {}, {"layer_types": ["linear_attention"] * 4}, r"text_config\.layer_types: .*found 'linear_attention'"),
    ("mistral3", {}, {"rope_parameters": {"rope_type": "default"}}, r"llama_4_scaling_beta: the field is missing"),
    ("mistral3", {}, {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, r"original_max_position_embeddings: the field is miss"),
    ("mistral3", {}, {"rope_parameters": {"llama_4_scaling_beta": -1}}, r"llama_4_scaling_beta: "),
]


@pytest.mark.parametrize(("kind", "outer", "inner", "words"), REFUSED)
def test_refusals(kind: str, outer: dict[str, Any], inner: dict[str, Any], words: str) -> None:
    """Catches a field of one level that is taken for the other's, and a place that is not the field's."""
    raw = raw_config(kind) | {"architectures": [CLASSES[kind]]} | outer
    if inner:
        raw["text_config"] = raw["text_config"] | inner
    raises(words, parse_config, raw, error=ConfigError)


def test_a_flat_file_of_qwen2_5_vl_means_the_same() -> None:
    """Catches a form of Qwen's own files that is refused: the decoder's fields at the top level."""
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 5e4}
    nested = raw_config("qwen2_5_vl", **rope)
    flat = nested["text_config"] | {"model_type": "qwen2_5_vl", "architectures": [CLASSES["qwen2_5_vl"]], "vision_config": {}}
    assert parse_config(flat) == parse_config(nested)
    assert decoder_fields(flat)["rope_theta"] == 5e4
    raises("architectures: ", parse_config, flat | {"architectures": ["Qwen2ForCausalLM"]}, error=UnsupportedError)


# Forms of the names in a checkpoint, made from the plain ones.
FORMS = {
    "a wrapper's model": {"model.": "model.language_model.", "lm_head.": "lm_head."},
    "a wrapper's language model": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "plain": {"model.": "model.", "lm_head.": "lm_head."},
}
VISION = [before + name for name in ("visual.", "vision_tower.", "multi_modal_projector.") for before in ("", "model.")]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("vision", VISION)
def test_names_of_tensors(form: str, vision: str, tmp_path: Any) -> None:
    """Catches a name of a published checkpoint that is not found, and a vision encoder that is skipped without a word."""
    model = make("smollm3, listed", tmp_path)
    tensors, prefixes = load_file(tmp_path / "model.safetensors"), FORMS[form]
    renamed = {}
    for name, tensor in tensors.items():
        start = next(prefix for prefix in prefixes if name.startswith(prefix))
        renamed[prefixes[start] + name.removeprefix(start)] = tensor
    renamed |= {f"{vision}{i}.weight": torch.ones(3) for i in range(2)}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    told = rf"2 tensors {vision}\* are not used: a vision encoder is not supported"
    with pytest.warns(UserWarning, match=told):
        assert distance(logits(tmp_path, PROMPT), truth(model, PROMPT)) < 1e-5


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_under_two_names_is_refused(tmp_path: Any) -> None:
    """Catches one of two decoders in a file that silently wins."""
    make("ministral3", tmp_path)
    rewrite(tmp_path, lambda t: t.update({"language_model.model.norm.weight": torch.ones(64)}))
    refused(tmp_path, r"there twice; .*language_model\.model\.norm\.weight and model\.norm\.weight")


@pytest.mark.filterwarnings("ignore")
def test_ends_of_sequences_are_those_of_the_decoder(tmp_path: Any) -> None:
    """Catches an end that config.json states in text_config alone, and that nobody reads: answers would not end."""
    make("qwen3-vl, tied", tmp_path)
    text = read_config(tmp_path)["text_config"]
    (tmp_path / "generation_config.json").unlink()
    restate(tmp_path, text_config=text | {"eos_token_id": 77})
    with load(tmp_path) as generator:
        assert generator.eos_token_ids == (77,)
    restate(tmp_path, text_config=text | {"eos_token_id": 211})
    refused(tmp_path, r"eos_token_id: .*from 0 to 210; found 211", ConfigError)


@pytest.mark.filterwarnings("ignore")
def test_fp8_weights_of_a_decoder(tmp_path: Any) -> None:
    """Ministral 3 Instruct as it is published: one scale for each weight, and one that is not used for its input.

    Catches a quantization_config of the top level that is not read, and scales under a name of the wrapper that are not found.
    """
    model = make("mistral3 with ministral3", tmp_path)
    tensors, kept = load_file(tmp_path / "model.safetensors"), {}
    for name, tensor in tensors.items():
        linear = name.removesuffix(".weight")
        if name.startswith("language_model.model.layers.") and linear.endswith("_proj"):
            scale = tensor.abs().max() / 448
            kept[name], kept[f"{linear}.weight_scale_inv"] = (tensor / scale).to(torch.float8_e4m3fn), scale
            kept[f"{linear}.activation_scale"] = torch.tensor(0.1)
            parameter = model.get_parameter(name.replace("language_model.model.", "model.language_model."))
            parameter.data = kept[name].float() * scale
        else:
            kept[name] = tensor
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    stated = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False}
    stated["modules_to_not_convert"] = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    restate(tmp_path, quantization_config=stated)
    with load(tmp_path) as generator:
        assert any("input scales are not used" in note for note in generator.plan.notes)
        for token in (5, 99, 170):  # one token: activations are not rounded
            assert distance(generator.logits([token]), truth(model, [token])) < 1e-5


def test_no_warning_about_usual_names(tmp_path: Any) -> None:
    """Catches a warning about what is as it should be: only the vision encoder is told."""
    make("qwen3-vl", tmp_path)
    count = sum(name.startswith("model.visual.") for name in load_file(tmp_path / "model.safetensors"))
    with one_warning(rf"{count} tensors model.visual.\* are not used: a vision encoder is not supported"):
        load(tmp_path).close()


SCALARS = st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.sampled_from(["", "yarn", "mrope", "default"])
KEYS = st.sampled_from(["type", "factor"])
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=2))
ROPE_KEYS = st.sampled_from(["rope_type", "type", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta", "factor"])
NAMES = ["text_config", "model_type", "architectures", "dtype", "tie_word_embeddings", "eos_token_id", "hidden_size"]
NAMES += ["rope_scaling", "rope_parameters", "rope_theta", "quantization_config", "layer_types", "sliding_window", "head_dim"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from([*INNER, "smollm3", "ministral3"]),
    outer=st.dictionaries(st.sampled_from([*NAMES, "no_rope_layers", "no_rope_layer_interval"]), VALUES, max_size=2),
    inner=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
    rope=st.none() | st.dictionaries(ROPE_KEYS, VALUES, max_size=3),
)
def test_any_json_parses_or_is_refused(kind: str, outer: dict[str, Any], inner: dict[str, Any], rope: Any) -> None:
    """Catches an error of Python on a damaged file, instead of a ConfigError that names the field."""
    raw = raw_config(kind)
    if kind in INNER:
        raw["text_config"] = raw["text_config"] | inner | ({} if rope is None else {"rope_parameters": rope})
    raw = raw | {name: value for name, value in outer.items() if name != "model_type"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            parsed = parse_config(raw)
        except ConfigError:
            return
    assert parsed.vocab_size > 0
    assert isinstance(decoder_fields(raw), dict)
