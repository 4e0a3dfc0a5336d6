"""/v1/responses: OpenAI's Responses API. It is stateless: a request has the whole conversation, and no answer is stored."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from minirt.errors import MinirtError, quoted, shortened
from minirt.outputs import Completion
from minirt.server.answers import Answer, ReplyAnswer, endpoint, named_event, usage_of
from minirt.server.conversation import Conversation, Prepared, prepare, template_variables
from minirt.server.errors import HTTPError, bad_field, error_fields
from minirt.server.exchange import Exchange
from minirt.server.front import Front
from minirt.server.protocol import REFUSED, Common, Int, Positive, Refused, StreamOptions, answer_form, decode
from minirt.server.response_items import Output, StreamEvent, read_input
from minirt.text.messages import text_at
from minirt.text.reply import Event
from minirt.text.tokenizer import Tokenizer
from minirt.text.tools import Tool, read_tools

_PATH = "/v1/responses"


class ResponsesRequest(Common, kw_only=True):
    """The fields of a request for a response."""

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
_NO_LOGPROBS = "log-probabilities are not in responses: use /v1/chat/completions"
_REFUSED: Refused = {
    **REFUSED,
    **dict.fromkeys(("previous_response_id", "conversation"), _STATELESS),
    "background": "answers are not stored, so none can be asked for later",
    "prompt": "stored prompts are not supported: use input",
    **dict.fromkeys(("truncation", "context_management"), "a conversation is not shortened"),
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), _NO_LOGPROBS),
    "messages": "is named input here",
    **dict.fromkeys(("n", "best_of"), "there is one answer"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "is named max_output_tokens here"),
    "response_format": "is named text.format here",
    "reasoning_effort": "is named reasoning.effort here",
    "verbosity": "is named text.verbosity here",
}
# Outputs that `include` asks for. They belong to tools that are not there, or are always part of an answer, or are missing.
_INCLUDE = (
    "reasoning.encrypted_content", "message.input_image.image_url", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
)  # fmt: skip


def _prepare(front: Front, exchange: Exchange, body: bytes) -> Answer:
    request = decode(front, body, ResponsesRequest, _REFUSED)
    exchange.prompt_field = "input"
    _check(front, request)
    if front.options.log_prompts:
        exchange.log |= {"instructions": request.instructions, "input": request.input}
    tools, ignored = _read_tools(front, request.tools or []), dict[str, None]()
    messages = read_input(request.input, request.instructions, ignored)
    front.note_unknown(list(ignored), "unsupported parts of requests")
    conversation = Conversation(
        messages, tools, _tool_choice(request.tool_choice, tools),
        request.parallel_tool_calls is not False, _variables(front, request),
        truncates=request.truncate_prompt_tokens is not None,
    )  # fmt: skip
    grammar = answer_form((request.text or {}).get("format"), request.structured_outputs, "text.format")
    prepared = prepare(
        front, exchange, conversation, request, {"max_tokens": "max_output_tokens"}, max_tokens=request.max_output_tokens,
        grammar=grammar, grammar_field="text.format",
    )  # fmt: skip
    answer = _ResponseAnswer(front, exchange, request, tools, prepared)
    exchange.error_event = answer.failed
    return answer


def _check(front: Front, request: ResponsesRequest) -> None:
    if request.metadata is not None and not isinstance(request.metadata, dict):
        raise bad_field("metadata", "not an object", found=type(request.metadata).__name__)
    if "message.output_text.logprobs" in (include := request.include or ()):
        raise bad_field("include", _NO_LOGPROBS, found="message.output_text.logprobs")
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


def _tool_choice(choice: Any, tools: Sequence[Tool]) -> Any:
    """A `tool_choice` as `ReplyFormat.parser` takes it."""
    if choice in (None, "none", "auto", "required"):
        return choice
    names = [tool.name for tool in tools]
    if isinstance(choice, dict) and choice.get("type") == "function" and choice.get("name") in names:
        return {"type": "function", "function": {"name": choice["name"]}}
    expected = shortened(f'none, auto, required, or {{"type": "function", "name": …}} with one of {", ".join(names)}')
    raise bad_field("tool_choice", "not an acceptable choice", expected=expected, found=quoted(choice, 80))


def _variables(front: Front, request: ResponsesRequest) -> dict[str, Any]:
    """The variables of the chat template."""
    hints = {"reasoning_effort": (request.reasoning or {}).get("effort"), "verbosity": (request.text or {}).get("verbosity")}
    fields = {"reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity"}
    for name, hint in hints.items():
        if hint is not None:
            text_at(hint, fields[name])
    return template_variables(front, request.chat_template_kwargs, hints, fields)


class _ResponseAnswer(ReplyAnswer):
    """The response to a request, as it stands."""

    def __init__(
        self, front: Front, exchange: Exchange, request: ResponsesRequest, tools: Sequence[Tool], prepared: Prepared
    ) -> None:
        super().__init__(prepared, request.stream)
        self._output = Output(lambda prefix: f"{prefix}_{uuid.uuid4().hex}")
        self._tokenizer, self._status, self._num_events = prepared.tokenizer, "in_progress", 0
        self._id, self._created = f"resp_{exchange.id}", int(time.time())
        sampling, reasoning = self.completion.sampling, request.reasoning or {}
        self._said = {
            "background": False, "conversation": None, "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens, "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {}, "model": front.options.names[0],
            "parallel_tool_calls": request.parallel_tool_calls is not False, "previous_response_id": None, "prompt": None,
            "prompt_cache_key": request.prompt_cache_key, "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "safety_identifier": request.safety_identifier, "service_tier": "default", "store": False,
            "temperature": sampling.temperature, "text": {"format": (request.text or {}).get("format") or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto", "tools": [_tool(tool) for tool in tools], "top_logprobs": 0,
            "top_p": sampling.top_p, "truncation": "disabled", "user": request.user,
        }  # fmt: skip

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        for event in self.whole_reply():
            self._output.add(event)
        self._end()
        return self._response()

    def begin(self) -> bytes:
        return self._about("created") + self._about("in_progress")

    def tell(self, events: Sequence[Event]) -> list[bytes]:
        return [self._encode(event) for reply in events for event in self._output.add(reply)]

    def end(self) -> bytes:
        return b"".join(map(self._encode, self._end())) + self._about(self._status)

    def failed(self, error: MinirtError) -> bytes:
        """What tells that the reply has failed: an event with the error, and one with the response."""
        fields = error_fields(error)
        message, code = fields["message"], fields["code"] or fields["type"]
        self._end()
        event = self._encode({"type": "error", "code": code, "message": message, "param": fields["param"]})
        return event + self._about("failed", {"code": "server_error", "message": message})

    def _end(self) -> list[StreamEvent]:
        """The reply has ended, or is complete up to an error. Returns the last events of its items."""
        complete = self.completion.finish_reason == "stop"
        self._status = "completed" if complete else "incomplete"
        return self._output.end(complete)

    def _response(self, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The object that clients get. `error`: what it has failed with."""
        status = self._status if error is None else "failed"
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "error": error,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [] if status == "in_progress" else self._output.items,
            "usage": None if status == "in_progress" else self._usage(),
        } | self._said  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        counts = usage_of(self.call)
        reasoning = _reasoning_tokens(self._tokenizer, self.completion, self._output.reasoning)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},  # the latter have a price elsewhere
            "output_tokens": counts["completion_tokens"], "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": counts["total_tokens"],
        }  # fmt: skip

    def _about(self, kind: str, error: Mapping[str, Any] | None = None) -> bytes:
        return self._encode({"type": f"response.{kind}", "response": self._response(error)})

    def _encode(self, event: StreamEvent) -> bytes:
        self._num_events += 1
        return named_event(event | {"sequence_number": self._num_events - 1})


def _tool(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "strict": None, "description": None, "parameters": None} | tool.value["function"]


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


ROUTES = {f"POST {_PATH}": endpoint(lambda front, exchange: front.read(exchange, _prepare))}
STORED = {f"{method} {_PATH}/*": _stored for method in ("GET", "POST", "DELETE")}
