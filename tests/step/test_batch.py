"""Batches that are built from chunks. Catches a slot or a position that is off by one, and rows of the wrong sequence."""

import pytest
import torch

from minirt.kernels.attention.limits import KV_SPLIT
from minirt.step.batch import Batch, Chunk

PAGE = 16


def test_a_mixed_batch():
    chunks = [Chunk([7, 8, 9], 14, [3, 5], slot=6), Chunk([4], 300, list(range(20, 40))), Chunk([1, 2], 0, [9], 0, 2)]
    batch = Batch.build(chunks, PAGE)
    assert batch.seq_slots.tolist() == [6, -1, 2]
    assert batch.input_ids.tolist() == [7, 8, 9, 4, 1, 2]
    assert batch.positions.tolist() == [14, 15, 16, 300, 0, 1]
    assert batch.slot_mapping.tolist() == [3 * 16 + 14, 3 * 16 + 15, 5 * 16, 38 * 16 + 12, 9 * 16, 9 * 16 + 1]
    assert batch.logits_indices.tolist() == [2, 3]
    assert batch.query_starts_device.tolist() == [0, 3, 4, 6]
    assert batch.seq_lens_device.tolist() == [17, 301, 2]
    assert batch.split_starts_device.tolist() == [0, 1, 1 + -(-301 // KV_SPLIT), 2 + -(-301 // KV_SPLIT)]
    assert (batch.query_lens, batch.seq_lens, batch.query_starts) == ((3, 1, 2), (17, 301, 2), [0, 3, 4])
    assert (batch.max_splits, batch.max_seq_len, batch.max_query_len) == (4, 301, 3)
    assert batch.block_tables.tolist() == [[3, 5] + [0] * 17, list(range(20, 39)), [9] + [0] * 18]


@pytest.mark.parametrize(("start", "count"), [(0, 5), (0, 16), (3, 13), (3, 14), (15, 2), (16, 48), (31, 70), (7, 1)])
def test_a_chunk_over_scattered_pages(start, count):
    """The chunk begins and ends anywhere in a page, and does not use the last pages of the table."""
    pages = [11, 2, 30, 4, 25, 6, 17, 8, 99]
    batch = Batch.build([Chunk([1], 40, [50, 51, 52]), Chunk(list(range(count)), start, pages)], PAGE)
    positions = list(range(start, start + count))
    assert batch.positions[1:].tolist() == positions
    assert batch.slot_mapping.tolist() == [52 * PAGE + 8] + [pages[p // PAGE] * PAGE + p % PAGE for p in positions]


def test_tables_of_a_window_are_made_once():
    """Catches a copy from the host in a CUDA graph of a step without an engine, which cannot be captured (`minirt tune`)."""
    batch = Batch.build([Chunk([1], 599, list(range(40)))], PAGE)
    starts = batch.tables(100).split_starts_device
    assert starts.tolist() == [0, 1 + (599 // KV_SPLIT > 500 // KV_SPLIT)]
    assert batch.tables(100).split_starts_device is starts


def test_every_row():
    assert Batch.build([Chunk([5, 6], 0, [1], num_logits=2), Chunk([3], 9, [2])], PAGE).every_row
    assert not Batch.build([Chunk([5, 6], 0, [1])], PAGE).every_row
    assert Batch.build([], PAGE).num_tokens == 0


def test_another_device_gets_every_tensor():
    batch = Batch.build([Chunk([5, 6], 0, [1]), Chunk([3], 9, [2])], PAGE)
    moved = batch.to(torch.device("meta"))
    tensors = {name for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    assert {name for name, value in vars(moved).items() if isinstance(value, torch.Tensor) and value.is_meta} == tensors
    assert moved.seq_lens == batch.seq_lens
    assert batch.to(torch.device("cpu")) is batch
