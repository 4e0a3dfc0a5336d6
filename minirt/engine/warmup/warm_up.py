"""`WarmUp` compiles the kernels and captures the CUDA graphs that steps can need, and measures; `measure_step_bytes`."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minirt.device import on_device
from minirt.engine.buckets import Bucket, Buckets, batch_bucket
from minirt.engine.execute.runner import Runner
from minirt.engine.limits import EngineLimits
from minirt.engine.schedule.step_times import GraphTimes, PromptTime
from minirt.engine.warmup.steps import MIDDLE_TOKENS, first_buckets, largest_prompts, largest_steps, warm_up_steps
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.kernels.sampling.batch import SamplingBatch
from minirt.kernels.sampling.dispatch import sample
from minirt.kernels.step.table import FINAL_LEN, NEXT_TOKENS, NUM_NEXT, PROMPT_LEN
from minirt.modeling.model import Model
from minirt.progress import COMPILING, LoadProgress
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import KVCache
from minirt.step.plan import Copies, Edit, PlannedSequences, StepPlan
from minirt.wording import warn

if TYPE_CHECKING:
    from minirt.kernels.compile.ahead_of_time import AheadOfTime

_MEASURED_CONTEXT = 8192  # tokens before a measured chunk of a prompt
_BETWEEN = 8  # times a piece's own time, until the next one beside requests: one delays a step by 5 to 20 ms
_SHORTEST_S = 1e-3  # what a piece counts at least, also if it finds that kernels are still compiled
_REPLAYS = 3  # of each CUDA graph of a decode step, to measure it


class Measured(NamedTuple):
    """What warm-up has measured; None: it was not measured.

    Args:
        prompt_time: of a prompt's tokens, on a GPU.
        step_times: of decode steps, on a GPU with CUDA graphs and drafts.
    """

    prompt_time: PromptTime | None = None
    step_times: GraphTimes | None = None


class WarmUp:
    """Compiles the kernels of a runner's steps, captures their CUDA graphs, and measures steps. Does nothing on a CPU.

    `start` does what any prompt and any decode step need: some CUDA graphs, to which other steps are padded, for at most
    `most_tokens` tokens; and it takes the memory for all. `advance` does the rest piece by piece, between steps.

    Args:
        lazy: leave a rest. Without CUDA graphs, or with drafts, whose steps are measured, there is none.
        progress: its stages are COMPILING ("kernels", if Triton's cache has all of them) and "CUDA graphs".
    """

    def __init__(self, runner: Runner, *, lazy: bool = False, progress: LoadProgress | None = None) -> None:
        self._runner, self._progress = runner, progress or (lambda stage, done, total: None)
        self._lazy = lazy and runner.graphs.buckets is not None and not runner.limits.max_drafts
        self._compiler: AheadOfTime | None = None
        self._launches = deque[Callable[[], Any]]()  # whose kernels are still to be compiled
        self._ended = self._took = 0.0  # the last piece, in seconds

    @property
    def remaining(self) -> int:
        """Number of CUDA graphs that are still to be captured."""
        return len(self._runner.graphs.later)

    @property
    def most_tokens(self) -> int | None:
        """Tokens of the largest step whose kernels are sure to be compiled; None: all are."""
        return max(MIDDLE_TOKENS, self._runner.limits.max_num_seqs) if self._compiler is not None else None

    @torch.inference_mode()
    def start(self) -> Measured:
        """The cache's pages must not be in use."""
        runner, model, device, graphs = self._runner, self._runner.model, self._runner.device, self._runner.graphs
        if device.type != "cuda" or not isinstance(model, Model):
            return Measured()
        from minirt.kernels.compile.ahead_of_time import AheadOfTime

        def ready(done: int, total: int, compiles: bool) -> None:
            self._progress(COMPILING if compiles else "kernels", done, total)

        buckets = [] if graphs.buckets is None else graphs.buckets.all()
        first, launches = buckets, [*first_launches(runner, model), *other_launches(runner, model)]
        if graphs.buckets is not None and self._lazy:
            first, launches = first_buckets(graphs.buckets), first_launches(runner, model)
            self._launches.extend(other_launches(runner, model))
        prompt_time = step_times = None
        self._compiler = AheadOfTime(device, ready)
        try:
            with on_device(device):
                for launch in launches:
                    self._compiler.add(launch)
                self._compiler.wait()
                torch.cuda.empty_cache()
                if len(first) < len(buckets):
                    graphs.reserve(buckets[0])
                for done, bucket in enumerate(first, 1):
                    graphs.capture(bucket)
                    self._progress("CUDA graphs", done, len(first))
                torch.cuda.current_stream(device).synchronize()
                _reserve(runner, model)
                with _tolerant(runner):
                    prompt_time = _measure_prompts(runner, model)
                if graphs.buckets is not None and runner.limits.max_drafts:
                    step_times = _measure_graphs(runner, graphs.buckets)
            graphs.later.extend(bucket for bucket in reversed(buckets) if bucket not in first)
        finally:
            if not graphs.later:
                self.close()
        return Measured(prompt_time, step_times)

    @torch.inference_mode()
    def advance(self, wait_s: float = 0.0) -> None:
        """Do the next piece: begin to compile the kernels of a step, or capture a CUDA graph if all kernels are ready, for which
        this waits `wait_s` seconds. A piece leaves the queue first, so that its exception does not come again and again."""
        began = perf_counter()
        try:
            with on_device(self._runner.device):
                self._do_next(wait_s)
        finally:
            self._ended = perf_counter()
            self._took = max(self._ended - began, _SHORTEST_S)

    def _do_next(self, wait_s: float) -> None:
        if self._compiler is not None:
            if self._launches:
                self._compiler.add(self._launches.popleft())
                return
            if not self._compiler.ready_within(wait_s):
                return
            self.close()
        bucket = self._runner.graphs.later.popleft()
        try:
            self._runner.graphs.capture(bucket)
        except torch.OutOfMemoryError as error:
            what = f"no memory for the CUDA graph of {bucket.num_tokens} tokens, whose steps are padded to a larger one"
            warn(f"{what} ({error})", RuntimeWarning)

    def after_step(self, running: int) -> None:
        """Do a piece if it is time: it delays the next token of `running` sequences. CUDA graphs, which take longest, come the
        less often, the more run."""
        between = _BETWEEN + running // (4 if self._launches else 1)
        if perf_counter() - self._ended >= between * self._took:
            self.advance()

    def close(self) -> None:
        """End the compilation. Kernels that are missing are compiled at their first launch."""
        compiler, self._compiler = self._compiler, None
        self._launches.clear()
        if compiler is not None:
            compiler.close()


def first_launches(runner: Runner, model: Model) -> list[Callable[[], Any]]:
    """What launches the kernels of the steps that come first: dry runs of the CUDA graphs that are captured first and of measured
    prompts, and the sampler."""
    launches = list[Callable[[], Any]]()
    if (buckets := runner.graphs.buckets) is not None:
        launches += [partial(runner.graphs.dry_run, bucket) for bucket in first_buckets(buckets)]
    launches += [partial(_dry_run, runner, model, [chunk]) for chunk in _measured_prompts(runner)]
    launches += [partial(sample_once, runner, settings) for settings in SamplingBatch.variants(runner.device)]
    return [*launches, runner.sampler.compile]


def other_launches(runner: Runner, model: Model) -> list[Callable[[], Any]]:
    """What launches every other kernel that a step of this runner's model can need. Those that take longest to compile, of large
    steps, come first."""
    limits, buckets = runner.limits, runner.graphs.buckets
    seqs, longest = limits.max_num_seqs, limits.max_model_len
    steps = [largest_prompts(limits), *warm_up_steps(limits)]
    if buckets is None:
        # Decode steps with short contexts, and with one of the longest: only that has several KV splits to combine.
        short, long = (Chunk([0], end - 1, range(runner.cache.pages_for(end))) for end in (1, longest))
        for size in {batch_bucket(n + 1) for n in range(seqs)}:
            steps += [[first] + [short] * (size - 1) for first in (short, long)]
    captured = [Bucket(1), Bucket(1, 1)] if buckets is None else buckets.all()
    launches: list[Callable[[], Any]] = [partial(_dry_run, runner, model, chunks) for chunks in steps]
    launches += [partial(runner.graphs.dry_run, bucket) for bucket in captured]
    tiles = {model.row_maxima_tiles(bucket.num_logits) for bucket in captured if buckets is not None}
    for maxima in filter(None, (runner.buffers.row_maxima_of(1, count) for count in tiles)):
        launches.append(partial(sample_once, runner, SamplingBatch.variants(runner.device)[0], maxima.values))
    if runner.cache.num_snapshots:
        launches.append(partial(runner.cache.copy, Copies(((0, 0),), ((0, 0),))))
    return launches


def sample_once(runner: Runner, settings: SamplingBatch, row_maxima: Tensor | None = None) -> None:
    """Launch the kernels that draw a token with these settings."""
    logits = torch.zeros(1, runner.vocab_size, dtype=torch.float32, device=runner.device)
    sample(logits, settings, row_maxima=row_maxima)


def _dry_run(runner: Runner, model: Model, chunks: Sequence[Chunk]) -> None:
    for adapted in {False, runner.adapters is not None}:
        model.dry_run(_batch(runner, chunks, adapted), runner.cache)


def _batch(runner: Runner, chunks: Sequence[Chunk], adapted: bool = False) -> Batch:
    """A step's batch, for `Model.dry_run`. `adapted`: with adapters, if the model has some; such a step takes most memory."""
    batch = Batch.build(chunks, runner.cache.page_size).to(runner.device)
    return runner.with_buffers(batch, len(batch.logits_indices), adapted=adapted)


def _tolerant(runner: Runner) -> AbstractContextManager[None]:
    """Context in which memory may run out, unless other ranks would go on."""
    return suppress(torch.OutOfMemoryError) if runner.retries else nullcontext()


def _reserve(runner: Runner, model: Model) -> None:
    """Have PyTorch's allocator keep the memory of the largest step.

    Otherwise it would keep blocks of each smaller size, and exceed the memory plan. If there is no memory for that step, nothing
    is kept: a step that runs out of memory is tried again with fewer tokens.
    """
    from minirt.kernels.compile.ahead_of_time import without_launches

    def run(chunks: Sequence[Chunk]) -> int:
        torch.cuda.empty_cache()
        model.dry_run(_batch(runner, chunks, adapted=True), runner.cache)
        return torch.cuda.memory_reserved(runner.device)

    with without_launches(runner.device), _tolerant(runner):
        run(max(largest_steps(runner.limits), key=run))


def _measure_prompts(runner: Runner, model: Model) -> PromptTime:
    """Run a chunk of a prompt, at its beginning and after a long context. All its pages are page 0.

    With a proposer that runs layers over all tokens, that is a part of the time.
    """
    def seconds(chunk: Chunk) -> float:
        batch = _batch(runner, [chunk])
        draft = runner.graphs.proposing(Bucket(1, batch.num_tokens), batch)
        return _seconds([partial(model, batch, runner.cache), *([] if draft is None else [draft])])

    begin, late = _measured_prompts(runner)
    count, first = len(begin.tokens), seconds(begin)
    context_s = max(0.0, seconds(late) - first) / (count * late.start) if late.start else 0.0
    return PromptTime(first / count, context_s)


def _measured_prompts(runner: Runner) -> list[Chunk]:
    """A chunk of a prompt, at its beginning and after a long context."""
    longest = min(runner.limits.max_model_len, runner.cache.capacity)
    count = min(MIDDLE_TOKENS, runner.limits.max_num_batched_tokens, longest)
    starts = 0, min(longest - count, _MEASURED_CONTEXT)
    return [Chunk([0] * count, start, [0] * runner.cache.pages_for(start + count)) for start in starts]


def _seconds(work: Sequence[Callable[[], Any]], repeats: int = 1) -> float:
    """Seconds of work on the current GPU. The first time is not counted."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for number in range(repeats + 1):
        if number == 1:
            events[0].record()
        for launch in work:
            launch()
    events[1].record()
    events[1].synchronize()  # not the device: another engine may be capturing
    return events[0].elapsed_time(events[1]) / 1e3 / repeats


def _measure_graphs(runner: Runner, buckets: Buckets) -> GraphTimes:
    """Replay the CUDA graphs of each decode step, and of the drafts after it. Attention has no context then.

    All tokens differ, as a mixture reads the experts of all of them. Their pages are page 0.
    """
    seconds, buffers, captured = dict[Bucket, float](), runner.buffers, runner.graphs.captured
    for bucket in [bucket for bucket in buckets.all() if not (bucket.tokens or bucket.short or bucket.adapted)]:
        buffers.send(measuring_step(runner, min(bucket.seqs, runner.limits.max_num_seqs), 1 + bucket.drafts))
        buffers.sent()
        if captured is not None:
            seconds[bucket] = _seconds([partial(captured.replay, key) for key in runner.graphs.keys(bucket)], _REPLAYS)
    buffers.table.zero_()
    return GraphTimes(buckets, seconds)


def measuring_step(runner: Runner, seqs: int, count: int) -> StepPlan:
    """A step of sequences without a prompt that go on with `count` tokens each, all different. Each replay of a CUDA graph
    applies its edits."""
    tokens = np.random.default_rng(0).integers(runner.vocab_size, size=(seqs, count), dtype=np.int32)
    row = np.zeros(NEXT_TOKENS, np.int32)
    row[NUM_NEXT], row[FINAL_LEN], row[PROMPT_LEN] = count, runner.limits.max_model_len, 1
    edits = [Edit(slot, 0, row[: PROMPT_LEN + 1]) for slot in range(seqs)]
    edits += [Edit(slot, NEXT_TOKENS, row) for slot, row in enumerate(tokens)]
    return StepPlan(PlannedSequences.of((slot, -1, count, count, count, count) for slot in range(seqs)), edits=tuple(edits))


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
        model.dry_run(_batch(runner, chunks, adapted=True), runner.cache)

    with torch.inference_mode(), on_device(device), without_launches(device):
        try:
            before = torch.cuda.memory_allocated(device)
            cache = KVCache(model.cache_specs, 1, device, model.kv_dtype, num_slots=limits.max_num_seqs)
            states = torch.cuda.memory_allocated(device) - before
            runner = Runner(model, cache, device, limits, vocab_size=model.config.vocab_size, cuda_graphs=cuda_graphs)
            steps = largest_steps(limits)
            ends = [[chunk.start + len(chunk.tokens) for chunk in chunks] for chunks in steps]
            model.reserve_splits(max(sum(-(-end // KV_SPLIT) for end in step) for step in ends))
            buckets = runner.graphs.buckets
            graph = 0 if buckets is None else peak(partial(runner.graphs.dry_run, buckets.all()[0]))  # its memory stays
            needed = graph + max(peak(partial(dry_run, runner, chunks)) for chunks in steps)
            return torch.cuda.memory_allocated(device) - before - states + needed
        except torch.OutOfMemoryError:
            return None
