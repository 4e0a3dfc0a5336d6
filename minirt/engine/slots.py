"""`HostSlots`: the host's columns of the table of slots. What is the same for all sequences that decode is done on its arrays.

The host knows the tokens of steps that it has read, and bounds of what the steps in flight yield. A sequence has a slot while it
runs, and is in the arrays once its prompt is computed: until then, its object is faster, and the first token waits for it.
"""

from contextlib import suppress
from enum import IntEnum
from mmap import MADV_DONTNEED, MADV_NOHUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from typing import TYPE_CHECKING

import numpy as np

from minirt.engine.limits import EngineLimits

if TYPE_CHECKING:
    from minirt.engine.sequence import Sequence

NEVER = np.iinfo(np.int64).max
SHORT = 4096  # tokens for which a free slot keeps memory, 48 KiB: to return it takes microseconds
FEW = 3  # so many sequences take less time one by one than on arrays


class Reason(IntEnum):
    """Why a sequence yields no more tokens."""

    RUNS = 0
    STOP = 1  # at one of its `ends`
    LENGTH = 2
    NO_TOKEN = 3  # the sampler drew −1


class _LongRows:
    """Rows of zeros, of which only what was written takes memory, until the row is cleared.

    Attributes:
        array: [count, at least `length`].
    """

    def __init__(self, count: int, length: int, dtype: type[np.generic]) -> None:
        size = np.dtype(dtype).itemsize
        self._row_bytes = -(-max(1, length) * size // PAGESIZE) * PAGESIZE
        try:
            self._memory = mmap(-1, count * self._row_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{count:,} rows of {self._row_bytes:,} bytes: {error.strerror}") from error
        with suppress(OSError):  # a system without huge pages
            self._memory.madvise(MADV_NOHUGEPAGE)  # one would hold the beginnings of several rows
        self.array = np.frombuffer(self._memory, dtype).reshape(count, -1)

    def clear(self, row: int) -> None:
        """Return a row's memory to the system."""
        self._memory.madvise(MADV_DONTNEED, row * self._row_bytes, self._row_bytes)


class HostSlots:
    """Arrays with a row for each slot.

    Args:
        limits: of the engine; its `max_model_len` is the number of tokens of the longest sequence.
        pages: columns of a page table.

    Attributes:
        sequences: who has the slot; None: it is free.
        epochs: how many sequences have had the slot before, by which a step in flight tells whether it has changed hands.
        tokens, times: [S, L], each token that the host knows, and the `time.perf_counter` at which a generated one was known.
            As `page_tables`, they take memory for the tokens of sequences that run, and for SHORT tokens of each other slot.
        lengths: number of these tokens.
        steps, unread: steps that were started and yield tokens which the host has not read; the most tokens that these yield.
        prompt_lens, final_lens: tokens of the prompt, and of the sequence at its end.
        page_tables, num_pages: [S, P] KV pages, and their number.
        num_sent: number of pages that the device knows.
        num_registered: number of pages that are in the prefix cache; `NEVER`: none ever will be.
        num_drafted, num_accepted: drafts that were verified, and that were right.
        flags, num_top, rules_until: what its draws need (`planning.py`).
        ends: [S, E] token ids that end it, −1 where it has fewer.
        watched: whether somebody waits for each of its tokens.
    """

    def __init__(self, limits: EngineLimits, pages: int) -> None:
        count, length = limits.max_num_seqs, limits.max_model_len
        self.sequences: list[Sequence | None] = [None] * count
        self.epochs, self.lengths, self.steps, self.unread = (np.zeros(count, np.int64) for _ in range(4))
        self.prompt_lens, self.final_lens, self.num_pages, self.num_sent = (np.zeros(count, np.int64) for _ in range(4))
        self.num_registered, self.flags, self.num_top = (np.zeros(count, np.int64) for _ in range(3))
        self.num_drafted, self.num_accepted = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.rules_until, self.watched = np.zeros(count, np.int64), np.zeros(count, bool)
        self.ends = np.full((count, 1), -1, np.int32)
        self._long = [_LongRows(count, length, np.int32), _LongRows(count, length, np.float64), _LongRows(count, pages, np.int32)]
        self.tokens, self.times, self.page_tables = (rows.array for rows in self._long)
        self.free = list(range(count))[::-1]

    def reset(self) -> None:
        """Make every slot free."""
        self.sequences[:] = [None] * len(self.sequences)
        self.epochs += 1
        self.free = list(range(len(self.sequences)))[::-1]

    def reserve(self, sequence: "Sequence") -> int:
        """A free slot for a sequence. The caller has checked that there is one."""
        slot = self.free.pop()
        self.sequences[slot] = sequence
        return slot

    def join(self, sequence: "Sequence") -> None:
        """Write what the host knows of a sequence to the arrays, once all its known tokens are computed or in a step."""
        slot, count, ends, pages = sequence.slot, len(sequence.tokens), sequence.ends, sequence.pages
        if len(ends) > self.ends.shape[1]:
            wider = np.full((len(self.ends), len(ends)), -1, np.int32)
            wider[:, : self.ends.shape[1]] = self.ends
            self.ends = wider
        self.ends[slot, : len(ends)], self.ends[slot, len(ends) :] = ends, -1
        self.tokens[slot, :count], self.lengths[slot] = sequence.tokens, count
        if len(sequence.times):
            self.times[slot, sequence.prompt_len : count] = sequence.times
        self.steps[slot] = self.unread[slot] = 0
        self.prompt_lens[slot], self.final_lens[slot] = sequence.prompt_len, sequence.final_len
        self.page_tables[slot, : len(pages)], self.num_pages[slot] = pages, len(pages)
        self.num_sent[slot], self.num_registered[slot] = sequence.num_sent, sequence.num_registered
        self.flags[slot], self.num_top[slot], self.rules_until[slot] = sequence.needs
        self.watched[slot] = sequence.watched
        self.num_drafted[slot], self.num_accepted[slot] = sequence.drafted

    def release(self, slot: int) -> None:
        self.sequences[slot] = None
        self.epochs[slot] += 1
        self.free.append(slot)
        if self.lengths[slot] > SHORT:
            for rows in self._long:
                rows.clear(slot)

    def extend(self, slots: np.ndarray, counts: np.ndarray, tokens: np.ndarray, now: float) -> tuple[np.ndarray, np.ndarray]:
        """Append the tokens of a step.

        Args:
            slots: [N].
            counts: [N], how many of `tokens` [N, 1 + drafts] each yields.
        Returns:
            How many tokens each has taken, up to the one that ends it, and the `Reason` why it ends, [N] each.
        """
        lengths, final, ends = self.lengths[slots], self.final_lens[slots], self.ends[slots]
        before, reasons, runs = lengths, np.zeros(len(slots), np.int64), counts > 0
        for column in range(tokens.shape[1]):
            if column:
                runs = (reasons == Reason.RUNS) & (counts > column)
                if not runs.any():
                    break
            token = tokens[:, column]
            drawn = token >= 0
            takes = runs & drawn & (lengths < final)  # with max_tokens 0, the step has drawn a token all the same
            if takes.all():
                self.tokens[slots, lengths], self.times[slots, lengths] = token, now
            else:
                where, at = slots[takes], lengths[takes]
                self.tokens[where, at], self.times[where, at] = token[takes], now
                reasons[runs & ~drawn] = Reason.NO_TOKEN
            lengths = lengths + takes
            reasons[runs & drawn & (lengths >= final)] = Reason.LENGTH
            reasons[takes & (token[:, None] == ends).any(1)] = Reason.STOP
        self.lengths[slots] = lengths
        return lengths - before, reasons

    def extend_one(self, slot: int, count: int, tokens: list[int], now: float) -> tuple[int, Reason]:
        """`extend` of one slot."""
        length, final, taken = int(self.lengths[slot]), int(self.final_lens[slot]), 0
        reason, ends = Reason.RUNS, self.ends[slot].tolist()
        for token in tokens[:count]:
            if token < 0 or length == final:
                reason = Reason.NO_TOKEN if token < 0 else Reason.LENGTH
                break
            self.tokens[slot, length], self.times[slot, length] = token, now
            length, taken = length + 1, taken + 1
            if token in ends or length == final:
                reason = Reason.STOP if token in ends else Reason.LENGTH
                break
        self.lengths[slot] = length
        return taken, reason
