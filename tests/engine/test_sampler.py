"""Penalties, masks and log-probabilities in the engine, on the mock model of test_engine.py.

Catches: counts that miss the token that only the device knows, counts that survive in a reused slot or are not rebuilt after a
preemption, a prompt token that is scored twice or not at all, log-probabilities of another row, kernels that run unasked.
"""

import itertools
import math

import pytest
import torch
from engine.test_engine import PROMPTS, SIZES, VOCAB, Mock, engine, following
from hypothesis import given, settings
from hypothesis import strategies as st

from minirt.engine import request_checks
from minirt.engine.engine import Request
from minirt.engine.execute import sampler
from minirt.engine.execute.logits_processors import LogitsProcessors
from minirt.engine.execute.runner import Runner
from minirt.engine.limits import EngineLimits
from minirt.engine.plan_step import plan_step
from minirt.engine.state.sequence import Sequence
from minirt.engine.state.slots import HostSlots
from minirt.errors import InputError
from minirt.kernels.sampling.batch import SamplingBatch
from minirt.kernels.sampling.dispatch import sample
from minirt.profiling.planned import scheduled
from minirt.sampling_params import SamplingParams, resolve
from minirt.step.rules import Rules

IDS = itertools.count(10**6)


class Noisy(Mock):
    """Logits that depend on every token of the sequence, with many near the top, so that penalties change the choice."""

    def __call__(self, batch, cache):
        rows = super().__call__(batch, cache).argmax(-1)
        return spread(rows)


def spread(rows):
    v = torch.arange(VOCAB)
    return ((rows[:, None] * 7 + v * 31) % 13).float() / 3 - 1.5


def alone(prompt, params, bad_words=(), permitted=None):
    """The tokens of a request by itself, computed from the definitions, without an engine.

    `permitted`: of a request with structured outputs, generated tokens → those that may follow.
    """
    effective, eos = resolve(params, None), (5,)
    tokens = list(prompt)
    while len(tokens) - len(prompt) < min(effective.max_tokens, 64 - len(prompt)):
        generated = tokens[len(prompt) :]
        x = spread(torch.tensor([following(tokens)]))[0]
        counts = torch.tensor(generated, dtype=torch.int64).bincount(minlength=VOCAB)
        for v, bias in effective.logit_bias.items():
            x[v] += bias
        known = torch.tensor([v in tokens for v in range(VOCAB)])
        x = torch.where(known, torch.where(x > 0, x / effective.repetition_penalty, x * effective.repetition_penalty), x)
        x = x - effective.frequency_penalty * counts - effective.presence_penalty * (counts > 0)
        constrained = permitted and effective.structured_outputs
        for some in (effective.allowed_token_ids, permitted(generated) if constrained else None):
            if some is not None:
                x[[v for v in range(VOCAB) if v not in some]] = -math.inf
        if len(generated) < effective.min_tokens:
            x[[*eos, *effective.stop_token_ids]] = -math.inf
        for word in bad_words:
            if tuple(generated[len(generated) - len(word) + 1 :]) == word[:-1]:
                x[word[-1]] = -math.inf
        tokens.append(sample(x[None], SamplingBatch.build([(effective, len(generated))])).item())
        if tokens[-1] in effective.stop_token_ids or (tokens[-1] in eos and not effective.ignore_eos):
            break
    return tokens[len(prompt) :]


KINDS = [
    {}, {"temperature": 0.9}, {"presence_penalty": 1.0}, {"frequency_penalty": -0.4, "temperature": 0.7},
    {"repetition_penalty": 1.5},
    {"logit_bias": {3: 2.0, 96: -5.0}}, {"allowed_token_ids": [1, 2, 3, 5, 8]}, {"min_tokens": 6, "stop_token_ids": [7, 11, 20]},
    {"bad_words": "x", "temperature": 1.3}, {"stop_token_ids": list(range(0, 90, 7))},
    {"presence_penalty": -0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": {40: 1.0}, "min_tokens": 3,
     "allowed_token_ids": list(range(0, 97, 2)), "bad_words": "x", "temperature": 0.8, "ignore_eos": True},
]  # fmt: skip
WORDS = ((4,), (2, 2), (3, 1, 3), (8, 8, 8, 8), (40, 50), (1, 2, 1, 2, 5))


def served(it, requests, unscored=None, tick=lambda: None):
    """Run (arrival, prompt, params) → the outputs of each request, in order.

    `unscored`: of each request, how many first tokens of its prompt have no scores. `tick` is called before each step.
    """
    ids, outputs = {}, {}
    for step in range(10_000):
        for i, (arrival, prompt, params) in enumerate(requests):
            if arrival == step:
                sampling, first = resolve(params, None), unscored[i] if unscored else 1
                words = WORDS if sampling.bad_words else ()
                request = Request(next(IDS), prompt, sampling, (5,), bad_words=words, first_scored=first)
                it.checks.check(prompt, sampling, request.rules)
                it.add(request)
                ids[request.id], outputs[i] = i, []
        tick()
        for output in it.step():
            before = outputs[ids[output.request_id]]
            assert not before or before[-1].finish_reason is None, "an output after the last"
            before.append(output)
        if not it.has_work and step > max(r[0] for r in requests):
            return outputs
    raise AssertionError("starved")


def run(it, requests, unscored=None):
    """The same without errors → tokens, log-probabilities and those of the prompt, by request."""
    tokens, logprobs, scores = {}, {}, {}
    for i, outputs in served(it, requests, unscored).items():
        assert not [output.error for output in outputs if output.error]
        tokens[i] = [token for output in outputs for token in output.token_ids]
        logprobs[i] = [row for output in outputs for row in output.logprobs]
        for output in outputs:
            if output.prompt_logprobs is not None:
                assert i not in scores
                scores[i] = output.prompt_logprobs
    return tokens, logprobs, scores


FEW_PAGES = st.fixed_dictionaries(SIZES | {"pages": st.integers(16, 30)})


@pytest.mark.parametrize("lookahead", [0, 1])
def test_logprobs_are_those_of_the_raw_logits(lookahead):
    it, _ = engine(seqs=4, budget=20, lookahead=lookahead)
    it._runner.model = Noisy()
    both = {"logprobs": 3, "prompt_logprobs": 2, "temperature": 0.7, "seed": 3, "presence_penalty": 1.5, "max_tokens": 9}
    requests = [
        (0, [9, 8, 7], SamplingParams(**both)), (0, [50] * 30, SamplingParams(max_tokens=5, temperature=0.0)),
        (1, [60] * 25, SamplingParams(max_tokens=6, logprobs=-1, prompt_logprobs=-1)),
        (2, [4], SamplingParams(logprobs=0, max_tokens=3)), (2, [4, 5], SamplingParams(prompt_logprobs=0, max_tokens=3)),
    ]  # fmt: skip
    tokens, found, scores = run(it, requests)
    assert set(scores) == {0, 2, 4}
    for i, (_, prompt, params) in enumerate(requests):
        assert len(found[i]) == (0 if params.logprobs is None else len(tokens[i]))
        text, start = prompt + tokens[i], len(prompt)
        rows = list(zip(range(start, len(text)), found[i], itertools.repeat(params.logprobs)))
        rows += list(zip(range(1, start), scores.get(i, ()), itertools.repeat(params.prompt_logprobs)))
        if i in scores:
            assert len(scores[i]) == start - 1
        for position, row, top in rows:
            z = spread(torch.tensor([following(text[:position])]))[0]
            exact = z.double().log_softmax(-1)
            assert row.token_id == text[position]
            assert row.logprob == pytest.approx(exact[row.token_id].item(), abs=1e-5)
            assert row.rank == 1 + int((z > z[row.token_id]).sum())
            order = sorted(range(VOCAB), key=lambda v, z=z: (-z[v].item(), v))[: VOCAB if top == -1 else top]
            assert [v for v, _ in row.top] == order
            assert [p for _, p in row.top] == pytest.approx(exact[order].tolist(), abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 8), PROMPTS, st.integers(0, 12), st.integers(0, 30)), min_size=1, max_size=8),
    sizes=FEW_PAGES,
)
def test_every_prompt_token_is_scored_once(requests, sizes):
    """Also where a prompt is cut into chunks, or preempted, or its beginning is in the prefix cache or is not to be scored."""
    it, cache = engine(**sizes)
    it._runner.model = Noisy()
    asked = [(w, p, SamplingParams(max_tokens=n, prompt_logprobs=1 if on or not n else None)) for w, p, n, on in requests]
    unscored = [min(max(on, 1), len(prompt)) for _, prompt, _, on in requests]
    tokens, _, scores = run(it, asked, unscored)
    for i, (_, prompt, params) in enumerate(asked):
        assert tokens[i] == (alone(prompt, params) if params.max_tokens else [])
        assert (i in scores) == (params.prompt_logprobs is not None)
        for position, row in enumerate(scores.get(i, ()), unscored[i]):
            exact = spread(torch.tensor([following(prompt[:position])]))[0].double().log_softmax(-1)
            assert row.token_id == prompt[position]
            assert row.logprob == pytest.approx(exact[row.token_id].item(), abs=1e-5)
        assert i not in scores or len(scores[i]) == len(prompt) - unscored[i]
    assert cache.allocator.num_free == sizes["pages"], "pages leaked"


def test_a_prompt_that_is_not_scored_at_its_beginning_may_be_long():
    """A step is bounded by the rows of logits, which unscored tokens do not need; and the prefix cache has their pages."""
    it, cache = engine(pages=600, seqs=4, budget=2000, length=1500)
    it._runner.model = model = Noisy()
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    for tail in (5, 6):
        run(it, [(0, [1] * 1400 + [tail] * 3, params)], [1400])
    full = (1400 - 1) // cache.page_size * cache.page_size
    assert model.tokens_per_step == [1403, 1403 - full]


def test_a_slot_that_comes_back_is_filled_anew():
    """Its data is that of the same sequence, from before it ran in another slot."""
    rules, own = Rules(presence=3.0), resolve(SamplingParams(max_tokens=9, temperature=0.0), None)
    runner = Runner(
        lambda batch, cache: torch.arange(VOCAB).float().repeat(len(batch.logits_indices), 1), engine()[1],
        torch.device("cpu"), EngineLimits(64, 3, 64), vocab_size=VOCAB,
    )  # fmt: skip
    sequence, slots = Sequence(Request(0, [1], own), 10, rules=rules), HostSlots(EngineLimits(64, 3, 64), 16)
    for slot in (1, 2, 2, 1):
        slots.free.append(slot)
        sequence.take_slot(slots, [0, 1, 2])
        for first in (True, False):
            length = len(sequence.tokens)
            row = slot, 0 if first else -1, length if first else 1, 1, 1, length
            step = scheduled([sequence] if first else [], [row], slots)
            result = runner.start(plan_step(step, slots, runner.columns, VOCAB)).result()
            slots.num_sent[slot] = 3
            slots.extend(step.sequences.slots, result.counts, result.tokens, 0.0)
        sequence.leave_slot()
    expected = list[int]()
    for _ in range(8):
        x = torch.arange(VOCAB).float()
        x[expected] -= 3.0
        expected.append(int(x.argmax()))
    assert list(sequence.tokens[1:]) == expected


def test_a_step_scores_a_bounded_number_of_prompt_tokens():
    it, _ = engine(pages=600, seqs=4, budget=2000, length=1500)
    sizes, model = [], Noisy()

    def watched(batch, cache):
        logits = model(batch, cache)
        sizes.append(len(logits))
        return logits

    it._runner.model = watched
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    _, _, scores = run(it, [(0, [1] * 700, params), (0, [2] * 300, params), (0, [3] * 40, SamplingParams(max_tokens=2))])
    assert [len(scores[i]) for i in (0, 1)] == [699, 299]
    assert max(sizes) == it.limits.max_logits_rows == 256


@pytest.mark.parametrize(("listed", "count"), [(-1, VOCAB), (20, 20)])
def test_too_many_log_probabilities_of_a_prompt_are_refused(listed, count, monkeypatch):
    """A prompt of 11 tokens has 10 that are scored. The limit itself is accepted."""
    it, _ = engine(length=200)
    sampling = resolve(SamplingParams(prompt_logprobs=listed), None)
    monkeypatch.setattr(request_checks, "MAX_PROMPT_LOGPROBS", 10 * count)
    it.checks.check([1] * 11, sampling)
    found = rf"11 tokens × {count} listed for each = {11 * count:,}"
    with pytest.raises(InputError, match=rf"prompt_logprobs: .*at most {10 * count:,} .*{found}.*Generator\.logits"):
        it.checks.check([1] * 12, sampling)
    for fewer in (0, None):
        it.checks.check([1] * 190, resolve(SamplingParams(prompt_logprobs=fewer), None))


def test_a_step_that_runs_out_of_memory_and_is_tried_again_counts_once(monkeypatch):
    it, _ = engine(seqs=4, budget=20)
    it._runner.model = Noisy()
    original, calls = sampler.token_logprobs, itertools.count()

    def fails_twice(*args, **kwargs):
        if next(calls) in (1, 6):
            raise torch.OutOfMemoryError("no memory")
        return original(*args, **kwargs)

    monkeypatch.setattr(sampler, "token_logprobs", fails_twice)
    params = SamplingParams(max_tokens=8, temperature=0.0, frequency_penalty=0.7, logprobs=1, prompt_logprobs=1)
    requests = [(0, [9, 8, 7, 6], params), (0, [30] * 7, params)]
    tokens, _, scores = run(it, requests)
    for i in (0, 1):
        assert tokens[i] == alone(requests[i][1], params)
        assert len(scores[i]) == len(requests[i][1]) - 1
    assert next(calls) > 6


def test_nobody_asks_nothing_runs(monkeypatch):
    """And a step with one row that asks runs what that row needs."""
    ran = []
    monkeypatch.setattr(LogitsProcessors, "process", lambda self, logits, *rest, **flags: ran.append("process") or logits)
    monkeypatch.setattr(LogitsProcessors, "record", lambda self, *rest: ran.append("record"))
    monkeypatch.setattr(LogitsProcessors, "fill", lambda self, *rest: ran.append("fill"))
    scores = sampler.token_logprobs
    monkeypatch.setattr(sampler, "token_logprobs", lambda *a, **k: ran.append("logprobs") or scores(*a, **k))
    it, _ = engine()
    run(it, [(0, [1, 2, 3], SamplingParams(max_tokens=4, temperature=t, top_k=3)) for t in (0.0, 0.9)])
    assert ran == []
    own = SamplingParams(max_tokens=2, logprobs=0, ignore_eos=True)
    run(it, [(0, [1, 2, 3], SamplingParams(max_tokens=2)), (0, [1, 2], own)])
    assert ran == ["logprobs"] * 2
    del ran[:]
    run(it, [(0, [1, 2, 3], SamplingParams(max_tokens=2, presence_penalty=1.0, ignore_eos=True))])
    assert ran == ["fill", "process", "record", "process", "record"]
    del ran[:]
    run(it, [(0, [1, 2, 3], SamplingParams(max_tokens=4, min_tokens=2, ignore_eos=True))])
    assert ran == ["fill", "process", "record", "process", "record"], "min_tokens is over after two steps"


def test_greedy_steps_need_no_logits_unless_somebody_asks(monkeypatch):
    """The LM head writes none, and `sample` reads its row maxima."""
    runner = Runner(Mock(), engine()[1], torch.device("cpu"), EngineLimits(64, 2, 64), vocab_size=VOCAB)
    asked, maxima, forward, send = [], torch.zeros(1, 1, dtype=torch.int64), runner._forward, runner.buffers.send
    monkeypatch.setattr(runner.buffers, "send", lambda plan, logits_needed, greedy: asked.append(logits_needed) or send(plan))
    monkeypatch.setattr(runner, "_forward", lambda plan: forward(plan)._replace(row_maxima=maxima))
    used = []

    def sample(logits, batch, out, row_maxima=None, **named):
        used.append(row_maxima is maxima)
        return out

    monkeypatch.setattr(sampler, "sample", sample)
    greedy = {"temperature": 0.0}
    for options in ({}, {"logprobs": 1}, {"temperature": 1.0}, {"presence_penalty": 1.0}, None):
        own = resolve(SamplingParams(**(greedy | (options or {}))), None)
        sequence, slots = Sequence(Request(0, [1], own), 9, rules=Rules.of(own, (), ())), HostSlots(EngineLimits(64, 1, 64), 16)
        sequence.constraint = object() if options is None else None
        sequence.take_slot(slots, [0])
        plan = plan_step(scheduled([sequence], [(0, 0, 1, 1, 1, 1)], slots), slots, runner.columns, VOCAB)
        if plan.sampling.masked:
            forward = runner.forward(plan)
            runner.masks(1).fill_(-1)
            runner.draw(forward)
        else:
            runner.start(plan)
    assert asked == [False, True, True, True, True]
    assert used == [True, True, True, False, False], "row maxima are those of the logits before penalties and masks"


def test_settings_are_checked_against_the_model():
    it, _ = engine()
    for options in ({"stop_token_ids": [VOCAB]}, {"allowed_token_ids": [1, VOCAB]}, {"logit_bias": {VOCAB: 1.0}}):
        own = resolve(SamplingParams(**options), None)
        with pytest.raises(InputError, match=rf"{next(iter(options))}: not a token id of this model.*0 to {VOCAB - 1}.*{VOCAB}"):
            it.checks.check([1], own, Request(0, [1], own).rules)
    own = resolve(SamplingParams(bad_words="x"), None)
    with pytest.raises(InputError, match="bad_words: the model has no logits"):
        it.checks.check([1], own, Request(0, [1], own, bad_words=((1, VOCAB),)).rules)
    own = resolve(SamplingParams(allowed_token_ids=[5, 7], min_tokens=1, stop_token_ids=[7]), None)
    with pytest.raises(InputError, match="min_tokens: no token is left to draw"):
        it.checks.check([1], own, Request(0, [1], own, (5,)).rules)
    it.checks.check([1], own, Request(0, [1], own, (6,)).rules)
