"""`AsyncGenerator`: the public API for asyncio. Wraps a `Generator`; any number of event loops may use it at once.

Each event loop has one port to the engine's thread. A step's outputs wake the loop once, whatever number of its requests they
belong to. They wait in a queue for each call, and become text in the loop's thread when the call reads them.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator as AsyncGeneration
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, overload

from minirt.call_driver import CallDriver, Wakeup
from minirt.engine.engine_thread import EngineThread
from minirt.engine.port import Sink, Sinks
from minirt.engine.request import Request, TokenOutput
from minirt.errors import InputError, SlowReaderError
from minirt.foreign_names import checks_names
from minirt.generator import Generator
from minirt.loading.options import EMBEDDED, LoadOptions
from minirt.outputs import Completion, CompletionStream, Piece, Score
from minirt.processor import AnyPrompt, Call, Messages, Params, Priority, Prompt, Prompts, is_single
from minirt.progress import LoadProgress
from minirt.sampling_params import OF_SAMPLING, SamplingParams
from minirt.settings import Integer

MAX_UNREAD = 4096  # the default of `AsyncGenerator`
_LONG = 2000  # characters or tokens: from here on, encoding takes longer than a change of threads


@checks_names(OF_SAMPLING)
class AsyncGenerator:
    """A `Generator` for asyncio programs. All its methods may be called from several event loops in several threads.

    Cancelling a task that waits here, or closing an iterator, aborts its requests. A reader that falls behind delays nobody.
    Long texts are encoded, and grammars compiled, in a worker thread, so that they do not block the event loop.

    Attributes:
        generator: the `Generator`, for everything that does not wait: `config`, `plan`, `encode`, `max_len` …
    """

    def __init__(self, generator: Generator, *, max_unread: int = MAX_UNREAD) -> None:
        """Wrap a `Generator`, which may have other callers.

        Args:
            max_unread: a stream ends with a `SlowReaderError` if it has this many unread pieces when the next one comes.
        """
        if not isinstance(generator, Generator):
            hint, shown = "await AsyncGenerator.from_pretrained(…) loads a model by its name", repr(generator)[:80]
            raise InputError("not a generator", where="generator", expected="a minirt.Generator", found=shown, hint=hint)
        self.generator, self._max_unread = generator, Integer(1)(max_unread, "max_unread", InputError)
        self._ports: dict[asyncio.AbstractEventLoop, _LoopPort] = {}
        self._lock = threading.Lock()

    @classmethod
    async def from_pretrained(
        cls, model: str | Path | LoadOptions = EMBEDDED, *, max_unread: int = MAX_UNREAD,
        progress: LoadProgress | None = None, **options: Any,
    ) -> "AsyncGenerator":  # fmt: skip
        """Load a model in a worker thread, which also calls `progress`. Other arguments: see `Generator.from_pretrained`."""
        return cls(await asyncio.to_thread(Generator.from_pretrained, model, progress=progress, **options), max_unread=max_unread)

    @overload
    async def generate(self, prompts: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> Completion: ...

    @overload
    async def generate(
        self, prompts: Prompts[AnyPrompt], params: Params = None, *, priority: Priority = 0
    ) -> list[Completion]: ...

    async def generate(
        self, prompts: Prompt | Prompts, params: Params = None, *, priority: Priority = 0
    ) -> Completion | list[Completion]:
        """Complete one prompt (→ `Completion`) or many at once (→ list of `Completion`), as `Generator.generate` does."""
        call = await self._prepare(prompts, params, priority, single=is_single(prompts))
        await self._finish(call)
        return call.result()

    @overload
    async def score(self, prompts: Prompt, completions: Prompt, *, priority: int = 0, lora: str | None = None) -> Score: ...

    @overload
    async def score(
        self, prompts: Prompt | Prompts[AnyPrompt], completions: Prompts[AnyPrompt], *, priority: Priority = 0,
        lora: str | None = None,
    ) -> list[Score]: ...  # fmt: skip

    async def score(
        self, prompts: Prompt | Prompts, completions: Prompt | Prompts, *, priority: Priority = 0, lora: str | None = None
    ) -> Score | list[Score]:
        """The log-probabilities of completions after their prompts, as `Generator.score`."""
        call = await asyncio.to_thread(self.generator._processor.prepare_scores, prompts, completions, priority, lora)
        await self._finish(call)
        return call.scores()

    async def chat(
        self, messages: Messages, params: SamplingParams | None = None, *, priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Completion:  # fmt: skip
        """Answer a conversation, messages of {"role", "content"}, through the model's chat template; see `Generator.chat`."""
        limit = self.generator._processor.limit(params)
        tokens = await asyncio.to_thread(self.generator.encode_chat, messages, limit, chat_template_kwargs)
        return await self.generate(tokens, params, priority=priority)

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> AsyncIterator[Piece]:
        """Yield the completion piece by piece, as `Generator.stream` does. Closing the iterator aborts.

        Raises:
            SlowReaderError: more than `max_unread` pieces were not read. The pieces before them come first.
            MinirtError: the request failed.
        """
        async with aclosing(self.stream_completion(prompt, params, priority=priority)) as pieces:
            async for piece, _ in pieces:
                yield piece

    async def stream_completion(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncGeneration[tuple[Piece, Completion], None]:
        """Like `stream`, but each piece comes with the completion that it belongs to, so far."""
        call = await self._prepare(prompt, params, priority, single=True)
        async with aclosing(self._run(call, self._max_unread, raises=True)) as pieces:
            async for stream, piece in pieces:
                yield piece, stream.completion

    async def encode_chat(self, messages: Messages, chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a conversation through the chat template, for `stream` and `generate`; see `Generator.encode_chat`."""
        return await asyncio.to_thread(self.generator.encode_chat, messages, self.generator.max_len - 1, chat_template_kwargs)

    async def close(self) -> None:
        """Close the generator. Open requests of all its callers end with an error."""
        await asyncio.to_thread(self.generator.close)

    async def __aenter__(self) -> "AsyncGenerator":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _prepare(self, prompts: Any, params: Any, priority: Any, *, single: bool) -> Call:
        several = params if isinstance(params, list | tuple) else [params]
        grammars = any(getattr(one, "structured_outputs", None) is not None for one in several)  # to be compiled
        if _size([prompts] if single else prompts) < _LONG and not grammars:
            return self.generator._prepare(prompts, params, priority, single)
        return await asyncio.to_thread(self.generator._prepare, prompts, params, priority, single)

    async def _finish(self, call: Call) -> None:
        """Run a call's requests to their ends."""
        async with aclosing(self._run(call, final_only=True)) as pieces:
            async for _ in pieces:
                pass

    async def _run(
        self, call: Call, limit: int | None = None, **how: bool
    ) -> AsyncGeneration[tuple[CompletionStream, Piece], None]:
        """Run a call's requests to their ends, yielding each new piece and its stream; left early, it aborts.

        Args:
            limit: outputs that may wait for the reader. None: the caller reads at once.
            how: see `CallDriver`.
        """
        port = self._port()
        reader = _Reader(limit, lambda: port.abort(list(call.open)))
        with CallDriver(call, port, reader, **how) as driver:
            driver.start()
            while call.open:
                if not reader.unread:
                    await reader.wait()
                elif (new := driver.push(reader.unread.popleft())) is not None:
                    yield new

    def _port(self) -> "_LoopPort":
        """The port of the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._ports:
                for closed in [loop for loop in self._ports if loop.is_closed()]:
                    del self._ports[closed]
                self._ports[loop] = _LoopPort(self.generator._engine, loop)
            return self._ports[loop]


class _Reader:
    """The outputs that a call has not read yet. With `limit` of them it is full: if more come, its requests are aborted.

    What arrives together goes in together, so that no reader is called slow because the event loop was busy.
    """

    def __init__(self, limit: int | None, abort: Callable[[], None]) -> None:
        self._limit, self._abort = limit, abort
        self.unread: deque[TokenOutput] = deque()
        self._slow = False
        self._wakeup = Wakeup()

    def put(self, outputs: list[TokenOutput]) -> None:
        if self._limit is None or len(self.unread) < self._limit:
            self.unread.extend(outputs)
        else:
            self._slow = True
            self._abort()  # nothing more comes
        self._wakeup.wake()

    def wait(self) -> "asyncio.Future[None]":
        """A future to await until there is something to read.

        Raises:
            SlowReaderError: it was full, and nothing more comes.
        """
        if self._slow:
            expected, hint = f"at most {self._limit} unread pieces", "read faster, ask for fewer tokens, or raise max_unread"
            raise SlowReaderError("the stream was read too slowly, and is aborted", expected=expected, hint=hint)
        return self._wakeup.wait()


class _LoopPort:
    """The engine's thread as one event loop sees it: sinks get their outputs in the loop's thread."""

    def __init__(self, thread: EngineThread, loop: asyncio.AbstractEventLoop) -> None:
        self._thread, self._loop, self._sinks = thread, loop, Sinks()
        self._arrived: deque[list[TokenOutput]] = deque()  # outputs that have not been sorted yet
        self._woken = False  # whether the loop is to sort them

    def submit(self, requests: Sequence[Request], sink: Sink) -> None:
        for request in requests:  # first, so that an interrupt leaves no request that `abort` does not know
            self._sinks[request.id] = sink
        self._thread.submit(requests, self)

    def abort(self, request_ids: Sequence[int]) -> None:
        if known := self._sinks.drop(request_ids):
            self._thread.abort(known)

    def put(self, outputs: list[TokenOutput]) -> None:
        """Called in the engine's thread. Wakes the loop, unless it is about to sort anyway."""
        self._arrived.append(outputs)
        if self._woken and not self._loop.is_closed():
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._sort)
        except RuntimeError:  # the loop is closed: no task waits for these requests
            self._thread.abort(list(self._sinks))

    def _sort(self) -> None:
        """Called in the loop's thread."""
        self._woken = False  # from here on, what arrives wakes the loop again
        outputs: list[TokenOutput] = []
        while self._arrived:
            outputs += self._arrived.popleft()
        self._sinks.deliver(outputs)


def _size(prompts: Any) -> int:
    """Characters or tokens of all prompts. Other values count 0; they are refused later."""
    if not isinstance(prompts, list | tuple):
        return 0
    return sum(len(prompt) for prompt in prompts if isinstance(prompt, str | list | tuple))
