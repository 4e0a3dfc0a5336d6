"""Requests of Anthropic's Messages API: their fields, and the conversations that they describe."""

from collections.abc import Iterable, Mapping
from typing import Any

from minirt.server.conversation import Conversation, template_variables
from minirt.server.errors import bad_field, shown
from minirt.server.front import Front
from minirt.server.protocol import REFUSED, SETTINGS, Common, Positive, Refused, answer_form, check_nesting, check_texts
from minirt.text.messages import text_at
from minirt.text.tools import Tool, read_tools

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
    check_nesting("messages", request.messages)
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
    form = (request.output_config or {}).get("format")
    return answer_form(form, request.structured_outputs, "output_config.format", kinds=("json_schema",))


# --- messages ---


_KINDS = {  # of the blocks that a message of a role may have
    "user": ("text", "tool_result"), "assistant": ("text", "tool_use", "thinking", "redacted_thinking"), "system": ("text",),
}  # fmt: skip


def _messages(request: CountTokensRequest, ignored: dict[str, None]) -> list[dict[str, Any]]:
    """The conversation in OpenAI's form. Neighbours of the same role are one message, as Anthropic's API has it."""
    result: list[dict[str, Any]] = []
    system = [] if request.system is None else _texts(request.system, "system", ignored)
    if parts := [part for part in system if not part["text"].startswith(_BILLING)]:
        result.append({"role": "system", "content": parts})
    if not request.messages:
        raise bad_field("messages", "is empty", expected="at least one message")
    for i, message in enumerate(request.messages):
        place, role, content = f"messages[{i}]", message.get("role"), message.get("content")
        _note(message, {"role", "content"}, "messages[]", ignored)
        if content == [] and role != "assistant":  # an empty answer has no blocks
            raise bad_field(f"{place}.content", "is empty", expected="a text, or at least one block")
        if not isinstance(role, str) or role not in _KINDS:
            raise bad_field(f"{place}.role", "not an acceptable role", expected=" or ".join(_KINDS), found=shown(role))
        blocks = _blocks(content, f"{place}.content")
        for j, block in enumerate(blocks):
            _add(result, _message(role, block, f"{place}.content[{j}]", ignored))
        if not blocks:
            _add(result, {"role": role, "content": []})
    if result[-1].get("tool_calls"):
        what, expected = "ends with a call of a tool", "its tool_result in a message of the user"
        raise bad_field(f"messages[{len(request.messages) - 1}]", what, expected=expected)
    return result


def _add(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    last = messages[-1] if messages else {}
    if last.get("role") != message["role"] or message["role"] == "tool":
        messages.append(message)
        return
    last["content"] += message["content"]
    if calls := message.get("tool_calls"):
        last.setdefault("tool_calls", []).extend(calls)
    if "reasoning_content" in message:
        last["reasoning_content"] = "\n".join(filter(None, (last.get("reasoning_content"), message["reasoning_content"])))


def _message(role: str, block: dict[str, Any], place: str, ignored: dict[str, None]) -> dict[str, Any]:
    """A message with one block."""
    match _kind(block, place, _KINDS[role], ignored):
        case "tool_result":
            return {"role": "tool", **_result(block, place, ignored)}
        case "thinking":
            return {"role": role, "content": [], "reasoning_content": text_at(block.get("thinking"), f"{place}.thinking")}
        case "redacted_thinking":
            ignored["messages[].content[redacted_thinking]"] = None
            return {"role": role, "content": []}
        case "tool_use":
            if not isinstance(arguments := block.get("input"), dict | None):
                raise bad_field(f"{place}.input", "not an object", found=type(arguments).__name__)
            function = {"name": text_at(block.get("name"), f"{place}.name"), "arguments": arguments}
            call = {"id": text_at(block.get("id"), f"{place}.id"), "type": "function", "function": function}
            return {"role": role, "content": [], "tool_calls": [call]}
    return {"role": role, "content": [_text_part(block, place)]}


def _result(block: dict[str, Any], place: str, ignored: dict[str, None]) -> dict[str, Any]:
    content, failed = block.get("content"), block.get("is_error")
    if failed not in (None, True, False):
        raise bad_field(f"{place}.is_error", "not a truth value", found=shown(failed))
    texts = _texts([] if content is None else content, f"{place}.content", ignored)
    text = (_ERROR if failed else "") + "\n".join(part["text"] for part in texts)
    return {"tool_call_id": text_at(block.get("tool_use_id"), f"{place}.tool_use_id"), "content": text}


def _blocks(content: Any, place: str) -> list[dict[str, Any]]:
    """Content as a list of blocks: a text is one block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise bad_field(place, "not content", expected="a text, or a list of blocks", found=type(content).__name__)
    for i, block in enumerate(content):
        if not isinstance(block, dict):
            raise bad_field(f"{place}[{i}]", "not a block", expected='{"type": …}', found=type(block).__name__)
    return content


def _kind(block: dict[str, Any], place: str, known: tuple[str, ...], ignored: dict[str, None]) -> str:
    """The type of a block. Raises 400 unless it is in `known`."""
    kind = block.get("type")
    if kind not in known:
        hint = "minirt's models read text only" if kind in ("image", "document") else None
        shown = kind[:40] if isinstance(kind, str) else repr(kind)[:40]
        raise bad_field(f"{place}.type", "a block of another type", expected=" or ".join(known), found=shown, hint=hint)
    _note(block, _BLOCK_FIELDS[kind] | {"type", "cache_control"}, f"messages[].content[{kind}]", ignored)
    return kind


def _texts(content: Any, place: str, ignored: dict[str, None]) -> list[dict[str, Any]]:
    """Content that may have text only, as parts of OpenAI's form."""
    blocks = _blocks(content, place)
    for i, block in enumerate(blocks):
        _kind(block, f"{place}[{i}]", ("text",), ignored)
    return [_text_part(block, f"{place}[{i}]") for i, block in enumerate(blocks)]


def _text_part(block: dict[str, Any], place: str) -> dict[str, Any]:
    return {"type": "text", "text": text_at(block.get("text"), f"{place}.text")}


def _note(value: Mapping[str, Any], known: Iterable[str], place: str, ignored: dict[str, None]) -> None:
    ignored.update((f"{place}.{name}", None) for name in value.keys() - set(known))


# --- tools and thinking ---


def _tools(values: list[Any], ignored: dict[str, None]) -> list[Tool]:
    """The tools that the client runs. Tools with another type, which Anthropic's servers or models run, are left out."""

    def read(tool: object, place: str) -> dict[str, Any] | None:
        if not isinstance(tool, dict):
            raise bad_field(place, "not an object", found=type(tool).__name__)
        if tool.get("type") not in (None, "custom"):
            ignored[f"tools[{text_at(tool['type'], f'{place}.type')}]"] = None
            return None
        if tool.get("input_schema") is None:
            raise bad_field(f"{place}.input_schema", "is missing", expected="a JSON schema")
        _note(tool, _TOOL_FIELDS, "tools[]", ignored)
        function = {"name": tool.get("name")}
        if tool.get("description") is not None:
            function["description"] = text_at(tool["description"], f"{place}.description")
        return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}

    return read_tools(values, read, "name", "input_schema")


def _choice(choice: dict[str, Any]) -> tuple[Any, bool]:
    """`tool_choice` in OpenAI's form, and whether an answer may have several calls."""
    if not choice:
        return None, True
    kind, single = choice.get("type"), choice.get("disable_parallel_tool_use")
    if type(single) not in (type(None), bool):
        raise bad_field("tool_choice.disable_parallel_tool_use", "not a truth value", found=shown(single))
    if kind == "tool":
        return {"type": "function", "function": {"name": text_at(choice.get("name"), "tool_choice.name")}}, not single
    if not isinstance(kind, str) or kind not in _CHOICES:
        expected, shown_kind = "auto, any, tool or none", shown(kind)
        raise bad_field("tool_choice.type", "not an acceptable value", expected=expected, found=shown_kind)
    return _CHOICES[kind], not single


def _variables(front: Front, request: CountTokensRequest, ignored: dict[str, None]) -> dict[str, Any]:
    """The variables of the chat template. Clients send `thinking` and `effort` to any model, so those are ignored if unknown."""
    tokenizer, config = front.check_ready()[0].text(), request.output_config or {}
    _note(config, {"format", "effort"}, "output_config", ignored)
    effort = None if config.get("effort") is None else text_at(config["effort"], "output_config.effort")
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
