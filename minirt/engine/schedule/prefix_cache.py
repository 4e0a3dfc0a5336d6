"""`PrefixCache`: finds KV pages that hold the beginning of a sequence, so that a step need not compute it again.

The key of a full page is a hash of its tokens and of the previous page's key, so a key identifies the whole prefix. (This is
the scheme of vLLM's automatic prefix caching.) The hash includes a secret of this process, so that callers cannot construct
two prefixes with the same key.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from minirt.engine.schedule.windows import Windows
from minirt.step.kv_cache import PageAllocator

if TYPE_CHECKING:
    from minirt.engine.state.sequence import Sequence


@dataclass
class PrefixCacheStats:
    """Counters since the model was loaded.

    Args:
        queries: number of tokens that were looked up.
        hits: number of these tokens that were found, so they were not computed again.
        evictions: pages whose values were dropped to make room.
        recomputed: tokens whose KV pages were found, and that were computed again because recurrent layers had no state behind
            them.
        snapshots, snapshot_evictions: states of recurrent layers that are kept now; and that were dropped to make room.
    """

    queries: int = 0
    hits: int = 0
    evictions: int = 0
    recomputed: int = 0
    snapshots: int = 0
    snapshot_evictions: int = 0


class Hit(NamedTuple):
    """What is cached of a sequence's beginning.

    Args:
        tokens: how many of its tokens need not be computed.
        pages: full KV pages with the first of these tokens, to be shared.
        matched: tokens in all full pages that were found.
        partial: a page with the rest of the tokens, to be copied; None: there is no rest.
        snapshot: the key of the state behind the tokens, in models with recurrent layers.
    """

    tokens: int
    pages: list[int]
    matched: int
    partial: int | None = None
    snapshot: bytes = b""

    @property
    def held(self) -> list[int]:
        """The pages that must not be evicted before a step has used them."""
        return self.pages if self.partial is None else [*self.pages, self.partial]


NO_HIT = Hit(0, [], 0)


class PrefixCache:
    """Finds the pages of an allocator by key. The scheduler asks it what is cached, and tells it what happens to sequences.

    Models with recurrent layers have a `state_cache.StatePrefixCache`.

    Args:
        page_size: tokens of a page.
        windows: the pages of layers with a window, whose last ones a prefix needs, too; None: there are none.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, windows: Windows | None = None) -> None:
        self._allocator, self._page_size, self._windows = allocator, page_size, windows
        self._secret = secrets.token_bytes(32)
        self._queries = self._hits = 0

    @property
    def stats(self) -> PrefixCacheStats:
        return PrefixCacheStats(self._queries, self._hits, self._allocator.evictions)

    def root(self, salt: str | None) -> bytes:
        """What stands for the key of the page before the first one."""
        return b"" if salt is None else blake2b(salt.encode(), digest_size=16, key=self._secret).digest()

    def extend_keys(self, keys: list[bytes], tokens: np.ndarray, salt: str | None, most: int | None = None) -> None:
        """Extend `keys`, the keys of the first full pages of `tokens`, to all full pages, or to the first `most` of them.

        Args:
            tokens: int32.
            salt: sequences with different salts share no page.
        """
        known, count = len(keys), len(tokens) // self._page_size
        count = count if most is None else min(count, most)
        if known >= count:
            return
        secret, size = self._secret, 4 * self._page_size
        content = tokens[known * self._page_size : count * self._page_size].tobytes()
        parent = keys[-1] if keys else self.root(salt)
        for start in range(0, len(content), size):
            page = blake2b(parent, digest_size=16, key=secret)
            page.update(content[start : start + size])
            parent = page.digest()
            keys.append(parent)

    def find(self, keys: list[bytes], tokens: np.ndarray, salt: str | None, most: int) -> list[int]:
        """The pages, in use or free, of the longest known prefix of `tokens`, up to `most` pages.

        Extends `keys` only as far as that takes: most prompts are new, and a step waits for this.
        """
        pages: list[int] = []
        while len(pages) < most:
            if len(pages) == len(keys):
                self.extend_keys(keys, tokens, salt, min(most, 2 * len(keys) + 1))
            page = self._allocator.page_of(keys[len(pages)])
            if page is None:
                break
            pages.append(page)
        return pages

    def hits(self, keys: list[bytes], tokens: np.ndarray, salt: str | None, most: int) -> Iterator[Hit]:
        """What is cached of the first `most` tokens: the best hit, then those that need fewer pages beside their own."""
        pages = self.find(keys, tokens, salt, most // self._page_size)
        depth = len(pages) if self._windows is None else self._windows.depth(keys, len(pages))
        yield Hit(depth * self._page_size, pages[:depth], len(pages) * self._page_size)

    def count(self, queries: int, hit: Hit) -> None:
        """Add to the counters: a request's tokens, and what was found of them."""
        self._queries += queries
        self._hits += hit.tokens

    def take(self, sequence: "Sequence", hit: Hit) -> None:
        """A sequence is admitted with this hit."""
        self._allocator.share(hit.pages)
        if self._windows is not None:
            self._windows.take(sequence.slot, sequence.keys, len(hit.pages))
