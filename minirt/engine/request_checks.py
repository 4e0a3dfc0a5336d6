"""`RequestChecks`: the errors with which an engine refuses a request before it is queued. Any thread may use it."""

from collections.abc import Sequence

from minirt.engine.schedule.scheduler import Scheduler
from minirt.engine.token_constraints import TokenConstraints
from minirt.errors import InputError, UnsupportedError
from minirt.hooks.step import StepHooks
from minirt.sampling_params import MAX_PROMPT_LOGPROBS, EffectiveSampling
from minirt.step.rules import Rules


class RequestChecks:
    """Changes nothing.

    Args:
        vocab_size: the number of token ids.
        scheduler: knows how long requests may be now.
        constraints: compiles `structured_outputs`; None: they are refused.
    """

    def __init__(self, vocab_size: int, scheduler: Scheduler, constraints: TokenConstraints | None) -> None:
        self._vocab_size, self._scheduler, self._constraints = vocab_size, scheduler, constraints
        self.hooks: StepHooks | None = None  # of the model
        self.alone = True  # whether one process runs the steps

    def check(
        self, prompt_token_ids: Sequence[int], sampling: EffectiveSampling | None = None, rules: Rules | None = None,
        compiles: bool = True,
    ) -> None:  # fmt: skip
        """Raise the error with which a request would be refused. Changes nothing, so any thread may call it.

        `compiles`: check `structured_outputs`, too, which may take long. Otherwise an error in it comes as the request's output.

        Raises:
            InputError: the prompt is empty; an id, of the prompt or of a setting, is outside the vocabulary; the settings leave
                no token to draw; the log-probabilities of the prompt would be too many; a grammar is wrong.
            ContextLengthError: the prompt can never fit.
            UnsupportedError: a grammar has a feature that is not supported.
        """
        new = 1 if sampling is None else min(1, sampling.max_tokens)
        self._scheduler.check_length(len(prompt_token_ids), new)  # before its tokens are looked at: it may be very long
        self._check_tokens(prompt_token_ids)
        if sampling is not None:
            scored, listed = len(prompt_token_ids) - 1, sampling.prompt_logprobs or 0
            listed = self._vocab_size if listed < 0 else listed
            if scored * listed > MAX_PROMPT_LOGPROBS:  # the result would take gigabytes of the host's memory
                what, expected = "too many log-probabilities of the prompt", f"at most {MAX_PROMPT_LOGPROBS:,} in one request"
                product = f"{scored:,} tokens × {listed:,} listed for each = {scored * listed:,}"
                hint = "shorten the prompt, list fewer tokens, or use Generator.logits in Python, which returns a tensor"
                raise InputError(what, where="prompt_logprobs", expected=expected, found=product, hint=hint)
            for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
                largest = max(getattr(sampling, name) or (), default=-1)
                if largest >= self._vocab_size:
                    expected = f"ids from 0 to {self._vocab_size - 1}"
                    raise InputError("not a token id of this model", where=name, expected=expected, found=largest)
            if sampling.lora is not None:
                self.check_lora(sampling.lora)
            if not self.alone and (sampling.logits_processors or sampling.capture is not None):
                place = "logits_processors" if sampling.logits_processors else "capture"
                what, hint = "not supported beside --tensor-parallel, whose ranks draw alike", "load the model on one GPU"
                raise UnsupportedError(what, where=place, hint=hint)
            if self.hooks is not None:
                self.hooks.check(sampling)
            elif (sampling.capture is not None and sampling.capture.states) or sampling.steer:
                place, hint = "steer" if sampling.steer else "capture", "load it with capture=[…] or edits={…}"
                raise InputError("the model was loaded without hooks", where=place, hint=hint)
            if (spec := sampling.structured_outputs) is not None:
                if self._constraints is None:
                    raise no_constraints()
                if compiles:
                    self._constraints.compile(spec)
        if rules is not None:
            rules.check_sizes()
        if rules is not None and (rules.bad_words or rules.end_ids):
            largest = max(map(max, rules.bad_words), default=-1)
            if largest >= self._vocab_size:
                what, expected = "the model has no logits for a token of a bad word", f"ids from 0 to {self._vocab_size - 1}"
                raise InputError(what, where="bad_words", expected=expected, found=largest)
            if rules.banned(()).issuperset(range(self._vocab_size) if rules.allowed is None else rules.allowed):
                what = "no token is left to draw: bad_words and min_tokens forbid all that are allowed"
                place = "min_tokens" if rules.end_ids else "bad_words"
                raise InputError(what, where=place, expected="an allowed token that is not forbidden", found="none")

    def check_lora(self, name: str) -> None:
        """Raise InputError if there is no adapter of this name."""
        if self._scheduler.adapters is None:
            hint = f"load it with loras={{{name!r}: folder}}"
            raise InputError("the model was loaded without adapters", where="lora", found=name, hint=hint)
        self._scheduler.adapters.get(name)

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        """Raise InputError unless `tokens` is a non-empty list of token ids of the model."""
        if len(tokens) == 0:
            raise InputError("the prompt is empty", hint="give at least one token")
        if set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < self._vocab_size:
            return
        for position, token in enumerate(tokens):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._vocab_size:
                place, expected = f"prompt token {position}", f"an integer from 0 to {self._vocab_size - 1}"
                raise InputError("not a token id of this model", where=place, expected=expected, found=repr(token))


def no_constraints() -> UnsupportedError:
    place, hint = "structured_outputs", "use a model with a tokenizer"
    return UnsupportedError("a grammar is about text, and there is no tokenizer", where=place, hint=hint)
