"""Catches: a mask off by one, heads of a group mixed up, pages in table order mistaken for memory order, garbage in
unused parts of pages leaking through V, a ragged batch's rows shifted. With a window: a mask off by one at its older end, a block
that some row of a tile sees left out, one of which a row sees nothing (NaN), a token that no row sees read (NaN)."""

import itertools
import os

import pytest
import torch
from support.decode import attention64, forget
from support.raising import raises

from minirt.errors import InputError
from minirt.kernels import reference
from minirt.kernels.attention import dispatch, partial, prefill_sm90
from minirt.kernels.attention import prefill as kernel
from minirt.kernels.attention.operands import AttentionInput, KVPages, Scores, Sequences
from minirt.kernels.launch import Workspace

QWEN = {"Nq": 28, "Nkv": 4, "D": 128, "page_size": 64}
LLAMA = {"Nq": 32, "Nkv": 8, "D": 64, "page_size": 16}


WINDOWED = [  # the second batch: windows that begin at edges of blocks, for the first query of a tile and for others
    {"Nq": group, "Nkv": 1, "D": 64, "page_size": page_size, "lens": lens, "contexts": contexts, "window": w}
    for w in (1, 5, 64, 100, 300) for page_size, group, lens, contexts in (
        (16, 3, (40, 1, 130, 0, 7, 65), (w, 3 * w, 0, 9, 2 * w + 5, 100)),
        (64, 2, (33, 64, 17, 2), (w - 1, w + 63, w + 31, w + 64)),
    )
]  # fmt: skip


def prefill_on_hopper(q, k, v, tables, starts, lens, scale, out, shortest=1):
    """`prefill_sm90`, of however few tokens."""
    sequences = Sequences(tables, lens, query_starts=starts)
    prefill_sm90.launch(AttentionInput(q, KVPages(k, v), sequences, Scores(scale), out, shortest=shortest))
    return out


def check(case, dtype, make, cache, nan, agrees, device, prefill=dispatch.paged_attention_prefill):
    Nq, Nkv, D, page_size = (case[name] for name in ("Nq", "Nkv", "D", "page_size"))
    lens, window = case["lens"], case.get("window")
    totals = [n + c for n, c in zip(lens, case["contexts"], strict=True)]
    pages = cache(totals, Nkv, D, page_size, dtype)
    q, scale = make(sum(lens), Nq, D, dtype=dtype), 1.3 * D**-0.5
    starts = list(itertools.accumulate(lens, initial=0))
    on_device = torch.tensor(starts, dtype=torch.int32, device=device)
    options = {} if window is None else {"window": window}
    tables = forget(pages, totals, lens, window)
    out = prefill(q, pages.k, pages.v, tables, on_device, pages.lens, scale, nan(*q.shape, dtype=dtype), **options)
    expected = reference.paged_attention(q, pages.clean_k, pages.clean_v, pages.tables, lens, totals, scale, **options)
    for start, n, k, v in zip(starts, lens, pages.keys, pages.values, strict=False):
        rows = slice(start, start + n)
        if n:
            agrees(out[rows], expected[rows], attention64(q[rows], k, v, scale, window))


def check_fp8(case, dtype, make, cache8, nan, agrees, device, **options):
    Nq, Nkv, D, page_size = (case[name] for name in ("Nq", "Nkv", "D", "page_size"))
    lens, window = case["lens"], case.get("window")
    totals = [n + c for n, c in zip(lens, case["contexts"], strict=True)]
    kv = cache8(totals, Nkv, D, page_size)
    q, scale = make(sum(lens), Nq, D, dtype=dtype), 0.02
    if dtype == torch.bfloat16:
        q[0] *= 1e5  # more than fp16 holds, in which these pages are multiplied
    starts = list(itertools.accumulate(lens, initial=0))
    on_device = torch.tensor(starts, dtype=torch.int32, device=device)
    rest = {"block_tables": forget(kv, totals, lens, window), "query_starts": on_device, "seq_lens": kv.lens, "scale": scale}
    rest["window"] = window
    out = dispatch.paged_attention_prefill(q, out=nan(*q.shape, dtype=dtype), **rest, **kv.pages, **options)
    k_clean, v_clean, *scales = kv.clean
    expected = reference.paged_attention(q, k_clean, v_clean, kv.tables, lens, totals, scale, *scales, window)
    for start, n, k, v in zip(starts, lens, kv.keys, kv.values, strict=False):
        rows = slice(start, start + n)
        if n:
            agrees(out[rows], expected[rows], attention64(q[rows], k, v, scale, window))


@pytest.mark.parametrize("case", kernel.CASES + WINDOWED, ids=str)
def test_prefill_on_fp8_pages(case, dtype, make, cache8, nan, agrees, device):
    check_fp8(case, dtype, make, cache8, nan, agrees, device)


@pytest.mark.parametrize("case", kernel.CASES + WINDOWED, ids=str)
def test_prefill(case, dtype, make, cache, nan, agrees, device):
    check(case, dtype, make, cache, nan, agrees, device)


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_lengths_around_the_tiles(page_size, make, cache, nan, agrees, device):
    """Every tile boundary ± 1, of queries and of context, in one batch."""
    edges = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65]
    case = {"Nq": 2, "Nkv": 1, "D": 64, "page_size": page_size, "lens": edges, "contexts": edges[::-1]}
    check(case, torch.float32, make, cache, nan, agrees, device)


def test_sequences_without_new_tokens(make, cache, nan, agrees, device):
    case = {"Nq": 2, "Nkv": 2, "D": 64, "page_size": 16, "lens": (0, 5, 0), "contexts": (20, 3, 0)}
    check(case, torch.float32, make, cache, nan, agrees, device)
    check({**case, "lens": (0,), "contexts": (9,)}, torch.float32, make, cache, nan, agrees, device)


def check_padding(dtype, make, cache, nan, agrees, device, prefill=dispatch.paged_attention_prefill, empty=2):
    """Rows behind the last sequence's and sequences without rows, as many as a captured batch may be padded with."""
    pages = cache([70, 9, *[0] * empty], 2, 64, 16, dtype)
    q = make(150, 6, 64, dtype=dtype)
    q[74:] = torch.nan
    starts = torch.tensor([0, 70, *[74] * (empty + 1)], dtype=torch.int32, device=device)
    rest = (pages.k, pages.v, pages.tables, starts, pages.lens, 0.2)
    out = prefill(q, *rest, nan(*q.shape, dtype=dtype))
    longer = prefill(q, *rest, nan(*q.shape, dtype=dtype), shortest=5)
    assert torch.equal(longer[:70], out[:70])
    assert longer[70:].isnan().all()
    assert out[74:].isnan().all()
    for start, n, k, v in ((0, 70, pages.keys[0], pages.values[0]), (70, 4, pages.keys[1], pages.values[1])):
        rows = q[start : start + n]
        usual = reference.paged_attention(rows, pages.clean_k, pages.clean_v, pages.tables[start // 70 :], [n], [len(k)], 0.2)
        agrees(out[start : start + n], usual, attention64(rows, k, v, 0.2))


def test_padding_of_a_cuda_graph(make, cache, nan, agrees, device):
    check_padding(torch.float32, make, cache, nan, agrees, device)


def test_wrong_arguments_are_named(make, cache, device):
    pages = cache([20], 2, 64, 16, torch.float32)
    starts = torch.tensor([0, 20], dtype=torch.int32, device=device)

    def call(q, starts=starts, k=pages.k, tables=pages.tables):
        dispatch.paged_attention_prefill(q, k, pages.v, tables, starts, pages.lens, 1.0)

    raises("unsupported number of query heads; expected a multiple of 2", call, make(20, 3, 64, dtype=torch.float32))
    with pytest.raises(InputError, match="unsupported head size; expected one of 64, 80, 96, 112, 128, 192, 256, 512; found 32"):
        call(make(20, 4, 32, dtype=torch.float32))
    raises("query_starts: wrong shape", call, make(20, 4, 64, dtype=torch.float32), starts[:1])
    raises("block_tables: wrong dtype", call, make(20, 4, 64, dtype=torch.float32), tables=pages.tables.long())
    scales = torch.ones(pages.k.shape[:3], device=device)
    q = make(20, 2, 64, dtype=torch.float32)
    rest = (pages.k, pages.v, pages.tables, starts, pages.lens)
    raises("k_scales, v_scales: only one of both is given", dispatch.paged_attention_prefill, q, *rest, 1.0, k_scales=scales)
    with pytest.raises(InputError, match=r"k_pages: wrong dtype; expected torch.float8_e4m3fn"):
        dispatch.paged_attention_prefill(q, *rest, 1.0, k_scales=scales, v_scales=scales)
    raises(r"scale: not positive.*found 0", dispatch.paged_attention_prefill, q, *rest, 0.0)
    q, odd = make(1, 2, 64, dtype=torch.float32), make(4, 5, 2, 64, dtype=torch.float32)
    with pytest.raises(InputError, match=r"unsupported page size.*found 5"):
        dispatch.paged_attention_prefill(q, odd, odd, pages.tables, starts, pages.lens, 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [QWEN, LLAMA], ids=["qwen", "llama"])
@pytest.mark.parametrize(
    ("lens", "contexts"),
    [((2048,), (0,)), ((100, 1, 700, 33), (0, 3000, 1500, 8)), ((512,), (6000,)), ((1,) * 40, range(0, 4000, 100))],
    ids=["prompt", "ragged", "long context", "single tokens"],
)
def test_large(heads, lens, contexts, half_dtype, make, cache, nan, agrees, device):
    check({**heads, "lens": lens, "contexts": contexts}, half_dtype, make, cache, nan, agrees, device)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [QWEN, LLAMA], ids=["qwen", "llama"])
def test_large_on_fp8_pages(heads, half_dtype, make, cache8, nan, agrees, device):
    case = {**heads, "lens": (700, 1, 100, 33, 9), "contexts": (0, 3000, 1500, 8, 6000)}
    check_fp8(case, half_dtype, make, cache8, nan, agrees, device)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [QWEN, LLAMA, {"Nq": 3, "Nkv": 3, "D": 64, "page_size": 512}], ids=["qwen", "llama", "odd"])
def test_long_prompts_on_widened_fp8_pages(heads, half_dtype, make, cache8, nan, agrees, device):
    """Beside sequences in parts, which are read as they are."""
    lens, contexts = (700, 9, 0, 100, 1500, 5), (0, 700, 9, 1500, 801, 6000)
    workspace = Workspace(device, num_floats=partial.workspace_floats(64, heads["Nq"], heads["D"]))
    case = {**heads, "lens": lens, "contexts": contexts}
    check_fp8(case, half_dtype, make, cache8, nan, agrees, device, workspace=workspace, max_splits=64)


HOPPER_CASES = [  # a tile of 128 rows has 128 queries, or 18, or 8; a block of K and V one page, or many, or part of one
    *kernel.CASES,
    {**QWEN, "lens": (127, 128, 129, 1000), "contexts": (1, 0, 127, 64)},
    {**QWEN, "page_size": 16, "lens": (0, 300, 5, 0), "contexts": (9, 1000, 11, 0)},
    {"Nq": 3, "Nkv": 1, "D": 128, "page_size": 128, "lens": (3, 1, 37, 400), "contexts": (0, 16, 70, 517)},
    {"Nq": 16, "Nkv": 1, "D": 128, "page_size": 256, "lens": (130, 500), "contexts": (5, 250)},
    {"Nq": 4, "Nkv": 4, "D": 64, "page_size": 32, "lens": (300, 1, 1500), "contexts": (0, 300, 1)},
    {"Nq": 16, "Nkv": 2, "D": 512, "page_size": 64, "lens": (40, 1, 16), "contexts": (30, 64, 112)},
]


@pytest.fixture
def on_hopper():
    if "MINIRT_EMULATE" not in os.environ and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for Hopper")
    return prefill_on_hopper


@pytest.mark.gpu
@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
def test_hopper(case, half_dtype, make, cache, nan, agrees, device, on_hopper):
    check(case, half_dtype, make, cache, nan, agrees, device, on_hopper)


@pytest.mark.gpu
@pytest.mark.parametrize("empty", [2, 600])
def test_hopper_with_padding(empty, half_dtype, make, cache, nan, agrees, device, on_hopper):
    check_padding(half_dtype, make, cache, nan, agrees, device, on_hopper, empty)


@pytest.mark.gpu
def test_hopper_leaves_single_tokens(half_dtype, make, cache, nan, device, on_hopper):
    """A mixed batch: rows of sequences of one token, between the others, belong to another kernel."""
    lens = [1, 1, 40, 1, 300, 1, 1, 2] * 40
    pages = cache([n + 70 for n in lens], 4, 128, 64, half_dtype)
    q = make(sum(lens), 28, 128, dtype=half_dtype)
    starts = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=device)
    rest = (pages.k, pages.v, pages.tables, starts, pages.lens, 0.1)
    out, longer = on_hopper(q, *rest, torch.empty_like(q)), on_hopper(q, *rest, nan(*q.shape, dtype=q.dtype), shortest=2)
    single = torch.tensor(lens, device=device).repeat_interleave(torch.tensor(lens, device=device)) == 1
    assert longer[single].isnan().all()
    assert torch.equal(longer[~single], out[~single])


def test_hopper_takes_long_batches_of_16_bits(monkeypatch):
    monkeypatch.setattr(dispatch, "capability", lambda device: 90)

    def suits(T, D, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, workspace=None):
        q, pages = torch.empty(T, 2, D, dtype=dtype), torch.empty(1, 16, 2, D, dtype=kv_dtype)
        numbers = torch.zeros(1, 1, dtype=torch.int32)
        sequences = Sequences(numbers, numbers[0], query_starts=numbers[0])
        a = AttentionInput(q, KVPages(pages, pages), sequences, Scores(1.0), q, workspace=workspace)
        return dispatch.regime(dispatch.PREFILL, a.heads.shape[0], a).kernel == "prefill_sm90"

    assert [suits(T, 128) for T in (511, 512)] == [suits(T, 64) for T in (1023, 1024)] == [False, True]
    assert not suits(2048, 128, torch.float32, torch.float32)
    assert not suits(2048, 128, kv_dtype=torch.float8_e4m3fn)
    one_order = Workspace("cpu", invariant=True)
    assert [suits(2048, D, workspace=one_order) for D in (64, 128, 256, 512)] == [True, True, False, False]


@pytest.mark.gpu
def test_same_bits_every_time(make, cache, device):
    pages = cache([1500], 4, 128, 64, torch.bfloat16)
    q, starts = make(1500, 28, 128, dtype=torch.bfloat16), torch.tensor([0, 1500], dtype=torch.int32, device=device)
    runs = [dispatch.paged_attention_prefill(q, pages.k, pages.v, pages.tables, starts, pages.lens, 0.1) for _ in range(20)]
    assert all(torch.equal(runs[0], run) for run in runs)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [64, 16])
@pytest.mark.parametrize("prefill", [dispatch.paged_attention_prefill, prefill_on_hopper], ids=["triton", "hopper"])
def test_pages_past_2_31_elements(page_size, prefill, make, device):
    """A prompt's tokens in the first page, and the same in the last: tiles of one page, and of several."""
    if prefill is prefill_on_hopper and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for Hopper")
    count = 80_000 * 64 // page_size
    pages = torch.zeros(2, count, page_size, 4, 128, dtype=torch.float16, device=device)
    pages[:, -1] = pages[:, 0] = make(2, page_size, 4, 128, dtype=torch.float16)
    tokens = page_size - 3
    q, lens = make(tokens, 28, 128, dtype=torch.float16), torch.tensor([tokens], dtype=torch.int32, device=device)
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    low, high = (
        prefill(
            q, *pages, torch.tensor([[page]], dtype=torch.int32, device=device), starts, lens, 0.1, torch.empty_like(q)
        )
        for page in (0, count - 1)
    )
    assert low.isfinite().all()
    assert torch.equal(low, high)
