"""Streaming parsers of tool calls, one for each form in which models write them.

| format | a call |
|---|---|
| `hermes` | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Qwen2.5, Qwen3, Hermes |
| `qwen3_coder` | `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`: Qwen3-Coder, Qwen3.5 |
| `llama3_json` | `{"name": …, "parameters": {…}}` as the answer, or after `<|python_tag|>`; several with `;` between: Llama 3 |

Text before a marker is content. A call starts when its name is known and its arguments begin. What turns out to be no call before
that is content, with its markers. If the arguments are damaged later, the rest is content, and the arguments stay incomplete.
White space between content and calls is left out.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from minirt.errors import InputError
from minirt.text.json_checker import JsonChecker, escaped
from minirt.text.reply import (
    ArgumentsDelta,
    Calls,
    ContentDelta,
    Event,
    Parser,
    content,
    first_marker,
    held_length,
    json_text,
)
from minirt.text.tools import Tool, typed, types

_MORE, _DONE, _BAD = "more", "done", "bad"
_CALL_KEYS = ("name", "arguments", "parameters", "type", "id")
_ARGUMENT_KEYS = ("arguments", "parameters")
_MAX_NAME = 200


class _CallReader:
    """Reads one JSON object {"name": …, "arguments": {…}} from text in pieces; `parameters` is another name of `arguments`.

    Args:
        names: the functions that exist; None: any name. With names, an object that cannot be a call is given up at once.

    Attributes:
        consumed: the text that was read.
        started: whether the start of the call is among the events.
    """

    def __init__(self, calls: Calls, names: Collection[str] | None) -> None:
        self._calls, self._names = calls, names
        self.consumed, self.started = "", False
        self._json = JsonChecker()
        self._key: str | None = None  # whose value is read
        self._part: list[str] | None = None  # the characters of a key or a value of the call
        self._name: str | None = None
        self._arguments: str | None = None  # complete, but not sent
        self._streaming, self._out = False, ""

    def feed(self, text: str) -> tuple[list[Event], int, str]:
        """Read text. Returns events, the number of characters used, and whether the object needs more, is done, or is bad."""
        events: list[Event] = []
        status, used = _MORE, 0
        for character in text:
            status = self._push(character, events)
            if status is _BAD:
                break
            used += 1
            if status is _DONE:
                break
        self.consumed += text[:used]
        if self._out:
            events.append(self._calls.arguments(self._out))
            self._out = ""
        if status is _DONE and not self.started:
            status = self._whole(events)
        return events, used, status

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
            if self._streaming:
                self._out += shown
            else:
                self._part.append(shown)
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
        """Whether a key or a name that is not complete can still become one of a call."""
        if self._names is None or self._part is None or self._json.depth != 1 or not self._json.in_string:
            return True
        begun = "".join(self._part[1:])
        if "\\" in begun:
            return True
        if self._json.in_key:
            return any(key.startswith(begun) for key in _CALL_KEYS)
        return self._key != "name" or any(name.startswith(begun) for name in self._names)

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
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value


class _StatefulParser:
    """A parser whose states are methods: each returns events, or None if it needs more text."""

    def __init__(self, tools: Sequence[Tool], new_id: Callable[[], str] | None = None) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._calls = Calls(new_id) if new_id is not None else Calls()
        self._text = ""  # not used yet
        self._state: Callable[[], list[Event] | None]

    def feed(self, text: str) -> list[Event]:
        """See `Parser.feed`."""
        self._text += text
        events: list[Event] = []
        while (found := self._state()) is not None:
            events += found
        return _merged(events)

    def finish(self) -> list[Event]:
        """See `Parser.finish`."""
        events, self._text = self._rest(), ""
        return events

    def _rest(self) -> list[Event]:
        raise NotImplementedError

    def _content(self, markers: Sequence[str]) -> tuple[list[Event], str]:
        """Content up to the next marker. Returns events and the marker, which is then used up; "" if there is none yet.

        White space before a marker is left out; `_before` has it.
        """
        place, marker = first_marker(self._text, markers)
        end = place if marker else len(self._text) - held_length(self._text, markers)
        text = self._text[:end].rstrip()
        self._before = self._text[len(text) : end] + marker if marker else ""
        self._text = self._text[end + len(marker) :] if marker else self._text[len(text) :]
        return content(text), marker

    def _rest_of_content(self) -> list[Event]:
        return content(self._text) if self._text.strip() or not self._calls.count else []


class _JsonCallParser(_StatefulParser):
    """A parser of calls that are JSON objects among content."""

    _reader: _CallReader
    _before: str  # what stood before the call, in case it is none

    def _outside(self) -> list[Event] | None:
        """The state between calls."""
        raise NotImplementedError

    def _after_call(self) -> list[Event] | None:
        """The state at the end of a call."""
        raise NotImplementedError

    def _call(self) -> list[Event] | None:
        if not self._text:
            return None
        events, used, status = self._reader.feed(self._text)
        self._text = self._text[used:]
        if status is _MORE:
            return events
        self._state = self._after_call if status is _DONE else self._outside
        if status is _BAD and not self._reader.started:
            events += content(self._before + self._reader.consumed)
        return events


class HermesParser(_JsonCallParser):
    """Format `hermes`."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, tools: Sequence[Tool], new_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, new_id)
        self._state = self._outside

    def _outside(self) -> list[Event] | None:
        events, marker = self._content([self._OPEN])
        if marker:
            self._reader = _CallReader(self._calls, None)
            self._state = self._call
        return events if events or marker else None

    def _after_call(self) -> list[Event] | None:
        text = self._text.lstrip()
        if text.startswith(self._CLOSE):
            self._text = text[len(self._CLOSE) :]
        elif self._CLOSE.startswith(text):
            return None
        self._state = self._outside
        return []

    def _rest(self) -> list[Event]:
        if self._state == self._call and not self._reader.started:
            return content(self._before + self._reader.consumed)
        return self._rest_of_content() if self._state == self._outside else []


class Qwen3CoderParser(_StatefulParser):
    """Format `qwen3_coder`. Values are typed by the tools' JSON schemas; strings are streamed.

    Some models leave out `<tool_call>`; then the function has to be one of the tools.
    """

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"
    _FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"

    def __init__(self, tools: Sequence[Tool], new_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, new_id)
        self._state = self._outside
        self._name, self._key = "", ""
        self._raw = ""  # of a call that has not started
        self._bare, self._started, self._first = False, False, True

    def _outside(self) -> list[Event] | None:
        events, marker = self._content([self._OPEN, self._FUNCTION])
        if marker:
            self._raw, self._started, self._bare = self._before, False, marker == self._FUNCTION
            self._state = self._function_name if self._bare else self._opened
        return events if events or marker else None

    def _opened(self) -> list[Event] | None:
        return self._take((self._FUNCTION,), lambda marker: self._function_name)

    def _take(self, markers: tuple[str, ...], to: Callable[[str], Any]) -> list[Event] | None:
        """After white space one of `markers` must come; it is used up, and `to` says the next state. Else the call is no call."""
        text = self._text.lstrip()
        for marker in markers:
            if text.startswith(marker):
                self._use(len(self._text) - len(text) + len(marker))
                self._state = to(marker)
                return []
        return None if any(marker.startswith(text) for marker in markers) else self._give_up()

    def _use(self, length: int) -> str:
        used, self._text = self._text[:length], self._text[length:]
        if not self._started:
            self._raw += used
        return used

    def _give_up(self) -> list[Event]:
        """What comes now cannot belong to a call."""
        self._state = self._outside
        return [] if self._started else content(self._raw)

    def _word(self) -> str | None:
        """The name up to ">"; None if it is not complete; "" if it is none."""
        end = self._text.find(">")
        begun = self._text if end < 0 else self._text[:end]
        if len(begun) > _MAX_NAME or re.search(r'[<"\n]', begun):
            return ""
        if end < 0:
            return None
        self._use(end + 1)
        return begun.strip()

    def _function_name(self) -> list[Event] | None:
        if self._bare and not any(name.startswith(self._text.partition(">")[0].strip()) for name in self._tools):
            return self._give_up()
        name = self._word()
        if name is None:
            return None
        if not name or (self._bare and name not in self._tools):
            return self._give_up()
        self._name, self._first = name, True
        self._state = self._body
        return []

    def _body(self) -> list[Event] | None:
        states = {self._PARAMETER: self._parameter_name, self._FUNCTION_END: self._end}
        return self._take(tuple(states), states.__getitem__)

    def _start(self) -> list[Event]:
        if self._started:
            return []
        self._started = True
        return [self._calls.start(self._name)]

    def _parameter_name(self) -> list[Event] | None:
        key = self._word()
        if not key:
            return None if key is None else self._give_up()
        tool = self._tools.get(self._name)
        self._schema = tool.parameter(key) if tool is not None else None
        self._is_string = types(self._schema) in ((), ("string",))
        begun = ("{" if self._first else ", ") + json_text(key) + ": " + ('"' if self._is_string else "")
        start = self._start()
        self._first = False
        self._state = self._value_begins
        return [*start, self._calls.arguments(begun)]

    def _value_begins(self) -> list[Event] | None:
        if not self._text:
            return None
        self._text = self._text.removeprefix("\n")
        self._state = self._value
        return []

    def _value(self) -> list[Event] | None:
        """Up to the end of the value, without one newline before it."""
        end = self._text.find(self._PARAMETER_END)
        if end >= 0:
            value, self._text = self._text[:end].removesuffix("\n"), self._text[end + len(self._PARAMETER_END) :]
            self._state = self._body
            text = json_text(value)[1:] if self._is_string else json_text(typed(value, self._schema))
            return [self._calls.arguments(text)]
        if not self._is_string:
            return None
        length = len(self._text) - held_length(self._text, [self._PARAMETER_END, "\n" + self._PARAMETER_END])
        value, self._text = self._text[:length], self._text[length:]
        return [self._calls.arguments(json_text(value)[1:-1])] if value else None

    def _end(self) -> list[Event] | None:
        start = self._start()
        events = [*start, self._calls.arguments("{}" if self._first else "}")]
        self._state = self._outside if self._bare else self._after
        return events

    def _after(self) -> list[Event] | None:
        text = self._text.lstrip()
        if text.startswith(self._CLOSE):
            self._text = text[len(self._CLOSE) :]
        elif self._CLOSE.startswith(text):
            return None
        self._state = self._outside
        return []

    def _rest(self) -> list[Event]:
        if self._state == self._outside:
            return self._rest_of_content()
        if self._state == self._after:
            return []
        return content(self._text if self._started else self._raw + self._text)


class Llama3Parser(_JsonCallParser):
    """Format `llama3_json`. A JSON object is a call if the answer begins with it, and its name is that of a tool."""

    _TAG = "<|python_tag|>"

    def __init__(self, tools: Sequence[Tool], new_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, new_id)
        self._state = self._after_call
        self._before = ""

    def _after_call(self) -> list[Event] | None:
        """At the beginning, too: white space (and after a call also separators), then a call; or else content."""
        text = self._text.lstrip(" \t\r\n;," if self._calls.count else " \t\r\n")
        if self._TAG.startswith(text) and text != self._TAG:
            return None
        skipped = len(self._text) - len(text) + (len(self._TAG) if text.startswith(self._TAG) else 0)
        if not text.startswith(("{", self._TAG)):
            self._state = self._outside
            return []
        self._before, self._text = self._text[:skipped], self._text[skipped:]
        self._reader = _CallReader(self._calls, self._tools)
        self._state = self._call
        return []

    def _outside(self) -> list[Event] | None:
        events, marker = self._content([self._TAG])
        if marker:
            self._reader = _CallReader(self._calls, self._tools)
            self._state = self._call
        return events if events or marker else None

    def _rest(self) -> list[Event]:
        if self._state == self._call:
            return [] if self._reader.started else content(self._before + self._reader.consumed)
        separators = self._text.strip(" \t\r\n;,")
        return content(self._text) if separators or not self._calls.count else []


class CallListParser(_StatefulParser):
    """The answer to a `tool_choice` of "required": a JSON list of calls (see `tools.call_schema`)."""

    def __init__(self, tools: Sequence[Tool], new_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, new_id)
        self._state = self._beginning
        self._before = ""

    def _beginning(self) -> list[Event] | None:
        return self._separator("[", self._first)

    def _separator(self, wanted: str, next_state: Callable[[], list[Event] | None]) -> list[Event] | None:
        text = self._text.lstrip()
        if not text:
            return None
        if not text.startswith(tuple(wanted)):
            self._state = self._outside
            return []
        skipped = len(self._text) - len(text) + 1
        self._before += self._text[:skipped]
        self._state, self._text = self._outside if text[0] == "]" else next_state, self._text[skipped:]
        return []

    def _first(self) -> list[Event] | None:
        self._reader = _CallReader(self._calls, None)
        self._state = self._call
        return []

    def _call(self) -> list[Event] | None:
        if not self._text:
            return None
        events, used, status = self._reader.feed(self._text)
        self._text = self._text[used:]
        if status is _MORE:
            return events
        self._state = self._between if status is _DONE else self._outside
        if status is _BAD and not self._reader.started:
            events += content(self._before + self._reader.consumed)
        self._before = ""
        return events

    def _between(self) -> list[Event] | None:
        return self._separator(",]", self._first)

    def _outside(self) -> list[Event] | None:
        return self._content(())[0] or None

    def _rest(self) -> list[Event]:
        if self._state == self._call and not self._reader.started:
            return content(self._before + self._reader.consumed)
        return self._rest_of_content() if self._calls.count else content(self._before + self._text)


class NamedCallParser(_StatefulParser):
    """The answer to a `tool_choice` that names a function: a JSON object, its arguments."""

    def __init__(self, name: str, new_id: Callable[[], str] | None = None) -> None:
        super().__init__((), new_id)
        self._name, self._json = name, JsonChecker()
        self._state = self._beginning

    def _beginning(self) -> list[Event] | None:
        text = self._text.lstrip()
        if not text:
            return None
        if not text.startswith("{"):
            self._state = self._outside
            return []
        self._text, self._state = text, self._arguments
        return [self._calls.start(self._name)]

    def _arguments(self) -> list[Event] | None:
        used, shown = 0, ""
        for character in self._text:
            if self._json.done or not self._json.push(character):
                self._state = self._outside
                break
            shown += json_text(character)[1:-1] if character < " " and self._json.in_string else character
            used += 1
        self._text = self._text[used:]
        return [self._calls.arguments(shown)] if shown else None if self._state == self._arguments else []

    def _outside(self) -> list[Event] | None:
        return self._content(())[0] or None

    def _rest(self) -> list[Event]:
        return self._rest_of_content()


def _merged(events: list[Event]) -> list[Event]:
    """Join neighbouring deltas of one kind."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            joined[-1] = ContentDelta(last.text + event.text)
        elif isinstance(event, ArgumentsDelta) and isinstance(last, ArgumentsDelta) and event.index == last.index:
            joined[-1] = ArgumentsDelta(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined


FORMATS: dict[str, Callable[..., Parser]] = {
    "hermes": HermesParser,
    "qwen3_coder": Qwen3CoderParser,
    "qwen3_xml": Qwen3CoderParser,
    "llama3_json": Llama3Parser,
}
# What some tokenizers have as special tokens, which a decoder may leave out of the text.
MARKERS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "qwen3_xml": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
}


def detect_format(template: str | None) -> str | None:
    """The format of the tool calls that a chat template writes and asks for; None if it is none that is known."""
    if template is None:
        return None
    if "<function=" in template and "<parameter=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or ('"parameters": dictionary of argument name' in template):
        return "llama3_json"
    return None


def tool_call_parser(name: str, tools: Sequence[Tool]) -> Parser:
    """The parser of a format by its name.

    Raises:
        InputError: there is no such format.
    """
    if name not in FORMATS:
        raise InputError("no such format of tool calls", expected=", ".join(FORMATS), found=name)
    return FORMATS[name](tools)
