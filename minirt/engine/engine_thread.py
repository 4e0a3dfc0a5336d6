"""`EngineThread`: one thread that owns an engine and its device.

Callers put commands into the thread's inbox and take outputs from their sinks. A step costs nothing for requests that
are not in it. Several streams can be open at once, and a stream that nobody reads delays no other. (vLLM separates its engine
core from its callers in the same way, by processes.)
"""

import atexit
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from minirt.engine.engine import Engine
from minirt.engine.port import Sink, Sinks
from minirt.engine.request import Request
from minirt.errors import DeviceFailedError, EngineError, MinirtError

T = TypeVar("T")
_MOST_FRUITLESS = 3


@dataclass(eq=False)
class _Command:
    """What a caller asks of the engine's thread.

    Args:
        run: does it.
        refuse: ends it after an exception: its caller gets an error.
    """

    run: Callable[[Engine], None]
    refuse: Callable[[BaseException], None]


def _nothing(_: Any) -> None:
    pass


_WAKE, _STOP = _Command(_nothing, _nothing), _Command(_nothing, _nothing)


class EngineThread:
    """Runs an engine in a separate thread, which starts with the first command and ends with `stop`.

    Commands are carried out in order, between steps. After an unforeseen exception, the requests that have started and the
    command that raised it end with an `EngineError`, and the engine goes on with the others. A failed GPU ends the thread.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._inbox: SimpleQueue[_Command] = SimpleQueue()
        self._commands: deque[_Command] = deque()  # taken from the inbox, not carried out yet
        self._current: _Command | None = None
        self._fruitless = 0  # exceptions in a row that ended neither a command nor a request
        self._sinks = Sinks()  # only the engine's thread changes them
        self._ids = itertools.count()
        self._ended: EngineError | DeviceFailedError | None = None  # why the thread has ended
        self._lock = threading.RLock()  # reentrant: a finalizer may run while it is held, and may put a command
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    @property
    def engine(self) -> Engine:
        """The engine. Other threads may only use its limits and checks.

        Raises:
            MinirtError: the thread has ended.
        """
        engine = self._engine
        if engine is None:
            raise self._reason()
        return engine

    @property
    def failed(self) -> bool:
        """Whether the GPU has failed."""
        return isinstance(self._ended, DeviceFailedError) or (self._engine is not None and self._engine.failed)

    @property
    def max_len(self) -> int:
        """Maximum number of tokens of a request, prompt and completion together."""
        return self.engine.max_len

    @property
    def keeps_states(self) -> bool:
        """See `Engine.keeps_states`."""
        return self.engine.keeps_states

    def peak_memory(self) -> int:
        """Peak memory in bytes, for `Completion.peak_memory_bytes`; 0 if the thread has ended."""
        return 0 if (engine := self._engine) is None else engine.peak_memory()

    def check(self, request: Request, compiles: bool = True) -> None:
        """Raise the error with which a request would be refused. Any thread may call it. `compiles`: see `RequestChecks`."""
        self.engine.checks.check(request.prompt_token_ids, request.sampling, request.rules, compiles)

    def new_id(self) -> int:
        """An id for a request. Any thread may ask for one."""
        return next(self._ids)

    def wake(self) -> None:
        """Announce a command: a sleeping thread takes some 0.1 ms to wake up, which the caller can use."""
        if self._thread is not None and self._ended is None and not self._sinks:
            self._inbox.put(_WAKE)

    def start(self) -> None:
        """Start the thread, for the work that the engine has without requests."""
        self._put(_WAKE)

    def submit(self, requests: Sequence[Request], sink: Sink) -> None:
        """See `Port`. The requests must have passed `check`. The sink's `put` runs in the engine's thread, once a step."""

        def run(engine: Engine) -> None:
            for request in requests:
                self._sinks[request.id] = sink
                engine.add(request)

        def refuse(error: BaseException) -> None:
            refused = [request.id for request in requests if self._engine is None or request.id not in self._engine]
            for request_id in refused:
                self._sinks[request_id] = sink
            self._sinks.fail(refused, _for_request(error))

        self._put(_Command(run, refuse))

    def abort(self, request_ids: Sequence[int]) -> None:
        """See `Port`. Outputs that were delivered before may still be in the sink."""

        def run(engine: Engine) -> None:
            self._sinks.drop(request_ids)
            for request_id in request_ids:
                engine.abort(request_id)

        def refuse(_: BaseException) -> None:  # an abort must not be lost
            if self._engine is not None:
                run(self._engine)

        with suppress(EngineError, DeviceFailedError):  # the thread has ended, and its requests with it
            self._put(_Command(run, refuse))

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function(engine)` between two steps, after the commands that came before.

        Returns its result or raises its exception.
        """
        result: Future = Future()
        self._put_call(function, result)
        try:
            return result.result()
        finally:
            result.cancel()  # if an exception, such as KeyboardInterrupt, ended the wait

    def ask(self, function: Callable[[Engine], T], answer: Callable[[T], None]) -> None:
        """As `call`, without waiting: the engine's thread calls `answer(result)`, unless an exception is raised."""

        def deliver(result: Future) -> None:
            if not result.cancelled() and result.exception() is None:
                answer(result.result())

        result: Future = Future()
        result.add_done_callback(deliver)
        self._put_call(function, result)

    def _put_call(self, function: Callable[[Engine], Any], result: Future) -> None:
        def run(engine: Engine) -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(function(engine))
                except DeviceFailedError:
                    raise
                except Exception as error:
                    result.set_exception(_for_request(error))

        def refuse(error: BaseException) -> None:
            if result.running() or (not result.done() and result.set_running_or_notify_cancel()):
                result.set_exception(_for_request(error))

        self._put(_Command(run, refuse))

    def stop(self) -> None:
        """End the thread after the current step. Open requests end with an error. Returns when the thread has ended."""
        if os.getpid() != self._process:  # a forked process does not have this thread
            return
        with self._lock:
            thread = self._thread
            if thread is None:
                self._end(_closed())
                return
        self._inbox.put(_STOP)
        if thread is not threading.current_thread():  # a finalizer may run in the engine's thread, which cannot join itself
            thread.join()

    def _put(self, command: _Command) -> None:
        with self._lock:
            if self._ended is not None:
                raise self._reason()
            if os.getpid() != self._process:
                hint = "load the model in the process that uses it"
                raise EngineError("the engine belongs to the process that loaded the model", hint=hint)
            self._inbox.put(command)
            if self._thread is None:  # daemon: a program that forgets to close the generator must still end
                self._thread = threading.Thread(target=self._run, name="minirt-engine", daemon=True)
                self._thread.start()
                atexit.register(self.stop)  # a daemon thread in PyTorch's code would abort the process

    def _reason(self) -> MinirtError:
        """The reason why the thread has ended, as a new exception: one exception must not be raised in several threads."""
        return (self._ended or _closed()).copy()

    # ── the methods below run in the engine's thread ──

    def _run(self) -> None:
        reason: EngineError | DeviceFailedError | None = None
        try:
            while True:
                try:
                    self._loop()
                    reason = None
                    return
                except DeviceFailedError as error:
                    reason = error.copy()
                    return
                except BaseException as error:
                    reason = _unforeseen(error)
                    self._recover(error)
        finally:
            self._end(reason or _closed())

    def _loop(self) -> None:
        engine = self.engine
        while self._take_commands(engine):
            if engine.has_work:
                if rest := engine.step(self._sinks.deliver):
                    self._sinks.deliver(rest)
            elif engine.warming_up:
                engine.continue_warm_up()
            self._fruitless = 0

    def _take_commands(self, engine: Engine) -> bool:
        """Carry out the commands in the inbox. Waits for a command if there is nothing else to do. Returns False at a stop."""
        wait = not self._commands and not engine.has_work and not engine.warming_up
        while wait or not self._inbox.empty():
            self._commands.append(self._inbox.get())  # in one line, so that an exception loses no command
            wait = False
        for command in tuple(self._commands):
            if command is _STOP:
                return False
            self._current = command
            command.run(engine)
            self._commands.remove(command)
            self._current = None
        return True

    def _recover(self, error: BaseException) -> None:
        """Continue after an exception at any line. The engine drops the requests that have started; each ends with an error.

        If exceptions come again and again before any request has started, all requests end: else they would come for ever.
        """
        self.engine.recover()
        command, self._current = self._current, None
        if command is not None:
            command.refuse(error)
            if command in self._commands:
                self._commands.remove(command)
        failed = [i for i in self._sinks if i not in self.engine]
        self._fruitless = 0 if failed or command is not None else self._fruitless + 1
        if self._fruitless == _MOST_FRUITLESS:
            failed, self._fruitless = list(self._sinks), 0
        for request_id in failed:
            self.engine.abort(request_id)
        self._sinks.fail(failed, _for_request(error))

    def _end(self, reason: EngineError | DeviceFailedError) -> None:
        """End all requests and commands with an error, and drop the engine."""
        with self._lock:  # no command is accepted from here on
            engine, self._engine, self._ended = self._engine, None, reason
        if engine is not None:
            engine.close()
        atexit.unregister(self.stop)
        while not self._inbox.empty():
            self._commands.append(self._inbox.get())
        for command in self._commands:
            command.refuse(reason)
        self._commands.clear()
        self._sinks.fail(list(self._sinks), reason)


def _closed() -> EngineError:
    return EngineError("the generator is closed")


def _unforeseen(error: BaseException) -> EngineError:
    failure = EngineError(f"the engine failed: {type(error).__name__}: {error}", hint="the exception is this error's __cause__")
    failure.__cause__ = error
    return failure


def _for_request(error: BaseException) -> MinirtError:
    """An error for one request: a copy of minirt's own, else an `EngineError` with the exception as its cause."""
    return error.copy() if isinstance(error, MinirtError) else _unforeseen(error)
