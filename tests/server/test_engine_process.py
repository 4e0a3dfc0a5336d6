"""The engine's process, with a fake connection: refusals, and aborts at any time."""

import threading
from types import SimpleNamespace

import pytest

from minirt.engine.request import Request
from minirt.errors import EngineError, InputError
from minirt.sampling_params import SamplingParams, resolve
from minirt.server.engine_process import _Server
from minirt.server.wire import Abort, Submit


class Fake:
    """A connection, and a generator with its engine's thread and client. `gate`: a check waits for it."""

    def __init__(self, error=None):
        self.sent, self.submitted, self.aborted = [], [], []
        self.error, self.gate, self.entered = error, threading.Event(), threading.Event()
        self._engine = self

    def connect(self, deliver):
        return SimpleNamespace(submit=self.submitted.extend, abort=self.aborted.extend)

    def send(self, message):
        self.sent += message.outputs

    def check(self, request):
        self.entered.set()
        if request.sampling.structured_outputs is not None:
            self.gate.wait(20)
        if self.error is not None:
            raise self.error


def requests(*ids, slow=False):
    sampling = SimpleNamespace(**vars(resolve(SamplingParams(), None)))
    sampling.structured_outputs = "a grammar" if slow else None
    return [Request(i, [1], sampling) for i in ids]


def handle(server, own):
    """Submit requests as they are, since a fake setting cannot be sent."""
    server.handle(Submit(own))


def test_requests_are_checked_and_submitted():
    fake = Fake()
    handle(_Server(fake, fake), requests(3, 5))
    assert [request.id for request in fake.submitted] == [3, 5]
    assert fake.sent == []


@pytest.mark.parametrize("error", [InputError("bad", where="top_k"), ValueError("a fault")])
def test_a_refused_call_ends_with_an_error(error):
    fake = Fake(error)
    server = _Server(fake, fake)
    handle(server, requests(3, 5))
    assert fake.submitted == []
    assert [(output.request_id, output.finish_reason) for output in fake.sent] == [(3, "error"), (5, "error")]
    assert str(error) in str(fake.sent[0].error)
    assert not server._unchecked


def test_an_engine_that_has_ended():
    fake = Fake()
    server = _Server(fake, fake)

    def submit(_):
        raise EngineError("the generator is closed")

    server._client.submit = submit
    handle(server, requests(3))
    assert isinstance(fake.sent[0].error, EngineError)


def test_a_slow_check_delays_nobody_and_may_be_aborted():
    fake = Fake()
    server = _Server(fake, fake)
    handle(server, requests(1, 2, slow=True))
    fake.entered.wait(20)
    handle(server, requests(7))
    assert [request.id for request in fake.submitted] == [7]
    server.handle(Abort([2]))
    assert fake.aborted == [2]
    fake.gate.set()
    server._compiling.shutdown(wait=True)
    assert [request.id for request in fake.submitted] == [7, 1]
    assert fake.sent == []
    assert not server._unchecked
