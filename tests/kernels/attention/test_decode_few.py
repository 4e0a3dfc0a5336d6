"""Catches: a new token that sees one too many or too few, rows of heads and tokens mixed up, a new token that sees nothing of the
last split and poisons the sum, splits of another sequence or of another new token, a sequence without new tokens that is read or
written, a result that depends on the step."""

import itertools

import pytest
import torch
from support.decode import SM_COUNTS, plan, use_sms

from minirt.errors import InputError
from minirt.kernels import reference
from minirt.kernels.attention import decode_few as kernel
from minirt.kernels.attention import dispatch


def attention64(q, k, v, scale):
    """One sequence: q [n, Nq, D] are the last n of its tokens k, v [total, Nkv, D]."""
    n, total = q.shape[0], k.shape[0]
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    hidden = torch.arange(total, device=q.device) > torch.arange(total - n, total, device=q.device).unsqueeze(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def run(q, pages, lens, new, split, scale, out, rows=None, **options):
    """`paged_attention_decode_few` of the sequences `rows` of `pages` (all by default), with a workspace of NaN."""
    rows = list(range(len(lens))) if rows is None else rows
    own, device = [lens[i] for i in rows], q.device
    starts, most, workspace = plan(own, split, q.shape[1], q.shape[2], device, spare=3)
    workspace.reserve(kernel.workspace_floats(most, *q.shape[1:]))
    workspace.sums(0).fill_(torch.nan)
    firsts = torch.tensor(list(itertools.accumulate((new[i] for i in rows), initial=0)), dtype=torch.int32, device=device)
    kv = pages.pages if hasattr(pages, "pages") else {"k_pages": pages.k, "v_pages": pages.v}
    options = {"split": split, "max_query_len": max(2, *(new[i] for i in rows), 2)} | options
    return dispatch.paged_attention_decode_few(
        q, block_tables=pages.tables[rows], query_starts=firsts, seq_lens=pages.lens[rows], split_starts=starts, max_splits=most,
        scale=scale, workspace=workspace, out=out, **kv, **options,
    )  # fmt: skip


def check(case, dtype, fp8, make, cache, cache8, nan, agrees):
    Nq, Nkv, D, page_size = (case[name] for name in ("Nq", "Nkv", "D", "page_size"))
    lens, new = list(case["seq_lens"]), list(case["new"])
    scale = 0.02 if fp8 else 1.3 * D**-0.5
    pages = cache8(lens, Nkv, D, page_size) if fp8 else cache(lens, Nkv, D, page_size, dtype)
    clean = pages.clean if fp8 else (pages.clean_k, pages.clean_v)
    for row, n in zip(pages.tables, lens, strict=True):
        row[-(-n // page_size) :] = 2**31 - 1  # where no page is
    q = make(sum(new) + 2, Nq, D, dtype=dtype)
    q[sum(new) :] = torch.nan
    out = run(q, pages, lens, new, case["split"], scale, nan(*q.shape, dtype=dtype))
    tables = pages.tables.where(pages.tables < 2**31 - 1, 0)
    first = 0
    for b, (n, m) in enumerate(zip(lens, new, strict=True)):
        rows = slice(first, first + m)
        first += m
        if m:
            expected = reference.paged_attention(q[rows], *clean[:2], tables[b : b + 1], [m], [n], scale, *clean[2:])
            agrees(out[rows], expected, attention64(q[rows], pages.keys[b], pages.values[b], scale))
    assert out[first:].isnan().all(), "padding is not written"


@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_few_new_tokens(case, dtype, make, cache, nan, agrees, monkeypatch):
    use_sms(SM_COUNTS[dtype == torch.float32], monkeypatch)
    check(case, dtype, False, make, cache, None, nan, agrees)
