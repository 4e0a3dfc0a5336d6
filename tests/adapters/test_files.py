"""Files of adapters: what is read, and every refusal by name."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.adapters import ranked, write_adapter

from minirt.adapters.files import read_adapter, shapes_of, warn_of_base
from minirt.errors import MinirtError
from minirt.loading.load import plan_model
from minirt.loading.options import LoadOptions


@pytest.fixture(scope="module")
def hf(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def shapes(folder):
    shapes = shapes_of(plan_model(LoadOptions(model=folder, device="cpu")).parameters())
    return {name: shape for name, shape in shapes.items() if name != "lm_head"}


def test_patterns_and_scalings(hf, shapes, tmp_path):
    """Catches a pattern that is no regular expression over the end of a name, one alpha for all ranks, and rsLoRA's root."""
    fields = {
        "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.down_proj": 7}, "alpha_pattern": {"o_proj|v_proj": 5, "proj": 11},
        "use_rslora": True,
    }  # fmt: skip
    with pytest.warns(UserWarning, match="alpha_pattern: no module of the adapter matches 'proj'"):
        adapter = read_adapter(write_adapter(tmp_path, hf, 4, 0, **fields), shapes)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert len(adapter.linears) == 3 * 7
    ranks = {linear.rank for linear in adapter.linears.values()}
    assert ranks == {3, 4, 7}
    for name, linear in adapter.linears.items():
        assert (linear.rank, linear.scaling) == pytest.approx(ranked(config, name))
        assert torch.equal(linear.a, tensors[f"base_model.model.{name}.lora_A.weight"])
        assert torch.equal(linear.b, tensors[f"base_model.model.{name}.lora_B.weight"])


FIELDS = [
    ({"use_dora": True}, "DoRA"), ({"target_parameters": ["experts.gate_up_proj"]}, "single parameters"),
    ({"layers_to_transform": [0]}, "layers_to_transform"), ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"lora_bias": True}, "lora_bias"), ({"alora_invocation_tokens": [1, 2]}, "activated LoRA"), ({"bias": "all"}, "bias"),
    ({"peft_type": "IA3"}, "peft_type"), ({"task_type": "SEQ_CLS"}, "task_type"), ({"r": 0}, "rank from 1 to 256"),
    ({"r": 257}, "rank from 1 to 256"),
    ({"lora_alpha": float("inf")}, "lora_alpha"), ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ({"something_new": 3}, "something_new"), ({"modules_to_save": ["lm_head"]}, "merge"),
    ({"rank_pattern": {"(a+)+": 3}}, "too complex"), ({"rank_pattern": {"(": 3}}, "not a pattern"),
    ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern"), ({"r": 5}, "wrong shape"),
    ({"rank_pattern": {"k_proj": 3}}, "k_proj"),
    ({"target_modules": ["q_proj", "w_pack"]}, "w_pack"), ({"target_modules": 3}, "target_modules"),
    ({"base_model_name_or_path": 3}, "base_model_name_or_path"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), FIELDS, ids=[words for _, words in FIELDS])
def test_fields_that_are_refused(hf, shapes, tmp_path, fields, words):
    """Catches a setting that changes the result and is passed over in silence."""
    write_adapter(tmp_path, hf, 4, 0)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(MinirtError, match=words):
        read_adapter(tmp_path, shapes)


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
HEAD = "base_model.model.lm_head.lora_A.weight"
TENSORS = [
    ({A: None}, "q_proj.lora_A.weight"), ({A: torch.zeros(4, 63)}, "wrong shape"), ({A: torch.full((4, 64), torch.nan)}, "NaN"),
    ({A: torch.zeros(4, 64, dtype=torch.int32)}, "wrong dtype"),
    ({A.removeprefix("base_model."): torch.zeros(4, 64)}, "unexpected"),
    ({A.replace("layers.0", "layers.9"): torch.zeros(4, 64)}, "layers.9"), ({HEAD: torch.zeros(4, 64)}, "merge"),
    ({A.replace("lora_A.weight", "lora_magnitude_vector"): torch.zeros(64)}, "DoRA"),
    ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 211)}, "embeddings"),
    ({"base_model.model.model.embed_tokens.weight": torch.zeros(211, 64)}, "merge"),
    ({A.replace("weight", "bias"): torch.zeros(4)}, "biases"),
    ({"base_model.model.model.norm.weight": torch.zeros(64)}, "unexpected"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), TENSORS, ids=[words for _, words in TENSORS])
def test_tensors_that_are_refused(hf, shapes, tmp_path, changes, words):
    """Catches a missing, misshapen, damaged or unknown tensor that is passed over in silence."""
    write_adapter(tmp_path, hf, 4, 0)
    file = tmp_path / "adapter_model.safetensors"
    tensors = {name: tensor for name, tensor in (load_file(file) | changes).items() if tensor is not None}
    save_file(tensors, file)
    with pytest.raises(MinirtError, match=words):
        read_adapter(tmp_path, shapes)


def test_files_that_are_refused(hf, shapes, tmp_path):
    """Catches an adapter without one of its files, and a truncated one."""
    with pytest.raises(MinirtError, match=r"adapter_config\.json"):
        read_adapter(tmp_path, shapes)
    write_adapter(tmp_path, hf, 4, 0)
    file = tmp_path / "adapter_model.safetensors"
    content = file.read_bytes()
    for damaged in (content[:-7], content[:40], b""):
        file.write_bytes(damaged)
        with pytest.raises(MinirtError, match=r"adapter_model\.safetensors"):
            read_adapter(tmp_path, shapes)
    file.unlink()
    with pytest.raises(MinirtError, match=r"adapter_model\.safetensors"):
        read_adapter(tmp_path, shapes)


def test_another_base_model_warns(hf, shapes, tmp_path):
    """Catches a warning for a folder with the model's name, and none for another model."""
    adapter = read_adapter(write_adapter(tmp_path, hf, 4, 0, base_model_name_or_path="org/Tiny-Llama"), shapes)
    warn_of_base(adapter, "/models/tiny-llama/")
    with pytest.warns(UserWarning, match="trained for 'org/Tiny-Llama'"):
        warn_of_base(adapter, "/models/other")
