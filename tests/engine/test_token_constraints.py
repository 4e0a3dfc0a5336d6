"""Token constraints in the engine, on the mock model of test_engine.py and a constraint whose masks depend on every token.

Catches a mask of an earlier step or another row, a token that a constraint is told twice or not at all, a state that is lost when
its sequence is preempted, requests that wait for ever for a constraint, and errors that end more than one request.
"""

import itertools
import math
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from engine.test_engine import PROMPTS, VOCAB, add, engine, following
from engine.test_sampler import FEW_PAGES, KINDS, WORDS, Noisy, served
from engine.test_sampler import alone as alone_by_sampler
from hypothesis import given, settings
from hypothesis import strategies as st

from minirt.engine.collect.collector import no_token
from minirt.engine.compiling_requests import CompilingRequests
from minirt.engine.engine import Request
from minirt.engine.execute import sampler
from minirt.errors import EngineError, InputError, NumericsError, UnsupportedError
from minirt.kernels.sampling.dispatch import sample
from minirt.sampling_params import SamplingParams, resolve

IDS = itertools.count(2 * 10**6)
EOS = 5
BOUND = {"structured_outputs": {"regex": "x"}}


def permitted(generated):
    """A third of the tokens, by a hash of all that were generated; the end in every third state."""
    state = following(generated)
    allowed = {v for v in range(VOCAB) if (v * 5 + state) % 3 == 0 and v != EOS}
    return allowed | {EOS} if state % 3 == 0 else allowed


class State:
    def __init__(self, fails_at):
        self.tokens, self.fails_at = [], fails_at

    def accept(self, tokens):
        assert EOS not in tokens
        self.tokens += tokens


class Fake:
    """Implements `TokenConstraints`. `late`: number of steps after which a constraint is compiled."""

    def __init__(self, late=0):
        self.late, self.waiting, self.calls = late, [], 0

    def compile(self, spec):
        if spec.regex == "bad":
            raise InputError("bad", where="structured_outputs.regex")

    def prepare(self, spec, ends, min_tokens):
        assert EOS in ends
        future = Future()
        self.waiting.append([self.late, spec, future])
        self.tick(0)
        return future

    def tick(self, count=1):
        for entry in self.waiting:
            entry[0] -= count
            if entry[0] <= 0 and not entry[2].done():
                try:
                    self.compile(entry[1])
                    entry[2].set_result(State(len(entry[1].regex) - 2 if entry[1].regex.startswith("fail") else None))
                except InputError as error:
                    entry[2].set_exception(error)

    def fill(self, masks, rows):
        assert [(own.num_rows, own.drafts) for own in rows] == [(1, ())] * len(masks)
        assert masks.shape == (len(rows), -(-VOCAB // 32))
        assert masks.dtype == torch.int32
        self.calls += 1
        masks.fill_(0)  # what no row sets must not matter
        failed = {}
        for row, (own, _, _) in enumerate(rows):
            bits = permitted(own.tokens) if own is not None else range(VOCAB)
            for v in bits:
                masks[row, v // 32] |= torch.tensor(1 << (v % 32), dtype=torch.int64).to(torch.int32)
            if own is not None and own.fails_at is not None and len(own.tokens) >= own.fails_at:
                failed[row] = InputError("the grammar cannot go on", where=f"generated token {len(own.tokens)}")
        return failed


def bound_engine(*, late=0, **options):
    it, cache = engine(**options)
    it._constraints = it.checks._constraints = it._collector._constraints = it._compiling._constraints = Fake(late)
    return it, cache


def alone(prompt, params):
    return alone_by_sampler(prompt, params, WORDS if params.bad_words else (), permitted)


def run(it, requests):
    """Run (arrival, prompt, params) → tokens and the last output, by request."""
    outputs = served(it, requests, tick=it._constraints.tick)
    tokens = {i: [token for output in outputs[i] for token in output.token_ids] for i in outputs}
    return tokens, {i: outputs[i][-1] for i in outputs}


MIXED = [
    *KINDS, BOUND, BOUND | {"temperature": 1.1}, BOUND | {"presence_penalty": 1.0, "repetition_penalty": 1.3}, BOUND,
    BOUND | {"logit_bias": {3: 2.0, 96: -5.0}, "temperature": 0.6}, BOUND | {"stop_token_ids": list(range(0, 90, 7))},
    BOUND | {"frequency_penalty": 0.4, "temperature": 0.8, "logprobs": 2},
]  # fmt: skip
KIND = st.integers(0, len(MIXED) - 1)


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 12), PROMPTS, st.integers(6, 20), KIND), min_size=1, max_size=9),
    sizes=FEW_PAGES, late=st.integers(0, 3),
)  # fmt: skip
def test_any_schedule_gives_the_tokens_of_a_solo_run(requests, sizes, late):
    """Penalties, biases, masks and draws, with constraints and without. Catches counts of another step or slot."""
    it, cache = bound_engine(late=late, **sizes)
    it._runner.model = Noisy()
    usual = {"temperature": 0.0}
    asked = [(when, p, SamplingParams(**usual | {"max_tokens": n, "seed": n} | MIXED[k])) for when, p, n, k in requests]
    tokens, last = run(it, asked)
    for i, (_, prompt, params) in enumerate(asked):
        assert tokens[i] == alone(prompt, params), MIXED[requests[i][3]]
        assert last[i].error is None
    assert cache.allocator.num_free == sizes["pages"], "pages leaked"


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_constraint_follows_its_sequence_through_preemptions(lookahead):
    it, _ = bound_engine(pages=16, seqs=8, budget=64, lookahead=lookahead)
    it._runner.model = model = Noisy()
    params = SamplingParams(max_tokens=30, temperature=0.0, logit_bias={EOS: -50.0}, **BOUND)
    requests = [(0, [i + 10] * 9, params) for i in range(6)]
    tokens, _ = run(it, requests)
    assert [tokens[i] for i in range(6)] == [alone(r[1], params) for r in requests]
    assert sum(model.tokens_per_step) > sum(9 + len(tokens[i]) - 1 for i in range(6)), "nothing was recomputed"


def test_the_forward_pass_is_queued_before_the_tokens_of_the_step_before_are_read(monkeypatch):
    """So the device has work while the host waits and computes masks. What the sampler needs beside them is sent before. Steps
    without constraints keep their order."""
    it, _ = bound_engine(lookahead=1)
    it._runner.model, order = Noisy(), []
    start, collect, fill = it._runner._forward, it._collector.collect, it._constraints.fill
    it._runner._forward = lambda *args: order.append("forward") or start(*args)
    it._collector.collect = lambda *args: order.append("collect") or collect(*args)
    it._constraints.fill = lambda *args: order.append("masks") or fill(*args)
    slots = it._runner.sampler.fill_slots
    it._runner.sampler.fill_slots = lambda rules: order.extend(["slots"] * len(rules)) or slots(rules)
    monkeypatch.setattr(sampler, "sample", lambda *args, **own: order.append("draw") or sample(*args, **own))
    run(it, [(0, [1, 2], SamplingParams(max_tokens=3, temperature=0.0, logit_bias={EOS: -50.0}, **BOUND))])
    assert order == ["forward", "slots", "masks", "draw", *["forward", "collect", "masks", "draw"] * 2, "collect"]
    del order[:]
    run(it, [(0, [1, 2], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))])
    assert order == ["forward", "draw", *["forward", "draw", "collect"] * 2, "collect"]


def test_a_request_that_has_ended_writes_into_no_slot():
    """Its row in the step that was queued meanwhile is still drawn, and another sequence's slot may be the last one."""
    it, _ = bound_engine(seqs=2, lookahead=1)
    it._runner.model = Noisy()
    first = SamplingParams(max_tokens=1, temperature=0.0)
    last_slot = SamplingParams(max_tokens=25, temperature=0.0, repetition_penalty=1.4, presence_penalty=0.9, ignore_eos=True)
    ending = SamplingParams(max_tokens=30, temperature=0.0, frequency_penalty=-1.0, logit_bias={EOS: 50.0}, **BOUND)
    requests = [(0, [1, 2], first), (0, [3], last_slot), (2, [4, 7, 9], ending)]
    tokens, _ = run(it, requests)
    assert tokens[2][-1] == EOS
    assert 1 < len(tokens[2]) < 20
    assert [tokens[i] for i in range(3)] == [alone(prompt, own) for _, prompt, own in requests]


def test_steps_without_constraints_compute_no_mask():
    it, _ = bound_engine()
    run(it, [(0, [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))])
    assert it._constraints.calls == 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_constraint_that_cannot_go_on_ends_its_request_only(lookahead):
    it, cache = bound_engine(lookahead=lookahead)
    it._runner.model = Noisy()
    bias = {"temperature": 0.0, "max_tokens": 12, "logit_bias": {EOS: -50.0}}
    failing = SamplingParams(structured_outputs={"regex": "failxx"}, **bias)  # at its fourth token
    requests = [(0, [1, 2], SamplingParams(**bias | BOUND)), (0, [3, 4], failing), (1, [5], SamplingParams(**bias))]
    tokens, last = run(it, requests)
    assert tokens[0] == alone(*requests[0][1:])
    assert tokens[2] == alone(*requests[2][1:])
    assert tokens[1] == alone([3, 4], failing)[:4]
    assert last[1].finish_reason == "error"
    assert str(last[1].error) == "generated token 4: the grammar cannot go on"
    assert cache.allocator.num_free == cache.num_pages


@pytest.mark.parametrize("lookahead", [0, 1])
def test_what_leaves_no_token_is_an_error(lookahead):
    it, _ = bound_engine(lookahead=lookahead)
    it._runner.model = Noisy()
    only = next(v for v in permitted([]) if v not in permitted([v]))
    params = SamplingParams(allowed_token_ids=[only], temperature=0.0, max_tokens=9, **BOUND)
    tokens, last = run(it, [(0, [1, 2], params)])
    assert tokens[0] == [only]
    assert isinstance(last[0].error, InputError)
    assert str(last[0].error) == (
        "allowed_token_ids: no token is left to draw; expected a token that fits structured_outputs and allowed_token_ids; "
        "found none for generated token 1 (a grammar needs an end-of-sequence token, too)"
    )
    it._runner.model = lambda batch, cache: Noisy()(batch, cache).fill_(math.nan)
    _, last = run(it, [(0, [1, 2], params)])
    assert isinstance(last[0].error, NumericsError), "the settings leave tokens, so it is the model"


def test_a_constraint_that_cannot_go_on_behind_a_draft_is_why_no_token_is_drawn():
    """Its row allows no token. The model is not to blame."""
    sampling = resolve(SamplingParams(**BOUND), None)
    tokens = torch.tensor([1, 2, 3]).numpy()
    own = SimpleNamespace(rules=None, tokens=tokens, prompt_len=2, constraint=State(fails_at=0), sampling=sampling)
    assert str(no_token(own, Fake(), VOCAB)) == "generated token 0: the grammar cannot go on"
    own.constraint = State(fails_at=None)
    assert isinstance(no_token(own, Fake(), VOCAB), NumericsError)


def test_requests_wait_while_their_constraint_is_compiled():
    it, _ = bound_engine(late=5, lookahead=1)
    free = add(it, [1, 2], resolve(SamplingParams(max_tokens=20), None))
    bound = resolve(SamplingParams(max_tokens=4, **BOUND), None)
    waiting = Request(next(IDS), [7, 8], bound, (EOS,))
    aborted = Request(next(IDS), [7, 8], bound, (EOS,))
    for request in (waiting, aborted):
        it.add(request)
    first = {}
    for step in range(60):
        it._constraints.tick()
        if step == 2:
            it.abort(aborted.id)
        for output in it.step():
            first.setdefault(output.request_id, step)
    assert first.keys() == {free, waiting.id}
    assert first[free] <= 1
    assert first[waiting.id] >= 4
    assert not it.has_work


def test_a_constraint_that_does_not_compile_ends_its_request():
    it, _ = bound_engine(late=2)
    for regex, kind in (("bad", InputError), ("ok", None), ("explodes", EngineError)):
        own = resolve(SamplingParams(max_tokens=3, structured_outputs={"regex": regex}), None)
        request = Request(next(IDS), [1, 2], own, (EOS,))
        it.add(request)
        if kind is EngineError:
            it._compiling[request.id].set_exception(KeyError("x"))
        outputs = []
        for _ in range(20):
            it._constraints.tick()
            outputs += it.step()
        assert isinstance(outputs[-1].error, kind) if kind else outputs[-1].error is None
        assert not it.has_work


def test_recovery_keeps_requests_whose_constraint_is_being_compiled():
    it, cache = bound_engine(late=4, lookahead=1)
    it._runner.model = Noisy()
    started = add(it, [1, 2], resolve(SamplingParams(max_tokens=20), None))
    params = SamplingParams(max_tokens=5, temperature=0.0, **BOUND)
    request = Request(next(IDS), [7, 8], resolve(params, None), (EOS,))
    it.add(request)
    it.step()
    it.recover()
    assert started not in it
    assert request.id in it
    tokens = []
    for _ in range(30):
        it._constraints.tick()
        tokens += [token for output in it.step() for token in output.token_ids]
    assert tokens == alone([7, 8], params)
    assert cache.allocator.num_free == cache.num_pages


def test_a_request_whose_constraint_cannot_be_prepared_does_not_run_without_it(monkeypatch):
    it, _ = bound_engine()

    def no_thread(spec, ends, min_tokens):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(it._constraints, "prepare", no_thread)
    request = Request(next(IDS), [1], resolve(SamplingParams(**BOUND), None), (EOS,))
    with pytest.raises(RuntimeError):
        it.add(request)
    it.recover()
    assert request.id not in it


def test_a_step_costs_nothing_for_constraints_that_are_being_compiled():
    class Untouched(CompilingRequests):
        def items(self):
            raise AssertionError("a step looks at all of them")

        values = __iter__ = items

    it, _ = bound_engine(late=3)
    it._compiling = Untouched(it._constraints)
    add(it, [1, 2], resolve(SamplingParams(max_tokens=20), None))
    bound = [Request(next(IDS), [7, 8], resolve(SamplingParams(max_tokens=2, **BOUND), None), (EOS,)) for _ in range(3)]
    for request in bound:
        it.add(request)
    it.abort(bound[1].id)
    assert it._constraints.waiting[1][2].cancelled(), "nobody needs it any more"
    ended = set()
    for _ in range(9):
        ended |= {output.request_id for output in it.step() if output.finish_reason == "length"}
        it._constraints.tick()
    assert ended == {bound[0].id, bound[2].id}


def test_an_engine_without_constraints_refuses():
    it, _ = engine()
    with pytest.raises(UnsupportedError, match="structured_outputs: a grammar is about text, and there is no tokenizer"):
        it.checks.check([1], resolve(SamplingParams(**BOUND), None))
    request = Request(next(IDS), [1], resolve(SamplingParams(**BOUND), None), (EOS,))
    it.add(request)  # of a caller that has not checked it
    (output,) = it.step()
    assert isinstance(output.error, UnsupportedError)
    assert not it.has_work


def test_memory_that_runs_out_in_the_sampler_changes_nothing(monkeypatch):
    """The tokens of the earlier step, which were collected while the step was started, are delivered all the same."""
    it, _ = bound_engine(lookahead=1, seqs=4)
    it._runner.model = Noisy()
    calls = itertools.count()

    def short_of_memory(*args, **own):
        if next(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sample(*args, **own)

    monkeypatch.setattr(sampler, "sample", short_of_memory)
    params = SamplingParams(max_tokens=10, temperature=0.0, logit_bias={EOS: -50.0}, **BOUND)
    requests = [(0, [i, 2 * i, 3], params) for i in range(1, 4)]
    tokens, last = run(it, requests)
    assert [tokens[i] for i in range(3)] == [alone(r[1], params) for r in requests]
    assert next(calls) > 12
    assert all(output.error is None for output in last.values())
