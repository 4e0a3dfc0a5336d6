"""`Scheduler`: which sequences run in the next step, on which KV pages. Knows token ids and pages, no tensors.

There is no separate prefill and decode: a sequence has tokens, of which the cache holds the first `num_computed`; a step
computes the next ones, all that the token budget allows (vLLM's v1 scheduler and Sarathi-Serve's chunked prefill do the same).
A step may be planned before the tokens of the one before it are known: a token that is still on the device counts as `pending`.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field

from minirt.engine.kv_cache import KVCache
from minirt.engine.step_input import Chunk
from minirt.errors import ContextLengthError, InputError

MAX_NUM_BATCHED_TOKENS = 8192  # of a step, unless told otherwise
MOST = 1 << 20  # sequences, or tokens, of a step


@dataclass(eq=False)
class Sequence:
    """One request on its way. `tokens` is the prompt and what was generated so far; it ends at `final_len` tokens."""

    id: int
    tokens: array  # of int64
    prompt_len: int
    final_len: int
    num_computed: int = 0
    pending: int = 0  # tokens sampled in a step whose results the host has not seen: 0 or 1
    row: int = 0  # of the last step's sampled tokens: where a pending one lies
    pages: array = field(default_factory=lambda: array("i"))

    @property
    def length(self) -> int:
        """Tokens, those pending included."""
        return len(self.tokens) + self.pending

    @property
    def num_generated(self) -> int:
        return self.length - self.prompt_len


def check_limits(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Raise InputError unless a step can have so many sequences and tokens; kernels count both in 32 bits."""
    for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
        if type(value) is not int or not 1 <= value <= MOST:
            raise InputError("not an acceptable value", where=name, expected=f"an integer from 1 to {MOST}", found=repr(value))


class Scheduler:
    """First come, first served; running sequences before waiting ones; the youngest is preempted when pages run out.

    Args:
        max_num_seqs: sequences in one step at most.
        max_num_batched_tokens: tokens in one step at most; a longer prompt is computed in chunks.
        max_model_len: positions that the model has.
    """

    def __init__(self, cache: KVCache, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
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
        """Take a finished or aborted sequence out and free its pages.

        A step in flight may still write to them: whoever gets them next writes later, in the order of the device's stream.
        """
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._free(sequence)

    def schedule(self) -> list[tuple[Sequence, Chunk]]:
        """The next step's chunks, with their pages reserved; empty when there is nothing to compute (yet)."""
        budget = self.max_num_batched_tokens
        chosen: list[tuple[Sequence, Chunk]] = []
        index, preempted = 0, False
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            if sequence.length >= sequence.final_len:  # its last token is pending
                index += 1
                continue
            count = min(sequence.length - sequence.num_computed, budget)
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
            if self._cache.pages_for(sequence.length + 1) > self._cache.allocator.num_free:
                break
            count = min(sequence.length, budget)
            self._reserve(sequence, count)
            self.running.append(self.waiting.popleft())
            chosen.append((sequence, _chunk(sequence, count)))
            budget -= count
        return chosen

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        needed = self._cache.pages_for(sequence.num_computed + count) - len(sequence.pages)
        if needed > self._cache.allocator.num_free:
            return False
        if needed > 0:
            sequence.pages.extend(self._cache.allocator.allocate(needed))
        return True

    def _free(self, sequence: Sequence) -> None:
        self._cache.allocator.release(sequence.pages)
        sequence.pages, sequence.num_computed = array("i"), 0


def _chunk(sequence: Sequence, count: int) -> Chunk:
    start = sequence.num_computed
    stop = start + count
    tokens = sequence.tokens[start:stop]
    if stop > len(sequence.tokens):
        tokens.append(~sequence.row)
    return Chunk(tokens, start, sequence.pages, wants_logits=stop == sequence.length)
