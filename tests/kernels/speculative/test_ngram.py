"""N-gram matching: its eager form against a search in plain Python, and its kernel against its eager form.

Catches a match that is too short, not the last one, or the suffix itself; tokens of another sequence or of an earlier one in the
same row; drafts beyond the sequence's end; a block of places that is lost; a row that is written although it has no next token.
"""

import random

import pytest
import torch

from minirt.errors import InputError
from minirt.kernels.speculative import ngram, reference
from minirt.kernels.step import table as words
from minirt.kernels.step.table import Columns, Rows

GARBAGE = -7
SIZES = {"most": 4, "shortest": 2, "longest": 4}


def expected(tokens, room, most, shortest, longest):
    """(length of the match, drafts), by comparing every suffix with every place. `room`: drafts that fit before the end."""
    for length in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 2, length - 2, -1):
            if tokens[end - length + 1 : end + 1] == tokens[len(tokens) - length :]:
                text = list(tokens)
                for i in range(most):  # one token after the other, so that the copy may reach into itself
                    text.append(text[end + 1 + i])
                drafts = text[len(tokens) :][: max(room, 0)]
                return (length, drafts) if drafts else (0, [])
    return 0, []


def build(histories, columns, *, frozen=(), finals=None, padding=()):
    """(table, rows): each history in the row of a random slot, with its next token last; GARBAGE everywhere else."""
    rng = random.Random(len(histories))
    table = torch.full((len(histories) + 3, columns.words), GARBAGE, dtype=torch.int32)
    slots = rng.sample(range(len(table)), len(histories))
    for i, (slot, history) in enumerate(zip(slots, histories, strict=True)):
        row = table[slot]
        row[words.NUM_CACHED], row[words.NUM_NEXT] = len(history) - 1, 0 if i in frozen else 1
        row[words.FINAL_LEN] = columns.history if finals is None else finals[i]
        row[words.NEXT_TOKENS] = history[-1]
        row[columns.tokens : columns.tokens + len(history)] = torch.tensor(history, dtype=torch.int32)
    order = [-1 if i in padding else slot for i, slot in enumerate(slots)]
    zeros = torch.zeros(len(order), dtype=torch.int32)
    return table, Rows(torch.tensor(order, dtype=torch.int32), zeros - 1, zeros + 1, zeros + 1, zeros + 1, zeros[:0])


def check(histories, columns, device, sizes=None, **options):
    """Both forms. The eager one is what `expected` says, and changes no other word. Returns (length, drafts) of each row."""
    sizes = sizes or SIZES
    table, rows = build(histories, columns, **options)
    eager, ours = table.clone(), table.clone().to(device)
    reference.propose(eager, columns, rows, **sizes)
    ngram.propose(ours, columns, Rows(*(values.to(device) for values in rows)), **sizes)
    assert torch.equal(ours.cpu(), eager)
    results = []
    for i, (history, slot) in enumerate(zip(histories, rows.slots.tolist(), strict=True)):
        if slot < 0 or i in options.get("frozen", ()):
            results.append(None)
            continue
        row = table[slot]
        matched, drafts = expected(history, int(row[words.FINAL_LEN]) - len(history) - 1, **sizes)
        row[words.NUM_NEXT], row[words.MATCHED] = 1 + len(drafts), matched
        row[words.NEXT_TOKENS + 1 : words.NEXT_TOKENS + 1 + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
        results.append((matched, drafts))
    assert torch.equal(eager, table)
    return results


@pytest.mark.parametrize(
    ("sizes", "block"), [((1, 1, 1), 64), ((7, 1, 3), 4), ((3, 3, 3), 64), ((4, 2, 16), 8), ((5, 16, 16), 32)]
)
def test_random_histories(sizes, block, device, monkeypatch):
    """Few different tokens, so that there are many matches; some sequences are frozen, padding, or near their end."""
    monkeypatch.setattr(ngram, "_BLOCK", block)
    ngram._constants.cache_clear()
    try:
        rng, columns, longest, most = random.Random(sum(sizes)), Columns(7, (), 5, 203), sizes[2], 6 * block
        histories = []
        for _ in range(24):
            length = min(rng.choice((1, 2, longest, longest + 1, longest + 2, most, rng.randint(1, most), most)), 201)
            period = [rng.randrange(5) for _ in range(rng.choice((1, 2, 3, 7, 50, 300)))]
            histories.append([rng.randrange(3) if rng.random() < 0.03 else token for token in (period * 201)[:length]])
        finals = [len(history) + rng.choice((1, 2, 3, 5, 9, 200)) for history in histories]
        chosen = rng.sample(range(24), 4)
        settings = dict(zip(SIZES, sizes, strict=True))
        results = check(histories, columns, device, settings, frozen=chosen[:2], finals=finals, padding=chosen[2:])
        matches = [match for match in results if match is not None]
        assert sum(1 for length, _ in matches if length) > 5
        assert sum(1 for length, _ in matches if not length) > 1
    finally:
        ngram._constants.cache_clear()


def test_many_tokens(device):
    """Two blocks. The only match ends right before the suffix, at both sides of the blocks' border, and is the first tokens."""
    rng, pattern, last = random.Random(3), [901, 902, 903], 2 * ngram._BLOCK - 4
    histories = []
    for back in (2, ngram._BLOCK - 1, ngram._BLOCK, last - 3):  # tokens between the match's last and the sequence's last
        history = [rng.randrange(900) for _ in range(last - 2)] + pattern
        history[last - 3 - back : last - back] = pattern
        histories.append(history)
    results = check(histories, Columns(4, (), 3, 2 * ngram._BLOCK), device)
    assert [length for length, _ in results] == [3] * 4


def test_the_end_of_a_sequence(device):
    """A step with all drafts computes the last token but one, and draws the last. MATCHED is 0 where no draft is left."""
    history = [1, 2, 3, 1, 2, 3, 1, 2]
    finals = [len(history) + n for n in (1, 2, 3, 5, 6, 0)]
    results = check([history] * 6, Columns(4, (), 3, 40), device, finals=finals)
    assert results == [(0, []), (4, [3]), (4, [3, 1]), (4, [3, 1, 2, 3]), (4, [3, 1, 2, 3]), (0, [])]


def test_a_history_that_fills_its_row(device):
    """The last tokens of a row, and a sequence whose next token had no column any more: it has no drafts."""
    columns = Columns(4, (), 3, 8)
    history = [5, 6, 5, 6, 5, 6, 5, 6]
    assert check([history], columns, device, finals=[30]) == [(4, [5, 6, 5, 6])]
    table, rows = build([history], columns)
    table[rows.slots.long(), words.NUM_CACHED] = 8
    before, ours = table.clone(), table.clone().to(device)
    reference.propose(table, columns, rows, **SIZES)
    ngram.propose(ours, columns, Rows(*(values.to(device) for values in rows)), **SIZES)
    assert torch.equal(table, before)
    assert torch.equal(ours.cpu(), before)


def test_no_sequence(device):
    rows = Rows(*torch.zeros(6, 0, dtype=torch.int32, device=device))
    ngram.propose(torch.zeros(1, 64, dtype=torch.int32, device=device), Columns(4, (), 3, 8), rows, **SIZES)


@pytest.mark.parametrize(("columns", "changed", "message"), [
    (Columns(4, (), 3, 0), {}, "history: n-gram matching reads the tokens of sequences; expected columns for 1 to"),
    (Columns(4, (), 3, 1 << 27), {}, "history: "), (Columns(3, (), 3, 8), {}, "most: .*; expected 1 to 3; found 4"),
    (Columns(4, (), 3, 8), {"most": 0}, "most: "), (Columns(4, (), 3, 8), {"shortest": 0}, "shortest, longest: "),
    (Columns(4, (), 3, 8), {"shortest": 5}, "found 5 and 4"), (Columns(4, (), 3, 8), {"longest": 17}, "<= 16; found 2 and 17"),
])  # fmt: skip
def test_numbers_out_of_range_are_refused(columns, changed, message):
    """By both forms. The kernel would read words that are no tokens, or pack a length into bits of a place."""
    rows = Rows(*torch.zeros(6, 0, dtype=torch.int32))
    for form in (reference, ngram):
        with pytest.raises(InputError, match=message):
            form.propose(torch.zeros(1, 64, dtype=torch.int32), columns, rows, **SIZES | changed)
