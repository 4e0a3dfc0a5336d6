"""`HostSlots`: what the host knows of the running sequences, as arrays with a row for each slot.

The host knows the tokens of steps that it has read, and bounds of what the steps in flight yield. A sequence has a row from its
admission until it ends or is preempted. What is the same for all sequences that decode is done on the arrays.
"""

from collections.abc import Iterable
from contextlib import suppress
from mmap import MADV_DONTNEED, MADV_NOHUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from typing import TYPE_CHECKING

import numpy as np

from minirt.engine.limits import EngineLimits

if TYPE_CHECKING:
    from minirt.engine.schedule.windows import Windows
    from minirt.engine.state.sequence import Sequence

NEVER = np.iinfo(np.int64).max
FEW = 3  # up to this number of sequences, one after the other is faster: after a wait, each call of NumPy takes some 10 µs
SHORT = 4096  # tokens for which a free slot keeps memory, 48 KiB: returning it takes microseconds


class Reason:
    """Why a sequence yields no more tokens. (No `IntEnum`, with which NumPy compares slowly.)"""

    RUNS = 0
    STOP = 1  # at one of its `ends`
    LENGTH = 2
    NO_TOKEN = 3  # the sampler drew −1


def check_stop(tokens: list[int], length: int, final_len: int, ends: Iterable[int]) -> tuple[int, int]:
    """The stop rules: how many of a step's tokens a sequence of `length` tokens takes, and the `Reason` why it ends."""
    for count, token in enumerate(tokens):
        if token < 0:
            return count, Reason.NO_TOKEN
        if length + count >= final_len:  # with max_tokens 0, the step has drawn a token all the same
            return count, Reason.LENGTH
        if token in ends:
            return count + 1, Reason.STOP
        if length + count + 1 == final_len:
            return count + 1, Reason.LENGTH
    return len(tokens), Reason.RUNS


class _LongRows:
    """Rows of zeros. Only what was written takes memory, until the row is cleared.

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
        windows: the pages of layers with a window, by slot; None: there are none.

    Attributes:
        sequences: the sequence in each slot; None: the slot is free.
        epochs: number of sequences that have left the slot. A step that has another value was planned for an earlier one.

    Written by `admit`, once for a sequence:
        prompt_lens, final_lens: tokens of the prompt, and of the sequence at its end.
        ends: [S, E] token ids that end it, −1 where it has fewer.
        watched: whether Python handles each of its tokens (`Sequence.watched`).

    Written by `extend`, when the collector has read a step:
        tokens, times: [S, L], each token that the host knows, and the `time.perf_counter` at which a generated one was known.
            Like `page_tables`, they take memory for the tokens of running sequences, and for SHORT tokens of each other slot.
        lengths: number of these tokens.

    Written by `mark_queued` when a step was started, and by `mark_read` when the collector has read it:
        steps: number of steps in flight that yield tokens, which the host has not read.
        unread: the most tokens that these yield.

    Written by the scheduler:
        page_tables, num_pages: [S, P] KV pages, and their number.
        num_sent: number of pages that the device knows; −1: it does not know the sequence.
        unsent: slots with pages that the device does not know.
        num_registered: number of pages that are in the prefix cache; `NEVER`: none ever will be.
        quiet_until: up to this length it needs no page and cannot reach its end.

    Written by `DraftLengths`:
        num_drafted, num_accepted: drafts that were verified, and that were right.

    Written by `plan_step`, which reads them, too:
        flags, num_top, rules_until: what its draws need.
    """

    def __init__(self, limits: EngineLimits, pages: int, windows: "Windows | None" = None) -> None:
        self.windows = windows
        count, length = limits.max_num_seqs, limits.max_model_len
        self.epochs, self.lengths, self.steps, self.unread, self.prompt_lens, self.final_lens = np.zeros((6, count), np.int64)
        self.num_pages, self.num_sent, self.num_registered, self.quiet_until = np.zeros((4, count), np.int64)
        self.flags, self.num_top, self.rules_until, self.num_drafted, self.num_accepted = np.zeros((5, count), np.int64)
        self.watched, self.ends = np.zeros(count, bool), np.full((count, 1), -1, np.int32)
        self._long = [_LongRows(count, length, np.int32), _LongRows(count, length, np.float64), _LongRows(count, pages, np.int32)]
        self.tokens, self.times, self.page_tables = (rows.array for rows in self._long)
        self.reset()

    def reset(self) -> None:
        """Make every slot free."""
        self.sequences: list[Sequence | None] = [None] * len(self.epochs)
        self.epochs += 1
        self.unsent, self.free = set[int](), list(range(len(self.epochs)))[::-1]

    def admit(self, sequence: "Sequence") -> int:
        """Give a sequence a free slot, and write what the host knows of it. The caller has checked that there is a slot."""
        slot, count, ends = self.free.pop(), len(sequence.tokens), sequence.ends
        self.sequences[slot] = sequence
        if len(ends) > self.ends.shape[1]:
            wider = np.full((len(self.ends), len(ends)), -1, np.int32)
            wider[:, : self.ends.shape[1]] = self.ends
            self.ends = wider
        self.ends[slot, : len(ends)], self.ends[slot, len(ends) :] = ends, -1
        self.tokens[slot, :count], self.lengths[slot] = sequence.tokens, count
        if len(sequence.times):
            self.times[slot, sequence.prompt_len : count] = sequence.times
        self.steps[slot] = self.unread[slot] = self.num_pages[slot] = self.quiet_until[slot] = 0
        self.prompt_lens[slot], self.final_lens[slot] = sequence.prompt_len, sequence.final_len
        self.num_sent[slot], self.watched[slot] = -1, sequence.watched
        self.num_drafted[slot], self.num_accepted[slot] = sequence.num_drafts
        return slot

    def release(self, slot: int) -> None:
        self.sequences[slot] = None
        self.epochs[slot] += 1
        self.unsent.discard(slot)
        self.free.append(slot)
        if self.lengths[slot] > SHORT:
            for rows in self._long:
                rows.clear(slot)

    def unchanged(self, slots: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """[N] bool, whether slots still have the sequences that they had when a step was scheduled, at these `epochs`."""
        same: np.ndarray = self.epochs[slots] == epochs
        return same

    def add_pages(self, slot: int, pages: list[int]) -> None:
        count = int(self.num_pages[slot])
        self.page_tables[slot, count : count + len(pages)] = pages
        self.num_pages[slot] = count + len(pages)
        self.unsent.add(slot)

    def mark_queued(self, slots: np.ndarray | int, draws: np.ndarray | int) -> None:
        """A step was started in which these slots draw at most so many tokens, [N] each or one of each."""
        self.steps[slots] += 1
        self.unread[slots] += draws

    def mark_read(self, slots: np.ndarray, draws: np.ndarray) -> None:
        """A step that was marked as queued with these values has been read, and its tokens are appended."""
        self.steps[slots] -= 1
        self.unread[slots] -= draws

    def extend(self, slots: np.ndarray, counts: np.ndarray, tokens: np.ndarray, now: float) -> tuple[np.ndarray, np.ndarray]:
        """Append the tokens of a step.

        Args:
            slots: [N].
            counts: [N], how many of `tokens` [N, 1 + drafts] each yields.
        Returns:
            How many tokens each has taken, up to the one that ends it, and the `Reason` why it ends, [N] each.
        """
        taken, reasons = counts.copy(), np.zeros(len(slots), np.int64)
        others: Iterable[int] = range(len(slots))
        if len(slots) > FEW:  # arrays, for those that no stop rule concerns
            lengths, inside = self.lengths[slots], np.arange(tokens.shape[1]) < counts[:, None]
            stops = (tokens < 0) | (tokens[:, :, None] == self.ends[slots][:, None]).any(2)
            ending = (lengths + counts >= self.final_lens[slots]) | (inside & stops).any(1)
            rows, columns = (inside & ~ending[:, None]).nonzero()
            places = slots[rows], lengths[rows] + columns
            self.tokens[places], self.times[places] = tokens[rows, columns], now
            self.lengths[slots] = lengths + np.where(ending, 0, counts)
            others = ending.nonzero()[0].tolist()
        for i in others:
            slot, new = slots[i], tokens[i, : counts[i]].tolist()
            length = int(self.lengths[slot])
            taken[i], reasons[i] = count, _ = check_stop(new, length, int(self.final_lens[slot]), self.ends[slot].tolist())
            self.tokens[slot, length : length + count], self.times[slot, length : length + count] = new[:count], now
            self.lengths[slot] = length + count
        return taken, reasons
