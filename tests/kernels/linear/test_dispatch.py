"""Catches: tails of N, K and T; the norm's mean over padding; gate and up swapped; a part of K added twice or dropped;
counters left non-zero; the residual read after it was overwritten; fp8 scales of other rows or tokens, or applied to the bias."""

import itertools
from functools import partial

import pytest
import torch
from support.linear import gemm_small, linear64, norm64
from support.raising import raises

from minirt.errors import InputError
from minirt.kernels import reference
from minirt.kernels.activations import ACTIVATIONS
from minirt.kernels.launch import Gpu, Workspace, token_block
from minirt.kernels.linear import dispatch as kernel
from minirt.kernels.linear.gemm_small import GemmSmallConfig, rule
from minirt.kernels.linear.product import ProductFacts, RowMaxima, part_of
from minirt.kernels.norm import rms_norm_quantize
from minirt.kernels.quantize import quantize

EPS = 1e-6
LARGE = [(4608, 3584), (3584, 18944)]


def inputs(make, T, N, K, dtype, rows=1):
    x, norm_weight = make(T, K, dtype=dtype, scale=2.0), make(K, dtype=dtype)
    return x, norm_weight, make(rows * N, K, dtype=dtype, scale=K**-0.5), make(rows * N, dtype=dtype)


def clean(workspace):
    return not workspace.counters(1).any()


def check_norm_linear(case, dtype, make, nan, agrees, device, normalize):
    T, N, K = case["T"], case["N"], case["K"]
    x, norm_weight, weight, bias = inputs(make, T, N, K, dtype)
    norm_weight = norm_weight if normalize else None
    workspace = Workspace(device)
    out = kernel.norm_linear(x, norm_weight, EPS, weight, bias, nan(T, N, dtype=dtype), workspace=workspace)
    h = x if norm_weight is None else reference.rms_norm(x, norm_weight, EPS)
    agrees(out, reference.linear(h, weight, bias), linear64(norm64(x, norm_weight), weight, bias))
    assert clean(workspace)


def check_gate_up(T, intermediate, K, activation, dtype, make, nan, agrees):
    x, norm_weight, weight, _ = inputs(make, T, intermediate, K, dtype, rows=2)
    out = kernel.norm_gate_up(x, norm_weight, EPS, weight, activation, nan(T, intermediate, dtype=dtype))
    expected = reference.gated(reference.linear(reference.rms_norm(x, norm_weight, EPS), weight), activation)
    agrees(out, expected, reference.gated(linear64(norm64(x, norm_weight), weight), activation))


def check_residual(case, dtype, make, agrees, device):
    T, N, K = case["T"], case["N"], case["K"]
    x, _, weight, bias = inputs(make, T, N, K, dtype)
    residual, workspace = make(T, N, dtype=dtype), Workspace(device)
    expected, truth = reference.linear(x, weight, bias) + residual, linear64(x, weight, bias) + residual.double()
    agrees(kernel.linear_residual(x, weight, residual, bias, workspace=workspace), expected, truth)
    out = kernel.linear_residual(x, weight, residual, bias, residual, workspace=workspace)  # in place
    agrees(out, expected, truth)
    assert clean(workspace)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_norm_linear(case, normalize, dtype, make, nan, agrees, device):
    check_norm_linear(case, dtype, make, nan, agrees, device, normalize)


@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_residual_also_in_place(case, dtype, make, agrees, device):
    check_residual(case, dtype, make, agrees, device)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("T", "intermediate", "K"), [(1, 131, 577), (1, 96, 256), (3, 67, 97), (17, 96, 320)])
def test_gate_up(T, intermediate, K, activation, dtype, make, nan, agrees):
    check_gate_up(T, intermediate, K, activation, dtype, make, nan, agrees)


@pytest.mark.parametrize("T", [1, 5])
def test_gate_up_with_bias(T, make, agrees):
    x, norm_weight, weight, bias = inputs(make, T, 33, 64, torch.float32, rows=2)
    out = kernel.norm_gate_up(x, norm_weight, EPS, weight, "silu", bias=bias)
    expected = reference.gated(reference.linear(reference.rms_norm(x, norm_weight, EPS), weight, bias), "silu")
    agrees(out, expected, reference.gated(linear64(norm64(x, norm_weight), weight, bias), "silu"))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("gpu", [Gpu(80, 108), Gpu(89, 128), Gpu(90, 132), Gpu(90, 20)], ids=str)
def test_configurations_fit_the_workspace(gpu, itemsize, invariant):
    """Catches a model whose sums have no room, which only its first step would show: each size of well-known models."""
    workspace = Workspace("meta")
    sizes = (896, 1152, 2560, 3584, 4608, 4864, 5120, 6144, 8192, 10240, 16384, 18944, 27648, 28672, 53248)
    for N, K, T in itertools.product((*sizes, 152064), sizes, (1, 16, 17, 64, 128)):
        part = part_of(N, K, itemsize, False, False) if invariant else 0
        c = rule(ProductFacts(T, N, K, itemsize, part=part), gpu)
        assert c.split in (1, -(-K // part)) if invariant else c.split <= -(-K // c.block_k)
        if c.split > 1:
            workspace.sums(-(-N // c.block_n) * c.split * c.block_n * token_block(T))
            workspace.counters(-(-N // c.block_n))


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("split", [2, 3, 8])
def test_any_split_of_k(split, tma, dtype, make, nan, agrees, device):
    """Also parts of unequal length, and more parts asked for than K has blocks."""
    x, _, weight, bias = inputs(make, 9, 40, 208, dtype)
    workspace = Workspace(device)
    config = GemmSmallConfig(block_n=16, block_k=32, num_warps=2, split=split, tma=tma)
    out = gemm_small(x, weight, bias, None, nan(9, 40, dtype=dtype), workspace=workspace, config=config)
    agrees(out, reference.linear(x, weight, bias), linear64(x, weight, bias))
    again = gemm_small(x, weight, bias, None, nan(9, 40, dtype=dtype), workspace=workspace, config=config)
    assert torch.equal(out, again)
    assert clean(workspace)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize(("T", "N", "block_n"), [(2, 203, 32), (9, 40, 16), (40, 100, 64)])
def test_row_maxima(T, N, block_n, split, fp8, make, nan, device):
    """Of each row the argmax of its own values, of equals the first, and those values only if needed; NaN and infinities."""
    K, tiles = 208, -(-N // block_n)
    x, _, weight, _ = inputs(make, T, N, K, torch.float16)
    x[-1], weight[N // 2 :] = -x[0].abs(), weight[: N - N // 2].clone()
    x[1, 7] = 0 if fp8 else float("nan")
    x[T // 2 + 1 : T - 1, 5] = float("inf") if not fp8 else 0  # logits of +inf and -inf
    (x, x_scale), (weight, scale) = (quantize(x), reference.quantize_fp8(weight)) if fp8 else ((x, None), (weight, None))
    config = GemmSmallConfig(block_n=block_n, block_k=32, num_warps=2, split=split)
    run = partial(gemm_small, x, weight, None, None, scale=scale, x_scale=x_scale, workspace=Workspace(device), config=config)
    plain = run(nan(T, N, dtype=torch.float32))
    for needed in (1, 0):
        flag, values = torch.tensor([needed], dtype=torch.int32, device=device), torch.full((T, tiles + 3), 2**62, device=device)
        out = run(nan(T, N, dtype=torch.float32), row_maxima=RowMaxima(values[:, :tiles], flag))
        assert bool(out.isnan().all()) if not needed else torch.equal(out.nan_to_num(7e7), plain.nan_to_num(7e7))
        best = values[:, :tiles].amax(1)
        failed = plain.isnan().any(1)
        assert torch.equal(((best & (2**31 - 1)) ^ (2**31 - 1))[~failed], plain.argmax(1)[~failed])
        assert failed.sum() == (not fp8)
        assert bool(((best >> 32) == 2**31 - 1)[failed].all())
        assert bool((values[:, tiles:] == 2**62).all())
    for width in (tiles - 1, tiles + 1):  # a sampler would miss some, or take old ones for this step's
        with pytest.raises(InputError, match="this product stores no row maxima"):
            run(nan(T, N, dtype=torch.float32), row_maxima=RowMaxima(values[:, :width], flag))


def quantized(make, rows, K):
    """fp8 weights with a different scale for each row, and what they stand for in fp64."""
    weight = make(rows, K, dtype=torch.float32).to(torch.float8_e4m3fn)
    scale = make(rows, dtype=torch.float32, scale=K**-0.5)
    return weight, scale, weight.double() * scale.double()[:, None]


def linear8(quantized_x, weight, scale, dtype, bias=None):
    """What the product of quantized tokens must be: (in `dtype`, in fp64).

    On a GPU the first is at most bf16: its tensor cores sum fp8 products less exactly than fp32 does, but more exactly than bf16
    can tell (`test_fp8_sums_are_exact_enough`).
    """
    values, x_scale = (t.double() for t in quantized_x)
    truth = linear64(values * x_scale[:, None], weight.double() * scale.double()[:, None], bias)
    return truth.to(torch.bfloat16 if weight.is_cuda else dtype), truth


@pytest.mark.parametrize("T", [2, 17, 40])
@pytest.mark.parametrize(("N", "K"), [(67, 208), (40, 97)])
def test_fp8_weights(T, N, K, dtype, make, nan, agrees, device):
    x, norm_weight, _, bias = inputs(make, T, N, K, dtype)
    weight, scale, _ = quantized(make, N, K)
    workspace = Workspace(device)
    out = kernel.norm_linear(x, norm_weight, EPS, weight, bias, nan(T, N, dtype=dtype), scale=scale, workspace=workspace)
    agrees(out, *linear8(rms_norm_quantize(x, norm_weight, EPS), weight, scale, dtype, bias))
    residual = make(T, N, dtype=dtype)
    expected, truth = linear8(quantize(x), weight, scale, dtype, bias)
    out = kernel.linear_residual(x, weight, residual, bias, scale=scale, workspace=workspace)
    agrees(out, (expected.double() + residual.double()).to(expected.dtype), truth + residual.double())
    assert clean(workspace)


def test_a_token_that_is_not_finite_shows_and_spares_the_others(make, device):
    x, (weight, scale, _) = make(5, 64, dtype=torch.float32), quantized(make, 24, 64)
    expected = kernel.norm_linear(x, None, EPS, weight, scale=scale)
    x[1], x[2, 3], x[3, 0] = 0, torch.inf, x[3, 0] * 1000
    out = kernel.norm_linear(x, None, EPS, weight, scale=scale)
    assert torch.equal(out[[0, 4]], expected[[0, 4]])
    assert not out[1].any()
    if device.type == "cuda":  # the interpreter takes NaN for 480
        assert bool(out[2].isnan().all())


@pytest.mark.parametrize("T", [3, 33])
def test_fp8_gate_up(T, dtype, make, nan, agrees):
    x, norm_weight, _, bias = inputs(make, T, 72, 104, dtype, rows=2)
    weight, scale, _ = quantized(make, 144, 104)
    out = kernel.norm_gate_up(x, norm_weight, EPS, weight, "silu", nan(T, 72, dtype=dtype), bias, scale=scale)
    expected, truth = linear8(rms_norm_quantize(x, norm_weight, EPS), weight, scale, dtype, bias)
    agrees(out, reference.gated(expected, "silu"), reference.gated(truth, "silu"))


def test_the_configuration_knows_regimes_not_token_counts():
    """A kernel compiled for each token count would stall serving."""
    for shape in ((4608, 3584), (3584, 18944), (96, 576)):
        for regime in (range(2, 17), range(17, 33), range(33, 65), range(65, 129)):
            for itemsize in (1, 2):
                assert len({rule(ProductFacts(T, *shape, itemsize), Gpu(90, 132)) for T in regime}) == 1


def test_wrong_arguments_are_named(make, device):
    x, norm_weight, weight, bias = inputs(make, 2, 16, 32, torch.float32)
    raises("weight: wrong shape", kernel.norm_linear, x, norm_weight, EPS, weight.t().contiguous())
    raises("bias: wrong shape", kernel.norm_linear, x, norm_weight, EPS, weight, bias[:3])
    raises("norm_weight: wrong dtype", kernel.norm_linear, x, norm_weight.half(), EPS, weight)
    raises("residual: wrong shape", kernel.linear_residual, x, weight, x)
    raises(r"activation: unknown.*relu", kernel.norm_gate_up, x, norm_weight, EPS, weight, "relu")
    raises(r"weight: wrong dtype; expected torch\.float8_e4m3fn", kernel.norm_linear, x, None, EPS, weight, scale=bias)
    tiles = kernel.row_maxima_tiles(2, weight, x.dtype)
    values, needed = torch.zeros(2, tiles, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.int32, device=device)
    for row_maxima, message in (
        (RowMaxima(values[:1], needed), "values: wrong tensor"), (RowMaxima(values.int(), needed), "values: wrong tensor"),
        (RowMaxima(torch.cat((values, values), 1), needed), "values: wrong tensor"),
        (RowMaxima(values, needed.bool()), "logits_needed: wrong dtype"),
    ):  # fmt: skip
        raises(f"row_maxima.{message}", kernel.norm_linear, x, norm_weight, EPS, weight, row_maxima=row_maxima)
    config = GemmSmallConfig(block_n=16, block_k=16, num_warps=1, split=2)
    out, small = x.new_empty(2, 16), Workspace(device, num_floats=5)
    with pytest.raises(InputError, match=r"num_floats: too small; expected at least 512; found 5"):
        gemm_small(x, weight, None, None, out, workspace=small, config=config)
    eight, scale, _ = quantized(make, 16, 32)
    raises("scale: wrong shape", kernel.norm_linear, x, None, EPS, eight, scale=scale[:3])
    raises("weight: wrong dtype", kernel.norm_linear, x, None, EPS, eight)


@pytest.mark.parametrize("T", [1, 129])
def test_kernels_without_row_maxima_refuse_them(T, make, device):
    """A sampler would take those of another step for this one's."""
    x, norm_weight, weight, _ = inputs(make, T, 16, 32, torch.float32)
    assert kernel.row_maxima_tiles(T, weight, x.dtype) == 0
    values, needed = torch.zeros(T, 1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(InputError, match="row_maxima: no kernel stores row maxima of this product"):
        kernel.norm_linear(x, norm_weight, EPS, weight, row_maxima=RowMaxima(values, needed))


@pytest.mark.parametrize("stored", ["plain", "fp8", "blocks"])
@pytest.mark.parametrize("T", [2, 16, 17, 64, 100])
def test_row_maxima_are_as_many_as_is_said(T, stored, make, nan, device):
    """Also where a head's weight decides the tiles: the sampler reads so many columns and no others. Of the scaled values."""
    x, norm_weight, weight, _ = inputs(make, T, 1000, 144 if stored == "blocks" else 64, torch.float16)
    weight, scale = weight * torch.logspace(-1, 1, 1000, device=device)[:, None].half(), None
    if stored == "fp8":
        weight, scale = reference.quantize_fp8(weight)
    elif stored == "blocks":
        weight, scale = reference.quantize_fp8_blocks(weight, 8)
    weight = weight.contiguous()
    tiles = kernel.row_maxima_tiles(T, weight, x.dtype, scale)
    assert tiles > 1
    values, needed = torch.full((T, tiles + 2), 2**62, device=device), torch.ones(1, dtype=torch.int32, device=device)
    row_maxima = RowMaxima(values[:, :tiles], needed)
    options = {"out": nan(T, 1000, dtype=torch.float32), "scale": scale, "row_maxima": row_maxima}
    out = kernel.norm_linear(x, norm_weight, EPS, weight, **options)
    best = values[:, :tiles].amax(1)
    assert torch.equal((best & (2**31 - 1)) ^ (2**31 - 1), out.argmax(1))
    assert bool((values[:, tiles:] == 2**62).all())
    assert bool((values[:, :tiles] != 2**62).all())


def check_capped(T, V, K, dtype, stored, multiplier, softcap, make, nan, agrees, device):
    """Logits from near 0 to past the cap against fp64, and their row maxima where the kernel stores them."""
    x, norm_weight, weight, bias = inputs(make, T, V, K, dtype)
    scale, exact = None, weight
    if stored == "fp8":
        weight, scale = reference.quantize_fp8(weight)
        exact = weight.double() * scale.double()[:, None]
    elif stored == "int4":
        codes, factors, zero = reference.quantize_int4(weight, 32)
        weight, scale = reference.pack_int4(codes), reference.pack_int4_scale(factors, zero)
        exact = reference.dequantize_int4(weight, scale, K, torch.float64)
    options = {"scale": scale, "multiplier": multiplier, "softcap": softcap, "workspace": Workspace(device)}
    tiles = kernel.row_maxima_tiles(T, weight, dtype, scale)
    if tiles:
        values = torch.full((T, tiles), 2**62, device=device)
        options["row_maxima"] = RowMaxima(values, torch.ones(1, dtype=torch.int32, device=device))
    out = kernel.norm_linear(x, norm_weight, EPS, weight, bias, nan(T, V, dtype=torch.float32), **options)
    plain = kernel.norm_linear(x, norm_weight, EPS, weight, bias, nan(T, V, dtype=torch.float32), scale=scale)
    if stored == "fp8" and T > 1:  # x is quantized: only what is done with the logits is compared
        truth, expected = plain.double(), plain
    else:
        truth = linear64(norm64(x, norm_weight), exact, bias)
        expected = reference.linear(reference.rms_norm(x, norm_weight, EPS), weight, bias, scale).float()
    agrees(out, reference.cap_logits(expected, multiplier, softcap), reference.cap_logits(truth, multiplier, softcap))
    if tiles:
        best = values.amax(1)
        bits = (best >> 32).int()
        top = torch.where(bits < 0, bits ^ (2**31 - 1), bits).view(torch.float32)
        assert torch.equal(top, out.amax(1))
        assert torch.equal((best & (2**31 - 1)) ^ (2**31 - 1), out.argmax(1))


@pytest.mark.parametrize(("multiplier", "softcap"), [(-0.25, 0.0), (0.125, 3.0)])
@pytest.mark.parametrize(("T", "stored"), [
    (1, "plain"), (3, "plain"), (130, "plain"), (3, "fp8"), (70, "fp8"), (1, "int4"), (3, "int4"), (70, "int4"),
])  # fmt: skip
def test_logits_are_multiplied_and_capped(T, stored, multiplier, softcap, make, nan, agrees, device):
    """Catches a multiplier after the cap, a cap before the sum of a split K or before the bias, and row maxima of other logits
    than those that are stored, as a negative multiplier shows."""
    check_capped(T, 77, 160, torch.float32, stored, multiplier, softcap, make, nan, agrees, device)


def test_small_logits_keep_their_digits_under_a_cap(make, nan, device):
    """Catches tanh as a quotient of 1 − e^(−2x), which loses the digits of small x: here 4 of 7."""
    x, weight = make(1, 64, dtype=torch.float32, scale=1e-2), make(50, 64, dtype=torch.float32, scale=1e-2)
    out = kernel.norm_linear(x, None, EPS, weight, out=nan(1, 50, dtype=torch.float32), softcap=30.0)
    plain = kernel.norm_linear(x, None, EPS, weight, out=nan(1, 50, dtype=torch.float32))
    torch.testing.assert_close(out.double(), 30 * torch.tanh(plain.double() / 30), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "value"), [("multiplier", float("nan")), ("softcap", -1.0), ("softcap", float("inf"))])
def test_a_wrong_cap_is_named(name, value, make):
    x, norm_weight, weight, _ = inputs(make, 2, 16, 32, torch.float32)
    raises(name, kernel.norm_linear, x, norm_weight, EPS, weight, **{name: value})


@pytest.mark.gpu
@pytest.mark.parametrize("stored", ["plain", "fp8", "int4"])
@pytest.mark.parametrize("T", [1, 8, 64, 65, 300])
def test_large_heads_are_multiplied_and_capped(T, stored, half_dtype, make, nan, agrees, device):
    """The kernels for Hopper as well, in their sizes."""
    check_capped(T, 32_003 if stored == "int4" else 32_000, 2048, half_dtype, stored, -0.5, 4.0, make, nan, agrees, device)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 16, 17, 64, 72, 100, 128])
@pytest.mark.parametrize(("N", "K"), LARGE)
def test_large(T, N, K, half_dtype, make, nan, agrees, device):
    case = {"T": T, "N": N, "K": K}
    check_norm_linear(case, half_dtype, make, nan, agrees, device, normalize=K == 3584)
    check_residual(case, half_dtype, make, agrees, device)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [2, 16, 17, 64, 72, 100, 128])
@pytest.mark.parametrize(("N", "K"), [*LARGE, (3584, 3584)])
def test_large_fp8(T, N, K, half_dtype, make, nan, agrees, device):
    test_fp8_weights(T, N, K, half_dtype, make, nan, agrees, device)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [2, 24, 64, 72, 128])
def test_large_fp8_gate_up(T, half_dtype, make, nan, agrees):
    x, norm_weight, _, _ = inputs(make, T, 8, 3584, half_dtype)
    weight, scale, _ = quantized(make, 2 * 18944, 3584)
    out = kernel.norm_gate_up(x, norm_weight, EPS, weight, "silu", nan(T, 18944, dtype=half_dtype), scale=scale)
    expected, truth = linear8(rms_norm_quantize(x, norm_weight, EPS), weight, scale, half_dtype)
    agrees(out, reference.gated(expected, "silu"), reference.gated(truth, "silu"))


@pytest.mark.gpu
@pytest.mark.parametrize("T", [2, 24, 64, 128])
def test_fp8_sums_are_exact_enough(T, make):
    """Hopper's tensor cores keep 13 bits or so of fp8 sums: what that costs must vanish beside the rounding to bf16, 1.7e-3.

    `gemm_sm90` sets its sums aside less often than `gemm_small` promotes them.
    """
    x, (weight, scale, _) = make(T, 18944, dtype=torch.bfloat16), quantized(make, 3584, 18944)
    out = kernel.norm_linear(x, None, EPS, weight, scale=scale, out_dtype=torch.float32)
    _, truth = linear8(quantize(x), weight, scale, torch.float32)
    assert ((out - truth).norm() / truth.norm()).item() < (4e-4 if T <= 64 else 8e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 16, 17, 64, 128])
def test_large_gate_up(T, half_dtype, make, nan, agrees):
    check_gate_up(T, 18944, 3584, "silu", half_dtype, make, nan, agrees)


@pytest.mark.gpu
def test_weight_past_2_31_elements(make, agrees):
    """The LM head of a 152064-token vocabulary at H = 16384."""
    x, _, weight, _ = inputs(make, 1, 152064, 16384, torch.bfloat16)
    for T in (1, 2):
        rows = x.expand(T, -1).contiguous()
        out = kernel.norm_linear(rows, None, EPS, weight, out_dtype=torch.float32)[:, -4096:]
        agrees(out, reference.linear(rows, weight[-4096:]), linear64(rows, weight[-4096:]))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("T", [1, 16, 64, 72, 128, 129, 300])
def test_same_bits_every_time_also_with_pdl(T, fp8, with_pdl, make, device, repeats):
    """A chain of kernels that overlap by PDL, share the workspace and each read what the one before wrote."""
    x, norm_weight, weight, bias = inputs(make, T, 3584, 3584, torch.bfloat16)
    workspace, scale = Workspace(device), None
    if fp8:
        weight, scale = reference.quantize_fp8(weight)

    def chain(pdl):
        h, options = x, {"scale": scale, "workspace": workspace, "pdl": pdl}
        for _ in range(2 * repeats(25)):
            y = kernel.norm_linear(h, norm_weight, EPS, weight, bias, **options)
            h = kernel.linear_residual(y, weight, h, **options)
        return h

    expected = chain(False)
    assert torch.equal(chain(False), expected)
    assert torch.equal(chain(True), expected)
    assert clean(workspace)
