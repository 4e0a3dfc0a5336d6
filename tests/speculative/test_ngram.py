"""`NgramProposer` on a table of slots, and in an engine. tests/kernels/speculative has the matching itself."""

import pytest
import torch

from minirt.engine.engine import Engine
from minirt.engine.limits import EngineLimits, EngineOptions
from minirt.engine.request import Request
from minirt.errors import InputError
from minirt.kernels.step import table as words
from minirt.kernels.step.table import Columns, Rows
from minirt.sampling_params import SamplingParams, resolve
from minirt.speculative.proposers import NgramProposer
from minirt.step.kv_cache import KVCache, PagesSpec


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
    columns, history = Columns(7, (), 3, 40), [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5, 0, 5, 1, 2, 3, 4, 5]
    assert NgramProposer.needs_history
    assert NgramProposer().max_drafts == 4
    assert propose(NgramProposer(), history, columns) == (4, [0, 5, 1, 2])
    assert propose(NgramProposer(7, 3, 5), history, columns) == (5, [6, 7, 8, 9, 2, 3, 4])
    assert propose(NgramProposer(1, 1, 1), history, columns) == (1, [1])
    assert propose(NgramProposer(1, 6, 6), history, columns) == (0, [])


def test_what_it_cannot_do_is_refused():
    with pytest.raises(InputError, match=r"most: .*expected 1 to 3; found 4"):
        propose(NgramProposer(), [1], Columns(3, (), 3, 40))


class Cycle:
    """Each token comes after the one before it: 0, 1, 2, 3, 4, 0 …"""

    calls = 0

    def __call__(self, batch, cache):
        self.calls += 1
        return torch.eye(9)[(batch.input_ids[batch.logits_indices] + 1) % 5]


def test_an_engine_takes_it():
    """The same tokens in fewer steps, up to the last token. Catches a history without the prompt's or a step's tokens."""
    steps = []
    for proposer in (None, NgramProposer()):
        model, cache = Cycle(), KVCache([PagesSpec(1, 1)], 40, page_size=4)
        it = Engine(model, cache, EngineLimits(64, 4, 16), EngineOptions(adaptive_drafts=False), vocab_size=9, proposer=proposer)
        tokens = {}
        for i, prompt in enumerate(([0], [1, 2, 3, 4] * 5, [7, 8, 3])):
            it.add(Request(i, prompt, resolve(SamplingParams(max_tokens=31, temperature=0.0), None)))
            tokens[i] = []
        while it.has_work:
            for output in it.step():
                tokens[output.request_id] += output.token_ids
        assert tokens == {i: [(first + n) % 5 for n in range(31)] for i, first in enumerate((1, 0, 4))}
        steps.append(model.calls)
    assert steps[0] > 30
    assert steps[1] < 15
