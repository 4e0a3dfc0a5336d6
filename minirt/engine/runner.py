"""`Runner`: a step on the device: input buffers, the model or its CUDA graph, the sampler, and the copy of tokens to the host.

On a GPU nothing here waits, except `fill`: a step is queued behind the previous step and reads that step's tokens on the device.
The host reads tokens from pinned memory after the event of their copy. On a CPU, a step has ended when `start` returns.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from minirt.device import on_device
from minirt.engine.buckets import Bucket, Buckets, batch_bucket, max_prompt_tokens, max_splits
from minirt.engine.cuda_graphs import StepGraphs
from minirt.engine.kv_cache import KVCache
from minirt.engine.logprobs import TokenLogprobs
from minirt.engine.sampler import SamplingBatch, sample
from minirt.engine.sampling_stages import Drawn, FillMasks, Row, SamplingStages, Scored
from minirt.engine.step_buffers import StepBuffers
from minirt.engine.step_input import Batch, Chunk, Ranges
from minirt.engine.warmup import largest_steps, sampling_kinds, warm_up_steps
from minirt.errors import ContextLengthError, UnsupportedError
from minirt.modeling.model import Model, Observer
from minirt.progress import COMPILING
from minirt.sampling_params import SamplingParams, resolve

ModelLike = Callable[[Batch, KVCache], Tensor]
ProgressCallback = Callable[[str, int, int], None]  # (stage, done, total)


class Scores(NamedTuple):
    """The outputs of a step for the rows that need logits.

    `logits` [R, V] fp32. `row_maxima` [R, P] int64: the largest logit of each tile of a row; None if the head stores none.

    Row maxima, and the logits of a CUDA graph, are views of static buffers, which the next step overwrites. If the head stores
    row maxima and all rows are greedy, `logits` holds a previous step's values.
    """

    logits: Tensor
    row_maxima: Tensor | None


class _Static(NamedTuple):
    """The objects that steps with CUDA graphs need. A runner has all of them or none."""

    model: Model
    buffers: StepBuffers
    graphs: StepGraphs


class StepResult(NamedTuple):
    """The result of a step, for each of its chunks that needed logits, in order.

    Args:
        tokens: new tokens, one or more. −1: the logits were NaN or +inf, or only -inf.
        drafts: proposed tokens after these, which the next step verifies; None: the runner proposes none. With drafts, the engine
            must not look ahead.
        logprobs: the log-probabilities of these tokens; None if no chunk asked. An entry is None if its chunk did not ask.
        prompt_logprobs: for each chunk with `targets`, in order, their log-probabilities.
    """

    tokens: list[list[int]]
    drafts: list[list[int]] | None = None
    logprobs: "list[list[TokenLogprobs] | None] | None" = None
    prompt_logprobs: "Sequence[list[TokenLogprobs]]" = ()


@dataclass(frozen=True)
class Step:
    """A step that was started."""

    _drawn: Drawn
    _scored: list[Scored]
    _ended: "torch.cuda.Event | None" = None  # None: the step had ended when it was returned

    def result(self) -> StepResult:
        """Waits for the end of the step, also if no chunk needed logits."""
        if self._ended is not None:
            self._ended.synchronize()
        logprobs = self._drawn.logprobs()
        return StepResult(
            [[token] for token in self._drawn.tokens.tolist()],
            logprobs=None if logprobs is None else [None if row is None else [row] for row in logprobs],
            prompt_logprobs=[scored.logprobs() for scored in self._scored],
        )


class Runner:
    """Runs the steps of one model on one cache, in order.

    Args:
        model: `model(batch, cache)` → logits [R, V] fp32.
        cuda_graphs: run small steps as CUDA graphs. Needs a `Model` whose layers can all be captured.
    """

    def __init__(
        self,
        model: ModelLike,
        cache: KVCache,
        device: torch.device,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_seq_len: int,
        max_num_batched_tokens: int,
        cuda_graphs: bool,
    ) -> None:
        self._model, self._cache, self._device, self._vocab_size = model, cache, device, vocab_size
        self._max_seq_len, self._buckets = max_seq_len, _buckets(model, max_num_seqs, max_num_batched_tokens)
        self._previous = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._static: _Static | None = None
        self._cuda = device.type == "cuda"
        self._ranges = Ranges(cache.capacity if self._cuda else 0)
        self._observer: Observer | None = None
        self._inference, self._on_device = torch.inference_mode(), on_device(device)  # to be entered by each step
        self._stages = SamplingStages(self._previous, vocab_size, max_seq_len)
        if isinstance(model, Model) and model.uses_triton:  # buckets import Triton, which other layers do not need
            model.reserve_splits(max_splits(batch_bucket(max_num_seqs), max_seq_len, cache.capacity))
            if cuda_graphs:
                sizes = {"max_seq_len": max_seq_len, "vocab_size": vocab_size}
                buffers = StepBuffers(model, cache, self._buckets, self._previous, self._ranges, **sizes)
                self._static = _Static(model, buffers, StepGraphs(model, cache))

    @property
    def cuda_graphs(self) -> bool:
        """Whether small steps run as CUDA graphs."""
        return self._static is not None

    def observe(self, observer: Observer | None) -> None:
        """Call `observer(layer, x)` with the input of each layer, from the next step on, without CUDA graphs; None: no longer."""
        self._observer = observer

    def start(self, chunks: Sequence[Chunk], rows: Sequence[Row], fill: FillMasks | None = None) -> Step:
        """Queue a step.

        Args:
            rows: an entry for each chunk from which a token is drawn: one with `num_sampled` 1, not 0.
            fill: writes the masks of the rows, [B, ceil(V / 32)] int32 on the CPU. Called once, after the forward pass is queued
                and before the sampler is, so that it may wait for earlier steps. None: there are no masks.
        Raises:
            torch.OutOfMemoryError: no memory for the step's activations. In this case nothing has changed.
        """
        with self._inference, self._on_device:
            return self._start(chunks, rows, fill)

    def _start(self, chunks: Sequence[Chunk], rows: Sequence[Row], fill: FillMasks | None) -> Step:
        scores = any(chunk.targets for chunk in chunks)
        needed = scores or fill is not None or any(r.sampling.temperature > 0 or r.rules or r.num_top is not None for r in rows)
        logits, row_maxima = self._scores(chunks, needed)
        scored = list[Scored]()
        if scores:
            scored = self._stages.score(logits, chunks)
            logits, row_maxima = self._stages.sampled_rows(logits, chunks), None
        drawn = self._stages.draw(logits, row_maxima, rows, fill) if rows else Drawn(torch.empty(0, dtype=torch.int64))
        if not self._cuda:
            return Step(drawn, scored)
        ended = torch.cuda.Event()  # even if the step has no tokens: the host is one step ahead of the device, never more
        ended.record()
        return Step(drawn, scored, ended)

    def _scores(self, chunks: Sequence[Chunk], logits_needed: bool) -> Scores:
        static, bucket = self._static, None if self._static is None else self._buckets.find(chunks)
        if self._observer is not None and isinstance(self._model, Model):
            batch = self._batch(chunks)
            logits = self._model(batch, self._cache, self._observer)
            rows = logits.shape[0]
        elif static is not None and bucket is not None:
            batch = static.graphs.batch(bucket) or self._capture(static, bucket)
            static.buffers.send(batch.layout, chunks, logits_needed=logits_needed)
            static.graphs.replay(bucket)
            static.buffers.sent()
            logits, rows = static.buffers.logits, sum(c.num_logits for c in chunks)
        else:
            batch = self._batch(chunks)
            logits = self._model(batch, self._cache)
            rows = logits.shape[0]
        return Scores(logits[:rows], None if batch.row_maxima is None else batch.row_maxima.values[:rows])

    def _batch(self, chunks: Sequence[Chunk]) -> Batch:
        """The batch for a step without a CUDA graph.

        If the runner has CUDA graphs, the head stores row maxima here too, so that both use one compiled kernel.
        """
        batch = Batch.build(chunks, self._cache.page_size, pinned=self._cuda, ranges=self._ranges).after(self._previous)
        return batch if self._static is None else self._static.buffers.with_row_maxima(batch.to(self._device))

    def _capture(self, static: _Static, bucket: Bucket, *, compiled: bool = False) -> Batch:
        """Capture a bucket's CUDA graph, after a dry run that compiles its kernels, unless `compiled`. Returns its batch."""
        batch = static.buffers.batch(bucket)
        if not compiled:
            self._dry_run(static, batch)
        return static.graphs.capture(bucket, batch)

    def _dry_run(self, static: _Static, batch: Batch) -> None:
        """Run one layer of each kind over a static batch, on padding."""
        from minirt.kernels.block_tables import expand_block_tables

        static.buffers.send(batch.layout, [])
        static.buffers.sent()
        expand_block_tables(batch.pages, batch.page_starts, batch.block_tables, check=False)
        static.model.dry_run(batch, self._cache)

    @torch.inference_mode()
    def warm_up(self, progress: ProgressCallback | None = None) -> None:
        """Compile every kernel that a step can need and capture every CUDA graph. Does nothing on a CPU.

        Dry runs of each kind of step find the kernels. The cache's pages must not be in use. The stages of `progress` are
        COMPILING ("kernels", if Triton's cache has all of them) and "CUDA graphs".
        """
        if not self._cuda or not isinstance(self._model, Model):
            return
        from minirt.kernels.compile.ahead_of_time import compile_ahead

        static = self._static
        buckets = [] if static is None else self._buckets.all()

        def ready(done: int, total: int, compiles: bool) -> None:
            if progress is not None:
                progress(COMPILING if compiles else "kernels", done, total)

        with on_device(self._device):
            with compile_ahead(self._device, ready):
                self.launch_all(self._model)
            if static is not None:
                for done, bucket in enumerate(buckets, 1):
                    self._capture(static, bucket, compiled=True)
                    if progress is not None:
                        progress("CUDA graphs", done, len(buckets))
                stored = [batch.row_maxima.values for batch in static.graphs.batches if batch.row_maxima is not None]
                for row_maxima in {values.shape[1]: values[:1] for values in stored}.values():
                    self._sample(SamplingParams(temperature=0.0), row_maxima)
            torch.cuda.synchronize(self._device)
            self._reserve(self._model)

    def launch_all(self, model: Model) -> None:
        """Launch every kernel that a step of this runner's model can need: dry runs of each kind of step, and the sampler."""
        seqs, static = self._buckets.max_num_seqs, self._static
        steps = warm_up_steps(self._buckets.max_num_batched_tokens, self._max_seq_len, seqs)
        if static is None:
            # Decode steps with a short and with the longest context: only the second combines KV splits.
            last = self._max_seq_len - 1
            contexts = [Chunk([0], start, range(self._cache.pages_for(start + 1))) for start in {0, last}]
            steps += [[chunk] * size for size in {batch_bucket(n + 1) for n in range(seqs)} for chunk in contexts]
        for chunks in steps:
            self._run_dry(model, chunks)
        if static is not None:
            for bucket in self._buckets.all():
                self._dry_run(static, static.buffers.batch(bucket))
        for params in sampling_kinds():
            self._sample(params)
        self._stages.compile()

    def _reserve(self, model: Model) -> None:
        """Have PyTorch's allocator keep the memory of the largest step.

        Otherwise it would keep blocks of every size that steps ask for, until a larger one comes, and take more than was planned.
        If there is no memory for that step, nothing is kept: a step that runs out of memory is tried again with fewer tokens.
        """
        from minirt.kernels.compile.ahead_of_time import without_launches

        def run(chunks: Sequence[Chunk]) -> int:
            torch.cuda.empty_cache()
            self._run_dry(model, chunks)
            return torch.cuda.memory_reserved(self._device)

        steps = largest_steps(self._buckets.max_num_batched_tokens, self._max_seq_len, self._buckets.max_num_seqs)
        with without_launches(self._device), suppress(torch.OutOfMemoryError):
            largest = max(steps, key=run)
            run(largest)

    @torch.inference_mode()
    def dry_run_bytes(self, steps: Sequence[Sequence[Chunk]]) -> int:
        """Peak of the bytes that dry runs allocate: of the largest CUDA graph, whose memory stays, and of the largest of `steps`.

        Layers of a kind run once, so kernels should be kept from running (`without_launches`).
        """

        def peak(run: Callable[[], None]) -> int:
            before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            run()
            return torch.cuda.max_memory_allocated(self._device) - before

        model, static, graph = self._model, self._static, 0
        if not isinstance(model, Model):
            return 0
        if static is not None:
            graph = peak(lambda: self._dry_run(static, static.buffers.batch(self._buckets.all()[0])))
        return graph + max(peak(partial(self._run_dry, model, chunks)) for chunks in steps)

    def _run_dry(self, model: Model, chunks: Sequence[Chunk]) -> None:
        model.dry_run(self._batch(chunks), self._cache)

    def _sample(self, params: SamplingParams, row_maxima: Tensor | None = None) -> None:
        logits = torch.zeros(1, self._vocab_size, device=self._device)
        sample(logits, SamplingBatch.build([(resolve(params, None), 0)], self._device), row_maxima=row_maxima)

    @torch.inference_mode()
    def replay_times(self, batch_size: int, context_len: int, repeats: int) -> list[float]:
        """Seconds of `repeats` replays of a greedy decode step's CUDA graph, without sampler and copies.

        The cached values are arbitrary. The sequences have different tokens, so that a mixture uses different experts for them.
        """
        if self._static is None:
            what = "there is no CUDA graph to time; it needs a GPU and every layer on Triton"
            raise UnsupportedError(what, where="replay_times", found=f"device {self._device}")
        cache, needed = self._cache, self._cache.pages_for(context_len)
        if batch_size * needed > cache.allocator.num_free:
            expected = f"{batch_size * needed} free pages"
            raise ContextLengthError("too few KV pages", expected=expected, found=cache.allocator.num_free)
        pages = [cache.allocator.allocate(needed) for _ in range(batch_size)]
        try:
            with on_device(self._device):
                chunks = [Chunk([i % self._vocab_size], context_len - 1, own) for i, own in enumerate(pages)]
                self._scores(chunks, logits_needed=False)
                return self._static.graphs.replay_times(self._buckets.decode(chunks), repeats)
        finally:
            for own in pages:
                cache.allocator.release(own)


def _buckets(model: ModelLike, max_num_seqs: int, max_num_batched_tokens: int) -> Buckets:
    flops = [layer.flops(1) for layer in model.layers if layer.residual] if isinstance(model, Model) else []
    if not flops:
        return Buckets(max_num_seqs, max_num_batched_tokens)
    return Buckets(max_num_seqs, max_num_batched_tokens, max_prompt_tokens(sum(flops) / len(flops)))
