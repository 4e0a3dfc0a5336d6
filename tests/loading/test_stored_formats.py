"""Checkpoints that are quantized already: each format computes what its tensors state, and every contradiction is refused.

The files are written by tests/support/quantized.py. The truth is transformers in fp64 with the dequantized weights.
"""

import json
import math
import shutil
from functools import partial
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import quantized_int4
from support.checkpoints import TOKENS, config, load, logits, no_warning, plan, refused, restate
from support.quantized import STYLES, save, write, write_changed
from support.weights import loads_alike

from minirt import LoadOptions, SamplingParams
from minirt.bench.bounds import errors, fault, floor
from minirt.errors import CheckpointError, ConfigError, MinirtError, UnsupportedError
from minirt.kernels.reference import dequantize_fp8, quantize_fp8
from minirt.loading import checkpoint
from minirt.loading.checkpoint import PinnedBuffers
from minirt.loading.load import plan_model
from minirt.modeling.parameters import PackedExperts

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}  # in safetensors files
# Sizes that blocks of 128 do not divide: q, k and v begin at rows 0, 288 and 384; the last block of K has 16 columns.
SIZES = {"hidden_size": 144, "intermediate_size": 200, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 48}


def quietly(folder, **options):
    with no_warning("on a CPU, quantized weights save memory"):
        return load(folder, **options)


@pytest.fixture(scope="module")
def plain(hf_folder):
    return hf_folder("Qwen2", seed=5, **{k: v for k, v in SIZES.items() if k != "head_dim"}, head_dim=48)


@pytest.fixture
def quantized(plain, tmp_path):
    return partial(write_changed, write, plain, tmp_path / "model")


def truth(plain, exact, dtype):
    """transformers' model with these weights."""
    config = transformers.AutoConfig.from_pretrained(plain)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    missing, unexpected = model.load_state_dict({name: tensor.to(dtype) for name, tensor in exact.items()}, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


@pytest.mark.parametrize("style", STYLES)
def test_each_format_computes_what_it_states(style, plain, quantized):
    """Weights and scales are those of the file. Steps of one token use activations that are not rounded, so they agree within
    the bounds of fp32."""
    written = quantized(style, shards=3)
    exact, theirs = truth(plain, written.exact, torch.float64), truth(plain, written.exact, torch.float32)
    with quietly(written.folder) as generator:
        rows = {row.layer: row for row in generator.plan.rows}
        blocks = "block" in style
        for layer in ("layers.0.attention", "layers.2.mlp"):
            assert rows[layer].formats == (("fp8 128x128" if blocks else "fp8"),)
        assert rows["embedding"].formats == rows["head"].formats == ()
        assert generator.plan.checkpoint.startswith(style.split()[0])
        for parameter in (each for layer in generator._model.layers for each in layer.quantizable()):
            values = torch.cat([written.tensors[f"{module}.weight"].view(torch.uint8) for module in parameter.modules])
            assert torch.equal(parameter.weight.view(torch.uint8), values)
            if parameter.format is not None:
                assert parameter.scale.dtype == torch.float32
                right = torch.cat([written.exact[f"{module}.weight"] for module in parameter.modules])
                assert torch.equal(dequantize_fp8(parameter.weight, parameter.scale, torch.float64), right)
                biases = 0 if parameter.bias is None else parameter.bias.nbytes
                assert parameter.weight.nbytes + parameter.scale.nbytes + biases == parameter.nbytes(torch.float32)
        with torch.no_grad():
            for token in TOKENS[:6]:
                ids = torch.tensor([[token]])
                right, approximate = exact(ids).logits[0], theirs(ids).logits[0]
                error_of_one = errors(generator.logits([token]), right)
                assert fault(error_of_one, errors(approximate, right), floor(torch.float32)) is None
            right = exact(torch.tensor([TOKENS])).logits[0]
        error = errors(generator.logits(TOKENS), right).relative
        assert 1e-3 < error < 0.25, "the effect of rounding activations to e4m3, about 2% each, in a model with random weights"
        assert len(generator.generate(TOKENS, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)).token_ids) == 3


@pytest.mark.parametrize("style", ["compressed-tensors channel", "modelopt", "fp8 block"])
def test_weights_in_pieces(style, quantized, monkeypatch):
    """Parts of a file of 5,000 bytes, through buffers as on a GPU. The pieces of a weight begin at rows within a block."""
    written = quantized(style)
    expected = logits(written.folder)
    original, buffers, sizes = checkpoint._read, PinnedBuffers(5_000, None), []

    def read(group, place, _=None):
        sizes.append(checkpoint._size(group))
        return original(group, place, buffers)

    monkeypatch.setattr(checkpoint, "_read", read)
    monkeypatch.setattr(checkpoint, "PART_BYTES", 5_000)
    with load(written.folder) as generator:
        buffers.of_thread()[:] = b"\xff" * 5_000
        assert torch.equal(generator.logits(TOKENS), expected)
    assert max(sizes) <= 5_000


def test_a_file_of_the_numbers_of_fp8_loads_as_fp8_does(plain, tmp_path):
    """`--fp8` of the plain checkpoint, and a checkpoint with its numbers: the same bits."""
    written = write(plain, tmp_path / "model", "compressed-tensors channel")
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            values, scale = quantize_fp8(tensor)
            written.tensors |= {name: values, f"{name}_scale": scale.unsqueeze(1)}
    save(written)
    with load(written.folder) as stored, load(plain, quantization="fp8", quantize_head=False) as rounded:
        assert torch.equal(stored.logits(TOKENS), rounded.logits(TOKENS))
        assert torch.equal(stored.logits(TOKENS[:1]), rounded.logits(TOKENS[:1]))
        assert [row.bytes for row in stored.plan.rows] == [row.bytes for row in rounded.plan.rows]
        assert stored.plan.rows == rounded.plan.rows
        assert stored.decode_read_bytes == rounded.decode_read_bytes
        keys = [[parameter.compile_key() for parameter in each._model.parameters()] for each in (stored, rounded)]
        assert keys[0] == keys[1], "the same kernels"


def test_mixed_models(plain, quantized):
    """Linears in 16 bits beside quantized ones, a quantized head, and ignore lists with regular expressions."""
    written = quantized("compressed-tensors channel", skip=("q_proj", "k_proj", "v_proj", "1.mlp.down_proj"))
    stated = config(written.folder)["quantization_config"]
    restate(written.folder, quantization_config=stated | {"ignore": ["re:.*self_attn.(q|k|v)_proj$", DOWN]})
    with quietly(written.folder) as generator:
        first, attention, mlp, head = (generator._model.layers[i] for i in (2, 1, 4, -1))
        assert first.down.format is not None
        assert attention.qkv.format is None
        assert attention.o.format is not None
        assert mlp.down.format is None
        assert head.lm_head.format is not None
        right = truth(plain, written.exact, torch.float64)(torch.tensor([[9]])).logits[0]
        assert errors(generator.logits([9]), right).relative < 1e-5


def test_what_is_not_listed(quantized):
    """An absent list is usual for the head of Qwen's files; other linears are warned about."""
    written = quantized("fp8 block", listed=False)
    with quietly(written.folder) as generator:
        assert generator._model.layers[-1].lm_head.format is None
    written = quantized("compressed-tensors channel", listed=False, skip=("lm_head", "1.mlp.down_proj"))
    with pytest.warns(UserWarning, match=r"not quantized, though not listed so: model\.layers\.1\.mlp\.down_proj, lm_head$"):
        load(written.folder).close()


def test_tied_heads(hf_folder, tmp_path):
    """Catches a head that is loaded as a second table, and one that contradicts the embedding."""
    plain = hf_folder("Llama", seed=8, tie_word_embeddings=True)
    for style in ("compressed-tensors channel", "modelopt", "fp8 block"):
        written = write(plain, tmp_path / style, style, skip=())
        with quietly(written.folder) as generator:
            assert generator._model.layers[0].table is generator._model.layers[-1].lm_head
    table = written.tensors["model.embed_tokens.weight"]
    written.tensors["lm_head.weight"] = table.to(torch.float8_e4m3fn)
    save(written)
    refused(written.folder, r"lm_head\.weight: config\.json ties the head.*set tie_word_embeddings to false", ConfigError)
    written.tensors.pop("lm_head.weight")
    written.tensors["model.embed_tokens.weight"] = table.to(torch.float8_e4m3fn)
    written.tensors["model.embed_tokens.weight_scale_inv"] = torch.ones(2, 1)
    save(written)
    refused(written.folder, r"model\.embed_tokens\.weight: this weight cannot be quantized", UnsupportedError)


def test_notes_and_unused_scales(quantized):
    """Catches scales that are left out without a word, and names that transformers gives them."""

    def renamed(tensors):
        for name in [name for name in tensors if name.endswith(".weight_scale")]:
            tensors[f"{name}_inv"] = tensors.pop(name)
            tensors[name.replace("weight_scale", "activation_scale")] = torch.tensor(0.5)

    written = quantized("modelopt")
    with load(written.folder) as generator:
        notes = "\n".join(generator.plan.notes)
        assert "21 input scales are not used" in notes
        assert "6 scales of the KV cache are not used" in notes
        assert generator.unused_tensors == ()
    stated = config(quantized("compressed-tensors channel").folder)["quantization_config"]
    stated["config_groups"]["group_0"]["input_activations"] = None
    restate(written.folder, quantization_config=stated)
    (written.folder / "hf_quant_config.json").unlink()
    assert "16-bit activations" in "".join(plan(written.folder).notes)
    written = quantized("fp8 tensor", renamed)
    with load(written.folder) as generator:
        assert "21 input scales are not used" in "".join(generator.plan.notes)
        down = generator._model.layers[2].down
        assert down.scale.unique().item() == written.tensors[f"{down.modules[0]}.weight_scale_inv"].item()


@pytest.mark.parametrize(("style", "scale", "right", "wrong", "heads"), [
    ("modelopt", "k_proj.k_scale", 2, 6, "2 KV heads"), ("fp8 tensor", "q_scale", 6, 2, "6 query heads"),
])  # fmt: skip
def test_a_scale_of_attention_may_have_a_value_for_each_head(style, scale, right, wrong, heads, quantized):
    """Catches a refusal of such files, and scales of the other heads."""
    folder = quantized(style, lambda t: t.update({f"{ATTENTION}.{scale}": torch.ones(right)})).folder
    assert "are not used" in "\n".join(plan(folder).notes)
    load(folder).close()
    folder = quantized(style, lambda t: t.update({f"{ATTENTION}.{scale}": torch.ones(wrong)})).folder
    refused(folder, rf"wrong shape of a scale; expected one value.* {heads}; found \[{wrong}\]")


ATTENTION = "model.layers.0.self_attn"
# Scales of FP8 attention, besides k_scale and v_scale of k_proj and v_proj, under the names of AutoFP8, vLLM, llm-compressor and
# ModelOpt.
SCALE_NAMES = [
    ["kv_scale"], ["q_scale", "k_scale", "v_scale"], ["attn.k_scale", "attn.v_scale"], ["prob_scale", "k_scale", "v_scale"],
    ["attn.q_scale", "attn.prob_scale"], ["qkv_proj.k_scale", "qkv_proj.v_scale"], ["q_proj.q_scale"],
]  # fmt: skip


@pytest.mark.parametrize("names", SCALE_NAMES, ids=", ".join)
def test_scales_of_attention_under_any_name(names, quantized):
    """Catches a refusal of scales that minirt does not use: it computes those of FP8 pages."""
    written = quantized("fp8 tensor", lambda t: t.update({f"{ATTENTION}.{name}": torch.tensor(0.03) for name in names}))
    with quietly(written.folder) as generator:
        what = "attention" if any("q_scale" in name or "prob" in name for name in names) else "the KV cache"
        assert f"{len(names)} scales of {what} are not used" in "".join(generator.plan.notes)
        assert generator.unused_tensors == ()
    written.tensors[f"{ATTENTION}.{names[0]}"] = torch.tensor(-0.03)
    save(written)
    refused(written.folder, f"{names[0]}: 1 of 1 scales are unusable", by=load)


@pytest.mark.parametrize("name", ["o_scale", "self_attn.x.attn.k_scale", "model.layers.3.self_attn.k_scale", "k_scale"])
def test_other_scales_are_unexpected(name, quantized):
    """Catches a name that is accepted anywhere: in a layer that the model does not have, or of no layer."""
    name = name if name.startswith(("model.", "k_scale")) else f"{ATTENTION}.{name}"
    folder = quantized("fp8 tensor", lambda t: t.update({name: torch.tensor(0.03)})).folder
    refused(folder, f"1 unexpected tensors.*{name}", by=plan)


def test_the_plan_reads_headers_only(quantized, monkeypatch):
    """Catches minutes of reading for a plan, and sizes that are not those of the file."""
    written = quantized("fp8 block", shards=2)
    monkeypatch.setattr("minirt.loading.checkpoint._read", lambda *_: pytest.fail("a tensor was read"))
    planned = plan(written.folder, dtype="bfloat16")
    assert planned.checkpoint == "fp8: FP8, one scale for each block of 128x128"
    rows = {row.layer: row for row in planned.rows}
    down = 144 * 200 + 2 * 2 * 4
    gate_up = 2 * 200 * 144 + 4 * (400 // 8) * 2  # up begins at row 200, so the scales are for 8 rows
    assert rows["layers.0.mlp"].bytes == down + gate_up + 2 * 144
    for file in written.folder.glob("*.safetensors*"):
        file.unlink()
    stated = plan(written.folder, dtype="bfloat16")
    assert stated.rows == planned.rows
    assert "the formats are those that config.json states" in stated.notes[0]


def test_the_plan_of_a_hub_model(quantized, monkeypatch):
    """Headers come from the Hub. If it cannot be reached, what config.json states is believed."""
    written = quantized("fp8 block", skip=("lm_head", "1.mlp.down_proj"), listed=False)
    with pytest.warns(UserWarning, match="down_proj"):
        local = plan(written.folder)
    header = SimpleNamespace(tensors={
        name: SimpleNamespace(dtype=NAMES[tensor.dtype], shape=list(tensor.shape)) for name, tensor in written.tensors.items()
    })  # fmt: skip
    asked = []

    def metadata(repo, *, revision):
        asked.append((repo, revision))
        return SimpleNamespace(files_metadata={"model.safetensors": header})

    (written.folder / "model.safetensors").unlink()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(written.folder))
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", metadata)
    with pytest.warns(UserWarning, match="down_proj"):
        assert plan("org/name") == local
    assert asked == [("org/name", written.folder.name)]
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda *_, **__: 1 / 0)
    stated = plan("org/name")
    assert stated.weight_bytes < local.weight_bytes
    assert "config.json states" in stated.notes[0]


@pytest.mark.parametrize("style", ["fp8 block", "modelopt block"])
def test_blocks_run_on_triton_layers_on_a_gpu(style, quantized, monkeypatch):
    """Catches a GPU that has the kernels and computes with PyTorch, and one that has none and gets them."""
    written = quantized(style)
    monkeypatch.setattr("minirt.layers.base.compute_capability", lambda device: (9, 0))
    monkeypatch.setattr("minirt.loading.load.compute_capability", lambda device: (9, 0))
    monkeypatch.setattr("minirt.layers.base.interpreting", lambda: False)
    monkeypatch.setattr("minirt.layers.base.is_nvidia", lambda device: True)
    monkeypatch.setattr("minirt.loading.load.pick_device", lambda device: torch.device("cuda", 0))
    rows = {row.layer: row for row in plan_model(LoadOptions(model=written.folder)).plan.rows}
    assert rows["layers.0.mlp"].implementation == rows["layers.2.mlp"].implementation == "triton"
    assert rows["layers.0.mlp"].formats == ("fp8 128x128",)
    monkeypatch.setattr("minirt.layers.base.compute_capability", lambda device: (8, 6))
    reason = {row.layer: row.reason for row in plan_model(LoadOptions(model=written.folder)).plan.rows}["layers.0.mlp"]
    assert "compute capability 8.6 is below 8.9 for fp8 128x128 weights" in reason


def test_random_weights_of_each_format(quantized):
    """Catches random codes whose scale makes the logits overflow or vanish."""
    for style in ("fp8 block", "compressed-tensors tensor"):
        written = quantized(style)
        for file in written.folder.glob("*.safetensors"):
            file.unlink()
        with load(written.folder, random_weights=True) as generator:
            linear = generator._model.layers[1].qkv
            assert linear.format is not None
            spread = dequantize_fp8(linear.weight, linear.scale).std().item()
            assert spread == pytest.approx((0.5 / 144) ** 0.5, rel=0.1)
            assert generator.logits(TOKENS).isfinite().all()


# --- refusals ---

DOWN = "model.layers.1.mlp.down_proj"
K = "model.layers.0.self_attn.k_proj"


def _value(name, value):
    def change(t):
        t[name] = t[name].clone()
        t[name].view(-1)[0] = value

    return change


def _plain(module, scale):
    def change(t):
        t[f"{module}.weight"] = t[f"{module}.weight"].float()
        del t[f"{module}.{scale}"]

    return change


TENSORS = {  # what: style, change of the tensors, error, words
    "no scale": ("fp8 block", lambda t: t.pop(f"{DOWN}.weight_scale_inv"), CheckpointError, f"{DOWN}.weight: .* no scale"),
    "a scale alone": (
        "fp8 block", lambda t: t.update({f"{DOWN}.weight": t[f"{DOWN}.weight"].float()}), CheckpointError,
        f"{DOWN}.weight_scale_inv: a scale without a quantized weight",
    ),
    "no weight": ("fp8 block", lambda t: t.pop(f"{DOWN}.weight"), CheckpointError, f"{DOWN}.weight_scale_inv: a scale without"),
    "neither weight nor scale": (
        "fp8 block", lambda t: (t.pop(f"{K}.weight"), t.pop(f"{K}.weight_scale_inv")), CheckpointError,
        rf"2 of .* missing; expected {K}\.weight, {K}\.weight_scale_inv",
    ),
    "too few blocks": (
        "fp8 block", lambda t: t.update({f"{DOWN}.weight_scale_inv": torch.ones(1, 2)}), CheckpointError,
        rf"{DOWN}.weight_scale_inv: wrong shape; expected \[2, 2\]; found \[1, 2\]",
    ),
    "a scale for each tensor": (
        "compressed-tensors channel", lambda t: t.update({f"{DOWN}.weight_scale": torch.ones(1)}), CheckpointError,
        rf"{DOWN}.weight_scale: wrong shape; expected \[144, 1\]; found \[1\]",
    ),
    "the other name": (
        "fp8 block", lambda t: t.update({f"{DOWN}.weight_scale": t.pop(f"{DOWN}.weight_scale_inv")}), CheckpointError,
        f"{DOWN}.weight: .*not that of the stated format; expected weight_scale_inv",
    ),
    "two scales": (
        "fp8 block", lambda t: t.update({f"{DOWN}.weight_scale": torch.ones(1)}), CheckpointError, f"{DOWN}.weight: .*scale",
    ),
    "a scale in e8m0": (
        "fp8 block", lambda t: t.update({f"{DOWN}.weight_scale_inv": t[f"{DOWN}.weight_scale_inv"].to(torch.float8_e8m0fnu)}),
        CheckpointError, f"{DOWN}.weight_scale_inv: wrong dtype",
    ),
    **{
        f"a scale of {value}": ("compressed-tensors channel", _value(f"{DOWN}.weight_scale", value), CheckpointError, words)
        for value, words in (
            (0.0, f"{DOWN}.weight_scale: 1 of 144 scales are unusable.*found 0.0"), (-1.0, f"{DOWN}.weight_scale.*found -1.0"),
            (math.nan, f"{DOWN}.weight_scale.*found nan"), (math.inf, f"{DOWN}.weight_scale.*found inf"),
        )
    },
    "an input scale of NaN": (
        "modelopt", lambda t: t[f"{DOWN}.input_scale"].fill_(math.nan), CheckpointError, f"{DOWN}.input_scale",
    ),
    "a KV scale of zero": ("modelopt", lambda t: t[f"{K}.k_scale"].fill_(0), CheckpointError, rf"{K}\.k_scale: 1 of 1 scales"),
    "a KV scale of integers": (
        "modelopt", lambda t: t.update({f"{K}.k_scale": torch.tensor(1)}), CheckpointError, "wrong dtype.*I64",
    ),
    "a KV scale of many values": (
        "modelopt", lambda t: t.update({f"{K}.k_scale": torch.ones(9, 9)}), CheckpointError,
        rf"{K}\.k_scale: wrong shape of a scale; expected one value.* 2 KV heads; found \[9, 9\]",
    ),
    "zero points": (
        "compressed-tensors channel", lambda t: t.update({f"{DOWN}.weight_zero_point": torch.ones(144, 1)}), UnsupportedError,
        f"{DOWN}.weight_zero_point: weights with zero points, but .*config.json.* states compressed-tensors",
    ),
    "an input scale elsewhere": (
        "modelopt", lambda t: t.update({"lm_head.input_scale": torch.ones(())}), CheckpointError, "unexpected",
    ),
    "a part in 16 bits": (
        "fp8 block", _plain(K, "weight_scale_inv"), UnsupportedError,
        rf"layers\.0\.attention: .*one format.*q_proj\.weight: FP8.*{K}\.weight: not quantized",
    ),
    "e5m2": (
        "fp8 block", lambda t: t.update({f"{DOWN}.weight": t[f"{DOWN}.weight"].float().to(torch.float8_e5m2)}), CheckpointError,
        f"{DOWN}.weight: wrong dtype.*F8_E4M3.*F8_E5M2",
    ),
    "GPTQ": (
        "fp8 block", lambda t: t.update({f"{DOWN}.qweight": torch.ones(2, 2)}), UnsupportedError, f"{DOWN}.qweight: AWQ or GPTQ",
    ),
    "bitsandbytes": ("fp8 block", lambda t: t.update({f"{DOWN}.weight.absmax": torch.ones(2)}), UnsupportedError, "bitsandbytes"),
    "int4": ("fp8 block", lambda t: t.update({f"{DOWN}.weight_packed": torch.ones(2)}), UnsupportedError, "4-bit"),
    "a quantized norm": (
        "fp8 block", lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}), UnsupportedError,
        r"model\.norm\.weight: this weight cannot be",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", TENSORS)
def test_tensors_that_contradict(what, quantized):
    """Catches weights that would be computed with another scale, or none, without a word."""
    style, change, error, words = TENSORS[what]
    refused(quantized(style, change).folder, words, error)


def test_values_are_refused_on_request(quantized):
    """NaN in the weights, of which e4m3 has a code."""
    folder = quantized("fp8 block", lambda t: t[f"{DOWN}.weight"].view(torch.uint8).view(-1)[7:9].fill_(0x7F)).folder
    load(folder).close()
    refused(folder, rf"{DOWN}\.weight: 2 NaN or Inf", check_weights=True)


def test_contradictions_of_tensors_and_config(quantized, plain):
    """Catches a statement that is believed although the tensors say otherwise, or the other way round."""
    folder = quantized("compressed-tensors channel").folder
    stated = config(folder)["quantization_config"]
    group = stated["config_groups"]["group_0"]
    values = group | {"targets": [r"re:.*self_attn\.v_proj"], "weights": group["weights"] | {"strategy": "tensor"}}
    restate(folder, quantization_config=stated | {"config_groups": {"group_0": group, "group_1": values}})
    refused(folder, r"layers\.0\.attention.*q_proj\.weight: FP8.*channel.*v_proj\.weight: .*tensor", UnsupportedError)
    restate(folder, quantization_config=stated | {"ignore": [DOWN, "lm_head"]})
    refused(folder, rf"{DOWN}\.weight: the weight is quantized, but config\.json says it is not", ConfigError)
    restate(folder, quantization_config=stated | {"ignore": ["re:.*gate_proj", "lm_head"]})
    refused(folder, r"gate_proj\.weight: the weight is quantized, but", ConfigError)
    restate(folder, quantization_config=...)
    refused(folder, r"_proj\.weight: the weight is FP8, but config\.json states no quantization")
    restate(folder, quantization_config=stated)
    refused(folder, "quantized already; found compressed-tensors: FP8", ConfigError, quantization="fp8")
    shutil.copy(plain / "model.safetensors", folder)
    refused(folder, r"quantization_config\.quant_method: no weight of the checkpoint is quantized", ConfigError)


# --- other projects' quantizers, and a trained model ---


@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_against_compressed_tensors(strategy, plain, tmp_path):
    """The tensors that compressed-tensors writes, and the weights that it reads from them."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    written = write(plain, tmp_path / "model", f"compressed-tensors {strategy}")
    blocks = {"block_structure": [128, 128]} if strategy == "block" else {}
    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, **blocks)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry("float-quantized")
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            state = {"weight": tensor, "weight_scale": written.tensors[f"{name}_scale"].float()}
            state = compressor.compress(state, scheme)
            written.exact[name] = compressor.decompress(dict(state), scheme)["weight"].double()
            written.tensors |= {name: state["weight"].contiguous(), f"{name}_scale": state["weight_scale"]}
    save(written)
    with load(written.folder) as generator:
        right = truth(plain, written.exact, torch.float64)(torch.tensor([[9]])).logits[0]
        assert errors(generator.logits([9]), right).relative < 1e-5


def test_against_transformers(hf_folder, tmp_path):
    """The blocks that transformers writes, in the form of Qwen's releases, and the weights that it reads from them."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(fp8, "Fp8Quantize"):
        pytest.skip("this version of transformers does not quantize to FP8 without a GPU")
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    source = hf_folder("Qwen2", seed=7, num_hidden_layers=1, **sizes)
    stated = transformers.FineGrainedFP8Config(weight_block_size=(128, 128))
    quantize = fp8.Fp8Quantize(SimpleNamespace(quantization_config=stated)).convert
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors |= quantize({name: tensor}) if name.endswith("_proj.weight") else {name: tensor}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config(source) | {"quantization_config": stated.to_dict()}))
    read = transformers.FineGrainedFP8Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=read, dtype=torch.float32)
    theirs = model.state_dict()
    with load(tmp_path) as generator:
        quantized = [each for layer in generator._model.layers for each in layer.quantizable() if each.format is not None]
        assert sum(len(each.modules) for each in quantized) == 7
        for each in quantized:
            right = torch.cat([theirs[f"{module}.weight"] for module in each.modules])
            assert torch.equal(dequantize_fp8(each.weight, each.scale), right), each.modules


TEXT = "The capital of France is Paris. The capital of Italy is Rome. Water is made of hydrogen and oxygen, and the Earth orbits"


def mean_loss(generator, tokens):
    """Mean negative log-likelihood in nats of each token after the ones before it."""
    logits = generator.logits(tokens).double().log_softmax(-1)
    return -logits[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].mean().item()


@pytest.mark.slow
def test_smollm2(smollm2, tmp_path):
    """A trained model with a tied head, in shards. FP8: text as before, and hardly more loss; 4 bits cost this model much, and a
    wrong order would cost all."""
    greedy = SamplingParams(max_tokens=2, temperature=0)
    with load(smollm2) as generator:
        tokens = generator.tokenizer.encode(TEXT)
        before, text = mean_loss(generator, tokens), generator.generate(TEXT, greedy).text
    assert text.startswith(" the Sun")
    for folder, size, most in (
        (write(smollm2, tmp_path / "fp8", "fp8 block", shards=2, listed=False).folder, 0.45 * 538e6, before + 0.1),
        (quantized_int4.write(smollm2, tmp_path / "int4", "gptq 128", shards=2).folder, 0.4 * 538e6, 4.0),
    ):
        with quietly(folder, max_model_len=64) as generator:
            assert generator.plan.weight_bytes < size
            assert generator._model.layers[0].table is generator._model.layers[-1].lm_head
            assert mean_loss(generator, tokens) < most
            assert generator.generate(TEXT, greedy).text == text or most == 4.0


MIXTURE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 136, "num_hidden_layers": 1, "head_dim": 16}


def test_the_plan_refuses_what_loading_refuses(hf_folder, tmp_path):
    """A missing and an extra expert, one in 16 bits, and a config.json that states nothing: in the plan too, in few words."""
    written = write(hf_folder("Qwen3Moe", **MIXTURE), tmp_path / "q", "fp8 block")
    whole, up = dict(written.tensors), "model.layers.0.mlp.experts.1.up_proj"
    expert = {name: tensor for name, tensor in whole.items() if name.startswith(up)}

    def both_refuse(tensors, words):
        written.tensors = tensors
        save(written)
        for attempt in (plan, load):
            with pytest.raises(MinirtError, match=words) as error:
                attempt(written.folder)
            assert len(str(error.value)) < 600

    others = {name: tensor for name, tensor in whole.items() if name not in expert}
    both_refuse(others, rf"2 of \d+ tensors are missing; expected {up}\.weight, {up}")
    extra = {name.replace("experts.1.", "experts.3."): tensor.clone() for name, tensor in expert.items()}
    both_refuse(whole | extra, r"2 unexpected tensors; found .*experts\.3\.up_proj")
    plain = others | {f"{up}.weight": written.exact[f"{up}.weight"].float()}
    both_refuse(plain, rf"layers\.0\.moe: .*one format.*experts\.0\.gate_proj\.weight: FP8.*{up}\.weight: not quantized")
    restate(written.folder, quantization_config=...)
    both_refuse(whole, r"q_proj\.weight: the weight is FP8, but config\.json states no quantization")


@pytest.mark.parametrize("style", ["compressed-tensors channel", "fp8 block"])
def test_experts_keep_their_scales(style, hf_folder, tmp_path):
    """Each expert's weights times its scales are the written ones; the router is not quantized."""
    written = write(hf_folder("Qwen3Moe", **MIXTURE), tmp_path / "q", style)
    with load(written.folder) as generator:
        layer = next(layer for layer in generator.model.layers if layer.kind == "moe")
        assert layer.router.format is None
        for name, parts in (("gate_up", ("gate", "up")), ("down", ("down",))):
            weight, scale = getattr(layer, name).stacked
            for e in range(3):
                names = [f"model.layers.0.mlp.experts.{e}.{part}_proj.weight" for part in parts]
                right = torch.cat([written.exact[name] for name in names])
                torch.testing.assert_close(dequantize_fp8(weight[e], scale[e], torch.float64), right, rtol=1e-6, atol=0)
        assert generator.logits([3, 4, 5]).isfinite().all()


@pytest.mark.parametrize("style", ["compressed-tensors channel", "fp8 block"])
def test_single_experts_in_pieces(style, hf_folder, tmp_path, monkeypatch):
    """Each expert is larger than a part of the file. Catches pieces that are all loaded to an expert's first rows."""
    written = write(hf_folder("Qwen3Moe", **MIXTURE), tmp_path / "q", style)
    expected = logits(written.folder)
    original, split = PackedExperts.load, []

    def record(self, name, source, first=0):
        split.append(first > 0)
        original(self, name, source, first)

    monkeypatch.setattr(PackedExperts, "load", record)
    monkeypatch.setattr(checkpoint, "PART_BYTES", 500)
    assert torch.equal(logits(written.folder), expected)
    assert any(split)


@pytest.mark.gpu
@pytest.mark.parametrize("style", STYLES)
def test_weights_on_a_gpu_are_those_on_the_cpu(style, quantized, monkeypatch):
    """Catches a buffer that is filled again before it was copied."""
    monkeypatch.setattr(checkpoint, "PART_BYTES", 5_000)
    assert loads_alike(quantized(style).folder) > 0
