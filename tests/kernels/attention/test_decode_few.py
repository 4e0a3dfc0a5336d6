"""Catches: a new token that sees one too many or too few, rows of heads and tokens mixed up, a new token that sees nothing of the
last split and poisons the sum, splits of another sequence or of another new token, a sequence without new tokens that is read or
written, a result that depends on the step. With a window: one token too many or too few, a new token that sees nothing of the
first split, a token that no new token sees and that is read (NaN)."""

import itertools

import pytest
import torch
from support.decode import SM_COUNTS, attention64, forget, plan, use_sms

from minirt.errors import InputError
from minirt.kernels import reference
from minirt.kernels.attention import decode_few as kernel
from minirt.kernels.attention import dispatch
from minirt.kernels.launch import Workspace

WINDOWED = [
    {
        "Nq": 2, "Nkv": 1, "D": 64, "page_size": page_size, "split": split, "window": w,
        "seq_lens": (max(w, 8), w + 8, 2 * w + 64, 70, 130, 64, 264, w + 64, w + 258)[first:],
        "new": (8, 8, 5, 8, 2, 0, 8, 1, 3)[first:],
    }
    for w in (1, 5, 64, 100, 300) for page_size, split, first in ((16, 64, 0), (64, 256, 0), (64, 64, 8))
]  # fmt: skip


def run(q, pages, lens, new, split, scale, out, rows=None, window=None, **options):
    """`paged_attention_decode_few` of the sequences `rows` of `pages` (all by default), with a workspace of NaN."""
    rows = list(range(len(lens))) if rows is None else rows
    lengths, device = [lens[i] for i in rows], q.device
    starts, most, workspace = plan(lengths, split, q.shape[1], q.shape[2], device, 3, window, [new[i] for i in rows])
    workspace.reserve(kernel.workspace_floats(most, *q.shape[1:]))
    workspace.sums(0).fill_(torch.nan)
    firsts = torch.tensor(list(itertools.accumulate((new[i] for i in rows), initial=0)), dtype=torch.int32, device=device)
    kv = pages.pages if hasattr(pages, "pages") else {"k_pages": pages.k, "v_pages": pages.v}
    options = {"split": split, "max_query_len": max(new[i] for i in rows)} | options
    return dispatch.paged_attention_decode_few(
        q, block_tables=pages.tables[rows], query_starts=firsts, seq_lens=pages.lens[rows], split_starts=starts, max_splits=most,
        scale=scale, workspace=workspace, out=out, window=window, **kv, **options,
    )  # fmt: skip


def check(case, dtype, fp8, make, cache, cache8, nan, agrees):
    Nq, Nkv, D, page_size = (case[name] for name in ("Nq", "Nkv", "D", "page_size"))
    lens, new, window = list(case["seq_lens"]), list(case["new"]), case.get("window")
    scale = 0.02 if fp8 else 1.3 * D**-0.5
    pages = cache8(lens, Nkv, D, page_size) if fp8 else cache(lens, Nkv, D, page_size, dtype)
    clean = pages.clean if fp8 else (pages.clean_k, pages.clean_v, None, None)
    tables = pages.tables.clone()
    pages = pages._replace(tables=forget(pages, lens, new, window))
    for row, n in zip(pages.tables, lens, strict=True):
        row[-(-n // page_size) :] = 2**31 - 1  # where no page is
    q = make(sum(new) + 2, Nq, D, dtype=dtype)
    q[sum(new) :] = torch.nan
    out = run(q, pages, lens, new, case["split"], scale, nan(*q.shape, dtype=dtype), window=window)
    first = 0
    for b, (n, m) in enumerate(zip(lens, new, strict=True)):
        rows = slice(first, first + m)
        first += m
        if m:
            rest = (tables[b : b + 1], [m], [n], scale, *clean[2:], window)
            expected = reference.paged_attention(q[rows], *clean[:2], *rest)
            agrees(out[rows], expected, attention64(q[rows], pages.keys[b], pages.values[b], scale, window))
    assert out[first:].isnan().all(), "padding is not written"


@pytest.mark.parametrize("case", kernel.CASES + WINDOWED, ids=str)
def test_few_new_tokens(case, dtype, make, cache, nan, agrees, monkeypatch):
    use_sms(SM_COUNTS[dtype == torch.float32], monkeypatch)
    check(case, dtype, False, make, cache, None, nan, agrees)


@pytest.mark.parametrize("case", kernel.CASES[::2] + WINDOWED, ids=str)
def test_few_new_tokens_on_fp8_pages(case, make, cache8, nan, agrees):
    check(case, torch.float16, True, make, None, cache8, nan, agrees)


def test_nan_stays_in_its_sequence(make, cache, nan):
    """Catches NaN that spreads by a product with a hidden probability of zero, through the tile or through the combination."""
    lens, new = [70, 66, 9], [3, 5, 2]
    pages, q = cache(lens, 1, 64, 16, torch.float32), make(sum(new), 3, 64, dtype=torch.float32)
    clean = run(q, pages, lens, new, 64, 0.2, nan(*q.shape, dtype=q.dtype))
    for b, rows in enumerate((slice(0, 3), slice(3, 8), slice(8, 10))):
        bad, spoiled = q.clone(), pages._replace(k=pages.k.clone(), v=pages.v.clone())
        bad[rows] = torch.nan
        for x in (spoiled.k, spoiled.v):
            x[pages.tables[b, : -(-lens[b] // 16)].long()] = torch.nan
        result = run(bad, spoiled, lens, new, 64, 0.2, nan(*q.shape, dtype=q.dtype))
        others = torch.ones(len(q), dtype=torch.bool)
        others[rows] = False
        assert torch.equal(result[others], clean[others])
        assert result[rows].isnan().all()


def test_wrong_arguments_are_named(make, cache, nan):
    pages, q = cache([70], 1, 64, 16, torch.float32), make(5, 2, 64, dtype=torch.float32)
    for bound in (0, 9, None):
        ending = "" if bound is None else f"; found {bound}"
        with pytest.raises(InputError, match=f"max_query_len: .* expected a bound from 1 to 8{ending}"):
            run(q, pages, [70], [5], 64, 0.2, None, max_query_len=bound)
    with pytest.raises(InputError, match="split: not a power of two"):
        run(q, pages, [70], [5], 96, 0.2, None)
    rest = (pages.k, pages.v, pages.tables, pages.lens[:0], pages.lens, pages.lens[:0], 2, 5, 0.2, Workspace("cpu"))
    with pytest.raises(InputError, match="split_starts: wrong shape"):
        dispatch.paged_attention_decode_few(q, *rest)
    with pytest.raises(InputError, match="query_starts: missing"):
        dispatch.paged_attention_decode_few(q, *rest[:3], None, pages.lens, pages.lens.repeat(2), *rest[6:])
    few = Workspace(q.device, num_floats=2 * 8 * 2 * 66 - 1)
    starts = torch.tensor([0, 5], dtype=torch.int32, device=q.device)
    with pytest.raises(InputError, match=r"num_floats: too small; expected at least 2112; found 2111"):
        dispatch.paged_attention_decode_few(q, *rest[:3], starts, pages.lens, starts, 2, 5, 0.2, few, split=64)
    none = dispatch.paged_attention_decode_few(
        q[:0], *rest[:2], pages.tables[:0], starts[:1], pages.lens[:0], starts[:1], 0, 8, 0.2, few, split=64
    )
    assert none.shape == (0, 2, 64)
