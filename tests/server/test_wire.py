"""Messages between the processes come out as they went in, however the stream of bytes is cut."""

import random
from dataclasses import replace

import pytest

from minirt.engine.request import Request, TokenLogprobs, TokenOutput
from minirt.errors import ContextLengthError, EngineError, InputError, NumericsError
from minirt.sampling_params import SamplingParams, resolve
from minirt.server import wire
from minirt.server.wire import (
    TO_ENGINE,
    TO_FRONT,
    Abort,
    Failed,
    Frames,
    StepOutputs,
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


@pytest.mark.parametrize("error", [
    InputError("w", where="temperature", expected="e", found=-1, hint="h"), ContextLengthError("too long"),
    NumericsError("NaN", where="generated token 3"),
])  # fmt: skip
def test_errors_keep_their_class_and_text(error):
    (body,) = bodies(frame(StepOutputs([TokenOutput(1, (), "error", error=error)])))
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
