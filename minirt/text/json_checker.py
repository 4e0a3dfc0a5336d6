"""`JsonChecker`: checks a JSON text one character at a time, so that it can be passed on while it arrives."""

import json
import re
from typing import Any

_SPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-?((0|[1-9][0-9]*)((\.[0-9]*)?|(\.[0-9]+)?[eE][+-]?[0-9]*))?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LITERALS = ("true", "false", "null")
_CLOSING = {"{": "}", "[": "]"}
_MAX_DEPTH = 200
_MAX_SCALAR = 500  # characters of a number

_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END, _COLON, _AFTER = range(6)
_ENDS = (_AFTER, _VALUE_OR_END, _KEY_OR_END)  # where a bracket may close
_EXPECTED = {_VALUE: "value", _VALUE_OR_END: "value", _KEY: "key", _KEY_OR_END: "key", _COLON: "colon"}


class JsonChecker:
    """Checks one JSON value. Control characters in strings are accepted: models write line breaks in them.

    Attributes:
        in_string: inside a string, which is a key if `in_key`.
        scalar: the characters so far of a number, true, false or null. It ends at the character after it.
        closing: the brackets that close those that are open.
    """

    def __init__(self) -> None:
        self._state, self.closing = _VALUE, ""
        self.in_string, self.in_key, self.scalar = False, False, ""
        self._escaped, self._hex = False, 0

    @property
    def depth(self) -> int:
        """The number of brackets that are open."""
        return len(self.closing)

    @property
    def done(self) -> bool:
        """Whether a whole value has been read. A scalar at the top never is."""
        return not self.closing and self._state == _AFTER

    @property
    def complete(self) -> bool:
        """Whether the text so far and `closing` are a value."""
        return not self.in_string and not self.scalar and self._state in _ENDS

    @property
    def expects(self) -> str:
        """What comes next: "key", "colon" or "value"; "": a string or a scalar goes on, or nothing of these comes."""
        return "" if self.in_string or self.scalar else _EXPECTED.get(self._state, "")

    def push(self, character: str) -> bool:
        """Add a character. Returns False if it cannot be there; the checker is of no use afterwards."""
        if self.in_string:
            return self._in_string(character)
        if self.scalar:
            if character not in ",]}" + _SPACE:
                self.scalar += character
                return self._scalar_begun()
            if not (self.scalar in _LITERALS or _NUMBER.fullmatch(self.scalar)):
                return False
            self.scalar, self._state = "", _AFTER
        if character in _SPACE:
            return True
        return self._structure(character)

    def _structure(self, character: str) -> bool:
        state, closing = self._state, self.closing
        if character in ("]", "}"):
            self.closing, self._state = closing[1:], _AFTER
            return character == closing[:1] and state in _ENDS
        if state == _COLON:
            self._state = _VALUE
            return character == ":"
        if state == _AFTER:
            self._state = _KEY if closing[:1] == "}" else _VALUE
            return character == "," and closing != ""
        if character == '"':
            self.in_string, self.in_key = True, state in (_KEY, _KEY_OR_END)
            return True
        if state in (_KEY, _KEY_OR_END):
            return False
        if character in _CLOSING:
            self.closing = _CLOSING[character] + closing
            self._state = _KEY_OR_END if character == "{" else _VALUE_OR_END
            return self.depth <= _MAX_DEPTH
        self.scalar = character
        return self._scalar_begun()

    def _in_string(self, character: str) -> bool:
        if self._hex:
            self._hex -= 1
            return character in "0123456789abcdefABCDEF"
        if self._escaped:
            self._escaped = False
            self._hex = 4 if character == "u" else 0
            return character in '"\\/bfnrtu'
        if character == "\\":
            self._escaped = True
        elif character == '"':
            self.in_string = False
            self._state = _COLON if self.in_key else _AFTER
        return True

    def _scalar_begun(self) -> bool:
        begun = self.scalar
        known = any(literal.startswith(begun) for literal in _LITERALS)
        return known or (len(begun) <= _MAX_SCALAR and _NUMBER_BEGUN.fullmatch(begun) is not None)


def escaped(text: str) -> str | None:
    """A JSON object, list or string with the control characters in its strings escaped; None if `text` is none of these."""
    kept, _, is_whole = _complete_part(text.strip())
    return kept if is_whole else None


def completed(text: str) -> str:
    """A JSON object as far as it has come, with the control characters in its strings escaped.

    A value that is not complete is left out, with its key. So is a number, true, false or null at the end of the text, since it
    could go on. A text that does not begin like an object becomes {}.
    """
    kept, closing, _ = _complete_part(text.lstrip())
    return kept + closing if kept.startswith("{") else "{}"


def _complete_part(text: str) -> tuple[str, str, bool]:
    """The beginning of a text up to the end of its last complete value, the brackets that close it, and whether it is all."""
    checker, characters, end, closing = JsonChecker(), list[str](), 0, ""
    for character in text:
        separates = character == "," and not checker.in_string  # a number before it is complete now
        if checker.done or not checker.push(character):
            return "".join(characters[:end]), closing, False
        if separates:
            end, closing = len(characters), checker.closing
        characters.append(shown(character, checker))
        if checker.complete:
            end, closing = len(characters), checker.closing
    return "".join(characters[:end]), closing, checker.done


def shown(character: str, checker: JsonChecker) -> str:
    """A character that `checker` has just accepted, escaped if it must not stand in a string as it is."""
    return json.dumps(character)[1:-1] if character < " " and checker.in_string else character


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold a text: it has no half of a surrogate pair."""
    return text.isascii() or _SURROGATE.search(text) is None


def json_text(value: Any) -> str:
    """A value as JSON, with non-ASCII characters as they are. Halves of surrogate pairs, which UTF-8 lacks, are escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() else _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)
