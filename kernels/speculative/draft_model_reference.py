"""What a step with a draft model needs beside its layers, in PyTorch: the eager form of the kernels in `draft_model.py`.

A draft model continues from the hidden states of its target: its row p has the token at position p + 1 and the state at position
p, and its logits are a draft of the token at position p + 2. Its first pass has the rows of the target's step, each further pass
one row of each sequence, with the draft before. Draft i of a sequence with c cached tokens is a draft of the token at position
c + i, and comes from row c + i − 2. The rows of drafts are computed again in the next step, with the target's states.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from minirt.kernels.sampling.philox import philox, uniform
from minirt.kernels.step.table import (
    FINAL_LEN,
    MATCHED,
    NEXT_TOKENS,
    NUM_CACHED,
    NUM_NEXT,
    PROMPT_LEN,
    SEED,
    TEMPERATURE,
    Columns,
    Rows,
)

LEAST_TEMPERATURE = 1e-6  # below it, the draft is the largest logit


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
    words, slots, noisy = table, rows.slots.long(), table.view(torch.float32)[:, TEMPERATURE]
    row = slots.clamp(min=0)
    cached, following, final = words[row, NUM_CACHED], words[row, NUM_NEXT], words[row, FINAL_LEN]
    room = torch.minimum((final - 2 - cached).clamp(max=most), 1 + (-cached) % page_size)
    live = (slots >= 0) & (following > 0)
    names = torch.arange(logits.shape[1], device=logits.device) if ids is None else ids
    temperature = noisy[row].unsqueeze(1)
    seed = words[row, SEED : SEED + 2].contiguous().view(torch.int64).squeeze(1)
    race = logits / temperature.clamp(min=LEAST_TEMPERATURE) - _noise(seed, cached + number - words[row, PROMPT_LEN], names).log()
    drafts = names[torch.where(temperature > LEAST_TEMPERATURE, race, logits).argmax(1)]
    drawn = live & (room >= number)
    words[row[drawn], NEXT_TOKENS + number] = drafts[drawn].int()
    if number == 1:
        words[row[live], NUM_NEXT], words[row[live], MATCHED] = 1, 0
    words[row[drawn], NUM_NEXT], words[row[drawn], MATCHED] = 1 + number, number
    goes_on, position = live & (room > number), (cached + number - 1).long()
    page = words[row, columns.page_tables + position // page_size].long()
    out.tokens[:], out.positions[:] = drafts * goes_on, position * goes_on
    out.slot_mapping[:] = torch.where(goes_on, page * page_size + position % page_size, -1)
    out.seq_lens[:] = (position + 1) * goes_on
    out.split_starts[0] = 0
    out.split_starts[1:] = (-(-out.seq_lens // kv_split)).cumsum(0)


def _noise(seed: Tensor, step: Tensor, ids: Tensor) -> Tensor:
    """The sampler's exponential noise of these ids [R] for `seed` [B] and `step` [B] → [B, R] fp32."""
    zero = torch.zeros_like(step).unsqueeze(1)
    words = torch.stack(philox(seed.unsqueeze(1), (ids // 4).unsqueeze(0), step.long().unsqueeze(1), zero, zero), -1)
    return uniform(words.gather(-1, (ids % 4).expand(words.shape[:-1]).unsqueeze(-1)).squeeze(-1)).neg_().log1p_().neg_()
