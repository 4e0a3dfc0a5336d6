"""Catches: a page copied for another sequence or under another number, a sequence that is left out or copied though another
kernel computes it, scales of the wrong token or head, a page that no new token sees in its window copied, or one left out."""

import itertools

import pytest
import torch

from minirt.kernels.attention import widen_kv
from minirt.kernels.attention.decode import splits_before
from minirt.kernels.attention.operands import AttentionInput, KVPages, Scores, Sequences


@pytest.mark.parametrize(("split", "sms"), [(256, 1), (64, 132)])
@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 17, 300])
@pytest.mark.parametrize("case", widen_kv.CASES, ids=str)
def test_copies(case, window, chunks, sms, split, dtype, cache8, device, monkeypatch):
    monkeypatch.setattr(widen_kv, "sm_count", lambda device: sms)
    Nkv, D, page_size, shortest = (case[name] for name in ("Nkv", "D", "page_size", "shortest"))
    lens = case["lens"]
    totals = [n + c for n, c in zip(lens, case["contexts"], strict=True)]
    kv = cache8(totals, Nkv, D, page_size)
    pages = KVPages(kv.pages["k_pages"], kv.pages["v_pages"], kv.pages["k_scales"], kv.pages["v_scales"])
    starts = torch.tensor(list(itertools.accumulate(lens, initial=0)), dtype=torch.int32, device=device)
    splits, q = splits_before(totals, split, window, lens)[-1], torch.empty(sum(lens), 1, D, dtype=dtype, device=device)
    widened = widen_kv.widen(AttentionInput(
        q, pages, Sequences(kv.tables, kv.lens, query_starts=starts), Scores(1.0, window), q, max_splits=splits, split=split,
        shortest=shortest, partial=split if chunks else 0,
    ))  # fmt: skip
    (k, v, *_), tables = widened.pages, widened.sequences.block_tables
    numbers = []
    for b, (new, total) in enumerate(zip(lens, totals, strict=True)):
        oldest, part = max(0, total - new - (window or total) + 1), max(split, split // 4 << (new - 1).bit_length())
        in_parts = chunks and 2 <= new <= 256 and total // part - -(-oldest // part) >= 2
        if new < max(1, shortest) or in_parts:
            continue
        seen = oldest // page_size * page_size
        pages = tables[b, seen // page_size : -(-total // page_size)].tolist()
        numbers += pages
        for wide, exact in ((k, kv.keys[b]), (v, kv.values[b])):
            got = wide[torch.tensor(pages, device=device)].flatten(0, 1)[: total - seen]
            assert torch.equal(got, exact[seen:].float().to(dtype))
    assert numbers == list(range(len(numbers))), "every page once, in order"
    assert len(numbers) <= k.shape[0]
