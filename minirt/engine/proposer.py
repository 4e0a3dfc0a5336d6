"""`Proposer`: what a method of speculative decoding implements for the engine."""

from typing import Protocol

from torch import Tensor

from minirt.kernels.step.table import Columns, Rows
from minirt.step.batch import Batch


class Proposer(Protocol):
    """Proposes drafts: tokens that may follow a slot's next token. They are verified in the next step.

    `max_drafts`: the most for a slot, up to `kernels.speculative.limits.MAX_DRAFTS`. `needs_history`: whether rows of the table
    have all tokens of their sequences. `capturable`, if it has this attribute: whether `propose` may be a part of CUDA graphs,
    which run it again with new values in the same tensors.
    """

    max_drafts: int
    needs_history: bool

    def propose(self, table: Tensor, columns: Columns, rows: Rows, batch: Batch, wanted: int) -> None:
        """After the commit of a step: propose for its sequences, unless NUM_NEXT of their row of the table is 0 (the sequence
        yields no more tokens).

        Write drafts behind the next token (NEXT_TOKENS + 1 …), their number, with the next token, to NUM_NEXT, and to MATCHED a
        positive number if there are any, else 0. Does not wait for the device. `kernels/step/table.py` describes a row.

        `batch` is the step's: sequences in the order of `rows`, and in `taps` the hidden states that the model hands over.
        `wanted`: how many drafts of a sequence the next step may verify, by the step before it, and one size more. At least 1, at
        most `max_drafts`. More drafts are allowed; they take time.
        """
