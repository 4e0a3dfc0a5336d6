"""Gemma 4's quantized files under their official names, and in bf16: against transformers with the numbers that the files state.

Catches a linear whose format is lost behind the names of the multimodal model, a K whose rows are also V's, experts that are
stored one by one, a group of 32 columns, and a factor of the embedding that is not rounded.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import distance
from support.model_cases import make
from support.quantized_int4 import packed, quantize

from minirt import Generator, LoadOptions, SamplingParams, models
from minirt.cli.gpus import find_gpu
from minirt.layers import implementation
from minirt.loading.load import plan_load

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
        q = quantize(weight, 32, True, torch.bfloat16)
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


def write(case: str, form: str, folder: Path) -> Any:
    """Write a tiny model whose linears are quantized. Returns transformers' model with the numbers that they stand for."""
    model, path = make(case, folder, tie_word_embeddings=True), folder / "model.safetensors"
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
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": config_of(form)}))
    return model


@pytest.mark.parametrize("form", ["int4", "fp8"])
@pytest.mark.parametrize("case", ["gemma4", "gemma4 with experts"])
def test_quantized_files(case: str, form: str, tmp_path: Path) -> None:
    model = write(case, form, tmp_path)
    tokens = PROMPT if form == "int4" else PROMPT[:1]  # several tokens are quantized, too
    with torch.inference_mode(), Generator.from_pretrained(tmp_path, device="cpu", dtype="float32") as generator:
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
        assert distance(generator.logits(tokens), expected) < 1e-5
        quantized = {p.format.name for layer in generator._model.layers for p in layer.parameters() if p.format}
        assert quantized == {form}


def test_31b_in_4_bits_on_a_card_of_24_gb(tmp_path: Path) -> None:
    """Catches scales of 32 bits, which take 1.7 GiB more, pages that windows do not bound, and a plan that forgets the
    weight that long steps unpack, but on Hopper."""
    raw = next(raw for name, _, raw in models.raw_configs() if name == "gemma-4-31B-it")
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": config_of("int4")}))
    options = LoadOptions(
        model=tmp_path, max_model_len=32_000, max_num_seqs=1, kv_cache_dtype="fp8", max_num_batched_tokens=1024,
        gpu_memory_utilization=0.95,
    )  # fmt: skip
    _, memory = plan_load(options, find_gpu("RTX-4090"))
    assert memory.fits
    assert memory.context == 32_000
    assert memory.weights < 18 << 30
    _, hopper = plan_load(options, find_gpu("24GiB:9.0"))
    assert memory.step - hopper.step > 2 * 21_504 * 5_376 * 2, "gate and up, unpacked"
    short = replace(options, max_num_batched_tokens=256)
    steps = [plan_load(short, find_gpu(f"24GiB:{cc}"))[1].step for cc in ("8.9", "9.0")]
    assert steps[0] == steps[1], "steps that need no unpacking"


def test_a_card_that_holds_one_sequence_serves_it(tmp_path: Path) -> None:
    """In 4 bits, with the fewest pages: a prompt in chunks longer than the window, up to the last position. Catches pages of
    windows or of full layers that a plan for one sequence lacks."""
    model = write("gemma4", "int4", tmp_path)
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 250, "max_num_seqs": 1, "max_num_batched_tokens": 70}
    page = plan_load(LoadOptions(model=tmp_path, **options))[1].page
    tokens = [(7 * i) % 211 for i in range(225)]
    with torch.inference_mode(), Generator.from_pretrained(tmp_path, kv_cache_memory=4 * page, **options) as generator:
        made = generator.generate(tokens, SamplingParams(max_tokens=25, temperature=0, ignore_eos=True)).token_ids
        assert len(made) == 25
        logits = model(input_ids=torch.tensor([tokens + made])).logits[0]
        assert logits[len(tokens) - 1 : -1].argmax(1).tolist() == made


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
