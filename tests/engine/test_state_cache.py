"""The prefix cache of models with recurrent layers: hits to the token, and nobody can tell from the tokens.

A mock model with a state beside its pages. The next token is a hash of both, so a state with one token too many or too few shows
in the next token, as does a page with a wrong one. With drafts, its state can be undone as that of gated DeltaNet. With `within`,
it stores snapshots within a step, as gated DeltaNet does at multiples of 64 tokens; without, steps end where one is wanted.

Catches labels that are off by one, snapshots of a slot that has a new sequence already, copies in the wrong order or made twice,
states of rejected drafts or of steps that ran out of memory, pages that are written while others read them, leaked rows, steps
that end where a snapshot could be stored within them.
"""

import itertools
import pickle
import random
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine.test_engine import PAGE, SIZES, VOCAB, aborts_until, finish, following, run
from engine.test_engine import engine as attention_engine
from engine.test_prefix_cache import NUMBERS, REQUESTS, consistent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minirt import SamplingParams
from minirt.engine.engine import Engine, Request
from minirt.engine.execute.logits_processors import LogitsProcessors
from minirt.engine.limits import EngineLimits, EngineOptions
from minirt.errors import ContextLengthError, EngineError, UnsupportedError
from minirt.kernels.step.table import MATCHED, NEXT_TOKENS, NUM_CACHED, NUM_NEXT
from minirt.sampling_params import resolve
from minirt.step.kv_cache import CombinedSpec, KVCache, PagesSpec, StateSpec
from minirt.step.plan import NO_COPIES

START, PRIME = 5, 9973


def fold(state, token):
    return (state * 37 + int(token) + 3) % PRIME


class Recurrent:
    """A `Mock` whose next token also depends on a state: a hash of all tokens, folded in one by one."""

    def __init__(self, undoable=0, within=0):
        self.undoable, self.ring, self.within = undoable, 2 * undoable + 3, within
        self.tokens_per_step = []
        tensors = (("hash", (1,), torch.int64), ("folded", (1,), torch.int64), ("inputs", (self.ring,), torch.int64))
        self.specs = [CombinedSpec((PagesSpec(1, 1), StateSpec(tensors, undoable, within)))]

    def __call__(self, batch, cache):
        pages, state = cache.layers[0][0].k.view(-1), cache.layers[0][1]
        pages[batch.slot_mapping] = batch.input_ids.float()
        self.tokens_per_step.append(batch.num_tokens)
        rows, slots = [], batch.seq_slots.tolist()
        snapshots = batch.snapshots.tolist()
        for i, (first, count) in enumerate(zip(batch.query_starts, batch.query_lens, strict=True)):
            length, slot = batch.seq_lens[i], slots[i]
            start = length - count
            value, folded = (int(state["hash"][slot]), int(state["folded"][slot])) if start else (START, 0)
            for position in range(folded, start):
                value = fold(value, state["inputs"][slot, position % self.ring])
            before, undone = value, count <= self.undoable
            where = torch.arange(length)
            own = batch.block_tables[i][where // PAGE].long() * PAGE + where % PAGE
            tokens = pages[own].long().tolist()
            for j in range(count):
                token = int(batch.input_ids[first + j])
                value = fold(value, token)
                state["inputs"][slot, (start + j) % self.ring] = token
                for row, offset in snapshots[i]:
                    if row >= 0 and offset == j + 1:
                        assert j + 1 < count
                        assert (j + 1) % self.within == 0
                        state["hash"][row], state["folded"][row] = value, start + j + 1
                rows.append((following(tokens[: start + j + 1]) + value) % VOCAB)
            state["hash"][slot], state["folded"][slot] = (before, start) if undone else (value, length)
        return torch.nn.functional.one_hot(torch.tensor(rows), VOCAB).float()[batch.logits_indices]


def undisturbed(prompt, count, eos=None):
    """The tokens that follow a prompt."""
    tokens, state = list(prompt), START
    for token in prompt:
        state = fold(state, token)
    for _ in range(count):
        tokens.append((following(tokens) + state) % VOCAB)
        state = fold(state, tokens[-1])
        if tokens[-1] == eos:
            break
    return tokens[len(prompt) :]


class Known:
    """Proposes the tokens that will come, of which a share is wrong. Sequences are found by their pages."""

    needs_history = True

    def __init__(self, most, right, seed=0):
        self.max_drafts, self.right, self.draw = most, right, np.random.default_rng(seed)

    def propose(self, table, columns, rows, batch, wanted):
        for slot in rows.slots.tolist():
            if slot < 0 or table[slot, NUM_NEXT] == 0:
                continue
            cached = int(table[slot, NUM_CACHED])
            known = [*table[slot, columns.tokens : columns.tokens + cached].tolist(), int(table[slot, NEXT_TOKENS])]
            drafts = undisturbed(known, int(self.draw.integers(0, self.max_drafts + 1)))
            drafts = [token if self.draw.random() < self.right else (token + 1) % VOCAB for token in drafts]
            table[slot, NEXT_TOKENS + 1 : NEXT_TOKENS + 1 + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
            table[slot, NUM_NEXT], table[slot, MATCHED] = 1 + len(drafts), len(drafts)


def engine(pages=64, seqs=6, budget=40, length=64, lookahead=1, snapshots=8, drafts=0, right=0.7, prefix_cache=True, within=0):
    model = Recurrent(1 + drafts if drafts else 0, within)
    cache = KVCache(model.specs, pages, page_size=PAGE, num_slots=seqs, num_snapshots=snapshots)
    kv, state = cache.layers[0]
    kv.k.fill_(float("nan"))
    for tensor in state.tensors():
        tensor.random_(0, 50, generator=torch.Generator().manual_seed(3))
    it = Engine(
        model, cache, EngineLimits(length, seqs, budget),
        EngineOptions(lookahead=lookahead, prefix_cache=prefix_cache, adaptive_drafts=False), vocab_size=VOCAB,
        proposer=Known(drafts, right) if drafts else None,
    )  # fmt: skip
    return it, cache


def breaking(it, most, seed):
    """Make steps of more than `most` tokens run out of memory: before their copies, or when the model has changed the states."""
    model, send, draw = it._runner.model, it._runner.buffers.send, random.Random(seed)

    def before(plan, **options):
        if plan.sequences.total_tokens > most and draw.random() < 0.4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return send(plan, **options)

    def after(batch, cache):
        logits = model(batch, cache)
        if batch.num_tokens > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return logits

    it._runner.buffers.send, it._runner.model = before, after


def complete(it, prompt, count, salt=None, eos=(), history=0):
    """(tokens, cached tokens) of one request, alone."""
    sampling = resolve(SamplingParams(max_tokens=count, temperature=0.0), None)
    request = Request(next(NUMBERS), prompt, sampling, eos, salt, history_len=history)
    it.add(request)
    outputs = finish(it)
    assert not outputs[-1].error
    return [token for output in outputs for token in output.token_ids], outputs[0].num_cached


def check(it, cache):
    """Nothing is held, and each row is known or free."""
    states = it._scheduler.prefix_cache
    assert cache.allocator.num_free == cache.num_pages, "pages leaked"
    consistent(cache.allocator)
    rows = [snapshot.row for snapshot in states._known.values()]
    assert sorted(rows + states._free) == list(states._rows), "rows leaked, or used twice"
    assert {id(own) for owns in states._children.values() for own in owns} == {id(own) for own in states._known.values()}
    held = {id(snapshot) for _, snapshot in states._saves}
    assert all(snapshot.holds == (id(snapshot) in held) for snapshot in states._known.values())


@settings(max_examples=70, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=REQUESTS, aborts=aborts_until(40, 14), most=st.integers(2, 60), histories=st.integers(0, 5),
    options=st.fixed_dictionaries(SIZES | {
        "pages": st.integers(9, 40), "snapshots": st.integers(1, 9), "drafts": st.sampled_from([0, 0, 1, 3]),
        "right": st.sampled_from([0.0, 0.6, 1.0]), "within": st.sampled_from([0, 1, 3, 4, 6]),
    }),
)  # fmt: skip
def test_states_that_are_found_change_no_token(requests, aborts, most, histories, options):
    """Forks, evictions, preemptions, aborts, memory that runs out in steps of more than `most` tokens, drafts."""
    it, cache = engine(length=36, **options)
    breaking(it, most, len(requests))
    add = it.add
    it.add = lambda own: add(replace(  # some say where their history ends, and some share nothing with the others
        own, history_len=len(own.prompt_token_ids) * histories // 4, cache_salt="salt" * (own.prompt_token_ids[0] == 20) or None
    ))  # fmt: skip
    tokens, reasons = run(it, requests, aborts)
    for i, (_, prompt, count) in enumerate(requests):
        wanted = undisturbed(prompt, min(count, 36 - len(prompt)), eos=5)
        assert tokens[i] == (wanted[: len(tokens[i])] if reasons[i] == "abort" else wanted)
    check(it, cache)
    for i, (_, prompt, _) in enumerate(requests):  # a second turn begins with generated tokens, too
        turn = [*prompt, *tokens[i], 53][:35]
        assert complete(it, turn, 1)[0] == undisturbed(turn, 1)
    check(it, cache)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("drafts", [0, 3])
def test_what_is_found(lookahead, drafts):
    it, cache = engine(lookahead=lookahead, drafts=drafts, right=1.0, budget=64)
    prompt = list(range(10, 23))  # 13 tokens, pages of 4
    answer, cached = complete(it, prompt, 9)
    assert (answer, cached) == (undisturbed(prompt, 9), 0)
    assert complete(it, prompt, 9) == (answer, 12), "all but the last token, whose logits are needed"
    assert it.prefix_cache_stats.recomputed == 0
    second = [*prompt, *answer, 60, 61]
    tokens, cached = complete(it, second, 1)
    assert tokens == undisturbed(second, 1)
    assert cached in ((21, 22) if lookahead and drafts else (21,)), "generated tokens count; the last one may be in no step"
    other = [*prompt[:9], 50, 51, 52, 53, 54]
    assert complete(it, other, 1) == (undisturbed(other, 1), 0)
    assert it.prefix_cache_stats.recomputed == 8, "two pages were found, and no state"
    another = [*prompt[:9], 70, 71, 72]
    assert complete(it, another, 1) == (undisturbed(another, 1), 8), "a state was kept where the prompt before left a known path"
    assert complete(it, prompt, 1, salt="a")[1] == 0
    assert complete(it, prompt, 1, salt="a")[1] == 12
    assert complete(it, prompt, 1, salt="b")[1] == 0
    check(it, cache)


def test_the_end_of_a_conversations_history_is_kept():
    """Templates rewrite what follows it, so the next turn begins with the history and goes on with other tokens."""
    it, cache = engine(budget=64)
    history = list(range(10, 31))
    prompt = [*history, 80, 81, 82]
    complete(it, prompt, 7, history=len(history))
    turn = [*history, 80, 81, 40, 41]
    assert complete(it, turn, 3) == (undisturbed(turn, 3), len(history))
    assert complete(it, prompt, 1, history=len(history))[1] == len(history)
    assert [complete(it, history, 3) for _ in range(2)] == [(undisturbed(history, 3), cached) for cached in (0, 20)]
    check(it, cache)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("length", range(1, 14))
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("within", [0, 3, 4])
def test_prompts_that_end_at_any_place(length, lookahead, drafts, within):
    """The same prompt again, longer ones and one that leaves it: all tokens are those without a cache."""
    it, cache = engine(lookahead=lookahead, drafts=drafts, budget=7, snapshots=20, within=within)
    prompt = list(range(10, 10 + length))
    for own in (prompt, prompt, [*prompt, 60], [*prompt, 61, 62, 63, 64, 65], [*prompt[:-2], 70], prompt):
        if not own:
            continue
        tokens, cached = complete(it, own, 6)
        assert tokens == undisturbed(own, 6)
        assert cached < len(own)
    if within:
        assert cached > length - 1 - PAGE - within, "a page after the one before, or a multiple of `within`"
    else:
        assert cached == (length - 1 if length > PAGE else 0)
    check(it, cache)


@pytest.mark.parametrize("drafts", [0, 3])
def test_prompts_are_one_step(drafts):
    """A snapshot costs a prompt no step, and the next turn of a conversation none either. Twice as many, if layers store none."""
    for within, steps in ((0, 2), (4, 1)):
        it, cache = engine(pages=200, length=400, budget=300, within=within, drafts=drafts)
        started, start = [], it._runner.start
        it._runner.start = lambda plan, start=start, started=started: started.append(plan) or start(plan)
        history = list(range(10, 95))
        prompt, known = [*history, 98, 99], 0
        for _ in range(3):
            started.clear()
            tokens, cached = complete(it, prompt, 1, history=len(history))
            assert tokens == undisturbed(prompt, 1)
            assert len([plan for plan in started if len(plan.tokens)]) == steps
            assert cached == (known - known % within if within else known)
            own = [snapshot for plan in started for snapshot in pickle.loads(pickle.dumps(plan)).snapshots]
            assert len(own) == (within > 0)
            known = len(history)
            history = [*history, 97, *range(20, 51)]
            prompt = [*history, 98, 99]
        check(it, cache)


def test_a_step_stores_two_snapshots_of_a_prompt():
    """Where it leaves a known path, and at its end. Catches one that is lost, or has the other's row."""
    it, cache = engine(pages=200, length=400, budget=300, within=4)
    shared = list(range(10, 50))
    complete(it, [*shared, 60] * 2, 1)
    plans, start = [], it._runner.start
    it._runner.start = lambda plan: plans.append(plan) or start(plan)
    for i, (cached, stored) in enumerate(((0, [40, 64]), (40, [24]))):
        plans.clear()
        prompt = [*shared, 70 + i, *range(20, 45)]
        assert complete(it, prompt, 1) == (undisturbed(prompt, 1), cached)
        assert [[own.offset for own in plan.snapshots] for plan in plans if len(plan.tokens)] == [stored]
        assert complete(it, prompt, 1)[1] == 64, "its end is kept, too"
    check(it, cache)


def test_states_of_unusable_logits_are_not_found():
    """A prompt whose logits were NaN once is computed anew: its pages get no keys, so its snapshot is not found either."""
    it, cache = engine(budget=64, within=4)
    model, prompt = it._runner.model, list(range(10, 34))

    def broken(batch, kv):
        return torch.full_like(model(batch, kv), torch.nan)

    it._runner.model = broken
    it.add(Request(next(NUMBERS), prompt, resolve(SamplingParams(max_tokens=3), None)))
    outputs = finish(it)
    assert outputs[-1].error
    it._runner.model = model
    assert complete(it, [*prompt, 60], 3) == (undisturbed([*prompt, 60], 3), 0)
    assert complete(it, prompt, 3) == (undisturbed(prompt, 3), 20)
    check(it, cache)


def test_equal_prompts_of_a_step_store_one_snapshot():
    """Each finds nothing, and all would store the same. Catches a row that is lost, or that two snapshots have."""
    it, cache = engine(budget=200, within=4, seqs=4)
    prompt, plans, start = list(range(10, 31)), [], it._runner.start
    it._runner.start = lambda plan: plans.append(plan) or start(plan)
    for _ in range(4):
        it.add(Request(next(NUMBERS), prompt, resolve(SamplingParams(max_tokens=1), None)))
    finish(it)
    assert [len(plan.snapshots) for plan in plans] == [1]
    assert it.prefix_cache_stats.snapshots == 1
    assert complete(it, prompt, 2) == (undisturbed(prompt, 2), 20)
    check(it, cache)


def test_a_stop_in_the_middle_of_a_step_with_drafts():
    """The device has gone on behind the token that ends the answer. A state there is another sequence's."""
    for lookahead, count in itertools.product((0, 1), range(2, 9)):
        it, cache = engine(lookahead=lookahead, drafts=3, right=1.0, budget=64)
        prompt = list(range(20, 33))
        answer = undisturbed(prompt, count)
        assert complete(it, prompt, 20, eos=(answer[-1],))[0] == answer[: answer.index(answer[-1]) + 1]
        for turn in ([*prompt, *answer, 53, 54], [*prompt, *answer], [*prompt, *answer[:-1], 55]):
            assert complete(it, turn, 5)[0] == undisturbed(turn, 5)
        check(it, cache)


class Anything:
    """A `TokenConstraints` that permits all tokens, and an own constraint. Steps with it read the step before in their middle."""

    def compile(self, spec):
        pass

    def prepare(self, spec, ends, min_tokens):
        future = Future()
        future.set_result(self)
        return future

    def accept(self, tokens):
        pass

    def fill(self, masks, rows):
        masks.fill_(-1)
        return {}


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_answers_that_end_while_masks_are_filled(lookahead, drafts):
    """The step that waits for the masks has computed the last token already, though it has not been counted as started."""
    it, cache = engine(pages=200, length=400, budget=64, lookahead=lookahead, drafts=drafts, right=0.8, snapshots=20)
    it._constraints = it.checks._constraints = it._collector._constraints = it._compiling._constraints = Anything()
    sampling = resolve(SamplingParams(max_tokens=390, temperature=0.0, structured_outputs={"regex": "x"}), None)
    other = Request(next(NUMBERS), [90], sampling)
    it.add(other)
    found = []
    for count in range(2, 13):
        prompt = [count, *range(20, 33)]
        answer = undisturbed(prompt, count)
        answer = answer[: answer.index(answer[-1]) + 1]
        for own, most in ((prompt, 20), ([*prompt, *answer, 53, 54], 4), ([*prompt, *answer], 4)):
            request = Request(next(NUMBERS), own, resolve(SamplingParams(max_tokens=most), None), (answer[-1],))
            it.add(request)
            tokens, ends = [], False
            while not ends:
                for output in it.step():
                    if output.request_id == request.id:
                        tokens += output.token_ids
                        ends = output.finish_reason is not None
                        found += [output.num_cached - len(prompt)] if own != prompt and ends else []
            assert tokens == undisturbed(own, most, eos=answer[-1])
    assert other.id in it, "a request with masks runs all the time"
    assert max(found) > 3, "states of answers are found"
    it.abort(other.id)
    finish(it)
    check(it, cache)


def test_a_prompt_that_fails_while_its_masks_are_filled():
    """Its step has begun to store a snapshot, and it has no pages any more. The row is free again."""
    it, cache = engine(budget=64, within=3, snapshots=2)
    it._constraints = it.checks._constraints = it._collector._constraints = it._compiling._constraints = constraints = Anything()

    def fill(masks, rows):
        masks.fill_(-1)
        return {0: EngineError("no token is allowed")}

    constraints.fill = fill
    prompt = list(range(20, 37))
    for _ in range(3):
        it.add(Request(next(NUMBERS), prompt, resolve(SamplingParams(structured_outputs={"regex": "x"}), None)))
        outputs = it.step()
        assert outputs[0].error
        assert it.prefix_cache_stats.snapshots == 0
        check(it, cache)
    finish(it)
    assert [complete(it, prompt, 2) for _ in range(2)] == [(undisturbed(prompt, 2), cached) for cached in (0, 15)]
    check(it, cache)


def test_samples_wait_for_the_state_of_their_prompt():
    it, cache = engine(seqs=6, budget=64, lookahead=0)
    prompt, ids, cached = list(range(10, 35)), [], []
    for _ in range(5):
        request = Request(next(NUMBERS), prompt, resolve(SamplingParams(max_tokens=3), None), group=1)
        it.add(request)
        ids.append(request.id)
    while it.has_work:
        cached += [output.num_cached for output in it.step() if output.finish_reason]
    assert sorted(cached) == [0, 24, 24, 24, 24]
    check(it, cache)


def test_the_least_recently_used_state_goes_first():
    it, cache = engine(snapshots=2, budget=64)
    first, second, third = ([i] * 14 for i in (10, 20, 30))
    for prompt in (first, second, first, third):
        complete(it, prompt, 1)
    assert it.prefix_cache_stats.snapshot_evictions == 1
    assert complete(it, first, 1)[1] == 13
    assert complete(it, second, 1)[1] == 0
    check(it, cache)


def test_pinned_prompts_stay():
    it, _ = engine(pages=24, length=64, snapshots=4, budget=64)
    prompt = list(range(10, 24))
    complete(it, prompt, 1)
    assert it.pin(prompt) == it.pin(prompt) == 13
    for i in range(6):
        complete(it, [40 + i] * 30, 20)
    assert it.prefix_cache_stats.snapshot_evictions
    assert it.prefix_cache_stats.evictions
    assert complete(it, prompt, 3) == (undisturbed(prompt, 3), 13)
    assert it.pin([77] * 12) == 0, "nothing of it is cached"
    for i, fits in enumerate((True, False)):
        complete(it, [80 + i] * 9, 1)
        if fits:
            assert it.pin([80 + i] * 9) == 8
        else:
            with pytest.raises(ContextLengthError, match="half of 4"):
                it.pin([80 + i] * 9)
    it.recover()
    complete(it, prompt, 1)
    assert it.pin(prompt) == 13


def test_without_room_for_states_there_is_no_cache():
    it, _ = engine(snapshots=0)
    assert it.prefix_cache_stats is None
    prompt = list(range(10, 24))
    assert complete(it, prompt, 5) == complete(it, prompt, 5) == (undisturbed(prompt, 5), 0)


def test_a_spec_that_hides_which_tensors_are_states_is_refused():
    class Mixed:
        state_bytes = 8

        def page_bytes(self, dtype, page_size):
            return 4

        def allocate(self, room):
            return None

    KVCache([Mixed()], 2, num_slots=1)
    with pytest.raises(UnsupportedError, match="CombinedSpec"):
        KVCache([Mixed()], 2, num_slots=1, num_snapshots=1)


def test_models_of_attention_layers_copy_nothing(monkeypatch):
    """Their decode steps ask the prefix cache for nothing, and their plans have no copies."""
    it, _ = attention_engine(lookahead=1)
    called, plans, start = [], [], it._runner.start
    cache = it._scheduler.prefix_cache
    for name in ("find", "hits", "take", "count", "root", "extend_keys"):
        own = getattr(cache, name)
        monkeypatch.setattr(cache, name, lambda *args, name=name, own=own: called.append(name) or own(*args))
    it._runner.start = lambda plan: plans.append(plan) or start(plan)
    it.add(Request(next(NUMBERS), list(range(10, 23)), resolve(SamplingParams(max_tokens=9, temperature=0.0), None)))
    it.step()
    assert set(called) >= {"hits", "take"}
    called.clear()
    finish(it)
    assert set(called) <= {"extend_keys"}, "of a page that is full"
    assert all(plan.copies is NO_COPIES for plan in plans)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_out_of_memory_for_a_requests_rules_ends_that_request(lookahead, monkeypatch):
    """The others of its step have changed their states by then, and begin again. Catches states that are computed twice."""
    prompts = [[i + 1, 2, 3, 4, 5] * 3 for i in range(3)]
    expected = [complete(engine(lookahead=lookahead)[0], prompt, 12)[0] for prompt in prompts]
    it, cache = engine(lookahead=lookahead)
    plain, own = (resolve(SamplingParams(max_tokens=12, temperature=0.0, presence_penalty=p), None) for p in (0.0, 1.0))
    good = [Request(next(NUMBERS), prompt, plain) for prompt in prompts]
    for request in good:
        it.add(request)
    outputs = [*it.step(), *it.step()]

    def fails(self, values, dtype):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(LogitsProcessors, "_sent", fails)
    it.add(bad := Request(next(NUMBERS), [9, 9, 9], own))
    outputs += finish(it)
    assert [[token for o in outputs if o.request_id == own.id for token in o.token_ids] for own in good] == expected
    assert [o.request_id for o in outputs if o.error is not None] == [bad.id]
    check(it, cache)
