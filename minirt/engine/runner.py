"""`Runner`: executes step plans: the table of slots, the model or its CUDA graph, the draw, the commit, the copy to the host.

On a GPU nothing here waits: a step is queued behind the previous step, and goes on with the tokens that are in the table then.
The host reads tokens from pinned memory after the event of their copy. On a CPU, a step has ended when `start` returns.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from minirt.device import is_out_of_memory, on_device
from minirt.engine.buckets import Bucket, Buckets, batch_bucket, draft_sizes, max_prompt_tokens
from minirt.engine.limits import EngineLimits, max_splits
from minirt.engine.logprobs import TokenLogprobs, unpack
from minirt.engine.sampler import sample
from minirt.engine.sampling_stages import SamplingStages, ScoredRows
from minirt.engine.step_buffers import StepBuffers
from minirt.engine.step_times import GraphTimes, PromptTime
from minirt.engine.warmup import largest_steps, warm_up_steps
from minirt.errors import UnsupportedError
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.kernels.sampling.batch import SamplingBatch
from minirt.kernels.step.table import FINAL_LEN, NEXT_TOKENS, NUM_NEXT, PROMPT_LEN, Columns, Rows, StepTensors
from minirt.modeling.model import Model
from minirt.progress import COMPILING
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import KVCache
from minirt.step.plan import NO_COPIES, Copies, Edit, PlannedSequences, StepPlan
from minirt.wording import warn

_MEASURED_TOKENS = 2048  # of a prompt at warm-up
_DRAFTS = "drafts"  # with a bucket, the key of the CUDA graph that proposes drafts after such a step
_REPLAYS = 3  # of each CUDA graph of a decode step, to measure it
ModelLike = Callable[[Batch, KVCache], Tensor]
ProgressCallback = Callable[[str, int, int], None]  # (stage, done, total)


class Proposer(Protocol):
    """Proposes drafts: tokens that may follow a slot's next token. They are verified in the next step.

    `max_drafts`: the most for a slot, up to `kernels.attention.limits.MAX_DRAFTS`. `needs_history`: whether rows of the table
    have all tokens of their sequences. `capturable`, if it has this attribute: whether `propose` may be a part of CUDA graphs,
    which run it again with new values in the same tensors.
    """

    max_drafts: int
    needs_history: bool

    def propose(self, table: Tensor, columns: Columns, rows: Rows, batch: Batch, wanted: int) -> None:
        """After the commit of a step: propose for its sequences, unless NUM_NEXT of their row of the table is 0 (the sequence
        yields no more tokens).

        Write drafts behind the next token (NEXT_TOKENS + 1 …), their number, with the next token, to NUM_NEXT, and to MATCHED a
        positive number if there are any, else 0. Does not wait for the device. `kernels/step/table.py` describes a row.

        `batch` is the step's: sequences in the order of `rows`, and in `taps` the hidden states that the model hands over.
        `wanted`: how many drafts of a sequence the next step may verify, by the step before it, and one size more. At least 1, at
        most `max_drafts`. More drafts are allowed; they take time.
        """


class StepResult(NamedTuple):
    """The result of a step.

    Args:
        counts: [B] how many tokens each sequence of the plan yields: none if no token is drawn from it.
        tokens: [B, 1 + drafts] int32, these tokens. −1, the last one: the logits were NaN or +inf, or only -inf.
        logprobs: for each draw of the plan, the log-probabilities of its token; None: no draw asked. An entry is None if its
            sequence did not ask.
        scored: for each of the plan's `scored`.
        proposed: [B, 2 + drafts] int32, the drafts for the next step (`report` in `kernels/step/table.py`); None: no proposer.
    """

    counts: np.ndarray
    tokens: np.ndarray
    logprobs: list[TokenLogprobs | None] | None = None
    scored: Sequence[ScoredRows] = ()
    proposed: np.ndarray | None = None

    def lists(self) -> list[list[int]]:
        """The tokens that each sequence yields."""
        return [tokens[:count] for count, tokens in zip(self.counts.tolist(), self.tokens.tolist(), strict=True)]


class CudaGraphs:
    """CUDA graphs by key. They share one memory pool, because they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        # The stream for captures. PyTorch's default capture stream belongs to the device that captured first.
        self._stream = torch.cuda.Stream(device)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def capture(self, key: Hashable, work: Callable[[], Any]) -> None:
        """Capture the kernels that `work` launches. They must have been compiled, and use memory that stays."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may use other streams during the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph

    def replay(self, key: Hashable) -> None:
        """Queue a captured graph."""
        self._graphs[key].replay()


class _Forward(NamedTuple):
    """A step whose logits are computed, or being computed."""

    plan: StepPlan
    tensors: StepTensors
    settings: SamplingBatch  # of its draws
    logits: Tensor  # [R, V]
    row_maxima: Tensor | None
    batch: Batch
    bucket: Bucket | None  # of its CUDA graph
    committed: bool  # whether the CUDA graph has drawn the tokens, too


class Step(NamedTuple):
    """A step that was started."""

    plan: StepPlan
    values: np.ndarray
    proposed: np.ndarray | None
    packed: Tensor | None
    scored: list[ScoredRows]
    ended: "torch.cuda.Event | None"  # None: the step had ended when it was returned

    def result(self) -> StepResult:
        """Waits for the end of the step, also if it yields no tokens."""
        if self.ended is not None:
            self.ended.synchronize()
        rows = self.values.copy()  # a later step uses the buffer again
        proposed = None if self.proposed is None else self.proposed.copy()
        result = StepResult(rows[:, 0], rows[:, 1:], None, self.scored, proposed)
        if self.packed is None:
            return result
        drawn = list[int]()
        for tokens, count in zip(result.lists(), self.plan.sequences.num_draws.tolist(), strict=True):
            drawn += (tokens + [0] * count)[:count]
        return result._replace(logprobs=unpack(self.packed, drawn, self.plan.sampling.logprobs))


class Runner:
    """Runs the steps of one model on one cache, in order.

    Args:
        model: `model(batch, cache)` → logits [R, V] fp32.
        cuda_graphs: run small steps as CUDA graphs. Needs a `Model` whose layers can all be captured.
        proposer: proposes drafts. None: there are none.
        adaptive_drafts: whether steps verify only as many drafts as pay, so that no more need to be proposed.

    `waits`: whether a step waits for the device: always on a CPU, and with drafts if layers are eager, which take lengths from
    the host.
    """

    def __init__(
        self, model: ModelLike, cache: KVCache, device: torch.device, limits: EngineLimits, *, vocab_size: int,
        cuda_graphs: bool = False, proposer: Proposer | None = None, adaptive_drafts: bool = False,
    ) -> None:  # fmt: skip
        self._model, self._cache, self._device, self._vocab_size, self._limits = model, cache, device, vocab_size, limits
        self._cuda, self._proposer, self._adapts = device.type == "cuda", proposer, adaptive_drafts
        self.waits = not self._cuda or (limits.max_drafts > 0 and isinstance(model, Model) and model.uses("eager"))
        self._inference, self._on_device = torch.inference_mode(), on_device(device)  # to be entered by each step
        self._graphs: CudaGraphs | None = None
        self.buckets: Buckets | None = None  # of the CUDA graphs
        seqs, tokens, tiles, rows = limits.max_num_seqs, limits.max_num_batched_tokens, 0, 0
        draws = limits.max_logits_rows if limits.max_drafts else seqs
        if isinstance(model, Model) and model.uses("triton"):  # buckets import Triton, which other layers do not need
            model.reserve_splits(max_splits(batch_bucket(seqs), limits.max_model_len, cache.capacity))
            if cuda_graphs:
                flops = [layer.flops(1) for layer in model.layers if layer.residual]
                self._graphs, buckets = CudaGraphs(device), Buckets(limits, max_prompt_tokens(sum(flops) / max(1, len(flops))))
                self.buckets, seqs, rows = buckets, buckets.max_seqs, buckets.max_logits
                tokens, draws = max(tokens, buckets.max_tokens, rows), max(draws, rows)
                tiles = max(model.row_maxima_tiles(n + 1) for n in range(rows))
        self._buffers = StepBuffers(
            cache, limits, device, vocab_size, seqs, tokens, draws, row_maxima_tiles=tiles, logits_rows=rows
        )
        self._stages = SamplingStages(limits, vocab_size, draws, device)
        self.columns = self._buffers.columns  # of the table of slots, which plans edit
        self._taps: Tensor | None = None  # the hidden states of a step, for a draft model
        if isinstance(model, Model) and model.draft_model is not None:
            self._taps = torch.zeros(tokens, model.config.hidden_size, dtype=model.dtype, device=device)
        self._statics: dict[Bucket, tuple[StepTensors, Batch]] = {}
        self.prompt_time: PromptTime | None = None  # after warm-up on a GPU
        self.step_times: GraphTimes | None = None  # after warm-up on a GPU with CUDA graphs and drafts
        self._masked: _Forward | None = None  # the step that waits for its masks

    def start(self, plan: StepPlan) -> Step | None:
        """Queue a step.

        Returns:
            None if its sampling is masked: write the masks to `masks`, then call `draw`.
        Raises:
            torch.OutOfMemoryError, StepOutOfMemory: no memory for the step's activations, or for the rules of one sequence. Then
                a plan with the same edits can be started.
        """
        self._masked = None
        with self._inference, self._on_device:
            forward = self._forward(plan)
            self._stages.fill_slots(plan.rules)
            if not plan.sampling.masked:
                return self._draw(forward)
            self._masked = forward
            return None

    def masks(self, count: int) -> Tensor:
        """The host's buffer for the masks of the step that was started: [Q, ceil(V / 32)] int32, a row for each draw."""
        return self._stages.masks(count)

    def draw(self) -> Step:
        """The second half of a step with masks. Raises as `start` does."""
        forward, self._masked = self._masked, None
        if forward is None:
            raise UnsupportedError("no step waits for masks", where="Runner.draw")
        with self._inference, self._on_device:
            return self._draw(forward)

    def _draw(self, forward: _Forward) -> Step:
        plan, tensors, settings, logits, row_maxima, batch, bucket, committed = forward
        scored = list[ScoredRows]()
        if plan.scored:
            scored = self._stages.score(logits, plan)
            logits, row_maxima = logits.index_select(0, tensors.draw_rows), None
        packed, drawn = None, tensors.draw_rows  # no token, if there are no draws
        if not committed:
            if plan.num_draws:
                drawn, packed = self._stages.draw(logits, row_maxima, tensors, settings, plan, self._buffers.drafts)
            self._buffers.commit(tensors, drawn)
        if plan.sampling.any_rules:
            self._stages.record(drawn, tensors, settings)
        if self._proposer is not None:
            self._propose(self._proposer, plan, batch, bucket)
            if self._limits.max_drafts:
                self._buffers.report(len(tensors.seq_lens))
        result, proposed = self._buffers.to_host(len(plan.sequences))
        ended = None
        if self._cuda:  # also if the step has no tokens: the host is at most one step ahead of the device
            ended = torch.cuda.Event()
            ended.record()
        return Step(plan, result, proposed, packed, scored, ended)

    def _propose(self, proposer: Proposer, plan: StepPlan, batch: Batch, bucket: Bucket | None) -> None:
        """Propose drafts for a step's sequences. Their tokens are in the table, so the step cannot be tried again: if memory runs
        out, there are no drafts."""
        try:
            if bucket is not None and self._graphs is not None and (_DRAFTS, bucket) in self._graphs:
                self._graphs.replay((_DRAFTS, bucket))
            else:
                wanted = 1  # after chunks in the middle of prompts, no sequence decodes next
                if plan.num_draws:
                    prompts = len(plan.tokens) > 0
                    wanted = self._wanted(None if prompts else -(-plan.num_tokens // len(plan.sequences)) - 1)
                proposer.propose(self._buffers.table, self.columns, self._buffers.rows(batch.num_seqs), batch, wanted)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._buffers.table[:, NUM_NEXT].clamp_(max=1)  # each sequence goes on with its next token alone
            what, hint = "no memory left for drafts, so a step has none", "lower --kv-cache-memory or --max-num-seqs"
            warn(f"{what} ({hint})", RuntimeWarning)

    def _forward(self, plan: StepPlan) -> _Forward:
        needs = plan.sampling
        needed = bool(plan.scored or needs.masked or needs.any_rules or needs.logprobs or not needs.all_greedy)
        graphs, bucket = self._graphs, None if self.buckets is None else self.buckets.find(plan)
        if bucket is not None and graphs is not None and bucket not in graphs:
            self.dry_run(bucket)
            self._capture(bucket)
        greedy = not needed and bucket is not None
        self._buffers.send(plan, logits_needed=needed, greedy=greedy)
        if plan.copies is not NO_COPIES:
            self._cache.copy(plan.copies)
        rows = plan.num_logits
        if bucket is not None and graphs is not None:
            batch = self._static(bucket)[1]
            graphs.replay(bucket)
            self._buffers.sent()
            logits = self._buffers.logits
        else:
            batch = self._eager(plan, settings=needed)
            self._buffers.sent()
            logits = self._model(batch, self._cache)
        maxima = None if batch.row_maxima is None else batch.row_maxima.values[:rows]
        drawing = self._buffers.tensors(0, len(plan.sequences), 0, plan.num_draws)  # without the padding of a CUDA graph
        settings = self._buffers.settings(plan.num_draws)
        return _Forward(plan, drawing, settings, logits[:rows], maxima, batch, bucket, greedy)

    def _eager(self, plan: StepPlan, *, settings: bool = True) -> Batch:
        """The batch of a step without a CUDA graph.

        If the runner has CUDA graphs, the head stores row maxima here too, so that both use one compiled kernel.
        """
        planned, tokens, logits = plan.sequences, plan.num_tokens, plan.num_logits
        one_token = tokens == len(planned)  # of each
        step = self._buffers.tensors(tokens, len(planned), logits, plan.num_draws)
        self._buffers.prepare(step, one_token=one_token, settings=settings)
        lens = step.seq_lens.tolist() if self.waits else planned.seq_lens.tolist()
        counts, every_row = [1] * tokens, one_token and logits == tokens
        if not every_row:
            counts = planned.num_tokens.tolist()
            if self.waits:
                starts = step.query_starts.tolist()
                counts, tokens = [end - start for start, end in pairwise(starts)], starts[-1]
                step = step._replace(tokens=step.tokens[:tokens], positions=step.positions[:tokens], slots=step.slots[:tokens])
            if logits == tokens:  # with next tokens, the device may have fewer, and then rows of logits are not without gaps
                exact = (planned.starts >= 0) | (planned.num_tokens == 1)
                every_row = bool((exact & (planned.num_logits == planned.num_tokens)).all())
        splits = sum([-(-length // KV_SPLIT) for length in lens])
        return self._with_buffers(Batch.of(step, tuple(counts), tuple(lens), max(lens), splits, every_row), logits)

    def _with_buffers(self, batch: Batch, logits: int) -> Batch:
        """The batch, with what its layers write to beside their results."""
        if self._taps is not None:
            batch = replace(batch, taps=self._taps[: batch.num_tokens])
        if self._graphs is None or not isinstance(self._model, Model):
            return batch
        return replace(batch, row_maxima=self._buffers.row_maxima_of(logits, self._model.row_maxima_tiles(logits)))

    def _static(self, bucket: Bucket) -> tuple[StepTensors, Batch]:
        """The tensors and the batch, over static buffers, of a bucket's CUDA graph."""
        if bucket in self._statics:
            return self._statics[bucket]
        seqs, tokens, rows = bucket.seqs, bucket.num_tokens, bucket.num_logits
        longest = min(KV_SPLIT, self._limits.max_model_len) if bucket.short else self._limits.max_model_len
        step = self._buffers.tensors(tokens, seqs, rows, rows)
        query_len = bucket.tokens or (1 + self._limits.max_drafts if bucket.drafts else 1)
        batch = Batch.of(
            step, (query_len,) * seqs, (longest,) * seqs, longest, max_splits(seqs, longest, self._cache.capacity),
            every_row=bucket.one_token,
        )  # fmt: skip
        batch = self._with_buffers(batch, rows)
        if self._graphs is not None:
            batch = replace(batch, logits=self._buffers.logits[:rows])
        self._statics[bucket] = step, batch
        return step, batch

    def _capture(self, bucket: Bucket) -> None:
        """Capture a bucket's CUDA graph. Its kernels must have been compiled."""
        step, batch = self._static(bucket)

        def work() -> None:
            self._buffers.prepare(step, one_token=bucket.one_token)
            self._model(batch, self._cache)
            self._commit_greedy(step, batch)

        if self._graphs is not None:
            self._graphs.capture(bucket, work)
            if (draft := self._capturable(bucket, batch)) is not None:
                self._graphs.capture((_DRAFTS, bucket), draft)

    def _commit_greedy(self, step: StepTensors, batch: Batch) -> None:
        """The draw and the commit, if the step is greedy and nothing else needs logits."""
        if batch.row_maxima is not None:
            maxima = batch.row_maxima.values
        else:
            maxima = self._stages.row_maxima(self._buffers.logits[: len(step.draw_rows)], self._buffers.greedy)
        self._buffers.commit_greedy(step, maxima)

    def _capturable(self, bucket: Bucket, batch: Batch) -> Callable[[], None] | None:
        """`propose` after a step of this bucket, if CUDA graphs may contain it."""
        if self._proposer is None or not getattr(self._proposer, "capturable", False):
            return None
        wanted, rows = self._wanted(None if bucket.tokens else bucket.drafts), self._buffers.rows(bucket.seqs)
        return partial(self._proposer.propose, self._buffers.table, self.columns, rows, batch, wanted)

    def _wanted(self, verified: int | None) -> int:
        """Number of drafts to propose after a step that verifies `verified` of each sequence on average: one size more, so that
        the number can grow. None: a step with prompts, after which nothing is known."""
        most = self._limits.max_drafts
        if verified is None or not self._adapts:
            return most
        return next((size for size in draft_sizes(most) if size > verified), most)

    def dry_run(self, bucket: Bucket) -> None:
        """Run one layer of each kind over a static batch, on padding."""
        step, batch = self._static(bucket)
        empty = StepPlan(PlannedSequences.of(()))
        self._buffers.send(empty)
        self._buffers.sent()
        self._buffers.prepare(step, one_token=bucket.one_token)
        self._buffers.commit(step, step.draw_rows)
        if isinstance(self._model, Model):
            self._model.dry_run(batch, self._cache)
        if self._graphs is not None:
            self._commit_greedy(step, batch)
        if (draft := self._capturable(bucket, batch)) is not None:
            draft()

    @torch.inference_mode()
    def warm_up(self, progress: ProgressCallback | None = None) -> None:
        """Compile every kernel that a step can need and capture every CUDA graph. Does nothing on a CPU.

        Dry runs of each kind of step find the kernels. The cache's pages must not be in use. The stages of `progress` are
        COMPILING ("kernels", if Triton's cache has all of them) and "CUDA graphs".
        """
        if not self._cuda or not isinstance(self._model, Model):
            return
        from minirt.kernels.compile.ahead_of_time import compile_ahead

        buckets, report = [] if self.buckets is None else self.buckets.all(), progress or (lambda stage, done, total: None)

        def ready(done: int, total: int, compiles: bool) -> None:
            report(COMPILING if compiles else "kernels", done, total)

        with on_device(self._device):
            with compile_ahead(self._device, ready):
                self.launch_all(self._model)
            for done, bucket in enumerate(buckets, 1):
                self._capture(bucket)
                report("CUDA graphs", done, len(buckets))
            tiles = {self._model.row_maxima_tiles(bucket.num_logits) for bucket in buckets}
            for maxima in (self._buffers.row_maxima_of(1, count) for count in tiles):
                if maxima is not None:
                    self._sample(SamplingBatch.variants(self._device)[0], maxima.values)
            torch.cuda.synchronize(self._device)
            self._reserve(self._model)
            with suppress(torch.OutOfMemoryError):
                self.prompt_time = self._measure_prompts(self._model)
            if self._graphs is not None and self.buckets is not None and self._limits.max_drafts:
                self.step_times = self._measure_graphs(self._graphs, self.buckets)

    def launch_all(self, model: Model) -> None:
        """Launch every kernel that a step of this runner's model can need: dry runs of each kind of step, and the sampler."""
        limits = self._limits
        seqs, longest = limits.max_num_seqs, limits.max_model_len
        steps = warm_up_steps(limits)
        if self.buckets is None:
            # Decode steps with short contexts, and with one of the longest: only that has several KV splits to combine.
            short, long = (Chunk([0], end - 1, range(self._cache.pages_for(end))) for end in (1, longest))
            for size in {batch_bucket(n + 1) for n in range(seqs)}:
                steps += [[first] + [short] * (size - 1) for first in (short, long)]
        for chunks in steps:
            model.dry_run(self.dry_batch(chunks), self._cache)
        for bucket in [Bucket(1), Bucket(1, 1)] if self.buckets is None else self.buckets.all():
            self.dry_run(bucket)
        for settings in SamplingBatch.variants(self._device):
            self._sample(settings)
        self._stages.compile()
        if self._cache.num_snapshots:
            self._cache.copy(Copies(((0, 0),), ((0, 0),)))

    def _reserve(self, model: Model) -> None:
        """Have PyTorch's allocator keep the memory of the largest step.

        Otherwise it would keep blocks of each smaller size, and exceed the memory plan. If there is no memory for that step,
        nothing is kept: a step that runs out of memory is tried again with fewer tokens.
        """
        from minirt.kernels.compile.ahead_of_time import without_launches

        def run(chunks: Sequence[Chunk]) -> int:
            torch.cuda.empty_cache()
            model.dry_run(self.dry_batch(chunks), self._cache)
            return torch.cuda.memory_reserved(self._device)

        with without_launches(self._device), suppress(torch.OutOfMemoryError):
            largest = max(largest_steps(self._limits), key=run)
            run(largest)

    def dry_batch(self, chunks: Sequence[Chunk]) -> Batch:
        """A step's batch, for `Model.dry_run`."""
        batch = Batch.build(chunks, self._cache.page_size).to(self._device)
        return self._with_buffers(batch, len(batch.logits_indices))

    def _measure_prompts(self, model: Model) -> PromptTime:
        """Run a chunk of a prompt, at its beginning and at the end of the longest context. All its pages are page 0.

        With a proposer that runs layers over all tokens, that is a part of the time.
        """
        longest = min(self._limits.max_model_len, self._cache.capacity)
        count = min(_MEASURED_TOKENS, self._limits.max_num_batched_tokens, longest)

        def seconds(start: int) -> float:
            batch = self.dry_batch([Chunk([0] * count, start, [0] * self._cache.pages_for(start + count))])
            draft = self._capturable(Bucket(1, count), batch)
            return self._seconds([partial(model, batch, self._cache), *([] if draft is None else [draft])])

        first, start = seconds(0), longest - count
        context_s = max(0.0, seconds(start) - first) / (count * start) if start else 0.0
        return PromptTime(first / count, context_s)

    def _seconds(self, work: Sequence[Callable[[], Any]], repeats: int = 1) -> float:
        """Seconds of work on the GPU. The first time is not counted."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for number in range(repeats + 1):
            if number == 1:
                events[0].record()
            for launch in work:
                launch()
        events[1].record()
        torch.cuda.synchronize(self._device)
        return events[0].elapsed_time(events[1]) / 1e3 / repeats

    def _measure_graphs(self, graphs: CudaGraphs, buckets: Buckets) -> GraphTimes:
        """Replay the CUDA graphs of each decode step, and of the drafts after it. Attention has no context then.

        All tokens differ, as a mixture reads the experts of all of them. Their pages are page 0.
        """
        seconds = dict[Bucket, float]()
        for bucket in [bucket for bucket in buckets.all() if not bucket.tokens and not bucket.short]:
            self._buffers.send(self._measured_plan(min(bucket.seqs, self._limits.max_num_seqs), 1 + bucket.drafts))
            self._buffers.sent()
            keys = [key for key in (bucket, (_DRAFTS, bucket)) if key in graphs]
            seconds[bucket] = self._seconds([partial(graphs.replay, key) for key in keys], _REPLAYS)
        self._buffers.table.zero_()
        return GraphTimes(buckets, seconds)

    def _measured_plan(self, seqs: int, count: int) -> StepPlan:
        """A step of sequences without a prompt that go on with `count` tokens each, all different. Each replay of a CUDA graph
        applies its edits."""
        tokens = np.random.default_rng(0).integers(self._vocab_size, size=(seqs, count), dtype=np.int32)
        row = np.zeros(NEXT_TOKENS, np.int32)
        row[NUM_NEXT], row[FINAL_LEN], row[PROMPT_LEN] = count, self._limits.max_model_len, 1
        edits = [Edit(slot, 0, row[: PROMPT_LEN + 1]) for slot in range(seqs)]
        edits += [Edit(slot, NEXT_TOKENS, row) for slot, row in enumerate(tokens)]
        return StepPlan(PlannedSequences.of((slot, -1, count, count, count, count) for slot in range(seqs)), edits=tuple(edits))

    def _sample(self, settings: SamplingBatch, row_maxima: Tensor | None = None) -> None:
        logits = torch.zeros(1, self._vocab_size, dtype=torch.float32, device=self._device)
        sample(logits, settings, row_maxima=row_maxima)


def measure_step_bytes(model: Model, limits: EngineLimits, *, cuda_graphs: bool) -> int | None:
    """Bytes that steps need: static buffers, the pool of the CUDA graphs, and the activations of the largest step. None: there is
    not enough free memory.

    The steps run without launching a kernel, and PyTorch's allocator counts. (vLLM profiles a real forward pass for the same
    purpose.) Layers without Triton do run, on one KV page. Layers of a kind run once.

    Args:
        model: with weights, on a GPU.
    """
    from minirt.kernels.compile.ahead_of_time import without_launches

    device = model.device

    def peak(run: Callable[[], None]) -> int:
        start = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - start

    def dry_run(runner: Runner, chunks: Sequence[Chunk]) -> None:
        model.dry_run(runner.dry_batch(chunks), runner._cache)

    with torch.inference_mode(), on_device(device), without_launches(device):
        try:
            before = torch.cuda.memory_allocated(device)
            cache = KVCache(model.cache_specs, 1, device, model.kv_dtype, num_slots=limits.max_num_seqs)
            states = torch.cuda.memory_allocated(device) - before
            runner = Runner(model, cache, device, limits, vocab_size=model.config.vocab_size, cuda_graphs=cuda_graphs)
            steps = largest_steps(limits)
            ends = [[chunk.start + len(chunk.tokens) for chunk in chunks] for chunks in steps]
            model.reserve_splits(max(sum(-(-end // KV_SPLIT) for end in step) for step in ends))
            graph = 0 if runner.buckets is None else peak(partial(runner.dry_run, runner.buckets.all()[0]))  # its memory stays
            needed = graph + max(peak(partial(dry_run, runner, chunks)) for chunks in steps)
            return torch.cuda.memory_allocated(device) - before - states + needed
        except torch.OutOfMemoryError:
            return None
