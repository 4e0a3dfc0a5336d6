"""Content, reasoning and tool calls of a model's text, as events; and `ReplyParser`, which finds them in streamed text.

Parsers take the text in any pieces. How it is cut never changes what the events add up to: the joined content, the joined
reasoning, and for each tool call its name and its joined arguments. The work is proportional to the text: a parser keeps what it
has looked at in a list, and holds back only what could be a marker.
"""

import re
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, Protocol


@dataclass(frozen=True)
class ContentDelta:
    """More text of the answer."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A tool call begins. Calls are numbered from 0; `id` is unique."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """More text of the arguments of tool call `index`. Joined, they are a JSON object, unless the text ends within it."""

    index: int
    text: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


class Parser(Protocol):
    """Turns streamed text into events."""

    def feed(self, text: str) -> list[Event]:
        """Add text; return the events that are certain now."""

    def finish(self) -> list[Event]:
        """The text has ended: return the events that were held back. Call once, after the last `feed`."""


class ReplyParser:
    """Splits off the reasoning, and finds tool calls in what follows. Either parser may be None."""

    def __init__(self, reasoning: Parser | None = None, tool_calls: Parser | None = None) -> None:
        self._reasoning, self._tool_calls = reasoning, tool_calls
        self.passes_through = reasoning is None and tool_calls is None  # whether all text is content, as it comes

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = [ContentDelta(text)] if text else []
        if self._reasoning is not None:
            events = self._reasoning.feed(text)
        return self._calls(events)

    def finish(self) -> list[Event]:
        events = self._calls(self._reasoning.finish()) if self._reasoning is not None else []
        return events + (self._tool_calls.finish() if self._tool_calls is not None else [])

    def _calls(self, events: list[Event]) -> list[Event]:
        if self._tool_calls is None:
            return events
        result: list[Event] = []
        for event in events:
            result += self._tool_calls.feed(event.text) if isinstance(event, ContentDelta) else [event]
        return result


@dataclass(frozen=True)
class ToolCall:
    """A complete tool call. `arguments` is the text of a JSON object; it is cut off if the model's text was."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """The events of a whole text, added up."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]


def collect(events: Iterable[Event]) -> Reply:
    """Add up the events of a whole text."""
    starts, texts = list[ToolCallStart](), defaultdict[Any, list[str]](list)
    for event in events:
        if isinstance(event, ToolCallStart):
            starts.append(event)
        else:
            texts[type(event), getattr(event, "index", None)].append(event.text)
    calls = tuple(ToolCall(start.id, start.name, "".join(texts[ArgumentsDelta, start.index])) for start in starts)
    return Reply("".join(texts[ContentDelta, None]), "".join(texts[ReasoningDelta, None]), calls)


def parse(parser: Parser, text: str) -> Reply:
    """Parse a whole text."""
    return collect([*parser.feed(text), *parser.finish()])


class Calls:
    """Numbers tool calls, and makes their events."""

    def __init__(self) -> None:
        self.count = 0

    def start(self, name: str) -> ToolCallStart:
        self.count += 1
        return ToolCallStart(self.count - 1, f"call_{uuid.uuid4().hex[:24]}", name)  # the form that OpenAI's clients know

    def arguments(self, text: str) -> ArgumentsDelta:
        """More arguments of the call that was started last."""
        return ArgumentsDelta(self.count - 1, text)


def content(text: str) -> list[Event]:
    """An event for `text`, or none if it is empty."""
    return [ContentDelta(text)] if text else []


def held_length(text: str, markers: Sequence[str], start: int = 0) -> int:
    """How many characters at the end of `text`, from `start` on, could be the beginning of a marker, but are none."""
    for length in range(min(max(map(len, markers), default=0) - 1, len(text) - start), 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) and marker != tail for marker in markers):
            return length
    return 0


def first_marker(text: str, markers: Sequence[str], start: int = 0) -> tuple[int, str]:
    """The place and the name of the first marker in `text`; (-1, "") if there is none. Of two at one place, the longer one.

    One search for all markers: one search for each would look at all of the text for a marker that does not come.
    """
    match = _any_of(tuple(markers)).search(text, start) if markers else None
    return (match.start(), match[0]) if match is not None else (-1, "")


@lru_cache(maxsize=256)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))


State = Callable[[], list[Event] | None]


class StatefulParser:
    """A parser whose states are methods: each returns events, or None if it needs more text.

    A state uses up all text but what could be the beginning of a marker or a name, so what is held is short.
    """

    def __init__(self) -> None:
        self._text, self._at = "", 0  # the text from `_at` on is not used yet
        self._space: list[str] = []  # white space before that, which is content only if content follows
        self._state: State

    def feed(self, text: str) -> list[Event]:
        """See `Parser.feed`."""
        self._text, self._at = self._text[self._at :] + text, 0
        events: list[Event] = []
        while (new := self._state()) is not None:
            events += new
        return events if len(events) < 2 else _merged(events)

    def finish(self) -> list[Event]:
        """See `Parser.finish`."""
        events = self._rest()
        self._text, self._at = "", 0
        self._space.clear()
        return events

    def _rest(self) -> list[Event]:
        raise NotImplementedError

    def _take_space(self) -> str:
        space = "".join(self._space)
        self._space.clear()
        return space

    def _skip_space(self, others: str = "") -> None:
        """White space and the characters of `others` that come next are kept in `_space`."""
        end = self._at
        while end < len(self._text) and (self._text[end].isspace() or self._text[end] in others):
            end += 1
        self._space.append(self._text[self._at : end])
        self._at = end

    def _next(self, *markers: str) -> str | None:
        """The marker that comes next, after white space; "" if it is none of these, None if more text is needed to know."""
        self._skip_space()
        begun = self._text[self._at : self._at + max(map(len, markers))]
        for marker in markers:
            if begun.startswith(marker):
                return marker
        return None if any(marker.startswith(begun) for marker in markers) else ""

    def _up_to(self, markers: Sequence[str]) -> tuple[str, str]:
        """Use up the text before the next marker. Returns it and the marker, which stays unused; "" if there is no marker yet."""
        place, marker = first_marker(self._text, markers, self._at)
        end = place if marker else len(self._text) - held_length(self._text, markers, self._at)
        text, self._at = self._text[self._at : end], end
        return text, marker

    def _unused(self) -> str:
        return "".join(self._space) + self._text[self._at :]


def _merged(events: list[Event]) -> list[Event]:
    """Join neighbouring deltas of one kind."""
    joined: list[Event] = []
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "index", None))):
        same: list[Any] = list(group)
        joined.append(same[0] if len(same) == 1 else replace(same[0], text="".join(event.text for event in same)))
    return joined


class Trimmer:
    """Leaves out the white space at the beginning and at the end of streamed text."""

    def __init__(self) -> None:
        self._space: list[str] = []  # at the end of what has come, which counts only if more text follows
        self._begun = False

    def feed(self, text: str) -> str:
        """Add text; returns what is certain now."""
        shown, result = text.rstrip(), ""
        if shown:
            result = "".join(self._space) + shown if self._begun else shown.lstrip()
            self._space.clear()
            self._begun = True
        self._space.append(text[len(shown) :])
        return result
