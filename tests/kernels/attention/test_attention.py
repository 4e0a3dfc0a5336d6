"""`attention`: all kernels of a layer's step. Catches: a sequence that no kernel computes or that two do, in a step with single
tokens, few new tokens on a long context and prompts; raw heads taken for queries; new K and V that attention does not see; a
kernel that is left without the window, or whose splits are not those of the window."""

import pytest
import torch
from support.decode import decode64, forget, plan

from minirt.errors import InputError
from minirt.kernels import reference
from minirt.kernels.attention import decode_few, dispatch
from minirt.kernels.attention.dispatch import attention
from minirt.kernels.attention.operands import AttentionInput, KVPages, Rope, Scores, Sequences

NQ, NKV, D, SPLIT, SCALE = 6, 2, 64, 64, 0.2


def step(lens, new, make, cache, nan, device, window=None):
    """The input of a step of fp32 raw heads, whose K and V are NaN in the pages, and its q, keys and values by the reference."""
    pages = cache(lens, NKV, D, 16, torch.float32)
    heads, cos_sin = make(sum(new), (NQ + 2 * NKV) * D, dtype=torch.float32), make(max(lens), D, dtype=torch.float32)
    norms = make(D, dtype=torch.float32), make(D, dtype=torch.float32)
    positions = torch.cat([torch.arange(n - m, n, device=device) for n, m in zip(lens, new, strict=True)])
    row = torch.arange(len(lens), device=device).repeat_interleave(torch.tensor(new, device=device))
    slots = pages.tables[row, positions // 16].long() * 16 + positions % 16
    q, k, v = heads.view(-1, NQ + 2 * NKV, D).split((NQ, NKV, NKV), 1)
    q, k = (reference.rope(reference.rms_norm(x, w, 1e-5), cos_sin[positions]) for x, w in zip((q, k), norms, strict=True))
    firsts = [sum(new[:i]) for i in range(len(new) + 1)]
    for b, (n, m) in enumerate(zip(lens, new, strict=True)):
        pages.keys[b][n - m :], pages.values[b][n - m :] = k[firsts[b] : firsts[b + 1]], v[firsts[b] : firsts[b + 1]]
    pages.k.view(-1, NKV, D)[slots] = pages.v.view(-1, NKV, D)[slots] = torch.nan
    tables = forget(pages, lens, new, window)
    starts, most, workspace = plan(lens, SPLIT, NQ, D, device, 0, window, new)
    workspace.reserve(decode_few.workspace_floats(most, NQ, D))
    workspace.sums(0).fill_(torch.nan)
    query_starts = None if set(new) == {1} else torch.tensor(firsts, dtype=torch.int32, device=device)
    a = AttentionInput(
        heads, KVPages(pages.k, pages.v), Sequences(tables, pages.lens, starts, query_starts), Scores(SCALE, window),
        nan(sum(new), NQ, D, dtype=torch.float32), Rope(cos_sin, *norms, 1e-5), positions, slots, workspace, most, split=SPLIT,
    )  # fmt: skip
    return a, q, pages, firsts


@pytest.mark.parametrize(
    ("lens", "new"), [([70, 300, 40, 1, 65], [1, 5, 40, 1, 65]), ([300], [5]), ([33], [33]), ([70, 1, 64, 129], [1, 1, 1, 1])],
    ids=["mixed", "chunk", "prompt", "single tokens"],
)  # fmt: skip
@pytest.mark.parametrize("window", [None, 1, 40, 150])
def test_each_new_token_sees_all_before_it(lens, new, window, make, cache, nan, agrees, device):
    a, q, pages, firsts = step(lens, new, make, cache, nan, device, window)
    out = attention(a)
    for b, (n, m) in enumerate(zip(lens, new, strict=True)):
        for i in {0, m // 2, m - 1}:
            seen = slice(0, n - m + i + 1)
            truth = decode64(q[firsts[b] + i], pages.keys[b][seen], pages.values[b][seen], SCALE, window)
            agrees(out[firsts[b] + i], truth.float(), truth)


def test_few_new_tokens_have_one_kernel(make, cache, nan, device, monkeypatch):
    """Catches drafts that are computed as prompts, or twice, and a kernel that combines where there is nothing to combine."""
    ran = []

    def record(name):
        function = getattr(dispatch, name)

        def recording(a, *rest):
            ran.append(rest[0][-1].kernel if name == "_by_splits" else name)
            return function(a, *rest)

        monkeypatch.setattr(dispatch, name, recording)

    for name in ("_by_splits", "_prefill", "combine"):
        record(name)
    a, *_ = step([60, 9, 64], [5, 1, 8], make, cache, nan, device)
    for bound, longest, expected in (
        (8, 64, ["decode_few"]), (8, 65, ["decode_few", "combine"]), (2, None, ["decode_few", "combine"]),
        (9, 64, ["decode", "combine", "_prefill"]), (None, 64, ["decode", "combine", "_prefill"]),
    ):  # fmt: skip
        ran.clear()
        attention(a._replace(max_query_len=bound, max_seq_len=longest))
        assert ran == expected, (bound, longest)


def test_what_is_missing_is_named(make, cache, nan, device):
    a, *_ = step([70, 40], [1, 40], make, cache, nan, device)
    with pytest.raises(InputError, match="positions, slots: missing"):
        attention(a._replace(slots=None))
    with pytest.raises(InputError, match="workspace: missing"):
        attention(a._replace(workspace=None))


@pytest.mark.parametrize(
    ("lens", "new", "few"), [([70, 300, 40, 1, 65], [1, 5, 40, 1, 65], None), ([300, 66], [5, 3], 8), ([70, 129], [1, 1], None)],
    ids=["mixed", "few", "single tokens"],
)  # fmt: skip
def test_a_window_past_all_tokens_changes_no_bit(lens, new, few, make, cache, nan, device):
    """Catches loops or parts that begin elsewhere, and a token that is hidden, because there is a window."""
    a, *_ = step(lens, new, make, cache, nan, device)
    a = a._replace(max_query_len=few)
    expected = attention(a).clone()
    for window in (max(lens), 2**31 - 1):
        assert torch.equal(attention(a._replace(scores=Scores(SCALE, window))), expected)
