"""The kernels of the table of slots against their eager form, on random tables and steps.

Catches a sum that loses a block of sequences, padding that is not written or written over a sequence, a wrong program for a part
of a long sequence, a store to another slot's row, and a draft that counts after a wrong one.
"""

import random

import pytest
import torch

from minirt.kernels.sampling.batch import COLUMNS
from minirt.kernels.step import kernels, table
from minirt.kernels.step.table import Columns, Rows, StepTensors


def problem(seed, B, columns, page_size, *, one_token=False, padding=0.3, most=9):
    """(table, rows, (tokens, rows of logits, draws)) of a random step of B sequences.

    Some sequences yield no more tokens, some reach their final length within the step, and some have new tokens.
    """
    rng = random.Random(seed)
    S, longest = B + 3, columns.pages * page_size
    words = torch.randint(-(1 << 31), 1 << 31, (S, columns.words), generator=torch.Generator().manual_seed(seed)).int()
    settings = torch.rand(S, len(COLUMNS), generator=torch.Generator().manual_seed(seed))
    words[:, table.TEMPERATURE : table.SEED] = settings.view(torch.int32)
    words[:, table.NEXT_TOKENS : table.NEXT_TOKENS + 1 + columns.drafts] &= 0x3FF
    words[::3, table.NEXT_TOKENS + 1 : table.NEXT_TOKENS + min(2, 1 + columns.drafts)] = -1  # a draft that is no token
    rows, tokens, slots = [], 0, rng.sample(range(S), S)
    for b in range(B):
        final = rng.randint(3, longest)
        prompt = rng.randint(1, final - 1)
        near_end = rng.random() < 0.3
        cached = final - rng.randint(1, 2) if near_end else rng.randrange(final)
        next_tokens = rng.choice((0, 1, 1 + columns.drafts, 1 + columns.drafts))
        words[slots[b], : table.PROMPT_LEN + 1] = torch.tensor([cached, next_tokens, final, prompt])
        if rng.random() < padding:
            rows.append((-1, rng.choice((-1, 2)), rng.randrange(5), rng.randrange(5), rng.randrange(5)))
        elif rng.random() < 0.6:
            count = 1 if one_token else rng.choice((rng.randint(1, 1 + columns.drafts), 1 + columns.drafts))
            draws = rng.choice((count, count, count, 0))
            rows.append((slots[b], -1, count, draws, draws))
        else:
            start = rng.choice((0, rng.randrange(final)))
            count = 1 if one_token else min(final - start, rng.choice((1, rng.randint(1, most), most)))
            logits = rng.randint(0, count)
            rows.append((slots[b], start, count, logits, min(1, logits)))
            tokens += count
    message = torch.zeros(1 + 5 * B, dtype=torch.int32)[1:]  # rows are not aligned
    message.view(5, B).copy_(torch.tensor(rows).T)
    new = torch.randint(0, 1 << 30, (tokens,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    step = Rows(*message.split(B), tokens=new)
    used = [row for row in rows if row[0] >= 0]
    return words, step, tuple(sum(row[i] for row in used) for i in (2, 3, 4))


def on(device, step):
    return Rows(*(values.to(device) for values in step))


CASES = [
    (B, columns, page_size, one_token)
    for B in (1, 3, 65)
    for columns, page_size in (
        (Columns(0, (), 9, 0), 4), (Columns(1, (37,), 300, 1200), 4), (Columns(4, (), 17, 1088), 64),
        (Columns(4, (37,), 7, 0), 64),
    )
    for one_token in (False, True)
]  # fmt: skip
CASES.append((260, Columns(0, (), 9, 0), 4, True))
CASES.append(pytest.param((530, Columns(1, (), 9, 40), 4, False), marks=pytest.mark.exhaustive))


def check_derive(case, garbage, device, *, extra=(5, 3, 2), **options):
    """Both forms on the same garbage: all tensors and the table are equal. Returns them and the case."""
    B, columns, page_size, one_token = case
    words, step, (T, R, Q) = problem(B + columns.drafts, B, columns, page_size, one_token=one_token, **options)
    sizes = ((B if one_token else T) + extra[0], R + extra[1], Q + extra[2])
    (theirs, settings), (ours, draws) = garbage(columns, B, *sizes), garbage(columns, B, *sizes, device=device)
    larger = torch.full((columns.groups, B + 2, columns.pages), -77, dtype=torch.int32, device=device)
    ours = ours._replace(block_tables=larger[:, :B])
    own_words = words.clone().to(device)
    table.derive(words, columns, step, theirs, settings, page_size, 13, one_token=one_token)
    kernels.derive(own_words, columns, on(device, step), ours, draws, page_size, 13, one_token=one_token)
    for name, mine, wanted in zip((*StepTensors._fields, *settings._fields), (*ours, *draws), (*theirs, *settings), strict=True):
        assert torch.equal(mine.cpu(), wanted), name
    assert torch.equal(own_words.cpu(), words)
    assert bool((larger[:, B:] == -77).all())
    return words, step, theirs


def check_step(case, garbage, device, **options):
    """`check_derive`, then both forms of commit, with right and wrong drafts and tokens −1, and draws of no sequence."""
    B, columns, *_ = case
    words, step, out = check_derive(case, garbage, device, **options)
    rng, drawn = random.Random(B), []
    for slot, draws in zip(step.slots.tolist(), step.draws.tolist(), strict=True):
        if slot >= 0:
            drafts = words[slot, table.NEXT_TOKENS + 1 : table.NEXT_TOKENS + 1 + columns.drafts].tolist()
            right = rng.randint(0, draws)
            drawn += [*[*drafts, 77][:right], rng.choice((5, -1)), *drafts, 5][:draws]
    drawn = torch.tensor(drawn + [9] * (len(out.draw_rows) - len(drawn)), dtype=torch.int64)
    theirs = torch.full((B, 2 + columns.drafts), -77, dtype=torch.int32)
    ours, own_words, own_drawn = theirs.clone().to(device), words.clone().to(device), drawn.clone().to(device)
    table.commit(words, columns, step, out.seq_lens, drawn, theirs)
    kernels.commit(own_words, columns, on(device, step), out.seq_lens.to(device), own_drawn, ours)
    assert torch.equal(ours.cpu(), theirs)
    assert torch.equal(own_drawn.cpu(), drawn)
    if columns.drafts:  # what a sequence does not yield is no token for those who count
        yielded = [token for count, *row in theirs.tolist() for token in row[:count]]
        assert [token for token in drawn[: int((step.draws * (step.slots >= 0)).sum())].tolist() if token >= 0] == [
            token for token in yielded if token >= 0
        ]
    assert torch.equal(own_words.cpu(), words)
    if B == 65:
        assert set(theirs[:, 0].tolist()) >= {0, 1, 1 if case[3] else 1 + columns.drafts}
        assert (theirs[:, 1:] == -1).any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step(case, garbage, device):
    """Sequences of all kinds; more than 256 of them are several blocks."""
    check_step(case, garbage, device, padding=0.9 if case[0] > 300 else 0.3)


@pytest.mark.parametrize("one_token", [False, True])
def test_many_blocks(one_token, garbage, device, monkeypatch):
    """Blocks of 4, so that sequences, pages, tokens, rows of logits, draws and padding are many blocks each."""
    monkeypatch.setattr(kernels, "_BLOCK", 4)
    kernels._constants.cache_clear()
    try:
        check_step((21, Columns(4, (37,), 30, 120), 4, one_token), garbage, device, most=50, extra=(50, 40, 30))
    finally:
        kernels._constants.cache_clear()


def test_a_sequence_in_parts(garbage, device):
    """Long prompts, whose tokens and pages several programs write, in several rounds; the last one has no padding behind it."""
    _, step, _ = check_derive((6, Columns(0, (37,), 800, 3200), 4, False), garbage, device, most=3000, padding=0)
    _, other, _ = check_derive((5, Columns(4, (), 80, 0), 64, False), garbage, device, most=5000, padding=0, extra=(0, 0, 0))
    assert max(*step.counts.tolist(), *other.counts.tolist()) > kernels._BLOCK * kernels._MOST_PARTS


@pytest.mark.parametrize("one_token", [False, True])
@pytest.mark.parametrize("extra", [(0, 0, 0), (300, 290, 280)], ids=str)
def test_padding_only(one_token, extra, garbage, device):
    """No sequence at all, and exactly as many rows as there are, or blocks of padding."""
    check_derive((3, Columns(1, (37,), 5, 20), 4, one_token), garbage, device, padding=1, extra=(1 + extra[0], *extra[1:]))
    check_derive((3, Columns(1, (37,), 5, 20), 4, one_token), garbage, device, padding=0, extra=extra)


@pytest.mark.parametrize(("tiles", "case"), [(7, case) for case in CASES[:-1:2]] + [(100, case) for case in CASES[1:-1:2]])
def test_greedy_draws(case, tiles, device):
    """Like the commit of each row's largest logit; −1 where that is NaN or infinite; nothing unless it is wanted.

    Catches the row maxima of another draw, drafts that count although they are wrong, and a step that is committed twice.
    """
    B, columns, page_size, one_token = case
    words, step, (_, _, draws) = problem(11 + B, B, columns, page_size, one_token=one_token)
    step = step._replace(draws=step.draws.clamp(max=1 + columns.drafts))
    draws = int(step.draws[step.slots >= 0].sum())
    starts = torch.where(step.starts < 0, words[step.slots.clamp(min=0).long(), table.NUM_CACHED], step.starts)
    lengths = torch.where(step.slots < 0, 0, starts + step.counts).int()
    generator = torch.Generator().manual_seed(tiles)
    logits = torch.randint(-3, 4, (draws, 16 * tiles), generator=generator).float() * 0.25  # many equal ones, and -0
    drafts = words[step.slots.clamp(min=0).long(), table.NEXT_TOKENS + 1 : table.NEXT_TOKENS + 1 + columns.drafts]
    drafts = torch.cat((drafts, torch.full((B, 1), -1)), 1)
    place = [(b, i) for b in range(B) if step.slots[b] >= 0 for i in range(int(step.draws[b]))]
    for row, (b, i) in enumerate(place):
        if 0 <= (draft := int(drafts[b, i])) < logits.shape[1] and row % 4:
            logits[row, draft] = 9.0
    logits[::9] = torch.tensor([float("-inf"), float("nan"), float("inf")])[torch.arange(len(logits[::9])) % 3, None]
    tokens = torch.where(logits.amax(1).isfinite(), logits.argmax(1), -1)
    value, column = logits.view(draws, tiles, 16).max(2)
    bits = (value + 0.0).view(torch.int32).long()
    key = torch.where(value.isnan(), 2**31 - 1, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    packed = (key << 32) | (2**31 - 1 - (column + 16 * torch.arange(tiles)))
    maxima = torch.full((draws, tiles + 3), 2**62)[:, :tiles].copy_(packed).to(device)
    result = torch.full((B, 2 + columns.drafts), -77, dtype=torch.int32)
    for wanted in (0, 1):
        ours, own_words = result.clone().to(device), words.clone().to(device)
        flag = torch.tensor([0, 0, wanted], dtype=torch.int32, device=device)[2:]
        kernels.commit_greedy(own_words, columns, on(device, step), lengths.to(device), maxima, flag, ours)
        if not wanted:
            assert torch.equal(ours.cpu(), result)
            assert torch.equal(own_words.cpu(), words)
    table.commit(words, columns, step, lengths, tokens, result)
    assert torch.equal(ours.cpu(), result)
    assert torch.equal(own_words.cpu(), words)


def test_no_draws_and_no_tokens_to_commit(device):
    """A step without draws commits the cached tokens only."""
    columns = Columns(0, (), 3, 0)
    words, step, _ = problem(3, 3, columns, 4, padding=0)
    step = step._replace(draws=torch.zeros(3, dtype=torch.int32), starts=torch.tensor([-1, 2, 2], dtype=torch.int32))
    lengths = torch.tensor([7, 8, 9], dtype=torch.int32)
    theirs, own_words = torch.full((3, 2), -77, dtype=torch.int32), words.clone().to(device)
    ours, drawn = theirs.clone().to(device), torch.zeros(0, dtype=torch.int64)
    table.commit(words, columns, step, lengths, drawn, theirs)
    kernels.commit(own_words, columns, on(device, step), lengths.to(device), drawn.to(device), ours)
    assert ours.tolist() == theirs.tolist() == [[0, 0]] * 3
    assert torch.equal(own_words.cpu(), words)


@pytest.mark.parametrize("number", [0, 1, 31, 32, 70])
def test_edits(number, device):
    """Edits of one word to more than a block, more edits than programs, and fewer than there is room for."""
    rng = random.Random(number)
    words = torch.randint(0, 1000, (80, 2600), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    edits, values = [], list(range(-5, 0))
    for slot in rng.sample(range(80), number):
        count = rng.choice((1, 2, 30, 1024, 1025, 2500)) if len(edits) % 2 else 1
        edits.append([slot, rng.randint(0, 2600 - count), count, len(values)])
        values += [-rng.randrange(1, 1 << 31) for _ in range(count)]
    edits = torch.tensor(edits, dtype=torch.int32).view(-1, 4)
    room = torch.cat((edits, torch.tensor([[0, 0, 2600, 0]] * 40, dtype=torch.int32)))  # edits of an earlier step
    values, own_words = torch.tensor(values, dtype=torch.int32), words.clone().to(device)
    table.edit_table(words, edits, values)
    count = torch.tensor([number], dtype=torch.int32, device=device)
    kernels.edit_table(own_words, room.to(device), values.to(device), count)
    assert torch.equal(own_words.cpu(), words)


def test_no_sequence(garbage, device):
    """B = 0: all is padding, and nothing is committed."""
    columns = Columns(1, (), 4, 8)
    rows = Rows(*torch.zeros(6, 0, dtype=torch.int32, device=device))
    words = torch.full((2, columns.words), 7, dtype=torch.int32, device=device)
    out, settings = garbage(columns, 0, 3, 2, 2, device=device)
    kernels.derive(words, columns, rows, out, settings, 4, 8, one_token=False)
    kernels.commit(words, columns, rows, out.seq_lens, out.draw_rows, out.block_tables[0, :, :3])
    assert (out.query_starts.tolist(), out.split_starts.tolist(), out.slot_mapping.tolist()) == ([0], [[0]], [[-1] * 3])
    assert (out.logits_indices.tolist(), out.draw_slots.tolist()) == ([0, 1], [-1, -1])
    assert bool((words == 7).all())


@pytest.mark.parametrize("drafts", [0, 1, 4, 7])
def test_report(drafts, device):
    """Both forms, by plain Python: the drafts of each sequence, 0 behind them, and 0 for padding. A draft outside the vocabulary
    is reported, but the table has 0: the embedding would read memory beyond its table."""
    columns, vocab = Columns(drafts, (), 5, 8), 50
    words, step, _ = problem(drafts, 33, columns, 4)
    ids = torch.tensor([0, 49, 50, -1, 2**31 - 1, 7, -(2**31)], dtype=torch.int32)
    first, end = table.NEXT_TOKENS + 1, table.NEXT_TOKENS + 1 + drafts
    for slot in range(len(words)):
        words[slot, table.NUM_NEXT] = slot % (2 + drafts)
        words[slot, first:end] = ids.roll(slot)[:drafts]
    expected, reported = words.clone(), torch.zeros(33, 2 + drafts, dtype=torch.int32)
    for row, slot in enumerate(step.slots.tolist()):
        if slot >= 0:
            count = max(int(words[slot, table.NUM_NEXT]) - 1, 0)
            reported[row, :2] = words[slot, [table.MATCHED, table.NUM_NEXT]]
            reported[row, 2 : 2 + count] = words[slot, first : first + count]
            for i in range(first, first + count):
                if not 0 <= words[slot, i] < vocab:
                    expected[slot, i] = 0
    own_words, out = words.clone().to(device), torch.full((33, 2 + drafts), -77, dtype=torch.int32)
    ours = out.clone().to(device)
    table.report(words, columns, step, out, vocab)
    kernels.report(own_words, columns, on(device, step), ours, vocab)
    assert out.tolist() == ours.tolist() == reported.tolist()
    assert torch.equal(words, expected)
    assert torch.equal(own_words.cpu(), expected)


def test_one_token_each(garbage):
    """Rows of tokens are those of the sequences, with padding between them. By hand."""
    columns = Columns(drafts=1, windows=(), pages=3, history=0)
    words = torch.zeros(3, columns.words, dtype=torch.int32)
    words[:, : table.PROMPT_LEN + 1] = torch.tensor([[5, 1, 9, 2], [8, 1, 12, 3], [4, 0, 5, 1]])
    words[:, table.RULED] = torch.tensor([1, 0, 1])
    words[:, table.NEXT_TOKENS : table.NEXT_TOKENS + 2] = torch.tensor([[11, 88], [22, 88], [33, 88]])
    words[:, columns.page_tables : columns.page_tables + 3] = torch.tensor([[10, 11, 12], [20, 21, 22], [30, 31, 32]])
    sequences = [(1, -1, 1, 1, 1), (-1, -1, 1, 1, 1), (2, -1, 1, 1, 1), (0, 4, 1, 1, 1)]
    rows = Rows(*torch.tensor(sequences, dtype=torch.int32).T, tokens=torch.tensor([44], dtype=torch.int32))
    out, settings = garbage(columns, 4, 5, 4, 4)
    table.derive(words, columns, rows, out, settings, 4, 8, one_token=True)
    assert out.tokens.tolist() == [22, 0, 33, 44, 0]
    assert out.positions.tolist() == [8, 0, 4, 4, 0]
    assert out.slot_mapping[0].tolist() == [88, -1, 124, 44, -1]
    assert out.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert out.seq_lens.tolist() == [9, 0, 5, 5]
    assert out.split_starts[0].tolist() == [0, 2, 2, 3, 4]
    assert out.block_tables.tolist() == [[[20, 21, 22], [-77] * 3, [30, 31, -77], [10, 11, -77]]]
    assert out.logits_indices.tolist() == [0, 2, 3, 3]
    assert out.draw_slots.tolist() == [-1, 2, 0, -1]
    assert settings.step.tolist() == [6, 4, 3, 0]
