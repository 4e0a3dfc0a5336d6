"""Streaming parsers of tool calls, one for each form in which models write them.

| format | a call |
|---|---|
| `hermes` | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Qwen2.5, Qwen3, Hermes |
| `qwen3_coder` | `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`: Qwen3-Coder, Qwen3.5 |
| `llama3_json` | `{"name": …, "parameters": {…}}` as the answer, or after `<|python_tag|>`; several with `;` between: Llama 3 |
| `mistral` | `[TOOL_CALLS]NAME[ARGS]{…}`, or with `[CALL_ID]ID` before `[ARGS]`; `[TOOL_CALLS][{"name": …, "arguments": {…}}]` |

Text before a marker is content. A call starts when its name is known and its arguments begin. What turns out to be no call before
that is content, with its markers. If the arguments are damaged later, the rest is content, and the arguments stay incomplete.
White space between content and calls is left out. Arguments are passed on as the model wrote them, as far as they are JSON.
"""

import json
import re
import string
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

from minirt.text.json_checker import JsonChecker, escaped
from minirt.text.reply import (
    Calls,
    Event,
    Parser,
    StatefulParser,
    content,
    first_marker,
    held_length,
    is_unicode,
    json_text,
)
from minirt.text.tools import Tool, typed_json

_MORE, _DONE, _BAD = "more", "done", "bad"
_CALL_KEYS = ("name", "arguments", "parameters", "type", "id")
_ARGUMENT_KEYS = ("arguments", "parameters")
_MAX_NAME = 200
_WORD = re.compile(r"[\w.:/-]*", re.ASCII)
# After a parameter's value that is not closed: the tags that end its call.
_CALL_END = re.compile(r"(?:</function>\s{0,99})?(?:</tool_call>\s{0,99})?")


class _CallReader:
    """Reads one JSON object {"name": …, "arguments": {…}} from text in pieces; `parameters` is another name of `arguments`.

    Args:
        names: the functions that exist; None: any name. With names, an object that cannot be a call is given up at once.

    Attributes:
        started: whether the start of the call is among the events.
    """

    def __init__(self, calls: Calls, names: Collection[str] | None) -> None:
        self._calls, self._names = calls, names
        self.started = False
        self._consumed: list[str] = []  # until the call starts
        self._json = JsonChecker()
        self._key: str | None = None  # whose value is read
        self._part: list[str] | None = None  # the characters of a key or a value of the call
        self._name: str | None = None
        self._arguments: str | None = None  # complete, but not sent
        self._streaming, self._out = False, list[str]()

    @property
    def consumed(self) -> str:
        """The text that was read, if the call has not started."""
        return "".join(self._consumed)

    def feed(self, text: str, start: int) -> tuple[list[Event], int, str]:
        """Read text from `start` on. Returns events, where the read text ends, and the status."""
        events: list[Event] = []
        status, end = _MORE, start
        while status is _MORE and end < len(text):
            status = self._push(text[end], events)
            end += status is not _BAD
        if not self.started:
            self._consumed.append(text[start:end])
        if self._out:
            events.append(self._calls.arguments("".join(self._out)))
            self._out.clear()
        if status is _DONE and not self.started:
            status = self._whole(events)
        return events, end, status

    def _push(self, character: str, events: list[Event]) -> str:
        checker = self._json
        depth, was_scalar = checker.depth, bool(checker.scalar)
        if depth == 0 and not character.isspace() and character != "{":
            return _BAD
        if depth == 1 and was_scalar and character in ",} \t\n\r" and not self._complete():
            return _BAD
        if depth == 1 and checker.expects_item and not character.isspace() and character != "}":
            self._part = []
            if checker.expects_value and not self._value_begins(character, events):
                return _BAD
        if not checker.push(character):
            return _BAD
        if self._part is not None:
            shown = json_text(character)[1:-1] if character < " " and checker.in_string else character
            (self._out if self._streaming else self._part).append(shown)
            ended = checker.depth == 1 and not checker.in_string and not checker.scalar
            if (ended and not self._complete()) or not (ended or self._plausible()):
                return _BAD
        return _DONE if checker.done else _MORE

    def _value_begins(self, first: str, events: list[Event]) -> bool:
        """The value of `_key` begins. Starts the call if these are its arguments and its name is known."""
        if self._key in _ARGUMENT_KEYS:
            if self._arguments is not None or self.started:
                return False
            if first == "{" and self._name is not None:
                events.append(self._calls.start(self._name))
                self.started = self._streaming = True
        return self._key != "name" or (self._name is None and first == '"')

    def _complete(self) -> bool:
        """A key or a value is complete. Returns whether it can belong to a call."""
        text, self._part = "".join(self._part or []), None
        if self._json.expects_colon:
            self._key = _string(text)
            return self._key is not None and (self._names is None or self._key in _CALL_KEYS)
        if self._streaming:
            self._streaming = False
        elif self._key == "name":
            self._name = _string(text)
            return bool(self._name) and (self._names is None or self._name in self._names)
        elif self._key in _ARGUMENT_KEYS:
            self._arguments = text
        return True

    def _plausible(self) -> bool:
        """Whether a key or a name that is not complete can still become one of a call. Looks at few characters."""
        if self._names is None or self._part is None or self._json.depth != 1 or not self._json.in_string:
            return True
        if not self._json.in_key and self._key != "name":
            return True
        words = _CALL_KEYS if self._json.in_key else self._names
        if len(self._part) > 6 * max(map(len, words), default=0) + 1:  # also if each character is written as \uXXXX
            return False
        begun = "".join(self._part[1:])
        return "\\" in begun or any(word.startswith(begun) for word in words)

    def _whole(self, events: list[Event]) -> str:
        """The object is complete, and its arguments have not been sent."""
        arguments: str | None = "{}" if self._arguments in (None, "null") else self._arguments
        if arguments is not None and arguments.startswith('"'):  # some models write them as a string
            arguments = escaped(_string(arguments) or "")
        if self._name is None or arguments is None or not arguments.lstrip().startswith("{"):
            return _BAD
        events += [self._calls.start(self._name), self._calls.arguments(arguments)]
        self.started = True
        return _DONE


def _string(text: str) -> str | None:
    """The value of a JSON string that `JsonChecker` has accepted; None if it has a lone surrogate."""
    value = json.loads(text)
    return value if is_unicode(value) else None


class _CallParser(StatefulParser):
    """A parser of calls among content."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._tools, self._calls = {tool.name: tool for tool in tools}, Calls()
        self._pending: list[str] = []  # what seems to belong to a call that has not started, and is content if it is none

    def _outside(self) -> list[Event] | None:
        """The state between calls."""
        raise NotImplementedError

    def _content(self, markers: Sequence[str]) -> tuple[list[Event], str]:
        """Content up to the next marker. Returns events and the marker, which is pending then; "" if there is none yet.

        White space before a marker is pending, too.
        """
        text, marker = self._up_to(markers)
        shown = text.rstrip()
        events = content(self._take_space() + shown) if shown else []
        self._space.append(text[len(shown) :])
        if marker:
            self._use(len(marker))
        return events, marker

    def _use(self, length: int) -> None:
        """The next text, and the white space before it, belong to a call."""
        self._pending += [*self._space, self._text[self._at : self._at + length]]
        self._space.clear()
        self._at += length

    def _give_up(self) -> list[Event]:
        """What comes now cannot belong to a call."""
        self._state, pending, self._pending = self._outside, self._pending, []
        return content("".join(pending))

    def _begin_arguments(self, name: str) -> list[Event]:
        """A call begins whose arguments come next: a JSON object."""
        self._space.clear()
        self._pending, self._json, self._state = [], JsonChecker(), self._arguments
        return [self._calls.start(name)]

    def _arguments(self) -> list[Event] | None:
        shown = list[str]()
        while self._at < len(self._text):
            character = self._text[self._at]
            if self._json.done or not self._json.push(character):
                self._state = self._outside
                break
            shown.append(json_text(character)[1:-1] if character < " " and self._json.in_string else character)
            self._at += 1
        return [self._calls.arguments("".join(shown))] if shown else None if self._state == self._arguments else []

    def _rest_of_content(self) -> list[Event]:
        text = self._unused()
        return content(text) if text.strip() or not self._calls.count else []


class _JsonFormat(NamedTuple):
    """How calls that are JSON objects stand in a text.

    Args:
        opens: the markers among content before a call.
        begins: what the first call of a text without such a marker comes after, at its beginning; "{" if after nothing.
        follows: what comes between two calls; "{" if nothing does.
        ends: what comes after the last call.
        skipped: characters between two calls that mean as much as white space.
        checks_names: whether an object is a call only if it has the name of a tool.
    """

    opens: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()
    follows: tuple[str, ...] = ("{",)
    ends: tuple[str, ...] = ()
    skipped: str = ""
    checks_names: bool = False


class _JsonCallParser(_CallParser):
    """A parser of calls that are JSON objects among content. A JSON object without a name or arguments is content."""

    def __init__(self, form: _JsonFormat, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._form = form
        self._state = self._beginning if form.begins else self._outside

    def _beginning(self) -> list[Event] | None:
        return self._expect(self._form.begins)

    def _outside(self) -> list[Event] | None:
        events, marker = self._content(self._form.opens)
        if marker:
            self._begin_call()
        return events if events or marker else None

    def _after_call(self) -> list[Event] | None:
        return self._expect(self._form.follows, self._form.ends)

    def _expect(self, starts: tuple[str, ...], ends: tuple[str, ...] = ()) -> list[Event] | None:
        """What comes next: a call, after one of `starts`; one of `ends`; or content."""
        self._skip_space(self._form.skipped if self._calls.count else "")
        marker = self._next(*starts, *ends)
        if marker is None:
            return None
        if marker not in starts:
            self._state = self._outside
            if marker:
                self._at += len(marker)
                self._space.clear()
            return []
        self._use(0 if marker == "{" else len(marker))
        return self._begin_call()

    def _begin_call(self) -> list[Event]:
        self._reader, self._state = _CallReader(self._calls, self._tools if self._form.checks_names else None), self._call
        return []

    def _call(self) -> list[Event] | None:
        if self._at == len(self._text):
            return None
        events, self._at, status = self._reader.feed(self._text, self._at)
        if status is _MORE:
            return events
        self._state = self._after_call if status is _DONE else self._outside
        if status is _BAD and not self._reader.started:
            events += content("".join(self._pending) + self._reader.consumed)
        self._pending = []
        return events

    def _rest(self) -> list[Event]:
        if self._state == self._call:
            return [] if self._reader.started else content("".join(self._pending) + self._reader.consumed)
        if self._state == self._after_call and self._form.ends:
            return []
        text = "".join(self._pending) + self._unused()
        return content(text) if text.strip(string.whitespace + self._form.skipped).strip() or not self._calls.count else []


class MistralParser(_JsonCallParser):
    """Format `mistral`. A call is an object of a list, or a name before its arguments."""

    _ID, _ARGUMENTS = "[CALL_ID]", "[ARGS]"

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(_JsonFormat(opens=("[TOOL_CALLS]",), follows=(",",), ends=("]",)), tools)

    def _begin_call(self) -> list[Event]:
        if self._state != self._outside:
            return super()._begin_call()
        self._state, self._name = self._opened, ""
        return []

    def _opened(self) -> list[Event] | None:
        if self._next("[", "{") != "":
            return self._expect(("[", "{"))
        self._use(0)
        self._state = self._word
        return []

    def _word(self) -> list[Event] | None:
        """The name of a function, or the id after it, which is not used."""
        self._skip_space()
        word = _WORD.match(self._text, self._at)[0]  # type: ignore[index]  # it also matches no character
        if self._at + len(word) == len(self._text) and len(word) <= _MAX_NAME:
            return None
        self._use(len(word))
        self._name = self._name or word
        self._state = self._header
        return [] if word and len(word) <= _MAX_NAME else self._give_up()

    def _header(self) -> list[Event] | None:
        marker = self._next("{", self._ARGUMENTS, self._ID)
        if not marker:
            return None if marker is None else self._give_up()
        if marker == "{":
            return self._begin_arguments(self._name)
        self._use(len(marker))
        self._state = self._word if marker == self._ID else self._header
        return []


class CallListParser(_JsonCallParser):
    """The answer to a `tool_choice` of "required": a JSON list of calls (see `tools.call_schema`)."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(_JsonFormat(begins=("[",), follows=(",",), ends=("]",)), tools)


class NamedCallParser(_CallParser):
    """The answer to a `tool_choice` that names a function: a JSON object, its arguments."""

    def __init__(self, name: str) -> None:
        super().__init__(())
        self._name, self._state = name, self._beginning

    def _beginning(self) -> list[Event] | None:
        marker = self._next("{")
        if marker == "":
            self._state = self._outside
            return []
        return self._begin_arguments(self._name) if marker else None

    def _outside(self) -> list[Event] | None:
        return self._content(())[0] or None

    def _rest(self) -> list[Event]:
        return self._rest_of_content()


class Qwen3CoderParser(_CallParser):
    """Format `qwen3_coder`. Values are typed by the tools' JSON schemas; strings are streamed.

    Some models leave out `<tool_call>`; then the function has to be one of the tools. A tag may have several functions.

    Some leave out `</parameter>`, or `</function>` before `</tool_call>`. So two more tags end a value, unless it seems to quote
    them: `<parameter=KEY>` at the beginning of a line, if the tool has this parameter and the call does not have it yet; and
    `</function>` or `</tool_call>`, if no other text than the next call follows.
    """

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"
    _FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._state = self._outside
        self._name = ""
        self._value_parts: list[str] = []  # of a value that is no string
        self._types: tuple[str, ...] = ()
        self._absent = set[str]()  # parameters of the tool that the call does not have yet
        self._bare, self._started, self._first, self._final = False, False, True, False
        self._empty = True  # nothing of a value is used yet

    def finish(self) -> list[Event]:
        """See `Parser.finish`."""
        self._final = True
        return [*self.feed(""), *super().finish()]

    def _outside(self) -> list[Event] | None:
        self._started = False
        events, marker = self._content([self._OPEN, self._FUNCTION])
        if marker:
            self._bare = marker == self._FUNCTION
            self._state = self._function_name if self._bare else self._opened
        return events if events or marker else None

    def _opened(self) -> list[Event] | None:
        return self._take((self._FUNCTION,), lambda marker: self._function_name)

    def _take(self, markers: tuple[str, ...], to: Callable[[str], Any]) -> list[Event] | None:
        """After white space one of `markers` must come; it is used up, and `to` says the next state. Else the call is no call."""
        marker = self._next(*markers)
        if marker:
            self._use(len(marker))
            self._state = to(marker)
            return []
        return None if marker is None else self._give_up()

    def _use(self, length: int) -> None:
        super()._use(length)
        if self._started:
            self._pending.clear()

    def _begun(self) -> str:
        """The name that comes next, as far as it has come."""
        end = self._text.find(">", self._at, self._at + _MAX_NAME + 1)
        return self._text[self._at : end if end >= 0 else self._at + _MAX_NAME + 1]

    def _word(self) -> str | None:
        """The name up to ">"; None if it is not complete; "" if it is none."""
        begun = self._begun()
        if len(begun) > _MAX_NAME or re.search(r'[<"\n]', begun):
            return ""
        if self._at + len(begun) == len(self._text):
            return None
        self._use(len(begun) + 1)
        return begun.strip()

    def _function_name(self) -> list[Event] | None:
        if self._bare and not any(name.startswith(self._begun().strip()) for name in self._tools):
            return self._give_up()
        name = self._word()
        if name is None:
            return None
        if not name or (self._bare and name not in self._tools):
            return self._give_up()
        self._name, self._first = name, True
        properties = self._tools[name].parameters.get("properties") if name in self._tools else None
        self._absent = set(properties) if isinstance(properties, dict) else set()
        self._state = self._body
        return []

    def _body(self) -> list[Event] | None:
        states = {self._PARAMETER: self._parameter_name, self._FUNCTION_END: self._end, self._CLOSE: self._end_without_tag}
        return self._take(tuple(states), states.__getitem__)

    def _start(self) -> list[Event]:
        if self._started:
            return []
        self._started, self._pending = True, []
        return [self._calls.start(self._name)]

    def _parameter_name(self) -> list[Event] | None:
        key = self._word()
        if not key:
            return None if key is None else self._give_up()
        tool = self._tools.get(self._name)
        self._absent.discard(key)
        self._types = tool.types(key) if tool is not None else ()
        self._is_string = self._types in ((), ("string",))
        begun = ("{" if self._first else ", ") + json_text(key) + ": " + ('"' if self._is_string else "")
        start = self._start()
        self._first = False
        self._state = self._value_begins
        return [*start, self._calls.arguments(begun)]

    def _value_begins(self) -> list[Event] | None:
        if self._at == len(self._text):
            return None
        self._at += self._text[self._at] == "\n"
        self._state, self._empty = self._value, True
        return []

    def _value(self) -> list[Event] | None:
        """Up to the end of the value, without one newline before it."""
        tags = (self._PARAMETER_END, self._PARAMETER, self._FUNCTION_END, self._CLOSE)
        place, tag = first_marker(self._text, tags, self._at)
        while tag and (ends := self._ends_value(place, tag)) is False:
            place, tag = first_marker(self._text, tags, place + len(tag))
        done = bool(tag and ends)
        if not tag:
            place = len(self._text) - held_length(self._text, [*tags, *("\n" + tag for tag in tags)], self._at)
        elif place > self._at and self._text[place - 1] == "\n":
            place -= 1
        piece, self._at = self._text[self._at : place], place
        if done:
            self._at += (self._text[place] == "\n") + (len(tag) if tag == self._PARAMETER_END else 0)
            self._state = self._body
        elif not piece:
            return None
        self._empty = False
        if self._is_string:
            return [self._calls.arguments(json_text(piece)[1 : None if done else -1])]
        self._value_parts.append(piece)
        if not done:
            return []
        value = "".join(self._value_parts)
        self._value_parts.clear()
        return [self._calls.arguments(typed_json(value, self._types))]

    def _ends_value(self, place: int, tag: str) -> bool | None:
        """Whether a tag at `place` ends the value; None if more text is needed to know."""
        if tag == self._PARAMETER_END:
            return True
        if tag == self._PARAMETER:
            start = place + len(tag)
            end = self._text.find(">", start, start + _MAX_NAME)
            begun = self._text[start : end if end >= 0 else start + _MAX_NAME]
            if not (self._empty if place == self._at else self._text[place - 1] == "\n"):
                return False
            if end >= 0:
                return begun in self._absent
            return None if not self._final and any(name.startswith(begun) for name in self._absent) else False
        end = _CALL_END.match(self._text, place).end()  # type: ignore[union-attr]  # it matches `tag`
        following = self._text[end : end + len(self._CLOSE)]
        if following.startswith((self._OPEN, self._FUNCTION)):
            return True
        if not any(marker.startswith(following) for marker in (self._CLOSE[:-1], self._OPEN, self._FUNCTION)):
            return False
        return self._final or None

    def _end(self) -> list[Event] | None:
        start = self._start()
        events = [*start, self._calls.arguments("{}" if self._first else "}")]
        self._state = self._after
        return events

    def _end_without_tag(self) -> list[Event] | None:
        events = self._end()
        self._state = self._outside
        return events

    def _after(self) -> list[Event] | None:
        marker = self._next(self._CLOSE) if self._bare else self._next(self._CLOSE, self._FUNCTION)
        if marker is None:
            return None
        self._state = self._outside
        if marker == self._FUNCTION:
            self._started, self._state = False, self._function_name
        if marker:
            self._use(len(marker))
        return []

    def _rest(self) -> list[Event]:
        if self._state == self._outside:
            return self._rest_of_content()
        if self._state == self._after:
            return []
        text = "".join(self._value_parts) + self._unused()
        if not self._started:
            return content("".join(self._pending) + text)
        return content(text) if text.strip() else []


class Format(NamedTuple):
    """A form in which models write calls.

    Args:
        parser: makes the parser of an answer for a request's tools.
        markers: what some tokenizers have as special tokens, which a decoder may leave out of the text.
        end_reasoning: how calls begin, if models may call a tool without closing their reasoning first (Qwen3.5).
    """

    parser: Callable[[Sequence[Tool]], Parser]
    markers: tuple[str, ...]
    end_reasoning: tuple[str, ...] = ()


_TAGS, _PYTHON = ("<tool_call>", "</tool_call>"), "<|python_tag|>"
_HERMES = _JsonFormat(opens=_TAGS[:1], ends=_TAGS[1:])  # a tag may have several objects
# A JSON object is a call if the answer begins with it.
_LLAMA3 = _JsonFormat(opens=(_PYTHON,), begins=("{", _PYTHON), follows=("{", _PYTHON), skipped=";,", checks_names=True)
_QWEN3_CODER = Format(Qwen3CoderParser, _TAGS, ("<tool_call>\n<function=", "<tool_call><function="))
FORMATS = {
    "hermes": Format(partial(_JsonCallParser, _HERMES), _TAGS),
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "llama3_json": Format(partial(_JsonCallParser, _LLAMA3), (_PYTHON,)),
    "mistral": Format(MistralParser, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
}
# Signs of formats that no parser here reads, though they share markers with one: GLM 4.5, Hunyuan, Seed-OSS, Functionary.
_OTHER_FORMATS = ("<arg_key>", "<tool_calls>", ":tool_call>", "<|recipient|>", ">>>")


def detect_format(template: str | None) -> str | None:
    """The format of the tool calls that a chat template writes and asks for; None if it is none that is known."""
    if template is None or any(sign in template for sign in _OTHER_FORMATS):
        return None
    if "<function=" in template:  # with JSON after it, and without parameters: Functionary, and custom functions of Llama 3.1
        return "qwen3_coder" if "<parameter=" in template else None
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or ('"parameters": dictionary of argument name' in template):
        return "llama3_json"
    return "mistral" if "[TOOL_CALLS]" in template else None
