"""`WaitingQueue`: the sequences that wait, by arrival and by size."""

import heapq
from operator import attrgetter
from typing import Any

from minirt.engine.sequence import Sequence

_RANKS = attrgetter("rank"), attrgetter("size_rank")


class WaitingQueue:
    """Sequences by their `rank` and by their `size_rank`. Adding one costs O(log n), removing any O(1) amortized.

    A removed sequence stays in a heap until it comes first, or until half of the heap is such entries.
    """

    def __init__(self) -> None:
        self._heaps: tuple[list[Any], ...] = [], []  # ranks are unique, so sequences are never compared
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return self._sequences.get(sequence.id) is sequence

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.id] = sequence
        for heap, rank in zip(self._heaps, _RANKS, strict=True):
            heapq.heappush(heap, (rank(sequence), sequence))

    def oldest(self) -> Sequence:
        """The sequence with the lowest `rank`. The queue must not be empty."""
        return self._first(self._heaps[0])

    def smallest(self) -> Sequence:
        """The sequence with the lowest `size_rank`. The queue must not be empty."""
        return self._first(self._heaps[1])

    def _first(self, heap: list[Any]) -> Sequence:
        while heap[0][1] not in self:
            heapq.heappop(heap)
        first: Sequence = heap[0][1]
        return first

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is here."""
        if sequence not in self:
            return
        del self._sequences[sequence.id]
        for heap, rank in zip(self._heaps, _RANKS, strict=True):
            if len(heap) > 2 * len(self._sequences) + 16:
                heap[:] = [(rank(waiting), waiting) for waiting in self._sequences.values()]
                heapq.heapify(heap)
