"""The variants of `bench/tools/ablation.py` compute the same as the layers, and each leaves out its trick.

Catches: a replacement that is never called (the trick would seem useless), a replacement with a wrong result, patches that stay
after the measurement.
"""

import pytest
import torch

from minirt import Generator
from minirt.bench.compare import compare
from minirt.bench.compare import layers as compare_layers
from minirt.bench.tools import ablation
from minirt.errors import NumericsError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests the interpreter; the script itself runs on the GPU"),
]
TOKENS = [(7 * i * i + 3) % 211 for i in range(90)]
HEADS = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
ONE = {"combine", "norm", "residual", "activation", "rope", "fma"}


@pytest.fixture(scope="module")
def folder(hf_folder):
    return hf_folder("Qwen3", seed=5, hidden_size=48, intermediate_size=64, num_hidden_layers=1, **HEADS)


def steps(folder, batch, **options):
    with Generator.from_pretrained(folder, device="cpu", impl="eager", kv_cache_memory=1 << 22, **options) as generator:
        model = generator.model
        compare.bind(model, ())
        sequence = compare_layers.places(model)
        texts = [TOKENS[5 * i : 5 * i + 9] for i in range(batch)]
        yield model, sequence, compare_layers.decode(model, sequence, texts)


@pytest.mark.parametrize(
    ("batch", "options", "expected"),
    [
        (1, {}, ONE), (1, {"quantization": "fp8", "kv_cache_dtype": "fp8"}, ONE),
        (2, {}, {"residual", "activation", "rope", "combine", "split_k"}),
        (2, {"quantization": "fp8"}, {"quantize", "residual", "activation", "rope", "combine", "split_k"}),
    ],
)  # fmt: skip
def test_variants_agree_and_are_used(folder, batch, options, expected):
    for model, sequence, step in steps(folder, batch, **options):
        found = ablation.variants(model, sequence, step)
        assert set(found) == {"all"} | expected
        assert all(len(own) == len(sequence) for own in found.values())
        assert set(ablation.greedy(model, sequence, step)) == ({"logits", "row_maxima"} if batch > 1 else set())


def test_nothing_stays_behind(folder):
    from minirt.kernels.linear import dispatch as linear

    before = linear.regime, linear.linear_residual
    for _, sequence, step in steps(folder, 1):
        own, used = ablation.forwards(sequence, ablation.TRICKS["residual"])
        compare_layers.stream(own, sequence, step.batch, step.cache)
        assert used == ["linear_residual"] * 2
    assert (linear.regime, linear.linear_residual) == before


def test_a_variant_that_computes_something_else_is_refused(folder, monkeypatch):
    def forgets(original, x, weight, residual, bias, **options):
        return ablation._residual_apart(original, x, weight, residual, bias, **options) - residual

    wrong = ablation.TRICKS["residual"]._replace(without=forgets)
    monkeypatch.setitem(ablation.TRICKS, "residual", wrong)
    for model, sequence, step in steps(folder, 1):
        with pytest.raises(NumericsError, match=r"residual: the logits of a variant differ"):
            ablation.variants(model, sequence, step)
