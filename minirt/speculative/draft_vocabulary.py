"""`draft_ids`: which ids drafts may have, so that their head is small (a reduced draft vocabulary, as in EAGLE-3 and FR-Spec).

The head of a vocabulary of 248,320 ids takes most of the time of a draft, and few ids make up most text. A token outside them is
never a draft, so the step that yields it yields no more.
"""

from pathlib import Path

import torch
from torch import Tensor

from minirt.errors import ConfigError
from minirt.files import read_text
from minirt.text.tokenizer import Tokenizer

MAX_TEXT = 16 << 20  # bytes; a MB takes about half a second, at each load


def draft_ids(tokenizer: Tokenizer | None, count: int, vocab: int, text: str | None = None) -> Tensor:
    """`count` ids of `vocab`, int64 in ascending order: those that are most frequent in a text, and special tokens.

    Where the text leaves room, or without one, the lowest ids follow: a tokenizer has its first merges there, which are those of
    the most frequent pairs.

    Args:
        tokenizer: None: of a model without one, the lowest ids are taken.
        text: the name of a file.
    Raises:
        ConfigError: the text cannot be read, or there is no tokenizer to read it with.
    """
    order = torch.arange(vocab)
    if tokenizer is not None:
        first = torch.zeros(vocab, dtype=torch.float32) if text is None else _counts(tokenizer, Path(text), vocab).float()
        first[[token for token in tokenizer.added_ids if token < vocab]] = float("inf")
        order = first.argsort(descending=True, stable=True)
    elif text is not None:
        what, expected = "a text needs a tokenizer", "a model with a tokenizer.json"
        raise ConfigError(what, where="draft_vocab_text", expected=expected, found="no tokenizer")
    return order[:count].sort().values


def _counts(tokenizer: Tokenizer, path: Path, vocab: int) -> Tensor:
    """How often each id occurs in a text file."""
    lines = read_text(path, limit=MAX_TEXT, error=ConfigError).splitlines(keepends=True)
    ids = torch.tensor([token for line in lines for token in tokenizer.encode_plain(line)], dtype=torch.int64)
    return torch.bincount(ids[ids < vocab], minlength=vocab)
