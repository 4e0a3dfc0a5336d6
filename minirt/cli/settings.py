"""Options of commands from the records of settings (`minirt.settings`), and the values that a command line gives to settings."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import click

from minirt.cli.help import option_group
from minirt.errors import InputError, quoted
from minirt.settings import settings_of
from minirt.sizes import parse_size


class Parsed(click.ParamType):
    """What a function makes of a text. A value that is no text, such as a default, stays.

    Args:
        name: what --help calls the value.
        parse: raises a ValueError, such as an `InputError`, that says what is wrong.
    """

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def integers(text: str, separator: str, pattern: str, what: str) -> tuple[int, ...]:
    """"0,17" → (0, 17): integers that look like `pattern`."""
    words = [word.strip() for word in text.split(separator)]
    if not all(re.fullmatch(pattern, word) for word in words):
        raise ValueError(f"{text!r} is not {what}")
    return tuple(map(int, words))


def _token_ids(text: str) -> tuple[int, ...]:
    return integers(text, ",", "[0-9]{1,18}", "token ids with ',' between")


def _bias(text: str) -> tuple[int, float]:
    """"17=-5.5" → (17, -5.5)."""
    match = re.fullmatch(r"([0-9]{1,18})=([+-]?[0-9]{1,9}(?:\.[0-9]{0,18})?)", text.strip())
    if not match:
        raise ValueError(f"{text!r} is no token id and number, such as 17=-5.5")
    return int(match[1]), float(match[2])


def _json_object(text: str) -> dict[str, Any]:
    from minirt.files import parse_json

    return parse_json(text, quoted(text), error=InputError, hint="")


def token_count(text: str) -> int | None:
    """"32k", "32K", "32768" → a number of tokens: k and m are powers of 1000, K and M of 1024, as in vLLM. "auto" → None."""
    if text == "auto":
        return None
    match = re.fullmatch(r"([+-]?[0-9]{1,40}|[0-9]{1,9}(?:\.[0-9]{1,9})?(?=[kKmM]))([kKmM]?)", text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a number of tokens; examples are 32768 and 32k (32,000; 32K is 32,768), or auto")
    factor = {"": 1, "k": 1000, "K": 1 << 10, "m": 10**6, "M": 1 << 20}[match[2]]
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


JSON_OBJECT = Parsed("JSON", _json_object)
_KINDS = {"size": Parsed("SIZE", lambda text: parse_size(text, 0)), "tokens": Parsed("TOKENS", token_count)}
# Type of a setting → (that of its option, whether the option is repeatable).
_TYPES: dict[Any, tuple[Any, bool]] = {
    Sequence[int]: (Parsed("ID,ID,…", _token_ids), False), Mapping[int, float]: (Parsed("ID=BIAS", _bias), True),
    Sequence[str]: (str, True), int: (int, False), float: (float, False),
}  # fmt: skip


class LazyChoice(click.Choice):
    """A choice of texts, or of those that a function returns, which is called when they are needed."""

    def __init__(self, choices: Sequence[str] | Callable[[], Sequence[str]]) -> None:
        self._choices = choices
        self.case_sensitive = True

    @property
    def choices(self) -> Sequence[str]:  # type: ignore[override]
        return self._choices() if callable(self._choices) else self._choices


COUNT = click.IntRange(1)


def options_of(kind: type, *scopes: str, title: str, **changes: Mapping[str, Any]) -> Callable:
    """Decorator: the options of the settings of a class that have one of the scopes, in the order of their declaration.

    `title`: the group in --help of the settings that name none. `changes`: see `option_of`, by setting.
    """
    chosen = [name for name, record in settings_of(kind).items() if record.scope in scopes and record.option != ""]
    return option_group(None, *(option_of(kind, name, title, **changes.get(name, {})) for name in chosen))


def option_of(kind: type, name: str, title: str, **changes: Any) -> Callable:
    """Decorator: the option of one setting. `changes`: arguments of `click.option` that do not follow from its record."""
    record = settings_of(kind)[name]
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
        facts["type"] = LazyChoice(record.kind)
    elif record.kind in _KINDS:
        facts["type"] = _KINDS[record.kind]
    else:
        parsed, several = next((_TYPES[kind] for kind in types if kind in _TYPES), (str, False))
        facts |= {"type": parsed, "multiple": several or record.kind == "several"}
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
