"""How the answers of a chat request are read: `ReplyPlan`; and their content, reasoning and tool calls as OpenAI's fields."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minirt.server.errors import bad_field
from minirt.text.reasoning import CLOSE, opens_reasoning
from minirt.text.reply import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    Parser,
    ReasoningDelta,
    ReplyParser,
    ToolCall,
    parse,
)
from minirt.text.reply_format import ReplyFormat
from minirt.text.tokenizer import Tokenizer
from minirt.text.tools import Tool, call_schema, chosen


def check_tools(form: ReplyFormat, tokenizer: Tokenizer, tools: Sequence[Tool], choice: object) -> None:
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


@dataclass(frozen=True)
class ReplyPlan:
    """How the answers of one request are read, and what they must be.

    Attributes:
        form: how answers are read.
        tools, choice: as `ReplyFormat.parser` takes them.
        prompt: the rendered conversation.
        continued: the final message, if the model continues it.
        parallel: whether an answer may have several calls. Further ones are left out.
        forces: whether the answer must be calls.
        grammar: `structured_outputs` of the sampling parameters.
    """

    form: ReplyFormat
    tools: Sequence[Tool]
    choice: object
    prompt: str
    continued: str
    parallel: bool
    forces: bool
    grammar: Any

    @classmethod
    def of(
        cls, form: ReplyFormat, tools: Sequence[Tool], choice: object, prompt: str, continued: str, parallel: bool, grammar: Any
    ) -> "ReplyPlan":
        """The plan of a request with a `tool_choice` that `check_tools` accepts.

        A grammar holds from the first token on, unless the prompt has opened a reasoning block: then it holds after the block.
        Nothing but the reasoning and forced calls is looked for in such an answer.

        Args:
            grammar: what the request's content must be; None: any text. Calls that are forced have a grammar of their own.
        """
        forces = choice not in (None, "none", "auto")
        if forces:
            grammar = {"json": call_schema(tools, parallel) if choice == "required" else chosen(tools, choice).parameters}
        if grammar is not None:
            stated = grammar.get("reasoning_end") if isinstance(grammar, dict) else None
            reasons = form.reasoning and (stated is not None or opens_reasoning(prompt, continued))
            if reasons and stated is None and isinstance(grammar, dict):  # else it is refused later
                grammar = grammar | {"reasoning_end": CLOSE}
            form, choice = ReplyFormat(reasoning=reasons), choice if forces else "none"
        return cls(form, tools, choice, prompt, continued, parallel, forces, grammar)

    def parser(self) -> Parser | None:
        """The parser of one answer; None if all of its text is content."""
        parser = self.form.parser(self.prompt, self.tools, self.choice, self.continued)
        return None if isinstance(parser, ReplyParser) and parser.passes_through else parser

    def reader(self) -> "ReplyReader":
        """A reader of one streamed answer."""
        return ReplyReader(self.parser() or ReplyParser(), self.parallel)

    def sampling(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Parameters of `SamplingParams` that the plan needs."""
        found: dict[str, Any] = {} if self.grammar is None else {"structured_outputs": self.grammar}
        if self.parser() is not None and self.form.needs_special_tokens(tokenizer.special_tokens):
            found["skip_special_tokens"] = False
        return found

    def message(self, text: str, prefix: str) -> dict[str, Any]:
        """The fields of a message with a whole answer. `prefix`: stands before its content."""
        if (parser := self.parser()) is None:
            return {"content": prefix + text}
        reply = parse(parser, text)
        calls, content = reply.tool_calls if self.parallel else reply.tool_calls[:1], prefix + reply.content
        found: dict[str, Any] = {"content": content or (None if calls or reply.reasoning else "")}
        if reply.reasoning:
            found |= _reasoning(reply.reasoning)
        return found | ({"tool_calls": [_call(call) for call in calls]} if calls else {})


class ReplyReader:
    """Reads one streamed answer."""

    def __init__(self, parser: Parser, parallel: bool) -> None:
        self._parser, self._parallel = parser, parallel
        self.calls = False  # whether there was a tool call

    def read(self, text: str, ended: bool) -> list[dict[str, Any]]:
        """The deltas of more text. `ended`: it is the last."""
        events = self._parser.feed(text) + (self._parser.finish() if ended else [])
        return [delta for event in events if (delta := self._delta(event)) is not None]

    def _delta(self, event: Event) -> dict[str, Any] | None:
        if isinstance(event, ContentDelta):
            return {"content": event.text}
        if isinstance(event, ReasoningDelta):
            return _reasoning(event.text)
        if event.index > 0 and not self._parallel:
            return None
        self.calls = True
        if isinstance(event, ArgumentsDelta):
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        return {"tool_calls": [{"index": event.index} | _call(ToolCall(event.id, event.name, ""))]}


def finish_reason(reason: str | None, calls: bool) -> str | None:
    """OpenAI's reason for the end of an answer, with or without tool calls."""
    return "tool_calls" if calls and reason == "stop" else reason


def _reasoning(text: str) -> dict[str, str]:
    """Clients differ in the name that they read."""
    return {"reasoning": text, "reasoning_content": text}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
