"""`StatePrefixCache`: the prefix cache of models with recurrent layers. Beside KV pages it keeps snapshots of states.

A recurrent layer has one state for each sequence, which stands for all its tokens. So a beginning can be used again only where
its state was kept: a **snapshot**, in a row of the state tensors behind those of the slots. Its key is a hash of exactly the
tokens that are folded into it: those on its last page, and the key of the full pages before. A hit needs these full pages, the
page with the rest (which it copies, since it writes behind the rest), and the snapshot, copied into the sequence's slot.

The layers store snapshots within a prompt while they compute it, at multiples of `within` tokens of the step. Others are taken
by copies, before the layers of the next step run. As steps run in order, a snapshot can be found as soon as the step that
stores it was started, or its copy is planned. They are dropped least recently used first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from minirt.engine.schedule.prefix_cache import Hit, PrefixCache, PrefixCacheStats
from minirt.engine.state.sequence import Sequence
from minirt.errors import ContextLengthError
from minirt.step.kv_cache import PageAllocator
from minirt.step.plan import NO_COPIES, Copies, Snapshot


@dataclass(eq=False)
class _Snapshot:
    """The states after the first `length` tokens of some sequence.

    Args:
        row: of the state tensors.
        key: of these tokens.
        parent: the key of their full pages.
        holds: copies of a planned step from or to it, and pins. With any, it is not evicted.
    """

    row: int
    key: bytes
    parent: bytes
    length: int
    holds: int = 0


class StatePrefixCache(PrefixCache):
    """A `PrefixCache` that also finds and keeps states.

    Args:
        rows: of the state tensors, for snapshots.
        spacing: minimum number of tokens between snapshots at the ends of a long prompt's chunks.
        within: a step stores snapshots of a prompt after multiples of this number of its tokens; 0: only at its end, so chunks
            end at the place of a wanted snapshot.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, rows: Seq[int], spacing: int, within: int = 0) -> None:
        super().__init__(allocator, page_size)
        self._rows, self._spacing, self._within = rows, spacing, within
        self._recomputed = self._evictions = 0
        self.reset()

    def reset(self) -> None:
        self._free = list(self._rows)[::-1]
        self._known: OrderedDict[bytes, _Snapshot] = OrderedDict()  # by key; the least recently used comes first
        self._children: dict[bytes, list[_Snapshot]] = {}  # by parent
        self._saves: list[tuple[int, _Snapshot]] = []  # slots and snapshots that the next step is to take of them
        self._planned: list[_Snapshot] = []  # those that the step takes which is being started
        self._stored: list[tuple[Sequence, int, int | None]] = []  # what this step stores: sequence, number of tokens, row
        self._admitted: list[tuple[Sequence, Hit, _Snapshot]] = []  # the sequences that begin in that step from a snapshot
        self._pinned: set[_Snapshot] = set()

    @property
    def stats(self) -> PrefixCacheStats:
        kept, dropped = len(self._known), self._evictions
        return replace(super().stats, recomputed=self._recomputed, snapshots=kept, snapshot_evictions=dropped)

    def hits(self, keys: list[bytes], tokens: np.ndarray, salt: str | None, most: int) -> Iterator[Hit]:
        size = self._page_size
        pages = self.find(keys, tokens, salt, most // size)
        for whole in (False, True):  # the second one needs no page beside those of the sequence
            snapshot = self._deepest(keys, tokens, salt, most, len(pages), whole)
            if snapshot is None:
                yield Hit(0, [], len(pages) * size)
                return
            partial = self._allocator.page_of(snapshot.key) if snapshot.length % size else None
            yield Hit(snapshot.length, pages[: snapshot.length // size], len(pages) * size, partial, snapshot.key)
            if partial is None:
                return

    def _deepest(
        self, keys: list[bytes], tokens: np.ndarray, salt: str | None, most: int, pages: int, whole: bool
    ) -> _Snapshot | None:
        """The snapshot of most of the first `most` tokens, whose first `pages` full pages are cached.

        Args:
            whole: only those at the end of a full page.
        """
        for depth in range(pages, -1, -1):
            parent = keys[depth - 1] if depth else self.root(salt)
            for snapshot in sorted(self._children.get(parent, ()), key=lambda snapshot: -snapshot.length):
                rest = snapshot.length % self._page_size
                if snapshot.length > most or (whole and rest):
                    continue
                if rest and self._allocator.page_of(snapshot.key) is None:  # its page was evicted
                    if not snapshot.holds:
                        self._drop(snapshot)
                elif not rest or snapshot.key == self._key(parent, tokens, snapshot.length):
                    return snapshot
        return None

    def _key(self, parent: bytes, tokens: np.ndarray, length: int) -> bytes:
        """The key of the first `length` tokens, whose full pages have the key `parent`."""
        key = blake2b(parent, digest_size=16, key=self._secret, person=b"state")
        key.update(tokens[length - length % self._page_size : length].tobytes())
        return key.digest()

    def count(self, queries: int, hit: Hit) -> None:
        super().count(queries, hit)
        self._recomputed += max(0, hit.matched - hit.tokens)

    def take(self, sequence: Sequence, hit: Hit) -> None:
        self._allocator.share(hit.held)
        sequence.last_snapshot = hit.tokens
        if hit.tokens:
            snapshot = self._known[hit.snapshot]
            self._known.move_to_end(hit.snapshot)
            snapshot.holds += 1
            self._admitted.append((sequence, hit, snapshot))
        # A snapshot saves the tokens since the one before it. Fewer than a page of them take no time beside a step's others.
        request, last = sequence.request, sequence.prompt_len - 1  # an identical prompt computes its last token
        if request.sampling.prompt_logprobs is not None:  # and the first token whose logits are needed
            last = request.first_scored - 1
        wanted, before = list[int](), hit.tokens
        for place in sorted((hit.matched, min(request.history_len or last, last))):
            if place - before >= self._page_size:
                wanted.append(place)
                before = place
        sequence.next_snapshots = tuple(wanted)

    def _keys(self, sequence: Sequence, length: int) -> tuple[bytes, bytes]:
        """The keys of the full pages of a sequence's first tokens, and of all these tokens."""
        salt, depth = sequence.request.cache_salt, length // self._page_size
        self.extend_keys(sequence.keys, sequence.tokens, salt, depth)
        parent = sequence.keys[depth - 1] if depth else self.root(salt)
        return parent, self._key(parent, sequence.tokens, length)

    def pin(self, hit: Hit) -> None:
        """Never evict what this hit needs. Its pages are the caller's to hold.

        Raises:
            ContextLengthError: too much is pinned.
        """
        if not hit.tokens or (snapshot := self._known[hit.snapshot]) in self._pinned:
            return
        if 2 * (len(self._pinned) + 1) > len(self._rows):
            what, expected = "pinned prompts take too many snapshots of states", f"at most half of {len(self._rows)}"
            hint = "raise --state-cache-memory, or pin less"
            raise ContextLengthError(what, expected=expected, found=len(self._pinned) + 1, hint=hint)
        snapshot.holds += 1
        self._pinned.add(snapshot)

    def _inside(self, sequence: Sequence, start: int, stop: int) -> list[int]:
        """The wanted snapshots within a step from `start` to `stop`, after the state that it begins with."""
        return [place for place in sequence.next_snapshots if start + max(1, self._within) <= place < stop]

    def chunk_end(self, sequence: Sequence, start: int, stop: int) -> int:
        """Where a chunk of a prompt ends that begins at `start` and could end at `stop`."""
        return stop if self._within else min(self._inside(sequence, start, stop), default=stop)

    def snapshots(self, prompts: Iterable[tuple[int, Sequence]], ends: list[int]) -> tuple[Snapshot, ...]:
        """The snapshots that the next step is to store while it computes prompts. Then call `on_started` or `on_failed`.

        Args:
            prompts: with their places in the step.
            ends: how many of its tokens each of these is computed up to.
        """
        if not self._within:
            return ()
        planned, keys = list[Snapshot](), set[bytes]()
        for (place, sequence), stop in zip(prompts, ends, strict=True):
            start = sequence.num_prefilled
            for wanted in self._inside(sequence, start, stop):
                length = wanted - (wanted - start) % self._within
                _, key = self._keys(sequence, length)
                row = None if key in self._known or key in keys else self._row()
                if row is not None:
                    keys.add(key)
                    planned.append(Snapshot(place, row, length - start))
                self._stored.append((sequence, length, row))
        return tuple(planned)

    def copies(self) -> Copies:
        """What the next step must copy before its layers run. Then call `on_started` or `on_failed`."""
        if not self._saves and not self._admitted:
            return NO_COPIES
        states = [(slot, snapshot.row) for slot, snapshot in self._saves]  # first: a slot may have a new sequence already
        states += [(snapshot.row, sequence.slot) for sequence, _, snapshot in self._admitted]
        pages = [
            (hit.partial, int(sequence.pages[len(hit.pages)])) for sequence, hit, _ in self._admitted if hit.partial is not None
        ]
        self._planned, self._saves = [snapshot for _, snapshot in self._saves], []
        return Copies(tuple(states), tuple(pages))

    def on_started(self) -> None:
        """The step with the `copies` and `snapshots` was started."""
        for snapshot in self._planned:
            snapshot.holds -= 1
        self._planned.clear()
        for sequence, length, row in self._stored:
            if sequence.slot >= 0:
                self._add(sequence, length, row)
            elif row is not None:  # it has ended while the step was being started
                self._free.append(row)
        self._stored.clear()
        for _, hit, snapshot in self._admitted:
            snapshot.holds -= 1
            if hit.partial is not None:
                self._allocator.release([hit.partial])
        self._admitted.clear()

    def on_failed(self) -> None:
        """The step failed to start; its writes are undefined."""
        lost = list(self._planned)
        self._free += [row for _, _, row in self._stored if row is not None]
        self._stored.clear()
        self.on_started()
        for snapshot in lost:
            self._pinned.discard(snapshot)
            self._drop(snapshot)

    def computed(self, sequence: Sequence) -> None:
        """A step was started that computes a sequence's first `num_prefilled` tokens."""
        length, places = sequence.num_prefilled, sequence.next_snapshots
        # The next step stores none before `length + within`.
        near = any(length < place < length + self._within for place in places)
        apart = self._page_size if near else self._spacing
        if length in places or (length < sequence.prefill_len and length - sequence.last_snapshot >= apart):
            self._keep(sequence, length)

    def ended(self, sequence: Sequence, computed: int) -> None:
        """A sequence has ended, of which `computed` tokens are computed or in a started step. It still has its slot."""
        if computed - sequence.last_snapshot >= self._page_size:
            self._keep(sequence, computed)

    def _keep(self, sequence: Sequence, length: int) -> None:
        """Take a snapshot of a sequence's slot, whose state has `length` tokens once the started steps have ended."""
        _, key = self._keys(sequence, length)
        row = None if key in self._known else self._row()
        self._add(sequence, length, row)
        if row is not None:
            self._known[key].holds += 1
            self._saves.append((sequence.slot, self._known[key]))

    def _add(self, sequence: Sequence, length: int, row: int | None) -> None:
        """Make the snapshot of a sequence's first tokens known, in `row`, unless it is already. None: there is no row."""
        parent, key = self._keys(sequence, length)
        if key in self._known:
            self._known.move_to_end(key)
            if row is not None:
                self._free.append(row)
        elif row is None:
            return
        else:
            self._known[key] = snapshot = _Snapshot(row, key, parent, length)
            self._children.setdefault(parent, []).append(snapshot)
        sequence.last_snapshot = length
        if length % self._page_size:
            self._allocator.register(int(sequence.pages[length // self._page_size]), key)

    def _row(self) -> int | None:
        """A row for a snapshot; None: all are in use by the next step, or pinned."""
        if not self._free:
            oldest = next((snapshot for snapshot in self._known.values() if not snapshot.holds), None)
            if oldest is None:
                return None
            self._evictions += 1
            self._drop(oldest)
        return self._free.pop()

    def _drop(self, snapshot: _Snapshot) -> None:
        del self._known[snapshot.key]
        others = self._children[snapshot.parent]
        others.remove(snapshot)
        if not others:
            del self._children[snapshot.parent]
        self._allocator.forget(snapshot.key)
        self._free.append(snapshot.row)
