"""Catches: splits weighted or ordered wrongly or left out, an item that finds the wrong sequence (beside empty ones above
all), a sequence that ends on a split's or a page's edge, padding rows that read, write or keep garbage, the new token
missing, doubled or in the wrong slot, a result that depends on the rest of the batch or on the size of the GPU. With a window:
one token too many or too few, a token outside of it that is read (NaN), a split, counted from the window, that takes another's
pages, a sequence of one split in the window that is left to be combined."""

from dataclasses import replace

import pytest
import torch
from support.decode import LARGE, SM_COUNTS, WINDOWED, decode64, forget, plan, use_sms
from support.raising import raises

from minirt.errors import InputError
from minirt.kernels import reference
from minirt.kernels.attention import decode as kernel
from minirt.kernels.attention import dispatch
from minirt.kernels.attention import rope_write as kv_write
from minirt.kernels.launch import Workspace


def check(case, dtype, make, cache, nan, agrees, device):
    Nq, Nkv, D, split, window = case["Nq"], case["Nkv"], case["D"], case["split"], case.get("window")
    lens = list(case["seq_lens"])
    pages = cache(lens, Nkv, D, case["page_size"], dtype)
    counts = [-(-n // case["page_size"]) for n in lens]
    tables = forget(pages, lens, [1] * len(lens), window)[:, : max(counts)].contiguous()
    for row, count in zip(tables, counts, strict=True):
        row[count:] = 2**31 - 1  # where no page is
    q, scale = make(len(lens), Nq, D, dtype=dtype), 1.3 * D**-0.5
    starts, most, workspace = plan(lens, split, Nq, D, device, 5, window)
    out = dispatch.paged_attention_decode(
        q, pages.k, pages.v, tables, pages.lens, starts, most, scale, workspace, nan(*q.shape, dtype=dtype), split=split,
        window=window,
    )  # fmt: skip
    for i, n in enumerate(lens):
        if n == 0:
            assert not out[i].any()
            continue
        table = pages.tables[i : i + 1]
        expected = reference.paged_attention(q[i : i + 1], pages.clean_k, pages.clean_v, table, [1], [n], scale, window=window)
        agrees(out[i], expected[0], decode64(q[i], pages.keys[i], pages.values[i], scale, window))


def check_fused(case, normalize, dtype, make, cache, nan, agrees, device):
    """Rotation and write against the kernel that does only these, which has a separate test."""
    Nq, Nkv, D, page_size, split = case["Nq"], case["Nkv"], case["D"], case["page_size"], case["split"]
    lens, B, window = list(case["seq_lens"]), len(case["seq_lens"]), case.get("window")
    pages = cache(lens, Nkv, D, page_size, dtype)
    tables = forget(pages, lens, [1] * B, window)
    qkv, cos_sin = make(B, (Nq + 2 * Nkv) * D, dtype=dtype), make(max(lens), D, dtype=torch.float32)
    q_norm, k_norm = (make(D, dtype=dtype), make(D, dtype=dtype)) if normalize else (None, None)
    positions = (pages.lens.long() - 1).clamp_min(0)
    places = pages.tables.gather(1, positions.unsqueeze(1) // page_size).squeeze(1) * page_size + positions % page_size
    slots = places.where(pages.lens > 0, -1)
    k, v, scale = pages.k.clone(), pages.v.clone(), 1.3 * D**-0.5
    q = kv_write.qk_norm_rope_kv_write(qkv, cos_sin, positions, slots, k, v, Nq, Nkv, q_norm, k_norm, 1e-5)
    starts, most, workspace = plan(lens, split, Nq, D, device, window=window)
    rest = (tables, pages.lens, starts, most, scale, workspace)
    new = slots[slots >= 0]
    pages.k.view(-1, Nkv, D)[new] = float("nan")
    pages.v.view(-1, Nkv, D)[new] = float("nan")
    out = dispatch.rope_paged_attention_decode(
        qkv, cos_sin, pages.k, pages.v, *rest, Nq, q_norm, k_norm, 1e-5, nan(B, Nq, D, dtype=dtype), split=split, window=window
    )  # fmt: skip
    eps = torch.finfo(dtype).eps
    # The compiler may fuse products and sums otherwise there.
    torch.testing.assert_close(pages.k, k, rtol=eps, atol=max(eps, 1e-5), equal_nan=True)
    assert torch.equal(pages.v.nan_to_num(9), v.nan_to_num(9))
    for i, n in enumerate(lens):
        if n == 0:
            assert not out[i].any()
            continue
        table = pages.tables[i : i + 1]
        clean = (k.nan_to_num(0), v.nan_to_num(0))
        expected = reference.paged_attention(q[i : i + 1], *clean, table, [1], [n], scale, window=window)
        keys, values = (x[table[0].long()].flatten(0, 1)[:n] for x in (k, v))
        agrees(out[i], expected[0], decode64(q[i], keys, values, scale, window))


@pytest.mark.parametrize("sms", SM_COUNTS)
@pytest.mark.parametrize("case", kernel.CASES + WINDOWED, ids=str)
def test_decode(case, sms, dtype, make, cache, nan, agrees, device, monkeypatch):
    use_sms(sms, monkeypatch)
    check(case, dtype, make, cache, nan, agrees, device)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("case", kernel.CASES + WINDOWED, ids=str)
def test_fused_with_rope_and_write(case, normalize, dtype, make, cache, nan, agrees, device, monkeypatch):
    use_sms(SM_COUNTS[not normalize], monkeypatch)
    check_fused(case, normalize, dtype, make, cache, nan, agrees, device)


def test_short_sequences_are_not_combined(dtype, make, cache, nan, device):
    """The same bits, where the bound says that each has one split; rows of padding stay as they are."""
    lens, Nq, Nkv, D = [1, 0, 64, 65, 63], 7, 1, 64
    pages, qkv = cache(lens, Nkv, D, 16, dtype), make(len(lens), (Nq + 2 * Nkv) * D, dtype=dtype)
    starts, most, workspace = plan(lens, 128, Nq, D, device, spare=5)
    rest = (qkv, make(128, D, dtype=torch.float32), pages.k, pages.v, pages.tables, pages.lens, starts, most, 0.1, workspace, Nq)
    combined, short = (
        dispatch.rope_paged_attention_decode(*rest, out=nan(len(lens), Nq, D, dtype=dtype), split=128, max_seq_len=longest)
        for longest in (129, 128)
    )
    assert not combined[1].any()
    assert short[1].isnan().all()
    assert torch.equal(short[[0, 2, 3, 4]], combined[[0, 2, 3, 4]])


@pytest.mark.parametrize("window", [None, 1, 40, 150])
def test_single_tokens_among_prompts(window, make, cache, nan, agrees, device):
    """Only they are computed, from their rows of q to their rows of the result, whether of one split or of more."""
    lens, new = [300, 65, 1, 0, 64, 200, 9], [1, 5, 1, 0, 1, 130, 1]
    pages = cache(lens, 2, 64, 16, torch.float32)
    q = make(sum(new) + 3, 6, 64, dtype=torch.float32)
    firsts = [sum(new[:i]) for i in range(len(new) + 1)]
    query_starts = torch.tensor(firsts, dtype=torch.int32, device=device)
    starts, most, workspace = plan(lens, 64, 6, 64, device, 4, window, new)
    tables = forget(pages, lens, new, window)
    out = dispatch.paged_attention_decode(
        q, pages.k, pages.v, tables, pages.lens, starts, most, 0.2, workspace, nan(*q.shape, dtype=q.dtype),
        query_starts=query_starts, split=64, window=window,
    )  # fmt: skip
    untouched = torch.ones(len(q), dtype=torch.bool, device=device)
    for row, n, k, v in zip(firsts, new, pages.keys, pages.values, strict=False):
        if n == 1:
            truth = decode64(q[row], k, v, 0.2, window)
            agrees(out[row], truth.float(), truth)
            untouched[row] = False
    assert out[untouched].isnan().all()


@pytest.mark.parametrize("sms", SM_COUNTS)
def test_large_batches(sms, make, cache, nan, agrees, device, monkeypatch):
    """More sequences than are looked up at once in a small batch, more items than programs, empty ones everywhere."""
    use_sms(sms, monkeypatch)
    lens = [0, 1, 0, 0, 65, 64, 300] + [1, 2, 63, 0] * 8 + [0, 129, 0]
    case = {"Nq": 3, "Nkv": 1, "D": 64, "page_size": 16, "seq_lens": lens, "split": 64}
    check(case, torch.float32, make, cache, nan, agrees, device)
    check_fused({**case, "seq_lens": lens[::-1][:33]}, True, torch.float32, make, cache, nan, agrees, device)


def test_more_splits_than_are_combined_at_once(make, cache, nan, agrees, device):
    """The largest score of some heads is in the second round: sums of the first one are scaled."""
    case = {"Nq": 8, "Nkv": 1, "D": 64, "page_size": 64, "seq_lens": [64 * 50], "split": 64}
    check(case, torch.float32, make, cache, nan, agrees, device)


def test_split_starts():
    assert kernel.splits_before([0, 1, 256, 257, 0, 1000]) == [0, 0, 1, 2, 4, 4, 8]
    assert kernel.splits_before([65], 64) == [0, 2]
    assert kernel.splits_before([]) == [0]
    assert kernel.splits_before([0, 64, 128, 129, 193, 500], 64, 65) == [0, 0, 1, 3, 5, 7, 9]
    assert kernel.splits_before([201, 201, 130, 0], 64, 9, [1, 8, 3, 0]) == [0, 1, 3, 5, 5]
    with_prompts = kernel.splits_before([128, 200], 64, 1, [0, 200])
    assert with_prompts == [0, 0, 4], "no split of a sequence without new tokens, all of a prompt"


def test_wrong_arguments_are_named(make, cache, device):
    pages, workspace = cache([200], 1, 64, 16, torch.float32), Workspace(device, num_floats=100)
    starts = torch.tensor([0, 4], dtype=torch.int32, device=device)
    q = make(1, 2, 64, dtype=torch.float32)
    rest = (pages.k, pages.v, pages.tables, pages.lens, starts, 4, 1.0, workspace)
    raises(r"num_floats: too small; expected at least 528; found 100", dispatch.paged_attention_decode, q, *rest, split=64)
    for split in (96, 32, 2048):
        with pytest.raises(InputError, match=f"split: not a power of two from 64 to 1024; found {split}"):
            dispatch.paged_attention_decode(q, *rest, split=split)
    raises("window: not positive; found 0", dispatch.paged_attention_decode, q, *rest, window=0)
    raises("seq_lens: wrong shape", dispatch.paged_attention_decode, q.repeat(2, 1, 1), *rest)
    raises("split_starts: wrong shape", dispatch.paged_attention_decode, q, *rest[:4], starts[:1], *rest[5:])
    raises("split_starts: wrong dtype", dispatch.paged_attention_decode, q, *rest[:4], starts.long(), *rest[5:])
    with pytest.raises(InputError, match="qkv: wrong shape"):
        dispatch.rope_paged_attention_decode(make(1, 64, dtype=torch.float32), make(200, 64, dtype=torch.float32), *rest, 2)
    empty = dispatch.paged_attention_decode(
        q[:0], *rest[:2], pages.tables[:0], pages.lens[:0], starts[:1], 0, *rest[6:], split=64
    )
    assert empty.shape == (0, 2, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case, half_dtype, make, cache, nan, agrees, device, monkeypatch):
    check(case, half_dtype, make, cache, nan, agrees, device)
    check_fused(case, True, half_dtype, make, cache, nan, agrees, device)
    monkeypatch.setattr(dispatch, "DECODE", dispatch.DECODE[-1:])  # the kernel for any GPU
    check_fused(case, True, half_dtype, make, cache, nan, agrees, device)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("Nq", "Nkv", "D"), [(28, 4, 128), (9, 9, 64), (8, 4, 128)])
def test_the_batch_changes_no_bit_on_the_gpu(fp8, Nq, Nkv, D, make, cache, cache8, device):
    """The kernel is compiled apart for batches of 1, of up to 32 and of more, and items of fp8 pages are wider from 7 on."""
    lens = [3000, 17, 256, 257] + [100] * 296
    pages = cache8(lens, Nkv, D, 64) if fp8 else cache(lens, Nkv, D, 64, torch.bfloat16)
    kv = pages.pages if fp8 else {"k_pages": pages.k, "v_pages": pages.v}
    qkv, cos_sin = make(len(lens), (Nq + 2 * Nkv) * D, dtype=torch.bfloat16), make(3000, D, dtype=torch.float32)
    norms = (make(D, dtype=torch.bfloat16), make(D, dtype=torch.bfloat16))

    def run(rows):
        starts, most, workspace = plan([lens[i] for i in rows], 256, Nq, D, device, spare=1000)
        rest = {"block_tables": pages.tables[rows], "seq_lens": pages.lens[rows], "split_starts": starts, "max_splits": most}
        rest |= {"scale": 0.1, "workspace": workspace, "Nq": Nq, "q_norm": norms[0], "k_norm": norms[1]}
        return dispatch.rope_paged_attention_decode(qkv[rows], cos_sin, **kv, **rest)

    together = run(list(range(300)))
    for rows in ([0], [1], [2], [3], [3, 0, 1], list(range(40))):
        assert torch.equal(run(rows), together[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
def test_same_bits_every_time_also_with_pdl(fused, with_pdl, make, cache, device, repeats):
    """A chain through the pages of 8 layers, in which each kernel reads what the one before wrote, and none comes to rest."""
    lens = [3000]
    layers = [cache(lens, 4, 128, 64, torch.bfloat16) for _ in range(8)]
    starts, most, workspace = plan(lens, 256, 28, 128, device, spare=100)
    first, cos_sin = make(1, 36 * 128, dtype=torch.bfloat16), make(3000, 128, dtype=torch.float32)

    def chain(pdl):
        qkv = first.clone()
        q = qkv[:, : 28 * 128].view(1, 28, 128)
        for pages in layers * repeats(5):
            rest = (pages.k, pages.v, pages.tables, pages.lens, starts, most, 1.0, workspace)
            if fused:
                dispatch.rope_paged_attention_decode(qkv, cos_sin, *rest, 28, out=q, pdl=pdl)
            else:
                dispatch.paged_attention_decode(q, *rest, out=q, pdl=pdl)
        return qkv

    expected = chain(False)
    assert expected.isfinite().all()
    assert all(torch.equal(chain(pdl), expected) for pdl in [False, True] * repeats(5))


@pytest.mark.gpu
def test_pages_past_2_31_elements(make, device):
    pages = torch.zeros(2, 80_000, 64, 4, 128, dtype=torch.float16, device=device)
    pages[:, -1] = pages[:, 0] = make(2, 64, 4, 128, dtype=torch.float16)
    q, lens = make(1, 28, 128, dtype=torch.float16), torch.tensor([60], dtype=torch.int32, device=device)
    starts, most, workspace = plan([60], 256, 28, 128, device)
    low, high = (
        dispatch.paged_attention_decode(
            q, *pages, torch.tensor([[page]], dtype=torch.int32, device=device), lens, starts, most, 0.1, workspace
        )
        for page in (0, 79_999)
    )
    assert torch.equal(low, high)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_fused_on_pages_past_2_31_elements(dtype, make, device):
    """Also what is written there."""
    pages = torch.zeros(2, 80_000, 64, 4, 128, dtype=dtype, device=device)
    pages[:, -1] = pages[:, 0] = make(2, 64, 4, 128, dtype=torch.float16).to(dtype)
    scales = torch.zeros(2, 80_000, 64, 4, device=device)
    scales[:, -1] = scales[:, 0] = make(2, 64, 4, dtype=torch.float32).abs()
    k_scales, v_scales = scales if dtype == torch.float8_e4m3fn else (None, None)
    qkv, cos_sin = make(1, 36 * 128, dtype=torch.float16), make(60, 128, dtype=torch.float32)
    lens = torch.tensor([60], dtype=torch.int32, device=device)
    starts, most, workspace = plan([60], 256, 28, 128, device)
    low, high = (
        dispatch.rope_paged_attention_decode(
            qkv,
            cos_sin,
            *pages,
            torch.tensor([[page]], dtype=torch.int32, device=device),
            *(lens, starts, most, 0.1, workspace, 28),
            k_scales=k_scales,
            v_scales=v_scales,
        )
        for page in (0, 79_999)
    )
    assert torch.equal(low, high)
    assert low.isfinite().all()
    assert torch.equal(pages[:, 0].float(), pages[:, -1].float())
    assert torch.equal(scales[:, 0], scales[:, -1])


@pytest.mark.gpu
def test_partial_sums_past_2_31_values(make, device, monkeypatch):
    """Those of a token behind a sequence whose splits are left to `paged_attention_prefill`, which costs next to nothing: there
    are few items, since each head of K and V has many of q, and one warp with one stage of loads passes an item over with hardly
    an access to shared memory, at which racecheck takes its time."""
    Nq, Nkv, D, page, config = 128, 8, 128, 64, kernel.DecodeConfig(32, 1, 1, 3)
    monkeypatch.setattr(kernel, "FAMILY", replace(kernel.FAMILY, rule=lambda facts, gpu: config))
    before = 2**31 // (Nq * D)
    k, v = (make(4, page, Nkv, D, dtype=torch.float32) for _ in range(2))
    q, tables = make(3, Nq, D, dtype=torch.float32), torch.zeros(2, before, dtype=torch.int32, device=device)
    tables[1, :3] = torch.tensor([3, 1, 2])

    def last_row(lens, firsts):
        starts, most, workspace = plan(lens, page, Nq, D, device)
        lens, firsts = (torch.tensor(x, dtype=torch.int32, device=device) for x in (lens, firsts))
        out = torch.full_like(q[: firsts[-1]], float("nan"))
        rest = (lens, starts, most, 0.1, workspace, out)
        pages = (k, v, tables[-len(lens) :])
        dispatch.paged_attention_decode(q[-len(out) :], *pages, *rest, query_starts=firsts, split=page)
        return out[-1]

    alone = last_row([170], [0, 1])
    assert alone.isfinite().all()
    assert torch.equal(last_row([page * before, 170], [0, 2, 3]), alone)
