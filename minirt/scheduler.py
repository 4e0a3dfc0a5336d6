"""`Scheduler`: which sequences run in the next step, on which KV pages. Knows token ids and pages, no tensors.

There is no separate prefill and decode: a sequence has `tokens`, of which the cache holds the first `num_computed`; a step
computes the next ones, all that the token budget allows (vLLM's v1 scheduler and Sarathi-Serve's chunked prefill do the same).
"""

from collections import deque
from dataclasses import dataclass, field

from minirt.batch import Chunk
from minirt.errors import ContextLengthError, InputError
from minirt.kv_cache import KVCache


@dataclass(eq=False)
class Sequence:
    """One request on its way. `tokens` is the prompt and what was generated so far."""

    id: int
    tokens: list[int]
    prompt_len: int
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len


class Scheduler:
    """First come, first served; running sequences before waiting ones; the youngest is preempted when pages run out.

    Args:
        max_num_seqs: sequences in one step at most.
        max_num_batched_tokens: tokens in one step at most; a longer prompt is computed in chunks.
        max_model_len: positions that the model has.
    """

    def __init__(self, cache: KVCache, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if value < 1:
                raise InputError("must be at least 1", where=name, found=value)
        self._cache = cache
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_len = min(max_model_len, cache.capacity)
        self._limit = "--max-model-len" if max_model_len <= cache.capacity else "--kv-cache-memory"
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; refused with the numbers if its prompt and one more token can never fit."""
        if len(sequence.tokens) >= self.max_len:
            raise ContextLengthError(
                "the prompt is too long",
                expected=f"at most {self.max_len - 1} tokens, to leave room for one new token",
                found=f"{len(sequence.tokens)} tokens",
                hint=f"shorten it, or raise {self._limit} if the model and the memory allow",
            )
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out and free its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._free(sequence)

    def schedule(self) -> list[tuple[Sequence, Chunk]]:
        """The next step's chunks, with their pages reserved; empty when nothing is left to do."""
        budget = self.max_num_batched_tokens
        chosen: list[tuple[Sequence, Chunk]] = []
        index, preempted = 0, False
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            count = min(len(sequence.tokens) - sequence.num_computed, budget)
            while not self._reserve(sequence, count):
                victim = self.running.pop()  # the youngest; it may be this very sequence
                self._free(victim)
                self.waiting.appendleft(victim)
                preempted = True
                if victim is sequence:
                    break
            else:
                chosen.append((sequence, _chunk(sequence, count)))
                budget -= count
                index += 1
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs and not preempted:
            sequence = self.waiting[0]
            # Room for all of it, though chunks take their pages as they come: an early start would only be preempted.
            if self._cache.pages_for(len(sequence.tokens) + 1) > self._cache.allocator.num_free:
                break
            count = min(len(sequence.tokens), budget)
            self._reserve(sequence, count)
            self.running.append(self.waiting.popleft())
            chosen.append((sequence, _chunk(sequence, count)))
            budget -= count
        return chosen

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        needed = self._cache.pages_for(sequence.num_computed + count) - len(sequence.pages)
        if needed > self._cache.allocator.num_free:
            return False
        sequence.pages += self._cache.allocator.allocate(max(needed, 0))
        return True

    def _free(self, sequence: Sequence) -> None:
        self._cache.allocator.release(sequence.pages)
        sequence.pages, sequence.num_computed = [], 0


def _chunk(sequence: Sequence, count: int) -> Chunk:
    start = sequence.num_computed
    stop = start + count
    return Chunk(sequence.tokens[start:stop], start, sequence.pages, wants_logits=stop == len(sequence.tokens))
