"""Gemma 4's quantized files under their official names, and in bf16: against transformers with the numbers that the files state.

Catches a linear whose format is lost behind the names of the multimodal model, a K whose rows are also V's, experts that are
stored one by one, a group of 32 columns, and a factor of the embedding that is not rounded.
"""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import distance
from support.model_cases import make
from support.quantized_int4 import packed, quantize

from minirt import Generator, models
from minirt.layers import implementation

PROMPT = [5, 9, 200, 3, 77, 131, 8]
IGNORED = ["re:.*vision.*", "re:.*audio.*", "lm_head", "re:.*router.*", "re:.*embed.*"]
pytestmark = pytest.mark.filterwarnings("ignore:.*is not supported", "ignore:on a CPU, quantized weights")


def config_of(form: str) -> dict[str, Any]:
    """`quantization_config`, as llm-compressor writes it."""
    weights: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    inputs, name = None, "pack-quantized"
    if form == "fp8":
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
        name = "float-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}, "ignore": IGNORED}


def stored(weight: torch.Tensor, form: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A linear's tensors, and the numbers that they stand for."""
    if form == "int4":
        q = quantize(weight, 32, True, torch.float32)
        return packed(q, True), q.exact.float()
    scale = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def linears(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The quantized linears of a tensor, by their modules, as views: experts one by one."""
    if not name.startswith("model.language_model.layers."):
        return {}
    prefix, experts, part = name.partition(".experts.")
    if experts:
        halves = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[part]
        return {f"{prefix}.experts.{e}.{half}": rows for e, each in enumerate(tensor)
                for half, rows in zip(halves, each.chunk(len(halves)), strict=True)}  # fmt: skip
    plain = tensor.ndim == 2 and "router" not in name
    return {name.removesuffix(".weight"): tensor} if plain else {}


@pytest.mark.parametrize("form", ["int4", "fp8"])
@pytest.mark.parametrize("case", ["gemma4", "gemma4 with experts"])
def test_quantized_files(case: str, form: str, tmp_path: Any) -> None:
    model, path = make(case, tmp_path, tie_word_embeddings=True), tmp_path / "model.safetensors"
    written, own = dict[str, torch.Tensor](), dict(model.named_parameters())
    for name, tensor in load_file(path).items():
        parts = linears(name, own[name].data) if name in own else {}
        for module, view in parts.items():
            made, exact = stored(view.clone(), form)
            written |= {f"{module}.{last}": value.contiguous() for last, value in made.items()}
            view.copy_(exact)
        if not parts:
            written[name] = tensor
    save_file(written, path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": config_of(form)}))
    tokens = PROMPT if form == "int4" else PROMPT[:1]  # several tokens are quantized, too
    with torch.inference_mode(), Generator.from_pretrained(tmp_path, device="cpu", dtype="float32") as generator:
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
        assert distance(generator.logits(tokens), expected) < 1e-5
        quantized = {p.format.name for layer in generator._model.layers for p in layer.parameters() if p.format}
        assert quantized == {form}


@pytest.mark.parametrize("case", ["gemma4", "gemma4 with experts"])
def test_bf16_is_as_near_as_transformers(case: str, tmp_path: Any) -> None:
    """In eager layers."""
    model = make(case, tmp_path)
    prompt = [(7 * i) % 211 for i in range(90)]
    with torch.inference_mode(), Generator.from_pretrained(tmp_path, device="cpu", dtype="bfloat16") as generator:
        narrow = generator.logits(prompt).float()
        theirs = model.bfloat16()(input_ids=torch.tensor([prompt])).logits[0].float()
        exact = model.float()(input_ids=torch.tensor([prompt])).logits[0]  # of the same weights
        assert 0 < distance(narrow, exact) < 1.2 * distance(theirs, exact)


def test_what_wide_heads_have_no_kernels_for() -> None:
    """Catches orders of sums that differ between kernels of 512 channels and are said not to."""
    fields = {"model_type": "gemma4_unified_text", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    layers = models.build(models.parse_config(fields | {"num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 99}))
    windowed, full = (layer for layer in layers if layer.kind == "attention")
    reasons = implementation("attention", "triton").unsupported
    assert "512" not in str(reasons(full, torch.device("cpu")))
    windowed.context.invariant = full.context.invariant = True
    assert "no batch-invariant kernel for heads of 512" in str(reasons(full, torch.device("cpu")))
    assert "512" not in str(reasons(windowed, torch.device("cpu")))
