"""Catches: wrong row or column stride, a dropped tail of H, 32-bit row offsets (gpu)."""

import pytest
import torch

from minirt.errors import InputError
from minirt.kernels import embedding as kernel


@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_rows_are_copied_exactly(case, dtype, device, make, nan):
    T, V, H = case["T"], case["V"], case["H"]
    table = make(V, H, dtype=dtype)
    tokens = torch.randint(V, (T,), device=device)
    tokens[0] = V - 1
    out = nan(T, H, dtype=dtype)
    assert kernel.embedding(tokens, table, out) is out
    assert torch.equal(out, table[tokens])


def test_no_tokens(device, make):
    out = kernel.embedding(torch.empty(0, dtype=torch.int64, device=device), make(3, 8, dtype=torch.float32))
    assert out.shape == (0, 8)


def test_wrong_arguments_are_named(device, make):
    table = make(3, 8, dtype=torch.float32)
    with pytest.raises(InputError, match="tokens: wrong dtype"):
        kernel.embedding(torch.zeros(2, dtype=torch.int32, device=device), table)
    with pytest.raises(InputError, match="out: wrong shape"):
        kernel.embedding(torch.zeros(2, dtype=torch.int64, device=device), table, table)


@pytest.mark.gpu
def test_table_past_2_31_elements(device):
    table = torch.empty(600_000, 4096, dtype=torch.float16, device=device)
    table[-1] = torch.arange(4096, device=device) / 8
    tokens = torch.full((2,), 599_999, device=device)
    assert torch.equal(kernel.embedding(tokens, table), table[-1].expand(2, -1))
