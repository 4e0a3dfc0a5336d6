"""`WaitingQueue`: the sequences that wait, in the order in which they are to run."""

import heapq

from minirt.engine.sequence import Sequence


class WaitingQueue:
    """Sequences by their `rank`. Adding one and taking the first cost O(log n), removing any one O(1) amortized.

    A removed sequence stays in the heap until it comes first, or until half of the heap is such entries.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []  # ranks are unique, so sequences are never compared
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return self._sequences.get(sequence.id) is sequence

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.id] = sequence
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def first(self) -> Sequence:
        """The sequence with the lowest rank. The queue must not be empty."""
        while self._heap[0][1] not in self:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Sequence:
        """Remove and return the first sequence."""
        sequence = self.first()
        heapq.heappop(self._heap)
        self._forget(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is here."""
        if sequence in self:
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]
        if len(self._heap) > 2 * len(self._sequences) + 16:
            self._heap = [entry for entry in self._heap if entry[1] in self]
            heapq.heapify(self._heap)
