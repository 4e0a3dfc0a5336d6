"""Experts with biases and a clamped SwiGLU in every kernel of mixtures, against fp64.

Catches a bias of another expert, row or part, one that is not weighted, added for each part of a row, or left out; a clamp of the
wrong side or part; a router's bias that is added before the norm's factor.
"""

import pytest
import torch
from support.experts import four_bits

from minirt.errors import InputError
from minirt.kernels import reference
from minirt.kernels.moe.dispatch import mixture_residual, router_logits
from minirt.kernels.reference import SharedExpert

E, K, H, INTER, LIMIT, ALPHA, EPS = 9, 3, 136, 72, 0.7, 1.702, 1e-6


def truth(x, norm, router, router_bias, parts, residual):
    """By loops over tokens and experts, in the dtype of x."""
    up, up_bias, down, down_bias = parts
    h = reference.rms_norm(x, norm, EPS)
    out = residual.clone()
    for t, logits in enumerate(h @ router.T + router_bias):
        top, experts = logits.topk(K)
        for share, e in zip(top.softmax(0), experts.tolist(), strict=True):
            both = up[e] @ h[t] + up_bias[e]
            gate, linear = both[:INTER].clamp(max=LIMIT), both[INTER:].clamp(-LIMIT, LIMIT)
            out[t] += share * (down[e] @ ((linear + 1) * gate * torch.sigmoid(ALPHA * gate)) + down_bias[e])
    return out


@pytest.mark.parametrize("form", ["plain", 32, "mx"])
@pytest.mark.parametrize("T", [1, 3, 21])
def test_mixture(T, form, dtype, make, agrees):
    x, norm, residual = make(T, H, dtype=dtype), 1 + make(H, dtype=dtype, scale=0.3), make(T, H, dtype=dtype)
    router, router_bias = make(E, H, dtype=dtype) / H**0.5, make(E, dtype=dtype)
    biases = make(E, 2 * INTER, dtype=dtype), make(E, H, dtype=dtype)
    wide = make(E, 2 * INTER, H, dtype=torch.float32) / H**0.5, make(E, H, INTER, dtype=torch.float32) / INTER**0.5
    stored = [(w.to(dtype), None, w.to(dtype).double()) if form == "plain" else four_bits(w, form) for w in wide]
    (up, up_scale, up64), (down, down_scale, down64) = stored
    logits = router_logits(x, norm, EPS, router, K, bias=router_bias, four_bits=form != "plain")
    out = mixture_residual(
        x, logits, up, down, residual, K, True, "silu", norm_weight=norm, eps=EPS, gate_up_scale=up_scale, down_scale=down_scale,
        gate_up_bias=biases[0], down_bias=biases[1], limit=LIMIT, alpha=ALPHA,
    )  # fmt: skip
    given = [x, norm, router, router_bias, (up64, biases[0], down64, biases[1]), residual]
    exact = [tuple(t.double() for t in g) if isinstance(g, tuple) else g.double() for g in given]
    h = reference.rms_norm(x, norm, EPS)
    rest = up_scale, down_scale, None, *biases, LIMIT, ALPHA
    same = residual + reference.mixture(h, *reference.route(h @ router.T + router_bias, K, True), up, down, "silu", *rest)
    agrees(out, same, truth(*exact))


def test_nan_is_not_clamped(make, device):
    """Catches a NaN that the bound turns into a number."""
    x, logits = make(1, H, dtype=torch.float32), make(1, E, dtype=torch.float32)
    x[0, 3] = torch.nan
    up, down = make(E, 2 * INTER, H, dtype=torch.float32), make(E, H, INTER, dtype=torch.float32)
    assert mixture_residual(x, logits, up, down, torch.zeros_like(x), K, True, "silu", limit=1.0, alpha=1.0).isnan().all()


def test_wrong_operands_are_named(make):
    x, logits = make(1, H, dtype=torch.float32), make(1, E, dtype=torch.float32)
    up, down = make(E, 2 * INTER, H, dtype=torch.float32), make(E, H, INTER, dtype=torch.float32)
    for match, options in (
        ("gate_up_bias: wrong shape", {"gate_up_bias": make(E, INTER, dtype=torch.float32)}),
        ("down_bias: wrong shape", {"down_bias": make(E, INTER, dtype=torch.float32)}),
        ("shared", {"limit": 1.0, "shared": SharedExpert(up[0], down[0], make(1, H, dtype=torch.float32))}),
    ):
        with pytest.raises(InputError, match=match):
            mixture_residual(x, logits, up, down, x, K, True, "silu", **options)
