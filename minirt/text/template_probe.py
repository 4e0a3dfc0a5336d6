"""What a chat template takes and writes, found by rendering short conversations with it.

Templates differ in the form of messages that they take (`MessageForm`): one joins arguments of tool calls as texts, another one
walks through them as objects. A template is a program, so only its output says which form it takes. llama.cpp does the same.
What renders raises a `RenderingError` as `Probe.render` does.
"""

import itertools
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from minirt.text.messages import IN_CONTENT, REASONING, MessageForm, checked_messages
from minirt.text.rendering import Renderer, RenderingError

MAX_SECONDS = 5  # wall-clock time after which no further rendering begins; each has the limits of `Renderer`
# Words that no template writes by itself. None is part of another one.
_USER, _ANSWER, _REASONING, _RESULT, _NAME, _KEY, _VALUE, _OTHER = (
    "user-7f3a", "answer-9b52", "reason-e60d", "result-18af", "name_0b7c", "key_d294", "value-5ac3", "other_4c1e",
)  # fmt: skip
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought")
_TOOL = {"type": "function", "function": {"name": _OTHER, "description": "", "parameters": {"type": "object", "properties": {}}}}


def _tool_call(number: str = "") -> dict[str, Any]:
    """A call whose words have `number` at the end."""
    function = {"name": _NAME + number, "arguments": f'{{"{_KEY}{number}": "{_VALUE}{number}"}}'}
    return {"id": f"call_0123456789abcdef01234567{number}", "type": "function", "function": function}


_TOOL_CALL = _tool_call()


class Probe:
    """Renders short conversations with one template, within `MAX_SECONDS`.

    Args:
        variables: special tokens, by their names in templates.
    """

    def __init__(self, renderer: Renderer, variables: Mapping[str, Any]) -> None:
        self._renderer, self._variables = renderer, variables
        self._deadline = time.monotonic() + MAX_SECONDS

    def render(self, messages: Sequence[dict[str, Any]], form: MessageForm, *, tools: bool = False) -> str:
        """The text of a conversation; "" if the template fails.

        Raises:
            RenderingError: the template was stopped, or the time is over.
        """
        if time.monotonic() > self._deadline:
            raise RenderingError(f"the conversations that find its form take more than {MAX_SECONDS} s", stopped=True)
        names: dict[str, Any] = {"messages": checked_messages(list(messages), form), "tools": [_TOOL] if tools else None}
        names |= {"documents": None, "add_generation_prompt": False} | dict(self._variables)
        try:
            return self._renderer.render(names)
        except RenderingError as error:
            if error.stopped:
                raise
            return ""


def message_form(probe: Probe, source: str) -> MessageForm:
    """The form of messages that the template with this source takes."""
    user, form = _message("user", _USER), MessageForm()
    parts = replace(form, content_parts=True)
    if _USER not in probe.render([user], form) and _USER in probe.render([user], parts):
        form = parts
    chat = [user, _message("assistant", _ANSWER)]
    if "tool_calls" in source:
        form, chat = _tool_form(probe, form), _tool_chat()
    for name in (*(name for name in _REASONING_FIELDS if name in source), *([IN_CONTENT] if "thinking" in source else [])):
        other = replace(form, reasoning=name)
        text = probe.render([chat[0], chat[1] | {"reasoning": _REASONING}, *chat[2:]], other)
        if _REASONING in text and not re.search(f"thinking['\"]: ['\"]{_REASONING}", text):  # a list that is joined as a text
            both = chat[1] | {"reasoning": _REASONING, "content": _ANSWER}
            return replace(other, one_text="tool_calls" in source and not probe.render([chat[0], both, *chat[2:]], other))
    return form


# --- what a template leaves out ---


class Kind(NamedTuple):
    """What a message has. `calls`: 0, 1, or 2 for several. `name`: not that of a tool's result, which is the name in its call."""

    role: str
    content: bool
    calls: int
    reasoning: bool
    name: bool


def outline(messages: Sequence[Mapping[str, Any]]) -> tuple[Kind, ...]:
    """The kinds of a conversation's messages, without repetitions, as a conversation that templates take.

    A turn begins with a message of the user, a step of a turn with one of the assistant. Of equal turns, steps of a turn, and
    messages of a step, there is the first one, and once more the last one of all.
    """

    def parts(kinds: Sequence[Kind], role: str) -> list[Sequence[Kind]]:
        starts = [i for i, kind in enumerate(kinds) if kind.role == role and i > 0]
        return [kinds[start:end] for start, end in itertools.pairwise([0, *starts, len(kinds)])]

    def few(values: Sequence[Any]) -> tuple[Any, ...]:
        return (*dict.fromkeys(values[:-1]), values[-1])

    def joined(values: Sequence[tuple[Kind, ...]]) -> tuple[Kind, ...]:
        return tuple(itertools.chain.from_iterable(values))

    turns = parts(list(map(_kind, messages)), "user")
    return joined(few([joined(few([few(step) for step in parts(turn, "assistant")])) for turn in turns]))


def _kind(message: Mapping[str, Any]) -> Kind:
    role, calls = message["role"], len(message.get("tool_calls") or ())
    reasoning = any(message.get(name) for name in REASONING)
    return Kind(role, bool(message.get("content")), min(calls, 2), reasoning, role != "tool" and bool(message.get("name")))


def left_out(probe: Probe, form: MessageForm, kinds: Sequence[Kind], tools: bool) -> str:
    """What the template leaves out of a conversation of these kinds; "" if it shows all.

    Reasoning before the last message of the user is not looked for: most templates leave it out, as their models were trained.
    """
    chat, parts, pending = list[dict[str, Any]](), list[tuple[str, list[str]]](), list[dict[str, Any]]()
    last = max((i for i, kind in enumerate(kinds) if kind.role == "user"), default=-1)
    for i, kind in enumerate(kinds):
        number = f"_{i}_"
        message = _message(kind.role, _USER + number if kind.content else "")
        words = {"content": [_USER + number]} if kind.content else {}
        if kind.name:
            message["name"] = f"{_NAME}{number}own"
            words["name"] = [message["name"]]
        if kind.reasoning:
            message["reasoning"] = _REASONING + number
            words |= {"reasoning": [_REASONING + number]} if i > last else {}
        if kind.calls:
            numbers = [f"{number}{j}_" for j in range(kind.calls)]
            message["tool_calls"] = list(map(_tool_call, numbers))
            words["tool calls"] = [word + end for word in (_NAME, _KEY, _VALUE) for end in numbers]
            pending = list(message["tool_calls"])
        if kind.role == "tool":
            call = pending.pop(0) if pending else _TOOL_CALL
            message |= {"tool_call_id": call["id"], "name": call["function"]["name"]}
        chat.append(message)
        place = f"after {kinds[i - 1].role}" if i else "at the beginning"
        parts += [(f"{part} of {kind.role} {place}", shown) for part, shown in words.items()]
    text = probe.render(chat, form, tools=tools)
    if not text:
        return "it is not known what, since it fails with other texts"
    parts.append(("tools", [_OTHER] if tools else []))
    return ", ".join(dict.fromkeys(part for part, words in parts if not all(word in text for word in words)))


def _tool_form(probe: Probe, form: MessageForm) -> MessageForm:
    """`form` with the form of tool calls with which the template shows most of a call; the most common one of several."""
    best, text = form, ""
    for short, named, as_text, null in itertools.product((False, True), repeat=4):
        other = replace(form, short_ids=short, named_results=named, text_arguments=as_text, null_content=null)
        rendered = probe.render(_tool_chat(), other, tools=True)
        if _shown(rendered) > _shown(text):
            best, text = other, rendered
        # Ids and names are changed only for templates that demand it, by an error.
        if _shown(text) == _ALL_SHOWN or (as_text and null and _RESULT in text):
            break
    if text and not best.null_content:  # where both contents are accepted, "" may open an empty block, and null become "None"
        other = replace(best, null_content=True)
        rendered = probe.render(_tool_chat(), other, tools=True)
        if _shown(rendered) == _shown(text) and len(rendered) < len(text):
            return other
    return best


_ALL_SHOWN = 5


def _shown(text: str) -> int:
    """How much of `_tool_chat` a text has: its words, and the arguments as JSON or without quotes."""
    # An object that is joined as a text looks like Python's, and a text that is written as JSON has escaped quotes.
    key = _KEY in text and f"'{_KEY}':" not in text and f'\\"{_KEY}' not in text
    return key + sum(word in text for word in (_USER, _NAME, _VALUE, _RESULT))


def _tool_chat() -> list[dict[str, Any]]:
    result = _message("tool", _RESULT) | {"tool_call_id": _TOOL_CALL["id"]}
    return [_message("user", _USER), {"role": "assistant", "tool_calls": [_TOOL_CALL]}, result]


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def end_of_turn(probe: Probe, form: MessageForm, tokens: Collection[str]) -> str | None:
    """The token that the template writes at the end of each answer: of the last one and of earlier ones.

    Args:
        tokens: texts of the tokens that may be one.
    Returns:
        None: there is no such token, or it also ends the reasoning before an answer.
    """
    chat = [_message("user", _USER), _message("assistant", _ANSWER) | {"reasoning": _REASONING}]
    last = probe.render(chat, form)
    earlier = probe.render([*chat, _message("user", _USER)], form)
    if not tokens or _ANSWER not in last or _ANSWER not in earlier:
        return None
    one = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
    before, _, after = last.rpartition(_ANSWER)
    openers = set(_leading(one, last))  # some templates write those of the next turn, too
    ends = []
    for token, other in zip(_leading(one, after), _leading(one, earlier.rpartition(_ANSWER)[2]), strict=False):
        if token != other or token in openers:
            break
        ends.append(token)
    _, reasons, between = before.rpartition(_REASONING)
    return ends[-1] if ends and not (reasons and ends[-1] in between) else None


def _leading(one: re.Pattern[str], text: str) -> Iterator[str]:
    """The tokens with which a text begins, without white space between them. `one` matches a token."""
    while match := one.match(text := text.lstrip()):
        yield match[0]
        text = text[match.end() :]
