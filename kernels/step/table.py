"""The table of slots: what the device knows of each running sequence, and how a step reads and changes it.

A running sequence has a slot, a row of the table, from its admission until it ends or is preempted. A row is a run of int32
words, which the host changes by one kind of edit: new values of some words. The functions here are the eager form of the kernels
in `step/kernels.py` and define their results.

A slot's next tokens are the tokens that its next step computes: one, or one and drafts after it. The drafts are right as long as
the draw of the row before gives the same token, so a step yields one token and all right drafts (greedy verification as in
speculative decoding, Leviathan et al. 2023; with seeds for each token's place, sampled tokens are the same as without drafts).
"""

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from minirt.kernels.sampling.batch import COLUMNS, SamplingBatch

# The first words of a row. Numbers of tokens count from the beginning of the sequence.
NUM_CACHED = 0  # tokens whose KV values are cached
NUM_NEXT = 1  # number of its next tokens; 0: it yields no more tokens, because it has its last one or drew none
FINAL_LEN = 2  # tokens of the sequence at its end
PROMPT_LEN = 3  # tokens of its prompt
ADAPTER = 4  # of its weights; −1: none
LOGPROBS = 5  # number of most probable tokens to list for each token; −1: no log-probabilities
TEMPERATURE = 6  # fp32; the filters follow, fp32 or int32, in the order of `SamplingBatch`
SEED = TEMPERATURE + len(COLUMNS)  # two words, low half first
RULED = SEED + 2  # 1 if it has rules for its logits (`LogitsProcessors`), else 0
MATCHED = RULED + 1  # what its drafts rest on: the length of an n-gram match, or another measure; 0: it has no drafts
# The first of its next tokens; drafts follow. With drafts, also in the middle of a prompt: the token after the computed ones.
NEXT_TOKENS = MATCHED + 1

MAX_SNAPSHOTS = 2  # of states, that a step stores of a sequence


class Columns(NamedTuple):
    """The parts of a row whose sizes differ between engines.

    Args:
        drafts: maximum number of drafts of a slot.
        windows: those of layers that have page tables of their own, after the table of all other layers.
        pages: columns of one page table.
        history: columns for the tokens of a sequence, the prompt included; 0: they are not kept.
    """

    drafts: int = 0
    windows: tuple[int, ...] = ()
    pages: int = 0
    history: int = 0

    @property
    def groups(self) -> int:
        """Number of page tables, one for each group of layers that have the same pages."""
        return 1 + len(self.windows)

    @property
    def page_tables(self) -> int:
        """First word of the page tables, one after the other."""
        return _aligned(NEXT_TOKENS + 1 + self.drafts)

    @property
    def tokens(self) -> int:
        """First word of the history."""
        return _aligned(self.page_tables + self.groups * self.pages)

    @property
    def words(self) -> int:
        return _aligned(self.tokens + self.history)


def _aligned(words: int) -> int:
    return -(-words // 4) * 4


class Rows(NamedTuple):
    """The B sequences of a step, in order, int32. A sequence with slot −1 is padding: it has no tokens.

    Args:
        slots: [B].
        starts: [B], the position of the first new token, whose tokens are in `tokens`. −1: the sequence goes on with the next
            tokens of its slot.
        counts: [B], number of new tokens; with next tokens, the maximum.
        logits: [B], number of its last new tokens that need logits; with next tokens, the maximum.
        draws: [B], how many of the logits, the last ones, a token is drawn from.
        tokens: [P], the new tokens of all sequences with a start, one sequence after the other.
    """

    slots: Tensor
    starts: Tensor
    counts: Tensor
    logits: Tensor
    draws: Tensor
    tokens: Tensor


class StepTensors(NamedTuple):
    """The input of a step's layers and of its sampler: T tokens of B sequences, R rows of logits, Q draws.

    Args:
        tokens, positions: [T] int64.
        slot_mapping: [groups, T] int64, page · page_size + offset of each token's K and V; −1 for padding.
        query_starts: [B + 1] int32, the first token of each sequence; last, the number of tokens that are no padding; with one
            token each, B.
        seq_lens: [B] int32, cached tokens after the step; 0 for padding.
        split_starts: [groups, B + 1] int32, the number of KV splits of all sequences before; last, that of all. With a window,
            of those that the new tokens see.
        seq_slots: [B] int32, `Rows.slots`.
        snapshots: [B, MAX_SNAPSHOTS, 2] int32, as in `Batch`; a part of the step's message. Empty: there are no states.
        block_tables: [groups, B, pages] int32. Columns beyond a sequence's pages keep what they held.
        logits_indices: [R] int64, the tokens that need logits.
        draw_rows: [Q] int64, the rows of logits that tokens are drawn from.
        draw_slots: [Q] int32, the slot of each draw, if it has rules; −1 without, and for padding.
        draw_logprobs: [Q] int32; −1 for padding.
        draw_drafts: [Q] int32, how many drafts of its sequence come before each draw; 0 for padding.
    """

    tokens: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    split_starts: Tensor
    seq_slots: Tensor
    snapshots: Tensor
    block_tables: Tensor
    logits_indices: Tensor
    draw_rows: Tensor
    draw_slots: Tensor
    draw_logprobs: Tensor
    draw_drafts: Tensor


def array(tensor: Any) -> np.ndarray:
    return tensor if isinstance(tensor, np.ndarray) else tensor.numpy()


def arrays(record: Any) -> Any:
    """A record of tensors as one of arrays that share their memory."""
    return record if isinstance(record[0], np.ndarray) else record._make([tensor.numpy() for tensor in record])


def edit_table(table: Tensor, edits: Tensor, values: Tensor) -> None:
    """Write words into the table [S, words] int32.

    Edits are absolute values, so applying them twice does the same as once. No two edits of a step touch the same word.
    edits: [E, 4] int32: slot, first word of its row, number of words, index of the first word in `values` [N] int32.
    """
    words, new = array(table), array(values)
    for slot, column, count, first in edits.tolist():
        words[slot, column : column + count] = new[first : first + count]


def derive(
    table: Tensor, columns: Columns, rows: Rows, out: StepTensors, settings: SamplingBatch | None, page_size: int,
    kv_split: int, *, one_token: bool
) -> None:  # fmt: skip
    """Write the input of a step to `out` and `settings`. If their sizes are larger, the rest is padding.

    A sequence that goes on with the next tokens of its slot has at most FINAL_LEN − 1 − NUM_CACHED of them, and always one: if it
    yields no more tokens, the step computes one token again, which changes nothing that is read.

    Args:
        settings: of Q draws. None: neither they nor what `out` has for each draw are needed.
        one_token: each sequence has one token, in the row of its index, padding too. Otherwise the tokens are without gaps.
    """
    words, to = array(table), arrays(out)
    slots, starts, counts, logits, draws, given = arrays(rows)
    B, T, R, Q = len(slots), len(to.tokens), len(to.logits_indices), len(to.draw_rows)
    valid, going_on = slots >= 0, starts < 0
    head = words[np.maximum(slots, 0), : NEXT_TOKENS + 1 + columns.drafts]
    cached = head[:, NUM_CACHED]
    start = np.where(going_on, cached, starts)
    if one_token:
        count, first, ends = valid.astype(np.int32), np.arange(B), np.arange(1, B + 1)
    else:
        most = np.minimum(head[:, NUM_NEXT], head[:, FINAL_LEN] - 1 - cached)
        count = np.where(going_on, np.maximum(np.minimum(counts, most), 1), counts) * valid
        ends = count.cumsum()
        first = ends - count
    length = (start + count) * valid
    to.seq_slots[:], to.seq_lens[:] = slots, length
    to.query_starts[0], to.split_starts[:, 0] = 0, 0
    to.query_starts[1:] = ends
    splits = -(-length // kv_split)
    np.cumsum(splits, out=to.split_starts[0, 1:])
    for group, window in enumerate(columns.windows, 1):
        np.cumsum(splits - np.maximum(start - window + 1, 0) * valid // kv_split, out=to.split_starts[group, 1:])
    used = -(-length // page_size)
    inside = np.arange(used.max(initial=0)) < used[:, None]
    for group in range(len(to.block_tables)):
        place = columns.page_tables + group * columns.pages
        pages = words[np.maximum(slots, 0), place : place + inside.shape[1]]
        np.copyto(to.block_tables[group, :, : inside.shape[1]], pages, where=inside)
    if one_token and valid.all() and T == R == B and settings is None:  # as in most steps of a CPU
        to.positions[:] = start
        for group, mapping in enumerate(to.slot_mapping):
            page = words[slots, columns.page_tables + group * columns.pages + start // page_size].astype(np.int64)
            mapping[:] = page * page_size + start % page_size
        to.tokens[:], to.logits_indices[:] = head[:, NEXT_TOKENS], first
        if not going_on.all():
            to.tokens[~going_on] = given[: B - np.count_nonzero(going_on)]
        if columns.history:
            words[slots, columns.tokens + start] = to.tokens
        return
    # Tokens.
    b, offset = _expanded(count)
    if len(b) < T:
        to.tokens[:], to.positions[:], to.slot_mapping[:, :] = 0, 0, -1
    position, row, slot = start[b] + offset, first[b] + offset, slots[b]
    to.positions[row] = position
    for group, mapping in enumerate(to.slot_mapping):
        page = words[slot, columns.page_tables + group * columns.pages + position // page_size].astype(np.int64)
        mapping[row] = page * page_size + position % page_size
    to.tokens[row] = head[b, NEXT_TOKENS + np.minimum(offset, columns.drafts)]
    known = ~going_on[b]
    if known.any():
        to.tokens[row[known]] = given[: known.sum()]
    if columns.history:
        words[slot, columns.tokens + position] = to.tokens[row]
    # Rows of logits, and draws. Of a sequence that has fewer tokens than its maximum, the first rows are the valid ones.
    logits, draws, last = logits * valid, draws * valid, first + count
    b, offset = (b, offset) if (logits == count).all() else _expanded(logits)
    if len(b) < R:
        to.logits_indices[:] = np.minimum(np.arange(R), T - 1)
    to.logits_indices[: len(b)] = np.minimum((last - np.minimum(logits, count))[b] + offset, last[b] - 1)
    if settings is None:
        return
    b, offset = (b, offset) if (draws == logits).all() else _expanded(draws)
    to_settings, of_draw, drawn = arrays(settings), head[b], len(b)
    if drawn < Q:
        to.draw_rows[:] = np.arange(Q)
        to.draw_slots[drawn:], to.draw_logprobs[drawn:] = -1, -1
        for column in (to.draw_drafts, *to_settings):
            column[drawn:] = 0
    to.draw_rows[:drawn] = (logits.cumsum() - draws)[b] + offset
    to.draw_slots[:drawn], to.draw_logprobs[:drawn] = np.where(of_draw[:, RULED] > 0, slots[b], -1), of_draw[:, LOGPROBS]
    to.draw_drafts[:drawn] = offset
    for word, column in enumerate(to_settings[: len(COLUMNS)], TEMPERATURE):
        column.view(np.int32)[:drawn] = of_draw[:, word]
    to_settings.seed.view(np.int32).reshape(-1, 2)[:drawn] = of_draw[:, SEED : SEED + 2]
    to_settings.step[:drawn] = (length - np.minimum(draws, count) + 1)[b] + offset - of_draw[:, PROMPT_LEN]


def _expanded(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each of counts[b] entries of each b, in order: b, and the number of the entry."""
    if (counts == 1).all():  # as in most steps
        return np.arange(len(counts)), np.zeros_like(counts)
    b = np.repeat(np.arange(len(counts)), counts)
    return b, np.arange(len(b)) - (counts.cumsum() - counts)[b]


def commit(table: Tensor, columns: Columns, rows: Rows, seq_lens: Tensor, drawn: Tensor, result: Tensor) -> None:
    """Write a step's tokens into the table and into `result`.

    A sequence yields the first drawn token, and one more for each draft that equals the token drawn before it. A sequence that
    drew −1 (unusable logits) after that commits nothing, and yields no more tokens until an edit says so.

    Args:
        seq_lens: [B] int32, from `derive`.
        drawn: [Q] int64, the tokens; −1: none could be drawn. With drafts, those that no sequence yields become −1.
        result: [B, 2 + drafts] int32: the number of tokens that a sequence yields, a last −1 included, and these tokens.
    """
    words, to, lens, tokens = array(table), array(result), array(seq_lens), array(drawn)
    slots, starts, _, _, draws, _ = arrays(rows)
    going_on = starts < 0
    if not columns.drafts and len(slots) == len(tokens) and slots.min() >= 0 and draws.min() == 1:  # as in most steps
        drew = ~going_on | (words[slots, NUM_NEXT] != 0)
        to[:, 0], to[:, 1] = drew, tokens * drew
        slots, tokens, lens = (slots, tokens, lens) if drew.all() else (slots[drew], tokens[drew], lens[drew])
        usable = tokens >= 0
        if not usable.all():
            words[slots[~usable], NUM_NEXT] = 0
            slots, tokens, lens = slots[usable], tokens[usable], lens[usable]
        words[slots, NUM_CACHED], words[slots, NEXT_TOKENS] = lens, tokens
        words[slots, NUM_NEXT] = lens + 1 < words[slots, FINAL_LEN]
        if columns.history:
            room = lens < columns.history
            words[slots[room], columns.tokens + lens[room]] = tokens[room]
        return
    head = words[np.maximum(slots, 0), : NEXT_TOKENS + 1 + columns.drafts]
    live = (slots >= 0) & (~going_on | (head[:, NUM_NEXT] != 0))
    first = (draws * (slots >= 0)).cumsum() - draws
    yields = live & (draws > 0)
    count = np.where(going_on, np.minimum(lens - head[:, NUM_CACHED], draws), np.minimum(draws, 1))  # draws that are valid
    each = np.arange(1 + columns.drafts)
    inside = yields[:, None] & (each < count[:, None])
    candidates, places = np.full(inside.shape, -1), first[:, None] + each
    candidates[inside] = tokens[places[inside]]
    right = np.zeros_like(count)
    if columns.drafts:
        equal = inside[:, 1:] & (candidates[:, :-1] == head[:, NEXT_TOKENS + 1 :]) & (candidates[:, :-1] >= 0)
        right = np.logical_and.accumulate(equal, 1).sum(1)
    token = candidates[np.arange(len(slots)), right]
    kept = yields[:, None] & (each <= right[:, None])
    to[:, 0], to[:, 1:] = (right + 1) * yields, candidates * kept
    if columns.drafts:
        tokens[places[~kept & (each < (draws * (slots >= 0))[:, None])]] = -1
    cached, usable = lens - (count - 1 - right) * yields, ~yields | (token >= 0)
    moved, drew = live & usable, yields & usable
    words[slots[moved], NUM_CACHED] = cached[moved]
    words[slots[drew], NEXT_TOKENS] = token[drew]
    words[slots[yields], NUM_NEXT] = (usable & (cached + 1 < head[:, FINAL_LEN]))[yields]
    if columns.history:
        room = drew & (cached < columns.history)
        words[slots[room], columns.tokens + cached[room]] = token[room]


def report(table: Tensor, columns: Columns, rows: Rows, out: Tensor, vocab: int) -> None:
    """Write a report of a step's drafts to `out` [B, 2 + drafts] int32: MATCHED, NUM_NEXT, and the drafts, padded with zeros.

    In the table, a draft outside [0, vocab) becomes 0: the next step may be queued before the host sees the report.
    """
    words, to, slots = array(table), array(out), array(rows.slots)
    head = words[np.maximum(slots, 0), : NEXT_TOKENS + 1 + columns.drafts]
    valid, inside = slots >= 0, np.arange(1, 1 + columns.drafts) < head[:, NUM_NEXT, None]
    to[:, 0], to[:, 1] = head[:, MATCHED] * valid, head[:, NUM_NEXT] * valid
    drafts = head[:, NEXT_TOKENS + 1 :] * (inside & valid[:, None])
    to[:, 2:] = drafts
    b, i = ((drafts < 0) | (drafts >= vocab)).nonzero()
    words[slots[b], NEXT_TOKENS + 1 + i] = 0
