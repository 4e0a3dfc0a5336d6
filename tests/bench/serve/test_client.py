"""One request of `minirt bench serve` against a server whose every byte is known.

Catches a first token that only opens a message, tokens counted twice or not at all, and failures that look like answers.
"""

import asyncio
import json
import random
import re
import time

import pytest
from support.fake_server import END, STREAM, Asked, FakeServer, answer, chunk, completion

from minirt.bench.serve import client as module
from minirt.bench.serve import http
from minirt.bench.serve.client import Outcome, StreamedCompletion, generate
from minirt.bench.serve.http import HTTPClient
from minirt.errors import InputError


def payload(text=None, reason=None, usage=None, **delta):
    choice = {"index": 0, "finish_reason": reason, **({"text": text} if text is not None else {"delta": delta})}
    return json.dumps({"id": "a", "choices": [choice], **({"usage": usage} if usage else {})}).encode()


def read(*payloads: bytes) -> StreamedCompletion:
    """Read events that arrive at times 1, 2, 3, …"""
    generation = StreamedCompletion()
    for now, data in enumerate(payloads, 1):
        generation.events([data], now)
    return generation


USAGE = b'{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}'


def test_what_counts_as_a_token() -> None:
    opening, last = payload(role="assistant", content=""), payload(reason="stop")
    assert read(opening, payload(content="a"), payload(content="b"), last, USAGE, b"[DONE]").times == [2, 3]
    assert read(payload(role="assistant", content="a"), last).times == [1]  # some servers open with the first token
    others = payload(reasoning="a"), payload(reasoning_content="b"), payload(tool_calls=[{"index": 0}])
    assert read(*others, last).times == [1, 2, 3]
    assert read(payload(""), payload("a"), payload("b", "length")).times == [1, 2, 3]  # a token may have no text yet
    assert read(payload("a"), payload("", "stop")).times == [1]
    assert read(payload(content="a"), payload(), last).times == [1, 2]
    assert read(payload("a", usage={"completion_tokens": 1}), payload("b", usage={"completion_tokens": 2})).times == [1, 2]
    assert read(payload(content=None, role="assistant"), last).times == []


def test_usage_end_and_latency() -> None:
    outcome = Outcome(0, 0.0)
    read(payload("a"), payload("b"), payload("", "stop"), USAGE, b"[DONE]").fill(outcome, 0.25)
    assert (outcome.ttft, outcome.itls, outcome.latency, outcome.events) == (0.75, [1], 2.75, 2)  # the last choice is at 3
    assert (outcome.prompt_tokens, outcome.output_tokens) == (7, 3)
    bad = read(payload("a"), b'{"choices": [], "usage": {"prompt_tokens": "7", "completion_tokens": true}}', b"[DONE]")
    bad.fill(outcome, 0.0)
    assert (outcome.prompt_tokens, outcome.output_tokens, bad.error) == (None, None, "")


@pytest.mark.parametrize(("payloads", "error"), [
    ([payload("a"), b'{"error": {"message": "out\\nof memory", "code": 500}}', b"[DONE]"], r"an error: out\\nof memory"),
    ([payload("a"), b'{"error": "gone"}'], "has an error: gone"),
    ([b"hello", b"[DONE]"], "no completion: hello"),
    ([b"[1]", b"[DONE]"], r"no completion: \[1\]"),
    ([b'{"choices": [3]}', b"[DONE]"], "no completion"),
    ([b"[" * 100_000], "no completion"),
    ([b"\xff"], "no completion"),
    ([payload("a"), payload("b")], "ended early, after 2 events"),
    ([b"[DONE]"], "without a token"),
    ([], "without a token"),
])  # fmt: skip
def test_what_is_no_completion(payloads: list[bytes], error: str) -> None:
    outcome, generation = Outcome(0, 0.0), read(*payloads)
    generation.fill(outcome, 0.0)
    assert re.search(error, generation.error)
    assert generation.error.isprintable()
    assert len(generation.error) < 400


def test_events_that_are_not_parsed_count_as_if_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most events are recognised by the bytes around their text. Text that looks like keys must not mislead this."""
    rng = random.Random(5)
    texts = ["", "é👧", '"finish_reason":null', '"text":"', '"delta":{"role":"x"}', '"usage":{"a":1}', '\\"error\\":{}', "}]}"]
    streams = []
    for _ in range(100):
        chat, spaced, order = rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.5
        payloads = []
        for _ in range(rng.randint(1, 20)):
            text, kind = rng.choice(texts), rng.random()
            delta = {"delta": {"content": text} | ({"role": "assistant"} if kind < 0.1 else {})} if chat else {"text": text}
            reason = {"finish_reason": "stop" if kind > 0.9 else None}
            value = {"id": "c", "choices": [{"index": 0} | (delta | reason if order else reason | delta)]}
            value |= {"usage": {"completion_tokens": 1}} if 0.2 < kind < 0.3 else {"usage": None} if 0.3 < kind < 0.6 else {}
            value = {"error": {"message": text}} if 0.85 < kind < 0.87 else value
            payloads.append(json.dumps(value, separators=None if spaced else (",", ":"), ensure_ascii=order).encode())
        streams.append(payloads)
    fast = [vars(read(*payloads)) for payloads in streams]
    calls = []
    monkeypatch.setattr(module, "_frame", lambda data: (b"\0", b""))
    read_event = StreamedCompletion._read
    monkeypatch.setattr(StreamedCompletion, "_read", lambda self, *a: calls.append(1) or read_event(self, *a))
    slow = [read(*payloads) for payloads in streams]
    assert len(calls) == sum(map(len, streams))
    for a, b in zip(fast, slow, strict=True):
        assert a | {"_head": b._head, "_tail": b._tail} == vars(b)


# --- over a connection ---


def run(url, *requests, timeout=30.0, headers=None):
    """Send requests one after the other with one client → outcomes."""

    async def send():
        client = HTTPClient(url, headers or {}, timeout)
        outcomes = []
        for i, body in enumerate(requests):
            outcome = Outcome(i, 0.0)
            await generate(client, client.encode("POST", "/v1/completions", body), outcome, time.perf_counter())
            outcomes.append(outcome)
        client.close()
        return outcomes

    return asyncio.run(send())


BODY = json.dumps({"prompt": [1, 2, 3], "max_tokens": 5}).encode()


def test_requests_share_a_connection() -> None:
    with FakeServer() as server:
        outcomes = run(server.url + "/base", BODY, BODY, BODY, headers={"Authorization": "Bearer k", "X-A": "b"})
    assert [(o.error, o.events, o.prompt_tokens, o.output_tokens, len(o.itls)) for o in outcomes] == [("", 5, 3, 5, 4)] * 3
    assert all(0 < o.ttft <= o.latency for o in outcomes)
    assert {(a.method, a.path, a.connection) for a in server.asked} == {("POST", "/base/v1/completions", 0)}
    headers = server.asked[0].headers
    assert (headers["host"], headers["authorization"], headers["x-a"]) == (server.url[7:], "Bearer k", "b")
    assert (headers["content-type"], headers["accept-encoding"]) == ("application/json", "identity")
    assert server.asked[0].body == json.loads(BODY)


def test_a_stream_cut_at_every_byte() -> None:
    """Each write is one byte, so reads end anywhere."""

    async def slow(asked: Asked, reader, writer) -> None:
        for byte in STREAM + b"".join(map(chunk, completion(3, 2))) + END:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)

    with FakeServer(slow) as server:
        (outcome,) = run(server.url, BODY)
    assert (outcome.error, outcome.events, outcome.prompt_tokens, outcome.output_tokens) == ("", 3, 2, 3)


def test_tokens_that_arrive_together() -> None:
    async def together(asked: Asked, reader, writer) -> None:
        writer.write(STREAM + chunk(b"".join(completion(4, 2))) + END)

    with FakeServer(together) as server:
        (outcome,) = run(server.url, BODY)
    assert (outcome.error, outcome.events, outcome.itls) == ("", 4, [0, 0, 0])


def test_a_kept_connection_that_the_server_closes_is_replaced() -> None:
    """Servers close idle connections at any time; a request that meets this has not failed."""

    async def close_second(asked: Asked, reader, writer) -> None:
        if len(server.asked) == 2:
            writer.close()  # without any answer
            return
        writer.write(STREAM + b"".join(map(chunk, completion(2, 1))) + END)

    with FakeServer(close_second) as server:
        outcomes = run(server.url, BODY, BODY)
    assert [(o.error, o.events) for o in outcomes] == [("", 2)] * 2
    assert [a.connection for a in server.asked] == [0, 0, 1]


@pytest.mark.parametrize(("written", "error", "events"), [
    (b"", "closed the connection before it answered", 0),
    (STREAM, "closed the connection in the middle", 0),
    (STREAM + b"".join(map(chunk, completion(4, 2)[:2])), "closed the connection in the middle", 2),
    (STREAM + b"".join(map(chunk, completion(4, 2)[:2])) + END, "ended early, after 2 events", 2),
    (answer({"choices": []}), 'no event stream but application/json: {"choices"', 0),
    (answer(b"<html>hi</html>", kind="text/html"), "no event stream but text/html: <html>hi", 0),
    (answer({"error": {"message": "is full"}}, "429 Too Many Requests"), "HTTP 429 Too Many Requests: is full", 0),
    (answer({"detail": "Not Found"}, "404 Not Found"), "HTTP 404 Not Found: Not Found", 0),
    (answer(b"\x1b[31mno\xff" * 999, "500 Internal Server Error"), r"HTTP 500 Internal Server Error: \x1b[31mno", 0),
])  # fmt: skip
def test_failures_are_named(written: bytes, error: str, events: int) -> None:
    async def handler(asked: Asked, reader, writer) -> None:
        writer.write(written)
        writer.close()

    with FakeServer(handler) as server:
        (outcome,) = run(server.url, BODY)
    assert error in outcome.error
    assert outcome.events == events
    assert outcome.error.isprintable()
    assert len(outcome.error) < 400


def test_silence_is_an_error() -> None:
    async def silent(asked: Asked, reader, writer) -> None:
        await reader.read(1)

    with FakeServer(silent) as server:
        (outcome,) = run(server.url, BODY, timeout=0.05)
    assert outcome.error == "the server sent nothing for 0.05 s"


def test_silence_counts_from_the_last_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that takes longer than the timeout, without a long pause, is no error."""

    class Loop:
        def __init__(self):
            self.later: list[tuple] = []

        def call_later(self, seconds, call, *arguments):
            self.later.append((seconds, arguments))

    async def check() -> None:
        loop = Loop()
        exchange = http._Exchange(asyncio.get_running_loop().create_future(), lambda events, now: None, 100.0)
        connection = http._Connection(loop)  # type: ignore[arg-type]
        monkeypatch.setattr(http.time, "perf_counter", lambda: 106.0)
        connection._check_silence(exchange, 10.0)
        assert loop.later == [(4.0, (exchange, 10.0))]
        exchange.last_read = 96.0
        connection._check_silence(exchange, 10.0)
        assert len(loop.later) == 1
        assert "nothing for 10 s" in str(exchange.done.exception())

    asyncio.run(check())


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://a", "http://", "http://a:b", "http://a:99999", "http://a b", "http://a?x", "http://a\n", "http://é"]
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(InputError):
        HTTPClient(url, {}, 1.0)


@pytest.mark.parametrize("header", [{"a\n": "b"}, {"a": "b\r\nc: d"}, {"é": "b"}])
def test_headers_cannot_break_out(header: dict[str, str]) -> None:
    with pytest.raises(InputError):
        HTTPClient("http://a", header, 1.0)
