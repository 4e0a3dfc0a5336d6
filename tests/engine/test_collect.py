"""`HostSlots.extend` appends a step's tokens on arrays. Here one sequence after the other is the reference, on random traffic.

Catches an output, an end, a page or a count that depends on how many sequences ran in the step.
"""

import random
from dataclasses import replace
from functools import partial

import numpy as np
from engine.test_engine import VOCAB, Request, drafting, engine

from minirt.engine.state.slots import Reason
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


def one_by_one(host, slots, counts, tokens, now):
    """`extend`, with the stop rules in words: an unusable token, the length, a stop id, the length again."""
    taken, reasons = np.zeros_like(counts), np.zeros(len(slots), np.int64)
    for i, slot in enumerate(slots.tolist()):
        for token in tokens[i, : counts[i]].tolist():
            length, final = int(host.lengths[slot]), int(host.final_lens[slot])
            if reasons[i] == 0 and (token < 0 or length >= final):
                reasons[i] = Reason.NO_TOKEN if token < 0 else Reason.LENGTH
            if reasons[i]:
                break
            host.tokens[slot, length], host.times[slot, length], host.lengths[slot] = token, now, length + 1
            taken[i] += 1
            if token in host.ends[slot].tolist() or length + 1 == final:
                reasons[i] = Reason.STOP if token in host.ends[slot].tolist() else Reason.LENGTH
    return taken, reasons


def collected(seed, reference, monkeypatch):
    """Everything that callers get, step by step, and the state after each step."""
    options, requests, right, damaged = traffic(seed)
    it, cache = engine(**options) if right is None else drafting(right, seed, **options)
    if damaged:
        model = it._runner.model
        it._runner.model = lambda batch, cache: model(batch, cache).masked_fill(
            (batch.input_ids[batch.logits_indices] % 41 == NO_LOGITS)[:, None], float("nan")
        )
    seen, preempted = [], 0
    slots, preempt = it._scheduler.host, it._scheduler._preempt

    def count_preempted(sequence):
        nonlocal preempted
        preempted += int(slots.steps[sequence.slot] > 0)
        preempt(sequence)

    if reference:
        monkeypatch.setattr(slots, "extend", partial(one_by_one, slots))
    monkeypatch.setattr(it._scheduler, "_preempt", count_preempted)
    for step in range(MOST_STEPS):
        for arrival, request, _, aborted in requests:
            if arrival == step:
                it.add(request)
            if aborted == step:
                it.abort(request.id)
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
            return seen, preempted
    raise AssertionError("starved")


def test_arrays_give_what_one_sequence_after_the_other_gives(monkeypatch):
    """Random traffic: ends by EOS, stop ids, length, stop strings, NaN and aborts; drafts, preemption, log-probabilities."""
    reasons, preempted, aways = set(), 0, 0
    for seed in range(SEEDS):
        arrays, away = collected(seed, False, monkeypatch)
        expected, _ = collected(seed, True, monkeypatch)
        for i, (a, b) in enumerate(zip(arrays, expected, strict=True)):
            assert a == b, (seed, i)
        reasons |= {own.finish_reason for outputs, *_ in arrays for own in outputs}
        preempted += arrays[-1][1].num_preemptions
        aways += away
    assert reasons == {None, "stop", "length", "error"}
    assert preempted > 5
    assert aways > 0, "a sequence was preempted while a step with its token ran"
