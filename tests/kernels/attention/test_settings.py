"""Every size of heads and every setting of a layer, in all kernels of a step, against fp64.

Catches: channels past the end of a head that are loaded, stored or counted by the norm; rotation by halves of D instead of R;
channels that should not be rotated, or not be normalized; V that is not normalized, or is K after its norm or rotation; a scale
of q that is K's or another token's; a gate of another head or token, applied to one KV split or twice, or left out by one of the
kernels; raw heads that are not contiguous; a sink of another head, in another base, or added for each KV split."""

from typing import NamedTuple

import pytest
import torch
from support.decode import plan

from minirt.errors import InputError
from minirt.kernels import reference
from minirt.kernels.attention import decode_few, prefill_sm90, rope_write
from minirt.kernels.attention.checks import check_decode
from minirt.kernels.attention.dispatch import DECODE, attention, regime
from minirt.kernels.attention.limits import HEAD_DIMS
from minirt.kernels.attention.operands import AttentionInput, KVPages, Rope, Scores, Sequences

SPLIT, PAGE, EPS = 64, 16, 1e-3


class Setting(NamedTuple):
    """R: rotated channels. norm: "weights", "plain" (without weights) or None. v: "norm", "k" (made from k) or "k norm"."""

    D: int
    R: int
    Nq: int
    Nkv: int
    norm: str | None = None
    q_scales: bool = False
    gate: bool = False
    sinks: bool = False
    v: str = ""


SETTINGS = [
    Setting(64, 64, 3, 1, "plain", gate=True), Setting(64, 0, 2, 2, "weights", q_scales=True),
    Setting(80, 80, 2, 2, None, gate=True), Setting(96, 32, 6, 2, "plain", q_scales=True, gate=True),
    Setting(112, 112, 7, 1, "weights", gate=True), Setting(128, 0, 6, 2, None, q_scales=True),
    Setting(128, 64, 8, 1, "weights", q_scales=True, gate=True), Setting(192, 128, 3, 1, "weights"),
    Setting(192, 2, 3, 1, None, gate=True), Setting(256, 64, 8, 1, "weights", gate=True),
    Setting(256, 256, 2, 2, "plain", q_scales=True), Setting(512, 512, 8, 1, "weights", gate=True, v="k norm"),
    Setting(256, 256, 4, 2, "weights", v="norm"), Setting(64, 64, 4, 2, "weights", v="k norm"), Setting(128, 128, 2, 1, v="k"),
    Setting(64, 64, 8, 1, "plain", sinks=True),
    Setting(128, 32, 6, 2, "plain", gate=True, sinks=True),
]  # fmt: skip
STEPS = {  # cached tokens with the new ones, new tokens
    "decode": ([1, 63, 0, 64, 65, 257], [1, 1, 1, 1, 1, 1]),
    "empty": ([0, 0, 0], [1, 1, 1]),
    "few": ([66, 0, 5, 131], [1, 0, 5, 4]),
    "mixed": ([70, 0, 300, 9, 1, 65], [1, 0, 5, 9, 1, 2]),
}


def name(setting):
    on = [setting.norm or "", "scaled" if setting.q_scales else "", "gate" if setting.gate else "", "sinks" * setting.sinks]
    on += [setting.v.replace(" ", "-")]
    return "-".join([f"D{setting.D}-R{setting.R}-{setting.Nq}:{setting.Nkv}", *filter(None, on)])


def turned(setting, rope, positions, q, k):
    """q and k by the reference, in their dtype."""
    if setting.norm:
        q, k = reference.rms_norm(q, rope.q_norm, EPS), reference.rms_norm(k, rope.k_norm, EPS)
    rows = None if rope.cos_sin is None else rope.cos_sin[positions].to(torch.promote_types(q.dtype, torch.float32))
    scales = None if rope.q_scales is None else rope.q_scales[positions]
    return reference.rope(q, rows, scales), reference.rope(k, rows)


def wide(rope):
    """The settings in fp64."""
    return rope._replace(**{field: x.double() for field, x in rope._asdict().items() if isinstance(x, torch.Tensor)})


def problem(setting, step, dtype, fp8, make, cache, nan, device):
    """A step of raw heads, beside gates in the same rows, whose K and V are NaN in the pages."""
    D, R, Nq, Nkv, *_ = setting
    lens, new = STEPS[step]
    sinks = make(Nq, dtype=dtype, scale=2.0) if setting.sinks else None
    T, width = sum(new), (Nq + (1 if "k" in setting.v else 2) * Nkv) * D
    pages = cache(lens, Nkv, D, PAGE, dtype)
    positions = torch.cat([torch.arange(n - m, n, device=device).clamp_min(0) for n, m in zip(lens, new, strict=True)])
    row = torch.arange(len(lens), device=device).repeat_interleave(torch.tensor(new, device=device))
    slots = pages.tables[row, positions // PAGE].long() * PAGE + positions % PAGE
    exists = pages.lens[row] > 0
    slots = torch.where(exists, slots, -1)
    rows = nan(T, width + Nq * D + 8, dtype=dtype)
    rows[:, : -8 if setting.gate else width] = make(T, width + (Nq * D if setting.gate else 0), dtype=dtype, scale=2.0)
    rows[~exists] = torch.nan
    heads, gate = rows[:, :width], rows[:, width:-8].view(T, Nq, D) if setting.gate else None
    norms = (make(D, dtype=dtype), make(D, dtype=dtype)) if setting.norm == "weights" else (None, None)
    cos_sin = make(max(lens), R, dtype=torch.float32) if R else None
    q_scales = make(max(lens), dtype=torch.float32).abs() + 0.5 if setting.q_scales else None
    rope = Rope(cos_sin, *norms, EPS, setting.norm is not None, q_scales, "norm" in setting.v, "k" in setting.v)
    for x in (pages.k, pages.v):
        x.view(-1, Nkv, D)[slots[exists]] = torch.nan
    kv = KVPages(pages.k, pages.v)
    if fp8:
        kv = KVPages(*(part for x in kv[:2] for part in reference.quantize_fp8(x)))
        kv = KVPages(kv.k, kv[2], kv[1], kv.v_scale)
    starts, most, workspace = plan(lens, SPLIT, Nq, D, device)
    workspace.reserve(decode_few.workspace_floats(most, Nq, D))
    workspace.sums(0).fill_(torch.nan)
    firsts = [sum(new[:i]) for i in range(len(new) + 1)]
    query_starts = None if step not in ("few", "mixed") else torch.tensor(firsts, dtype=torch.int32, device=device)
    sequences = Sequences(pages.tables, pages.lens, starts, query_starts)
    scores, out = Scores((0.3 if setting.sinks else 1.3) * D**-0.5), nan(T, Nq, D, dtype=dtype)  # sinks: errors of scores count
    return AttentionInput(
        heads, kv, sequences, scores, out, rope, positions, slots, workspace, most, max_query_len=max(new), split=SPLIT,
        gate=gate, sinks=sinks,
    )  # fmt: skip


def dequantized(pages, scales, dtype):
    values = pages.to(dtype)
    return values if scales is None else values * scales.to(dtype).unsqueeze(-1)


def check(setting, step, a, agrees):
    """The new K and V in the pages against fp64, and the output against fp64 on what the pages hold."""
    lens, new = STEPS[step]
    D, _, Nq, Nkv, *_ = setting
    kept = a.slots >= 0
    raw = list(a.heads.reshape(len(a.heads), -1, D)[kept].split((Nq, Nkv, Nkv)[: 2 if "k" in setting.v else 3], 1))
    v = raw[1] if "k" in setting.v else raw[2]
    v, v64 = (reference.rms_norm(x, None, EPS) if "norm" in setting.v else x for x in (v, v.double()))
    narrow = turned(setting, a.rope, a.positions[kept], *raw[:2])
    exact = turned(setting, wide(a.rope), a.positions[kept], *(x.double() for x in raw[:2]))
    out = attention(a)
    stored = [dequantized(x, s, torch.float64).view(-1, Nkv, D) for x, s in zip(a.pages[:2], a.pages[2:], strict=True)]
    written = [x[a.slots[kept]] for x in stored]
    if a.pages.k_scale is None:
        agrees(written[0].to(a.heads.dtype), narrow[1], exact[1])
        agrees(written[1].to(a.heads.dtype), v, v64)
        assert "norm" in setting.v or torch.equal(written[1].to(a.heads.dtype), v)
    else:  # half a step of e4m3, and what rounding to the heads' dtype before it may add
        for x, truth in zip(written, (exact[1], v64), strict=True):
            top = truth.abs().amax(-1, keepdim=True)
            assert ((x - truth).abs() <= truth.abs() / 15 + top / 2**17 + top * torch.finfo(a.heads.dtype).eps * 4).all()
    q, q64 = (torch.full_like(a.out, torch.nan, dtype=x.dtype) for x in (narrow[0], exact[0]))
    q[kept], q64[kept] = narrow[0], exact[0]
    first = 0
    for b, (n, m) in enumerate(zip(lens, new, strict=True)):
        rows = slice(first, first + m)
        first += m
        if n == 0:
            assert not out[rows].any()
            continue
        t = torch.arange(n, device=out.device)
        place = a.sequences.block_tables[b][t // PAGE].long() * PAGE + t % PAGE
        k, v = (x[place].repeat_interleave(Nq // Nkv, 1) for x in stored)
        hidden = t > torch.arange(n - m, n, device=out.device)[:, None]

        def attend(q, k=k, v=v, hidden=hidden, rows=rows):
            scores = torch.einsum("qhd,khd->hqk", q[rows], k.to(q.dtype)) * a.scores.scale
            scores = scores.to(torch.promote_types(q.dtype, torch.float32)).masked_fill(hidden, -torch.inf)
            if a.sinks is not None:
                scores = torch.cat((scores, a.sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)), 2)
            weights = scores.softmax(-1)[:, :, : len(k)]
            result = torch.einsum("hqk,khd->qhd", weights.to(q.dtype), v.to(q.dtype))
            return result if a.gate is None else reference.gate_output(result, a.gate[rows].to(q.dtype))

        agrees(out[rows], attend(q), attend(q64))


@pytest.mark.parametrize("step", ["decode", "mixed"])
@pytest.mark.parametrize("setting", SETTINGS, ids=name)
def test_a_step(setting, step, dtype, make, cache, nan, agrees, device):
    check(setting, step, problem(setting, step, dtype, False, make, cache, nan, device), agrees)


@pytest.mark.parametrize("step", ["decode", "mixed"])
@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.gate or s.sinks], ids=name)
def test_a_step_on_fp8_pages(setting, step, make, cache, nan, agrees, device):
    check(setting, step, problem(setting, step, torch.float16, True, make, cache, nan, device), agrees)


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.gate or s.sinks], ids=name)
def test_a_step_of_few_tokens(setting, make, cache, nan, agrees, device):
    """Each size of heads once, every second one on FP8 pages: a size takes long in the interpreter."""
    fp8 = setting.D in (80, 112, 192)
    check(setting, "few", problem(setting, "few", torch.float16 if fp8 else torch.float32, fp8, make, cache, nan, device), agrees)


@pytest.mark.parametrize("step", ["decode", "few", "mixed"])
@pytest.mark.parametrize(("setting", "fp8"), [(SETTINGS[0], False), (SETTINGS[4], True), (SETTINGS[6], False)])
def test_an_invariant_step(setting, fp8, step, make, cache, nan, agrees, device):
    """Also catches a total that is not that of all tokens, and splits that are rescaled by another row's maximum."""
    a = problem(setting, step, torch.float16, fp8, make, cache, nan, device)
    a.workspace.invariant = True
    check(setting, step, a, agrees)


def test_padding_alone(dtype, make, cache, nan, device):
    """Catches a gate of NaN on the zeros of padding, and a launch that needs partial results where there can be none."""
    setting = SETTINGS[2]
    a = problem(setting, "empty", dtype, False, make, cache, nan, device)
    assert a.max_splits == 0
    assert not attention(a).any()


@pytest.mark.parametrize("D", HEAD_DIMS)
def test_every_size_of_heads_has_a_case(D):
    """Catches a size that is declared and never computed here, without and with a gate."""
    assert any(setting.D == D and setting.gate for setting in SETTINGS)


def test_wrong_settings_are_named(make, cache, nan, device):
    setting = Setting(96, 32, 6, 2, "weights", q_scales=True, gate=True)
    a = problem(setting, "decode", torch.float32, False, make, cache, nan, device)
    check_decode(a, 6)
    wrong = [
        (a._replace(gate=a.gate[:, :5]), "gate: wrong shape"), (a._replace(gate=a.gate.half()), "gate: wrong dtype"),
        (a._replace(gate=a.gate.transpose(1, 2).contiguous().transpose(1, 2)), "gate: not contiguous"),
        (a._replace(heads=a.heads.t().contiguous().t()), "qkv: not contiguous"),
        (a._replace(rope=a.rope._replace(q_scales=a.rope.q_scales[1:])), r"q_scales: wrong shape; expected \[257\]"),
        (a._replace(rope=a.rope._replace(cos_sin=make(257, 98, dtype=torch.float32))), "cos_sin: wrong number of rotated"),
        (a._replace(rope=a.rope._replace(cos_sin=make(257, 31, dtype=torch.float32))), "cos_sin: wrong number of rotated"),
        (a._replace(rope=a.rope._replace(cos_sin=make(257, 0, dtype=torch.float32))), "cos_sin: wrong number of rotated"),
    ]  # fmt: skip
    for one, message in wrong:
        with pytest.raises(InputError, match=message):
            check_decode(one, 6)
    check_decode(a._replace(rope=Rope(None)), 6)


def test_infinite_channels_that_are_not_rotated(make, device):
    """Catches a rotation by zero: infinity times a sine of zero is NaN."""
    heads = make(1, 3 * 64, dtype=torch.float32)
    heads[0, 40] = heads[0, 64 + 60] = torch.inf
    zero, pages = torch.zeros(1, dtype=torch.int64, device=device), make(1, 16, 1, 64, dtype=torch.float32)
    cos_sin = make(1, 32, dtype=torch.float32)
    q = rope_write.qk_norm_rope_kv_write(heads, cos_sin, zero, zero, pages, pages.clone(), 1, 1)
    assert torch.equal(q[0, 0, 32:], heads[0, 32:64])
    assert torch.equal(pages[0, 0, 0, 32:], heads[0, 96:128])


@pytest.mark.parametrize(("D", "gate", "sinks"), [(256, False, False), (256, True, False), (64, False, True), (512, True, True)])
@pytest.mark.skipif("not torch.cuda.is_available() and 'MINIRT_EMULATE' not in __import__('os').environ", reason="needs Hopper")
def test_prompts_on_hopper(D, gate, sinks, half_dtype, make, cache, nan, agrees, device):
    """Catches blocks of half as many tokens taken for whole ones, a gate in another layout than the sums or of another piece's
    channels, a sink of another head.

    Pages are smaller and larger than a block, and the last block is not full.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs Hopper")
    cases = ((8, 1, 128, 201, 70), (3, 3, 16, 65, 65), (14, 2, 64, 700, 513))
    for Nq, Nkv, page_size, total, new in cases if device.type == "cuda" else cases[:1]:
        pages, sink = cache([total], Nkv, D, page_size, half_dtype), make(Nq, dtype=half_dtype, scale=4.0) if sinks else None
        rows = make(new, 2 * Nq * D, dtype=half_dtype)
        q, g = rows[:, : Nq * D].reshape(new, Nq, D).contiguous(), rows[:, Nq * D :].view(new, Nq, D) if gate else None
        starts = torch.tensor([0, new], dtype=torch.int32, device=device)
        out = nan(new, Nq, D, dtype=half_dtype)
        sequences = Sequences(pages.tables, pages.lens, query_starts=starts)
        prefill_sm90.launch(AttentionInput(q, KVPages(pages.k, pages.v), sequences, Scores(0.08), out, gate=g, sinks=sink))
        expected = reference.paged_attention(q, pages.clean_k, pages.clean_v, pages.tables, [new], [total], 0.08, sinks=sink)
        k, v = (x[0].double().repeat_interleave(Nq // Nkv, 1) for x in (pages.keys, pages.values))
        hidden = torch.arange(total, device=device) > torch.arange(total - new, total, device=device)[:, None]
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * 0.08
        scores = scores.masked_fill(hidden, -torch.inf)
        if sink is not None:
            scores = torch.cat((scores, sink.double()[:, None, None].expand(-1, new, 1)), 2)
        truth = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[:, :, :total], v)
        if g is not None:
            expected, truth = reference.gate_output(expected, g), reference.gate_output(truth, g.double())
        agrees(out, expected, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("step", ["decode", "few", "mixed"])
@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.D in (128, 256)], ids=name)
def test_hopper_decodes_every_setting(setting, step, half_dtype, make, cache, nan, agrees, device):
    """Catches a setting that sends heads of 128 and 256 channels to the kernel for any GPU without need."""
    a = problem(setting, step, half_dtype, False, make, cache, nan, device)
    if step != "few" and torch.cuda.get_device_capability(device)[0] == 9:
        assert regime(DECODE, a.num_seqs, a).kernel == "decode_sm90"
    check(setting, step, a, agrees)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("step", ["decode", "mixed"])
@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.v and s.D <= 256], ids=name)
def test_hopper_makes_v(setting, step, make, cache, nan, agrees, device):
    """Catches V that is normalized in the pages and not in the sum, or the other way round, and sums of another head's K."""
    a = problem(setting, step, torch.float16, False, make, cache, nan, device)
    assert regime(DECODE, a.num_seqs, a).kernel == "decode_sm90"
    check(setting, step, a, agrees)
