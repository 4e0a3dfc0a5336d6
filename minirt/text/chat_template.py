"""`ChatTemplate`: renders a conversation as prompt text, with the model's Jinja chat template."""

import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from minirt.errors import InputError, TokenizerError, printable, shortened
from minirt.files import present, read_json, read_text
from minirt.text.messages import MessageForm, checked_messages, without_texts
from minirt.text.rendering import Renderer, RenderingError
from minirt.text.template_probe import Kind, Probe, end_of_turn, left_out, message_form, outline
from minirt.wording import warn

T = TypeVar("T")
_NOTHING: Mapping[str, Any] = MappingProxyType({})
MAX_TEMPLATE = 1 << 20  # bytes; the largest known are about 50 kB
_MAX_OUTLINES = 1000  # of conversations, whose losses a template remembers
_NAMES = ("default", "tool_use")  # the templates that transformers chooses by itself; others are chosen by the caller


class ChatTemplate:
    """The chat templates of a model folder: one, or one named "default" and one named "tool_use", for conversations with tools.

    As in transformers, chat_template.jinja (the default one) and additional_chat_templates/NAME.jinja take precedence over
    tokenizer_config.json. The older chat_template.json, which transformers reads for processors, is the last one.

    Attributes:
        source: the template; None if the folder has none.
        tool_source: the one for conversations with tools, which may be another.
    """

    def __init__(self, folder: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str] = _NOTHING) -> None:
        """
        Args:
            tokenizer_config: the content of tokenizer_config.json.
            special_tokens: name → text (bos_token, eos_token, …). Templates refer to them by name.
        """
        self._special_tokens = special_tokens
        stated = list(filter(None, _stated(folder, tokenizer_config)))
        named = stated[0] if stated else {}
        texts = [{name: text.strip() for name, (text, _) in templates.items()} for templates in stated]
        for other, stripped in zip(stated[1:], texts[1:], strict=True):
            if stripped != texts[0]:
                path, used = (next(iter(templates.values()))[1] for templates in (other, named))
                what = f"{path}: its chat template is ignored, since {used.name} has another one, which takes precedence"
                warn(printable(what))
        self._file = folder / "tokenizer_config.json"
        templates = {name: _Template(text, path, special_tokens) for name, (text, path) in named.items()}
        self._plain = templates.get("default")
        self._tool = templates.get("tool_use", self._plain)
        self.source = None if self._plain is None else self._plain.source
        self.tool_source = None if self._tool is None else self._tool.source

    def render(
        self, messages: list[dict[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True, continue_final_message: bool = False, variables: Mapping[str, Any] = _NOTHING,
    ) -> str:  # fmt: skip
        """Render `messages` as one text.

        Args:
            messages: a non-empty list; see `checked_messages`.
            tools: what the model may call, for the template; see `minirt.text.tools.Tool.value`.
            add_generation_prompt: end with the assistant's header.
            continue_final_message: end with the content of the last message, so that the model continues it. Excludes
                `add_generation_prompt`.
            variables: further variables of the template, such as enable_thinking.
        Raises:
            InputError: `messages` is not such a list, or an option is wrong.
            TokenizerError: there is no template, or the template fails, rejects the messages, renders nothing, or takes more
                time, memory or output than `minirt.text.rendering` allows.
        """
        template, mark = self._tool if tools else self._plain, ""
        if template is None:
            checked_messages(messages)
            hint = "the model completes plain prompts; conversations need a chat model, often named -Instruct"
            raise TokenizerError("there is no chat template", where=self._file, hint=hint)
        form = template.form or MessageForm()
        plain = checked_messages(messages, form)
        if continue_final_message:
            if add_generation_prompt:
                hint = "set add_generation_prompt to false"
                raise InputError("excludes add_generation_prompt", where="continue_final_message", hint=hint)
            mark = f"END{secrets.token_hex(16)}OF_TEXT "  # the space shows whether the template trims
            if isinstance(plain[-1]["content"], list):
                plain[-1]["content"][-1]["text"] += mark
            else:
                plain[-1]["content"] = (plain[-1]["content"] or "") + mark
        names: dict[str, Any] = {"messages": plain, "tools": None if tools is None else list(tools), "documents": None}
        # The variables that transformers passes.
        names |= {"add_generation_prompt": add_generation_prompt} | dict(self._special_tokens)
        for name, value in (("tools", names["tools"]), ("chat_template_kwargs", dict(variables))):
            try:
                json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise InputError("not a JSON value", where=name, found=shortened(error, 80)) from error
        if taken := names.keys() & variables.keys():
            what = "a variable of the chat template has a fixed meaning"
            raise InputError(what, where="chat_template_kwargs", found=min(taken))
        names |= variables
        try:
            text = template.render(names)
        except TokenizerError:
            objects = without_texts(plain)  # an answer that was cut off, for a template that takes no text as arguments
            if form.text_arguments or objects == plain:
                raise
            text = template.render(names | {"messages": objects})
        if mark:
            place = text.rfind(mark.rstrip())
            if place < 0:
                what = "the chat template does not show the last message's content, so it cannot be continued"
                raise InputError(what, where="continue_final_message")
            # If the template has removed the space at the end of the mark, it trims.
            text = text[:place] if text.startswith(mark, place) else text[:place].rstrip()
        if not text:
            raise TokenizerError("the chat template rendered nothing", where=template.path, hint="check the roles")
        if (lost := template.left_out(outline(messages), bool(tools), variables)) is not None:
            warn(lost)
        return text

    def end_of_turn(self, tokens: Collection[str]) -> str | None:
        """The one of `tokens` that the template writes at the end of each answer; None if there is no such token."""
        return None if self._plain is None else self._plain.end_of_turn(tokens)


class _Template:
    """One template, and the file that has it."""

    def __init__(self, source: str, path: Path, special_tokens: Mapping[str, str]) -> None:
        self.source, self.path, self._special_tokens, self._renderer = source, path, special_tokens, Renderer(source)
        self._left_out: dict[int, str | None] = {}  # what `left_out` says, by the hash of its arguments

    @cached_property
    def form(self) -> MessageForm | None:
        """The form of messages that it takes. It renders some conversations to find it; None: it was stopped at one."""
        what = "which form of messages it takes and what it leaves out"
        return self._probed(what, lambda probe: message_form(probe, self.source))

    def end_of_turn(self, tokens: Collection[str]) -> str | None:
        """See `ChatTemplate.end_of_turn`."""
        if (form := self.form) is None:
            return None
        return self._probed("how it ends an answer", lambda probe: end_of_turn(probe, form, tokens))

    def _probed(self, what: str, ask: Callable[[Probe], T | None]) -> T | None:
        """What short conversations say about it; None, with a warning, if it was stopped."""
        try:
            return ask(Probe(self._renderer, self._special_tokens))
        except RenderingError as error:
            text = f"{self.path}: it is not known {what}, since the chat template was stopped at a short conversation: {error}"
            warn(printable(shortened(text, 1000)))
            return None

    def left_out(self, kinds: Sequence[Kind], tools: bool, variables: Mapping[str, Any]) -> str | None:
        """A warning of what the template leaves out of conversations with this outline, so that the model does not see it.

        The first conversation of each outline is rendered once more, with other texts. Later ones cost the look at their kinds.
        """
        form = self.form
        if form is None:
            return None
        key = hash((kinds, tools, json.dumps(dict(variables))))
        known = self._left_out = self._left_out if len(self._left_out) < _MAX_OUTLINES else {}
        if key not in known:
            try:
                lost = left_out(Probe(self._renderer, {**self._special_tokens, **variables}), form, kinds, tools)
            except RenderingError as error:
                lost = str(error)
            text = f"{self.path}: in conversations that end with {kinds[-1].role}, the chat template leaves out: {lost}"
            known[key] = printable(shortened(text, 1000)) if lost else None
        return known[key]

    def render(self, names: Mapping[str, Any]) -> str:
        """The text with these variables. Raises a TokenizerError if the template fails."""
        try:
            return self._renderer.render(names)
        except RenderingError as error:
            damaged = str(error).startswith("TemplateSyntaxError")
            hint = "check the messages and the order of their roles; the template may be damaged"
            hint = "correct the template, or get the file again" if damaged else hint
            raise TokenizerError(f"the chat template failed: {error}", where=self.path, hint=hint) from error


_Sources = dict[str, tuple[str, Path]]  # name → source of a template, and the file that has it


def _stated(folder: Path, tokenizer_config: Mapping[str, Any]) -> list[_Sources]:
    """The templates of each place that may have some, in the order of precedence."""
    paths = {name: folder / "additional_chat_templates" / f"{name}.jinja" for name in _NAMES}
    if not present(paths["default"]):
        paths["default"] = folder / "chat_template.jinja"
    existing = {name: path for name, path in paths.items() if present(path)}
    files = {name: (read_text(path, limit=MAX_TEMPLATE, error=TokenizerError), path) for name, path in existing.items()}
    config, older = folder / "tokenizer_config.json", folder / "chat_template.json"
    stated = read_json(older, limit=8 * MAX_TEMPLATE, error=TokenizerError) if present(older) else {}
    return [files, _named(tokenizer_config.get("chat_template"), config), _named(stated.get("chat_template"), older)]


def _named(value: Any, path: Path) -> _Sources:
    """The templates in `value`, a `chat_template`: a text, which is the default one, several with names, or null."""
    expected = 'a text, or a list of {"name", "template"} with one named default'
    if value is None:
        return {}
    entries = [{"name": "default", "template": value}] if isinstance(value, str) else value
    if isinstance(value, dict):
        entries = [{"name": name, "template": template} for name, template in value.items()]
    if not isinstance(entries, list) or any(not isinstance(e, dict) or not e.keys() >= {"name", "template"} for e in entries):
        shown = "a list of something else" if isinstance(value, list) else type(value).__name__
        raise TokenizerError("bad chat_template", where=path, expected=expected, found=shown)
    names = [entry["name"] for entry in entries]
    if names.count("default") != 1 or names.count("tool_use") > 1:
        shown = f"{names.count('default')} named default, {names.count('tool_use')} named tool_use"
        raise TokenizerError("bad chat_template", where=path, expected=expected, found=shown)
    named = {entry["name"]: (entry["template"], path) for entry in entries if entry["name"] in _NAMES}
    for text, _ in named.values():
        if not isinstance(text, str):
            raise TokenizerError("bad chat_template", where=path, expected=expected, found=type(text).__name__)
        if len(text) > MAX_TEMPLATE:
            limit, shown = f"at most {MAX_TEMPLATE:,} characters", f"{len(text):,}"
            raise TokenizerError("the chat template is too large", where=path, expected=limit, found=shown)
    return named
