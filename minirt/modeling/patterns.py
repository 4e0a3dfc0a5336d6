"""`matches`: regular expressions from a model's files, in time that a pattern cannot blow up. Imports no torch.

Python's `re` backtracks, so a pattern such as `(a|a)*$` takes exponential time. Here the set of all positions that a match can
reach goes through the pattern once. That decides whether a match exists, which is all that is asked. A lookahead is decided once
for each position.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from minirt.errors import UnsupportedError

MAX_LENGTH = 512  # characters of a pattern
_MAX_DEPTH = 6  # groups and repeats inside each other
_LOOKAHEADS = (ops.ASSERT, ops.ASSERT_NOT)
_REPEATS = (ops.MAX_REPEAT, ops.MIN_REPEAT)
# Where the argument of a node has the nodes inside it. A branch has several.
_BODY = {ops.SUBPATTERN: 3, **dict.fromkeys(_REPEATS, 2), **dict.fromkeys(_LOOKAHEADS, 1)}
_CATEGORIES = {
    ops.CATEGORY_DIGIT: str.isdecimal, ops.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    ops.CATEGORY_WORD: lambda c: c.isalnum() or c == "_", ops.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
    ops.CATEGORY_SPACE: str.isspace, ops.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
}  # fmt: skip
_ANCHORS = (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING, ops.AT_END, ops.AT_END_STRING)
_CLASS_ITEMS = (ops.LITERAL, ops.RANGE, ops.NEGATE)


def matches(pattern: str, text: str) -> bool:
    """Whether `pattern` matches a beginning of `text`, as `re.match` does.

    Raises:
        UnsupportedError: see `parsed`.
    """
    return bool(_ends(parsed(pattern, lookaheads=True), text, frozenset({0})))


@lru_cache(maxsize=4096)
def parsed(pattern: str, lookaheads: bool = False) -> Any:
    """The syntax tree of a pattern, as Python's own parser makes it. `lookaheads`: it may have some.

    Literals, classes, groups, alternatives, repeats and anchors are known; not back references, lookbehinds and flags.

    Raises:
        UnsupportedError: the pattern is no regular expression, or uses something else.
    """
    if len(pattern) > MAX_LENGTH:
        raise UnsupportedError("the pattern is too long", expected=f"at most {MAX_LENGTH} characters", found=len(pattern))
    try:
        tree = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsupportedError("not a regular expression", found=repr(pattern)[:80]) from error
    if tree.state.flags & ~re.UNICODE or not _known(tree, 0, lookaheads):
        raise UnsupportedError("the regular expression is not simple enough", found=repr(pattern)[:80])
    return tree


def _known(nodes: Iterable[Any], depth: int, lookaheads: bool) -> bool:
    """Whether `_ends` knows all of these nodes."""
    for operation, argument in nodes:
        bodies = argument[1] if operation is ops.BRANCH else [argument[_BODY[operation]]] if operation in _BODY else []
        known = bool(bodies) or operation in (ops.LITERAL, ops.NOT_LITERAL, ops.ANY)
        if operation is ops.IN:
            known = all(kind in _CLASS_ITEMS or (kind is ops.CATEGORY and value in _CATEGORIES) for kind, value in argument)
        elif operation is ops.AT:
            known = argument in _ANCHORS
        elif operation is ops.SUBPATTERN:
            known = not argument[1] and not argument[2]  # no flags
        elif operation in _LOOKAHEADS:
            known = lookaheads and argument[0] > 0
        if not known or depth > _MAX_DEPTH or not all(_known(body, depth + 1, lookaheads) for body in bodies):
            return False
    return True


def _ends(nodes: Iterable[Any], text: str, starts: frozenset[int]) -> frozenset[int]:
    """All positions where a match of `nodes` that begins at one of `starts` can end."""
    for operation, argument in nodes:
        if not starts:
            break
        if operation is ops.AT:
            starts = frozenset(i for i in starts if _at(argument, i, text))
        elif operation is ops.SUBPATTERN:
            starts = _ends(argument[3], text, starts)
        elif operation is ops.BRANCH:
            starts = frozenset().union(*(_ends(branch, text, starts) for branch in argument[1]))
        elif operation in _REPEATS:
            starts = _repeated(argument[2], text, starts, int(argument[0]), int(argument[1]))
        elif operation in _LOOKAHEADS:
            starts = frozenset(i for i in starts if _holds(argument[1], text, i) == (operation is ops.ASSERT))
        else:
            starts = frozenset(i + 1 for i in starts if i < len(text) and accepts(operation, argument, text[i]))
    return starts


@lru_cache(maxsize=1 << 14)
def _holds(body: Any, text: str, start: int) -> bool:
    """Whether a lookahead's `body` matches at `start`."""
    return bool(_ends(body, text, frozenset({start})))


def _repeated(body: Any, text: str, starts: frozenset[int], least: int, most: int) -> frozenset[int]:
    """Positions after `least` to `most` matches of `body`. After len(text) + 1 matches nothing new can come."""
    now, reached = starts, starts if least == 0 else frozenset()
    for count in range(1, min(most, least + len(text) + 1) + 1):
        after = _ends(body, text, now)
        if not after or after == now:
            return reached | after
        if count >= least:
            if after <= reached:
                break
            reached |= after
        now = after
    return reached


def accepts(operation: Any, argument: Any, character: str) -> bool:
    """Whether a node of the tree for one character (a literal, a class or a dot) accepts this one."""
    if operation is ops.ANY:
        return character != "\n"
    if operation is not ops.IN:
        return (ord(character) == argument) == (operation is ops.LITERAL)
    negated = argument[0][0] is ops.NEGATE
    return negated != any(_in_class(kind, item, character) for kind, item in argument[negated:])


def _in_class(kind: Any, item: Any, character: str) -> bool:
    if kind is ops.CATEGORY:
        return bool(_CATEGORIES[item](character))
    low, high = item if kind is ops.RANGE else (item, item)
    return low <= ord(character) <= high


def _at(anchor: Any, position: int, text: str) -> bool:
    if anchor in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING):
        return position == 0
    before_newline = anchor is ops.AT_END and position == len(text) - 1 and text[position] == "\n"
    return position == len(text) or before_newline
