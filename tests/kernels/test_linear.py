"""Catches: tails of N, K and T; the norm's mean over padding; gate and up swapped; a part of K added twice or dropped;
counters left non-zero; the residual read after it was overwritten."""

import pytest
import torch

from minirt.errors import InputError
from minirt.kernels import linear as kernel
from minirt.kernels import reference
from minirt.kernels.common import ACTIVATIONS, LinearConfig, Workspace
from minirt.kernels.gemm_small import choose_config, gemm_small
from minirt.kernels.gemv import gemv

EPS = 1e-6
LARGE = [(4608, 3584), (3584, 18944)]


def norm64(x, weight):
    x = x.double()
    return x if weight is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


def linear64(x, weight, bias=None):
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def inputs(make, T, N, K, dtype, rows=1):
    x, norm_weight = make(T, K, dtype=dtype, scale=2.0), make(K, dtype=dtype)
    return x, norm_weight, make(rows * N, K, dtype=dtype, scale=K**-0.5), make(rows * N, dtype=dtype)


def clean(workspace):
    return not workspace.counters(1).any()


def check_norm_linear(case, dtype, make, nan, agrees, device, normalize):
    T, N, K = case["T"], case["N"], case["K"]
    x, norm_weight, weight, bias = inputs(make, T, N, K, dtype)
    norm_weight = norm_weight if normalize else None
    workspace = Workspace(device)
    out = kernel.norm_linear(x, norm_weight, EPS, weight, bias, nan(T, N, dtype=dtype), workspace=workspace)
    h = x if norm_weight is None else reference.rms_norm(x, norm_weight, EPS)
    agrees(out, reference.linear(h, weight, bias), linear64(norm64(x, norm_weight), weight, bias))
    assert clean(workspace)


def check_gate_up(T, intermediate, K, activation, dtype, make, nan, agrees):
    x, norm_weight, weight, _ = inputs(make, T, intermediate, K, dtype, rows=2)
    out = kernel.norm_gate_up(x, norm_weight, EPS, weight, activation, nan(T, intermediate, dtype=dtype))
    expected = reference.gated(reference.linear(reference.rms_norm(x, norm_weight, EPS), weight), activation)
    agrees(out, expected, reference.gated(linear64(norm64(x, norm_weight), weight), activation))


def check_residual(case, dtype, make, agrees, device):
    T, N, K = case["T"], case["N"], case["K"]
    x, _, weight, bias = inputs(make, T, N, K, dtype)
    residual, workspace = make(T, N, dtype=dtype), Workspace(device)
    expected, truth = reference.linear(x, weight, bias) + residual, linear64(x, weight, bias) + residual.double()
    agrees(kernel.linear_residual(x, weight, residual, bias, workspace=workspace), expected, truth)
    out = kernel.linear_residual(x, weight, residual, bias, residual, workspace=workspace)  # in place
    agrees(out, expected, truth)
    assert clean(workspace)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_norm_linear(case, normalize, dtype, make, nan, agrees, device):
    check_norm_linear(case, dtype, make, nan, agrees, device, normalize)


@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_residual_also_in_place(case, dtype, make, agrees, device):
    check_residual(case, dtype, make, agrees, device)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("T", "intermediate", "K"), [(1, 131, 577), (1, 96, 256), (3, 67, 97), (17, 96, 320)])
def test_gate_up(T, intermediate, K, activation, dtype, make, nan, agrees):
    check_gate_up(T, intermediate, K, activation, dtype, make, nan, agrees)


@pytest.mark.parametrize("T", [1, 5])
def test_gate_up_with_bias(T, make, agrees):
    x, norm_weight, weight, bias = inputs(make, T, 33, 64, torch.float32, rows=2)
    out = kernel.norm_gate_up(x, norm_weight, EPS, weight, "silu", bias=bias)
    expected = reference.gated(reference.linear(reference.rms_norm(x, norm_weight, EPS), weight, bias), "silu")
    agrees(out, expected, reference.gated(linear64(norm64(x, norm_weight), weight, bias), "silu"))


@pytest.mark.parametrize("T", [1, 9])
@pytest.mark.parametrize("split", [2, 3, 8])
def test_any_split_of_k(T, split, dtype, make, nan, agrees, device):
    """Also parts of unequal length, and more parts asked for than K has blocks."""
    x, norm_weight, weight, bias = inputs(make, T, 40, 208, dtype)
    workspace = Workspace(device)
    options = {"workspace": workspace, "config": LinearConfig(block_n=16, block_k=32, num_warps=2, split=split)}
    run = gemv if T == 1 else gemm_small
    out = run(x, norm_weight, EPS, weight, bias, None, nan(T, 40, dtype=dtype), **options)
    h = reference.rms_norm(x, norm_weight, EPS)
    agrees(out, reference.linear(h, weight, bias), linear64(norm64(x, norm_weight), weight, bias))
    again = run(x, norm_weight, EPS, weight, bias, None, nan(T, 40, dtype=dtype), **options)
    assert torch.equal(out, again)
    assert clean(workspace)


def test_logits_in_fp32(make, agrees):
    """Rounding logits to 16 bits would make ties."""
    x, norm_weight, weight, _ = inputs(make, 1, 50, 64, torch.float16)
    out = kernel.norm_linear(x, norm_weight, EPS, weight, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert not torch.equal(out, out.half().float())
    h = reference.rms_norm(x, norm_weight, EPS)
    agrees(out, reference.linear(h, weight), linear64(norm64(x, norm_weight), weight))


def test_no_tokens(make):
    x, norm_weight, weight, _ = inputs(make, 1, 16, 32, torch.float32)
    assert kernel.norm_linear(x[:0], norm_weight, EPS, weight).shape == (0, 16)


def test_the_configuration_knows_regimes_not_token_counts():
    """A kernel compiled for each token count would stall serving."""
    for shape in ((4608, 3584), (3584, 18944), (96, 576)):
        for regime in (range(2, 17), range(17, 33), range(33, 65), range(65, 129)):
            assert len({choose_config(T, *shape, 2, False, 90, 132) for T in regime}) == 1


def test_wrong_arguments_are_named(make, device):
    x, norm_weight, weight, bias = inputs(make, 2, 16, 32, torch.float32)
    with pytest.raises(InputError, match="weight: wrong shape"):
        kernel.norm_linear(x, norm_weight, EPS, weight.t().contiguous())
    with pytest.raises(InputError, match="bias: wrong shape"):
        kernel.norm_linear(x, norm_weight, EPS, weight, bias[:3])
    with pytest.raises(InputError, match="norm_weight: wrong dtype"):
        kernel.norm_linear(x, norm_weight.half(), EPS, weight)
    with pytest.raises(InputError, match="residual: wrong shape"):
        kernel.linear_residual(x, weight, x)
    with pytest.raises(InputError, match=r"activation: unknown.*relu"):
        kernel.norm_gate_up(x, norm_weight, EPS, weight, "relu")
    config = LinearConfig(block_n=16, block_k=16, num_warps=1, split=2)
    out, small = x.new_empty(2, 16), Workspace(device, num_floats=5)
    with pytest.raises(InputError, match=r"num_floats: too small; expected at least 64; found 5"):
        gemm_small(x, None, 0.0, weight, None, None, out, workspace=small, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 16, 17, 64, 128])
@pytest.mark.parametrize(("N", "K"), LARGE)
def test_large(T, N, K, half_dtype, make, nan, agrees, device):
    case = {"T": T, "N": N, "K": K}
    check_norm_linear(case, half_dtype, make, nan, agrees, device, normalize=K == 3584)
    check_residual(case, half_dtype, make, agrees, device)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 16, 17, 64, 128])
def test_large_gate_up(T, half_dtype, make, nan, agrees):
    check_gate_up(T, 18944, 3584, "silu", half_dtype, make, nan, agrees)


@pytest.mark.gpu
def test_weight_past_2_31_elements(make, agrees):
    """The LM head of a 152064-token vocabulary at H = 16384."""
    x, _, weight, _ = inputs(make, 1, 152064, 16384, torch.bfloat16)
    for T in (1, 2):
        rows = x.expand(T, -1).contiguous()
        out = kernel.norm_linear(rows, None, EPS, weight, out_dtype=torch.float32)[:, -4096:]
        agrees(out, reference.linear(rows, weight[-4096:]), linear64(rows, weight[-4096:]))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 16])
def test_same_bits_every_time_also_with_pdl(T, make, device):
    """A chain of kernels that overlap by PDL, share the workspace and each read what the one before wrote."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("PDL needs sm_90")
    x, norm_weight, weight, bias = inputs(make, T, 3584, 3584, torch.bfloat16)
    workspace = Workspace(device)

    def chain(pdl):
        h = x
        for _ in range(50):
            y = kernel.norm_linear(h, norm_weight, EPS, weight, bias, workspace=workspace, pdl=pdl)
            h = kernel.linear_residual(y, weight, h, workspace=workspace, pdl=pdl)
        return h

    expected = chain(False)
    assert torch.equal(chain(False), expected)
    assert torch.equal(chain(True), expected)
    assert clean(workspace)
