"""`StepPlan`: what a step does, as a plain value. It can be pickled, sent to another process or rank, logged and replayed.

It names sequences by slot, and says nothing that only the device knows: how many tokens a sequence has, or which one comes next.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from minirt.step.rules import Rules

NO_TOKENS = np.zeros(0, np.int32)


class Edit(NamedTuple):
    """Words of the table of slots (`kernels/step/table.py`): from `column` of row `slot` on, they are `values` (int32) now."""

    slot: int
    column: int
    values: np.ndarray


class Copies(NamedTuple):
    """The copies in the cache before a step, in order: (source, target) of each.

    Args:
        states: rows of states, those of slots and of snapshots (`KVCache.num_slots` and more).
        pages: KV pages.
    """

    states: tuple[tuple[int, int], ...] = ()
    pages: tuple[tuple[int, int], ...] = ()


NO_COPIES = Copies()


class Snapshot(NamedTuple):
    """A snapshot that recurrent layers store within a step; those of a sequence are in order, at most `table.MAX_SNAPSHOTS`.

    Args:
        place: of the sequence in the plan.
        row: of the states.
        offset: how many of the sequence's new tokens it has.
    """

    place: int
    row: int
    offset: int


@dataclass(eq=False)
class PlannedSequences:
    """The sequences of a step, in order.

    Attributes:
        values: [6, B] int64, with which NumPy indexes fastest; its rows are the next six attributes.
        slots: the row of the table.
        starts: position of the first new token, whose tokens the plan has; −1: it goes on with the next tokens of its slot.
        num_tokens: number of new tokens; with next tokens, the maximum.
        num_logits: number of the last new tokens that need logits.
        num_draws: how many of these, the last ones, a token is drawn from.
        seq_lens: cached tokens after the step, at most.
        total_tokens, total_logits, total_draws: of all sequences. (The scheduler knows them; NumPy is slow for a few numbers.)
    """

    values: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    num_tokens: np.ndarray
    num_logits: np.ndarray
    num_draws: np.ndarray
    seq_lens: np.ndarray
    total_tokens: int
    total_logits: int
    total_draws: int

    @classmethod
    def of(cls, sequences: Iterable[tuple[int, int, int, int, int, int]]) -> "PlannedSequences":
        """From one tuple of these values for each sequence."""
        values = np.array(list(sequences), np.int64).reshape(-1, 6).T
        tokens, logits, draws = values[2:5].sum(1).tolist()
        return cls(values, *values, tokens, logits, draws)  # type: ignore[call-arg]  # mypy does not count the rows


class SlotRules(NamedTuple):
    """The rules of a sequence that was admitted (`Rules`), with its tokens (int32): the prompt's, and the generated ones."""

    slot: int
    rules: Rules
    prompt: np.ndarray
    generated: np.ndarray


class Scored(NamedTuple):
    """Rows of logits for the caller: the first ones of a sequence.

    Args:
        place: of the sequence in the plan.
        num_rows: number of rows.
        targets: the tokens whose log-probabilities the rows give; None: the caller wants the logits themselves.
        num_top: number of most probable tokens to list for each target.
    """

    place: int
    num_rows: int
    targets: np.ndarray | None
    num_top: int


class Sampling(NamedTuple):
    """What the draws of a step need. Stages that no row uses are not launched.

    Args:
        all_greedy, filters: whether no draw has a temperature; the filters that a draw uses (`SamplingBatch`).
        any_rules, any_bias, any_ban: whether a sequence has rules for its logits; biases; forbidden tokens.
        masked: masks of the draws follow, see `Runner.draw`.
        processed: functions of users that change logits follow, see `Runner.draw`.
        logprobs: for each draw, the number of most probable tokens to list, −1 for no log-probabilities. Empty: no request asks.
    """

    all_greedy: bool = True
    filters: tuple[str, ...] = ()
    any_rules: bool = False
    any_bias: bool = False
    any_ban: bool = False
    masked: bool = False
    processed: bool = False
    logprobs: tuple[int, ...] = ()


class HookPlan(NamedTuple):
    """What a step's hooks do (`minirt.hooks`).

    Args:
        owners: (place of the sequence in the plan, first row, number of rows) of each whose states are copied.
        rows: [2, N] int64, of each row: the place of its sequence, and the number of its token among the new ones. [1, N]: its
            number in the step, if the host knows it: no sequence has drafts.
        names: the places in the model.
        factors: [edits, B] fp32, of the sequences.
    """

    owners: tuple[tuple[int, int, int], ...]
    rows: np.ndarray
    names: tuple[str, ...]
    factors: np.ndarray


@dataclass(eq=False)
class StepPlan:
    """A step: `sequences` in order, `tokens` (int32) of those with a start, one after the other, and what changes before it.

    `adapters`: whether a sequence has one.
    """

    sequences: PlannedSequences
    tokens: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    edits: tuple[Edit, ...] = ()
    rules: tuple[SlotRules, ...] = ()
    scored: tuple[Scored, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    copies: Copies = NO_COPIES
    snapshots: tuple[Snapshot, ...] = ()
    hooks: HookPlan | None = None
    adapters: bool = False
