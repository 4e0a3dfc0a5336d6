"""The router's logits in parts, from there to the choice: against the norm and the product in fp64."""

import pytest
import torch

from minirt.kernels import reference
from minirt.kernels.linear.product import Norm
from minirt.kernels.moe import dispatch, few_tokens, few_tokens_int4
from minirt.kernels.moe.route import gather, route
from minirt.kernels.moe.router import CASES, LogitParts, router_logits
from minirt.kernels.norm import rms_norm

EPS = 1e-5


def operands(make, case, dtype):
    T, E, H = case.values()
    x, norm = make(T, H, dtype=dtype, scale=3.0), 1 + make(H, dtype=dtype, scale=0.3)
    x[0] *= 30  # of another size than the others
    return x, norm, make(E, H, dtype=dtype, scale=H**-0.5)


def summed(parts):
    """The logits that `route` makes of parts, before they are rounded."""
    logits = parts.sums.double().sum(0)
    if parts.squares is None:
        return logits
    return logits * (parts.squares.double().sum(0) / parts.hidden + parts.eps).rsqrt()[:, None]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_logits(case, normed, dtype, make):
    x, norm, weight = operands(make, case, dtype)
    parts = router_logits(x, norm if normed else None, EPS, weight)
    wide = reference.rms_norm(x.double(), norm.double(), EPS) if normed else x.double()
    truth = wide @ weight.double().T
    error = (summed(parts) - truth).norm(dim=1) / truth.norm(dim=1)
    assert error.max() < (4e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps if normed else 4e-6)
    assert parts.counts.tolist() == [0] * case["E"]


@pytest.mark.parametrize("T", [2, 21, 140])
def test_choice_of_parts(T, make):
    """The same lists as for the logits that the parts add up to, also when the counts were already taken."""
    E, H, k = 11, 200, 3
    x, norm, weight = operands(make, {"T": T, "E": E, "H": H}, torch.float32)
    parts = router_logits(x, norm, EPS, weight)
    expected = route(summed(parts).float(), k, True, 8)
    for _ in range(2):
        routing = route(parts, k, True, 8)
        assert parts.counts is None
        torch.testing.assert_close(routing.weights, expected.weights, rtol=1e-5, atol=1e-7)
        for name in ("experts", "order", "places", "tiles", "used"):
            assert torch.equal(getattr(routing, name), getattr(expected, name)), name


def test_nan_stays_with_its_token(make):
    x, norm, weight = operands(make, {"T": 20, "E": 7, "H": 136}, torch.float32)
    x[3, 100] = torch.nan
    routing = route(router_logits(x, norm, EPS, weight), 2, True, 8)
    assert routing.experts[3].tolist() == [0, 1]
    assert routing.weights.isnan().any(1).nonzero().tolist() == [[3]]


@pytest.mark.parametrize("quantized", [False, True])
def test_gather_normalizes(quantized, dtype, make):
    """As the norm's kernel does, so that `gather` may take its place."""
    T, E, k, H = 9, 5, 2, 72
    x, norm, weight = operands(make, {"T": T, "E": E, "H": H}, dtype)
    routing = route(router_logits(x, norm, EPS, weight), k, True, 8)
    rows, scale = gather(x, routing, quantized, Norm(norm, EPS))
    expected = rms_norm(x, norm, EPS)[routing.order.long() // k]
    if not quantized:
        torch.testing.assert_close(rows, expected, rtol=0, atol=0)
        return
    values, scales = reference.quantize_fp8(expected)
    assert torch.equal(scale, scales)
    assert torch.equal(rows.view(torch.uint8), values.view(torch.uint8))


def test_few_tokens_have_whole_logits(dtype, make):
    """By the linear layers' kernel of one token. Experts of 4 bits too."""
    T, E, H = few_tokens.MOST, 37, 328
    x, norm, weight = operands(make, {"T": T + 1, "E": E, "H": H}, dtype)
    for n in (0, 1, 2, T):
        logits = dispatch.router_logits(x[:n], norm, EPS, weight, 2)
        truth = reference.rms_norm(x[:n].double(), norm.double(), EPS) @ weight.double().T
        assert logits.dtype == dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(logits.double(), truth, rtol=2 * eps, atol=20 * eps)
        four_bits = dispatch.router_logits(x[:n], norm, EPS, weight, 2, four_bits=True)
        assert isinstance(four_bits, LogitParts) == (n > few_tokens_int4.MOST)
    assert isinstance(dispatch.router_logits(x, norm, EPS, weight, 2), LogitParts)
    assert isinstance(dispatch.router_logits(x[:T], norm, EPS, weight, 5), LogitParts)  # too many experts in common
