"""Seeded mutations of files for the fuzz tests: `mutated` damages one JSON or text file, `budget` is the number of cases.

A mutator takes a `random.Random` and what it changes, and returns the changed value. The same seed gives the same file.
"""

import copy
import json
import os
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

_REPEATED = "\ue000"  # marks a key that `dump` writes without the mark, and so twice
ODD_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**32, 2**63, 2**64, -(2**63) - 1, 10**30, 10**4000),
    *(0.0, -0.0, 0.5, 1.5, 1e308, 1e-320, float("nan"), float("inf"), float("-inf")),
    *("", " ", "a", "\0", "\x1b[31m", "\ud800", "é", "名", "x" * 10_000, "NaN", "1", "(a|aa)+$", "../../etc/passwd"),
    *([], {}, [[]], [None], [{}], {"": None}, [0] * 1000, {"type": "Sequence"}, {"type": None}),
    *({"Regex": "(a+)+$"}, {"Regex": ""}, {"String": ""}),
]


def budget(cases: int) -> int:
    """The number of cases that a fuzz test tries: the environment variable MINIRT_FUZZ, or `cases`."""
    return int(os.environ.get("MINIRT_FUZZ", cases))


def dump(value: Any) -> str:
    """`value` as JSON. A key that `repeat_key` marked is written without the mark, and so is there twice."""
    return json.dumps(value).replace(json.dumps(_REPEATED)[1:-1], "")


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from places(inner)


def _place(random: Random, value: Any) -> tuple[Any, Any] | None:
    """One place: every depth is about as likely, though most of a tokenizer's places are deep in its vocabulary."""
    container, found = value, None
    while isinstance(container, dict | list) and container:
        keys = list(container) if isinstance(container, dict) else range(len(container))
        found = (container, random.choice(keys))
        container = found[0][found[1]]
        if random.random() < 0.3:
            break
    return found


def drop(random: Random, value: Any) -> Any:
    if place := _place(random, value):
        del place[0][place[1]]
    return value


def replace(random: Random, value: Any) -> Any:
    """An odd value, of any type."""
    if place := _place(random, value):
        place[0][place[1]] = copy.deepcopy(random.choice(ODD_VALUES))
    return value


def near(random: Random, value: Any) -> Any:
    """A value close to the old one: off by one, of the other sign, another case, cut, doubled, wrapped in a list."""
    if not (place := _place(random, value)):
        return value
    container, key = place
    old = container[key]
    if isinstance(old, bool):
        new: Any = not old
    elif isinstance(old, int | float):
        new = random.choice([old + 1, old - 1, -old, str(old)] + ([old * 1000, float(old)] if abs(old) < 1e300 else []))
    elif isinstance(old, str):
        new = random.choice([old.upper(), old[:-1], old + old, old + " ", "▁" + old, [old]])
    elif isinstance(old, list):
        new = random.choice([old + old, old[::-1], old[:1], {str(i): inner for i, inner in enumerate(old)}])
    elif isinstance(old, dict):
        new = random.choice([list(old.values()), {key.upper(): inner for key, inner in old.items()}, [old]])
    else:
        new = random.choice(["", 0, {}])
    container[key] = copy.deepcopy(new)
    return value


def swap(random: Random, value: Any) -> Any:
    """Two values, at any two places, change places."""
    one, two = _place(random, value), _place(random, value)
    if one and two:
        first, second = copy.deepcopy(one[0][one[1]]), copy.deepcopy(two[0][two[1]])
        one[0][one[1]] = second
        if isinstance(two[0], dict) or two[1] < len(two[0]):
            two[0][two[1]] = first
    return value


def rename(random: Random, value: Any) -> Any:
    """A key gets another name: of another key in the file, or an odd one."""
    known = [key for container, key in places(value) if isinstance(container, dict)][:2000]
    for _ in range(10):
        place = _place(random, value)
        if place and isinstance(place[0], dict):
            place[0][random.choice([*known, "", "\0", place[1] + "_"])] = place[0].pop(place[1])
            break
    return value


def repeat_key(random: Random, value: Any) -> Any:
    """A key is there twice, with two values."""
    for _ in range(10):
        place = _place(random, value)
        if place and isinstance(place[0], dict):
            place[0][place[1] + _REPEATED] = copy.deepcopy(random.choice(ODD_VALUES))
            break
    return value


def nest(random: Random, value: Any) -> Any:
    """A value inside 1 to 100 lists or objects. `insert` nests deeper than Python's parser can go."""
    if place := _place(random, value):
        inner = place[0][place[1]]
        for _ in range(random.choice([1, 3, 30, 100])):
            inner = [inner] if random.random() < 0.5 else {"a": inner}
        place[0][place[1]] = inner
    return value


def graft(random: Random, value: Any) -> Any:
    """A copy of one part of the file in place of another, or beside it."""
    one, two = _place(random, value), _place(random, value)
    if one and two:
        part = copy.deepcopy(one[0][one[1]])
        if isinstance(two[0], list) and random.random() < 0.5:
            two[0].insert(two[1], part)
        else:
            two[0][two[1]] = part
    return value


JSON_MUTATORS = (drop, replace, replace, near, near, swap, rename, repeat_key, nest, graft)


def cut(random: Random, content: bytes) -> bytes:
    return content[: random.randrange(len(content) + 1)]


def flip(random: Random, content: bytes) -> bytes:
    """One to eight bytes change."""
    changed = bytearray(content)
    for _ in range(random.randint(1, 8) if changed else 0):
        changed[random.randrange(len(changed))] = random.randrange(256)
    return bytes(changed)


def insert(random: Random, content: bytes) -> bytes:
    """Something odd between two bytes."""
    odd = [b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\x1b[2J", b'"', b"\\ud800", b"NaN", b"1e999"]
    odd += [b"[" * 3000, b'{"a":' * 3000, b"9" * 5000]
    at = random.randrange(len(content) + 1)
    return content[:at] + random.choice(odd) + content[at:]


def remove(random: Random, content: bytes) -> bytes:
    at = random.randrange(len(content) + 1)
    return content[:at] + content[at + random.choice([1, 2, 10, 100]) :]


def repeat(random: Random, content: bytes) -> bytes:
    """A piece of the file is there several times."""
    at = random.randrange(len(content) + 1)
    end = min(at + random.choice([1, 10, 100]), len(content))
    return content[:at] + content[at:end] * random.choice([2, 50]) + content[end:]


def empty(random: Random, content: bytes) -> bytes:
    return random.choice([b"", b"{}", b"[]", b"null", b"0", b" " * 100, b"\0" * 100])


BYTE_MUTATORS = (cut, flip, flip, insert, remove, repeat, empty)


def mutated(random: Random, content: bytes, mutators: Sequence[Any] = JSON_MUTATORS, bytes_share: float = 0.2) -> bytes:
    """A damaged copy of a file: one to three mutations. `bytes_share`: how often the bytes are changed and not the JSON value."""
    count = random.choice([1, 1, 1, 2, 3])
    if random.random() < bytes_share:
        for _ in range(count):
            content = random.choice(BYTE_MUTATORS)(random, content)
        return content
    value = json.loads(content)
    for _ in range(count):
        value = random.choice(mutators)(random, value)
    return dump(value).encode()
