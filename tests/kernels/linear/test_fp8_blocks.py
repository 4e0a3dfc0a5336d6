"""FP8 weights with a scale for each block of g rows and 128 columns, in every kernel of the linear layers, against a formula in
fp64 that gathers the scale of each weight.

Catches: the scale of another block, part (gate for up) or token; a last block that is taken for a whole one; sums scaled twice or
after they left their block; parts of K that start inside a block; tables of scales that fit no weight.
"""


import pytest
import torch
from support.linear import gemm, gemm_small, gemv, product
from support.raising import raises

from minirt.errors import InputError
from minirt.kernels import reference
from minirt.kernels.launch import Gpu, Workspace
from minirt.kernels.linear import dispatch as kernel
from minirt.kernels.linear import gemm as tiled
from minirt.kernels.linear import gemm_sm90
from minirt.kernels.linear.gemm_small import GemmSmallConfig
from minirt.kernels.linear.gemm_small import gemm_small as launch_small
from minirt.kernels.linear.gemv import GemvConfig
from minirt.kernels.linear.product import ProductFacts
from minirt.kernels.norm import rms_norm_quantize
from minirt.kernels.quantize import quantize

EPS = 1e-6
# N, K, rows of a block. Short last blocks of rows and of columns; K below 128; rows that a program shares with other blocks; rows
# that are not aligned to a load.
SHAPES = [(192, 272, 128), (80, 200, 8), (67, 208, 64), (40, 97, 1), (256, 144, 64)]


def blocks(make, N, K, g):
    """Weights, a scale for each block, and what they stand for in fp64. Neighbouring scales differ by factors up to 64."""
    weight = make(N, K, dtype=torch.float32).to(torch.float8_e4m3fn)
    scale = torch.exp2(make(-(-N // g), -(-K // 128), dtype=torch.float32).clamp(-2, 2) * 1.5) * K**-0.5
    rows, columns = torch.arange(N, device=scale.device) // g, torch.arange(K, device=scale.device) // 128
    return weight, scale, weight.double() * scale.double()[rows][:, columns]


def widened(values, x_scale):
    """Quantized tokens [T, K] with scales [T, ⌈K / 128⌉] in fp64."""
    columns = torch.arange(values.shape[1], device=values.device) // 128
    return values.double() * x_scale.double()[:, columns]


def products(x, norm_weight, wide, bias, dtype):
    """What the product must be, in `dtype` and in fp64. One token is not quantized.

    On a GPU the first is at most bf16: its tensor cores sum the 128 products of a block less exactly than fp32 does, but more
    exactly than bf16 can tell.
    """
    if len(x) > 1:
        h = widened(*(quantize(x, blocks=True) if norm_weight is None else rms_norm_quantize(x, norm_weight, EPS, blocks=True)))
    elif norm_weight is None:
        h = x.double()
    else:
        h = x.double()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * norm_weight.double()
    truth = h @ wide.T
    truth = truth if bias is None else truth + bias.double()
    if len(x) > 1:
        return truth.to(torch.bfloat16 if x.is_cuda else dtype), truth
    h = x if norm_weight is None else reference.rms_norm(x, norm_weight, EPS)
    expected = (h.float() @ wide.float().T).to(dtype)
    return expected if bias is None else expected + bias, truth


def check_dispatch(T, N, K, g, dtype, make, nan, agrees, device, gated=True):
    x, norm_weight, bias = make(T, K, dtype=dtype, scale=2.0), make(K, dtype=dtype), make(N, dtype=dtype)
    weight, scale, wide = blocks(make, N, K, g)
    workspace = Workspace(device)
    options = {"scale": scale, "workspace": workspace}
    out = kernel.norm_linear(x, norm_weight, EPS, weight, bias, nan(T, N, dtype=dtype), **options)
    expected, truth = products(x, norm_weight, wide, bias, dtype)
    agrees(out, expected, truth)
    if gated and N % (2 * g) == 0:
        out = kernel.norm_gate_up(x, norm_weight, EPS, weight, "silu", nan(T, N // 2, dtype=dtype), bias, scale=scale)
        agrees(out, reference.gated(expected, "silu"), reference.gated(truth, "silu"))
    residual = make(T, N, dtype=dtype)
    expected, truth = products(x, None, wide, bias, dtype)
    expected, truth = (expected.double() + residual.double()).to(expected.dtype), truth + residual.double()
    agrees(kernel.linear_residual(x, weight, residual, bias, residual, **options), expected, truth)  # in place
    assert not workspace.counters(1).any()


@pytest.mark.parametrize("T", [1, 17])
@pytest.mark.parametrize(("N", "K", "g"), SHAPES)
def test_every_regime(T, N, K, g, make, nan, agrees, device):
    check_dispatch(T, N, K, g, torch.float16, make, nan, agrees, device)


@pytest.mark.parametrize("T", [1, 2, 40])
def test_every_dtype(T, dtype, make, nan, agrees, device):
    check_dispatch(T, 96, 272, 16, dtype, make, nan, agrees, device)


@pytest.mark.parametrize(("N", "K", "g"), [(136, 144, 128), (48, 144, 4)])
def test_many_tokens(N, K, g, make, nan, agrees, device):
    check_dispatch(130, N, K, g, torch.float16, make, nan, agrees, device)


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("config", [GemvConfig(2, 1, 1), GemvConfig(4, 2, 2), GemvConfig(16, 1, 3)], ids=str)
@pytest.mark.parametrize(("K", "g"), [(584, 8), (299, 1)])
def test_one_token_with_any_configuration(K, g, config, activation, make, nan, agrees):
    """Programs whose rows lie in one block or in several; the last tile is partial; rows that are not aligned."""
    N = 48 if activation is None else 24
    x, (weight, scale, wide) = make(1, K, dtype=torch.float16), blocks(make, 48, K, g)
    out = gemv(x, None, EPS, weight, None, None, nan(1, N, dtype=torch.float16), activation, scale=scale, config=config)
    expected, truth = products(x, None, wide, None, torch.float16)
    if activation is not None:
        expected, truth = reference.gated(expected, activation), reference.gated(truth, activation)
    agrees(out, expected, truth)


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(("split", "block_k", "block_n"), [(1, 64, 32), (2, 128, 16), (3, 32, 64), (8, 64, 16)])
def test_few_tokens_with_any_configuration(split, block_k, block_n, tma, make, nan, agrees, device):
    """Steps shorter than a block, parts of K that begin inside one, tiles of rows narrower and wider than a block."""
    x, (weight, scale, wide) = make(9, 400, dtype=torch.float16), blocks(make, 80, 400, 32)
    values, x_scale = quantize(x, blocks=True)
    config = GemmSmallConfig(block_n, block_k, 2, split=split, tma=tma)
    workspace = Workspace(device)
    options = {"scale": scale, "x_scale": x_scale, "workspace": workspace, "config": config}
    outs = [gemm_small(values, weight, None, None, nan(9, 80, dtype=torch.float16), **options) for _ in range(2)]
    agrees(outs[0], *products(x, None, wide, None, torch.float16))
    assert torch.equal(*outs)
    assert not workspace.counters(1).any()


@pytest.mark.parametrize(
    "config", [tiled.GemmConfig(32, 64, 64, 4, 2), tiled.GemmConfig(16, 64, 128, 4, 2, tma=True, rest=2, num_sms=5)], ids=str
)
def test_tiles_with_any_configuration(config, make, nan, agrees):
    """Also tiles of the last round that are cut, and gate and up."""
    x, bias = make(50, 336, dtype=torch.float16), make(192, dtype=torch.float16)
    weight, scale, wide = blocks(make, 192, 336, 32)
    (values, x_scale), (expected, truth) = quantize(x, blocks=True), products(x, None, wide, bias, torch.float16)
    options = {"scale": scale, "x_scale": x_scale, "config": config}
    residual = make(50, 192, dtype=torch.float16)
    out = gemm(values, weight, bias, residual, nan(50, 192, dtype=torch.float16), **options)
    agrees(out, (expected.double() + residual.double()).to(expected.dtype), truth + residual.double())
    out = gemm(values, weight, bias, None, nan(50, 96, dtype=torch.float16), activation="silu", **options)
    agrees(out, reference.gated(expected, "silu"), reference.gated(truth, "silu"))


def test_tables_of_scales_that_fit_no_weight_are_named(make):
    x, (weight, scale, _) = make(2, 200, dtype=torch.float32), blocks(make, 96, 200, 32)
    for wrong in (torch.cat((scale, scale[:2])), scale[:, :1], scale[:, :1].repeat(1, 3), scale[None]):
        raises("scale: wrong", kernel.linear_residual, x, weight, make(2, 96, dtype=torch.float32), scale=wrong.contiguous())
    raises("scale: not contiguous", kernel.norm_linear, x, None, EPS, weight, scale=scale.t().contiguous().t())
    _, scale, _ = blocks(make, 96, 200, 64)  # the first block has rows of gate and of up
    with pytest.raises(InputError, match="scale: wrong shape for blocks that hold no rows of both gate and up"):
        kernel.norm_gate_up(x, None, EPS, weight, "silu", scale=scale)
    (values, x_scale), (weight, scale, _) = quantize(x, blocks=True), blocks(make, 96, 200, 32)
    made = product(values, weight, x.new_empty(2, 96), scale=scale, x_scale=x_scale)
    for run, config in ((launch_small, GemmSmallConfig(16, 256)), (tiled.gemm, tiled.GemmConfig(16, 32, 256, 4, 2))):
        raises(r"config.block_k: a step in K has one scale; expected a divisor of 128; found 256", run, made, config)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("T", [65, 100, 192, 256, 2048])
def test_no_strip_of_a_hopper_tile_reaches_into_a_second_block(T, gated):
    """The kernel reads one scale for each strip, at its first row."""
    for N, K in ((4608, 3584), (3584, 18944), (18944, 3584), (576, 1536)):
        facts = ProductFacts(T, N, K, 1, gated, blocks=True)
        configs = gemm_sm90.candidates(facts, Gpu(90, 132))
        assert gemm_sm90.rule(facts, Gpu(90, 132))
        for c in configs:
            assert c.promote == 0
            columns = (c.width + c.second) // (1 + gated)
            pairs = [(0, c.width)] + ([(c.width // (1 + gated), c.second)] if c.second else [])
            for start in range(0, N, columns):
                for first, width in pairs:
                    strips = [start + first] if gated else [start + first, start + first + width // 2]
                    for strip in strips:
                        assert strip // 64 == (strip + width // 2 - 1) // 64


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("widths", "groups", "split", "activation"),
    [((128, 64), 2, 1, None), ((64, 32), 2, 2, None), ((128, 0), 3, 1, "silu"), ((64, 0), 2, 1, "silu")], ids=str,
)
def test_hopper_small(widths, groups, split, activation, on_hopper, make, nan, agrees, device):
    """Also without a GPU, see tests/emulate: several tiles for a program, T, N and K that no tile divides."""
    T, N, K = 150, 320 if activation is None else 384, 272
    (weight, scale, wide), bias = blocks(make, N, K, 64), make(N, dtype=torch.float16)
    values, x_scale = reference.quantize_fp8_blocks(make(T, K, dtype=torch.float32), T)
    values, truth = values.contiguous(), widened(values, x_scale) @ wide.T + bias.double()
    residual = make(T, N, dtype=torch.float16) if activation is None else None
    config = gemm_sm90.derive_config(*widths, K, 1, residual is not None, 2, split=split, groups=groups, blocks=True)
    options = {"activation": activation, "scale": scale, "x_scale": x_scale, "workspace": Workspace(device), "pdl": True}
    out = nan(T, N if activation is None else N // 2, dtype=torch.float16)
    gemm(values, weight, bias, residual, out, config=config, **options)
    wanted = truth + residual.double() if residual is not None else reference.gated(truth, activation)
    agrees(out, wanted.bfloat16(), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("widths", gemm_sm90.WIDTHS_OF_BLOCKS, ids=str)
@pytest.mark.parametrize(
    ("T", "N", "K", "g"), [(129, 640, 576, 128), (300, 384, 4112, 64), (2, 256, 64, 128), (1100, 1152, 1040, 64)]
)
def test_hopper(T, N, K, g, widths, groups, on_hopper, make, nan, agrees, device):
    """Many tiles for each program. With two groups of warps also in two parts, the same bits every time."""
    if groups == 3 and sum(widths) > 128:
        pytest.skip("the registers of three groups do not hold these sums")
    x, (weight, scale, wide), bias = make(T, K, dtype=torch.bfloat16), blocks(make, N, K, g), make(N, dtype=torch.bfloat16)
    (values, x_scale), residual = quantize(x, blocks=True), make(T, N, dtype=torch.bfloat16)
    truth = widened(values, x_scale) @ wide.T + bias.double()
    workspace = Workspace(device)
    options = {"scale": scale, "x_scale": x_scale, "workspace": workspace}
    for split in (1, 2) if groups == 2 and sum(widths) <= 144 else (1,):
        config = gemm_sm90.derive_config(*widths, K, 1, True, 7, split=split, groups=groups, blocks=True)
        outs = [gemm(values, weight, bias, residual, nan(T, N, dtype=torch.bfloat16), config=config, **options) for _ in range(3)]
        agrees(outs[0], (truth + residual.double()).bfloat16(), truth + residual.double())
        assert all(torch.equal(out, outs[0]) for out in outs)
    if widths in gemm_sm90.GATED_WIDTHS_OF_BLOCKS and N % (2 * g) == 0:
        config = gemm_sm90.derive_config(*widths, K, 1, False, 7, groups=groups, blocks=True)
        out = gemm(values, weight, bias, None, nan(T, N // 2, dtype=torch.bfloat16), activation="silu", config=config, **options)
        agrees(out, reference.gated(truth.bfloat16(), "silu"), reference.gated(truth, "silu"))
    config = gemm_sm90.derive_config(*widths, K, 1, False, 7, 4, groups=groups, blocks=True)
    out = gemm(values, weight, bias, out=nan(T, N, dtype=torch.float32), config=config, **options)
    assert (out - truth).norm() <= 4e-4 * truth.norm()
    assert not workspace.counters(1 << 14).any()


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 16, 24, 64, 72, 128, 129, 300])
@pytest.mark.parametrize(("N", "K"), [(4608, 3584), (3584, 18944)])
def test_large(T, N, K, half_dtype, make, nan, agrees, device):
    check_dispatch(T, N, K, 128, half_dtype, make, nan, agrees, device, gated=False)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 24, 64, 72, 128, 300])
def test_large_gate_up(T, half_dtype, make, nan, agrees):
    x, norm_weight = make(T, 3584, dtype=half_dtype), make(3584, dtype=half_dtype)
    weight, scale, wide = blocks(make, 37888, 3584, 128)
    out = kernel.norm_gate_up(x, norm_weight, EPS, weight, "silu", nan(T, 18944, dtype=half_dtype), scale=scale)
    expected, truth = products(x, norm_weight, wide, None, half_dtype)
    agrees(out, reference.gated(expected, "silu"), reference.gated(truth, "silu"))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 16, 64, 72, 128, 129, 300])
def test_same_bits_every_time_also_with_pdl(T, with_pdl, make, device, repeats):
    """A chain of kernels that overlap by PDL, share the workspace and each read what the one before wrote."""
    x, (weight, scale, _) = make(T, 3584, dtype=torch.bfloat16), blocks(make, 3584, 3584, 128)
    scale, norm_weight, workspace = scale / 8, make(3584, dtype=torch.bfloat16), Workspace(device)

    def chain(pdl):
        h, options = x, {"scale": scale, "workspace": workspace, "pdl": pdl}
        for _ in range(2 * repeats(25)):
            y = kernel.norm_linear(h, norm_weight, EPS, weight, **options)
            h = kernel.linear_residual(y, weight, h, **options)
        return h

    expected = chain(False)
    assert bool(expected.isfinite().all())
    assert torch.equal(chain(False), expected)
    assert torch.equal(chain(True), expected)
    assert not workspace.counters(1).any()
