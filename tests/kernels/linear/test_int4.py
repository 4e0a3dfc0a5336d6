"""Catches: nibbles in a wrong order, a zero point or scale of a neighbouring group or row, gate and up swapped or with each
other's scales, a part of K added twice or dropped, columns past K, tails of N and T, counters left non-zero, the residual read
after it was overwritten, weights rounded where sums are scaled."""

import pytest
import torch
from support.linear import product

from minirt.errors import InputError
from minirt.kernels import reference
from minirt.kernels.launch import Gpu, Workspace, capability
from minirt.kernels.linear import dispatch, gemm_int4
from minirt.kernels.linear.gemm_int4 import Int4Config
from minirt.kernels.linear.gemv import GemvConfig
from minirt.kernels.linear.gemv_int4 import gemv_int4
from minirt.kernels.linear.product import Norm, ProductFacts

EPS = 1e-6
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
# (T, N, K, group, activation, configuration): ragged N and K, groups that K does not fill, more parts of K than there are steps.
CASES = [
    (1, 33, 97, 128, None, Int4Config(16, 16)), (3, 40, 577, 128, None, Int4Config(32, 16, split=3)),
    (17, 24, 320, 64, None, Int4Config(16, 16, split=2)), (5, 20, 336, 32, None, Int4Config(16, 16, split=9)),
    (5, 40, 288, 32, None, Int4Config(16, 16, exact=False)), (20, 24, 256, 128, "silu", Int4Config(16, 32)),
    (2, 17, 200, 64, "gelu_tanh", Int4Config(16, 16, exact=False)),
    (35, 17, 160, 64, None, Int4Config(16, 16, exact=False, split=2)), (17, 24, 320, "mx", None, Int4Config(16, 16, split=2)),
    (5, 17, 97, "mx", "silu", Int4Config(16, 16)), (5, 40, 288, "mx", None, Int4Config(16, 16, exact=False)),
    (5, 22, 336, (32, torch.bfloat16), None, Int4Config(16, 16, split=2)),
    (3, 20, 200, (64, torch.float16), "silu", Int4Config(16, 16)),
    (5, 40, 288, (32, torch.bfloat16), None, Int4Config(16, 16, exact=False)),
]  # fmt: skip


def four_bits(N, K, group, device, seed=3):
    """Random words and scale words, and the fp64 weights that they stand for. Scales differ a lot between groups.

    group: columns; with a dtype, of symmetric weights whose scale words have it; "mx": MXFP4.
    """
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (N, K), generator=generator)
    if group == "mx":
        exponents = torch.randint(117, 125, (N, -(-K // 32)), generator=generator)
        exact = E2M1[codes] * 2.0 ** (exponents[:, torch.arange(K) // 32] - 127).double()
        words, scales = reference.pack_int4(codes), reference.pack_mxfp4_scale(exponents.to(torch.uint8))
        return words.to(device), scales.to(device), exact.to(device)
    group, symmetric = group if isinstance(group, tuple) else (group, None)
    groups = -(-K // group)
    powers = torch.randint(-4, 4, (N, groups), generator=generator)
    scale = (0.01 * 2.0**powers * torch.rand(N, groups, generator=generator)).to(symmetric or torch.float16)
    zeros = torch.randint(0, 16, (N, groups), generator=generator, dtype=torch.int32)
    if symmetric is not None:
        scale, zeros = scale * (1 - 2 * (powers % 2)), torch.full_like(zeros, 8)  # of either sign, as AutoRound writes them
    at = torch.arange(K) // group
    exact = (codes - zeros[:, at]).double() * scale[:, at].double()
    words = reference.pack_int4(codes)
    scales = reference.pack_int4_scale(scale, zeros) if symmetric is None else scale.T.contiguous()
    return words.to(device), scales.to(device), exact.to(device)


def expected(x, words, scale, exact, bias, residual, activation):
    """By PyTorch in x's dtype, and in fp64."""
    out, truth = reference.linear(x, words, bias, scale), x.double() @ exact.T + bias.double()
    if activation is not None:
        out, truth = reference.gated(out, activation), reference.gated(truth, activation)
    return (out, truth) if residual is None else (out + residual, truth + residual.double())


def check(T, N, K, group, activation, config, dtype, make, nan, agrees, device):
    rows = N if activation is None else 2 * N
    words, scale, exact = four_bits(rows, K, group, device)
    x, bias = make(T, K, dtype=dtype), make(rows, dtype=dtype)
    residual, workspace, out = make(T, N, dtype=dtype), Workspace(device), nan(T, N, dtype=dtype)
    made = product(x, words, out, bias, residual, activation, scale, workspace=workspace)
    right = expected(x, words, scale, exact, bias, residual, activation)
    gemm_int4.gemm_int4(made, config)
    agrees(out, *right)
    assert not workspace.counters(1).any()
    again = nan(T, N, dtype=dtype)
    gemm_int4.gemm_int4(made._replace(out=again), config)
    assert torch.equal(again, out)
    gemm_int4.gemm_int4(made._replace(out=residual), config)  # in place
    assert torch.equal(residual, out)


def test_packing_and_what_it_stands_for(device):
    """Each nibble by hand: word 32c + s, from the lowest bits: the columns 128c + s, + 32, + 64, + 96."""
    N, K = 3, 300
    words, scale, exact = four_bits(N, K, 64, device)
    assert words.shape == (N, 96)
    assert scale.shape == (5, N)
    for n, k in ((0, 0), (1, 33), (2, 127), (0, 128), (2, 299), (1, 255)):
        c, j, s = k // 128, k % 128 // 32, k % 32
        code = (int(words[n, 32 * c + s]) >> 4 * j) & 15
        word = scale[k // 64, n : n + 1]
        value = (code - int(word & 15)) * (word & -16).view(torch.float32).double().item()
        assert value == exact[n, k].item()
    assert torch.equal(reference.dequantize_int4(words, scale, K, torch.float64), exact)
    assert torch.equal(gemm_int4.unpack_weight(words, scale, K, torch.float32), exact.float())
    for dtype in (torch.float16, torch.float32):
        assert torch.equal(gemm_int4.unpack_weight(words, scale, K, dtype), reference.dequantize_int4(words, scale, K, dtype))


def test_every_code_and_scale_of_mxfp4(device):
    """All 16 codes at all 255 scales, by a table and powers of two in fp64. Catches a denormal scale (byte 0) or result that is
    flushed, a sign lost in a zero, a number that is finite though the format's exceeds bf16, bytes of a word in another order."""
    codes, exponents = torch.arange(16).repeat(255, 8), torch.arange(255)[:, None].expand(-1, 4).clone()
    exponents[:, 1:] = exponents[:, 1:].flip(0)
    exact = E2M1[codes] * 2.0 ** (exponents.repeat_interleave(32, 1) - 127).double()
    words, scales = reference.pack_int4(codes).to(device), reference.pack_mxfp4_scale(exponents.to(torch.uint8)).to(device)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        right = exact.to(dtype)
        got = [reference.dequantize_mxfp4(words, scales, 128, dtype).cpu()]
        if dtype in (torch.float32, torch.float16) or (dtype == torch.bfloat16 and device.type == "cuda"):
            got.append(gemm_int4.unpack_weight(words, scales, 128, dtype).cpu())
        for values in got:
            assert torch.equal(values, right)
            assert torch.equal(values.signbit(), right.signbit())
    assert exact.to(torch.bfloat16).isinf().sum() == 12 * 8  # 4 and 6 at 253, 2 and more at 254


def test_quantization_to_mxfp4_rounds_to_the_nearest_level():
    """Catches ties to odd codes, a scale that is twice or half the better one, an outlier that is not clamped, ragged groups."""
    weight = torch.randn(60, 100, generator=torch.Generator().manual_seed(2))
    weight[0], weight[1, :32], weight[2, 5], weight[3, 0] = 0.0, 0.75, 40.0, -7.9
    weight[4, :32] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4)  # all ties at scale 1
    codes, exponents = reference.quantize_mxfp4(weight)
    back = E2M1[codes.long()] * 2.0 ** (exponents.repeat_interleave(32, 1)[:, :100].double() - 127)
    for shift in (-1, 0, 1):
        power = 2.0 ** (exponents.repeat_interleave(32, 1)[:, :100].double() - 127 + shift)
        nearest = E2M1[(weight.double()[..., None] / power[..., None] - E2M1).abs().argmin(-1)] * power
        error, other = ((x - weight).square() for x in (back, nearest))
        for first in range(0, 100, 32):
            ours, theirs = (e[:, first : first + 32].sum(1) for e in (error, other))
            assert (ours <= theirs * (1 + 1e-9) + 1e-12).all()
    assert back[4, :8].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert torch.equal(back, reference.dequantize_mxfp4(*reference.quantize_weight(weight, "mxfp4"), 100, torch.float64))
    again = reference.dequantize_mxfp4(*reference.quantize_weight(back.float(), "mxfp4"), 100, torch.float64)
    assert torch.equal(again, back)  # what is in the format stays


@pytest.mark.parametrize("case", CASES, ids=str)
def test_configurations(case, dtype, make, nan, agrees, device):
    check(*case, dtype, make, nan, agrees, device)


ONE_TOKEN = [  # N, K, group, activation, configuration
    (5, 97, 128, None, GemvConfig(2, 1, 2)),  # columns in pairs that no word fills: single loads
    (9, 1096, 64, None, GemvConfig(4, 1, 1)),
    (3, 1096, 128, "silu", GemvConfig(2, 1, 2)),
    (2, 1100, 32, "gelu", GemvConfig(1, 2, 3)),
    (3, 1100, "mx", "silu", GemvConfig(2, 2, 1)),
    (9, 1096, (32, torch.bfloat16), None, GemvConfig(4, 1, 1)),
]


@pytest.mark.parametrize("case", ONE_TOKEN, ids=str)
def test_one_token(case, dtype, make, nan, agrees, device):
    """With the norm in the product or before it; each row without feeling its neighbours."""
    N, K, group, activation, config = case
    rows = N if activation is None else 2 * N
    words, scale, exact = four_bits(rows, K, group, device)
    x, norm, bias = make(1, K, dtype=dtype, scale=3.0), make(K, dtype=dtype), make(rows, dtype=dtype)
    residual, out = make(1, N, dtype=dtype), nan(1, N, dtype=dtype)
    made = product(x, words, out, bias, residual, activation, scale)
    gemv_int4(made, config)
    agrees(out, *expected(x, words, scale, exact, bias, residual, activation))
    gemv_int4(made._replace(norm=Norm(norm, EPS)), config)
    wide = x.double()
    h = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * norm.double()
    approximate, _ = expected(reference.rms_norm(x, norm, EPS), words, scale, exact, bias, residual, activation)
    truth = h @ exact.T + bias.double()
    truth = (truth if activation is None else reference.gated(truth, activation)) + residual.double()
    agrees(out, approximate, truth)
    if activation is None:
        alone = nan(1, 1, dtype=dtype)
        last = product(x, words[-1:].contiguous(), alone, bias[-1:], residual[:, -1:], None, scale[:, -1:].contiguous())
        gemv_int4(last._replace(norm=Norm(norm, EPS)), config)
        assert torch.equal(alone, out[:, -1:])


@pytest.mark.parametrize("magnitude", [1e-6, 1e6])
def test_one_token_of_small_and_large_values(magnitude, make, nan, agrees, device):
    """Nibbles are denormal numbers there: products must neither vanish nor overflow. Zero points count in full."""
    words, scale, exact = four_bits(12, 260, 128, device)
    x, out = make(1, 260, dtype=torch.float32) * magnitude, nan(1, 12, dtype=torch.float32)
    bias = torch.zeros(12, device=device)
    gemv_int4(product(x, words, out, None, None, None, scale))
    agrees(out, *expected(x, words, scale, exact, bias, None, None))


@pytest.mark.parametrize("case", [(1, 12, 200), (3, 21, 97), (16, 18, 256), (130, 16, 130)], ids=str)
def test_fused_layers(case, dtype, make, nan, agrees, device):
    """Through dispatch: the norm before, every regime, without a workspace too."""
    T, N, K = case
    words, scale, exact = four_bits(2 * N, K, 128, device)
    x, norm, bias = make(T, K, dtype=dtype), make(K, dtype=dtype), make(2 * N, dtype=dtype)
    h = reference.rms_norm(x, norm, EPS)
    wide = x.double()
    truth = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * norm.double()) @ exact.T + bias.double()
    for workspace in (None, Workspace(device)):
        out = dispatch.norm_linear(x, norm, EPS, words, bias, nan(T, 2 * N, dtype=dtype), scale=scale, workspace=workspace)
        agrees(out, reference.linear(h, words, bias, scale), truth)
    out = dispatch.norm_gate_up(x, norm, EPS, words, "silu", nan(T, N, dtype=dtype), bias, scale=scale)
    agrees(out, reference.gated(reference.linear(h, words, bias, scale), "silu"), reference.gated(truth, "silu"))
    residual = make(T, 2 * N, dtype=dtype)
    out = dispatch.linear_residual(x, words, residual, bias, nan(T, 2 * N, dtype=dtype), scale=scale, workspace=Workspace(device))
    agrees(out, *expected(x, words, scale, exact, bias, residual, None))


def test_logits_are_not_rounded(make, nan, device):
    """A head's fp32 logits from 16-bit activations: sums of few tokens are scaled in fp32, so no weight is rounded."""
    words, scale, exact = four_bits(40, 256, 128, device)
    x = make(2, 256, dtype=torch.float16)
    assert dispatch.row_maxima_tiles(2, words, torch.float16) == 0
    out = dispatch.norm_linear(x, None, 0.0, words, scale=scale, out=nan(2, 40, dtype=torch.float32))
    truth = x.double() @ exact.T
    assert ((out - truth).norm() / truth.norm()).item() < 1e-6


def test_the_product_of_an_unpacked_weight_starts_after_it(make, nan, device, monkeypatch):
    """Catches PDL there: `gemm_sm90` fetches weights before it waits for the kernel before, and that one writes them."""
    words, scale, _ = four_bits(16, 256, 128, device)
    wide, launched = make(16, 256, dtype=torch.float16), []
    monkeypatch.setattr(gemm_int4, "unpack_weight", lambda *operands: wide)
    x, out = make(257, 256, dtype=torch.float16), nan(257, 16, dtype=torch.float16)
    gemm_int4.gemm_unpacked(product(x, words, out, scale=scale, pdl=True), launched.append)
    assert [(one.weight is wide, one.epilogue.scale, one.pdl) for one in launched] == [(True, None, False)]


@pytest.mark.parametrize(("change", "words"), [
    (lambda w, s: (w[:, :-32].contiguous(), s), r"weight: wrong shape; expected \[any, 64\]"),
    (lambda w, s: (w.int(), s), "weight: wrong dtype; expected torch.int16"),
    (lambda w, s: (w, s[:, :-1].contiguous()), r"scale: wrong shape; expected \[any, 12\]"),
    (lambda w, s: (w, s[:1].contiguous()), "scale: wrong number of groups; expected 2 or 4 or 7; found 1"),
    (lambda w, s: (w, None), "weight: wrong"),
])  # fmt: skip
def test_operands_that_do_not_fit(change, words, make, device):
    packed, scale, _ = four_bits(12, 200, 128, device)
    weight, new_scale = change(packed, scale)
    with pytest.raises(InputError, match=words):
        dispatch.norm_linear(make(1, 200, dtype=torch.float16), None, 0.0, weight, scale=new_scale)


@pytest.mark.parametrize("group", [128, 32])
def test_quantization_rounds_to_the_nearest_level(group):
    """Levels that reach over each group's values: ragged groups, zeros, one outlier, equal values, one sign, a shifted row."""
    weight = torch.randn(40, 300, generator=torch.Generator().manual_seed(1))
    weight[0], weight[1, :group], weight[2, 5], weight[3] = 0.0, 0.25, 40.0, -0.125
    weight[4], weight[5], weight[6] = weight[4].abs(), -weight[5].abs(), weight[6] + 1.5
    codes, scale, zero = reference.quantize_int4(weight, group)
    back = reference.dequantize_int4(reference.pack_int4(codes), reference.pack_int4_scale(scale, zero), 300)
    assert torch.equal(back[0], torch.zeros(300))
    torch.testing.assert_close(back[1, :group], weight[1, :group], rtol=2e-6, atol=0)
    torch.testing.assert_close(back[3], weight[3], rtol=2e-6, atol=0)
    symmetric = 0.0
    for i, first in enumerate(range(0, 300, group)):
        part, rounded = weight[:, first : first + group], back[:, first : first + group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        step = torch.where(high > low, (high - low) / 15, 1.0)
        torch.testing.assert_close(scale[:, i], step)
        assert (zero[:, i] == (-low / step).round()).all()
        inside = (part >= -step[:, None] * zero[:, i : i + 1]) & (part <= step[:, None] * (15 - zero[:, i : i + 1]))
        assert ((rounded - part).abs() <= step[:, None] * torch.where(inside, 0.50001, 1.00001)).all(), "not the nearest level"
        largest = part.abs().amax(1, keepdim=True).clamp(min=1e-9) / 7.5
        symmetric += ((part / largest).round().clamp(-8, 7) * largest - part).square().sum().item()
    assert (back - weight).square().sum().item() < 0.9 * symmetric


@pytest.mark.parametrize("sms", [132, 20])
def test_configurations_fit_the_workspace(sms):
    """Of well-known models: partial sums and counters, and a step of every split."""
    workspace = Workspace("meta")
    for hidden, heads, inter in ((896, 1152, 4864), (3584, 4608, 18944), (4096, 6144, 14336), (8192, 10240, 29568)):
        for N, K in ((heads, hidden), (hidden, hidden), (hidden, inter), (150_000, hidden)):
            for T in (1, 17, 64, gemm_int4.MAX_TOKENS):
                for cc in (80, 89, 90):
                    c = gemm_int4.rule(ProductFacts(T, N, K, 2), Gpu(cc, sms))
                    assert c.split <= -(-K // 128)
                    tiles = -(-N // c.block_n) * -(-T // c.block_t)
                    if c.split > 1:
                        workspace.sums(tiles * c.split * c.block_n * c.block_t)
                        workspace.counters(tiles)


LARGE = [
    (1, 4608, 3584, 128, None), (1, 18944, 3584, 128, "silu"), (7, 3584, 18944, 64, None), (24, 3584, 3584, 32, None),
    (64, 3584, 18944, 128, None), (100, 4608, 3584, 128, None), (100, 4864, 896, 64, "silu"), (256, 3584, 3584, 128, None),
    (300, 2000, 3584, 128, "silu"), (1, 4608, 2880, "mx", None), (24, 2880, 2880, "mx", "silu"), (100, 4608, 2880, "mx", None),
    (300, 2000, 2880, "mx", "silu"), (1, 5376, 21504, (32, torch.bfloat16), None), (1, 21504, 5376, (32, torch.bfloat16), "silu"),
    (7, 5376, 21504, (32, torch.bfloat16), None), (24, 5376, 5376, (32, torch.bfloat16), None),
    (100, 4608, 5376, (32, torch.bfloat16), "silu"), (300, 2000, 5376, (64, torch.float16), "silu"),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case, half_dtype, make, nan, agrees, device):
    """The configurations of real shapes, with PDL, whose units of the unpacking only run on a GPU."""
    T, N, K, group, activation = case
    rows = N if activation is None else 2 * N
    words, scale, exact = four_bits(rows, K, group, device)
    x, bias, out = make(T, K, dtype=half_dtype), make(rows, dtype=half_dtype), nan(T, N, dtype=half_dtype)
    pdl = capability(device) >= 90
    made = product(x, words, out, bias, None, activation, scale, workspace=Workspace(device), pdl=pdl)
    dispatch.launch(made)
    agrees(out, *expected(x, words, scale, exact, bias, None, activation))
    first = out.clone()
    for _ in range(5):
        dispatch.launch(made)
        assert torch.equal(out, first)


@pytest.mark.gpu
@pytest.mark.parametrize(("itemsize", "zero"), [(2, 0), (2, 15)])
def test_every_code_on_a_gpu(itemsize, zero, half_dtype, make, nan, device):
    """Codes minus zero points are exact in 16 bits: one column a row, so that every sum has a single term."""
    codes = torch.arange(16, device=device).repeat(8)[:, None] * torch.eye(128, device=device, dtype=torch.long)
    codes = torch.where(torch.eye(128, device=device, dtype=torch.bool), codes, zero)
    scale = 2.0 ** -torch.arange(128, device=device).remainder(5)[:, None].float()
    words = reference.pack_int4(codes)
    scales = reference.pack_int4_scale(scale, torch.full((128, 1), zero, device=device, dtype=torch.int32))
    x = (2.0 ** torch.arange(128, device=device).remainder(7)).to(half_dtype)[None]
    for config in (Int4Config(64, 16), Int4Config(32, 16, 2), Int4Config(64, 16, exact=False)):
        out = nan(1, 128, dtype=torch.float32)
        gemm_int4.gemm_int4(product(x, words, out, scale=scales), config)
        right = (torch.arange(16, device=device).repeat(8) - zero) * scale[:, 0] * x[0].float()
        assert torch.equal(out[0], right)
