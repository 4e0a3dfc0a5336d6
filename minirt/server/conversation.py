"""`Conversation`: what a request of any chat API asks the model; its prompt, and the call that answers it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minirt.errors import InputError
from minirt.processor import Call
from minirt.server.errors import bad_field, shown
from minirt.server.exchange import Exchange
from minirt.server.front import Front
from minirt.server.protocol import MAX_VARIABLES, Common, check_texts, sampling_params
from minirt.server.replies import ReplyPlan, check_tools
from minirt.text.messages import checked_messages
from minirt.text.tokenizer import Tokenizer
from minirt.text.tools import Tool


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
        truncates: whether the prompt may be too long, because its beginning is cut off.
    """

    messages: list[dict[str, Any]]
    tools: Sequence[Tool] = ()
    tool_choice: object = None
    parallel: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    opens_answer: bool = True
    continues: bool = False
    truncates: bool = False


@dataclass(frozen=True)
class Prompt:
    """A conversation as the model gets it.

    Attributes:
        tokens: of `text`.
        text: the rendered conversation.
        last: content of the last message.
    """

    tokens: list[int]
    text: str
    last: str


@dataclass(frozen=True)
class Prepared:
    """A conversation that is ready to be answered.

    Attributes:
        plan: how its answers are read.
        call: its requests.
    """

    prompt: Prompt
    plan: ReplyPlan
    call: Call
    tokenizer: Tokenizer


def template_variables(
    front: Front, given: Mapping[str, Any] | None, hints: Mapping[str, str | None], renamed: Mapping[str, str] = {}
) -> dict[str, Any]:
    """The variables of the chat template that a request sets. Those that the template does not use are noted in the log.

    Args:
        given: `chat_template_kwargs`.
        hints: variables that have fields of their own in requests: reasoning_effort and verbosity. Clients send them to any
            model, so the template need not use them. A reasoning_effort of "none" then turns off enable_thinking.
        renamed: names of hints → the names of their fields, for the log.
    """
    tokenizer, variables = front.check_ready()[0].text(), dict(given or {})
    check_texts("chat_template_kwargs", list(variables), MAX_VARIABLES)
    front.note_unknown([f"chat_template_kwargs.{name}" for name in variables if not tokenizer.template_uses(name)])
    for name, hint in hints.items():
        if hint is None:
            continue
        if tokenizer.template_uses(name):
            variables[name] = hint
        elif (name, hint) == ("reasoning_effort", "none") and tokenizer.template_uses("enable_thinking"):
            variables.setdefault("enable_thinking", False)
        else:
            front.note_unknown([renamed.get(name, name)], "fields that the chat template does not use")
    return variables


def render(front: Front, conversation: Conversation) -> Prompt:
    """The prompt of a conversation. Not for the event loop's thread."""
    processor, _ = front.check_ready()
    tokenizer, messages = processor.text(), conversation.messages
    if not tokenizer.has_chat_template:
        checked_messages(messages)
        raise InputError("the model has no chat template", where="messages", hint="send a prompt to /v1/completions")
    limit = None if conversation.truncates else processor.limit(None)
    options: dict[str, Any] = {
        "tools": [tool.value for tool in conversation.tools] or None, "add_generation_prompt": conversation.opens_answer,
        "continue_final_message": conversation.continues, "variables": conversation.variables,
    }  # fmt: skip
    text = tokenizer.render_chat(messages, **options)
    tokens = tokenizer.encode_rendered(text, messages, limit, processor.keeps_states, **options)
    return Prompt(tokens, text, checked_messages(messages[-1:])[0]["content"])


def prepare(
    front: Front, exchange: Exchange, conversation: Conversation, request: Common, renamed: Mapping[str, str], *,
    max_tokens: int | None, grammar: Any = None, grammar_field: str = "response_format", **params: Any,
) -> Prepared:  # fmt: skip
    """Render a conversation, plan its answers, and make its requests. Not for the event loop's thread.

    Args:
        request: has the parameters that are the same in all APIs.
        renamed: see `sampling_params`.
        max_tokens: of an answer; None: all that fit, up to those of generation_config.json.
        grammar: `structured_outputs` of the answer's content; None: any text.
        grammar_field: the field of the request that has it, unless that is `structured_outputs`.
        params: more parameters of `SamplingParams`.
    """
    processor, _ = front.check_ready()
    tokenizer, tools, choice = processor.text(), conversation.tools, conversation.tool_choice
    check_tools(front.reply_format, tokenizer, tools, choice)
    prompt = render(front, conversation)
    continued = prompt.last if conversation.continues else ""
    plan = ReplyPlan.of(front.reply_format, tools, choice, prompt.text, continued, conversation.parallel, grammar)
    if plan.forces:
        if request.structured_outputs:
            raise bad_field("structured_outputs", "excludes a tool_choice that forces calls", found=shown(choice))
        grammar_field = "tools"
    exchange.grammar_field = None if request.structured_outputs not in (None, {}) else grammar_field
    if max_tokens is None:
        max_tokens = _room(front, len(prompt.tokens), request.truncate_prompt_tokens)
    sampling = sampling_params(request, renamed, max_tokens=max_tokens, **params, **plan.sampling(tokenizer))
    priority = request.priority or 0
    call = processor.prepare([prompt.tokens], sampling, priority, single=False, cache_salt=request.cache_salt)
    return Prepared(prompt, plan, call, tokenizer)


def _room(front: Front, prompt_tokens: int, kept: int | None) -> int:
    """The most tokens of an answer without a limit. `kept`: the prompt's tokens that are kept; -1: what fits."""
    _, info = front.check_ready()
    if kept is not None:
        prompt_tokens = min(prompt_tokens, kept if kept > 0 else info.max_len - 1)
    room, stated = max(1, info.max_len - prompt_tokens), (info.generation_config or {}).get("max_new_tokens")
    return min(room, stated) if type(stated) is int and stated > 0 else room
