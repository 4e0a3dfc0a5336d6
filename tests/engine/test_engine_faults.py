"""Failures in a step: out of memory, a failed GPU, logits with NaN. Nothing hangs, and other requests are not affected.

Catches a request that is lost without an output, pages kept by a failed request, an engine that continues on a failed device.
"""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.test_engine import IDS, add, engine, finish, following, run, undisturbed
from support.native import native_error

from minirt.engine.engine import Request
from minirt.engine.execute.logits_processors import LogitsProcessors
from minirt.engine.limits import EngineLimits
from minirt.engine.schedule.scheduler import STEPS_UNTIL_LARGER
from minirt.engine.state.sequence import Sequence
from minirt.engine.state.slots import HostSlots
from minirt.errors import DeviceFailedError, NumericsError, OutOfMemoryError
from minirt.sampling_params import SamplingParams, resolve


def failing(it, error, at):
    """Make the model of an engine raise `error` in its `at`-th step."""
    model, steps = it._runner.model, iter(range(10_000))

    def call(batch, cache):
        if next(steps) == at:
            raise error
        return model(batch, cache)

    it._runner.model = call


def steps(it):
    for _ in range(10):
        it.step()


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.\nmore"),
    native_error("Triton Error [CUDA]: out of memory, 7.00 GiB"),  # when a kernel cannot be loaded
]


def limited(it, most, error):
    """Make the model of an engine run out of memory in steps of more than `most` tokens. → the tokens of each try."""
    model, tries = it._runner.model, []

    def call(batch, cache):
        tries.append(batch.num_tokens)
        if batch.num_tokens > most:
            raise error
        return model(batch, cache)

    it._runner.model = call
    return tries


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["allocator", "kernel"])
def test_out_of_memory_once_changes_no_token(error, at, lookahead):
    it, cache = engine(lookahead=lookahead)
    failing(it, error, at)
    prompts = [[50 + i] * 5 for i in range(3)]
    tokens, _ = run(it, [(0, prompt, 9) for prompt in prompts])
    assert [tokens[i] for i in range(3)] == [undisturbed(prompt, 9, eos=5) for prompt in prompts]
    assert cache.allocator.num_free == 64


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("most", [1, 2, 7])
def test_steps_shrink_until_they_fit(most, lookahead):
    """Prompts and decode steps; the limit holds for a while, so that not every step is tried in vain."""
    it, cache = engine(lookahead=lookahead, budget=32)
    tries = limited(it, most, OUT_OF_MEMORY[0])
    prompts = [[50 + i] * 9 for i in range(6)]
    tokens, _ = run(it, [(0, prompt, 12) for prompt in prompts])
    assert [tokens[i] for i in range(6)] == [undisturbed(prompt, 12, eos=5) for prompt in prompts]
    assert cache.allocator.num_free == 64
    assert 0 < sum(n > most for n in tries) <= 5 + len(tries) // STEPS_UNTIL_LARGER


def test_the_limit_is_lifted():
    it, _ = engine(budget=32)
    model = it._runner.model
    failing(it, OUT_OF_MEMORY[0], 0)
    run(it, [(0, [50] * 30, 1)])
    run(it, [(0, [51 + i], STEPS_UNTIL_LARGER) for i in range(3)])
    model.tokens_per_step.clear()
    run(it, [(0, [60] * 30, 1)])
    assert model.tokens_per_step[0] == 30


@pytest.mark.parametrize("lookahead", [0, 1])
def test_out_of_memory_for_one_token_ends_its_request(lookahead):
    it, cache = engine(lookahead=lookahead)
    model = it._runner.model

    def call(batch, cache):
        if 7 in batch.seq_lens:
            raise OUT_OF_MEMORY[0]
        return model(batch, cache)

    it._runner.model = call
    bad, good = add(it, [50, 51, 52, 53]), add(it, [60] * 9, resolve(SamplingParams(max_tokens=6), None), (5,))
    outputs = finish(it)
    error = next(output.error for output in outputs if output.request_id == bad and output.error)
    assert isinstance(error, OutOfMemoryError)
    assert "7.00 GiB" in str(error)
    assert "--max-num-seqs" in str(error)
    tokens = [token for o in outputs if o.request_id == good for token in o.token_ids]
    assert tokens == undisturbed([60] * 9, 6, eos=5)
    assert cache.allocator.num_free == 64


def logits(it, tokens):
    """The only output of a request for the logits of all its tokens."""
    it.add(Request(next(IDS), tokens, replace(resolve(None, None), max_tokens=0), logits_only=True))
    outputs = finish(it)
    (output,) = outputs
    return output


def test_logits_take_smaller_chunks():
    it, cache = engine()
    tokens = list(range(40))
    expected = logits(it, tokens).logits
    assert expected.argmax(-1).tolist() == [following(tokens[: i + 1]) for i in range(40)]
    model = it._runner.model
    it._runner.model = lambda batch, cache: model(batch, cache) if batch.num_tokens <= 3 else raises(OUT_OF_MEMORY[0])
    assert torch.equal(logits(it, tokens).logits, expected)
    it._runner.model = lambda batch, cache: raises(OUT_OF_MEMORY[0])
    assert "a step of one token" in str(logits(it, tokens).error)
    assert cache.allocator.num_free == 64


def raises(error):
    raise error


def test_a_failed_gpu_is_the_end_with_its_cause():
    it, _ = engine()
    cause = native_error("CUDA error: an illegal memory access was encountered\nCompile with …")
    failing(it, cause, 2)
    add(it, [50, 51])
    with pytest.raises(DeviceFailedError, match="illegal memory access") as caught:
        steps(it)
    assert caught.value.__cause__ is cause
    with pytest.raises(DeviceFailedError, match="illegal memory access"):
        it.step()


@pytest.mark.parametrize("message", ["shapes do not match", "CUDA error: out of memory, said by a layer"])
def test_other_errors_of_a_layer_come_through(message):
    """Also one whose text looks like that of a failed GPU. What waited for its first step goes on."""
    it, cache = engine(seqs=1)
    failing(it, RuntimeError(message), 1)
    first, second = add(it, [50, 51]), add(it, [60, 61], resolve(SamplingParams(max_tokens=6), None), (5,))
    with pytest.raises(RuntimeError, match=message):
        steps(it)
    it.recover()
    assert cache.allocator.num_free == 64
    assert first not in it
    assert second in it
    tokens = []
    while it.has_work:
        tokens += [token for output in it.step() for token in output.token_ids]
    assert tokens == undisturbed([60, 61], 6, eos=5)
    assert cache.allocator.num_free == 64


@pytest.mark.parametrize("lookahead", [0, 1])
def test_logits_without_numbers(lookahead):
    """With lookahead, the next step has already started by then, with −1 as the token."""
    it, cache = engine(lookahead=lookahead)
    model = it._runner.model
    it._runner.model = lambda batch, cache: model(batch, cache).masked_fill((batch.seq_lens_device == 4)[:, None], float("nan"))
    bad, good = add(it, [50, 51, 52]), add(it, [53, 54, 55, 56, 57])
    outputs = finish(it)
    mine = [o for o in outputs if o.request_id == bad]
    assert [o.finish_reason for o in mine] == [None, "error"]
    assert isinstance(mine[-1].error, NumericsError)
    assert "generated token 1" in str(mine[-1].error)
    tokens = [token for o in outputs if o.request_id == good for token in o.token_ids]
    assert tokens == undisturbed([53, 54, 55, 56, 57], len(tokens))
    assert cache.allocator.num_free == 64


RULES = {
    "penalties": {"frequency_penalty": 0.5}, "bias": {"logit_bias": {3: 1.0}}, "allowed": {"allowed_token_ids": [3, 4]},
    "bad words": {"bad_words": "x"}, "min_tokens": {"min_tokens": 3},
}  # fmt: skip


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("name", RULES)
def test_out_of_memory_for_a_requests_rules_ends_that_request(name, lookahead, monkeypatch):
    """Each copy to the device fails once. Catches an engine that takes the step for too large, and makes all steps smaller."""
    plain = [[50 + i] * 5 for i in range(4)]
    sent = LogitsProcessors._sent
    for failing_copy in itertools.count():
        copies = itertools.count()

        def fails(self, values, dtype, copies=copies, failing_copy=failing_copy):
            if next(copies) == failing_copy:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")
            return sent(self, values, dtype)

        monkeypatch.setattr(LogitsProcessors, "_sent", fails)
        it, cache = engine(lookahead=lookahead, seqs=8, prefix_cache=False)
        good = [add(it, prompt, resolve(SamplingParams(max_tokens=12), None), (5,)) for prompt in plain]
        outputs = [*it.step(), *it.step()]
        own = resolve(SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.0, **RULES[name]), None)
        bad = Request(next(IDS), [60, 61, 62], own, (5,), bad_words=((1, 2), (3,)) if own.bad_words else ())
        it.add(bad)
        outputs += finish(it)
        tokens = {i: [token for o in outputs if o.request_id == i for token in o.token_ids] for i in (*good, bad.id)}
        assert [tokens[i] for i in good] == [undisturbed(prompt, 12, eos=5) for prompt in plain]
        assert cache.allocator.num_free == 64
        steps = it._runner.model.tokens_per_step
        failed = [o.error for o in outputs if o.error is not None]
        if next(copies) <= failing_copy:  # it has had no failing copy
            assert not failed
            assert len(tokens[bad.id]) == 9
            break
        assert len(failed) == 1
        assert isinstance(failed[0], OutOfMemoryError)
        assert "a request's penalties, biases and masks" in str(failed[0])
        assert not tokens[bad.id]
        assert len(steps) <= 12 + 3, "one step is tried again, and one computes a row for nothing"
        assert it._scheduler._limit_tokens == 64
    assert failing_copy >= 2


def test_no_request_makes_a_lasting_buffer():
    """Whatever requests ask for, the engine's tensors are those that it was made with, which the plan of memory holds. Catches a
    buffer that the first such request makes, and a table that grows."""

    def buffers(it):
        sampler = it._runner.sampler
        owners = (sampler, sampler._processors, sampler._processors.slots._asdict(), sampler._masks, it._runner.buffers)
        values = [value for owner in owners for value in (owner if isinstance(owner, dict) else vars(owner)).values()]
        return [(value.data_ptr(), value.shape) for value in values if isinstance(value, torch.Tensor)]

    it, _ = engine(seqs=4)
    before = buffers(it)
    assert len(before) > 12
    for options in (*RULES.values(), {"logprobs": 3}, {"prompt_logprobs": 2}, {"temperature": 1.0, "top_k": 3, "min_p": 0.1}):
        own = resolve(SamplingParams(max_tokens=4, ignore_eos=True, **options), None)
        it.add(Request(next(IDS), [1, 2, 3], own, (5,), bad_words=((1, 2), (3,)) if own.bad_words else ()))
    finish(it)
    assert buffers(it) == before


def test_long_rows_of_slots_do_not_stay_in_memory():
    """Each of many slots has a long sequence once, one after the other, then all have a short one. Catches 12 bytes for each
    token that ever was in a slot (3.2 GB for these limits), and huge pages for beginnings of rows."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    slots, before = HostSlots(EngineLimits(2**18, 1024), 2**12), resident()
    sequence = Sequence(Request(0, [1], resolve(None, None)), 2**18)
    for _ in range(60):
        slot = slots.admit(sequence)
        slots.tokens[slot], slots.times[slot], slots.page_tables[slot], slots.lengths[slot] = 1, 1.0, 1, 2**18
        slots.release(slot)
        slots.free.insert(0, slots.free.pop())
        assert resident() - before < 2**24
    for _ in range(1024):
        slot = slots.admit(sequence)
        slots.tokens[slot, :100] = slots.times[slot, :100] = slots.page_tables[slot, :2] = 1
    assert resident() - before < 2**25
