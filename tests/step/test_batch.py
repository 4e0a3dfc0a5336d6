"""The flat buffer of a batch.

Catches tensors that overlap or are not aligned, padding that writes or reads a page, a decode batch in a static buffer that
differs from one built for the step, and a step that starts PyTorch's threads.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minirt.errors import InputError
from minirt.step.batch import KV_SPLIT, Batch, Chunk, Layout, Ranges, pack_chunks

PAGE = 16
NAMES = ("tokens", "positions", "slots", "logits_indices", "query_starts", "seq_lens", "split_starts", "logits_needed",
         "seq_slots", "page_starts", "pages")  # fmt: skip


def decode_chunks(lengths):
    return [Chunk([~i if i % 2 else 100 + i], n - 1, [50 * i + j for j in range(-(-n // PAGE))]) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("layout", [Layout(5, 2, 3, 7), Layout(1, 1, 1, 1), Layout(8, 8, 8, 3), Layout(0, 0, 0, 0)], ids=str)
def test_views_are_aligned_and_apart(layout):
    flat = torch.zeros(layout.words, dtype=torch.int32)
    seqs = layout.seqs
    sizes = [layout.tokens] * 3 + [layout.logits, seqs + 1, seqs, seqs + 1, 1, seqs, seqs + 1, layout.pages]
    for value, (view, size) in enumerate(zip(layout.views(flat), sizes, strict=True), 1):
        assert view.numel() == size
        assert view.storage_offset() * view.element_size() % 16 == 0
        view.fill_(value)
    for value, view in enumerate(layout.views(flat), 1):
        assert bool((view == value).all()), f"{NAMES[value - 1]} was overwritten"


def test_a_mixed_batch():
    chunks = [Chunk([7, 8, 9], 14, [3, 5], slot=6), Chunk([~4], 300, list(range(20, 40))), Chunk([1, 2], 0, [9], 0, 2)]
    batch = Batch.build(chunks, PAGE)
    assert batch.seq_slots.tolist() == [6, -1, 2]
    assert batch.tokens.tolist() == [7, 8, 9, ~4, 1, 2]
    assert batch.positions.tolist() == [14, 15, 16, 300, 0, 1]
    assert batch.slots.tolist() == [3 * 16 + 14, 3 * 16 + 15, 5 * 16, 38 * 16 + 12, 9 * 16, 9 * 16 + 1]
    assert batch.logits_indices.tolist() == [2, 3]
    assert batch.query_starts_device.tolist() == [0, 3, 4, 6]
    assert batch.seq_lens_device.tolist() == [17, 301, 2]
    assert batch.split_starts_device.tolist() == [0, 1, 3, 4]
    assert batch.logits_needed.tolist() == [1]
    assert (batch.max_splits, batch.max_seq_len, batch.max_query_len) == (4, 301, 3)
    assert batch.page_starts.tolist() == [0, 2, 21, 22]
    assert batch.block_tables.tolist() == [[3, 5] + [0] * 17, list(range(20, 39)), [9] + [0] * 18]
    assert batch.after(torch.tensor([5, 6, 7, 8, 33])).input_ids.tolist() == [7, 8, 9, 33, 1, 2]
    assert batch.after(torch.tensor([5, 6, 7, 8, -1])).input_ids[3] == 0


@pytest.mark.parametrize(("start", "count"), [(0, 5), (0, 16), (3, 13), (3, 14), (15, 2), (16, 48), (31, 70), (7, 1)])
def test_a_chunk_over_scattered_pages(start, count):
    """The chunk begins and ends anywhere in a page, and does not use the last pages of the table."""
    pages = [11, 2, 30, 4, 25, 6, 17, 8, 99]
    batch = Batch.build([Chunk([1], 40, [50, 51, 52]), Chunk(list(range(count)), start, pages)], PAGE)
    positions = list(range(start, start + count))
    assert batch.positions[1:].tolist() == positions
    assert batch.slots.tolist() == [52 * PAGE + 8] + [pages[p // PAGE] * PAGE + p % PAGE for p in positions]


def same_pages(views, built):
    """The page lists begin alike; padding sequences have no pages."""
    count = built.num_seqs
    assert torch.equal(views["page_starts"][: count + 1], built.page_starts)
    assert views["page_starts"][count:].unique().numel() == 1
    assert torch.equal(views["pages"][: built.pages.numel()], built.pages)


@pytest.mark.parametrize("lengths", [[1], [17, 300, 256], [257] * 8, []])
def test_decode_in_a_static_buffer(lengths):
    """The buffer holds garbage before. Rows after the step's rows are padding. Only the first `used` words matter."""
    size, width = 8, 20
    layout = Layout(size, size, size, size * width)
    flat = torch.full((layout.words,), 12345, dtype=torch.int32)
    used = pack_chunks(layout, flat, decode_chunks(lengths), PAGE)
    flat[used:] = -777  # these words are not copied to the device
    views = dict(zip(NAMES, layout.views(flat), strict=True))
    built = Batch.build(decode_chunks(lengths), PAGE)
    count = len(lengths)
    for name, expected in (("tokens", built.tokens), ("positions", built.positions), ("slots", built.slots)):
        assert torch.equal(views[name][:count], expected), name
    assert torch.equal(views["seq_lens"][:count], built.seq_lens_device)
    assert torch.equal(views["split_starts"][: count + 1], built.split_starts_device)
    same_pages(views, built)
    assert used == layout.starts[-2] + sum(-(-n // PAGE) for n in lengths), "only pages in use travel"
    assert views["slots"][count:].tolist() == [-1] * (size - count)
    assert views["seq_lens"][count:].tolist() == [0] * (size - count)
    assert views["tokens"][count:].tolist() == [0] * (size - count)
    assert views["split_starts"][count:].unique().numel() == 1, "padding has no splits"
    assert views["logits_indices"].tolist() == list(range(size))
    assert views["query_starts"].tolist() == [min(i, count) for i in range(size + 1)]
    tables = torch.full((size, width), 7, dtype=torch.int32)
    static = Batch.static(flat, layout, tables, width * PAGE, 40, decode=True, previous=flat, logits=flat)
    assert static.block_tables is tables
    assert static.every_row
    assert (static.max_query_len, static.max_seq_len, static.max_splits) == (1, width * PAGE, 40)
    assert built.max_splits == sum(-(-n // KV_SPLIT) for n in lengths)


def test_a_mixed_batch_in_a_static_buffer():
    """Padding tokens belong to no sequence and have no slot; padding sequences have no tokens."""
    chunks = [Chunk([7, 8, 9], 14, [3, 5]), Chunk([~4], 300, list(range(20, 40))), Chunk([1, 2], 0, [9], num_logits=0)]
    layout = Layout(16, 5, 5, 5 * 24)
    flat = torch.full((layout.words,), 12345, dtype=torch.int32)
    used = pack_chunks(layout, flat, chunks, PAGE)
    flat[used:] = -777
    views, built = dict(zip(NAMES, layout.views(flat), strict=True)), Batch.build(chunks, PAGE)
    for name in ("tokens", "positions", "slots"):
        assert torch.equal(views[name][:6], getattr(built, name)), name
    assert views["slots"][6:].tolist() == [-1] * 10
    assert views["seq_slots"].tolist() == [-1, -1, -1, -1, -1]
    assert views["query_starts"].tolist() == [0, 3, 4, 6, 6, 6]
    assert views["seq_lens"].tolist() == [17, 301, 2, 0, 0]
    assert views["split_starts"].tolist() == [0, 1, 3, 4, 4, 4]
    assert views["logits_indices"][:2].tolist() == [2, 3]
    assert 0 <= views["logits_indices"].min() <= views["logits_indices"].max() < 16
    same_pages(views, built)
    tables = torch.zeros(5, 24, dtype=torch.int32)
    static = Batch.static(flat, layout, tables, 24 * PAGE, 40, decode=False, previous=flat, logits=flat)
    assert not static.every_row
    assert static.max_query_len > 1


def test_as_many_rows_as_tokens_are_not_every_row():
    """The sizes of a static batch are bounds. A `Select` that took equal sizes for "all rows in order" would skip its gather."""
    layout = Layout(16, 16, 16, 4)
    flat = torch.zeros(layout.words, dtype=torch.int32)
    pack_chunks(layout, flat, [Chunk([5, 6, 7], 0, [1])], PAGE)
    assert layout.views(flat)[3][0] == 2
    assert not Batch.static(flat, layout, flat.view(1, -1), 64, 16, decode=False, previous=flat, logits=flat).every_row
    assert Batch.build([Chunk([5, 6], 0, [1], num_logits=2), Chunk([3], 9, [2])], PAGE).every_row
    assert not Batch.build([Chunk([5, 6], 0, [1])], PAGE).every_row


def test_a_buffer_without_room_is_refused():
    layout = Layout(8, 8, 8, 160)
    for flat in (torch.zeros(9, dtype=torch.int32), torch.zeros(2 * layout.words, dtype=torch.int32)[::2]):
        before = flat.clone()
        with pytest.raises(InputError, match="the buffer cannot hold the step"):
            pack_chunks(layout, flat, decode_chunks([17, 300]), PAGE)
        assert torch.equal(flat, before)


@pytest.mark.parametrize("layout", [Layout(3, 4, 1, 9), Layout(4, 4, 0, 9)], ids=str)
def test_a_layout_without_room_is_refused(layout):
    """The error comes before anything is written past a tensor or past the buffer."""
    flat = torch.full((layout.words + 64,), 12345, dtype=torch.int32)
    with pytest.raises(InputError, match="the layout is too small for the step"):
        pack_chunks(layout, flat, [Chunk([5, 6, 7, 8], 0, [1])], PAGE)
    assert bool((flat[layout.words :] == 12345).all())


def test_ranges_are_counted_once():
    ranges = Ranges(5)
    assert ranges(1, 4).tolist() == [1, 2, 3]
    assert ranges(3, 9).tolist() == list(range(3, 9))
    assert ranges(0, 0).tolist() == []
    ranges(1, 3)[0] = 99
    assert ranges(0, 3).tolist() == [0, 1, 2], "a copy"


LARGE = """
import os, torch
from minirt.step.batch import Batch, Chunk, Layout, pack_chunks
torch.set_num_threads(4)
layout = Layout(256, 256, 256, 256 * 132)
flat = torch.empty(layout.words, dtype=torch.int32)  # torch.zeros would start threads
before = len(os.listdir("/proc/self/task"))
pack_chunks(layout, flat, [Chunk([1], 132 * 64 - 1, range(132 * i, 132 * i + 132)) for i in range(256)], 64)
print(len(os.listdir("/proc/self/task")) - before, layout.views(flat)[-1].flatten().tolist() == list(range(256 * 132)))
prompt = Batch.build([Chunk(list(range(40000)), 0, range(1, 626))], 64)
print(len(os.listdir("/proc/self/task")) - before, prompt.slots.tolist() == list(range(64, 40064)))
torch.ones(36000).exp()
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in Linux's /proc")
def test_a_large_batch_starts_no_threads():
    """256 sequences of up to 8,448 tokens, or one prompt of 40,000 tokens.

    PyTorch starts its threads at the first operation that it splits among them.
    """
    done = subprocess.run([sys.executable, "-P", "-c", LARGE], capture_output=True, text=True, check=True)
    decode, prompt, shared = done.stdout.splitlines()
    assert decode == prompt == "0 True"
    assert int(shared) > 0, "the control operation started no threads, so the test cannot fail"
