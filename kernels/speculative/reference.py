"""Drafts in eager PyTorch and NumPy: n-gram matching, and what a step with a draft model needs beside its layers.

**N-gram matching** (prompt lookup decoding, Saxena 2023). The last tokens of a sequence, its next token included, are looked up
in the tokens before. What followed there is proposed.

**A draft model** continues from the hidden states of its target: its row p has the token at position p + 1 and the state at
position p, and its logits are a draft of the token at position p + 2. Its first pass has the rows of the target's step, each
further pass one row of each sequence, with the draft before. Draft i of a sequence with c cached tokens is a draft of the token
at position c + i, and comes from row c + i − 2. The rows of drafts are computed again in the next step, with the target's states.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.reference import embedding, rms_norm
from minirt.kernels.sampling.philox import philox, uniform
from minirt.kernels.speculative.limits import LONGEST, MAX_HISTORY
from minirt.kernels.step import table as words
from minirt.kernels.step.table import FINAL_LEN, MATCHED, NEXT_TOKENS, NUM_CACHED, NUM_NEXT, Columns, Rows, array

LEAST_TEMPERATURE = 1e-6  # below it, the draft is the largest logit


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
    check_matching(columns, most, shortest, longest)
    cells = array(table)
    for slot in array(rows.slots).tolist():
        if slot < 0:
            continue
        row = cells[slot]
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
def check_matching(columns: Columns, most: int, shortest: int, longest: int) -> None:
    """Raise InputError unless the arguments of `propose` are in range."""
    if not 0 < columns.history <= MAX_HISTORY:
        what, expected = "n-gram matching reads the tokens of sequences", f"columns for 1 to {MAX_HISTORY} tokens"
        raise InputError(what, where="history", expected=expected, found=columns.history)
    if not 1 <= most <= columns.drafts:
        raise InputError("not an acceptable value", where="most", expected=f"1 to {columns.drafts}", found=most)
    if not 1 <= shortest <= longest <= LONGEST:
        expected, shown = f"1 <= shortest <= longest <= {LONGEST}", f"{shortest} and {longest}"
        raise InputError("not acceptable values", where="shortest, longest", expected=expected, found=shown)


def draft_input(tokens: Tensor, table: Tensor, hidden: Tensor, token_norm: Tensor, hidden_norm: Tensor, eps: float) -> Tensor:
    """[rms_norm(table[tokens], token_norm) | rms_norm(hidden, hidden_norm)]: [T] int64 and [T, H] → [T, 2H]."""
    return torch.cat((rms_norm(embedding(tokens, table), token_norm, eps), rms_norm(hidden, hidden_norm, eps)), 1)


class DraftTokens(NamedTuple):
    """The input of a further pass: one row for each of B sequences. A sequence without a further draft is padding.

    Args:
        tokens, positions, slot_mapping: [B] int64; `slot_mapping`: page · page_size + offset, −1 for padding.
        seq_lens: [B] int32, 0 for padding.
        split_starts: [B + 1] int32, as in `StepTensors`.
    """

    tokens: Tensor
    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    split_starts: Tensor


def first_pass(table: Tensor, rows: Rows, input_ids: Tensor, positions: Tensor, query_starts: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens [T] int64 of the first pass, and the row [B] int64 of each sequence's last token that stays.

    Call it after the step's `commit`. The rows of a step are those of the target's; each gets the token of the next row, and the
    last one that stays, and those of wrong drafts behind it, the slot's next token.

    Args:
        input_ids, positions: [T] int64, those of the target's step. `query_starts`: [B + 1] int32.
    """
    ids, last = torch.zeros_like(input_ids), torch.zeros(len(rows.slots), dtype=torch.int64, device=table.device)
    starts = query_starts.tolist()
    for b, slot in enumerate(rows.slots.tolist()):
        first, end = starts[b], starts[b + 1]
        if slot < 0 or first == end:
            last[b] = min(first, len(ids) - 1)
            continue
        stays = min(max(int(table[slot, NUM_CACHED]) - int(positions[first]), 1), end - first)
        last[b] = first + stays - 1
        ids[first : end - 1] = input_ids[first + 1 : end]
        ids[last[b] : end] = table[slot, NEXT_TOKENS]
    return ids, last


def draw(
    logits: Tensor, ids: Tensor | None, table: Tensor, columns: Columns, rows: Rows, out: DraftTokens, *, number: int, most: int,
    page_size: int, kv_split: int,
) -> None:  # fmt: skip
    """Write draft `number` (from 1 on) of each sequence into the table, and the input of the next pass.

    The draft is the largest logit, or above temperature 0 the winner of the race with the noise with which the sampler will draw
    the token of this place: so where both distributions agree, both draw the same token. A sequence gets no draft if it yields no
    more tokens, beyond its end, and if the row of an earlier draft would begin a KV page, which it may not have yet.

    Args:
        logits: [B, R] fp32. `ids`: [R] int64, the ids of the columns; None: their numbers.
        most: drafts of a sequence, at most.
    """
    slots = rows.slots.long()
    row = slots.clamp(min=0)
    cached, following, final = table[row, NUM_CACHED], table[row, NUM_NEXT], table[row, FINAL_LEN]
    room = torch.minimum((final - 2 - cached).clamp(max=most), 1 + (-cached) % page_size)
    live = (slots >= 0) & (following > 0)
    names = torch.arange(logits.shape[1], device=logits.device) if ids is None else ids
    temperature = table.view(torch.float32)[row, words.TEMPERATURE].unsqueeze(1)
    seed = table[row, words.SEED : words.SEED + 2].contiguous().view(torch.int64).squeeze(1)
    noise = _noise(seed, cached + number - table[row, words.PROMPT_LEN], names)
    race = logits / temperature.clamp(min=LEAST_TEMPERATURE) - noise.log()
    drafts = names[torch.where(temperature > LEAST_TEMPERATURE, race, logits).argmax(1)]
    drawn = live & (room >= number)
    table[row[drawn], NEXT_TOKENS + number] = drafts[drawn].int()
    if number == 1:
        table[row[live], NUM_NEXT], table[row[live], MATCHED] = 1, 0
    table[row[drawn], NUM_NEXT], table[row[drawn], MATCHED] = 1 + number, number
    goes_on, position = live & (room > number), (cached + number - 1).long()
    page = table[row, columns.page_tables + position // page_size].long()
    out.tokens[:], out.positions[:] = drafts * goes_on, position * goes_on
    out.slot_mapping[:] = torch.where(goes_on, page * page_size + position % page_size, -1)
    out.seq_lens[:] = (position + 1) * goes_on
    out.split_starts[0] = 0
    out.split_starts[1:] = (-(-out.seq_lens // kv_split)).cumsum(0)


def _noise(seed: Tensor, step: Tensor, ids: Tensor) -> Tensor:
    """The sampler's exponential noise of these ids [R] for `seed` [B] and `step` [B] → [B, R] fp32."""
    zero = torch.zeros_like(step).unsqueeze(1)
    drawn = torch.stack(philox(seed.unsqueeze(1), (ids // 4).unsqueeze(0), step.long().unsqueeze(1), zero, zero), -1)
    return uniform(drawn.gather(-1, (ids % 4).expand(drawn.shape[:-1]).unsqueeze(-1)).squeeze(-1)).neg_().log1p_().neg_()
