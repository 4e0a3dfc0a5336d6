"""`MLP` with other norms or a factor, `Embedding` and `Head` with a factor, a norm or a bound, weights minus 1: against fp64.

Catches a norm on the wrong side of the residual or with the eps of the layer's input, a bound before the factor, and an offset of
norm weights that is lost or added twice.
"""

from dataclasses import replace

import pytest
import torch

from minirt import models
from minirt.layers import MLP, Embedding, Head, LayerContext, implementation
from minirt.modeling.parameters import NormWeight
from minirt.models.decoder import decoder_layers
from minirt.step.batch import Batch, Chunk

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
IMPLS = ["eager", "triton"]
HIDDEN, EPS, ROWS = 96, 1e-5, 5


def config(**fields):
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 211}
    sizes |= {"num_attention_heads": 2, "rms_norm_eps": EPS, "max_position_embeddings": 64}
    return models.parse_config({"model_type": "llama", **sizes, **fields})


def filled(layer, impl):
    """The layer with random weights, bound, and its checkpoint's tensors in fp64."""
    layer.context = LayerContext(64, DEVICE)
    random, tensors = torch.Generator().manual_seed(3), {}
    for parameter in layer.parameters():
        parameter.allocate(DEVICE, torch.float32)
        for name, shape, *_ in parameter.expected():
            tensor = torch.randn(shape, generator=random) / (3 if len(shape) == 1 else shape[-1] ** 0.5)
            parameter.load(name, tensor + (len(shape) == 1))
            tensors[name] = (tensor + (len(shape) == 1)).double()
    layer.bind(implementation(layer.kind, impl))
    return layer, tensors


def normalized(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def run(layer, x):
    return layer(x.to(DEVICE), Batch.build([Chunk([0] * len(x), 0, [0])], 64).to(DEVICE), None).double().cpu()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("norm", "post_norm", "factor"), [
    ("norm", "post", 1.0), ("norm", "post", -0.4), ("norm", None, 0.22), (None, "post", 1.0),
])  # fmt: skip
def test_mlp_with_other_norms_or_a_factor(impl, norm, post_norm, factor):
    settings = {"post_norm": post_norm, "post_norm_eps": 0.3, "residual_multiplier": factor}
    layer, w = filled(MLP(config(), name="mlp", norm=norm, prefix="mlp", **settings), impl)
    assert [op.residual for op in layer.linear_ops()] == [False, False]
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
    h = normalized(x.double(), w["norm.weight"], EPS) if norm else x.double()
    gate = h @ w["mlp.gate_proj.weight"].T
    y = (gate / (1 + (-gate).exp()) * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    y = y if post_norm is None else normalized(y, w["post.weight"], 0.3)
    torch.testing.assert_close(run(layer, x), x.double() + factor * y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("multiplier", "normalized_rows"), [(1.0, True), (12.0, False), (-0.3, True)])
def test_embedding_with_a_factor_and_a_norm(impl, multiplier, normalized_rows):
    """Catches a factor before the norm, which would then change nothing, and one that is lost."""
    layer, w = filled(Embedding(config(), weight="w", multiplier=multiplier, normalized=normalized_rows), impl)
    rows = w["w.weight"][[0] * ROWS]
    expected = multiplier * (normalized(rows, 1, EPS) if normalized_rows else rows)
    torch.testing.assert_close(run(layer, torch.empty(ROWS, HIDDEN)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, 0.0), (0.37, 0.0), (1.0, 1.5), (2.5, 1.5), (-40.0, 3.0)])
def test_head_with_a_factor_and_a_bound(impl, multiplier, softcap):
    layer, w = filled(Head(config(), norm="norm", weight="w", multiplier=multiplier, softcap=softcap), impl)
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(2))
    logits = multiplier * (normalized(x.double(), w["norm.weight"], EPS) @ w["w.weight"].T)
    if softcap:
        logits = softcap * (logits / softcap).tanh()
        assert run(layer, x).abs().max() <= softcap
    torch.testing.assert_close(run(layer, x), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_stored_minus_1(dtype):
    """The sum is rounded once, from fp32: a small weight of 16 bits is not lost before."""
    stored = torch.tensor([0.0, -1.0, 0.5, 2**-7, -(2**-9), 1e-3]).to(torch.bfloat16)
    weight = NormWeight("norm", len(stored), zero_centered=True)
    weight.allocate(torch.device("cpu"), dtype)
    weight.load("norm.weight", stored)
    assert torch.equal(weight.weight, (1 + stored.double()).to(dtype))


def test_all_norms_of_a_model_are_stored_alike():
    """Catches a layer that forgets the offset of its norms."""
    changed = replace(config(), zero_centered_norms=True, qk_norm=True)
    norms = [p for layer in decoder_layers(changed) for p in layer.parameters() if isinstance(p, NormWeight)]
    assert len(norms) == 5  # of attention, q, k, the MLP and the head
    assert all(norm.zero_centered for norm in norms)
