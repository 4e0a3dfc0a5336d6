"""N-gram matching (prompt lookup decoding, Saxena 2023) in NumPy: the eager form of the kernel in `ngram.py`.

The last tokens of a sequence, its next token included, are looked up in the tokens before. What followed there is proposed.
"""

from functools import lru_cache

import numpy as np
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.speculative.limits import LONGEST, MAX_HISTORY
from minirt.kernels.step.table import FINAL_LEN, MATCHED, NEXT_TOKENS, NUM_CACHED, NUM_NEXT, Columns, Rows, array


def propose(table: Tensor, columns: Columns, rows: Rows, *, most: int, shortest: int, longest: int) -> None:
    """Write drafts of the sequences in `rows` into the table [S, words] int32, after a step's `commit`.

    A sequence is skipped if it yields no more tokens (NUM_NEXT is 0). The match is the longest suffix that also occurs before the
    last token; of several places, the last one counts. The drafts are the tokens that follow there. If fewer than `most`
    follow, the copy goes on with the drafts themselves, so that periodic text continues. No draft is beyond the sequence's last
    token.

    NUM_NEXT becomes 1 + the number of drafts, and MATCHED the length of the match; without drafts, 0. Words behind the drafts
    stay as they are.

    Args:
        most: number of drafts of a sequence, at most; 1 to `columns.drafts`.
        shortest, longest: tokens of a match; 1 to `LONGEST`.
    Raises:
        InputError: these numbers are out of range, or the table has no history.
    """
    check(columns, most, shortest, longest)
    words = array(table)
    for slot in array(rows.slots).tolist():
        if slot < 0:
            continue
        row = words[slot]
        cached, following, final = row[NUM_CACHED : FINAL_LEN + 1].tolist()
        if not following or cached >= columns.history:
            continue
        tokens = row[columns.tokens : columns.tokens + cached + 1]
        matched, ends, count = 0, np.arange(cached), 0
        for length in range(1, min(longest, cached) + 1):
            ends = ends[ends >= length - 1]
            ends = ends[tokens[ends - (length - 1)] == tokens[cached - (length - 1)]]
            if not len(ends):
                break
            if length >= shortest:
                matched, end = length, int(ends[-1])
        if matched:
            count = max(min(most, final - 2 - cached), 0)
            row[NEXT_TOKENS + 1 : NEXT_TOKENS + 1 + count] = tokens[end + 1 + np.arange(count) % (cached - end)]
        row[NUM_NEXT], row[MATCHED] = 1 + count, matched if count else 0


@lru_cache
def check(columns: Columns, most: int, shortest: int, longest: int) -> None:
    """Raise InputError unless the arguments of `propose` are in range."""
    if not 0 < columns.history <= MAX_HISTORY:
        what, expected = "n-gram matching reads the tokens of sequences", f"columns for 1 to {MAX_HISTORY} tokens"
        raise InputError(what, where="history", expected=expected, found=columns.history)
    if not 1 <= most <= columns.drafts:
        raise InputError("not an acceptable value", where="most", expected=f"1 to {columns.drafts}", found=most)
    if not 1 <= shortest <= longest <= LONGEST:
        expected, shown = f"1 <= shortest <= longest <= {LONGEST}", f"{shortest} and {longest}"
        raise InputError("not acceptable values", where="shortest, longest", expected=expected, found=shown)
