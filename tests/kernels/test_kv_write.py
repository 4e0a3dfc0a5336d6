"""Catches: halves rotated the wrong way, q and k norms swapped or V normalized, a slot off by one, padding stored."""

import pytest
import torch

from minirt.errors import InputError
from minirt.kernels import kv_write as kernel
from minirt.kernels import reference

EPS = 1e-6


def rope64(x, cos_sin):
    """Each pair (d, d + D/2) as a complex number times e^(i·angle): not the reference's formula."""
    lower, upper = x.double().chunk(2, dim=-1)
    cos, sin = cos_sin.double().unsqueeze(1).chunk(2, dim=-1)
    turned = torch.complex(lower, upper) * torch.complex(cos, sin)
    return torch.cat((turned.real, turned.imag), dim=-1)


def norm64(x, weight):
    x = x.double()
    return x if weight is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


def norm(x, weight):
    return x if weight is None else reference.rms_norm(x, weight, EPS)


def table(length, D, device):
    angles = torch.arange(length, device=device)[:, None] * 10000.0 ** (-torch.arange(D // 2, device=device) / (D // 2))
    return torch.cat((angles.cos(), angles.sin()), -1).float()


def check(case, normalize, dtype, make, nan, agrees, device):
    T, Nq, Nkv, D, page_size = (case[name] for name in ("T", "Nq", "Nkv", "D", "page_size"))
    qkv, cos_sin = make(T, (Nq + 2 * Nkv) * D, dtype=dtype, scale=2.0), table(3 * T + 50, D, device)
    q_norm, k_norm = (make(D, dtype=dtype), make(D, dtype=dtype)) if normalize else (None, None)
    positions = torch.randperm(3 * T + 50, device=device)[:T]
    pages = 2 * T // page_size + 3
    slots = torch.randperm(pages * page_size, device=device)[:T]
    slots[T // 2 : T // 2 + T // 3] = -1
    k_pages, v_pages = nan(pages, page_size, Nkv, D, dtype=dtype), nan(pages, page_size, Nkv, D, dtype=dtype)
    q = kernel.qk_norm_rope_kv_write(
        qkv, cos_sin, positions, slots, k_pages, v_pages, Nq, Nkv, q_norm, k_norm, EPS, nan(T, Nq, D, dtype=dtype)
    )
    heads, rows = qkv.view(T, -1, D), cos_sin[positions]
    raw_q, raw_k, raw_v = heads.split((Nq, Nkv, Nkv), dim=1)
    agrees(q, reference.rope(norm(raw_q, q_norm), rows), rope64(norm64(raw_q, q_norm), rows))
    kept = slots >= 0
    flat_k, flat_v = k_pages.view(-1, Nkv, D), v_pages.view(-1, Nkv, D)
    k, k64 = reference.rope(norm(raw_k, k_norm), rows), rope64(norm64(raw_k, k_norm), rows)
    agrees(flat_k[slots[kept]], k[kept], k64[kept])
    assert torch.equal(flat_v[slots[kept]], raw_v[kept])
    untouched = torch.ones(pages * page_size, dtype=torch.bool, device=device)
    untouched[slots[kept]] = False
    assert flat_k[untouched].isnan().all()
    assert flat_v[untouched].isnan().all()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_against_reference(case, normalize, dtype, make, nan, agrees, device):
    check(case, normalize, dtype, make, nan, agrees, device)


def test_no_tokens_and_wrong_arguments(make, device):
    qkv, cos_sin = make(2, 4 * 64, dtype=torch.float32), table(9, 64, device)
    pages = make(1, 16, 1, 64, dtype=torch.float32)
    where = torch.arange(2, device=device)
    assert kernel.qk_norm_rope_kv_write(qkv[:0], cos_sin, where[:0], where[:0], pages, pages, 2, 1).shape == (0, 2, 64)
    with pytest.raises(InputError, match="slots: wrong dtype"):
        kernel.qk_norm_rope_kv_write(qkv, cos_sin, where, where.int(), pages, pages, 2, 1)
    with pytest.raises(InputError, match="qkv: wrong shape"):
        kernel.qk_norm_rope_kv_write(qkv, cos_sin, where, where, pages, pages, 3, 1)
    narrow = make(1, 16, 1, 32, dtype=torch.float32)
    with pytest.raises(InputError, match="unsupported head size; expected 64 or 128; found 32"):
        kernel.qk_norm_rope_kv_write(qkv, cos_sin, where, where, narrow, narrow, 2, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 16, 100, 5000])
@pytest.mark.parametrize(("Nq", "Nkv", "D"), [(28, 4, 128), (32, 8, 64)])
def test_large(T, Nq, Nkv, D, half_dtype, make, nan, agrees, device):
    case = {"T": T, "Nq": Nq, "Nkv": Nkv, "D": D, "page_size": 64}
    check(case, True, half_dtype, make, nan, agrees, device)


@pytest.mark.gpu
def test_pages_past_2_31_elements(make, device):
    qkv, cos_sin = make(1, 10 * 128, dtype=torch.float16), table(4, 128, device)
    pages = torch.zeros(80_000, 64, 4, 128, dtype=torch.float16, device=device)
    slot = torch.tensor([80_000 * 64 - 1], device=device)
    kernel.qk_norm_rope_kv_write(qkv, cos_sin, slot * 0, slot, pages, pages.clone(), 2, 4)
    assert torch.equal(pages[-1, -1], qkv[0, 256:768].view(4, 128))  # position 0: not rotated
