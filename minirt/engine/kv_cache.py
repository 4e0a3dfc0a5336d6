"""The KV cache: pages of the attention layers, state slots of recurrent layers, and a reference-counted page allocator."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minirt.errors import MinirtError
from minirt.modeling.formats import FP8

PAGE_SIZE = 64  # tokens; a multiple of the context block of every attention tile


class PagesSpec(NamedTuple):
    """What an attention layer stores per token: K and V, each `num_kv_heads` heads of `head_dim` channels, in pages."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class StateSpec:
    """What a recurrent layer stores per sequence, independent of its length: (name, shape, dtype) of each tensor."""

    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]

    @property
    def nbytes(self) -> int:
        """Bytes per sequence."""
        return sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in self.tensors)


class LayerKV(NamedTuple):
    """The pages of one attention layer: k and v, each [num_pages, page_size, Nkv, D].

    FP8 pages have one scale per token and head: k_scale and v_scale, each [num_pages, page_size, Nkv] fp32.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class LayerState(dict[str, Tensor]):
    """The states of one recurrent layer: tensors [num_slots, *shape] by name. A sequence's row is its slot (`Batch.seq_slots`).

    A slot holds the values of an earlier sequence until the layer overwrites them: a sequence whose first token is at position 0
    has no state yet.
    """


def page_bytes(specs: Sequence[PagesSpec | StateSpec], dtype: torch.dtype, page_size: int = PAGE_SIZE) -> int:
    """Bytes of one page, summed over all attention layers."""
    scale = 4 if dtype == FP8 else 0
    pages = [spec for spec in specs if not isinstance(spec, StateSpec)]
    return sum(2 * page_size * heads * (dim * dtype.itemsize + scale) for heads, dim in pages)


def state_bytes(specs: Sequence[PagesSpec | StateSpec]) -> int:
    """Bytes of the states of one sequence, summed over all recurrent layers."""
    return sum(spec.nbytes for spec in specs if isinstance(spec, StateSpec))


class KVCache:
    """What layers keep between steps: pages of attention layers, state slots of recurrent ones.

    A page number means the same page in every layer, and a slot the same sequence. Pages and slots start uninitialized: no layer
    may read one before it is written.

    Args:
        specs: one for each layer with a `cache_spec`, in order.
        num_slots: sequences that can run at once. Only recurrent layers need memory for them.
    """

    def __init__(
        self,
        specs: Sequence[PagesSpec | StateSpec],
        num_pages: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        page_size: int = PAGE_SIZE,
        num_slots: int = 0,
    ) -> None:
        self.page_size, self.num_pages = page_size, num_pages
        self.has_states = any(isinstance(spec, StateSpec) for spec in specs)
        self.layers: list[LayerKV | LayerState] = []
        for spec in specs:
            if isinstance(spec, StateSpec):
                state = {name: torch.empty(num_slots, *shape, device=device, dtype=kind) for name, shape, kind in spec.tensors}
                self.layers.append(LayerState(state))
                continue
            heads, dim = spec
            size = (num_pages, page_size, heads)
            k, v = (torch.empty(*size, dim, device=device, dtype=dtype) for _ in range(2))
            scales = [torch.empty(size, device=device) for _ in range(2)] if dtype == FP8 else []
            self.layers.append(LayerKV(k, v, *scales))
        self.allocator = PageAllocator(num_pages)

    @property
    def capacity(self) -> int:
        """Number of tokens that fit in all pages together."""
        return self.num_pages * self.page_size

    @property
    def nbytes(self) -> int:
        tensors = (layer.values() if isinstance(layer, LayerState) else layer for layer in self.layers)
        return sum(t.nbytes for layer in tensors for t in layer if t is not None)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


class PageAllocator:
    """Allocates page numbers. A page becomes free when its last holder releases it.

    A page may have a key, which stands for its content (see `PrefixCache`). A free page keeps its key and content until it is
    allocated again. Free pages without a key are allocated first, then those that were released first.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages, self.evictions = num_pages, 0
        self.num_changes = 0  # releases and registrations so far; until the next one, a sequence that did not fit cannot fit
        self.reset()

    def reset(self) -> None:
        """Make all pages free, even those in use, and forget their keys."""
        self._free = OrderedDict.fromkeys(range(self.num_pages))  # in order of allocation
        self._references = [0] * self.num_pages
        self._keys: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}
        self.num_changes += 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, with one reference each. The caller must have checked `num_free`."""
        if count > len(self._free):
            raise MinirtError("KV pages exhausted", expected=f"{count} free pages", found=len(self._free))
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._references[page] = 1
            key = self._keys.pop(page, None)
            if key is not None:
                del self._pages[key]
                self.evictions += 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a reference to each of `pages`: in use, or free with a key."""
        for page in pages:
            if self._references[page] == 0:
                if page not in self._keys:
                    raise MinirtError("cannot share a free KV page", where=f"page {page}")
                del self._free[page]
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference to each page. The last free page is allocated again before the first, so beginnings stay longer."""
        for page in reversed(pages):
            if self._references[page] == 0:
                raise MinirtError("KV page released twice", where=f"page {page}")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free[page] = None
                if page not in self._keys:
                    self._free.move_to_end(page, last=False)
        self.num_changes += 1

    def register(self, page: int, key: bytes) -> None:
        """Give a page in use a key, unless another page already has this key."""
        if key not in self._pages:
            self._pages[key] = page
            self._keys[page] = key
            self.num_changes += 1

    def page_of(self, key: bytes) -> int | None:
        """The page with this key, in use or free."""
        return self._pages.get(key)

    def count_free(self, pages: Sequence[int]) -> int:
        """How many of `pages` are free."""
        return sum(self._references[page] == 0 for page in pages)
