"""An HTTP server on loopback whose every byte a test decides, in a thread of its own."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Asked:
    """A request as it came. `body` is parsed JSON, or None."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    connection: int


Handler = Callable[[Asked, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":")).encode()) + b"\n\n"


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def answer(value: Any, status: str = "200 OK", kind: str = "application/json", extra: str = "") -> bytes:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{extra}content-length: {len(body)}\r\n\r\n".encode() + body


def completion(count: int, prompt: int, chat: bool = False) -> list[bytes]:
    """The events of a completion of `count` tokens: for chat an opening chunk, `count` chunks with text, usage, [DONE]."""
    events = [event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})] * chat
    for i in range(count):
        text = {"delta": {"content": f" t{i}"}} if chat else {"text": f" t{i}"}
        reason = "length" if i == count - 1 else None
        events.append(event({"id": "x", "choices": [{"index": 0, **text, "finish_reason": reason}]}))
    usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
    return [*events, event({"id": "x", "choices": [], "usage": usage}), event(b"[DONE]")]


async def serve_completions(asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A small OpenAI-compatible server: models, version, and completions of as many tokens as are asked for."""
    if asked.path == "/v1/models":
        writer.write(answer({"object": "list", "data": [{"id": "fake", "max_model_len": 4096}]}))
    elif asked.path == "/version":
        writer.write(answer({"version": "1.2.3"}))
    elif asked.method == "GET":
        writer.write(answer({"detail": "Not Found"}, "404 Not Found"))
    else:
        chat = "messages" in asked.body
        count = asked.body["max_completion_tokens" if chat else "max_tokens"]
        prompt = asked.body["messages"][0]["content"].split() if chat else asked.body["prompt"]
        writer.write(STREAM)
        for part in completion(count, len(prompt), chat):
            writer.write(chunk(part))
            await asyncio.sleep(0)
        writer.write(END)
    await writer.drain()


@dataclass
class FakeServer:
    """Context in which `handler` answers every request on `url`. `asked` has all requests, `most` the most in flight at once."""

    handler: Handler = serve_completions
    asked: list[Asked] = field(default_factory=list)
    most: int = 0
    connections: int = 0
    url: str = ""

    def __enter__(self) -> "FakeServer":
        self._loop, self._flying = asyncio.new_event_loop(), 0
        ready = threading.Event()

        async def start() -> None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
            ready.set()

        def run() -> None:
            self._loop.run_until_complete(start())
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        def stop() -> None:
            self._server.close()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.call_soon(self._loop.stop)

        self._loop.call_soon_threadsafe(stop)
        self._thread.join(30)
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.connections
        self.connections += 1
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
                data = await reader.readexactly(int(headers.get("content-length", "0")))
                asked = Asked(method, path, headers, json.loads(data) if data else None, number)
                self.asked.append(asked)
                self._flying += 1
                self.most = max(self.most, self._flying)
                try:
                    await self.handler(asked, reader, writer)
                finally:
                    self._flying -= 1
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
