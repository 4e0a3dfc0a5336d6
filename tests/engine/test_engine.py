"""The scheduler and the engine on a mock model whose next token depends on every cached token.

Catches pages shared by mistake, positions or slots off by one, stale pages after preemption, leaked pages, lost or reordered
requests, and wrong chunk boundaries.
"""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minirt.engine.engine import Engine, Request
from minirt.engine.limits import EngineLimits, EngineOptions
from minirt.errors import QueueFullError
from minirt.kernels.step.table import MATCHED, NEXT_TOKENS, NUM_CACHED, NUM_NEXT, PROMPT_LEN
from minirt.sampling_params import SamplingParams, resolve
from minirt.step.kv_cache import KVCache, PagesSpec

VOCAB = 97
PAGE = 4


class Mock:
    """Writes each token to its slot, then reads the sequence back through the block table. Next token: a hash of the sequence."""

    def __init__(self):
        self.tokens_per_step = []

    def __call__(self, batch, cache):
        pages = cache.layers[0].k.view(-1)
        pages[batch.slot_mapping] = batch.input_ids.float()
        self.tokens_per_step.append(batch.num_tokens)
        rows = []
        for i, (start, count) in enumerate(zip(batch.query_starts, batch.query_lens, strict=True)):
            for j in range(count):
                length = batch.seq_lens[i] - count + j + 1
                assert batch.positions[start + j] == length - 1
                where = torch.arange(length)
                slots = (batch.block_tables[i][where // cache.page_size].long() * cache.page_size + where % cache.page_size)
                rows.append(following(pages[slots].long().tolist()))
        logits = torch.nn.functional.one_hot(torch.tensor(rows), VOCAB).float()
        return logits[batch.logits_indices]


def following(tokens):
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 10007
    return value % VOCAB


def undisturbed(prompt, count, eos=None):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens))
        if tokens[-1] == eos:
            break
    return tokens[len(prompt) :]


def engine(
    pages=64, seqs=8, budget=64, length=64, lookahead=1, prefix_cache=True, max_waiting=None, proposer=None, adaptive=False
):
    cache = KVCache([PagesSpec(1, 1)], pages, page_size=PAGE)
    cache.layers[0].k.fill_(float("nan"))
    limits = EngineLimits(length, seqs, budget, max_waiting, 0 if proposer is None else proposer.max_drafts)
    options = EngineOptions(prefix_cache, lookahead=lookahead, adaptive_drafts=adaptive)
    return Engine(Mock(), cache, limits, options, vocab_size=VOCAB, proposer=proposer), cache


IDS = itertools.count()


def add(it, prompt, sampling=None, eos=()):
    """Queue a request and return its id."""
    it.checks.check(prompt)
    request = Request(next(IDS), prompt, sampling or resolve(None, None), eos)
    it.add(request)
    return request.id


def finish(it):
    """Run steps until nothing is left → their outputs."""
    outputs = []
    while it.has_work:
        outputs += it.step()
    return outputs


def run(it, requests, aborts=(), eos=(5,)):
    """Run `requests` (arrival step, prompt, max tokens) with `aborts` (step, request) → tokens and reasons by request."""
    ids, tokens, reasons = {}, {i: [] for i in range(len(requests))}, {}
    for step in range(10_000):
        for i, (arrival, prompt, count) in enumerate(requests):
            if arrival == step:
                ids[add(it, prompt, resolve(SamplingParams(max_tokens=count), None), eos)] = i
        for when, which in aborts:
            if when == step:
                for request, i in ids.items():
                    if i == which:
                        it.abort(request)
                        reasons.setdefault(i, "abort")
        for output in it.step():
            i = ids[output.request_id]
            assert i not in reasons, "a token after the end"
            tokens[i] += output.token_ids
            if output.finish_reason:
                reasons[i] = output.finish_reason
        if not it.has_work and step > max(r[0] for r in requests):
            return tokens, reasons
    raise AssertionError("starved")


@pytest.mark.parametrize("lookahead", [0, 1])
def test_tokens_are_delivered_before_the_engines_own_work(lookahead):
    """A caller sees the last token while its request still holds pages, sees all of them in order, and none twice."""
    requests = [(0, [1, 2, 3], 9), (1, [4] * 11, 7), (3, [5, 6], 1)]
    it, cache = engine(lookahead=lookahead)
    expected, _ = run(engine(lookahead=lookahead)[0], requests)
    settings = [resolve(SamplingParams(max_tokens=count), None) for *_, count in requests]
    ids = {add(it, requests[i][1], settings[i], (5,)): i for i in range(len(requests))}
    tokens = {i: [] for i in expected}

    def deliver(outputs):
        for output in outputs:
            assert output.request_id in it, "it is dropped later"
            tokens[ids[output.request_id]] += output.token_ids
        if any(output.finish_reason for output in outputs):
            assert cache.allocator.num_free < cache.num_pages

    while it.has_work:
        assert it.step(deliver) == []
    assert tokens == expected
    assert cache.allocator.num_free == cache.num_pages


PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)
SIZES = {"pages": st.integers(17, 40), "seqs": st.integers(1, 6), "budget": st.integers(1, 40), "lookahead": st.integers(0, 1)}


def aborts_until(step, requests):
    """(step, request) of requests whose callers leave."""
    return st.lists(st.tuples(st.integers(0, step), st.integers(0, requests - 1)), max_size=4)


class Drafts:
    """Proposes up to 4 tokens after the next one: all right, all wrong, or right with a probability. Reads the cached tokens."""

    max_drafts, needs_history = 4, False

    def __init__(self, right, seed=0):
        self.right, self._draw = right, random.Random(seed)
        self.cache, self.counts = None, []

    def propose(self, table, columns, rows, batch, wanted):
        for slot in rows.slots.tolist():
            row = table[slot]
            if row[NUM_NEXT] == 0 or row[PROMPT_LEN] > row[NUM_CACHED]:
                continue
            pages, size = row[columns.page_tables :].tolist(), self.cache.page_size
            cached = self.cache.layers[0].k.view(-1)
            known = [int(cached[pages[i // size] * size + i % size]) for i in range(int(row[NUM_CACHED]))]
            known.append(int(row[NEXT_TOKENS]))
            count = self._draw.randrange(5)
            for i in range(count):
                token = following(known)
                known.append(token if self._draw.random() < self.right else (token + 1) % VOCAB)
                row[NEXT_TOKENS + 1 + i] = known[-1]
            row[NUM_NEXT], row[MATCHED] = 1 + count, count


def drafting(right, seed=0, **options):
    drafts = Drafts(right, seed)
    it, cache = engine(proposer=drafts, **options)
    drafts.cache = cache
    return it, cache


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 10), PROMPTS, st.integers(1, 20)), min_size=1, max_size=10),
    sizes=st.fixed_dictionaries(SIZES), aborts=aborts_until(25, 10), seed=st.integers(0, 99),
    right=st.sampled_from([None, None, 0.0, 0.5, 0.8, 1.0]),
)  # fmt: skip
def test_any_schedule_gives_the_undisturbed_tokens(requests, sizes, aborts, seed, right):
    """With drafts, unless `right` is None. Rejected ones leave no trace, whether a step is cut by the budget, a request ends in
    the middle, or pages run out; also if the host does not know how many tokens the step before has yielded."""
    it, cache = engine(**sizes) if right is None else drafting(right, seed, **sizes)
    tokens, reasons = run(it, requests, aborts)
    for i, (_, prompt, count) in enumerate(requests):
        wanted = undisturbed(prompt, min(count, 64 - len(prompt)), eos=5)
        assert tokens[i] == (wanted[: len(tokens[i])] if reasons[i] == "abort" else wanted)
        assert reasons[i] in ("abort", "stop" if wanted[-1] == 5 else "length")
    assert cache.allocator.num_free == sizes["pages"], "pages leaked"


@pytest.mark.parametrize("lookahead", [0, 1])
def test_right_drafts_save_steps_and_wrong_ones_cost_none(lookahead):
    steps = {}
    for right in (0.0, 1.0):
        it, _ = drafting(right, lookahead=lookahead)
        tokens, _ = run(it, [(0, [50, 51], 40)])
        assert tokens[0] == undisturbed([50, 51], 40, eos=5)
        steps[right] = len(it._runner.model.tokens_per_step)
    assert len(tokens[0]) <= steps[0.0] <= len(tokens[0]) + lookahead
    assert steps[1.0] < steps[0.0] / 2


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_more_than_max_waiting_are_refused(limit):
    """What a step computes does not count, and what already waits is never refused."""
    it, cache = engine(seqs=2, max_waiting=limit, lookahead=0)
    first = [add(it, [50 + i], resolve(SamplingParams(max_tokens=3), None)) for i in range(7)]
    errors = [output for output in it.step() if output.error is not None]
    assert [output.request_id for output in errors] == first[2 + limit :]
    assert {type(output.error) for output in errors} == {QueueFullError}
    assert f"at most {limit}" in str(errors[0].error)
    late = add(it, [60])
    assert [output.request_id for output in it.step() if output.error is not None] == [late]
    ended = [output.request_id for _ in range(40) for output in it.step() if output.finish_reason == "length"]
    assert sorted(ended) == first[: 2 + limit]
    assert not it.has_work
    assert cache.allocator.num_free == 64


def test_preempted_sequences_are_not_refused():
    it, _ = engine(pages=9, seqs=4, length=32, max_waiting=1)
    ids = [add(it, [50 + i] * 7, resolve(SamplingParams(max_tokens=20), None)) for i in range(4)]
    outputs = [output for _ in range(200) for output in it.step()]
    assert len(it._runner.model.tokens_per_step) > 40, "nothing was preempted"
    assert {output.request_id for output in outputs if output.finish_reason == "length"} == set(ids)
