"""The kernel for experts of 4 bits on Hopper, on a GPU or emulated: against the reference in fp64.

Catches the scale of another expert, group or part (gate for up), gate and up swapped, columns past K, tiles that reach into
another expert's rows, stages that are released too early, biases or a limit that are left out, a row of another pair.
"""

import os

import pytest
import torch
from support.experts import four_bits, lists

from minirt.kernels import reference
from minirt.kernels.launch import Gpu
from minirt.kernels.linear.product import Epilogue, Product, ProductFacts
from minirt.kernels.moe import experts_int4_sm90
from minirt.kernels.moe.dispatch import mixture_residual
from minirt.kernels.moe.experts_int4_sm90 import block_t, derive_config, rule

# (T, E, k, N, K, group, gated, tokens of a tile, stages, programs of an SM): rows that no tile divides, a chunk that is not full,
# more chunks than stages and fewer, experts of several tiles, more items than programs.
CASES = [
    (5, 4, 2, 70, 456, "mx", True, 8, 2, 2), (5, 4, 2, 150, 456, "mx", False, 8, 3, 2),
    (40, 3, 2, 104, 200, "mx", True, 16, 4, 2), (40, 5, 1, 140, 320, 64, False, 32, 2, 2),
    (70, 3, 1, 72, 392, 32, True, 64, 2, 1), (300, 3, 1, 88, 264, "mx", True, 128, 2, 1),
    (70, 3, 1, 71, 392, (32, torch.bfloat16), True, 64, 2, 1),
    (300, 3, 1, 136, 264, 128, False, 128, 2, 1), (9, 4, 2, 40, 584, 128, True, 8, 8, 2),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_product(case, half_dtype, make, nan, agrees, on_hopper):
    """The tokens are spread by the reference; the second expert has none. Biases, and a clamped SwiGLU if gated."""
    T, E, k, N, K, group, gated, tokens, stages, programs = case
    rows = 2 * N if gated else N
    words, scales, exact = four_bits(make(E, rows, K, dtype=torch.float32) / K**0.5, group)
    logits, bias = make(T, E, dtype=torch.float32), make(E, rows, dtype=half_dtype)
    logits[:, 1] = -100
    weights, experts = reference.route(logits, k, True)
    routing = lists(experts, weights, E, tokens)
    x = make(T * k, K, dtype=half_dtype)
    epilogue = Epilogue(scales, None, bias, "silu", limit=1.5, alpha=1.7) if gated else Epilogue(scales, None, bias)
    product = Product(x, words, nan(T * k, N, dtype=half_dtype), epilogue=epilogue, pdl=True)
    config = experts_int4_sm90.ExpertsInt4Sm90Config(tokens, stages, programs)
    out, pairs = experts_int4_sm90.launch(product, routing, config), routing.order.long()
    for e in experts.unique().tolist():
        places = (experts.flatten()[pairs] == e).nonzero()[:, 0]
        each = [x[places].to(kind) @ exact[e].to(kind).T + bias[e].to(kind) for kind in (half_dtype, torch.float64)]
        stored = places if gated else pairs[places]
        agrees(out[stored], *(reference.gated(y, "silu", 1.5, 1.7) if gated else y for y in each))


@pytest.mark.gpu
@pytest.mark.skipif("MINIRT_EMULATE" in os.environ, reason="too large to emulate")
@pytest.mark.parametrize("T", [4, 8, 17, 64, 100, 129, 256, 513, 2048])
@pytest.mark.parametrize("group", ["mx", 128])
def test_mixture_of_a_real_size(T, group, make, half_dtype, agrees, on_hopper):
    """All regimes with the shapes of gpt-oss-20b, and an expert with more tokens than others."""
    E, k, H = 32, 4, 2880
    (up, up_scale, up_exact), (down, down_scale, down_exact) = (
        four_bits(make(E, rows, H, dtype=torch.float32) / H**0.5, group) for rows in (2 * H, H)
    )
    h, logits = make(T, H, dtype=half_dtype), make(T, E, dtype=half_dtype)
    logits[:, 7] += 2
    given = {"gate_up_bias": make(E, 2 * H, dtype=half_dtype), "down_bias": make(E, H, dtype=half_dtype)}
    out = mixture_residual(
        h, logits, up, down, h, k, True, "silu", gate_up_scale=up_scale, down_scale=down_scale, limit=7.0, alpha=1.702, pdl=True,
        **given,
    )  # fmt: skip

    def expected(kind):
        chosen = reference.route(logits.to(kind), k, True)
        biases = {name: bias.to(kind) for name, bias in given.items()}
        return h.to(kind) + reference.mixture(
            h.to(kind), *chosen, up_exact.to(kind), down_exact.to(kind), "silu", limit=7.0, alpha=1.702, **biases
        )

    agrees(out, expected(half_dtype), expected(torch.float64))


def test_configurations_fit_on_an_sm():
    """Also what the rules choose for the mixtures of well-known models."""
    for E, k, N, K in ((32, 4, 2880, 2880), (128, 8, 768, 2048), (128, 4, 2880, 2880)):
        heights = set()
        for T in (2, 8, 16, 17, 64, 100, 256, 512, 1024, 2048, 9000):
            c = rule(ProductFacts(T, N, K, 2, E=E, k=k, rows=block_t(T, k, E)), Gpu(90, 132))
            assert c == derive_config(c.block_t, c.programs)
            assert c.num_stages >= 4
            assert c.programs * (c.num_stages * (c.block_t * 256 + 128 * 64) + 2048) <= 227 * 1024
            heights.add(c.block_t)
        assert min(heights) == 8
        assert max(heights) == 128
