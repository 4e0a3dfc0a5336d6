"""Checkpoints with 4-bit weights: each layout gives the exact numbers of its file, and every contradiction is refused.

The files are written by tests/support/quantized_int4.py, by compressed-tensors' own compressor, and by the packers of AutoAWQ,
AutoGPTQ and AutoRound. Catches: nibbles in a wrong order, a zero point off by one, scales of the wrong group, parts of a fused
linear in each other's rows.
"""

import json
import math
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.quantized import save
from support.quantized_int4 import STYLES, write
from support.weights import loads_alike
from torch.utils._python_dispatch import TorchDispatchMode

from minirt import Generator, LoadOptions, SamplingParams
from minirt.errors import CheckpointError, ConfigError, MinirtError, UnsupportedError
from minirt.kernels.reference import dequantize_int4, unpack_int4_scale
from minirt.layers.moe import MoE
from minirt.loading import checkpoint
from minirt.loading.load import plan_model
from minirt.modeling.formats import Kept, LinearFormat, QuantizedToInt4, StoredInt4
from minirt.modeling.quantization_config import INT4_LAYOUTS, Int4Scheme

TOKENS = [(7 * i * i + 3 * i) % 211 for i in range(24)]
# Columns that neither 128 nor 64 nor 32 divides; q, k and v begin at rows 0, 288 and 384.
SIZES = {"hidden_size": 144, "intermediate_size": 200, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 48}
DOWN = "model.layers.1.mlp.down_proj"
K = "model.layers.0.self_attn.k_proj"


def load(folder, **options):
    return Generator.from_pretrained(folder, device="cpu", **{"kv_cache_memory": 1 << 22, **options})


@pytest.fixture(scope="module")
def plain(hf_folder):
    return hf_folder("Qwen2", seed=5, **SIZES)


@pytest.fixture
def quantized(plain, tmp_path):
    return lambda style, **options: write(plain, tmp_path / "model", style, **options)


def check_weights(generator, exact):
    """The weights, exactly; returns how many linears have 4 bits."""
    count = 0
    for layer in generator._model.layers:
        for parameter in layer.quantizable():
            right = torch.cat([exact[f"{module}.weight"] for module in parameter.modules])
            if parameter.format is None:
                assert torch.equal(parameter.weight.double(), right)
                continue
            found = dequantize_int4(parameter.weight, parameter.scale, parameter.in_features, torch.float64)
            assert torch.equal(found, right), parameter.modules
            kept = parameter.format.nbytes(parameter.rows, parameter.in_features)
            assert parameter.weight.nbytes + parameter.scale.nbytes == kept
            count += 1
    return count


@pytest.mark.parametrize("style", STYLES)
def test_each_layout_has_the_numbers_of_its_file(style, plain, quantized):
    written = quantized(style, shards=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "on a CPU, quantized weights save memory")
        generator = load(written.folder)
    with generator:
        assert check_weights(generator, written.exact) == 3 * 4
        assert generator.unused_tensors == ()
        rows = {row.layer: row for row in generator.plan.rows}
        assert rows["layers.0.attention"].formats == rows["layers.2.mlp"].formats == ("int4",)
        assert rows["head"].formats == ()
        assert "4 bits" in generator.plan.checkpoint
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(plain), dtype=torch.float64)
        model.load_state_dict(written.exact, strict=False)
        right = model.eval()(torch.tensor([TOKENS])).logits[0]
        assert ((generator.logits(TOKENS) - right).norm() / right.norm()).item() < 1e-5
        assert len(generator.generate(TOKENS, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)).token_ids) == 3
    planned = plan_model(LoadOptions(model=written.folder, device="cpu")).plan
    assert planned.rows == generator.plan.rows, "from the headers"


@pytest.mark.parametrize("style", STYLES)
def test_repacking_in_pieces(style, quantized, monkeypatch):
    """Large tensors are repacked in several pieces. Here the pieces are as small as they can be."""
    written = quantized(style)
    monkeypatch.setattr(LinearFormat, "chunk", 1)
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


@pytest.mark.parametrize("form", [*(StoredInt4(Int4Scheme(layout)) for layout in INT4_LAYOUTS), QuantizedToInt4()])
def test_pieces_bound_the_temporary_memory(form, monkeypatch):
    """No temporary tensor of a load is larger than four bytes for each weight of a piece: a tensor is not unpacked as a whole."""
    monkeypatch.setattr(type(form), "chunk", 1 << 14)
    rows, K = (256, 256), 4096
    weight, scale = form.allocate(rows, K, torch.device("cpu"))
    spec = next(form.tensors("m", 256, K))
    source = torch.zeros(spec.shape, dtype=torch.int32 if spec.dtypes == ("I32",) else torch.bfloat16)
    with Largest() as largest:
        form.load(spec.name.removeprefix("m."), source, Kept(weight, scale, rows), slice(256, 512))
    assert 0 < largest.bytes <= max(4 << 14, 4 * 256 * 128), "a piece of a transposed tensor has 128 columns at least"
    assert largest.bytes < source.nbytes


def test_scales_of_32_bits(quantized):
    """The scale words keep 20 of the 24 bits of their mantissas; 16-bit scales are exact."""
    written = quantized("packed 128")
    scale = written.tensors[f"{DOWN}.weight_scale"].float() * (1 + torch.linspace(1e-4, 2e-4, 2 * 144).reshape(144, 2))
    written.tensors[f"{DOWN}.weight_scale"] = scale
    save(written)
    with load(written.folder) as generator:
        found = unpack_int4_scale(generator._model.layers[4].down.scale)[0]
        assert not torch.equal(found, scale)
        assert ((found - scale).abs() / scale).max() <= 2**-20


def test_mixed_models(quantized):
    """Linears in 16 bits beside quantized ones, and a quantized head."""
    for style in ("packed 128", "gptq 128", "awq 128"):
        written = quantized(style, skip=("1.mlp.down_proj",))
        with load(written.folder) as generator:
            assert check_weights(generator, written.exact) == 3 * 4 - 1 + 1
            assert generator._model.layers[-1].lm_head.format is not None
            assert generator._model.layers[4].down.format is None
        shutil.rmtree(written.folder)


def dequantized(generator):
    """The weight of each linear with 4 bits, by module."""
    found = {}
    for parameter in (each for layer in generator._model.layers for each in layer.quantizable() if each.format is not None):
        weight = dequantize_int4(parameter.weight, parameter.scale, parameter.in_features)
        found |= dict(zip(parameter.modules, weight.split(parameter.rows), strict=True))
    return found


def check_equal(found, right):
    assert found.keys() == right.keys()
    for module, weight in right.items():
        assert torch.equal(found[module], weight), module


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
    path = written.folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= strategy | {"symmetric": symmetric}
    path.write_text(json.dumps(config))
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

    config = json.loads((OTHERS / packer / "config.json").read_text())
    converter = AutoAWQConverter.from_autoawq_config(config["quantization_config"])
    tensors = converter.process(load_file(OTHERS / packer / "model.safetensors"))
    config["quantization_config"] = converter.update_config(None).model_dump(mode="json")
    (tmp_path / "config.json").write_text(json.dumps(config))
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
    style, alter, error, words = TENSORS[what]
    written = quantized(style)
    if alter is None:
        path = written.folder / "config.json"
        path.write_text(path.read_text().replace("gptq_v2", "gptq"))
    else:
        alter(written.tensors)
        save(written)
    with pytest.raises(error, match=words):
        load(written.folder)


def test_biases_of_zeros(quantized):
    """Qwen's GPTQ releases have a bias of zeros for each linear, also where the model has none."""
    written = quantized("gptq 128")
    extra = {name.replace("qweight", "bias"): words.shape[1] for name, words in written.tensors.items() if "qweight" in name}
    extra = {name: torch.zeros(rows).half() for name, rows in extra.items() if name not in written.tensors}
    with load(written.folder) as generator:
        expected = generator.logits(TOKENS)
    written.tensors |= extra
    save(written)
    with load(written.folder) as generator:
        assert torch.equal(generator.logits(TOKENS), expected)
        assert f"{len(extra)} biases of linear layers that have none are not used" in generator.plan.notes[0]
        assert generator.unused_tensors == ()
    extra[f"{DOWN}.bias"][5] = 0.25
    save(written)
    with pytest.raises(CheckpointError, match=rf"{DOWN}\.bias: the model has no bias here; .*zeros; found 1 values"):
        load(written.folder)


def test_desc_act_with_columns_in_their_own_order(quantized):
    """As GPTQ writes with static groups. Catches a refusal by the name of the setting, and a file without g_idx taken for one."""
    written = quantized("gptq 128")
    with load(written.folder) as generator:
        expected = generator.logits(TOKENS)
    path = written.folder / "config.json"
    content = json.loads(path.read_text())
    content["quantization_config"] |= {"desc_act": True, "static_groups": True}
    path.write_text(json.dumps(content))
    with load(written.folder) as generator:
        assert torch.equal(generator.logits(TOKENS), expected)
        assert "desc_act; loading checks that each g_idx" in "".join(generator.plan.notes)
    right = written.tensors[f"{DOWN}.g_idx"].clone()
    written.tensors[f"{DOWN}.g_idx"] = right.flip(0)
    save(written)
    with pytest.raises(CheckpointError, match=rf"{DOWN}.g_idx: columns in the order of their activations"):
        load(written.folder)
    written.tensors.pop(f"{DOWN}.g_idx")
    save(written)
    with pytest.raises(CheckpointError, match=rf"1 of .* tensors are missing; expected {DOWN}\.g_idx"):
        load(written.folder)


def test_parts_of_two_group_sizes(quantized):
    written = quantized("packed 128")
    path = written.folder / "config.json"
    config = json.loads(path.read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = json.loads(json.dumps(groups["group_0"]))
    groups["group_1"]["targets"], groups["group_1"]["weights"]["group_size"] = [r"re:.*self_attn\.v_proj"], 64
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"layers\.0\.attention.*q_proj\.weight: .*of 128.*v_proj.*of 64"):
        load(written.folder)


@pytest.mark.parametrize(("shift", "words"), [(-64, "truncated"), (64, "truncated")])
def test_a_shard_with_another_length(shift, words, quantized):
    """Files that are shorter or longer than their header says, in the middle of the words."""
    file = quantized("awq 128", shards=2).folder / "model-00002-of-00002.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:shift] if shift < 0 else content + bytes(shift))
    with pytest.raises(CheckpointError, match=rf"00002-of-00002.safetensors.*{words}"):
        load(file.parent)


def test_not_stated(quantized):
    written = quantized("awq 128")
    path = written.folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in config.items() if name != "quantization_config"}))
    with pytest.raises(UnsupportedError, match=r"AWQ or GPTQ weights, but config\.json does not state them"):
        load(written.folder)
    config["quantization_config"]["modules_to_not_convert"] = ["down_proj"]
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"down_proj\.qweight: the weight has 4 bits, but config\.json says it is not"):
        load(written.folder)
    config["quantization_config"]["modules_to_not_convert"] = None
    path.write_text(json.dumps(config))
    with pytest.raises(MinirtError, match="quantized already"):
        load(written.folder, quantization="int4")


@pytest.mark.parametrize("fused", [False, True])
def test_experts_are_quantized_while_loading(fused, hf_folder):
    """Catches experts that keep their dtype, a scale of another expert or part, and a kernel that reads them in another order."""
    sizes = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 136, "num_hidden_layers": 1, "head_dim": 16}
    folder = hf_folder("Qwen3Moe", fused=fused, **sizes)
    stored = load_file(folder / "model.safetensors")
    prefix, logits = "model.layers.0.mlp.experts", {}
    for impl in ("eager", ["eager", "*.moe=triton"]):
        with load(folder, quantization="int4", impl=impl) as generator:
            logits[str(impl)] = generator.logits(TOKENS)
            moe = next(layer for layer in generator.model.layers if isinstance(layer, MoE))
    for parameter, parts in ((moe.gate_up, ("gate_proj", "up_proj")), (moe.down, ("down_proj",))):
        words, scales = parameter.stacked
        for e in range(3):
            name = f"{prefix}.{parameter.fused_tensor.rpartition('.')[2]}"
            right = stored[name][e] if fused else torch.cat([stored[f"{prefix}.{e}.{part}.weight"] for part in parts])
            found = dequantize_int4(words[e], scales[e], parameter.in_features)
            assert 0 < (found - right).norm() < 1.01 * (write_nearest(right) - right).norm()
    eager, triton = logits.values()
    assert (eager - triton).norm() < 1e-5 * eager.norm()


def test_quantized_while_loading(plain):
    with load(plain, quantization="int4") as generator, load(plain, quantization="int4", quantize_head=True) as all_of_it:
        rows = {row.layer: row.formats for row in generator.plan.rows}
        assert rows["layers.1.mlp"] == ("int4",)
        assert rows["head"] == ()
        assert all_of_it.plan.rows[-1].formats == ("int4",)
        right = load_file(plain / "model.safetensors")
        for module, parameter in ((DOWN, generator._model.layers[4].down), ("lm_head", all_of_it._model.layers[-1].lm_head)):
            weight = right[f"{module}.weight"]
            found = dequantize_int4(parameter.weight, parameter.scale, parameter.in_features)
            nearest = write_nearest(weight)
            assert ((found - weight).norm() / (nearest - weight).norm()).item() < 0.95, "no better than symmetric levels"
        assert generator.logits(TOKENS).isfinite().all()


def write_nearest(weight, group=128):
    """Rounded to the nearest, with the scale of the largest value: 7.5 levels on each side."""
    out = torch.empty_like(weight)
    for first in range(0, weight.shape[1], group):
        part = weight[:, first : first + group]
        scale = part.abs().amax(1, keepdim=True) / 7.5
        out[:, first : first + group] = (part / scale).round().clamp(-8, 7) * scale
    return out


TEXT = "The capital of France is Paris. The capital of Italy is Rome. Water is made of hydrogen and oxygen, and the Earth orbits"


@pytest.mark.slow
@pytest.mark.parametrize("style", ["packed 128", "gptq 128", "awq 64"])
def test_smollm2(style, smollm2, tmp_path):
    """A trained model with a tied head in each layout, in shards. 4 bits cost this model much; a wrong order would cost all."""
    folder = write(smollm2, tmp_path / "model", style, shards=2).folder
    with load(folder) as generator:
        assert generator.plan.weight_bytes < 0.4 * 538e6
        tokens = generator.tokenizer.encode(TEXT)
        logits = generator.logits(tokens).double().log_softmax(-1)
        loss = -logits[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].mean().item()
        assert loss < 4.0
        assert len(generator.generate(TEXT, SamplingParams(max_tokens=2, temperature=0)).token_ids) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("style", STYLES)
def test_weights_on_a_gpu_are_those_on_the_cpu(style, quantized, monkeypatch):
    """Catches a buffer that is filled again before it was copied, and bits that are packed otherwise on a GPU."""
    monkeypatch.setattr(checkpoint, "PART_BYTES", 5_000)
    assert loads_alike(quantized(style).folder) > 0
