"""Catches: parts of a context that overlap or leave tokens out, parts of one sequence added to another's, a sequence that is
computed twice or not at all, a workspace that is too small. With a window: parts counted otherwise by one of the kernels, the
visible tokens before the first part left out, other tokens read (NaN)."""

import itertools

import pytest
import torch
from support.decode import attention64, forget

from minirt.kernels import reference
from minirt.kernels.attention import decode, dispatch, partial
from minirt.kernels.launch import Workspace

CASES = [
    {"Nq": 7, "Nkv": 1, "D": 128, "page_size": 64, "lens": (2,), "contexts": (510,)},
    {"Nq": 3, "Nkv": 1, "D": 64, "page_size": 16, "lens": (1, 0, 4, 5, 30, 300), "contexts": (600, 700, 800, 506, 1500, 0)},
    {"Nq": 4, "Nkv": 4, "D": 64, "page_size": 128, "lens": (5, 8, 9), "contexts": (1019, 1015, 2039)},
    {"Nq": 16, "Nkv": 1, "D": 64, "page_size": 32, "lens": (17,), "contexts": (4100,)},
]

WINDOWED = [
    {
        "Nq": 3, "Nkv": 1, "D": 64, "page_size": page_size, "window": w,
        "lens": (2, 4, 1, 6, 30, 8, 0, 3), "contexts": (2100, 1500 + w % 100, 700, 1024 + w, 3000, w + 500, 9, 2045),
    }
    for page_size, w in ((16, 5), (64, 512), (16, 513), (64, 700), (16, 1300))
] + [{"Nq": 1, "Nkv": 1, "D": 64, "page_size": 16, "window": 506, "lens": (8,), "contexts": (1016,)}]  # fmt: skip

LARGE = [
    {"Nq": 28, "Nkv": 4, "D": 128, "page_size": 64, "lens": (2,), "contexts": (32766,)},
    {"Nq": 28, "Nkv": 4, "D": 128, "page_size": 64, "lens": (16,), "contexts": (32752,)},
    {"Nq": 8, "Nkv": 2, "D": 64, "page_size": 16, "lens": (256, 1, 7, 900, 64), "contexts": (33000, 500, 5000, 100, 9001)},
]


def check(case, dtype, make, cache, nan, agrees, device, fp8=False):
    Nq, Nkv, D, page_size = (case[name] for name in ("Nq", "Nkv", "D", "page_size"))
    lens, window = case["lens"], case.get("window")
    totals = [n + c for n, c in zip(lens, case["contexts"], strict=True)]
    q, scale = make(sum(lens), Nq, D, dtype=dtype), 0.02 if fp8 else 1.3 * D**-0.5
    starts = list(itertools.accumulate(lens, initial=0))
    on_device = torch.tensor(starts, dtype=torch.int32, device=device)
    workspace = Workspace(device, num_floats=1)
    splits = decode.splits_before(totals, 256, window, lens)[-1]
    need = partial.workspace_floats(splits, Nq, D)
    workspace.reserve(need + 4096)
    workspace.sums(1).fill_(torch.nan)
    if fp8:
        kv = cache(totals, Nkv, D, page_size)
        clean = kv.clean
        out = dispatch.paged_attention_prefill(
            q, out=nan(*q.shape, dtype=dtype), block_tables=forget(kv, totals, lens, window), query_starts=on_device,
            seq_lens=kv.lens, scale=scale, workspace=workspace, max_splits=splits, window=window, **kv.pages,
        )  # fmt: skip
    else:
        kv = cache(totals, Nkv, D, page_size, dtype)
        clean = (kv.clean_k, kv.clean_v)
        out = dispatch.paged_attention_prefill(
            q, kv.k, kv.v, forget(kv, totals, lens, window), on_device, kv.lens, scale, nan(*q.shape, dtype=dtype),
            workspace=workspace, max_splits=splits, window=window,
        )  # fmt: skip
    assert workspace.sums(need + 4096)[need : need + 4096].isnan().all()
    k_clean, v_clean, *scales = clean
    scales = scales or (None, None)
    expected = reference.paged_attention(q, k_clean, v_clean, kv.tables, lens, totals, scale, *scales, window)
    for start, n, k, v in zip(starts, lens, kv.keys, kv.values, strict=False):
        rows = slice(start, start + n)
        if n:
            agrees(out[rows], expected[rows], attention64(q[rows], k, v, scale, window))


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_chunks(case, dtype, make, cache, nan, agrees, device):
    check(case, dtype, make, cache, nan, agrees, device)


@pytest.mark.parametrize("case", CASES + WINDOWED, ids=str)
def test_chunks(case, dtype, make, cache, nan, agrees, device):
    check(case, dtype, make, cache, nan, agrees, device)


@pytest.mark.parametrize("case", CASES[:2] + WINDOWED[1:3], ids=str)
def test_chunks_on_fp8_pages(case, dtype, make, cache8, nan, agrees, device):
    check(case, dtype, make, cache8, nan, agrees, device, fp8=True)
