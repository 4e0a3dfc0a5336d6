"""`StepBuffers`: the static device buffers of a runner's steps, at addresses that CUDA graphs can keep."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minirt.engine.buckets import Bucket, Buckets, max_splits
from minirt.engine.cpu_gpu_buffer import CpuGpuBuffer
from minirt.engine.kv_cache import KVCache
from minirt.engine.step_input import KV_SPLIT, Batch, Chunk, Layout, Ranges, pack_chunks
from minirt.modeling.model import Model


class StepBuffers:
    """One buffer each for step input, block tables, logits and row maxima. It serves all buckets: steps run one after the other.

    Args:
        previous: [max_num_seqs] int64 on the device: the tokens that the previous step sampled.
        ranges: copies of ranges of integers, for the step input.
        max_seq_len: tokens of the longest possible sequence.
        vocab_size: columns of the logits.
    """

    def __init__(
        self, model: Model, cache: KVCache, buckets: Buckets, previous: Tensor, ranges: Ranges, *, max_seq_len: int,
        vocab_size: int,
    ) -> None:  # fmt: skip
        self._model, self._cache, self._max_seq_len, self._previous = model, cache, max_seq_len, previous
        self._ranges, self._table_width = ranges, cache.pages_for(max_seq_len)
        rows, device = buckets.max_seqs, previous.device
        tiles = max(model.row_maxima_tiles(n + 1) for n in range(rows))
        self.logits = torch.zeros(rows, vocab_size, device=device)
        self._row_maxima = torch.zeros(rows, tiles, dtype=torch.int64, device=device)
        self._block_tables = torch.zeros(rows * self._table_width, dtype=torch.int32, device=device)
        self._input = CpuGpuBuffer((max(self._layout(bucket).words for bucket in buckets.all()),), device)

    def batch(self, bucket: Bucket) -> Batch:
        """The batch, as views of the buffers, with which a bucket's CUDA graph is captured."""
        longest = min(KV_SPLIT, self._max_seq_len) if bucket.short else self._max_seq_len
        layout, splits = self._layout(bucket), max_splits(bucket.seqs, longest, self._cache.capacity)
        tables = self._block_tables[: bucket.seqs * self._table_width].view(bucket.seqs, self._table_width)
        return self.with_row_maxima(Batch.static(
            self._input.device, layout, tables, longest, splits, decode=not bucket.tokens, previous=self._previous,
            logits=self.logits[: layout.logits],
        ))  # fmt: skip

    def send(self, layout: Layout, chunks: Sequence[Chunk], *, logits_needed: bool = True) -> None:
        """Queue the copy of a step's input to the device. Without chunks, the step is only padding and touches no page.

        Call `sent` when the step is queued.
        """
        used = pack_chunks(
            layout, self._input.host(), chunks, self._cache.page_size, logits_needed=logits_needed, ranges=self._ranges
        )
        self._input.copy(used)

    def sent(self) -> None:
        """Guard the host's copy of the input until the device has it."""
        self._input.copied()

    def with_row_maxima(self, batch: Batch) -> Batch:
        """The batch with buffers for row maxima; unchanged if too many rows need logits, or the head stores none."""
        rows = batch.logits_indices.shape[0]
        tiles = self._model.row_maxima_tiles(rows) if rows <= self._row_maxima.shape[0] else 0
        if not tiles:
            return batch
        from minirt.kernels.linear.product import RowMaxima

        return replace(batch, row_maxima=RowMaxima(self._row_maxima[:rows, :tiles], batch.logits_needed))

    def _layout(self, bucket: Bucket) -> Layout:
        """The layout of a bucket. Each sequence needs logits for at most one row."""
        seqs, tokens = bucket.seqs, bucket.tokens or bucket.seqs
        return Layout(tokens, min(tokens, seqs), seqs, seqs * self._table_width)
