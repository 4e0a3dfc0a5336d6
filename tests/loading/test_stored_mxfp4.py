"""Experts stored in MXFP4, as gpt-oss's files have them: against transformers with the weights that they stand for.

Catches a nibble, a block or an exponent at another place, gate and up exchanged, an expert's rows or biases at another's, a piece
at a wrong row, and damaged files that load.
"""

import json

import pytest
import torch
from support.checkpoints import distance, load, logits, plan, refused, restate, rewrite, transformers_logits
from support.experts import STATED, in_mxfp4
from support.model_cases import make

from minirt import errors
from minirt.kernels import reference
from minirt.layers import MoE
from minirt.loading import checkpoint

SIZES = {"hidden_size": 96, "intermediate_size": 160, "sliding_window": 17}  # neither has whole chunks of 128
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture
def folders(tmp_path):
    """A model in MXFP4, and the same numbers in transformers' own layout of fp32."""
    make("gpt_oss", tmp_path / "plain", **SIZES)
    in_mxfp4(tmp_path / "plain", tmp_path / "mxfp4", range(-8, -4))
    return tmp_path / "mxfp4", tmp_path / "plain"


def test_against_transformers(folders):
    """fp32 logits of both files. Exact: both models of minirt have the same numbers."""
    stored, plain = folders
    expected = transformers_logits(plain)
    assert distance(logits(plain), expected) < 1e-5
    assert distance(logits(stored), expected) < 1e-5
    assert "mxfp4: MXFP4" in str(plan(stored))
    assert plan(stored).formats


def test_every_weight_in_pieces(folders, monkeypatch):
    """The words of each expert stand for the numbers of the file, also where a tensor is read an expert at a time."""
    stored, plain = folders
    monkeypatch.setattr(checkpoint, "PART_BYTES", 1000)
    with load(stored) as generator, load(plain) as other:
        for layer, same in zip(generator.model.layers, other.model.layers, strict=True):
            if isinstance(layer, MoE):
                for ours, theirs in ((layer.gate_up, same.gate_up), (layer.down, same.down)):
                    wide = reference.dequantize_mxfp4(ours.weight, ours.scale, ours.in_features)
                    assert torch.equal(wide, theirs.weight)
                    assert torch.equal(ours.bias, theirs.bias)


def test_damaged_files_are_refused(folders):
    stored, _ = folders
    rewrite(stored, lambda tensors: tensors[f"{GATE_UP}_scales"].view(-1)[:2].fill_(255))
    refused(stored, r"gate_up_proj_scales: a scale above 2\^63, or NaN; expected bytes up to 190; found 255")
    rewrite(stored, lambda tensors: tensors.pop(f"{GATE_UP}_scales"))
    refused(stored, "the quantized weight has no scale")
    rewrite(stored, lambda tensors: tensors.update({f"{GATE_UP}_scales": torch.full((5, 320, 2), 120, dtype=torch.uint8)}))
    refused(stored, r"wrong shape; expected \[5, 320, 3\]")
    rewrite(stored, lambda tensors: tensors.update({GATE_UP: torch.zeros(5, 96, 320)}))
    refused(stored, "the weight is stored twice")


Q_PROJ = "model.layers.0.self_attn.q_proj"
WRONG = {  # new tensors by name, None for none; and the message
    "flat": ({f"{GATE_UP}_blocks": (5, 320, 48)}, r"_blocks: wrong shape; expected \[5, 320, 3, 16\]; found \[5, 320, 48\]"),
    "blocks of 16": ({f"{GATE_UP}_blocks": (5, 320, 6, 8)}, r"_blocks: .*expected \[5, 320, 3, 16\]; found \[5, 320, 6, 8\]"),
    "an expert less": ({f"{GATE_UP}_scales": (4, 320, 3)}, r"_scales: .*expected \[5, 320, 3\]; found \[4, 320, 3\]"),
    "transposed": ({f"{GATE_UP}_blocks": (5, 3, 320, 16)}, r"_blocks: .*expected \[5, 320, 3, 16\]; found \[5, 3, 320, 16\]"),
    "no scales": ({f"{GATE_UP}_scales": None}, "_blocks: the quantized weight has no scale; expected .*gate_up_proj_scales"),
    "no blocks": ({f"{GATE_UP}_blocks": None}, "1 of 97 tensors are missing; expected .*gate_up_proj_blocks"),
    "neither": ({f"{GATE_UP}_blocks": None, f"{GATE_UP}_scales": None}, "2 of 97 tensors are missing; .*_blocks, .*_scales"),
    "no bias": ({f"{GATE_UP}_bias": None}, "1 of 97 tensors are missing; expected .*gate_up_proj_bias"),
    "a scale of all": ({f"{GATE_UP}_global_scale": (5,)}, "1 unexpected tensors; found .*gate_up_proj_global_scale"),
    "a linear": ({f"{Q_PROJ}_blocks": (96, 3, 16)}, "only experts can be in MXFP4, without those .*expected F32 or F16 or BF16"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
def test_wrong_shapes_and_missing_tensors(folders, change, words):
    """Catches a file that loads with another model's experts, and messages without the tensor, or what is expected of it."""
    stored, scales = folders[0], {f"{name}_scales": (96, 3) for name in (Q_PROJ,) if f"{name}_blocks" in change}

    def damage(tensors):
        for name, shape in (change | scales).items():
            tensors.pop(name, None)
            tensors.update({} if shape is None else {name: torch.full(shape, 120, dtype=torch.uint8)})

    rewrite(stored, damage)
    refused(stored, words, errors.ConfigError if scales else errors.CheckpointError)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float8_e8m0fnu"])
def test_scales_of_another_dtype(folders, dtype):
    def damage(tensors):
        scales = tensors[f"{GATE_UP}_scales"]
        tensors[f"{GATE_UP}_scales"] = scales.bfloat16() if dtype == "bfloat16" else scales.view(getattr(torch, dtype))

    rewrite(folders[0], damage)
    refused(folders[0], r"gate_up_proj_scales: wrong dtype; expected U8; found (I8|BF16|F8_E8M0)")


def test_contradictions_are_refused(folders):
    stored, plain = folders
    restate(stored, quantization_config=...)
    refused(stored, "the weight is in MXFP4, but config.json does not say so", errors.ConfigError)
    restate(plain, quantization_config=STATED)
    refused(plain, "no weight of the checkpoint is quantized", errors.ConfigError)
    restate(stored, quantization_config=STATED)
    refused(stored, "--quantize|quantized already", errors.MinirtError, quantization="int4")


@pytest.mark.parametrize("quantization", ["mxfp4", "int4", "fp8"])
def test_quantized_while_loading(quantization, tmp_path):
    """A 16-bit file whose experts are transposed. Catches rows of the wrong dimension, and linears that are left out."""
    make("gpt_oss", tmp_path, **SIZES)
    with load(tmp_path, quantization=quantization) as generator, load(tmp_path) as other:
        for layer, same in zip(generator.model.layers, other.model.layers, strict=True):
            if isinstance(layer, MoE):
                for ours, theirs in ((layer.gate_up, same.gate_up), (layer.down, same.down)):
                    assert ours.format is not None
                    wide = reference.linear(torch.eye(ours.in_features), ours.weight, None, ours.scale, quantize=False).T
                    assert 1e-3 < distance(wide, theirs.weight) < 0.15


def test_fine_tunes_in_16_bits(tmp_path):
    """bf16 files in the transposed layout: the logits of transformers in fp32 from the same files."""
    made = make("gpt_oss", tmp_path, **SIZES)
    made.bfloat16().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert distance(logits(tmp_path), transformers_logits(tmp_path)) < 1e-5
