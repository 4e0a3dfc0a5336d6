"""The engine's process: loads the model, and runs the requests that the front sends. `python -m minirt.server.engine_process FD`.

The main thread reads the front's messages; the thread of `EngineThread` computes, and sends the outputs of each step. If the
front ends, so does this process. If the front does not read, sending waits, and so does the engine.
"""

import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from minirt.engine.request import Request, TokenOutput
from minirt.errors import DeviceFailedError, MinirtError, inside, printable
from minirt.head_start import head_start
from minirt.loading.options import LoadOptions
from minirt.progress import load_bars
from minirt.server import wire
from minirt.server.errors import named
from minirt.sizes import format_size
from minirt.user_code import import_file
from minirt.wording import command_line

if TYPE_CHECKING:
    from minirt.generator import Generator

_READ = 1 << 20


class _Connection:
    """The socket to the front. Messages may be sent from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._frames, self._lock = wire.Frames(), threading.Lock()

    def send(self, message: wire.ToFront) -> None:
        data = wire.frame(message)
        with self._lock:
            self._socket.sendall(data)

    def messages(self) -> Iterator[Any]:
        """The front's messages, until it closes the connection."""
        while data := self._socket.recv(_READ):
            yield from map(wire.TO_ENGINE.decode, self._frames.feed(data))


@cache
def _print_warning(text: str) -> None:
    """Print a warning, once: the model's files are read for the front, and again for loading."""
    sys.stderr.write(f"minirt: warning: {text}\n")


def main(descriptor: int) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the front decides when the engine ends
    warnings.showwarning = lambda message, *_, **__: _print_warning(printable(message))
    sys.setswitchinterval(wire.SWITCH_SECONDS)
    connection = _Connection(descriptor)
    messages = connection.messages()
    start: wire.Start | None = next(messages, None)
    if start is None:
        return 1
    try:
        generator = _load(connection, start)
    except Exception as error:
        connection.send(wire.Failed(named(error, "the model cannot be loaded")))
        return 1
    server = _Server(connection, generator)
    with suppress(ConnectionError):
        for message in messages:
            server.handle(message)
    generator.close()
    return 0


def _load(connection: _Connection, start: wire.Start) -> "Generator":
    with head_start(start.options):
        from minirt.generator import Generator
        from minirt.loading.load import find

        for file in start.imports:
            import_file(file)
        options = LoadOptions(**start.options)
        files = find(options.model, options.revision, need_weights=not options.random_weights, progress=start.progress).files
        connection.send(wire.FilesReady(str(files.folder) if files else None))
        with load_bars(start.progress) as progress:
            generator = Generator.from_pretrained(options, progress=progress)
    kept = {}
    for name, text in start.warm_prompts:
        with inside(name):
            kept[name] = generator.warm_prompt(text)
    facts = {
        "device": str(generator.device), "plan": generator.plan.title,
        "weights": format_size(generator.plan.weight_bytes), "kv_cache": format_size(generator.kv_cache_bytes),
        "max_num_batched_tokens": generator.max_num_batched_tokens, "max_waiting": generator.max_waiting,
        "prefix_cache": generator.prefix_cache_stats is not None, "load_time_s": round(generator.load_time_s, 3),
        "warm_up_time_s": round(generator.warm_up_time_s, 3), "warm_prompts": kept,
    }  # fmt: skip
    connection.send(
        wire.Ready(
            generator.max_len, generator.config.vocab_size, generator.max_num_seqs, generator.eos_token_ids,
            generator.generation_config, facts, generator._engine.keeps_states, generator.loras,
        )
    )  # fmt: skip
    return generator


class _Server:
    """Carries out the front's messages on a generator's engine, and is the sink of all requests."""

    def __init__(self, connection: _Connection, generator: "Generator") -> None:
        self._connection, self._thread, self._generator = connection, generator._engine, generator
        self._changes = SimpleQueue[wire.ChangeAdapter]()
        threading.Thread(target=self._change_adapters, daemon=True).start()

    def handle(self, message: wire.Submit | wire.Abort | wire.Ask | wire.ChangeAdapter) -> None:
        match message:
            case wire.ChangeAdapter():
                self._changes.put(message)
            case wire.Submit():
                self._submit(message.whole())
            case wire.Abort(request_ids=request_ids):
                self._thread.abort(request_ids)
            case wire.Ask(request_ids=ids):
                self._thread.ask(
                    lambda engine: wire.EngineState(engine.stats, [*map(engine.num_tokens, ids)]), self._connection.send
                )

    def _change_adapters(self) -> None:
        """Carry out changes one after the other, in a thread: reading an adapter must not delay the messages after it."""
        while True:
            change, error = self._changes.get(), None
            try:
                if change.folder is None:
                    self._generator.unload_lora(change.name)
                else:
                    self._generator.load_lora(change.name, change.folder)
            except Exception as raised:
                error = named(raised, "the adapter cannot be changed")
            with suppress(OSError, MinirtError):  # the front or the engine has ended
                self._connection.send(wire.AdapterChanged(self._generator.loras, error))

    def _submit(self, requests: Sequence[Request]) -> None:
        """Add the requests of one call, or refuse all of them: they have the same prompt, or belong together."""
        try:
            for request in requests:
                self._thread.check(request, compiles=False)  # a grammar must not delay the messages after it
            self._thread.submit(requests, self)
        except Exception as error:
            refusal = named(error, "the request cannot be checked")
            self._connection.send(wire.StepOutputs([TokenOutput(request.id, (), "error", error=refusal) for request in requests]))

    def put(self, outputs: list[TokenOutput]) -> None:
        """Send outputs to the front. Ends the process after the front has ended or the GPU has failed."""
        try:
            self._connection.send(wire.StepOutputs(outputs))
        except OSError:  # the front has ended
            os._exit(1)
        for output in outputs:
            if isinstance(output.error, DeviceFailedError):  # only a new process can use the GPU again
                os._exit(1)


if __name__ == "__main__":
    with command_line():
        code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # PyTorch takes a second to tear down what the system frees anyway
