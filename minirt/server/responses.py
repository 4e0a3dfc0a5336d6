"""/v1/responses: OpenAI's Responses API. It is stateless: a request has the whole conversation, and no answer is stored."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from minirt.errors import MinirtError, quoted, shortened
from minirt.outputs import Completion
from minirt.processor import Call
from minirt.server.answers import ReplyEvents, collect, stream_reply, usage_of
from minirt.server.conversation import Conversation, Prepared, prepare, template_variables
from minirt.server.errors import HTTPError, bad_field, error_fields
from minirt.server.exchange import Exchange, encode_json
from minirt.server.front import Front
from minirt.server.protocol import (
    REFUSED,
    Common,
    Int,
    Positive,
    Refused,
    StreamOptions,
    check_nesting,
    decode,
    grammar_of,
)
from minirt.server.response_items import Output, StreamEvent, read_input
from minirt.text.reply import Event
from minirt.text.tokenizer import Tokenizer
from minirt.text.tools import Tool, check_names, checked_list, checked_tool

PATH = "/v1/responses"


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


async def responses(front: Front, exchange: Exchange) -> None:
    front.check_ready()
    body = await exchange.body(front.options.max_body_size)
    exchange.cancel_on_disconnect()
    request, tools, ready = await front.in_thread(_prepare, front, exchange, body)
    answer = _Answer(front, exchange.id, request, tools, ready.call, ready.tokenizer)
    if request.stream:
        events = _Events(answer)
        exchange.error_event = events.failed
        await stream_reply(front, exchange, ready.call, ready.plan, events)
        return
    (done,) = await collect(front, exchange, ready.call)
    for event in ready.plan.reader().read(done.text, True):
        answer.output.add(event)
    answer.end()
    await exchange.answer(answer.response())


def _prepare(front: Front, exchange: Exchange, body: bytes) -> tuple[ResponsesRequest, Sequence[Tool], Prepared]:
    request = decode(front, body, ResponsesRequest, _REFUSED)
    front.check_model(request.model)
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
    ready = prepare(
        front, exchange, conversation, request, {"max_tokens": "max_output_tokens"}, max_tokens=request.max_output_tokens,
        grammar=_grammar(request), grammar_field="text.format",
    )  # fmt: skip
    return request, tools, ready


def _check(front: Front, request: ResponsesRequest) -> None:
    for name in ("tools", "tool_choice", "text", "reasoning", "chat_template_kwargs"):
        check_nesting(name, getattr(request, name))
    if request.metadata is not None and not isinstance(request.metadata, dict):
        raise bad_field("metadata", "not an object", found=type(request.metadata).__name__)
    if "message.output_text.logprobs" in (include := request.include or ()):
        raise bad_field("include", _NO_LOGPROBS, found="message.output_text.logprobs")
    front.note_unknown([f"include: {name}" for name in include if name not in _INCLUDE])
    for name, known in (("text", ("format", "verbosity")), ("reasoning", ("effort", "summary", "generate_summary"))):
        front.note_unknown([f"{name}.{own}" for own in getattr(request, name) or () if own not in known])


def _read_tools(front: Front, values: list[Any]) -> list[Tool]:
    """The functions of a request's `tools`: {"type": "function", "name", "description", "parameters"}. Others are ignored."""
    tools, places = [], []
    for i, value in enumerate(checked_list(values)):
        where = f"tools[{i}]"
        if not isinstance(value, dict) or not isinstance(kind := value.get("type"), str):
            raise bad_field(where, "not a tool", expected='{"type": "function", "name": …}', found=quoted(value, 80))
        if kind != "function":
            front.note_unknown([kind], "tools that are no functions")
            continue
        if not isinstance(text := value.get("description"), str | None):
            raise bad_field(f"{where}.description", "not a text", found=type(text).__name__)
        function = {name: value[name] for name in ("name", "description", "parameters") if value.get(name) is not None}
        tools.append(checked_tool({"type": "function", "function": function}, f"{where}.name", f"{where}.parameters"))
        places.append(f"{where}.name")
    check_names(tools, places)
    return tools


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
        if not isinstance(hint, str | None):
            raise bad_field(fields[name], "not a text", found=type(hint).__name__)
    return template_variables(front, request.chat_template_kwargs, hints, fields)


def _grammar(request: ResponsesRequest) -> Any:
    """`text.format` or `structured_outputs` as a parameter of `SamplingParams`; None: any text."""
    form = (request.text or {}).get("format")
    return grammar_of(request, form, "text.format", form, "a JSON schema", "text.format.schema")


class _Answer:
    """The response to a request, as it stands.

    Attributes:
        output: its items.
    """

    def __init__(
        self, front: Front, exchange_id: str, request: ResponsesRequest, tools: Sequence[Tool], call: Call, tokenizer: Tokenizer
    ) -> None:
        self.output = Output(lambda prefix: f"{prefix}_{uuid.uuid4().hex}")
        self._call, self._tokenizer, self._status = call, tokenizer, "in_progress"
        self._id, self._created = f"resp_{exchange_id}", int(time.time())
        sampling, reasoning = self._done.sampling, request.reasoning or {}
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

    @property
    def _done(self) -> Completion:
        return self._call.streams[0].completion

    def end(self) -> list[StreamEvent]:
        """The reply has ended, or is complete up to an error. Returns the last events of its items."""
        complete = self._done.finish_reason == "stop"
        self._status = "completed" if complete else "incomplete"
        return self.output.end(complete)

    def response(self, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The object that clients get. `error`: what it has failed with."""
        status = self._status if error is None else "failed"
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "error": error,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [] if status == "in_progress" else self.output.items,
            "usage": None if status == "in_progress" else self._usage(),
        } | self._said  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        counts = usage_of(self._call)
        reasoning = _reasoning_tokens(self._tokenizer, self._done, self.output.reasoning)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},  # the latter have a price elsewhere
            "output_tokens": counts["completion_tokens"], "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": counts["total_tokens"],
        }  # fmt: skip


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


class _Events(ReplyEvents):
    def __init__(self, answer: _Answer) -> None:
        self._answer, self._count = answer, 0

    def begin(self, call: Call) -> bytes:
        return self._about("created") + self._about("in_progress")

    def more(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._encode(own) for event in events for own in self._answer.output.add(event))

    def end(self, call: Call) -> bytes:
        last = b"".join(map(self._encode, self._answer.end()))
        return last + self._about(self._answer.response()["status"])

    def failed(self, error: MinirtError) -> bytes:
        """What tells that the reply has failed: an event with the error, and one with the response."""
        fields = error_fields(error)
        message, code = fields["message"], fields["code"] or fields["type"]
        self._answer.end()
        event = self._encode({"type": "error", "code": code, "message": message, "param": fields["param"]})
        return event + self._about("failed", {"code": "server_error", "message": message})

    def _about(self, kind: str, error: Mapping[str, Any] | None = None) -> bytes:
        return self._encode({"type": f"response.{kind}", "response": self._answer.response(error)})

    def _encode(self, event: StreamEvent) -> bytes:
        data = encode_json(event | {"sequence_number": self._count})
        self._count += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)


def stored_route(path: str) -> Any:
    """The handler of a path that belongs to a stored response: there is none."""
    if not path.startswith(f"{PATH}/"):
        return None

    async def stored(front: Front, exchange: Exchange) -> None:
        raise HTTPError(404, _STATELESS, param="store", found=path[:200])

    return stored


ROUTES = {f"POST {PATH}": responses}
