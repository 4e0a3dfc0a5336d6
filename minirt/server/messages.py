"""/v1/messages: Anthropic's Messages API, whole or streamed, and its count of tokens."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from minirt.errors import MinirtError
from minirt.outputs import Completion
from minirt.server.answers import Answer, ReplyAnswer, endpoint, named_event, usage_of
from minirt.server.conversation import Prepared, Prompt, prepare, render
from minirt.server.errors import param_of, status_of
from minirt.server.exchange import Exchange, encode_json
from minirt.server.front import Front
from minirt.server.messages_request import (
    UNSUPPORTED,
    CountTokensRequest,
    MessagesRequest,
    check_request,
    conversation_of,
    grammar_of,
)
from minirt.server.protocol import decode
from minirt.text.json_checker import completed
from minirt.text.reply import ContentDelta, Event, ReasoningDelta, ToolCallStart

_PATH = "/v1/messages"
_ERROR_TYPES = {
    401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
_SIGNATURE = "unsigned"  # of reasoning: clients send it back, and drop reasoning that has none

Body = TypeVar("Body", bound=CountTokensRequest)


def adopt(exchange: Exchange) -> None:
    """Use this API's form of errors for its exchanges, also before a handler runs, and add its header with the id."""
    if exchange.path != _PATH and not exchange.path.startswith(f"{_PATH}/"):
        return

    def error_body(error: MinirtError, prompt_field: str | None) -> bytes:
        param = param_of(error, prompt_field)
        text = str(error) if param is None else f"{param}: {error.at(None)}"
        status = status_of(error)
        content = {"type": _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error"), "message": text}
        return encode_json({"type": "error", "error": content, "request_id": exchange.id})

    def error_event(error: MinirtError) -> bytes:
        return b"event: error\ndata: %b\n\n" % error_body(error, exchange.prompt_field)

    exchange.error_body, exchange.error_event = error_body, error_event
    exchange.headers.append((b"request-id", exchange.id.encode()))


def _prepare(front: Front, exchange: Exchange, body: bytes) -> Answer:
    request = _read(front, exchange, body, MessagesRequest)
    renamed = {} if request.stop_sequences is None else {"stop": "stop_sequences"}
    prepared = prepare(
        front, exchange, conversation_of(front, request), request, renamed, max_tokens=request.max_tokens,
        grammar=grammar_of(request), grammar_field="output_config.format",
    )  # fmt: skip
    return _MessageAnswer(front, exchange, request, prepared)


async def _count_tokens(front: Front, exchange: Exchange) -> None:
    """The number of tokens of a prompt, which may be longer than the model can take."""
    await exchange.answer({"input_tokens": len((await front.read(exchange, _render)).tokens)})


def _render(front: Front, exchange: Exchange, body: bytes) -> Prompt:
    request = _read(front, exchange, body, CountTokensRequest)
    return render(front, conversation_of(front, request, truncates=True))


def _read(front: Front, exchange: Exchange, body: bytes, kind: type[Body]) -> Body:
    request = decode(front, body, kind, UNSUPPORTED)
    exchange.prompt_field = "messages"
    check_request(request)
    if front.options.log_prompts:
        exchange.log |= {"system": request.system, "messages": request.messages}
    return request


class _MessageAnswer(ReplyAnswer):
    def __init__(self, front: Front, exchange: Exchange, request: MessagesRequest, prepared: Prepared) -> None:
        super().__init__(prepared, request.stream)
        model = front.options.names[0]
        self._fields = {"id": f"msg_{exchange.id}", "type": "message", "role": "assistant", "model": model}
        self._stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        self._max_tokens, self._blocks = request.max_tokens, _Blocks()

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        events = self.whole_reply()
        content = _content([*(event for reply in events for event in self._blocks.add(reply)), *self._blocks.stop()])
        return self._message(content) | self._ending()

    def begin(self) -> bytes:
        return named_event({"type": "message_start", "message": self._message([])})

    def tell(self, events: Sequence[Event]) -> list[bytes]:
        return [named_event(event) for reply in events for event in self._blocks.add(reply)]

    def end(self) -> bytes:
        last = {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}, {"type": "message_stop"}
        return b"".join(map(named_event, [*self._blocks.stop(), *last]))

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return self._fields | {"content": content, "stop_reason": None, "stop_sequence": None, "usage": self._usage()}

    def _ending(self) -> dict[str, str | None]:
        """Why the answer has ended."""
        stop = self.call.streams[0].stops.found
        if self.completion.finish_reason == "length":
            full = len(self.completion.token_ids) < self._max_tokens
            return {"stop_reason": "model_context_window_exceeded" if full else "max_tokens", "stop_sequence": None}
        if stop in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "tool_use" if self._blocks.called else "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        """Tokens so far. Cached prompt tokens are counted apart from the other ones, as in Anthropic's API."""
        counts = usage_of(self.call)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached, "output_tokens": counts["completion_tokens"],
        }  # fmt: skip


class _Blocks:
    """Turns a reply into the stream events of content blocks: each starts, gets deltas, and stops before the next one starts."""

    def __init__(self) -> None:
        self._index, self._kind = -1, ""
        self.called = False  # whether there was a block of a tool's call

    def add(self, event: Event) -> list[dict[str, Any]]:
        if isinstance(event, ContentDelta):
            start = self._need("text", {"text": ""})
            return [*start, self._delta("text_delta", "text", event.text)]
        if isinstance(event, ReasoningDelta):
            start = self._need("thinking", {"thinking": "", "signature": ""})
            return [*start, self._delta("thinking_delta", "thinking", event.text)]
        if isinstance(event, ToolCallStart):
            self.called = True
            call_id = "toolu_" + event.id.removeprefix("call_")
            return [*self.stop(), *self._need("tool_use", {"id": call_id, "name": event.name, "input": {}})]
        return [self._delta("input_json_delta", "partial_json", event.text)]

    def stop(self) -> list[dict[str, Any]]:
        """The end of the block that is open, if any."""
        kind, self._kind = self._kind, ""
        if not kind:
            return []
        signed = [self._delta("signature_delta", "signature", _SIGNATURE)] if kind == "thinking" else []
        return [*signed, {"type": "content_block_stop", "index": self._index}]

    def _need(self, kind: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        """Events after which a block of this kind is open."""
        if self._kind == kind:
            return []
        stopped = self.stop()
        self._index, self._kind = self._index + 1, kind
        block = {"type": kind} | fields
        return [*stopped, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, kind: str, name: str, text: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, name: text}}


def _content(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content blocks that a stream's events add up to."""
    blocks, inputs = list[dict[str, Any]](), dict[int, str]()
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta, index = event["delta"], event["index"]
            if delta["type"] == "input_json_delta":
                inputs[index] = inputs.get(index, "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                blocks[index][name] += delta[name]
    for index, text in inputs.items():
        blocks[index]["input"] = msgspec.Raw(completed(text).encode())
    return blocks


ROUTES = {
    "POST /v1/messages": endpoint(lambda front, exchange: front.read(exchange, _prepare)),
    "POST /v1/messages/count_tokens": _count_tokens,
}
