"""The kernel that copies rows against its eager form. Catches a row that is cut off, rows of other tensors, and other rows."""

import pytest
import torch

from minirt.kernels.step import copies, rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {
    "words": [((5, 3, 7), torch.float32), ((5, 4098), torch.float32), ((5, 2), torch.bfloat16), ((5, 1), torch.int64)],
    "bytes": [((5, 3), torch.bfloat16), ((5, 4097), torch.int8), ((5, 9), torch.float32)], "one": [((2, 1), torch.int32)],
}  # fmt: skip


@pytest.mark.parametrize("kind", SHAPES)
def test_a_row_of_each_tensor_is_copied(kind):
    def made():
        draw = torch.Generator().manual_seed(len(kind))
        return [torch.randint(-100, 100, shape, generator=draw).to(dtype).to(DEVICE) for shape, dtype in SHAPES[kind]]

    expected, result = made(), made()
    table = rows.RowTable.of(result)
    assert table is not None
    assert table.word == (1 if kind == "bytes" else 4)
    last = len(result[0]) - 1
    for source, target in ((0, last), (last, last - 1), (1, 1)):
        rows.copy_rows(expected, source, target)
        copies.copy_rows(table, source, target)
        assert all(torch.equal(copied, other) for copied, other in zip(result, expected, strict=True))


def test_what_the_kernel_does_not_take():
    assert rows.RowTable.of([]) is None
    assert rows.RowTable.of([torch.zeros(4, 6)[:, :3]]) is None
