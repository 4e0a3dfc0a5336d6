"""`Windows`: the KV pages of layers that see only the last tokens, for each window by itself (a cache group).

A sequence holds such pages for the tokens that its next token sees, and for those of the step that is being planned. Older pages
are freed, in the order of the stream: steps that were started before read them before others write there. Free pages keep their
keys, so a prefix whose last pages are still there can be used again. The numbers of pages suffice for all sequences that run at
once (`window_pages`), so nothing waits for them unless prompts are pinned or a step has failed.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from minirt.errors import ContextLengthError
from minirt.kernels.step.table import Columns
from minirt.step.kv_cache import PAGE_SIZE, PageAllocator
from minirt.step.plan import Edit

NO_LIMIT = 1 << 30  # tokens of a sequence


def window_pages(window: int, seqs: int, tokens: int, drafts: int, length: int) -> int:
    """Pages of layers with a window: what `seqs` sequences of up to `length` tokens hold, and the largest step's `tokens`."""
    most = window + PAGE_SIZE + 3 * (1 + drafts)  # one is freed when the next is needed; steps have drafts
    each = min(-(-most // PAGE_SIZE) + 1, -(-length // PAGE_SIZE))
    return min(seqs * each + -(-tokens // PAGE_SIZE), seqs * -(-length // PAGE_SIZE))


class _Group:
    """Of each slot: its page table, the number of the first page that it holds, the one after the last, and how many of them the
    device knows."""

    def __init__(self, window: int, allocator: PageAllocator, slots: int, columns: int) -> None:
        self.window, self.allocator = window, allocator
        self.tables = np.zeros((slots, columns), np.int32)
        self.first, self.end, self.sent = np.zeros((3, slots), np.int64)
        self.pinned = set[int]()

    def visible(self, computed: int, size: int) -> int:
        """The first page that the token after `computed` tokens sees."""
        return max(0, computed - self.window + 1) // size


class Windows:
    """Pages by slot.

    Args:
        allocators: by window.
        page_size: tokens of a page.
        columns: pages of the longest sequence.
    """

    def __init__(self, allocators: Mapping[int, PageAllocator], page_size: int, slots: int, columns: int) -> None:
        self._size = page_size
        self._groups = [_Group(window, allocator, slots, columns) for window, allocator in allocators.items()]

    def reset(self) -> None:
        """No slot holds a page, and none has a key."""
        for group in self._groups:
            group.allocator.reset()
            group.pinned = set()
            group.first[:] = group.end[:] = group.sent[:] = 0

    def room(self, slot: int) -> int:
        """Up to how many tokens of a sequence there are pages."""
        return min(int(group.end[slot]) + group.allocator.num_free for group in self._groups) * self._size

    def reserve(self, slot: int, tokens: int) -> bool:
        """Hold pages for the first `tokens` tokens, but for those that were freed. False: there are too few; nothing changes."""
        if tokens > self.room(slot):
            return False
        end = -(-tokens // self._size)
        for group in self._groups:
            if (count := end - int(group.end[slot])) > 0:
                group.tables[slot, group.end[slot] : end] = group.allocator.allocate(count)
                group.end[slot] = end
        return True

    def skip(self, slot: int, computed: int) -> None:
        """Begin a slot that holds no pages after `computed` tokens, whose values are arbitrary."""
        for group in self._groups:
            first = group.visible(computed, self._size)
            group.first[slot] = group.end[slot] = group.sent[slot] = first

    def free_before(self, slot: int, computed: int) -> None:
        """Free the pages that the token after `computed` tokens does not see, nor any later one."""
        for group in self._groups:
            first, kept = int(group.first[slot]), min(group.visible(computed, self._size), int(group.end[slot]))
            if kept > first:
                group.allocator.release(group.tables[slot, first:kept].tolist())
                group.first[slot] = kept

    def cut(self, slot: int, count: int) -> None:
        """Free the pages after the first `count` of the sequence."""
        for group in self._groups:
            kept = max(count, int(group.first[slot]))
            if kept < group.end[slot]:
                group.allocator.release(group.tables[slot, kept : group.end[slot]].tolist())
                group.end[slot], group.sent[slot] = kept, min(kept, int(group.sent[slot]))

    def release(self, slot: int) -> None:
        """Free all pages of a slot."""
        for group in self._groups:
            group.allocator.release(group.tables[slot, group.first[slot] : group.end[slot]].tolist())
            group.first[slot] = group.end[slot] = group.sent[slot] = 0

    def register(self, slot: int, keys: Sequence[bytes], full: int) -> None:
        """Give the pages that a slot holds of its first `full` their keys."""
        for group in self._groups:
            for page in range(int(group.first[slot]), full):
                group.allocator.register(int(group.tables[slot, page]), keys[page])

    def depth(self, keys: Sequence[bytes], most: int) -> int:
        """The most pages, at most `most`, of a prefix with these keys after which a sequence can go on."""
        missing = [[i for i in range(most) if group.allocator.page_of(keys[i]) is None] for group in self._groups]
        depth, before = most, most + 1
        while depth < before:
            before = depth
            for group, absent in zip(self._groups, missing, strict=True):
                while absent and absent[-1] >= depth:
                    absent.pop()
                while absent and absent[-1] >= group.visible(depth * self._size, self._size):
                    depth = absent.pop()
        return depth

    def take(self, slot: int, keys: Sequence[bytes], depth: int) -> None:
        """Begin a slot, which holds no pages, after the first `depth` pages of a prefix; see `depth`."""
        self.skip(slot, depth * self._size)
        for group in self._groups:
            pages = self._pages(group, keys, depth)
            group.allocator.share(pages)
            group.tables[slot, group.first[slot] : depth], group.end[slot] = pages, depth

    def pin(self, keys: Sequence[bytes], depth: int) -> None:
        """Hold what `take` needs for good. Raises ContextLengthError if the other pages are too few for a sequence."""
        wanted = [group.pinned.union(self._pages(group, keys, depth)) for group in self._groups]
        for group, pinned in zip(self._groups, wanted, strict=True):
            most = group.allocator.num_pages - window_pages(group.window, 1, self._size, 0, NO_LIMIT)
            if len(pinned) > max(0, most):
                what, hint = "pinned prompts take too many KV pages of layers with a window", "raise --max-num-seqs, or pin less"
                raise ContextLengthError(what, expected=f"at most {max(0, most)}", found=len(pinned), hint=hint)
        for group, pinned in zip(self._groups, wanted, strict=True):
            group.allocator.share(list(pinned - group.pinned))
            group.pinned = pinned

    def _pages(self, group: _Group, keys: Sequence[bytes], depth: int) -> list[int]:
        pages = (group.allocator.page_of(key) for key in keys[group.visible(depth * self._size, self._size) : depth])
        return [page for page in pages if page is not None]

    def edits(self, slot: int, columns: Columns) -> list[Edit]:
        """The pages of a slot that the device does not know."""
        edits = list[Edit]()
        for number, group in enumerate(self._groups, 1):
            first, end = max(int(group.sent[slot]), int(group.first[slot])), int(group.end[slot])
            if first < end:
                place = columns.page_tables + number * columns.pages + first
                edits.append(Edit(slot, place, group.tables[slot, first:end].copy()))
        return edits

    def sent(self, slots: np.ndarray) -> None:
        """The device knows all pages of these slots."""
        for group in self._groups:
            group.sent[slots] = group.end[slots]
