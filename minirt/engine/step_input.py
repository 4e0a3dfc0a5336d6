"""`Batch`: the input of one step, any mix of prefill and decode, as flat tensors."""

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

    A token is an id, or the placeholder ~r: the token that the previous step sampled in row r. The host does not know it yet.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    num_logits: int = 1  # number of its last tokens that need logits: 0 in the middle of a prompt, all for an evaluation
    slot: int = -1  # row of what the device keeps while the sequence runs; −1: none
    targets: Sequence[int] = ()  # prompt tokens after the tokens of its first rows of logits; these rows score them
    num_top: int = 0  # number of most probable tokens to list for each target

    @property
    def num_sampled(self) -> int:
        """Number of rows of logits that a token is drawn from."""
        return self.num_logits - len(self.targets)


@dataclass(frozen=True)
class Layout:
    """The places of a step's tensors in one flat int32 tensor.

    Each tensor starts at a multiple of 16 bytes, so that kernels are compiled for one alignment. The page numbers are last, so
    a step copies only those in use to the device.

    Args:
        tokens, logits, seqs, pages: maximum number of tokens, rows with logits, sequences, and pages of all sequences together.
    """

    tokens: int
    logits: int
    seqs: int
    pages: int

    @cached_property
    def sizes(self) -> list[int]:
        """Sizes in int32 words of: tokens, positions, slots, logits_indices (these are int64), query_starts, seq_lens,
        split_starts, logits_needed, seq_slots, page_starts, pages."""
        seqs = self.seqs
        return [2 * self.tokens] * 3 + [2 * self.logits, seqs + 1, seqs, seqs + 1, 1, seqs, seqs + 1, self.pages]

    @cached_property
    def starts(self) -> list[int]:
        """First word of each tensor, and the total number of words."""
        return list(accumulate((_aligned(size) for size in self.sizes), initial=0))

    @property
    def words(self) -> int:
        return self.starts[-2] + self.pages

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The tensors as views of `flat`, in the order of `sizes`."""
        parts = [flat[start : start + size] for start, size in zip(self.starts, self.sizes, strict=False)]
        return *(part.view(torch.int64) for part in parts[:4]), *parts[4:]


def _aligned(words: int) -> int:
    return -(-words // 4) * 4


@dataclass(frozen=True)
class Batch:
    """T tokens of B sequences, sequence after sequence.

    Attributes:
        flat: int32; the tensors up to `pages` are views of it, so a batch that was built on the host is sent in one copy.
        layout: the places of the tensors in `flat`.
        tokens: [T] int64, ids and placeholders; see `input_ids`.
        positions: [T] int64.
        slots: [T] int64, page · page_size + offset of each token's K and V; −1: not stored.
        logits_indices: [R] int64, the rows that need logits, which `Select` keeps. May be empty.
        query_starts_device: [B + 1] int32, the first row of each sequence; last, T.
        seq_lens_device: [B] int32, number of cached tokens, including the new ones.
        split_starts_device: [B + 1] int32, the number of KV splits of all sequences before; last, that of all.
        logits_needed: [1] int32. With `row_maxima`, the head writes logits only if this is 1.
        seq_slots: [B] int32, the row of each sequence's state in recurrent layers; −1 for padding.
        page_starts: [B + 1] int32, the index in `pages` of each sequence's first page; last, the number of pages.
        pages: int32, the page numbers of all sequences, one sequence after the other.
        query_lens, seq_lens: new tokens and cached tokens of each sequence, on the host. In a static batch, upper bounds.
        max_seq_len, max_splits: upper bounds of sequence length and of KV splits together, which set the kernels' grid sizes.
        every_row: whether logits_indices is 0 … T − 1.
        table_width: columns of `block_tables`.
        static_tables: the static buffer of `block_tables`, if any.
        previous: [≥ R] int64, the tokens that the previous step sampled.
        logits: [R, V], the tensor that the head writes to; None: a new one.
        row_maxima: the buffers in which the head stores the largest logit of each tile; None: it stores none.
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
        """Token ids [T] int64. Placeholders are replaced by the previous step's tokens; a failed row gives 0."""
        if self.previous is None:
            return self.tokens
        sampled = self.previous[(~self.tokens).clamp(min=0)].clamp(min=0)
        return torch.where(self.tokens < 0, sampled, self.tokens)

    @cached_property
    def block_tables(self) -> Tensor:
        """Page numbers [B, width] int32, a row for each sequence: computed from `pages`, or the static buffer that
        `expand_block_tables` fills."""
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
        """Build the batch on the host. `pinned`: in pinned memory, for asynchronous copies."""
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
        """A batch of views of `flat`, a device buffer that gets each step's values (`pack_chunks`).

        Args:
            block_tables: [B, width] int32, which `expand_block_tables` fills on the device.
            max_seq_len, max_splits: the largest values that a step may have.
            decode: each sequence has one token; otherwise any mix.
        """
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
        """The same batch, with placeholders resolved from `previous`."""
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
    """Copies of ranges of integers. Copying stored numbers is many times faster than counting in each step.

    Args:
        stop: the numbers below `stop` are stored at once. Larger ones are stored when they are first needed.
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
    """Write chunks to a host buffer whose layout is large enough, followed by padding.

    Padding tokens are not stored (slot −1) and belong to no sequence; padding sequences have no tokens. Uses only this thread:
    PyTorch splits copies of more than 32,768 words over all cores, and waits milliseconds for the last one if other processes
    keep it busy.

    Returns:
        The number of words in use, counted from the buffer's start.
    """
    ranges = ranges or Ranges()
    tokens, positions, slots, used = array("q"), array("q"), array("q"), array("i")
    logits, starts, lens, splits, seq_slots, page_starts = list[int](), [0], list[int](), [0], list[int](), [0]
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
    _check_buffer(layout, flat)
    if len(tokens) > layout.tokens or len(logits) > layout.logits or len(lens) > layout.seqs or len(used) > layout.pages:
        what, found = "the layout is too small for the step", (len(tokens), len(logits), len(lens), len(used))
        raise InputError(what, where="layout", expected=f"tokens, logits, sequences and pages of {layout}", found=found)
    # Padding rows count as rows that need logits, as every row of a decode step does.
    logits += [min(row, layout.tokens - 1) for row in range(len(logits), layout.logits)]
    # All 64-bit tensors are copied at once, and then all others.
    _, positions_at, slots_at, logits_at, narrow_at, *_ = layout.starts
    wide = tokens
    following = (positions, positions_at, _ZERO), (slots, slots_at, _ZERO), (array("q", logits), logits_at, _NO_SLOT)
    for values, start, fill in following:
        wide.extend(fill * (start // 2 - len(wide)))
        wide.extend(values)
    seqs, bounds = _aligned(layout.seqs), _aligned(layout.seqs + 1)
    narrow = array("i", (
        _padded(starts, bounds, starts[-1]) + _padded(lens, seqs, 0) + _padded(splits, bounds, splits[-1])
        + [int(logits_needed), 0, 0, 0] + _padded(seq_slots, seqs, -1) + _padded(page_starts, bounds, page_starts[-1])
    ))  # fmt: skip
    narrow.extend(used)
    address = flat.data_ptr()
    ctypes.memmove(address, wide.buffer_info()[0], 8 * len(wide))
    ctypes.memmove(address + 4 * narrow_at, narrow.buffer_info()[0], 4 * len(narrow))
    return narrow_at + len(narrow)


_ZERO, _NO_SLOT = array("q", [0]), array("q", [-1])


def _padded(values: list[int], size: int, fill: int) -> list[int]:
    return values + [fill] * (size - len(values))


def _check_buffer(layout: Layout, flat: Tensor) -> None:
    if layout.words > flat.numel() or not flat.is_contiguous() or flat.device.type != "cpu":
        found = f"{flat.numel()} on {flat.device}, shape {tuple(flat.shape)}, strides {flat.stride()}"
        expected = f"{layout.words} contiguous words on the host"
        raise InputError("the buffer cannot hold the step", where="flat", expected=expected, found=found)
