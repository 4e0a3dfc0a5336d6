"""The message of a step, and the buffers that it becomes on the device.

Catches a sequence or an edit that arrives in another place, padding that touches a page, buffers that are too small for the
largest plan, and a step that starts PyTorch's threads.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from minirt.engine.buckets import Bucket, Buckets
from minirt.engine.execute import step_graphs
from minirt.engine.execute.runner import Runner
from minirt.engine.execute.step_buffers import StepBuffers, StepSizes
from minirt.engine.execute.step_graphs import StepGraphs
from minirt.engine.limits import EngineLimits
from minirt.kernels.step.table import FINAL_LEN, NEXT_TOKENS, NUM_NEXT
from minirt.modeling.model import Model
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import KVCache, PagesSpec
from minirt.step.plan import Edit, PlannedSequences, StepPlan

PAGE, CPU = 16, torch.device("cpu")


def buffers(seqs=4, tokens=40, length=400, max_seqs=None):
    cache = KVCache([PagesSpec(1, 1)], 99, page_size=PAGE)
    return StepBuffers(cache, EngineLimits(length, seqs, tokens), CPU, 97, StepSizes(max_seqs or seqs, tokens, max_seqs or seqs))


def ints(*values):
    return np.array(values, np.int32)


def plan_of(chunks, own, following=()):
    """The plan that computes chunks: those of `following` as the next token of their slot, the others as given tokens."""
    planned, tokens, edits = [], [], []
    for slot, chunk in enumerate(chunks):
        count, stop = len(chunk.tokens), chunk.start + len(chunk.tokens)
        words = {FINAL_LEN: 10**6, **({0: chunk.start, NUM_NEXT: 1, NEXT_TOKENS: chunk.tokens[0]} if slot in following else {})}
        edits += [Edit(slot, column, ints(value)) for column, value in words.items()]
        edits.append(Edit(slot, own.columns.page_tables, ints(*chunk.pages)))
        planned.append((slot, -1 if slot in following else chunk.start, count, chunk.num_logits, 0, stop))
        if slot not in following:
            tokens.extend(chunk.tokens)
    return StepPlan(PlannedSequences.of(planned), ints(*tokens), tuple(edits[:8 * len(chunks)]))


CHUNKS = [Chunk([7, 8, 9], 14, [3, 5]), Chunk([4], 300, list(range(20, 40))), Chunk([1, 2], 0, [9], num_logits=0),
          Chunk([6], 31, [1, 2])]  # fmt: skip


def derived(own, plan, tokens, seqs, logits, one_token=False):
    view = own.view(tokens, seqs, logits, 0)
    for tensor in view.tensors:
        tensor.fill_(12345)
    own.send(plan)
    own.prepare(view, one_token=one_token)
    return view.tensors


def edits_in_messages(own, plan):
    """Send a plan's edits a few at a time, as several steps do."""
    for first in range(0, len(plan.edits), 2):
        own.send(StepPlan(PlannedSequences.of(()), edits=plan.edits[first : first + 2]))
        own.prepare(own.view(0, 0, 0, 0), one_token=False)


@pytest.mark.parametrize("following", [(), (1,), (1, 3)])
@pytest.mark.parametrize("padding", [(0, 0, 0), (10, 2, 3)])
def test_a_plan_becomes_the_batch_of_its_chunks(following, padding):
    own = buffers(max_seqs=8)
    plan = plan_of(CHUNKS, own, following)
    edits_in_messages(own, plan)
    more_tokens, more_seqs, more_logits = padding
    step, built = derived(own, plan, 7 + more_tokens, 4 + more_seqs, 3 + more_logits), Batch.build(CHUNKS, PAGE)
    for name, wanted in (("tokens", built.input_ids), ("positions", built.positions), ("slot_mapping", built.slot_mapping)):
        assert torch.equal(getattr(step, name)[..., :7].view(7), wanted), name
    assert step.slot_mapping[0, 7:].tolist() == [-1] * more_tokens
    assert torch.equal(step.query_starts[:5], built.query_starts_device)
    assert torch.equal(step.seq_lens, torch.cat((built.seq_lens_device, torch.zeros(more_seqs, dtype=torch.int32))))
    assert torch.equal(step.split_starts[0, :5], built.split_starts_device)
    assert step.split_starts[0, 4:].unique().numel() == 1, "padding has no splits"
    assert step.logits_indices[:3].tolist() == [2, 3, 6]
    assert 0 <= step.logits_indices.min() <= step.logits_indices.max() < 7 + more_tokens
    for row, chunk in enumerate(CHUNKS):
        used = -(-(chunk.start + len(chunk.tokens)) // PAGE)
        assert step.block_tables[0, row, :used].tolist() == list(chunk.pages)[:used]


def test_one_token_for_each_sequence_is_in_its_row():
    own = buffers(max_seqs=8)
    chunks = [Chunk([4], 300, list(range(20, 40))), Chunk([6], 31, [1, 2])]
    plan = plan_of(chunks, own, following=(0, 1))
    edits_in_messages(own, plan)
    step = derived(own, plan, 8, 8, 8, one_token=True)
    assert step.tokens.tolist() == [4, 6] + [0] * 6
    assert step.seq_lens.tolist() == [301, 32] + [0] * 6
    assert step.slot_mapping[0].tolist() == [38 * PAGE + 12, 2 * PAGE + 15] + [-1] * 6
    assert step.logits_indices.tolist() == list(range(8))
    for tensor in step:
        assert tensor.data_ptr() % 16 == 0, "kernels are compiled for aligned tensors"


def test_the_largest_plan_fits():
    """Each sequence is admitted with pages of the longest sequence, in one step."""
    own = buffers(seqs=5, length=400)
    edits = [e for s in range(5) for e in (
        Edit(s, 0, ints(*range(NEXT_TOKENS))), Edit(s, own.columns.page_tables, ints(*[s] * own.columns.pages)),
    )]  # fmt: skip
    sequences = PlannedSequences.of((slot, 0, 8, 1, 0, 8) for slot in range(5))
    step = derived(own, StepPlan(sequences, ints(*range(40)), tuple(edits)), 40, 5, 5)
    assert step.tokens.tolist() == list(range(40))
    assert own.table[:, own.columns.page_tables].tolist() == list(range(5))
    assert own.table[:, NEXT_TOKENS - 1].tolist() == [NEXT_TOKENS - 1] * 5


@pytest.mark.parametrize(("bucket", "tokens", "rows"), [
    (Bucket(1, 512), 512, 1), (Bucket(1, 16, short=True), 16, 1), (Bucket(64, 16), 16, 16), (Bucket(64, 2048), 2048, 64),
    (Bucket(8, short=True), 8, 8),
])  # fmt: skip
def test_graphs_compute_no_more_rows_than_can_want_logits(bucket, tokens, rows, monkeypatch):
    limits = EngineLimits(512, 64, 2048)
    monkeypatch.setattr(step_graphs, "CudaGraphs", lambda device: object())
    own = object.__new__(Runner)
    own._taps, own.device = None, CPU
    own.limits, own.cache = limits, KVCache([PagesSpec(1, 64)], 70)
    own.buffers = StepBuffers(own.cache, limits, CPU, 211, StepSizes(64, 2048, 64, row_maxima_tiles=7, logits_rows=64))
    own.model = object.__new__(Model)
    own.model.row_maxima_tiles = lambda rows: 7
    own.graphs = StepGraphs(own, Buckets(limits))
    assert bucket in own.graphs.buckets.all()
    (step, *_), batch = own.graphs.static(bucket)
    assert batch.num_tokens == len(step.tokens) == tokens
    assert len(batch.logits_indices) == len(batch.logits) == len(batch.row_maxima.values) == len(step.draw_rows) == rows
    assert batch.num_seqs == len(batch.seq_lens_device) == bucket.seqs
    assert batch.every_row == (not bucket.tokens), "otherwise equal sizes do not mean that all rows are kept in order"


LARGE = """
import os, torch
import numpy as np
from minirt.engine.limits import EngineLimits
from minirt.engine.execute.step_buffers import StepBuffers, StepSizes
from minirt.step.kv_cache import KVCache, PagesSpec
from minirt.step.plan import Edit, PlannedSequences, StepPlan
torch.set_num_threads(1)  # large buffers of zeros would start threads
cache = KVCache([PagesSpec(1, 1)], 1, page_size=64)
own = StepBuffers(cache, EngineLimits(8448, 256, 40000), torch.device("cpu"), 8, StepSizes(256, 40000, 256))
own._message.copy = lambda count: None  # the copy to a device is not the host's work
torch.set_num_threads(4)
before = len(os.listdir("/proc/self/task"))
edits = tuple(Edit(s, own.columns.page_tables, np.arange(132, dtype=np.int32)) for s in range(256))
sequences = PlannedSequences.of((s, -1, 1, 1, 1, 8448) for s in range(256))
own.send(StepPlan(sequences, edits=edits))
own.send(StepPlan(PlannedSequences.of([(0, 0, 40000, 1, 1, 40000)]), np.arange(40000, dtype=np.int32)))
print(len(os.listdir("/proc/self/task")) - before, int(own._message.next_host()[own._tokens_at + 39999]) in (0, 39999))
torch.ones(36000).exp()
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in Linux's /proc")
def test_a_large_message_starts_no_threads():
    """256 sequences of 8,448 tokens that are admitted together, and one prompt of 40,000 tokens."""
    done = subprocess.run([sys.executable, "-P", "-c", LARGE], capture_output=True, text=True, check=True)
    message, shared = done.stdout.splitlines()
    assert message == "0 True"
    assert int(shared) > 0, "the control operation started no threads, so the test cannot fail"
