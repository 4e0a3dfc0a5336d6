"""`StepGraphs`: steps as CUDA graphs, so that the host launches one thing a step instead of some two hundred.

A graph is captured for a bucket of sizes and serves every context length: what depends on it (pages, lengths, splits) lies in
static buffers, and the kernels' grids are sized by bounds. Decode steps have buckets of sequences. Steps with prompts have
buckets of tokens, as long as they are so small that the host would be slower than the GPU.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minirt.engine.cpu_gpu_buffer import CpuGpuBuffer
from minirt.engine.kv_cache import KVCache
from minirt.engine.step_input import KV_SPLIT, Batch, Chunk, Layout, pack_chunks
from minirt.modeling.model import Model

NARROWEST = 32  # columns of logits that a tile of the head has at least
SHORT_SEQS = 8  # of decode steps that have a graph for short sequences, too
MAX_PROMPT_TOKENS = 2048  # of a step with prompts that is captured; more take the GPU longer than the host, also in fp8


class Bucket(NamedTuple):
    """What a graph is captured for: `tokens` is 0 for decode steps, whose sequences have one each. `short`: no sequence is longer
    than a KV split, new tokens included, so that attention has no splits to combine."""

    seqs: int
    tokens: int = 0
    short: bool = False


def batch_bucket(count: int) -> int:
    """The captured batch size for `count` sequences: 1, 2, 4, 8, then multiples of 8, then of 16, then of 32."""
    if count <= 8:
        return 1 << (count - 1).bit_length()
    step = 8 if count <= 64 else 16 if count <= 128 else 32
    return -(-count // step) * step


def token_bucket(count: int) -> int:
    """The captured number of tokens for `count`: 16, 32, 64, 128, 192, then multiples of 128, as the linear layers pad them."""
    if count <= 128:
        return max(16, 1 << (count - 1).bit_length())
    return 192 if count <= 192 else -(-count // 128) * 128


def _has_short_graph(bucket: Bucket) -> bool:
    """Whether there is a graph for `short` sequences, too: for decode steps of many, which a kernel less makes about 1% faster,
    and for a prompt alone that attention would otherwise take for the end of a longer one."""
    return bucket.seqs >= SHORT_SEQS if not bucket.tokens else bucket.seqs == 1 and bucket.tokens <= KV_SPLIT


def _for_lengths(bucket: Bucket, chunks: Sequence[Chunk]) -> Bucket:
    """The bucket for sequences as long as these."""
    return bucket._replace(short=_has_short_graph(bucket) and all(c.start + len(c.tokens) <= KV_SPLIT for c in chunks))


def max_splits(count: int, max_seq_len: int, cache: KVCache) -> int:
    """KV splits that `count` sequences of the cache can have, together."""
    return min(count * -(-max_seq_len // KV_SPLIT), cache.capacity // KV_SPLIT + count)


class Scores(NamedTuple):
    """What a step computes for the rows that want logits: `logits` [R, V], and `row_maxima` [R, P], the largest of each tile
    of a row, if the head stores them. Row maxima, and the logits of a CUDA graph, are views of static buffers, which the next
    step overwrites. When `logits_needed` is 0, the logits of a CUDA graph hold a previous step's values."""

    logits: Tensor
    row_maxima: Tensor | None


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    layout: Layout
    parts: int  # of a row, whose largest logits the head leaves


class StepGraphs:
    """The captured steps of one model and cache on a CUDA device.

    Args:
        previous: [max_num_seqs] int64 on the device, where the sampler leaves a step's tokens for the next.
        max_seq_len: tokens of the longest sequence there can be.
        max_num_batched_tokens: tokens of the largest step there can be.
    """

    def __init__(
        self, model: Model, cache: KVCache, previous: Tensor, max_seq_len: int, max_num_batched_tokens: int, vocab_size: int
    ) -> None:
        self._model, self._cache, self._previous, self._max_seq_len = model, cache, previous, max_seq_len
        self._most_seqs = batch_bucket(previous.shape[0])
        self._most_tokens = min(MAX_PROMPT_TOKENS, token_bucket(max_num_batched_tokens))
        words = max(self._layout(bucket).words for bucket in self.buckets)
        self._buffer = CpuGpuBuffer((words,), model.device)
        self._logits = torch.zeros(self._most_seqs, vocab_size, device=model.device)  # one for all graphs: it is large
        self._row_maxima = torch.zeros(self._most_seqs, -(-vocab_size // NARROWEST), dtype=torch.int64, device=model.device)
        self._graphs: dict[Bucket, _Captured] = {}
        self._pool: Any = None  # of the graphs' memory: graphs that run one after the other can share it
        self._stream = torch.cuda.Stream(model.device)  # to capture on: PyTorch's own is of the device that captured first

    @property
    def buckets(self) -> list[Bucket]:
        """Every bucket there is, largest first, so that the smaller find their memory in its pool."""
        decode = {Bucket(batch_bucket(n + 1)) for n in range(self._previous.shape[0])}
        tokens = {token_bucket(n + 1) for n in range(self._most_tokens)}
        prompts = {Bucket(seqs, n) for seqs in (1, self._most_seqs) for n in tokens}
        short = {bucket._replace(short=True) for bucket in decode | prompts if _has_short_graph(bucket)}
        return sorted(decode | prompts | short, key=lambda b: (b.tokens, b.seqs, b.short), reverse=True)

    def bucket(self, chunks: Sequence[Chunk]) -> Bucket | None:
        """The bucket for a step; None where there is no graph for its like."""
        if all(len(c.tokens) == 1 and c.wants_logits for c in chunks):
            return _for_lengths(Bucket(batch_bucket(len(chunks))), chunks)
        tokens = sum(len(c.tokens) for c in chunks)
        if tokens > self._most_tokens or any(c.all_logits for c in chunks):
            return None
        return _for_lengths(Bucket(1 if len(chunks) == 1 else self._most_seqs, token_bucket(tokens)), chunks)

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], *, logits_needed: bool = True) -> Scores | None:
        """The scores of the chunks that want logits; None, and nothing was done, where there is no graph for such a step.

        `logits_needed`: False if their largest are enough, and nothing but `row_maxima` is looked at where there are such."""
        bucket = self.bucket(chunks)
        if bucket is None:
            return None
        captured = self.capture(bucket)
        used = pack_chunks(captured.layout, self._buffer.host(), chunks, self._cache.page_size, logits_needed=logits_needed)
        self._buffer.send(used)
        captured.graph.replay()
        rows = sum(c.wants_logits for c in chunks)
        return Scores(self._logits[:rows], self._row_maxima[:rows, : captured.parts] if captured.parts else None)

    def with_row_maxima(self, batch: Batch) -> Batch:
        """A batch on the device whose head leaves its largest logits, beside all of them, where those of graphs do; as it is if
        more rows want logits than there are sequences."""
        from minirt.kernels.linear.row_maxima import RowMaxima

        rows = batch.logits_indices.shape[0]
        if rows > self._most_seqs:
            return batch
        return replace(batch, row_maxima=RowMaxima(self._row_maxima[:rows], batch.logits_needed))

    @torch.inference_mode()
    def dry_run(self, bucket: Bucket) -> None:
        """Run a layer of each form as the bucket's graph would, on padding, which touches no page."""
        batch = self._batch(bucket)
        pack_chunks(batch.layout, self._buffer.host(), [], self._cache.page_size)
        self._buffer.send()
        self._model.dry_run(batch, self._cache)

    @torch.inference_mode()
    def capture(self, bucket: Bucket, *, compiled: bool = False) -> _Captured:
        """The graph for a bucket, captured if it is not there yet. `compiled`: its kernels have been compiled."""
        if bucket in self._graphs:
            return self._graphs[bucket]
        if not compiled:
            self.dry_run(bucket)
        batch = self._batch(bucket)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            self._model(batch, self._cache)
        self._pool = self._pool or graph.pool()
        self._graphs[bucket] = _Captured(graph, batch.layout, 0 if batch.row_maxima is None else batch.row_maxima.num_tiles)
        return self._graphs[bucket]

    def row_maxima(self) -> list[Tensor]:
        """The largest logits as each form of the captured heads leaves them."""
        return [self._row_maxima[:, :parts] for parts in sorted({own.parts for own in self._graphs.values()} - {0})]

    def _layout(self, bucket: Bucket) -> Layout:
        """At most one row of a sequence wants logits."""
        seqs, tokens = bucket.seqs, bucket.tokens or bucket.seqs
        return Layout(tokens, min(tokens, seqs), seqs, self._cache.pages_for(self._max_seq_len))

    def _batch(self, bucket: Bucket) -> Batch:
        """The static batch over the device buffer."""
        longest = min(KV_SPLIT, self._max_seq_len) if bucket.short else self._max_seq_len
        layout, splits = self._layout(bucket), max_splits(bucket.seqs, longest, self._cache)
        return self.with_row_maxima(Batch.static(
            self._buffer.device, layout, longest, splits, decode=not bucket.tokens, previous=self._previous,
            logits=self._logits[: layout.logits],
        ))  # fmt: skip

    @torch.inference_mode()
    def replay_times(self, chunks: Sequence[Chunk], repeats: int) -> list[float]:
        """Seconds of each of `repeats` replays for these decode chunks, by CUDA events, after as many that are not counted; of a
        greedy step."""
        self.run(chunks, logits_needed=False)
        graph = self.capture(_for_lengths(Bucket(batch_bucket(len(chunks))), chunks)).graph
        for _ in range(repeats):
            graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
