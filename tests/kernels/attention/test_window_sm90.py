"""Hopper's kernels with a sliding window, against fp64.

Catches: a window off by one, in one row of a prompt or in all; a split, a block or a page that is left out though it is seen, or
counted though it is not; a sequence of one split taken for one of several, or the reverse; NaN of hidden tokens, which other
sequences may have written, in K, in V or in scales; rows of a prompt that see nothing of its first block; teams of warps that
disagree about the blocks."""

import itertools

import pytest
import torch
from support.decode import SM_COUNTS, decode64, use_sms

from minirt.kernels import reference
from minirt.kernels.attention import decode_fp8_sm90, decode_sm90, prefill_sm90
from minirt.kernels.attention.combine import combine
from minirt.kernels.attention.operands import AttentionInput, KVPages, Rope, Scores, Sequences, first_split
from minirt.kernels.launch import Workspace

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_hopper")]

DECODE = [  # lengths around the window, twice the window, the edges of pages, of blocks and of splits
    {"window": 1, "Nq": 3, "Nkv": 1, "D": 64, "page_size": 16, "split": 64, "seq_lens": (1, 2, 0, 64, 65, 66, 129)},
    {"window": 5, "Nq": 6, "Nkv": 3, "D": 64, "page_size": 64, "split": 64, "seq_lens": (4, 5, 6, 10, 64, 68, 69, 130)},
    {"window": 64, "Nq": 2, "Nkv": 2, "D": 128, "page_size": 64, "split": 128, "seq_lens": (63, 64, 65, 128, 129, 192, 193)},
    {"window": 100, "Nq": 4, "Nkv": 2, "D": 128, "page_size": 16, "split": 256, "seq_lens": (99, 100, 101, 200, 300, 357, 612)},
    {"window": 300, "Nq": 9, "Nkv": 1, "D": 64, "page_size": 128, "split": 256, "seq_lens": (299, 300, 301, 600, 513, 1068)},
]
WIDE = {"window": 100, "Nq": 2, "Nkv": 1, "D": 256, "page_size": 64, "split": 128, "seq_lens": (100, 101, 357)}
MANY = {"window": 70, "Nq": 8, "Nkv": 8, "D": 64, "page_size": 32, "split": 128, "seq_lens": (69, 70, 71, 140, 0, 199, 325)}
PROMPTS = [
    {"window": 1, "Nq": 2, "Nkv": 2, "D": 64, "page_size": 64, "lens": (3, 150), "contexts": (130, 5)},
    {"window": 5, "Nq": 3, "Nkv": 1, "D": 128, "page_size": 16, "lens": (40, 4, 90), "contexts": (0, 131, 127)},
    {"window": 64, "Nq": 1, "Nkv": 1, "D": 256, "page_size": 64, "lens": (200, 1), "contexts": (126, 64)},
    {"window": 100, "Nq": 7, "Nkv": 1, "D": 64, "page_size": 128, "lens": (17, 60), "contexts": (400, 100)},
    {"window": 300, "Nq": 1, "Nkv": 1, "D": 128, "page_size": 64, "lens": (130, 20), "contexts": (640, 299)},  # all masks
    {"window": 100, "Nq": 8, "Nkv": 2, "D": 512, "page_size": 16, "lens": (40, 3), "contexts": (150, 30)},
]


def forgotten(pages, tables, counts, page_size):
    """Tables whose pages before `counts` tokens of each sequence belong to others; NaN in all these tokens."""
    for table, count in zip(tables, counts, strict=True):
        t = torch.arange(count, device=tables.device)
        for x in pages:
            values, nan = (x.view(torch.uint8), 0x7F) if x.dtype == torch.float8_e4m3fn else (x, torch.nan)
            values[table[t // page_size].long(), t % page_size] = nan
    after = tables.clone()
    for table, count in zip(after, counts, strict=True):
        table[: count // page_size] = table[-1]  # the unused page
    return after


def plan(lens, new, window, split, Nq, D, device):
    """`support.decode.plan` of the splits that a window leaves."""
    counts = [-(-n // split) - (first_split(n, m, window, split) if n else 0) for n, m in zip(lens, new, strict=True)]
    starts = list(itertools.accumulate(counts, initial=0))
    workspace = Workspace(device, num_floats=starts[-1] * Nq * (D + 2) + 16)
    workspace.sums(0).fill_(torch.nan)
    return torch.tensor(starts, dtype=torch.int32, device=device), starts[-1], workspace


def decode(heads, pages, tables, lens, query_starts, planned, window, Nq, split, scale, nan):
    """The kernel for these pages, then `combine`."""
    k, v, *scales = pages
    starts, most, workspace = planned
    a = AttentionInput(
        heads, KVPages(k, v, *scales), Sequences(tables, lens, starts, query_starts), Scores(scale, window),
        nan(len(heads), Nq, k.shape[-1], dtype=heads.dtype), Rope(None), workspace=workspace, max_splits=most, split=split,
    )  # fmt: skip
    (decode_fp8_sm90 if scales else decode_sm90).launch(a)
    combine(a)
    return a.out


def check_decode(case, fp8, dtype, new, make, cache, cache8, nan, agrees, device):
    """Single tokens, or those among sequences with several new tokens; the same bits whatever hidden tokens hold."""
    window, Nq, Nkv, D, page_size, split = (case[name] for name in ("window", "Nq", "Nkv", "D", "page_size", "split"))
    lens, mixed, scale = list(case["seq_lens"]), new is not None, 0.02 if fp8 else 1.3 * D**-0.5
    new = new or [1] * len(lens)
    built = cache8(lens, Nkv, D, page_size) if fp8 else cache(lens, Nkv, D, page_size, dtype)
    pages = list(built.pages.values()) if fp8 else [built.k, built.v]
    firsts = list(itertools.accumulate(new, initial=0))
    heads = make(firsts[-1], (Nq + 2 * Nkv) * D, dtype=dtype)
    whole = [x.clone() for x in pages]
    hidden = forgotten(pages, built.tables, [max(0, n - m - window + 1) for n, m in zip(lens, new, strict=True)], page_size)
    query_starts = torch.tensor(firsts, dtype=torch.int32, device=device) if mixed else None
    rest = (built.lens, query_starts, plan(lens, new, window, split, Nq, D, device), window, Nq, split, scale, nan)
    out = decode(heads, pages, hidden, *rest)
    q, *fresh = heads.view(firsts[-1], -1, D).split((Nq, Nkv, Nkv), 1)
    for i, (n, m, row) in enumerate(zip(lens, new, firsts, strict=False)):
        if m != 1:
            assert out[row : row + m].isnan().all()
            continue
        if n == 0:
            assert not out[row].any()
            continue
        kv = []
        for old, x in zip((built.keys[i], built.values[i]), fresh, strict=True):
            last = x[row].double()
            if fp8:
                codes, scales = reference.quantize_fp8(x[row].float())
                last = codes.double() * scales.double().unsqueeze(-1)
            kv.append(torch.cat((old[:-1].double(), last[None])))
        one_page = [x[None].to(dtype) for x in kv]
        expected = reference.paged_attention(q[row][None], *one_page, built.tables[:1] * 0, [1], [n], scale, window=window)
        agrees(out[row], expected[0], decode64(q[row], *(x[-window:] for x in kv), scale))
    assert torch.equal(decode(heads, whole, built.tables, *rest).nan_to_num(9), out.nan_to_num(9))


@pytest.mark.parametrize("sms", SM_COUNTS)
@pytest.mark.parametrize("case", [*DECODE, WIDE], ids=str)
def test_decode(case, sms, half_dtype, make, cache, nan, agrees, device, monkeypatch):
    use_sms(sms, monkeypatch)
    check_decode(case, False, half_dtype, None, make, cache, None, nan, agrees, device)


@pytest.mark.parametrize("sms", SM_COUNTS)
@pytest.mark.parametrize("case", [*DECODE[:4], MANY], ids=str)
def test_decode_on_fp8_pages(case, sms, half_dtype, make, cache8, nan, agrees, device, monkeypatch):
    use_sms(sms, monkeypatch)
    check_decode(case, True, half_dtype, None, make, None, cache8, nan, agrees, device)


@pytest.mark.parametrize("fp8", [False, True])
def test_single_tokens_among_prompts(fp8, half_dtype, make, cache, cache8, nan, agrees, device, monkeypatch):
    """Catches items of a sequence of several new tokens, which start at an earlier split, taken for splits past its end."""
    use_sms(1, monkeypatch)
    case = {"window": 70, "Nq": 4, "Nkv": 2, "D": 64, "page_size": 16, "split": 64, "seq_lens": (500, 300, 1, 0, 64, 333, 70)}
    check_decode(case, fp8, half_dtype, [400, 1, 1, 0, 1, 5, 1], make, cache, cache8, nan, agrees, device)


def prefill(q, k, v, tables, firsts, lens, scale, window, nan):
    starts, out = torch.tensor(firsts, dtype=torch.int32, device=q.device), nan(*q.shape, dtype=q.dtype)
    sequences = Sequences(tables, lens, query_starts=starts)
    prefill_sm90.launch(AttentionInput(q, KVPages(k, v), sequences, Scores(scale, window), out))
    return out


def window64(q, k, v, window, scale):
    """`support.decode.attention64` with a window."""
    n, total = q.shape[0], k.shape[0]
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    seen = torch.ones(n, total, dtype=torch.bool, device=q.device).tril(total - n).triu(total - n - window + 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("case", PROMPTS, ids=str)
def test_prompts(case, half_dtype, make, cache, nan, agrees, device, monkeypatch):
    """Two programs have all tiles, so that the barriers of one tile's first block are used again for the next one's."""
    monkeypatch.setattr(prefill_sm90, "sm_count", lambda device: 2)
    window, Nq, Nkv, D, page_size = (case[name] for name in ("window", "Nq", "Nkv", "D", "page_size"))
    lens, totals = case["lens"], [n + c for n, c in zip(case["lens"], case["contexts"], strict=True)]
    built, scale = cache(totals, Nkv, D, page_size, half_dtype), 1.3 * D**-0.5
    q, firsts = make(sum(lens), Nq, D, dtype=half_dtype), list(itertools.accumulate(lens, initial=0))
    expected = reference.paged_attention(q, built.clean_k, built.clean_v, built.tables, lens, totals, scale, window=window)
    whole = built.k.clone(), built.v.clone()
    hidden = forgotten((built.k, built.v), built.tables, [max(0, c - window + 1) for c in case["contexts"]], page_size)
    out = prefill(q, built.k, built.v, hidden, firsts, built.lens, scale, window, nan)
    for first, n, k, v in zip(firsts, lens, built.keys, built.values, strict=False):
        rows = slice(first, first + n)
        agrees(out[rows], expected[rows], window64(q[rows], k, v, window, scale))
    assert torch.equal(prefill(q, *whole, built.tables, firsts, built.lens, scale, window, nan), out)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_wide_window_changes_no_bit(fp8, half_dtype, make, cache, cache8, nan, device):
    """Catches a window that hides something from a sequence that is not longer."""
    lens, Nq, Nkv, D = [1, 64, 129, 300], 4, 2, 64
    built = cache8(lens, Nkv, D, 16) if fp8 else cache(lens, Nkv, D, 16, half_dtype)
    pages = built.pages.values() if fp8 else (built.k, built.v)
    heads, planned = make(4, (Nq + 2 * Nkv) * D, dtype=half_dtype), plan(lens, [1] * 4, None, 128, Nq, D, device)
    outs = [decode(heads, pages, built.tables, built.lens, None, planned, w, Nq, 128, 0.02, nan) for w in (None, 300)]
    assert torch.equal(*outs)
    if not fp8:
        q, firsts = make(300, Nq, D, dtype=half_dtype), [0, 1, 2, 100, 300]
        outs = [prefill(q, built.k, built.v, built.tables, firsts, built.lens, 0.1, w, nan) for w in (None, 300)]
        assert torch.equal(*outs)


def test_what_parts_of_the_context_leave(half_dtype, make, cache, nan, agrees, device):
    """Catches a sequence that neither `partial` nor this kernel computes: its context has several parts, its window has not."""
    window, Nq, Nkv, D, lens, totals = 70, 4, 2, 64, [3, 130], [403, 230]
    built, scale = cache(totals, Nkv, D, 16, half_dtype), D**-0.5
    q, out = make(133, Nq, D, dtype=half_dtype), nan(133, Nq, D, dtype=half_dtype)
    starts = torch.tensor([0, 3, 133], dtype=torch.int32, device=device)
    sequences, scores = Sequences(built.tables, built.lens, query_starts=starts), Scores(scale, window)
    prefill_sm90.launch(AttentionInput(q, KVPages(built.k, built.v), sequences, scores, out, partial=128))
    expected = reference.paged_attention(q, built.clean_k, built.clean_v, built.tables, lens, totals, scale, window=window)
    agrees(out[:3], expected[:3], window64(q[:3], built.keys[0], built.values[0], window, scale))
    assert out[3:].isfinite().all()
