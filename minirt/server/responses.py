"""/v1/responses: OpenAI's Responses API. It is stateless: a request has the whole conversation, and no answer is stored."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from minirt.errors import MinirtError, quoted
from minirt.outputs import Completion
from minirt.server.answers import Answer, ReplyAnswer, StreamEvent, named_event, usage_of
from minirt.server.conversation import Conversation, Prepared, prepare, read_parts, template_variables
from minirt.server.errors import HTTPError, bad_field, check_choice, error_fields
from minirt.server.exchange import Exchange
from minirt.server.front import Front
from minirt.server.json_size import check_text
from minirt.server.protocol import NO_CHOICES, NO_LOGPROBS, Common, Int, Positive, StreamOptions, answer_form, decode
from minirt.text.messages import object_at, text_at
from minirt.text.reply import ContentDelta, ToolCallStart
from minirt.text.tokenizer import Tokenizer
from minirt.text.tools import Tool, read_tools

_PATH = "/v1/responses"


class ResponsesRequest(Common, kw_only=True):
    """The fields of a request for a response."""

    prompt_fields = ("input", "instructions")
    input: Any
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tool_calls: Int | None = None  # without effect: of tools that the server runs; there are none


_STATELESS = "answers are not stored: send the whole conversation in input"
_REFUSED = {
    **NO_CHOICES, **dict.fromkeys(("previous_response_id", "conversation"), _STATELESS),
    "background": "answers are not stored, so none can be asked for later",
    "prompt": "stored prompts are not supported: use input",
    **dict.fromkeys(("truncation", "context_management"), "a conversation is not shortened"), "messages": "is named input here",
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "is named max_output_tokens here"),
    "response_format": "is named text.format here", "reasoning_effort": "is named reasoning.effort here",
    "verbosity": "is named text.verbosity here",
}  # fmt: skip
# Outputs that `include` asks for. They belong to tools that are not there, or are always part of an answer, or are missing.
_INCLUDE = (
    "reasoning.encrypted_content", "message.input_image.image_url", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
)  # fmt: skip


_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}  # type of a part → its text
_REASONING = {"reasoning_text": "text", "summary_text": "text"}
_ITEMS = "message, function_call, function_call_output or reasoning"


def _prepare(front: Front, exchange: Exchange, body: bytes) -> Answer:
    request = decode(front, exchange, body, ResponsesRequest, _REFUSED)
    _check(front, request)
    tools, ignored = _read_tools(front, request.tools or []), dict[str, None]()
    messages = _messages(request.input, request.instructions, ignored)
    front.note_unknown(list(ignored), "unsupported parts of requests")
    text, effort, choice = request.text or {}, (request.reasoning or {}).get("effort"), request.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    hints = {"reasoning_effort": (effort, "reasoning.effort"), "verbosity": (text.get("verbosity"), "text.verbosity")}
    conversation = Conversation(
        messages, tools, choice, request.parallel_tool_calls is not False,
        template_variables(front, request.chat_template_kwargs, hints),
    )  # fmt: skip
    grammar = answer_form(text.get("format"), request.structured_outputs, "text.format")
    prepared = prepare(
        front, exchange, conversation, request, {"max_tokens": "max_output_tokens"}, max_tokens=request.max_output_tokens,
        grammar=grammar, grammar_field="text.format",
    )  # fmt: skip
    answer = _ResponseAnswer(front, exchange, request, tools, prepared)
    exchange.error_event = answer.failed
    return answer


def _check(front: Front, request: ResponsesRequest) -> None:
    if request.metadata is not None:
        object_at(request.metadata, "metadata")
    if "message.output_text.logprobs" in (include := request.include or ()):
        raise bad_field("include", NO_LOGPROBS, found="message.output_text.logprobs")
    front.note_unknown([f"include: {name}" for name in include if name not in _INCLUDE])
    for name, known in (("text", ("format", "verbosity")), ("reasoning", ("effort", "summary", "generate_summary"))):
        front.note_unknown([f"{name}.{part}" for part in getattr(request, name) or () if part not in known])


def _read_tools(front: Front, values: list[Any]) -> list[Tool]:
    """The functions of a request's `tools`: {"type": "function", "name", "description", "parameters"}. Others are ignored."""

    def read(value: object, place: str) -> dict[str, Any] | None:
        if not isinstance(value, dict) or not isinstance(kind := value.get("type"), str):
            raise bad_field(place, "not a tool", expected='{"type": "function", "name": …}', found=quoted(value, 80))
        if kind != "function":
            front.note_unknown([kind], "tools that are no functions")
            return None
        if value.get("description") is not None:
            text_at(value["description"], f"{place}.description")
        function = {name: value[name] for name in ("name", "description", "parameters") if value.get(name) is not None}
        return {"type": "function", "function": function}

    return read_tools(values, read, "name", "parameters")


# --- input items become messages ---


def _messages(value: Any, instructions: str | None, ignored: dict[str, None]) -> list[dict[str, Any]]:
    """A request's `input` as messages that `checked_messages` takes.

    `instructions` and the system messages at the beginning become one system message, because many chat templates take one only.
    Consecutive items of the assistant (reasoning, a message, calls) become one message. The text of a reasoning item is its
    content, or else its summary; an item with neither is left out, and named in `ignored`.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise bad_field("input", "not an input", expected="a text, or a non-empty list of items", found=quoted(value, 80))
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for i, item in enumerate(value):
        place = f"input[{i}]"
        kind = object_at(item, place, "not an item", "an object").get("type", "message" if "role" in item else None)
        if kind == "message":
            _add_message(messages, item, place)
        elif kind == "function_call":
            _assistant(messages, "tool_calls").setdefault("tool_calls", []).append(_call(item, place))
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
        else:
            what = "answers are not stored: send the item itself" if kind == "item_reference" else "not an acceptable item"
            raise bad_field(f"{place}.type", what, expected=_ITEMS, found=quoted(kind, 80))
    if not messages:
        raise bad_field("input", "has no message", expected="at least one message")
    return messages


def _add_message(messages: list[dict[str, Any]], item: dict[str, Any], place: str) -> None:
    role, text = item.get("role"), _text_of(item.get("content"), f"{place}.content", _TEXTS)
    check_choice(f"{place}.role", role, _ROLES, "not an acceptable role")
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


def _text_of(content: Any, place: str, fields: dict[str, str]) -> str:
    """The text of a content. Its parts, which are joined with newlines, may have these types, with a text in this field."""
    parts = ((part, fields.get(part["type"], "text")) for part in read_parts(content, place, fields))
    return "\n".join(text_at(part.get(name), f"{place}[{i}].{name}") for i, (part, name) in enumerate(parts))


# --- answers ---

_GROWS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}  # as events name it


class _ResponseAnswer(ReplyAnswer):
    """The response to a request, as it stands. Its parts are the output items."""

    def __init__(
        self, front: Front, exchange: Exchange, request: ResponsesRequest, tools: Sequence[Tool], prepared: Prepared
    ) -> None:
        super().__init__(prepared, request.stream)
        self._tokenizer, self._status, self._num_events = prepared.tokenizer, "in_progress", 0
        self._id, self._created = f"resp_{exchange.id}", int(time.time())
        sampling, reasoning = self.completion.sampling, request.reasoning or {}
        tool_fields = {"type": "function", "strict": None, "description": None, "parameters": None}
        self._said = {
            "background": False, "conversation": None, "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens, "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {}, "model": request.model or front.options.names[0],
            "parallel_tool_calls": request.parallel_tool_calls is not False, "previous_response_id": None, "prompt": None,
            "prompt_cache_key": request.prompt_cache_key, "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "safety_identifier": request.safety_identifier, "service_tier": "default", "store": False,
            "temperature": sampling.temperature, "text": {"format": (request.text or {}).get("format") or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto", "top_logprobs": 0, "top_p": sampling.top_p,
            "tools": [tool_fields | tool.value["function"] for tool in tools], "truncation": "disabled", "user": request.user,
        }  # fmt: skip

    def message(self) -> dict[str, Any]:
        self._end()
        return self._response()

    def begin(self) -> bytes:
        return self._about("created") + self._about("in_progress")

    def end(self) -> bytes:
        return b"".join(map(self.encode, self._end())) + self._about(self._status)

    def failed(self, error: MinirtError) -> bytes:
        """What tells that the reply has failed: an event with the error, and one with the response."""
        fields = error_fields(error)
        message, code = fields["message"], fields["code"] or fields["type"]
        self._end()
        event = self.encode({"type": "error", "code": code, "message": message, "param": fields["param"]})
        return event + self._about("failed", {"code": "server_error", "message": message})

    def _end(self) -> list[StreamEvent]:
        """The reply has ended, or is complete up to an error. A reply of nothing is an empty message."""
        self._status = "completed" if self.completion.finish_reason == "stop" else "incomplete"
        return ([] if self.parts else self.grow([ContentDelta("")])) + self.end_part(self._status == "completed")

    def _response(self, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The object that clients get. `error`: what it has failed with."""
        status = self._status if error is None else "failed"
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "error": error,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [] if status == "in_progress" else self.parts,
            "usage": None if status == "in_progress" else self._usage(),
        } | self._said  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        counts = usage_of(self.call)
        texts = [part["text"] for item in self.parts if item["type"] == "reasoning" for part in item["content"]]
        reasoning = _reasoning_tokens(self._tokenizer, self.completion, "".join(texts))
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},  # the latter have a price elsewhere
            "output_tokens": counts["completion_tokens"], "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": counts["total_tokens"],
        }  # fmt: skip

    def _about(self, kind: str, error: Mapping[str, Any] | None = None) -> bytes:
        return self.encode({"type": f"response.{kind}", "response": self._response(error)})

    def encode(self, event: StreamEvent) -> bytes:
        self._num_events += 1
        return named_event(event | {"sequence_number": self._num_events - 1})

    def open_part(self, call: ToolCallStart | None) -> list[StreamEvent]:
        prefix, fields = "msg", dict[str, Any](type="message", role="assistant", content=[])
        if call is not None:
            prefix, fields = "fc", {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""}
        elif self.kind == "reasoning":
            prefix, fields = "rs", {"type": "reasoning", "summary": [], "content": [], "encrypted_content": None}
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress"} | fields
        self.parts.append(item)
        events = [{"type": "response.output_item.added", "output_index": len(self.parts) - 1, "item": item.copy()}]
        return events if call is not None else [*events, self._event("content_part.added", part=self._content(""))]

    def delta(self, text: str) -> StreamEvent:
        return self._event(f"{_GROWS[self.kind]}.delta", delta=text, **self._logprobs())

    def close_part(self, text: str, complete: bool) -> list[StreamEvent]:
        item, done = self.parts[-1], f"{_GROWS[self.kind]}.done"
        if self.kind == "call":
            item["arguments"] = text
            events = [self._event(done, name=item["name"], arguments=text)]
        else:
            item["content"] = [self._content(text)]
            events = [self._event(done, text=text, **self._logprobs()), self._event("content_part.done", part=item["content"][0])]
        item["status"] = "completed" if complete else "incomplete"
        return [*events, {"type": "response.output_item.done", "output_index": len(self.parts) - 1, "item": item}]

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        """An event about the item that grows."""
        place = {"item_id": self.parts[-1]["id"], "output_index": len(self.parts) - 1}
        return {"type": f"response.{kind}"} | place | ({} if self.kind == "call" else {"content_index": 0}) | fields

    def _content(self, text: str) -> dict[str, Any]:
        """The part of an item with its text."""
        return {"type": _GROWS[self.kind], "text": text} | ({"annotations": []} if self.kind == "text" else {}) | self._logprobs()

    def _logprobs(self) -> dict[str, Any]:
        """Clients expect log-probabilities with a message's text. There are none."""
        return {"logprobs": []} if self.kind == "text" else {}


def _reasoning_tokens(tokenizer: Tokenizer, done: Completion, reasoning: str) -> int:
    """The tokens of a reply up to the end of its reasoning, with the marker before it."""
    end = len(done.text[: done.text.find(reasoning) + len(reasoning)].encode()) if reasoning else 0
    count = size = 0
    while size < end and count < len(done.token_ids):
        size += len(tokenizer.token_bytes(done.token_ids[count]))
        count += 1
    return count


async def _stored(front: Front, exchange: Exchange) -> None:
    """Refuse the paths of stored responses: no response is stored."""
    raise HTTPError(404, _STATELESS, param="store", found=exchange.path[:200])


ROUTES = {f"POST {_PATH}": Front.reads(_prepare)}
STORED = {f"{method} {_PATH}/*": _stored for method in ("GET", "POST", "DELETE")}
