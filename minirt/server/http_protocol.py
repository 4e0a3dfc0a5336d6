"""`HTTPProtocol`: one connection of a client. uvicorn's protocol, with bounds for the heads of requests."""

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minirt.server.errors import HTTPError, error_body

HEAD_SECONDS = 60  # how long the head of a request may take, and the first one of a connection may stay away
MAX_HEAD = 1 << 16  # bytes of a head that comes in several pieces; the first one may have as many as a socket's read
REST_SECONDS = 30  # how long the rest of a request may take that has its answer already
MAX_REST = 1 << 30  # bytes of such a rest


class HTTPProtocol(HttpToolsProtocol):
    """A connection.

    What differs from uvicorn: an unfinished head may take neither any time nor any memory, a request to change to another
    protocol is an ordinary request, requests that are not HTTP get an error in JSON, and streams in HTTP/1.0 are not chunked.

    An answer such as 413 may come before the whole request has been read. The rest of the request is then read and dropped,
    within bounds. A connection that is closed with unread bytes is reset, so its client would lose the answer.
    """

    _deadline: asyncio.TimerHandle | None = None  # of the head, or of the rest of an answered request, that is being read
    _head_size = 0
    _skips = False  # the parser reads the head of `_ignore_upgrade`, or what follows the last request
    _rest: int | None = None  # bytes that may still come of a request that has its answer
    _closes = False  # this answer is the last one
    _ended = False  # nothing is parsed any longer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._rest is not None:
            self._rest -= len(data)
            if self._rest < 0:
                self.transport.close()
                return
        if self._ended:
            return
        head, rest = self._deadline, memoryview(data)
        try:
            while rest:
                try:
                    self.parser.feed_data(rest)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    if self._ended:
                        return
                    rest = rest[upgrade.args[0] :]
                    self._ignore_upgrade()
        except httptools.HttpParserError:
            if self._closes:
                self._ended = True
            else:
                self._refuse(HTTPError(400, "the request is not HTTP"))
            return
        # Whether these bytes are all of one head, which goes on. (The rest of a refused body has the same deadline.)
        if not self._ended and self._rest is None and head is not None and self._deadline is head:
            self._head_size += len(data)
            if self._head_size > MAX_HEAD:
                self._refuse(HTTPError(431, "the head of the request is too long", expected=f"at most {MAX_HEAD:,} bytes"))

    def on_message_begin(self) -> None:
        if self._skips:
            return
        self._begin_head()
        super().on_message_begin()
        # With it, the application can drop a reader that does not read.
        self.scope["extensions"] = {"minirt": {"transport": self.transport}}  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        if not self._skips:
            self._end_head()
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # its body has not been read yet
            return
        super().on_message_complete()
        if self._rest is None:
            return
        self._rest = None
        if self._closes:
            self._ended = self._skips = True
            self.transport.close()
        else:
            self._begin_head()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        async def wrapped(scope: Any, receive: Any, send: Any) -> None:
            await app(scope, receive, self._sender(cycle))

        super()._start_asgi_task(cycle, wrapped)

    def _sender(self, cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
        """What sends an answer's messages."""
        unframed = cycle.scope["http_version"] == "1.0"  # and no length is stated: the end of the connection ends the answer

        async def send(message: Any) -> None:
            nonlocal unframed
            if message["type"] == "http.response.start":
                unframed = unframed and all(name != b"content-length" for name, _ in message["headers"])
                if unframed:
                    cycle.chunked_encoding = False
            elif unframed:
                cycle.expected_content_length = len(message["body"])
            if not cycle.more_body or message.get("more_body", True):
                await cycle.send(message)
                return
            closes, cycle.keep_alive = not cycle.keep_alive, True  # else uvicorn closes the connection now
            await cycle.send(message)
            if cycle.more_body:
                self._drop_rest(closes)
            elif closes:
                self.transport.close()

        return send

    def _drop_rest(self, closes: bool) -> None:
        """Read and drop the rest of a request that has its answer. `closes`: the connection ends then."""
        self._end_head()
        self._deadline = self.loop.call_later(REST_SECONDS, self.transport.close)
        self._rest, self._closes = MAX_REST, closes
        if closes and self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()

    def _ignore_upgrade(self) -> None:
        """Go on after a head that asks for another protocol, which a server may ignore (RFC 9110, 7.8).

        Clients in Java ask for HTTP/2 with each request. The parser ends there, before the body, so a new one reads on. It gets a
        made-up head, which says how long the body is.
        """
        framing = [f"{name.decode()}: {value.decode('latin-1')}\r\n" for name, value in self.headers if name in _FRAMING]
        self.parser = httptools.HttpRequestParser(self)
        self._skips, self.headers = True, []  # the request keeps its own list
        self.parser.feed_data("".join(["POST / HTTP/1.1\r\n", *framing, "\r\n"]).encode("latin-1"))
        self._skips = False

    def _begin_head(self) -> None:
        self._end_head()
        self._deadline, self._head_size = self.loop.call_later(HEAD_SECONDS, self.transport.close), 0

    def _end_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, error: HTTPError) -> None:
        """Answer what is no request, and close the connection. Within another answer, only close it."""
        self._ended, within = True, self.cycle is not None and not self.cycle.response_complete
        if not within or not self.cycle.response_started:
            body, phrase = error_body(error), HTTPStatus(error.status).phrase
            head = f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
            if within:  # its handler waits for the rest of the body
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self._drop_rest(closes=True)
        else:
            self.transport.close()


_FRAMING = (b"content-length", b"transfer-encoding")
