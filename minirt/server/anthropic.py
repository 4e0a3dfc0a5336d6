"""/v1/messages: Anthropic's Messages API, whole or streamed, and its count of tokens."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from minirt.errors import MinirtError
from minirt.server import protocol
from minirt.server.answers import Answer, ReplyAnswer, StreamEvent, named_event, usage_of
from minirt.server.conversation import Conversation, Prepared, prepare, read_parts, render, template_variables
from minirt.server.errors import bad_field, check_choice, error_type, param_of, shown, status_of
from minirt.server.exchange import Exchange, encode_json
from minirt.server.front import Front
from minirt.server.protocol import NO_CHOICES, Common, Positive, answer_form, check_nesting, check_texts, decode
from minirt.text.json_checker import completed
from minirt.text.messages import object_at, text_at
from minirt.text.reply import ToolCallStart
from minirt.text.tools import Tool, read_tools

_PATH = "/v1/messages"
_ERROR_TYPES = {413: "request_too_large", 499: "invalid_request_error", 500: "api_error"}  # where they are not OpenAI's
_SIGNATURE = "unsigned"  # of reasoning: clients send it back, and drop reasoning that has none
# Claude Code puts a block with this beginning in front of its system prompt. It says nothing to a model, and it differs in each
# request, so that the prefix cache would find nothing.
_BILLING = "x-anthropic-billing-header:"
_ERROR = "Error: "  # before the result of a tool that has failed: chat templates have no field for it

# Fields of blocks that are used, or that are about Anthropic's service.
_BLOCK_FIELDS = {
    "text": {"text", "citations"}, "tool_use": {"id", "name", "input", "caller", "toolset_name"},
    "tool_result": {"tool_use_id", "content", "is_error", "toolset_name"}, "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
}  # fmt: skip
_TOOL_FIELDS = {"name", "description", "input_schema", "type", "cache_control"}
# Type of `thinking` → whether the model is to think; None: as its chat template has it.
_THINKING = {"enabled": True, "disabled": False, "adaptive": None, "between_tools": None}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REFUSED = {
    **NO_CHOICES, "container": "there are no containers and no skills",
    "mcp_servers": "the server does not connect to others: run the tools in the client",
    "response_format": "is named output_config.format here", "reasoning_effort": "is named output_config.effort here",
    "parallel_tool_calls": "is named tool_choice.disable_parallel_tool_use here",
}  # fmt: skip


Body = TypeVar("Body", bound="CountTokensRequest")


class CountTokensRequest(Common, kw_only=True):
    """The fields that say what the prompt is."""

    prompt_fields = ("messages", "system")
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


# --- requests ---


def _read(front: Front, exchange: Exchange, body: bytes, kind: type[Body]) -> Body:
    """A request. `stop_sequences` become `stop`."""
    request = decode(front, exchange, body, kind, _REFUSED)
    check_nesting("messages", request.messages)
    if isinstance(request, MessagesRequest) and request.stop_sequences is not None:
        if request.stop is not None:
            raise bad_field("stop_sequences", "excludes stop, which means the same")
        check_texts("stop_sequences", request.stop_sequences, protocol.SETTINGS["stop"].most or 0)
        request.stop = request.stop_sequences
    return request


def _conversation(front: Front, request: CountTokensRequest) -> Conversation:
    """A request's conversation. The log names what is ignored."""
    ignored: dict[str, None] = {}
    messages = _messages(request, ignored)
    tools = _tools(request.tools or [], ignored)
    choice, parallel = _choice(request.tool_choice or {})
    variables = _variables(front, request, ignored)
    front.note_unknown(list(ignored), "unsupported parts of requests")
    continues = messages[-1]["role"] == "assistant"
    return Conversation(messages, tools, choice, parallel, variables, opens_answer=not continues, continues=continues)


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
        _note(message, {"role", "content"}, "messages[]", ignored)
        role = check_choice(f"messages[{i}].role", message.get("role"), _KINDS, "not an acceptable role")
        content, place = message.get("content"), f"messages[{i}].content"
        if content == [] and role != "assistant":
            raise bad_field(place, "is empty", expected="a text, or at least one block")
        for j, block in enumerate(_blocks(content, place, _KINDS[role], ignored)):
            _add(result, role, block, f"{place}[{j}]", ignored)
        if content == []:  # an empty answer has no blocks
            _last(result, role)
    if result[-1].get("tool_calls"):
        what, expected = "ends with a call of a tool", "its tool_result in a message of the user"
        raise bad_field(f"messages[{len(request.messages) - 1}]", what, expected=expected)
    return result


def _add(messages: list[dict[str, Any]], role: str, block: dict[str, Any], place: str, ignored: dict[str, None]) -> None:
    """Add a block of a message of this role."""
    if block["type"] == "tool_result":
        messages.append({"role": "tool", **_result(block, place, ignored)})
        return
    message = _last(messages, role)
    match block["type"]:
        case "thinking":
            thought = text_at(block.get("thinking"), f"{place}.thinking")
            message["reasoning_content"] = "\n".join(filter(None, (message.get("reasoning_content"), thought)))
        case "redacted_thinking":
            ignored["messages[].content[redacted_thinking]"] = None
        case "tool_use":
            if (arguments := block.get("input")) is not None:
                object_at(arguments, f"{place}.input")
            function = {"name": text_at(block.get("name"), f"{place}.name"), "arguments": arguments}
            call = {"id": text_at(block.get("id"), f"{place}.id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        case _:
            message["content"].append(_text_part(block, place))


def _last(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """The last message if it has this role, else a new one."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": []})
    return messages[-1]


def _result(block: dict[str, Any], place: str, ignored: dict[str, None]) -> dict[str, Any]:
    content, failed = block.get("content"), block.get("is_error")
    if failed not in (None, True, False):
        raise bad_field(f"{place}.is_error", "not a truth value", found=shown(failed))
    texts = _texts([] if content is None else content, f"{place}.content", ignored)
    text = (_ERROR if failed else "") + "\n".join(part["text"] for part in texts)
    return {"tool_call_id": text_at(block.get("tool_use_id"), f"{place}.tool_use_id"), "content": text}


def _blocks(content: Any, place: str, kinds: Sequence[str], ignored: dict[str, None]) -> list[dict[str, Any]]:
    """The blocks of a content; a text is one block. `kinds`: the types that they may have."""
    blocks = read_parts(content, place, kinds, "block")
    for block in blocks:
        kind = block["type"]
        _note(block, _BLOCK_FIELDS[kind] | {"type", "cache_control"}, f"messages[].content[{kind}]", ignored)
    return blocks


def _texts(content: Any, place: str, ignored: dict[str, None]) -> list[dict[str, Any]]:
    """Content that may have text only, as parts of OpenAI's form."""
    return [_text_part(block, f"{place}[{i}]") for i, block in enumerate(_blocks(content, place, ("text",), ignored))]


def _text_part(block: dict[str, Any], place: str) -> dict[str, Any]:
    return {"type": "text", "text": text_at(block.get("text"), f"{place}.text")}


def _note(value: Mapping[str, Any], known: Iterable[str], place: str, ignored: dict[str, None]) -> None:
    ignored.update((f"{place}.{name}", None) for name in value.keys() - set(known))


def _tools(values: list[Any], ignored: dict[str, None]) -> list[Tool]:
    """The tools that the client runs. Tools with another type, which Anthropic's servers or models run, are left out."""

    def read(value: object, place: str) -> dict[str, Any] | None:
        tool = object_at(value, place)
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
    single = choice.get("disable_parallel_tool_use")
    if type(single) not in (type(None), bool):
        raise bad_field("tool_choice.disable_parallel_tool_use", "not a truth value", found=shown(single))
    if (kind := check_choice("tool_choice.type", choice.get("type"), (*_CHOICES, "tool"))) == "tool":
        return {"type": "function", "function": {"name": text_at(choice.get("name"), "tool_choice.name")}}, not single
    return _CHOICES[kind], not single


def _variables(front: Front, request: CountTokensRequest, ignored: dict[str, None]) -> dict[str, Any]:
    """The variables of the chat template. Clients send `thinking` and `effort` to any model, so those are ignored if unknown."""
    tokenizer, config = front.check_ready()[0].text(), request.output_config or {}
    _note(config, {"format", "effort"}, "output_config", ignored)
    hints = {"reasoning_effort": (config.get("effort"), "output_config.effort")}
    variables = template_variables(front, request.chat_template_kwargs, hints)
    if thinking := request.thinking:
        kind, budget = check_choice("thinking.type", thinking.get("type"), _THINKING), thinking.get("budget_tokens")
        if budget is not None and (type(budget) is not int or budget < 1):
            raise bad_field("thinking.budget_tokens", "not an acceptable value", expected="an integer >= 1", found=shown(budget))
        _note(thinking, {"type"}, "thinking", ignored)
        if _THINKING[kind] is not None and tokenizer.template_uses("enable_thinking"):
            variables["enable_thinking"] = _THINKING[kind]
        elif _THINKING[kind] is not None:
            ignored["thinking, since the chat template has no enable_thinking"] = None
    return variables


def _prepare(front: Front, exchange: Exchange, body: bytes) -> Answer:
    request, place = _read(front, exchange, body, MessagesRequest), "output_config.format"
    renamed = {} if request.stop_sequences is None else {"stop": "stop_sequences"}
    form = (request.output_config or {}).get("format")
    prepared = prepare(
        front, exchange, _conversation(front, request), request, renamed, max_tokens=request.max_tokens, grammar_field=place,
        grammar=answer_form(form, request.structured_outputs, place, kinds=("json_schema",)),
    )  # fmt: skip
    return _MessageAnswer(front, exchange, request, prepared)


def _count_tokens(front: Front, exchange: Exchange, body: bytes) -> dict[str, int]:
    """The number of tokens of a prompt, which may be longer than the model can take."""
    request = _read(front, exchange, body, CountTokensRequest)
    return {"input_tokens": len(render(front, _conversation(front, request), any_length=True))}


# --- answers ---


def adopt(exchange: Exchange) -> None:
    """Use this API's form of errors for its exchanges, also before a handler runs, and add its header with the id."""
    if exchange.path != _PATH and not exchange.path.startswith(f"{_PATH}/"):
        return

    def error_body(error: MinirtError, prompt_field: str | None) -> bytes:
        param = param_of(error, prompt_field)
        text = str(error) if param is None else f"{param}: {error.at(None)}"
        content = {"type": error_type(status_of(error), _ERROR_TYPES), "message": text}
        return encode_json({"type": "error", "error": content, "request_id": exchange.id})

    exchange.error_body = error_body
    exchange.error_event = lambda error: b"event: error\ndata: %b\n\n" % error_body(error, exchange.prompt_field)
    exchange.headers.append((b"request-id", exchange.id.encode()))


# Kind of a part → the type of its block, that of its deltas, and the field of both that grows.
_GROWS = {
    "text": ("text", "text_delta", "text"), "reasoning": ("thinking", "thinking_delta", "thinking"),
    "call": ("tool_use", "input_json_delta", "partial_json"),
}  # fmt: skip


class _MessageAnswer(ReplyAnswer):
    def __init__(self, front: Front, exchange: Exchange, request: MessagesRequest, prepared: Prepared) -> None:
        super().__init__(prepared, request.stream)
        model = request.model or front.options.names[0]
        self._fields = {"id": f"msg_{exchange.id}", "type": "message", "role": "assistant", "model": model}
        self._stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        self._max_tokens = request.max_tokens

    def message(self) -> dict[str, Any]:
        self.end_part()
        return self._message(self.parts) | self._ending()

    def begin(self) -> bytes:
        return named_event({"type": "message_start", "message": self._message([])})

    def end(self) -> bytes:
        last = {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}, {"type": "message_stop"}
        return b"".join(map(named_event, [*self.end_part(), *last]))

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return self._fields | {"content": content, "stop_reason": None, "stop_sequence": None, "usage": self._usage()}

    def _ending(self) -> dict[str, str | None]:
        """Why the answer has ended."""
        stop = self.call.streams[0].stops.match
        if self.completion.finish_reason == "length":
            full = len(self.completion.token_ids) < self._max_tokens
            return {"stop_reason": "model_context_window_exceeded" if full else "max_tokens", "stop_sequence": None}
        if stop in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        called = any(block["type"] == "tool_use" for block in self.parts)
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        """Tokens so far. Cached prompt tokens are counted apart from the other ones, as in Anthropic's API."""
        counts = usage_of(self.call)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached, "output_tokens": counts["completion_tokens"],
        }  # fmt: skip

    def open_part(self, call: ToolCallStart | None) -> list[StreamEvent]:
        kind, _, field = _GROWS[self.kind]
        block: dict[str, Any] = {"type": kind, field: ""} | ({"signature": ""} if kind == "thinking" else {})
        if call is not None:
            block = {"type": kind, "id": "toolu_" + call.id.removeprefix("call_"), "name": call.name, "input": {}}
        self.parts.append(block)
        return [{"type": "content_block_start", "index": len(self.parts) - 1, "content_block": block.copy()}]

    def delta(self, text: str) -> StreamEvent:
        _, kind, field = _GROWS[self.kind]
        return {"type": "content_block_delta", "index": len(self.parts) - 1, "delta": {"type": kind, field: text}}

    def close_part(self, text: str, complete: bool) -> list[StreamEvent]:
        block, index, signed = self.parts[-1], len(self.parts) - 1, list[StreamEvent]()
        if self.kind != "call":
            block[_GROWS[self.kind][2]] = text
        elif not self.streams:
            block["input"] = msgspec.Raw(completed(text).encode())
        if self.kind == "reasoning":
            block["signature"] = _SIGNATURE
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            signed = [{"type": "content_block_delta", "index": index, "delta": delta}]
        return [*signed, {"type": "content_block_stop", "index": index}]


ROUTES = {"POST /v1/messages": Front.reads(_prepare), "POST /v1/messages/count_tokens": Front.reads(_count_tokens)}
