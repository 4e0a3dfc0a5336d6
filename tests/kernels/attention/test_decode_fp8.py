"""Catches, on FP8 pages: a scale left out, of another token or head, heads mixed that are read together, scores or queries past
what fp16 holds, the new token's bytes or scales unlike those of the kernel that only writes, or its attention on other values;
a scale of a token outside of the window (NaN)."""

import pytest
import torch
from support.decode import LARGE, SM_COUNTS, WINDOWED, decode64, forget, plan, use_sms

from minirt.kernels import reference
from minirt.kernels.attention import decode as kernel
from minirt.kernels.attention import dispatch
from minirt.kernels.attention import rope_write as kv_write

BESIDE = [  # on Hopper KV heads are read by pairs of 64 and, for seven sequences or more, by four pairs or heads of 128
    {"Nq": 9, "Nkv": 3, "D": 64, "page_size": 16, "seq_lens": (0, 63, 64, 65, 0, 1, 66), "split": 64},
    {"Nq": 21, "Nkv": 3, "D": 64, "page_size": 32, "seq_lens": (255, 256, 257, 258, 513, 0), "split": 256},
    {"Nq": 5, "Nkv": 5, "D": 64, "page_size": 128, "seq_lens": (130, 1, 2, 200), "split": 128},
    {"Nq": 32, "Nkv": 2, "D": 64, "page_size": 64, "seq_lens": (70, 300), "split": 256},
    {"Nq": 16, "Nkv": 1, "D": 128, "page_size": 16, "seq_lens": (64, 65, 256, 257, 513), "split": 256},
    {"Nq": 9, "Nkv": 9, "D": 64, "page_size": 32, "seq_lens": (0, 63, 64, 65, 257, 1, 66), "split": 64},
    {"Nq": 8, "Nkv": 8, "D": 64, "page_size": 64, "seq_lens": (255, 256, 257, 258, 513, 0, 1), "split": 256},
    {"Nq": 4, "Nkv": 4, "D": 64, "page_size": 64, "seq_lens": (513, 258, 0, 1300), "split": 256},
    {"Nq": 6, "Nkv": 3, "D": 128, "page_size": 16, "seq_lens": (130, 1, 2, 200, 0, 64, 65, 66), "split": 128},
]
# The sizes that no Hopper kernel takes come last: tests/kernels/test_emulated.py selects others by `normalize`, which alternates.
FUSED = sorted(kernel.CASES + BESIDE + WINDOWED, key=lambda case: case["D"] > 256)


def check_fp8(case, dtype, make, cache8, nan, agrees, device):
    Nq, Nkv, D, split = case["Nq"], case["Nkv"], case["D"], case["split"]
    lens, window = list(case["seq_lens"]), case.get("window")
    kv = cache8(lens, Nkv, D, case["page_size"])
    q, scale = make(len(lens), Nq, D, dtype=dtype), 0.02
    if dtype == torch.bfloat16:
        q[0] *= 1e5  # more than fp16 holds, in which these pages are multiplied
    starts, most, workspace = plan(lens, split, Nq, D, device, 5, window)
    out = dispatch.paged_attention_decode(
        q, block_tables=forget(kv, lens, [1] * len(lens), window), seq_lens=kv.lens, split_starts=starts, max_splits=most,
        scale=scale, workspace=workspace, out=nan(*q.shape, dtype=dtype), split=split, window=window, **kv.pages,
    )  # fmt: skip
    k_clean, v_clean, *scales = kv.clean
    for i, n in enumerate(lens):
        if n == 0:
            assert not out[i].any()
            continue
        row = slice(i, i + 1)
        expected = reference.paged_attention(q[row], k_clean, v_clean, kv.tables[row], [1], [n], scale, *scales, window)
        agrees(out[i], expected[0], decode64(q[i], kv.keys[i], kv.values[i], scale, window))


@pytest.mark.parametrize("case", kernel.CASES + WINDOWED, ids=str)
def test_decode_on_fp8_pages(case, dtype, make, cache8, nan, agrees, device):
    check_fp8(case, dtype, make, cache8, nan, agrees, device)


def check_fused_fp8(case, normalize, dtype, make, cache8, nan, agrees, device, shift=0):
    """The same bytes and scales as the kernel that only writes, and attention on them, also on the new token's.

    `shift`: values by which qkv misses an aligned address.
    """
    Nq, Nkv, D, page_size, split = case["Nq"], case["Nkv"], case["D"], case["page_size"], case["split"]
    lens, B, window = list(case["seq_lens"]), len(case["seq_lens"]), case.get("window")
    scale = 0.02 if dtype != torch.float32 else 0.005  # where large scores show that the GPU's powers of two are fast ones
    kv = cache8(lens, Nkv, D, page_size)
    tables = forget(kv, lens, [1] * B, window)
    qkv, cos_sin = make(B, (Nq + 2 * Nkv) * D, dtype=dtype), make(max(lens), D, dtype=torch.float32)
    qkv = torch.cat((nan(shift, dtype=dtype), qkv.flatten()))[shift:].view_as(qkv)
    if dtype == torch.bfloat16 and not normalize:  # more than fp16 holds, in which these pages are multiplied
        qkv[:, : Nq * D] *= 1e5
        scale /= 1e5
    norms = (make(D, dtype=dtype), make(D, dtype=dtype)) if normalize else (None, None)
    positions = (kv.lens.long() - 1).clamp_min(0)
    places = kv.tables.gather(1, positions.unsqueeze(1) // page_size).squeeze(1) * page_size + positions % page_size
    slots = places.where(kv.lens > 0, -1)
    copies = {name: x.clone() for name, x in kv.pages.items()}
    k, v, k_scales, v_scales = copies.values()
    q = kv_write.qk_norm_rope_kv_write(
        qkv, cos_sin, positions, slots, k, v, Nq, Nkv, *norms, 1e-5, k_scales=k_scales, v_scales=v_scales
    )
    starts, most, workspace = plan(lens, split, Nq, D, device, window=window)
    rest = {"block_tables": tables, "seq_lens": kv.lens, "split_starts": starts, "max_splits": most, "scale": scale}
    rest |= {"workspace": workspace, "split": split, "window": window}
    names = {"q_norm": norms[0], "k_norm": norms[1], "eps": 1e-5, "out": nan(B, Nq, D, dtype=dtype)}
    new = slots[slots >= 0]
    for name, x in kv.pages.items():
        if "scales" in name:
            x.view(-1, Nkv)[new] = torch.nan
        else:
            x.view(torch.uint8).view(-1, Nkv, D)[new] = 0x7F  # NaN
    out = dispatch.rope_paged_attention_decode(qkv, cos_sin, **kv.pages, **rest, Nq=Nq, **names)
    clean = [x.float().nan_to_num(0).to(x.dtype) for x in kv.pages.values()]
    wide = [x.double() * scales.double().unsqueeze(-1) for x, scales in zip(clean[:2], clean[2:], strict=True)]
    for i, n in enumerate(lens):
        if n == 0:
            assert not out[i].any()
            continue
        row = slice(i, i + 1)
        expected = reference.paged_attention(q[row], *clean[:2], kv.tables[row], [1], [n], scale, *clean[2:], window)
        keys, values = (x[kv.tables[i].long()].flatten(0, 1)[:n] for x in wide)
        agrees(out[i], expected[0], decode64(q[i], keys, values, scale, window))
    eps = torch.finfo(dtype).eps
    for name, written in copies.items():
        stored = kv.pages[name]
        if written.dtype == torch.float32:
            torch.testing.assert_close(stored, written, rtol=4 * eps, atol=0, equal_nan=True)
        else:  # where the compiler fuses the rotation's products and sums otherwise, a value may round to its neighbour
            stored, written = (x.float().nan_to_num(1000) for x in (stored, written))
            assert ((stored - written).abs() <= written.abs() / 8 + 2**-9).all()
            assert (stored != written).float().mean() < 0.01


@pytest.mark.parametrize(
    ("normalize", "case"), [(i % 2 == 1, case) for i, case in enumerate(FUSED)], ids=str
)
def test_fused_on_fp8_pages(case, normalize, dtype, make, cache8, nan, agrees, device, monkeypatch):
    use_sms(SM_COUNTS[not normalize], monkeypatch)
    check_fused_fp8(case, normalize, dtype, make, cache8, nan, agrees, device)


def test_fused_on_fp8_pages_at_an_odd_address(half_dtype, make, cache8, nan, agrees, device):
    """Hopper's kernel reads the new token's V by pairs."""
    case = {"Nq": 8, "Nkv": 2, "D": 64, "page_size": 64, "seq_lens": (70, 1, 300, 0), "split": 256}
    check_fused_fp8(case, True, half_dtype, make, cache8, nan, agrees, device, shift=1)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE[:3] + LARGE[4:], ids=str)
def test_large_on_fp8_pages(case, half_dtype, make, cache8, nan, agrees, device, monkeypatch):
    check_fp8(case, half_dtype, make, cache8, nan, agrees, device)
    check_fused_fp8(case, True, half_dtype, make, cache8, nan, agrees, device)
    monkeypatch.setattr(dispatch, "DECODE", dispatch.DECODE[-1:])  # the kernel for any GPU
    check_fused_fp8(case, True, half_dtype, make, cache8, nan, agrees, device)
