"""A step's plan is a plain value. Catches a plan that refers to the scheduler, and one that depends on what its process knows."""

import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from engine.test_engine import PAGE, VOCAB, Mock, add, engine, finish, undisturbed
from engine.test_sampler import Noisy

from minirt.engine.execute.runner import Runner
from minirt.engine.limits import EngineLimits
from minirt.engine.plan_step import plan_step
from minirt.engine.request import Request
from minirt.engine.state.sequence import Sequence
from minirt.engine.state.slots import HostSlots
from minirt.kernels.step.table import NEXT_TOKENS, NUM_CACHED, NUM_NEXT
from minirt.profiling.planned import scheduled
from minirt.sampling_params import SamplingParams, resolve
from minirt.step.kv_cache import KVCache, PagesSpec

OTHER = """
import pickle, sys
sys.path[:0] = {path!r}
from engine.test_plan_step import execute
plans = pickle.load(sys.stdin.buffer)
pickle.dump([result.lists() for result in map(execute(), plans)], sys.stdout.buffer)
"""
PARAMS = [
    {"temperature": 0.0}, {"temperature": 0.9, "seed": 2**63 + 5, "top_p": 0.9}, {"temperature": 0.0, "presence_penalty": 1.5},
    {"temperature": 1e-40}, {"temperature": 0.7, "seed": 4, "top_k": 5, "min_p": 0.1, "logit_bias": {3: 2.0}},
]  # fmt: skip


def execute(model=None):
    """A function that executes plans in order, on a model and a cache of its own."""
    cache = KVCache([PagesSpec(1, 1)], 64, page_size=PAGE)
    runner = Runner(model or Noisy(), cache, torch.device("cpu"), EngineLimits(64, 4, 16), vocab_size=VOCAB)
    return lambda plan: runner.start(plan).result()


def test_another_process_draws_the_same_tokens():
    """Prompts in chunks, sequences that come and go, preemption, penalties, seeds of 64 bits."""
    it, _ = engine(seqs=4, budget=16, pages=14)
    it._runner.model = Noisy()
    plans, results, start = [], [], it._runner.start

    def kept(plan):
        own = plan.sequences
        assert [own.total_tokens, own.total_logits, own.total_draws] == own.values[2:5].sum(1).tolist(), "buckets use them"
        plans.append(pickle.dumps(plan))
        step = start(plan)
        results.append(step.result().lists())
        return step

    it._runner.start = kept
    for i, options in enumerate(PARAMS):
        add(it, [10 + i] * (3 + 5 * i), resolve(SamplingParams(max_tokens=12, ignore_eos=True, **options), None))
    finish(it)
    assert it.stats.num_preemptions
    assert len(plans) > 20
    code = OTHER.format(path=[path for path in sys.path if path])
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps([pickle.loads(plan) for plan in plans]), capture_output=True, check=True
    )
    assert pickle.loads(done.stdout) == results


def test_a_row_that_draws_nothing_yields_nothing_until_the_host_knows():
    """With a step of lookahead, the step behind it computes the slot once more."""
    it, cache = engine(lookahead=1)
    model, steps = Mock(), []

    def nan_at_the_second(batch, cache):
        steps.append(batch.seq_lens)
        logits = model(batch, cache)
        return logits.fill_(float("nan")) if len(steps) == 2 else logits

    it._runner.model, results, start = nan_at_the_second, [], it._runner.start

    def kept(plan):
        step = start(plan)
        results.append(step.result().lists())
        return step

    it._runner.start = kept
    add(it, [50, 51, 52], resolve(SamplingParams(max_tokens=9), None))
    outputs = finish(it)
    assert [len(tokens[0]) for tokens in results] == [1, 1, 0]
    assert results[1] == [[-1]]
    assert [output.finish_reason for output in outputs] == [None, "error"]
    assert steps == [(3,), (4,), (4,)], "the failed row stays where it was"
    assert cache.allocator.num_free == cache.num_pages


@pytest.mark.parametrize("budget", [64, 5])
def test_a_row_that_draws_nothing_leaves_shared_pages_alone(budget):
    """The step behind it computes a place of the failed row, which must not be the beginning: another sequence has that page."""
    it, _ = engine(lookahead=1, budget=budget)
    model, prompt = it._runner.model, list(range(10, 22))
    params = resolve(SamplingParams(max_tokens=9, ignore_eos=True), None)
    first = add(it, [*prompt, 30], params)
    outputs = [output for _ in range(8) for output in it.step()]
    it._runner.model = lambda batch, cache: model(batch, cache).masked_fill(
        (batch.seq_lens_device >= 24)[:, None], float("nan")
    )
    failed = add(it, [*prompt, *range(40, 52)], params)
    outputs += finish(it)
    tokens = [token for output in outputs if output.request_id == first for token in output.token_ids]
    assert tokens == undisturbed([*prompt, 30], 9)
    assert [output.finish_reason for output in outputs if output.request_id == failed] == ["error"]
    it._runner.model = model
    again = add(it, [*prompt, 31], params)
    outputs += finish(it)
    assert [t for o in outputs if o.request_id == again for t in o.token_ids] == undisturbed([*prompt, 31], 9)
    assert it.stats.prefix_cache_hits


def test_no_position_lies_beyond_the_end():
    """A slot has more drafts than its sequence has room for."""
    lens, cache = [], KVCache([PagesSpec(1, 1)], 8, page_size=PAGE)
    model = Mock()
    limits = replace(EngineLimits(64, 1, 16), max_drafts=4)
    runner = Runner(
        lambda batch, cache: lens.append(batch.seq_lens) or model(batch, cache), cache, torch.device("cpu"), limits,
        vocab_size=VOCAB,
    )  # fmt: skip
    slots = HostSlots(limits, 16)
    sequence = Sequence(Request(0, [50, 51, 52, 53], resolve(SamplingParams(temperature=0.0), None)), 7)
    sequence.take_slot(slots, [3, 5])

    def tokens_of(row, prompts):
        return runner.start(plan_step(scheduled(prompts, [row], slots), slots, runner.columns, VOCAB)).result().lists()[0]

    (token,) = tokens_of((0, 0, 4, 1, 1, 4), [sequence])
    row = runner.buffers.table[0]
    row[NUM_NEXT], row[NEXT_TOKENS + 1 : NEXT_TOKENS + 5] = 5, 1
    slots.num_sent[0] = 2
    tokens = tokens_of((0, -1, 5, 5, 5, 7), [])
    assert lens == [(4,), (6,)], "the last token is drawn, and not computed"
    assert 1 <= len(tokens) <= 2
    assert token >= 0


class Watched:
    """Proposes nothing, and compares the history of each slot with the tokens whose KV values are cached."""

    max_drafts, needs_history = 0, True

    def __init__(self):
        self.cache, self.compared = None, 0

    def propose(self, table, columns, rows, batch, wanted):
        for slot in [slot for slot in rows.slots.tolist() if slot >= 0]:
            row, size = table[slot], self.cache.page_size
            count = int(row[NUM_CACHED])
            pages, cached = row[columns.page_tables :].tolist(), self.cache.layers[0].k.view(-1)
            known = [int(cached[pages[i // size] * size + i % size]) for i in range(count)]
            if row[NUM_NEXT]:
                known.append(int(row[NEXT_TOKENS]))
            assert row[columns.tokens :][: len(known)].tolist() == known
            self.compared += len(known)


def test_the_history_has_all_tokens():
    """Also those of cached pages, and of a sequence that was preempted."""
    watched = Watched()
    it, watched.cache = engine(seqs=4, budget=16, pages=14, proposer=watched)
    params = resolve(SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True), None)
    for _ in range(2):
        for i in range(4):
            add(it, [10 + i] * (3 + 5 * i), params)
        finish(it)
    assert it.stats.num_preemptions
    assert it.stats.prefix_cache_hits
    assert watched.compared > 1000
