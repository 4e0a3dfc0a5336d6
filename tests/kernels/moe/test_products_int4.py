"""Experts of 4 bits by their kernel: against the reference in fp64. On a GPU, in the interpreter, or emulated.

Catches the scale of another expert, group or part (gate for up), a column past K, a row of another pair.
"""

import pytest
import torch
from support.experts import four_bits, lists

from minirt.errors import InputError
from minirt.kernels import reference
from minirt.kernels.linear.product import Epilogue, Product
from minirt.kernels.moe import products_int4
from minirt.kernels.moe.dispatch import mixture_residual


def expected(h, logits, gate_up, down, residual, k):
    weights, experts = reference.route(logits, k, True)
    return residual + reference.mixture(h, weights, experts, gate_up, down, "gelu")


@pytest.mark.parametrize("case", products_int4.CASES, ids=str)
def test_mixture(case, dtype, make, agrees):
    T, E, k, H, inter, group = case.values()
    h, residual, logits, norm = (make(*n, dtype=dtype) for n in ((T, H), (T, H), (T, E), (H,)))
    sizes = (E, 2 * inter, H), (E, H, inter)
    parts = [four_bits(make(*size, dtype=torch.float32) / size[2] ** 0.5, group) for size in sizes]
    scales = {"gate_up_scale": parts[0][1], "down_scale": parts[1][1]}
    operands = (h, logits, parts[0][0], parts[1][0], residual)
    out = mixture_residual(*operands, k, True, "gelu", norm_weight=norm, eps=1e-6, **scales)
    exact = [part[2] for part in parts]
    normed = reference.rms_norm(h, norm, 1e-6)
    same = expected(normed, logits, *(x.to(dtype) for x in exact), residual, k)
    wide = reference.rms_norm(h.double(), norm.double(), 1e-6)
    agrees(out, same, expected(wide, logits.double(), *exact, residual.double(), k))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("N", "K", "group", "T"), [
    (70, 200, 128, 9), (96, 136, 32, 70), (40, 320, 64, 5), (40, 72, "mx", 9), (41, 136, (32, torch.bfloat16), 9),
])  # fmt: skip
def test_one_product(N, K, group, T, gated, dtype, make, nan, agrees):
    """One product, its tokens spread by the reference: one expert has none."""
    E, k, rows = 4, 2, 2 * N if gated else N
    words, scales, exact = four_bits(make(E, rows, K, dtype=torch.float32) / K**0.5, group)
    logits = make(T, E, dtype=torch.float32)
    logits[:, 1] = -100
    weights, experts = reference.route(logits, k, True)
    routing = lists(experts, weights, E, products_int4.block_t(T))
    routing.tiles[:, int(routing.used) :] = -1
    x = make(T if gated else T * k, K, dtype=dtype)
    epilogue = Epilogue(scales, activation="silu" if gated else None)
    out = products_int4.launch(Product(x, words, nan(T * k, N, dtype=dtype), epilogue=epilogue), routing)
    pairs = routing.order.long()
    for e in experts.unique().tolist():
        places = (experts.flatten()[pairs] == e).nonzero()[:, 0]
        tokens, stored = (pairs[places] // k, places) if gated else (places, pairs[places])
        each = [x[tokens].to(kind) @ exact[e].to(kind).T for kind in (dtype, torch.float64)]
        agrees(out[stored], *(reference.gated(y, "silu") if gated else y for y in each))


def test_wrong_operands_are_named(make):
    H, inter = 160, 64
    (up, up_scale, _), (down, down_scale, _) = (
        four_bits(make(3, *size, dtype=torch.float32), 32) for size in ((2 * inter, H), (H, inter))
    )
    h, logits = make(2, H, dtype=torch.float32), make(2, 3, dtype=torch.float32)
    wrong = {"gate_up_scale": (up_scale[:, :4], down_scale), "down_scale": (up_scale, down_scale[:2]), "both": (up_scale, None)}
    for match, scales in wrong.items():
        named = dict(zip(("gate_up_scale", "down_scale"), scales, strict=True))
        with pytest.raises(InputError, match=match):
            mixture_residual(h, logits, up, down, h, 2, True, "silu", **named)
