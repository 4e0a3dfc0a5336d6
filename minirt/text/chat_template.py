"""`ChatTemplate`: renders a conversation as prompt text, with the model's own Jinja chat template."""

import functools
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minirt.errors import InputError, TokenizerError, shortened
from minirt.files import present, read_text
from minirt.text.messages import checked_messages
from minirt.text.rendering import Renderer, RenderingError

MAX_TEMPLATE = 1 << 20  # bytes; the largest known are about 50 kB
# Variables that a template gets from elsewhere, and names that other servers take for something else.
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")


@dataclass(frozen=True)
class ChatOptions:
    """How a conversation is rendered.

    Attributes:
        tools: what the model may call, for the template; see `minirt.text.tools.Tool.value`.
        add_generation_prompt: end with the header of the assistant's answer.
        continue_final_message: end within the last message, which the model then continues. Excludes `add_generation_prompt`.
        template_kwargs: further variables of the template, such as enable_thinking: JSON values.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """The chat template of a model folder.

    Attributes:
        source: the template; None if the folder has none.
        tool_source: the one for conversations with tools, which may be another.
    """

    def __init__(self, folder: Path, tokenizer_config: Mapping[str, Any]) -> None:
        """`tokenizer_config`: the content of tokenizer_config.json. chat_template.jinja takes precedence over it."""
        self._file = folder / "chat_template.jinja"
        self.source: str | None
        self.tool_source: str | None
        if present(self._file):
            self.source = self.tool_source = read_text(self._file, limit=MAX_TEMPLATE, error=TokenizerError)
        else:
            self._file = folder / "tokenizer_config.json"
            self.source, self.tool_source = _templates(tokenizer_config.get("chat_template"), self._file)

    def render(
        self, messages: list[dict[str, Any]], special_tokens: Mapping[str, str], options: ChatOptions | None = None
    ) -> str:
        """Render `messages` as one text that ends with the assistant's header, unless `options` say otherwise.

        Args:
            messages: a non-empty list; see `checked_messages`.
            special_tokens: name → text (bos_token, eos_token, …). Templates refer to them by name.
        Raises:
            InputError: `messages` is not such a list, or an option is wrong.
            TokenizerError: there is no template, or the template fails, rejects the messages, renders nothing, or takes more
                time, memory or output than `minirt.text.rendering` allows.
        """
        options = ChatOptions() if options is None else options
        plain, mark = checked_messages(messages), ""
        _check_options(options, special_tokens)
        if options.continue_final_message:
            mark = f"END{secrets.token_hex(16)}OF_TEXT "  # the space shows whether the template trims
            plain[-1]["content"] += mark
        if self.source is None:
            raise TokenizerError("there is no chat template", where=self._file, hint="use a plain prompt")
        # The variables that transformers passes.
        tools = None if options.tools is None else list(options.tools)
        names: dict[str, Any] = {"messages": plain, "tools": tools, "documents": None, **options.template_kwargs}
        names["add_generation_prompt"] = options.add_generation_prompt
        try:
            text = (self._tool_renderer if options.tools else self._renderer).render(names | dict(special_tokens))
        except RenderingError as error:
            hint = "check the order of the roles; else the template is damaged"
            raise TokenizerError(f"the chat template failed: {error}", where=self._file, hint=hint) from error
        if mark:
            text = self._up_to(mark, text)
        if not text:
            raise TokenizerError("the chat template rendered nothing", where=self._file, hint="check the roles")
        return text

    def _up_to(self, mark: str, text: str) -> str:
        """The text before `mark`, without white space before it if the template has removed the space at its end."""
        place = text.rfind(mark.rstrip())
        if place < 0:
            what = "the chat template does not write the final message, so it cannot be continued"
            raise TokenizerError(what, where=self._file, hint="leave out continue_final_message")
        before = text[:place]
        return before if text.startswith(mark, place) else before.rstrip()

    @functools.cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self.source or "")

    @functools.cached_property
    def _tool_renderer(self) -> Renderer:
        return self._renderer if self.tool_source == self.source else Renderer(self.tool_source or "")


def _check_options(options: ChatOptions, special_tokens: Mapping[str, str]) -> None:
    if options.continue_final_message and options.add_generation_prompt:
        hint = "set add_generation_prompt to false"
        raise InputError("excludes add_generation_prompt", where="continue_final_message", hint=hint)
    for name in options.template_kwargs:
        if name in _RESERVED or name in special_tokens:
            raise InputError("is not a variable that a request can set", where=f"chat_template_kwargs.{shortened(name, 40)}")
    for where, value in (("chat_template_kwargs", dict(options.template_kwargs)), ("tools", options.tools)):
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError("not a JSON value", where=where, found=shortened(error, 80)) from error


def _templates(value: Any, path: Path) -> tuple[str | None, str | None]:
    """The templates in `value`, the `chat_template` of tokenizer_config.json: without and with tools.

    It is a text, or a list with one template named "default" and perhaps one named "tool_use".
    """
    if isinstance(value, list):
        tool_use = [entry.get("template") for entry in value if isinstance(entry, dict) and entry.get("name") == "tool_use"]
        default = _template(value, path)
        return default, _template(tool_use[0], path) if tool_use else default
    template = _template(value, path)
    return template, template


def _template(value: Any, path: Path) -> str | None:
    """A template that is a text, or the default one of a list."""
    expected = 'a text, or a list of {"name", "template"} with one named default'
    if isinstance(value, list):
        if not all(isinstance(entry, dict) and entry.keys() >= {"name", "template"} for entry in value):
            raise TokenizerError("bad chat_template", where=path, expected=expected, found="a list of something else")
        texts = [entry["template"] for entry in value if entry["name"] == "default"]
        if len(texts) != 1:
            raise TokenizerError("bad chat_template", where=path, expected=expected, found=f"{len(texts)} named default")
        value = texts[0]
    if value is not None and not isinstance(value, str):
        raise TokenizerError("bad chat_template", where=path, expected=expected, found=type(value).__name__)
    if value is not None and len(value) > MAX_TEMPLATE:
        expected = f"at most {MAX_TEMPLATE:,} characters"
        raise TokenizerError("the chat template is too large", where=path, expected=expected, found=f"{len(value):,}")
    return value
