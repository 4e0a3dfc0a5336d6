"""`AsyncGenerator`: the public API for asyncio. Wraps a `Generator`; any number of event loops may use it at once.

Each event loop has one client of the engine's thread. A step's outputs wake the loop once, whatever number of its requests they
belong to. They wait in a queue for each call, and become text in the loop's thread when the call reads them.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator as AsyncGeneration
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, overload
from weakref import WeakMethod

from minirt import models
from minirt.engine.engine_thread import EngineThread
from minirt.engine.request import TokenOutput
from minirt.errors import InputError, MinirtError, SlowReaderError
from minirt.foreign_names import checks_names
from minirt.generator import OF_SAMPLING, Generator
from minirt.loading.options import LoadOptions
from minirt.outputs import Completion, CompletionStream, Piece, Score
from minirt.processor import AnyPrompt, Call, Messages, Prompt, is_single
from minirt.sampling_params import SamplingParams

_check_names = checks_names(OF_SAMPLING)
MAX_UNREAD = 4096  # the default of `AsyncGenerator`
_LONG = 2000  # characters or tokens: from here on, encoding takes longer than a change of threads


class AsyncGenerator:
    """A `Generator` for asyncio programs. All its methods may be called from several event loops in several threads.

    Cancelling a task that waits here, or closing an iterator, aborts its requests. A reader that falls behind delays nobody.
    Long texts are encoded, and grammars compiled, in a worker thread, so that they do not block the event loop.

    Attributes:
        generator: the `Generator`, for everything that does not wait: `config`, `plan`, `encode`, `max_len` …
    """

    @_check_names
    def __init__(self, generator: Generator, *, max_unread: int = MAX_UNREAD) -> None:
        """Wrap a `Generator`, which may have other callers, too.

        Args:
            max_unread: a stream ends with a `SlowReaderError` if so many of its pieces wait for their reader when more come.
        """
        if type(max_unread) is not int or max_unread < 1:
            expected, found = "an integer >= 1", repr(max_unread)[:80]
            raise InputError("not an acceptable value", where="max_unread", expected=expected, found=found)
        self.generator, self._max_unread = generator, max_unread
        self._clients: dict[asyncio.AbstractEventLoop, _LoopClient] = {}
        self._lock = threading.Lock()

    @classmethod
    async def from_pretrained(
        cls,
        model: str | Path | LoadOptions = models.EMBEDDED,
        *,
        max_unread: int = MAX_UNREAD,
        progress: Callable[[str, int, int], None] | None = None,
        **options: Any,
    ) -> "AsyncGenerator":
        """Load a model in a worker thread, in which `progress` runs, too. Other arguments: see `Generator.from_pretrained`."""
        load = Generator.from_pretrained
        return cls(await asyncio.to_thread(load, model, progress=progress, **options), max_unread=max_unread)

    @overload
    async def generate(
        self, prompts: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> Completion: ...

    @overload
    async def generate(
        self,
        prompts: list[AnyPrompt] | tuple[AnyPrompt, ...],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[Completion]: ...

    @_check_names
    async def generate(
        self,
        prompts: Prompt | list[AnyPrompt] | tuple[AnyPrompt, ...],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Completion | list[Completion]:
        """Complete one prompt (→ `Completion`) or many at once (→ list of `Completion`), as `Generator.generate` does."""
        call = await self._prepare(prompts, params, priority, single=is_single(prompts))
        async with aclosing(self._run(call, final_only=True)) as pieces:
            async for _ in pieces:
                pass
        return call.result()

    @overload
    async def score(self, prompts: Prompt, completions: Prompt, *, priority: int = 0) -> Score: ...

    @overload
    async def score(
        self,
        prompts: Prompt | list[AnyPrompt] | tuple[AnyPrompt, ...],
        completions: list[AnyPrompt] | tuple[AnyPrompt, ...],
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[Score]: ...

    @_check_names
    async def score(
        self,
        prompts: Prompt | list[AnyPrompt] | tuple[AnyPrompt, ...],
        completions: Prompt | list[AnyPrompt] | tuple[AnyPrompt, ...],
        *,
        priority: int | Sequence[int] = 0,
    ) -> Score | list[Score]:
        """The log-probabilities of completions after their prompts, as `Generator.score`."""
        call = await asyncio.to_thread(self.generator._processor.prepare_scores, prompts, completions, priority)
        async with aclosing(self._run(call, final_only=True)) as pieces:
            async for _ in pieces:
                pass
        return call.scores()

    @_check_names
    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Answer a conversation, messages of {"role", "content"}, through the model's chat template; see `Generator.chat`."""
        limit = self.generator._processor.limit(params)
        tokens = await asyncio.to_thread(self.generator.encode_chat, messages, limit, chat_template_kwargs)
        return await self.generate(tokens, params, priority=priority)

    @_check_names
    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncIterator[Piece]:
        """Yield the completion piece by piece, as `Generator.stream` does. Closing the iterator aborts.

        Raises:
            SlowReaderError: more than `max_unread` pieces were not read. The pieces before them come first.
            MinirtError: the request failed.
        """
        call = await self._prepare(prompt, params, priority, single=True)
        async with aclosing(self._run(call, self._max_unread)) as pieces:
            async for stream, piece in pieces:
                if stream.completion.error is not None:
                    raise stream.completion.error
                yield piece

    @_check_names
    async def stream_completion(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncGeneration[tuple[Piece, Completion], None]:
        """As `stream`, with the completion that the piece belongs to, as it stands then."""
        call = await self._prepare(prompt, params, priority, single=True)
        async with aclosing(self._run(call, self._max_unread)) as pieces:
            async for stream, piece in pieces:
                if stream.completion.error is not None:
                    raise stream.completion.error
                yield piece, stream.completion

    @_check_names
    async def encode_chat(
        self, messages: Messages, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation through the chat template, for `stream` and `generate`; see `Generator.encode_chat`."""
        limit = self.generator.max_len - 1
        return await asyncio.to_thread(self.generator.encode_chat, messages, limit, chat_template_kwargs)

    async def close(self) -> None:
        """Close the generator. Open requests of all its callers end with an error."""
        await asyncio.to_thread(self.generator.close)

    async def __aenter__(self) -> "AsyncGenerator":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _prepare(self, prompts: Any, params: Any, priority: Any, *, single: bool) -> Call:
        own = params if isinstance(params, list | tuple) else [params]
        grammars = any(isinstance(one, SamplingParams) and one.structured_outputs is not None for one in own)  # to be compiled
        if _size([prompts] if single else prompts) < _LONG and not grammars:
            return self.generator._prepare(prompts, params, priority, single)
        return await asyncio.to_thread(self.generator._prepare, prompts, params, priority, single)

    async def _run(
        self, call: Call, limit: int | None = None, *, final_only: bool = False
    ) -> AsyncGeneration[tuple[CompletionStream, Piece], None]:
        """Run a call's requests to their ends, yielding each new piece and its stream; left early, it aborts.

        Args:
            limit: outputs that may wait for the reader. None: the caller reads at once.
            final_only: see `Call.start`.
        """
        client = self._client()
        reader = _Reader(limit)
        try:
            client.submit(call, reader, final_only)
            while call.open:
                if (output := reader.take()) is None:
                    await reader.wait()
                elif output.request_id in call.open:  # else it ended at a stop string; the engine was ahead
                    stream, piece = call.push(output)
                    if piece.finish_reason is not None:
                        client.end([output.request_id], abort=output.finish_reason is None)
                    yield stream, piece
        finally:
            client.end(list(call.open), abort=True)

    def _client(self) -> "_LoopClient":
        """The client of the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._clients:
                for closed in [loop for loop in self._clients if loop.is_closed()]:
                    del self._clients[closed]
                self._clients[loop] = _LoopClient(self.generator._engine, loop)
            return self._clients[loop]


class _Reader:
    """The outputs that a call has not read yet. With `limit` of them it is full: it takes no more, and `take` raises at its end.

    What arrives together goes in together, so that no reader is called slow because the event loop was busy.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._unread: deque[TokenOutput | MinirtError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, outputs: Sequence[TokenOutput]) -> bool:
        """Returns False if it was full before."""
        full = self._limit is not None and len(self._unread) >= self._limit
        if full:
            expected, hint = f"at most {self._limit} unread pieces", "read faster, ask for fewer tokens, or raise max_unread"
            self._unread.append(SlowReaderError("the stream was read too slowly, and is aborted", expected=expected, hint=hint))
        else:
            self._unread.extend(outputs)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        return not full

    async def wait(self) -> None:
        """Wait until `take` has something."""
        if not self._unread:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def take(self) -> TokenOutput | None:
        """The next output; None: there is none yet. Raises an error in its place."""
        if not self._unread:
            return None
        item = self._unread.popleft()
        if isinstance(item, MinirtError):
            raise item
        return item


class _LoopClient:
    """One event loop's client of the engine's thread, for all calls of the loop."""

    def __init__(self, thread: EngineThread, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: deque[list[TokenOutput]] = deque()  # outputs that have not been sorted yet
        self._woken = False  # whether the loop is to sort them
        self._calls: dict[int, tuple[Call, _Reader]] = {}  # by request; the loop's thread alone reads and writes this
        method = WeakMethod(self._deliver)  # the thread must not keep this object alive

        def deliver(outputs: list[TokenOutput]) -> None:
            if (own := method()) is not None:
                own(outputs)

        self._client = thread.connect(deliver)

    def submit(self, call: Call, reader: _Reader, final_only: bool) -> None:
        """Queue a call's requests, whose outputs go to `reader`."""
        requests = call.start(final_only=final_only)
        if requests:
            self._calls |= {request.id: (call, reader) for request in requests}
            self._client.submit(requests)

    def end(self, request_ids: Sequence[int], abort: bool) -> None:
        """Deliver nothing more of these requests. `abort`: the engine still has them."""
        for request_id in request_ids:
            self._calls.pop(request_id, None)
        if abort and request_ids:
            with suppress(MinirtError):  # the engine has ended, and its requests with it
                self._client.abort(request_ids)

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        """Called in the engine's thread. Wakes the loop, unless it is about to sort anyway."""
        self._arrived.append(outputs)
        if self._woken and not self._loop.is_closed():
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._sort)
        except RuntimeError:  # the loop is closed, so that nobody waits for these requests
            self._client.close()

    def _sort(self) -> None:
        """Called in the loop's thread. Outputs go to the readers of their calls."""
        self._woken = False  # from here on, what arrives wakes the loop again
        mail: dict[_Reader, tuple[Call, list[TokenOutput]]] = {}
        while self._arrived:
            for output in self._arrived.popleft():
                if output.request_id in self._calls:
                    call, reader = self._calls[output.request_id]
                    mail.setdefault(reader, (call, []))[1].append(output)
        for reader, (call, outputs) in mail.items():
            if not reader.put(outputs):
                self.end(list(call.open), abort=True)


def _size(prompts: Any) -> int:
    """Characters or tokens of all prompts. What is no prompt is refused later."""
    if not isinstance(prompts, list | tuple):
        return 0
    return sum(len(prompt) for prompt in prompts if isinstance(prompt, str | list | tuple))
