"""`enforceable`: a checked JSON schema as llguidance gets it, where llguidance alone would not enforce it exactly."""

import math
import re
from collections.abc import Mapping
from re import _constants as ops  # type: ignore[attr-defined]
from typing import Any

from minirt.errors import InputError, UnsupportedError
from minirt.modeling.patterns import parsed
from minirt.structured.schema import normalized, walk

_SET_OPERATION = re.compile(r"\[[^\]]*(?:&&|--|~~|\|\||\[)")  # of classes, which Python reads otherwise
_MAX_EXPANSION = 300_000  # texts that are made to find what "patternProperties" match


def enforceable(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy of a checked schema for llguidance 1.9, in which it enforces everything.

    It has the keywords of draft 2020-12 (see `normalized`). Others are replaced, because llguidance

    - accepts 0 for (0, 0.5]: it includes an exclusive bound that is an integer if the other bound has the same integer part. Such
      a bound becomes an inclusive one, moved inwards by about a billionth of the range;
    - accepts 29 February in every year, and host names and parts of email addresses that are too long: see `_PATTERNS`;
    - starts an additional property where only stated names match "patternProperties", and cannot go on. Such patterns become
      schemas of these properties.
    """
    result, expansion = normalized(schema), _Expansion()
    for _, part in walk(result):
        _include_bounds(part)
        _state_format(part)
        _state_properties(part, expansion)
    return result


def _include_bounds(schema: dict[str, Any]) -> None:
    """Change the exclusive bounds of one schema, see `enforceable`."""
    low = schema.get("exclusiveMinimum", schema.get("minimum", -math.inf))
    high = schema.get("exclusiveMaximum", schema.get("maximum", math.inf))
    if schema.get("type") in ("integer", ["integer"]) or not 0 < high - low < 1:
        return
    step = 10.0 ** (math.floor(math.log10(high - low)) - 9)
    if "exclusiveMinimum" in schema and low >= 0 and float(low).is_integer():
        schema["minimum"] = max(low + step, schema.get("minimum", -math.inf))
        del schema["exclusiveMinimum"]
    if "exclusiveMaximum" in schema and high <= 0 and float(high).is_integer():
        schema["maximum"] = min(high - step, schema.get("maximum", math.inf))
        del schema["exclusiveMaximum"]


_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"  # the years of Python's datetime
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = f"(?:{_YEAR}-(?:{_DAY})|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
# Formats for which llguidance accepts other texts, too: patterns that must all match, and the maximum length.
_PATTERNS: dict[str, tuple[tuple[str, ...], int | None]] = {
    "date": ((f"^{_DATE}$",), None), "time": ((f"^{_TIME}$",), None), "date-time": ((f"^{_DATE}T{_TIME}$",), None),
    "hostname": ((rf"^{_LABEL}(?:\.{_LABEL})*$",), 253),
    "email": ((rf"^{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})*$", "^[^@]{1,64}@"), 254),
}  # fmt: skip


def _state_format(schema: dict[str, Any]) -> None:
    """Replace a "format" by what it means, see `enforceable`."""
    patterns, longest = _PATTERNS.get(schema.get("format", ""), ((), None))
    if patterns:
        del schema["format"]
        schema["allOf"] = [*schema.get("allOf", ()), *({"pattern": pattern} for pattern in patterns)]
    if longest is not None:
        schema["maxLength"] = min(longest, schema.get("maxLength", longest))


def _state_properties(schema: dict[str, Any], expansion: "_Expansion") -> None:
    """Replace "patternProperties" that only match stated properties, see `enforceable`."""
    stated, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    if not patterns or schema.get("additionalProperties") is not False:
        return
    try:
        names = {pattern: expansion.names(pattern, stated) for pattern in patterns}
    except (UnsupportedError, _OtherNames):
        return
    del schema["patternProperties"]
    for name, part in stated.items():
        others = [patterns[pattern] for pattern, matched in names.items() if name in matched]
        stated[name] = {"allOf": [part, *others]} if others else part


class _OtherNames(Exception):
    """A pattern matches other names, too, or it is not simple."""


class _Expansion:
    """The texts that patterns match, where these are few. Bounds the work for all patterns of a schema together."""

    _BEGIN, _END = "\x00", "\x01"  # stand for the ends of a text; patterns with such characters are refused

    def __init__(self) -> None:
        self._work = 0

    def names(self, pattern: str, stated: Mapping[str, Any]) -> set[str]:
        """The stated names that a pattern matches, if it matches no others."""
        if _SET_OPERATION.search(pattern):
            raise _OtherNames
        texts = self._texts(parsed(pattern), 4 * sum(len(name) + 2 for name in stated))
        names = {text[1:-1] for text in texts if text.count(self._BEGIN) == text.count(self._END) == 1}  # others match nothing
        if not all(text[:1] == self._BEGIN and text[-1:] == self._END for text in texts) or not names <= stated.keys():
            raise _OtherNames
        return names

    def _texts(self, nodes: Any, limit: int) -> set[str]:
        """All texts that a part of a pattern matches, with marks for anchors. They have at most `limit` characters."""
        texts = {""}
        for operation, argument in nodes:
            texts = self._joined(texts, self._node(operation, argument, limit), limit)
        return texts

    def _node(self, operation: Any, argument: Any, limit: int) -> set[str]:
        if operation is ops.LITERAL:
            return {chr(argument)}
        if operation is ops.AT:
            return {self._BEGIN if argument in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING) else self._END}
        if operation is ops.SUBPATTERN:
            return self._texts(argument[3], limit)
        if operation is ops.BRANCH:
            return set().union(*(self._texts(branch, limit) for branch in argument[1]))
        if operation is ops.IN and all(kind in (ops.LITERAL, ops.RANGE) for kind, _ in argument):
            ranges = [value if kind is ops.RANGE else (value, value) for kind, value in argument]
            if sum(high - low + 1 for low, high in ranges) <= limit:
                return {chr(code) for low, high in ranges for code in range(low, high + 1)}
        elif operation in (ops.MAX_REPEAT, ops.MIN_REPEAT) and argument[1] <= limit:
            body, now, repeated = self._texts(argument[2], limit), {""}, set[str]()
            for count in range(argument[1] + 1):
                repeated |= now if count >= argument[0] else set()
                now = self._joined(now, body, limit) if count < argument[1] else now
            return repeated
        raise _OtherNames

    def _joined(self, first: set[str], second: set[str], limit: int) -> set[str]:
        """Each text of `first` with each of `second`."""
        if len(first) * len(second) > limit:
            raise _OtherNames
        self._work += len(first) * len(second)
        if self._work > _MAX_EXPANSION:
            what, hint = '"patternProperties" are too complex beside "additionalProperties": false', "simplify the patterns"
            raise InputError(what, hint=hint)
        texts = {before + after for before in first for after in second}
        if sum(map(len, texts)) > limit:
            raise _OtherNames
        return texts
