"""The words of messages: options for readers of the command line, arguments for callers from Python.

Messages are written with options, such as "lower --max-model-len". `MinirtError` and `warn` word them for the reader.
"""

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

# In a sentence, the word after an option is its value only if it looks like one.
_WORDS = "auto|cpu|cuda:[0-9N]+|cuda|bfloat16|float16|float32|fp8|int4|eager|triton|ngram|mtp"
_VALUE = rf"[0-9][0-9.]*\w*\b|(?:{_WORDS})\b|'?[^\s,;()']+=[^\s,;()']+'?"
_OPTION = rf"(?<![\w/-])--(?P<name>[a-z][a-z0-9-]*[a-z0-9])(?: (?P<value>{_VALUE})|(?<=--model) (?P<model>[\w./-]+))?"
_COMMAND = r"(\b(?:minirt|pip|uv) [^,;()`]*)"  # a whole command stays as it is

_readers = ["Python"]  # the last one reads the messages of this process


@contextmanager
def command_line() -> Iterator[None]:
    """Context in which all messages of this process are for the command line."""
    _readers.append("command line")
    try:
        yield
    finally:
        _readers.pop()


def worded(text: str) -> str:
    """A sentence for its reader. For Python, "use --dtype bfloat16 --fp8" is 'use dtype="bfloat16", quantization="fp8"'."""
    if _readers[-1] == "command line" or "--" not in text:
        return text
    parts = re.split(_COMMAND, text)
    for i in range(0, len(parts), 2):
        separated = re.sub(rf"{_OPTION}(?= --)", r"\g<0>,", parts[i])
        parts[i] = re.sub(_OPTION, lambda match: _argument(match["name"], match["value"] or match["model"]), separated)
    return "".join(parts)


def worded_place(place: str) -> str:
    """The `where` of an error, which often is "--name" or "--name value", for its reader."""
    if _readers[-1] == "command line" or not place.startswith("--"):
        return worded(place)
    name, _, value = place.removeprefix("--").partition(" ")
    return _argument(name, value or None)


@cache
def _arguments() -> dict[str, str]:
    """Option without its dashes → the argument of `LoadOptions`; of a switch with its value: "fp8" → 'quantization="fp8"'."""
    import minirt
    from minirt.settings import settings_of

    arguments = {"speculative-config": "speculative"}
    for name, record in settings_of(minirt.LoadOptions).items():
        for option in record.options or [f"--{name}"]:
            on = not (record.default is True or option.startswith("--no-"))
            is_switch = isinstance(record.default, bool) or "/" in (record.option or "")
            arguments[option[2:]] = f"{name}={on}" if is_switch else name
        arguments |= {option.lstrip("-"): f'{name}="{value}"' for option, value in record.short.items()}
    return arguments


def _argument(name: str, value: str | None) -> str:
    argument = _arguments().get(name, name.replace("-", "_"))
    if value is None or "=" in argument:
        return argument if value is None else f"{argument} {value}"
    value = value.strip("'")
    return f"{argument}={value}" if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", value) else f'{argument}="{value}"'


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn the code that called minirt: the warning names the caller's line, not one of this package."""
    level, frame = 2, sys._getframe(1)
    inside = ("minirt", "contextlib", "functools")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in inside:
        level, frame = level + 1, frame.f_back
    warnings.warn(worded(text), category, stacklevel=level)
