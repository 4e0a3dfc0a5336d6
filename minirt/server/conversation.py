"""`Conversation`: what a request of any chat API asks the model; its prompt, its call, and how answers are read."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from minirt.errors import InputError
from minirt.processor import Call
from minirt.server.errors import bad_field, check_choice, shown
from minirt.server.exchange import Exchange
from minirt.server.front import Front
from minirt.server.protocol import MAX_VARIABLES, Common, check_texts, sampling_params
from minirt.text.harmony import CALLING
from minirt.text.messages import checked_messages, object_at, text_at
from minirt.text.reply import ContentDelta, Event, Parser, ReplyParser, ToolCallStart
from minirt.text.reply_format import ReplyFormat
from minirt.text.tokenizer import ChatTokens, Tokenizer
from minirt.text.tools import Tool, call_schema, chosen

_NO_TEXT = ("image", "document", "file", "audio")

@dataclass(frozen=True)
class Conversation:
    """A conversation that the model goes on with. The APIs differ in how they say it.

    Attributes:
        messages: as `checked_messages` takes them.
        tools, tool_choice: as `ReplyFormat.parser` takes them.
        parallel: whether an answer may have several calls.
        variables: of the chat template; see `template_variables`.
        opens_answer: whether the prompt ends with the assistant's header.
        continues: whether the model continues the last message, which is the assistant's.
    """

    messages: list[dict[str, Any]]
    tools: Sequence[Tool] = ()
    tool_choice: object = None
    parallel: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    opens_answer: bool = True
    continues: bool = False


@dataclass(frozen=True)
class Prepared:
    """A conversation that is ready to be answered.

    Attributes:
        last: content of its last message.
        call: its requests.
        parse: makes the parser of an answer.
        is_plain: whether all text of an answer is content.
        parallel: whether an answer may have several calls. Further ones are left out.
        forces: whether the answer must be calls. It has no content then.
    """

    last: str
    call: Call
    tokenizer: Tokenizer
    parse: Callable[[], Parser]
    is_plain: bool
    parallel: bool
    forces: bool


class ReplyReader:
    """Reads one answer, whole or in pieces. `calls`: whether there was a tool call."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared, self._parser, self.calls = prepared, prepared.parse(), False

    def read(self, text: str, ended: bool) -> list[Event]:
        """What new text adds to the answer. `ended`: it is the last."""
        events = self._parser.feed(text) + (self._parser.finish() if ended else [])
        self.calls = self.calls or any(isinstance(event, ToolCallStart) for event in events)
        if self._prepared.forces:  # content is what stood before the first call when the answer was cut off
            events = [event for event in events if not isinstance(event, ContentDelta)]
        return events if self._prepared.parallel else [event for event in events if getattr(event, "index", 0) == 0]


def template_variables(front: Front, given: Mapping[str, Any] | None, hints: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    """The variables of the chat template that a request sets. Those that the template does not use are noted in the log.

    Args:
        given: `chat_template_kwargs`.
        hints: variables that have fields of requests: their values and the names of these fields. Clients send them to any model,
            so the template need not use them. A reasoning_effort of "none" then turns off enable_thinking; another one
            is the reasoning_strength of a template that uses this name (Muse-Glimmer).
    """
    tokenizer, variables = front.check_ready()[0].text(), dict(given or {})
    check_texts("chat_template_kwargs", list(variables), MAX_VARIABLES)
    front.note_unknown([f"chat_template_kwargs.{name}" for name in variables if not tokenizer.template_uses(name)])
    for name, (hint, place) in hints.items():
        if hint is None:
            continue
        text_at(hint, place)
        if tokenizer.template_uses(name):
            variables[name] = hint
        elif (name, hint) == ("reasoning_effort", "none") and tokenizer.template_uses("enable_thinking"):
            variables.setdefault("enable_thinking", False)
        elif name == "reasoning_effort" and hint != "none" and tokenizer.template_uses("reasoning_strength"):
            variables.setdefault("reasoning_strength", hint)
        else:
            front.note_unknown([place], "fields that the chat template does not use")
    if (effort := variables.get("reasoning_effort")) is not None and (efforts := front.reply_format.efforts):
        hint, place = hints["reasoning_effort"]
        check_choice("chat_template_kwargs.reasoning_effort" if hint is None else place, effort, efforts)
    return variables


def read_parts(content: Any, place: str, kinds: Collection[str], name: str = "part") -> list[dict[str, Any]]:
    """The parts of a content; a text is one part, of type "text".

    Args:
        kinds: the types that they may have.
        name: what a part is called, for messages.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise bad_field(place, "not a content", expected=f"a text, or a list of {name}s", found=type(content).__name__)
    for i, part in enumerate(content):
        kind = object_at(part, f"{place}[{i}]", f"not a {name}", '{"type": …}').get("type")
        if not isinstance(kind, str) or kind not in kinds:
            hint = "minirt's models read text only" if str(kind).removeprefix("input_") in _NO_TEXT else None
            expected = " or ".join(kinds)
            raise bad_field(f"{place}[{i}].type", f"a {name} of another type", expected=expected, found=shown(kind), hint=hint)
    return content


def render(front: Front, conversation: Conversation, any_length: bool = False) -> ChatTokens:
    """The prompt of a conversation. Not for the event loop's thread. `any_length`: it may be longer than the model can take."""
    processor, _ = front.check_ready()
    tokenizer, messages = processor.text(), conversation.messages
    if not tokenizer.has_chat_template:
        checked_messages(messages)
        raise InputError("the model has no chat template", where="messages", hint="send a prompt to /v1/completions")
    limit = None if any_length else processor.limit(None)
    return tokenizer.encode_chat(
        messages, limit, with_history=processor.engine.keeps_states, tools=[tool.value for tool in conversation.tools] or None,
        add_generation_prompt=conversation.opens_answer, continue_final_message=conversation.continues,
        variables=conversation.variables,
    )  # fmt: skip


def prepare(
    front: Front, exchange: Exchange, conversation: Conversation, request: Common, renamed: Mapping[str, str], *,
    max_tokens: int | None, grammar: Any = None, grammar_field: str = "response_format", **params: Any,
) -> Prepared:  # fmt: skip
    """Render a conversation, plan its answers, and make its requests. Not for the event loop's thread.

    A grammar holds from the first token on, unless reasoning comes first, as where the prompt has opened its block: then it holds
    after the block. Nothing but the reasoning and forced calls is looked for in such an answer, and in the answers of `CALLING`
    calls before the grammar.

    Args:
        request: has the parameters that are the same in all APIs.
        renamed: see `sampling_params`.
        max_tokens: of an answer; None: all that fit, up to those of generation_config.json.
        grammar: `structured_outputs` of the answer's content; None: any text. Forced calls have another grammar.
        grammar_field: the field of the request that has it, unless that is `structured_outputs`.
        params: further parameters of `SamplingParams`.
    """
    processor, _ = front.check_ready()
    form, tokenizer, tools, choice = front.reply_format, processor.text(), conversation.tools, conversation.tool_choice
    _check_tools(form, tokenizer, tools, choice)
    prompt = render(front, conversation, any_length=request.truncate_prompt_tokens is not None)
    last = checked_messages(conversation.messages[-1:])[0]["content"]
    continued = last if conversation.continues else ""
    forces = choice not in (None, "none", "auto")
    if forces:
        if request.structured_outputs:
            raise bad_field("structured_outputs", "excludes a tool_choice that forces calls", found=shown(choice))
        grammar_field, several = "tools", conversation.parallel
        grammar = {"json": call_schema(tools, several) if choice == "required" else chosen(tools, choice).parameters}
    exchange.grammar_field = None if request.structured_outputs not in (None, {}) else grammar_field
    if grammar is not None:
        stated = grammar.get("reasoning_end") if isinstance(grammar, dict) else None
        reasons = form.reasoning if stated is not None or form.reasons_first(prompt.text, continued) else None
        may_call = bool(tools and choice in (None, "auto") and form.tool_calls and reasons and reasons[1] in CALLING)
        if reasons and stated is None and isinstance(grammar, dict):  # else it is refused later
            grammar = {"may_call": may_call} | grammar | {"reasoning_end": reasons[1]}
        if may_call and isinstance(grammar, dict) and grammar.get("may_call"):
            form = replace(form, has_grammar=True)
        else:
            form, choice = ReplyFormat(reasoning=reasons), choice if forces else "none"
        params["structured_outputs"] = grammar
    parse = partial(form.parser, prompt.text, tools, choice, continued)
    parser = parse()
    is_plain = isinstance(parser, ReplyParser) and parser.passes_through
    if not is_plain and form.needs_special_tokens(tokenizer.special_tokens):
        params["skip_special_tokens"] = False
    if max_tokens is None:
        max_tokens = _room(front, len(prompt), request.truncate_prompt_tokens)
    sampling = sampling_params(request, renamed, max_tokens=max_tokens, **params)
    call = processor.prepare([prompt], sampling, request.priority or 0, single=False, cache_salt=request.cache_salt)
    return Prepared(last, call, tokenizer, parse, is_plain, conversation.parallel, forces)


def _check_tools(form: ReplyFormat, tokenizer: Tokenizer, tools: Sequence[Tool], choice: object) -> None:
    """Check that the model gets these tools, and that its calls can be read.

    Raises:
        HTTPError, InputError: it is not so, or `choice` is no `tool_choice`.
    """
    form.parser("", tools, choice)
    if not tools or choice not in (None, "auto"):
        return
    hint = 'tool_choice "required" and named functions work without it'
    if not tokenizer.template_uses("tools"):
        raise bad_field("tools", "the model's chat template does not use tools", hint=hint)
    if form.response_template is None and form.tool_calls is None:
        hint = f"start the server with --tool-call-parser; {hint}"
        raise bad_field("tools", "the format of the model's tool calls is not known", hint=hint)


def _room(front: Front, prompt_tokens: int, kept: int | None) -> int:
    """The most tokens of an answer without a limit. `kept`: the prompt's tokens that are kept; -1: what fits."""
    _, info = front.check_ready()
    if kept is not None:
        prompt_tokens = min(prompt_tokens, kept if kept > 0 else info.max_len - 1)
    room, stated = max(1, info.max_len - prompt_tokens), (info.generation_config or {}).get("max_new_tokens")
    return min(room, stated) if type(stated) is int and stated > 0 else room
