"""`ChatTemplate`: renders a conversation as prompt text, with the model's own Jinja chat template."""

import functools
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from minirt.errors import InputError, TokenizerError
from minirt.text.files import damage_reported, read_json_object


class ChatTemplate:
    """The chat template of a model folder. `source` is None if the folder has no template."""

    def __init__(self, folder: Path) -> None:
        self.source, self._file = _read_template(folder)

    def render(self, messages: list[dict[str, str]], special_tokens: Mapping[str, str]) -> str:
        """Render `messages` as one text that ends with the assistant's header.

        Args:
            messages: a non-empty list; each message is {"role": str, "content": str}.
            special_tokens: name → text (bos_token, eos_token, …). Templates refer to them by name.
        Raises:
            InputError: `messages` has another form.
            TokenizerError: there is no template, or the template fails or rejects the messages.
        """
        plain = _checked_messages(messages)
        if self.source is None:
            raise TokenizerError("there is no chat template", where=self._file, hint="use a plain prompt")
        try:
            names = {"messages": plain, "tools": None, "documents": None, "add_generation_prompt": True}
            return self._compiled.render(names | dict(special_tokens))  # the variables that transformers passes
        except Exception as error:  # the template is third-party code and can raise anything
            what, hint = f"the chat template failed: {type(error).__name__}: {error}", "check the order of the roles"
            raise TokenizerError(what, where=self._file, hint=hint) from error

    @functools.cached_property
    def _compiled(self) -> Any:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            tags = {"generation"}  # noqa: RUF012  # marks the text to train on; for inference a plain block

            def parse(self, parser: Any) -> nodes.Node:
                line = next(parser.stream).lineno
                return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        extensions = [Generation, "jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # jinja2's own filter escapes HTML
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.source or "")


def _read_template(folder: Path) -> tuple[str | None, Path]:
    """(chat template or None, its file). chat_template.jinja takes precedence over tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.exists():
        with damage_reported(path):
            return path.read_text(encoding="utf-8"), path
    path = folder / "tokenizer_config.json"
    with damage_reported(path):
        value = read_json_object(path).get("chat_template")
        if isinstance(value, list):
            named = {entry["name"]: entry["template"] for entry in value}
            if "default" not in named:
                raise KeyError("no chat template has the name default")
            value = named["default"]
        if value is not None and not isinstance(value, str):
            raise TypeError("chat_template is neither a string nor a list of named strings")
        return value, path


def _checked_messages(messages: object) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise InputError("not a non-empty list of messages", found=repr(messages)[:80])
    for i, message in enumerate(messages):
        good = isinstance(message, dict) and message.keys() == {"role", "content"}
        if not good or not all(isinstance(value, str) for value in message.values()):
            raise InputError(f"messages[{i}] must have exactly a role and a content, both strings", found=repr(message)[:80])
    return [dict(message) for message in messages]
