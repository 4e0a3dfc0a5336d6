"""`check_size`: refuses JSON with so many values that parsing it would delay all other requests.

A parser runs in one piece and holds Python's lock: 32 MB of `[],[],…` stop the event loop for seconds, while a text of this size
takes some tens of milliseconds. So the values are counted first, in pieces between which other requests go on.
"""

import asyncio
from collections.abc import Iterator

from minirt.server.errors import HTTPError

MAX_NODES = 100_000  # objects, lists and keys of objects
MAX_VALUES = 1_000_000  # values in lists and objects, such as token ids
_PIECE = 1 << 16  # bytes; a smaller body is not worth counting


async def check_size(body: bytes) -> None:
    """Raise 400 if a JSON body has too many values. The count of bytes that are no JSON means nothing."""
    for _ in _count(body, "body"):
        await asyncio.sleep(0)


def check_text(text: str, param: str) -> None:
    """Check a text in a body that is JSON itself, as `check_size` does. `param`: its field. Not for the event loop's thread."""
    for _ in _count(text.encode(), param):
        pass


def _count(body: bytes, param: str) -> Iterator[None]:
    inside, rest = False, b""  # whether the piece begins inside a string; the backslash before it
    nodes = values = 0
    for start in range(0, len(body) if len(body) > _PIECE else 0, _PIECE):
        piece = (rest + body[start : start + _PIECE]).replace(rb"\\", b"").replace(rb"\"", b"")
        rest = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.split(b'"')  # strings and the text between them, alternating
        between = b"".join(parts[inside::2])
        inside ^= len(parts) % 2 == 0
        nodes += between.count(b"[") + between.count(b"{") + between.count(b":")
        values += between.count(b",")
        if nodes > MAX_NODES:
            raise HTTPError(400, "has too many objects, lists and keys", param=param, expected=f"at most {MAX_NODES:,}")
        if values > MAX_VALUES:
            raise HTTPError(400, "has too many values", param=param, expected=f"at most {MAX_VALUES:,}")
        yield
