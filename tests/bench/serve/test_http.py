"""The HTTP reader of `minirt bench serve`: any cut of a response gives the same events, and damage is named.

Catches events that are lost or doubled where a read ends inside a chunk size, a line or an event.
"""

import random
from itertools import pairwise

import pytest

from minirt.bench.serve.http import EventParser, ProtocolError, Response

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: Chunked\r\nX-Empty:\r\n\r\n"
BODY = (
    b'data: {"a": 1}\n\n: ping\n\ndata:no space\r\n\r\nid: 7\nevent: x\ndata: two\ndata: lines \n\n\n\ndata:\n\n'
    b'data: {"n": "\xc3\xa9\xe2\x82\xac"}\n\ndata: [DONE]\n\n'
)
EVENTS = [b'{"a": 1}', b"no space", b"two\nlines ", b"", b'{"n": "\xc3\xa9\xe2\x82\xac"}', b"[DONE]"]


def chunks(body: bytes, sizes: list[int]) -> bytes:
    out, place = b"", 0
    for i, size in enumerate(sizes):
        piece = body[place : place + size]
        out += (b"%x" if i % 2 else b"%X") % len(piece) + (b";name=value" if i % 3 == 1 else b"") + b"\r\n" + piece + b"\r\n"
        place += size
    assert place >= len(body)
    return out + b"0\r\nTrailer: yes\r\n\r\n"


def parsed(pieces: list[bytes]) -> tuple[list[bytes], Response]:
    response, events, payloads = Response(), EventParser(), []
    for piece in pieces:
        for part in response.feed(piece):
            payloads += events.feed(part)
    return payloads + events.end(), response


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(places), len(data)]
    return [data[a:b] for a, b in pairwise(ends)]


def test_every_cut_gives_the_same_events() -> None:
    rng = random.Random(3)
    sizes = [1, 2, 17, 5, 30, 11, 200]
    response = HEAD + chunks(BODY, sizes)
    cuts = [[i] for i in range(len(response) + 1)] + [list(range(len(response)))]
    cuts += [rng.choices(range(len(response)), k=rng.randint(2, 12)) for _ in range(200)]
    for places in cuts:
        events, parser = parsed(cut(response, places))
        assert events == EVENTS, places
        assert (parser.status, parser.reason, parser.complete, parser.keeps_alive) == (200, "OK", True, True)
    assert parser.headers == {"content-type": "text/event-stream", "transfer-encoding": "Chunked", "x-empty": ""}


def test_events_in_one_piece_each_as_servers_send_them() -> None:
    """The fast path: a piece that is exactly one event; and pieces that only look like one."""
    parser = EventParser()
    assert parser.feed(b"data: a\n\n") == [b"a"]
    assert parser.feed(b"data: b\n") == []
    assert parser.feed(b"data: c\n\n") == [b"b\nc"]
    assert parser.feed(b"data: d\nx\n") == []
    assert parser.feed(b"\n") == [b"d"]
    assert parser.feed(b"data: e\n\ndata: f\n\n") == [b"e", b"f"]
    assert parser.feed(b"da") == []
    assert parser.feed(b"ta: g\n\n") == [b"g"]
    assert parser.feed(b"data: h") == []
    assert parser.end() == [b"h"]


@pytest.mark.parametrize(("data", "body", "keeps_alive"), [
    (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello", True),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"", True), (b"HTTP/1.1 204 No Content\r\n\r\n", b"", False),
    (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok", True),
    (b"HTTP/1.1 200\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok", b"ok", False),
    (b"HTTP/1.0 200 OK\nContent-Length: 2\n\nok", b"ok", False),
])  # fmt: skip
def test_bodies_of_known_length(data: bytes, body: bytes, keeps_alive: bool) -> None:
    for places in [[i] for i in range(len(data))] + [list(range(len(data)))]:
        response = Response()
        pieces = [piece for part in cut(data, places) for piece in response.feed(part)]
        assert b"".join(pieces) == body
        assert response.complete
        assert response.keeps_alive == keeps_alive
        response.end()


def test_a_body_until_the_connection_closes() -> None:
    response = Response()
    assert response.feed(b"HTTP/1.1 200 OK\r\n\r\nab") == [b"ab"]
    assert response.feed(b"c") == [b"c"]
    assert not response.complete
    response.end()
    assert response.complete
    assert not response.keeps_alive


@pytest.mark.parametrize("size", [1, 60, len(HEAD), len(HEAD) + 1, len(HEAD) + 20, -1, -3])
def test_a_response_that_ends_early_is_an_error(size: int) -> None:
    response = Response()
    response.feed((HEAD + chunks(BODY, [len(BODY)]))[:size])
    with pytest.raises(ProtocolError, match="closed the connection"):
        response.end()


@pytest.mark.parametrize(("data", "message"), [
    (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "not HTTP: it begins with 'SSH-2.0"),
    (b"\x16\x03\x01\x02", r"not HTTP: it begins with '\\\\x16"), (b"HTTP/2 200\r\n\r\n", "not HTTP/1.1"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "content-length '-5'"),
    (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n", "compressed .gzip."), (HEAD + b"xyz\r\n", "'xyz' is no size"),
    (HEAD + b"-5\r\n", "'-5' is no size"), (HEAD + b"3\r\nabcd\r\n", "is no size"), (HEAD + b"1" * 99999, "too long"),
    (b"HTTP/1.1 200 OK\r\n" + b"a" * 99999, "too long"),
])  # fmt: skip
def test_damage_is_named(data: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        Response().feed(data)


def test_an_endless_event_is_refused() -> None:
    parser = EventParser()
    for _ in range(16):
        parser.feed(b"data: " + b"a" * (1 << 20) + b"\n")
    with pytest.raises(ProtocolError, match="16 MiB"):
        parser.feed(b"data: a")
