"""Experts stored in MXFP4, as gpt-oss's files have them: against transformers with the weights that they stand for.

Catches a nibble, a block or an exponent at another place, gate and up exchanged, an expert's rows or biases at another's, a piece
at a wrong row, and damaged files that load.
"""

import json

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import distance, load, logits, plan, refused, restate, rewrite, transformers_logits
from support.model_cases import make

from minirt import errors
from minirt.kernels import reference
from minirt.layers import MoE
from minirt.loading import checkpoint

SIZES = {"hidden_size": 96, "intermediate_size": 160, "sliding_window": 17}  # neither has whole chunks of 128
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
STATED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]}
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


def decoded(blocks, scales):
    """What blocks [E, N, G, 16] and scales [E, N, G] stand for, byte by byte: [E, N, 32G] fp64."""
    E, N, G, _ = blocks.shape
    values = torch.zeros(E, N, G, 32, dtype=torch.float64)
    for byte in range(16):
        for half in range(2):
            code = (blocks[..., byte].int() >> 4 * half) & 15
            magnitude = torch.tensor(LEVELS, dtype=torch.float64)[code & 7]
            values[..., 2 * byte + half] = torch.where(code >= 8, -magnitude, magnitude) * 2.0 ** (scales.double() - 127)
    return values.flatten(2)


@pytest.fixture
def folders(tmp_path):
    """A model in MXFP4, and the same numbers in transformers' own layout of fp32."""
    make("gpt_oss", tmp_path / "plain", **SIZES)
    generator, stored = torch.Generator().manual_seed(5), {}

    def quantize(tensors):
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            E, K, N = tensors[name].shape
            blocks = torch.randint(0, 256, (E, N, K // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(119, 123, (E, N, K // 32), generator=generator, dtype=torch.uint8)
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
            tensors[name] = decoded(blocks, scales).float().transpose(1, 2)
        rest = {name: tensor for name, tensor in tensors.items() if not name.endswith(("gate_up_proj", "down_proj"))}
        folder = tmp_path / "mxfp4"
        folder.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in (rest | stored).items()}, folder / "model.safetensors")
        (folder / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
        restate(folder, quantization_config=STATED)

    rewrite(tmp_path / "plain", quantize)
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
    refused(stored, r"gate_up_proj_scales: 2 scales above 2\^63 or NaN; expected bytes up to 190")
    rewrite(stored, lambda tensors: tensors.pop(f"{GATE_UP}_scales"))
    refused(stored, "the quantized weight has no scale")
    rewrite(stored, lambda tensors: tensors.update({f"{GATE_UP}_scales": torch.full((5, 320, 2), 120, dtype=torch.uint8)}))
    refused(stored, r"wrong shape; expected \[5, 320, 3\]")
    rewrite(stored, lambda tensors: tensors.update({GATE_UP: torch.zeros(5, 96, 320)}))
    refused(stored, "the weight is stored twice")


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
