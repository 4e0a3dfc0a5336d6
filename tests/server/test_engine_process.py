"""The engine's process, with a fake connection and engine: what it submits, and what it refuses."""

import json
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from minirt import models
from minirt.engine.request import EngineStats, Request
from minirt.errors import InputError
from minirt.sampling_params import SamplingParams, resolve
from minirt.server.engine_process import _Connection, _Server
from minirt.server.wire import EngineState, Frames, Start, Submit, frame


class Fake:
    """A connection, and a generator with its engine's thread."""

    def __init__(self, error=None):
        self.sent, self.submitted, self.aborted, self.checked = [], [], [], []
        self.error = error
        self._engine = self

    def submit(self, requests, sink):
        self.submitted += requests

    def abort(self, request_ids):
        self.aborted += request_ids

    def send(self, message):
        self.sent += message.outputs

    def check(self, request, **options):
        self.checked.append(request.prompt_token_ids)
        if self.error is not None:
            raise self.error


def requests(*ids, group=None):
    sampling = resolve(SamplingParams(), None)
    return [Request(i, [1, 2], sampling, group=group) for i in ids]


@pytest.mark.parametrize("error", [InputError("bad", where="top_k"), ValueError("a fault")])
def test_a_refused_call_ends_with_an_error(error):
    fake = Fake(error)
    _Server(fake, fake).handle(Submit(requests(3, 5)))
    assert fake.submitted == []
    assert [(output.request_id, output.finish_reason) for output in fake.sent] == [(3, "error"), (5, "error")]
    assert str(error) in str(fake.sent[0].error)


def test_messages_of_several_threads_are_whole():
    """Each is longer than what the socket takes at once, so that a thread waits within its message."""
    front, engine = socket.socketpair()
    messages = [EngineState(EngineStats(), [i] * 500_000) for i in range(8)]
    with ThreadPoolExecutor(len(messages)) as pool, front:
        front.settimeout(20)
        connection, frames, bodies = _Connection(engine.detach()), Frames(), []
        sending = [pool.submit(connection.send, message) for message in messages]
        while len(bodies) < len(messages):
            bodies += frames.feed(front.recv(1 << 16))
        for done in sending:
            done.result()
    assert sorted(bodies) == sorted(frame(message)[4:] for message in messages)


def test_a_warning_of_a_model_is_printed_once(tmp_path):
    """The process reads config.json for the front and for loading. Catches a warning that stands twice in the log."""
    folder = shutil.copytree(models.embedded(), tmp_path / "model")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"novel_field": 1}))
    front, engine = socket.socketpair()
    with front, engine:
        front.sendall(frame(Start({"model": str(folder), "device": "cpu"}, False)))
        front.shutdown(socket.SHUT_WR)
        command = [sys.executable, "-m", "minirt.server.engine_process", str(engine.fileno())]
        done = subprocess.run(command, pass_fds=[engine.fileno()], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.count("novel_field") == 1
