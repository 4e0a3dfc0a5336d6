"""Catches: a mean over the padded block instead of H, a missing eps or weight, mixed-up rows; with quantization, a scale from
padding or from the values before the norm."""

import pytest
import torch
from support.raising import raises

from minirt.errors import InputError
from minirt.kernels import norm as kernel
from minirt.kernels import reference
from minirt.kernels.quantize import quantize


def truth(x, weight, eps):
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_against_reference(case, dtype, make, nan, agrees):
    T, H = case["T"], case["H"]
    x, weight = make(T, H, dtype=dtype, scale=3.0), make(H, dtype=dtype)
    out = kernel.rms_norm(x, weight, 1e-6, nan(T, H, dtype=dtype))
    agrees(out, reference.rms_norm(x, weight, 1e-6), truth(x, weight, 1e-6))
    out = kernel.rms_norm(x, None, 1e-6, nan(T, H, dtype=dtype), check=False)
    agrees(out, reference.rms_norm(x, None, 1e-6), truth(x, torch.ones_like(weight), 1e-6))


def test_eps_matters_for_tiny_values_and_zero_rows(make, agrees):
    x, weight = make(3, 100, dtype=torch.float32, scale=1e-3), make(100, dtype=torch.float32)
    x[1] = 0
    out = kernel.rms_norm(x, weight, 1e-5)
    agrees(out, reference.rms_norm(x, weight, 1e-5), truth(x, weight, 1e-5))


@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_norm_residual(case, dtype, make, nan, agrees):
    """Catches a residual that is normalized, multiplied by the weight, or of another row; a result rounded as if it were 0;
    the norms of two branches mixed up."""
    T, H = case["T"], case["H"]
    y, residual, weight = make(T, H, dtype=dtype, scale=3.0), make(T, H, dtype=dtype, scale=5.0), make(H, dtype=dtype)
    out = kernel.norm_residual(y, weight, 1e-5, residual, nan(T, H, dtype=dtype))
    exact = residual.double() + truth(y, weight, 1e-5)
    agrees(out, reference.norm_residual(y, weight, 1e-5, residual), exact)
    for name in ("y", "residual"):  # in place
        inputs = {"y": y.clone(), "residual": residual.clone()}
        assert torch.equal(kernel.norm_residual(weight=weight, eps=1e-5, out=inputs[name], **inputs), out)
    factor = make(1, dtype=dtype)
    out = kernel.norm_residual(y, weight, 1e-5, residual, nan(T, H, dtype=dtype), factor=factor)
    agrees(out, reference.norm_residual(y, weight, 1e-5, residual, factor), exact * factor.double())
    branch = kernel.Branch(make(H, dtype=dtype), make(T, H, dtype=dtype, scale=0.3), make(H, dtype=dtype))
    out = kernel.norm_residual(y.clone(), weight, 1e-5, residual, nan(T, H, dtype=dtype), factor=factor, branch=branch)
    inner = reference.norm_residual(y, branch.weight, 1e-5, reference.rms_norm(branch.other, branch.other_weight, 1e-5))
    exact = truth(y, branch.weight, 1e-5) + truth(branch.other, branch.other_weight, 1e-5)
    exact = (residual.double() + truth(exact, weight, 1e-5)) * factor.double()
    agrees(out, reference.norm_residual(inner, weight, 1e-5, residual, factor), exact)
    assert kernel.norm_residual(y[:0], weight, 1e-5, residual[:0]).shape == (0, H)
    raises("residual: wrong shape", kernel.norm_residual, y, weight, 1e-5, residual[:, :-1].contiguous())
    with pytest.raises(InputError, match="y: not contiguous"):
        kernel.norm_residual(make(H, T + 1, dtype=dtype).t(), weight, 1e-5, make(T + 1, H, dtype=dtype))


def test_in_place_and_empty(make):
    x, weight = make(5, 64, dtype=torch.float32), make(64, dtype=torch.float32)
    expected = kernel.rms_norm(x, weight, 1e-6)
    assert torch.equal(kernel.rms_norm(x, weight, 1e-6, x), expected)
    assert kernel.rms_norm(x[:0], weight, 1e-6).shape == (0, 64)


def test_wrong_arguments_are_named(make):
    x = make(2, 8, dtype=torch.float32)
    raises("weight: wrong shape", kernel.rms_norm, x, make(9, dtype=torch.float32), 1e-6)
    raises("x: not contiguous", kernel.rms_norm, make(8, 2, dtype=torch.float32).t(), make(8, dtype=torch.float32), 1e-6)


def check_quantized(T, H, dtype, make, nan):
    """Equals norm, then quantization. The two norms may differ in the last bit, which can move a value to the next code."""
    x, weight = make(T, H, dtype=dtype, scale=3.0), make(H, dtype=dtype)
    x[0], x[-1, 0] = 0, torch.nan if T > 2 else 1.0
    out = torch.full((T, H), 0x7F, dtype=torch.uint8, device=x.device).view(torch.float8_e4m3fn)
    values, scale = kernel.rms_norm_quantize(x, weight, 1e-6, out, nan(T, dtype=torch.float32))
    expected, expected_scale = quantize(kernel.rms_norm(x, weight, 1e-6))
    torch.testing.assert_close(scale, expected_scale, rtol=4 * torch.finfo(dtype).eps, atol=0)
    codes, wanted = (t.view(torch.uint8).int() for t in (values, expected))
    assert int((codes - wanted).abs().max()) <= 1
    assert (codes != wanted).float().mean().item() < 2e-3


@pytest.mark.parametrize(("T", "H"), [(1, 16), (3, 97), (5, 576)])
def test_quantized_in_groups(T, H, dtype, make, nan):
    """Each 128 columns have a scale of their own: equals norm, then quantization in groups."""
    x, weight = make(T, H, dtype=dtype, scale=3.0), make(H, dtype=dtype)
    x[0, :80] = 0
    weight *= torch.exp2(torch.arange(H, device=x.device) // 128).to(dtype)
    out = torch.full((T, H), 0x7F, dtype=torch.uint8, device=x.device).view(torch.float8_e4m3fn)
    groups = nan(T, -(-H // 128), dtype=torch.float32)
    values, scale = kernel.rms_norm_quantize(x, weight, 1e-6, out, groups, blocks=True)
    expected, expected_scale = quantize(kernel.rms_norm(x, weight, 1e-6), blocks=True)
    torch.testing.assert_close(scale, expected_scale, rtol=4 * torch.finfo(dtype).eps, atol=0)
    codes, wanted = (t.view(torch.uint8).int() for t in (values, expected))
    assert int((codes - wanted).abs().max()) <= 1
    assert (codes != wanted).float().mean().item() < 5e-3


@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_quantized(case, dtype, make, nan):
    check_quantized(case["T"], case["H"], dtype, make, nan)


def test_quantized_wrong_arguments_are_named(make):
    x, weight = make(2, 8, dtype=torch.float32), make(8, dtype=torch.float32)
    raises("scale: wrong dtype", kernel.rms_norm_quantize, x, weight, 1e-6, None, torch.empty(2, dtype=torch.float16))
    raises("weight: wrong shape", kernel.rms_norm_quantize, x, weight[:3], 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 200, 8192])
def test_large(T, half_dtype, make, nan, agrees):
    x, weight = make(T, 3584, dtype=half_dtype, scale=5.0), make(3584, dtype=half_dtype)
    out = kernel.rms_norm(x, weight, 1e-6, nan(T, 3584, dtype=half_dtype))
    agrees(out, reference.rms_norm(x, weight, 1e-6), truth(x, weight, 1e-6))
    check_quantized(T, 3584, half_dtype, make, nan)
