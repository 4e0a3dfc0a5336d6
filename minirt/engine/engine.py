"""`Engine`: the main loop. Requests of token ids go in, sampled token ids come out, one step at a time.

On a GPU the host runs one step ahead: it queues a step before the tokens of the previous step are known, so the GPU never waits
for Python. The cost: when a request ends at an EOS token or a stop string, one row has been computed for nothing.

`Collector` reads the tokens of a step. `Scheduler` says what the next step computes, `Runner` computes it.
"""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from minirt.device import is_device_failure, is_out_of_memory, peak_memory
from minirt.engine.collect.collector import Collector, Deliver
from minirt.engine.compiling_requests import CompilingRequests
from minirt.engine.execute.runner import ModelLike, Runner, StartedStep
from minirt.engine.execute.sampler import StepOutOfMemory
from minirt.engine.limits import EngineLimits, EngineOptions
from minirt.engine.plan_step import plan_step
from minirt.engine.proposer import Proposer
from minirt.engine.request import DraftStats, EngineStats, Request, TokenOutput
from minirt.engine.request_checks import RequestChecks
from minirt.engine.schedule.prefix_cache import PrefixCacheStats
from minirt.engine.schedule.scheduler import ScheduledStep, Scheduler
from minirt.engine.schedule.step_times import OnlineStepTimes
from minirt.engine.state.sequence import Sequence
from minirt.engine.token_constraints import ConstrainedRows, TokenConstraints
from minirt.errors import (
    DeviceFailedError,
    InputError,
    MinirtError,
    OutOfMemoryError,
    QueueFullError,
    UnsupportedError,
)
from minirt.hooks.processors import ProcessedRows, UserProcessors
from minirt.hooks.step import captured_of
from minirt.progress import LoadProgress
from minirt.step.kv_cache import KVCache

if TYPE_CHECKING:  # it imports Triton's tables, which other layers do not need
    from minirt.engine.warmup.warm_up import WarmUp

_WAIT_S = 0.005  # for compilers, while there are no requests


class DeviceErrors:
    """Context that turns errors of the GPU or its driver into a `DeviceFailedError`, and raises it again at every later use."""

    failure: DeviceFailedError | None = None

    def __enter__(self) -> None:
        if self.failure is not None:
            raise self.failure

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, DeviceFailedError):
            self.failure = error
        elif isinstance(error, Exception) and is_device_failure(error):
            hint = "start a new process; with CUDA_LAUNCH_BLOCKING=1 it names the call that failed"
            self.failure = DeviceFailedError("the GPU failed", found=str(error).strip().splitlines()[0], hint=hint)
            raise self.failure from error


class Engine:
    """Runs many requests at once on one model and one KV cache.

    Attributes:
        checks: of requests, before they are added.
        adapters: `Adapters` of the model; None: requests have none.
        ranks: `Ranks` of the model, the processes that run the same steps; None: there is one.

    Args:
        model: `model(batch, cache)` → logits [R, V]: a `Model`, or any callable with this signature.
        vocab_size: the number of token ids; prompts with other ids are refused.
        constraints: compiles `structured_outputs` of requests. None: such requests are refused.
        proposer: proposes drafts; replaces the limits of drafts in `limits`. None: there are no drafts.
    """

    def __init__(
        self, model: ModelLike, cache: KVCache, limits: EngineLimits, options: EngineOptions | None = None, *,
        vocab_size: int, device: torch.device | str = "cpu", constraints: TokenConstraints | None = None,
        proposer: Proposer | None = None,
    ) -> None:  # fmt: skip
        self._cache, self._vocab_size = cache, vocab_size
        options, device = options or EngineOptions(), torch.device(device)
        if proposer is not None:
            if cache.undoable < 1 + proposer.max_drafts:
                what = "drafts need states that can be taken back"
                expected, undoable = f"{1 + proposer.max_drafts} tokens of a step", f"{cache.undoable} in recurrent layers"
                raise UnsupportedError(what, where="speculative", expected=expected, found=undoable)
            limits = replace(limits, max_drafts=proposer.max_drafts, keeps_history=proposer.needs_history)
        self.adapters: Any = getattr(model, "adapters", None)
        self._scheduler = Scheduler(cache, limits, vocab_size, prefix_cache=options.prefix_cache, adapters=self.adapters)
        self.checks = RequestChecks(vocab_size, self._scheduler, constraints)
        self.ranks: Any = getattr(model, "ranks", None)
        self._runner: Runner = (Runner if self.ranks is None else self.ranks.runner)(
            model, cache, device, replace(limits, max_model_len=self.max_len), vocab_size=vocab_size,
            cuda_graphs=options.cuda_graphs, proposer=proposer, adaptive_drafts=options.adaptive_drafts,
        )  # fmt: skip
        self.checks.hooks, self.checks.alone = self._runner.hooks, self.ranks is None
        self._lookahead = int(not self._runner.waits) if options.lookahead is None else options.lookahead
        self._adaptive_drafts = options.adaptive_drafts
        learns = options.adaptive_drafts and limits.max_drafts and device.type != "cuda"  # a GPU's are measured at warm-up
        self._step_times = OnlineStepTimes() if learns else None
        self._scheduler.use_times(step_times=self._step_times)
        self._in_flight: deque[tuple[StartedStep, ScheduledStep]] = deque()
        self._requests: dict[int, Sequence] = {}
        self._constraints = constraints
        self._compiling = CompilingRequests(constraints)
        self._collector = Collector(self._scheduler, self._requests, constraints, vocab_size)
        self._device_errors = DeviceErrors()
        self._warm_up: WarmUp | None = None
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
        longest = max((sequence.final_len for sequence in self._requests.values()), default=0)
        return self._scheduler.pin(np.array(prompt_token_ids, np.int32), longest)

    @property
    def keeps_states(self) -> bool:
        """Whether the prefix cache keeps states of recurrent layers, and asks for `Request.history_len`."""
        return self._cache.has_states and self._scheduler.prefix_cache is not None

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Counters of the prefix cache; None without one."""
        cache = self._scheduler.prefix_cache
        return None if cache is None else cache.stats

    @property
    def stats(self) -> EngineStats:
        """What is running now, and counters."""
        scheduler, allocator, cached = self._scheduler, self._cache.allocator, self.prefix_cache_stats
        running, drafts = len(scheduler.running), scheduler.draft_lengths
        return EngineStats(
            num_running=running, num_waiting=len(self._requests) - running,
            kv_cache_usage=1 - allocator.num_free / allocator.num_pages, num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=cached.queries if cached else 0, prefix_cache_hits=cached.hits if cached else 0,
            prefix_cache_recomputed=cached.recomputed if cached and self.keeps_states else None,
            generation_tokens=self._collector.num_generated, drafts=DraftStats() if drafts is None else drafts.stats,
            num_graphs_to_capture=0 if self._warm_up is None else self._warm_up.remaining,
            adapter_requests={} if self.adapters is None else self.adapters.request_counts(),
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

    def num_tokens(self, request_id: int) -> int:
        """How many tokens an open request has generated; 0 if it is not open."""
        sequence = self._requests.get(request_id)
        return 0 if sequence is None else len(sequence.tokens) - sequence.prompt_len

    def warm_up(self, progress: LoadProgress | None = None, *, lazy: bool = False) -> None:
        """Compile the kernels and capture the CUDA graphs that steps need; see `WarmUp`. Without this, it happens at first use.

        `lazy`: do a part of it later, between steps, and in `continue_warm_up`.
        """
        from minirt.engine.warmup.warm_up import WarmUp

        warm_up = WarmUp(self._runner, lazy=lazy, progress=progress)
        prompt_time, step_times = warm_up.start()
        self._keep(warm_up)
        self._scheduler.use_times(prompt_time, step_times if self._adaptive_drafts else None)

    @property
    def warming_up(self) -> bool:
        """Whether a part of the warm-up is left."""
        return self._warm_up is not None

    def continue_warm_up(self) -> None:
        """Do a piece of the warm-up that is left, or wait a moment for compilers, while there are no requests."""
        if (warm_up := self._warm_up) is not None:
            with self._device_errors:
                self._go_on(warm_up, partial(warm_up.advance, _WAIT_S))

    def _go_on(self, warm_up: "WarmUp", piece: Callable[[], None]) -> None:
        try:
            piece()
        finally:
            self._keep(warm_up)

    def _keep(self, warm_up: "WarmUp") -> None:
        """Go by what a warm-up has done so far, and keep it if a part is left."""
        self._scheduler.most_tokens = warm_up.most_tokens
        self._warm_up = warm_up if warm_up.remaining else None

    def close(self) -> None:
        """End what runs beside the steps."""
        if self._warm_up is not None:
            self._warm_up.close()
        if self.ranks is not None:
            self._runner.graphs.clear()  # the ranks' connection cannot be closed before what uses it
            self.ranks.close()

    def add(self, request: Request) -> None:
        """Queue a request that has passed `checks`. Requests share no cached prefix with others that edits change differently."""
        if request.sampling.steer:
            salt = f"{request.cache_salt or ''}, {sorted(request.sampling.steer.items())}"
            request = replace(request, cache_salt=salt)
        adapter = problem = None
        try:  # again: it may have been removed since, and a prompt that was pinned since lowers the limit
            if request.sampling.lora is not None:
                adapter = self.adapters.get(request.sampling.lora)
                adapter.requests += 1
                request = replace(request, cache_salt=f"{adapter.salt} {request.cache_salt or ''}")
            self._scheduler.check_length(len(request.prompt_token_ids), min(1, request.sampling.max_tokens))
        except InputError as error:
            problem = error
        captured = captured_of(request.sampling, len(request.prompt_token_ids), self._runner.hooks)
        if captured is not None and captured.logits is not None:
            functions = captured.logits, *request.sampling.logits_processors
            request = replace(request, sampling=request.sampling.with_values(logits_processors=functions))
        sampling, length = request.sampling, len(request.prompt_token_ids)
        ends = {*(() if sampling.ignore_eos else request.eos_token_ids), *sampling.stop_token_ids}
        sequence = Sequence(request, min(self.max_len, length + sampling.max_tokens), tuple(ends), request.rules)
        sequence.captured, sequence.adapter = captured, adapter
        compiles = self._compiling.add(sequence, problem)  # first, so that no exception leaves a request without its constraint
        self._requests[request.id] = sequence
        if compiles:
            self._compiling.announce(request.id)
        else:
            self._scheduler.add(sequence)

    def __contains__(self, request_id: int) -> bool:
        """Whether a request is open: added, and neither ended nor aborted."""
        return request_id in self._requests

    def abort(self, request_id: int, *, failed: bool = False) -> None:
        """Drop a request at any time. Unknown ids are ignored, because the request may just have ended.

        `failed`: what it has computed is of no use to others.
        """
        sequence = self._requests.pop(request_id, None)
        if not self._compiling.remove(request_id) and sequence is not None:
            self._scheduler.remove(sequence, failed=failed)

    def recover(self) -> None:
        """Make the engine consistent again after an exception has left any of its methods, at any line.

        Requests that have started are dropped, and all pages are free again. Requests that were waiting for their first step
        stay.
        """
        self._in_flight.clear()
        for request_id in [i for i, sequence in self._requests.items() if sequence.has_started]:
            del self._requests[request_id]
        self._compiling.keep(self._requests)
        self._scheduler.reset(sequence for i, sequence in self._requests.items() if i not in self._compiling)

    def step(self, deliver: Deliver | None = None) -> list[TokenOutput]:
        """Start the next step, and return the tokens of an earlier step that has ended, if any.

        `deliver` takes the tokens of a step as soon as they are known, before the engine's other work on that step. These are
        not returned.

        A chunk that ends in the middle of a prompt yields no token. If a step runs out of memory, it is tried again with half as
        many tokens. If a step of one token does not fit, its request ends with an error in its output. So does a request whose
        penalties, biases or masks do not fit; then the step is tried again without it.

        Raises:
            DeviceFailedError: the GPU has failed. The engine cannot be used any more.
            Exception: a layer or the engine itself failed. Call `recover` before the next step.
        """
        with self._device_errors:
            outputs = self._add_compiled() if self._compiling else []
            scheduled = self._scheduler.schedule()
            outputs += self._refuse()
            while scheduled is not None and (problem := self._start(scheduled, outputs, deliver)) is not None:
                outputs += self._out_of_memory(scheduled, problem, deliver)
                if problem.slot is None and scheduled.sequences.total_tokens == 1:
                    break
                scheduled = self._scheduler.schedule()
            outputs += self._collect_to(0 if scheduled is None else self._lookahead, deliver)
            if self._compiling and scheduled is None and not outputs:
                self._compiling.wait()
            if (warm_up := self._warm_up) is not None:
                self._go_on(warm_up, partial(warm_up.after_step, len(self._scheduler.running)))
            return outputs

    def _refuse(self) -> list[TokenOutput]:
        """The errors of the requests that are too many to wait."""
        outputs = []
        for sequence in self._scheduler.take_refused():
            most, hint = self.limits.max_waiting, "try again later, or raise --max-waiting"
            expected, before = f"at most {most}", f"{most} that came before"
            full = QueueFullError("too many requests wait", expected=expected, found=before, hint=hint)
            outputs.append(self._fail(sequence.id, full))
        return outputs

    def _out_of_memory(self, scheduled: ScheduledStep, problem: StepOutOfMemory, deliver: Deliver | None) -> list[TokenOutput]:
        """After a step that did not fit: wait for those in flight, which hold memory, and limit the next one, or end the request
        that cannot run. Returns outputs."""
        planned, host = scheduled.sequences, self._scheduler.host
        place = 0 if problem.slot is None else planned.slots.tolist().index(problem.slot)
        current = bool(host.unchanged(planned.slots, scheduled.epochs)[place])  # else it has ended while masks were filled
        blamed = host.sequences[int(planned.slots[place])] if current else None
        self._scheduler.on_failed(scheduled)
        outputs = self._collect_to(0, deliver)
        if problem.slot is None and planned.total_tokens > 1:
            self._scheduler.limit_tokens(planned.total_tokens // 2)
        elif blamed is not None and blamed in self._requests.values():
            what = "a step of one token" if problem.slot is None else "a request's penalties, biases and masks"
            hint = "lower --kv-cache-memory or --max-num-seqs, to leave more for activations"
            error = OutOfMemoryError(f"no memory left for {what}", found=str(problem).strip().partition("\n")[0], hint=hint)
            outputs.append(self._fail(blamed.id, error))
        return outputs

    def _add_compiled(self) -> list[TokenOutput]:
        """Hand requests whose constraints are compiled to the scheduler. Returns the errors of those that failed."""
        outputs = []
        for request_id, constraint in self._compiling.done():
            if isinstance(constraint, MinirtError):
                outputs.append(self._fail(request_id, constraint))
                continue
            sequence = self._requests[request_id]
            sequence.constraint = constraint
            self._compiling.remove(request_id)
            self._scheduler.add(sequence)
        return outputs

    def _start(self, scheduled: ScheduledStep, outputs: list[TokenOutput], deliver: Deliver | None) -> StepOutOfMemory | None:
        """Start a step. Returns None, or a problem if memory runs out; in this case the step has changed nothing.

        If a draw needs tokens, for a constraint or for functions of users, the earlier steps are collected into `outputs` while
        the layers run. A sequence of this very step may end by that.
        """
        began, runner = time.perf_counter(), self._runner
        plan = plan_step(scheduled, self._scheduler.host, runner.columns, self._vocab_size, runner.hooks)
        try:
            if plan.sampling.masked or plan.sampling.processed:
                forward = runner.forward(plan)
                outputs += self._collect_to(0, deliver)
                drawing = self._drawing(scheduled)
                outputs += self._fill_masks(drawing) if plan.sampling.masked else []
                process = _processors(drawing) if plan.sampling.processed else None
                step = runner.draw(forward, process)
                outputs += [] if process is None else [self._fail(failed, error) for failed, error in process.errors.items()]
            else:
                step = runner.start(plan)
        except Exception as error:  # only its text is kept: its traceback refers to the step's activations
            if not isinstance(error, StepOutOfMemory) and not is_out_of_memory(error):
                raise
            return StepOutOfMemory(getattr(error, "slot", None), str(error))
        if self._step_times is not None and not scheduled.prompts and not (plan.sampling.masked or plan.sampling.processed):
            self._step_times.observe(scheduled.sequences.total_tokens, time.perf_counter() - began)
        self._scheduler.on_started(scheduled)
        self._in_flight.append((step, scheduled))
        # Work that the step's launch does not need.
        for _, sequence, _ in scheduled.prompts:
            self._scheduler.extend_keys(sequence)
        if self._device.type == "cuda" and (scheduled.prompts or runner.graphs.captured is None):  # other steps allocate nothing
            self._peak_memory = peak_memory(self._device)
        return None

    def _drawing(self, scheduled: ScheduledStep) -> "list[Drawing]":
        """Who draws in a step whose layers run, in order. Every earlier step has been collected."""
        host, planned, drafts = self._scheduler.host, scheduled.sequences, self._scheduler.draft_lengths
        current, drawing = host.unchanged(planned.slots, scheduled.epochs).tolist(), list[Drawing]()
        for slot, count, same in zip(planned.slots.tolist(), planned.num_draws.tolist(), current, strict=True):
            if count:
                sequence = host.sequences[slot] if same else None
                proposed = () if drafts is None or sequence is None else drafts.of(slot)
                drawing.append(Drawing(sequence, count, proposed))
        return drawing

    def _fill_masks(self, drawing: "Seq[Drawing]") -> list[TokenOutput]:
        """Write the masks of a step's draws. Returns the errors of sequences whose constraints cannot go on."""
        if self._constraints is None:
            return []
        rows = [ConstrainedRows(None if one.sequence is None else one.sequence.constraint, *one[1:]) for one in drawing]
        errors = self._constraints.fill(self._runner.masks(sum(one.num_rows for one in drawing)), rows)
        return [
            self._fail(failed.id, error) for place, error in errors.items() if (failed := drawing[place].sequence) is not None
        ]

    def _collect_to(self, most: int, deliver: Deliver | None) -> list[TokenOutput]:
        """Wait for steps until at most `most` are in flight.

        Returns their outputs, unless `deliver` takes them. Drops the requests that have ended.
        """
        remaining = list[TokenOutput]()
        while len(self._in_flight) > most:
            step, scheduled = self._in_flight.popleft()
            outputs = self._collector.collect(step.result(), scheduled, deliver)
            for output in outputs:
                if output.finish_reason is not None:
                    self.abort(output.request_id, failed=output.error is not None)
            if deliver is None:
                remaining += outputs
        return remaining

    def _fail(self, request_id: int, error: MinirtError) -> TokenOutput:
        self.abort(request_id, failed=True)
        return TokenOutput(request_id, (), "error", error=error)


class Drawing(NamedTuple):
    """Rows of logits from which a step draws tokens of a sequence; None: it has ended since. `drafts`: see `ConstrainedRows`."""

    sequence: Sequence | None
    num_rows: int
    drafts: Seq[int]


def _processors(drawing: Seq[Drawing]) -> UserProcessors:
    """The functions of the requests that have some, for their rows."""
    rows, first = list[ProcessedRows](), 0
    for sequence, count, drafts in drawing:
        if sequence is not None and sequence.sampling.logits_processors:
            functions = sequence.sampling.logits_processors
            rows.append(ProcessedRows(sequence.id, first, sequence.tokens.copy(), drafts[: count - 1], functions))
        first += count
    return UserProcessors(rows)
