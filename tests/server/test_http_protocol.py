"""Connections: heads without end, requests for another protocol, and what is not HTTP."""

import asyncio
import gzip
import json

import pytest
from support.server import answer, front, message

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
def test_a_request_for_another_protocol_is_an_ordinary_request(first):
    """As is the one after it, wherever the bytes are cut."""

    async def scenario(this, engine, ask):
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
        reader, _ = await ask(message(BODY[:-1], TOKENS, **H2C))
        assert (await answer(reader))[0] == 400

    run(scenario)


def test_a_head_has_a_bound():
    async def scenario(this, engine, ask):
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

    run(scenario)


@pytest.mark.parametrize("data", [b"", b"GET /ver", message(b"", "/version", "GET") + b"GET"])
def test_a_head_that_does_not_end_in_time(data, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.05)

    async def scenario(this, engine, ask):
        reader, _ = await ask(data)
        found = await reader.read()
        assert found.startswith(b"HTTP/1.1 200") if data.count(b"GET") == 2 else not found

    run(scenario)


def test_an_answer_may_take_longer_than_a_head():
    async def scenario(this, engine, ask):
        await ask(message({"prompt": "Once", "max_tokens": 1}, "/v1/completions"))
        await engine.until(lambda e: e.requests)
        (own,) = this.exchanges
        connection = own._scope["extensions"]["minirt"]["transport"].get_protocol()
        assert connection._deadline is None

    run(scenario)


def test_what_is_no_http_gets_an_error_in_json_but_not_within_an_answer():
    async def scenario(this, engine, ask):
        reader, _ = await ask(b"\x16\x03\x01\x02\r\n\r\n")
        status, headers, found = await answer(reader)
        assert (status, headers["content-type"], headers["connection"]) == (400, "application/json", "close")
        assert json.loads(found)["error"]["type"] == "invalid_request_error"
        reader, writer = await ask(message({"prompt": "Once", "stream": True, "max_tokens": 9}, "/v1/completions"))
        await engine.until(lambda e: e.requests)
        engine.send(TokenOutput(engine.requests[0].id, (5,), None))
        begin = await reader.readuntil(b"\n\n")
        writer.write(b"\x00\x01\x02")
        assert b"HTTP/1.1 400" not in begin + await reader.read()
        await engine.until(lambda e: e.aborted)

    run(scenario)


def test_compressed_bodies_are_refused_by_name():
    async def scenario(this, engine, ask):
        reader, _ = await ask(message(gzip.compress(BODY), TOKENS, content_encoding="gzip") + message(BODY, TOKENS))
        status, _, found = await answer(reader)
        assert (status, json.loads(found)["error"]["param"]) == (415, "content-encoding")
        assert (await answer(reader))[0] == 200
        reader, _ = await ask(message(BODY, TOKENS, content_encoding="identity"))
        assert (await answer(reader))[0] == 200

    run(scenario)
