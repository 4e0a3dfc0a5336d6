"""Page numbers spread into block tables. Catches rows that mix, a row cut at the block size, and writes beyond a row."""

import pytest
import torch

from minirt.errors import InputError
from minirt.kernels import reference
from minirt.kernels.block_tables import expand_block_tables

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
COUNTS = [[1], [0], [3, 0, 7], [255, 256, 257, 1, 0], [700] * 3, [0, 0]]


def problem(counts):
    pages = torch.randint(1, 1 << 20, (sum(counts) + 5,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    rows, at = [], 0
    for count in counts:
        rows.append(pages[at : at + count].tolist())
        at += count
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return pages.to(DEVICE), starts.to(DEVICE), rows


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_rows_hold_their_pages_and_nothing_else_changes(counts):
    pages, starts, rows = problem(counts)
    width = max(counts) + 3
    tables = torch.full((len(counts) + 1, width), -9, dtype=torch.int32, device=DEVICE)  # one row more, behind the last
    expand_block_tables(pages, starts, tables[:-1])
    assert tables.tolist() == [[*row, *[-9] * (width - len(row))] for row in rows] + [[-9] * width]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_the_reference(counts):
    pages, starts, rows = problem(counts)
    width = max(counts)
    expected = [row + [0] * (width - len(row)) for row in rows]
    assert reference.block_tables(pages[: sum(counts)], starts, width).tolist() == expected


def test_a_row_is_cut_at_the_width():
    pages, starts, rows = problem([5, 2])
    tables = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    assert expand_block_tables(pages, starts, tables).tolist() == [rows[0][:3], [*rows[1], 0]]


def test_wrong_arguments():
    pages, starts, _ = problem([5, 2])
    tables = torch.zeros(2, 5, dtype=torch.int32, device=DEVICE)
    for wrong in ((pages.long(), starts, tables), (pages, starts[:2], tables), (pages, starts, tables.t())):
        with pytest.raises(InputError):
            expand_block_tables(*wrong)
