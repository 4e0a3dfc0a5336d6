"""Checkpoints with one linear for q, k and v, and one for gate and up (Phi-3), quantized while loading."""

import pytest
from safetensors.torch import load_file, save_file
from support.checkpoints import TOKENS, distance, logits, restate
from support.model_cases import make


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_fused_linears_are_those_of_separate_ones(quantization, tmp_path):
    """Catches rows that are quantized with the scale of another part, or that land in another one's place."""
    make("phi3", tmp_path, tie_word_embeddings=False, intermediate_size=96)
    fused = logits(tmp_path, TOKENS, quantization=quantization)
    tensors = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        fused_name = name.split(".")[-2]
        parts, sizes = {"qkv_proj": ("qkv", (64, 32, 32)), "gate_up_proj": (("gate", "up"), (96, 96))}.get(fused_name, ("", ()))
        if not parts:
            tensors[name] = tensor
        for part, rows in zip(parts, tensor.split(sizes) if parts else (), strict=True):
            tensors[name.replace(fused_name, f"{part}_proj")] = rows.contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    restate(tmp_path, model_type="mistral", architectures=["MistralForCausalLM"], original_max_position_embeddings=...)
    assert distance(logits(tmp_path, TOKENS, quantization=quantization), fused) == 0
