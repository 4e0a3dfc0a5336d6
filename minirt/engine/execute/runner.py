"""`Runner`: executes step plans: the table of slots, the model or its CUDA graph, the draw, the commit, the copy to the host.

On a GPU nothing here waits: a step is queued behind the previous step, and goes on with the tokens that are in the table then.
The host reads tokens from pinned memory after the event of their copy. On a CPU, a step has ended when `start` returns.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minirt.adapters.rows import StepAdapters
from minirt.device import is_out_of_memory, on_device
from minirt.engine.buckets import Bucket, Buckets, batch_bucket, drafts_to_propose, max_prompt_tokens
from minirt.engine.execute.sampler import Sampler, ScoredRows, unpack
from minirt.engine.execute.step_buffers import StepBuffers, StepSizes, StepView
from minirt.engine.execute.step_graphs import StepGraphs
from minirt.engine.limits import EngineLimits, max_splits
from minirt.engine.proposer import Proposer
from minirt.engine.request import TokenLogprobs
from minirt.hooks.step import CapturedRows, step_hooks
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.kernels.step.table import NUM_NEXT
from minirt.modeling.model import Model
from minirt.step.batch import Batch
from minirt.step.kv_cache import KVCache
from minirt.step.plan import NO_COPIES, StepPlan
from minirt.wording import warn

ModelLike = Callable[[Batch, KVCache], Tensor]


class StepResult(NamedTuple):
    """The result of a step.

    Args:
        counts: [B] how many tokens each sequence of the plan yields: none if no token is drawn from it.
        tokens: [B, 1 + drafts] int32, these tokens. −1, the last one: the logits were NaN or +inf, or only -inf.
        logprobs: for each draw of the plan, the log-probabilities of its token; None: no draw asked. An entry is None if its
            sequence did not ask.
        scored: for each of the plan's `scored`.
        proposed: [B, 2 + drafts] int32, the drafts for the next step (`report` in `kernels/step/table.py`); None: no proposer.
        captured: the states that hooks have copied; None: no request asks.
    """

    counts: np.ndarray
    tokens: np.ndarray
    logprobs: list[TokenLogprobs | None] | None = None
    scored: Sequence[ScoredRows] = ()
    proposed: np.ndarray | None = None
    captured: CapturedRows | None = None

    def lists(self) -> list[list[int]]:
        """The tokens that each sequence yields."""
        return [tokens[:count] for count, tokens in zip(self.counts.tolist(), self.tokens.tolist(), strict=True)]


class Forward(NamedTuple):
    """A step whose logits are computed, or being computed."""

    plan: StepPlan
    view: StepView  # without the padding of a CUDA graph
    logits: Tensor  # [R, V]
    row_maxima: Tensor | None
    batch: Batch
    bucket: Bucket | None  # of its CUDA graph
    committed: bool  # whether the CUDA graph has drawn the tokens, too
    needed: bool  # whether row maxima do not suffice


class StartedStep(NamedTuple):
    """A step that was started."""

    plan: StepPlan
    values: np.ndarray
    proposed: np.ndarray | None
    packed: Tensor | None
    scored: list[ScoredRows]
    captured: CapturedRows | None
    ended: "torch.cuda.Event | None"  # None: the step had ended when it was returned

    def result(self) -> StepResult:
        """Waits for the end of the step, also if it yields no tokens."""
        if self.ended is not None:
            self.ended.synchronize()
        rows = self.values.copy()  # a later step uses the buffer again
        proposed = None if self.proposed is None else self.proposed.copy()
        result = StepResult(rows[:, 0], rows[:, 1:], None, self.scored, proposed, self.captured)
        if self.packed is None:
            return result
        drawn = list[int]()
        for tokens, count in zip(result.lists(), self.plan.sequences.num_draws.tolist(), strict=True):
            drawn += (tokens + [0] * count)[:count]
        return result._replace(logprobs=unpack(self.packed, drawn, self.plan.sampling.logprobs))


class Runner:
    """Runs the steps of one model on one cache, in order.

    Attributes:
        graphs: the steps that have static buffers, and CUDA graphs.
        retries: whether a step may go on with less if memory runs out: not if other ranks would not.
        waits: whether a step waits for the device: always on a CPU, and with drafts if layers are eager, which take lengths from
            the host.

    Args:
        model: `model(batch, cache)` → logits [R, V] fp32.
        cuda_graphs: run small steps as CUDA graphs. Needs a `Model` whose layers can all be captured.
        proposer: proposes drafts. None: there are none.
        adaptive_drafts: whether steps verify only as many drafts as pay, so that no more need to be proposed.
    """

    retries = True

    def __init__(
        self, model: ModelLike, cache: KVCache, device: torch.device, limits: EngineLimits, *, vocab_size: int,
        cuda_graphs: bool = False, proposer: Proposer | None = None, adaptive_drafts: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.cache, self.device, self.vocab_size, self.limits = model, cache, device, vocab_size, limits
        self._cuda, self.proposer, self.adapts = device.type == "cuda", proposer, adaptive_drafts
        self.waits = not self._cuda or (limits.max_drafts > 0 and isinstance(model, Model) and model.uses("eager"))
        self._inference, self._on_device = torch.inference_mode(), on_device(device)  # to be entered by each step
        buckets: Buckets | None = None
        seqs, tokens, tiles, rows = limits.max_num_seqs, limits.max_num_batched_tokens, 0, 0
        draws = limits.max_logits_rows if limits.max_drafts else seqs
        if isinstance(model, Model) and model.uses("triton"):  # buckets import Triton, which other layers do not need
            model.reserve_splits(max_splits(batch_bucket(seqs), limits.max_model_len, cache.capacity))
            if cuda_graphs:
                flops = [layer.flops(1) for layer in model.layers if layer.residual]
                buckets = Buckets(limits, max_prompt_tokens(sum(flops) / max(1, len(flops))), model.adapters is not None)
                seqs, rows = buckets.max_seqs, buckets.max_logits
                tokens, draws = max(tokens, buckets.max_tokens, rows), max(draws, rows)
                tiles = max(model.row_maxima_tiles(n + 1) for n in range(rows))
        self.buffers = StepBuffers(cache, limits, device, vocab_size, StepSizes(seqs, tokens, draws, tiles, rows))
        self.sampler = Sampler(limits, vocab_size, draws, device)
        self.columns = self.buffers.columns  # of the table of slots, which plans edit
        self._taps: Tensor | None = None  # the hidden states of a step, for a draft model
        if isinstance(model, Model) and model.draft_model is not None:
            self._taps = torch.zeros(tokens, model.config.hidden_size, dtype=model.dtype, device=device)
        self.hooks = step_hooks(model, tokens, seqs, device)
        self.adapters: StepAdapters | None = None  # the rows of a step with adapters
        if isinstance(model, Model) and model.adapters is not None:
            most = max(draws, rows, limits.max_logits_rows)
            self.adapters = StepAdapters(model.adapters, tokens, most, device)
        self.graphs = StepGraphs(self, buckets)

    def start(self, plan: StepPlan) -> StartedStep:
        """Queue a step whose draw needs nothing of the host.

        Raises:
            torch.OutOfMemoryError, StepOutOfMemory: no memory for the step's activations, or for the rules of one sequence. Then
                a plan with the same edits can be started.
        """
        with self._inference, self._on_device:
            return self._draw(self._forward(plan))

    def forward(self, plan: StepPlan) -> Forward:
        """Queue the layers of a step whose draw needs tokens. Then write masks to `masks`, and call `draw`.

        Raises as `start` does.
        """
        with self._inference, self._on_device:
            return self._forward(plan)

    def masks(self, count: int) -> Tensor:
        """The host's buffer for the masks of the next draw: [Q, ceil(V / 32)] int32, a row for each of a step's draws."""
        return self.sampler.masks(count)

    def draw(self, forward: Forward, process: Callable[[Tensor], Tensor] | None = None) -> StartedStep:
        """The second half of a step. Raises as `start` does.

        `process`: functions of users, logits of the draws [Q, V] → other logits.
        """
        with self._inference, self._on_device:
            return self._draw(forward, process)

    def _forward(self, plan: StepPlan) -> Forward:
        needs, planned = plan.sampling, plan.sequences
        needed = bool(plan.scored or needs.masked or needs.processed or needs.any_rules or needs.logprobs or not needs.all_greedy)
        if plan.adapters and isinstance(self.model, Model):
            self.model.adapters.load()
        bucket = self.graphs.find_or_capture(plan)
        greedy = not needed and bucket is not None
        self.buffers.send(plan, logits_needed=needed, greedy=greedy)
        if self.hooks is not None and plan.hooks is not None:
            self.hooks.send(plan.hooks)
        if plan.copies is not NO_COPIES:
            self.cache.copy(plan.copies)
        if bucket is not None:
            batch = self.graphs.replay(bucket)
            self.buffers.sent()
            view, logits = self.buffers.view(0, len(planned.slots), 0, planned.total_draws), self.buffers.logits
        else:
            view, batch = self._without_cuda_graph(plan, settings=needed)
            self.buffers.sent()
            logits = self.model(batch, self.cache)
        maxima = None if batch.row_maxima is None else batch.row_maxima.values[: planned.total_logits]
        if plan.rules:
            self.sampler.fill_slots(plan.rules)
        return Forward(plan, view, logits[: planned.total_logits], maxima, batch, bucket, greedy, needed)

    def _without_cuda_graph(self, plan: StepPlan, *, settings: bool = True) -> tuple[StepView, Batch]:
        """The view and the batch of a step without a CUDA graph.

        If the runner has CUDA graphs, the head stores row maxima here too, so that both use one compiled kernel.
        """
        planned = plan.sequences
        tokens, logits, seqs = planned.total_tokens, planned.total_logits, len(planned.slots)
        one_token = tokens == seqs  # of each
        view = self.buffers.view(tokens, seqs, logits, planned.total_draws)
        self.buffers.prepare(view, one_token=one_token, settings=settings)
        step = view.tensors
        lens = step.seq_lens.tolist() if self.waits else planned.seq_lens.tolist()
        counts, every_row = [1] * tokens, one_token and logits == tokens
        if not every_row:
            counts = planned.num_tokens.tolist()
            if self.waits:
                starts = step.query_starts.tolist()
                counts, tokens = [end - start for start, end in pairwise(starts)], starts[-1]
                parts = {name: getattr(step, name)[..., :tokens] for name in ("tokens", "positions", "slot_mapping")}
                step = step._replace(**parts)
            if logits == tokens:  # with next tokens, the device may have fewer, and then rows of logits are not without gaps
                exact = (planned.starts >= 0) | (planned.num_tokens == 1)
                every_row = bool((exact & (planned.num_logits == planned.num_tokens)).all())
        splits = sum([-(-length // KV_SPLIT) for length in lens])
        batch = Batch.of(step, tuple(counts), tuple(lens), max(lens), splits, every_row, self.columns.windows)
        if plan.adapters and self.adapters is not None:
            batch = replace(batch, adapters=self.adapters.begin(self.buffers.table, step))
        return view, self.with_buffers(batch, logits, hooked=plan.hooks is not None)

    def with_buffers(self, batch: Batch, logits: int, *, hooked: bool = False, adapted: bool = False) -> Batch:
        """The batch, with what its layers write to beside their results. `hooked`: a request asks for what hooks do. `adapted`:
        it has adapters, whose rows are in static buffers."""
        if adapted and self.adapters is not None:
            batch = replace(batch, adapters=self.adapters.of(batch.num_tokens, logits))
        if hooked:
            batch = replace(batch, hooks=self.hooks)
        if self._taps is not None:
            batch = replace(batch, taps=self._taps[: batch.num_tokens])
        if self.graphs.captured is None or not isinstance(self.model, Model):
            return batch
        return replace(batch, row_maxima=self.buffers.row_maxima_of(logits, self.model.row_maxima_tiles(logits)))

    def _draw(self, forward: Forward, process: Callable[[Tensor], Tensor] | None = None) -> StartedStep:
        plan, view, logits, row_maxima, batch, bucket, committed, _ = forward
        tensors, scored = view.tensors, list[ScoredRows]()
        captured = self.hooks.take(plan.hooks, batch) if self.hooks is not None and plan.hooks is not None else None
        if plan.scored:
            scored = self.sampler.score(logits, plan)
            logits, row_maxima = logits.index_select(0, tensors.draw_rows), None
        packed, drawn = None, tensors.draw_rows  # no token, if there are no draws
        if not committed:
            if plan.sequences.total_draws:
                drawn, packed = self.sampler.draw(logits, row_maxima, view, plan, self.buffers.drafts, process)
            self.buffers.commit(view, drawn)
        if plan.sampling.any_rules:
            self.sampler.record(drawn, view)
        if self.proposer is not None:
            self._propose(self.proposer, plan, batch, bucket)
            if self.limits.max_drafts:
                self.buffers.report(view)
        result, proposed = self.buffers.to_host(view)
        ended = None
        if self._cuda:  # also if the step has no tokens: the host is at most one step ahead of the device
            ended = torch.cuda.Event()
            ended.record()
        return StartedStep(plan, result, proposed, packed, scored, captured, ended)

    def _propose(self, proposer: Proposer, plan: StepPlan, batch: Batch, bucket: Bucket | None) -> None:
        """Propose drafts for a step's sequences. Their tokens are in the table, so the step cannot be tried again: if memory runs
        out, there are no drafts."""
        try:
            if self.graphs.replay_drafts(bucket):
                return
            wanted = 1  # after chunks in the middle of prompts, no sequence decodes next
            if plan.sequences.total_draws:
                verified = None if len(plan.tokens) else -(-plan.sequences.total_tokens // len(plan.sequences.slots)) - 1
                wanted = drafts_to_propose(self.limits.max_drafts, verified, self.adapts)
            proposer.propose(self.buffers.table, self.columns, self.buffers.view(0, batch.num_seqs, 0, 0).rows, batch, wanted)
        except Exception as error:
            if not self.retries or not is_out_of_memory(error):
                raise
            self.buffers.table[:, NUM_NEXT].clamp_(max=1)  # each sequence goes on with its next token alone
            what, hint = "no memory left for drafts, so a step has none", "lower --kv-cache-memory or --max-num-seqs"
            warn(f"{what} ({hint})", RuntimeWarning)
