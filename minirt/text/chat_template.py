"""`ChatTemplate`: renders a conversation as prompt text, with the model's own Jinja chat template."""

import functools
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minirt.errors import InputError, TokenizerError, shortened
from minirt.files import present, read_text
from minirt.text.messages import checked_messages, without_texts
from minirt.text.rendering import Renderer, RenderingError

MAX_TEMPLATE = 1 << 20  # bytes; the largest known are about 50 kB


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
        self,
        messages: list[dict[str, Any]],
        special_tokens: Mapping[str, str],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render `messages` as one text.

        Args:
            messages: a non-empty list; see `checked_messages`.
            special_tokens: name → text (bos_token, eos_token, …). Templates refer to them by name.
            tools: what the model may call, for the template; see `minirt.text.tools.Tool.value`.
            add_generation_prompt: end with the assistant's header.
            continue_final_message: end with the content of the last message, so that the model continues it. Excludes
                `add_generation_prompt`.
            variables: more variables of the template, such as enable_thinking.
        Raises:
            InputError: `messages` is not such a list, or an option is wrong.
            TokenizerError: there is no template, or the template fails, rejects the messages, renders nothing, or takes more
                time, memory or output than `minirt.text.rendering` allows.
        """
        plain, mark = checked_messages(messages), ""
        if continue_final_message:
            if add_generation_prompt:
                hint = "set add_generation_prompt to false"
                raise InputError("excludes add_generation_prompt", where="continue_final_message", hint=hint)
            mark = f"END{secrets.token_hex(16)}OF_TEXT "  # the space shows whether the template trims
            plain[-1]["content"] += mark
        if self.source is None:
            raise TokenizerError("there is no chat template", where=self._file, hint="use a plain prompt")
        names: dict[str, Any] = {"messages": plain, "tools": None if tools is None else list(tools), "documents": None}
        names |= {"add_generation_prompt": add_generation_prompt} | dict(special_tokens)  # the variables that transformers passes
        _check_json("tools", names["tools"])
        _check_json("chat_template_kwargs", dict(variables))
        if taken := names.keys() & variables.keys():
            what = "a variable of the chat template has a fixed meaning"
            raise InputError(what, where="chat_template_kwargs", found=min(taken))
        names |= variables
        try:
            text = self._rendered(self._tool_renderer if tools else self._renderer, names)
        except RenderingError as error:
            damaged = str(error).startswith("TemplateSyntaxError")
            hint = "check the messages and the order of their roles; the template may be damaged"
            hint = "correct the template, or get the file again" if damaged else hint
            raise TokenizerError(f"the chat template failed: {error}", where=self._file, hint=hint) from error
        if mark:
            text = self._up_to(mark, text)
        if not text:
            raise TokenizerError("the chat template rendered nothing", where=self._file, hint="check the roles")
        return text

    @staticmethod
    def _rendered(renderer: Renderer, names: dict[str, Any]) -> str:
        """The template's text. Arguments that are no JSON objects are texts, unless the template fails with them."""
        try:
            return renderer.render(names)
        except RenderingError:
            objects = without_texts(names["messages"])
            if objects == names["messages"]:
                raise
            return renderer.render(names | {"messages": objects})

    @staticmethod
    def _up_to(mark: str, text: str) -> str:
        """The text before `mark`, without white space before it if the template has removed the space at its end."""
        place = text.rfind(mark.rstrip())
        if place < 0:
            what = "the chat template does not show the last message's content, so it cannot be continued"
            raise InputError(what, where="continue_final_message")
        before = text[:place]
        return before if text.startswith(mark, place) else before.rstrip()

    @functools.cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self.source or "")

    @functools.cached_property
    def _tool_renderer(self) -> Renderer:
        return self._renderer if self.tool_source == self.source else Renderer(self.tool_source or "")


def _check_json(where: str, value: Any) -> None:
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
