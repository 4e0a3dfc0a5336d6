"""`Generation`: the running requests of one HTTP request. The engine's outputs go in; its handler waits for text."""

import asyncio
from collections.abc import Callable, Sequence

from minirt.call_driver import CallDriver, Wakeup
from minirt.engine.port import Port
from minirt.engine.request import TokenOutput
from minirt.errors import MinirtError, SlowReaderError
from minirt.outputs import CompletionStream
from minirt.processor import Call
from minirt.server.errors import named, status_of
from minirt.server.metrics import Metrics
from minirt.server.remote_engine import RemoteEngine

_COUNT_SECONDS = 1.0  # that an answer which is given up waits for its number of tokens
MAX_UNSENT = 4096  # tokens of a stream that may wait for its reader


class Choice:
    """One completion of the response, and what of it was not sent yet.

    Attributes:
        index: its place in the response.
        text, num_tokens: what is to be sent.
        finish_reason: None while it runs.
        begun: whether something was sent.
    """

    __slots__ = ("begun", "finish_reason", "index", "last_time", "num_tokens", "stream", "text")

    def __init__(self, index: int, stream: CompletionStream) -> None:
        self.index, self.stream = index, stream
        self.text, self.num_tokens = "", 0
        self.finish_reason: str | None = None
        self.begun, self.last_time = False, 0.0


class Generation:
    """Collects the outputs of a call's requests until its handler takes them. A context manager that aborts what still runs.

    Text that is not sent yet is joined, so that a slow socket gets few large chunks. A stream whose reader is too slow fails.

    Metrics count a request as vLLM does: its prompt with its first token, the rest when it ends. A request that is refused, by an
    error of status 4xx before its first token, counts nowhere.

    Attributes:
        reason: why requests without a finish_reason ended: "abort", of the client or a time limit, or "error".

    Args:
        running: has it while it runs.
        interval: tokens of a choice after which the handler is woken; the first one and the last one always do. None: it is
            woken at the end of all requests.
        on_slow: called when more than `MAX_UNSENT` tokens wait for the reader. Without effect if `interval` is None.
    """

    def __init__(
        self, engine: Port, call: Call, metrics: Metrics, running: "set[Generation]", interval: int | None,
        on_slow: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._call, self._metrics = call, metrics
        self._driver = CallDriver(call, engine, self, final_only=interval is None)
        self._running, self._interval, self._on_slow = running, interval, on_slow
        self.choices = [Choice(index, stream) for index, stream in enumerate(call.streams)]
        self._by_id = {request.id: choice for request, choice in zip(call.requests, self.choices, strict=True)}
        self._pending: dict[Choice, None] = {}  # choices with something to send, in order
        self._unsent = 0
        self._error: MinirtError | None = None
        self._wakeup = Wakeup()
        self.reason = "abort"
        self.queue_time_s: float | None = None

    def __enter__(self) -> "Generation":
        self._driver.start()
        self._running.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._running.discard(self)
        self._metrics.finished["abort"] += self._driver.abort()

    async def count_unread(self, engine: RemoteEngine) -> int | None:
        """How many tokens the engine has made of the requests that still run, beside those that came. Call it before they are
        aborted: tokens of requests without a stream come when they end. None: the engine does not answer soon, or has ended."""
        running, unread = dict(self._call.open), 0
        try:
            # Not asyncio.timeout: before Python 3.11.3 it cannot end in a task that is being cancelled, as this one is.
            counts = (await asyncio.wait_for(engine.ask(list(running)), _COUNT_SECONDS)).counts
        except (MinirtError, TimeoutError):
            return None
        for (request_id, stream), count in zip(running.items(), counts, strict=True):
            unread += max(0, count - len(stream.completion.token_ids))
            if count and not self._by_id[request_id].last_time:
                self._metrics.prompt_tokens += len(stream.completion.prompt_token_ids)
        return unread

    @property
    def done(self) -> bool:
        """Whether all requests have ended."""
        return not self._call.open

    def put(self, outputs: list[TokenOutput]) -> None:
        """Take outputs of the requests. Called for each step of each stream."""
        try:
            for output in outputs:
                if output.error is not None:
                    if output.request_id in self._call.open:  # else it has ended at a stop string before
                        self.fail(output.error)
                    continue
                if (new := self._driver.push(output)) is None:
                    continue
                stream, piece = new
                choice, metrics = self._by_id[output.request_id], self._metrics
                count = len(piece.token_ids)
                times = stream.completion.token_times_s
                now, between = times[-1], count
                if not choice.last_time:
                    choice.last_time, between = times[0], count - 1
                    metrics.prompt_tokens += len(stream.completion.prompt_token_ids)
                    metrics.time_to_first_token.observe(times[0])
                    if output.queue_time_s is not None:
                        metrics.queue_time.observe(output.queue_time_s)
                        self.queue_time_s = output.queue_time_s
                if between:
                    metrics.inter_token_latency.observe((now - choice.last_time) / between, between)
                first, choice.last_time = between < count, now
                choice.num_tokens += count
                if piece.text:
                    choice.text += piece.text
                if piece.finish_reason is not None:
                    choice.finish_reason = piece.finish_reason
                    metrics.finished[piece.finish_reason] += 1
                    metrics.e2e_latency.observe(now)
                    metrics.request_prompt_tokens.observe(len(stream.completion.prompt_token_ids))
                    metrics.request_generation_tokens.observe(len(stream.completion.token_ids))
                interval = self._interval
                if interval is None:
                    if self.done:
                        self._wakeup.wake()
                    continue
                self._unsent += count
                if self._unsent > MAX_UNSENT:
                    expected, hint = f"at most {MAX_UNSENT} unread tokens", "read faster, or ask for fewer tokens"
                    self.fail(SlowReaderError("the stream is read too slowly, and is aborted", expected=expected, hint=hint))
                    self._on_slow()
                    continue
                if first or choice.num_tokens >= interval or piece.finish_reason is not None:
                    self._pending[choice] = None
                    self._wakeup.wake()
        except Exception as error:  # one call must not end the others
            self.fail(named(error, "the output cannot be processed"))

    def fail(self, error: MinirtError) -> None:
        """End all requests with an error, which `wait` raises."""
        if self._error is None:
            self._error, status = error, status_of(error)
            self.reason = "abort" if status == 499 else "error"  # 499: its reader was too slow
            ended, begun = self._driver.abort(), any(choice.last_time for choice in self.choices)
            if begun or status >= 499:
                self._metrics.finished[self.reason] += ended
            self._wakeup.wake()

    async def wait(self) -> None:
        """Wait until there is something to send, or all requests have ended. Raises the error if one has failed."""
        if self._error is None and not self._pending and not self.done:
            await self._wakeup.wait()
        if self._error is not None:
            raise self._error

    def take(self) -> Sequence[Choice]:
        """The choices with something to send. The caller sends it and calls `sent` for each."""
        pending = list(self._pending)
        self._pending.clear()
        return pending

    def sent(self, choice: Choice) -> None:
        """What the choice had to send is in a chunk now."""
        self._unsent -= choice.num_tokens
        choice.text, choice.num_tokens, choice.begun = "", 0, True
