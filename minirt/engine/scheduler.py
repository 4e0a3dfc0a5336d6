"""`Scheduler`: decides which sequences run in the next step, and on which KV pages. Uses token ids and page numbers, no tensors.

Prefill and decode are not separate phases. The KV cache holds the first `num_computed` tokens of a sequence, and a step computes
the next ones, within a token budget (as in vLLM's v1 scheduler and in Sarathi-Serve's chunked prefill). A step may be scheduled
before the tokens of the previous step are known: such a token is on the device only, and is called `pending`.
"""

import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from minirt.engine.kv_cache import KVCache
from minirt.engine.prefix_cache import PrefixCache
from minirt.engine.step_input import Chunk
from minirt.engine.waiting_queue import WaitingQueue
from minirt.errors import ContextLengthError, InputError

# The default token budget of a step. On a CPU a larger step is no faster, and an interrupt or another request waits for it.
MAX_NUM_BATCHED_TOKENS = {"cuda": 8192, "cpu": 512}
STEPS_UNTIL_LARGER = 64  # number of steps after which twice as many tokens are tried again, once memory ran out
MAX_SCORED_TOKENS = 512  # maximum number of prompt tokens that a step scores: each takes a row of logits
MOST = 1 << 20  # the upper bound of both limits of a step: sequences and tokens


@dataclass(eq=False)
class Sequence:
    """The state of one request. `tokens` holds the prompt and the tokens generated so far, at most `final_len` in total."""

    id: int
    tokens: array  # of int64
    prompt_len: int
    final_len: int
    priority: int = 0  # the lowest runs first
    group: int | None = None  # the sequences of one group have the same prompt
    leads: bool = False  # whether the others of its group wait until its prompt is computed
    rank: tuple[int, int] = (0, -1)  # its priority and its place among all arrivals: the order of admission
    num_computed: int = 0
    pending: int = 0  # number of sampled tokens that the host has not read yet: 0 or 1
    row: int = 0  # the row of the pending token among the last step's sampled tokens
    drafts: list[int] = field(default_factory=list)  # proposed next tokens, which a step verifies
    pages: array = field(default_factory=lambda: array("i"))
    slot: int = -1  # row of what the device keeps while it runs, such as recurrent states and token counts; −1: none
    admissions: int = 0  # number of times it was admitted; in between, other sequences may have had its slot
    prompt_logprobs: int | None = None  # number of most probable tokens to list for each prompt token; None: no scores
    num_unscored: int = 1  # number of first prompt tokens that are not scored: at least the first one
    num_scored: int = 0  # number of prompt tokens after the first that need no scores, or whose scores are known or in a step
    salt: str | None = None
    keys: list[bytes] = field(default_factory=list)  # keys of its first full pages; see `PrefixCache`
    num_registered: int = 0  # number of its pages that are in the prefix cache
    num_cached: int = -1  # tokens that were found in the prefix cache when it first ran; -1: it has not run
    added_at: float = 0.0  # the time at which it was queued
    queue_time_s: float | None = None  # from then until its first admission; None before, and once it was reported

    @property
    def length(self) -> int:
        """Number of tokens, including a pending one."""
        return len(self.tokens) + self.pending

    @property
    def num_generated(self) -> int:
        return len(self.tokens) + self.pending - self.prompt_len

    @property
    def unscored(self) -> int:
        """Number of prompt tokens that still are to be scored."""
        return 0 if self.prompt_logprobs is None else self.prompt_len - 1 - self.num_scored

    @property
    def has_started(self) -> bool:
        """Whether it holds pages, or a token was sampled or scored for it."""
        return len(self.pages) > 0 or self.num_generated > 0 or self.num_scored >= self.num_unscored


def check_limits(max_num_seqs: int, max_num_batched_tokens: int | None, max_waiting: int | None = None) -> None:
    """Raise InputError unless the limits are in range. Kernels count the sequences and tokens of a step in 32 bits."""
    for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
        if value is None and name == "max_num_batched_tokens":
            continue
        if type(value) is not int or not 1 <= value <= MOST:
            where = "--" + name.replace("_", "-")
            raise InputError("not an acceptable value", where=where, expected=f"an integer from 1 to {MOST}", found=repr(value))
    if max_waiting is not None and (type(max_waiting) is not int or max_waiting < 0):
        expected, found = "an integer >= 0, or None", repr(max_waiting)[:80]
        raise InputError("not an acceptable value", where="--max-waiting", expected=expected, found=found)


class Scheduler:
    """Schedules running sequences first. Then waiting ones, by priority value (the lowest first), then by arrival.

    When pages run out, preempts the running sequence with the highest priority value, the youngest of several. A waiting sequence
    preempts none.

    Args:
        max_num_seqs: maximum number of sequences in one step.
        max_num_batched_tokens: maximum number of tokens in one step. A longer prompt is computed in chunks.
        max_model_len: number of positions that the model serves.
        prefix_cache: whether sequences with the same beginning share pages. Without effect if there are recurrent layers, because
            their state at the end of the shared beginning is not kept.
        max_waiting: maximum number of waiting sequences. None: no limit.
    """

    def __init__(
        self,
        cache: KVCache,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        prefix_cache: bool = True,
        max_waiting: int | None = None,
    ) -> None:
        self._cache = cache
        self.prefix_cache = PrefixCache(cache.allocator, cache.page_size) if prefix_cache and not cache.has_states else None
        # The token limit of a step, lowered when memory runs out, and the number of steps since then.
        self._limit_tokens, self._steps_since = max_num_batched_tokens, 0
        self._pinned: set[int] = set()  # pages of pinned prompts
        self._blocked = (-1, -1)  # id of the last sequence that did not fit, and `allocator.num_changes` then
        self._free_slots = list(range(max_num_seqs))[::-1]
        self.max_num_seqs, self.max_num_batched_tokens, self.max_waiting = max_num_seqs, max_num_batched_tokens, max_waiting
        self._added: list[Sequence] = []  # since the last step, if they may be refused
        self.max_len = min(max_model_len, cache.capacity)
        self._limit = "--max-model-len" if max_model_len <= cache.capacity else "--kv-cache-memory"
        self.waiting = WaitingQueue()
        self.running: dict[int, Sequence] = {}  # by id, in the order of admission
        self._num_arrivals = 0
        self.num_preemptions = 0
        self._followers: dict[int | None, OrderedDict[int, Sequence]] = {}  # by group: those that wait for the one that leads

    def check_length(self, tokens: int, new: int = 1) -> None:
        """Raise ContextLengthError if a prompt of this many tokens can never fit, with room for `new` tokens, 1 or 0."""
        if tokens + new > self.max_len:
            raise ContextLengthError(
                "the prompt is too long",
                expected=f"at most {self.max_len - new} tokens" + ", to leave room for one new token" * new,
                found=f"{tokens} tokens",
                hint=f"shorten it, or raise {self._limit} if the model and the memory allow",
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose length has been checked."""
        sequence.rank, sequence.added_at = (sequence.priority, self._num_arrivals), time.perf_counter()
        self._num_arrivals += 1
        if sequence.group in self._followers:
            self._followers[sequence.group][sequence.id] = sequence
            return
        if sequence.group is not None:
            self._followers[sequence.group], sequence.leads = OrderedDict(), True
        self.waiting.add(sequence)
        if self.max_waiting is not None:
            self._added.append(sequence)

    def refused(self) -> list[Sequence]:
        """The sequences to refuse: as many as wait above `max_waiting`, the latest of those added since the last step.

        Call it after `schedule`, so that no sequence is refused that the step computes. A group counts as one sequence until its
        prompt is computed. The caller removes them.
        """
        if self.max_waiting is None or not self._added:
            return []
        added, self._added = self._added, []
        excess = len(self.waiting) - self.max_waiting
        still = [sequence for sequence in added if sequence in self.waiting] if excess > 0 else []
        refused = still[max(0, len(still) - excess) :]
        return [member for sequence in refused for member in (sequence, *self._followers.get(sequence.group, {}).values())]

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or aborted sequence and free its pages.

        A step in flight may still write to these pages. This is safe, because their next owner's writes follow in stream order.
        """
        self.running.pop(sequence.id, None)
        self.waiting.remove(sequence)
        if sequence.group is not None:
            self._leave_group(sequence)
        self._free(sequence)

    def _leave_group(self, sequence: Sequence) -> None:
        """If it led its group, the next one does."""
        followers = self._followers.get(sequence.group, OrderedDict())
        if not sequence.leads:
            followers.pop(sequence.id, None)
        elif followers:
            _, following = followers.popitem(last=False)
            sequence.leads, following.leads = False, True
            self.waiting.add(following)
        else:
            sequence.leads = False
            del self._followers[sequence.group]

    def _release_followers(self, sequence: Sequence) -> None:
        """Let the rest of a group run, once its leader's full prompt pages are in the prefix cache; at once if there is none."""
        full = (sequence.prompt_len - 1) // self._cache.page_size
        if sequence.leads and (self.prefix_cache is None or sequence.num_registered >= full):
            sequence.leads = False
            for following in self._followers.pop(sequence.group).values():
                self.waiting.add(following)

    def reset(self, waiting: Iterable[Sequence]) -> None:
        """Drop all sequences, free all pages, and queue the sequences of `waiting`, none of which has started, in this order.

        Nothing is cached or pinned any more.
        """
        self.running.clear()
        self._pinned.clear()
        self._blocked = (-1, -1)
        self._free_slots = list(range(self.max_num_seqs))[::-1]
        self.waiting = WaitingQueue()
        self._followers.clear()
        for sequence in waiting:
            sequence.slot, sequence.num_computed, sequence.leads = -1, 0, False
            self.add(sequence)
        self._added.clear()
        self._cache.allocator.reset()

    def schedule(self) -> list[tuple[Sequence, Chunk]]:
        """The chunks of the next step, with their pages reserved. Empty if there is nothing to compute (yet)."""
        budget = self._limit_tokens
        chosen: dict[int, tuple[Sequence, Chunk]] = {}
        preempted, scores = False, MAX_SCORED_TOKENS
        for sequence in list(self.running.values()):
            if budget <= 0:
                break
            if preempted and sequence.id not in self.running:  # for an earlier one
                continue
            length, drafts = sequence.length, sequence.drafts
            if length >= sequence.final_len and sequence.pending:  # its last token
                continue
            if drafts:
                del drafts[sequence.final_len - length - 1 :]  # a step gives one token more than it verifies
            count = min(length + len(drafts) - sequence.num_computed, budget)
            count = min(count, _most(sequence, scores)) if sequence.unscored else count
            if not count:
                continue
            while not self._reserve(sequence, count):
                last = self._preempt_last()
                preempted = True
                if last.id in chosen:
                    chunk = chosen.pop(last.id)[1]
                    budget, scores = budget + len(chunk.tokens), scores + len(chunk.targets)
                if last is sequence:
                    break
            else:
                chunk = _chunk(sequence, count)
                chosen[sequence.id] = sequence, chunk
                budget -= count
                scores -= len(chunk.targets)
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs and not preempted:
            sequence = self.waiting.first()
            if (sequence.unscored and not scores) or not self._admit(sequence):
                break
            count = min(sequence.length - sequence.num_computed, budget)
            count = min(count, _most(sequence, scores)) if sequence.unscored else count
            self._reserve(sequence, count)
            self.running[sequence.id] = self.waiting.pop()
            self._release_followers(sequence)
            chosen[sequence.id] = sequence, _chunk(sequence, count)
            budget -= count
            scores -= len(chosen[sequence.id][1].targets)
        return list(chosen.values())

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its slot and the cached pages of its prefix, if all of its tokens fit. Returns whether they do.

        A sequence that does not fit would soon be preempted.
        """
        allocator, size = self._cache.allocator, self._cache.page_size
        if self._blocked == (sequence.id, allocator.num_changes):
            return False
        pages: list[int] = []
        if self.prefix_cache is not None:
            # At least one token is computed. The logits of token i score token i + 1.
            known = (sequence.num_scored if sequence.unscored else sequence.length - 1) // size
            pages = self.prefix_cache.find(sequence.keys, sequence.tokens, sequence.salt, known)
        needed = self._cache.pages_for(min(sequence.length + 1, sequence.final_len)) - len(pages)
        if needed > allocator.num_free - allocator.count_free(pages):
            self._blocked = sequence.id, allocator.num_changes
            return False
        allocator.share(pages)
        sequence.pages, sequence.slot = array("i", pages), self._free_slots.pop()
        sequence.num_computed, sequence.num_registered = len(pages) * size, len(pages)
        sequence.admissions += 1
        if sequence.num_cached < 0:
            sequence.num_cached = sequence.num_computed
            sequence.queue_time_s = time.perf_counter() - sequence.added_at
            if self.prefix_cache is not None:
                self.prefix_cache.count(sequence.length, sequence.num_computed)
        return True

    def extend_keys(self, sequence: Sequence) -> None:
        """Compute the keys that `register` will need, while the sequence's step runs."""
        if self.prefix_cache is not None:
            self.prefix_cache.extend_keys(sequence.keys, sequence.tokens, sequence.salt)

    def register(self, sequence: Sequence, computed: int) -> None:
        """Add the full pages of a sequence's first `computed` tokens to the prefix cache. Their step must have ended."""
        full = computed // self._cache.page_size
        if self.prefix_cache is None or full <= sequence.num_registered:
            return
        full = min(full, len(sequence.pages))
        self.extend_keys(sequence)
        for i in range(sequence.num_registered, full):
            self._cache.allocator.register(sequence.pages[i], sequence.keys[i])
        sequence.num_registered = full
        self._release_followers(sequence)

    def pin(self, tokens: array, longest: int = 0) -> int:
        """Hold the cached pages of a prompt, so that they are never evicted. Returns the number of tokens in them.

        Args:
            longest: number of tokens that an open request may reach; the other pages must hold them.
        Raises:
            ContextLengthError: pinned prompts would take more than half of all pages, or pages that an open request may need.
        """
        if self.prefix_cache is None:
            return 0
        pages = self.prefix_cache.find([], tokens, None, len(tokens) // self._cache.page_size)
        pinned = self._pinned | set(pages)
        if 2 * len(pinned) > self._cache.num_pages:
            raise ContextLengthError(
                "pinned prompts take too many KV pages", expected=f"at most half of {self._cache.num_pages}", found=len(pinned),
                hint="raise --kv-cache-memory, or pin less",
            )  # fmt: skip
        room = (self._cache.num_pages - len(pinned)) * self._cache.page_size
        if longest > room:
            raise ContextLengthError(
                "an open request may need the KV pages of the pinned prompt", expected=f"at most {room} tokens", found=longest,
                hint="pin prompts before other requests run, lower their max_tokens, or raise --kv-cache-memory",
            )  # fmt: skip
        self._cache.allocator.share([page for page in pages if page not in self._pinned])
        self._pinned = pinned
        if room < self.max_len:
            self.max_len, self._limit = room, "--kv-cache-memory"
        return len(pages) * self._cache.page_size

    def limit_tokens(self, most: int) -> None:
        """Limit the next steps to `most` tokens, because a larger step did not fit into memory."""
        self._limit_tokens, self._steps_since = most, 0

    def relax_limit(self) -> None:
        """Count a step that fits. After STEPS_UNTIL_LARGER of them, double the limit of `limit_tokens`."""
        self._steps_since += 1
        if self._steps_since >= STEPS_UNTIL_LARGER:
            self._limit_tokens, self._steps_since = min(2 * self._limit_tokens, self.max_num_batched_tokens), 0

    def _preempt_last(self) -> Sequence:
        """Take the pages of the last running sequence by rank, which is computed again from its start later.

        It keeps its rank, so that it is admitted before those that arrived later.
        """
        last = max(self.running.values(), key=lambda sequence: sequence.rank)
        self.num_preemptions += 1
        del self.running[last.id]
        self._free(last)
        self.waiting.add(last)
        return last

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        needed = self._cache.pages_for(sequence.num_computed + count) - len(sequence.pages)
        if needed <= 0:
            return True
        if needed > self._cache.allocator.num_free:
            return False
        sequence.pages.extend(self._cache.allocator.allocate(needed))
        return True

    def _free(self, sequence: Sequence) -> None:
        self._cache.allocator.release(sequence.pages)
        sequence.pages, sequence.num_computed, sequence.num_registered = array("i"), 0, 0
        sequence.drafts.clear()
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1


def _most(sequence: Sequence, scores: int) -> int:
    """How many tokens of a prompt a step may compute if it scores at most `scores` of them."""
    return scores + max(0, sequence.num_scored - sequence.num_computed)


def _chunk(sequence: Sequence, count: int) -> Chunk:
    """The next `count` tokens: known ones, a pending one, then drafts.

    Drafts and the last token before them need logits, and so do tokens of the prompt whose successors are not scored yet.
    """
    start = sequence.num_computed
    if count == 1 and start == len(sequence.tokens):  # the pending token: what most steps compute
        return Chunk((~sequence.row,), start, sequence.pages, 1, sequence.slot)
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
