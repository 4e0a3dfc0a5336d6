"""`Scheduler`: decides which sequences run in the next step, and on which KV pages. Knows token ids and pages, no tensors.

Prefill and decode are not separate phases. The KV cache holds the first `num_computed` tokens of a sequence, and a step computes
the next ones, within a token budget (as in vLLM's v1 scheduler and in Sarathi-Serve's chunked prefill). A step may be scheduled
before the tokens of the previous step are known: a token that is still on the device counts as `pending`.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from minirt.engine.kv_cache import KVCache
from minirt.engine.prefix_cache import PrefixCache
from minirt.engine.step_input import Chunk
from minirt.errors import ContextLengthError, InputError

MAX_NUM_BATCHED_TOKENS = 8192  # the default token budget of a step
STEPS_UNTIL_LARGER = 64  # after memory ran out, a step of twice the tokens is tried again after so many steps
MAX_SCORED_TOKENS = 512  # prompt tokens that a step scores: each takes a row of logits
MOST = 1 << 20  # the upper bound of both limits of a step: sequences and tokens


@dataclass(eq=False)
class Sequence:
    """The state of one request. `tokens` holds the prompt and the tokens generated so far, at most `final_len` in total."""

    id: int
    tokens: array  # of int64
    prompt_len: int
    final_len: int
    num_computed: int = 0
    pending: int = 0  # number of sampled tokens that the host has not read yet: 0 or 1
    row: int = 0  # the row of the pending token among the last step's sampled tokens
    drafts: list[int] = field(default_factory=list)  # proposals for its next tokens, which a step verifies
    pages: array = field(default_factory=lambda: array("i"))
    slot: int = -1  # where the device keeps what lives as long as it runs
    admissions: int = 0  # how often it was admitted: in between, others may have had its slot
    prompt_logprobs: int | None = None  # how many of the most probable tokens are listed for each prompt token; None: no scores
    num_scored: int = 0  # of the prompt's tokens but the first, how many are scored, or are in a step that was started
    salt: str | None = None
    keys: list[bytes] = field(default_factory=list)  # of its first full pages, for the prefix cache
    num_registered: int = 0  # of its pages, how many the prefix cache knows
    num_cached: int = -1  # tokens that were found in the prefix cache when it first ran; -1: it has not run

    @property
    def length(self) -> int:
        """Number of tokens, including a pending one."""
        return len(self.tokens) + self.pending

    @property
    def num_generated(self) -> int:
        return self.length - self.prompt_len

    @property
    def unscored(self) -> int:
        """Number of prompt tokens that still are to be scored."""
        return 0 if self.prompt_logprobs is None else self.prompt_len - 1 - self.num_scored

    @property
    def has_started(self) -> bool:
        """Whether it holds pages, or a token was sampled or scored for it."""
        return len(self.pages) > 0 or self.num_generated > 0 or self.num_scored > 0


def check_limits(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Raise InputError unless both limits of a step are in range. Kernels count sequences and tokens in 32 bits."""
    for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
        if type(value) is not int or not 1 <= value <= MOST:
            raise InputError("not an acceptable value", where=name, expected=f"an integer from 1 to {MOST}", found=repr(value))


class Scheduler:
    """First come, first served, running sequences before waiting ones. Preempts the youngest when pages run out.

    Args:
        max_num_seqs: maximum number of sequences in one step.
        max_num_batched_tokens: maximum number of tokens in one step. A longer prompt is computed in chunks.
        max_model_len: number of positions that the model serves.
        prefix_cache: whether sequences share pages that hold the same beginning. Not with recurrent layers, whose state at the
            end of a shared beginning is not kept.
    """

    def __init__(
        self, cache: KVCache, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, prefix_cache: bool = True
    ) -> None:
        self._cache = cache
        self.prefix_cache = PrefixCache(cache.allocator, cache.page_size) if prefix_cache and not cache.has_states else None
        self._limit_tokens, self._steps_since = max_num_batched_tokens, 0  # of a step, after memory ran out
        self._blocked = (-1, -1)  # the sequence that did not fit last, and the allocator's state then
        self._free_slots = list(range(max_num_seqs))[::-1]
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_len = min(max_model_len, cache.capacity)
        self._limit = "--max-model-len" if max_model_len <= cache.capacity else "--kv-cache-memory"
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()  # by id, the next one first
        self.running: OrderedDict[int, Sequence] = OrderedDict()  # by id, the youngest last

    def check_length(self, tokens: int) -> None:
        """Raise ContextLengthError if a prompt of this many tokens and one new token can never fit."""
        if tokens >= self.max_len:
            raise ContextLengthError(
                "the prompt is too long",
                expected=f"at most {self.max_len - 1} tokens, to leave room for one new token",
                found=f"{tokens} tokens",
                hint=f"shorten it, or raise {self._limit} if the model and the memory allow",
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose length has been checked."""
        self.waiting[sequence.id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or aborted sequence and free its pages.

        A step in flight may still write to these pages. This is safe, because their next owner's writes follow in stream order.
        """
        self.running.pop(sequence.id, None)
        self.waiting.pop(sequence.id, None)
        self._free(sequence)

    def reset(self, waiting: Iterable[Sequence]) -> None:
        """Start anew with these sequences, none of which has started. All pages become free, whoever held them."""
        self.running.clear()
        self._blocked = (-1, -1)
        self._free_slots = list(range(self.max_num_seqs))[::-1]
        self.waiting = OrderedDict((sequence.id, sequence) for sequence in waiting)
        for sequence in self.waiting.values():
            sequence.slot, sequence.num_computed = -1, 0
        self._cache.allocator.reset()

    def schedule(self) -> list[tuple[Sequence, Chunk]]:
        """The chunks of the next step, with their pages reserved. Empty if there is nothing to compute (yet)."""
        budget = self._limit_tokens
        chosen: list[tuple[Sequence, Chunk]] = []
        preempted, scores = False, MAX_SCORED_TOKENS
        for sequence in list(self.running.values()):
            if budget <= 0:
                break
            if sequence.id not in self.running:  # preempted for an older one, as all behind it are
                break
            if sequence.length >= sequence.final_len:  # its last token is pending
                continue
            del sequence.drafts[sequence.final_len - sequence.length - 1 :]  # a step gives one token more than it verifies
            count = min(sequence.length + len(sequence.drafts) - sequence.num_computed, budget)
            count = min(count, scores) if sequence.unscored else count
            if not count:
                continue
            while sequence.id in self.running and not self._reserve(sequence, count):
                self._preempt_youngest()  # possibly `sequence` itself
                preempted = True
            if sequence.id in self.running:
                chosen.append((sequence, _chunk(sequence, count)))
                budget -= count
                scores -= len(chosen[-1][1].targets)
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs and not preempted:
            sequence = next(iter(self.waiting.values()))
            if (sequence.unscored and not scores) or not self._admit(sequence):
                break
            count = min(sequence.length - sequence.num_computed, budget)
            count = min(count, scores) if sequence.unscored else count
            self._reserve(sequence, count)
            self.running[sequence.id] = self.waiting.pop(sequence.id)
            chosen.append((sequence, _chunk(sequence, count)))
            budget -= count
            scores -= len(chosen[-1][1].targets)
        return chosen

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence the cached pages of its prefix, if all of it fits: otherwise it would be preempted."""
        allocator, size = self._cache.allocator, self._cache.page_size
        if self._blocked == (sequence.id, allocator.num_changes):
            return False
        pages: list[int] = []
        if self.prefix_cache is not None:
            self.prefix_cache.extend_keys(sequence.keys, sequence.tokens, sequence.salt)
            known = 0 if sequence.unscored else (sequence.length - 1) // size  # at least one token is computed
            pages = self.prefix_cache.find(sequence.keys[:known])
        needed = self._cache.pages_for(sequence.length + 1) - len(pages)
        if needed > allocator.num_free - allocator.count_free(pages):
            self._blocked = sequence.id, allocator.num_changes
            return False
        allocator.share(pages)
        sequence.pages, sequence.slot = array("i", pages), self._free_slots.pop()
        sequence.num_computed, sequence.num_registered = len(pages) * size, len(pages)
        sequence.admissions += 1
        if sequence.num_cached < 0:
            sequence.num_cached = sequence.num_computed
            if self.prefix_cache is not None:
                self.prefix_cache.count(sequence.length, sequence.num_computed)
        return True

    def register(self, sequence: Sequence, computed: int) -> None:
        """Let the prefix cache know the full pages among a sequence's first `computed` tokens, whose step has ended."""
        full = min(computed // self._cache.page_size, len(sequence.pages))
        if self.prefix_cache is None or full <= sequence.num_registered:
            return
        self.prefix_cache.extend_keys(sequence.keys, sequence.tokens, sequence.salt)
        for i in range(sequence.num_registered, full):
            self._cache.allocator.register(sequence.pages[i], sequence.keys[i])
        sequence.num_registered = full

    def limit_tokens(self, most: int) -> None:
        """Let the next steps have at most so many tokens, because a larger one did not fit into memory."""
        self._limit_tokens, self._steps_since = most, 0

    def relax_limit(self) -> None:
        """A step fits. After enough of them, larger steps are tried again."""
        self._steps_since += 1
        if self._steps_since >= STEPS_UNTIL_LARGER:
            self._limit_tokens, self._steps_since = min(2 * self._limit_tokens, self.max_num_batched_tokens), 0

    def _preempt_youngest(self) -> None:
        """Take the pages of the youngest running sequence, which is computed again from its start later."""
        _, sequence = self.running.popitem()
        self._free(sequence)
        self.waiting[sequence.id] = sequence
        self.waiting.move_to_end(sequence.id, last=False)

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        needed = self._cache.pages_for(sequence.num_computed + count) - len(sequence.pages)
        if needed > self._cache.allocator.num_free:
            return False
        if needed > 0:
            sequence.pages.extend(self._cache.allocator.allocate(needed))
        return True

    def _free(self, sequence: Sequence) -> None:
        self._cache.allocator.release(sequence.pages)
        sequence.pages, sequence.num_computed, sequence.num_registered = array("i"), 0, 0
        sequence.drafts.clear()
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1


def _chunk(sequence: Sequence, count: int) -> Chunk:
    """The next `count` tokens: known ones, a pending one, then drafts. The last known or pending one and drafts need logits, and
    so do prompt tokens whose successors are to be scored."""
    start = sequence.num_computed
    stop = start + count
    tokens = sequence.tokens[start:stop]
    if stop > len(sequence.tokens):
        if sequence.pending:
            tokens.append(~sequence.row)
        tokens.extend(sequence.drafts[: stop - sequence.length])
    num_logits, targets = max(0, stop - sequence.length + 1), array("q")
    if sequence.unscored:
        first = max(start, sequence.num_scored)
        targets = sequence.tokens[first + 1 : min(stop + 1, sequence.prompt_len)]
    return Chunk(
        tokens, start, sequence.pages, num_logits + len(targets), sequence.slot, targets, sequence.prompt_logprobs or 0
    )
