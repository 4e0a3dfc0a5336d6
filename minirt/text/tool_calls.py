"""Streaming parsers of tool calls, one for each form in which models write them.

| format | a call |
|---|---|
| `hermes` | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Qwen2.5, Qwen3, Hermes |
| `qwen3_coder` | `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`: Qwen3-Coder, Qwen3.5 |
| `llama3_json` | `{"name": …, "parameters": {…}}` as the answer, or after `<|python_tag|>`; several with `;` between: Llama 3 |
| `muse_glimmer` | `<atem:function_calls><atem:invoke name="NAME"><atem:parameter name="KEY">VALUE…`: Muse-Glimmer |
| `harmony` | `<|channel|>commentary to=functions.NAME<|message|>{…}<|call|>`: gpt-oss |
| `mistral` | `[TOOL_CALLS]NAME[ARGS]{…}`, or with `[CALL_ID]ID` before `[ARGS]`; `[TOOL_CALLS][{"name": …, "arguments": {…}}]` |

Text before a marker is content. A call starts when its name is known and its arguments begin. What turns out to be no call before
that is content, with its markers. If the arguments are damaged later, the rest is content, and the arguments stay incomplete.
White space between content and calls is left out. Arguments are passed on as the model wrote them, as far as they are JSON.
"""

import json
import re
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from minirt.text.addressed import ADDRESSED
from minirt.text.harmony import HARMONY, MARKERS, HarmonyParser, is_harmony
from minirt.text.json_checker import JsonChecker, escaped, is_unicode, json_text, shown
from minirt.text.reply import Calls, Event, Parser, State, StatefulParser, content, first_marker, held_length
from minirt.text.tools import Tool, typed_json

_CALL_KEYS = ("name", "arguments", "parameters", "type", "id")
_ARGUMENT_KEYS = ("arguments", "parameters")
_MAX_NAME = 200
_WORD = re.compile(rf"[\w.:/-]{{0,{_MAX_NAME}}}", re.ASCII)  # a name in Mistral's format
_TAG_NAME = re.compile(rf'[^<>"\n]{{0,{_MAX_NAME}}}')  # a name in a tag of Qwen3-Coder


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
        self._json = JsonChecker()
        self._key: str | None = None  # whose value is read
        self._part: list[str] | None = None  # the characters of a key, or of a value that is a string, a list or an object
        self._name: str | None = None
        self._arguments: str | None = None  # complete, but not sent
        self._streams = False  # whether `_part` belongs to arguments that are sent as they come

    def feed(self, text: str, start: int) -> tuple[list[Event], int, bool | None]:
        """Read text from `start` on. Returns events, where the read text ends, and whether it is a call; None if it goes on."""
        events: list[Event] = []
        is_call, end = None, start
        while is_call is None and end < len(text):
            is_call = self._push(text[end], events)
            end += is_call is not False
        if self._streams and self._part:
            events.append(self._calls.arguments("".join(self._part)))
            self._part.clear()
        if is_call and not self.started:
            is_call = self._whole(events)
        return events, end, is_call

    def _push(self, character: str, events: list[Event]) -> bool | None:
        """Add a character; see `feed`."""
        checker, depth = self._json, self._json.depth
        if depth == 0 and not character.isspace() and character != "{":
            return False
        item = checker.expects if depth == 1 else ""
        if item in ("key", "value") and not character.isspace() and character != "}":
            if item == "value" and not self._value_begins(character, events):
                return False
            self._part = [] if character in '"[{' else None
        if not checker.push(character):
            return False
        if self._part is not None:
            self._part.append(character if character >= " " else shown(character, checker))
            ended = checker.depth == 1 and not checker.in_string
            if not (self._complete(events) if ended else self._streams or self._plausible(self._part)):
                return False
        return True if checker.done else None

    def _value_begins(self, first: str, events: list[Event]) -> bool:
        """The value of `_key` begins. Starts the call if these are its arguments and its name is known."""
        if self._key in _ARGUMENT_KEYS:
            if self._arguments is not None or self.started or first not in '{"n':
                return False
            if first == "{" and self._name is not None:
                events.append(self._calls.start(self._name))
                self.started = self._streams = True
            elif first == "n":  # null
                self._arguments = "{}"
        return self._key != "name" or (self._name is None and first == '"')

    def _complete(self, events: list[Event]) -> bool:
        """A key or a value is complete. Returns whether it can belong to a call."""
        text, self._part = "".join(self._part or []), None
        if self._json.expects == "colon":
            self._key = _string(text)
            return self._key is not None and (self._names is None or self._key in _CALL_KEYS)
        if self._streams:
            self._streams = False
            events.append(self._calls.arguments(text))
        elif self._key == "name":
            self._name = _string(text)
            return bool(self._name) and (self._names is None or self._name in self._names)
        elif self._key in _ARGUMENT_KEYS:
            self._arguments = text
        return True

    def _plausible(self, part: Sequence[str]) -> bool:
        """Whether a key or a name that is not complete can still become one of a call. Looks at few characters."""
        checker = self._json
        if self._names is None or checker.depth != 1 or not (checker.in_key or self._key == "name"):
            return True
        words = _CALL_KEYS if checker.in_key else self._names
        if len(part) > 6 * max(map(len, words), default=0) + 1:  # also if each character is written as \uXXXX
            return False
        begun = "".join(part[1:])
        return "\\" in begun or any(word.startswith(begun) for word in words)

    def _whole(self, events: list[Event]) -> bool:
        """The object is complete, and its arguments have not been sent. Returns whether it is a call."""
        arguments = self._arguments or "{}"
        if arguments.startswith('"'):  # some models write them as a string
            arguments = escaped(_string(arguments) or "") or ""
        if self._name is None or not arguments.startswith("{"):
            return False
        events += [self._calls.start(self._name), self._calls.arguments(arguments)]
        self.started = True
        return True


def _string(text: str) -> str | None:
    """The value of a JSON string that `JsonChecker` has accepted; None if it has a lone surrogate."""
    value = json.loads(text)
    return value if is_unicode(value) else None


class _CallParser(StatefulParser):
    """A parser of calls among content."""

    _stays: tuple[str, ...] = ("{",)  # markers with which the next state begins
    _skipped = ""  # characters between two calls that mean as much as white space

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._tools, self._calls = {tool.name: tool for tool in tools}, Calls()
        self._opens: Mapping[str, State] = {}  # the markers among content before a call, and the states after them
        self._pending: list[str] = []  # what seems to belong to a call that has not started, and is content if it is none
        self._started = False

    def _outside(self) -> list[Event] | None:
        """The state between calls. White space before a marker is pending, as is the marker."""
        self._started = False
        text, marker = self._up_to(tuple(self._opens))
        before = text.rstrip()
        events = content(self._take_space() + before) if before else []
        self._space.append(text[len(before) :])
        if marker:
            self._use(len(marker))
            self._state = self._opens[marker]
        return events if events or marker else None

    def _use(self, length: int) -> None:
        """The next text, and the white space before it, belong to a call."""
        if not self._started:
            self._pending += [*self._space, self._text[self._at : self._at + length]]
        self._space.clear()
        self._at += length

    def _take(self, states: Mapping[str, State], ends: Sequence[str] = ()) -> list[Event] | None:
        """After white space one of these markers must come, which leads to its state, or one that `ends` calls.

        Else what is pending is content.
        """
        marker = self._next(*states, *ends)
        if not marker:
            return None if marker is None else self._give_up()
        if marker in ends:
            self._at += len(marker)
            self._space.clear()
        else:
            self._use(0 if marker in self._stays else len(marker))
        self._state = states.get(marker, self._outside)
        return []

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
        part = list[str]()
        while self._at < len(self._text):
            character = self._text[self._at]
            if self._json.done or not self._json.push(character):
                self._state = self._outside
                break
            part.append(character if character >= " " else shown(character, self._json))
            self._at += 1
        return [self._calls.arguments("".join(part))] if part else None if self._state == self._arguments else []

    def _rest(self) -> list[Event]:
        text = "".join(self._pending) + self._unused()
        return content(text) if text.strip(string.whitespace + self._skipped).strip() or not self._calls.count else []


class _JsonCallParser(_CallParser):
    """A parser of calls that are JSON objects among content. A JSON object without a name or arguments is content.

    Args:
        opens: the markers among content before a call.
        begins: what the first call of a text without such a marker comes after, at its beginning; "{" if after nothing.
        follows: what comes between two calls; "{" if nothing does.
        ends: what comes after the last call.
        skipped: characters between two calls that mean as much as white space.
        checks_names: whether an object is a call only if it has the name of a tool.
    """

    def __init__(
        self, tools: Sequence[Tool], *, opens: Sequence[str] = (), begins: Sequence[str] = (), follows: Sequence[str] = ("{",),
        ends: Sequence[str] = (), skipped: str = "", checks_names: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(tools)
        self._opens, self._begins, self._follows = (dict.fromkeys(m, self._begin_call) for m in (opens, begins, follows))
        self._ends, self._skipped, self._names = ends, skipped, self._tools if checks_names else None
        self._state: State = self._beginning if begins else self._outside

    def _beginning(self) -> list[Event] | None:
        return self._take(self._begins)

    def _after_call(self) -> list[Event] | None:
        self._started = False
        self._skip_space(self._skipped)
        return self._take(self._follows, self._ends)

    def _begin_call(self) -> list[Event]:
        self._reader, self._state = _CallReader(self._calls, self._names), self._call
        return []

    def _call(self) -> list[Event] | None:
        if self._at == len(self._text):
            return None
        events, end, is_call = self._reader.feed(self._text, self._at)
        self._use(end - self._at)
        self._started = self._reader.started
        if self._started:
            self._pending.clear()
        if is_call is not None:
            self._state = self._after_call if is_call else self._outside
            events += [] if self._started else self._give_up()
        return events

    def _rest(self) -> list[Event]:
        return [] if self._ends and self._state == self._after_call else super()._rest()


class MistralParser(_JsonCallParser):
    """Format `mistral`. A call is an object of a list, or a name before its arguments."""

    _ID, _ARGUMENTS = "[CALL_ID]", "[ARGS]"

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools, follows=(",",), ends=("]",))
        self._opens = {"[TOOL_CALLS]": self._opened}

    def _opened(self) -> list[Event] | None:
        if self._next("[", "{") != "":
            return self._take(dict.fromkeys(("[", "{"), self._begin_call))
        self._use(0)
        self._state, self._name = self._word, ""
        return []

    def _word(self) -> list[Event] | None:
        """The name of a function, or the id after it, which is not used."""
        self._skip_space()
        word = _WORD.match(self._text, self._at)[0]  # type: ignore[index]  # it also matches no character
        if self._at + len(word) == len(self._text):
            return None
        self._use(len(word))
        self._name = self._name or word
        self._state = self._header
        return [] if word else self._give_up()

    def _header(self) -> list[Event] | None:
        return self._take({"{": partial(self._begin_arguments, self._name), self._ARGUMENTS: self._header, self._ID: self._word})


# The answer to a `tool_choice` of "required": a JSON list of calls (see `tools.call_schema`).
CallListParser = partial(_JsonCallParser, begins=("[",), follows=(",",), ends=("]",))


class NamedCallParser(_CallParser):
    """The answer to a `tool_choice` that names a function: a JSON object, its arguments."""

    def __init__(self, name: str) -> None:
        super().__init__(())
        self._name, self._state = name, self._beginning

    def _beginning(self) -> list[Event] | None:
        return self._take({"{": partial(self._begin_arguments, self._name)})


class Qwen3CoderParser(_CallParser):
    """Format `qwen3_coder`. Values are typed by the tools' JSON schemas; strings are streamed.

    Some models leave out `<tool_call>`; then the function has to be one of the tools. A tag may have several functions.

    Some leave out `</parameter>`, or `</function>` before `</tool_call>`. So two more tags end a value, unless it seems to quote
    them: `<parameter=KEY>` at the beginning of a line, if the tool has this parameter and the call does not have it yet; and
    `</function>` or `</tool_call>`, if no other text than the next call follows.
    """

    _OPEN, _CLOSE, _FUNCTION, _FUNCTION_END = "<tool_call>", "</tool_call>", "<function=", "</function>"
    _PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
    _NAME_END, _AROUND = ">", "\n"  # what ends a name in a tag; a character that may stand around a value

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._opens = {self._OPEN: self._opened, self._FUNCTION: self._bare_function}
        self._stays = ("{", self._CLOSE)
        # After a parameter's value that is not closed: the tags that end its call.
        self._call_end = re.compile(rf"(?:{self._FUNCTION_END}\s{{0,99}})?(?:{self._CLOSE}\s{{0,99}})?")
        self._state: State = self._outside
        self._bare, self._final = False, False  # whether the call has no opening tag; whether the text has ended

    def finish(self) -> list[Event]:
        """See `Parser.finish`."""
        self._final = True
        return [*self.feed(""), *super().finish()]

    def _opened(self) -> list[Event] | None:
        self._bare = False
        return self._take({self._FUNCTION: self._function_name})

    def _bare_function(self) -> list[Event] | None:
        self._bare = True
        return self._function_name()

    def _begun(self) -> str:
        """The name that comes next, as far as it has come."""
        return _TAG_NAME.match(self._text, self._at)[0]  # type: ignore[index]  # it also matches no character

    def _tag_name(self) -> str | None:
        """The name up to `_NAME_END`; None if it is not complete; "" if it is none."""
        begun = self._begun()
        end = self._at + len(begun)
        following = self._text[end : end + len(self._NAME_END)]
        if following != self._NAME_END:
            return None if self._NAME_END.startswith(following) else ""
        self._use(len(begun) + len(following))
        return begun.strip()

    def _function_name(self) -> list[Event] | None:
        if self._bare and not any(name.startswith(self._begun().strip()) for name in self._tools):
            return self._give_up()
        name = self._tag_name()
        if not name or (self._bare and name not in self._tools):
            return None if name is None else self._give_up()
        properties = self._tools[name].parameters.get("properties") if name in self._tools else None
        self._name = name
        # The parameters of the tool that the call does not have yet.
        self._absent: set[str] = set(properties) if isinstance(properties, dict) else set()
        self._state = self._body
        return []

    def _body(self) -> list[Event] | None:
        return self._take({self._PARAMETER: self._parameter_name, self._FUNCTION_END: self._end, self._CLOSE: self._end})

    def _append(self, first: str, later: str) -> list[Event]:
        """Events of arguments: `first` if the call begins with them, else `later`."""
        if self._started:
            return [self._calls.arguments(later)]
        self._started, self._pending = True, []
        return [self._calls.start(self._name), self._calls.arguments(first)]

    def _parameter_name(self) -> list[Event] | None:
        key = self._tag_name()
        if not key:
            return None if key is None else self._give_up()
        tool = self._tools.get(self._name)
        self._absent.discard(key)
        self._types: Sequence[str] = tool.types(key) if tool is not None else ()
        self._is_string = self._types in ((), ("string",))
        begun = json_text(key) + ": " + ('"' if self._is_string else "")
        self._state = self._value_begins
        return self._append("{" + begun, ", " + begun)

    def _value_begins(self) -> list[Event] | None:
        if self._at == len(self._text):
            return None
        self._at += self._text[self._at] == self._AROUND
        self._state, self._new_line = self._value, True  # whether the text that is used ends a line
        return []

    def _value(self) -> list[Event] | None:
        """Up to the end of the value, without one newline before it."""
        tags = (self._PARAMETER_END, self._PARAMETER, self._FUNCTION_END, self._CLOSE)
        place, tag = first_marker(self._text, tags, self._at)
        while tag and (ends := self._ends_value(place, tag)) is False:
            place, tag = first_marker(self._text, tags, place + len(tag))
        done = bool(tag and ends)
        if not tag:
            place = len(self._text) - held_length(self._text, [*tags, *(self._AROUND + tag for tag in tags)], self._at)
        elif place > self._at and self._text[place - 1] == self._AROUND:
            place -= 1
        piece, self._at = self._text[self._at : place], place
        if done:
            self._at += (self._text[place] == self._AROUND) + (len(tag) if tag == self._PARAMETER_END else 0)
            self._state = self._body
        elif not piece:
            return None
        self._new_line = piece.endswith("\n")
        if self._is_string:
            return [self._calls.arguments(json_text(piece)[1 : None if done else -1])]
        self._pending.append(piece)
        if not done:
            return []
        value, self._pending = "".join(self._pending), []
        return [self._calls.arguments(typed_json(value, self._types))]

    def _ends_value(self, place: int, tag: str) -> bool | None:
        """Whether a tag at `place` ends the value; None if more text is needed to know."""
        if tag == self._PARAMETER_END:
            return True
        if tag == self._PARAMETER:
            start = place + len(tag)
            end = self._text.find(self._NAME_END, start, start + _MAX_NAME)
            begun = self._text[start : end if end >= 0 else start + _MAX_NAME]
            if not (self._new_line if place == self._at else self._text[place - 1] == "\n"):
                return False
            if end >= 0:
                return begun in self._absent
            begun = begun[: len(begun) - held_length(begun, [self._NAME_END])]
            return None if not self._final and any(name.startswith(begun) for name in self._absent) else False
        end = self._call_end.match(self._text, place).end()  # type: ignore[union-attr]  # it matches `tag`
        following = self._text[end : end + len(self._CLOSE)]
        if following.startswith((self._OPEN, self._FUNCTION)):
            return True
        if not any(marker.startswith(following) for marker in (self._CLOSE[:-1], self._OPEN, self._FUNCTION)):
            return False
        return self._final or None

    def _end(self) -> list[Event] | None:
        self._state = self._after_call
        return self._append("{}", "}")

    def _after_call(self) -> list[Event] | None:
        self._started = False
        return self._take({} if self._bare else {self._FUNCTION: self._function_name}, (self._CLOSE,))

    def _rest(self) -> list[Event]:
        return [] if self._state == self._after_call else super()._rest()


class MuseGlimmerParser(Qwen3CoderParser):
    """Format `muse_glimmer`: `qwen3_coder` with other tags. White space around a value belongs to it."""

    _OPEN, _CLOSE, _FUNCTION = "<atem:function_calls>", "</atem:function_calls>", '<atem:invoke name="'
    _FUNCTION_END, _PARAMETER, _PARAMETER_END = "</atem:invoke>", '<atem:parameter name="', "</atem:parameter>"
    _NAME_END, _AROUND = '">', ""


class Format(NamedTuple):
    """A form in which models write calls.

    Args:
        parser: makes the parser of an answer for a request's tools.
        markers: what some tokenizers have as special tokens, which a decoder may leave out of the text.
        end_reasoning: how calls begin, if models may call a tool without closing their reasoning first (Qwen3.5).
        reasoning: answers are messages, as `ReplyFormat.reasoning` says; None: they are not.
    """

    parser: Callable[[Sequence[Tool]], Parser]
    markers: tuple[str, ...]
    end_reasoning: tuple[str, ...] = ()
    reasoning: tuple[str, str] | None = None


_TAGS, _PYTHON = ("<tool_call>", "</tool_call>"), "<|python_tag|>"
_HERMES = partial(_JsonCallParser, opens=_TAGS[:1], ends=_TAGS[1:])  # a tag may have several objects
# A JSON object is a call if the answer begins with it.
_LLAMA3 = partial(
    _JsonCallParser, opens=(_PYTHON,), begins=("{", _PYTHON), follows=("{", _PYTHON), skipped=";,", checks_names=True
)
_QWEN3_CODER = Format(Qwen3CoderParser, _TAGS, ("<tool_call>\n<function=", "<tool_call><function="))
FORMATS = {
    "hermes": Format(_HERMES, _TAGS), "qwen3_coder": _QWEN3_CODER, "qwen3_xml": _QWEN3_CODER,
    "llama3_json": Format(_LLAMA3, (_PYTHON,)),
    "mistral": Format(MistralParser, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
    "muse_glimmer": Format(MuseGlimmerParser, ("<atem:function_calls>", "</atem:function_calls>"), reasoning=ADDRESSED),
    "harmony": Format(lambda tools: HarmonyParser("", NamedCallParser), MARKERS, reasoning=HARMONY),
}  # fmt: skip
# Signs of formats that no parser here reads, though they share markers with one: GLM 4.5, Hunyuan, Seed-OSS, Functionary.
_OTHER_FORMATS = ("<arg_key>", "<tool_calls>", ":tool_call>", "<|recipient|>", ">>>")


def detect_format(template: str | None) -> str | None:
    """The format of the tool calls that a chat template writes and asks for; None if it is none that is known."""
    if template is not None and "<atem:function_calls>" in template:
        return "muse_glimmer"
    if is_harmony(template):
        return "harmony"
    if template is None or any(sign in template for sign in _OTHER_FORMATS):
        return None
    if "<function=" in template:  # with JSON after it, and without parameters: Functionary, and custom functions of Llama 3.1
        return "qwen3_coder" if "<parameter=" in template else None
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or ('"parameters": dictionary of argument name' in template):
        return "llama3_json"
    return "mistral" if "[TOOL_CALLS]" in template else None
