"""`Collector`: appends the tokens of a step to its sequences, and makes the outputs for callers.

What is the same for all running sequences is done on the arrays of `HostSlots`. Python handles a sequence by itself when it ends,
or has a reader, a constraint or log-probabilities. The tokens of a sequence that was preempted since are drawn again later.
"""

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from minirt.engine.execute.runner import StepResult
from minirt.engine.request import TokenLogprobs, TokenOutput
from minirt.engine.schedule.scheduler import ScheduledStep, Scheduler
from minirt.engine.state.sequence import Sequence
from minirt.engine.state.slots import Reason
from minirt.engine.token_constraints import ConstrainedRows, TokenConstraints
from minirt.errors import InputError, MinirtError, NumericsError
from minirt.hooks.step import CapturedRows
from minirt.kernels.sampling.reference import unpacked
from minirt.step.plan import PlannedSequences

Deliver = Callable[[list[TokenOutput]], None]
_FINISH_REASONS: dict[int, str | None] = {Reason.RUNS: None, Reason.STOP: "stop", Reason.LENGTH: "length"}


class Collector:
    """Reads the results of an engine's steps, in order.

    Attributes:
        num_generated: tokens, since the engine was made.

    Args:
        scheduler: whose sequences the steps have.
        requests: the open ones, by id; the engine's.
        constraints: of the engine.
        vocab_size: number of token ids.
    """

    def __init__(
        self, scheduler: Scheduler, requests: Mapping[int, Sequence], constraints: TokenConstraints | None, vocab_size: int
    ) -> None:
        self._scheduler, self._requests, self._drafts = scheduler, requests, scheduler.draft_lengths
        self._constraints, self._vocab_size = constraints, vocab_size
        self.num_generated = 0

    def collect(self, result: StepResult, scheduled: ScheduledStep, deliver: Deliver | None) -> list[TokenOutput]:
        """Append a step's tokens to its sequences, and return what callers get.

        `deliver` takes it as soon as it is known. Then the pages that the step has filled are registered in the prefix cache.
        """
        planned, host = scheduled.sequences, self._scheduler.host
        same = host.unchanged(planned.slots, scheduled.epochs)  # else it has ended, or was preempted, since the step was started
        rows = (same & (planned.num_draws > 0)).nonzero()[0]
        drawing, draws, counts, tokens = planned.slots, planned.num_draws, result.counts, result.tokens
        if len(rows) < len(planned.slots):
            drawing, draws, counts, tokens = drawing[rows], draws[rows], counts[rows], tokens[rows]
        if self._drafts is not None and result.proposed is not None:
            self._drafts.compare(drawing, draws, counts, tokens, result.proposed[rows])
        outputs = self._scores(result, scheduled) if result.scored else []
        taken, reasons = host.extend(drawing, counts, tokens, time.perf_counter())
        self.num_generated += sum(taken.tolist())
        if result.captured is not None:
            self._keep_states(result.captured, planned, same, dict(zip(rows.tolist(), taken.tolist(), strict=True)))
        told = (host.watched[drawing] | (reasons != Reason.RUNS)).nonzero()[0]
        if len(told):
            columns = [drawing, rows, taken, reasons, tokens]
            columns = [column[told] for column in columns] if len(told) < len(rows) else columns
            for slot, row, count, reason, new in zip(*[column.tolist() for column in columns], strict=True):
                if (sequence := host.sequences[slot]) is not None:
                    outputs += self._tell(sequence, new[:count], reason, result, scheduled, row)
        if deliver is not None and outputs:  # a thread that waits for them takes as long to wake up as the rest takes here
            deliver(outputs)
        host.mark_read(drawing, draws)
        self._scheduler.register(drawing[reasons != Reason.NO_TOKEN])
        for place, sequence, chunk in scheduled.prompts:
            if not chunk.num_draws and same[place] and sequence.slot >= 0:
                self._scheduler.register_pages(sequence, min(chunk.stop, len(sequence.tokens) - 1))
        return outputs

    def _keep_states(
        self, captured: CapturedRows, planned: PlannedSequences, same: np.ndarray, taken: Mapping[int, int]
    ) -> None:  # fmt: skip
        """Keep the hidden states of a step for its sequences: of next tokens, as many as it has taken."""
        states, slots, starts = captured.on_host(), np.where(same, planned.slots, -1).tolist(), planned.starts.tolist()
        for place, first, count in captured.plan.owners:
            sequence = self._scheduler.host.sequences[slots[place]] if slots[place] >= 0 else None
            if sequence is not None and sequence.captured is not None:
                sequence.captured.add(states, first, count if starts[place] >= 0 else min(count, taken.get(place, 0)))

    def _scores(self, result: StepResult, scheduled: ScheduledStep) -> list[TokenOutput]:
        """Keep a step's log-probabilities and logits of prompts. Returns the outputs of requests that are complete."""
        outputs, rows = list[TokenOutput](), iter(result.scored)
        for _, sequence, chunk in scheduled.prompts:
            if chunk.num_logits == chunk.num_draws:
                continue
            scored = next(rows)
            if self._requests.get(sequence.id) is not sequence:  # it ended or was aborted after this step had started
                continue
            if sequence.scores is not None:
                sequence.scores += scored.logprobs()
            if sequence.logits_only:
                sequence.logits.append(scored.logits())
                if sum(map(len, sequence.logits)) == sequence.prompt_len:
                    logits = torch.cat(sequence.logits)
                    outputs.append(TokenOutput(sequence.id, (), "length", num_cached=sequence.num_cached, logits=logits))
        return outputs

    def _tell(
        self, sequence: Sequence, tokens: list[int], reason: int, result: StepResult, scheduled: ScheduledStep, row: int
    ) -> list[TokenOutput]:
        """The outputs for the caller of a sequence that has taken the tokens of a step."""
        if reason != Reason.RUNS:
            sequence.unused = int(result.counts[row]) - len(tokens)
        if reason == Reason.NO_TOKEN:  # after drafts that were right, their tokens come first, as without drafts
            before = sequence.watched and tokens
            outputs = self._tell(sequence, tokens, Reason.RUNS, result, scheduled, row) if before else []
            error = no_token(sequence, self._constraints, self._vocab_size)  # its constraint says which token was missing
            return [*outputs, TokenOutput(sequence.id, (), "error", error=error)]
        request = sequence.request
        if sequence.constraint is not None and reason == Reason.RUNS:
            sequence.constraint.accept(tokens)
        if result.logprobs is not None and request.sampling.logprobs is not None:
            first = int(scheduled.sequences.num_draws[:row].sum())
            sequence.logprobs += filter(None, result.logprobs[first : first + len(tokens)])
        times: tuple[float, ...] = ()
        if request.final_only:
            if reason == Reason.RUNS:
                return []
            tokens, times = sequence.tokens[sequence.prompt_len :].tolist(), tuple(sequence.times.tolist())
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sequence.logprobs:
            logprobs, sequence.logprobs = tuple(sequence.logprobs), []
        # With the first output of the request only:
        prompt_logprobs = None if sequence.scores is None else tuple(sequence.scores)
        queue_time_s, sequence.queue_time_s, sequence.scores = sequence.queue_time_s, None, None
        drafted, accepted = (0, 0) if self._drafts is None else sequence.num_drafts
        if reason == Reason.STOP:  # right drafts after the token that ends the request are none of its tokens
            accepted -= sequence.unused
        return [TokenOutput(  # by position: with keywords it takes twice as long, for each sequence of a step
            request.id, tuple(tokens), _FINISH_REASONS[reason], None, sequence.num_cached, logprobs, prompt_logprobs,
            queue_time_s, None, times, drafted, accepted,
            None if sequence.captured is None or reason == Reason.RUNS else sequence.captured.result(len(sequence.tokens)),
        )]  # fmt: skip


def no_token(sequence: Sequence, constraints: TokenConstraints | None, vocab: int) -> MinirtError:
    """Why the sampler has drawn no token: the settings of the request leave none, or the logits are unusable.

    Args:
        constraints: of the engine.
        vocab: number of token ids.
    """
    rules = sequence.rules
    generated = sequence.tokens[sequence.prompt_len :].tolist()
    left = set(range(vocab) if rules is None or rules.allowed is None else rules.allowed)
    left -= set() if rules is None else rules.banned(generated)
    if sequence.constraint is not None and constraints is not None:
        mask = torch.zeros(1, -(-vocab // 32), dtype=torch.int32)
        if failed := constraints.fill(mask, [ConstrainedRows(sequence.constraint)]):
            return failed[0]
        left.intersection_update(unpacked(mask, vocab)[0].nonzero().flatten().tolist())
    place = f"generated token {len(generated)}"
    if left:
        remedy = "--check-weights finds damaged weights; --dtype float32 rules out overflow"
        return NumericsError("the logits are NaN or +inf, or only -inf", where=place, hint=remedy)
    masks = ("structured_outputs", "allowed_token_ids", "bad_words", "min_tokens")
    names = [name for name in masks if getattr(sequence.sampling, name)]
    grammar = names[:2] == ["structured_outputs", "allowed_token_ids"]
    hint = "a grammar needs an end-of-sequence token, too" if grammar else None
    expected = f"a token that fits {' and '.join(names)}"
    return InputError("no token is left to draw", where=names[-1], expected=expected, found=f"none for {place}", hint=hint)
