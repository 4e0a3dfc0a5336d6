"""`EngineThread`: one thread that owns an engine and its device. `EngineClient`: how other threads use it.

Callers put commands into the thread's inbox and wait for outputs on a queue of their own. A step costs nothing for requests that
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
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

from minirt.engine.engine import Engine
from minirt.engine.request import Request, TokenOutput
from minirt.errors import DeviceFailedError, EngineError, MinirtError

T = TypeVar("T")
AnyError = TypeVar("AnyError", bound=MinirtError)
_MOST_FRUITLESS = 3


@dataclass(eq=False)
class _Outbox:
    """The outputs of one client's requests. `put` gets a list for each step that has some."""

    put: Callable[[list[TokenOutput]], None]  # must not keep the client alive
    open: set[int] = field(default_factory=set)  # ids of its requests in the engine; only the engine's thread uses this
    unfinished: int = 0  # submitted requests of which the client has not received the last output; only the client uses this
    closed: bool = False


@dataclass(eq=False)
class _Submit:
    outbox: _Outbox
    requests: Sequence[Request]


@dataclass(eq=False)
class _Abort:
    outbox: _Outbox
    request_ids: Sequence[int]


@dataclass(eq=False)
class _Close:
    outbox: _Outbox


@dataclass(eq=False)
class _Call:
    function: Callable[[Engine], Any]
    result: Future


@dataclass(eq=False)
class _Wake:
    pass


@dataclass(eq=False)
class _Stop:
    pass


_Command = _Submit | _Abort | _Close | _Call | _Wake | _Stop


class EngineThread:
    """Runs an engine in a thread of its own, which starts with the first command and ends with `stop`.

    Commands are carried out in order, between steps. After an unforeseen exception, the requests that have started and the
    command that raised it end with an `EngineError`, and the engine goes on with the others. A failed GPU ends the thread.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._inbox: SimpleQueue[_Command] = SimpleQueue()
        self._commands: deque[_Command] = deque()  # taken from the inbox, not carried out yet
        self._current: _Command | None = None
        self._fruitless = 0  # exceptions in a row that ended neither a command nor a request
        self._outboxes: dict[int, _Outbox] = {}  # by id of an open request
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
        """Say that a command follows soon: a thread that sleeps takes some 0.1 ms to wake up, which the caller can use."""
        if self._thread is not None and self._ended is None and not self._outboxes:
            self._inbox.put(_Wake())

    def connect(self, deliver: Callable[[list[TokenOutput]], None] | None = None) -> "EngineClient":
        """A client for the calling thread.

        Args:
            deliver: takes the outputs of each step, in place of `EngineClient.receive`. It runs in the engine's thread: it must
                return soon and raise nothing. It must not refer to the client, or that is not closed when it is dropped.
        """
        return EngineClient(self, deliver)

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function(engine)` between two steps, after the commands that came before.

        Returns its result or raises its exception.
        """
        result: Future = Future()
        self._put(_Call(function, result))
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
        self._put(_Call(function, result))

    def stop(self) -> None:
        """End the thread after the current step. Open requests end with an error. Returns when the thread has ended."""
        if os.getpid() != self._process:  # a forked process does not have this thread
            return
        with self._lock:
            thread = self._thread
            if thread is None:
                self._end(_closed())
                return
        self._inbox.put(_Stop())
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
        return _copy(self._ended or _closed())

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
                    reason = _copy(error)
                    return
                except BaseException as error:
                    reason = _unforeseen(error)
                    self._recover(error)
        finally:
            self._end(reason or _closed())

    def _loop(self) -> None:
        while self._take_commands():
            engine = self.engine
            if engine.has_work and (rest := engine.step(self._deliver)):
                self._deliver(rest)
            self._fruitless = 0

    def _take_commands(self) -> bool:
        """Carry out the commands in the inbox. Waits for a command if there is nothing else to do. Returns False at `_Stop`."""
        wait = not self._commands and not self.engine.has_work
        while wait or not self._inbox.empty():
            self._commands.append(self._inbox.get())  # in one line, so that an exception loses no command
            wait = False
        for command in tuple(self._commands):
            if isinstance(command, _Stop):
                return False
            self._current = command
            self._carry_out(command)
            self._commands.remove(command)
            self._current = None
        return True

    def _carry_out(self, command: _Command) -> None:
        match command:
            case _Submit(outbox=outbox, requests=requests):
                for request in requests if not outbox.closed else ():
                    self._outboxes[request.id] = outbox
                    outbox.open.add(request.id)
                    self.engine.add(request)
            case _Abort(request_ids=request_ids):
                for request_id in request_ids:
                    self._forget(request_id)
                    self.engine.abort(request_id)
            case _Close(outbox=outbox):
                outbox.closed = True
                for request_id in tuple(outbox.open):
                    self._forget(request_id)
                    self.engine.abort(request_id)
            case _Call(function=function, result=result):
                if result.set_running_or_notify_cancel():
                    try:
                        result.set_result(function(self.engine))
                    except DeviceFailedError:
                        raise
                    except Exception as error:
                        result.set_exception(_for_request(error))

    def _deliver(self, outputs: Sequence[TokenOutput]) -> None:
        """Deliver the outputs of a step, one list per client. A request is forgotten only after its last output is delivered."""
        mail: dict[_Outbox, list[TokenOutput]] = {}
        for output in outputs:
            if (outbox := self._outboxes.get(output.request_id)) is not None:
                mail.setdefault(outbox, []).append(output)
        for outbox, own in mail.items():
            outbox.put(own)
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(output.request_id)

    def _forget(self, request_id: int) -> None:
        if (outbox := self._outboxes.pop(request_id, None)) is not None:
            outbox.open.discard(request_id)

    def _recover(self, error: BaseException) -> None:
        """Continue after an exception at any line. The engine drops the requests that have started; each ends with an error.

        If exceptions come again and again before any request has started, all requests end: else they would come for ever.
        """
        self.engine.recover()
        command, self._current = self._current, None
        if command is not None:
            self._refuse(command, error)
            if command in self._commands:
                self._commands.remove(command)
        failed = [i for i in self._outboxes if i not in self.engine]
        self._fruitless = 0 if failed or command is not None else self._fruitless + 1
        if self._fruitless == _MOST_FRUITLESS:
            failed, self._fruitless = list(self._outboxes), 0
        for request_id in failed:
            self.engine.abort(request_id)
            self._fail(request_id, error)

    def _refuse(self, command: _Command, error: BaseException) -> None:
        """End a command that raised an exception: its caller gets an error. Aborts and closes are carried out."""
        if isinstance(command, _Submit):
            for request in command.requests:
                if self._engine is None or request.id not in self._engine:
                    self._outboxes[request.id] = command.outbox
                    self._fail(request.id, error)
        elif isinstance(command, _Call):
            result = command.result
            if result.running() or (not result.done() and result.set_running_or_notify_cancel()):
                result.set_exception(_for_request(error))
        elif isinstance(command, _Close | _Abort):  # an abort must not be lost
            ids = command.outbox.open if isinstance(command, _Close) else command.request_ids
            for request_id in tuple(ids):
                self._forget(request_id)
                self.engine.abort(request_id)

    def _fail(self, request_id: int, error: BaseException) -> None:
        outbox = self._outboxes[request_id]
        outbox.put([TokenOutput(request_id, (), "error", _for_request(error))])
        self._forget(request_id)

    def _end(self, reason: EngineError | DeviceFailedError) -> None:
        """End all requests and commands with an error, and drop the engine."""
        with self._lock:  # no command is accepted from here on
            self._ended, self._engine = reason, None
        atexit.unregister(self.stop)
        while not self._inbox.empty():
            self._commands.append(self._inbox.get())
        for command in self._commands:
            if isinstance(command, _Submit | _Call):
                self._refuse(command, reason)
        self._commands.clear()
        for request_id in list(self._outboxes):
            self._fail(request_id, reason)


class EngineClient:
    """One caller's requests in an engine. Use it in one thread only, and close it or use it as a context manager.

    A client that is dropped without `close` is closed at garbage collection.
    """

    def __init__(self, thread: EngineThread, deliver: Callable[[list[TokenOutput]], None] | None = None) -> None:
        self._queue: SimpleQueue[list[TokenOutput]] = SimpleQueue()
        self._thread, self._outbox = thread, _Outbox(deliver or self._queue.put)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; all are added before the next step. They must have passed `EngineThread.check`.

        Raises:
            MinirtError: the engine has ended.
        """
        self._outbox.unfinished += len(requests)
        self._thread._put(_Submit(self._outbox, requests))

    def receive(self) -> list[TokenOutput]:
        """Wait for outputs: those of one step, for one or more of the client's requests.

        Call it only while a request is open: each ends with an output that has a `finish_reason`.

        Raises:
            EngineError: the generator is closed.
        """
        if isinstance(self._thread._ended, EngineError):
            raise self._thread._reason()
        outputs = self._queue.get()
        self._outbox.unfinished -= sum([output.finish_reason is not None for output in outputs])
        return outputs

    def abort(self, request_ids: Sequence[int]) -> None:
        """Drop requests. Outputs that were delivered before may still be received."""
        self._thread._put(_Abort(self._outbox, request_ids))

    def close(self) -> None:
        """Drop all requests of this client that are still open."""
        if self._outbox.unfinished:  # else there is nothing to drop, and the caller need not wake the engine's thread
            with suppress(EngineError, DeviceFailedError):  # the thread has ended, and its requests with it
                self._thread._put(_Close(self._outbox))
            self._outbox.unfinished = 0

    def __enter__(self) -> "EngineClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _closed() -> EngineError:
    return EngineError("the generator is closed")


def _copy(error: AnyError) -> AnyError:
    copy = error.at(error.where)
    copy.__cause__ = error.__cause__
    return copy  # type: ignore[return-value]


def _unforeseen(error: BaseException) -> EngineError:
    own = EngineError(f"the engine failed: {type(error).__name__}: {error}", hint="the exception is this error's __cause__")
    own.__cause__ = error
    return own


def _for_request(error: BaseException) -> MinirtError:
    """An error for one request: a copy of minirt's own, else an `EngineError` with the exception as its cause."""
    return _copy(error) if isinstance(error, MinirtError) else _unforeseen(error)
