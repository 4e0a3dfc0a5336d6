"""`ResponseTemplate`: how a tokenizer says that its model's answers are to be read, and a streaming parser that does so.

A `response_template` in tokenizer_config.json (transformers 5) declares regions: where each begins and ends, how its text is
read, and into what it is formed. Known fields are `content`, `reasoning_content` (or `thinking`, `reasoning`) and `tool_calls`.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from minirt.errors import UnsupportedError, quoted, shortened
from minirt.text.json_checker import escaped, is_unicode, json_text
from minirt.text.reply import Calls, ContentDelta, Event, ReasoningDelta, Trimmer, content
from minirt.text.stream_search import Match, StreamPattern, StreamSearch
from minirt.text.tools import Tool, number_json, typed_json

_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {"open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
               "transform", "transform_each"}  # fmt: skip
_REASONING = ("reasoning_content", "thinking", "reasoning")
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_STRING, _BARE_KEY = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL), re.compile(r"(\w+)(?=\s*:)")


@dataclass(frozen=True)
class _Field:
    kind: str  # content, reasoning or tool_calls
    open: StreamPattern | None
    close: StreamPattern | None
    read: Callable[[str], Any]
    strip: bool
    join: str
    transform: Any
    transform_each: bool


@dataclass(frozen=True)
class ResponseTemplate:
    """A checked template. `implicit` is the field of text that no anchor has opened; None: such text is dropped."""

    start: StreamPattern
    fields: tuple[_Field, ...]
    implicit: _Field | None

    @classmethod
    def read(cls, spec: object, place: object = "response_template") -> "ResponseTemplate":
        """Check a template, a JSON value.

        Raises:
            UnsupportedError: it is no template, or needs something that minirt does not do; names the place.
        """
        values = _object(spec, str(place), _KEYS)
        if values.get("version", 1) != 1:
            shown = shortened(values["version"], 40)
            raise UnsupportedError("unknown version", where=f"{place}.version", expected=1, found=shown)
        start = _anchor(values, str(place), "start_anchor")
        named = _object(values.get("fields"), f"{place}.fields")
        fields = {name: _read_field(name, value, f"{place}.fields.{shortened(name, 40)}") for name, value in named.items()}
        implicit = [name for name, shown in fields.items() if shown.open is None]
        if start is None or not fields or len(implicit) > 1:
            expected, shown = "a start anchor, and at most one field that nothing opens", f"fields {', '.join(fields)}"
            raise UnsupportedError("not a response template", where=place, expected=expected, found=shown)
        return cls(start, tuple(fields.values()), fields[implicit[0]] if implicit else None)

    def prefill(self, prompt: str) -> str:
        """The part of a prompt that belongs to the answer: what follows the last start anchor."""
        return prompt[max((match.end for match in self.start.find_all(prompt)), default=len(prompt)) :]


def _object(value: object, place: str, keys: Collection[str] | None = None) -> dict[str, Any]:
    """An object. `keys`: the ones that it may have."""
    if not isinstance(value, dict):
        raise UnsupportedError("not an object", where=place, found=type(value).__name__)
    if keys is not None and (unknown := [key for key in value if key not in keys]):
        raise UnsupportedError("unknown key", where=f"{place}.{shortened(unknown[0], 40)}")
    return value


def _anchor(values: Mapping[str, Any], place: str, name: str) -> StreamPattern | None:
    """The anchor under this key, or the same with "_pattern"; None if there is neither."""
    regular = f"{name}_pattern"
    if name in values and regular in values:
        raise UnsupportedError(f"has both {name} and {regular}", where=place)
    if regular in values:
        pattern = _text(values[regular], f"{place}.{regular}")
        try:
            return StreamPattern(pattern=pattern)
        except UnsupportedError as error:
            raise error.at(f"{place}.{regular}") from error
    if name not in values:
        return None
    literals = values[name] if isinstance(values[name], list) else [values[name]]
    if not literals or not all(isinstance(text, str) and text for text in literals):
        shown = quoted(values[name], 80)
        raise UnsupportedError("not a text", where=f"{place}.{name}", expected="a text or a list of them", found=shown)
    return StreamPattern(literals)


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise UnsupportedError("not a text", where=place, found=type(value).__name__)
    return value


def _read_field(name: str, value: object, place: str) -> _Field:
    kind = "reasoning" if name in _REASONING else name
    if kind not in ("content", "reasoning", "tool_calls"):
        expected = "content, reasoning_content or tool_calls"
        raise UnsupportedError("a field that minirt cannot pass on", where=place, expected=expected)
    values = _object(value, place, _FIELD_KEYS)
    read, arguments = values.get("content", "text"), _object(values.get("content_args", {}), f"{place}.content_args")
    if kind != "tool_calls" and (read != "text" or "transform" in values):
        raise UnsupportedError("is not plain text", where=place, expected="text without a transform", found=shortened(read, 40))
    _check_transform(values.get("transform"), f"{place}.transform")
    join = "" if values.get("join") is None else _text(values["join"], f"{place}.join")
    return _Field(
        kind, _anchor(values, place, "open"), _anchor(values, place, "close"), _reader(read, arguments, place),
        arguments.get("strip", True) is not False, join, values.get("transform"), values.get("transform_each", False) is True,
    )  # fmt: skip


def _check_transform(value: Any, place: str) -> None:
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_transform(part, place)
    if isinstance(value, str) and _PLACEHOLDER.search(value) and not _PLACEHOLDER.fullmatch(value):
        raise UnsupportedError("mixes a placeholder with text", where=place, found=shortened(value, 80))


# --- reading the text of a region: ValueError means that it is not what its template says ---


def _reader(name: object, arguments: Mapping[str, Any], place: str, depth: int = 0) -> Callable[[str], Any]:
    """The function that reads a text as `name` says."""
    inner, inside = arguments.get("value_parser"), f"{place}.content_args"
    value: Callable[[str], Any] = str  # the text itself
    if inner is not None:
        inner = _object(inner, f"{inside}.value_parser", ("name", "args"))
        if depth > 8:
            raise UnsupportedError("nested too deeply", where=f"{inside}.value_parser")
        args = _object(inner.get("args", {}), f"{inside}.value_parser.args")
        value = _reader(inner.get("name", "text"), args, inside, depth + 1)
    strip: Callable[[str], str] = str.strip if arguments.get("strip", True) is not False else str
    match name:
        case "text":
            return strip
        case "int" | "float":
            return lambda text: json.loads(number_json(text.strip(), "integer" if name == "int" else "number") or "")
        case "bool":
            return lambda text: text.strip().lower() in ("true", "1")
        case "json":
            return _json_reader(arguments, inside)
        case "kv-lines":
            line, pair = arguments.get("line_sep", "\n"), arguments.get("kv_sep", ":")
            if not (isinstance(line, str) and line and isinstance(pair, str) and pair):
                raise UnsupportedError("not a separator", where=inside, found=quoted((line, pair), 80))
            return lambda text: _lines(text, line, pair, strip, value)
        case "xml-inline":
            tag, merge = _anchor(arguments, inside, "tag"), arguments.get("merge_duplicates", False) is True
            if tag is None or "key" not in tag.names.values():
                raise UnsupportedError("has no group named key", where=f"{inside}.tag_pattern")
            return lambda text: _tags(text, tag, value, merge)
    raise UnsupportedError("unknown content", where=f"{place}.content", found=shortened(name, 40))


def _lines(text: str, line: str, pair: str, strip: Callable[[str], str], value: Callable[[str], Any]) -> dict[str, Any]:
    parts = (one.partition(pair) for one in map(strip, text.split(line)))
    return {strip(key): value(strip(rest)) for key, separator, rest in parts if separator}


def _tags(text: str, tag: StreamPattern, value: Callable[[str], Any], merge: bool) -> dict[str, Any]:
    """The values of tags by key. With `merge`, several values of a key become a list; else the last one counts."""
    tags: dict[str, Any] = {}
    for match in tag.find_all(text):
        key, new = match.groups.get("key", ""), value(match.groups.get("value", ""))
        if key in tags and merge:  # the first value may be a list already
            new = [*(tags[key] if isinstance(tags[key], list) else [tags[key]]), new]
        tags[key] = new
    return tags


def _json_reader(arguments: Mapping[str, Any], place: str) -> Callable[[str], Any]:
    """Reads JSON, with strings between other marks, and keys without quotes, if `arguments` say so."""
    delimiters = arguments.get("string_delims", [])
    good = isinstance(delimiters, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in delimiters)
    if not good or not all(isinstance(mark, str) and mark for pair in delimiters for mark in pair):
        raise UnsupportedError("not pairs of marks", where=f"{place}.string_delims", found=quoted(delimiters, 80))
    unquoted, lax = arguments.get("unquoted_keys", False) is True, arguments.get("allow_non_json", False) is True

    def read(text: str) -> Any:
        try:
            return _json(_standard(text, delimiters, unquoted))
        except ValueError:
            if lax:
                return text.strip()
            raise

    return read


def _json(text: str) -> Any:
    """The value of a JSON text. Its numbers are finite."""
    standard = escaped(text)
    if standard is None and text.lstrip()[:1] in ("{", "["):
        raise ValueError(text)
    value = json.loads(standard or text)
    json.dumps(value, allow_nan=False)  # refuses NaN and 1e999
    return value


def _standard(text: str, delimiters: Sequence[Sequence[str]], unquoted: bool) -> str:
    """JSON of a dialect as standard JSON: other marks around strings become quotes, bare keys get them."""
    pieces, place, before = list[str](), 0, ""  # `before`: the last character that is not white space
    ended = set[str]()  # marks that do not come any more
    while place < len(text):
        opening, closing = next((pair for pair in delimiters if text.startswith(pair[0], place)), ("", ""))
        start = place + len(opening)
        end = -1 if not opening or closing in ended else text.find(closing, start)
        if end >= 0:
            piece, place = json_text(text[start:end]), end + len(closing)
        elif (string := _STRING.match(text, place)) is not None:  # without an end, it goes to the end of the text
            piece, place = string[0], string.end()
        elif unquoted and before in ("{", ",") and (key := _BARE_KEY.match(text, place)) is not None:
            piece, place = json_text(key[0]), key.end()
        else:
            piece, place = text[place], place + 1
        if opening and end < 0:
            ended.add(closing)
        pieces.append(piece)
        before = piece.strip()[-1:] or before
    return "".join(pieces)


def _formed(transform: Any, scope: Mapping[str, Any]) -> Any:
    """A transform with its placeholders filled from `scope`."""
    if isinstance(transform, dict):
        return {key: _formed(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_formed(value, scope) for value in transform]
    match = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if match is None:
        return transform
    value: Any = scope
    for key in match[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(key)
        value = value[key]
    return value


# --- the parser ---


class _Region:
    """The region that is open. `field` is None between regions, if the template has no implicit field."""

    def __init__(self, field: _Field | None, groups: Mapping[str, str] | None = None, opening: str = "") -> None:
        self.field, self.groups, self.opening = field, groups or {}, opening
        self.body: list[str] = []  # of tool calls
        self.trimmer, self.sent = Trimmer(), False


class ResponseTemplateParser:
    """Parses streamed text by a response template. The text must have its special tokens.

    Tool calls are sent when their region ends. A region whose text is not what the template says is content, with its anchors.

    Args:
        prompt: the rendered prompt: what it has of the answer already, such as an opened block, counts.
        tools: arguments that are texts get the types of their JSON schemas.
        calls: whether there may be tool calls; else they are content.
    """

    def __init__(self, template: ResponseTemplate, prompt: str, tools: Sequence[Tool] = (), *, calls: bool = True) -> None:
        self._template, self._may_call = template, calls
        self._tools, self._calls = {tool.name: tool for tool in tools}, Calls()
        self._count: dict[str, int] = {}  # regions so far, by kind
        self._text, self._base, self._at = "", 0, 0  # the place of `_text` in all text, and what of it is used
        anchors = [anchor for field in template.fields for anchor in (field.open, field.close) if anchor is not None]
        self._searches = {id(anchor): StreamSearch(anchor) for anchor in anchors}
        self._region = _Region(template.implicit)
        self._advance(template.prefill(prompt), final=False)

    def feed(self, text: str) -> list[Event]:
        """See `Parser.feed`."""
        return self._advance(text, final=False)

    def finish(self) -> list[Event]:
        """See `Parser.finish`."""
        return self._advance("", final=True) + self._close("")

    def _advance(self, text: str, final: bool) -> list[Event]:
        self._base += self._at
        self._text, self._at = self._text[self._at :] + text, 0
        events: list[Event] = []
        while True:
            match, opened, kept = self._next(final)
            end = (kept if match is None else match.start) - self._base
            events += self._add(self._text[self._at : end])
            if match is None:
                self._at = end
                return events
            self._at = match.end - self._base
            marker = self._text[end : self._at]
            events += self._close("" if opened is not None else marker)
            if opened is not None:
                self._region = _Region(opened, match.groups, marker)

    def _next(self, final: bool) -> tuple[Match | None, _Field | None, int]:
        """The next anchor, the field that it opens (None: it closes one), and how much of the text can be used without it."""
        inside = self._region.field
        watched: list[tuple[StreamPattern, _Field | None]] = []
        if inside is self._template.implicit:
            watched = [(field.open, field) for field in self._template.fields if field.open is not None]
        if inside is not None and inside.close is not None:
            watched.append((inside.close, None))
        kept, matches = self._base + len(self._text), list[tuple[Match, _Field | None]]()
        for anchor, opened in watched:
            match, place = self._searches[id(anchor)].next(self._text, self._base, self._base + self._at, final)
            kept = min(kept, place)
            matches += [] if match is None else [(match, opened)]
        first = min(matches, key=lambda entry: (entry[0].start, -entry[0].end), default=None)
        return (*first, kept) if first is not None and first[0].start < kept else (None, None, kept)

    def _add(self, text: str) -> list[Event]:
        """More text of the region that is open."""
        region = self._region
        field = region.field
        if field is None or not text:
            return []
        if field.kind == "tool_calls":
            region.body.append(text)
            return []
        text = region.trimmer.feed(text) if field.strip else text
        if not text:
            return []
        if not region.sent:
            region.sent = True
            self._count[field.kind] = self._count.get(field.kind, 0) + 1
            text = (field.join if self._count[field.kind] > 1 else "") + text
        return [ContentDelta(text) if field.kind == "content" else ReasoningDelta(text)]

    def _close(self, marker: str) -> list[Event]:
        """Close the region that is open; text after it is implicit."""
        region, self._region = self._region, _Region(self._template.implicit)
        body = "".join(region.body)
        raw = region.opening + body
        if region.field is None or region.field.kind != "tool_calls" or not raw:
            return []
        calls = None
        with suppress(ValueError):
            calls = [self._call(value) for value in _values(region.field, body, region.groups)] if self._may_call else None
        if calls is None:
            return content(raw + marker)
        return [event for name, arguments in calls for event in (self._calls.start(name), self._calls.arguments(arguments))]

    def _call(self, value: Any) -> tuple[str, str]:
        """Name and arguments of a formed tool call."""
        function = value.get("function", value) if isinstance(value, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name or not is_unicode(name):
            raise ValueError(name)
        arguments = function.get("arguments", function.get("parameters"))
        if isinstance(arguments, str) and (text := escaped(arguments) or "").startswith("{"):
            return name, text
        if not isinstance(arguments, dict | None):
            raise ValueError(name)
        tool = self._tools.get(name)
        typed = {  # a text gets the type that the tool's schema says
            key: typed_json(value, tool.types(key)) if tool is not None and isinstance(value, str) else json_text(value)
            for key, value in (arguments or {}).items()
        }
        return name, "{" + ", ".join(f"{json_text(key)}: {value}" for key, value in typed.items()) + "}"


def _values(field: _Field, text: str, groups: Mapping[str, str]) -> list[Any]:
    """The tool calls in a text, formed by the transform of its field."""
    value = field.read(text)
    if field.transform is not None and field.transform_each:
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise ValueError(value)
        return [_formed(field.transform, {**groups, **item}) for item in value]
    formed = value if field.transform is None else _formed(field.transform, {**groups, "content": value})
    return formed if isinstance(formed, list) else [formed]
