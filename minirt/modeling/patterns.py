"""`matches`: regular expressions from a model's files, in time that a pattern cannot blow up. Imports no torch.

Python's `re` backtracks, so a pattern such as `(a|a)*$` takes exponential time. Here the set of all positions that a match can
reach goes through the pattern once. That decides whether a match exists, which is all that is asked.
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


def matches(pattern: str, text: str) -> bool:
    """Whether `pattern` matches a beginning of `text`, as `re.match` does.

    Literals, classes, groups, alternatives, repeats and anchors are known; not back references, lookarounds and flags.

    Raises:
        UnsupportedError: the pattern is no regular expression, or uses something else.
    """
    return bool(_through(_parsed(pattern), text, frozenset({0}), 0, pattern))


@lru_cache(maxsize=4096)
def _parsed(pattern: str) -> Any:
    if len(pattern) > MAX_LENGTH:
        raise UnsupportedError("the pattern is too long", expected=f"at most {MAX_LENGTH} characters", found=len(pattern))
    try:
        tree = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsupportedError("not a regular expression", found=repr(pattern)[:80]) from error
    if tree.state.flags & ~re.UNICODE:
        raise _unknown(pattern)
    return tree


def _unknown(pattern: str) -> UnsupportedError:
    return UnsupportedError("the regular expression is not simple enough", found=repr(pattern)[:80])


def _through(nodes: Iterable[Any], text: str, starts: frozenset[int], depth: int, pattern: str) -> frozenset[int]:
    """All positions where a match of `nodes` that begins at one of `starts` can end."""
    if depth > _MAX_DEPTH:
        raise _unknown(pattern)
    for operation, argument in nodes:
        if not starts:
            break
        if operation in (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN):
            starts = frozenset(i + 1 for i in starts if i < len(text) and _accepts(operation, argument, text[i], pattern))
        elif operation is ops.AT:
            starts = frozenset(i for i in starts if _at(argument, i, text, pattern))
        elif operation is ops.SUBPATTERN and not argument[1] and not argument[2]:  # no flags of its own
            starts = _through(argument[3], text, starts, depth + 1, pattern)
        elif operation is ops.BRANCH:
            starts = frozenset().union(*(_through(branch, text, starts, depth + 1, pattern) for branch in argument[1]))
        elif operation in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            least, most, body = argument
            starts = _repeated(body, text, starts, depth + 1, pattern, least, most)
        else:
            raise _unknown(pattern)
    return starts


def _repeated(
    body: Any, text: str, starts: frozenset[int], depth: int, pattern: str, least: int, most: int
) -> frozenset[int]:
    """Positions after `least` to `most` matches of `body`. After len(text) + 1 matches nothing new can come."""
    bound = len(text) + 1
    now, reached = starts, starts if least == 0 else frozenset()
    for count in range(1, min(int(most), int(least) + bound) + 1):
        after = _through(body, text, now, depth, pattern)
        if count >= least:
            if after <= reached:
                break
            reached |= after
        if not after or after == now:
            reached |= after
            break
        now = after
    return reached


def _accepts(operation: Any, argument: Any, character: str, pattern: str) -> bool:
    if operation is ops.ANY:
        return character != "\n"
    if operation is not ops.IN:
        return (ord(character) == argument) == (operation is ops.LITERAL)
    negated = bool(argument) and argument[0][0] is ops.NEGATE
    return negated != any(_in_class(item, character, pattern) for item in argument[negated:])


_CATEGORIES = {
    ops.CATEGORY_DIGIT: str.isdecimal,
    ops.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    ops.CATEGORY_SPACE: str.isspace,
    ops.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    ops.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
    ops.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
}


def _in_class(item: Any, character: str, pattern: str) -> bool:
    kind, argument = item
    if kind is ops.LITERAL:
        return ord(character) == argument
    if kind is ops.RANGE:
        return argument[0] <= ord(character) <= argument[1]
    if kind is ops.CATEGORY and argument in _CATEGORIES:
        return bool(_CATEGORIES[argument](character))
    raise _unknown(pattern)


def _at(anchor: Any, position: int, text: str, pattern: str) -> bool:
    if anchor in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING):
        return position == 0
    if anchor in (ops.AT_END, ops.AT_END_STRING):
        end = position == len(text)
        return end or (anchor is ops.AT_END and position == len(text) - 1 and text[position] == "\n")
    raise _unknown(pattern)
