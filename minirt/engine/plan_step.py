"""`plan_step`: from what the scheduler chose to a `StepPlan`, the plain value that the runner executes."""

import struct
from array import array
from functools import lru_cache

import numpy as np

from minirt.engine.schedule.scheduler import ScheduledStep
from minirt.engine.state.sequence import Sequence
from minirt.engine.state.slots import NEVER, HostSlots
from minirt.hooks.step import StepHooks
from minirt.kernels.sampling.batch import COLUMNS, column_values, filters_of, fp32_temperature
from minirt.kernels.step.table import NEXT_TOKENS, Columns
from minirt.sampling_params import FILTERS
from minirt.step.plan import NO_TOKENS, Edit, Sampling, Scored, SlotRules, StepPlan

# `HostSlots.flags`: what the draws of a sequence need. Those of rules end with `HostSlots.rules_until`.
_SAMPLED, _RULES, _BIAS, _BAN, _MASKED, _PROCESSED, _LOGPROBS, _HOOKED, _ADAPTED, *_FILTERS = (
    1 << i for i in range(9 + len(FILTERS))
)
_OF_RULES = _RULES | _BIAS | _BAN
_OF_FILTER = dict(zip(FILTERS, _FILTERS, strict=True))
_HEAD = struct.Struct(f"=6i {COLUMNS} Q 2i")  # the words of a row before the next tokens


def plan_step(
    scheduled: ScheduledStep, host: HostSlots, columns: Columns, vocab: int, hooks: StepHooks | None = None
) -> StepPlan:  # fmt: skip
    """The plan of a step.

    Args:
        vocab: columns of the logits.
        hooks: of the model.
    """
    planned, rules, scored = scheduled.sequences, list[SlotRules](), list[Scored]()
    tokens, edits = list[np.ndarray](), list[Edit]()
    going_on = len(planned.slots) - len(scheduled.prompts)  # the first ones; of prompts, each is looked at
    for place, sequence, (slot, start, count, num_logits, num_draws, _) in scheduled.prompts:
        known, stop = sequence.tokens, start + count
        # In the middle of a prompt, a proposer needs the token that follows the step's.
        following = known[stop : stop + 1].copy() if columns.drafts and not num_draws else NO_TOKENS
        if host.num_sent[slot] < 0:
            host.flags[slot], host.num_top[slot], host.rules_until[slot] = _needs(sequence, vocab)
            edits.append(_admission(sequence, start, vocab, following, columns))
            edits += [] if host.windows is None else host.windows.edits(slot, columns)
            if sequence.rules is not None:
                prompt_len = sequence.prompt_len
                rules.append(SlotRules(slot, sequence.rules, known[:prompt_len].copy(), known[prompt_len:].copy()))
            if columns.history and start > 0:  # the other tokens of a prompt come as the tokens of steps
                edits.append(Edit(slot, columns.tokens, known[:start].copy()))
        else:
            if len(following):
                edits.append(Edit(slot, NEXT_TOKENS, following))
            edits += _new_pages(host, slot, columns)
        tokens.append(known[start:stop].copy())
        if num_scored := num_logits - num_draws:
            after = stop - num_logits + 1  # the place of the first target
            targets = None if sequence.logits_only else known[after : after + num_scored].copy()
            scored.append(Scored(place, num_scored, targets, num_top(sequence.sampling.prompt_logprobs or 0, vocab)))
    if host.unsent and going_on:
        for slot in host.unsent.intersection(planned.slots[:going_on].tolist()):
            edits += _new_pages(host, slot, columns)
    given = np.concatenate(tokens) if len(tokens) > 1 else tokens[0] if tokens else NO_TOKENS
    (bits, sampling), hooked = _sampling(scheduled, host), None
    if bits & _HOOKED and hooks is not None:
        hooked = hooks.plan(planned, [host.sequences[slot] for slot in planned.slots.tolist()])
    return StepPlan(
        planned, given, tuple(edits), tuple(rules), tuple(scored), sampling, scheduled.copies,
        scheduled.snapshots, hooked, bool(bits & _ADAPTED),
    )  # fmt: skip


def _new_pages(host: HostSlots, slot: int, columns: Columns) -> list[Edit]:
    """The pages of a slot that the device does not know."""
    first, pages = int(host.num_sent[slot]), host.page_tables[slot, host.num_sent[slot] : host.num_pages[slot]]
    edits = [Edit(slot, columns.page_tables + first, pages.copy())] if len(pages) else []
    return edits if host.windows is None else edits + host.windows.edits(slot, columns)


def _sampling(scheduled: ScheduledStep, host: HostSlots) -> tuple[int, Sampling]:
    """What a step's sequences need, and its draws."""
    slots, draws, bits = scheduled.sequences.slots, scheduled.sequences.num_draws, 0
    for _, sequence, chunk in scheduled.prompts:
        bits |= int(host.flags[chunk.slot]) & (_HOOKED | _ADAPTED)
        if chunk.num_draws:
            past_rules = len(sequence.tokens) - sequence.prompt_len >= host.rules_until[chunk.slot]
            bits |= int(host.flags[chunk.slot]) & (~_OF_RULES if past_rules else -1)
    if going_on := len(slots) - len(scheduled.prompts):
        decoding = slots[:going_on]
        flags = host.flags[decoding]
        of_decoding = int(np.bitwise_or.reduce(flags))
        if of_decoding & _OF_RULES:
            generated = host.lengths[decoding] + host.steps[decoding] - host.prompt_lens[decoding]
            flags = np.where(generated < host.rules_until[decoding], flags, flags & ~_OF_RULES)
            of_decoding = int(np.bitwise_or.reduce(flags))
        bits |= of_decoding
    if not bits & _LOGPROBS:
        return bits, _of_bits(bits)
    return bits, _of_bits(bits)._replace(logprobs=tuple(np.repeat(host.num_top[slots], draws).tolist()))


@lru_cache
def _of_bits(bits: int) -> Sampling:
    filters = tuple(name for name, flag in _OF_FILTER.items() if bits & flag)
    rules, bias, ban, masked, processed = (bool(bits & flag) for flag in (_RULES, _BIAS, _BAN, _MASKED, _PROCESSED))
    return Sampling(not bits & _SAMPLED, filters, rules, bias, ban, masked, processed)


def _needs(sequence: Sequence, vocab: int) -> tuple[int, int, int]:
    """What the draws of a sequence need: `HostSlots.flags`, `num_top`, `rules_until`."""
    s, rules, until = sequence.sampling, sequence.rules, 0
    bits = _MASKED * (sequence.constraint is not None) | _PROCESSED * bool(s.logits_processors)
    bits |= _LOGPROBS * (s.logprobs is not None)
    bits |= _HOOKED * bool(s.steer or (s.capture is not None and s.capture.states))
    bits |= _ADAPTED * (sequence.adapter is not None)
    bits |= _SAMPLED * (fp32_temperature(s) > 0) | sum(_OF_FILTER[name] for name in filters_of(s))
    if rules is not None:
        bits |= _RULES | _BIAS * bool(rules.bias) | _BAN * bool(rules.bad_words or rules.end_ids)
        until = NEVER if rules.lasting else rules.min_tokens
    return bits, num_top(s.logprobs, vocab), until


def num_top(asked: int | None, vocab: int) -> int:
    """How many of the most probable tokens to list; −1: no log-probabilities."""
    return -1 if asked is None else vocab if asked < 0 else min(asked, vocab)


def _admission(sequence: Sequence, cached: int, vocab: int, following: np.ndarray, columns: Columns) -> Edit:
    """A slot's row up to its pages, in the order of `kernels/step/table.py`.

    `following`: the token after those of the step, if it is known.
    """
    s = sequence.sampling
    words = _HEAD.pack(
        cached, 0, sequence.final_len, sequence.prompt_len, sequence.adapter_place, num_top(s.logprobs, vocab),
        *column_values(s), s.seed, sequence.rules is not None, 0,
    )  # fmt: skip
    between = [0] * (columns.page_tables - NEXT_TOKENS - len(following))
    rest = array("i", [*following.tolist(), *between, *sequence.pages.tolist()])
    return Edit(sequence.slot, 0, np.frombuffer(words + rest.tobytes(), np.int32))
