"""The kernels for 4-bit weights that only Hopper has, on a GPU or emulated. Catches: nibbles in another order than x's columns,
zero points or scales of a neighbouring group or row, tiles of a warp that are skipped or added twice, gate and up swapped, tails
of N, K and T, a residual that is activated, left out or read after it was overwritten, missing barriers around the sums over
warps."""


import pytest
import torch
from support.linear import product

from minirt.kernels import reference
from minirt.kernels.launch import Gpu, Workspace
from minirt.kernels.linear.gemm_int4_sm90 import Int4Sm90Config, gemm_int4_sm90
from minirt.kernels.linear.gemm_int4_small_sm90 import Int4SmallSm90Config, gemm_int4_small_sm90
from minirt.kernels.linear.gemv_int4_sm90 import GemvInt4Sm90Config, accepts, fitting, gemv_int4_sm90, shared_bytes
from minirt.kernels.linear.gemv_int4_sm90 import rule as gemv_rule
from minirt.kernels.linear.product import ProductFacts

from .test_int4 import EPS, expected, four_bits

# (T, N, K, group, activation, norm, configuration): chunks that the warps do not divide, columns that no chunk fills, rows past
# the last, more tiles in flight than there are.
SMALL = [
    (1, 24, 640, 128, None, True, Int4SmallSm90Config(16, 4, 2)), (1, 19, 456, 32, "silu", True, Int4SmallSm90Config(16, 2, 1)),
    (5, 40, 1000, 64, None, False, Int4SmallSm90Config(32, 4, 9)),
    (8, 17, 328, 128, "gelu_tanh", False, Int4SmallSm90Config(16, 1, 2)),
    (7, 33, 577, 32, None, False, Int4SmallSm90Config(16, 4, 1, None, 2)),
    (2, 16, 256, 128, None, False, Int4SmallSm90Config(16, 8, 4)),
    (3, 24, 456, "mx", "silu", False, Int4SmallSm90Config(16, 2, 2)),
    (6, 33, 577, (32, torch.bfloat16), None, False, Int4SmallSm90Config(16, 4, 1, None, 2)),
    (1, 19, 456, (64, torch.float16), "silu", True, Int4SmallSm90Config(16, 2, 1)),
]  # fmt: skip


def check(kernel, T, N, K, group, activation, normed, config, scale_of_x, dtype, make, nan, agrees, device):
    rows = N if activation is None else 2 * N
    words, scale, exact = four_bits(rows, K, group, device)
    x, bias = make(T, K, dtype=dtype, scale=scale_of_x), make(rows, dtype=dtype)
    norm = make(K, dtype=dtype) if normed else None
    residual, out = make(T, N, dtype=dtype), nan(T, N, dtype=dtype)
    made = product(x, words, out, bias, residual, activation, scale, norm=(norm, EPS))
    h, wide = x, x.double()
    if norm is not None:
        h = reference.rms_norm(x, norm, EPS)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * norm.double()
    eager, _ = expected(h, words, scale, exact, bias, residual, activation)
    truth = wide @ exact.T + bias.double()
    truth = (truth if activation is None else reference.gated(truth, activation)) + residual.double()
    kernel(made, config)
    agrees(out, eager, truth)
    kernel(made._replace(out=residual), config)  # in place
    assert torch.equal(residual, out)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small(case, half_dtype, make, nan, agrees, device, on_hopper):
    check(gemm_int4_small_sm90, *case, 1.0, half_dtype, make, nan, agrees, device)


# (N, K, group, activation, norm, configuration): a loop with and without a rest, slots that are filled again once, twice or
# never, warps with fewer chunks than others or none, columns that no chunk fills, groups past the last column, rows past the
# last.
ONE = [
    (24, 640, 128, None, True, GemvInt4Sm90Config(2, 2, 1)), (19, 456, 32, "silu", True, GemvInt4Sm90Config(2, 1, 1)),
    (40, 1000, 64, None, False, GemvInt4Sm90Config(1, 2, 2)),
    (17, 328, 128, "gelu_tanh", False, GemvInt4Sm90Config(2, 1, 1, None, True)),
    (33, 577, 32, None, False, GemvInt4Sm90Config(4, 2, 2, None, True)),
    (16, 256, 128, None, False, GemvInt4Sm90Config(8, 4, 4)), (20, 2000, 128, "silu", True, GemvInt4Sm90Config(2, 4, 2, 112)),
    (9, 1164, 64, "gelu_tanh", True, GemvInt4Sm90Config(1, 4, 2)),
    (35, 2440, 32, None, False, GemvInt4Sm90Config(2, 4, 4, 128, True)),
    (16, 1800, 128, None, True, GemvInt4Sm90Config(2, 8, 3, line=True)), (5, 97, 128, None, True, GemvInt4Sm90Config(1, 3, 1)),
    (19, 712, "mx", "silu", True, GemvInt4Sm90Config(2, 2, 1)),
    (34, 2440, (32, torch.bfloat16), None, False, GemvInt4Sm90Config(2, 4, 4, 128, True)),
    (18, 456, (32, torch.bfloat16), "silu", True, GemvInt4Sm90Config(2, 1, 1)),
    (22, 1000, (64, torch.float16), "silu", True, GemvInt4Sm90Config(2, 2, 2)),
    (16, 840, (128, torch.bfloat16), None, False, GemvInt4Sm90Config(4, 1, 1)),
]  # fmt: skip


def test_scale_words_that_copies_cannot_bring():
    """Catches copies of 4 bytes that begin between two scale words of 16 bits, or reach into the next group."""
    for rows, first, accepted in ((5376, 0, True), (5377, 0, False), (5376, 1, False)):
        x, words = torch.empty(1, 5376, dtype=torch.bfloat16), torch.empty(rows, 1344, dtype=torch.int16)
        scale = torch.empty(rows * 168 + 1, dtype=torch.bfloat16)[first:][: rows * 168].view(168, rows)
        assert accepts(product(x, words, torch.empty(1, rows), scale=scale)) == accepted
    assert accepts(product(x, torch.empty(5377, 1344, dtype=torch.int16), torch.empty(1, 5377), scale=torch.empty(168, 5377)))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ONE, ids=str)
def test_one_token(case, half_dtype, make, nan, agrees, device, on_hopper):
    check(gemv_int4_sm90, 1, *case, 3.0, half_dtype, make, nan, agrees, device)


def test_rings_fit_into_shared_memory():
    """Of well-known models and of awkward sizes, whatever configuration is asked for."""
    for N, K, gated, normed in (
        (4608, 3584, False, True), (18944, 3584, True, True), (3584, 18944, False, False), (28672, 8192, True, True),
        (8192, 28672, False, False), (100, 12288, True, True), (64, 97, False, True), (7, 53248, False, False),
    ):  # fmt: skip
        rule = gemv_rule(ProductFacts(1, N, K, 2, gated), Gpu(90, 132))
        for asked in (rule, GemvInt4Sm90Config(8, 16, 4), GemvInt4Sm90Config(4, 3, 2, None, True)):
            for group in (32, 64, 128):
                c = fitting(asked, K, group, gated, normed)
                count = -(-K // (128 * c.num_warps))
                assert 1 <= c.unroll <= c.stages <= count
                assert c.stages == count or c.stages % c.unroll == 0
                assert shared_bytes(c, K, group, gated) <= 46 * 1024
                assert not (c.x_in_ring and normed)


# (T, N, K, group, activation, configuration): more chunks than stages, chunks that the parts do not divide, several tiles.
LARGE = [
    (40, 140, 712, 128, None, Int4Sm90Config(64, 2, 3)), (100, 88, 584, 64, "silu", Int4Sm90Config(32, 3, 2)),
    (130, 72, 392, 32, None, Int4Sm90Config(128, 2, 2)), (129, 35, 264, 128, "silu", Int4Sm90Config(256, 2)),
    (20, 150, 640, 64, None, Int4Sm90Config(128, 3)), (40, 70, 456, "mx", "silu", Int4Sm90Config(64, 2, 2)),
    (129, 72, 392, (32, torch.bfloat16), None, Int4Sm90Config(128, 2, 2)),
    (99, 88, 584, (64, torch.float16), "silu", Int4Sm90Config(32, 3, 2)),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case, half_dtype, make, nan, agrees, device, on_hopper):
    T, N, K, group, activation, config = case
    rows = N if activation is None else 2 * N
    words, scale, exact = four_bits(rows, K, group, device)
    x, bias = make(T, K, dtype=half_dtype), make(rows, dtype=half_dtype)
    residual, out = make(T, N, dtype=half_dtype), nan(T, N, dtype=half_dtype)
    workspace = Workspace(device)
    made = product(x, words, out, bias, residual, activation, scale, workspace=workspace)
    gemm_int4_sm90(made, config)
    agrees(out, *expected(x, words, scale, exact, bias, residual, activation))
    assert not workspace.counters(1).any()
    gemm_int4_sm90(made._replace(out=residual), config)  # in place
    assert torch.equal(residual, out)
