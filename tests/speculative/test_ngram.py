"""`NgramProposer` on a table of slots. tests/kernels/speculative has the matching itself."""

import pytest
import torch

from minirt.errors import InputError
from minirt.kernels.step import table as words
from minirt.kernels.step.table import Columns, Rows
from minirt.speculative.ngram import NgramProposer


def propose(proposer, history, columns):
    table = torch.full((2, columns.words), -7, dtype=torch.int32)
    table[1, : words.FINAL_LEN + 1] = torch.tensor([len(history) - 1, 1, 30])
    table[1, columns.tokens : columns.tokens + len(history)] = torch.tensor(history)
    one = torch.ones(1, dtype=torch.int32)
    proposer.propose(table, columns, Rows(one, one - 2, one, one, one, one[:0]))
    row = table[1].tolist()
    return row[words.MATCHED], row[words.NEXT_TOKENS + 1 :][: row[words.NUM_NEXT] - 1]


def test_its_numbers_are_those_of_the_matching():
    """The defaults (4 drafts, matches of 2 to 4 tokens), and others. Catches numbers that are exchanged."""
    columns, history = Columns(7, 1, 3, 40), [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5, 0, 5, 1, 2, 3, 4, 5]
    assert NgramProposer.needs_history
    assert NgramProposer().max_drafts == 4
    assert propose(NgramProposer(), history, columns) == (4, [0, 5, 1, 2])
    assert propose(NgramProposer(7, 3, 5), history, columns) == (5, [6, 7, 8, 9, 2, 3, 4])
    assert propose(NgramProposer(1, 1, 1), history, columns) == (1, [1])
    assert propose(NgramProposer(1, 6, 6), history, columns) == (0, [])


def test_what_it_cannot_do_is_refused():
    with pytest.raises(InputError, match=r"most: .*expected 1 to 3; found 4"):
        propose(NgramProposer(), [1], Columns(3, 1, 3, 40))
