"""One call on an engine that answers by hand: what is submitted, pushed and aborted.

Catches a request that goes on after its caller has left or found a stop string, an abort that wakes the engine for nothing, and
tokens after the end.
"""

import asyncio

import pytest
from support.vocabularies import llama_like
from test_processor import made

from minirt.call_driver import CallDriver, Wakeup
from minirt.engine.request import TokenOutput
from minirt.errors import EngineError, InputError
from minirt.sampling_params import SamplingParams


class Port:
    """Notes what reaches the engine."""

    def __init__(self, error=None):
        self.submitted, self.aborted, self.error = [], [], error

    def submit(self, requests, sink):
        if self.error is not None:
            raise self.error
        self.submitted += requests

    def abort(self, request_ids):
        self.aborted.append(list(request_ids))


@pytest.fixture
def processor(tmp_path):
    return made(llama_like(), tmp_path)


def prepared(processor, prompts, **options):
    return processor.prepare(prompts, SamplingParams(max_tokens=8, **options), single=False)


def test_a_stop_string_aborts_its_request_alone(processor):
    text = processor.text()
    token = next(t for t in range(6, text.vocab_size) if text.decode([6, t])[-1:].isalpha())
    call, port = prepared(processor, [[3, 4], [5]], stop=[text.decode([6, token])[-1]]), Port()
    first, second = call.requests
    with CallDriver(call, port, sink=object(), final_only=True) as driver:
        driver.start()
        assert not port.submitted[0].final_only, "its text is looked at token by token"
        driver.push(TokenOutput(first.id, (6,), None))
        if first.id in call.open:
            driver.push(TokenOutput(first.id, (token,), None))
        assert port.aborted == [[first.id]]
        assert driver.push(TokenOutput(first.id, (6,), None)) is None, "the engine had computed one more token"
    assert port.aborted == [[first.id], [second.id]], "leaving aborts what still runs"


@pytest.mark.parametrize("samples", [1, 2])
def test_later_prompts_are_prepared_behind_the_first(processor, samples):
    """Catches a prompt that is submitted twice or never, and a later one whose times begin later."""
    port, prompts = Port(), [[3], [4], [5]]
    call = processor.prepare(prompts, SamplingParams(max_tokens=8, n=samples), single=False, first=1)
    assert len(call.requests) == samples
    with CallDriver(call, port, sink=object(), final_only=True) as driver:
        driver.start()
        assert [own.prompt_token_ids for own in port.submitted] == [prompt for prompt in prompts for _ in range(samples)]
        assert all(own.final_only for own in port.submitted)
        assert len({own.id for own in port.submitted}) == len(call.open) == 3 * samples
        assert len({stream.started for stream in call.streams}) == 1
        for own in port.submitted:
            driver.push(TokenOutput(own.id, (own.prompt_token_ids[0] + 3,), "length"))
    assert [result.token_ids if samples == 1 else result[1].token_ids for result in call.result()] == [[6], [7], [8]]


def test_outputs_may_come_before_all_prompts_are_submitted(processor):
    """Catches a request that is open again after its end, and a caller that cannot read until the last prompt is prepared."""
    call, port = processor.prepare([[3], [4], [5]], SamplingParams(max_tokens=8), single=False, first=1), Port()
    with CallDriver(call, port, sink=object()) as driver:
        for count, _ in enumerate(driver.parts(), 1):
            assert len(port.submitted) == len(call.requests) == count
            driver.push(TokenOutput(port.submitted[-1].id, (count + 5,), "length"))
            assert not call.open
    assert (port.aborted, [done.token_ids for done in call.result()]) == ([], [[6], [7], [8]])


def test_a_later_prompt_that_is_refused_ends_the_call(processor):
    call, port = processor.prepare([[3], [4], ["x"]], SamplingParams(max_tokens=8), single=False, first=2), Port()
    with pytest.raises(InputError, match=r"^prompts\[2\]: "), CallDriver(call, port, sink=object()) as driver:
        driver.start()
    assert port.aborted == [[own.id for own in port.submitted]]
    with pytest.raises(InputError, match=r"^prompts\[2\]: "):  # an engine takes the prompts by priority: it must know all
        processor.prepare([[3], [4], ["x"]], SamplingParams(max_tokens=8), [2, 1, 0], single=False, first=2)


@pytest.mark.parametrize("stage", ["before", "running", "refused"])
def test_leaving_early(processor, stage):
    """What was never submitted is not aborted; an exception in `submit` may come after the requests have reached the engine."""
    call, port = prepared(processor, [[3], [4]]), Port(EngineError("ended") if stage == "refused" else None)
    ids = [own.id for own in call.requests]
    with pytest.raises(EngineError), CallDriver(call, port, sink=object()) as driver:  # noqa: PT012
        if stage != "before":
            driver.start()
        raise EngineError("left")
    assert port.aborted == ([] if stage == "before" else [ids])
    assert driver.abort() == 0


def test_a_wakeup_wakes_the_task_that_waits_and_no_later_one():
    async def scenario():
        wakeup = Wakeup()
        wakeup.wake()  # nobody waits: it is not kept
        waiting = wakeup.wait()
        assert not waiting.done()
        wakeup.wake()
        wakeup.wake()
        await asyncio.wait_for(waiting, 20)
        cancelled = wakeup.wait()
        cancelled.cancel()
        wakeup.wake()
        assert not wakeup.wait().done()

    asyncio.run(scenario())
