"""A small HTTP/1.1 client for event streams, on asyncio.

`Response` and `EventParser` take bytes in any pieces and know nothing of sockets. `HTTPClient` keeps connections open and
sends requests. A load generator reads hundreds of thousands of small blocks a second: each block is handled in one callback, and
no coroutine wakes until a response is complete. docs/decisions/benchmarking.md has the measured cost.
"""

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from minirt.errors import InputError, printable, shortened

_BLOCK = 1 << 14  # bytes that one read takes; an event of one token has about 250
_MAX_HEAD = 1 << 16
_MAX_EVENT = 1 << 24
_MAX_BODY = 1 << 20  # of a response that is no event stream; the rest is dropped
_CONNECT_SECONDS = 30


class ProtocolError(Exception):
    """A request got no complete response. `str` says why."""


class ConnectError(ProtocolError):
    """There is no connection to the server."""


class Response:
    """One HTTP/1.1 response. `feed` takes its bytes in any pieces and returns those of the body.

    Attributes:
        status: the status code; 0 until the head is complete.
        reason: the text after the status code.
        headers: names in lower case → values.
        complete: whether the body has ended.
        keeps_alive: whether the connection can be used again after the response.
        body: what `HTTPClient` keeps of the body; nothing of an event stream.
    """

    def __init__(self) -> None:
        self.status, self.reason = 0, ""
        self.headers: dict[str, str] = {}
        self.complete, self.keeps_alive = False, True
        self.body = bytearray()
        self._held = b""  # the start of a line that is not complete
        self._chunked, self._until_close = False, False
        self._left = 0  # bytes of the chunk, or of a body of known length, that are still to come
        self._after_chunk, self._in_trailers = False, False

    @property
    def is_event_stream(self) -> bool:
        return self.status == 200 and self.headers.get("content-type", "").partition(";")[0].strip() == "text/event-stream"

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the pieces of the body in them.

        Raises:
            ProtocolError: this is no HTTP/1.1 response, or has an encoding that was not asked for.
        """
        if self._held:
            data, self._held = self._held + data, b""
        if not self.status:
            data = self._read_head(data)
            if not self.status:
                return []
        if self._chunked:
            return self._chunks(data)
        piece = data if self._until_close else data[: self._left]
        if not self._until_close:
            self._left -= len(piece)
            self.complete = not self._left
        return [piece] if piece else []

    def end(self) -> None:
        """The connection has been closed. Raises ProtocolError if the response is not complete."""
        if self._until_close:
            self.complete = True
        if not self.complete:
            what = "in the middle of the response" if self.status else "before it answered"
            raise ProtocolError(f"the server closed the connection {what}")

    def _chunks(self, data: bytes) -> list[bytes]:
        pieces, place, size = [], 0, len(data)
        while place < size and not self.complete:
            if self._left:
                piece = data[place : place + self._left]
                pieces.append(piece)
                self._left -= len(piece)
                place += len(piece)
                self._after_chunk = not self._left
                continue
            end = data.find(b"\n", place)
            if end < 0:
                self._held = data[place:]
                if len(self._held) > _MAX_HEAD:
                    raise ProtocolError("a line of the chunked body is too long")
                break
            line = data[place:end].rstrip(b"\r")
            place = end + 1
            if self._after_chunk and not line:
                self._after_chunk = False
            elif self._in_trailers:
                self.complete = not line
            else:
                self._left = _chunk_size(line) if not self._after_chunk else -1
                if self._left < 0:
                    shown = shortened(printable(line.decode("latin-1")), 40)
                    raise ProtocolError(f"bad chunked body: {shown!r} is no size of a chunk")
                self._in_trailers = not self._left
        return pieces

    def _read_head(self, data: bytes) -> bytes:
        """Parse status line and headers. Returns what follows them; b"" if they are not complete."""
        if data[:5] != b"HTTP/"[: len(data)]:
            raise ProtocolError(f"the answer is not HTTP: it begins with {shortened(printable(data.decode('latin-1')), 40)!r}")
        end, width = data.find(b"\r\n\r\n"), 4
        if end < 0:
            end, width = data.find(b"\n\n"), 2
        if end < 0:
            if len(data) > _MAX_HEAD:
                raise ProtocolError("the head of the response is too long")
            self._held = data
            return b""
        first, *lines = data[:end].decode("latin-1").splitlines()
        version, _, rest = first.partition(" ")
        code, _, self.reason = rest.partition(" ")
        if version not in ("HTTP/1.1", "HTTP/1.0") or not (len(code) == 3 and code.isascii() and code.isdigit()):
            raise ProtocolError(f"the answer is not HTTP/1.1: it begins with {shortened(printable(first), 40)!r}")
        if code[0] == "1":  # an interim response: another one follows
            return self._read_head(data[end + width :])
        self.status = int(code)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._body_form(version)
        return data[end + width :]

    def _body_form(self, version: str) -> None:
        self.keeps_alive = version == "HTTP/1.1" and self.headers.get("connection", "").lower() != "close"
        if self.headers.get("content-encoding", "identity") != "identity":
            encoding = printable(self.headers["content-encoding"])
            raise ProtocolError(f"the answer is compressed ({encoding}), which was not asked for")
        length = self.headers.get("content-length")
        self._chunked = self.headers.get("transfer-encoding", "").lower().endswith("chunked")
        if self._chunked:
            return
        if length is None:
            self._until_close, self.keeps_alive = self.status not in (204, 304), False
            self.complete = not self._until_close
        elif length.isascii() and length.isdigit() and len(length) < 19:
            self._left = int(length)
            self.complete = not self._left
        else:
            raise ProtocolError(f"bad content-length {shortened(printable(length), 40)!r}")


def _chunk_size(line: bytes) -> int:
    """The size in the first line of a chunk; -1 if there is none."""
    word = line.partition(b";")[0].strip()
    return int(word, 16) if word.isalnum() and len(word) < 16 and not word.strip(b"0123456789abcdefABCDEF") else -1


class EventParser:
    """Parses server-sent events: bytes in any pieces → the data of each event. Comments and other fields are left out."""

    def __init__(self) -> None:
        self._held = b""
        self._data: bytes | None = None

    def feed(self, piece: bytes) -> list[bytes]:
        """Add bytes; return the data of the events that they complete.

        Raises:
            ProtocolError: an event has more than 16 MiB.
        """
        alone = not self._held and self._data is None and piece.startswith(b"data: ") and piece.endswith(b"\n\n")
        if alone and piece.find(b"\n") == len(piece) - 2:  # by far the most pieces: one event
            return [piece[6:-2]]
        *lines, self._held = (self._held + piece).split(b"\n")
        if len(self._held) + len(self._data or b"") > _MAX_EVENT:
            raise ProtocolError("an event of the stream has more than 16 MiB")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data is not None:
                    events.append(self._data)
                    self._data = None
            elif line.startswith(b"data:"):
                data = line[6:] if line.startswith(b" ", 5) else line[5:]
                self._data = data if self._data is None else self._data + b"\n" + data
        return events

    def end(self) -> list[bytes]:
        """The stream has ended: return the event whose empty line is missing, if there is one."""
        return self.feed(b"\n\n")


OnEvents = Callable[[list[bytes], float], None]  # (data of events that arrived together, time.perf_counter() of their arrival)


@dataclass
class _Exchange:
    """A request in flight on a connection."""

    done: asyncio.Future
    on_events: OnEvents
    last_read: float  # time.perf_counter()
    answered: bool = False  # whether anything has arrived
    response: Response = field(default_factory=Response)
    events: EventParser | None = None


class _Connection(asyncio.BufferedProtocol):
    """One connection, which carries one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._buffer = loop, bytearray(_BLOCK)
        self._view = memoryview(self._buffer)
        self._transport: Any = None
        self._exchange: _Exchange | None = None
        self.closed = False
        self.dropped = False  # closed before anything of a response arrived

    async def send(self, request: bytes, on_events: OnEvents, timeout: float) -> Response:
        """Send a request and wait for the end of its response. `timeout`: seconds in which nothing arrives."""
        exchange = self._exchange = _Exchange(self._loop.create_future(), on_events, time.perf_counter())
        self._transport.write(request)
        timer = self._loop.call_later(timeout, self._check_silence, exchange, timeout)
        try:
            return await exchange.done
        except BaseException:
            self._transport.abort()
            raise
        finally:
            timer.cancel()
            self._exchange = None

    def close(self) -> None:
        self._transport.abort()

    def _check_silence(self, exchange: _Exchange, timeout: float) -> None:
        left = exchange.last_read + timeout - time.perf_counter()
        if exchange.done.done():
            return
        if left > 0:
            self._loop.call_later(left, self._check_silence, exchange, timeout)
        else:
            exchange.done.set_exception(ProtocolError(f"the server sent nothing for {timeout:g} s"))

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        now, exchange = time.perf_counter(), self._exchange
        if exchange is None or exchange.done.done():  # bytes that nobody asked for
            self._transport.abort()
            return
        exchange.last_read, exchange.answered = now, True
        try:
            self._read(exchange, bytes(self._view[:nbytes]), now)
        except ProtocolError as error:
            exchange.done.set_exception(error)

    def _read(self, exchange: _Exchange, data: bytes, now: float) -> None:
        response = exchange.response
        known = response.status
        pieces = response.feed(data)
        if not known and response.is_event_stream:
            exchange.events = EventParser()
        if exchange.events is not None:
            for piece in pieces:
                events = exchange.events.feed(piece)
                if events:
                    exchange.on_events(events, now)
        else:
            for piece in pieces:
                response.body += piece[: _MAX_BODY - len(response.body)]
        if response.complete:
            self._finish(exchange, now)

    def _finish(self, exchange: _Exchange, now: float) -> None:
        response = exchange.response
        if exchange.events is not None and (rest := exchange.events.end()):
            exchange.on_events(rest, now)
        if not response.keeps_alive:
            self._transport.abort()
            self.closed = True
        exchange.done.set_result(response)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed, exchange = True, self._exchange
        if exchange is None or exchange.done.done():
            return
        self.dropped = not exchange.answered
        try:
            if error is not None:
                raise ProtocolError(f"the connection broke: {error}")
            exchange.response.end()
            self._finish(exchange, time.perf_counter())
        except ProtocolError as failure:
            exchange.done.set_exception(failure)


class HTTPClient:
    """Sends requests to one server, over connections that it keeps open.

    Args:
        base_url: http://HOST[:PORT][/PATH] or https://…; requests have paths below it.
        headers: sent with every request.
        timeout: seconds in which nothing arrives, after which a request fails.
    Raises:
        InputError: `base_url` is not such a URL, or a header has a line break.
    """

    def __init__(self, base_url: str, headers: dict[str, str], timeout: float) -> None:
        expected = "http://HOST:PORT or https://HOST:PORT, with a path or without"
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError as error:
            raise InputError(f"not a URL: {error}", expected=expected, found=base_url) from error
        plain = base_url.isascii() and base_url.isprintable() and " " not in base_url
        if not plain or parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InputError("not the URL of a server", expected=expected, found=base_url)
        self._host, self._port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._secure = ssl.create_default_context() if parts.scheme == "https" else None
        self._path, self._timeout = parts.path.rstrip("/"), timeout
        fields = {"Host": parts.netloc.rpartition("@")[2], "Accept-Encoding": "identity"} | headers
        if any(not (f"{name}{value}".isprintable() and name.isascii() and name) for name, value in fields.items()):
            raise InputError("a header has a name or a value that HTTP does not take", found=sorted(fields))
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode("utf-8")
        self._idle: list[_Connection] = []

    def encode(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """The bytes of a request, for `send`."""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n".encode() + self._head
        if body is not None:
            head += b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
        return head + b"\r\n" + (body or b"")

    async def send(self, request: bytes, on_events: OnEvents = lambda events, now: None) -> Response:
        """Send a request and return its response when that is complete. Events go to `on_events` as they arrive.

        A kept connection that the server has closed meanwhile is replaced once.

        Raises:
            ConnectError: no connection.
            ProtocolError: the response is damaged or not complete, or nothing arrived for too long.
        """
        while True:
            connection, kept = await self._connection()
            try:
                response = await connection.send(request, on_events, self._timeout)
            except ProtocolError:
                if kept and connection.dropped:
                    continue
                raise
            if not connection.closed:
                self._idle.append(connection)
            return response

    async def _connection(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection, True
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, made = await loop.create_connection(lambda: _Connection(loop), self._host, self._port, ssl=self._secure)
        except TimeoutError as error:
            raise ConnectError(f"no connection within {_CONNECT_SECONDS} s") from error
        except (OSError, UnicodeError) as error:
            code = getattr(error, "errno", None)
            plain = code is not None and code > 0 and not isinstance(error, ssl.SSLError | socket.gaierror)
            text = os.strerror(code or 0) if plain else str(error)  # asyncio's own text hides the reason
            raise ConnectError(printable(text)) from error
        return made, False

    def close(self) -> None:
        """Close the kept connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
