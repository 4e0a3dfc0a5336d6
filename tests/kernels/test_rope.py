"""Catches: channels or halves paired wrongly, the table of another token or sequence, heads of q taken for k's, a mean over the
padded head, a missing norm weight or epsilon, strides that are ignored, values that are not written."""

import pytest
import torch

from minirt.errors import InputError
from minirt.kernels import reference
from minirt.kernels import rope as kernel


def truth(x, cos, sin, weight, eps):
    x, cos, sin = x.double(), cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + turned * sin


@pytest.fixture(autouse=True)
def results_begin_as_nan(monkeypatch):
    empty_like = torch.empty_like
    monkeypatch.setattr(kernel.torch, "empty_like", lambda x: empty_like(x).fill_(torch.nan))


def check(B, Nq, Nk, T, D, dtype, make, agrees, shared=False, wide=False):
    packed = make(B, T, Nq + 2 * Nk, D, dtype=dtype, scale=3.0)  # as a packed projection gives it
    q, k = packed[:, :, :Nq].transpose(1, 2), packed[:, :, Nq : Nq + Nk].transpose(1, 2)
    rows = 1 if shared else B
    cos, sin = (make(rows, T, D, dtype=torch.float32 if wide else dtype) for _ in range(2))
    for norms in ((None, None), (make(D, dtype=dtype), make(D, dtype=dtype))):
        results = kernel.qk_norm_rope(q, k, cos, sin, *norms, 1e-3)
        for out, x, norm in zip(results, (q, k), norms, strict=True):
            assert out.stride() == torch.empty_like(x).stride()
            agrees(out, reference.norm_rope(x, cos, sin, norm, 1e-3), truth(x, cos, sin, norm, 1e-3))
            assert torch.equal(kernel.norm_rope(x, cos, sin, norm, 1e-3), out)


@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_against_reference(case, dtype, make, agrees):
    check(**case, dtype=dtype, make=make, agrees=agrees)


@pytest.mark.parametrize(("shared", "wide"), [(True, False), (False, True)])
def test_one_table_for_all_sequences_and_a_table_in_fp32(shared, wide, dtype, make, agrees):
    check(3, 2, 1, 5, 10, dtype, make, agrees, shared, wide)


def test_any_strides(make):
    """Channels far apart, and a dimension that is repeated."""
    x, table = make(2, 16, 5, 3, dtype=torch.float32).permute(0, 3, 2, 1), make(2, 5, 16, dtype=torch.float32)
    expected = kernel.norm_rope(x.contiguous(), table, table)
    assert torch.equal(kernel.norm_rope(x, table, table), expected)
    one = x[:, :1].expand(-1, 3, -1, -1)
    assert torch.equal(kernel.norm_rope(one, table, table), kernel.norm_rope(one.contiguous(), table, table))


def test_empty(make):
    x, table = make(0, 3, 4, 8, dtype=torch.float32), make(0, 4, 8, dtype=torch.float32)
    assert kernel.norm_rope(x, table, table).shape == (0, 3, 4, 8)
    x, table = make(1, 0, 4, 8, dtype=torch.float32), make(1, 4, 8, dtype=torch.float32)
    assert kernel.norm_rope(x, table, table).shape == (1, 0, 4, 8)


def test_wrong_arguments_are_named(make):
    x, table = make(2, 3, 4, 8, dtype=torch.float32), make(2, 4, 8, dtype=torch.float32)
    for args, message in (
        ((x, table[:, 1:], table), "cos: wrong shape"),
        ((x, table, table, make(7, dtype=torch.float32)), "norm_weight: wrong shape"),
        ((make(1, 1, 1, 2048, dtype=torch.float32), table, table), "x: unsupported head size; .*up to 1024"),
    ):
        with pytest.raises(InputError, match=message):
            kernel.norm_rope(*args)


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "T"), [(1, 1), (8, 1), (1, 8192), (3, 700)])
def test_large(B, T, half_dtype, make, agrees):
    check(B, 28, 4, T, 128, half_dtype, make, agrees)
