"""`plan_step`: from what the scheduler chose to a `StepPlan`, the plain value that the runner executes."""

import struct
from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

from minirt.engine.logits_processors import Rules
from minirt.engine.scheduler import Work
from minirt.engine.sequence import Sequence
from minirt.kernels.step.table import Columns
from minirt.sampling_params import EffectiveSampling
from minirt.step.plan import Edit, Sampling, Scored, SlotRules, StepPlan

_LARGEST, _SMALLEST = 3.4028234663852886e38, 1.1754943508222875e-38  # of fp32 numbers, and of normal ones


class Settings(NamedTuple):
    """What a request asks of the draws. `constrained`: masks come before each of them."""

    sampling: EffectiveSampling
    rules: Rules | None
    constrained: bool = False


def plan_step(work: Seq[Work], settings: Seq[Settings], columns: Columns, vocab: int) -> StepPlan:
    """The plan of a step.

    Args:
        settings: of each sequence of `work`.
        vocab: columns of the logits.
    """
    tokens, edits, rules, scored = array("i"), list[Edit](), list[SlotRules](), list[Scored]()
    for index, (item, own) in enumerate(zip(work, settings, strict=True)):
        sequence, planned = item
        if sequence.num_sent < 0:
            edits.append(_admission(sequence, own, planned.start, vocab))
            if own.rules is not None:
                known, start = sequence.tokens, sequence.prompt_len
                rules.append(SlotRules(planned.slot, own.rules, known[:start], known[start:]))
            if columns.history and planned.start > 0:  # the other tokens of a prompt come as the tokens of steps
                cached = sequence.tokens[: planned.start]
                edits.append(Edit(planned.slot, columns.tokens, cached))
        first = max(0, sequence.num_sent)
        if first < len(sequence.pages):
            edits.append(Edit(planned.slot, columns.page_tables + first, sequence.pages[first:]))
        if planned.start >= 0:
            stop = planned.start + planned.num_tokens
            tokens.extend(sequence.tokens[planned.start : stop])
            if num_scored := item.num_scored:
                after = stop - planned.num_logits + 1  # the place of the first target
                targets = None if sequence.logits_only else sequence.tokens[after : after + num_scored]
                scored.append(Scored(index, num_scored, targets, num_top(sequence.prompt_logprobs or 0, vocab)))
    drawing = [own for (_, planned), own in zip(work, settings, strict=True) for _ in range(planned.num_draws)]
    sequences = tuple([planned for _, planned in work])
    return StepPlan(sequences, tokens, tuple(edits), tuple(rules), tuple(scored), _sampling(drawing, vocab))


def _sampling(settings: Seq[Settings], vocab: int) -> Sampling:
    drawn, ruled = [s.sampling for s in settings if s.sampling.temperature >= _SMALLEST], [s.rules for s in settings if s.rules]
    logprobs = any(s.sampling.logprobs is not None for s in settings)
    return Sampling(
        not drawn, any(s.top_k > 0 for s in drawn), any(s.top_p < 1 for s in drawn), any(s.min_p > 0 for s in drawn),
        bool(ruled), any(r.bias for r in ruled), any(r.bad_words or r.end_ids for r in ruled),
        any(s.constrained for s in settings), tuple([num_top(s.sampling.logprobs, vocab) for s in settings]) if logprobs else (),
    )  # fmt: skip


def num_top(asked: int | None, vocab: int) -> int:
    """How many of the most probable tokens to list; −1: no log-probabilities."""
    return -1 if asked is None else vocab if asked < 0 else min(asked, vocab)


def _admission(sequence: Sequence, own: Settings, cached: int, vocab: int) -> Edit:
    """The first words of a slot's row, up to the next tokens, in the order of `kernels/step/table.py`."""
    s = own.sampling
    # A temperature below the smallest normal fp32 number becomes greedy; one above the fp32 range becomes the largest number.
    temperature = 0.0 if s.temperature < _SMALLEST else min(s.temperature, _LARGEST)
    words = struct.pack(
        "=6i f i 2f Q i", cached, 0, sequence.final_len, sequence.prompt_len, -1, num_top(s.logprobs, vocab), temperature,
        min(s.top_k, 2**31 - 1), s.top_p, s.min_p, s.seed, own.rules is not None,
    )  # fmt: skip
    return Edit(sequence.slot, 0, array("i", words))
