"""`Batch`: the input of a step's layers, any mix of prefill and decode, as flat tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from minirt.kernels.attention.limits import KV_SPLIT
from minirt.kernels.attention.operands import first_split
from minirt.kernels.step.table import MAX_SNAPSHOTS, StepTensors

if TYPE_CHECKING:
    from minirt.kernels.linear.product import RowMaxima


class Chunk(NamedTuple):
    """A part of one sequence for `Batch.build`: `tokens` at positions start, start + 1, …, in `pages`.

    Args:
        num_logits: number of its last tokens that need logits.
        slot: row of the sequence's state in recurrent layers; −1: none.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    num_logits: int = 1
    slot: int = -1


class PageTables(NamedTuple):
    """What a step has for the layers of a cache group, under the names of a `Batch`."""

    block_tables: Tensor
    slot_mapping: Tensor
    split_starts_device: Tensor


@dataclass(frozen=True)
class Batch:
    """T tokens of B sequences, sequence after sequence.

    Attributes:
        input_ids: [T] int64.
        positions: [T] int64.
        slot_mapping: [T] int64, page · page_size + offset of each token's K and V; −1: padding, not stored.
        logits_indices: [R] int64, the rows that need logits, which `Select` keeps. May be empty.
        query_starts_device: [B + 1] int32, the first row of each sequence; last, the number of tokens that are no padding.
        seq_lens_device: [B] int32, number of cached tokens, including the new ones; 0 for padding.
        split_starts_device: [B + 1] int32, the number of KV splits of all sequences before; last, that of all.
        seq_slots: [B] int32, the row of each sequence's state in recurrent layers; −1 for padding.
        block_tables: [B, width] int32, the page numbers of each sequence.
        query_lens, seq_lens: new tokens and cached tokens of each sequence, on the host. On a GPU upper bounds, if no
            layer is eager.
        max_seq_len, max_splits: upper bounds of sequence length and of KV splits together, which set the kernels' grid sizes.
        every_row: whether logits_indices is 0 … T − 1.
        logits: [R, V], the tensor that the head writes to; None: a new one.
        row_maxima: the buffers in which the head stores the largest logit of each tile; None: it stores none.
        taps: [T, H] or [R, H], the tensor that a `Tap` writes to; None: it writes nothing.
        hidden: [T, H], the hidden states from which a draft model continues; None: it has none.
        snapshots: [B, 2, 2] int32, of each snapshot that recurrent layers store within the step (`StateSpec.snapshot_tokens`):
            the row of the states, and how many of the sequence's new tokens it has. In order; −1: no more of them. None or empty:
            no sequence has one.
        hooks: `StepHooks`, which hooks among the layers call; None: they do nothing.
        windows: the tables of layers with a window that is shorter than sequences can be, by window. None: all layers have the
            same pages, and the lengths on the host are exact.
        adapters: `BatchAdapters`, which layers call; None: no sequence has one.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    logits_indices: Tensor
    query_starts_device: Tensor
    seq_lens_device: Tensor
    split_starts_device: Tensor
    seq_slots: Tensor
    block_tables: Tensor
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    max_seq_len: int
    max_splits: int
    every_row: bool
    logits: Tensor | None = None
    row_maxima: "RowMaxima | None" = None
    taps: Tensor | None = None
    hidden: Tensor | None = None
    snapshots: Tensor | None = None
    hooks: Any = None
    windows: Mapping[int, PageTables] | None = None
    adapters: Any = None

    def tables(self, window: int) -> PageTables:
        """The tables of layers with this window; those of layers without one are the batch's."""
        tables = PageTables(self.block_tables, self.slot_mapping, self.split_starts_device)
        if self.windows is not None:
            return self.windows.get(window, tables)
        if window not in self._split_starts:
            lens = zip(self.seq_lens, self.query_lens, strict=True)
            splits = [-(-length // KV_SPLIT) - first_split(length, new, window) for length, new in lens]
            starts = torch.tensor(list(accumulate(splits, initial=0)), dtype=torch.int32, device=self.device)
            self._split_starts[window] = starts
        return tables._replace(split_starts_device=self._split_starts[window])

    @cached_property
    def _split_starts(self) -> dict[int, Tensor]:
        """By window. Made at the first use, as no CUDA graph may copy from the host."""
        return {}

    @property
    def device(self) -> torch.device:
        return self.input_ids.device

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @cached_property
    def query_starts(self) -> list[int]:
        """Row of each sequence's first new token."""
        return list(accumulate(self.query_lens, initial=0))[:-1]

    @cached_property
    def max_query_len(self) -> int:
        return max(self.query_lens, default=0)

    @classmethod
    def build(cls, chunks: Sequence[Chunk], page_size: int) -> "Batch":
        """A batch on the CPU, for those who run a model without an engine: evaluations, benchmarks, dry runs."""
        tokens, positions, slots, indices = list[int](), list[int](), list[int](), list[int]()
        seq_lens = [chunk.start + len(chunk.tokens) for chunk in chunks]
        counts = [-(-length // page_size) for length in seq_lens]
        tables = torch.zeros(len(chunks), max(counts, default=0), dtype=torch.int32)
        for row, (chunk, stop, count) in enumerate(zip(chunks, seq_lens, counts, strict=True)):
            pages = list(chunk.pages[:count])
            tokens += chunk.tokens
            positions += range(chunk.start, stop)
            slots += [pages[p // page_size] * page_size + p % page_size for p in range(chunk.start, stop)]
            indices += range(len(tokens) - chunk.num_logits, len(tokens))
            tables[row, :count] = torch.tensor(pages, dtype=torch.int32)
        query_lens, splits = tuple(len(chunk.tokens) for chunk in chunks), [-(-length // KV_SPLIT) for length in seq_lens]
        i32, i64 = torch.int32, torch.int64
        return cls(
            torch.tensor(tokens, dtype=i64), torch.tensor(positions, dtype=i64), torch.tensor(slots, dtype=i64),
            torch.tensor(indices, dtype=i64), torch.tensor(list(accumulate(query_lens, initial=0)), dtype=i32),
            torch.tensor(seq_lens, dtype=i32), torch.tensor(list(accumulate(splits, initial=0)), dtype=i32),
            torch.tensor([chunk.slot for chunk in chunks], dtype=i32), tables, query_lens, tuple(seq_lens),
            max(seq_lens, default=0), sum(splits), len(indices) == len(tokens),
            snapshots=torch.full((len(chunks), MAX_SNAPSHOTS, 2), -1, dtype=i32),  # as in engines: kernels have one compiled form
        )  # fmt: skip

    @classmethod
    def of(
        cls, step: StepTensors, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], max_seq_len: int, max_splits: int,
        every_row: bool, windows: Sequence[int] = (),
    ) -> "Batch":  # fmt: skip
        """The batch of a step's tensors, as `derive` fills them. `windows`: those of `Columns`."""
        (pages, slots, splits), *others = map(PageTables, step.block_tables, step.slot_mapping, step.split_starts)
        return cls(
            step.tokens, step.positions, slots, step.logits_indices, step.query_starts, step.seq_lens, splits, step.seq_slots,
            pages, query_lens, seq_lens, max_seq_len, max_splits, every_row, snapshots=step.snapshots,
            windows=dict(zip(windows, others, strict=True)),
        )  # fmt: skip

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        if self.device == device:
            return self
        moved: dict[str, Any] = {
            each.name: value.to(device) for each in fields(self)
            if each.name not in ("logits", "taps", "hidden") and isinstance(value := getattr(self, each.name), Tensor)
        }  # fmt: skip
        return replace(self, **moved)
