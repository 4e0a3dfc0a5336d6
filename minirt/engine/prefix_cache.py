"""`PrefixCache`: finds KV pages that hold the beginning of a sequence, so that a step need not compute it again.

The key of a full page is a hash of its tokens and of the previous page's key, so a key identifies the whole prefix. (This is
the scheme of vLLM's automatic prefix caching.) The hash includes a secret of this process, so nobody outside can construct two
prefixes with the same key.
"""

import secrets
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from minirt.step.kv_cache import PageAllocator


@dataclass
class PrefixCacheStats:
    """Counters since the model was loaded.

    Args:
        queries: number of tokens that were looked up.
        hits: number of these tokens that were found, so their KV values were not computed again.
        evictions: pages whose values were dropped to make room.
    """

    queries: int = 0
    hits: int = 0
    evictions: int = 0


class PrefixCache:
    """Finds the pages of an allocator by key.

    Args:
        page_size: tokens of a page.
    """

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self._allocator, self._page_size = allocator, page_size
        self._secret = secrets.token_bytes(32)
        self._queries = self._hits = 0

    @property
    def stats(self) -> PrefixCacheStats:
        return PrefixCacheStats(self._queries, self._hits, self._allocator.evictions)

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
        root = b"" if salt is None else blake2b(salt.encode(), digest_size=16, key=secret).digest()
        parent = keys[-1] if keys else root
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

    def count(self, queries: int, hits: int) -> None:
        """Add to the counters: a request's tokens, and the number of them that were found."""
        self._queries += queries
        self._hits += hits
