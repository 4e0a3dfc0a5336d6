"""The experts of a single token, against the reference in fp64."""

import pytest
import torch

from minirt.bench import bounds
from minirt.kernels import reference
from minirt.kernels.linear.product import Epilogue, Norm, Product
from minirt.kernels.moe import one_token
from minirt.kernels.moe.dispatch import mixture_residual
from minirt.kernels.moe.one_token import CASES

EPS = 1e-6


def operands(make, case, dtype):
    E, _, H, inter = case.values()
    x, residual, logits = (make(1, n, dtype=dtype) for n in (H, H, E))
    gate_up, down = make(E, 2 * inter, H, dtype=dtype, scale=H**-0.5), make(E, H, inter, dtype=dtype, scale=inter**-0.5)
    return x, 1 + make(H, dtype=dtype, scale=0.3), residual, logits, gate_up, down


def expected(x, norm, residual, logits, gate_up, down, k, normalize, activation, scales=(None, None)):
    h = x if norm is None else reference.rms_norm(x, norm, EPS)
    return residual + reference.mixture(h, *reference.route(logits, k, normalize), gate_up, down, activation, *scales)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("fp8", [False, True])
def test_one_token(case, fp8, make, nan, dtype):
    if fp8 and dtype == torch.float32:
        pytest.skip("the other dtypes show it")
    x, norm, residual, logits, gate_up, down = operands(make, case, dtype)
    k, normalize, activation = case["k"], case["E"] % 2 == 1, "silu" if case["k"] > 1 else "gelu_tanh"
    scales = (None, None)
    if fp8:
        (gate_up, up_scale), (down, down_scale) = map(reference.quantize_fp8, (gate_up, down))
        scales = (up_scale, down_scale)
    inner = nan(k, case["I"], dtype=dtype)
    one_token.gate_up(Product(x, gate_up, inner, Norm(norm, EPS), Epilogue(scales[0], activation=activation)), logits)
    second = Product(inner, down, nan(1, case["H"], dtype=dtype), None, Epilogue(scales[1], residual=residual))
    out = one_token.down(second, logits, normalize)
    same = expected(x, norm, residual, logits, gate_up, down, k, normalize, activation, scales)
    wide = [t if t.dtype == torch.float8_e4m3fn else t.double() for t in (x, norm, residual, logits, gate_up, down)]
    truth = expected(*wide, k, normalize, activation, scales)
    assert bounds.fault(bounds.errors(out, truth), bounds.errors(same, truth), bounds.floor(dtype)) is None


@pytest.mark.parametrize("name", ["ties", "nan", "underflow"])
def test_the_same_experts_as_with_more_tokens(name, make):
    """Ranks decide equal shares, shares that are 0, and NaN, as `route` does: only the chosen experts hold finite weights."""
    x, norm, residual, logits, gate_up, down = operands(make, {"E": 70, "k": 4, "H": 40, "I": 24}, torch.float32)
    if name == "ties":
        logits = torch.zeros_like(logits)
        logits[0, [69, 31]] = 2.0
    elif name == "nan":
        logits[0, 9] = torch.nan
    else:
        logits = torch.arange(70.0, device=x.device)[None] * 60
    chosen = reference.route(logits, 4, True)[1][0]
    others = torch.ones(70, dtype=torch.bool, device=x.device)
    others[chosen] = False
    gate_up[others] = torch.nan
    down[others] = torch.nan
    out = mixture_residual(x, logits, gate_up, down, residual, 4, True, "silu", norm_weight=norm, eps=EPS)
    assert bool(out.isnan().all()) == (name == "nan")
    if name != "nan":
        torch.testing.assert_close(out, expected(x, norm, residual, logits, gate_up, down, 4, True, "silu"), rtol=1e-4, atol=1e-5)


def test_every_configuration_gives_the_same(make, nan):
    """Rows per program, loads in flight and the step in K change no result by more than rounding."""
    case = {"E": 5, "k": 2, "H": 72, "I": 40}
    x, norm, residual, logits, gate_up, down = operands(make, case, torch.float32)
    for block_n, block_k, tiles, blocks in ((4, 32, 1, 1), (8, 64, 2, 3), (16, 128, 9, 2)):
        config = one_token.OneTokenConfig(block_n, 2, block_k, tiles, blocks)
        inner, out = nan(2, 40, dtype=torch.float32), nan(1, 72, dtype=torch.float32)
        one_token.gate_up(Product(x, gate_up, inner, Norm(norm, EPS), Epilogue(activation="silu")), logits, config)
        one_token.down(Product(inner, down, out, None, Epilogue(residual=residual)), logits, True, config=config)
        truth = expected(x, norm, residual, logits, gate_up, down, 2, True, "silu")
        torch.testing.assert_close(out, truth, rtol=1e-5, atol=1e-5)


def test_cost():
    nbytes, flops = one_token.cost(4, 2, 8, 3, 2, 1)
    assert flops == 2 * 2 * 3 * 3 * 8
    assert nbytes == 2 * 3 * 3 * 8 + 2 * (4 + 3 * 8 + 2 * 2 * 3)
