"""Catches: elements left out or read twice (the measured bandwidth would be wrong), a tail read past the end, a 32-bit offset."""

import pytest
import torch
from support.raising import raises

from minirt.kernels import bandwidth as kernel


def truth(x):
    return torch.stack([part.double().sum() for part in x.split(kernel.chunk(x.element_size()))])


@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_against_reference(case, dtype, make, nan, agrees):
    n = case["n"]
    beyond = nan(n + 64, dtype=dtype)  # NaN past the end
    x = beyond[:n].copy_(make(n, dtype=dtype))
    out = nan(-(-n // kernel.chunk(x.element_size())), dtype=torch.float32)
    assert kernel.read_sums(x, out) is out
    # The error is relative to the sum. A sum of signed values may be near zero; a sum of |x| is not.
    agrees(kernel.read_sums(x.abs()).unsqueeze(1), kernel.reference(x.abs()).unsqueeze(1), truth(x.abs()).unsqueeze(1))
    assert (out.double() - truth(x)).abs().max() <= 1e-5 * truth(x.abs()).max()


def test_every_element_counts_once(device):
    """fp32 sums whole numbers exactly, so a single 1 must show in its chunk's sum, wherever it lies."""
    size = kernel.chunk(4)
    n = 2 * size + 5
    for place in (0, size // 8 - 1, size // 8, size - 1, size, 2 * size, n - 1):
        x = torch.zeros(n, device=device)
        x[place] = 1
        assert kernel.read_sums(x).tolist() == [float(place // size == i) for i in range(3)], place


def test_empty_and_wrong_arguments(make, nan):
    assert kernel.read_sums(make(0, dtype=torch.float32)).shape == (0,)
    x = make(10, dtype=torch.float32)
    raises("x: not contiguous", kernel.read_sums, x[::2])
    raises("x: unsupported dtype", kernel.read_sums, x.long())
    raises(r"out: wrong shape; expected \[1\]; found \[2\]", kernel.read_sums, x, nan(2, dtype=torch.float32))


@pytest.mark.gpu
def test_past_two_to_the_31(device):
    n = (1 << 31) + 70_001
    x = torch.zeros(n, dtype=torch.bfloat16, device=device)
    x[-1] = x[1 << 31] = x[3] = 1
    sums = kernel.read_sums(x)
    assert sums.sum().item() == 3
    assert sums[[0, (1 << 31) // kernel.chunk(2), -1]].tolist() == [1, 1, 1]
