"""The KV cache: pages of the attention layers, state slots of recurrent layers, and a reference-counted page allocator.

A layer states what it keeps between steps as a `CacheSpec`, which allocates it and counts its bytes. Nothing else distinguishes
kinds of specs, so a new kind needs no change elsewhere.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from minirt.device import is_nvidia
from minirt.errors import MinirtError, UnsupportedError
from minirt.kernels.attention.operands import KVPages
from minirt.kernels.step.rows import RowTable, copy_rows
from minirt.modeling.formats import FP8
from minirt.step.plan import Copies

_STATE_TOKENS = 2048  # `KVCache.state_tokens` of a model without pages
PAGE_SIZE = 64  # tokens; a multiple of the context block of every attention tile


class CacheRoom(NamedTuple):
    """The sizes and the place of a cache.

    Args:
        dtype: of KV pages.
        num_slots: rows of states: one for each sequence that can run at once, then one for each snapshot.
        window_pages: number of pages by window; layers with another window have `num_pages`.
    """

    num_pages: int
    page_size: int
    num_slots: int
    dtype: torch.dtype
    device: torch.device | str
    window_pages: Mapping[int, int] = MappingProxyType({})


class LayerCache(Protocol):
    """What one layer keeps between steps, as the layer gets it (`kv`)."""

    def tensors(self) -> list[Tensor]:
        """Its tensors as views [N, …], with a row for each token of the pages, or for each slot of a sequence."""


@runtime_checkable
class CacheSpec(Protocol):
    """What a layer keeps between steps: pages (`PagesSpec`), a state (`StateSpec`), several (`CombinedSpec`), or another kind.

    A spec is hashable, and equal specs allocate alike: layers whose specs are equal can share kernels (`Layer.compile_key`).
    """

    def page_bytes(self, dtype: torch.dtype, page_size: int) -> int:
        """Bytes of one page with values of `dtype`; 0: it has no pages."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence; 0: it has none."""

    def allocate(self, room: CacheRoom) -> LayerCache:
        """Tensors for all pages and slots, uninitialized."""


class PagesSpec(NamedTuple):
    """What an attention layer stores per token: K and V, each `num_kv_heads` heads of `head_dim` channels, in pages.

    `window`: it reads no token that is this number of tokens or more before a new one; None: it reads all.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None

    def page_bytes(self, dtype: torch.dtype, page_size: int) -> int:
        scale = 4 if dtype == FP8 else 0
        return 2 * page_size * self.num_kv_heads * (self.head_dim * dtype.itemsize + scale)

    @property
    def state_bytes(self) -> int:
        return 0

    def allocate(self, room: CacheRoom) -> "LayerKV":
        pages = room.num_pages if self.window is None else room.window_pages.get(self.window, room.num_pages)
        size = (pages, room.page_size, self.num_kv_heads)
        k, v = (torch.empty(*size, self.head_dim, device=room.device, dtype=room.dtype) for _ in range(2))
        scales = [torch.empty(size, dtype=torch.float32, device=room.device) for _ in range(2)] if room.dtype == FP8 else []
        return LayerKV(k, v, *scales)


@dataclass(frozen=True)
class StateSpec:
    """What a recurrent layer stores per sequence, independent of its length: (name, shape, dtype) of each tensor.

    Args:
        undoable: most new tokens of a step after which the layer can go back to any of them (drafts).
        snapshot_tokens: the layer stores snapshots within a step (`Batch.snapshots`), after multiples of this number of the
            sequence's new tokens. 0: it does not, so a step ends at a state that is to be kept.
    """

    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    undoable: int = 0
    snapshot_tokens: int = 0

    def page_bytes(self, dtype: torch.dtype, page_size: int) -> int:
        return 0

    @property
    def state_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in self.tensors)

    def allocate(self, room: CacheRoom) -> "LayerState":
        return LayerState({
            name: torch.empty(room.num_slots, *shape, device=room.device, dtype=dtype) for name, shape, dtype in self.tensors
        })  # fmt: skip


@dataclass(frozen=True)
class CombinedSpec:
    """Several specs of one layer, such as pages and a state. The layer gets a tuple, with what each of them allocates."""

    specs: tuple[CacheSpec, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "specs", tuple(self.specs))

    def page_bytes(self, dtype: torch.dtype, page_size: int) -> int:
        return sum(spec.page_bytes(dtype, page_size) for spec in self.specs)

    @property
    def state_bytes(self) -> int:
        return sum(spec.state_bytes for spec in self.specs)

    def allocate(self, room: CacheRoom) -> "CombinedCache":
        return CombinedCache(spec.allocate(room) for spec in self.specs)


class LayerKV(KVPages):
    """The pages of one attention layer, as its kernels take them."""

    __slots__ = ()
    _fields = KVPages._fields  # Triton finds the names of a record's fields in the class itself, not in its base

    def tensors(self) -> list[Tensor]:
        return [tensor.flatten(0, 1) for tensor in self if tensor is not None]


class LayerState(dict[str, Tensor]):
    """The states of one recurrent layer: tensors [num_slots, *shape] by name. A sequence's row is its slot (`Batch.seq_slots`).

    A slot holds the values of an earlier sequence until the layer overwrites them: a sequence whose first token is at position 0
    has no state yet.
    """

    def tensors(self) -> list[Tensor]:
        return list(self.values())


class CombinedCache(tuple[LayerCache, ...]):
    """What a layer with a `CombinedSpec` keeps: an element for each of its specs."""

    __slots__ = ()

    def tensors(self) -> list[Tensor]:
        return [tensor for part in self for tensor in part.tensors()]


def undoable(specs: Sequence[CacheSpec]) -> int:
    """Most new tokens of a sequence in a step, if some of them are taken back afterwards; without states, any number."""
    return min([getattr(spec, "undoable", 0) for spec in _with_states(specs)], default=2**31)


def snapshot_tokens(specs: Sequence[CacheSpec]) -> int:
    """All layers store snapshots within a step after multiples of this number of a sequence's new tokens; 0: not all do."""
    return math.lcm(*[getattr(spec, "snapshot_tokens", 0) for spec in _with_states(specs)])


def _with_states(specs: Sequence[CacheSpec]) -> list[CacheSpec]:
    return [part for part in _flat(specs) if part.state_bytes]


def _flat(specs: Sequence[CacheSpec]) -> list[CacheSpec]:
    return [part for spec in specs for part in (_flat(spec.specs) if isinstance(spec, CombinedSpec) else (spec,))]


def windows_of(specs: Sequence[CacheSpec], length: int) -> tuple[int, ...]:
    """The windows of layers, each once, that are shorter than sequences of `length` tokens can be. Layers with the same one share
    page numbers, as do all others (a cache group)."""
    return tuple(sorted({window for part in _flat(specs) if (window := _window(part)) is not None and window < length}))


def _window(spec: CacheSpec) -> int | None:
    return getattr(spec, "window", None)


def _parts(specs: Sequence[CacheSpec], layers: Sequence[LayerCache]) -> Iterator[tuple[CacheSpec, LayerCache]]:
    """What layers keep, each part with its spec: either pages or states.

    Raises:
        UnsupportedError: a spec has pages and states, and does not say which of its tensors are which.
    """
    for spec, layer in zip(specs, layers, strict=True):
        if isinstance(spec, CombinedSpec) and isinstance(layer, CombinedCache):
            yield from _parts(spec.specs, layer)
        elif spec.state_bytes and spec.page_bytes(torch.float32, 1):
            what, hint = "states beside pages are kept only if each has a spec", "use a CombinedSpec, or --no-prefix-cache"
            raise UnsupportedError(what, where=type(spec).__name__, expected="pages or a state", found="both", hint=hint)
        else:
            yield spec, layer


def page_bytes(
    specs: Sequence[CacheSpec], dtype: torch.dtype, page_size: int = PAGE_SIZE, *, windows: Collection[int] = (),
    window: int | None = None,
) -> int:  # fmt: skip
    """Bytes of one page, summed over all layers of a cache group: those of `window`; None: those of none of `windows`."""
    parts = [part for part in _flat(specs) if (_window(part) == window if window else _window(part) not in windows)]
    return sum(part.page_bytes(dtype, page_size) for part in parts)


def state_bytes(specs: Sequence[CacheSpec]) -> int:
    """Bytes of the states of one sequence, summed over all layers."""
    return sum(spec.state_bytes for spec in specs)


class KVCache:
    """What layers keep between steps: pages of attention layers, state slots of recurrent ones.

    A page number means the same page in every layer of a cache group, and a slot the same sequence. Pages and slots start
    uninitialized: no layer may read one before it is written.

    Attributes:
        state_tokens: the number of tokens whose pages take as many bytes as the states of one sequence.
        snapshot_tokens: see `snapshot_tokens`.
        allocator, window_allocators: of the pages of layers without a window, and of those of each window.

    Args:
        specs: one for each layer with a `cache_spec`, in order.
        num_pages: of layers without a window. `window_pages`: of those with one, by window; layers with another window count as
            those without.
        num_slots: sequences that can run at once. Only recurrent layers need memory for them.
        num_snapshots: states that are kept beside those of running sequences, in the rows after them; see `StatePrefixCache`.
    """

    def __init__(
        self, specs: Sequence[CacheSpec], num_pages: int, device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32, page_size: int = PAGE_SIZE, num_slots: int = 0, num_snapshots: int = 0,
        window_pages: Mapping[int, int] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.page_size, self.num_pages, self.num_slots, self.num_snapshots = page_size, num_pages, num_slots, num_snapshots
        self.has_states, self.undoable = state_bytes(specs) > 0, undoable(specs)
        self.snapshot_tokens = snapshot_tokens(specs)
        room = CacheRoom(num_pages, page_size, num_slots + num_snapshots, dtype, device, window_pages)
        self.layers = [spec.allocate(room) for spec in specs]
        self._states, self._pages = self._rows(specs) if num_snapshots else ([], [])
        self._tables = (RowTable.of(self._states), RowTable.of(self._pages)) if is_nvidia(torch.device(device)) else (None, None)
        one = page_bytes(specs, dtype, 1, windows=window_pages)
        self.state_tokens = -(-state_bytes(specs) // one) if one else _STATE_TOKENS
        self.allocator = PageAllocator(num_pages)
        self.window_allocators = {window: PageAllocator(count) for window, count in sorted(window_pages.items())}

    @property
    def capacity(self) -> int:
        """Number of tokens that fit in all pages together."""
        return self.num_pages * self.page_size

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors())

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def copy(self, copies: Copies) -> None:
        """Copy rows of states and pages, one after the other, in stream order. Allocates nothing and does not wait."""
        for tensors, table, pairs in zip((self._states, self._pages), self._tables, copies, strict=True):
            for source, target in pairs:
                if table is None:
                    copy_rows(tensors, source, target)
                else:
                    from minirt.kernels.step import copies as kernel

                    kernel.copy_rows(table, source, target)

    def _rows(self, specs: Sequence[CacheSpec]) -> tuple[list[Tensor], list[Tensor]]:
        """All tensors of states, with a row for each slot and snapshot, and all of pages, with a row for each page."""
        parts = [(spec, tensor) for spec, layer in _parts(specs, self.layers) for tensor in layer.tensors()]
        states = [tensor for spec, tensor in parts if spec.state_bytes]
        return states, [tensor.unflatten(0, (-1, self.page_size)) for spec, tensor in parts if not spec.state_bytes]


class PageAllocator:
    """Allocates page numbers. A page becomes free when its last holder releases it.

    A page may have keys, which stand for its content (see `PrefixCache`): one for all of it, others for its first tokens. A free
    page keeps its keys and content until it is allocated again. Free pages without a key are allocated first, then those that
    were released first.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages, self.evictions = num_pages, 0
        self.num_changes = 0  # releases and registrations so far; until the next one, a sequence that did not fit cannot fit
        self.reset()

    def reset(self) -> None:
        """Make all pages free, even those in use, and forget their keys."""
        self._free = OrderedDict.fromkeys(range(self.num_pages))  # in order of allocation
        self._references = [0] * self.num_pages
        self._keys: dict[int, list[bytes]] = {}
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
            if (keys := self._keys.pop(page, None)) is not None:
                for key in keys:
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
            self._keys.setdefault(page, []).append(key)
            self.num_changes += 1

    def forget(self, key: bytes) -> None:
        """Take a key from the page that has it, if there is one."""
        if (page := self._pages.pop(key, None)) is None:
            return
        self._keys[page].remove(key)
        if not self._keys[page]:
            del self._keys[page]
            if page in self._free:
                self._free.move_to_end(page, last=False)

    def page_of(self, key: bytes) -> int | None:
        """The page with this key, in use or free."""
        return self._pages.get(key)

    def count_free(self, pages: Sequence[int]) -> int:
        """How many of `pages` are free."""
        return sum(self._references[page] == 0 for page in pages)
