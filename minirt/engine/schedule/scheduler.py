"""`Scheduler`: decides which sequences run in the next step, and on which KV pages. Uses token ids and page numbers, no tensors.

Prefill and decode are not separate phases. A step computes the next tokens of each running sequence, within a token budget (as in
vLLM's v1 scheduler and in Sarathi-Serve's chunked prefill): first of those that decode, on the arrays of `HostSlots`, then of
prompts, one by one. A step may be scheduled before the tokens of the previous step are known, and a step with drafts yields a
number of tokens that only the device knows. So the scheduler reserves pages for the most tokens that a sequence can have, and
returns the surplus once the host knows.
"""

import heapq
import operator
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from minirt.engine.limits import MAX_SHARING, EngineLimits
from minirt.engine.schedule.draft_lengths import DraftLengths
from minirt.engine.schedule.prefix_cache import NO_HIT, Hit, PrefixCache
from minirt.engine.schedule.state_cache import StatePrefixCache
from minirt.engine.schedule.step_times import GraphTimes, OnlineStepTimes, PromptTime
from minirt.engine.schedule.windows import Windows
from minirt.engine.state.sequence import Sequence
from minirt.engine.state.slots import NEVER, HostSlots
from minirt.errors import ContextLengthError, UnsupportedError
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.step.kv_cache import KVCache
from minirt.step.plan import NO_COPIES, NO_TOKENS, Copies, PlannedSequences, Snapshot

STEPS_UNTIL_LARGER = 64  # number of steps after which twice as many tokens are tried again, once memory ran out
_ANY_TIME = 1e9  # seconds
_PROMPT_TILE = 128  # chunks of prompts that time limits have a multiple of this number of tokens


class PromptChunk(NamedTuple):
    """What a step computes of a prompt: a column of `PlannedSequences`. `stop`: cached tokens after the step."""

    slot: int
    start: int
    num_tokens: int
    num_logits: int
    num_draws: int
    stop: int


class ScheduledPrompt(NamedTuple):
    """A sequence whose new tokens the host knows. `place`: among the sequences of the step."""

    place: int
    sequence: Sequence
    chunk: PromptChunk


class ScheduledStep(NamedTuple):
    """The sequences of the next step, in order, and what changes before it.

    Args:
        epochs: [B], of their slots; see `HostSlots`.
        prompts: those whose new tokens the host knows, after the others. Python looks at each, with as few calls of NumPy as
            possible: after a wait, a call takes some 10 µs.
    """

    sequences: PlannedSequences
    epochs: np.ndarray
    prompts: list[ScheduledPrompt]
    copies: Copies = NO_COPIES
    snapshots: tuple[Snapshot, ...] = ()


class _Room(NamedTuple):
    """What is left of a step for prompts.

    Args:
        rows: of logits, beside one draw of each running sequence.
        splits: KV splits.
        seconds: while others decode.
    """

    tokens: int
    rows: int
    splits: int
    seconds: float

    def half(self) -> "_Room":
        """Half of all but the KV splits, of which sequences that share no pages cannot run out."""
        return _Room((self.tokens + 1) // 2, (self.rows + 1) // 2, self.splits, self.seconds / 2)

    def plus(self, other: "_Room") -> "_Room":
        return _Room._make(map(operator.add, self, other))

    def less(self, other: "_Room") -> "_Room":
        return _Room._make(map(operator.sub, self, other))


_by_arrival, _by_size = operator.attrgetter("arrival_rank"), operator.attrgetter("size_rank")


class WaitingQueue:
    """Sequences by their `arrival_rank` and by their `size_rank`. Adding one costs O(log n), removing any O(1) amortized.

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
        for heap, rank in zip(self._heaps, (_by_arrival, _by_size), strict=True):
            heapq.heappush(heap, (rank(sequence), sequence))

    def oldest(self) -> Sequence:
        """The sequence with the lowest `arrival_rank`. The queue must not be empty."""
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
        for heap, rank in zip(self._heaps, (_by_arrival, _by_size), strict=True):
            if len(heap) > 2 * len(self._sequences) + 16:
                heap[:] = [(rank(waiting), waiting) for waiting in self._sequences.values()]
                heapq.heapify(heap)


def _further_splits(length: Any) -> Any:
    """Number of complete KV splits before the last one, of a number of cached tokens or an array of them."""
    return (length - 1) // KV_SPLIT


def _planned(
    slots: np.ndarray, counts: np.ndarray, lens: np.ndarray, total: int, prompts: list[PromptChunk]
) -> PlannedSequences:
    """The sequences of a step: those that go on with the next tokens of their slots, then prompts.

    Args:
        slots, counts, lens: [B] of the first, their `num_tokens` and `seq_lens`; each token has logits and a draw.
        total: sum of `counts`.
    """
    going_on = len(slots)
    if going_on:
        values = np.empty((6, going_on + len(prompts)), np.int64)
        first = values[:, :going_on]
        first[0], first[1], first[2:5], first[5] = slots, -1, counts, lens
        if prompts:
            values[:, going_on:] = np.transpose(prompts)
    else:
        values = np.array(prompts, np.int64).T
    tokens = logits = draws = total
    for chunk in prompts:
        tokens, logits, draws = tokens + chunk.num_tokens, logits + chunk.num_logits, draws + chunk.num_draws
    return PlannedSequences(values, *values, tokens, logits, draws)  # type: ignore[call-arg]  # mypy does not count the rows


class Scheduler:
    """Schedules sequences that decode first. Then prompts, by priority value (the lowest first), then by `_schedule_prompts`.

    A waiting sequence is admitted if the pages of all its tokens are free, and preempts none. While the first one does not fit,
    others may pass it until steps have computed as many tokens as its prompt has. When pages run out, the running sequence with
    the highest priority value is preempted, the youngest of several.

    Args:
        vocab_size: number of token ids.
        prefix_cache: whether sequences with the same beginning share pages. If there are recurrent layers, it needs snapshots of
            their states.
        adapters: `minirt.adapters.adapters.Adapters`, which have places on the device; None: sequences have none.

    Attributes:
        host: what it knows of the running sequences.
        waiting, running: the sequences; those that run by id, in the order of admission.
        draft_lengths: None: there are no drafts.
        tokens_done: number of tokens of all steps.
        most_tokens: of a step while kernels for larger ones are compiled; None: as `limits` says.
    """

    def __init__(
        self, cache: KVCache, limits: EngineLimits, vocab_size: int, *, prefix_cache: bool = True, adapters: Any = None
    ) -> None:  # fmt: skip
        self._cache, self.limits, self.adapters = cache, limits, adapters
        self.prefix_cache: PrefixCache | None = None
        self._states: StatePrefixCache | None = None  # the prefix cache, if there are recurrent layers
        self._windows: Windows | None = None  # None: no layer has a window
        if cache.window_allocators:
            columns = cache.pages_for(min(limits.max_model_len, cache.capacity))
            self._windows = Windows(cache.window_allocators, cache.page_size, limits.max_num_seqs, columns)
            if prefix_cache and cache.has_states:
                what, expected = "a prefix cache of layers with windows beside recurrent ones", "windows or states"
                raise UnsupportedError(what, where="prefix_cache", expected=expected, found="both", hint="use --no-prefix-cache")
        if prefix_cache and not cache.has_states:
            self.prefix_cache = PrefixCache(cache.allocator, cache.page_size, self._windows)
        elif prefix_cache and cache.num_snapshots:
            rows, within = range(cache.num_slots, cache.num_slots + cache.num_snapshots), cache.snapshot_tokens
            self._states = StatePrefixCache(cache.allocator, cache.page_size, rows, cache.state_tokens, within)
            self.prefix_cache = self._states
        # The token limit of a step, lowered when memory runs out and doubled after `_until_larger` steps; those since then.
        self._limit_tokens, self._steps_since, self._until_larger = limits.max_num_batched_tokens, 0, STEPS_UNTIL_LARGER
        self.most_tokens: int | None = None
        self._most_rows = limits.max_logits_rows
        self._most_splits = MAX_SHARING * (cache.capacity // KV_SPLIT)  # see `max_splits`
        self._prompt_time: PromptTime | None = None  # None: steps have no limit of time
        self.tokens_done = self._num_arrivals = self.num_preemptions = 0
        self._clear()
        self.host = HostSlots(replace(limits, max_model_len=self.max_len), cache.pages_for(self.max_len), self._windows)
        self.draft_lengths = DraftLengths(limits, self.host, vocab_size) if limits.max_drafts else None

    def _clear(self) -> None:
        """Nothing waits, runs or is pinned."""
        self._starting: ScheduledStep | None = None  # a step that was scheduled, before `on_started` or `on_failed`
        self.waiting = WaitingQueue()
        self.running: dict[int, Sequence] = {}
        self._prefilling: dict[int, Sequence] = {}  # those whose known tokens are not computed yet
        self._decoding: dict[int, Sequence] = {}  # those that go on, by slot, in the order in which they began to
        self._decoding_slots: np.ndarray | None = None  # their slots as an array; None: to be made
        self._added: list[Sequence] = []  # since the last step, if they may be refused
        self._followers: dict[int | None, OrderedDict[int, Sequence]] = {}  # by group: those that wait for the one that leads
        self._pinned: set[int] = set()  # pages of pinned prompts, which lower `max_len`
        length, capacity = self.limits.max_model_len, self._cache.capacity
        self.max_len = min(length, capacity)
        self._limiting_option = "--max-model-len" if length <= capacity else "--kv-cache-memory"

    def use_times(self, prompt_time: PromptTime | None = None, step_times: GraphTimes | OnlineStepTimes | None = None) -> None:
        """Go by these times of steps from now on. None: as before."""
        self._prompt_time = prompt_time or self._prompt_time
        if self.draft_lengths is not None and step_times is not None:
            self.draft_lengths.times = step_times

    def check_length(self, tokens: int, new: int = 1) -> None:
        """Raise ContextLengthError if a prompt of this many tokens can never fit, with room for `new` tokens, 1 or 0."""
        if tokens + new > self.max_len:
            longest = self.limits.model_len
            hint = f"shorten it, or raise {self._limiting_option} if the memory allows"
            if longest is not None and tokens + new > longest:
                hint = f"shorten it: the model itself takes at most {longest} tokens"
            expected = f"at most {self.max_len - new} tokens" + ", to leave room for one new token" * new
            raise ContextLengthError("the prompt is too long", expected=expected, found=f"{tokens} tokens", hint=hint)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose length has been checked."""
        sequence.arrival_rank, sequence.added_at = (sequence.request.priority, self._num_arrivals), time.perf_counter()
        self._num_arrivals += 1
        if sequence.group in self._followers:
            self._followers[sequence.group][sequence.id] = sequence
            return
        if sequence.group is not None:
            self._followers[sequence.group], sequence.leads = OrderedDict(), True
        self._enqueue(sequence)
        if self.limits.max_waiting is not None:
            self._added.append(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.size = len(sequence.tokens)
        if self.waiting or self._prefilling:  # else it is compared with none that comes before it
            sequence.size -= next(self._hits(sequence)).tokens
        sequence.passes_until = self.tokens_done + sequence.size
        self.waiting.add(sequence)

    def take_refused(self) -> list[Sequence]:
        """The sequences to refuse, so that `max_waiting` wait: the latest of those added since the last step.

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

    def remove(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Remove a finished or aborted sequence and free its pages.

        `failed`: what it has computed is of no use.

        A step in flight may still write to these pages. This is safe, because their next owner's writes follow in stream order.
        """
        if self.running.pop(sequence.id, None) is None:
            self.waiting.remove(sequence)
        if sequence.group is not None:
            self._leave_group(sequence)
        generated = len(sequence.tokens) > sequence.prompt_len
        if self._states is not None and sequence.slot in self._decoding and generated and not failed:
            self._keep_end(sequence, self._states)
        self._free(sequence)

    def _keep_end(self, sequence: Sequence, states: StatePrefixCache) -> None:
        """Tell the prefix cache how many tokens are in the state of a sequence that ends.

        The steps that the host has read have computed all its tokens but the last one, and this one too if the sequence did not
        take all that they yield. A step in flight computes the next token. With drafts, a state can go back to any token of its
        last step, but not behind its beginning.
        """
        slot, starting, unused = sequence.slot, self._starting, sequence.unused
        steps = int(self.host.steps[slot])  # that the host has not read
        if starting is not None:
            slots = starting.sequences.slots
            steps += int((self.host.unchanged(slots, starting.epochs) & (slots == slot)).sum())
        if steps and (steps > 1 or unused > 1):  # the state may be behind the sequence's end, or at a token that is not its own
            return
        computed = len(sequence.tokens) - (unused == 0 and steps == 0)
        self.register_pages(sequence, computed)
        states.ended(sequence, computed)

    def _leave_group(self, sequence: Sequence) -> None:
        """If it led its group, the next one does."""
        followers = self._followers.get(sequence.group, OrderedDict())
        if not sequence.leads:
            followers.pop(sequence.id, None)
        elif followers:
            _, following = followers.popitem(last=False)
            sequence.leads, following.leads = False, True
            self._enqueue(following)
        else:
            sequence.leads = False
            del self._followers[sequence.group]

    def _release_followers(self, sequence: Sequence) -> None:
        """Let the rest of a group run, once its leader's full prompt pages are in the prefix cache; at once if there is none."""
        full = (sequence.prompt_len - 1) // self._cache.page_size
        if sequence.leads and (self.prefix_cache is None or self.host.num_registered[sequence.slot] >= full):
            sequence.leads = False
            for following in self._followers.pop(sequence.group).values():
                self._enqueue(following)

    def reset(self, waiting: Iterable[Sequence]) -> None:
        """Drop all sequences, free all pages, and queue the sequences of `waiting`, none of which has started, in this order.

        Nothing is cached or pinned any more.
        """
        self._clear()
        self.host.reset()
        self._cache.allocator.reset()
        if self._windows is not None:
            self._windows.reset()
        if self._states is not None:
            self._states.reset()
        if self.adapters is not None:
            self.adapters.reset()
        for sequence in waiting:
            sequence.leads = False  # it has not started
            self.add(sequence)
        self._added.clear()

    def schedule(self) -> ScheduledStep | None:
        """The sequences of the next step, with their pages reserved. None if there is nothing to compute (yet)."""
        preemptions, limit = self.num_preemptions, min(self._limit_tokens, self.most_tokens or self._limit_tokens)
        admits = bool(self.waiting) and len(self.running) < self.limits.max_num_seqs
        rows = self._most_rows - len(self.running)  # beside one draw of each running sequence
        slots, counts, lens = self._schedule_decoding(limit, self._most_splits, rows - int(admits))
        going_on, chunks = len(slots), dict[Sequence, PromptChunk]()
        used = going_on if self.draft_lengths is None else int(counts.sum())
        if used < limit and (self._prefilling or self.waiting):
            limited = going_on and self._prompt_time is not None and self.limits.max_step_ms
            seconds = self.limits.max_step_ms / 1e3 if limited else _ANY_TIME
            splits = self._most_splits - (int(_further_splits(lens).sum()) if going_on else 0)
            room = _Room(limit - used, rows - used + going_on, splits, seconds)
            chunks = self._schedule_prompts(room, admits and self.num_preemptions == preemptions)
        if not going_on and not chunks:
            return None
        copies = NO_COPIES if self._states is None else self._states.copies()
        prompts = [ScheduledPrompt(place, *item) for place, item in enumerate(chunks.items(), going_on)]
        planned = _planned(slots, counts, lens, used, list(chunks.values()))
        snapshots: tuple[Snapshot, ...] = ()
        if self._states is not None and chunks:
            snapshots = self._states.snapshots([prompt[:2] for prompt in prompts], [chunk.stop for chunk in chunks.values()])
        self._starting = ScheduledStep(planned, self.host.epochs[planned.slots], prompts, copies, snapshots)
        return self._starting

    def _schedule_prompts(self, room: _Room, admits: bool) -> dict[Sequence, PromptChunk]:
        """The prompts of the next step, of sequences that are admitted already, and of waiting ones if `admits`.

        Half of the room goes to the oldest prompts, the rest to those with the fewest tokens left. So a short prompt does not
        wait for a long one, and a long one takes at most twice as long beside any number of short ones.
        """
        chunks, alone = dict[Sequence, PromptChunk](), len(self._prefilling) + len(self.waiting) == 1
        part = room if alone else room.half()
        rest = self._add_prompts(chunks, part, admits, _by_arrival, self.waiting.oldest)
        if not alone:
            self._add_prompts(chunks, rest.plus(room).less(part), admits, _by_size, self.waiting.smallest)
        return chunks

    def _add_prompts(
        self, chunks: dict[Sequence, PromptChunk], room: _Room, admits: bool, rank: Callable[[Sequence], Any],
        first_waiting: Callable[[], Sequence],
    ) -> _Room:  # fmt: skip
        """Add chunks of prompts to a step, in the order of `rank`. Returns the room that is left.

        Args:
            chunks: those that the step has already, which may get longer.
            first_waiting: the first waiting sequence by `rank`.
        """
        prompts = self._prefilling.values()
        unfinished = (prompt for prompt in prompts if prompt not in chunks or chunks[prompt].stop < prompt.prefill_len)
        pending = sorted(unfinished, key=rank, reverse=True)
        admits = admits and bool(self.waiting) and self._may_pass(self.waiting.oldest(), room)
        while room.tokens > 0:
            admits = admits and bool(self.waiting) and len(self.running) < self.limits.max_num_seqs and room.rows > 0
            if admits and (not pending or rank(first_waiting()) < rank(pending[-1])):
                sequence, least = first_waiting(), 1
                in_time = not chunks or self._in_time(0, room.tokens, room.seconds)
                if not in_time or (hit := self._fitting(sequence, room.splits)) is None:
                    admits = False
                    continue
                self._admit(sequence, hit)
                room = room._replace(rows=room.rows - 1)
            elif pending:
                sequence, least = pending.pop(), int(not chunks)
            else:
                break
            free = room.plus(self._taken(chunks[sequence])) if sequence in chunks else room
            if (chunk := self._chunk(sequence, free, least)) is not None:
                chunks[sequence], room = chunk, free.less(self._taken(chunk))
        return room

    def _may_pass(self, oldest: Sequence, room: _Room) -> bool:
        """Whether sequences may be admitted before the oldest: it fits, too, or is not due yet."""
        return self.tokens_done < oldest.passes_until or self._fitting(oldest, room.splits) is not None

    def _taken(self, chunk: PromptChunk) -> _Room:
        """What a prompt takes of a step's room."""
        seconds = 0.0 if self._prompt_time is None else self._prompt_time.seconds(chunk.start, chunk.num_tokens)
        return _Room(chunk.num_tokens, max(0, chunk.num_logits - 1), _further_splits(chunk.stop), seconds)

    def _in_time(self, start: int, budget: int, seconds: float) -> int:
        """Number of a prompt's tokens, the first at position `start`, that a step computes in `seconds`, at most `budget`."""
        if self._prompt_time is None:
            return budget
        tokens = self._prompt_time.tokens(start, seconds)
        if tokens >= budget or tokens < _PROMPT_TILE:
            return min(tokens, budget)
        return tokens // _PROMPT_TILE * _PROMPT_TILE

    def _schedule_decoding(self, budget: int, splits: int, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Those that go on with the next tokens of their slots: slots, new tokens and cached tokens, [B] each.

        Args:
            rows: of logits, for drafts.
        """
        host = self.host
        if not self._decoding:
            return NO_TOKENS, NO_TOKENS, NO_TOKENS
        if self._decoding_slots is None:
            self._decoding_slots = np.array(list(self._decoding))
        slots = self._decoding_slots
        new: int | np.ndarray = 1
        plain = host.lengths[slots] + host.unread[slots]  # cached tokens without drafts
        if self.draft_lengths is not None:
            left = budget - len(slots)  # drafts take none of the tokens that others go on with, and half of what prompts may have
            left = left // 2 if self._prefilling or self.waiting else left
            new = self.draft_lengths.choose(slots, len(slots) + min(rows, max(0, left)))
        elif self._is_quiet(slots, plain, budget, splits):
            return slots, np.ones(len(slots), np.int64), plain
        final = host.final_lens[slots]
        counts = np.maximum(np.minimum(final - host.lengths[slots] - host.steps[slots], new), 0)  # 0: its last token is in a step
        counts = np.minimum(counts, budget - (counts.cumsum() - counts))
        runs = counts > 0
        slots, counts, final = slots[runs], counts[runs], final[runs]
        if self.draft_lengths is not None:
            self._return_pages(slots)
        plain = np.minimum(plain[runs], final)
        lens = np.minimum(plain - 1 + counts, final)
        if int(_further_splits(lens).sum()) > splits:  # as many as fit, in order
            for i, further in enumerate(_further_splits(lens).tolist()):
                if further <= splits:
                    splits -= further
                else:
                    counts[i] = 0
        self._reserve_pages(slots, counts, plain, lens)
        host.quiet_until[slots] = np.minimum(final - 1, host.num_pages[slots] * self._cache.page_size)
        kept = counts > 0
        if self._decoding_slots is None:  # some were preempted
            kept &= [host.sequences[slot] is not None for slot in slots.tolist()]
        return slots[kept], counts[kept], lens[kept]

    def _is_quiet(self, slots: np.ndarray, lens: np.ndarray, budget: int, splits: int) -> bool:
        """Whether one token more of each slot needs no page, ends no sequence and fits into the step, as in most steps.

        `lens`: cached tokens then.
        """
        return bool(
            len(slots) <= budget and (lens <= self.host.quiet_until[slots]).all()
            and (len(slots) * _further_splits(self.max_len) <= splits or int(_further_splits(lens).sum()) <= splits)
        )  # fmt: skip

    def _reserve_pages(self, slots: np.ndarray, counts: np.ndarray, plain: np.ndarray, lens: np.ndarray) -> None:
        """Reserve pages for slots that go on, [B] each; those for next tokens may preempt others, those for drafts none.

        Args:
            counts: new tokens; 0 afterwards: it waits, 1: its drafts have no pages.
            plain, lens: cached tokens, without drafts and with them.
        """
        host, size = self.host, self._cache.page_size
        for i in ((counts > 0) & (plain > host.num_pages[slots] * size)).nonzero()[0].tolist():
            slot = int(slots[i])
            sequence = host.sequences[slot]
            while sequence is not None and sequence.slot >= 0 and not self._reserve(sequence, int(plain[i])):
                if host.unread[slot] > host.steps[slot]:  # it waits until the host knows how many of its drafts are right
                    counts[i] = 0
                    break
                self._preempt(max(self.running.values(), key=_by_arrival))
        if self.draft_lengths is not None:
            for i in ((counts > 0) & (lens > host.num_pages[slots] * size)).nonzero()[0].tolist():
                sequence = host.sequences[int(slots[i])]
                if sequence is not None and not self._reserve(sequence, int(lens[i])):
                    counts[i], lens[i] = 1, plain[i]

    def _chunk(self, sequence: Sequence, room: _Room, least: int = 0) -> PromptChunk | None:
        """What a step computes of a sequence's known tokens within a room; None: nothing.

        Args:
            least: 1: one token also if there is no time.
        """
        start, first = sequence.num_prefilled, sequence.prefill_len
        tokens = max(least, self._in_time(start, room.tokens, room.seconds))
        if sequence.logits_only or sequence.num_to_score:
            first = max(start, sequence.logits_from)
        stop = min(sequence.prefill_len, start + tokens, first + room.rows + 1)
        if stop <= start or _further_splits(stop) > room.splits:
            return None
        if self._states is not None:
            stop = self._states.chunk_end(sequence, start, stop)
        if self._windows is not None:
            stop = min(stop, self._windows.room(sequence.slot))
            if stop <= start:
                return None
            self._windows.reserve(sequence.slot, stop)
        draws = int(stop == sequence.prefill_len and not sequence.logits_only)
        scored = max(0, min(stop, sequence.prefill_len - draws) - first)
        return PromptChunk(sequence.slot, start, stop - start, scored + draws, draws, stop)

    def on_started(self, scheduled: ScheduledStep) -> None:
        """A step with these sequences was started."""
        host, slots = self.host, scheduled.sequences.slots
        self._starting, self._steps_since = None, self._steps_since + 1
        self.tokens_done += scheduled.sequences.total_tokens
        if self._steps_since >= self._until_larger:
            self._limit_tokens, self._steps_since = min(2 * self._limit_tokens, self.limits.max_num_batched_tokens), 0
        if self._states is not None:
            self._states.on_started()
        for slot in host.unsent.intersection(slots.tolist()) if host.unsent else ():
            host.num_sent[slot] = host.num_pages[slot]
            host.unsent.remove(slot)
        if self._windows is not None:
            self._windows.sent(slots)
        if going_on := len(slots) - len(scheduled.prompts):
            host.mark_queued(slots[:going_on], scheduled.sequences.num_draws[:going_on])
        for _, sequence, chunk in scheduled.prompts:
            if sequence.slot < 0:  # it has ended while the step was being started
                continue
            sequence.num_prefilled += chunk.num_tokens
            sequence.logits_from += chunk.num_logits - chunk.num_draws
            if self._states is not None:
                self._states.computed(sequence)
            if self._windows is not None:
                self._keep_windows(sequence, self._windows)
            if sequence.num_prefilled == sequence.prefill_len:
                self._prefilling.pop(sequence.id, None)
                if chunk.num_draws:
                    self._decoding[chunk.slot], self._decoding_slots = sequence, None
                    host.mark_queued(chunk.slot, chunk.num_draws)

    def _keep_windows(self, sequence: Sequence, windows: Windows) -> None:
        """A step with a prompt's first `num_prefilled` tokens was started: free what no later token sees. As steps run in
        order, its pages can be found from now on."""
        computed, cache = sequence.num_prefilled, self.prefix_cache
        if cache is not None and not sequence.logits_only:
            full = computed // self._cache.page_size
            cache.extend_keys(sequence.keys, sequence.tokens, sequence.request.cache_salt, full)
            windows.register(sequence.slot, sequence.keys, full)
        windows.free_before(sequence.slot, computed)

    def on_failed(self, scheduled: ScheduledStep) -> None:
        """A step with these sequences did not start, because memory ran out in the middle of its layers.

        States may have changed by then, and pages only what the next try writes again. So sequences with states begin again.
        """
        self._starting = None
        if self._states is not None:
            self._states.on_failed()
        if self._cache.has_states:
            slots = scheduled.sequences.slots
            for slot in slots[self.host.unchanged(slots, scheduled.epochs)].tolist():
                if (sequence := self.host.sequences[slot]) is not None:
                    self._preempt(sequence)

    def _hits(self, sequence: Sequence) -> Iterator[Hit]:
        """What is cached of a waiting sequence's beginning; see `PrefixCache.hits`."""
        if self.prefix_cache is None or sequence.logits_only:
            return iter([NO_HIT])
        # At least one token is computed. The logits of token i score token i + 1.
        known = sequence.logits_from if sequence.num_to_score else len(sequence.tokens) - 1
        known = known if sequence.captured is None else min(known, sequence.captured.next)
        return self.prefix_cache.hits(sequence.keys, sequence.tokens, sequence.request.cache_salt, known)

    def _fitting(self, sequence: Sequence, splits: int) -> Hit | None:
        """What a waiting sequence can use of the prefix cache, if all of its tokens fit beside it; None: they do not.

        A sequence that does not fit would soon be preempted.
        """
        allocator = self._cache.allocator
        if sequence.adapter is not None and not self.adapters.fits(sequence.adapter):
            return None
        if sequence.blocked_at == allocator.num_changes or _further_splits(len(sequence.tokens)) > splits:
            return None
        pages = self._cache.pages_for(min(len(sequence.tokens) + 1, sequence.final_len))
        for hit in self._hits(sequence):
            if pages - len(hit.pages) <= allocator.num_free - allocator.count_free(hit.held):
                return hit
        sequence.blocked_at = allocator.num_changes
        return None

    def _admit(self, sequence: Sequence, hit: Hit) -> None:
        """Give a waiting sequence its slot, and the pages of its tokens."""
        self.waiting.remove(sequence)
        cache, tokens = None if sequence.logits_only else self.prefix_cache, len(sequence.tokens)
        sequence.take_slot(self.host, hit.pages)
        if sequence.adapter is not None:
            sequence.adapter_place = self.adapters.take(sequence.adapter)
        sequence.num_prefilled, sequence.prefill_len = hit.tokens, tokens
        self.host.num_registered[sequence.slot] = NEVER if cache is None else len(hit.pages)
        if cache is not None:
            cache.take(sequence, hit)
        self._reserve(sequence, tokens)
        if sequence.num_cached < 0:
            sequence.num_cached = sequence.num_prefilled
            sequence.queue_time_s = time.perf_counter() - sequence.added_at
            if cache is not None:
                cache.count(tokens, hit)
        self.running[sequence.id] = self._prefilling[sequence.id] = sequence
        self._release_followers(sequence)

    def extend_keys(self, sequence: Sequence) -> None:
        """Compute the keys that `register` will need, while the sequence's step runs."""
        if self.prefix_cache is not None:
            self.prefix_cache.extend_keys(sequence.keys, sequence.tokens, sequence.request.cache_salt)

    def register(self, slots: np.ndarray) -> None:
        """Add the full pages of slots that decode to the prefix cache, but for the last token, whose KV values come with the next
        step. The steps of the other tokens must have ended."""
        if self.prefix_cache is not None:
            host = self.host
            for slot in slots[(host.lengths[slots] - 1) // self._cache.page_size > host.num_registered[slots]].tolist():
                if (sequence := host.sequences[slot]) is not None:
                    self.register_pages(sequence, int(host.lengths[slot]) - 1)

    def register_pages(self, sequence: Sequence, computed: int) -> None:
        """Add the full pages of a sequence's first `computed` tokens to the prefix cache. Their step must have ended."""
        registered, pages = int(self.host.num_registered[sequence.slot]), sequence.pages
        full = min(computed // self._cache.page_size, len(pages))
        if self.prefix_cache is None or full <= registered:
            return
        self.extend_keys(sequence)
        for page, key in zip(pages[registered:full].tolist(), sequence.keys[registered:full], strict=True):
            self._cache.allocator.register(page, key)
        if self._windows is not None:
            self._windows.register(sequence.slot, sequence.keys, full)
        self.host.num_registered[sequence.slot] = full
        self._release_followers(sequence)

    def pin(self, tokens: np.ndarray, longest: int = 0) -> int:
        """Hold the cached pages of a prompt, so that they are never evicted. Returns the number of tokens in them.

        Args:
            longest: number of tokens that an open request may reach; the other pages must hold them.
        Raises:
            ContextLengthError: pinned prompts would take more than half of all pages, or pages that an open request may need.
        """
        if self.prefix_cache is None:
            return 0
        hit = next(self.prefix_cache.hits([], tokens, None, len(tokens)), NO_HIT)
        pinned = self._pinned | set(hit.held)
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
        if self._states is not None:
            self._states.pin(hit)
        if self._windows is not None:
            keys = list[bytes]()
            self.prefix_cache.extend_keys(keys, tokens, None, len(hit.pages))
            self._windows.pin(keys, len(hit.pages))
        self._cache.allocator.share([page for page in hit.held if page not in self._pinned])
        self._pinned = pinned
        if room < self.max_len:
            self.max_len, self._limiting_option = room, "--kv-cache-memory"
        return hit.tokens

    def limit_tokens(self, most: int) -> None:
        """Limit the next steps to `most` tokens, because a larger step did not fit into memory."""
        self._limit_tokens, self._steps_since = most, 0
        if self._cache.has_states:  # their sequences have begun again (`on_failed`), and need more steps than that to end
            self._until_larger *= 2

    def _preempt(self, sequence: Sequence) -> None:
        """Take the pages of a running sequence, which is computed again from its start later.

        It keeps its rank, so that it is admitted before those that arrived later.
        """
        self.num_preemptions += 1
        del self.running[sequence.id]
        self._free(sequence)
        sequence.passes_until = 0  # others that pass would be preempted in their turn
        self.waiting.add(sequence)

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Reserve pages for the first tokens of a sequence. (A prompt's pages of layers with windows come with its chunks.)"""
        needed = self._cache.pages_for(tokens) - int(self.host.num_pages[sequence.slot])
        if needed > self._cache.allocator.num_free:
            return False
        if self._windows is not None and sequence.slot in self._decoding:
            self._windows.free_before(sequence.slot, int(self.host.lengths[sequence.slot]) - 1)
            if not self._windows.reserve(sequence.slot, tokens):
                return False
        if needed > 0:
            self.host.add_pages(sequence.slot, self._cache.allocator.allocate(needed))
        return True

    def _return_pages(self, slots: np.ndarray) -> None:
        """Return the pages that were reserved for drafts which turned out to be wrong."""
        host = self.host
        most = np.minimum(host.lengths[slots] + host.unread[slots], host.final_lens[slots])
        kept = -(-most // self._cache.page_size)
        for i in (kept < host.num_pages[slots]).nonzero()[0].tolist():
            slot, count = int(slots[i]), int(kept[i])
            self._cache.allocator.release(host.page_tables[slot, count : host.num_pages[slot]].tolist())
            host.num_pages[slot], host.num_sent[slot] = count, min(count, int(host.num_sent[slot]))
            if self._windows is not None:
                self._windows.cut(slot, count)

    def _free(self, sequence: Sequence) -> None:
        """Take the pages and the slot of a sequence, if it has them."""
        if sequence.slot < 0:
            return
        self._cache.allocator.release(sequence.pages.tolist())
        if self._windows is not None:
            self._windows.release(sequence.slot)
        if sequence.adapter is not None:
            self.adapters.release(sequence.adapter)
        self._prefilling.pop(sequence.id, None)
        if self._decoding.pop(sequence.slot, None) is not None:
            self._decoding_slots = None
        sequence.leave_slot()
