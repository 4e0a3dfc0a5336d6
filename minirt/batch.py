"""`Batch`: one step's work for the model, any mix of prefill and decode, flat and ragged."""

from collections.abc import Sequence
from dataclasses import dataclass

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

    Device tensors: `tokens` [T] int64, `positions` [T] int64, `slots` [T] int64 (page · page_size + offset: where a token's
    K and V go), `query_starts_device` [B + 1] int32, `seq_lens_device` [B] int32 (cached tokens, the new ones included),
    `block_tables` [B, pages] int32 (padded with page 0), `logits_indices` [R] int64 (rows of the T that need logits).
    Host tuples: `query_starts`, `query_lens`, `seq_lens`, for what the eager layers and the kernels' grids need.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    query_starts_device: Tensor
    seq_lens_device: Tensor
    block_tables: Tensor
    logits_indices: Tensor
    query_starts: tuple[int, ...]
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def max_query_len(self) -> int:
        return max(self.query_lens, default=0)

    @property
    def max_seq_len(self) -> int:
        return max(self.seq_lens, default=0)

    @classmethod
    def build(cls, chunks: Sequence[Chunk], page_size: int, device: torch.device | str = "cpu") -> "Batch":
        """Lay the chunks out flat and copy them to `device` in one transfer per tensor."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts: list[int] = [0]
        logits: list[int] = []
        for chunk in chunks:
            stop = chunk.start + len(chunk.tokens)
            first = len(tokens)
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
        tables = [(list(c.pages) + [0] * width)[:width] for c in chunks]

        def put(values: list, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        return cls(
            tokens=put(tokens, torch.int64),
            positions=put(positions, torch.int64),
            slots=put(slots, torch.int64),
            query_starts_device=put(starts, torch.int32),
            seq_lens_device=put(list(seq_lens), torch.int32),
            block_tables=put(tables, torch.int32).view(len(chunks), width),
            logits_indices=put(logits, torch.int64),
            query_starts=tuple(starts[:-1]),
            query_lens=tuple(len(c.tokens) for c in chunks),
            seq_lens=seq_lens,
        )
