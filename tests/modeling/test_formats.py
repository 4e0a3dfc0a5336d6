"""FP8 weights and pages: rounding against all 256 codes, edge cases, and whole models with the eager layers.

Catches scales along the wrong axis, rounding to zero or beyond the largest code, NaN that turn into numbers, a chunk that is
skipped or written twice, and an embedding that is quantized together with its tied head.
"""

from hashlib import sha256

import pytest
import torch
from safetensors.torch import load_file, save_file

from minirt import Generator, SamplingParams
from minirt.errors import ConfigError
from minirt.kernels.reference import FP8_MAX, linear, quantize_fp8
from minirt.modeling import formats
from minirt.modeling.config import ModelConfig
from minirt.modeling.formats import FP8, Quantization, QuantizedToFp8, StoredFp8Blocks
from minirt.modeling.model import Model
from minirt.modeling.parameters import PackedLinear, Part

TOKENS = list(range(3, 43))


def weights(rows, columns, seed=0):
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return w * torch.logspace(-6, 3, rows).unsqueeze(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_weight_takes_the_nearest_code(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    codes = codes[codes.isfinite()].sort().values
    w = weights(9, 301).to(dtype)
    values, scale = quantize_fp8(w)
    assert values.dtype == FP8
    assert scale.dtype == torch.float32
    torch.testing.assert_close(scale.double(), w.double().abs().amax(1) / 448, rtol=1e-6, atol=0)
    exact = w.double() / scale.double().unsqueeze(1)
    best = (exact.unsqueeze(-1) - codes).abs().amin(-1)
    found = (exact - values.double()).abs()
    assert bool((found <= best + 1e-6 * exact.abs()).all())  # tolerance for the rounding of the division
    assert bool((values.float().abs().amax(1) == 448).all())


def test_rows_without_a_scale():
    w = torch.zeros(6, 8)
    w[1, 2], w[2, 3], w[3] = float("nan"), float("-inf"), float("inf")
    w[2, 4], w[4, 0], w[5] = 2.0, 1e-45, 3.4e38
    values, scale = quantize_fp8(w)
    real = values.float() * scale.unsqueeze(1)
    assert not real[0].any()
    assert scale[:2].tolist() == [1.0, 1.0]
    for row, bad in ((1, [2]), (2, [3]), (3, list(range(8)))):
        assert real[row].isnan().nonzero().flatten().tolist() == bad, "NaN and Inf must stay visible, and only these"
    assert real[2, 4] == 2.0
    assert real[4].isfinite().all()
    torch.testing.assert_close(real[5], w[5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 6])
def test_a_product_with_fp8_weights(tokens, dtype):
    """A single token is not quantized; several tokens are, each with its own scale. 448 · 448 overflows fp16."""
    x = torch.randn(tokens, 96, generator=torch.Generator().manual_seed(3)).to(dtype)
    x[0] *= 50
    weight, scale = quantize_fp8(torch.randn(20, 96, generator=torch.Generator().manual_seed(4)) * 0.1)
    bias = torch.arange(20).to(dtype)
    exact = x.double()
    if tokens > 1:
        values, x_scale = quantize_fp8(x)
        exact = values.double() * x_scale.double().unsqueeze(1)
    exact = exact @ (weight.double() * scale.double().unsqueeze(1)).T + bias.double()
    y = linear(x, weight, bias, scale)
    assert y.dtype == dtype
    error = (y.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max().item() < 2 * torch.finfo(dtype).eps + 1e-6


def test_one_channel_times_a_thousand_leaves_the_others_alone():
    w = weights(16, 64)
    plain = [t.clone() for t in quantize_fp8(w)]
    w[5] *= 1000
    values, scale = quantize_fp8(w)
    assert torch.equal(values[torch.arange(16) != 5].float(), plain[0][torch.arange(16) != 5].float())
    torch.testing.assert_close(values[5].float() * scale[5], w[5], rtol=2**-4, atol=float(scale[5]) * 2**-9)


def test_chunks_make_no_difference(monkeypatch):
    w = weights(37, 24)

    def load(chunk):
        monkeypatch.setattr("minirt.modeling.formats.CHUNK", chunk)
        linear = PackedLinear([Part("a", 20), Part("b", 17)], 24)
        linear.format = QuantizedToFp8()
        linear.allocate(torch.device("cpu"), torch.float32)
        linear.weight.view(torch.uint8).fill_(0x7F)  # NaN
        linear.load("b.weight", w[20:])
        linear.load("a.weight", w[:20])
        return linear.weight.float(), linear.scale

    whole, pieces = load(1 << 22), load(50)
    assert torch.equal(whole[0], pieces[0])
    assert torch.equal(whole[1], pieces[1])


@pytest.mark.parametrize(("family", "options"), [("Llama", {}), ("Qwen2", {}), ("Qwen3", {"head_dim": 32})])
@pytest.mark.parametrize("head", [True, False])
def test_a_model_computes_with_the_quantized_weights(family, options, head, hf_folder, tmp_path):
    """Compared with an unquantized model whose checkpoint has the same rounded weights.

    Steps with one token agree. Larger steps also quantize the activations, so they agree only approximately.
    """
    folder = hf_folder(family, seed=7, **options)
    with Generator.from_pretrained(folder, device="cpu", quantization="fp8", quantize_head=head) as generator:
        found = generator.logits(TOKENS)
        alone = [generator.logits([token]) for token in TOKENS[:5]]
        formats = {row.layer: row.dtypes for row in generator.plan.rows}
        small, reads = generator.plan.weight_bytes, generator.decode_read_bytes
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight") or (name == "lm_head.weight" and head):
            values, scale = quantize_fp8(tensor)
            tensors[name] = values.float() * scale.unsqueeze(1)
    for file in folder.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with Generator.from_pretrained(tmp_path, device="cpu") as generator:
        expected = generator.logits(TOKENS)
        for token, logits in zip(TOKENS, alone, strict=False):
            torch.testing.assert_close(logits, generator.logits([token]), rtol=1e-4, atol=1e-4)
        large, reads_large = generator.plan.weight_bytes, generator.decode_read_bytes
    error = ((found - expected).norm() / expected.norm()).item()
    assert 1e-3 < error < 0.25, "the effect of rounding activations to e4m3, about 2% each, in a model with random weights"
    assert formats["layers.0.mlp"] == "float32 · fp8"
    assert formats["embedding"] == "float32"
    assert formats["head"] == ("float32 · fp8" if head else "float32")
    assert small < 0.65 * large
    assert reads < 0.5 * reads_large or not head


def test_a_tied_head_is_a_copy(hf_folder):
    folder = hf_folder("Llama", seed=8, tie_word_embeddings=True)
    with Generator.from_pretrained(folder, device="cpu", quantization="fp8", quantize_head=True) as generator:
        layers = generator._model.layers
        table, head = layers[0].table, layers[-1].lm_head
        assert table is not head
        assert table.weight.dtype == torch.float32
        values, scale = quantize_fp8(table.weight)
        assert torch.equal(head.weight.float(), values.float())
        assert torch.equal(head.scale, scale)
        assert len(generator.generate(TOKENS, SamplingParams(max_tokens=5, ignore_eos=True)).token_ids) == 5
    with Generator.from_pretrained(folder, device="cpu", quantization="fp8", quantize_head=False) as generator:
        assert generator._model.layers[0].table is generator._model.layers[-1].lm_head


def test_random_weights_are_quantized_too(hf_folder):
    folder = hf_folder("Llama", seed=8)
    with Generator.from_pretrained(folder, device="cpu", quantization="fp8", random_weights=True, seed=3) as generator:
        linear = generator._model.layers[1].qkv
        assert bool((linear.weight.float().abs().amax(1) == 448).all())
        spread = (linear.weight.float() * linear.scale.unsqueeze(1)).std().item()
        assert spread == pytest.approx((0.5 / linear.in_features) ** 0.5, rel=0.1)


def test_unknown_formats_are_refused(hf_folder):
    with pytest.raises(ConfigError, match=r"quantization.*fp8 or int4.*'int3'"):
        Generator.from_pretrained(hf_folder("Llama", seed=8), quantization="int3")


def test_the_model_knows_its_bytes():
    from minirt import models

    config: ModelConfig = models.preset("Qwen2.5-7B").config
    model = Model(config, models.build(config), Quantization("fp8"))
    assert 8.15e9 < model.weight_bytes(torch.bfloat16) < 8.25e9  # includes a bf16 embedding of 1.09 GB
    model.dtype = torch.bfloat16
    assert 7.0e9 < model.decode_read_bytes < 7.15e9
    assert torch.finfo(FP8).max == FP8_MAX


def test_a_mixture_of_experts_knows_its_bytes():
    """A token reads 8 of 128 experts of each layer."""
    from minirt import models
    from minirt.bench.read_bytes import step_read_bytes

    config: ModelConfig = models.preset("Qwen3-30B-A3B").config
    for quantization, total, read in ((None, 61.06e9, 6.08e9), (Quantization("fp8"), 31.0e9, 3.06e9)):
        model = Model(config, models.build(config), quantization)
        model.dtype = torch.bfloat16
        assert model.num_parameters == pytest.approx(30.53e9, rel=1e-3)
        assert model.weight_bytes(torch.bfloat16) == pytest.approx(total, rel=0.01)
        one, some, many = (step_read_bytes(model, tokens) for tokens in (1, 32, 10**4))
        assert model.decode_read_bytes == one == pytest.approx(read, rel=0.02)
        assert 6.8 * one < some < many < total


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_fp8_pages(family, hf_folder):
    """FP8 pages give nearly the logits of the exact cache, take fewer bytes, and do not depend on how prompts are batched."""
    folder = hf_folder(family, seed=9)
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=1 << 22) as generator:
        exact, bytes_exact = generator.logits(TOKENS), generator.kv_bytes_per_token
    options = {"device": "cpu", "kv_cache_dtype": "fp8", "kv_cache_memory": 1 << 22}
    with Generator.from_pretrained(folder, **options) as generator:
        found, kv = generator.logits(TOKENS), generator._cache.layers[0]
        error = ((found - exact).norm() / exact.norm()).item()
        assert 1e-4 < error < 0.2
        assert kv.k.dtype == FP8
        assert kv.k_scale.shape == kv.k.shape[:3]
        assert generator.kv_bytes_per_token < 0.35 * bytes_exact
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        prompts = [TOKENS, TOKENS[:7], TOKENS[3:20]]
        alone = [generator.generate(p, params).token_ids for p in prompts]
        assert [c.token_ids for c in generator.generate(prompts, params)] == alone
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype.*auto or fp8.*int8"):
        Generator.from_pretrained(folder, device="cpu", kv_cache_dtype="int8")


def test_fp8_heads_of_zeros_and_outliers():
    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
    x[1, 0], x[2, 1, 3] = 0.0, 5000.0
    values, scale = quantize_fp8(x)
    assert scale.shape == (5, 2)
    assert not values[1, 0].float().any()
    assert scale[2, 1] == pytest.approx(5000 / 448)
    assert scale[2, 0] < 0.02, "an outlier affects only its own head"


def test_the_bits_of_fp8_do_not_change():
    """The weights of the embedded model with `--fp8`. Another hash means other numbers for every user."""
    with Generator.from_pretrained(device="cpu", quantization="fp8", kv_cache_memory=1 << 22) as generator:
        digest = sha256()
        for parameter in generator.model.parameters():
            for tensor in (parameter.weight, getattr(parameter, "scale", None)):
                digest.update(b"" if tensor is None else tensor.contiguous().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == "232e2458ae228f6d3c38161af5396f69dfa6db5ff46577ec43bf3bc06b61d60e"


@pytest.mark.parametrize("capability", [(9, 0), (8, 9), (8, 6), (0, 0)])
@pytest.mark.parametrize("missing", [None, "triton", "a GPU for its kernels"])
def test_a_kernel_quantizes_where_there_is_one(capability, missing, monkeypatch):
    """An older GPU, and one of AMD, has the layers' eager forms with FP8 weights, so it has to load them, too."""
    pytest.importorskip("triton")
    from minirt.kernels import quantize as kernels

    used, w = [], weights(7, 97)
    expected = quantize_fp8(w)

    def quantize(source, out, scale):
        used.append(source.shape)
        out.copy_(expected[0])
        scale.copy_(expected[1])

    monkeypatch.setattr(kernels, "quantize", quantize)
    monkeypatch.setattr(formats, "compute_capability", lambda device: capability)
    monkeypatch.setattr(formats, "triton_installed", lambda: missing != "triton")
    monkeypatch.setattr(formats, "interpreting", lambda: missing == "a GPU for its kernels")
    packed = PackedLinear([Part("a", 7)], 97)
    packed.format = QuantizedToFp8()
    packed.allocate(torch.device("cpu"), torch.bfloat16)
    packed.load("a.weight", w)
    assert packed.weight.view(torch.uint8).equal(expected[0].view(torch.uint8))
    assert packed.scale.equal(expected[1])
    assert used == [(7, 97)] * (capability >= (8, 9) and missing is None)


@pytest.mark.parametrize("rows", [(300,), (128, 128, 7), (192, 64), (576, 192, 192), (64, 1), (1, 64), (768,) * 256, (96, 32, 9)])
def test_rows_of_a_block_that_parts_share(rows):
    """The largest power of two up to 128 that divides the beginning of every part."""
    starts = [sum(rows[:part]) for part in range(len(rows))]
    expected = max(g for g in (1, 2, 4, 8, 16, 32, 64, 128) if all(start % g == 0 for start in starts))
    assert StoredFp8Blocks().group_rows(rows) == expected
