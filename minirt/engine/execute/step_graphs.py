"""`StepGraphs`: steps over static buffers, padded to buckets. On a GPU each is captured as a CUDA graph."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, simplefilter

from minirt.engine.buckets import Bucket, Buckets, drafts_to_propose
from minirt.engine.execute.cuda_graphs import CudaGraphs
from minirt.engine.execute.step_buffers import StepView
from minirt.engine.limits import max_splits
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.modeling.model import Model
from minirt.step.batch import Batch
from minirt.step.plan import PlannedSequences, StepPlan

if TYPE_CHECKING:
    from minirt.engine.execute.runner import Runner

_DRAFTS = "drafts"  # with a bucket, the key of the CUDA graph that proposes drafts after such a step


class StepGraphs:
    """The steps of a runner that have static buffers: `prepare`, the layers and the greedy draw; and the drafts after them.

    Attributes:
        buckets: those that have a CUDA graph; None: no step has.
        captured: the CUDA graphs, by bucket; None: no step has one.
        later: the buckets that warm-up has still to capture.
    """

    def __init__(self, runner: "Runner", buckets: Buckets | None) -> None:
        self._runner, self.buckets = runner, buckets
        self.captured = None if buckets is None else CudaGraphs(runner.device)
        self.later = deque[Bucket]()
        self._static: dict[Bucket, tuple[StepView, Batch]] = {}

    def find_or_capture(self, plan: StepPlan) -> Bucket | None:
        """The bucket of a step, captured if it was not, or a larger one while warm-up captures them; None: the step has no CUDA
        graph."""
        if self.captured is None or self.buckets is None:
            return None
        bucket = self.buckets.find(plan)
        if bucket is not None and plan.hooks is not None:
            bucket = bucket._replace(hooked=True)
        if bucket is not None and plan.adapters:
            bucket = bucket._replace(adapted=True)
        if bucket is None or bucket in self.captured:
            return bucket
        if self.later:
            return min((b for b in self._static if b in self.captured and b.serves(bucket)), key=lambda b: b.cost, default=None)
        self.dry_run(bucket)
        self.capture(bucket)
        return bucket

    def clear(self) -> None:
        """Drop all CUDA graphs. No step can run any more."""
        if self.captured is not None:
            self.captured.clear()

    def replay(self, bucket: Bucket) -> Batch:
        """Queue the CUDA graph of a step, whose message was sent."""
        if self.captured is not None:
            self.captured.replay(bucket)
        return self.static(bucket)[1]

    def replay_drafts(self, bucket: Bucket | None) -> bool:
        """Queue the CUDA graph that proposes drafts after a step of this bucket, if there is one."""
        key = _DRAFTS, bucket
        if bucket is None or self.captured is None or key not in self.captured:
            return False
        self.captured.replay(key)
        return True

    def static(self, bucket: Bucket) -> tuple[StepView, Batch]:
        """The view and the batch, over static buffers, of a bucket."""
        if bucket in self._static:
            return self._static[bucket]
        runner, seqs, rows = self._runner, bucket.seqs, bucket.num_logits
        longest = min(KV_SPLIT, runner.limits.max_model_len) if bucket.short else runner.limits.max_model_len
        view = runner.buffers.view(bucket.num_tokens, seqs, rows, rows)
        query_len = bucket.tokens or (1 + runner.limits.max_drafts if bucket.drafts else 1)
        batch = Batch.of(
            view.tensors, (query_len,) * seqs, (longest,) * seqs, longest, max_splits(seqs, longest, runner.cache.capacity),
            every_row=bucket.one_token, windows=runner.buffers.columns.windows,
        )  # fmt: skip
        batch = runner.with_buffers(batch, rows, hooked=bucket.hooked, adapted=bucket.adapted)
        if self.captured is not None:
            batch = replace(batch, logits=runner.buffers.logits[:rows])
        self._static[bucket] = view, batch
        return view, batch

    def capture(self, bucket: Bucket) -> None:
        """Capture a bucket's CUDA graphs. Their kernels must have been compiled."""
        if self.captured is None:
            return
        runner, (view, batch) = self._runner, self.static(bucket)

        def roots() -> dict[str, Any]:
            held = {"batch": batch, "cache": runner.cache, "model": runner.model, "proposer": runner.proposer, "step": view}
            held["adapters"] = runner.adapters
            return held | runner.buffers.of_graphs()

        def work() -> None:
            self._prepare(bucket, view)
            runner.model(batch, runner.cache)
            self._commit_greedy(view, batch)

        self.captured.capture(bucket, work, roots)
        if (draft := self.proposing(bucket, batch)) is not None:
            self.captured.capture((_DRAFTS, bucket), draft, roots)

    def reserve(self, bucket: Bucket) -> None:
        """Have the memory pool of the CUDA graphs keep what a bucket needs, that is what all smaller ones need."""
        if self.captured is not None:
            from minirt.kernels.compile.ahead_of_time import without_launches

            with without_launches(self._runner.device), catch_warnings():
                simplefilter("ignore")  # PyTorch warns of a CUDA graph without kernels
                self.captured.capture("reserved", partial(self._runner.model, self.static(bucket)[1], self._runner.cache))

    def dry_run(self, bucket: Bucket) -> None:
        """Run one layer of each kind over a static batch, on padding."""
        runner, (view, batch) = self._runner, self.static(bucket)
        runner.buffers.send(StepPlan(PlannedSequences.of(())))
        runner.buffers.sent()
        self._prepare(bucket, view)
        runner.buffers.commit(view, view.tensors.draw_rows)
        if isinstance(runner.model, Model):
            runner.model.dry_run(batch, runner.cache)
        if self.captured is not None:
            self._commit_greedy(view, batch)
        if (draft := self.proposing(bucket, batch)) is not None:
            draft()

    def proposing(self, bucket: Bucket, batch: Batch) -> Callable[[], None] | None:
        """`propose` after a step of this bucket, if CUDA graphs may contain it."""
        runner, proposer = self._runner, self._runner.proposer
        if proposer is None or not getattr(proposer, "capturable", False):
            return None
        wanted = drafts_to_propose(runner.limits.max_drafts, None if bucket.tokens else bucket.drafts, runner.adapts)
        rows = runner.buffers.view(0, bucket.seqs, 0, 0).rows
        return partial(proposer.propose, runner.buffers.table, runner.columns, rows, batch, wanted)

    def keys(self, bucket: Bucket) -> list[object]:
        """The captured graphs of a step of this bucket, and of the drafts after it."""
        return [key for key in (bucket, (_DRAFTS, bucket)) if self.captured is not None and key in self.captured]

    def _prepare(self, bucket: Bucket, view: StepView) -> None:
        """The input of a step, and its rows by adapter."""
        self._runner.buffers.prepare(view, one_token=bucket.one_token)
        if bucket.adapted and self._runner.adapters is not None:
            self._runner.adapters.begin(self._runner.buffers.table, view.tensors)

    def _commit_greedy(self, view: StepView, batch: Batch) -> None:
        """The draw and the commit, if the step is greedy and nothing else needs logits."""
        buffers = self._runner.buffers
        if batch.row_maxima is not None:
            maxima = batch.row_maxima.values
        else:
            maxima = self._runner.sampler.row_maxima(buffers.logits[: len(view.tensors.draw_rows)], buffers.greedy)
        buffers.commit_greedy(view, maxima)
