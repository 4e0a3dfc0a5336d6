"""The masks of rows with drafts against those of fresh constraints that were told the drafts.

Catches a row that has the mask of the state before or after, a walk that goes on behind a wrong draft or an end, a state that
drafts have changed, rows of another sequence, and an error of a draft that may never be accepted.
"""

import random

import pytest
import torch
from support.structured import EOS, TOKENIZER, VOCAB, allowed, compiled, constraints

from minirt.engine.token_constraints import ConstrainedRows
from minirt.errors import InputError
from minirt.structured import grammar

OWN = constraints()
WORDS = -(-VOCAB // 32)
SCHEMA = {
    "type": "object", "required": ["name", "n", "tags"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string"}, "n": {"type": "integer"}, "tags": {"type": "array", "items": {"enum": ["x", "yy"]}},
    },
}  # fmt: skip
LIMITED = 'start: word "." rest\nword[max_tokens=2]: /[a-z ]+/\nrest[stop="!"]: /[a-z ]+/\n'


def row_of(choice):
    """A row of a mask with these tokens."""
    words = torch.zeros(WORDS * 32, dtype=torch.int64)
    words[:VOCAB] = choice
    packed = (words.view(-1, 32) << torch.arange(32)).sum(1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


class Reference:
    """A sequence under a constraint. Its masks are those of constraints that were told all tokens and no draft."""

    def __init__(self, own, start, ends, rng):
        self.own, self.start, self.ends, self.rng, self.tokens = own, start, ends, rng, []
        self.constraint = start()

    def fresh(self, drafts=()):
        other = self.start()
        other.accept([*self.tokens, *drafts])
        return allowed(self.own, other)

    def drafts(self):
        """Allowed tokens; often, a wrong one, an end or no token at all among them."""
        found, count = [], self.rng.randint(0, 7)
        while len(found) < count:
            choice = self.fresh(found)
            good = [t for t in choice.nonzero().flatten().tolist() if t not in self.ends]
            kind = self.rng.random()
            if kind < 0.15 or not good:
                other = [*self.ends, -1, VOCAB - 1, VOCAB, WORDS * 32, 1 << 30, -(1 << 30), self.rng.randrange(VOCAB)]
                return [*found, self.rng.choice(other), *(self.rng.randrange(VOCAB) for _ in range(count - len(found) - 1))]
            found.append(self.rng.choice(good))
        return found

    def expected(self, num_rows, drafts):
        """The rows, and how many of them are masks."""
        rows, before = [], []
        for i in range(num_rows):
            choice = self.fresh(before)
            rows.append(row_of(choice))
            draft = drafts[i] if i < len(drafts) else -1
            if not 0 <= draft < VOCAB or not choice[draft] or draft in self.ends:
                break
            before.append(draft)
        return torch.stack(rows + [torch.full((WORDS,), -1, dtype=torch.int32)] * (num_rows - len(rows))), len(rows)

    def advance(self):
        """Take a token. Returns False at the end."""
        good = [t for t in self.fresh().nonzero().flatten().tolist() if t not in self.ends]
        if not good:
            return False
        self.tokens.append(self.rng.choice(good))
        self.constraint.accept(self.tokens[-1:])
        return True


(LETTER,) = TOKENIZER.encode("q")
CASES = {
    "json": ({"json": SCHEMA}, (EOS,), 0), "compact json": ({"json": SCHEMA, "disable_any_whitespace": True}, (EOS,), 0),
    "regex": ({"regex": "[a-z ]{2,9}(, [0-9]+)?"}, (EOS,), 0), "choice": ({"choice": ["yes", "yes and no", "maybe"]}, (EOS,), 0),
    "grammar": ({"grammar": 'start: item ("," item)*\nitem: /[a-z]+/ | "(" start ")"\n'}, (EOS,), 0),
    "limited": ({"grammar": LIMITED}, (EOS,), 0), "reasoning": ({"regex": "[0-9]{1,4}", "reasoning_end": "!"}, (EOS, 8), 0),
    "min_tokens": ({"regex": "[a-z]{1,9}"}, (EOS, 9), 3), "an end that is text": ({"regex": "[o-r]{1,6}"}, (EOS, LETTER), 0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_rows_with_drafts_are_those_of_a_constraint_that_was_told_the_drafts(case):
    """Random drafts, right and wrong. `limited`: a grammar of which llguidance cannot take tokens back."""
    spec, ends, min_tokens = CASES[case]
    grammar_of, rng, longest = compiled(OWN, **spec), random.Random(case), 0
    for _ in range(2):
        it = Reference(OWN, lambda: grammar_of.start(ends, min_tokens), ends, rng)
        for _ in range(8):
            drafts = it.drafts()
            num_rows = rng.choice((1, 1 + len(drafts), 1 + len(drafts), 2 + len(drafts), max(1, len(drafts))))
            expected, count = it.expected(num_rows, drafts)
            masks = torch.full((num_rows, WORDS), 0x55555555, dtype=torch.int32)
            assert not OWN.fill(masks, [ConstrainedRows(it.constraint, num_rows, drafts)])
            assert torch.equal(masks, expected), (it.tokens, drafts)
            assert torch.equal(allowed(OWN, it.constraint), it.fresh()), "the state is as it was"
            longest = max(longest, count)
            if not it.advance():
                break
    assert longest > 2


def test_several_sequences_of_different_numbers_of_rows():
    """Rows of sequences with and without a constraint, in any order; some have no drafts, or none that is right."""
    rng, specs = random.Random(5), ["json", "regex", "choice", "reasoning", "min_tokens"]
    for _ in range(4):
        entries, expected = [], []
        for name in rng.sample([*specs, None, None], 7):
            num_rows = rng.randint(1, 8)
            if name is None:
                entries.append(ConstrainedRows(None, num_rows, [1] * rng.randint(0, num_rows)))
                expected.append(torch.full((num_rows, WORDS), -1, dtype=torch.int32))
                continue
            spec, ends, min_tokens = CASES[name]
            own = compiled(OWN, **spec)
            it = Reference(OWN, lambda own=own, ends=ends, least=min_tokens: own.start(ends, least), ends, rng)
            drafts = it.drafts()
            entries.append(ConstrainedRows(it.constraint, num_rows, drafts))
            expected.append(it.expected(num_rows, drafts)[0])
        masks = torch.full((sum(entry.num_rows for entry in entries), WORDS), 0x55555555, dtype=torch.int32)
        assert not OWN.fill(masks, entries)
        assert torch.equal(masks, torch.cat(expected))


def test_an_error_behind_a_draft_allows_no_token_and_leaves_the_state_alone():
    """The sequence may never get there. Without drafts, it has the error when it does."""
    own = compiled(OWN, grammar='start: /[0-9]/ (x | "b")\nx: "a" x')
    constraint, (seven,), (a,), (b,) = own.start((EOS,), 0), *(TOKENIZER.encode(text) for text in "7ab")
    constraint.accept([seven])
    masks = torch.full((5, WORDS), 0x55555555, dtype=torch.int32)
    assert not OWN.fill(masks, [ConstrainedRows(constraint, 5, [a, a, a, a])])
    assert torch.equal(masks[0], row_of(allowed(OWN, constraint)))
    assert torch.equal(masks[1], row_of(torch.arange(VOCAB) == a))
    assert not masks[2].any()
    assert bool((masks[3:] == -1).all())
    other = own.start((EOS,), 0)
    for token in (seven, a):
        other.accept([token])
        allowed(OWN, other)
    other.accept([a])
    with pytest.raises(InputError, match="generated token 3: the grammar cannot go on"):
        allowed(OWN, other)
    constraint.accept([b])
    assert allowed(OWN, constraint)[EOS]


def test_errors_are_those_of_sequences_not_of_rows(monkeypatch):
    """The rows after the first have no masks then. The other sequences have theirs."""
    monkeypatch.setattr(grammar.limits, "MAX_LEXER_STATES", 300)
    own, letters = constraints(), random.Random(0)
    bad = compiled(own, regex=".*a.{12}").start((EOS,), 0)
    bad.accept([token for _ in range(2000) for token in TOKENIZER.encode(letters.choice("ab"))])
    good, (letter,) = compiled(own, regex="x+"), TOKENIZER.encode("x")
    masks = torch.zeros(9, WORDS, dtype=torch.int32)
    failed = own.fill(masks, [
        ConstrainedRows(None, 2), ConstrainedRows(good.start((EOS,), 0), 2, [letter]), ConstrainedRows(bad, 3, [letter, letter]),
        ConstrainedRows(good.start((EOS,), 0), 2, [letter]),
    ])  # fmt: skip
    assert set(failed) == {2}
    assert torch.equal(masks[2:4], masks[7:])
    assert bool((masks[5:7] == -1).all())
    assert bool(masks[3, letter >> 5] >> (letter & 31) & 1)
