"""The layers of each architecture against transformers' models, and the presets against published parameter counts."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from support.config_files import as_file, num_parameters

from minirt.layers import MLP, Attention, Embedding, GatedDeltaNet, Head, MoE
from minirt.models import ARCHITECTURES, build, parse_config, preset, preset_table, presets, raw_configs

TINY = {
    "hidden_size": 60, "intermediate_size": 97, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
    "head_dim": 14, "vocab_size": 113, "max_position_embeddings": 64, "sliding_window": None, "rope_theta": 1e4,
    "num_experts": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 41, "shared_expert_intermediate_size": 43}


RECURRENT = {
    "layer_types": ["linear_attention", "full_attention"], "partial_rotary_factor": 1.0, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip


MIXTURES = ("gpt_oss", "qwen2_moe", "qwen3_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
HYBRIDS = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")


def tiny(kind: str, **options: Any) -> dict[str, Any]:
    experts = EXPERTS if kind in MIXTURES else {}
    if kind == "qwen3_moe":
        experts = {name: value for name, value in EXPERTS.items() if "shared" not in name}
    if kind == "gpt_oss":
        experts = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2}
    recurrent = RECURRENT if kind in HYBRIDS else {}
    if kind.startswith("gemma4"):
        recurrent = {"sliding_window": 9, "tie_word_embeddings": False, "num_experts": None, "rope_theta": None}
    return as_file(TINY | experts | recurrent | options | {"model_type": kind})


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}), ("llama", {"tie_word_embeddings": True, "attention_bias": True}), ("llama", {"mlp_bias": True}),
    ("qwen2", {}), ("qwen2", {"tie_word_embeddings": True}), ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}), ("qwen3_5_text", {}),
    ("qwen3_5_text", {"attention_bias": True, "tie_word_embeddings": True}), ("qwen3_5_moe_text", {}),
    ("qwen3_next", {"mlp_only_layers": [0], "tie_word_embeddings": True}),
    ("qwen3_next", {"decoder_sparse_step": 2, "attention_bias": True}), ("mistral", {}),
    ("smollm3", {"attention_bias": True, "pad_token_id": 0}), ("ministral3", {"tie_word_embeddings": True}),
    ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}), ("hunyuan_v1_dense", {"attention_bias": True}),
    ("olmo3", {"attention_bias": True, "sliding_window": 9}), ("exaone4", {"sliding_window": 9}),
    ("phi3", {"head_dim": 10, "pad_token_id": 0}), ("granite", {"mlp_bias": True, "attention_bias": True}),
    ("granite", {"tie_word_embeddings": True}),
    ("gpt_oss", {"head_dim": 10}), ("gpt_oss", {"attention_bias": False, "tie_word_embeddings": True}),
    ("qwen2_moe", {}), ("qwen2_moe", {"mlp_only_layers": [0], "qkv_bias": False}),
    ("gemma4_text", {"global_head_dim": 20, "num_global_key_value_heads": 2, "attention_k_eq_v": True}),
    ("gemma4_text", {}),
    ("gemma4_text", {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 41}),
    ("qwen3_moe", {"attention_bias": True}), ("qwen3_moe", {"decoder_sparse_step": 2, "tie_word_embeddings": True}),
]  # fmt: skip


def their_model(raw: dict[str, Any]) -> torch.nn.Module:
    """transformers' model for a config.json, on the meta device (without storage)."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw))


def one_by_one(name: str, shape: tuple[int, ...], stacked: bool) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint for a parameter of transformers, which stacks experts."""
    prefix, experts, part = name.partition(".experts.")
    if not experts or stacked:
        return {name: shape}
    names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    single = (shape[1] // len(names), shape[2])
    return {f"{prefix}.experts.{e}.{each}.weight": single for e in range(shape[0]) for each in names}


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_layers_name_every_tensor_of_transformers(kind: str, options: dict[str, Any]) -> None:
    raw = tiny(kind, **options)
    model = their_model(dict(raw))
    wanted: dict[str, tuple[int, ...]] = {}
    buffers = ((name, value) for name, value in model.named_buffers() if name.endswith("layer_scalar"))
    for name, value in (*model.named_parameters(), *buffers):  # tied weights appear once
        wanted |= one_by_one(name, tuple(value.shape), kind == "gpt_oss")
    read: dict[str, tuple[int, ...]] = {}
    for layer in build(parse_config(raw)):
        for parameter in layer.parameters():
            for name, shape, *_ in parameter.expected():
                assert read.get(name, tuple(shape)) == tuple(shape)  # a tied head uses the name of the embedding
                read[name] = tuple(shape)
    assert read == wanted
    assert num_parameters(parse_config(raw)) == sum(p.numel() for p in model.parameters()) + kind.startswith("gemma4") * 2


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_order_and_names_of_layers(kind: str) -> None:
    layers = build(parse_config(tiny(kind)))
    mixer, first = ("gated_delta_net", GatedDeltaNet) if kind in HYBRIDS else ("attention", Attention)
    mlp, block = ("moe", MoE) if kind in MIXTURES else ("mlp", MLP)
    names = ["embedding", f"layers.0.{mixer}", f"layers.0.{mlp}", "layers.1.attention", f"layers.1.{mlp}", "head"]
    assert [layer.name for layer in layers] == names
    assert [type(layer) for layer in layers] == [Embedding, first, block, Attention, block, Head]


# From the model cards, in units of 10^9: parameters, and parameters without embeddings if published.
PUBLISHED = {
    "Qwen2.5-0.5B": (0.49, 0.36), "Qwen2.5-1.5B": (1.54, 1.31), "Qwen2.5-3B": (3.09, 2.77), "Qwen2.5-7B": (7.62, 6.53),
    "Qwen2.5-14B": (14.8, 13.2),  # the card says 14.7 and 13.1, the safetensors index 14.77
    "Qwen2.5-32B": (32.8, 31.2),  # the card says 32.5 and 31.0, the safetensors index 32.76
    "Qwen2.5-72B": (72.7, 70.2),  # the card says 70.0
    "Qwen3-0.6B": (0.60, 0.44), "Qwen3-1.7B": (1.72, 1.41), "Qwen3-4B": (4.02, 3.63), "Qwen3-8B": (8.19, 6.95),
    "Qwen3-14B": (14.77, 13.21), "Qwen3-32B": (32.76, 31.21), "Qwen3-30B-A3B": (30.5, 29.9),
    "Qwen3-Coder-30B-A3B": (30.5, 29.9), "Qwen3-235B-A22B": (235.0, 234.0),
    # The cards' numbers have the vision encoder and the multi-token prediction, too; 27B is 53.8 GB in bf16.
    "Qwen3.5-0.8B": (0.752, None), "Qwen3.5-4B": (4.206, None), "Qwen3.5-9B": (8.954, None), "Qwen3.5-27B": (26.896, None),
    "Qwen3.5-35B-A3B": (34.66, None), "Qwen3.5-122B-A10B": (122.1, None), "Qwen3.6-27B": (26.896, None),
    "Qwen3.6-35B-A3B": (34.66, None), "Qwen3.8-27B": (26.896, None), "Qwen3-Next-80B-A3B": (79.7, 79.0),
    "Llama-3.1-8B": (8.03, None), "Llama-3.1-70B": (70.55, None), "Llama-3.2-1B": (1.236, None), "Llama-3.2-3B": (3.213, None),
    "SmolLM2-135M": (0.1345, None), "SmolLM2-360M": (0.3618, None), "SmolLM2-1.7B": (1.711, None), "SmolLM3-3B": (3.075, None),
    "Ministral-3-8B": (8.49, None),  # 8.4 on the card, and the vision encoder's 0.4 apart
    "Mistral-7B": (7.248, None), "Granite-4.1-3B": (3.40, None), "Granite-4.1-8B": (8.38, None), "Granite-4.1-30B": (28.87, None),
    "Seed-OSS-36B": (36.15, None),
    "Olmo-3-7B": (7.30, None), "Olmo-3-32B": (32.23, None),
    "EXAONE-4.0-32B": (32.0, 30.95), "EXAONE-4.0-1.2B": (1.28, 1.07),
    "gemma-4-31B": (30.70, None), "gemma-4-12B": (11.91, None), "gemma-4-26B-A4B": (25.23, None),
    "Muse-Glimmer-30B": (27.85, None),  # and the vision encoder
    "gpt-oss-20b": (20.91, None), "gpt-oss-120b": (116.83, None),
    "Phi-3-mini-4k": (3.82, None), "Phi-3-medium-4k": (13.96, None), "Phi-4": (14.66, None),
}  # fmt: skip


def base(name: str) -> str:
    return name.removesuffix("-Instruct").removesuffix("-it").removesuffix("-FP8")


@pytest.mark.parametrize("entry", presets(), ids=lambda entry: entry.name)
def test_preset_size(entry: Any) -> None:
    total, inner = PUBLISHED[base(entry.name)]
    config, count = entry.config, num_parameters(entry.config)
    assert count / 1e9 == pytest.approx(total, rel=0.01)
    if inner is not None:
        tables = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
        assert (count - tables) / 1e9 == pytest.approx(inner, rel=0.015)


@pytest.mark.parametrize("name", [
    "Qwen2.5-7B", "Qwen3-0.6B", "Llama-3.2-1B", "SmolLM2-135M", "Qwen3.5-35B-A3B", "Qwen3-Next-80B-A3B", "gemma-4-31B",
    "gemma-4-26B-A4B",
])  # fmt: skip
def test_preset_counts_as_transformers_does(name: str) -> None:
    raw = next(raw for key, _, raw in raw_configs() if key == name)
    model = their_model(dict(raw, num_hidden_layers=4))  # every kind of layer
    count = num_parameters(parse_config(raw | {"num_hidden_layers": 4}))
    assert count == sum(p.numel() for p in model.parameters()) + name.startswith("gemma") * 4  # factors are buffers there


def test_smollm2_preset_is_the_real_model(smollm2: Any) -> None:
    entry = preset("SmolLM2-135M-Instruct")
    assert entry is not None
    real = parse_config(json.loads((smollm2 / "config.json").read_text()))
    sizes = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
    for name in (*sizes, "rope", "tie_word_embeddings", "max_position_embeddings"):
        assert getattr(entry.config, name) == getattr(real, name)
    assert entry.config.rms_norm_eps == pytest.approx(real.rms_norm_eps, rel=1e-6)


def test_preset_look_up() -> None:
    """Whatever the case of the letters, and only by the whole name."""
    entry, base, llama = (preset(name) for name in ("qwen2.5-7b-INSTRUCT", "Qwen2.5-7B", "Llama-3.2-1B"))
    assert entry is not None
    assert base is not None
    assert llama is not None
    assert (entry.name, entry.hub_id) == ("Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct")
    assert (entry.config.max_position_embeddings, base.config.max_position_embeddings) == (32768, 131072)
    assert llama.hub_id == "meta-llama/Llama-3.2-1B"
    assert (llama.config.rope.kind, llama.config.rope.factor) == ("llama3", 32.0)
    theta = {"SmolLM2-1.7B": 130000.0, "SmolLM2-360M": 1e5, "Qwen3-8B": 1e6, "Qwen2.5-7B": 1e6, "Llama-3.1-8B": 5e5}
    assert {entry.name: entry.config.rope.theta for entry in presets() if entry.name in theta} == theta
    assert preset("Qwen2.5") is None
    assert preset("") is None


def test_presets_are_distinct_and_complete() -> None:
    """Catches a preset that hides another one, lacks a column, or has no published size."""
    assert {base(entry.name) for entry in presets()} == set(PUBLISHED)
    names = [entry.name.lower() for entry in presets()]
    assert len(set(names)) == len(names) == 83
    quantized = {f"{name}-FP8" for name in preset_table()["fp8_releases"]} | {"gpt-oss-20b", "gpt-oss-120b"}
    assert {entry.name for entry in presets() if entry.quantization} == quantized
    for name, _, raw in raw_configs():
        assert set(preset_table()["columns"]) <= set(raw), name
    assert all(entry.config.dtype == "bfloat16" for entry in presets())


def test_reading_a_config_imports_no_torch() -> None:
    code = f"""
import sys
import minirt.models as models
models.parse_config({dict(TINY, model_type="llama")!r})
models.presets()
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
