"""Requests of Anthropic's Messages API: their fields, and the conversations that they describe."""

from collections.abc import Iterable, Mapping
from typing import Any

from minirt.server.conversation import Conversation, template_variables
from minirt.server.errors import bad_field, shown
from minirt.server.front import Front
from minirt.server.protocol import REFUSED, SETTINGS, Common, Positive, Refused, check_nesting, check_texts
from minirt.text.tools import Tool, check_names, checked_list, checked_tool

# Claude Code puts a block with this beginning in front of its system prompt. It says nothing to a model, and it differs in each
# request, so that the prefix cache would find nothing.
_BILLING = "x-anthropic-billing-header:"
_ERROR = "Error: "  # before the result of a tool that has failed: chat templates have no field for it

# Fields of blocks that are used, or that are about Anthropic's own service.
_BLOCK_FIELDS = {
    "text": {"text", "citations"},
    "tool_use": {"id", "name", "input", "caller", "toolset_name"},
    "tool_result": {"tool_use_id", "content", "is_error", "toolset_name"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
}
_TOOL_FIELDS = {"name", "description", "input_schema", "type", "cache_control"}
_THINKING = {"enabled": True, "disabled": False, "adaptive": None, "between_tools": None}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_NO_LOGPROBS = "log-probabilities are not in messages: use /v1/chat/completions"
UNSUPPORTED: Refused = {
    **REFUSED,
    "container": "there are no containers and no skills",
    "mcp_servers": "the server does not connect to others: run the tools in the client",
    **dict.fromkeys(("n", "best_of"), "there is one answer"),
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), _NO_LOGPROBS),
    "response_format": "is named output_config.format here",
    "reasoning_effort": "is named output_config.effort here",
    "parallel_tool_calls": "is named tool_choice.disable_parallel_tool_use here",
}


class CountTokensRequest(Common, kw_only=True):
    """The fields that say what the prompt is."""

    messages: list[dict[str, Any]]
    system: Any = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Any = None  # without effect: the prefix cache needs no marks


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The fields of a request for the next message."""

    max_tokens: Positive
    stop_sequences: list[str] | None = None


def check_request(request: CountTokensRequest) -> None:
    """Check what is not about the conversation. `stop_sequences` become `stop`."""
    for name in ("messages", "system", "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs"):
        check_nesting(name, getattr(request, name))
    if not isinstance(request, MessagesRequest):
        return
    if request.stop_sequences is not None:
        if request.stop is not None:
            raise bad_field("stop_sequences", "excludes stop, which means the same")
        check_texts("stop_sequences", request.stop_sequences, SETTINGS["stop"].most or 0)
        request.stop = request.stop_sequences


def conversation_of(front: Front, request: CountTokensRequest, truncates: bool = False) -> Conversation:
    """A request's conversation. The log names what is ignored.

    Args:
        truncates: see `Conversation`.
    Raises:
        HTTPError, InputError: names the field that is wrong or not supported.
    """
    ignored: dict[str, None] = {}
    messages = _messages(request, ignored)
    tools = _tools(request.tools or [], ignored)
    choice, parallel = _choice(request.tool_choice or {})
    variables = _variables(front, request, ignored)
    front.note_unknown(list(ignored), "unsupported parts of requests")
    continues = messages[-1]["role"] == "assistant"
    truncates = truncates or request.truncate_prompt_tokens is not None
    return Conversation(
        messages, tools, choice, parallel, variables, opens_answer=not continues, continues=continues, truncates=truncates,
    )  # fmt: skip


def grammar_of(request: CountTokensRequest) -> Any:
    """`structured_outputs` of the answer's content; None: any text."""
    form, own = (request.output_config or {}).get("format"), request.structured_outputs or None
    if form is None:
        return own
    if own is not None:
        raise bad_field("structured_outputs", "excludes output_config.format", found=shown(own))
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        expected = '{"type": "json_schema", "schema": a JSON schema}'
        raise bad_field("output_config.format", "not an acceptable form", expected=expected, found=shown(form))
    return {"json": form["schema"]}


# --- messages ---


def _messages(request: CountTokensRequest, ignored: dict[str, None]) -> list[dict[str, Any]]:
    """The conversation in OpenAI's form. Neighbours of the same role are one message, as Anthropic's API has it."""
    found: list[dict[str, Any]] = []
    system = [] if request.system is None else _texts(request.system, "system", ignored)
    if own := [part for part in system if not part["text"].startswith(_BILLING)]:
        found.append({"role": "system", "content": own})
    if not request.messages:
        raise bad_field("messages", "is empty", expected="at least one message")
    for i, message in enumerate(request.messages):
        where, role, content = f"messages[{i}]", message.get("role"), message.get("content")
        _note(message, {"role", "content"}, "messages[]", ignored)
        if content == [] and role != "assistant":  # an empty answer has no blocks
            raise bad_field(f"{where}.content", "is empty", expected="a text, or at least one block")
        if role == "assistant":
            own = [_assistant(_blocks(content, f"{where}.content"), f"{where}.content", ignored)]
        elif role == "user":
            own = _user(_blocks(content, f"{where}.content"), f"{where}.content", ignored)
        elif role == "system":
            own = [{"role": "system", "content": _texts(content, f"{where}.content", ignored)}]
        else:
            expected, given = "user, assistant or system", shown(role)
            raise bad_field(f"{where}.role", "not an acceptable role", expected=expected, found=given)
        for one in own:
            _add(found, one)
    if found[-1].get("tool_calls"):
        what, expected = "ends with a call of a tool", "its tool_result in a message of the user"
        raise bad_field(f"messages[{len(request.messages) - 1}]", what, expected=expected)
    return found


def _add(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    last = messages[-1] if messages else {}
    if last.get("role") != message["role"] or message["role"] == "tool":
        messages.append(message)
        return
    last["content"] += message["content"]
    if calls := message.get("tool_calls"):
        last.setdefault("tool_calls", []).extend(calls)
    if reasoning := [own["reasoning_content"] for own in (last, message) if "reasoning_content" in own]:
        last["reasoning_content"] = "\n".join(reasoning)


def _user(blocks: list[dict[str, Any]], where: str, ignored: dict[str, None]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        if _kind(block, place, ("text", "tool_result"), ignored) == "text":
            _add(found, {"role": "user", "content": [_text_part(block, place)]})
        else:
            found.append({"role": "tool", **_result(block, place, ignored)})
    return found


def _result(block: dict[str, Any], where: str, ignored: dict[str, None]) -> dict[str, Any]:
    content, failed = block.get("content"), block.get("is_error")
    if failed not in (None, True, False):
        raise bad_field(f"{where}.is_error", "not a truth value", found=shown(failed))
    texts = _texts([] if content is None else content, f"{where}.content", ignored)
    text = "\n".join(part["text"] for part in texts)
    return {"tool_call_id": _text(block, "tool_use_id", where), "content": _ERROR + text if failed else text}


def _assistant(blocks: list[dict[str, Any]], where: str, ignored: dict[str, None]) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant", "content": []}
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        match _kind(block, place, ("text", "tool_use", "thinking", "redacted_thinking"), ignored):
            case "text":
                found["content"].append(_text_part(block, place))
            case "thinking":
                thinking = _text(block, "thinking", place)
                found["reasoning_content"] = "\n".join(filter(None, (found.get("reasoning_content"), thinking)))
            case "redacted_thinking":
                ignored["messages[].content[redacted_thinking]"] = None
            case _:
                if not isinstance(arguments := block.get("input"), dict | None):
                    raise bad_field(f"{place}.input", "not an object", found=type(arguments).__name__)
                function = {"name": _text(block, "name", place), "arguments": arguments}
                call = {"id": _text(block, "id", place), "type": "function", "function": function}
                found.setdefault("tool_calls", []).append(call)
    return found


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    """Content as a list of blocks: a text is one block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise bad_field(where, "not content", expected="a text, or a list of blocks", found=type(content).__name__)
    for i, block in enumerate(content):
        if not isinstance(block, dict):
            raise bad_field(f"{where}[{i}]", "not a block", expected='{"type": …}', found=type(block).__name__)
    return content


def _kind(block: dict[str, Any], where: str, known: tuple[str, ...], ignored: dict[str, None]) -> str:
    """The type of a block, which is one of those that may be there."""
    kind = block.get("type")
    if kind not in known:
        hint = "minirt's models read text only" if kind in ("image", "document") else None
        found = kind[:40] if isinstance(kind, str) else repr(kind)[:40]
        raise bad_field(f"{where}.type", "a block of another type", expected=" or ".join(known), found=found, hint=hint)
    _note(block, _BLOCK_FIELDS[kind] | {"type", "cache_control"}, f"messages[].content[{kind}]", ignored)
    return kind


def _texts(content: Any, where: str, ignored: dict[str, None]) -> list[dict[str, Any]]:
    """Content that may have text only, as parts of OpenAI's form."""
    blocks = _blocks(content, where)
    for i, block in enumerate(blocks):
        _kind(block, f"{where}[{i}]", ("text",), ignored)
    return [_text_part(block, f"{where}[{i}]") for i, block in enumerate(blocks)]


def _text_part(block: dict[str, Any], where: str) -> dict[str, Any]:
    return {"type": "text", "text": _text(block, "text", where)}


def _text(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise bad_field(f"{where}.{name}", "not a text", found=type(value).__name__)
    return value


def _note(value: Mapping[str, Any], known: Iterable[str], where: str, ignored: dict[str, None]) -> None:
    ignored.update((f"{where}.{name}", None) for name in value.keys() - set(known))


# --- tools and thinking ---


def _tools(values: list[Any], ignored: dict[str, None]) -> list[Tool]:
    """The tools that the client runs. Those of Anthropic's servers and models, which have a type of their own, are left out."""
    found, names = [], []
    for i, tool in enumerate(checked_list(values)):
        where = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise bad_field(where, "not an object", found=type(tool).__name__)
        kind = tool.get("type")
        if kind not in (None, "custom"):
            ignored[f"tools[{_text(tool, 'type', where)}]"] = None
            continue
        if tool.get("input_schema") is None:
            raise bad_field(f"{where}.input_schema", "is missing", expected="a JSON schema")
        _note(tool, _TOOL_FIELDS, "tools[]", ignored)
        description = {} if tool.get("description") is None else {"description": _text(tool, "description", where)}
        function = {"name": tool.get("name")} | description | {"parameters": tool["input_schema"]}
        names.append(f"{where}.name")
        found.append(checked_tool({"type": "function", "function": function}, names[-1], f"{where}.input_schema"))
    check_names(found, names)
    return found


def _choice(choice: dict[str, Any]) -> tuple[Any, bool]:
    """`tool_choice` in OpenAI's form, and whether an answer may have several calls."""
    if not choice:
        return None, True
    kind, single = choice.get("type"), choice.get("disable_parallel_tool_use")
    if type(single) not in (type(None), bool):
        raise bad_field("tool_choice.disable_parallel_tool_use", "not a truth value", found=shown(single))
    if kind == "tool":
        return {"type": "function", "function": {"name": _text(choice, "name", "tool_choice")}}, not single
    if not isinstance(kind, str) or kind not in _CHOICES:
        expected, found = "auto, any, tool or none", shown(kind)
        raise bad_field("tool_choice.type", "not an acceptable value", expected=expected, found=found)
    return _CHOICES[kind], not single


def _variables(front: Front, request: CountTokensRequest, ignored: dict[str, None]) -> dict[str, Any]:
    """The variables of the chat template. Clients send `thinking` and `effort` to any model, so those are ignored if unknown."""
    tokenizer, config = front.check_ready()[0].text(), request.output_config or {}
    _note(config, {"format", "effort"}, "output_config", ignored)
    effort = None if config.get("effort") is None else _text(config, "effort", "output_config")
    name, hints = {"reasoning_effort": "output_config.effort"}, {"reasoning_effort": effort}
    variables = template_variables(front, request.chat_template_kwargs, hints, name)
    switch = _switch(request.thinking or {}, ignored)
    if switch is not None and tokenizer.template_uses("enable_thinking"):
        variables["enable_thinking"] = switch
    elif switch is not None:
        ignored["thinking, since the chat template has no enable_thinking"] = None
    return variables


def _switch(thinking: dict[str, Any], ignored: dict[str, None]) -> bool | None:
    """Whether the model is to think; None: as its chat template has it."""
    if not thinking:
        return None
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if not isinstance(kind, str) or kind not in _THINKING:
        raise bad_field("thinking.type", "not an acceptable value", expected=" or ".join(_THINKING), found=shown(kind))
    if budget is not None and (type(budget) is not int or budget < 1):
        raise bad_field("thinking.budget_tokens", "not an acceptable value", expected="an integer >= 1", found=shown(budget))
    _note(thinking, {"type"}, "thinking", ignored)
    return _THINKING[kind]
