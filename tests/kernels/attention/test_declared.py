"""What the tables of attention and of RoPE and KV write declare of their kernels is true.

Catches a declaration that was copied from another kernel, or that a change of the kernel has left behind.
"""

from dataclasses import replace

import pytest
import torch
from support.decode import decode64, plan

from minirt.errors import InputError
from minirt.kernels.attention import decode_few, dispatch, rope_write
from minirt.kernels.attention.checks import check_attention, check_decode
from minirt.kernels.attention.dispatch import DECODE, FEW, PARTIAL, PREFILL
from minirt.kernels.attention.limits import FORMATS
from minirt.kernels.attention.operands import AttentionInput, KVPages, Rope, Scores, Sequences

TABLES = {"decode": DECODE, "few": FEW, "prefill": PREFILL, "partial": PARTIAL}
EVERY = [regime for table in TABLES.values() for regime in table]
NAMES = [f"{regime.kernel} {regime.first}" for regime in EVERY]


def operands(stored="fp16", raw=False, D=128, group=4, Nkv=2, page_size=16, split=64, shift=0, window=None):
    """A step of one sequence and one token. `shift`: values by which each tensor misses an aligned address."""
    dtype = torch.float32 if "fp32" in stored else torch.bfloat16

    def empty(*size, dtype=dtype):
        count = torch.Size(size).numel()
        return torch.empty(count + 16, dtype=dtype)[shift : shift + count].view(size)

    pages = [empty(1, page_size, Nkv, D, dtype=torch.float8_e4m3fn if "fp8" in stored else dtype) for _ in range(2)]
    if "fp8" in stored:
        pages += [empty(1, page_size, Nkv, dtype=torch.float32) for _ in range(2)]
    heads = empty(1, (group + 2) * Nkv * D) if raw else empty(1, group * Nkv, D)
    numbers = torch.zeros(2, dtype=torch.int32)
    return AttentionInput(
        heads, KVPages(*pages), Sequences(numbers[:1].view(1, 1), numbers[:1], numbers), Scores(1.0, window),
        empty(1, group * Nkv, D), Rope(torch.empty(8, D)) if raw else None, split=split,
    )  # fmt: skip


def least(limits, **changed):
    """Operands within the limits."""
    given = {"stored": limits.formats[0], "raw": bool(limits.raw), "D": limits.head_dims[0]}
    return operands(**given | {"group": 4 if limits.tile_queries is None else 1} | changed)


@pytest.mark.parametrize("regime", EVERY, ids=NAMES)
def test_a_kernel_accepts_what_is_within_its_limits_and_nothing_else(regime):
    limits = regime.limits
    for stored in FORMATS:
        assert regime.accepts(least(limits, stored=stored)) == (stored in limits.formats)
    for raw in (False, True):
        assert regime.accepts(least(limits, raw=raw)) == (limits.raw in (None, raw))
    for D in (32, 64, 128, 256):
        assert regime.accepts(least(limits, D=D)) == (D in limits.head_dims)
    for split in (64, 128, 256, 512, 1024, 2048):
        assert regime.accepts(least(limits, split=split)) == (limits.split is None or split <= limits.split)
    for shift in (0, 1, 4):
        assert regime.accepts(least(limits, shift=shift)) == (limits.alignment == 1 or shift == 0)
    assert regime.accepts(least(limits, window=5))


def test_any_operand_may_be_misaligned():
    """Each one counts: heads, output, pages, scales."""
    kernels = {regime.kernel: regime for regime in EVERY}
    for name in ("decode_sm90", "decode_fp8_sm90", "prefill_sm90"):
        limits = kernels[name].limits
        a, odd = least(limits), least(limits, shift=1)
        pages = [a.pages._replace(**{field: x}) for field, x in odd.pages._asdict().items() if x is not None]
        assert kernels[name].accepts(a)
        for one in (a._replace(heads=odd.heads), a._replace(out=odd.out), *(a._replace(pages=one) for one in pages)):
            assert not kernels[name].accepts(one)


@pytest.mark.parametrize("name", ["decode_sm90", "decode_fp8_sm90"])
def test_rows_of_raw_heads_may_lie_apart(name):
    """Catches a kernel that loads 16 bytes at once from rows whose distance is no multiple of 16 bytes."""
    (regime,) = (regime for regime in DECODE if regime.kernel == name)
    a = least(regime.limits)
    width = a.heads.shape[1]
    for extra in (0, 8, 4, 1):
        heads = torch.empty(2, width + extra, dtype=a.heads.dtype)[:1, :width]
        assert regime.accepts(a._replace(heads=heads)) == (extra % 8 == 0)


def test_the_queries_of_a_tile():
    """Two heads of 64 channels share a tile, one of 128 has it for itself, and so has a single head of 64."""
    (fp8,) = (regime for regime in DECODE if regime.limits.tile_queries)
    most = fp8.limits.tile_queries
    for D, Nkv, group in ((128, 2, most), (64, 2, most // 2), (64, 1, most)):
        assert fp8.accepts(least(fp8.limits, D=D, Nkv=Nkv, group=group))
        assert not fp8.accepts(least(fp8.limits, D=D, Nkv=Nkv, group=group + 1))


def test_what_no_kernel_takes_is_refused_before():
    """The last regime of a table takes the rest, so the checks of operands refuse what is past its limits."""
    for table in (DECODE, FEW, PREFILL):
        limits = table[-1].limits
        assert limits == replace(PARTIAL[0].limits, raw=limits.raw, split=limits.split)
        for size in (limits.page_size, 8 * limits.page_size):
            check_attention(least(limits, page_size=size, group=limits.group))
        least_page, most = limits.page_size, limits.group
        for one in ({"page_size": least_page // 2}, {"page_size": least_page + 8}, {"group": most + 1}, {"D": 32}):
            with pytest.raises(InputError, match="unsupported"):
                check_attention(least(limits, **one))
    for split in (64, DECODE[-1].limits.split):
        check_decode(operands(split=split))
    for split in (32, 96, 2 * DECODE[-1].limits.split):
        with pytest.raises(InputError, match="split"):
            check_decode(operands(split=split))


# In the interpreter: one sequence, beside others.

LEN, SCALE = 200, 0.2


def case(stored, D, group, page_size, make, cache, cache8, seqs):
    """q of two new tokens and pages of LEN tokens, for the sequence of which each of `seqs` is a copy."""
    dtype = torch.float32 if "fp32" in stored else torch.float16
    lens = [LEN] * seqs
    pages = cache8(lens, 1, D, page_size) if "fp8" in stored else cache(lens, 1, D, page_size, dtype)
    kv = KVPages(*pages.pages.values()) if "fp8" in stored else KVPages(pages.k, pages.v)
    tables = pages.tables[:1].expand(seqs, -1).contiguous()  # all read the first sequence's pages
    return make(1, group, D, dtype=dtype), kv, tables, pages


def steps(table, kernel, q, kv, tables, new, split, device, nan):
    """The rows of the first of `len(new)` equal sequences with so many new tokens each, by one kernel of a table."""
    B, (_, Nq, D) = len(new), q.shape
    lens = [LEN] * B
    starts, most, workspace = plan(lens, split, Nq, D, device)
    workspace.reserve(decode_few.workspace_floats(most, Nq, D))
    firsts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32, device=device)
    length = torch.tensor(lens, dtype=torch.int32, device=device)
    T = sum(new)
    sequences = Sequences(tables[:B], length, starts, None if table is DECODE else firsts)
    out = nan(T, Nq, D, dtype=q.dtype)
    a = AttentionInput(
        q.expand(T, -1, -1).contiguous(), kv, sequences, Scores(SCALE), out, workspace=workspace, max_splits=most, split=split,
        partial=split if table is PARTIAL else 0,
    )  # fmt: skip
    kernel.launch(a)
    if table is DECODE or table is FEW:
        dispatch.combine(a, decode_few.QUERIES if table is FEW else 1)
    return out[: new[0]]


GENERIC = [(name, stored) for name in TABLES for stored in FORMATS]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "stored"), GENERIC)
@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
def test_the_largest_and_the_smallest_within_the_limits_are_computed(name, stored, make, cache, cache8, nan, device):
    """A kernel for fewer queries of a KV head, other pages or shorter splits than it declares would be wrong here."""
    table = TABLES[name]
    limits = table[-1].limits
    new = {"decode": [1, 1], "few": [2, 3], "prefill": [1, 3], "partial": [2, 3]}[name]
    for D, group, split in ((limits.head_dims[0], 1, 64), (limits.head_dims[-1], limits.group, 64), (64, 3, limits.split or 64)):
        q, kv, tables, pages = case(stored, D, group, limits.page_size, make, cache, cache8, 2)
        out = steps(table, table[-1], q, kv, tables, new, split, device, nan)
        seen = slice(0, LEN - new[0] + 1)
        truth = decode64(q[0], pages.keys[0][seen], pages.values[0][seen], SCALE)
        assert ((out[0] - truth).norm() / truth.norm()).item() < 5e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "stored"), GENERIC)
@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
def test_whether_the_order_depends_on_the_step(name, stored, make, cache, cache8, nan, device):
    """Bit by bit: the same sequence in steps of more sequences, and of more new tokens. Where no dependence is declared, the row
    of the last token stays; where one is declared, some step shows it."""
    table = TABLES[name]
    regime = table[-1]
    few = {"decode": [1], "few": [2], "prefill": [1], "partial": [2]}[name]
    others = [few * 3, few * 34] if name == "decode" else [[*few, 5, 3], few * 3, [few[0] + 5], [few[0] + 20]]
    others = [[2, 8, 3], [2] * 3, [7]] if name == "few" else others
    q, kv, tables, _ = case(stored, 64, 3, 16, make, cache, cache8, 34)
    expected = steps(table, regime, q, kv, tables, few, 64, device, nan)[-1]
    assert expected.isfinite().all()
    same = [torch.equal(steps(table, regime, q, kv, tables, new, 64, device, nan)[-1], expected) for new in others]
    assert all(same) != regime.sums.by_tokens, same


@pytest.mark.exhaustive
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
def test_rope_and_write_within_their_limits(stored, make, device):
    """Each format, sizes of heads, pages of one token, more query heads than attention takes: bit by bit the same q, K and V of
    the first token in steps of several sizes of a regime."""
    dtype = torch.float32 if "fp32" in stored else torch.float16
    for regime in rope_write.REGIMES[:2]:
        limits = regime.limits
        assert (limits.raw, limits.formats, regime.sums.by_tokens) == (True, FORMATS, False)
        for D in limits.head_dims[::3]:  # 64, one that is padded, 256
            heads, norm = make(regime.first + 5, 20 * D, dtype=dtype), make(D, dtype=dtype)
            cos_sin, results = make(1, D, dtype=torch.float32), []
            for T in (regime.first, regime.first + 5):
                kept = torch.float8_e4m3fn if "fp8" in stored else dtype
                k, v = (torch.zeros(T, limits.page_size, 1, D, dtype=kept, device=device) for _ in range(2))
                scales = [torch.zeros(T, limits.page_size, 1, device=device) if "fp8" in stored else None for _ in range(2)]
                slots, zeros = torch.arange(T, device=device), torch.zeros(T, dtype=torch.int64, device=device)
                q = rope_write.qk_norm_rope_kv_write(
                    heads[:T], cos_sin, zeros, slots, k, v, 18, 1, norm, norm, k_scales=scales[0], v_scales=scales[1]
                )
                assert q.isfinite().all()
                results.append([x[0].float() for x in (q, k, v, *scales) if x is not None])
            assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
        wrong = torch.zeros(1, 1, 1, 32, dtype=dtype)
        with pytest.raises(InputError, match="unsupported head size"):
            rope_write.qk_norm_rope_kv_write(torch.zeros(1, 96, dtype=dtype), cos_sin, slots[:1], slots[:1], wrong, wrong, 1, 1)
