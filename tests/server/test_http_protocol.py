"""Connections: heads without end, requests for another protocol, what is not HTTP, and answers that come before the body."""

import asyncio
import gzip
import json

import pytest
from support.server import answer, answered, front, message, on_front

from minirt import models
from minirt.engine.request import TokenOutput
from minirt.server import http_protocol

BODY = b'{"prompt": "Once upon"}'
TOKENS = "/tokenize"
# As Java's client.
H2C = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "HTTP2_Settings": "AAMAAABkAAQCAAAAAAIAAAAA"}


def run(scenario, **options):
    async def main():
        async with front(models.embedded(), **options) as (this, engine, ask):
            await scenario(this, engine, ask)

    asyncio.run(main())


def chunked(body, **headers):
    head = message(b"", TOKENS, **headers).replace(b"content-length: 0", b"transfer-encoding: chunked")
    return head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"


@pytest.mark.parametrize("first", [
    message(BODY, TOKENS, **H2C), chunked(BODY, **H2C), message(BODY, TOKENS, connection="upgrade", upgrade="websocket"),
])  # fmt: skip
@on_front()
async def test_a_request_for_another_protocol_is_an_ordinary_request(this, engine, ask, first):
    """As is the one after it, wherever the bytes are cut."""
    data, end = first + message(b"", "/version", "GET"), first.index(b"\r\n\r\n") + 4
    for cut in (1, 30, end - 3, end - 1, end, end + 1, end + 5, len(first) - 1, len(first), len(first) + 9, len(data)):
        reader, writer = await ask(data[:cut])
        await writer.drain()
        for _ in range(5):
            await asyncio.sleep(0)
        writer.write(data[cut:])
        status, _, found = await answer(reader)
        assert (status, json.loads(found)["count"]) == (200, 2), cut
        assert "version" in json.loads((await answer(reader))[2])
    reader, _ = await ask(message(b"", "/version", "GET", **H2C) * 3)
    for _ in range(3):
        assert (await answer(reader))[0] == 200
    assert (await answered(ask(message(BODY[:-1], TOKENS, **H2C))))[0] == 400


@on_front()
async def test_a_head_has_a_bound(this, engine, ask):
    for start in (b"GET /version HTTP/1.1\r\nhost: x\r\nx: ", b"GET /version?"):
        reader, writer = await ask(start)
        sent = 0
        while not reader.at_eof() and sent < 1 << 24 and not reader._buffer:
            writer.write(b"a" * 10_000)
            sent += 10_000
            await asyncio.sleep(0)
        status, headers, found = await answer(reader)
        assert (status, headers["connection"]) == (431, "close")
        assert "head" in json.loads(found)["error"]["message"]
        assert sent < 1 << 21
    # One of a usual length may come in many pieces, and each request on a connection has the whole bound.
    reader, writer = await ask(b"")
    for _ in range(3):
        for piece in (b"GET /version HTTP/1.1\r\n", *(b"x: " + b"a" * 5000 + b"\r\n" for _ in range(10)), b"\r\n"):
            writer.write(piece)
            for _ in range(3):
                await asyncio.sleep(0)
        assert (await answer(reader))[0] == 200


@pytest.mark.parametrize("data", [b"", b"GET /ver", message(b"", "/version", "GET") + b"GET"])
def test_a_head_that_does_not_end_in_time(data, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.05)

    async def scenario(this, engine, ask):
        reader, _ = await ask(data)
        found = await reader.read()
        assert found.startswith(b"HTTP/1.1 200") if data.count(b"GET") == 2 else not found

    run(scenario)


@on_front()
async def test_an_answer_may_take_longer_than_a_head(this, engine, ask):
    await engine.gets(ask(message({"prompt": "Once", "max_tokens": 1}, "/v1/completions")))
    (own,) = this.exchanges
    connection = own._scope["extensions"]["minirt"]["transport"].get_protocol()
    assert connection._deadline is None


@on_front()
async def test_what_is_no_http_gets_an_error_in_json_but_not_within_an_answer(this, engine, ask):
    status, headers, found = await answered(ask(b"\x16\x03\x01\x02\r\n\r\n"))
    assert (status, headers["content-type"], headers["connection"]) == (400, "application/json", "close")
    assert json.loads(found)["error"]["type"] == "invalid_request_error"
    reader, writer = await engine.gets(ask(message({"prompt": "Once", "stream": True, "max_tokens": 9}, "/v1/completions")))
    engine.send(TokenOutput(engine.requests[0].id, (5,), None))
    begin = await reader.readuntil(b"\n\n")
    writer.write(b"\x00\x01\x02")
    assert b"HTTP/1.1 400" not in begin + await reader.read()
    await engine.until(lambda e: e.aborted)


@on_front()
async def test_compressed_bodies_are_refused_by_name(this, engine, ask):
    reader, _ = await ask(message(gzip.compress(BODY), TOKENS, content_encoding="gzip") + message(BODY, TOKENS))
    status, _, found = await answer(reader)
    assert (status, json.loads(found)["error"]["param"]) == (415, "content-encoding")
    assert (await answer(reader))[0] == 200
    assert (await answered(ask(message(BODY, TOKENS, content_encoding="identity"))))[0] == 200


BIG = b'{"prompt": "' + b"a" * (6 << 20) + b'"}'  # more than the buffers of sockets hold
CLOSE = {"connection": "close"}


async def upload(ask, data):
    """Send all of a request, then read its answer, as clients do that do not read meanwhile."""
    reader, writer = await ask(b"")
    for start in range(0, len(data), 1 << 18):
        writer.write(data[start : start + (1 << 18)])
        await writer.drain()
    return reader, writer, await answer(reader)


def early():
    """Requests with large bodies that are answered before their bodies are read, and the status."""
    yield 413, message(BIG, TOKENS)
    yield 413, message(BIG, TOKENS, **CLOSE)
    yield 404, message(BIG, "/nothing", **CLOSE)
    yield 405, message(BIG, "/version", **CLOSE)
    yield 415, message(BIG, TOKENS, content_encoding="gzip", **CLOSE)
    head = message(b"", TOKENS).replace(b"content-length: 0", b"transfer-encoding: chunked")
    yield 413, head + b"".join(b"%x\r\n%b\r\n" % (len(BIG), BIG) for _ in range(2)) + b"0\r\n\r\n"


def test_an_early_answer_reaches_a_client_that_sends_first():
    """A connection that is closed with unread bytes is reset: the client sees no status, and SDKs send the whole body again."""

    async def scenario(this, engine, ask):
        for status, data in early():
            for version in (b"HTTP/1.1", b"HTTP/1.0"):
                if b"chunked" in data and version == b"HTTP/1.0":
                    continue
                reader, _, (found, headers, body) = await upload(ask, data.replace(b"HTTP/1.1", version, 1))
                assert (found, headers["connection"]) == (status, "close"), data[:99]
                assert json.loads(body)["error"]["message"]
                assert await reader.read() == b""  # the connection ends, and is not reset

    async def with_key(this, engine, ask):
        reader, _, (status, _, _) = await upload(ask, message(BIG, TOKENS, **CLOSE))
        assert (status, await reader.read()) == (401, b"")

    async def while_it_ends(this, engine, ask):
        this.draining = True
        reader, _, (status, _, _) = await upload(ask, message(BIG, TOKENS, **CLOSE))
        assert (status, await reader.read()) == (503, b"")

    run(scenario, max_body_size=1024)
    run(with_key, api_keys=("k",))
    run(while_it_ends)


@on_front(api_keys=("k",))
async def test_a_connection_goes_on_after_an_early_answer(this, engine, ask, monkeypatch):
    """Unless the answer says that it ends, the rest of the body belongs to no other request. Each next head has its own time."""
    for data in (message(BIG, TOKENS), message(BIG, "/nothing"), message(b"", TOKENS, expect="100-continue")):
        reader, writer, (status, headers, _) = await upload(ask, data)
        assert status == 401
        assert "connection" not in headers
        writer.write(message(b"", "/health", "GET"))
        assert (await answer(reader))[0] == 200
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.3)
    reader, writer, (status, _, _) = await upload(ask, message(BIG, TOKENS))
    assert (status, await reader.read()) == (401, b"")


@on_front(max_body_size=1024)
async def test_the_last_answer_is_the_last_one(this, engine, ask):
    """What follows the rest of a refused request is neither answered nor run, also if it is no HTTP."""
    head = message(b"", TOKENS, **CLOSE).replace(b"content-length: 0", b"transfer-encoding: chunked")
    generates = message({"prompt": "Once", "max_tokens": 1}, "/v1/completions")
    for data in (
        message(BODY * 100, TOKENS) + generates, message(BODY * 100, TOKENS) + message(BODY, TOKENS, **H2C),
        head + b"fff\r\n" + b"a" * 0xFFF + b"\r\nzz\r\n", message(BODY * 100, TOKENS) + b"\x00\x01" * 100,
    ):
        for cut in (len(data) - 1, len(data) // 2, 1500):
            reader, writer = await ask(data[:cut])
            status = (await answer(reader))[0]
            writer.write(data[cut:])
            assert status in (413, 400)  # 400 if what is no HTTP comes with the head
            assert await reader.read() == b""
    assert not engine.requests


@pytest.mark.parametrize("refused", [b"\x16\x03\x01" * 50, b"GET /version HTTP/1.1\r\nx: " + b"a" * 300_000, "413"])
def test_the_rest_has_a_bound(refused, monkeypatch):
    """A client that goes on sending is cut off after so many bytes, whether its request is too large or no HTTP."""
    monkeypatch.setattr(http_protocol, "MAX_REST", 1 << 20)

    async def scenario(this, engine, ask):
        head = message(b"", TOKENS).replace(b"content-length: 0", b"content-length: 99999999999")
        _, writer = await ask(b"")
        data, sent = (head if refused == "413" else refused) + b"a" * (1 << 26), 0

        async def send():
            nonlocal sent
            for sent in range(0, len(data), 100_000):
                writer.write(data[sent : sent + 100_000])
                await writer.drain()

        with pytest.raises(ConnectionError):
            await send()
        assert sent < 1 << 25  # what was read, and what sockets hold

    run(scenario, max_body_size=1024)


@on_front(max_body_size=1024)
async def test_the_end_of_a_refused_body_is_no_head(this, engine, ask):
    """A last piece longer than a head may be was answered again, after the connection's end: a traceback in the log."""
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    for last in (1024, 200_000):
        head = message(b"", TOKENS).replace(b"content-length: 0", b"content-length: 500000")
        reader, writer = await ask(head + b"a" * (500_000 - last))
        assert (await answer(reader))[0] == 413
        writer.write(b"a" * last)
        assert await reader.read() == b""
    for _ in range(20):
        await asyncio.sleep(0)
    assert errors == []


def test_the_rest_has_a_time(monkeypatch):
    """A client that has its answer and sends no more of its body does not keep the connection."""
    monkeypatch.setattr(http_protocol, "REST_SECONDS", 0.05)

    async def scenario(this, engine, ask):
        for path in ("/nothing", TOKENS):
            reader, _ = await ask(message(BODY * 100, path)[:300])
            assert (await answer(reader))[0] == (404 if path == "/nothing" else 413)
            assert await reader.read() == b""
        assert not this.exchanges

    run(scenario, max_body_size=1024)


@on_front()
async def test_a_broken_body_ends_its_request(this, engine, ask):
    """Its handler, which waits for the rest, does not answer after the error."""
    head = message(b"", TOKENS).replace(b"content-length: 0", b"transfer-encoding: chunked")
    reader, writer = await ask(head + b"3\r\nabc\r\n")
    for _ in range(20):
        await asyncio.sleep(0)
    assert this.exchanges
    writer.write(b"zz\r\n")
    assert (await answer(reader))[0] == 400
    assert await reader.read() == b""
    while this.exchanges:
        await asyncio.sleep(0)


@on_front()
async def test_http_1_0_has_no_chunks(this, engine, ask):
    """Its clients do not know them: the end of the connection is the end of a stream."""
    body = {"prompt": "Once", "max_tokens": 2, "stream": True}
    data = message(body, "/v1/completions", connection="keep-alive")
    reader, _ = await engine.gets(ask(data.replace(b"HTTP/1.1", b"HTTP/1.0")))
    engine.send(TokenOutput(engine.requests[0].id, (5,), None))
    begin = await reader.readuntil(b"}\n\n")
    engine.send(TokenOutput(engine.requests[0].id, (6,), "length"))
    head, _, content = (begin + await reader.read()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head
    found = [event for event in content.split(b"\n\n") if event]
    assert all(event.startswith(b"data: ") for event in found)
    assert found[-1] == b"data: [DONE]"
    assert len(found) == 3
    for method in ("GET", "HEAD"):
        reader, _ = await ask(message(b"", "/version", method).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, content = (await reader.read()).partition(b"\r\n\r\n")
        assert b"content-length" in head
        assert (b"version" in content) == (method == "GET")
