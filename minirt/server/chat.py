"""/v1/chat/completions: conversations through the model's chat template."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minirt.engine.request import TokenLogprobs
from minirt.outputs import Completion
from minirt.server.answers import Format, collect, finite, stream, token_text, top_of, usage_of
from minirt.server.conversation import Conversation, Prepared, prepare, template_variables
from minirt.server.errors import bad_field, shown
from minirt.server.exchange import Exchange, encode_json
from minirt.server.front import Front
from minirt.server.generation import Choice
from minirt.server.json_size import check_text
from minirt.server.protocol import Listed, Positive, Sampling, check_nesting, decode, structured_outputs
from minirt.server.replies import ReplyPlan, ReplyReader
from minirt.text.messages import MESSAGE_FIELDS
from minirt.text.reply import ArgumentsDelta, ContentDelta, Event, ReasoningDelta, Reply, ToolCall
from minirt.text.tokenizer import Tokenizer
from minirt.text.tools import Tool, read_tools

_ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatRequest(Sampling, kw_only=True):
    """The fields of a request for the next message of a conversation."""

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


async def chat_completions(front: Front, exchange: Exchange) -> None:
    front.check_ready()
    body = await exchange.body(front.options.max_body_size)
    exchange.cancel_on_disconnect()
    request, ready = await front.in_thread(_prepare, front, exchange, body)
    fields = {
        "id": f"chatcmpl-{exchange.id}", "object": "chat.completion", "created": int(time.time()), "model": front.options.names[0]
    }  # fmt: skip
    prefix = ready.prompt.last if request.echo else ""
    if request.stream:
        form = _Events(fields | {"object": "chat.completion.chunk"}, ready.tokenizer, request, ready.plan, prefix)
        await stream(front, exchange, request, ready.call, form)
        return
    done = await collect(front, exchange, ready.call)
    choices = [_choice(ready.tokenizer, i, own, request, ready.plan, prefix) for i, own in enumerate(done)]
    await exchange.answer(fields | {"choices": choices, "usage": usage_of(ready.call)})


def _prepare(front: Front, exchange: Exchange, body: bytes) -> tuple[ChatRequest, Prepared]:
    request = decode(front, body, ChatRequest)
    front.check_model(request.model)
    exchange.prompt_field = "messages"
    _check(request)
    if front.options.log_prompts:
        exchange.log["messages"] = request.messages
    tools = read_tools(request.tools or [])
    parallel = request.parallel_tool_calls is not False
    conversation = replace(conversation_of(front, request, tools), tool_choice=request.tool_choice, parallel=parallel)
    newer = request.max_completion_tokens
    ready = prepare(
        front, exchange, conversation, request, {"max_tokens": "max_tokens" if newer is None else "max_completion_tokens"},
        max_tokens=newer or request.max_tokens, grammar=structured_outputs(request),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None, n=request.n or 1,
        prompt_logprobs=request.prompt_logprobs,
    )  # fmt: skip
    return request, ready


def _check(request: ChatRequest) -> None:
    for name in ("chat_template_kwargs", "tools", "tool_choice"):
        check_nesting(name, getattr(request, name))
    if request.max_completion_tokens is not None and request.max_tokens not in (None, request.max_completion_tokens):
        what = "max_tokens and max_completion_tokens are the same limit, and differ"
        raise bad_field("max_completion_tokens", what, expected=request.max_tokens, found=request.max_completion_tokens)
    if request.top_logprobs and not request.logprobs:
        raise bad_field("top_logprobs", "needs logprobs", expected="logprobs: true")
    if request.continue_final_message and request.add_generation_prompt:
        raise bad_field("continue_final_message", "excludes add_generation_prompt: true")
    if request.prompt_logprobs is not None and request.stream:
        raise bad_field("prompt_logprobs", "is not for streams", expected="stream: false")


def conversation_of(front: Front, request: Any, tools: Sequence[Tool]) -> Conversation:
    """A request's conversation. `request` has the fields of the chat template, as `ChatRequest` has."""
    messages = known_messages(request.messages, front)
    hints = {"reasoning_effort": request.reasoning_effort, "verbosity": request.verbosity}
    variables = template_variables(front, request.chat_template_kwargs, hints)
    continues = bool(request.continue_final_message)
    if continues and messages[-1]["role"] != "assistant":
        raise bad_field("continue_final_message", "needs a last message of the assistant", found=messages[-1]["role"])
    opens = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    return Conversation(
        messages, tools, variables=variables, opens_answer=opens, continues=continues,
        truncates=request.truncate_prompt_tokens is not None,
    )  # fmt: skip


def known_messages(messages: Sequence[dict[str, Any]], front: Front) -> list[dict[str, Any]]:
    """Messages without the fields that nobody knows. "developer" is OpenAI's newer name of the role "system"."""
    if not messages:
        raise bad_field("messages", "is empty", expected="at least one message")
    own = []
    for i, message in enumerate(messages):
        if message.get("role") not in _ROLES:
            expected, found = ", ".join(_ROLES), shown(message.get("role"))
            raise bad_field(f"messages[{i}].role", "not an acceptable role", expected=expected, found=found)
        front.note_unknown([f"messages[].{name}" for name in message if name not in MESSAGE_FIELDS])
        own.append({name: value for name, value in message.items() if name in MESSAGE_FIELDS})
        _check_arguments(message.get("tool_calls"), f"messages[{i}].tool_calls")
        if own[-1].get("role") == "developer":
            own[-1]["role"] = "system"
    return own


def _check_arguments(calls: Any, where: str) -> None:
    """Check the size of the arguments of tool calls, which are texts with JSON."""
    for i, call in enumerate(calls if isinstance(calls, list) else ()):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(arguments := function.get("arguments"), str):
            check_text(arguments, f"{where}[{i}].function.arguments")


def _choice(
    tokenizer: Tokenizer, index: int, done: Completion, request: ChatRequest, plan: ReplyPlan, prefix: str
) -> dict[str, Any]:
    count = request.top_logprobs or 0
    logprobs = None if done.logprobs is None else {"content": _rows(tokenizer, done.logprobs, count), "refusal": None}
    message = {"role": "assistant", "refusal": None} | _message(plan.read(done.text), prefix)
    choice = {
        "index": index, "message": message, "logprobs": logprobs,
        "finish_reason": _finish_reason(done.finish_reason, "tool_calls" in message),
    }  # fmt: skip
    if done.prompt_logprobs is not None:
        choice["prompt_logprobs"] = [None if row is None else row_by_id(tokenizer, row) for row in done.prompt_logprobs]
    return choice


def _message(reply: Reply, prefix: str) -> dict[str, Any]:
    """The fields of a message with a whole reply. `prefix`: stands before its content."""
    calls, content = reply.tool_calls, prefix + reply.content
    found: dict[str, Any] = {"content": content or (None if calls or reply.reasoning else "")}
    if reply.reasoning:
        found |= _reasoning(reply.reasoning)
    return found | ({"tool_calls": [_call(call) for call in calls]} if calls else {})


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


def _finish_reason(reason: str | None, calls: bool) -> str | None:
    """OpenAI's reason for the end of an answer, with or without tool calls."""
    return "tool_calls" if calls and reason == "stop" else reason


def row_by_id(tokenizer: Tokenizer | None, row: TokenLogprobs) -> dict[str, Any]:
    """vLLM's form of a prompt token's log-probabilities: token id → value, rank and text."""
    ranks = {token: (rank, logprob) for rank, (token, logprob) in enumerate(row.top, 1)} | {row.token_id: (row.rank, row.logprob)}
    return {
        str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token)}
        for token, (rank, logprob) in ranks.items()
    }


def _rows(tokenizer: Tokenizer | None, rows: Sequence[TokenLogprobs], count: int) -> list[dict[str, Any]]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        own = token_text(tokenizer, token)
        data = list(own.encode() if tokenizer is None else tokenizer.token_bytes(token))
        return {"token": own, "logprob": finite(logprob), "bytes": data}

    return [
        entry(row.token_id, row.logprob) | {"top_logprobs": [entry(token, logprob) for token, logprob in top_of(row, count)]}
        for row in rows
    ]


class _Events(Format):
    def __init__(
        self, fields: dict[str, Any], tokenizer: Tokenizer, request: ChatRequest, plan: ReplyPlan, prefix: str
    ) -> None:
        super().__init__(fields, tokenizer, bool(request.logprobs), parses=plan.parser() is not None)
        self._count, self._plan, self._prefix = request.top_logprobs or 0, plan, prefix
        self._readers: dict[int, ReplyReader] = {}

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        if self.parses:
            return b'{"index":%d,"delta":' % index, b""
        return b'{"index":%d,"delta":{"content":' % index, b"}"

    def opening(self, choice: Choice) -> bytes:
        delta = encode_json({"role": "assistant", "content": self._prefix})
        return self.start + b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}]}\n\n' % (choice.index, delta)

    def deltas(self, choice: Choice) -> list[bytes]:
        reader = self._readers.get(choice.index)
        if reader is None:
            reader = self._readers[choice.index] = self._plan.reader()
        return [encode_json(_delta(event)) for event in reader.read(choice.text, choice.finish_reason is not None)]

    def finish_reason(self, choice: Choice) -> str | None:
        reader = self._readers.get(choice.index)
        return _finish_reason(choice.finish_reason, reader is not None and reader.calls)

    def logprobs(self, choice: Choice, start: int, stop: int) -> Any:
        rows = choice.stream.completion.logprobs or []
        return {"content": _rows(self.tokenizer, rows[start:stop], self._count), "refusal": None}


ROUTES = {"POST /v1/chat/completions": chat_completions}
