"""The table of slots against a model of sequences in plain Python, over random steps.

The steps mix chunks of prompts, single tokens and drafts. Slots are used again, sequences are preempted and admitted again, and
some draws are −1. Catches a wrong position, page, length, sum, row of logits or setting, a token that is lost or comes twice, and
a text that depends on drafts.
"""

import random
import struct

import pytest
import torch

from minirt.kernels.sampling.batch import COLUMNS, SamplingBatch
from minirt.kernels.step import table as words
from minirt.kernels.step.table import Columns, Rows, commit, derive, edit_table

VOCAB, KV_SPLIT = 50, 7


def bits(number):
    """The int32 with the bits of an fp32."""
    return struct.unpack("i", struct.pack("f", number))[0]


def rounded(number):
    """The fp32 that is nearest to `number`."""
    return struct.unpack("f", struct.pack("f", number))[0]


def rows_of(columns):
    """`Rows` of (slot, start, count, logits, draws) for each sequence, and tokens."""
    sequences, tokens = columns
    return Rows(*(torch.tensor(column, dtype=torch.int32) for column in (*zip(*sequences, strict=True), tokens)))


class Text:
    """A sequence that the model knows all about: the text that it will have, and how much of it is computed."""

    def __init__(self, rng, prompt, final):
        self.text = [rng.randrange(VOCAB) for _ in range(final)]
        self.prompt, self.final = prompt, final
        self.bad = rng.randrange(prompt, final) if rng.random() < 0.2 else None  # the token that comes out as −1
        numbers = [rng.randrange(40) if kind == "i" else rounded(rng.random()) for kind in COLUMNS]
        self.settings = [rng.choice((-1, 0, 5)), *numbers]  # in the order of the row's words
        self.seed, self.ruled = rng.randrange(-(1 << 63), 1 << 63), rng.randrange(2)
        self.known = prompt  # tokens that the host has
        self.computed = 0  # tokens whose KV values are cached
        self.slot = self.following = None  # following: the next tokens on the device, None while the prompt is computed
        self.frozen = False
        self.pages = []

    def drawn(self, place):
        """The token that is drawn at this place of the text."""
        return -1 if place == self.bad else self.text[place] if place < self.final else 13


class Model:
    """The table as the host sees it, and the running sequences."""

    def __init__(self, seed, columns, page_size):
        self.rng, self.columns, self.page_size = random.Random(seed), columns, page_size
        self.table = torch.randint(-9, VOCAB, (6, columns.words), dtype=torch.int32)
        self.running, self.free = [], list(range(6))
        self.edits, self.values = [], []

    def edit(self, text, column, numbers):
        self.edits.append([text.slot, column, len(numbers), len(self.values)])
        self.values += numbers

    def admit(self, text):
        """Give a slot, with nothing cached or with whole pages that are cached already."""
        text.slot = self.free.pop(self.rng.randrange(len(self.free)))
        text.computed = self.rng.randrange(text.known) // self.page_size * self.page_size
        text.following, text.pages, text.frozen = None, [], False
        low, high = (text.seed & 0xFFFFFFFF) - (text.seed << 32 & 1 << 63 and 1 << 32), text.seed >> 32
        logprobs, *numbers = text.settings
        numbers = [number if kind == "i" else bits(number) for number, kind in zip(numbers, COLUMNS, strict=True)]
        self.edit(text, 0, [text.computed, self.rng.randrange(3), text.final, text.prompt, -1, logprobs])
        self.edit(text, words.TEMPERATURE, [*numbers, low, high, text.ruled])
        if self.columns.history and text.computed:
            self.edit(text, self.columns.tokens, text.text[: text.computed])
        self.append_pages(text, text.computed)
        self.running.append(text)

    def append_pages(self, text, length):
        before = len(text.pages)
        while len(text.pages) * self.page_size < length:
            text.pages.append([self.rng.randrange(1 << 20) for _ in range(self.columns.groups)])
        for group in range(self.columns.groups):
            if new := [pages[group] for pages in text.pages[before:]]:
                self.edit(text, self.columns.page_tables + group * self.columns.pages + before, new)

    def leave(self, text):
        self.running.remove(text)
        self.free.append(text.slot)
        text.slot = None

    def draft(self, text):
        """Drafts for a sequence that goes on, of which the first ones are right."""
        if text.frozen or not self.columns.drafts:
            return
        number = self.rng.randint(0, self.columns.drafts)
        right = text.text[text.computed + 1 :][: self.rng.randint(0, number)]
        drafts = right + [self.rng.randrange(VOCAB) for _ in range(number - len(right))]
        text.following = [text.following[0], *drafts]
        self.edit(text, words.NUM_NEXT, [1 + number])
        if number:
            self.edit(text, words.NEXT_TOKENS + 1, drafts)

    def plan(self):
        """(sequences, their rows, their new tokens, the rows' tokens); a sequence None is padding."""
        chosen = [text for text in self.running if self.rng.random() < 0.8] + [None] * self.rng.randrange(3)
        self.rng.shuffle(chosen)
        rows, new, given = [], [], []
        for text in chosen:
            if text is None:
                rows.append((-1, self.rng.choice((-1, 3)), self.rng.randrange(3), self.rng.randrange(3), self.rng.randrange(3)))
                new.append(([], 0))
            elif text.following is None:
                left = text.known - text.computed
                count = self.rng.randint(1, left)
                draws = int(count == left)
                logits = self.rng.randint(draws, count)  # more than are drawn: log-probabilities of the prompt
                start = text.computed
                rows.append((text.slot, start, count, logits, draws))
                new.append((text.text[start : start + count], start))
                given += text.text[start : start + count]
            else:
                most = self.rng.randint(1, 1 + self.columns.drafts)
                rows.append((text.slot, -1, most, most, most))
                count = 1 if text.frozen else min(most, len(text.following), text.final - 1 - text.computed)
                new.append((text.following[:count], text.computed))
        for text, (tokens, start) in zip(chosen, new, strict=True):
            if text:
                self.append_pages(text, start + len(tokens))
        return chosen, rows, new, given

    def expected(self, chosen, rows, new, sizes, before):
        """What `derive` is to write, as lists."""
        T, R, Q = sizes
        tokens, positions, kv_slots, starts, lengths, splits, logit_rows, draws = [], [], [], [0], [], [0], [], []
        tables = before.tolist()
        for b, (text, (_, _, _, logits, drawn), (own, start)) in enumerate(zip(chosen, rows, new, strict=True)):
            first, count, length = len(tokens), len(own), start + len(own)
            for i, token in enumerate(own):
                page, within = divmod(start + i, self.page_size)
                tokens.append(token)
                positions.append(start + i)
                kv_slots.append(text.pages[page][0] * self.page_size + within)
            starts.append(len(tokens))
            lengths.append(length if text else 0)
            splits.append(splits[-1] + (-(-length // KV_SPLIT) if text else 0))
            if text is None:
                continue
            for group in range(self.columns.groups):
                for page in range(-(-length // self.page_size)):
                    tables[group][b][page] = text.pages[page][group]
            valid = list(range(first, first + count))[-logits:] if logits else []
            logit_rows += valid + [first + count - 1] * (logits - len(valid))
            steps = list(range(length + 1 - text.prompt - min(drawn, count), length + 1 - text.prompt))
            steps += range(length + 1 - text.prompt, length + 1 - text.prompt + drawn - len(steps))
            at = len(logit_rows) - drawn
            draws += [(at + i, text.slot if text.ruled else -1, *text.settings, text.seed, step) for i, step in enumerate(steps)]
        logit_rows += [min(r, T - 1) for r in range(len(logit_rows), R)]
        draws += [(q, -1, -1, *[0] * len(SamplingBatch._fields)) for q in range(len(draws), Q)]
        names = "draw_rows", "draw_slots", "draw_logprobs", *SamplingBatch._fields
        pad = T - len(tokens)
        return {name: [draw[i] for draw in draws] for i, name in enumerate(names)} | {
            "tokens": tokens + [0] * pad, "positions": positions + [0] * pad, "slots": kv_slots + [-1] * pad,
            "query_starts": starts, "seq_lens": lengths, "split_starts": splits, "seq_slots": [row[0] for row in rows],
            "block_tables": tables, "logits_indices": logit_rows,
        }  # fmt: skip

    def draw(self, chosen, rows, new):
        """The tokens that the sampler draws; from rows of no use, any token or −1."""
        drawn = []
        for text, (_, _, _, _, draws), (own, start) in zip(chosen, rows, new, strict=True):
            if text:
                valid = min(draws, len(own))
                places = range(start + len(own) - valid + 1, start + len(own) + 1)
                drawn += [text.drawn(place) if not text.frozen else 7 for place in places]
                drawn += [self.rng.randrange(-1, VOCAB) for _ in range(draws - valid)]
        return drawn

    def yields(self, text, row, own, start):
        """What a sequence yields, by its text; and its state after the step."""
        if text is None or text.frozen:
            return []
        if not row[4]:
            text.computed = start + len(own)
            return []
        out = []
        drafts = own[1:] if row[1] < 0 else []
        first = text.computed + 1 if row[1] < 0 else start + len(own)
        while True:
            token = text.drawn(first + len(out))
            out.append(token)
            if token < 0 or len(out) > len(drafts) or drafts[len(out) - 1] != token:
                break
        if out[-1] < 0:
            text.frozen = True
            text.following = text.following or [int(self.table[text.slot, words.NEXT_TOKENS])]  # an old one; nothing reads more
            return out
        text.computed = first + len(out) - 1
        text.following = [out[-1]]
        text.frozen = text.computed + 1 == text.final
        return out

    def check_row(self, text):
        """The words of a sequence's row after a step."""
        row = self.table[text.slot].tolist()
        assert row[words.NUM_CACHED] == text.computed
        if text.following is not None:
            assert row[words.NUM_NEXT] == (0 if text.frozen else 1)
            assert row[words.NEXT_TOKENS] == text.following[0]
        if self.columns.history and not text.frozen:
            written = text.computed + (text.following is not None)
            assert row[self.columns.tokens :][:written] == text.text[:written]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("columns", [Columns(0, 1, 40, 0), Columns(1, 2, 41, 40), Columns(4, 1, 43, 37)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_steps_give_what_a_model_of_sequences_gives(seed, columns, page_size, garbage):
    """All of a step's input, its result and the rows of the table, step by step; and every sequence yields its text."""
    model = Model(seed, columns, page_size)
    rng, waiting, ended, mixed = model.rng, [], 0, 0
    for _ in range(120):
        if len(waiting) < 2:
            prompt = rng.randint(1, 20)
            waiting.append(Text(rng, prompt, prompt + rng.randint(1, 16)))
        while model.free and waiting and rng.random() < 0.5:
            model.admit(waiting.pop(0))
        for text in model.running:
            if text.following is not None:
                model.draft(text)
        chosen, rows, new, given = model.plan()
        if not chosen:
            continue
        mixed += any(row[1] < 0 <= row[0] for row in rows) and any(row[1] >= 0 <= row[0] for row in rows)
        edits, values = torch.tensor(model.edits, dtype=torch.int32).view(-1, 4), torch.tensor(model.values, dtype=torch.int32)
        for _ in range(rng.randint(1, 2)):  # a step that is tried again sends the same edits again
            edit_table(model.table, edits, values)
        model.edits, model.values = [], []
        step_rows = rows_of((rows, given + [3] * rng.randrange(3)))
        used = [(len(own), row[3], row[4]) for row, (own, _) in zip(rows, new, strict=True) if row[0] >= 0]
        sizes = [sum(n) + rng.randrange(4) for n in zip(*used, strict=True)] if used else [1, 2, 1]
        out, settings = garbage(columns, len(rows), max(sizes[0], 1), *sizes[1:])
        sizes[0] = max(sizes[0], 1)
        expected = model.expected(chosen, rows, new, sizes, out.block_tables)
        derive(model.table, columns, step_rows, out, settings, page_size, KV_SPLIT, one_token=False)
        written = out._asdict() | settings._asdict()
        for name, value in expected.items():
            assert written[name].tolist() == value, name
        drawn = torch.tensor(model.draw(chosen, rows, new) + [5] * (sizes[2] - sum(n for *_, n in used)), dtype=torch.int64)
        result = torch.full((len(rows), 2 + columns.drafts), -77, dtype=torch.int32)
        commit(model.table, columns, step_rows, out.seq_lens, drawn, result)
        for text, row, (own, start), found in zip(chosen, rows, new, result.tolist(), strict=True):
            tokens = model.yields(text, row, own, start)
            assert found == [len(tokens), *tokens, *[0] * (1 + columns.drafts - len(tokens))]
            if text is None:
                continue
            if tokens and tokens[-1] >= 0:
                assert tokens == text.text[text.known : text.known + len(tokens)]
            text.known += sum(token >= 0 for token in tokens)
            model.check_row(text)
            if text.frozen and rng.random() < 0.5:  # otherwise the host sees it some steps later
                assert text.known == text.final or text.known <= text.bad
                ended += text.known == text.final
                model.leave(text)
            elif not text.frozen and rng.random() < 0.02:  # preempted: its tokens are computed again
                model.leave(text)
                waiting.insert(0, text)
    assert ended > 3
    assert mixed > 20


def test_one_token_each(garbage):
    """Rows of tokens are those of the sequences, with padding between them. By hand."""
    columns = Columns(drafts=1, groups=1, pages=3, history=0)
    table = torch.zeros(3, columns.words, dtype=torch.int32)
    table[:, : words.PROMPT_LEN + 1] = torch.tensor([[5, 1, 9, 2], [8, 1, 12, 3], [4, 0, 5, 1]])
    table[:, words.RULED] = torch.tensor([1, 0, 1])
    table[:, words.NEXT_TOKENS : words.NEXT_TOKENS + 2] = torch.tensor([[11, 88], [22, 88], [33, 88]])
    table[:, columns.page_tables : columns.page_tables + 3] = torch.tensor([[10, 11, 12], [20, 21, 22], [30, 31, 32]])
    rows = rows_of(([(1, -1, 1, 1, 1), (-1, -1, 1, 1, 1), (2, -1, 1, 1, 1), (0, 4, 1, 1, 1)], [44]))
    out, settings = garbage(columns, 4, 5, 4, 4)
    derive(table, columns, rows, out, settings, 4, 8, one_token=True)
    assert out.tokens.tolist() == [22, 0, 33, 44, 0]
    assert out.positions.tolist() == [8, 0, 4, 4, 0]
    assert out.slots.tolist() == [88, -1, 124, 44, -1]
    assert out.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert out.seq_lens.tolist() == [9, 0, 5, 5]
    assert out.split_starts.tolist() == [0, 2, 2, 3, 4]
    assert out.block_tables.tolist() == [[[20, 21, 22], [-77] * 3, [30, 31, -77], [10, 11, -77]]]
    assert out.logits_indices.tolist() == [0, 2, 3, 3]
    assert out.draw_slots.tolist() == [-1, 2, 0, -1]
    assert settings.step.tolist() == [6, 4, 3, 0]
