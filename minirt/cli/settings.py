"""Options of commands from the records of settings (`minirt.settings`), and the values that a command line gives to settings."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import click

from minirt.cli.help import option_group
from minirt.errors import InputError
from minirt.settings import Setting, settings_of
from minirt.sizes import parse_count, parse_size


class TokenIds(click.ParamType):
    """"0,17" → (0, 17)."""

    name = "ID,ID,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in value.split(",")]
        if not all(re.fullmatch("[0-9]{1,18}", word) for word in words):
            self.fail(f"{value!r} is not token ids with ',' between", param, ctx)
        return tuple(map(int, words))


class Bias(click.ParamType):
    """"17=-5.5" → (17, -5.5)."""

    name = "ID=BIAS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"([0-9]{1,18})=([+-]?[0-9]{1,9}(?:\.[0-9]{0,18})?)", value.strip())
        if not match:
            self.fail(f"{value!r} is no token id and number, such as 17=-5.5", param, ctx)
        return int(match[1]), float(match[2])


class JsonObject(click.ParamType):
    """'{"a": 1}' → {"a": 1}."""

    name = "JSON"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        try:
            content = value if isinstance(value, dict) else json.loads(value)
        except (ValueError, RecursionError) as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)
        if not isinstance(content, dict):
            self.fail(f"{value!r} is not a JSON object", param, ctx)
        return content


class Size(click.ParamType):
    """"512MiB" → bytes: see `parse_size`."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_size(value, 0)
        except InputError as error:
            self.fail(str(error), param, ctx)


class TokenCount(click.ParamType):
    """"32k" → 32000: see `parse_count`. "auto" → None: the default."""

    name = "TOKENS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value == "auto":
            return None
        try:
            return value if isinstance(value, int) else parse_count(value)
        except InputError as error:
            self.fail(f"{error}, or auto", param, ctx)


class Choice(click.Choice):
    """A choice of texts, or of those that a function returns, which is called when they are needed."""

    def __init__(self, choices: Sequence[str] | Callable[[], Sequence[str]]) -> None:
        self._choices = choices
        self.case_sensitive = True

    @property
    def choices(self) -> Sequence[str]:  # type: ignore[override]
        return self._choices() if callable(self._choices) else self._choices


COUNT = click.IntRange(1)
_KINDS: dict[str, type[click.ParamType]] = {"size": Size, "tokens": TokenCount}


def options_of(kind: type, *scopes: str, title: str, **changes: Mapping[str, Any]) -> Callable:
    """Decorator: the options of the settings of a class that have one of the scopes, in the order of their declaration.

    Args:
        title: the group in --help of the settings that name none.
        changes: setting → other arguments of `click.option` than those that follow from its record.
    """
    chosen = [record for record in settings_of(kind).values() if record.scope in scopes and record.option != ""]
    return option_group(None, *(_option(record, title, **changes.get(record.name, {})) for record in chosen))


def option_of(kind: type, name: str, title: str) -> Callable:
    """Decorator: the option of one setting."""
    return _option(settings_of(kind)[name], title)


def _option(record: Setting, title: str, **changes: Any) -> Callable:
    types = get_args(record.type) or (record.type,)
    facts: dict[str, Any] = {"metavar": record.metavar}
    help_text = re.sub("`([a-z_]+)`", lambda name: f"--{name[1].replace('_', '-')}", record.option_help or record.help)
    spellings = [f"--{record.name.replace('_', '-')}"] if record.option is None else record.option.split()
    if "/" in spellings[0]:
        facts |= {"default": record.default, "show_default": bool(record.default)}
    elif isinstance(record.default, bool):
        facts["is_flag"], spellings = True, record.options
    elif isinstance(record.kind, click.ParamType):
        facts["type"] = record.kind
    elif isinstance(record.kind, tuple) or callable(record.kind):
        facts["type"] = Choice(record.kind)
    elif record.kind in _KINDS:
        facts["type"] = _KINDS[record.kind]()
    else:
        texts = {str(kind) for kind in types}
        numbers = [kind for kind in (int, float) if kind in types]
        ids = any("Sequence[int]" in text for text in texts)
        bias = any("Mapping[int" in text for text in texts)
        facts["type"] = TokenIds() if ids else Bias() if bias else numbers[0] if numbers else str
        facts["multiple"] = bias or record.kind == "several" or any("Sequence[str]" in text for text in texts)
    if facts.get("multiple"):
        help_text = f"{help_text.removesuffix('.')} (repeatable)."
    elif record.default not in (None, "", ()) and not isinstance(record.default, bool):
        facts |= {"default": record.default, "show_default": True}
    facts |= {"show_default": record.shown} if record.shown else {}
    dest = f"no_{record.name}" if record.default is True and "/" not in spellings[0] else record.name
    parts = [click.option(*spellings, dest, **facts | {"help": help_text} | changes)]
    for spelling, value in record.short.items():
        parts.append(click.option(spelling, is_flag=True, help=f"The same as {spellings[0]} {value}."))
    return option_group(record.group or title, *parts)


def given(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a class that the parsed options of a command set."""
    values: dict[str, Any] = {}
    for name, record in settings_of(kind).items():
        if record.default is True and f"no_{name}" in options:
            values[name] = not options[f"no_{name}"]
        elif (value := options.get(name)) not in (None, ()):
            values[name] = value
    return values


def biases(pairs: tuple[tuple[int, float], ...]) -> dict[int, float]:
    """The values of --logit-bias."""
    if len(dict(pairs)) < len(pairs):
        raise InputError("a token id appears twice", where="--logit-bias", found=list(pairs))
    return dict(pairs)
