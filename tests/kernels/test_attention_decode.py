"""Catches: splits weighted or ordered wrongly, a sequence that ends on a split's or a page's edge, padding rows that
read or write, the new token missing, doubled or in the wrong slot, a result that depends on the rest of the batch."""

import pytest
import torch

from minirt.errors import InputError
from minirt.kernels import attention_decode as kernel
from minirt.kernels import kv_write, reference
from minirt.kernels.common import Workspace

LARGE = [
    {"Nq": 28, "Nkv": 4, "D": 128, "page_size": 64, "seq_lens": (128,), "split": 256},
    {"Nq": 28, "Nkv": 4, "D": 128, "page_size": 64, "seq_lens": (8001,), "split": 256},
    {"Nq": 28, "Nkv": 4, "D": 128, "page_size": 64, "seq_lens": tuple(range(0, 6400, 100)), "split": 512},
    {"Nq": 32, "Nkv": 8, "D": 64, "page_size": 16, "seq_lens": (131072, 1, 5000), "split": 256},
]


def decode64(q, k, v, scale):
    """One sequence: q [Nq, D], k, v [total, Nkv, D]."""
    k, v = (x.double().repeat_interleave(q.shape[0] // x.shape[1], 1) for x in (k, v))
    return torch.einsum("hk,khd->hd", (torch.einsum("hd,khd->hk", q.double(), k) * scale).softmax(-1), v)


def check(case, dtype, make, cache, nan, agrees, device):
    Nq, Nkv, D = case["Nq"], case["Nkv"], case["D"]
    lens = list(case["seq_lens"])
    pages = cache(lens, Nkv, D, case["page_size"], dtype)
    q, scale = make(len(lens), Nq, D, dtype=dtype), 1.3 * D**-0.5
    workspace = Workspace(device, num_floats=kernel.workspace_floats(len(lens), Nq, D, max(lens) + 70, case["split"]))
    out = kernel.paged_attention_decode(
        q, pages.k, pages.v, pages.tables, pages.lens, max(lens) + 70, scale, workspace, nan(*q.shape, dtype=dtype),
        split=case["split"],
    )  # fmt: skip
    for i, n in enumerate(lens):
        if n == 0:
            assert not out[i].any()
            continue
        table = pages.tables[i : i + 1]
        expected = reference.paged_attention(q[i : i + 1], pages.clean_k, pages.clean_v, table, [1], [n], scale)
        agrees(out[i], expected[0], decode64(q[i], pages.keys[i], pages.values[i], scale))


def check_fused(case, normalize, dtype, make, cache, nan, agrees, device):
    """Rotation and write against the kernel that does only these, which has a test of its own."""
    Nq, Nkv, D, page_size = case["Nq"], case["Nkv"], case["D"], case["page_size"]
    lens, B = list(case["seq_lens"]), len(case["seq_lens"])
    pages = cache(lens, Nkv, D, page_size, dtype)
    qkv, cos_sin = make(B, (Nq + 2 * Nkv) * D, dtype=dtype), make(max(lens), D, dtype=torch.float32)
    q_norm, k_norm = (make(D, dtype=dtype), make(D, dtype=dtype)) if normalize else (None, None)
    positions = (pages.lens.long() - 1).clamp_min(0)
    where = pages.tables.gather(1, positions.unsqueeze(1) // page_size).squeeze(1) * page_size + positions % page_size
    slots = where.where(pages.lens > 0, -1)
    k, v, scale = pages.k.clone(), pages.v.clone(), 1.3 * D**-0.5
    q = kv_write.qk_norm_rope_kv_write(qkv, cos_sin, positions, slots, k, v, Nq, Nkv, q_norm, k_norm, 1e-5)
    workspace = Workspace(device, num_floats=kernel.workspace_floats(B, Nq, D, max(lens), case["split"]))
    rest = (pages.tables, pages.lens, max(lens), scale, workspace)
    new = slots[slots >= 0]
    pages.k.view(-1, Nkv, D)[new] = float("nan")
    pages.v.view(-1, Nkv, D)[new] = float("nan")
    out = kernel.rope_paged_attention_decode(
        qkv, cos_sin, pages.k, pages.v, *rest, Nq, q_norm, k_norm, 1e-5, nan(B, Nq, D, dtype=dtype), split=case["split"]
    )
    eps = torch.finfo(dtype).eps
    # The compiler may fuse products and sums otherwise there.
    torch.testing.assert_close(pages.k, k, rtol=eps, atol=max(eps, 1e-5), equal_nan=True)
    assert torch.equal(pages.v.nan_to_num(9), v.nan_to_num(9))
    for i, n in enumerate(lens):
        if n == 0:
            assert not out[i].any()
            continue
        table = pages.tables[i : i + 1]
        expected = reference.paged_attention(q[i : i + 1], k.nan_to_num(0), v.nan_to_num(0), table, [1], [n], scale)
        keys, values = (x[table[0].long()].flatten(0, 1)[:n] for x in (k, v))
        agrees(out[i], expected[0], decode64(q[i], keys, values, scale))


@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_decode(case, dtype, make, cache, nan, agrees, device):
    check(case, dtype, make, cache, nan, agrees, device)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_fused_with_rope_and_write(case, normalize, dtype, make, cache, nan, agrees, device):
    check_fused(case, normalize, dtype, make, cache, nan, agrees, device)


def test_a_sequence_does_not_feel_its_batch(make, cache, device):
    """The same bits alone, and beside a longer sequence that widens the grid."""
    pages = cache([300, 900], 1, 64, 16, torch.float32)
    q, workspace = make(2, 3, 64, dtype=torch.float32), Workspace(device)
    both = kernel.paged_attention_decode(q, pages.k, pages.v, pages.tables, pages.lens, 900, 0.2, workspace, split=64)
    alone = kernel.paged_attention_decode(
        q[:1], pages.k, pages.v, pages.tables[:1], pages.lens[:1], 300, 0.2, workspace, split=64
    )
    assert torch.equal(both[:1], alone)


def test_the_split_depends_on_the_cache_only():
    assert [kernel.split_size(n) for n in (1, 16384, 16385, 32768, 131072)] == [256, 256, 512, 512, 2048]


def test_wrong_arguments_are_named(make, cache, device):
    pages, workspace = cache([200], 1, 64, 16, torch.float32), Workspace(device, num_floats=100)
    q = make(1, 2, 64, dtype=torch.float32)
    rest = (pages.k, pages.v, pages.tables, pages.lens, 200, 1.0, workspace)
    with pytest.raises(InputError, match=r"num_floats: too small; expected at least 528; found 100"):
        kernel.paged_attention_decode(q, *rest, split=64)
    with pytest.raises(InputError, match="split: not a power of two from 64; found 96"):
        kernel.paged_attention_decode(q, *rest, split=96)
    with pytest.raises(InputError, match="seq_lens: wrong shape"):
        kernel.paged_attention_decode(q.repeat(2, 1, 1), *rest)
    with pytest.raises(InputError, match="qkv: wrong shape"):
        kernel.rope_paged_attention_decode(
            make(1, 64, dtype=torch.float32), make(200, 64, dtype=torch.float32), *rest, 2
        )
    assert kernel.paged_attention_decode(q[:0], *rest[:2], pages.tables[:0], pages.lens[:0], *rest[4:]).shape == (
        0,
        2,
        64,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case, half_dtype, make, cache, nan, agrees, device):
    check(case, half_dtype, make, cache, nan, agrees, device)
    check_fused(case, True, half_dtype, make, cache, nan, agrees, device)


@pytest.mark.gpu
def test_same_bits_every_time_also_with_pdl(make, cache, device):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("PDL needs sm_90")
    pages, workspace = cache([3000, 17], 4, 128, 64, torch.bfloat16), Workspace(device)
    qkv, cos_sin = make(2, 36 * 128, dtype=torch.bfloat16), make(3000, 128, dtype=torch.float32)

    def run(pdl):
        rest = (pages.tables, pages.lens, 4000, 0.1, workspace, 28)
        return kernel.rope_paged_attention_decode(qkv, cos_sin, pages.k, pages.v, *rest, pdl=pdl)

    expected = run(False)
    assert all(torch.equal(run(pdl), expected) for pdl in [False, True] * 20)
