"""Values of bodies, counted in pieces, against a count of the parsed value. Texts are full of quotes, backslashes, brackets."""

import asyncio
import json
import random

import pytest

from minirt.server import json_size
from minirt.server.errors import HTTPError


def text(draw):
    return "".join(draw.choice('ab"\\[{:,}]\n é') for _ in range(draw.randrange(20)))


def value(draw, depth=0):
    kind = draw.randrange(7 if depth < 4 else 3)
    if kind < 3:
        return [text(draw), draw.randrange(10**6), None][kind]
    if kind < 5:
        return [value(draw, depth + 1) for _ in range(draw.randrange(5))]
    return {text(draw): value(draw, depth + 1) for _ in range(draw.randrange(5))}


def counts(whole):
    """(objects, lists and keys; commas)"""
    nodes = commas = 0
    todo = [whole]
    while todo:
        own = todo.pop()
        if isinstance(own, list | dict):
            nodes += 1 + (len(own) if isinstance(own, dict) else 0)
            commas += max(0, len(own) - 1)
            todo += own if isinstance(own, list) else own.values()
    return nodes, commas


def accepts(body):
    try:
        asyncio.run(json_size.check_size(body))
    except HTTPError as error:
        return (error.status, error.param) != (400, "body")
    return True


def test_the_count_is_exact(monkeypatch):
    draw, checked = random.Random(5), 0
    for _ in range(300):
        own = [value(draw), value(draw)]
        body = json.dumps(own, ensure_ascii=draw.random() < 0.5).encode()
        monkeypatch.setattr(json_size, "_PIECE", draw.randrange(1, 20))
        nodes, commas = counts(own)
        for fewer_nodes, fewer_values in ((0, 0), (1, 0), (0, 1)):
            monkeypatch.setattr(json_size, "MAX_NODES", nodes - fewer_nodes)
            monkeypatch.setattr(json_size, "MAX_VALUES", commas - fewer_values)
            assert accepts(body) == (fewer_nodes + fewer_values == 0 or len(body) <= json_size._PIECE), body
            checked += len(body) > json_size._PIECE
    assert checked > 500


@pytest.mark.parametrize(("body", "fits"), [
    (b'{"prompt": "' + b"[{:,\\\"" * 200_000 + b'"}', True), (b"[" + b"1," * 900_000 + b"1]", True), (b"[" * 90_000, True),
    (b"[" * 110_000, False), (b'{"a":' * 60_000, False), (b"[" + b"1," * 1_100_000 + b"1]", False), (b"\\" * 10**6, True),
])  # fmt: skip
def test_limits(body, fits):
    assert accepts(body) == fits


def test_others_go_on_meanwhile():
    async def main():
        checking = asyncio.create_task(json_size.check_size(b'"' + b"a" * (1 << 20)))
        turns = 0
        while not checking.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 16

    asyncio.run(main())
