"""`--lora FOLDER --merge`: the weights of a model with an adapter in them."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.adapters import logits, write_adapter

from minirt import Generator
from minirt.errors import MinirtError

TOKENS = [1, 17, 5, 99, 4, 180]


def ours(model, **options):
    with Generator.from_pretrained(model, dtype="float32", device="cpu", **options) as generator:
        return generator.logits(TOKENS)


@pytest.mark.parametrize(
    ("family", "targets", "config"),
    [
        ("Llama", ("q_proj", "v_proj", "down_proj"), {}), ("Phi3", ("qkv_proj", "gate_up_proj", "o_proj"), {"pad_token_id": 0}),
        ("Qwen2Moe", ("q_proj", "o_proj", "lm_head"), {"moe_intermediate_size": 32, "num_experts": 4}),
    ],
)  # fmt: skip
def test_logits_are_those_of_the_adapter(hf_folder, tmp_path, family, targets, config):
    """Catches a module that is left out, rows of a packed linear in another place, and a rounded sum."""
    folder = hf_folder(family, seed=5, **config)
    dtype = torch.float32 if family == "Qwen2Moe" else torch.float64  # what transformers' experts take
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    adapter = write_adapter(tmp_path / "a", model, 5, 1, targets, alpha_pattern={"q_proj": 3})
    merged, wanted = ours(folder, loras=str(adapter), merge_lora=True), logits(model, adapter, TOKENS)
    torch.testing.assert_close(merged.double(), wanted.double(), atol=2e-4, rtol=2e-4)
    assert (wanted - logits(model, None, TOKENS)).abs().max() > 0.5


def test_whole_modules(folder, tmp_path):
    """Catches an embedding or a head of an adapter that is not used."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    adapter = write_adapter(tmp_path / "a", model, 5, 1, modules_to_save=["embed_tokens", "lm_head"])
    file = adapter / "adapter_model.safetensors"
    whole = {"model.embed_tokens": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}
    tensors = load_file(file)
    for name, module in whole.items():
        with torch.no_grad():
            module.weight.mul_(1.25)
        tensors[f"base_model.model.{name}.weight"] = module.weight.detach().float().contiguous()
    save_file(tensors, file)
    merged = ours(folder, loras=str(adapter), merge_lora=True)
    torch.testing.assert_close(merged.double(), logits(model, adapter, TOKENS), atol=2e-4, rtol=2e-4)


def test_quantization_comes_after(folder, tmp_path):
    """Catches an adapter that is added to weights which were rounded to 4 bits before."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapter = write_adapter(tmp_path / "a", model, 5, 1)
    with torch.no_grad():
        tensors = load_file(adapter / "adapter_model.safetensors")
        for name, module in model.named_modules():
            if (a := tensors.get(f"base_model.model.{name}.lora_A.weight")) is not None:
                module.weight += 2 * tensors[f"base_model.model.{name}.lora_B.weight"] @ a
    model.save_pretrained(tmp_path / "merged")
    merged = ours(folder, loras=str(adapter), merge_lora=True, quantization="fp8")
    wanted = ours(tmp_path / "merged", quantization="fp8")
    assert (merged - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_what_merging_refuses(folder, tmp_path):
    """Catches two adapters in one model, and a merge into random weights."""
    for options, words in (
        ({"loras": ["a", "b"]}, "one adapter can be merged"),
        ({"loras": "a", "random_weights": True}, "into the weights"), ({}, "into the weights"),
        ({"loras": {"name": "a"}}, "not an adapter"),
    ):  # fmt: skip
        with pytest.raises(MinirtError, match=words):
            Generator.from_pretrained(folder, merge_lora=True, **options)
