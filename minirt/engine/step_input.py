"""`Batch`: one step's work for the model, any mix of prefill and decode, flat and ragged."""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.attention.limits import KV_SPLIT

if TYPE_CHECKING:
    from minirt.kernels.linear.product import RowMaxima


class Chunk(NamedTuple):
    """The part of one sequence that a step computes: `tokens` at positions start, start + 1, …, in `pages`.

    A token is an id, or ~r for the token that the step before sampled in row r, which only the device knows yet.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    all_logits: bool = False  # logits for every token of the chunk (evaluation)
    wants_logits: bool = True  # logits for the last token: False for a chunk that does not end its prompt


@dataclass(frozen=True)
class Layout:
    """Where a batch's tensors lie in its one flat int32 tensor: each at a multiple of 16 bytes, so that kernels are compiled for
    one alignment, and the block tables last, so that a batch smaller than its layout is a prefix."""

    tokens: int
    logits: int
    seqs: int
    width: int

    @cached_property
    def sizes(self) -> list[int]:
        """int32 words: tokens, positions, slots, logits_indices (int64), query_starts, seq_lens, split_starts, logits_needed."""
        return [2 * self.tokens] * 3 + [2 * self.logits, self.seqs + 1, self.seqs, self.seqs + 1, 1]

    @cached_property
    def starts(self) -> list[int]:
        """The words before each tensor, the block tables included."""
        return list(accumulate((_aligned(size) for size in self.sizes), initial=0))

    @property
    def words(self) -> int:
        return self.starts[-1] + self.seqs * self.width

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """tokens, positions, slots, logits_indices, query_starts, seq_lens, split_starts, logits_needed, block_tables."""
        parts = [flat[start : start + size] for start, size in zip(self.starts, self.sizes, strict=False)]
        tables = flat[self.starts[-1] : self.words].view(self.seqs, self.width)
        return *(part.view(torch.int64) for part in parts[:4]), *parts[4:], tables


def _aligned(words: int) -> int:
    return -(-words // 4) * 4


@dataclass(frozen=True)
class Batch:
    """T tokens of B sequences, sequence after sequence.

    Tensors: `tokens` [T] int64 (see `input_ids`), `positions` [T] int64, `slots` [T] int64 (page · page_size + offset: where
    a token's K and V go; −1: nowhere), `logits_indices` [R] int64 (rows of the T that need logits, maybe none: what `Select`
    leaves to the layers behind it), `query_starts_device` [B + 1] int32, `seq_lens_device` [B] int32 (cached tokens, the new
    ones included), `split_starts_device` [B + 1] int32 (number of the first KV_SPLIT tokens of each sequence among those of
    all), `block_tables` [B, pages] int32. They are views of `flat`, so that a batch built on the host reaches the device in one
    copy. `previous` [≥ R] int64: what the step before sampled.
    Host values: `query_lens`, `seq_lens`; bounds that size the kernels' grids, `max_seq_len` and `max_splits`; `every_row`:
    logits_indices is 0 … T − 1. In a static batch the first two are bounds as well. `logits` [R, V]: where the head writes
    its result; None: to a new tensor. `row_maxima`: where the head stores the largest logits; it then writes logits only if
    `logits_needed` [1] int32, on the device, is 1.
    """

    flat: Tensor
    layout: Layout
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    logits_indices: Tensor
    query_starts_device: Tensor
    seq_lens_device: Tensor
    split_starts_device: Tensor
    logits_needed: Tensor
    block_tables: Tensor
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    max_seq_len: int
    max_splits: int
    every_row: bool
    previous: Tensor | None = None
    logits: Tensor | None = None
    row_maxima: "RowMaxima | None" = None

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def input_ids(self) -> Tensor:
        """Token ids [T] int64, those that the step before sampled filled in; what has no id (a failed row) becomes 0."""
        if self.previous is None:
            return self.tokens
        sampled = self.previous[(~self.tokens).clamp(min=0)].clamp(min=0)
        return torch.where(self.tokens < 0, sampled, self.tokens)

    @cached_property
    def query_starts(self) -> list[int]:
        """Row of each sequence's first new token."""
        return list(accumulate(self.query_lens, initial=0))[:-1]

    @cached_property
    def max_query_len(self) -> int:
        return max(self.query_lens, default=0)

    @classmethod
    def build(cls, chunks: Sequence[Chunk], page_size: int, *, pinned: bool = False) -> "Batch":
        """Lay the chunks out flat, on the host; `pinned`: in memory from which a GPU copies while the host goes on."""
        seq_lens = [c.start + len(c.tokens) for c in chunks]
        width = max((-(-n // page_size) for n in seq_lens), default=0)
        logits = sum(len(c.tokens) if c.all_logits else c.wants_logits for c in chunks)
        layout = Layout(sum(len(c.tokens) for c in chunks), logits, len(chunks), width)
        flat = torch.empty(layout.words, dtype=torch.int32, pin_memory=pinned)
        pack_chunks(layout, flat, chunks, page_size)
        splits = sum(-(-n // KV_SPLIT) for n in seq_lens)
        query_lens = tuple(len(c.tokens) for c in chunks)
        return cls._over(flat, layout, query_lens, tuple(seq_lens), max(seq_lens, default=0), splits, logits == layout.tokens)

    @classmethod
    def static(
        cls, flat: Tensor, layout: Layout, max_seq_len: int, max_splits: int, *, decode: bool, previous: Tensor, logits: Tensor
    ) -> "Batch":
        """A batch over a device buffer that `pack_chunks` fills for each step: one token of each sequence if `decode`, else any
        mix. The bounds are the largest that a step may have."""
        T, B = layout.tokens, layout.seqs
        query_lens = (1 if decode else T,) * B
        batch = cls._over(flat, layout, query_lens, (max_seq_len,) * B, max_seq_len, max_splits, decode)
        return replace(batch, previous=previous, logits=logits)

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`, in one copy."""
        if self.flat.device == device:
            return self
        moved = self._over(
            self.flat.to(device, non_blocking=True), self.layout, self.query_lens, self.seq_lens, self.max_seq_len,
            self.max_splits, self.every_row,
        )  # fmt: skip
        return replace(moved, previous=self.previous, logits=self.logits, row_maxima=self.row_maxima)

    def after(self, previous: Tensor) -> "Batch":
        """The same batch, its tokens ~r taken from `previous`."""
        return replace(self, previous=previous)

    @classmethod
    def _over(
        cls, flat: Tensor, layout: Layout, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], max_seq_len: int,
        max_splits: int, every_row: bool,
    ) -> "Batch":  # fmt: skip
        tokens, positions, slots, logits_indices, query_starts, lens, split_starts, logits_needed, tables = layout.views(flat)
        return cls(
            flat, layout, tokens, positions, slots, logits_indices, query_starts, lens, split_starts, logits_needed, tables,
            query_lens, seq_lens, max_seq_len, max_splits, every_row,
        )  # fmt: skip


def pack_chunks(layout: Layout, flat: Tensor, chunks: Sequence[Chunk], page_size: int, *, logits_needed: bool = True) -> int:
    """Write chunks to a host buffer of a layout that has room for them, and padding behind them: tokens that go nowhere
    (slot −1) and belong to no sequence, sequences of no tokens. → the words that matter, from the buffer's start.

    In this thread alone: PyTorch shares more than 32,768 words among all of the machine's cores, and waits for milliseconds for
    the last of them where other processes keep it busy.
    """
    tokens, positions, slots, logits = array("q"), array("q"), array("q"), array("q")
    starts, lens, splits, tables = array("i", [0]), array("i"), array("i", [0]), array("i")
    blank = array("i", bytes(4 * layout.width))
    for chunk in chunks:
        start, count, pages = chunk.start, len(chunk.tokens), chunk.pages
        stop, first = start + count, len(tokens)
        if count == 1:
            tokens.append(chunk.tokens[0])
            positions.append(start)
            slots.append(pages[start // page_size] * page_size + start % page_size)
        else:
            tokens.extend(chunk.tokens)
            positions.extend(_from_to(start, stop))
            for page in range(start // page_size, -(-stop // page_size)):
                begin = page * page_size
                to_slot = pages[page] * page_size - begin
                slots.extend(_from_to(max(start, begin) + to_slot, min(stop, begin + page_size) + to_slot))
        starts.append(first + count)
        lens.append(stop)
        splits.append(splits[-1] - (-stop // KV_SPLIT))
        if chunk.all_logits:
            logits.extend(_from_to(first, first + count))
        elif chunk.wants_logits:
            logits.append(first + count - 1)
        used = min(len(pages), layout.width)
        tables.extend(pages[:used])
        tables.extend(blank[used:])
    rows, seqs = layout.tokens - len(tokens), layout.seqs - len(lens)
    zeros = array("q", bytes(8 * max(0, rows)))
    # As if every padding token were wanted: of decode rows, each is.
    logits.extend(min(row, layout.tokens - 1) for row in range(len(logits), layout.logits))
    wide = [tokens + zeros, positions + zeros, slots + array("q", b"\xff" * 8 * rows), logits]
    narrow = [starts + starts[-1:] * seqs, lens + array("i", [0]) * seqs, splits + splits[-1:] * seqs]
    parts = [*wide, *narrow, array("i", [logits_needed]), tables]
    return _copy(layout, flat, parts)


_COUNTED = array("q")  # 0, 1, 2, …


def count_ahead(stop: int) -> None:
    """Have the numbers below `stop` ready to be copied, which is many times as fast as to count them for each step."""
    _COUNTED.extend(range(len(_COUNTED), stop))


def _from_to(start: int, stop: int) -> array:
    if stop > len(_COUNTED):
        count_ahead(max(stop, 2 * len(_COUNTED)))
    return _COUNTED[start:stop]


def _copy(layout: Layout, flat: Tensor, parts: list[array]) -> int:
    """The values of each of a layout's tensors to where it lies in a host buffer. → the words up to the end of the last."""
    if layout.words > flat.numel() or not flat.is_contiguous() or flat.device.type != "cpu":
        found = f"{flat.numel()} on {flat.device}, shape {tuple(flat.shape)}, strides {flat.stride()}"
        expected = f"{layout.words} words in a row on the host"
        raise InputError("no room for a step's values", where="flat", expected=expected, found=found)
    address, end = flat.data_ptr(), 0
    for start, room, values in zip(layout.starts, [*layout.sizes, layout.seqs * layout.width], parts, strict=True):
        source, count = values.buffer_info()
        words = count * values.itemsize // 4
        if words > room:
            raise InputError("no room for a step's values", where="layout", expected=f"at most {room} words", found=words)
        ctypes.memmove(address + 4 * start, source, 4 * words)
        end = start + words
    return end
