"""A rank other than 0: `python -m minirt.parallel.follower SOCKET MEMORY`. It loads its share and runs the steps of rank 0.

If rank 0 ends, so does this process, whatever it waits for.
"""

import json
import os
import socket
import sys
import threading
import time
import warnings
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

from minirt.engine.execute.runner import Forward, Runner
from minirt.errors import MinirtError
from minirt.generator import Generator
from minirt.loading.options import LoadOptions
from minirt.modeling.parameters import Shard
from minirt.parallel.messages import Ring, unpack
from minirt.parallel.ranks import BEAT_SECONDS, Ranks, StepRefused, failed, signs_in
from minirt.user_code import import_file


class _Leader:
    """The connection to rank 0."""

    signs: Any = None  # signs of life of all ranks, once their memory is known; that of rank 0 is that its process is there
    rank = 0

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)

    def start(self) -> dict[str, Any]:
        data = b""
        while not data.endswith(b"\n"):
            if not (byte := self._socket.recv(1)):
                sys.exit(1)
            data += byte
        return json.loads(data)

    def say(self, message: Any) -> None:
        self._socket.sendall(f"{json.dumps(message)}\n".encode())

    def wait(self) -> None:
        """Wait until rank 0 announces something."""
        if not self._socket.recv(1 << 12):
            sys.exit(1)

    def beat(self) -> None:
        """Say that this process lives, until rank 0 has ended. Its parent has changed then, even if the socket is still open."""
        parent = os.getppid()
        while os.getppid() == parent:
            try:
                self._socket.sendall(b"\n")
                if self.signs is not None:
                    self.signs[[0, self.rank]] += 1
            except OSError:
                break
            time.sleep(BEAT_SECONDS)
        os._exit(1)  # the main thread may wait for the device


def follow(runner: Runner, ring: Ring, place: int, leader: _Leader) -> None:
    """Do what rank 0 does, until it ends."""
    forward: Forward | None = None
    while True:
        what, value = unpack(ring.read(place, leader.wait))
        with suppress(StepRefused):  # by rank 0, too
            if what == "start":
                runner.start(value)
            elif what == "forward":
                forward = runner.forward(value)
            elif what == "draw" and forward is not None:
                if value is not None:
                    runner.masks(len(value)).copy_(torch.from_numpy(value.copy()))
                runner.draw(forward)
                forward = None
            elif what == "call":
                module, _, name = value[0].partition(":")
                getattr(import_module(module), name)(runner.model, *value[1])
            else:
                return


def main(descriptor: int, memory: int) -> int:
    warnings.simplefilter("ignore")  # rank 0 warns
    leader = _Leader(descriptor)
    threading.Thread(target=leader.beat, daemon=True).start()
    start = leader.start()
    try:
        for file in start["imports"]:
            import_file(file)
        options = LoadOptions(**start["options"])
        ranks, device = options.tensor_parallel, torch.device(options.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # what PyTorch allocates by itself is there, too
        ring = Ring(ranks - 1, memory)
        signs = signs_in(ring, ranks)
        leader.rank, leader.signs = start["rank"], signs[1]
        leader.say("ready")
        this = Ranks(Shard(start["rank"], ranks), device, start["folder"], signs)
        generator = Generator._of_rank(options, this)
        leader.say("serving")
        follow(generator._engine.engine._runner, ring, start["rank"] - 1, leader)
    except Exception as error:
        if not isinstance(error, MinirtError):
            sys.excepthook(*sys.exc_info())
            error = failed(error)
        leader.say({"class": type(error).__name__} | {name: _text(getattr(error, name)) for name in _FIELDS})
        return 1
    return 0


_FIELDS = "what", "where", "expected", "found", "hint"


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


if __name__ == "__main__":
    code = main(*map(int, sys.argv[1:]))
    sys.stdout.flush()
    os._exit(code)  # what libraries would do at the end may wait for ranks that have ended
