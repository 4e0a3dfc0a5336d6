"""Copies of rows, of states and of KV pages: the eager form of the kernel in `step/copies.py`, and its operand. No Triton."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RowTable(NamedTuple):
    """Tensors with rows of contiguous memory, as the kernel takes them.

    Args:
        addresses: [N] int64, of the first row of each.
        sizes: [N] int64, the words of a row.
        longest: the largest of these.
        word: bytes of a word, 4 or 1.
        tensors: the tensors themselves, which keeps their memory.
    """

    addresses: Tensor
    sizes: Tensor
    longest: int
    word: int
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "RowTable | None":
        """Of tensors [R, …] on one device; None: there are none, or one whose rows are not contiguous, one after the other."""
        if not tensors or not all(tensor.is_contiguous() for tensor in tensors):
            return None
        sizes = [tensor[0].nbytes for tensor in tensors]
        word = 1 if any(size % 4 or tensor.data_ptr() % 4 for size, tensor in zip(sizes, tensors, strict=True)) else 4
        addresses, words = [tensor.data_ptr() for tensor in tensors], [size // word for size in sizes]
        device = tensors[0].device
        return cls(
            torch.tensor(addresses, dtype=torch.int64, device=device), torch.tensor(words, dtype=torch.int64, device=device),
            max(words), word, tuple(tensors),
        )  # fmt: skip


def copy_rows(tensors: Sequence[Tensor], source: int, target: int) -> None:
    """Copy row `source` of each tensor [R, …] to its row `target`."""
    for tensor in tensors:
        tensor[target].copy_(tensor[source])
