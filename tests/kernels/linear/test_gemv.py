"""Catches: a tile used twice, dropped or read past the row's end; gate and up swapped or scaled by the other's scale; the
norm's division forgotten for one of them; fp8 codes decoded wrongly; a row that feels its neighbours; a load or store that
PDL puts before what it depends on."""

import pytest
import torch
from support.linear import gemv, norm64

from minirt.errors import UnsupportedError
from minirt.kernels import launch, reference
from minirt.kernels.activations import ACTIVATIONS
from minirt.kernels.linear.gemv import GemvConfig

EPS = 1e-6
FP8 = torch.float8_e4m3fn
# Ragged and whole rows; fewer tiles in a row than are kept in flight; more rows in a program than there are.
CONFIGS = [GemvConfig(1, 1, 1), GemvConfig(4, 1, 3), GemvConfig(2, 2, 9), GemvConfig(8, 4, 2, 64)]
SHAPES = [(13, 577), (3, 1024), (9, 97)]


def quantized(weight):
    """Rows of a weight as fp8 with a scale each, which differs a lot from row to row, and what they stand for."""
    weight = weight.float() * torch.logspace(-2, 2, len(weight), device=weight.device)[:, None]
    scale = weight.abs().amax(1) / 448
    codes = (weight / scale[:, None]).to(FP8)
    return codes, scale, codes.double() * scale.double()[:, None]


def run(x, norm, weight, bias, residual, activation, nan, scale=None, **options):
    N = len(weight) if activation is None else len(weight) // 2
    return gemv(x, norm, EPS, weight, bias, residual, nan(1, N, dtype=x.dtype), activation, scale=scale, **options)


def expected(x, norm, weight, bias, residual, activation):
    """By PyTorch in x's dtype, and in fp64; `weight` in fp64."""
    h = x if norm is None else reference.rms_norm(x, norm, EPS)
    out = reference.linear(h, weight.to(x.dtype), bias)
    truth = norm64(x, norm) @ weight.T + (0 if bias is None else bias.double())
    if activation is not None:
        out, truth = reference.gated(out, activation), reference.gated(truth, activation)
    return (out, truth) if residual is None else (out + residual, truth + residual.double())


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_any_tiles(N, K, config, fp8, dtype, make, nan, agrees):
    x, norm, bias, residual = (make(1, K, dtype=dtype), make(K, dtype=dtype), make(N, dtype=dtype), make(1, N, dtype=dtype))
    weight, scale = make(N, K, dtype=dtype, scale=K**-0.5), None
    values = weight.double()
    if fp8:
        weight, scale, values = quantized(weight)
    for arguments in ((x, norm, weight, bias, None, None), (x, None, weight, None, residual, None)):
        out = run(*arguments, nan, scale, config=config)
        agrees(out, *expected(*arguments[:2], values, *arguments[3:]))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("N", "K"), [(13, 577), (6, 256)])
def test_gated(N, K, activation, fp8, dtype, make, nan, agrees):
    x, norm, bias = make(1, K, dtype=dtype, scale=3.0), make(K, dtype=dtype), make(2 * N, dtype=dtype)
    weight, scale = make(2 * N, K, dtype=dtype, scale=K**-0.5), None
    values = weight.double()
    if fp8:
        weight, scale, values = quantized(weight)
    for options in ({}, {"config": GemvConfig(4, 2, 1)}):
        out = run(x, norm, weight, bias, None, activation, nan, scale, **options)
        agrees(out, *expected(x, norm, values, bias, None, activation))


def test_every_fp8_code(make, nan, device):
    """One column for each code, so that every sum has a single term; those that are no number make their row one only."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(FP8)
    values = codes.float()
    weight = torch.diag_embed(values).nan_to_num(0).to(FP8)
    weight[range(256), range(256)] = codes
    x = 2.0 ** torch.arange(256, device=device).remainder(7)[None].float()
    scale = 2.0 ** -torch.arange(256, device=device).remainder(5).float()
    out = run(x, None, weight, None, None, None, nan, scale)
    numbers = ~values.isnan()
    assert torch.equal(out[0, numbers], (values * x[0] * scale)[numbers])
    if device.type == "cuda":  # the interpreter knows no NaN in fp8
        assert out[0, ~numbers].isnan().all()


@pytest.mark.parametrize("magnitude", [1e-4, 3e4])
def test_norm_of_small_and_large_rows(magnitude, make, nan, agrees):
    """The sum is taken before the division by the root mean square: of large values it must not overflow; of small ones
    epsilon is the larger part."""
    x, norm = make(1, 300, dtype=torch.float32).clamp(-2, 2) * magnitude, make(300, dtype=torch.float16)
    x, weight = x.half(), make(24, 300, dtype=torch.float16)
    out = run(x, norm, weight, None, None, None, nan)
    agrees(out, *expected(x, norm, weight.double(), None, None, None))


def test_fp8_where_the_gpu_has_none(monkeypatch):
    monkeypatch.setattr(launch, "capability", lambda device: 80)
    with pytest.raises(UnsupportedError, match=r"no fp8 weights on this GPU; expected compute capability 8\.9.*found 8\.0"):
        launch.require_fp8(torch.device("cuda"))
    launch.require_fp8(torch.device("cpu"))  # the interpreter
    monkeypatch.setattr(launch, "capability", lambda device: 89)
    launch.require_fp8(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("N", "K", "activation"), [
    (1, 577, None),  # a size of one is compiled apart
    (1, 577, "silu"),
    (4608, 3584, None),
    (3584, 3584, None),
    (18944, 3584, "silu"),
    (3584, 18944, None),
    (1152, 896, None),
    (8192, 29568, None),
])  # fmt: skip
def test_large(N, K, activation, fp8, half_dtype, make, nan, agrees):
    rows = N if activation is None else 2 * N
    x, norm, weight = (make(1, K, dtype=half_dtype), make(K, dtype=half_dtype), make(rows, K, dtype=half_dtype, scale=K**-0.5))
    scale, values = None, weight
    if fp8:
        scale = weight.float().abs().amax(1) / 448
        weight = (weight.float() / scale[:, None]).to(FP8)
        values = weight.float() * scale[:, None]
    out = run(x, norm, weight, None, None, activation, nan, scale)
    agrees(out, *expected(x, norm, values.double(), None, None, activation))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_same_bits_every_time_also_with_pdl(fp8, with_pdl, make, device, repeats):
    """Layers whose kernels overlap by PDL, each reading what the one before wrote and overwriting what the one before that
    read; more of them than fit the GPU, so that some wait while others run."""
    H, inter, dtype = 3584, 18944, torch.bfloat16
    norm, x = make(H, dtype=dtype), make(1, H, dtype=dtype)
    shapes = [(4608, H), (H, 3584), (2 * inter, H), (H, inter)]
    layers = [[(make(*s, dtype=dtype, scale=s[1] ** -0.5), None) for s in shapes] for _ in range(3)]
    if fp8:
        layers = [[(w.to(FP8), torch.ones(len(w), device=device)) for w, _ in layer] for layer in layers]
    qkv, act, h = (torch.empty(1, n, dtype=dtype, device=device) for n in (4608, inter, H))

    def chain(pdl):
        for buffer in (qkv, act):
            buffer.fill_(float("nan"))
        h.copy_(x)
        for layer in layers * repeats(12):
            w, o, gate_up, down = layer
            gemv(h, norm, EPS, w[0], None, None, qkv, scale=w[1], pdl=pdl)
            gemv(qkv[:, :H], None, EPS, o[0], None, h, h, scale=o[1], pdl=pdl)
            gemv(h, norm, EPS, gate_up[0], None, None, act, "silu", scale=gate_up[1], pdl=pdl)
            gemv(act, None, EPS, down[0], None, h, h, scale=down[1], pdl=pdl)
        return h

    truth = chain(False).clone()
    assert truth.isfinite().all()
    assert torch.equal(chain(False), truth)
    assert all(torch.equal(chain(True), truth) for _ in range(repeats(10)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for _ in range(10):
        h.fill_(float("nan"))
        graph.replay()
        assert torch.equal(h, truth)
