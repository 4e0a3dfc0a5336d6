"""A step's tokens are appended in two ways: one sequence after the other for few sequences, on arrays for the others.

Catches an output, an end, a page or a count that depends on how many sequences ran in the step.
"""

import random
from dataclasses import replace

from engine.test_engine import VOCAB, Request, drafting, engine

from minirt.engine import slots as slots_module
from minirt.sampling_params import SamplingParams, resolve

EOS, SEEDS, MOST_STEPS = 5, 12, 2000
NO_LOGITS = 11  # after a token that is this, modulo 41, the logits are NaN, if the traffic has that


def traffic(seed):
    """An engine's options and requests: (arrival step, request, the token at which its caller aborts it or None, abort step)."""
    draw = random.Random(seed)
    options = {
        "pages": draw.randrange(17, 26), "seqs": draw.choice((2, 4, 9)), "budget": draw.randrange(4, 60),
        "lookahead": seed % 2, "prefix_cache": draw.random() < 0.7,
    }  # fmt: skip
    requests = []
    for i in range(16):
        stops = [draw.randrange(VOCAB) for _ in range(draw.choice((0, 3)))]
        params = SamplingParams(
            max_tokens=draw.randrange(1, 24), stop_token_ids=stops, ignore_eos=draw.random() < 0.3, temperature=0.0,
            logprobs=draw.choice((None, None, 2)), min_tokens=0,
        )  # fmt: skip
        stem = [20, 21, 22, 23, 24, 25, 26, 27][: draw.choice((0, 5, 8))]
        prompt = [*stem, *(draw.randrange(VOCAB) for _ in range(draw.randrange(1, 9)))]
        own = Request(i, prompt, resolve(params, None), (EOS,), priority=draw.randrange(2), final_only=draw.random() < 0.4)
        stop_string = draw.randrange(10) if draw.random() < 0.3 and not own.final_only else None
        if stop_string is not None:
            own = replace(own, sampling=replace(own.sampling, stop=("x",)))
        requests.append((draw.randrange(20), own, stop_string, draw.randrange(40) if draw.random() < 0.2 else None))
    return options, requests, draw.choice((None, 0.6)), draw.random() < 0.4


def collected(seed, few, monkeypatch):
    """Everything that callers get, step by step, and the state after each step. `few`: up to how many go one by one."""
    options, requests, right, damaged = traffic(seed)
    it, cache = engine(**options) if right is None else drafting(right, seed, **options)
    if damaged:
        model = it._runner._model
        it._runner._model = lambda batch, cache: model(batch, cache).masked_fill(
            (batch.input_ids[batch.logits_indices] % 41 == NO_LOGITS)[:, None], float("nan")
        )
    seen, sides, preempted = [], [0, 0], 0
    slots, preempt, extend = it._scheduler.slots, it._scheduler._preempt, it._scheduler.slots.extend

    def count_sides(slots, *arguments):
        sides[len(slots) > slots_module.FEW] += len(slots) > 0
        return extend(slots, *arguments)

    def count_preempted(sequence):
        nonlocal preempted
        preempted += int(slots.steps[sequence.slot] > 0)
        preempt(sequence)

    monkeypatch.setattr(slots, "extend", count_sides)
    monkeypatch.setattr(it._scheduler, "_preempt", count_preempted)
    for step in range(MOST_STEPS):
        for arrival, request, _, aborted in requests:
            if arrival == step:
                it.add(request)
            if aborted == step:
                it.abort(request.id)
        with monkeypatch.context() as patch:
            if few is not None:
                patch.setattr(slots_module, "FEW", few)
            outputs = it.step()
        for output in outputs:
            assert len(output.times) == (len(output.token_ids) if requests[output.request_id][1].final_only else 0)
            assert list(output.times) == sorted(output.times)
            if any(token % 10 == requests[output.request_id][2] for token in output.token_ids):
                it.abort(output.request_id)  # as a caller that has found a stop string
        plain = [own._replace(error=str(own.error), times=(), queue_time_s=own.queue_time_s is not None) for own in outputs]
        seen.append((sorted(plain, key=lambda own: own.request_id), it.stats,
                     cache.allocator.num_free, sorted(cache.allocator._pages.values())))  # fmt: skip
        if not it.has_work and step > 40:
            assert cache.allocator.num_free == options["pages"]
            return seen, sides, preempted
    raise AssertionError("starved")


def test_both_ways_of_collecting_give_the_same(monkeypatch):
    """Random traffic: ends by EOS, stop ids, length, stop strings, NaN and aborts; drafts, preemption, log-probabilities."""
    reasons, sides, preempted, aways = set(), [0, 0], 0, 0
    for seed in range(SEEDS):
        arrays, only_many, away = collected(seed, 0, monkeypatch)
        one_by_one, only_few, _ = collected(seed, 10**9, monkeypatch)
        both, mixed, _ = collected(seed, None, monkeypatch)
        assert only_many[0] == only_few[1] == 0
        for i, (a, b, c) in enumerate(zip(arrays, one_by_one, both, strict=True)):
            assert a == b == c, (seed, i)
        reasons |= {own.finish_reason for outputs, *_ in both for own in outputs}
        sides = [total + count for total, count in zip(sides, mixed, strict=True)]
        preempted += both[-1][1].num_preemptions
        aways += away
    assert reasons == {None, "stop", "length", "error"}
    assert min(sides) > 50, "steps on both sides of the threshold"
    assert preempted > 5
    assert aways > 0, "a sequence was preempted while a step with its token ran"
