"""Texts drawn at random from the masks of a constraint, without a model."""

import torch

from minirt.engine.token_constraints import ConstrainedRows
from minirt.models import embedded
from minirt.structured.constraints import Constraints
from minirt.structured.params import StructuredOutputsParams
from minirt.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(embedded())
VOCAB = 2100  # more than the tokenizer has: as if the model's were padded
EOS = 0
TEXTS = [TOKENIZER.decode([token], skip_special_tokens=False) for token in range(TOKENIZER.vocab_size)]
_SINGLE = torch.tensor([token for token, text in enumerate(TEXTS) if len(text) == 1 and text.isascii()])
_CLOSING = torch.tensor([token for token, text in enumerate(TEXTS) if text and set(text) <= set('"]}')])


def constraints(ends=(EOS,)):
    return Constraints(TOKENIZER, VOCAB, ends)


class Compiled:
    """A grammar that compiles. `start` gives a constraint for a new sequence."""

    def __init__(self, own, spec):
        self._own, self._spec = own, spec
        own.compile(spec)

    def start(self, ends, min_tokens):
        return self._own.prepare(self._spec, ends, min_tokens).result(timeout=60)


def compiled(own, **spec):
    return Compiled(own, StructuredOutputsParams(**spec))


def allowed(own, constraint):
    """[VOCAB] bool: what the mask of a row between two others allows."""
    masks = torch.full((3, -(-VOCAB // 32)), 0x55555555, dtype=torch.int32)
    failed = own.fill(masks, [ConstrainedRows(each) for each in (None, constraint, None)])
    assert set(failed) <= {1}
    if failed:
        raise failed[1]
    assert bool((masks[[0, 2]] == -1).all()), "rows without a constraint are free"
    bits = masks[1].unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)
    return (bits & 1).bool().flatten()[:VOCAB]


def draw(own, constraint, seed, *, push=20, limit=150, ends=(EOS,)):
    """Tokens drawn with equal probabilities. After `push` of them, ends come first, then what may lead there.

    Returns the tokens without the one that ended them, and whether one did.
    """
    random, tokens = torch.Generator().manual_seed(seed), []
    while len(tokens) < limit:
        choice = allowed(own, constraint)
        assert bool(choice.any()), f"a dead end after {TOKENIZER.decode(tokens)!r}"
        assert not bool(choice[TOKENIZER.vocab_size :].any()), "an id that the tokenizer lacks"
        if len(tokens) >= push:
            if bool(choice[list(ends)].any()):
                return tokens, True
            for few in (_CLOSING, _SINGLE)[int(torch.rand(1, generator=random) < 0.5) :]:
                if bool(choice[few].any()):
                    choice &= torch.zeros_like(choice).index_fill_(0, few, True)
                    break
        token = int(torch.multinomial(choice.float(), 1, generator=random))
        if token in ends:
            return tokens, True
        tokens.append(token)
        constraint.accept([token])
    return tokens, False


def text_of(tokens):
    return TOKENIZER.decode(tokens, skip_special_tokens=False)
