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
from minirt.kernels import reference
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
    num_logits: int = 1  # of its last tokens, how many need logits: 0 in the middle of a prompt, all for an evaluation
    slot: int = -1  # where the device keeps what lives as long as the sequence runs; −1: nowhere
    targets: Sequence[int] = ()  # the tokens that follow its first rows of logits, which are scored with them and not sampled
    num_top: int = 0  # of those rows, how many of the most probable tokens are listed

    @property
    def num_sampled(self) -> int:
        """Rows of logits that the sampler draws from."""
        return self.num_logits - len(self.targets)


@dataclass(frozen=True)
class Layout:
    """Where a step's values lie in one flat int32 tensor.

    Each tensor starts at a multiple of 16 bytes, so that kernels are compiled for one alignment. The page numbers are last: a
    step copies only those in use to the device.

    Args:
        tokens, logits, seqs, pages: room for so many tokens, rows of logits, sequences, and pages of all sequences together.
    """

    tokens: int
    logits: int
    seqs: int
    pages: int

    @cached_property
    def sizes(self) -> list[int]:
        """int32 words: tokens, positions, slots, logits_indices (these int64), query_starts, seq_lens, split_starts,
        logits_needed, seq_slots, page_starts, pages."""
        seqs = self.seqs
        return [2 * self.tokens] * 3 + [2 * self.logits, seqs + 1, seqs, seqs + 1, 1, seqs, seqs + 1, self.pages]

    @cached_property
    def starts(self) -> list[int]:
        """The words before each tensor, and before the end."""
        return list(accumulate((_aligned(size) for size in self.sizes), initial=0))

    @property
    def words(self) -> int:
        return self.starts[-2] + self.pages

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The tensors, in the order of `sizes`."""
        parts = [flat[start : start + size] for start, size in zip(self.starts, self.sizes, strict=False)]
        return *(part.view(torch.int64) for part in parts[:4]), *parts[4:]


def _aligned(words: int) -> int:
    return -(-words // 4) * 4


@dataclass(frozen=True)
class Batch:
    """T tokens of B sequences, sequence after sequence.

    Tensors: `tokens` [T] int64 (see `input_ids`), `positions` [T] int64, `slots` [T] int64 (page · page_size + offset: where
    a token's K and V go; −1: nowhere), `logits_indices` [R] int64 (rows of the T that need logits, maybe none: what `Select`
    leaves to the layers behind it), `query_starts_device` [B + 1] int32, `seq_lens_device` [B] int32 (cached tokens, the new
    ones included), `split_starts_device` [B + 1] int32 (number of the first KV_SPLIT tokens of each sequence among those of
    all), `seq_slots` [B] int32 (the slot of each sequence, −1 for padding: the row of what lives as long as the sequence runs,
    such as the state of a recurrent layer), `pages` int32 (the page numbers of all sequences, one sequence after the other) and
    `page_starts` [B + 1] int32 (where each sequence's begin). They are views of `flat`, so that a batch built on the host reaches
    the device in one copy. `block_tables` [B, width] int32 holds the same page numbers, a row for each sequence. `previous`
    [≥ R] int64: what the step before sampled.
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
    seq_slots: Tensor
    page_starts: Tensor
    pages: Tensor
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    max_seq_len: int
    max_splits: int
    every_row: bool
    table_width: int
    static_tables: Tensor | None = None
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
    def block_tables(self) -> Tensor:
        """Page numbers [B, width] int32: made from `pages`, or a static buffer, which `expand_block_tables` fills."""
        if self.static_tables is not None:
            return self.static_tables
        return reference.block_tables(self.pages, self.page_starts, self.table_width)

    @cached_property
    def query_starts(self) -> list[int]:
        """Row of each sequence's first new token."""
        return list(accumulate(self.query_lens, initial=0))[:-1]

    @cached_property
    def max_query_len(self) -> int:
        return max(self.query_lens, default=0)

    @classmethod
    def build(
        cls, chunks: Sequence[Chunk], page_size: int, *, pinned: bool = False, ranges: "Ranges | None" = None
    ) -> "Batch":
        """Lay the chunks out flat, on the host; `pinned`: in memory from which a GPU copies while the host goes on."""
        seq_lens = [c.start + len(c.tokens) for c in chunks]
        pages = [-(-n // page_size) for n in seq_lens]
        logits = sum(c.num_logits for c in chunks)
        layout = Layout(sum(len(c.tokens) for c in chunks), logits, len(chunks), sum(pages))
        flat = torch.empty(layout.words, dtype=torch.int32, pin_memory=pinned)
        pack_chunks(layout, flat, chunks, page_size, ranges=ranges)
        splits = sum(-(-n // KV_SPLIT) for n in seq_lens)
        query_lens, longest = tuple(len(c.tokens) for c in chunks), max(seq_lens, default=0)
        every_row, width = logits == layout.tokens, max(pages, default=0)
        return cls._over(flat, layout, query_lens, tuple(seq_lens), longest, splits, every_row, width)

    @classmethod
    def static(
        cls, flat: Tensor, layout: Layout, block_tables: Tensor, max_seq_len: int, max_splits: int, *, decode: bool,
        previous: Tensor, logits: Tensor,
    ) -> "Batch":  # fmt: skip
        """A batch over a device buffer that `pack_chunks` fills for each step: one token of each sequence if `decode`, else any
        mix. The bounds are the largest that a step may have. `block_tables` [B, width] int32 is filled on the device, by
        `expand_block_tables`."""
        T, B = layout.tokens, layout.seqs
        query_lens = (1 if decode else T,) * B
        width = block_tables.shape[1]
        batch = cls._over(flat, layout, query_lens, (max_seq_len,) * B, max_seq_len, max_splits, decode, width)
        return replace(batch, static_tables=block_tables, previous=previous, logits=logits)

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`, in one copy."""
        if self.flat.device == device:
            return self
        moved = self._over(
            self.flat.to(device, non_blocking=True), self.layout, self.query_lens, self.seq_lens, self.max_seq_len,
            self.max_splits, self.every_row, self.table_width,
        )  # fmt: skip
        return replace(moved, previous=self.previous, logits=self.logits, row_maxima=self.row_maxima)

    def after(self, previous: Tensor) -> "Batch":
        """The same batch, its tokens ~r taken from `previous`."""
        return replace(self, previous=previous)

    @classmethod
    def _over(
        cls, flat: Tensor, layout: Layout, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], max_seq_len: int,
        max_splits: int, every_row: bool, table_width: int,
    ) -> "Batch":  # fmt: skip
        tokens, positions, slots, indices, query_starts, lens, split_starts, logits_needed, *rest = layout.views(flat)
        seq_slots, page_starts, pages = rest
        return cls(
            flat, layout, tokens, positions, slots, indices, query_starts, lens, split_starts, logits_needed, seq_slots,
            page_starts, pages, query_lens, seq_lens, max_seq_len, max_splits, every_row, table_width,
        )  # fmt: skip


class Ranges:
    """Copies of ranges of integers. Copying numbers is many times as fast as counting them anew in each step.

    Args:
        stop: the numbers below `stop` are ready. Others are counted when they are first needed.
    """

    def __init__(self, stop: int = 0) -> None:
        self._numbers = array("q", range(stop))

    def __call__(self, start: int, stop: int) -> array:
        """start, start + 1, …, stop − 1 as int64."""
        known = len(self._numbers)
        if stop > known:
            self._numbers.extend(range(known, max(stop, 2 * known)))
        return self._numbers[start:stop]


def pack_chunks(
    layout: Layout, flat: Tensor, chunks: Sequence[Chunk], page_size: int, *, logits_needed: bool = True,
    ranges: Ranges | None = None,
) -> int:  # fmt: skip
    """Write chunks to a host buffer of a layout that has room for them, and padding behind them.

    Padding tokens go nowhere (slot −1) and belong to no sequence; padding sequences have no tokens. Everything runs in the
    calling thread: PyTorch would share more than 32,768 words among all cores, and wait for milliseconds where other processes
    keep one of them busy.

    Returns:
        The number of words in use, counted from the buffer's start.
    """
    ranges = ranges or Ranges()
    tokens, positions, slots, logits = array("q"), array("q"), array("q"), array("q")
    starts, lens, splits = array("i", [0]), array("i"), array("i", [0])
    seq_slots, page_starts, used = array("i"), array("i", [0]), array("i")
    for chunk in chunks:
        start, count, pages = chunk.start, len(chunk.tokens), chunk.pages
        stop, first = start + count, len(tokens)
        if count == 1:
            tokens.append(chunk.tokens[0])
            positions.append(start)
            slots.append(pages[start // page_size] * page_size + start % page_size)
        else:
            tokens.extend(chunk.tokens)
            positions.extend(ranges(start, stop))
            for page in range(start // page_size, -(-stop // page_size)):
                begin = page * page_size
                to_slot = pages[page] * page_size - begin
                slots.extend(ranges(max(start, begin) + to_slot, min(stop, begin + page_size) + to_slot))
        starts.append(first + count)
        lens.append(stop)
        splits.append(splits[-1] - (-stop // KV_SPLIT))
        if chunk.num_logits == 1:
            logits.append(first + count - 1)
        else:
            logits.extend(ranges(first + count - chunk.num_logits, first + count))
        seq_slots.append(chunk.slot)
        used.extend(pages[: -(-stop // page_size)])
        page_starts.append(len(used))
    rows, seqs = layout.tokens - len(tokens), layout.seqs - len(lens)
    zeros = array("q", bytes(8 * max(0, rows)))
    # As if every padding token were wanted: of decode rows, each is.
    logits.extend(min(row, layout.tokens - 1) for row in range(len(logits), layout.logits))
    wide = [tokens + zeros, positions + zeros, slots + array("q", b"\xff" * 8 * rows), logits]
    narrow = [starts + starts[-1:] * seqs, lens + array("i", [0]) * seqs, splits + splits[-1:] * seqs]
    narrow += [array("i", [logits_needed]), seq_slots + array("i", [-1]) * seqs, page_starts + page_starts[-1:] * seqs]
    return _copy(layout, flat, [*wide, *narrow, used])


def _copy(layout: Layout, flat: Tensor, parts: list[array]) -> int:
    """The values of each of a layout's tensors to where it lies in a host buffer. → the words up to the end of the last."""
    if layout.words > flat.numel() or not flat.is_contiguous() or flat.device.type != "cpu":
        found = f"{flat.numel()} on {flat.device}, shape {tuple(flat.shape)}, strides {flat.stride()}"
        expected = f"{layout.words} words in a row on the host"
        raise InputError("no room for a step's values", where="flat", expected=expected, found=found)
    address, end = flat.data_ptr(), 0
    for start, room, values in zip(layout.starts[:-1], layout.sizes, parts, strict=True):
        source, count = values.buffer_info()
        words = count * values.itemsize // 4
        if words > room:
            raise InputError("no room for a step's values", where="layout", expected=f"at most {room} words", found=words)
        ctypes.memmove(address + 4 * start, source, 4 * words)
        end = start + words
    return end
