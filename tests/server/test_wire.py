"""Messages between the processes come out as they went in, however the stream of bytes is cut."""

import random
from dataclasses import replace

import pytest

from minirt.engine.request import EngineStats, Request, TokenLogprobs, TokenOutput
from minirt.errors import ContextLengthError, EngineError, InputError, NumericsError
from minirt.sampling_params import SamplingParams, resolve
from minirt.server import wire
from minirt.server.wire import (
    TO_ENGINE,
    TO_FRONT,
    Abort,
    Answer,
    Ask,
    Failed,
    Frames,
    ModelFiles,
    Ready,
    Start,
    Step,
    Submit,
    frame,
)

SAMPLING = resolve(
    SamplingParams(
        seed=2**64 - 1, logit_bias={3: -1.5, 2**40: 2.0}, allowed_token_ids=[9, 4], stop=["a", "é"], bad_words=["x"], logprobs=3,
        max_tokens=2**53, prompt_logprobs=0,
    ),
    {"do_sample": True, "top_k": 7},
)  # fmt: skip
REQUEST = Request(2**40, [1, 2, 151_000], SAMPLING, (2, 7), "salt", -3, None, ((1, 2), (3,)))
ROW = TokenLogprobs(5, float("-inf"), 2, ((4, -0.25), (5, -1.5)))


def bodies(data, pieces=1):
    frames = Frames()
    cuts = sorted(random.Random(7).sample(range(1, len(data)), pieces - 1))
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        yield from frames.feed(bytes(data[begin:end]))


@pytest.mark.parametrize("message", [
    Start({"model": "m", "impl": ["eager"], "kv_cache_memory": 1 << 40, "seed": None}, True),
    Submit([REQUEST, REQUEST]), Abort([1, 2**50]), Ask(), Ask([2**40]),
])  # fmt: skip
def test_messages_to_the_engine(message):
    (body,) = bodies(frame(message))
    found = TO_ENGINE.decode(body)
    assert found == message
    if isinstance(message, Submit):  # the engine uses these as keys and in sets
        assert type(found.requests[0].eos_token_ids) is tuple
        assert type(found.requests[0].bad_words[0]) is tuple
        assert found.requests[0].sampling.stop == ("a", "é")


@pytest.mark.parametrize("message", [
    ModelFiles(None), ModelFiles("/models/é"), Ready(512, 4096, 8, (0, 2), {"top_k": 1}, {"plan": "x"}),
    Step([TokenOutput(2**40, (1, 2**31), None, None, 64, (ROW, ROW), (ROW,), 0.25), TokenOutput(1, (), "stop")]),
    Answer(EngineStats(1, 2, 0.5, 3, 4, 5, 6), []), Answer(EngineStats(1, 2, 0.5, 3, 4, 5, 6, prefix_cache_recomputed=7), [8]),
])  # fmt: skip
def test_messages_to_the_front(message):
    (body,) = bodies(frame(message))
    assert TO_FRONT.decode(body) == message


@pytest.mark.parametrize("error", [
    InputError("w", where="temperature", expected="e", found=-1, hint="h"), ContextLengthError("too long"),
    NumericsError("NaN", where="generated token 3"),
])  # fmt: skip
def test_errors_keep_their_class_and_text(error):
    (body,) = bodies(frame(Step([TokenOutput(1, (), "error", error)])))
    found = TO_FRONT.decode(body).outputs[0].error
    assert type(found) is type(error)
    assert str(found) == str(error)
    (body,) = bodies(frame(Failed(error)))
    assert str(TO_FRONT.decode(body).error) == str(error)


def test_samples_share_a_prompt():
    """A prompt is sent once, whatever number of samples it has."""
    first = replace(REQUEST, prompt_token_ids=[9] * 10_000, group=REQUEST.id)
    others = [replace(first, id=i, sampling=replace(SAMPLING, seed=i)) for i in range(5)]
    alone = replace(REQUEST, id=77, group=None)
    data = frame(Submit.of([first, *others, alone]))
    assert len(data) < 20_000
    (body,) = bodies(data)
    assert TO_ENGINE.decode(body).whole() == [first, *others, alone]


def test_a_message_that_is_too_large(monkeypatch):
    monkeypatch.setattr(wire, "MAX_FRAME", 1000)
    with pytest.raises(InputError, match="too large"):
        frame(Abort(list(range(2000))))


def test_frames_may_be_cut_anywhere():
    messages = [Abort([i] * (i % 50)) for i in range(300)]
    data = b"".join(map(frame, messages))
    for pieces in (1, 2, 700, len(data)):
        assert [TO_ENGINE.decode(body) for body in bodies(data, pieces)] == messages


def test_a_damaged_length_is_an_error():
    with pytest.raises(EngineError, match="damaged"):
        list(Frames().feed(b"\xff\xff\xff\xff"))


def test_an_integer_without_a_place_is_an_error():
    with pytest.raises(OverflowError):
        frame(Abort([2**65]))
