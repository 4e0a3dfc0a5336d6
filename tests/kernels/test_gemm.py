"""Catches: tiles of the grouped order computed twice or never, tails of T, N and K, gate and up swapped (the last tile
of gate reaches into up's rows), the residual read after it was overwritten, tiles of the last round cut wrongly."""

import pytest
import torch

from minirt.errors import InputError
from minirt.kernels import gemm as kernel
from minirt.kernels import reference
from minirt.kernels.common import ACTIVATIONS

LARGE = [(4608, 3584), (3584, 18944)]
CONFIGS = [None, kernel.GemmConfig(32, 64, 32, 4, 2), kernel.GemmConfig(16, 32, 64, 4, 2, tma=True)]


def linear64(x, weight, bias=None):
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def check(T, N, K, dtype, make, nan, agrees, config=None):
    x, weight = make(T, K, dtype=dtype), make(N, K, dtype=dtype, scale=K**-0.5)
    bias, residual = make(N, dtype=dtype), make(T, N, dtype=dtype)
    out = kernel.gemm(x, weight, out=nan(T, N, dtype=dtype), config=config)
    agrees(out, reference.linear(x, weight), linear64(x, weight))
    expected, truth = reference.linear(x, weight, bias) + residual, linear64(x, weight, bias) + residual.double()
    out = kernel.gemm(x, weight, bias, residual, residual, config=config)  # in place
    agrees(out, expected, truth)


def check_gated(T, intermediate, K, activation, dtype, make, nan, agrees, config=None):
    x, weight = make(T, K, dtype=dtype), make(2 * intermediate, K, dtype=dtype, scale=1.5 * K**-0.5)
    bias = make(2 * intermediate, dtype=dtype)
    out = nan(T, intermediate, dtype=dtype)
    kernel.gemm_gated(x, weight, activation, bias, out, config=config)
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
    out = kernel.gemm(x, weight, config=kernel.GemmConfig(16, 32, 32, 4, 2, tma=True))
    agrees(out, reference.linear(x, weight), linear64(x, weight))


@pytest.mark.parametrize("config", CONFIGS, ids=["chosen", "many-tiles", "tma"])
def test_output_in_fp32(config, make, nan, agrees):
    """Logits: rounding them to 16 bits would make ties."""
    x, weight = make(40, 64, dtype=torch.float16), make(48, 64, dtype=torch.float16)
    out = kernel.gemm(x, weight, out=nan(40, 48, dtype=torch.float32), config=config)
    assert not torch.equal(out, out.half().float())
    agrees(out, reference.linear(x, weight), linear64(x, weight))


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(
    ("T", "N", "rest", "processors", "whole"),
    [(40, 136, 2, 4, 8), (20, 264, 4, 5, 5), (20, 200, 4, 36, 0), (20, 264, 4, 4, 6)],
    ids=["two-parts", "four-parts", "no-whole-tiles", "too-many-parts"],
)
def test_last_round_in_parts(T, N, rest, processors, whole, tma, dtype, make, nan, agrees):
    """Also where a part lies past the last column."""
    config = kernel.GemmConfig(16, 32 * rest, 32, 4, 2, tma, rest, processors)
    assert kernel.whole_tiles(-(-T // 16) * -(-N // config.block_n), config) == whole
    check(T, N, 104, dtype, make, nan, agrees, config)
    check_gated(T, N, 104, "silu", dtype, make, nan, agrees, config)


def test_parts_fill_the_last_round():
    """On 132 processors."""
    for tiles, block_n, rest in (
        (296, 128, 4), (592, 128, 2), (56, 128, 2), (144, 64, 2),  # no narrower than 32 columns
        (72, 128, 1), (264, 128, 1), (2000, 128, 1),  # too few idle processors, none, many rounds
    ):  # fmt: skip
        assert kernel.parts_of_rest(tiles, 132, block_n) == rest


def test_the_configuration_knows_regimes_not_token_counts():
    """A kernel compiled for each token count would stall serving."""
    for N, K, gated in ((4608, 3584, False), (3584, 18944, False), (18944, 3584, True), (896, 4864, False)):
        for regime in (range(129, 257), range(257, 513), range(1025, 2049)):
            assert len({kernel.choose_config(T, N, K, 2, gated, 90, 132) for T in regime}) == 1


@pytest.mark.parametrize("T", [129, 256, 512, 2048])
def test_configurations_fit_the_device(T):
    for N, K, gated in ((4608, 3584, False), (3584, 18944, False), (18944, 3584, True), (896, 4864, False)):
        for cc, room in ((80, 163), (89, 99), (90, 227), (120, 99)):
            c = kernel.choose_config(T, N, K, 2, gated, cc, 108)
            assert c.num_stages * (c.block_t + c.block_n * (1 + gated)) * c.block_k * 2 <= room * 1024
            assert c.tma == (cc >= 90)
    assert not kernel.choose_config(T, 4607, 3584, 2, False, 90, 132).tma
    assert kernel.choose_config(8192, 4608, 3584, 2, False, 90, 132).block_n == 256


def test_no_tokens_and_wrong_arguments(make):
    x, weight = make(3, 32, dtype=torch.float32), make(6, 32, dtype=torch.float32)
    assert kernel.gemm(x[:0], weight).shape == (0, 6)
    with pytest.raises(InputError, match="weight: wrong shape"):
        kernel.gemm(x, weight.t().contiguous())
    with pytest.raises(InputError, match="out: unsupported dtype"):
        kernel.gemm(x, weight, out=make(3, 6, dtype=torch.float64))
    with pytest.raises(InputError, match="residual: wrong shape"):
        kernel.gemm(x, weight, residual=x)
    with pytest.raises(InputError, match=r"activation: unknown.*tanh"):
        kernel.gemm_gated(x, weight, "tanh")
    with pytest.raises(InputError, match="weight: odd number of rows"):
        kernel.gemm_gated(x, weight[:5], "silu")


@pytest.mark.gpu
@pytest.mark.parametrize("T", [129, 256, 512, 1000, 4096])
@pytest.mark.parametrize(("N", "K"), LARGE)
def test_large(T, N, K, half_dtype, make, nan, agrees):
    check(T, N, K, half_dtype, make, nan, agrees)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [129, 256, 512, 1000])
def test_large_gated(T, half_dtype, make, nan, agrees):
    check_gated(T, 18944, 3584, "silu", half_dtype, make, nan, agrees)
