"""`Scheduler`: decides which sequences run in the next step, and on which KV pages. Uses token ids and page numbers, no tensors.

Prefill and decode are not separate phases. A step computes the next tokens of each running sequence, within a token budget (as in
vLLM's v1 scheduler and in Sarathi-Serve's chunked prefill). A step may be scheduled before the tokens of the previous step are
known, and a step with drafts yields a number of tokens that only the device knows. So the scheduler reserves pages for the most
tokens that a sequence can have, and returns what is too much once the host knows.
"""

import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from minirt.engine.limits import MAX_SHARING, EngineLimits
from minirt.engine.prefix_cache import PrefixCache
from minirt.engine.sequence import Sequence
from minirt.engine.waiting_queue import WaitingQueue
from minirt.errors import ContextLengthError, EngineError
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.step.kv_cache import KVCache
from minirt.step.plan import PlannedSequence

STEPS_UNTIL_LARGER = 64  # number of steps after which twice as many tokens are tried again, once memory ran out


class Work(NamedTuple):
    """A sequence of the next step."""

    sequence: Sequence
    planned: PlannedSequence

    @property
    def num_scored(self) -> int:
        """How many of its rows of logits, the first ones, are for the caller."""
        return self.planned.num_logits - self.planned.num_draws

    @property
    def splits(self) -> int:
        """Number of its complete KV splits, at most."""
        return (self.planned.seq_len - 1) // KV_SPLIT


class Scheduler:
    """Schedules running sequences first. Then waiting ones, by priority value (the lowest first), then by arrival.

    When pages run out, preempts the running sequence with the highest priority value, the youngest of several. A waiting sequence
    preempts none.

    Args:
        prefix_cache: whether sequences with the same beginning share pages. Without effect if there are recurrent layers, because
            their state at the end of the shared beginning is not kept.
    """

    def __init__(self, cache: KVCache, limits: EngineLimits, prefix_cache: bool = True) -> None:
        self._cache, self.limits = cache, limits
        self.prefix_cache = PrefixCache(cache.allocator, cache.page_size) if prefix_cache and not cache.has_states else None
        # The token limit of a step, lowered when memory runs out, and the number of steps since then.
        self._limit_tokens, self._steps_since = limits.max_num_batched_tokens, 0
        self._pinned: set[int] = set()  # pages of pinned prompts
        self._blocked = (-1, -1)  # id of the last sequence that did not fit, and `allocator.num_changes` then
        self._free_slots = list(range(limits.max_num_seqs))[::-1]
        self._added: list[Sequence] = []  # since the last step, if they may be refused
        self.max_len = min(limits.max_model_len, cache.capacity)
        self._limit = "--max-model-len" if limits.max_model_len <= cache.capacity else "--kv-cache-memory"
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
        if self.limits.max_waiting is not None:
            self._added.append(sequence)

    def refused(self) -> list[Sequence]:
        """The sequences to refuse: as many as wait above `max_waiting`, the latest of those added since the last step.

        Call it after `schedule`, so that no sequence is refused that the step computes. A group counts as one sequence until its
        prompt is computed. The caller removes them.
        """
        if self.limits.max_waiting is None or not self._added:
            return []
        added, self._added = self._added, []
        excess = len(self.waiting) - self.limits.max_waiting
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
        self._free_slots = list(range(self.limits.max_num_seqs))[::-1]
        self.waiting = WaitingQueue()
        self._followers.clear()
        for sequence in waiting:
            sequence.slot, sequence.num_prefilled, sequence.num_sent, sequence.leads = -1, 0, -1, False
            sequence.steps = sequence.unread = 0
            self.add(sequence)
        self._added.clear()
        self._cache.allocator.reset()
        self.max_len = min(self.limits.max_model_len, self._cache.capacity)  # pinned prompts had lowered it

    def schedule(self) -> list[Work]:
        """The sequences of the next step, with their pages reserved. Empty if there is nothing to compute (yet)."""
        budget = self._limit_tokens
        chosen: dict[int, Work] = {}
        # Rows of logits beside those of draws, for which each running sequence has room, and the next one that is admitted.
        draws, admits = 1 + self.limits.max_drafts, bool(self.waiting) and len(self.running) < self.limits.max_num_seqs
        rows, preempted = self.limits.max_logits_rows - draws * (len(self.running) + admits), False
        splits = MAX_SHARING * (self._cache.capacity // KV_SPLIT)  # see `max_splits`
        for sequence in list(self.running.values()):
            if budget <= 0:
                break
            if preempted and sequence.id not in self.running:  # for an earlier one
                continue
            if self.limits.max_drafts:
                self._return_pages(sequence)
            work = self._next(sequence, budget, rows + draws)
            if work is None or work.splits > splits:
                continue
            while not self._reserve(sequence, work.planned.seq_len):
                last = self._preempt_last()
                preempted = True
                if last.id in chosen:
                    dropped = chosen.pop(last.id)
                    splits += dropped.splits
                    budget += dropped.planned.num_tokens
                    rows += max(0, dropped.planned.num_logits - draws)
                if last is sequence:
                    break
            else:
                chosen[sequence.id] = work
                splits -= work.splits
                budget, rows = budget - work.planned.num_tokens, rows - max(0, work.planned.num_logits - draws)
        rows += draws * admits
        while self.waiting and budget > 0 and rows >= draws and len(self.running) < self.limits.max_num_seqs and not preempted:
            sequence = self.waiting.first()
            if (len(sequence.tokens) - 1) // KV_SPLIT > splits or not self._admit(sequence):
                break
            work = self._next(sequence, budget, rows)
            if work is None:
                raise EngineError("an admitted sequence has nothing to compute", where=f"request {sequence.id}")
            self._reserve(sequence, work.planned.seq_len)
            self.running[sequence.id] = self.waiting.pop()
            self._release_followers(sequence)
            chosen[sequence.id] = work
            splits -= work.splits
            budget, rows = budget - work.planned.num_tokens, rows - max(draws, work.planned.num_logits)
        return list(chosen.values())

    def _next(self, sequence: Sequence, budget: int, rows: int) -> Work | None:
        """What a step computes of a sequence, with at most so many tokens and rows of logits; None: nothing."""
        if not sequence.prefills:
            if sequence.logits_only or sequence.least_len >= sequence.final_len:  # its last token is in a step
                return None
            most = 1 + self.limits.max_drafts if sequence.takes_drafts else 1
            count = min(most, sequence.final_len - sequence.least_len, budget)
            length = min(sequence.most_len - 1 + count, sequence.final_len)
            return Work(sequence, PlannedSequence(sequence.slot, -1, count, count, count, length))
        start, first = sequence.num_prefilled, sequence.prefill_len
        if sequence.logits_only or sequence.unscored:
            first = max(start, sequence.num_scored)
        stop = min(sequence.prefill_len, start + budget, first + rows)
        if stop <= start:
            return None
        draws = int(stop == sequence.prefill_len and not sequence.logits_only)
        scored = max(0, min(stop, sequence.prefill_len - draws) - first)
        planned = PlannedSequence(sequence.slot, start, stop - start, scored + draws, draws, stop)
        return Work(sequence, planned)

    def started(self, work: Iterable[Work]) -> None:
        """A step with these sequences was started."""
        for sequence, planned in work:
            sequence.num_sent = len(sequence.pages)
            if planned.start >= 0:
                sequence.num_prefilled += planned.num_tokens
                sequence.num_scored += planned.num_logits - planned.num_draws
            if planned.num_draws:
                sequence.steps += 1
                sequence.unread += planned.num_draws

    def read(self, sequence: Sequence, draws: int) -> None:
        """The tokens of a step with so many draws of a sequence are known now."""
        sequence.steps -= 1
        sequence.unread -= draws

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its slot and the cached pages of its prefix, if all of its tokens fit. Returns whether they do.

        A sequence that does not fit would soon be preempted. One that was preempted waits until all its tokens are known.
        """
        allocator, size = self._cache.allocator, self._cache.page_size
        if sequence.steps or self._blocked == (sequence.id, allocator.num_changes):
            return False
        pages: list[int] = []
        if self.prefix_cache is not None and not sequence.logits_only:
            # At least one token is computed. The logits of token i score token i + 1.
            known = sequence.num_scored if sequence.unscored else len(sequence.tokens) - 1
            pages = self.prefix_cache.find(sequence.keys, sequence.tokens, sequence.salt, known // size)
        needed = self._cache.pages_for(min(len(sequence.tokens) + 1, sequence.final_len)) - len(pages)
        if needed > allocator.num_free - allocator.count_free(pages):
            self._blocked = sequence.id, allocator.num_changes
            return False
        allocator.share(pages)
        sequence.pages, sequence.slot = array("i", pages), self._free_slots.pop()
        sequence.num_prefilled, sequence.num_registered = len(pages) * size, len(pages)
        sequence.prefill_len, sequence.num_sent = len(sequence.tokens), -1
        if sequence.num_cached < 0:
            sequence.num_cached = sequence.num_prefilled
            sequence.queue_time_s = time.perf_counter() - sequence.added_at
            if self.prefix_cache is not None and not sequence.logits_only:
                self.prefix_cache.count(len(sequence.tokens), sequence.num_prefilled)
        return True

    def extend_keys(self, sequence: Sequence) -> None:
        """Compute the keys that `register` will need, while the sequence's step runs."""
        if self.prefix_cache is not None:
            self.prefix_cache.extend_keys(sequence.keys, sequence.tokens, sequence.salt)

    def register(self, sequence: Sequence, computed: int) -> None:
        """Add the full pages of a sequence's first `computed` tokens to the prefix cache. Their step must have ended."""
        full = computed // self._cache.page_size
        if self.prefix_cache is None or full <= sequence.num_registered or sequence.logits_only:
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
            self._limit_tokens, self._steps_since = min(2 * self._limit_tokens, self.limits.max_num_batched_tokens), 0

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

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        needed = self._cache.pages_for(tokens) - len(sequence.pages)
        if needed <= 0:
            return True
        if needed > self._cache.allocator.num_free:
            return False
        sequence.pages.extend(self._cache.allocator.allocate(needed))
        return True

    def _return_pages(self, sequence: Sequence) -> None:
        """Return the pages that were reserved for drafts which turned out to be wrong."""
        kept = self._cache.pages_for(max(sequence.most_len, sequence.prefill_len))
        if kept < len(sequence.pages):
            self._cache.allocator.release(sequence.pages[kept:])
            del sequence.pages[kept:]
            sequence.num_sent = min(sequence.num_sent, kept)

    def _free(self, sequence: Sequence) -> None:
        self._cache.allocator.release(sequence.pages)
        sequence.pages, sequence.num_registered = array("i"), 0
        sequence.num_prefilled, sequence.num_sent = 0, -1
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1

