"""`draft_ids`: the ids that drafts may have, so that their head is small (a reduced draft vocabulary, as in EAGLE-3 and FR-Spec).

The head of a vocabulary of 248,320 ids takes most of the time of a draft, and few ids make up most text. A token outside them is
never a draft, so the step that yields it yields no more.
"""

import hashlib
import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minirt.errors import ConfigError
from minirt.files import cache_folder, read_bytes, read_text, replace_file
from minirt.text.tokenizer import Tokenizer
from minirt.wording import warn

MAX_TEXT = 16 << 20  # bytes; a MB takes about half a second, at the first load
_MAX_FILE = 64 << 20  # bytes of a tokenizer, and of stored counts


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
    """How often each id occurs in a text file: [vocab] int64. Kept in the cache folder, for the next load."""
    text = read_text(path, limit=MAX_TEXT, error=ConfigError)
    digest = hashlib.sha256(read_bytes(tokenizer.path, limit=_MAX_FILE, error=ConfigError))
    digest.update(text.encode())
    file = cache_folder() / f"draft-vocabulary-{digest.hexdigest()[:32]}-{vocab}.npy"
    if (known := _stored(file, vocab)) is not None:
        return known
    ids = torch.tensor([t for line in text.splitlines(keepends=True) for t in tokenizer.encode_plain(line)], dtype=torch.int64)
    counts, content = torch.bincount(ids[ids < vocab], minlength=vocab), io.BytesIO()
    np.save(content, counts.numpy())
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content.getvalue())
    except OSError as error:
        warn(f"{file} cannot be written, so each load reads {path} again: {error}")
    return counts


def _stored(file: Path, vocab: int) -> Tensor | None:
    """Counts of an earlier load; None: there are none, or the file is damaged."""
    try:
        counts = np.load(io.BytesIO(read_bytes(file, limit=_MAX_FILE, error=ConfigError)), allow_pickle=False)
    except (ConfigError, ValueError, EOFError):
        return None
    return torch.from_numpy(counts) if counts.shape == (vocab,) and counts.dtype == np.int64 else None
