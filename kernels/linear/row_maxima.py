"""`RowMaxima`: where an LM head leaves the largest logit of each tile, so that greedy sampling need not read all logits."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class RowMaxima:
    """The largest logit of each row in each tile of columns, which an LM head stores beside its logits.

    `values` [T, P] int64: a logit and its column, packed as by `sampling.filters.pack`. `num_tiles`: how many of a row's P values
    the head has stored, 0 if its kernel stores none. A head that stores them writes the logits only if `logits_needed` [1] int32,
    on the device, is not 0.
    """

    values: Tensor
    logits_needed: Tensor
    num_tiles: int = 0

    def stored(self) -> Tensor | None:
        """[T, num_tiles], or None if nothing has been stored."""
        return self.values[:, : self.num_tiles] if self.num_tiles else None
