"""How the answers to a conversation are read: `ReplyPlan`, and `ReplyReader` for streams."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minirt.server.errors import bad_field
from minirt.text.reply import ContentDelta, Event, Parser, ReasoningDelta, Reply, ReplyParser, collect
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
        forces: whether the answer must be calls. It has no content then.
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
            grammar: what the request's content must be; None: any text. Forced calls have another grammar.
        """
        forces = choice not in (None, "none", "auto")
        if forces:
            grammar = {"json": call_schema(tools, parallel) if choice == "required" else chosen(tools, choice).parameters}
        if grammar is not None:
            stated = grammar.get("reasoning_end") if isinstance(grammar, dict) else None
            reasons = form.reasoning if stated is not None or form.opens_reasoning(prompt, continued) else None
            if reasons and stated is None and isinstance(grammar, dict):  # else it is refused later
                grammar = grammar | {"reasoning_end": reasons[1]}
            form, choice = ReplyFormat(reasoning=reasons), choice if forces else "none"
        return cls(form, tools, choice, prompt, continued, parallel, forces, grammar)

    def parser(self) -> Parser | None:
        """The parser of one answer; None if all of its text is content."""
        parser = self.form.parser(self.prompt, self.tools, self.choice, self.continued)
        return None if isinstance(parser, ReplyParser) and parser.passes_through else parser

    def reader(self) -> "ReplyReader":
        """A reader of one streamed answer."""
        return ReplyReader(self.parser() or ReplyParser(), self.parallel, self.forces)

    def sampling(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Parameters of `SamplingParams` that the plan needs."""
        params: dict[str, Any] = {} if self.grammar is None else {"structured_outputs": self.grammar}
        if self.parser() is not None and self.form.needs_special_tokens(tokenizer.special_tokens):
            params["skip_special_tokens"] = False
        return params

    def read(self, text: str) -> Reply:
        """A whole answer."""
        return collect(self.reader().read(text, ended=True))


class ReplyReader:
    """Reads one streamed answer. For the arguments see `ReplyPlan`."""

    def __init__(self, parser: Parser, parallel: bool, forces: bool) -> None:
        self._parser, self._parallel, self._forces = parser, parallel, forces
        self.calls = False  # whether there was a tool call

    def read(self, text: str, ended: bool) -> list[Event]:
        """What more text adds to the answer. `ended`: it is the last."""
        events = self._parser.feed(text) + (self._parser.finish() if ended else [])
        return [event for event in events if self._counts(event)]

    def _counts(self, event: Event) -> bool:
        if isinstance(event, ContentDelta):  # of forced calls: what stood before the first one when the answer was cut off
            return not self._forces
        if isinstance(event, ReasoningDelta):
            return True
        self.calls = True
        return event.index == 0 or self._parallel
