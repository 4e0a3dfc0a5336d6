"""The experts of few tokens, against the reference in fp64."""


import pytest
import torch

from minirt.bench import bounds
from minirt.kernels import reference
from minirt.kernels.linear.product import Epilogue, Norm, Product
from minirt.kernels.moe import few_tokens
from minirt.kernels.moe.dispatch import mixture_residual
from minirt.kernels.moe.few_tokens import CASES, MOST
from minirt.kernels.moe.mixture import SharedOutput

EPS = 1e-6


def operands(make, case, dtype, T=1):
    E, _, H, inter = case.values()
    x, residual, logits = (make(T, n, dtype=dtype) for n in (H, H, E))
    gate_up, down = make(E, 2 * inter, H, dtype=dtype, scale=H**-0.5), make(E, H, inter, dtype=dtype, scale=inter**-0.5)
    return x, 1 + make(H, dtype=dtype, scale=0.3), residual, logits, gate_up, down


def expected(x, norm, residual, logits, gate_up, down, k, normalize, activation, scales=(None, None)):
    h = x if norm is None else reference.rms_norm(x, norm, EPS)
    chosen = reference.route(logits, k, normalize)
    return residual + reference.mixture(h, *chosen, gate_up, down, activation, *scales, quantize=False)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("T", "fp8"), [(1, False), (MOST - 1, True)])
@pytest.mark.parametrize("computed", [False, True])
def test_few_tokens(case, T, fp8, computed, make, nan, dtype):
    """Each token with its experts, shares, residual and shared expert, which is computed here or before. FP8 weights multiply
    activations that are not quantized."""
    x, norm, residual, logits, gate_up, down = operands(make, case, dtype, T)
    H, inter = case["H"], case["I"]
    joined = make(2 * inter, H, dtype=dtype, scale=H**-0.5), make(H, inter, dtype=dtype, scale=inter**-0.5)
    shared, gate, own_gate = make(T, H, dtype=dtype), make(T, 1, dtype=dtype), make(1, H, dtype=dtype, scale=H**-0.5)
    k, normalize, activation = case["k"], case["E"] % 2 == 1, "silu" if case["k"] > 1 else "gelu_tanh"
    scales = (None, None)
    if fp8:
        (gate_up, up_scale), (down, down_scale) = map(reference.quantize_fp8, (gate_up, down))
        scales = (up_scale, down_scale)
    own_scales = (None, None)
    if fp8:
        joined, own_scales = zip(*map(reference.quantize_fp8, joined), strict=True)
    expert = reference.SharedExpert(*joined, own_gate, *own_scales) if computed else None
    inner = nan(T * (k + computed), inter, dtype=dtype)
    first = Product(x, gate_up, inner, Norm(norm, EPS), Epilogue(scales[0], activation=activation))
    gates = few_tokens.gate_up(first, logits, k, expert)
    second = Product(inner, down, nan(T, H, dtype=dtype), None, Epilogue(scales[1], residual=residual))
    out = few_tokens.down(second, logits, k, normalize, expert if computed else SharedOutput(shared, gate), gates)

    def whole(x, norm, residual, logits, gate_up, down, shared, gate, first, last, own_gate):
        mixed = expected(x, norm, residual, logits, gate_up, down, k, normalize, activation, scales)
        if not computed:
            return mixed + gate.sigmoid() * shared
        one = reference.SharedExpert(first, last, own_gate, *own_scales)
        return mixed + reference.shared_expert(reference.rms_norm(x, norm, EPS), one, activation, quantize=False)

    given = (x, norm, residual, logits, gate_up, down, shared, gate, *joined, own_gate)
    truth = whole(*(t if t.dtype == torch.float8_e4m3fn else t.double() for t in given))
    assert bounds.fault(bounds.errors(out, truth), bounds.errors(whole(*given), truth), bounds.floor(dtype)) is None


@pytest.mark.parametrize("T", [1, MOST])
@pytest.mark.parametrize("name", ["ties", "nan", "underflow"])
def test_the_same_experts_as_with_more_tokens(name, T, make):
    """Ranks decide equal shares, shares that are 0, and NaN, as `route` does: only the chosen experts hold finite weights. NaN
    stays with its token."""
    x, norm, residual, logits, gate_up, down = operands(make, {"E": 70, "k": 4, "H": 40, "I": 24}, torch.float32, T)
    if name == "ties":
        logits[-1] = 0.0
        logits[-1, [69, 31]] = 2.0
    elif name == "nan":
        logits[-1, 9] = torch.nan
    else:
        logits[-1] = torch.arange(70.0, device=x.device) * 60
    chosen = reference.route(logits, 4, True)[1].flatten()
    others = torch.ones(70, dtype=torch.bool, device=x.device)
    others[chosen] = False
    gate_up[others] = torch.nan
    down[others] = torch.nan
    out = mixture_residual(x, logits, gate_up, down, residual, 4, True, "silu", norm_weight=norm, eps=EPS)
    finite = T - 1 if name == "nan" else T
    assert bool(out[finite:].isnan().all())
    truth = expected(x, norm, residual, logits, gate_up, down, 4, True, "silu")
    torch.testing.assert_close(out[:finite], truth[:finite], rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_every_configuration_gives_the_same(make, nan, monkeypatch):
    """Rows per program, loads in flight, the step in K, blocks and rounds change no result by more than rounding."""
    monkeypatch.setattr(few_tokens, "sm_count", lambda device: 1)  # several rounds
    case = {"E": 5, "k": 2, "H": 72, "I": 40}
    x, norm, residual, logits, gate_up, down = operands(make, case, torch.float32, 2)
    for block_n, block_k, tiles, blocks in ((4, 32, 1, 1), (8, 64, 2, 3), (16, 128, 9, 2), (1, 32, 3, 2)):
        config = few_tokens.FewTokensConfig(block_n, 2, block_k, tiles, blocks)
        inner, out = nan(4, 40, dtype=torch.float32), nan(2, 72, dtype=torch.float32)
        few_tokens.gate_up(Product(x, gate_up, inner, Norm(norm, EPS), Epilogue(activation="silu")), logits, 2, config=config)
        few_tokens.down(Product(inner, down, out, None, Epilogue(residual=residual)), logits, 2, True, config=config)
        truth = expected(x, norm, residual, logits, gate_up, down, 2, True, "silu")
        torch.testing.assert_close(out, truth, rtol=1e-5, atol=1e-5)
