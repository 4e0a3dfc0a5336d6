"""Catches: a scale from padding, from another row or from values that are not finite; rounding down, ties away from even, or
beyond the largest value; NaN that turn into numbers; parts of a row that no program writes."""

import pytest
import torch
from support.raising import raises

from minirt.kernels import quantize as kernel
from minirt.kernels import reference

FP8 = torch.float8_e4m3fn


def codes(device):
    """All finite e4m3 values, in order."""
    values = torch.arange(256, dtype=torch.uint8, device=device).view(FP8).float().double()
    return values[values.isfinite()].unique()


def check_nearest(x, values, scale):
    """Every value is a nearest e4m3 value to x / scale, up to the rounding of the division."""
    torch.testing.assert_close(scale.double(), x.double().abs().amax(1) / 448, rtol=1e-6, atol=0)
    exact, known = x.double() / scale.double().unsqueeze(1), codes(x.device)
    above = torch.searchsorted(known, exact.contiguous()).clamp(1, len(known) - 1)
    best = torch.minimum((exact - known[above]).abs(), (exact - known[above - 1]).abs())
    assert bool(((exact - values.double()).abs() <= best + 1e-6 * exact.abs()).all())


def run(x, nan):
    out = torch.full(x.shape, 0x7F, dtype=torch.uint8, device=x.device).view(FP8)
    return kernel.quantize(x, out, nan(len(x), dtype=torch.float32))


def check_groups(x, nan):
    """Each 128 columns of a row are quantized like a row of their own."""
    T, K = x.shape
    out = torch.full((T, K), 0x7F, dtype=torch.uint8, device=x.device).view(FP8)
    values, scale = kernel.quantize(x, out, nan(T, -(-K // 128), dtype=torch.float32), blocks=True)
    for group, first in enumerate(range(0, K, 128)):
        columns = slice(first, first + 128)
        check_nearest(x[:, columns], values[:, columns], scale[:, group])
    expected, expected_scale = reference.quantize_fp8_blocks(x, T)
    assert torch.equal(values.view(torch.uint8), expected.contiguous().view(torch.uint8))
    assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize(("T", "K"), [(1, 16), (3, 97), (17, 576), (2, 1290)])
def test_groups_of_128_columns(T, K, dtype, make, nan):
    """Sizes differ between groups: a scale of a neighbour would be wrong by far. The last group is shorter."""
    x = make(T, K, dtype=dtype, scale=0.01)
    x *= torch.exp2(torch.arange(K, device=x.device) // 128 % 5).to(dtype)
    check_groups(x, nan)


@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_every_value_takes_the_nearest_code(case, dtype, make, nan):
    x = make(case["T"], case["K"], dtype=dtype, scale=3.0)
    x[0] *= 100
    values, scale = run(x, nan)
    check_nearest(x, values, scale)
    expected, expected_scale = reference.quantize_fp8(x)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale, expected_scale)


def test_ties_to_even_and_subnormal_codes(device, nan):
    """Values half way between two codes, and just above and below half way. The largest value is 448, so the scale is 1."""
    known = codes(device)
    middle = (known[1:] + known[:-1]) / 2
    x = torch.cat([known, middle, middle * (1 + 2**-20), middle * (1 - 2**-20)]).float().unsqueeze(0)
    values, scale = run(x, nan)
    assert scale.item() == 1
    assert torch.equal(values.float(), x.to(FP8).float())


def test_rows_without_a_scale(device, nan):
    x = torch.zeros(7, 40, device=device)
    x[1, 2], x[2, 3], x[3] = torch.nan, -torch.inf, torch.inf
    x[2, 4], x[4, 0], x[5], x[6] = 2.0, 1e-38, 3.4e38, torch.nan
    values, scale = run(x, nan)
    expected, expected_scale = reference.quantize_fp8(x)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    assert scale[[0, 1, 3, 6]].tolist() == [1.0] * 4
    bad = values.view(torch.uint8) % 128 == 127
    assert torch.equal(bad, ~x.isfinite())
    assert torch.equal(values.float()[~bad], expected.float()[~bad])


def test_an_outlier_concerns_its_own_row_alone(make, nan):
    x = make(5, 300, dtype=torch.float32)
    values, scale = run(x, nan)
    x[2, 7] *= 1000
    again, scale_again = run(x, nan)
    others = [0, 1, 3, 4]
    assert torch.equal(again[others].float(), values[others].float())
    assert torch.equal(scale_again[others], scale[others])
    check_nearest(x, again, scale_again)


def test_empty(make):
    values, scale = kernel.quantize(make(3, 8, dtype=torch.float32)[:0])
    assert (values.shape, scale.shape) == ((0, 8), (0,))


def test_wrong_arguments_are_named(make):
    x = make(2, 8, dtype=torch.float32)
    raises("out: wrong dtype", kernel.quantize, x, torch.empty(2, 8))
    raises("scale: wrong shape", kernel.quantize, x, None, torch.empty(3))
    raises(r"scale: wrong shape; expected \[2, 1\]", kernel.quantize, x, None, torch.empty(1, 2), blocks=True)
    raises("x: unsupported dtype", kernel.quantize, x.double())


def test_every_part_of_a_row_is_written(make, nan):
    """With few tokens, several programs share a row. Here a row has three blocks, and the last one has the largest value."""
    for T in (2, 40, 70):
        x = make(T, 9000, dtype=torch.float16)
        x[1, 8999] = 200
        check_nearest(x, *run(x, nan))


@pytest.mark.gpu
@pytest.mark.parametrize("K", [3584, 18944, 29568])
@pytest.mark.parametrize("T", [1, 8, 64, 100, 2000])
def test_large(T, K, half_dtype, make, nan):
    x = make(T, K, dtype=half_dtype, scale=5.0)
    check_nearest(x, *run(x, nan))
    check_groups(x, nan)
