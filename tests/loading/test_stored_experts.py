"""Checkpoints with all experts of a layer in one tensor: found from the headers, loaded in pieces, refused by name if damaged.

The fused files are written by transformers, or by fusing single experts here. Catches: gate and up exchanged, experts in another
order, a piece at a wrong row, a form chosen for the model instead of a layer, and a fused tensor taken for something else.
"""

import json
import mmap
from math import prod

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import config as read_config
from support.checkpoints import distance, load, logits, plan, refused, restate, rewrite
from support.quantized import write

from minirt.errors import CheckpointError, UnsupportedError
from minirt.kernels import reference
from minirt.layers import MoE
from minirt.loading import checkpoint
from minirt.loading.load import plan_model
from minirt.loading.options import LoadOptions
from minirt.modeling.formats import QuantizedToFp8
from minirt.models.decoder import decoder_layers

SIZES = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_hidden_layers": 3}
FAMILIES = {
    "qwen3-moe": ("Qwen3Moe", SIZES | {"head_dim": 16, "mlp_only_layers": [0]}),
    "qwen2-moe": ("Qwen2Moe", SIZES | {"shared_expert_intermediate_size": 40}),
}
TOKENS = [5, 6, 7, 101]
EXPERTS = "model.layers.1.mlp.experts"
GATE_UP, DOWN = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"


@pytest.fixture
def mixture(hf_folder):
    """mixture(family): writes a model; `fused`: with the experts of a layer in two tensors."""

    def make(family="qwen2-moe", **options):
        name, sizes = FAMILIES[family]
        return hf_folder(name, **{**sizes, **options})

    return make


def fuse(tensors, layers=(0, 1, 2)):
    """Stack the experts of these layers, as transformers' classes hold them."""
    for i in layers:
        experts = f"model.layers.{i}.mlp.experts"
        if f"{experts}.0.up_proj.weight" in tensors:
            gate, up, down = (
                torch.stack([tensors.pop(f"{experts}.{e}.{part}_proj.weight") for e in range(5)])
                for part in ("gate", "up", "down")
            )
            tensors |= {f"{experts}.gate_up_proj": torch.cat((gate, up), 1), f"{experts}.down_proj": down}
    return tensors


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_files_of_transformers(family, quantization, mixture):
    """The same weights stored one by one and fused give the same bits, with a dense layer and with a shared expert."""
    single, fused = mixture(family), mixture(family, fused=True)
    names = load_file(fused / "model.safetensors").keys()
    assert GATE_UP in names, "transformers no longer writes fused tensors"
    assert not any("experts.0." in name for name in names)
    assert torch.equal(logits(fused, quantization=quantization), logits(single, quantization=quantization))
    assert plan(single, quantization=quantization) == plan(fused, quantization=quantization)


@pytest.mark.parametrize("layers", [(0,), (1, 2)])
def test_each_layer_may_be_stored_either_way(layers, mixture):
    """Catches a form that is chosen for the whole model."""
    folder = mixture()
    expected = logits(folder)
    rewrite(folder, lambda tensors: fuse(tensors, layers))
    assert torch.equal(logits(folder), expected)


def test_shards(mixture):
    """The two tensors of a layer in different files."""
    folder = mixture("qwen3-moe", fused=True, shard="40KB")
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert places[GATE_UP] != places[DOWN]
    assert torch.equal(logits(folder), logits(mixture("qwen3-moe")))


def test_composed_model(mixture):
    """The form is found also for layers that a caller composes, here the last mixture twice and without the first."""

    def composed(config):
        layers = decoder_layers(config)
        return [*layers[:2], *layers[3:-1], *layers[-2:]]

    assert torch.equal(logits(mixture(fused=True), layers=composed), logits(mixture(), layers=composed))


def test_beside_quantized_linears(mixture, tmp_path):
    """Experts in 16 bits beside other linears in FP8. Their dtype decides, as for any linear."""
    plain = ("lm_head", "gate_proj", "up_proj", "down_proj")
    folder = write(mixture("qwen3-moe"), tmp_path / "q", "fp8 block", skip=plain, listed=False).folder
    with pytest.warns(UserWarning, match="not quantized, though not listed so"):
        expected = logits(folder)
    rewrite(folder, fuse)
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize(("family", "g"), [("qwen3-moe", 8), ("qwen2-moe", 4)])
def test_fp8_blocks(family, g, mixture, tmp_path):
    """Values and scales of the file, in blocks that begin with each expert and part. Triton layers give the same logits."""
    sizes = {"hidden_size": 160, "moe_intermediate_size": 128 + g, "num_hidden_layers": 1, "mlp_only_layers": []}
    written = write(mixture(family, **sizes), tmp_path / "q", "fp8 block")
    stated = read_config(written.folder)["quantization_config"]
    stated["modules_to_not_convert"] += ["model.layers.0.mlp.gate"]
    restate(written.folder, quantization_config=stated)
    with load(written.folder) as generator:
        moe = next(layer for layer in generator.model.layers if isinstance(layer, MoE))
        for held, parts, rows in ((moe.gate_up, ("gate", "up"), g), (moe.down, ("down",), 32)):
            weight, scale = held.stacked
            assert reference.block_rows(weight.shape[1], scale.shape[1]) == rows
            for e in range(5):
                prefix = f"model.layers.0.mlp.experts.{e}"
                exact = torch.cat([written.exact[f"{prefix}.{part}_proj.weight"] for part in parts])
                assert torch.equal(reference.dequantize_fp8(weight[e], scale[e], torch.float64), exact)
        expected, alone = generator.logits(TOKENS), generator.logits(TOKENS[:1])
    if family == "qwen2-moe":  # with a shared expert
        with load(written.folder, impl=["eager", "*.moe=triton"], warm_up="none") as generator:
            assert {row.implementation for row in generator.plan.rows if row.kind == "moe"} == {"triton"}
            assert distance(generator.logits(TOKENS[:1]), alone) < 1e-5
            assert distance(generator.logits(TOKENS), expected) < 1e-2


def test_random_weights_do_not_depend_on_the_form(mixture):
    """Catches random weights in the order of the file."""
    single, fused = (logits(mixture("qwen3-moe", fused=fused), random_weights=True, seed=3) for fused in (False, True))
    assert torch.equal(fused, single)


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pieces(family, quantization, mixture, monkeypatch):
    """Large tensors are read a few entries at a time: no part of a file that is mapped is longer than the bound. The results are
    the same bits. With FP8, a piece is quantized in several chunks. Catches a piece or a chunk at a wrong row, a tensor that is
    read as a whole, and bytes that are counted twice."""
    folder = mixture(family, fused=True)
    expected = logits(folder, quantization=quantization)
    mapped = []

    def record(file, length, *, offset, **options):
        mapped.append((offset, length))
        return original(file, length, offset=offset, **options)

    original, bound = mmap.mmap, 2 * 48 * 64 * 4 + 1  # two experts' gate and up
    monkeypatch.setattr(checkpoint, "PART_BYTES", bound)
    monkeypatch.setattr(QuantizedToFp8, "chunk", 1000)
    monkeypatch.setattr(mmap, "mmap", record)
    done = []
    assert torch.equal(logits(folder, quantization=quantization, progress=lambda *step: done.append(step)), expected)
    assert max(length for _, length in mapped) < bound + mmap.ALLOCATIONGRANULARITY
    total = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert [step for step in done if step[0] == "weights"][-1] == ("weights", total, total)


def test_values_of_a_piece_are_checked(mixture, monkeypatch):
    """Catches a check of the first piece alone."""
    folder = mixture(fused=True)
    rewrite(folder, lambda tensors: tensors[DOWN][4, 7, 3:5].fill_(torch.nan))
    monkeypatch.setattr(checkpoint, "PART_BYTES", 1 << 13)
    refused(folder, rf"{DOWN}: 2 NaN or Inf", check_weights=True)


def as_fp8(tensors):
    tensors[GATE_UP] = tensors[GATE_UP].to(torch.float8_e4m3fn)


def also_single(tensors):
    tensors[f"{EXPERTS}.4.up_proj.weight"] = tensors[GATE_UP][4, 24:].clone()


def down_single(tensors):
    tensors |= {f"{EXPERTS}.{e}.down_proj.weight": expert for e, expert in enumerate(tensors.pop(DOWN))}


FILE = r"model\.safetensors: "
FORMS = rf"layers\.1\.moe has fused experts and single ones; expected one of the two forms; found {EXPERTS}"
QUANTIZED = r"\(load the unquantized checkpoint, .*one by one"
FAULTS = {
    "an expert missing": (
        lambda t: t.update({DOWN: t[DOWN][:4]}), rf"{FILE}{DOWN}: wrong shape; expected \[5, 64, 24\]; found \[4, 64, 24\]"
    ),
    "an expert too many": (
        lambda t: t.update({GATE_UP: torch.cat((t[GATE_UP], t[GATE_UP][:1]))}),
        rf"{FILE}{GATE_UP}: wrong shape; expected \[5, 48, 64\]; found \[6, 48, 64\]",
    ),
    "transposed": (
        lambda t: t.update({GATE_UP: t[GATE_UP].transpose(1, 2)}),
        rf"{FILE}{GATE_UP}: wrong shape; expected \[5, 48, 64\]; found \[5, 64, 48\] \(.*transpose its last two dimensions",
    ),
    "down transposed": (
        lambda t: t.update({DOWN: t[DOWN].transpose(1, 2)}),
        rf"{FILE}{DOWN}: wrong shape; expected \[5, 64, 24\]; found \[5, 24, 64\] \(.*transpose its last two dimensions",
    ),
    "two dimensions": (lambda t: t.update({DOWN: t[DOWN].flatten(0, 1)}), rf"{DOWN}: wrong shape; .*found \[320, 24\]"),
    "down missing": (lambda t: t.pop(DOWN), rf"1 of \d+ tensors are missing; expected {DOWN} "),
    "gate and up missing": (lambda t: t.pop(GATE_UP), rf"1 of \d+ tensors are missing; expected {GATE_UP} "),
    "an expert twice": (also_single, rf"{FILE}{EXPERTS}\.4\.up_proj\.weight: {FORMS}\.gate_up_proj \(keep one form"),
    "a mixture": (down_single, rf"{FILE}{EXPERTS}\.0\.down_proj\.weight: {FORMS}\.gate_up_proj"),
    "FP8": (as_fp8, rf"{FILE}{GATE_UP}: quantized experts.*expected F32 or F16 or BF16; found F8_E4M3 {QUANTIZED}"),
    "FP8 with scales": (
        lambda t: (as_fp8(t), t.update({f"{GATE_UP}_scale_inv": torch.ones(5, 1, 1)})),
        rf"{FILE}{GATE_UP}: quantized experts.*found F8_E4M3 {QUANTIZED}",
    ),
    "a scale": (
        lambda t: t.update({f"{DOWN}.weight_scale": torch.ones(5, 64, 1)}),
        rf"{FILE}{DOWN}\.weight_scale: beside fused experts.*expected only {GATE_UP} and {DOWN}; found F32 {QUANTIZED}",
    ),
    "packed": (
        lambda t: t.update({f"{GATE_UP}_blocks": t.pop(GATE_UP).to(torch.uint8), f"{GATE_UP}_scales": torch.ones(5, 48, 2)}),
        rf"{FILE}{GATE_UP}_blocks: beside fused experts.*found U8 {QUANTIZED}",
    ),
    "a bias": (lambda t: t.update({f"{DOWN}_bias": torch.zeros(5, 64)}), rf"{FILE}{DOWN}_bias: beside fused experts"),
    "integers": (lambda t: t.update({DOWN: t[DOWN].to(torch.int8)}), rf"{FILE}{DOWN}: quantized experts.*found I8"),
    "an unknown name": (lambda t: t.update({f"{EXPERTS}.gate": torch.zeros(3)}), rf"unexpected tensors; found {EXPERTS}\.gate "),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault, mixture):
    """Loading and planning refuse the same. The message names tensor and file, what was expected and found, and what to do."""
    change, message = FAULTS[fault]
    folder = mixture(fused=True)
    rewrite(folder, change)
    for action in (load, plan):
        refused(folder, message, (CheckpointError, UnsupportedError), by=action)


def test_one_tensor_in_two_files(mixture):
    """Catches one of two tensors that silently wins."""
    folder = mixture(fused=True)
    whole = folder / "model.safetensors"
    save_file({DOWN: load_file(whole)[DOWN]}, folder / "model-2.safetensors")
    with pytest.raises(CheckpointError, match=rf"{DOWN}: the tensor is in two files; found model\.safetensors, model-2"):
        checkpoint.read_headers([whole, folder / "model-2.safetensors"])


def test_parameters_of_a_layer(mixture):
    """Which tensors a mixture expects, before and after the loader has seen the headers."""
    model = plan_model(LoadOptions(model=mixture("qwen3-moe", fused=True), device="cpu"))
    layer = next(layer for layer in model.layers if isinstance(layer, MoE))
    specs = [spec for weights in (layer.gate_up, layer.down) for spec in weights.expected()]
    assert [(spec.name, spec.shape) for spec in specs] == [(GATE_UP, (5, 48, 64)), (DOWN, (5, 64, 24))]
    assert prod(specs[0].shape) == layer.gate_up.num_parameters
    fresh = next(layer for layer in decoder_layers(model.config) if isinstance(layer, MoE))
    assert [spec.name for spec in fresh.down.expected()] == [f"{EXPERTS}.{e}.down_proj.weight" for e in range(5)]
