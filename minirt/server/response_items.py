"""The items of /v1/responses: input items become messages, and the events of a reply become output items."""

from collections.abc import Callable
from copy import copy
from typing import Any

from minirt.errors import quoted
from minirt.server.errors import bad_field
from minirt.server.json_size import check_text
from minirt.text.messages import text_at
from minirt.text.reply import ContentDelta, Event, ReasoningDelta, ToolCallStart

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}  # type of a part → its text
_REASONING = {"reasoning_text": "text", "summary_text": "text"}
_ITEMS = "message, function_call, function_call_output or reasoning"


# --- input ---


def read_input(value: Any, instructions: str | None, ignored: dict[str, None]) -> list[dict[str, Any]]:
    """A request's `input` as messages that `checked_messages` takes.

    `instructions` and the system messages at the beginning become one system message, because many chat templates take one only.
    Consecutive items of the assistant (reasoning, a message, calls) become one message. The text of a reasoning item is its
    content, or else its summary; an item with neither is left out, and named in `ignored`.

    Raises:
        HTTPError: names the item and the field that is wrong.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        expected, shown = "a text, or a non-empty list of items", quoted(value, 80)
        raise bad_field("input", "not an input", expected=expected, found=shown)
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for i, item in enumerate(value):
        place = f"input[{i}]"
        if not isinstance(item, dict):
            raise bad_field(place, "not an item", expected="an object", found=type(item).__name__)
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            _add_message(messages, item, place)
        elif kind == "function_call":
            message = _assistant(messages, "tool_calls")
            message.setdefault("tool_calls", []).append(_call(item, place))
        elif kind == "function_call_output":
            output = _text_of(item.get("output"), f"{place}.output", _TEXTS)
            messages.append({"role": "tool", "tool_call_id": text_at(item.get("call_id"), f"{place}.call_id"), "content": output})
        elif kind == "reasoning":
            texts = [_text_of(item.get(name) or [], f"{place}.{name}", _REASONING) for name in ("content", "summary")]
            if reasoning := texts[0] or texts[1]:
                message = _assistant(messages, "reasoning_content")
                message["reasoning_content"] = "\n".join(filter(None, [message.get("reasoning_content"), reasoning]))
            else:
                ignored["input[reasoning without a text]"] = None
        elif kind == "item_reference":
            raise bad_field(f"{place}.type", "answers are not stored: send the item itself", expected=_ITEMS, found=kind)
        else:
            raise bad_field(f"{place}.type", "not an acceptable item", expected=_ITEMS, found=quoted(kind, 80))
    if not messages:
        raise bad_field("input", "has no message", expected="at least one message")
    return messages


def _add_message(messages: list[dict[str, Any]], item: dict[str, Any], place: str) -> None:
    role, text = item.get("role"), _text_of(item.get("content"), f"{place}.content", _TEXTS)
    if role not in _ROLES:
        shown = quoted(role, 80)
        raise bad_field(f"{place}.role", "not an acceptable role", expected=", ".join(_ROLES), found=shown)
    if role == "assistant":
        _assistant(messages, "content")["content"] = text
        return
    role = "system" if role == "developer" else role
    if role == "system" and len(messages) == 1 and messages[0]["role"] == "system":
        messages[0]["content"] += f"\n\n{text}"
    else:
        messages.append({"role": role, "content": text})


# What the assistant's last message must not have, if it is to get a field: it would come later.
_LATER = {"reasoning_content": ("content", "tool_calls"), "content": ("content", "tool_calls"), "tool_calls": ()}


def _assistant(messages: list[dict[str, Any]], field: str) -> dict[str, Any]:
    """The message of the assistant that gets `field`: the last one if it may, else a new one."""
    if not messages or messages[-1]["role"] != "assistant" or any(messages[-1].get(later) for later in _LATER[field]):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _call(item: dict[str, Any], place: str) -> dict[str, Any]:
    arguments = "{}" if item.get("arguments") is None else text_at(item.get("arguments"), f"{place}.arguments")
    check_text(arguments, f"{place}.arguments")
    function = {"name": text_at(item.get("name"), f"{place}.name"), "arguments": arguments}
    return {"id": text_at(item.get("call_id"), f"{place}.call_id"), "type": "function", "function": function}


def _text_of(content: Any, place: str, kinds: dict[str, str]) -> str:
    """The text of a content: a text, or parts of these types, which are joined with newlines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(place, "not a content", expected="a text, or a list of parts", found=type(content).__name__)
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict):
            raise bad_field(f"{place}[{i}]", "not a part of a content", expected="an object", found=type(part).__name__)
        if not isinstance(kind := part.get("type"), str) or kind not in kinds:
            expected, shown, hint = " or ".join(kinds), quoted(kind, 80), "minirt's models read text only"
            raise bad_field(f"{place}[{i}].type", "a part of another type", expected=expected, found=shown, hint=hint)
        texts.append(text_at(part.get(kinds[kind]), f"{place}[{i}].{kinds[kind]}"))
    return "\n".join(texts)


# --- output ---

StreamEvent = dict[str, Any]  # without its sequence_number
_TEXT, _THOUGHT, _CALL = "output_text", "reasoning_text", "function_call_arguments"  # what grows, as events name it


class Output:
    """The output items of a reply, and the events with which a stream tells them. One item grows at a time.

    Args:
        new_id: makes the id of an item, from a prefix that says what it is.

    Attributes:
        items: those that have begun.
    """

    def __init__(self, new_id: Callable[[str], str]) -> None:
        self.items: list[dict[str, Any]] = []
        self._new_id = new_id
        self._grows, self._texts = "", list[str]()  # what of the last item grows ("": it has ended), and what came of it

    @property
    def reasoning(self) -> str:
        """The whole reasoning of the items that have ended."""
        return "".join(part["text"] for item in self.items if item["type"] == "reasoning" for part in item["content"])

    def add(self, event: Event) -> list[StreamEvent]:
        """Add what an event of the reply says."""
        if isinstance(event, ToolCallStart):
            return self._begin(_CALL, "fc", type="function_call", call_id=event.id, name=event.name, arguments="")
        events: list[StreamEvent] = []
        if isinstance(event, ContentDelta) and self._grows != _TEXT:
            events = self._begin(_TEXT, "msg", type="message", role="assistant", content=[])
        elif isinstance(event, ReasoningDelta) and self._grows != _THOUGHT:
            events = self._begin(_THOUGHT, "rs", type="reasoning", summary=[], content=[], encrypted_content=None)
        self._texts.append(event.text)
        return [*events, self._event(f"{self._grows}.delta", delta=event.text, **_logprobs(self._grows))]

    def end(self, complete: bool) -> list[StreamEvent]:
        """The reply has ended. A reply of nothing is an empty message. `complete`: it was not cut off."""
        events = [] if self.items else self.add(ContentDelta(""))
        return events + self._end_item("completed" if complete else "incomplete")

    def _begin(self, grows: str, prefix: str, **fields: Any) -> list[StreamEvent]:
        """Begin an item, and end the one before. `prefix`: of its id."""
        events, index = self._end_item("completed"), len(self.items)
        self.items.append({"id": self._new_id(prefix), "status": "in_progress"} | fields)
        self._grows, self._texts = grows, []
        events.append({"type": "response.output_item.added", "output_index": index, "item": copy(self.items[-1])})
        return events if grows == _CALL else [*events, self._event("content_part.added", part=_part(grows, ""))]

    def _end_item(self, status: str) -> list[StreamEvent]:
        if not self._grows:
            return []
        text, item = "".join(self._texts), self.items[-1]
        if self._grows == _CALL:
            item["arguments"] = text
            events = [self._event(f"{self._grows}.done", name=item["name"], arguments=text)]
        else:
            part = _part(self._grows, text)
            item["content"] = [part]
            done = self._event(f"{self._grows}.done", text=text, **_logprobs(self._grows))
            events = [done, self._event("content_part.done", part=part)]
        item["status"], self._grows = status, ""
        return [*events, {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}]

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        """An event about the item that grows."""
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}"} | place | ({} if self._grows == _CALL else {"content_index": 0}) | fields


def _part(grows: str, text: str) -> dict[str, Any]:
    return {"type": grows, "text": text} | ({"annotations": []} | _logprobs(grows) if grows == _TEXT else {})


def _logprobs(grows: str) -> dict[str, Any]:
    """Clients expect log-probabilities with a message's text. There are none."""
    return {"logprobs": []} if grows == _TEXT else {}
