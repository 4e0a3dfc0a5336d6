"""The messages of a conversation: what is accepted, and the form in which chat templates get them."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minirt.errors import InputError, quoted, shortened

REASONING = ("reasoning_content", "reasoning", "thinking")
IN_CONTENT = "content"  # a `MessageForm.reasoning`: a part of the content, of type "thinking"
# What else a message may have: texts; and fields that answers of other servers have, and that say nothing to a template.
_TEXTS = ("name", "tool_call_id", *REASONING)
_SILENT = ("refusal", "audio", "annotations", "function_call")
MESSAGE_FIELDS = ("role", "content", "tool_calls", *_TEXTS, *_SILENT)


@dataclass(frozen=True)
class MessageForm:
    """The form of messages that one chat template takes. The default is the form that most templates take.

    Attributes:
        text_arguments: the arguments of tool calls are JSON texts; else they are objects.
        null_content: the content of a message with tool calls and no text is null; else it is "".
        content_parts: each content is a list of parts; else it is a text.
        short_ids: the ids of tool calls have 9 letters and digits, as Mistral's templates demand.
        named_results: each result of a tool has the tool's name.
        reasoning: the field of a message that has its reasoning; or `IN_CONTENT`.
        one_text: a message with tool calls has either reasoning or a content (gpt-oss), so a content follows the reasoning.
    """

    text_arguments: bool = False
    null_content: bool = False
    content_parts: bool = False
    short_ids: bool = False
    named_results: bool = False
    reasoning: str = "reasoning_content"
    one_text: bool = False


_COMMON = MessageForm()


def checked_messages(messages: object, form: MessageForm = _COMMON) -> list[dict[str, Any]]:
    """A conversation as a chat template reads it, from messages in OpenAI's form.

    The content of a message is a text. A list of parts of type "text" is joined with newlines. The arguments of tool calls, which
    are JSON texts, become objects. Those that are no JSON objects stay texts: an answer may have been cut off, or its call may be
    wrong. Reasoning has one name, whatever its name was. Null values and empty lists of tool calls are left out. `form` says what
    is different for one template.

    Raises:
        InputError: names the message and the field that is wrong.
    """
    if not isinstance(messages, list) or not messages:
        what = "the conversation is empty" if messages == [] else "not a conversation"
        shown = None if messages == [] else quoted(messages, 80)
        raise InputError(what, where="messages", expected="a list of one or more messages", found=shown)
    checked = [_message(message, f"messages[{i}]", form) for i, message in enumerate(messages)]
    if form.named_results:
        _name_results(checked)
    return checked


def _message(message: object, place: str, form: MessageForm) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InputError("not a message", where=place, expected='{"role": …, "content": …}', found=quoted(message, 80))
    given = {key: value for key, value in message.items() if value is not None}
    for key, value in given.items():
        if key not in MESSAGE_FIELDS:
            raise InputError("unknown field", where=f"{place}.{shortened(key, 40)}", expected=", ".join(MESSAGE_FIELDS[:6]))
        if key in _SILENT and value not in ([], ""):
            raise InputError("not supported", where=f"{place}.{key}")
        if key in _TEXTS or key == "role":
            text_at(value, f"{place}.{key}")
    if "role" not in given:
        raise InputError("has no role", where=place, found=quoted(message, 80))
    may_be_missing = "tool_calls" in given or given["role"] == "assistant"  # an answer may be reasoning alone
    result: dict[str, Any] = {"role": given["role"], "content": _content(given.get("content"), place, may_be_missing)}
    result |= {key: given[key] for key in ("name", "tool_call_id") if key in given}
    reasoning = next((given[key] for key in REASONING if key in given), None)
    if reasoning is not None and form.reasoning != IN_CONTENT:
        result[form.reasoning] = reasoning
    calls = _each(given.get("tool_calls", []), f"{place}.tool_calls", lambda call, place: _tool_call(call, place, form))
    if calls:
        result["tool_calls"] = calls
    if form.one_text and calls and reasoning and result["content"]:
        result |= {form.reasoning: f"{reasoning}\n\n{result['content']}", "content": ""}
    if form.short_ids and "tool_call_id" in result:
        result["tool_call_id"] = _short_id(result["tool_call_id"])
    if form.reasoning == IN_CONTENT and reasoning:
        result["content"] = [{"type": "thinking", "thinking": reasoning}, {"type": "text", "text": result["content"]}]
    elif form.null_content and calls and not result["content"]:
        result["content"] = None
    elif form.content_parts:
        result["content"] = [{"type": "text", "text": result["content"]}]
    return result


def _name_results(messages: list[dict[str, Any]]) -> None:
    """Give each result of a tool the name in the call that it belongs to, unless it has a name."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call}
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])


def _short_id(text: str) -> str:
    """An id of 9 letters and digits; the same one for the same text."""
    return text if re.fullmatch("[a-zA-Z0-9]{9}", text) else hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _content(content: object, place: str, may_be_missing: bool) -> str:
    if content is None and may_be_missing:
        return ""
    if not isinstance(content, list):
        return text_at(content, f"{place}.content", "a text, or a list of parts of type text")
    return "\n".join(_each(content, f"{place}.content", _part))


def _part(part: Any, place: str) -> str:
    kind = object_at(part, place, "not a part of a message").get("type")
    if kind != "text":
        shown, hint = shortened(kind, 40), "minirt's models read text only"
        raise InputError("a part of another type", where=f"{place}.type", expected="text", found=shown, hint=hint)
    return text_at(part.get("text"), f"{place}.text")


def _tool_call(call: object, place: str, form: MessageForm) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        expected, shown = '{"id", "type": "function", "function": {"name", "arguments"}}', quoted(call, 80)
        raise InputError("not a tool call", where=place, expected=expected, found=shown)
    if call.get("type", "function") != "function":
        shown = shortened(call["type"], 40)
        raise InputError("a tool call of another type", where=f"{place}.type", expected="function", found=shown)
    name = text_at(function.get("name"), f"{place}.function.name")
    arguments = _arguments(function.get("arguments"), f"{place}.function.arguments", form)
    result = {"id": text_at(call["id"], f"{place}.id")} if call.get("id") is not None else {}
    if form.short_ids and result:
        result["id"] = _short_id(result["id"])
    return result | {"type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(given: object, place: str, form: MessageForm) -> dict[str, Any] | str:
    """The arguments of a call: an object, or its JSON text. A text that is no JSON object stays as it is; null is {}."""
    if isinstance(given, str) and given:
        return given if form.text_arguments else _object(given)  # the client's text: with the spaces that the model wrote
    value = given or {}
    if not isinstance(value, dict):
        raise InputError("not a JSON object", where=place, found=quoted(value, 80))
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError("not JSON", where=place, found=quoted(given, 80)) from error
    return text if form.text_arguments else value


def _object(text: str) -> dict[str, Any] | str:
    """The JSON object that a text is; the text if it is none, or if a template could not write the object as JSON again."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # refuses 1e999 and half of a surrogate pair
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def without_texts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of `checked_messages` for a template that needs objects as arguments: a text becomes {"arguments": text}."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        function, arguments = call["function"], call["function"]["arguments"]
        return call | {"function": function | {"arguments": {"arguments": arguments}}} if isinstance(arguments, str) else call

    return [m | {"tool_calls": list(map(changed, m["tool_calls"]))} if "tool_calls" in m else m for m in messages]


def _each(values: object, place: str, read: Callable[[object, str], Any]) -> list[Any]:
    if not isinstance(values, list):
        raise InputError("not a list", where=place, found=type(values).__name__)
    return [read(value, f"{place}[{i}]") for i, value in enumerate(values)]


def object_at(value: object, place: str, what: str = "not an object", expected: str | None = None) -> dict[str, Any]:
    """An object at a place in a request."""
    if not isinstance(value, dict):
        raise InputError(what, where=place, expected=expected, found=type(value).__name__)
    return value


def text_at(value: object, place: str, expected: str = "a text") -> str:
    """A text at a place in a request."""
    if not isinstance(value, str):
        raise InputError("not a text", where=place, expected=expected, found=type(value).__name__)
    return value
