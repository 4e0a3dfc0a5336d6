"""Token constraints, such as a grammar: which tokens may come next in a sequence.

The engine knows no grammars. It knows these protocols, which `minirt.structured.constraints` implements.

The state of a constraint belongs to its request: `accept` is told every token once, when the host reads it. So a preempted
sequence, whose tokens are kept, needs nothing: its KV values are computed again, its constraint stays as it is.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from minirt.errors import MinirtError
from minirt.structured.params import StructuredOutputsParams


class TokenConstraint(Protocol):
    """The state of one sequence."""

    def accept(self, tokens: Sequence[int]) -> None:
        """The next tokens of the sequence, any number. What goes wrong is an error of the next `TokenConstraints.fill`."""


class ConstrainedRows(NamedTuple):
    """The rows of one sequence in a step's masks.

    Args:
        constraint: one that `TokenConstraints.prepare` gave; None: all tokens are allowed.
        num_rows: at least 1.
        drafts: the tokens that the rows after the first stand behind. There may be fewer than num_rows − 1.
    """

    constraint: Any
    num_rows: int = 1
    drafts: Sequence[int] = ()


class TokenConstraints(Protocol):
    """Compiles what requests state, and computes the masks of a step."""

    def compile(self, spec: StructuredOutputsParams) -> None:
        """Check what a request states. It may take long, so it is not called in the engine's thread.

        Raises:
            MinirtError: the request is to be refused.
        """

    def prepare(self, spec: StructuredOutputsParams, ends: Sequence[int], min_tokens: int) -> "Future[Any]":
        """A future `TokenConstraint` for a new sequence. Does not wait.

        Args:
            ends: the tokens that end the request. They are allowed where the constraint is complete. Elsewhere, those are
                allowed that the constraint allows as part of the text; they end the request there, too.
            min_tokens: before this number of tokens, none of `ends` is allowed, unless no other token is.
        """

    def fill(self, masks: Tensor, rows: Sequence[ConstrainedRows]) -> Mapping[int, MinirtError]:
        """Write the masks of a step.

        A sequence's first row gets the mask of its next token, and each row after it the mask behind the drafts before, as long
        as the drafts are allowed and do not end the request. Nobody reads the rows after that; they allow all tokens. The
        constraints stay as they were.

        Args:
            masks: [B, ceil(V / 32)] int32 on the CPU: bit v mod 32 of word v div 32 becomes 1 if token v is allowed.
            rows: of each sequence, in order; together B rows.
        Returns:
            An error for each sequence, by its place in `rows`, whose constraint cannot go on. A constraint that cannot go on
            behind a draft gives no error, but a mask that allows no token.
        """
