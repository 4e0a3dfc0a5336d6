"""Failures in a step: out of memory, a failed GPU, logits with NaN. Nothing hangs, and other requests are not affected.

Catches a request that is lost without an output, pages kept by a failed request, an engine that continues on a failed device.
"""

import pytest
import torch
from engine.test_engine import add, engine, run, undisturbed
from support.native import native_error

from minirt.errors import DeviceFailedError, NumericsError, OutOfMemoryError
from minirt.sampling_params import SamplingParams, resolve


def failing(it, error, at):
    """Make the model of an engine raise `error` in its `at`-th step."""
    model, steps = it._runner._model, iter(range(10_000))

    def call(batch, cache):
        if next(steps) == at:
            raise error
        return model(batch, cache)

    it._runner._model = call


def steps(it):
    for _ in range(10):
        it.step()


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.\nmore"),
     native_error("Triton Error [CUDA]: out of memory, 7.00 GiB")],  # when a kernel cannot be loaded
    ids=["allocator", "kernel"],
)  # fmt: skip
def test_out_of_memory_ends_the_requests_of_that_step(error, at, lookahead):
    it, cache = engine(lookahead=lookahead)
    failing(it, error, at)
    ids = [add(it, [50 + i] * 5) for i in range(3)]
    errors = {}
    while it.has_work:
        for output in it.step():
            if output.finish_reason == "error":
                errors[output.request_id] = output.error
                assert output.token_ids == ()
    assert sorted(errors) == ids
    assert all(isinstance(e, OutOfMemoryError) and "7.00 GiB" in str(e) and "--max-num-seqs" in str(e) for e in errors.values())
    assert cache.allocator.num_free == 64
    tokens, reasons = run(it, [(0, [60, 61], 6)])
    assert tokens[0] == undisturbed([60, 61], 6, eos=5)
    assert reasons[0] in ("length", "stop")


def test_out_of_memory_spares_those_that_wait():
    it, _ = engine(seqs=1)
    failing(it, torch.OutOfMemoryError("CUDA out of memory."), 0)
    tokens, reasons = run(it, [(0, [50, 51], 4), (0, [52, 53], 4)])
    assert reasons[0] == "error"
    assert tokens[1] == undisturbed([52, 53], 4, eos=5)


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
    model = it._runner._model
    it._runner._model = lambda batch, cache: model(batch, cache).masked_fill(
        (batch.seq_lens_device == 4)[:, None], float("nan")
    )
    bad, good = add(it, [50, 51, 52]), add(it, [53, 54, 55, 56, 57])
    outputs = []
    while it.has_work:
        outputs += it.step()
    mine = [o for o in outputs if o.request_id == bad]
    assert [o.finish_reason for o in mine] == [None, "error"]
    assert isinstance(mine[-1].error, NumericsError)
    assert "generated token 1" in str(mine[-1].error)
    tokens = [token for o in outputs if o.request_id == good for token in o.token_ids]
    assert tokens == undisturbed([53, 54, 55, 56, 57], len(tokens))
    assert cache.allocator.num_free == 64
