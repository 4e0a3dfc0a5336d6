"""FP8 weights and pages: whole models with the eager layers. tests/kernels/test_quantize.py has the rounding.

Catches a chunk that is skipped or written twice, other bits than before, and an embedding that is quantized together with its
tied head.
"""

from hashlib import sha256

import pytest
import torch
from support.checkpoints import TOKENS, distance, load, refused, rewrite

from minirt import Generator, SamplingParams
from minirt.errors import ConfigError
from minirt.kernels.reference import FP8_MAX, quantize_fp8
from minirt.modeling import formats
from minirt.modeling.config import ModelConfig
from minirt.modeling.formats import FP8, Quantization, QuantizedToFp8, StoredFp8Blocks
from minirt.modeling.model import Model
from minirt.modeling.parameters import PackedLinear, Part


def weights(rows, columns, seed=0):
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return w * torch.logspace(-6, 3, rows).unsqueeze(1)


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
def test_a_model_computes_with_the_quantized_weights(family, options, head, hf_folder):
    """Compared with an unquantized model whose checkpoint has the same rounded weights.

    Steps with one token agree. Larger steps also quantize the activations, so they agree only approximately.
    """
    folder = hf_folder(family, seed=7, **options)
    with load(folder, quantization="fp8", quantize_head=head) as generator:
        result = generator.logits(TOKENS)
        alone = [generator.logits([token]) for token in TOKENS[:5]]
        formats = {row.layer: row.dtypes for row in generator.plan.rows}
        small, reads = generator.plan.weight_bytes, generator.decode_read_bytes

    def rounded(tensors):
        for name, tensor in tensors.items():
            if name.endswith("_proj.weight") or (name == "lm_head.weight" and head):
                values, scale = quantize_fp8(tensor)
                tensors[name] = values.float() * scale.unsqueeze(1)

    rewrite(folder, rounded)
    with load(folder) as generator:
        expected = generator.logits(TOKENS)
        for token, logits in zip(TOKENS, alone, strict=False):
            torch.testing.assert_close(logits, generator.logits([token]), rtol=1e-4, atol=1e-4)
        large, reads_large = generator.plan.weight_bytes, generator.decode_read_bytes
    error = distance(result, expected)
    assert 1e-3 < error < 0.25, "the effect of rounding activations to e4m3, about 2% each, in a model with random weights"
    assert formats["layers.0.mlp"] == "float32 · fp8"
    assert formats["embedding"] == "float32"
    assert formats["head"] == ("float32 · fp8" if head else "float32")
    assert small < 0.65 * large
    assert reads < 0.5 * reads_large or not head


def test_a_tied_head_is_a_copy(hf_folder):
    """Catches an embedding that is quantized together with its head."""
    folder = hf_folder("Llama", seed=8, tie_word_embeddings=True)
    with load(folder, quantization="fp8", quantize_head=True) as generator:
        layers = generator._model.layers
        table, head = layers[0].table, layers[-1].lm_head
        assert table is not head
        assert table.weight.dtype == torch.float32
        values, scale = quantize_fp8(table.weight)
        assert torch.equal(head.weight.float(), values.float())
        assert torch.equal(head.scale, scale)
        assert len(generator.generate(TOKENS, SamplingParams(max_tokens=5, ignore_eos=True)).token_ids) == 5
    with load(folder, quantization="fp8", quantize_head=False) as generator:
        assert generator._model.layers[0].table is generator._model.layers[-1].lm_head
    refused(folder, r"quantization.*fp8 or int4.*'int3'", ConfigError, quantization="int3")
    refused(folder, r"--kv-cache-dtype.*auto or fp8.*int8", ConfigError, kv_cache_dtype="int8")


def test_the_model_knows_its_bytes():
    from minirt import models

    config: ModelConfig = models.preset("Qwen2.5-7B").config
    model = Model(config, models.build(config), Quantization("fp8"))
    assert 8.15e9 < model.weight_bytes(torch.bfloat16) < 8.25e9  # includes a bf16 embedding of 1.09 GB
    model.dtype = torch.bfloat16
    assert 7.0e9 < model.decode_read_bytes < 7.15e9
    assert torch.finfo(FP8).max == FP8_MAX


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_fp8_pages(family, hf_folder):
    """FP8 pages give nearly the logits of the exact cache, take fewer bytes, and do not depend on how prompts are batched."""
    folder = hf_folder(family, seed=9)
    with load(folder) as generator:
        exact, bytes_exact = generator.logits(TOKENS), generator.kv_bytes_per_token
    with load(folder, kv_cache_dtype="fp8") as generator:
        kv = generator._cache.layers[0]
        assert 1e-4 < distance(generator.logits(TOKENS), exact) < 0.2
        assert kv.k.dtype == FP8
        assert kv.k_scale.shape == kv.k.shape[:3]
        assert generator.kv_bytes_per_token < 0.35 * bytes_exact
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        prompts = [TOKENS, TOKENS[:7], TOKENS[3:20]]
        alone = [generator.generate(p, params).token_ids for p in prompts]
        assert [c.token_ids for c in generator.generate(prompts, params)] == alone


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
