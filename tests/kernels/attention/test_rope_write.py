"""Catches: halves rotated the wrong way, q and k norms swapped or V normalized, a slot off by one, padding stored; in fp8
pages a scale of the neighbouring token or head, rounding off by a tie, NaN turned into a number."""

import pytest
import torch

from minirt.errors import InputError
from minirt.kernels import reference
from minirt.kernels.attention import rope_write as kernel

EPS = 1e-6
CASES = [*kernel.CASES, {"T": 5, "Nq": 3, "Nkv": 1, "D": 80, "page_size": 16}]


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
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_reference(case, normalize, dtype, make, nan, agrees, device):
    check(case, normalize, dtype, make, nan, agrees, device)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp8_pages(case, normalize, dtype, make, nan, device):
    """What the reference makes of the same K and V, which the kernel for pages of full width gives; V to the bit."""
    T, Nq, Nkv, D, page_size = (case[name] for name in ("T", "Nq", "Nkv", "D", "page_size"))
    qkv, cos_sin = make(T, (Nq + 2 * Nkv) * D, dtype=dtype, scale=2.0), table(3 * T + 50, D, device)
    heads = qkv.view(T, -1, D)
    heads[..., [5, 5 + D // 2]] *= 64
    heads[T // 2, Nq:] = 0
    heads[T // 3, -1, 7], heads[T // 3, -1, 9] = float("nan"), float("-inf")
    heads[T // 4, Nq, 0] = float("nan")
    norms = (make(D, dtype=dtype), make(D, dtype=dtype)) if normalize else (None, None)
    slots, positions = torch.randperm(3 * page_size, device=device)[:T], torch.randperm(3 * T + 50, device=device)[:T]
    slots[: T // 3] = -1
    wide = [nan(3, page_size, Nkv, D, dtype=dtype) for _ in range(2)]
    args = (qkv, cos_sin, positions, slots)
    q = kernel.qk_norm_rope_kv_write(*args, *wide, Nq, Nkv, *norms, EPS)
    pages = [torch.full((3, page_size, Nkv, D), 0x7F, dtype=torch.uint8, device=device) for _ in range(2)]
    scales = [nan(3, page_size, Nkv, dtype=torch.float32) for _ in range(2)]
    fp8 = [x.view(torch.float8_e4m3fn) for x in pages]
    out = kernel.qk_norm_rope_kv_write(*args, *fp8, Nq, Nkv, *norms, EPS, k_scales=scales[0], v_scales=scales[1])
    assert torch.equal(out.nan_to_num(7), q.nan_to_num(7))
    kept = slots[slots >= 0]
    for codes_of_page, stored_scales, source in zip(pages, scales, wide, strict=True):
        values, right_scales = reference.quantize_fp8(source.view(-1, Nkv, D)[kept])
        stored = codes_of_page.view(torch.float8_e4m3fn).view(-1, Nkv, D)[kept].float()
        values = values.float()
        assert torch.equal(stored.isnan(), values.isnan())
        if source is wide[1]:
            assert torch.equal(stored.nan_to_num(0), values.nan_to_num(0))
            assert torch.equal(stored_scales.view(-1, Nkv)[kept], right_scales)
        else:  # the compiler may fuse the rotation's products and sums otherwise: a value may round to its neighbour
            wrong = (stored - values).abs().nan_to_num(0)
            assert (wrong <= values.abs().nan_to_num(0) / 8 + 2**-9).all()
            assert (wrong > 0).float().mean() < 0.01
            torch.testing.assert_close(stored_scales.view(-1, Nkv)[kept], right_scales, rtol=2 * torch.finfo(dtype).eps, atol=0)
        untouched = torch.ones(3 * page_size, dtype=torch.bool, device=device)
        untouched[kept] = False
        assert stored_scales.view(-1, Nkv)[untouched].isnan().all()
        assert (codes_of_page.view(-1, Nkv, D)[untouched] == 0x7F).all()


def test_every_e4m3_value_and_tie(make, device):
    """Rounding, ties and all, and both ends of the range: V is written as it comes, with a scale of 1."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    near = torch.cat((middle.nextafter(codes[1:]), middle.nextafter(codes[:-1])))
    values = torch.cat((codes, middle, near))
    v = torch.cat((values, -values, torch.zeros(61))).view(-1, 63)
    T = len(v)
    v = torch.cat((v, torch.full((T, 1), 448.0)), 1).to(device)
    qkv = torch.cat((torch.zeros(T, 128, device=device), v), 1)
    pages = torch.zeros(2, 1, 32, 1, 64, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scales = torch.zeros(2, 1, 32, 1, device=device)
    slots = torch.arange(T, device=device)
    kernel.qk_norm_rope_kv_write(
        qkv, table(T, 64, device), slots, slots, pages[0], pages[1], 1, 1, k_scales=scales[0], v_scales=scales[1]
    )
    assert (scales[1, 0, :T] == 1).all()
    assert torch.equal(pages[1].view(32, 64)[:T].float(), v.to(torch.float8_e4m3fn).float())


def test_no_tokens_and_wrong_arguments(make, device):
    qkv, cos_sin = make(2, 4 * 64, dtype=torch.float32), table(9, 64, device)
    pages = make(1, 16, 1, 64, dtype=torch.float32)
    slots = torch.arange(2, device=device)
    assert kernel.qk_norm_rope_kv_write(qkv[:0], cos_sin, slots[:0], slots[:0], pages, pages, 2, 1).shape == (0, 2, 64)
    with pytest.raises(InputError, match="slots: wrong dtype"):
        kernel.qk_norm_rope_kv_write(qkv, cos_sin, slots, slots.int(), pages, pages, 2, 1)
    with pytest.raises(InputError, match="qkv: wrong shape"):
        kernel.qk_norm_rope_kv_write(qkv, cos_sin, slots, slots, pages, pages, 3, 1)
    scales = torch.ones(1, 16, 1, device=device)
    with pytest.raises(InputError, match=r"k_pages: wrong dtype; expected torch\.float8_e4m3fn"):
        kernel.qk_norm_rope_kv_write(qkv, cos_sin, slots, slots, pages, pages, 2, 1, k_scales=scales, v_scales=scales)
    narrow = make(1, 16, 1, 32, dtype=torch.float32)
    with pytest.raises(InputError, match="unsupported head size; expected one of 64, 80, 96, 112, 128, 192, 256, 512; found 32"):
        kernel.qk_norm_rope_kv_write(qkv, cos_sin, slots, slots, narrow, narrow, 2, 1)


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
