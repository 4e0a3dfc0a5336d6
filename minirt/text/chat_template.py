"""`ChatTemplate`: renders a conversation as prompt text, with the model's own Jinja chat template."""

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minirt.errors import InputError, TokenizerError
from minirt.files import present, read_text
from minirt.text.rendering import Renderer, RenderingError

MAX_TEMPLATE = 1 << 20  # bytes; the largest known are about 50 kB


class ChatTemplate:
    """The chat template of a model folder. `source` is None if the folder has no template."""

    def __init__(self, folder: Path, tokenizer_config: Mapping[str, Any]) -> None:
        """`tokenizer_config`: the content of tokenizer_config.json. chat_template.jinja takes precedence over it."""
        self._file = folder / "chat_template.jinja"
        if present(self._file):
            self.source: str | None = read_text(self._file, limit=MAX_TEMPLATE, error=TokenizerError)
        else:
            self._file = folder / "tokenizer_config.json"
            self.source = _default_template(tokenizer_config.get("chat_template"), self._file)

    def render(
        self,
        messages: list[dict[str, str]],
        special_tokens: Mapping[str, str],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render `messages` as one text.

        Args:
            messages: a non-empty list; each message is {"role": str, "content": str}.
            special_tokens: name → text (bos_token, eos_token, …). Templates refer to them by name.
            add_generation_prompt: end with the assistant's header.
            continue_final_message: end with the content of the last message, so that the model continues it.
            variables: more variables of the template, such as enable_thinking.
        Raises:
            InputError: `messages` is not such a list.
            TokenizerError: there is no template, or the template fails, rejects the messages, renders nothing, or takes more
                time, memory or output than `minirt.text.rendering` allows.
        """
        plain = _checked_messages(messages)
        if self.source is None:
            raise TokenizerError("there is no chat template", where=self._file, hint="use a plain prompt")
        try:
            names: dict[str, Any] = {"messages": plain, "tools": None, "documents": None}  # as transformers passes them
            names |= {"add_generation_prompt": add_generation_prompt} | dict(special_tokens)
            if taken := names.keys() & variables.keys():
                what = "a variable of the chat template has a fixed meaning"
                raise InputError(what, where="chat_template_kwargs", found=min(taken))
            text = self._renderer.render(names | dict(variables))
        except RenderingError as error:
            hint = "check the order of the roles; else the template is damaged"
            raise TokenizerError(f"the chat template failed: {error}", where=self._file, hint=hint) from error
        if not text:
            raise TokenizerError("the chat template rendered nothing", where=self._file, hint="check the roles")
        return _until_content(text, plain[-1]["content"]) if continue_final_message else text

    @functools.cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self.source or "")


def _default_template(value: Any, path: Path) -> str | None:
    """The template in `value`, the `chat_template` of tokenizer_config.json: a text, or a list with one named "default"."""
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


def _until_content(text: str, content: str) -> str:
    """`text` up to the end of the last message's content, which templates may strip."""
    content = content.strip()
    start = text.rfind(content)
    if not content or start < 0:
        what = "the chat template does not show the last message's content, so it cannot be continued"
        raise InputError(what, where="continue_final_message", found=repr(content)[:80])
    return text[: start + len(content)]


def _checked_messages(messages: object) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise InputError("not a non-empty list of messages", found=repr(messages)[:80])
    for i, message in enumerate(messages):
        good = isinstance(message, dict) and message.keys() == {"role", "content"}
        if not good or not all(isinstance(value, str) for value in message.values()):
            raise InputError(f"messages[{i}] must have exactly a role and a content, both strings", found=repr(message)[:80])
    return [dict(message) for message in messages]
