"""Drafts change how many tokens a step yields, and nothing else.

A mock model whose logits depend on every cached token, in fp32: the same request with and without drafts yields the same tokens
and log-probabilities, whatever the proposer proposes. Catches a row that does not see the drafts before it, or that has another
row's noise, counts of rejected drafts, a stop in the middle of a step that is not the last token, drafts beyond the end.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine.test_engine import IDS, PAGE, VOCAB, finish, following

from minirt.engine.engine import Engine, Request
from minirt.engine.limits import EngineLimits, EngineOptions
from minirt.engine.schedule.draft_lengths import DraftLengths
from minirt.engine.schedule.step_times import OnlineStepTimes
from minirt.engine.state.slots import HostSlots
from minirt.errors import EngineError
from minirt.kernels.step.table import MATCHED, NEXT_TOKENS, NUM_CACHED, NUM_NEXT, PROMPT_LEN
from minirt.sampling_params import SamplingParams, resolve
from minirt.step.kv_cache import KVCache, PagesSpec

FLAT = torch.rand(1024, VOCAB, generator=torch.Generator().manual_seed(5)) * 6


class Noisy:
    """Logits by a hash of all cached tokens. A few tokens are likely."""

    def __init__(self):
        self.steps = []

    def __call__(self, batch, cache):
        pages = cache.layers[0].k.view(-1)
        pages[batch.slot_mapping] = batch.input_ids.float()
        self.steps.append((len(batch.query_lens), batch.num_tokens))
        rows = []
        for i, count in enumerate(batch.query_lens):
            length = batch.seq_lens[i]
            where = torch.arange(length)
            slots = batch.block_tables[i][where // PAGE].long() * PAGE + where % PAGE
            tokens = pages[slots].long().tolist()
            rows += [FLAT[hash_of(tokens[: length - count + j + 1])] for j in range(count)]
        return torch.stack(rows)[batch.logits_indices]


def hash_of(tokens):
    return sum(following(tokens[i:]) * (i + 1) for i in range(min(3, len(tokens)))) % len(FLAT)


class Mixed:
    """Proposes up to `most` tokens: those of the request without drafts, or, with a probability, wrong ones."""

    needs_history = adaptive = False  # else measured times decide how many are verified

    def __init__(self, most=4, right=0.7, seed=0):
        self.max_drafts, self.right, self._draw = most, right, random.Random(seed)
        self.known = {}

    def propose(self, table, columns, rows, batch, wanted):
        for slot in rows.slots.tolist():
            if slot < 0 or table[slot, NUM_NEXT] == 0:
                continue
            at = int(table[slot, NUM_CACHED] - table[slot, PROMPT_LEN]) + 1
            count = self._draw.randint(0, self.max_drafts)
            future = self.known.get(int(table[slot, PROMPT_LEN]), [])[at : at + count]
            future += self._draw.choices((0, VOCAB - 1, 5), k=count - len(future))
            own = [token if self._draw.random() < self.right else self._draw.choice((0, VOCAB - 1)) for token in future]
            table[slot, NEXT_TOKENS + 1 : NEXT_TOKENS + 1 + count] = torch.tensor(own, dtype=torch.int32)
            table[slot, NUM_NEXT], table[slot, MATCHED] = 1 + count, count


def engine(proposer=None, pages=64, seqs=6, budget=40, lookahead=1, **options):
    cache = KVCache([PagesSpec(1, 1)], pages, page_size=PAGE)
    cache.layers[0].k.fill_(float("nan"))
    options = EngineOptions(lookahead=lookahead, **{"adaptive_drafts": False, **options})
    return Engine(Noisy(), cache, EngineLimits(64, seqs, budget), options, vocab_size=VOCAB, proposer=proposer)


def run(it, requests, bad_words=()):
    """→ for each request its tokens, log-probabilities and reason."""
    ids = {}
    for prompt, params in requests:
        request = Request(next(IDS), prompt, resolve(params, None), (5,), bad_words=bad_words)
        it.add(request)
        ids[request.id] = [], [], []
    for _ in range(2000):
        for output in it.step():
            tokens, logprobs, reason = ids[output.request_id]
            assert not reason, "a token after the end"
            tokens += output.token_ids
            logprobs += output.logprobs
            reason += [output.finish_reason] * (output.finish_reason is not None)
        if not it.has_work:
            assert it._cache.allocator.num_free == it._cache.num_pages
            return list(ids.values())
    raise AssertionError("starved")


PARAMS = {
    "greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0},
    "hot": {"temperature": 3.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "presence": {"temperature": 0.0, "presence_penalty": 1.5}, "frequency": {"temperature": 0.8, "frequency_penalty": 0.9},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.6},
    "bias": {"temperature": 1.0, "logit_bias": {3: 4.0, 90: 3.0, VOCAB - 1: 2.0}},
    "allowed": {"temperature": 1.0, "allowed_token_ids": list(range(0, VOCAB, 9))},
    "min_tokens": {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": list(range(0, VOCAB, 3))},
    "stops": {"temperature": 1.5, "stop_token_ids": list(range(1, VOCAB, 11))}, "logprobs": {"temperature": 1.0, "logprobs": 3},
    "one": {"temperature": 1.0, "max_tokens": 1},
}  # fmt: skip


def tokens_of(outputs):
    return [token for output in outputs for token in output.token_ids]


def settings(**options):
    return SamplingParams(**{"max_tokens": 30, "ignore_eos": "stop_token_ids" not in options, "seed": 11, **options})


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("kind", PARAMS)
def test_the_same_tokens_with_drafts_and_without(kind, lookahead):
    """Five sequences side by side; their drafts are right, wrong, or at the edges of the vocabulary."""
    words = ((3, 90), (0, 0), (VOCAB - 1, 5, 5)) if kind in ("bias", "presence") else ()
    requests = [(list(range(7, 7 + 3 * i + 1)), settings(**PARAMS[kind])) for i in range(5)]
    plain = engine(lookahead=lookahead)
    wanted = run(plain, requests, words)
    for right in (0.0, 0.7, 1.0):
        proposer = Mixed(right=right)
        proposer.known = {len(prompt): tokens for (prompt, _), (tokens, *_) in zip(requests, wanted, strict=True)}
        it = engine(proposer, lookahead=lookahead)
        assert run(it, requests, words) == wanted
        if right == 1.0 and kind != "one":
            assert len(it._runner.model.steps) < len(plain._runner.model.steps)
            stats = it.stats.drafts
            assert stats.num_accepted_tokens > 0.5 * stats.num_draft_tokens > 0
            assert stats.num_proposals >= stats.num_drafts > 0
            assert stats.num_accepted_tokens == sum(stats.num_accepted_per_position)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_all_kinds_side_by_side_under_pressure(lookahead):
    """Few pages, so that sequences are preempted and computed again; chunks of prompts beside drafting sequences."""
    requests = [
        ([(7 * i + j) % VOCAB for j in range(2 + 5 * i)], settings(**{"max_tokens": 25, **own}))
        for i, own in enumerate(PARAMS.values())
    ][:9]
    wanted = run(engine(lookahead=lookahead), requests)
    proposer = Mixed(right=0.8, seed=3)
    proposer.known = {len(prompt): tokens for (prompt, _), (tokens, *_) in zip(requests, wanted, strict=True)}
    it = engine(proposer, pages=18, budget=13, lookahead=lookahead)
    assert run(it, requests) == wanted
    assert it.stats.num_preemptions
    assert it.stats.drafts.num_accepted_tokens


def test_the_last_output_counts_the_drafts():
    requests = [([7, 8, 9], settings(temperature=0.0))]
    (wanted,) = run(engine(), requests)
    proposer = Mixed(right=1.0)
    proposer.known = {3: wanted[0]}
    it = engine(proposer)
    it.add(Request(next(IDS), [7, 8, 9], resolve(requests[0][1], None), (5,), final_only=True))
    outputs = [output for _ in range(60) for output in it.step()]
    (last,) = outputs
    assert list(last.token_ids) == wanted[0]
    stats = it.stats.drafts
    assert (last.num_draft_tokens, last.num_accepted_tokens) == (stats.num_draft_tokens, stats.num_accepted_tokens)
    # A step yields one token and its right drafts; the first one, with the prompt, yields one.
    steps = len(it._runner.model.steps)
    assert 30 - stats.num_accepted_tokens <= steps <= 30 - stats.num_accepted_tokens + 1


def test_rows_of_logits_are_bounded():
    """More drafts than a step may have rows for."""
    proposer = Mixed(right=1.0)
    requests = [([7 + i], settings(temperature=0.0)) for i in range(6)]
    wanted = run(engine(), requests)
    it = engine(proposer)
    it._scheduler._most_rows, it._scheduler.limits = 9, EngineLimits(64, 6, 40, max_drafts=4)
    assert run(it, requests) == wanted
    assert max(tokens for _, tokens in it._runner.model.steps) <= 9


def lengths(count=8, most=4, times=None):
    slots = HostSlots(EngineLimits(64, count, max_drafts=most), 16)
    slots.final_lens[:], slots.lengths[:] = 60, 10
    own = DraftLengths(EngineLimits(64, count, max_drafts=most), slots, VOCAB)
    own.times = times
    return own, slots


def read(own, slot, tokens, drafts, planned=5):
    """A step of one slot that yields these tokens, after which these drafts are proposed."""
    padded = np.array([[*tokens, 0, 0, 0, 0, 0][:5]], np.int32)
    proposed = np.array([[len(drafts), 1 + len(drafts), *drafts, 9, 9, 9, 9][:6]], np.int32)
    own.compare(np.array([slot]), np.array([planned]), np.array([len(tokens)]), padded, proposed)


class Line:
    """A token more than one for each sequence costs a share of a step."""

    def __init__(self, cost):
        self.cost = cost

    def seconds(self, seqs, tokens):
        return 1 + self.cost * (tokens - seqs)


def test_how_many_drafts_are_chosen():
    """As many as pay: all if they are right and cheap, none if they are dear or wrong; then some again."""
    slots = np.array([3])
    for cost, least, most in ((0.02, 4, 4), (0.5, 4, 4), (1.05, 0, 0)):
        own, _ = lengths(times=Line(cost))
        assert own.choose(slots, 99).tolist() == [1], "nothing is proposed yet"
        read(own, 3, [1], [7, 7, 7, 7])
        for _ in range(9):
            read(own, 3, [7, 7, 7, 7, 7], [7, 7, 7, 7])
        assert least <= own.choose(slots, 99)[0] - 1 <= most, cost
    own, _ = lengths(times=Line(0.2))
    read(own, 3, [1], [7, 7, 7, 7])
    for _ in range(9):
        read(own, 3, [1], [7, 7, 7, 7])
    assert own.choose(slots, 99).tolist() == [1]
    assert own.stats.num_accepted_tokens == 0
    for _ in range(12):  # none is verified, but the first one is right each time
        read(own, 3, [7], [7, 7, 7, 7], planned=1)
    assert own.choose(slots, 99)[0] > 1
    read(own, 3, [7], [])
    assert own.choose(slots, 99).tolist() == [1], "without drafts, a step is a plain one"


def test_drafts_are_counted_by_position():
    own, slots = lengths()
    read(own, 2, [1], [5, 6, 7, 8])
    read(own, 2, [5, 6, 9], [1, 2], planned=5)  # two right ones of four
    read(own, 2, [1, 2, 4], [3, 3, 3, 3], planned=3)  # both
    read(own, 2, [3], [4], planned=1)  # none was verified
    assert own.stats == (2, 6, 4, (2, 2, 0, 0), 4)
    assert (slots.num_drafted[2], slots.num_accepted[2]) == (6, 4)
    assert own.of(2) == [4]
    slots.epochs[2] += 1  # another sequence
    assert own.of(2) == []
    assert own.choose(np.array([2]), 99).tolist() == [1]


def test_the_room_for_rows_is_divided():
    own, arrays = lengths()
    for slot in (1, 4, 5):
        read(own, slot, [1], [7, 7, 7, 7])
    slots = np.array([0, 1, 4, 5])
    assert own.choose(slots, 99).tolist() == [1, 5, 5, 5]
    assert own.choose(slots, 11).tolist() == [1, 3, 3, 3]
    assert own.choose(slots, 6).tolist() == [1, 1, 1, 1]
    read(own, 4, [1], [7])
    assert own.choose(slots, 99).tolist() == [1, 5, 2, 5], "no more than a slot has"
    assert own.choose(slots, 9).tolist() == [1, 3, 2, 3], "what one slot does not need is for the others"
    arrays.steps[4] = 1
    assert own.choose(slots, 99).tolist() == [1, 5, 5, 5], "it may have more after a step that nobody has read"


def test_the_time_of_a_step_counts_the_drafts_that_slots_have():
    """Four of one slot, and one of seven others: 11 tokens more, not 32, which would not pay."""

    class Steps(Line):
        def seconds(self, seqs, tokens):
            assert tokens <= 8 + 11
            return super().seconds(seqs, tokens)

    own, _ = lengths(times=Steps(0.01))
    for slot in range(8):
        read(own, slot, [1], [7] * 4 if slot == 3 else [7])
    assert own.choose(np.arange(8), 99).tolist() == [2, 2, 2, 5, 2, 2, 2, 2]


def test_step_times_of_a_cpu():
    times = OnlineStepTimes()
    assert times.seconds(1, 1) is None
    times.observe(1, 2.0)
    assert (times.seconds(1, 1), times.seconds(1, 5)) == (2.0, None), "one size says nothing of another"
    times.observe(5, 4.0)
    assert times.seconds(1, 1) == pytest.approx(2.0)
    assert times.seconds(3, 9) == pytest.approx(6.0)
    for _ in range(300):
        times.observe(1, 3.0)
        times.observe(5, 3.4)
    assert times.seconds(1, 5) == pytest.approx(3.4, rel=1e-3), "older steps count less"


def test_a_slow_step_is_forgotten():
    """Catches a single slow step with drafts, such as one beside another program, that keeps drafts away for many steps."""
    times, plain = OnlineStepTimes(), 0
    for _ in range(20):
        times.observe(1, 1.0)
    times.observe(5, 12.0)
    while (seconds := times.seconds(1, 5)) is not None and seconds > 2 * times.seconds(1, 1):
        times.observe(1, 1.0)
        plain += 1
    assert 0 < plain < 400


def request_of(prompt, **options):
    return Request(next(IDS), prompt, resolve(settings(**options), None), (5,))


def outputs_of(it, request):
    it.add(request)
    outputs = finish(it)
    return [output for output in outputs if output.request_id == request.id]


def oracle(prompt, tokens, kind=Mixed):
    proposer = kind(4, right=1.0)
    proposer.known = {len(prompt): tokens}
    proposer._draw.randint = lambda _, end: end
    return proposer


@pytest.mark.parametrize("beside", [0, 4])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_tokens_before_unusable_logits_are_delivered(lookahead, beside):
    """The logits are NaN behind accepted drafts. Catches accepted tokens and log-probabilities that the error replaces."""
    prompt, broken = [7, 8, 9], 3 + 8
    found = []
    for proposer in (None, "oracle"):
        if proposer:
            proposer = oracle(prompt, tokens_of(found[0]) + [1] * 9)
        it = engine(proposer, lookahead=lookahead, prefix_cache=False)
        model = it._runner.model

        def call(batch, cache, model=model):
            logits, rows = model(batch, cache), []
            for length, count in zip(batch.seq_lens, batch.query_lens, strict=True):
                rows += [length - count + j + 1 for j in range(count)]
            return logits.masked_fill((torch.tensor(rows)[batch.logits_indices] == broken)[:, None], float("nan"))

        it._runner.model = call
        for i in range(beside):
            it.add(request_of([40 + i] * 20, temperature=0.0))
        found.append(outputs_of(it, request_of(prompt, logprobs=1)))
    plain, drafted = found
    assert tokens_of(drafted) == tokens_of(plain)
    assert len(tokens_of(plain)) == 8
    assert [row for output in drafted for row in output.logprobs] == [row for output in plain for row in output.logprobs]
    for outputs in found:
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["error"]
        assert outputs[-1].token_ids == ()
        assert "generated token 8" in str(outputs[-1].error)
    assert len(drafted) < len(plain)


def test_right_drafts_behind_the_end_are_not_accepted_tokens():
    """A stop token in the middle of right drafts. Catches an acceptance length by tokens that the request has not yielded."""
    prompt = [7, 8, 9]
    ((tokens, *_),) = run(engine(), [(prompt, settings(temperature=0.0))])
    end = next(i for i in range(2, 30) if tokens[i] not in tokens[:i] and i % 5 == 2)  # a step's tokens: 1 … 5, 6 … 10, …
    it = engine(oracle(prompt, tokens), lookahead=0)
    *_, last = outputs_of(it, request_of(prompt, temperature=0.0, stop_token_ids=[tokens[end]]))
    assert last.finish_reason == "stop"
    assert end + 1 - last.num_accepted_tokens == 1 + -(-end // 5)  # steps



class Wrong(Mixed):
    """Writes a value that the protocol of proposers does not allow, in the third step."""

    def __init__(self, column, value):
        super().__init__(4, right=1.0)
        self.column, self.value, self.steps = column, value, 0

    def propose(self, table, columns, rows, batch, wanted):
        super().propose(table, columns, rows, batch, wanted)
        self.steps += 1
        if self.steps == 3:
            slot = int(rows.slots[0])
            table[slot, NUM_NEXT], table[slot, MATCHED] = 3, 1
            table[slot, self.column] = self.value


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(("column", "value", "message"), [
        (NUM_NEXT, 6, "NUM_NEXT.*1 to 5.*6"), (NUM_NEXT, 2**31 - 1, "NUM_NEXT.*2147483647"), (NUM_NEXT, -7, "NUM_NEXT.*-7"),
        (NUM_NEXT, 0, "NUM_NEXT of a sequence that goes on"), (MATCHED, 0, "MATCHED.*positive"),
        (NEXT_TOKENS + 1, VOCAB, f"a draft.*below {VOCAB}.*{VOCAB}"), (NEXT_TOKENS + 2, -1, "a draft.*-1"),
])  # fmt: skip
def test_a_wrong_value_of_a_proposer_is_an_error(column, value, message, lookahead):
    """No token outside the vocabulary reaches the model, nothing hangs, and what is drafted by mistake is not ignored."""
    it = engine(Wrong(column, value), lookahead=lookahead)
    model, ids = it._runner.model, []

    def call(batch, cache):
        ids.extend(batch.input_ids.tolist())
        return model(batch, cache)

    it._runner.model = call
    request = request_of([7, 8, 9], presence_penalty=1.0)
    it.add(request)
    with pytest.raises(EngineError, match=message):
        finish(it)
    assert all(0 <= token < VOCAB for token in ids)
    it.recover()
    assert request.id not in it
    assert len(tokens_of(outputs_of(it, request_of([7, 8, 9], temperature=0.0)))) == 30


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_proposer_without_memory_proposes_nothing(lookahead):
    """The step's tokens are committed by then. Catches a step that is tried again after that, which loses them, requests that
    end, and drafts that are half written: the proposer fails after it has written them."""
    requests = [([10 + i], settings(max_tokens=20, ignore_eos=True)) for i in range(3)]
    it, calls = engine(Mixed(), lookahead=lookahead), iter(range(1000))
    propose = it._runner.proposer.propose

    def fails(*arguments):
        propose(*arguments)
        if next(calls) in (0, 2, 3):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")

    it._runner.proposer.propose = fails
    with pytest.warns(RuntimeWarning, match="no memory left for drafts"):
        found = run(it, requests)
    assert found == run(engine(lookahead=lookahead), requests)
    assert next(calls) > 4
    assert it.stats.drafts.num_draft_tokens > 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_drafts_preempt_nobody(lookahead):
    """The pages are enough for the tokens. Catches a sequence that is computed again for another one's drafts."""
    requests = [([10, 20, 30], settings(temperature=0.0, max_tokens=20)), ([40], settings(temperature=0.0, max_tokens=11))]
    plain = engine(pages=7, lookahead=lookahead)
    wanted = run(plain, requests)
    it = engine(Mixed(7, right=0.0, seed=2), pages=7, lookahead=lookahead)
    assert run(it, requests) == wanted
    assert it.stats.num_preemptions == plain.stats.num_preemptions == 0
    assert it.stats.drafts.num_draft_tokens


def test_drafts_leave_tokens_of_a_step_to_others():
    """A step has room for 6 tokens. Catches drafts for which others that decode wait, and prompts that wait for their ends."""
    requests = [([10 + i], settings(temperature=0.0, max_tokens=20)) for i in range(3)]
    wanted = run(engine(), requests)
    proposer = oracle([10], wanted[0][0])
    it = engine(proposer, budget=6, lookahead=0)
    first, *others = (request_of(prompt, temperature=0.0, max_tokens=20) for prompt, _ in requests)
    it.add(first)
    it.step()
    it.step()
    for request in others:
        it.add(request)
    seen = {output.request_id for _ in range(3) for output in it.step()}
    assert seen == {first.id, *(request.id for request in others)}
    counts = []
    while first.id in it:
        counts.append({output.request_id: len(output.token_ids) for output in it.step()})
    assert all(len(own) == 3 for own in counts), "each one goes on in each step"


@pytest.mark.parametrize("drafts", [False, True])
def test_a_prompt_with_unusable_logits_beside_bad_words(drafts):
    """The next step computes a token of that prompt again. Catches its place before the first generated token being written."""
    words = ((3, 90), (0, 0))
    (wanted,) = run(engine(), [([10], settings(temperature=0.0))], words)
    it = engine(oracle([10], wanted[0]) if drafts else None, lookahead=1)
    model = it._runner.model
    it._runner.model = lambda batch, cache: torch.where(
        (batch.input_ids[batch.logits_indices] == 91)[:, None], float("nan"), model(batch, cache)
    )
    good, bad = request_of([10], temperature=0.0), request_of([20] * 30 + [91], temperature=0.0)
    it.add(replace(good, bad_words=words))
    it.add(bad)
    outputs = finish(it)
    assert [output.finish_reason for output in outputs if output.request_id == bad.id] == ["error"]
    assert tokens_of(output for output in outputs if output.request_id == good.id) == wanted[0]


class Asked(Mixed):
    """Notes how many drafts are wanted, and writes no more."""

    def __init__(self, most, right):
        super().__init__(most, right)
        self.wanted = []

    def propose(self, table, columns, rows, batch, wanted):
        self.wanted.append(wanted)
        most, self.max_drafts = self.max_drafts, wanted
        super().propose(table, columns, rows, batch, wanted)
        self.max_drafts = most



@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(("slope", "adaptive", "wanted"), [(9.0, True, {1}), (0.0, True, {4}), (9.0, False, {4})])
def test_drafts_that_do_not_pay_are_not_asked_for(slope, adaptive, wanted, lookahead):
    """Each draft of a draft model takes a pass. Catches passes for drafts that no step verifies."""
    prompt = [7, 8, 9]
    ((tokens, *_),) = run(engine(), [(prompt, settings(temperature=0.0))])
    proposer = oracle(prompt, tokens, kind=Asked)
    it = engine(proposer, lookahead=lookahead, adaptive_drafts=adaptive)
    if it._scheduler.draft_lengths.times is not None:
        it._scheduler.draft_lengths.times = Line(slope)
    assert tokens_of(outputs_of(it, request_of(prompt, temperature=0.0))) == tokens
    assert proposer.wanted[0] == 4, "after a prompt nothing is known"
    assert set(proposer.wanted[3:]) == wanted
