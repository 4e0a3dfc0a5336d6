"""`StepPlan`: what a step does, as a plain value. It can be pickled, sent to another process or rank, logged and replayed.

It names sequences by slot, and says nothing that only the device knows: how many tokens a sequence has, or which one comes next.
"""

from array import array
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from minirt.engine.logits_processors import Rules


class Edit(NamedTuple):
    """Words of the table of slots (`kernels/step/table.py`): from `column` of row `slot` on, they are `values` now."""

    slot: int
    column: int
    values: "array[int]"  # of int32


class PlannedSequence(NamedTuple):
    """A sequence of a step.

    Args:
        slot: its row of the table.
        start: position of its first new token, whose tokens the plan has; −1: it goes on with the next tokens of its slot.
        num_tokens: number of new tokens; with next tokens, the maximum.
        num_logits: number of its last new tokens that need logits.
        num_draws: how many of these, the last ones, a token is drawn from.
        seq_len: cached tokens after the step, at most.
    """

    slot: int
    start: int
    num_tokens: int
    num_logits: int
    num_draws: int
    seq_len: int


class SlotRules(NamedTuple):
    """The rules of a sequence that was admitted (`Rules`), with its tokens: the prompt's, and the generated ones."""

    slot: int
    rules: "Rules"
    prompt: array
    generated: array


class Scored(NamedTuple):
    """Rows of logits for the caller: the first ones of a sequence.

    Args:
        sequence: its place in the plan.
        num_rows: number of rows.
        targets: the tokens whose log-probabilities the rows give; None: the caller wants the logits themselves.
        num_top: number of most probable tokens to list for each target.
    """

    sequence: int
    num_rows: int
    targets: "array[int] | None"
    num_top: int


class Sampling(NamedTuple):
    """What the draws of a step need. What no draw needs launches no work.

    Args:
        all_greedy, any_top_k, any_top_p, any_min_p: as in `SamplingBatch`.
        any_rules, any_bias, any_ban: whether a sequence has rules for its logits; biases; forbidden tokens.
        masked: masks of the draws follow, see `Runner.draw`.
        logprobs: for each draw, the number of most probable tokens to list, −1 for no log-probabilities. Empty: nobody asks.
    """

    all_greedy: bool = True
    any_top_k: bool = False
    any_top_p: bool = False
    any_min_p: bool = False
    any_rules: bool = False
    any_bias: bool = False
    any_ban: bool = False
    masked: bool = False
    logprobs: tuple[int, ...] = ()


class StepPlan(NamedTuple):
    """A step: `sequences` in order, `tokens` (int32) of those with a start, one after the other, and what changes before it."""

    sequences: tuple[PlannedSequence, ...]
    tokens: "array[int]"
    edits: tuple[Edit, ...] = ()
    rules: tuple[SlotRules, ...] = ()
    scored: tuple[Scored, ...] = ()
    sampling: Sampling = Sampling()

    @property
    def num_tokens(self) -> int:
        """New tokens, at most."""
        return sum([sequence.num_tokens for sequence in self.sequences])

    @property
    def num_logits(self) -> int:
        return sum([sequence.num_logits for sequence in self.sequences])

    @property
    def num_draws(self) -> int:
        return sum([sequence.num_draws for sequence in self.sequences])
