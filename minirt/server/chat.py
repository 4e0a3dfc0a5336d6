"""/v1/chat/completions: conversations through the model's chat template."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minirt.engine.request import TokenLogprobs
from minirt.outputs import Completion
from minirt.server.answers import Answer, ChoicesAnswer, finite, prompt_rows, token_text, top_of
from minirt.server.conversation import Conversation, Prepared, ReplyReader, prepare, template_variables
from minirt.server.errors import bad_field, check_choice
from minirt.server.exchange import Exchange, encode_json
from minirt.server.front import Front
from minirt.server.generation import Choice
from minirt.server.json_size import check_text
from minirt.server.protocol import Listed, Positive, SamplingRequest, decode
from minirt.text.messages import MESSAGE_FIELDS
from minirt.text.reply import ArgumentsDelta, ContentDelta, Event, ReasoningDelta, Reply, ToolCall, collect
from minirt.text.tools import Tool, read_tools

_ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatRequest(SamplingRequest, kw_only=True):
    """The fields of a request for the next message of a conversation."""

    prompt_fields = ("messages",)
    messages: list[dict[str, Any]]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Listed | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    echo: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None


def _prepare(front: Front, exchange: Exchange, body: bytes) -> Answer:
    request = decode(front, exchange, body, ChatRequest)
    _check(request)
    tools = read_tools(request.tools or [])
    parallel = request.parallel_tool_calls is not False
    conversation = replace(conversation_of(front, request, tools), tool_choice=request.tool_choice, parallel=parallel)
    newer = request.max_completion_tokens
    prepared = prepare(
        front, exchange, conversation, request, {} if newer is None else {"max_tokens": "max_completion_tokens"},
        max_tokens=newer or request.max_tokens, grammar=request.grammar,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None, n=request.n or 1,
        prompt_logprobs=request.prompt_logprobs,
    )  # fmt: skip
    return _ChatAnswer(front, exchange, request, prepared)


def _check(request: ChatRequest) -> None:
    if request.max_completion_tokens is not None and request.max_tokens not in (None, request.max_completion_tokens):
        what = "max_tokens and max_completion_tokens are the same limit, and differ"
        raise bad_field("max_completion_tokens", what, expected=request.max_tokens, found=request.max_completion_tokens)
    if request.top_logprobs and not request.logprobs:
        raise bad_field("top_logprobs", "needs logprobs", expected="logprobs: true")
    if request.continue_final_message and request.add_generation_prompt:
        raise bad_field("continue_final_message", "excludes add_generation_prompt: true")


def conversation_of(front: Front, request: Any, tools: Sequence[Tool]) -> Conversation:
    """A request's conversation. `request` has the fields of the chat template, as `ChatRequest` has."""
    messages = known_messages(request.messages, front)
    hints = {name: (getattr(request, name), name) for name in ("reasoning_effort", "verbosity")}
    variables = template_variables(front, request.chat_template_kwargs, hints)
    continues = bool(request.continue_final_message)
    if continues and messages[-1]["role"] != "assistant":
        raise bad_field("continue_final_message", "needs a last message of the assistant", found=messages[-1]["role"])
    opens = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    return Conversation(messages, tools, variables=variables, opens_answer=opens, continues=continues)


def known_messages(messages: Sequence[dict[str, Any]], front: Front) -> list[dict[str, Any]]:
    """Messages without unknown fields. "developer" is OpenAI's newer name of the role "system"."""
    if not messages:
        raise bad_field("messages", "is empty", expected="at least one message")
    known = []
    for i, message in enumerate(messages):
        check_choice(f"messages[{i}].role", message.get("role"), _ROLES, "not an acceptable role")
        front.note_unknown([f"messages[].{name}" for name in message if name not in MESSAGE_FIELDS])
        known.append({name: value for name, value in message.items() if name in MESSAGE_FIELDS})
        _check_arguments(message.get("tool_calls"), f"messages[{i}].tool_calls")
        if known[-1].get("role") == "developer":
            known[-1]["role"] = "system"
    return known


def _check_arguments(calls: Any, place: str) -> None:
    """Check the size of the arguments of tool calls, which are texts with JSON."""
    for i, call in enumerate(calls if isinstance(calls, list) else ()):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(arguments := function.get("arguments"), str):
            check_text(arguments, f"{place}[{i}].function.arguments")


def _message(reply: Reply, prefix: str) -> dict[str, Any]:
    """The fields of a message with a whole reply. `prefix`: stands before its content."""
    calls, content = reply.tool_calls, prefix + reply.content
    message: dict[str, Any] = {"content": content or (None if calls or reply.reasoning else "")}
    if reply.reasoning:
        message |= _reasoning(reply.reasoning)
    return message | ({"tool_calls": [_call(call) for call in calls]} if calls else {})


def _delta(event: Event) -> dict[str, Any]:
    """What an event adds to a streamed message."""
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if isinstance(event, ReasoningDelta):
        return _reasoning(event.text)
    if isinstance(event, ArgumentsDelta):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return {"tool_calls": [{"index": event.index} | _call(ToolCall(event.id, event.name, ""))]}


def _reasoning(text: str) -> dict[str, str]:
    """Clients differ in the name that they read."""
    return {"reasoning": text, "reasoning_content": text}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class _ChatAnswer(ChoicesAnswer):
    def __init__(self, front: Front, exchange: Exchange, request: ChatRequest, prepared: Prepared) -> None:
        self._count, self._prefix = request.top_logprobs or 0, prepared.last if request.echo else ""
        self._readers = [ReplyReader(prepared) for _ in prepared.call.streams]
        fields = {"id": f"chatcmpl-{exchange.id}", "object": "chat.completion"}
        frame = (b'"delta":{"content":', b"}") if prepared.is_plain else (b'"delta":', b"")
        super().__init__(
            front, prepared.call, request, fields, "chat.completion.chunk", frame, prepared.tokenizer,
            wants_logprobs=bool(request.logprobs), parses=not prepared.is_plain,
        )  # fmt: skip

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        reply = collect(self._readers[index].read(completion.text, ended=True))
        message = {"role": "assistant", "refusal": None} | _message(reply, self._prefix)
        choice = {
            "index": index, "message": message, "logprobs": self._logprobs(completion.logprobs),
            "finish_reason": self.finish_reason(index, completion.finish_reason),
        }  # fmt: skip
        if completion.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_rows(self.tokenizer, completion.prompt_logprobs)
        return choice

    def opening(self, choice: Choice) -> bytes:
        delta = encode_json({"role": "assistant", "content": self._prefix})
        return self.start + b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}]}\n\n' % (choice.index, delta)

    def deltas(self, choice: Choice) -> list[bytes]:
        events = self._readers[choice.index].read(choice.text, choice.finish_reason is not None)
        return [encode_json(_delta(event)) for event in events]

    def finish_reason(self, index: int, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._readers[index].calls else reason

    def logprobs(self, choice: Choice, start: int, stop: int) -> Any:
        return self._logprobs((choice.stream.completion.logprobs or [])[start:stop])

    def _logprobs(self, rows: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        return None if rows is None else {"content": [self._row(row) for row in rows], "refusal": None}

    def _row(self, row: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in top_of(row, self._count)]
        return self._token(row.token_id, row.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = token_text(self.tokenizer, token)
        data = list(text.encode() if self.tokenizer is None else self.tokenizer.token_bytes(token))
        return {"token": text, "logprob": finite(logprob), "bytes": data}


ROUTES = {"POST /v1/chat/completions": Front.reads(_prepare)}
