"""The eager attention against fp64, on finite numbers and on those that PyTorch's function on a CPU loses.

Catches NaN or infinity in q or k that becomes a plausible number, an error that spreads to other rows or sequences, and rows that
are lost to a mask.
"""

import math

import pytest
import torch

from minirt.kernels import reference

PAGE = 16
NKV, GROUP, D = 2, 3, 32
# (new tokens, cached tokens with the new ones) of each sequence
STEPS = {
    "decode": [(1, 1), (1, 17), (1, 300)], "one": [(1, 41)], "prompt": [(7, 7)], "mixed": [(40, 40), (1, 33), (9, 90), (1, 5)],
}  # fmt: skip


def problem(step, dtype, seed):
    """q, pages and tables for `STEPS[step]`; each page belongs to one sequence, and its rest is NaN."""
    random = torch.Generator().manual_seed(seed)
    counts = [-(-total // PAGE) for _, total in STEPS[step]]
    order = torch.randperm(sum(counts), generator=random).tolist()
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    k, v = (torch.full((sum(counts), PAGE, NKV, D), math.nan, dtype=dtype) for _ in range(2))
    for row, ((_, total), count) in enumerate(zip(STEPS[step], counts, strict=True)):
        taken = [order.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(taken)
        for t in range(total):
            for pages in (k, v):
                pages[taken[t // PAGE], t % PAGE] = torch.randn(NKV, D, generator=random).to(dtype)
    q = torch.randn(sum(new for new, _ in STEPS[step]), NKV * GROUP, D, generator=random).to(dtype)
    return q, k, v, tables


def exact(q, k, v, tables, step, scale):
    """Row by row in fp64, each over the tokens that it sees; scores overflow as in fp32."""
    out, row = torch.empty(q.shape, dtype=torch.float64), 0
    for table, (new, total) in zip(tables.long(), STEPS[step], strict=True):
        keys, values = (x[table].flatten(0, 1).double().repeat_interleave(GROUP, 1) for x in (k, v))
        for seen in range(total - new + 1, total + 1):
            scores = torch.einsum("hd,thd->ht", q[row].double(), keys[:seen]).float().double() * scale
            out[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), values[:seen])
            row += 1
    return out


def attention(q, k, v, tables, step, scale):
    lens, totals = zip(*STEPS[step], strict=True)
    return reference.paged_attention(q, k, v, tables, lens, totals, scale)


def spoil(kind, q, k, v, tables, step):
    """Put NaN, infinities or large numbers into the last sequence, at its last token where only one is concerned."""
    (new, total), last_table = STEPS[step][-1], tables[-1]
    page, place = last_table[(total - 1) // PAGE].long(), (total - 1) % PAGE
    mine, pages = slice(q.shape[0] - new, None), last_table[: -(-total // PAGE)].long()
    if kind == "q NaN":
        q[mine] = math.nan
    elif kind == "one q NaN":
        q[-1, 4, 3] = math.nan
    elif kind == "q inf":
        q[mine, :, 5] = math.inf
    elif kind == "k NaN":
        k[page, place, 1, 7] = math.nan
    elif kind == "first k NaN":
        k[last_table[0].long(), 0, 0, 7] = math.nan
    elif kind == "k inf":
        k[pages, :, :, 5] = math.inf
    elif kind == "overflow":  # of the scores; in fp16 of q and k
        q[mine] *= 1e30
        k[pages] *= 1e30


KINDS = ["q NaN", "one q NaN", "q inf", "k NaN", "first k NaN", "k inf", "overflow"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", STEPS)
def test_not_finite(step, kind, dtype):
    q, k, v, tables = problem(step, dtype, seed=len(kind))
    before = attention(q, k, v, tables, step, 0.2)
    spoil(kind, q, k, v, tables, step)
    expected, out = exact(q, k, v, tables, step, 0.2), attention(q, k, v, tables, step, 0.2)
    assert expected.isnan().any()
    assert torch.equal(out.isnan(), expected.isnan())
    others = sum(new for new, _ in STEPS[step][:-1])
    assert torch.equal(out[:others], before[:others])  # other sequences keep their bits
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps, equal_nan=True)


@pytest.mark.parametrize("step", STEPS)
def test_the_exact_way_computes_attention(step, monkeypatch):
    """On finite numbers, also when it takes only some queries at a time."""
    q, k, v, tables = problem(step, torch.float32, seed=11)
    monkeypatch.setattr(reference, "_finite_scores", lambda q, k: False)
    whole = attention(q, k, v, tables, step, 0.2)
    torch.testing.assert_close(whole.double(), exact(q, k, v, tables, step, 0.2), rtol=0, atol=2e-6)
    monkeypatch.setattr(reference, "_EXACT_SCORES", 1000)
    torch.testing.assert_close(attention(q, k, v, tables, step, 0.2), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("width", "R"), [(64, 64), (80, 32), (96, 96), (256, 64), (112, 2), (64, None)])
@pytest.mark.parametrize("scaled", [False, True])
def test_rope_of_some_channels(width, R, scaled):
    """Catches rotation by halves of D instead of R, channels from R on that are rotated or dropped, a scale of another token.

    The truth multiplies complex numbers, pair by pair.
    """
    random = torch.Generator().manual_seed(4)
    x = torch.randn(5, 3, width, generator=random, dtype=torch.float64)
    angles = torch.rand(5, (R or 0) // 2, generator=random, dtype=torch.float64) * 7
    scales = torch.rand(5, generator=random, dtype=torch.float64) + 0.5 if scaled else None
    truth = x.clone()
    for t in range(5):
        for i in range((R or 0) // 2):
            turned = torch.complex(x[t, :, i], x[t, :, i + R // 2]) * torch.polar(torch.ones(()).double(), angles[t, i])
            truth[t, :, i], truth[t, :, i + R // 2] = turned.real, turned.imag
    if scaled:
        truth = torch.stack([row * scale for row, scale in zip(truth, scales, strict=True)])
    table = None if R is None else torch.cat((angles.cos(), angles.sin()), 1)
    torch.testing.assert_close(reference.rope(x, table, scales), truth, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norms_without_a_weight_and_after_a_layer(dtype):
    """Catches a weight that is taken for given, and a residual that is normalized or added before the weight."""
    random = torch.Generator().manual_seed(5)
    x, residual = (torch.randn(4, 97, generator=random).to(dtype) for _ in range(2))
    weight, eps = torch.randn(97, generator=random).to(dtype), 1e-3
    rms = (x.double().square().sum(-1, keepdim=True) / 97 + eps).sqrt()
    rounding = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    close = {"rtol": rounding, "atol": rounding}
    torch.testing.assert_close(reference.rms_norm(x, None, eps).double(), x.double() / rms, **close)
    expected = residual.double() + x.double() / rms * weight.double()
    torch.testing.assert_close(reference.norm_residual(x, weight, eps, residual).double(), expected, **close)


def test_logits_and_gates():
    """Catches a multiplier after the cap or left out, a cap of 0 that divides, and a gate by SiLU instead of the sigmoid."""
    x = torch.tensor([[-90.0, -1.0, 0.0, 0.5, 30.0, 200.0]], dtype=torch.float64)
    for multiplier, softcap in ((1.0, 0.0), (0.25, 0.0), (1.0, 30.0), (0.25, 30.0)):
        scaled = [multiplier * v for v in x[0].tolist()]
        expected = [softcap * math.tanh(v / softcap) if softcap else v for v in scaled]
        torch.testing.assert_close(reference.cap_logits(x, multiplier, softcap)[0], torch.tensor(expected).double())
    heads, gate = x.view(1, 2, 3), x.view(1, 3, 2).mT / 10
    expected = [v / (1 + math.exp(-g)) for v, g in zip(heads.flatten().tolist(), gate.flatten().tolist(), strict=True)]
    torch.testing.assert_close(reference.gate_output(heads, gate).flatten(), torch.tensor(expected).double())
