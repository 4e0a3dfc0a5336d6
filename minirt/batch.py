"""`Batch`: one step's work for the model, any mix of prefill and decode, flat and ragged."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """The part of one sequence that a step computes: `tokens` at positions start, start + 1, …, in `pages`."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    all_logits: bool = False  # logits for every token of the chunk (evaluation)
    wants_logits: bool = True  # logits for the last token: False for a chunk that does not end its prompt


@dataclass(frozen=True)
class Batch:
    """T tokens of B sequences, sequence after sequence.

    Tensors: `tokens` [T] int64, `positions` [T] int64, `slots` [T] int64 (page · page_size + offset: where a token's K and V
    go; −1: nowhere), `logits_indices` [R] int64 (rows of the T that need logits), `query_starts_device` [B + 1] int32,
    `seq_lens_device` [B] int32 (cached tokens, the new ones included), `block_tables` [B, pages] int32 (padded with page 0).
    They are views of `flat`, so that a batch built on the host reaches the device in one copy.
    Host tuples: `query_lens`, `seq_lens`, for what the eager layers and the kernels' grids need.
    """

    flat: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    logits_indices: Tensor
    query_starts_device: Tensor
    seq_lens_device: Tensor
    block_tables: Tensor
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]

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

    @cached_property
    def max_seq_len(self) -> int:
        return max(self.seq_lens, default=0)

    @classmethod
    def build(cls, chunks: Sequence[Chunk], page_size: int) -> "Batch":
        """Lay the chunks out flat, on the host."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts: list[int] = [0]
        logits: list[int] = []
        for chunk in chunks:
            stop, first = chunk.start + len(chunk.tokens), len(tokens)
            tokens.extend(chunk.tokens)
            positions.extend(range(chunk.start, stop))
            slots.extend(chunk.pages[p // page_size] * page_size + p % page_size for p in range(chunk.start, stop))
            starts.append(len(tokens))
            if chunk.all_logits:
                logits.extend(range(first, len(tokens)))
            elif chunk.wants_logits:
                logits.append(len(tokens) - 1)
        seq_lens = tuple(c.start + len(c.tokens) for c in chunks)
        width = max((-(-n // page_size) for n in seq_lens), default=0)
        batch = cls._over(
            torch.zeros(_length(len(tokens), len(logits), len(chunks), width), dtype=torch.int32),
            len(tokens), len(logits), width, tuple(len(c.tokens) for c in chunks), seq_lens,
        )  # fmt: skip
        batch.tokens.copy_(torch.tensor(tokens))
        batch.positions.copy_(torch.tensor(positions))
        batch.slots.copy_(torch.tensor(slots))
        batch.logits_indices.copy_(torch.tensor(logits))
        batch.query_starts_device.copy_(torch.tensor(starts))
        batch.seq_lens_device.copy_(torch.tensor(seq_lens))
        for row, chunk in zip(batch.block_tables, chunks, strict=True):
            pages = chunk.pages[:width]
            row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        return batch

    @classmethod
    def padding(cls, size: int, context: int, page_size: int) -> "Batch":
        """A decode batch of `size` padding rows (slot −1, length 0) that `fill` can overwrite, on the host.

        The host tuples hold the largest values that `fill` may bring: sequences of `context` tokens.
        """
        width = -(-context // page_size)
        flat = torch.zeros(_length(size, size, size, width), dtype=torch.int32)
        batch = cls._over(flat, size, size, width, (1,) * size, (context,) * size)
        batch.slots.fill_(-1)
        batch.logits_indices.copy_(torch.arange(size))
        batch.query_starts_device.copy_(torch.arange(size + 1))
        return batch

    def fill(self, other: "Batch") -> None:
        """Take over a decode batch of at most this size and context, both on the host; the rows behind it become padding."""
        count = other.num_seqs
        self.tokens[:count] = other.tokens
        self.positions[:count] = other.positions
        self.slots[:count] = other.slots
        self.slots[count:] = -1
        self.seq_lens_device[:count] = other.seq_lens_device
        self.seq_lens_device[count:] = 0
        self.block_tables[:count, : other.block_tables.shape[1]] = other.block_tables

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`, in one copy."""
        if self.flat.device == device:
            return self
        flat = self.flat.pin_memory() if device.type == "cuda" else self.flat
        return self.over(flat.to(device, non_blocking=True))

    def over(self, flat: Tensor) -> "Batch":
        """A batch of this layout whose tensors are views of `flat`."""
        width = self.block_tables.shape[1]
        return self._over(flat, self.num_tokens, self.logits_indices.shape[0], width, self.query_lens, self.seq_lens)

    @classmethod
    def _over(
        cls, flat: Tensor, tokens: int, logits: int, width: int, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]
    ) -> "Batch":
        seqs = len(seq_lens)
        sizes = [2 * tokens] * 3 + [2 * logits, seqs + 1, seqs, seqs * width]
        *wide, starts, lens, tables = flat.split(sizes)
        ids, positions, slots, logits_indices = (part.view(torch.int64) for part in wide)
        return cls(
            flat, ids, positions, slots, logits_indices, starts, lens, tables.view(seqs, width), query_lens, seq_lens
        )


def _length(tokens: int, logits: int, seqs: int, width: int) -> int:
    """int32 words of a batch: the int64 parts come first, so that they are aligned."""
    return 6 * tokens + 2 * logits + 2 * seqs + 1 + seqs * width
