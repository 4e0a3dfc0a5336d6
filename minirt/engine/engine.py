"""`Engine`: the main loop. Requests of token ids go in, sampled token ids come out, one step at a time.

On a GPU the host runs one step ahead: it queues a step before the tokens of the previous step are known, so the GPU never waits
for Python. The cost: when a request ends at an EOS token or a stop string, one row has been computed for nothing.
"""

from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from minirt.device import is_device_failure, is_out_of_memory, peak_memory
from minirt.engine.limits import EngineLimits
from minirt.engine.logits_processors import Rules, unpacked
from minirt.engine.planning import Settings, plan_step
from minirt.engine.prefix_cache import PrefixCacheStats
from minirt.engine.request import EngineStats, Request, TokenLogprobs, TokenOutput
from minirt.engine.runner import ModelLike, ProgressCallback, Proposer, Runner, Step
from minirt.engine.scheduler import Scheduler, Work
from minirt.engine.sequence import Sequence
from minirt.engine.token_constraints import TokenConstraint, TokenConstraints
from minirt.errors import (
    ContextLengthError,
    DeviceFailedError,
    EngineError,
    InputError,
    MinirtError,
    NumericsError,
    OutOfMemoryError,
    QueueFullError,
    UnsupportedError,
)
from minirt.modeling.model import Observer
from minirt.sampling_params import MAX_PROMPT_LOGPROBS, EffectiveSampling, SamplingParams, resolve
from minirt.step.kv_cache import KVCache
from minirt.step.plan import PlannedSequence

Deliver = Callable[[list[TokenOutput]], None]
_COMPILE_WAIT_S = 0.005  # how long a step with nothing else to do waits for a constraint that is being compiled


@dataclass(eq=False)
class _RequestState:
    sequence: Sequence
    sampling: EffectiveSampling
    ends: frozenset[int]
    rules: Rules | None
    prompt_logprobs: list[TokenLogprobs] | None  # until they are returned with the first token
    logits: list[Tensor] | None = None  # of all tokens, if the request asks for them and for nothing else
    constraint: TokenConstraint | None = None


class _InFlight(NamedTuple):
    step: Step
    work: Seq[Work]


class _DeviceErrors:
    """Context that turns errors of the GPU or its driver into a `DeviceFailedError`, and raises it again at every later use."""

    failure: DeviceFailedError | None = None

    def __enter__(self) -> None:
        if self.failure is not None:
            raise self.failure

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, Exception) and is_device_failure(error):
            hint = "start a new process; with CUDA_LAUNCH_BLOCKING=1 it names the call that failed"
            self.failure = DeviceFailedError("the GPU failed", found=str(error).strip().splitlines()[0], hint=hint)
            raise self.failure from error


class Engine:
    """Runs many requests at once on one model and one KV cache.

    Args:
        model: `model(batch, cache)` → logits [R, V]: a `Model`, or any callable with this signature.
        vocab_size: the number of token ids; prompts with other ids are refused.
        prefix_cache: whether requests share KV pages that hold the same beginning.
        cuda_graphs: run small steps as CUDA graphs. Needs a `Model` on a GPU whose layers can all be captured.
        lookahead: number of steps started before the tokens of an earlier step are read, 0 or 1. None: 1 on a GPU, else 0.
        constraints: compiles `structured_outputs` of requests. None: such requests are refused.
        proposer: proposes drafts; `limits.max_drafts` becomes its own. None: there are none.
    """

    def __init__(
        self,
        model: ModelLike,
        cache: KVCache,
        limits: EngineLimits,
        *,
        vocab_size: int,
        device: torch.device | str = "cpu",
        prefix_cache: bool = True,
        cuda_graphs: bool = False,
        lookahead: int | None = None,
        constraints: TokenConstraints | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        self._cache, self._vocab_size = cache, vocab_size
        device = torch.device(device)
        if proposer is not None and cache.has_states:
            raise UnsupportedError("drafts need states that can be taken back, and recurrent layers have none", where="proposer")
        limits = replace(limits, max_drafts=0 if proposer is None else proposer.max_drafts)
        self._scheduler = Scheduler(cache, limits, prefix_cache)
        self._runner = Runner(
            model, cache, device, replace(limits, max_model_len=self.max_len), vocab_size=vocab_size, cuda_graphs=cuda_graphs,
            proposer=proposer,
        )  # fmt: skip
        self._lookahead = int(device.type == "cuda") if lookahead is None else lookahead
        self._in_flight: deque[_InFlight] = deque()
        self._requests: dict[int, _RequestState] = {}
        self._constraints = constraints
        self._compiling: dict[int, Future[TokenConstraint]] = {}  # by request id; not in the scheduler yet
        self._compiled = deque[int]()  # requests in `_compiling` whose constraint is there; other threads append
        self._device_errors = _DeviceErrors()
        self._device = device
        self._peak_memory: int | None = None  # on a GPU; asking takes up to 76 µs, so it is not done when a request ends

    @property
    def max_len(self) -> int:
        """Maximum number of tokens of a request, prompt and generated tokens together."""
        return self._scheduler.max_len

    @property
    def limits(self) -> EngineLimits:
        return self._scheduler.limits

    def pin(self, prompt_token_ids: Seq[int]) -> int:
        """Never evict the cached pages of a prompt. Returns the number of tokens in them. See `Generator.warm_prompt`."""
        longest = max((request.sequence.final_len for request in self._requests.values()), default=0)
        return self._scheduler.pin(array("i", prompt_token_ids), longest)

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Counters of the prefix cache; None without one."""
        cache = self._scheduler.prefix_cache
        return None if cache is None else cache.stats

    @property
    def stats(self) -> EngineStats:
        """What is running now, and counters."""
        scheduler, allocator, cached = self._scheduler, self._cache.allocator, self.prefix_cache_stats
        running = len(scheduler.running)
        return EngineStats(
            running, len(self._requests) - running, 1 - allocator.num_free / allocator.num_pages, scheduler.num_preemptions,
            cached.queries if cached else 0, cached.hits if cached else 0,
        )  # fmt: skip

    def peak_memory(self) -> int:
        """Peak memory in bytes (see `device.peak_memory`), on a GPU until the last step with a prompt. For any thread."""
        return peak_memory(self._device) if self._peak_memory is None else self._peak_memory

    @property
    def failed(self) -> bool:
        """Whether the GPU has failed. If so, the engine cannot be used any more."""
        return self._device_errors.failure is not None

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def warm_up(self, progress: ProgressCallback | None = None) -> None:
        """Compile every kernel and capture every CUDA graph that a step can need. Without this, it happens at first use."""
        self._runner.warm_up(progress)

    def observe(self, observer: Observer | None) -> None:
        """Call `observer(layer, x)` with the input of each layer, from the next step on; see `Generator.observing`."""
        self._runner.observe(observer)

    def replay_times(self, batch_size: int, context_len: int, repeats: int) -> list[float]:
        """Seconds of `repeats` replays of a decode step's CUDA graph; see `Generator.replay_times`.

        The cached values are arbitrary. The sequences have different tokens, so that a mixture uses different experts for them.
        """
        if self.has_work:
            raise EngineError("requests are open", where="replay_times", hint="wait until they have ended")
        if not 1 <= batch_size <= self.limits.max_num_seqs or not 1 <= context_len <= self.max_len:
            expected = f"1 to {self.limits.max_num_seqs} sequences of 1 to {self.max_len} tokens"
            raise InputError("not a step of this engine", where="replay_times", expected=expected,
                             found=f"{batch_size} of {context_len}")  # fmt: skip
        work, allocator = [], self._cache.allocator
        needed = batch_size * self._cache.pages_for(context_len)
        if needed > allocator.num_free:
            raise ContextLengthError("too few KV pages", expected=f"{needed} free pages", found=allocator.num_free)
        greedy = Settings(resolve(SamplingParams(temperature=0.0), None), None)
        try:
            for slot in range(batch_size):
                tokens = array("i", [slot % self._vocab_size]) * context_len
                sequence = Sequence(-1, tokens, 1, context_len, slot=slot, prefill_len=context_len)
                sequence.pages.extend(allocator.allocate(self._cache.pages_for(context_len)))
                work.append(Work(sequence, PlannedSequence(slot, context_len - 1, 1, 1, 1, context_len)))
            plan = plan_step(work, [greedy] * batch_size, self._runner.columns, self._vocab_size)
            with self._device_errors:
                return self._runner.replay_times(plan, repeats)
        finally:
            for sequence, _ in work:
                allocator.release(sequence.pages)

    def check(
        self, prompt_token_ids: Seq[int], sampling: EffectiveSampling | None = None, rules: Rules | None = None,
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
        self.check_tokens(prompt_token_ids)
        if sampling is not None:
            self._check_prompt_logprobs(len(prompt_token_ids), sampling.prompt_logprobs)
            for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
                largest = max(getattr(sampling, name) or (), default=-1)
                if largest >= self._vocab_size:
                    expected = f"ids from 0 to {self._vocab_size - 1}"
                    raise InputError("not a token id of this model", where=name, expected=expected, found=largest)
            if (spec := sampling.structured_outputs) is not None:
                if self._constraints is None:
                    raise _no_constraints()
                if compiles:
                    self._constraints.compile(spec)
        if rules is not None and (rules.bad_words or rules.end_ids):
            largest = max(map(max, rules.bad_words), default=-1)
            if largest >= self._vocab_size:
                what, expected = "the model has no logits for a token of a bad word", f"ids from 0 to {self._vocab_size - 1}"
                raise InputError(what, where="bad_words", expected=expected, found=largest)
            if rules.banned(()).issuperset(range(self._vocab_size) if rules.allowed is None else rules.allowed):
                what = "no token is left to draw: bad_words and min_tokens forbid all that are allowed"
                where = "min_tokens" if rules.end_ids else "bad_words"
                raise InputError(what, where=where, expected="an allowed token that is not forbidden", found="none")

    def _check_prompt_logprobs(self, prompt_len: int, asked: int | None) -> None:
        """Refuse `prompt_logprobs` whose result would take gigabytes of the host's memory."""
        listed, scored = self._vocab_size if asked is not None and asked < 0 else asked or 0, prompt_len - 1
        if scored * listed > MAX_PROMPT_LOGPROBS:
            raise InputError(
                "too many log-probabilities of the prompt",
                where="prompt_logprobs",
                expected=f"at most {MAX_PROMPT_LOGPROBS:,} in one request",
                found=f"{scored:,} tokens × {listed:,} listed for each = {scored * listed:,}",
                hint="shorten the prompt, list fewer tokens, or use Generator.logits, which returns a tensor",
            )

    def add(self, request: Request) -> None:
        """Queue a request whose prompt has passed `check`."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        final_len = min(self.max_len, len(prompt) + sampling.max_tokens)
        sequence = Sequence(
            request.id, array("i", prompt), len(prompt), final_len, request.priority, request.group, salt=request.cache_salt,
            prompt_logprobs=sampling.prompt_logprobs, num_unscored=request.num_unscored, num_scored=request.num_unscored - 1,
            logits_only=request.logits_only, takes_drafts=request.rules is None and sampling.structured_outputs is None,
        )  # fmt: skip
        ends = frozenset(() if sampling.ignore_eos else request.eos_token_ids) | frozenset(sampling.stop_token_ids)
        scores = None if sampling.prompt_logprobs is None else list[TokenLogprobs]()
        if (constraint := self._prepare(len(prompt), sampling, ends)) is not None:
            self._compiling[request.id] = constraint  # first, so that no exception leaves a request without its constraint
        logits = list[Tensor]() if request.logits_only else None
        self._requests[request.id] = _RequestState(sequence, sampling, ends, request.rules, scores, logits)
        if constraint is None:
            self._scheduler.add(sequence)
        else:
            self._announce(request.id, constraint)

    def _prepare(self, prompt_len: int, sampling: EffectiveSampling, ends: frozenset[int]) -> Future[TokenConstraint] | None:
        """The constraint of a new request, or the error with which it ends; None: it has no constraint."""
        try:
            new = min(1, sampling.max_tokens)
            self._scheduler.check_length(prompt_len, new)  # again: a prompt that was pinned since lowers the limit
        except ContextLengthError as error:
            return _failed(error)
        if (spec := sampling.structured_outputs) is None:
            return None
        if self._constraints is None:
            return _failed(_no_constraints())
        return self._constraints.prepare(spec, tuple(ends), sampling.min_tokens)

    def _announce(self, request_id: int, constraint: Future[TokenConstraint]) -> None:
        """Have `_add_compiled` look at a constraint once it is there, so that those that are not cost a step nothing."""
        compiled = self._compiled
        constraint.add_done_callback(lambda _: compiled.append(request_id))

    def __contains__(self, request_id: int) -> bool:
        """Whether a request is open: added, and neither ended nor aborted."""
        return request_id in self._requests

    def abort(self, request_id: int) -> None:
        """Drop a request at any time. Unknown ids are ignored, because the request may just have ended."""
        request, compiling = self._requests.pop(request_id, None), self._compiling.pop(request_id, None)
        if compiling is not None:
            compiling.cancel()
        elif request is not None:
            self._scheduler.remove(request.sequence)

    def recover(self) -> None:
        """Make the engine consistent again after an exception has left any of its methods, at any line.

        Requests that have started are dropped, and all pages are free again. Requests that were waiting for their first step
        stay.
        """
        self._in_flight.clear()
        self._requests = {i: request for i, request in self._requests.items() if not request.sequence.has_started}
        self._compiling = {i: future for i, future in self._compiling.items() if i in self._requests}
        for request_id, constraint in self._compiling.items():
            self._announce(request_id, constraint)
        self._scheduler.reset(request.sequence for i, request in self._requests.items() if i not in self._compiling)

    def step(self, deliver: Deliver | None = None) -> list[TokenOutput]:
        """Start the next step, and return the tokens of an earlier step that has ended, if any.

        `deliver` takes the tokens of a step as soon as they are known, before the engine's own work on that step; then they are
        not returned.

        A chunk that ends in the middle of a prompt yields no token. If a step runs out of memory, it is tried again with half as
        many tokens. If a step of one token does not fit, its request ends with an error in its output.

        Raises:
            DeviceFailedError: the GPU has failed. The engine cannot be used any more.
            Exception: a layer or the engine itself failed. Call `recover` before the next step.
        """
        with self._device_errors:
            outputs = self._add_compiled() if self._compiled else []
            work = self._scheduler.schedule()
            outputs += [self._fail(sequence.id, self._queue_full()) for sequence in self._scheduler.refused()]
            while work and (problem := self._start(work, outputs, deliver)) is not None:
                while self._in_flight:  # they hold memory; and a preempted sequence must not run again with a pending token
                    outputs += self._collect(self._in_flight.popleft(), deliver)
                tokens = sum(planned.num_tokens for _, planned in work)
                if tokens == 1:
                    failure = _out_of_memory("a step of one token", problem)
                    outputs += [self._fail(sequence.id, failure) for sequence, _ in work if sequence.id in self]
                    break
                self._scheduler.limit_tokens(tokens // 2)
                work = self._scheduler.schedule()
            while self._in_flight and (len(self._in_flight) > self._lookahead or not work):
                outputs += self._collect(self._in_flight.popleft(), deliver)
            if self._compiling and not work and not outputs:
                wait(self._compiling.values(), _COMPILE_WAIT_S, FIRST_COMPLETED)
            return outputs

    def _add_compiled(self) -> list[TokenOutput]:
        """Hand requests whose constraints are compiled to the scheduler. Returns the errors of those that failed."""
        outputs = []
        while self._compiled:
            request_id = self._compiled[0]
            if (future := self._compiling.get(request_id)) is None:  # it was aborted, or announced twice
                pass
            elif (error := future.exception()) is None:
                request = self._requests[request_id]
                request.constraint = future.result()
                del self._compiling[request_id]
                self._scheduler.add(request.sequence)
            elif isinstance(error, MinirtError):
                outputs.append(self._fail(request_id, error))
            else:
                outputs.append(self._fail(request_id, EngineError(f"a grammar could not be compiled: {error!r}")))
            self._compiled.popleft()  # last, so that an exception above loses no request
        return outputs

    def _start(self, work: list[Work], outputs: list[TokenOutput], deliver: Deliver | None) -> str | None:
        """Start a step. Returns None, or the allocator's message if memory runs out; in this case the step has changed nothing.

        If a token is drawn under a constraint, the earlier steps are collected into `outputs` while the forward pass runs.
        """
        requests = [self._requests[sequence.id] for sequence, _ in work]
        settings = [_settings(request) for request in requests]
        plan = plan_step(work, settings, self._runner.columns, self._vocab_size)
        try:
            step = self._runner.start(plan)
            if step is None:
                drawn = [r for r, (_, planned) in zip(requests, work, strict=True) for _ in range(planned.num_draws)]
                self._fill_masks(drawn, outputs, deliver)
                step = self._runner.draw()
        except Exception as error:  # only its text is kept: its traceback refers to the step's activations
            if not is_out_of_memory(error):
                raise
            return str(error)
        self._scheduler.started(work)
        self._in_flight.append(_InFlight(step, work))
        self._scheduler.relax_limit()
        self._while_it_runs([sequence for sequence, planned in work if planned.num_tokens > 1 and planned.start >= 0])
        return None

    def _while_it_runs(self, prompts: Seq[Sequence]) -> None:
        """Work that a step's launch does not need. `prompts`: the sequences of whose prompts the step computes a part."""
        for sequence in prompts:
            self._scheduler.extend_keys(sequence)
        if self._device.type == "cuda" and (prompts or not self._runner.cuda_graphs):  # other steps allocate nothing
            self._peak_memory = peak_memory(self._device)

    def _fill_masks(self, requests: Seq[_RequestState], outputs: list[TokenOutput], deliver: Deliver | None) -> None:
        """Write the masks of a step whose forward pass was started, for the request of each draw. They need the tokens of the
        step before."""
        while self._in_flight:
            outputs += self._collect(self._in_flight.popleft(), deliver)
        masks = self._runner.masks(len(requests))
        constraints = [r.constraint if r.sequence.id in self._requests else None for r in requests]
        if self._constraints is not None:
            for row, error in self._constraints.fill(masks, constraints).items():
                outputs.append(self._fail(requests[row].sequence.id, error))

    def _collect(self, ended: _InFlight, deliver: Deliver | None) -> list[TokenOutput]:
        """Wait for a step and return its outputs, unless `deliver` takes them.

        Then registers the pages that it has filled in the prefix cache, and drops the requests that have ended.
        """
        outputs, ends, result = [], {}, ended.step.result()
        rows, first = iter(result.scored), 0
        for item, tokens in zip(ended.work, result.tokens, strict=True):
            sequence, planned = item
            scored = next(rows) if item.num_scored else None
            logprobs = (result.logprobs or ())[first : first + planned.num_draws]
            first += planned.num_draws
            request = self._requests.get(sequence.id)
            if request is None or request.sequence is not sequence:  # it ended or was aborted after this step had started
                continue
            if scored is not None and request.prompt_logprobs is not None:
                request.prompt_logprobs += scored.logprobs()
            if scored is not None and request.logits is not None:
                request.logits.append(scored.logits())
            if planned.num_draws:
                ends[sequence.id] = self._extend(request, tokens, [row for row in logprobs if row is not None])
                self._scheduler.read(sequence, planned.num_draws)
                outputs.append(ends[sequence.id])
            elif request.logits is not None and sum(map(len, request.logits)) == sequence.prompt_len:
                logits = torch.cat(request.logits)
                outputs.append(TokenOutput(sequence.id, (), "length", num_cached=sequence.num_cached, logits=logits))
        if deliver is not None:  # a thread that waits for them takes as long to wake up as the rest takes here
            deliver(outputs)
        for sequence, planned in ended.work:
            output = ends.get(sequence.id)
            if output is None or output.error is None:
                computed = len(sequence.tokens) - 1 if planned.num_draws else planned.start + planned.num_tokens
                self._scheduler.register(sequence, min(computed, len(sequence.tokens) - 1))
        for output in outputs:
            if output.finish_reason is not None:
                self.abort(output.request_id)
        return outputs if deliver is None else []

    def _extend(self, request: _RequestState, tokens: Seq[int], logprobs: Seq[TokenLogprobs]) -> TokenOutput:
        """Append new tokens to a request, up to the one that ends it."""
        sequence, ends, count = request.sequence, None, 0
        known = sequence.tokens
        for token in tokens:
            if token < 0:  # the sampler returns −1 for unusable logits
                return TokenOutput(sequence.id, (), "error", self._no_token(request))
            if len(known) >= sequence.final_len:  # max_tokens is 0: the step has drawn a token all the same
                ends = "length"
                break
            known.append(token)
            count += 1
            ends = "stop" if token in request.ends else "length" if len(known) >= sequence.final_len else None
            if ends is not None:
                break
        if request.constraint is not None and ends is None:
            request.constraint.accept(tokens[:count])
        output = TokenOutput(sequence.id, tuple(tokens[:count]), ends, None, sequence.num_cached, tuple(logprobs[:count]))
        if sequence.queue_time_s is None:
            return output
        # The first output of the request, and the only one with these.
        scores, request.prompt_logprobs = request.prompt_logprobs, None
        queue_time_s, sequence.queue_time_s = sequence.queue_time_s, None
        return output._replace(prompt_logprobs=None if scores is None else tuple(scores), queue_time_s=queue_time_s)

    def _no_token(self, request: _RequestState) -> InputError | NumericsError:
        """Why the sampler has drawn no token: the settings of the request leave none, or the logits are unusable."""
        sequence, rules, vocab = request.sequence, request.rules, self._vocab_size
        generated = sequence.tokens[sequence.prompt_len :]
        left = set(range(vocab) if rules is None or rules.allowed is None else rules.allowed)
        left -= set() if rules is None else rules.banned(generated)
        if request.constraint is not None and self._constraints is not None:
            mask = torch.zeros(1, -(-vocab // 32), dtype=torch.int32)
            self._constraints.fill(mask, [request.constraint])
            left.intersection_update(unpacked(mask, vocab)[0].nonzero().flatten().tolist())
        place = f"generated token {len(generated)}"
        if left:
            remedy = "--check-weights finds damaged weights; --dtype float32 rules out overflow"
            return NumericsError("the logits are NaN or +inf, or only -inf", where=place, hint=remedy)
        masks = ("structured_outputs", "allowed_token_ids", "bad_words", "min_tokens")
        names = [name for name in masks if getattr(request.sampling, name)]
        grammar = names[:2] == ["structured_outputs", "allowed_token_ids"]
        hint = "a grammar needs an end-of-sequence token, too" if grammar else None
        expected, found = f"a token that fits {' and '.join(names)}", f"none for {place}"
        return InputError("no token is left to draw", where=names[-1], expected=expected, found=found, hint=hint)

    def _queue_full(self) -> QueueFullError:
        limit = self.limits.max_waiting
        what, found = "too many requests wait", f"{limit} that came before"
        return QueueFullError(what, expected=f"at most {limit}", found=found, hint="try again later, or raise --max-waiting")

    def _fail(self, request_id: int, error: MinirtError) -> TokenOutput:
        self.abort(request_id)
        return TokenOutput(request_id, (), "error", error)

    def check_logits(self, tokens: Seq[int]) -> None:
        """Raise InputError or ContextLengthError if `logits` can never compute these tokens. Any thread may call it."""
        self.check_tokens(tokens)
        if len(tokens) > self.max_len:
            raise ContextLengthError("too many tokens", expected=f"at most {self.max_len}", found=len(tokens))

    def check_tokens(self, tokens: Seq[int]) -> None:
        """Raise InputError unless `tokens` is a non-empty list of token ids of the model."""
        if len(tokens) == 0:
            raise InputError("the prompt is empty", hint="give at least one token")
        if set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < self._vocab_size:
            return
        for position, token in enumerate(tokens):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self._vocab_size:
                raise InputError(
                    "not a token id of this model",
                    where=f"prompt token {position}",
                    expected=f"an integer from 0 to {self._vocab_size - 1}",
                    found=repr(token),
                )


def _settings(request: _RequestState) -> Settings:
    """What its next draw needs: without rules that change no logits any more."""
    rules, sequence = request.rules, request.sequence
    if rules is not None and sequence.num_sent >= 0 and not rules.apply(sequence.least_len - sequence.prompt_len):
        rules = None
    return Settings(request.sampling, rules, request.constraint is not None)


def _failed(error: MinirtError) -> Future[TokenConstraint]:
    future: Future[TokenConstraint] = Future()
    future.set_exception(error)
    return future


def _no_constraints() -> UnsupportedError:
    where, hint = "structured_outputs", "use a model with a tokenizer"
    return UnsupportedError("a grammar is about text, and there is no tokenizer", where=where, hint=hint)


def _out_of_memory(what: str, problem: str) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"no memory left for {what}",
        found=problem.strip().partition("\n")[0],
        hint="lower --kv-cache-memory or --max-num-seqs, to leave more for activations",
    )
