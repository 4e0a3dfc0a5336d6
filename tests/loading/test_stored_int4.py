"""Checkpoints with 4-bit weights: each layout gives the exact numbers of its file, and every contradiction is refused.

The files are written by tests/support/quantized_int4.py, by compressed-tensors' own compressor, and by the packers of AutoAWQ,
AutoGPTQ and AutoRound. Catches: nibbles in a wrong order, a zero point off by one, scales of the wrong group, parts of a fused
linear in each other's rows.
"""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.checkpoints import TOKENS, config, distance, load, logits, no_warning, plan, refused, restate
from support.quantized import save, write_changed
from support.quantized_int4 import STYLES, write
from support.weights import loads_alike
from torch.utils._python_dispatch import TorchDispatchMode

from minirt import SamplingParams
from minirt.errors import CheckpointError, ConfigError, MinirtError, UnsupportedError
from minirt.kernels.reference import dequantize_int4, unpack_int4_scale
from minirt.layers.moe import MoE
from minirt.loading import checkpoint
from minirt.modeling.formats import LinearFormat, PackedTensors, QuantizedToInt4, StoredInt4
from minirt.modeling.quantization_config import INT4_LAYOUTS, Scheme

# Columns that neither 128 nor 64 nor 32 divides; q, k and v begin at rows 0, 288 and 384.
SIZES = {"hidden_size": 144, "intermediate_size": 200, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 48}
DOWN = "model.layers.1.mlp.down_proj"
K = "model.layers.0.self_attn.k_proj"


@pytest.fixture(scope="module")
def plain(hf_folder):
    return hf_folder("Qwen2", seed=5, **SIZES)


@pytest.fixture
def quantized(plain, tmp_path):
    return partial(write_changed, write, plain, tmp_path / "model")


def check_weights(generator, exact):
    """The weights, exactly; returns how many linears have 4 bits."""
    count = 0
    for layer in generator._model.layers:
        for parameter in layer.quantizable():
            right = torch.cat([exact[f"{module}.weight"] for module in parameter.modules])
            if parameter.format is None:
                assert torch.equal(parameter.weight.double(), right)
                continue
            weight = dequantize_int4(parameter.weight, parameter.scale, parameter.in_features, torch.float64)
            assert torch.equal(weight, right), parameter.modules
            kept = parameter.format.nbytes(parameter.rows, parameter.in_features)
            assert parameter.weight.nbytes + parameter.scale.nbytes == kept
            count += 1
    return count


@pytest.mark.parametrize("style", STYLES)
def test_each_layout_has_the_numbers_of_its_file(style, plain, quantized, monkeypatch):
    """Catches nibbles, zero points and groups in another place, also of a tensor that is repacked in pieces; scales of symmetric
    weights that have 16 bits and take 32, and zero points that are lost in 16."""
    written = quantized(style, shards=3)
    with no_warning("on a CPU, quantized weights save memory"):
        generator = load(written.folder)
    with generator:
        assert check_weights(generator, written.exact) == 3 * 4
        assert generator.unused_tensors == ()
        four_bits = [each for layer in generator._model.layers for each in layer.quantizable() if each.format]
        assert {each.scale.dtype for each in four_bits} == {STYLES[style].dtype if STYLES[style].symmetric else torch.int32}
        rows = {row.layer: row for row in generator.plan.rows}
        assert rows["layers.0.attention"].formats == rows["layers.2.mlp"].formats == ("int4",)
        assert rows["head"].formats == ()
        assert "4 bits" in generator.plan.checkpoint
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(plain), dtype=torch.float64)
        model.load_state_dict(written.exact, strict=False)
        right = model.eval()(torch.tensor([TOKENS])).logits[0]
        assert distance(generator.logits(TOKENS), right) < 1e-5
        assert len(generator.generate(TOKENS, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)).token_ids) == 3
    assert plan(written.folder).rows == generator.plan.rows, "from the headers"
    monkeypatch.setattr(LinearFormat, "chunk", 1)  # large tensors are repacked in pieces, here as small as they can be
    with load(written.folder) as generator:
        assert check_weights(generator, written.exact) == 3 * 4


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes, in bytes; views do not count."""

    bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        given = {each.untyped_storage().data_ptr() for each in arguments if isinstance(each, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
            self.bytes = max(self.bytes, made.nbytes)
        return made


@pytest.mark.parametrize("form", [*(StoredInt4(Scheme(layout)) for layout in INT4_LAYOUTS.values()), QuantizedToInt4()])
def test_pieces_bound_the_temporary_memory(form, monkeypatch):
    """No temporary tensor of a load is larger than four bytes for each weight of a piece: a tensor is not unpacked as a whole."""
    monkeypatch.setattr(type(form), "chunk", 1 << 14)
    rows, K = (256, 256), 4096
    weight, scale = form.allocate(rows, K, torch.device("cpu"))
    spec = next(form.tensors("m", 256, K))
    source = torch.zeros(spec.shape, dtype=torch.int32 if spec.dtypes == ("I32",) else torch.bfloat16)
    with Largest() as largest:
        form.load(spec.name.removeprefix("m."), source, PackedTensors(weight, scale, rows), slice(256, 512))
    assert 0 < largest.bytes <= max(4 << 14, 4 * 256 * 128), "a piece of a transposed tensor has 128 columns at least"
    assert largest.bytes < source.nbytes


def test_scales_of_32_bits(quantized):
    """The scale words keep 20 of the 24 bits of their mantissas; 16-bit scales beside them are exact."""
    written = quantized("packed 128")
    scale = written.tensors[f"{DOWN}.weight_scale"].float() * (1 + torch.linspace(1e-4, 2e-4, 2 * 144).reshape(144, 2))
    written.tensors[f"{DOWN}.weight_scale"] = scale
    save(written)
    with load(written.folder) as generator:
        assert generator._model.layers[2].down.scale.dtype == torch.int32, "all have one dtype"
        stored = unpack_int4_scale(generator._model.layers[4].down.scale)[0]
        assert not torch.equal(stored, scale)
        assert ((stored - scale).abs() / scale).max() <= 2**-20


def test_mixed_models(quantized):
    """Linears in 16 bits beside quantized ones, and a quantized head."""
    for style in ("packed 128", "gptq 128", "awq 128"):
        written = quantized(style, skip=("1.mlp.down_proj",))
        with load(written.folder) as generator:
            assert check_weights(generator, written.exact) == 3 * 4 - 1 + 1
            assert generator._model.layers[-1].lm_head.format is not None
            assert generator._model.layers[4].down.format is None


def dequantized(generator):
    """The weight of each linear with 4 bits, by module."""
    weights = {}
    for parameter in (each for layer in generator._model.layers for each in layer.quantizable() if each.format is not None):
        weight = dequantize_int4(parameter.weight, parameter.scale, parameter.in_features)
        weights |= dict(zip(parameter.modules, weight.split(parameter.rows), strict=True))
    return weights


def check_equal(weights, right):
    assert weights.keys() == right.keys()
    for module, weight in right.items():
        assert torch.equal(weights[module], weight), module


@pytest.fixture(scope="module")
def whole_groups(hf_folder):
    """A model whose columns any size of group divides, as compressed-tensors needs."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}
    return hf_folder("Qwen2", seed=6, num_hidden_layers=1, **sizes)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [128, 64, 32, None])
def test_against_compressed_tensors(group, symmetric, whole_groups, tmp_path):
    """The tensors that compressed-tensors writes, and the weights that it reads from them."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    style = {128: "packed 128", 64: "packed 128", 32: "packed 32", None: "packed channel"}[group]
    written = write(whole_groups, tmp_path / "model", style)
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    stated = config(written.folder)["quantization_config"]
    stated["config_groups"]["group_0"]["weights"] |= strategy | {"symmetric": symmetric}
    restate(written.folder, quantization_config=stated)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=4, symmetric=symmetric, **strategy))
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    torch.manual_seed(3)
    right = {}
    for name, tensor in load_file(whole_groups / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            continue
        groups = tensor.shape[1] // group if group else 1
        scale = tensor.unflatten(1, (groups, -1)).abs().amax(2).half().float() / 8
        state = {"weight": tensor, "weight_scale": scale}
        if not symmetric:
            state["weight_zero_point"] = torch.randint(-8, 8, scale.shape, dtype=torch.int8)
        state = compressor.compress(state, scheme)
        right[module] = compressor.decompress(dict(state), scheme)["weight"]
        written.tensors |= {f"{module}.{last}": value.contiguous() for last, value in state.items()}
    save(written)
    assert len(right) == 7
    with load(written.folder) as generator:
        check_equal(dequantized(generator), right)


OTHERS = Path(__file__).with_name("packed_by_others")


@pytest.mark.parametrize("packer", sorted(folder.name for folder in OTHERS.iterdir()))
def test_files_that_other_projects_packed(packer):
    """AutoAWQ, AutoGPTQ and AutoRound packed these files and read them back, by tests/tools/pack_with_others.py of 8517f301."""
    folder = OTHERS / packer
    right = {module: torch.from_numpy(weight) for module, weight in np.load(folder / "weights.npz").items()}
    assert len(right) == 7
    with load(folder) as generator:
        check_equal(dequantized(generator), right)
        assert generator.logits([3, 4, 5]).isfinite().all()


@pytest.mark.parametrize("packer", ["autoawq", "autoround-awq"])
def test_awq_files_that_compressed_tensors_converted(packer, tmp_path):
    """compressed-tensors' converter turns AWQ words and zero points into its own."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.entrypoints.convert import AutoAWQConverter

    original = config(OTHERS / packer)
    converter = AutoAWQConverter.from_autoawq_config(original["quantization_config"])
    tensors = converter.process(load_file(OTHERS / packer / "model.safetensors"))
    stated = {"quantization_config": converter.update_config(None).model_dump(mode="json")}
    (tmp_path / "config.json").write_text(json.dumps(original | stated))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with load(tmp_path) as converted, load(OTHERS / packer) as original:
        assert converted.plan.checkpoint == "compressed-tensors: 4 bits, groups of 32, with zero points"
        check_equal(dequantized(converted), dequantized(original))


def change(name, update):
    return lambda t: t.update({name: update(t[name].clone())})


def bump(tensor):
    tensor.view(-1)[3] += 1
    return tensor


TENSORS = {  # what: style, change of the tensors, error, words
    "no scale": ("packed 128", lambda t: t.pop(f"{DOWN}.weight_scale"), CheckpointError, f"{DOWN}.weight_packed: .*no scale"),
    "no AWQ scale": ("awq 128", lambda t: t.pop(f"{K}.scales"), CheckpointError, f"{K}.qweight: .*no scale"),
    "no zero points": ("awq 128", lambda t: t.pop(f"{K}.qzeros"), CheckpointError, f"missing; expected {K}.qzeros"),
    "zero points of symmetric weights": (
        "packed 128", lambda t: t.update({f"{K}.weight_zero_point": torch.zeros(12, 2, dtype=torch.int32)}), CheckpointError,
        f"{K}.weight_zero_point: zero points of symmetric weights",
    ),
    "another shape": (
        "packed 128", change(f"{DOWN}.weight_shape", lambda s: s + torch.tensor([0, 8])), CheckpointError,
        rf"{DOWN}.weight_shape: wrong values; expected \[144, 200\]; found",
    ),
    "too few groups": (
        "packed 128", change(f"{DOWN}.weight_scale", lambda s: s[:, :1].contiguous()), CheckpointError,
        rf"{DOWN}.weight_scale: wrong shape; expected \[144, 2\]; found \[144, 1\]",
    ),
    "a scale of zero": (
        "gptq 128", change(f"{DOWN}.scales", lambda s: s.mul_(0)), CheckpointError, f"{DOWN}.scales: 288 of 288 scales",
    ),
    "words of 64 bits": (
        "awq 128", change(f"{DOWN}.qweight", lambda w: w.long()), CheckpointError, rf"{DOWN}.qweight: wrong dtype.*I32.*I64",
    ),
    "columns in another order": (
        "gptq 128", change(f"{DOWN}.g_idx", lambda g: g.flip(0)), CheckpointError,
        rf"{DOWN}.g_idx: columns in the order of their activations.*g_idx\[k\] = k // group_size",
    ),
    "other zero points": (
        "gptq 128", change(f"{K}.qzeros", bump), CheckpointError, rf"{K}.qzeros: zero points of symmetric.*expected 7.*1 other",
    ),
    "version 2 as version 1": ("gptq v2", None, CheckpointError, r"qzeros: zero points of symmetric weights; expected 7 every"),
    "ambiguous zero points": (
        "gptq zeros", change(f"{K}.qzeros", lambda z: z | 15), CheckpointError, f"{K}.qzeros: zero points that writers .* agree",
    ),
    "twice": (
        "packed 128", lambda t: t.update({f"{DOWN}.weight": torch.zeros(144, 200)}), CheckpointError,
        f"{DOWN}.weight_packed: the weight is stored twice",
    ),
    "another layout": (
        "packed 128", lambda t: t.update({f"{DOWN}.qweight": t.pop(f"{DOWN}.weight_packed")}), CheckpointError,
        f"{DOWN}.qweight: .*expected weight_packed",
    ),
    "a part in 16 bits": (
        "packed 128", lambda t: [t.pop(f"{K}.{w}") for w in ("weight_packed", "weight_scale", "weight_shape")]
        + [t.update({f"{K}.weight": torch.zeros(96, 144)})], UnsupportedError, rf"layers\.0\.attention: .*one format.*{K}",
    ),
    **{
        f"a scale of {value}, {style}": (
            style, change(f"{K}.{scale}", lambda s, value=value: s.index_fill_(1, torch.tensor([1]), value)), CheckpointError,
            f"{K}.{scale}: \\d+ of \\d+ scales are unusable.*found {value}",
        )
        for style, scale in (("packed 128", "weight_scale"), ("gptq zeros", "scales"), ("awq 64", "scales"))
        for value in (0.0, math.nan, math.inf, *([] if style == "packed 128" else [-0.5]))
    },
    "no shape": ("packed 128", lambda t: t.pop(f"{K}.weight_shape"), CheckpointError, rf"missing.*{K}\.weight_shape"),
    "words of AWQ as GPTQ's": (
        "gptq zeros", change(f"{K}.qweight", lambda w: w.view(-1).resize_(144, 12)), CheckpointError,
        rf"{K}\.qweight: wrong shape; expected \[18, 96\]; found \[144, 12\]",
    ),
    "a negative g_idx": (
        "gptq 128", change(f"{K}.g_idx", lambda g: g - 1), CheckpointError, rf"{K}\.g_idx: columns in the order",
    ),
    "g_idx of compressed-tensors": (
        "packed 128", lambda t: t.update({f"{K}.weight_g_idx": torch.arange(144)}), UnsupportedError,
        f"{K}.weight_g_idx: weights whose groups are columns in the order of their activations are not supported",
    ),
    "a foreign tensor": (
        "awq 128", lambda t: t.update({f"{K}.g_idx": torch.arange(144)}), CheckpointError, rf"unexpected.*{K}\.g_idx",
    ),
    "a quantized embedding": (
        "awq 128", lambda t: t.update({"model.embed_tokens.scales": torch.ones(1, 144)}), UnsupportedError,
        r"model\.embed_tokens\.weight: this weight cannot be.*found F32 with scales",
    ),
    "bitsandbytes": (
        "gptq 128", lambda t: t.update({f"{K}.weight.absmax": torch.ones(4)}), UnsupportedError, "4-bit weights of bitsandbytes",
    ),
    "sparse weights": (
        "packed 128", lambda t: t.update({f"{K}.bitmask": torch.ones(4)}), UnsupportedError, f"{K}.bitmask: sparse",
    ),
    "a part in FP8": (
        "packed 128", lambda t: [t.pop(f"{K}.weight_packed"),
        t.update({f"{K}.weight": torch.ones(96, 144).to(torch.float8_e4m3fn)})],
        CheckpointError, rf"{K}\.weight: the weight is not that of the stated format",
    ),
    "NVFP4": ("packed 128", lambda t: t.update({f"{K}.weight_scale_2": torch.ones(1)}), UnsupportedError, "NVFP4"),
}  # fmt: skip


@pytest.mark.parametrize("what", TENSORS)
def test_tensors_that_contradict(what, quantized):
    """Catches weights that would be computed with other levels, zero points or groups, without a word."""
    style, change, error, words = TENSORS[what]
    written = quantized(style, change or (lambda tensors: None))
    if change is None:
        path = written.folder / "config.json"
        path.write_text(path.read_text().replace("gptq_v2", "gptq"))
    refused(written.folder, words, error)


def test_biases_of_zeros(quantized):
    """Qwen's GPTQ releases have a bias of zeros for each linear, also where the model has none."""
    written = quantized("gptq 128")
    extra = {name.replace("qweight", "bias"): words.shape[1] for name, words in written.tensors.items() if "qweight" in name}
    extra = {name: torch.zeros(rows).half() for name, rows in extra.items() if name not in written.tensors}
    written.tensors |= extra
    save(written)
    with load(written.folder) as generator:
        assert f"{len(extra)} biases of linear layers that have none are not used" in generator.plan.notes[0]
        assert generator.unused_tensors == ()
    extra[f"{DOWN}.bias"][5] = 0.25
    save(written)
    refused(written.folder, rf"{DOWN}\.bias: the model has no bias here; .*zeros; found 1 values")


def test_desc_act_with_columns_in_their_own_order(quantized):
    """As GPTQ writes with static groups. Catches a refusal by the name of the setting, and a file without g_idx taken for one."""
    written = quantized("gptq 128")
    expected, stated = logits(written.folder), config(written.folder)["quantization_config"]
    restate(written.folder, quantization_config=stated | {"desc_act": True, "static_groups": True})
    with load(written.folder) as generator:
        assert torch.equal(generator.logits(TOKENS), expected)
        assert "desc_act; loading checks that each g_idx" in "".join(generator.plan.notes)
    written.tensors[f"{DOWN}.g_idx"] = written.tensors[f"{DOWN}.g_idx"].flip(0)
    save(written)
    refused(written.folder, rf"{DOWN}.g_idx: columns in the order of their activations")
    written.tensors.pop(f"{DOWN}.g_idx")
    save(written)
    refused(written.folder, rf"1 of .* tensors are missing; expected {DOWN}\.g_idx")


def test_parts_of_two_group_sizes(quantized):
    """Catches scales of one size of groups that are read as of the other."""
    folder = quantized("packed 128").folder
    stated = config(folder)["quantization_config"]
    group = stated["config_groups"]["group_0"]
    values = group | {"targets": [r"re:.*self_attn\.v_proj"], "weights": group["weights"] | {"group_size": 64}}
    restate(folder, quantization_config=stated | {"config_groups": {"group_0": group, "group_1": values}})
    refused(folder, r"layers\.0\.attention.*q_proj\.weight: .*of 128.*v_proj.*of 64", UnsupportedError)


@pytest.mark.parametrize("shift", [-64, 64])
def test_a_shard_with_another_length(shift, quantized):
    """Files that are shorter or longer than their header says, in the middle of the words."""
    file = quantized("awq 128", shards=2).folder / "model-00002-of-00002.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:shift] if shift < 0 else content + bytes(shift))
    refused(file.parent, r"00002-of-00002.safetensors.*truncated")


def test_not_stated(quantized):
    """Catches words that are read as weights, or quantized again."""
    folder = quantized("awq 128").folder
    stated = config(folder)["quantization_config"]
    restate(folder, quantization_config=...)
    refused(folder, r"AWQ or GPTQ weights, but config\.json does not state them", UnsupportedError)
    restate(folder, quantization_config=stated | {"modules_to_not_convert": ["down_proj"]})
    refused(folder, r"down_proj\.qweight: the weight has 4 bits, but config\.json says it is not", ConfigError)
    restate(folder, quantization_config=stated)
    refused(folder, "quantized already", MinirtError, quantization="int4")


@pytest.mark.parametrize("fused", [False, True])
def test_experts_are_quantized_while_loading(fused, hf_folder):
    """Catches experts that keep their dtype, a scale of another expert or part, and a kernel that reads them in another order."""
    sizes = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 136, "num_hidden_layers": 1, "head_dim": 16}
    folder = hf_folder("Qwen3Moe", fused=fused, **sizes)
    stored = load_file(folder / "model.safetensors")
    prefix, results = "model.layers.0.mlp.experts", []
    for impl in ("eager", ["eager", "*.moe=triton"]):
        with load(folder, quantization="int4", impl=impl) as generator:
            results.append(generator.logits(TOKENS))
            moe = next(layer for layer in generator.model.layers if isinstance(layer, MoE))
    for parameter, parts in ((moe.gate_up, ("gate_proj", "up_proj")), (moe.down, ("down_proj",))):
        words, scales = parameter.stacked
        for e in range(3):
            name = f"{prefix}.{parameter.fused_tensor.rpartition('.')[2]}"
            right = stored[name][e] if fused else torch.cat([stored[f"{prefix}.{e}.{part}.weight"] for part in parts])
            assert 0 < distance(dequantize_int4(words[e], scales[e], parameter.in_features), right) < 1.01 * nearest(right)
    assert distance(*results) < 1e-5


def test_quantized_while_loading(plain):
    """Catches weights that keep their dtype, a head against the option, and levels that are no better than symmetric ones."""
    with load(plain, quantization="int4") as generator, load(plain, quantization="int4", quantize_head=True) as all_of_it:
        rows = {row.layer: row.formats for row in generator.plan.rows}
        assert rows["layers.1.mlp"] == ("int4",)
        assert rows["head"] == ()
        assert all_of_it.plan.rows[-1].formats == ("int4",)
        right = load_file(plain / "model.safetensors")
        for module, parameter in ((DOWN, generator._model.layers[4].down), ("lm_head", all_of_it._model.layers[-1].lm_head)):
            weight = dequantize_int4(parameter.weight, parameter.scale, parameter.in_features)
            assert distance(weight, right[f"{module}.weight"]) < 0.95 * nearest(right[f"{module}.weight"])
        assert generator.logits(TOKENS).isfinite().all()


def nearest(weight, group=128):
    """The error of rounding to the nearest, with the scale of the largest value: 7.5 levels on each side."""
    out = torch.empty_like(weight)
    for first in range(0, weight.shape[1], group):
        part = weight[:, first : first + group]
        scale = part.abs().amax(1, keepdim=True) / 7.5
        out[:, first : first + group] = (part / scale).round().clamp(-8, 7) * scale
    return distance(out, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("style", STYLES)
def test_weights_on_a_gpu_are_those_on_the_cpu(style, quantized, monkeypatch):
    """Catches a buffer that is filled again before it was copied, and bits that are packed otherwise on a GPU."""
    monkeypatch.setattr(checkpoint, "PART_BYTES", 5_000)
    assert loads_alike(quantized(style).folder) > 0
