"""The table of slots: what the device knows of each running sequence, and how a step reads and changes it.

A running sequence has a slot, a row of the table, from its admission until it ends or is preempted. A row is a run of int32
words, so that the host changes any of it by one kind of `Edit`: these words of this row are now so. The functions here are the
eager form of the kernels in `step/kernels.py` and define their results:

`edit_table`: the edits of a step. `derive`: from the table and the step's rows, the input of the layers and of the sampler.
`commit`: the drawn tokens into the table, and the result for the host.

A slot's next tokens are the tokens that its next step computes: one, or one and drafts after it. The drafts are right as long as
the draw of the row before gives the same token, so a step yields one token and all right drafts (greedy verification as in
speculative decoding, Leviathan et al. 2023; with seeds for each token's place, sampled tokens are the same as without drafts).
"""

from typing import NamedTuple

import torch
from torch import Tensor

# The first words of a row. Numbers of tokens count from the beginning of the sequence.
NUM_CACHED = 0  # tokens whose KV values are cached
NUM_NEXT = 1  # number of its next tokens; 0: it yields no more tokens, because it has its last one or drew none
FINAL_LEN = 2  # tokens of the sequence at its end
PROMPT_LEN = 3  # tokens of its prompt
ADAPTER = 4  # of its weights; −1: none
LOGPROBS = 5  # number of most probable tokens to list for each token; −1: no log-probabilities
TEMPERATURE, TOP_K, TOP_P, MIN_P = 6, 7, 8, 9  # fp32, int32, fp32, fp32; as in `SamplingBatch`
SEED = 10  # two words, low half first
RULED = 12  # 1 if it has rules for its logits (`LogitsProcessors`), else 0
NEXT_TOKENS = 13  # the first of its next tokens; drafts follow
SETTINGS = NEXT_TOKENS  # number of words before the tokens


class Columns(NamedTuple):
    """The parts of a row whose sizes differ between engines.

    Args:
        drafts: maximum number of drafts of a slot.
        groups: number of page tables, one for each group of layers that have the same pages.
        pages: columns of one page table.
        history: columns for the tokens of a sequence, the prompt included; 0: they are not kept.
    """

    drafts: int = 0
    groups: int = 1
    pages: int = 0
    history: int = 0

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
        """Words of a row."""
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
        tokens, positions, slots: [T] int64; `slots`: page · page_size + offset of each token's K and V; −1 for padding.
        query_starts: [B + 1] int32, the first token of each sequence; last, the number of tokens that are no padding.
        seq_lens: [B] int32, cached tokens after the step; 0 for padding.
        split_starts: [B + 1] int32, the number of KV splits of all sequences before; last, that of all.
        seq_slots: [B] int32, `Rows.slots`.
        block_tables: [groups, B, pages] int32. Columns beyond a sequence's pages keep what they held.
        logits_indices: [R] int64, the tokens that need logits.
        draw_rows: [Q] int64, the rows of logits that tokens are drawn from.
        draw_slots: [Q] int32, the slot of each draw, if it has rules; −1 without, and for padding.
        draw_logprobs: [Q] int32; −1 for padding.
        temperature, top_k, top_p, min_p, seed, step: [Q], as in `SamplingBatch`.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    split_starts: Tensor
    seq_slots: Tensor
    block_tables: Tensor
    logits_indices: Tensor
    draw_rows: Tensor
    draw_slots: Tensor
    draw_logprobs: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    step: Tensor


def edit_table(table: Tensor, edits: Tensor, values: Tensor) -> None:
    """Write words into the table [S, words] int32.

    Edits are absolute values, so to apply a step's edits twice does the same as once. No two edits of a step touch the same word.

    Args:
        edits: [E, 4] int32: slot, first word of its row, number of words, index of the first word in `values`.
        values: [N] int32.
    """
    for slot, column, count, first in edits.tolist():
        table[slot, column : column + count] = values[first : first + count]


def derive(
    table: Tensor, columns: Columns, rows: Rows, out: StepTensors, page_size: int, kv_split: int, *, one_token: bool
) -> None:
    """Write the input of a step to `out`, whose sizes may be larger: what is beyond is padding.

    A sequence that goes on with the next tokens of its slot has at most FINAL_LEN − 1 − NUM_CACHED of them, and always one: if it
    yields no more tokens, the step computes one token again, which changes nothing that is read.

    Args:
        one_token: each sequence has one token, in the row of its index, padding too. Otherwise the tokens are without gaps.
    """
    B, T, R, Q = len(rows.slots), len(out.tokens), len(out.logits_indices), len(out.draw_rows)
    valid, at = rows.slots >= 0, rows.slots.clamp(min=0).long()
    going_on, cached = rows.starts < 0, table[at, NUM_CACHED]
    start = torch.where(going_on, cached, rows.starts)
    most = torch.minimum(table[at, NUM_NEXT], table[at, FINAL_LEN] - 1 - cached)
    count = torch.where(going_on, torch.minimum(rows.counts, most).clamp(min=1), rows.counts) * valid
    length = (start + count) * valid
    first = torch.arange(B) if one_token else count.cumsum(0) - count
    out.seq_slots.copy_(rows.slots)
    out.seq_lens.copy_(length)
    out.query_starts[0], out.split_starts[0] = 0, 0
    out.query_starts[1:] = torch.arange(1, B + 1) if one_token else count.cumsum(0)
    out.split_starts[1:] = ((length + kv_split - 1) // kv_split).cumsum(0)
    pages = table[at, columns.page_tables : columns.page_tables + columns.groups * columns.pages]
    pages = pages.view(B, columns.groups, columns.pages).transpose(0, 1)
    used = torch.arange(columns.pages) < ((length + page_size - 1) // page_size)[:, None]
    out.block_tables.copy_(torch.where(used, pages, out.block_tables))
    # Tokens.
    b = torch.arange(B).repeat_interleave(count.long())
    offset = torch.arange(len(b)) - (count.cumsum(0) - count)[b]
    position, row = start[b] + offset, first[b] + offset
    known = torch.where(going_on, 0, rows.counts) * valid
    index = (known.cumsum(0) - known)[b] + offset
    given = rows.tokens[index.clamp(max=max(0, len(rows.tokens) - 1))] if len(rows.tokens) else torch.zeros_like(index)
    following = table[at[b], NEXT_TOKENS + offset.clamp(max=columns.drafts)]
    out.tokens.zero_()[row] = torch.where(going_on[b], following, given).long()
    out.positions.zero_()[row] = position.long()
    page = table[at[b], columns.page_tables + position // page_size].long()
    out.slots.fill_(-1)[row] = page * page_size + position % page_size
    if columns.history:
        table[at[b], columns.tokens + position] = out.tokens[row].int()
    # Rows of logits, and draws. Of a sequence that has fewer tokens than its maximum, the first rows are the valid ones.
    logits, draws = rows.logits * valid, rows.draws * valid
    b = torch.arange(B).repeat_interleave(logits.long())
    offset = torch.arange(len(b)) - (logits.cumsum(0) - logits)[b]
    last = first[b] + count[b]
    out.logits_indices.copy_(torch.arange(R).clamp(max=T - 1))
    out.logits_indices[: len(b)] = torch.minimum(last - torch.minimum(logits, count)[b] + offset, last - 1)
    b = torch.arange(B).repeat_interleave(draws.long())
    offset = torch.arange(len(b)) - (draws.cumsum(0) - draws)[b]
    out.draw_rows.copy_(torch.arange(Q))
    out.draw_rows[: len(b)] = (logits.cumsum(0) - draws)[b] + offset
    out.draw_slots.fill_(-1)[: len(b)] = torch.where(table[at[b], RULED] > 0, rows.slots[b], -1)
    step = length[b] - torch.minimum(draws, count)[b] + 1 + offset - table[at[b], PROMPT_LEN]
    settings = table[at[b]]
    words = ((out.draw_logprobs, LOGPROBS, -1), (out.temperature, TEMPERATURE, 0), (out.top_k, TOP_K, 0), (out.top_p, TOP_P, 0),
             (out.min_p, MIN_P, 0))  # fmt: skip
    for target, column, padding in words:
        target.fill_(padding)[: len(b)] = settings[:, column].view(target.dtype)
    out.seed.zero_()[: len(b)] = settings[:, SEED : SEED + 2].contiguous().view(torch.int64)[:, 0]
    out.step.zero_()[: len(b)] = step.long()


def commit(table: Tensor, columns: Columns, rows: Rows, seq_lens: Tensor, drawn: Tensor, result: Tensor) -> None:
    """Write what a step has computed and drawn into the table, and its tokens into `result`.

    A sequence yields the first drawn token, and one more for each draft that equals the token drawn before it. A sequence that
    drew −1 (unusable logits) after that commits nothing, and yields no more tokens until an edit says so.

    Args:
        seq_lens: [B] int32, from `derive`.
        drawn: [Q] int64, the tokens; −1: none could be drawn.
        result: [B, 2 + drafts] int32: the number of tokens that a sequence yields, a last −1 included, and these tokens.
    """
    result.zero_()
    first = 0
    for b, (slot, start, draws) in enumerate(zip(rows.slots.tolist(), rows.starts.tolist(), rows.draws.tolist(), strict=True)):
        if slot < 0:
            continue
        row, length = table[slot], int(seq_lens[b])
        own, first = drawn[first : first + draws], first + draws
        if start < 0 and row[NUM_NEXT] == 0:
            continue
        if not draws:
            row[NUM_CACHED] = length
            continue
        count = length - int(row[NUM_CACHED]) if start < 0 else 1  # of its draws, those that are valid
        right = 0
        while right + 1 < min(count, draws) and own[right] >= 0 and own[right] == row[NEXT_TOKENS + 1 + right]:
            right += 1
        result[b, 0] = right + 1
        result[b, 1 : 2 + right] = own[: right + 1]
        if own[right] < 0:
            row[NUM_NEXT] = 0
            continue
        cached = length - (min(count, draws) - 1 - right)
        row[NUM_CACHED], row[NEXT_TOKENS] = cached, own[right]
        row[NUM_NEXT] = int(cached + 1 < row[FINAL_LEN])
        if columns.history and cached < columns.history:
            row[columns.tokens + cached] = own[right]
