"""`ReplyFormat`: how a model's answers are read, chosen once for a model; it makes the parser of each answer."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from minirt.errors import InputError, UnsupportedError
from minirt.text import channels
from minirt.text.addressed import ADDRESSED, MARKERS, AddressedParser, answers, is_addressed, opened
from minirt.text.harmony import EFFORTS, HARMONY, HarmonyParser, finishes, is_harmony
from minirt.text.harmony import MARKERS as HARMONY_MARKERS
from minirt.text.reasoning import BLOCKS, ReasoningParser
from minirt.text.reply import Parser, ReplyParser
from minirt.text.response_template import ResponseTemplate, ResponseTemplateParser
from minirt.text.tool_calls import FORMATS, CallListParser, NamedCallParser, detect_format
from minirt.text.tools import Tool, chosen

AUTO, NONE, TEMPLATE = "auto", "none", "response_template"
_BUILT_IN = {"gemma4": channels.RESPONSE_TEMPLATE}  # formats of whole answers, by name
NAMES = (AUTO, NONE, TEMPLATE, *FORMATS, *_BUILT_IN)


@dataclass(frozen=True)
class ReplyFormat:
    """How answers are read.

    Attributes:
        tool_calls: a format of `tool_calls.FORMATS`; None: calls are not recognised.
        reasoning: the markers of the block of reasoning with which answers may begin; None: they have none.
            `ADDRESSED`: answers are messages, each addressed to somebody; `HARMONY`: each has a channel.
        response_template: the tokenizer's declaration, which takes precedence over both, unless a `tool_choice` forces calls.
        notes: why something was not chosen, for a log.
        has_grammar: whether the content has one. Messages that are neither calls nor the answer are reasoning then.
    """

    tool_calls: str | None = None
    reasoning: tuple[str, str] | None = None
    response_template: ResponseTemplate | None = None
    notes: tuple[str, ...] = ()
    has_grammar: bool = False

    @classmethod
    def choose(cls, chat_template: str | None, response_template: Any = None, name: str = AUTO) -> "ReplyFormat":
        """Choose by a model's files, or by name.

        Args:
            chat_template: its source for conversations with tools (`Tokenizer.tool_template`).
            response_template: what tokenizer_config.json has under this key (`Tokenizer.response_template`).
            name: "auto" (the response template if there is one, else by the chat template), "response_template", "none",
                "gemma4", or a format of tool calls.
        Raises:
            InputError: there is no such name.
            UnsupportedError: the response template is asked for by name, and is missing or not understood.
        """
        if name not in NAMES:
            raise InputError("no such format of tool calls", expected=", ".join(NAMES), found=name)
        reasoning = next((block for block in BLOCKS if all(marker in (chat_template or "") for marker in block)), None)
        calls = detect_format(chat_template) if name == AUTO else name if name in FORMATS else None
        if calls is not None and FORMATS[calls].reasoning is not None:
            reasoning = FORMATS[calls].reasoning
        elif is_addressed(chat_template) or is_harmony(chat_template):
            reasoning = HARMONY if is_harmony(chat_template) else ADDRESSED
        notes: tuple[str, ...] = ()
        if name in _BUILT_IN or (name == AUTO and response_template is None and channels.is_channeled(chat_template)):
            response_template, name, reasoning = _BUILT_IN.get(name, channels.RESPONSE_TEMPLATE), TEMPLATE, channels.CHANNEL
        if name == TEMPLATE or (name == AUTO and response_template is not None):
            try:
                return cls(None, reasoning, ResponseTemplate.read(response_template))
            except UnsupportedError as error:
                if name == TEMPLATE:
                    raise
                notes = (f"the response template is not used: {error}",)
        return cls(calls, reasoning, None, notes)

    @property
    def efforts(self) -> tuple[str, ...]:
        """The values of reasoning_effort that the model knows. Empty: the chat template decides."""
        return EFFORTS if self.reasoning == HARMONY else ()

    def needs_special_tokens(self, special: Collection[str]) -> bool:
        """Whether the text must have its special tokens, because some of them are markers.

        Args:
            special: the texts of the tokenizer's special tokens (`Tokenizer.special_tokens`).
        """
        reasoning = {ADDRESSED: MARKERS, HARMONY: HARMONY_MARKERS, None: ()}.get(self.reasoning, self.reasoning or ())
        markers = (FORMATS[self.tool_calls].markers if self.tool_calls is not None else ()) + reasoning
        return self.response_template is not None or any(marker in special for marker in markers)

    def parser(self, prompt: str, tools: Sequence[Tool] = (), tool_choice: object = None, continued: str = "") -> Parser:
        """The parser of one answer.

        Args:
            prompt: the rendered prompt, which may have opened a reasoning block.
            continued: the final message, if the model continues it.
            tool_choice: "none", "auto", "required", or {"type": "function", "function": {"name": …}}; None: "auto" if there are
                tools. With the last two, the answer (after its reasoning) must follow `tools.call_schema` or the parameters of
                `tools.chosen`.
        Raises:
            InputError: `tool_choice` is none of these, or names a function that is not among `tools`.
        """
        choice = ("auto" if tools else "none") if tool_choice is None else tool_choice
        if choice not in ("none", "auto") and not tools:
            raise InputError("needs tools", where="tool_choice", expected="none or auto", found=str(choice)[:80])
        if self.response_template is not None and choice in ("none", "auto"):
            return ResponseTemplateParser(self.response_template, prompt, tools, calls=choice == "auto" and bool(tools))
        if self.reasoning in (ADDRESSED, HARMONY) and choice in ("none", "auto"):
            aside = self.has_grammar or self.tool_calls is None
            return ReplyParser(self._messages(prompt, tools if choice == "auto" else (), aside))
        calls: Parser | None = None
        ends: Sequence[str] = ()
        if choice == "required":
            calls = CallListParser(tools)
        elif choice == "auto":
            if tools and self.tool_calls is not None:
                form = FORMATS[self.tool_calls]
                calls, ends = form.parser(tools), form.end_reasoning
        elif choice != "none":
            calls = NamedCallParser(chosen(tools, choice).name)
        if self.reasoning is None:
            return ReplyParser(None, calls)
        if self.reasoning in (ADDRESSED, HARMONY):
            return ReplyParser(self._messages(prompt, (), aside=True), calls)
        return ReplyParser(ReasoningParser(self.opens_reasoning(prompt, continued), *self.reasoning, ends=ends), calls)

    def reasons_first(self, prompt: str, continued: str = "") -> bool:
        """Whether reasoning comes before the content of an answer, so that a grammar begins after it."""
        if self.reasoning == channels.CHANNEL and not continued and channels.reasons_first(prompt):
            return True
        return self.opens_reasoning(prompt, continued)

    def _messages(self, prompt: str, tools: Sequence[Tool], aside: bool) -> Parser:
        """The parser of an answer of messages. `tools`: whose calls are looked for. `aside`: as of `AddressedParser`."""
        form = FORMATS[self.tool_calls] if self.tool_calls is not None and tools else None
        if self.reasoning == HARMONY:
            return HarmonyParser(opened(prompt, HarmonyParser.ends), None if form is None else NamedCallParser, aside)
        return AddressedParser(opened(prompt), None if form is None else partial(form.parser, tools), aside)

    def opens_reasoning(self, prompt: str, continued: str = "") -> bool:
        """Whether an answer begins inside a block of reasoning; with addressed messages, whether one may come before the content.

        The chat template has opened the block for the model, or the final message has, if the model continues it. Markers
        elsewhere, such as those in a question about them, do not count.
        """
        if self.reasoning is None:
            return False
        opening, closing = self.reasoning
        if self.reasoning in (ADDRESSED, HARMONY):
            return not (answers(prompt) if self.reasoning == ADDRESSED else finishes(prompt))
        if continued.rfind(opening) > continued.rfind(closing):
            return True
        return prompt.rfind(opening) > prompt.rfind(closing) and prompt.rstrip().endswith(opening)
