"""`Exchange`: one HTTP request and its answer, on top of ASGI."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from minirt.errors import MinirtError, QueueFullError
from minirt.server.errors import HTTPError, error_body, status_of
from minirt.server.json_size import check_size

BODY_SECONDS = 60  # how long the upload of a body may take
ERROR_SECONDS = 5  # how long a stream waits until its client takes its error
_JSON = (b"content-type", b"application/json")
_EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
encode_json = msgspec.json.Encoder().encode


class Exchange:
    """One request and its answer.

    Attributes:
        id: of the request, for the log and the answer.
        method, path, client: of the request; the path without `root`.
        root: the path under which a proxy, or the host of the ASGI application, serves the server; "": none.
        status: of the answer; 0 before it begins, 499 if the client has gone.
        started: `time.perf_counter()` at the beginning.
        log: further fields of the line in the log.
        streaming: whether the answer is a stream of events.
        prompt_field: the field that errors of the prompt are about.
        grammar_field: the field that errors of `structured_outputs` are about, if it is another one.
        headers: further headers of the answer.
        error_body: the body of an error; `prompt_field` is its second argument.
        error_event: the events of an error in a stream. None: an event with its body.
    """

    def __init__(self, scope: Any, receive: Any, send: Any, exchange_id: str, root: str = "") -> None:
        self._scope, self._receive, self._send, self.id = scope, receive, send, exchange_id
        self.headers: list[tuple[bytes, bytes]] = []
        self.method, self.path, self.root = scope["method"], scope["path"], root or scope.get("root_path", "")
        if f"{self.path}/".startswith(f"{self.root}/"):  # else a proxy has removed it
            self.path = self.path.removeprefix(self.root) or "/"
        self.client = scope["client"][0] if scope.get("client") else ""
        self.status, self.started = 0, time.perf_counter()
        self.log: dict[str, Any] = {}
        self.streaming = self.disconnected = False
        self.prompt_field: str | None = None
        self.grammar_field: str | None = None
        self.error_body: Callable[[MinirtError, str | None], bytes] = error_body
        self.error_event: Callable[[MinirtError], bytes] | None = None
        self._watch: asyncio.Task | None = None

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self._scope["headers"] if key == name), None)

    async def body(self, limit: int) -> bytes:
        """The body of the request. From here on, the running task is cancelled when the client goes.

        Raises:
            HTTPError: 413 above `limit` bytes, 408 if it does not come in time, 415 if it is compressed, 499 if the client goes,
                400 if it has too many JSON values.
        """
        if (coding := self.header(b"content-encoding") or b"identity").lower() != b"identity":
            what, shown = "bodies that are compressed are not supported", coding.decode("latin-1")[:80]
            raise HTTPError(415, what, param="content-encoding", found=shown)
        stated = self.header(b"content-length") or b"0"
        size, parts = int(stated) if stated.isdigit() else 0, list[bytes]()
        received, goes_on = 0, True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while goes_on and size <= limit:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        self.disconnected = True
                        raise HTTPError(499, "the client has gone")
                    parts.append(message.get("body", b""))
                    received += len(parts[-1])
                    size, goes_on = max(size, received), message.get("more_body", False)
        except TimeoutError:
            raise HTTPError(408, "the body did not arrive in time", expected=f"{BODY_SECONDS} s") from None
        if size > limit:
            raise HTTPError(413, "the body is too large", expected=f"at most {limit:,} bytes", found=f"{size:,} or more")
        body = b"".join(parts)
        await check_size(body)
        self._cancel_on_disconnect()
        return body

    def _cancel_on_disconnect(self) -> None:
        task = asyncio.current_task()

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.disconnected = True
            if task is not None:
                task.cancel()

        self._watch = asyncio.get_running_loop().create_task(watch())

    def stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def answer(
        self, content: Any, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = (), content_type: bytes | None = None
    ) -> None:
        """Send the whole answer. `content`: bytes, or what becomes JSON."""
        self.stop_watching()  # a client that closes now has its answer
        body = content if isinstance(content, bytes) else encode_json(content)
        kind = _JSON if content_type is None else (b"content-type", content_type)
        await self._begin(status, [kind, (b"content-length", str(len(body)).encode()), *headers])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def named(self, error: MinirtError) -> MinirtError:
        """An error of a grammar as one of the request's field. Other errors are returned unchanged."""
        name, _, place = str(error.where or "").partition(", ")  # `place`: in a JSON schema
        if self.grammar_field is None or isinstance(error, HTTPError) or not name.startswith("structured_outputs"):
            return error
        what = f"{place}: {error.what}" if place else error.what
        return HTTPError(
            status_of(error), what, param=self.grammar_field, expected=error.expected, found=error.found, hint=error.hint
        )  # fmt: skip

    async def answer_error(self, error: MinirtError) -> None:
        """Send an error: as the answer, or as the last event of a stream."""
        body = self.error_body(error, self.prompt_field)
        if self.streaming:
            event = b"data: " + body + b"\n\n" if self.error_event is None else self.error_event(error)
            try:
                async with asyncio.timeout(ERROR_SECONDS):
                    await self.send_events(event)
                    await self.end_events()
            except TimeoutError:  # the client does not read
                self.drop()
            return
        headers = []
        seconds = error.retry_after if isinstance(error, HTTPError) else 1 if isinstance(error, QueueFullError) else None
        if seconds is not None:
            headers.append((b"retry-after", str(seconds).encode()))
        if isinstance(error, HTTPError) and error.status in (408, 413):  # the rest of the body is not read
            headers.append((b"connection", b"close"))
        await self.answer(body, status_of(error), headers)

    async def begin_events(self) -> None:
        """Begin a stream of events."""
        self.streaming = True
        await self._begin(200, list(_EVENTS))

    async def send_events(self, data: bytes) -> None:
        """Send events. Waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_events(self) -> None:
        self.stop_watching()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def drop(self) -> None:
        """Close the connection of a client that does not read, at once, without what was not sent yet."""
        self.log.setdefault("error", "the client reads too slowly, and is dropped")
        transport = self._scope.get("extensions", {}).get("minirt", {}).get("transport")
        if transport is not None:
            transport.abort()

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        headers += [(b"x-request-id", self.id.encode()), *self.headers]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
