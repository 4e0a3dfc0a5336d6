"""Catches: tiles of the grouped order computed twice or never, tails of T, N and K, gate and up swapped (the last tile
of gate reaches into up's rows), the residual read after it was overwritten, tiles of the last round cut wrongly; scales of
fp8 on the wrong side, and its sums left too long in the tensor cores' few bits."""

import pytest
import torch
from support.linear import gemm, gemm_gated, linear64

from minirt.kernels import reference
from minirt.kernels.activations import ACTIVATIONS
from minirt.kernels.launch import Gpu, Workspace
from minirt.kernels.linear import gemm as kernel
from minirt.kernels.linear import gemm_sm90
from minirt.kernels.linear.product import ProductFacts, RowMaxima

LARGE = [(4608, 3584), (3584, 18944)]
CONFIGS = [None, kernel.GemmConfig(32, 64, 32, 4, 2), kernel.GemmConfig(16, 32, 64, 4, 2, tma=True)]


def check(T, N, K, dtype, make, nan, agrees, config=None):
    x, weight = make(T, K, dtype=dtype), make(N, K, dtype=dtype, scale=K**-0.5)
    bias, residual = make(N, dtype=dtype), make(T, N, dtype=dtype)
    out = gemm(x, weight, out=nan(T, N, dtype=dtype), config=config)
    agrees(out, reference.linear(x, weight), linear64(x, weight))
    expected, truth = reference.linear(x, weight, bias) + residual, linear64(x, weight, bias) + residual.double()
    out = gemm(x, weight, bias, residual, residual, config=config)  # in place
    agrees(out, expected, truth)


def check_gated(T, intermediate, K, activation, dtype, make, nan, agrees, config=None):
    x, weight = make(T, K, dtype=dtype), make(2 * intermediate, K, dtype=dtype, scale=1.5 * K**-0.5)
    bias = make(2 * intermediate, dtype=dtype)
    out = nan(T, intermediate, dtype=dtype)
    gemm_gated(x, weight, activation, bias, out, config=config)
    expected = reference.gated(reference.linear(x, weight, bias), activation)
    agrees(out, expected, reference.gated(linear64(x, weight, bias), activation))


@pytest.mark.parametrize("config", CONFIGS, ids=["chosen", "many-tiles", "tma"])
@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_bias_and_residual(case, config, dtype, make, nan, agrees):
    T, N, K = case["T"], case["N"], case["K"]
    if config is not None and config.tma and (N % 8 or K % 8):
        pytest.skip("rows not aligned for TMA")
    check(T, N, K, dtype, make, nan, agrees, config)


@pytest.mark.parametrize("config", CONFIGS, ids=["chosen", "many-tiles", "tma"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated(activation, config, dtype, make, nan, agrees):
    check_gated(130, 72, 104, activation, dtype, make, nan, agrees, config)


def test_unaligned_memory_does_not_take_tma(make, agrees):
    x, weight = make(40 * 64 + 1, dtype=torch.float16)[1:].view(40, 64), make(32, 64, dtype=torch.float16)
    out = gemm(x, weight, config=kernel.GemmConfig(16, 32, 32, 4, 2, tma=True))
    agrees(out, reference.linear(x, weight), linear64(x, weight))


@pytest.mark.parametrize("config", CONFIGS, ids=["chosen", "many-tiles", "tma"])
def test_output_in_fp32(config, make, nan, agrees):
    """Logits: rounding them to 16 bits would make ties."""
    x, weight = make(40, 64, dtype=torch.float16), make(48, 64, dtype=torch.float16)
    out = gemm(x, weight, out=nan(40, 48, dtype=torch.float32), config=config)
    assert not torch.equal(out, out.half().float())
    agrees(out, reference.linear(x, weight), linear64(x, weight))


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(
    ("T", "N", "rest", "sms", "whole"), [(40, 136, 2, 4, 8), (20, 264, 4, 5, 5), (20, 200, 4, 36, 0), (20, 264, 4, 4, 6)],
    ids=["two-parts", "four-parts", "no-whole-tiles", "too-many-parts"],
)  # fmt: skip
def test_last_round_in_parts(T, N, rest, sms, whole, tma, dtype, make, nan, agrees):
    """Also where a part lies past the last column."""
    config = kernel.GemmConfig(16, 32 * rest, 32, 4, 2, tma, rest, sms)
    assert kernel.whole_tiles(-(-T // 16) * -(-N // config.block_n), config) == whole
    check(T, N, 104, dtype, make, nan, agrees, config)
    check_gated(T, N, 104, "silu", dtype, make, nan, agrees, config)


@pytest.mark.parametrize("T", [129, 256, 512, 2048])
def test_configurations_fit_the_device(T):
    for N, K, gated in ((4608, 3584, False), (3584, 18944, False), (18944, 3584, True), (896, 4864, False)):
        for cc, room in ((80, 163), (89, 99), (90, 227), (120, 99)):
            c = kernel.rule(ProductFacts(T, N, K, 2, gated), Gpu(cc, 108))
            assert c.num_stages * (c.block_t + c.block_n * (1 + gated)) * c.block_k * 2 <= room * 1024
            assert c.tma == (cc >= 90)
    assert not kernel.rule(ProductFacts(T, 4608, 3583, 2), Gpu(90, 132)).tma
    assert kernel.rule(ProductFacts(8192, 4608, 3584, 2), Gpu(90, 132)).block_n == 256


def eight(tensor):
    """float8_e4m3fn rows, and a scale for each: 1 where a row is zero."""
    most = tensor.double().abs().amax(-1)
    scale = torch.where(most > 0, most / 448, 1.0).float()
    return (tensor.float() / scale[:, None]).to(torch.float8_e4m3fn), scale


def eight_bits(T, N, K, make, bias_dtype):
    """(x, x_scale, weight, scale, bias, truth) with one row of zeros each."""
    wide, wide_weight = make(T, K, dtype=torch.float32), make(N, K, dtype=torch.float32, scale=1.5 * K**-0.5)
    wide[T // 2] = wide_weight[N // 3] = 0
    (x, x_scale), (weight, scale) = eight(wide), eight(wide_weight)
    bias = make(N, dtype=bias_dtype)
    truth = (x.double() * x_scale.double()[:, None]) @ (weight.double() * scale.double()[:, None]).T + bias.double()
    return x, x_scale, weight, scale, bias, truth


def check_eight(T, N, K, dtype, make, nan, agrees, config=None, activation="silu"):
    """`config` makes the configuration from (gated, residual)."""
    x, x_scale, weight, scale, bias, truth = eight_bits(T, N, K, make, dtype)
    operands, scales = (x, weight), {"scale": scale, "x_scale": x_scale}
    residual = make(T, N, dtype=dtype)
    rounded = torch.float16 if truth.is_cuda and dtype == torch.float32 else dtype  # the tensor cores' own rounding
    for add in (None, residual, residual.clone()):
        out = nan(T, N, dtype=dtype) if add is None or add is residual else add  # in place at last
        chosen = None if config is None else config(False, add is not None)
        gemm(*operands, bias, add, out, **scales, config=chosen)
        wanted = truth if add is None else truth + residual.double()
        agrees(out, wanted.to(rounded), wanted)
    if N % 16 == 0:
        out = nan(T, N // 2, dtype=dtype)
        chosen = None if config is None else config(True, False)
        gemm_gated(*operands, activation, bias, out, **scales, config=chosen)
        wanted = reference.gated(truth, activation)
        agrees(out, reference.gated(truth.to(rounded), activation), wanted)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("T", "N", "K"), [(129, 96, 576), (3, 48, 1040), (130, 71, 97), (1, 16, 16)])
def test_fp8(T, N, K, out_dtype, make, nan, agrees):
    check_eight(T, N, K, out_dtype, make, nan, agrees)


def each_row(out, truth):
    """One wrong row in hundreds hardly shows in the error of all."""
    assert ((out.double() - truth).norm(dim=1) <= 2e-2 * truth.norm(dim=1)).all()
    assert ((out.double() - truth).norm(dim=0) <= 2e-2 * truth.norm(dim=0) + 1e-2).all()


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for Hopper")


def configs(widths, K, itemsize, split=1, groups=2):
    """With many tiles for each program."""
    return lambda gated, residual: gemm_sm90.derive_config(
        *widths, K, itemsize, residual, 7, split=1 if gated else split, groups=groups
    )


@pytest.mark.gpu
@pytest.mark.parametrize("widths", gemm_sm90.WIDTHS, ids=str)
@pytest.mark.parametrize(("T", "N", "K"), [(129, 656, 576), (300, 144, 1096), (2, 16, 64), (1100, 72, 200)])
def test_hopper(T, N, K, widths, half_dtype, hopper, make, nan, agrees):
    config = configs(widths, K, 2)
    x, weight = make(T, K, dtype=half_dtype), make(N, K, dtype=half_dtype, scale=K**-0.5)
    bias, residual = make(N, dtype=half_dtype), make(T, N, dtype=half_dtype)
    out = gemm(x, weight, bias, out=nan(T, N, dtype=half_dtype), config=config(False, False))
    agrees(out, reference.linear(x, weight, bias), linear64(x, weight, bias))
    expected, truth = reference.linear(x, weight) + residual, linear64(x, weight) + residual.double()
    for out in (nan(T, N, dtype=half_dtype), residual):  # in place at last
        agrees(gemm(x, weight, None, residual, out, config=config(False, True)), expected, truth)
    for activation in ACTIVATIONS:
        check_gated(T, N, K, activation, half_dtype, make, nan, agrees, config(True, False))


@pytest.mark.gpu
@pytest.mark.parametrize("widths", gemm_sm90.WIDTHS, ids=str)
@pytest.mark.parametrize(("T", "N", "K"), [(129, 656, 576), (300, 144, 4112), (2, 16, 64)])
def test_hopper_fp8(T, N, K, widths, hopper, make, nan, agrees):
    check_eight(T, N, K, torch.bfloat16, make, nan, agrees, configs(widths, K, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("widths", gemm_sm90.WIDTHS, ids=str)
@pytest.mark.parametrize(("T", "N", "K"), [(129, 656, 576), (300, 148, 1096), (2, 16, 64), (1100, 76, 200)])
def test_hopper_output_in_fp32(T, N, K, widths, half_dtype, hopper, make, nan):
    """Of 16-bit values and of fp8, also with an activation; columns that are no multiple of 8."""
    x, weight = make(T, K, dtype=half_dtype), make(N, K, dtype=half_dtype, scale=K**-0.5)
    config, truth = gemm_sm90.derive_config(*widths, K, 2, False, 7, 4), linear64(x, weight)
    out = gemm(x, weight, out=nan(T, N, dtype=torch.float32), config=config)
    assert (out - truth).norm() <= 1e-5 * truth.norm()
    if N % 8 == 0:
        truth = reference.gated(truth, "silu")
        out = gemm_gated(x, weight, "silu", out=nan(T, N // 2, dtype=torch.float32), config=config)
        assert (out - truth).norm() <= 1e-5 * truth.norm()
    if K % 16 == 0:
        x, x_scale, weight, scale, bias, truth = eight_bits(T, N, K, make, half_dtype)
        config = gemm_sm90.derive_config(*widths, K, 1, False, 7, 4)
        out = nan(T, N, dtype=torch.float32)
        gemm(x, weight, bias, out=out, scale=scale, x_scale=x_scale, config=config)
        assert (out - truth).norm() <= 1e-3 * truth.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("widths", gemm_sm90.WIDTHS[1:], ids=str)
@pytest.mark.parametrize(("T", "N", "K"), [(72, 648, 1096), (129, 656, 576), (300, 144, 1104), (1100, 80, 4112)])
def test_hopper_in_two_parts(T, N, K, widths, half_dtype, hopper, make, nan, agrees, device):
    """Same bits every time, and counters left at zero."""
    workspace = Workspace(device)
    config = configs(widths, K, 2, split=2)
    x, weight = make(T, K, dtype=half_dtype), make(N, K, dtype=half_dtype, scale=K**-0.5)
    bias, residual = make(N, dtype=half_dtype), make(T, N, dtype=half_dtype)
    expected, truth = reference.linear(x, weight, bias), linear64(x, weight, bias)
    outs = [
        gemm(x, weight, bias, out=nan(T, N, dtype=half_dtype), workspace=workspace, config=config(False, False))
        for _ in range(5)
    ]
    agrees(outs[0], expected, truth)
    assert all(torch.equal(out, outs[0]) for out in outs)
    expected, truth = expected + residual, truth + residual.double()
    for out in (nan(T, N, dtype=half_dtype), residual):  # in place at last
        gemm(x, weight, bias, residual, out, workspace=workspace, config=config(False, True))
        agrees(out, expected, truth)
    if sum(widths) <= 144 and K % 16 == 0:
        x, x_scale, weight, scale, bias, truth = eight_bits(T, N, K, make, half_dtype)
        out, eight_config = nan(T, N, dtype=half_dtype), configs(widths, K, 1, split=2)(False, False)
        gemm(x, weight, bias, out=out, scale=scale, x_scale=x_scale, workspace=workspace, config=eight_config)
        agrees(out, truth.to(half_dtype), truth)
    assert not workspace.counters(1 << 14).any()


@pytest.mark.gpu
@pytest.mark.parametrize("widths", gemm_sm90.WIDTHS, ids=str)
@pytest.mark.parametrize(("T", "N", "itemsize"), [(65, 1100, 2), (129, 656, 1), (300, 148, 2)])
def test_sm90_stores_row_maxima(T, N, itemsize, widths, hopper, make, nan, device):
    """Of each row the argmax of its own logits, and those logits only if they are needed; a NaN, and of equals the first."""
    K = 576
    config, columns = gemm_sm90.derive_config(*widths, K, itemsize, False, 7, 4), sum(widths)
    if itemsize == 1:
        x, x_scale, weight, scale, _, _ = eight_bits(T, N, K, make, torch.bfloat16)
    else:
        x, weight, scale, x_scale = make(T, K, dtype=torch.bfloat16), make(N, K, dtype=torch.bfloat16), None, None
        x[7, 5], weight[N // 2 :] = float("nan"), weight[: N - N // 2].clone()
    plain = nan(T, N, dtype=torch.float32)
    gemm(x, weight, out=plain, scale=scale, x_scale=x_scale, config=config)
    for needed in (1, 0):
        flag, values = torch.tensor([needed], dtype=torch.int32, device=device), torch.full((T, 90), 2**62, device=device)
        tiles, out = -(-N // columns), nan(T, N, dtype=torch.float32)
        row_maxima = RowMaxima(values[:, :tiles], flag)
        gemm(x, weight, out=out, scale=scale, x_scale=x_scale, config=config, pdl=True, row_maxima=row_maxima)
        assert bool(out.isnan().all()) if not needed else torch.equal(out.nan_to_num(7e7), plain.nan_to_num(7e7))
        best = values[:, :tiles].amax(1)
        token = (best & (2**31 - 1)) ^ (2**31 - 1)
        failed = plain.isnan().any(1)
        assert torch.equal(token[~failed], plain.argmax(1)[~failed])
        assert bool(((best >> 32) == 2**31 - 1)[failed].all())
        assert bool((values[:, tiles:] == 2**62).all())


@pytest.mark.gpu
@pytest.mark.parametrize("widths", gemm_sm90.WIDTHS, ids=str)
@pytest.mark.parametrize("T", [65, 72, 100, 127, 128])
def test_hopper_up_to_one_tile_of_rows(T, widths, half_dtype, hopper, make, nan, agrees):
    """The second group of warps starts early enough to be full: rows that two groups compute; not so in place."""
    N, K, config = 336, 1096, configs(widths, 1096, 2)
    check_gated(T, N, K, "silu", half_dtype, make, nan, agrees, config(True, False))
    check(T, N, K, half_dtype, make, nan, agrees, config(False, True))
    check_eight(T, N, 1104, torch.bfloat16, make, nan, agrees, configs(widths, 1104, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("widths", gemm_sm90.WIDTHS_OF_THREE, ids=str)
@pytest.mark.parametrize("T", [1, 65, 129, 191, 192, 193, 300, 384, 1100])
def test_hopper_of_three_groups(T, widths, hopper, make, nan, agrees):
    """Tiles of 192 rows: the last one shifted back, groups of fewer rows than tokens, rows past the end where that may not be."""
    N, K, half_dtype = 656, 1096, torch.bfloat16
    config, room = configs(widths, K, 2, groups=3), sum(widths) <= 192
    x, weight = make(T, K, dtype=half_dtype), make(N, K, dtype=half_dtype, scale=K**-0.5)
    bias, residual = make(N, dtype=half_dtype), make(T, N, dtype=half_dtype)
    out = gemm(x, weight, bias, out=nan(T, N, dtype=half_dtype), config=config(False, False))
    agrees(out, reference.linear(x, weight, bias), linear64(x, weight, bias))
    each_row(out, linear64(x, weight, bias))
    expected, truth = reference.linear(x, weight) + residual, linear64(x, weight) + residual.double()
    for out in (nan(T, N, dtype=half_dtype), residual) if room else ():  # in place at last
        gemm(x, weight, None, residual, out, config=config(False, True))
        agrees(out, expected, truth)
        each_row(out, truth)
    for activation in ACTIVATIONS:
        check_gated(T, N, K, activation, half_dtype, make, nan, agrees, config(True, False))
    if room:
        fp32 = gemm_sm90.derive_config(*widths, K, 2, False, 7, 4, groups=3)
        out, truth = gemm(x, weight, out=nan(T, N, dtype=torch.float32), config=fp32), linear64(x, weight)
        assert (out - truth).norm() <= 1e-5 * truth.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("T", [129, 300])
def test_hopper_of_three_groups_ahead_of_the_kernel_before(T, hopper, make, nan):
    """With PDL the same bits, for several tiles a program."""
    N, K = 656, 2112
    x, weight, residual = (make(*size, dtype=torch.bfloat16) for size in ((T, K), (N, K), (T, N)))
    config = gemm_sm90.derive_config(128, 16, K, 2, True, 7, groups=3)
    outs = [
        gemm(x * 1, weight, None, residual, nan(T, N, dtype=torch.bfloat16), config=config, pdl=pdl)
        for pdl in (False, True, True)
    ]
    assert outs[0].isfinite().all()
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.gpu
@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize(
    ("widths", "T", "N", "programs"), [((256, 0), 300, 656, 8), ((256, 0), 1100, 104, 7), ((128, 0), 200, 1400, 20)], ids=str
)
def test_hopper_last_round_of_strips(widths, T, N, programs, itemsize, hopper, make, nan, agrees):
    """Single strips, some of them past the last column: the same bits as pairs, also in place and with PDL."""
    K = 2112
    x, x_scale, weight, scale, bias, truth = eight_bits(T, N, K, make, torch.bfloat16)
    if itemsize == 2:
        x, weight, x_scale, scale = make(T, K, dtype=torch.bfloat16), make(N, K, dtype=torch.bfloat16, scale=K**-0.5), None, None
        truth = linear64(x, weight, bias)
    residual, outs = make(T, N, dtype=torch.bfloat16), []
    tiles = -(-T // 128) * -(-N // widths[0])
    assert gemm_sm90.whole_tiles(tiles, programs) < tiles == gemm_sm90.whole_tiles(tiles, 64)
    for number, pdl, add, out in (
        (64, False, None, None), (programs, False, None, None), (programs, True, None, None),
        (64, False, residual, None), (programs, True, residual, None), (programs, False, residual, residual.clone()),
    ):  # fmt: skip
        config = gemm_sm90.derive_config(*widths, K, itemsize, add is not None, number)
        out, add = nan(T, N, dtype=torch.bfloat16) if out is None else out, add if out is None else out
        outs.append(gemm(x, weight, bias, add, out, scale=scale, x_scale=x_scale, config=config, pdl=pdl))
    agrees(outs[0], truth.to(torch.bfloat16), truth)
    agrees(outs[3], (truth + residual).to(torch.bfloat16), truth + residual.double())
    assert all(torch.equal(out, outs[0]) for out in outs[:3])
    assert all(torch.equal(out, outs[3]) for out in outs[3:])


@pytest.mark.gpu
@pytest.mark.parametrize("T", [129, 192, 300, 384])
def test_hopper_as_chosen(T, half_dtype, hopper, make, nan, agrees, device):
    """What the rule takes for a model's layers, the split ones with a workspace; all programs at once and several rounds."""
    workspace = Workspace(device)
    for N, K in ((4608, 3584), (3584, 3584), (3584, 18944)):
        x, weight = make(T, K, dtype=half_dtype), make(N, K, dtype=half_dtype, scale=K**-0.5)
        residual = make(T, N, dtype=half_dtype)
        out = gemm(x, weight, None, residual, nan(T, N, dtype=half_dtype), workspace=workspace)
        truth = linear64(x, weight) + residual.double()
        agrees(out, reference.linear(x, weight) + residual, truth)
        each_row(out, truth)
    check_gated(T, 18944, 3584, "silu", half_dtype, make, nan, agrees)
    assert not workspace.counters(1 << 14).any()


@pytest.mark.gpu
@pytest.mark.parametrize("K", [200, 2112])
@pytest.mark.parametrize("form", ["fp32", "gated", "residual", "split"])
@pytest.mark.parametrize("T", [100, 1100])
def test_hopper_ahead_of_the_kernel_before(T, form, K, hopper, make, nan, device):
    """With PDL the same bits, for several tiles a program and for fewer steps than there is room for (it hung)."""
    N, workspace = 656, Workspace(device)
    x, weight, residual = (make(*size, dtype=torch.bfloat16) for size in ((T, K), (N, K), (T, N)))
    size, added = 4 if form == "fp32" else 2, form in ("residual", "split")
    config = gemm_sm90.derive_config(128, 16, K, 2, added, 7, size, 2 if form == "split" else 1)
    outs = []
    for pdl in (False, True, True):
        if form == "gated":
            out = gemm_gated(x * 1, weight, "silu", out=nan(T, N // 2, dtype=torch.bfloat16), config=config, pdl=pdl)
        else:
            out = nan(T, N, dtype=torch.float32 if form == "fp32" else torch.bfloat16)
            add = residual if added else None
            gemm(x * 1, weight, None, add, out, workspace=workspace, config=config, pdl=pdl)
        outs.append(out)
    assert outs[0].isfinite().all()
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [None, *gemm_sm90.WIDTHS], ids=str)
@pytest.mark.parametrize("K", [3584, 18944])
def test_fp8_sums_are_set_aside_in_time(K, widths, make, nan):
    """Under the rounding of a bf16 output (1.7e-3), which fp16 makes visible; never set aside: 1.2e-3 and 3.4e-3."""
    x, x_scale, weight, scale, bias, truth = eight_bits(256, 640, K, make, torch.float16)
    config = None if widths is None else configs(widths, K, 1)(False, False)
    if widths is not None and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for Hopper")
    out = gemm(x, weight, bias, out=nan(256, 640, dtype=torch.float16), scale=scale, x_scale=x_scale, config=config)
    assert (out.double() - truth).norm() <= 1.1e-3 * truth.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("widths", gemm_sm90.WIDTHS[:2], ids=str)
def test_fp8_sums_of_the_largest_values_are_finite(widths, hopper, device):
    """Sums of one sign are where the tensor cores' bits are fewest: a few per cent go."""
    x = torch.full((130, 18944), 448.0, device=device).to(torch.float8_e4m3fn)
    scale, x_scale = torch.full((256,), 2.0**-32, device=device), torch.ones(130, device=device)
    config = configs(widths, 18944, 1)(False, False)
    out = gemm(x, x[:1].expand(256, -1).contiguous(), scale=scale, x_scale=x_scale, config=config)
    truth = torch.full_like(out, 448.0**2 * 18944 * 2.0**-32, dtype=torch.float64)
    torch.testing.assert_close(out.double(), truth, rtol=6e-2, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [129, 256, 512, 1000, 4096])
@pytest.mark.parametrize(("N", "K"), LARGE)
def test_large(T, N, K, half_dtype, make, nan, agrees):
    check(T, N, K, half_dtype, make, nan, agrees)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [129, 256, 2048])
@pytest.mark.parametrize(("N", "K"), LARGE)
def test_large_fp8(T, N, K, make, nan, agrees):
    check_eight(T, N, K, torch.bfloat16, make, nan, agrees)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [129, 256, 512, 1000])
def test_large_gated(T, half_dtype, make, nan, agrees):
    check_gated(T, 18944, 3584, "silu", half_dtype, make, nan, agrees)
