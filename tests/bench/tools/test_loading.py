"""`bench/tools/loading.py`: what it writes loads, in the format and with the layers that were asked for."""

from importlib import import_module

import pytest
import torch
from safetensors.torch import load_file

from minirt.bench.tools import loading

SIZES = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 50, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
STATED = {
    "bf16": None, "bf16-fused": None, "fp8-channels": "compressed-tensors: FP8, one scale for each channel",
    "fp8-blocks": "fp8: FP8, one scale for each block of 128x128",
    "w4a16": "compressed-tensors: 4 bits, groups of 128, symmetric",
    "gptq": "gptq: 4 bits, groups of 128, symmetric", "awq": "awq: 4 bits, groups of 128, with zero points",
}  # fmt: skip


MIXTURE = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


@pytest.mark.parametrize("kind", ["bf16", "bf16-fused", *loading.FORMATS])
def test_each_format(kind, tmp_path, monkeypatch):
    own = [("tiny", "", SIZES | {"num_hidden_layers": 9} | (MIXTURE if kind == "bf16-fused" else {}))]
    monkeypatch.setattr(import_module("minirt.models.presets"), "raw_configs", lambda: own)
    monkeypatch.setattr("minirt.loading.load.pick_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr(loading, "SHARD_BYTES", 1 << 14)
    loading.main("write", str(tmp_path), "tiny", kind, "2")
    tensors = [load_file(file) for file in tmp_path.glob("*.safetensors")]
    assert len(tensors) > 1
    assert {name.split(".")[2] for shard in tensors for name in shard if ".layers." in name} == {"0", "1"}
    assert any(name.endswith("experts.gate_up_proj") for shard in tensors for name in shard) == (kind == "bf16-fused")
    found = loading._load(str(tmp_path), None)
    assert found["checkpoint"] == STATED[kind]
    assert found["bytes"] == sum(tensor.nbytes for shard in tensors for tensor in shard.values())
    assert found["gpu_peak_gb"] is None
