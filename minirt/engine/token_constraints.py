"""Token constraints, such as a grammar: which tokens may come next in a sequence.

The engine knows no grammars. It knows these protocols, which `minirt.structured.constraints` implements.

The state of a constraint belongs to its request: `accept` is told every token once, when the host reads it. So a preempted
sequence, whose tokens are kept, needs nothing: its KV values are computed again, its constraint stays as it is.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from torch import Tensor

from minirt.errors import MinirtError
from minirt.structured.params import StructuredOutputsParams


class TokenConstraint(Protocol):
    """The state of one sequence."""

    def accept(self, tokens: Sequence[int]) -> None:
        """The next tokens of the sequence, any number. What goes wrong is an error of the next `TokenConstraints.fill`."""


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
            min_tokens: before so many tokens, none of these is allowed, unless no other is.
        """

    def fill(self, masks: Tensor, constraints: Sequence[Any]) -> Mapping[int, MinirtError]:
        """Write the mask of the next token of each row.

        Args:
            masks: [B, ceil(V / 32)] int32 on the CPU: bit v mod 32 of word v div 32 becomes 1 if token v is allowed.
            constraints: of each row, one that `prepare` gave; None: all tokens are allowed.
        Returns:
            An error for each row whose constraint cannot go on.
        """
