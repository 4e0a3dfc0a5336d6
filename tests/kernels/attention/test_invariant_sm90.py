"""Hopper's kernel of prompts in an invariant step: bit for bit the rows of `prefill`, whose order `test_invariant.py` compares
with that of all other kernels.

Catches: a split that ends at another token, or whose maximum or total goes on in the next one; the first step of a block that
takes the maximum of the second, or keeps its own factor; sums of ended splits that another team, or the tile before, has left;
splits that only some rows of a tile see; weights summed before they are rounded, or in another order.
"""

import itertools

import pytest
import torch

from minirt.kernels.attention import prefill, prefill_sm90
from minirt.kernels.attention.operands import AttentionInput, KVPages, Scores, Sequences
from minirt.kernels.launch import Workspace

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_hopper")]
# scale: of scores. With a large one, maxima grow from step to step, and many weights are tiny.
NAMES = ("Nq", "Nkv", "D", "page_size", "lens", "contexts", "split", "scale", "window")
CASES = [dict(zip(NAMES, values, strict=True)) for values in (
    (1, 1, 128, 64, (130,), (150,), 256, 1.3, None), (2, 1, 128, 16, (40, 5), (450, 251), 256, 9.0, None),
    (7, 1, 64, 128, (70, 2, 1), (100, 511, 600), 128, 3.0, None), (3, 1, 64, 32, (90,), (77,), 64, 2.0, 70),
    (4, 2, 128, 64, (66, 3), (500, 303), 256, 4.0, 99), (28, 4, 128, 64, (2048, 1, 700), (0, 33, 5000), 256, 2.0, None),
    (32, 8, 64, 16, (1500, 300), (7, 1999), 256, 5.0, None),
)]  # fmt: skip


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows(case, sinks, half_dtype, make, cache, nan, device, monkeypatch):
    """Few programs have all tiles, one after the other."""
    monkeypatch.setattr(prefill_sm90, "sm_count", lambda device: 2)
    Nq, Nkv, D, lens = (case[name] for name in ("Nq", "Nkv", "D", "lens"))
    pages = cache([n + c for n, c in zip(lens, case["contexts"], strict=True)], Nkv, D, case["page_size"], half_dtype)
    q, sink = make(sum(lens), Nq, D, dtype=half_dtype), make(Nq, dtype=half_dtype) if sinks else None
    starts = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=device)
    sequences = Sequences(pages.tables, pages.lens, query_starts=starts)
    scores = Scores(case["scale"] * D**-0.5, case["window"])

    def rows(kernel, invariant=True):
        a = AttentionInput(
            q, KVPages(pages.k, pages.v), sequences, scores, nan(*q.shape, dtype=q.dtype), split=case["split"],
            workspace=Workspace(device, 16, invariant=invariant), sinks=sink,
        )  # fmt: skip
        kernel.launch(a)
        return a.out

    truth, out = rows(prefill), rows(prefill_sm90)
    assert truth.isfinite().all()
    differ = (out != truth).flatten(1).any(1).nonzero().flatten().tolist()
    assert not differ, f"{len(differ)} tokens, first {differ[:5]}"
    if len(q) < 1000:
        assert not torch.equal(rows(prefill_sm90, invariant=False), truth)  # or the comparison sees nothing
