"""A setting is declared once, as a field of a dataclass: `temperature: float | None = setting("0 is greedy.", check=Number(0))`.

The dataclasses are `SamplingParams`, `StructuredOutputsParams`, `LoadOptions`, `SpeculativeOptions` and `ServerOptions`. Options
of benchmarks are fields of plain classes beside their commands, in `minirt/cli/`. The
records give checks and docstrings (here), options of the command line (`minirt.cli.settings`), fields of requests
(`minirt.server.protocol`), hints for names of other libraries (`minirt.foreign_names`), the names in messages (`minirt.wording`)
and the tables of docs/python-api.md (bench/tools/settings_tables.py).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field
from functools import cache
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple, dataclass_transform

from minirt.errors import InputError, MinirtError, quoted
from minirt.foreign_names import check_names

_SHOWN = 500  # characters of a refused value


class Setting(NamedTuple):
    """The record of a setting.

    Args:
        help: what it does, in sentences, for --help, docstrings and pages. --help shows `names` of other settings as options.
        details: further sentences for docstrings and pages.
        check: (value, where, error class, hint) → the value as it is kept. Raises the error.
        elsewhere: another program → its names for this setting, separated by spaces.
        option: the spellings of its option, separated by spaces. None: made from the name; "": it has none.
        option_help: `help` for the command line, where it differs.
        metavar: what --help calls the value.
        kind: how the command line reads the value: "size", "tokens", choices or a function that returns them, "several" texts, or
            a type of click's. None: by its type.
        shown: what --help says of a default that depends on something.
        short: spelling of a switch → the value of this setting that it stands for, such as "--fp8".
        group: the title of its options in --help; None: that of the class.
        scope: which commands have it; see the decorators of `minirt.cli.options`.
        engine: whether `Generator` takes it beside a loaded model.
        file: its name in generation_config.json.
        unset: the value if it is not set.
        column: float or int: the type of its column in the table of slots, if it has one; `unset` is off.
        acts: what it changes: "draws" (only if tokens are drawn), "logits", or "text".
        request: whether it is a field of the HTTP APIs.
        most: entries that a request may list.
        name, type, default: those of the field.
    """

    help: str
    details: str = ""
    check: Callable[..., Any] | None = None
    elsewhere: Mapping[str, str] = {}
    option: str | None = None
    option_help: str | None = None
    metavar: str | None = None
    kind: Any = None
    shown: str | None = None
    short: Mapping[str, Any] = {}
    group: str | None = None
    scope: str = ""
    engine: bool = False
    file: str | None = None
    unset: Any = None
    column: type | None = None
    acts: str = "text"
    request: bool = True
    most: int | None = None
    name: str = ""
    type: Any = None
    default: Any = None

    @property
    def text(self) -> str:
        """The description for docstrings and pages."""
        return f"{self.help} {self.details}".strip()

    @property
    def options(self) -> list[str]:
        """The spellings of its option; of a switch, those that change the default come first."""
        spellings = f"--{'no-' * (self.default is True)}{self.name.replace('_', '-')}" if self.option is None else self.option
        pairs = [spelling.split("/") for spelling in spellings.split()]
        return [spelling for pair in pairs for spelling in (pair[::-1] if self.default is True else pair)]

    @property
    def option_name(self) -> str | None:
        """The option that changes it: "--max-model-len", or "--no-cuda-graphs" for what is on by default. None: it has none."""
        return next(iter(self.options), None)


def setting(help: str, default: Any = None, **facts: Any) -> Any:
    """A field with a default and a `Setting`."""
    return field(default=default, metadata={"setting": {"help": help} | facts})


def _records(kind: Any) -> dict[str, Setting]:
    declared = getattr(kind, "__dataclass_fields__", vars(kind)).items()
    return {
        name: Setting(**one.metadata["setting"], name=name, type=kind.__annotations__[name], default=one.default)
        for name, one in declared if isinstance(one, Field)
    }  # fmt: skip


settings_of: Callable[[Any], dict[str, Setting]] = cache(_records)
"""Name → record of the settings of a class, in their order."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Settings:
    """Base of classes of settings, which become frozen dataclasses with the settings in their docstrings, before "Raises:".

    Refuses names that they do not have, with what to write instead, and checks values.

    Attributes:
        _error, _name_error: the classes of errors: of values, and of names.
        _elsewhere: what to write for arguments that belong to another call.
        _python: how Python code sets a setting, for hints; None: it does not.
        _unnamed: how many arguments may be given without their names.
    """

    _error: ClassVar[type[MinirtError]] = InputError
    _name_error: ClassVar[type[MinirtError]] = InputError
    _elsewhere: ClassVar[Mapping[str, str]] = {}
    _python: ClassVar[str | None] = None
    _unnamed: ClassVar[int] = 0

    def __init_subclass__(cls, kw_only: bool = True) -> None:
        dataclass(frozen=True, kw_only=kw_only)(cls)
        lines = [f"        {name}: {record.text}" for name, record in settings_of(cls).items()]
        before, raises, after = str(cls.__doc__).partition("    Raises:\n")
        cls.__doc__ = "\n".join((before.rstrip(), "", "    Args:", *lines, "", f"{raises}{after}" if raises else ""))

    def __new__(cls, *unnamed: Any, **given: Any) -> Any:
        known, too_many = settings_of(cls), unnamed[cls._unnamed :]
        if too_many or not given.keys() <= known.keys():
            check_names(given, tuple(known), cls.__name__, cls._name_error, cls._elsewhere, too_many)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, record in settings_of(type(self)).items():
            value = getattr(self, name)
            if record.check is None or (value is None and record.default is None):
                continue
            if (kept := record.check(value, self._place(name), self._error)) is not value:
                self._set(name, kept)

    @classmethod
    def _place(cls, name: str) -> str:
        """How an error names a setting."""
        return f"{cls.__name__}.{name}"

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen


# --- checks ---


class Number:
    """A check of numbers in a range.

    Args:
        low, high: the range; `open_low`: without `low` itself.
        note: what is added to the description of the range, such as "1 is off".
        text: the description, if it is not made of these.
    """

    kind: ClassVar[Any] = Real
    convert: ClassVar[Any] = float

    def __init__(
        self, low: float, high: float = math.inf, note: str = "", *, open_low: bool = False, text: str | None = None
    ) -> None:
        self.low, self.high, self.open_low = low, high, open_low
        kind = "an integer" if self.kind is Integral else "a finite number" if high == math.inf else "a number"
        bounded = f"above {low} and at most {high:,}" if open_low else f"from {low} to {high:,}"
        self.text = text or f"{kind} {f'>= {low}' if high == math.inf else bounded}" + (f" ({note})" if note else "")

    def __call__(self, value: Any, place: str, error: type[MinirtError], hint: str | None = None) -> Any:
        if not isinstance(value, bool) and isinstance(value, self.kind):
            try:
                number = self.convert(value)
            except OverflowError:  # an int beyond the range of float
                number = math.inf
            if (self.low < number if self.open_low else self.low <= number) and number <= self.high and number != math.inf:
                return number
        raise error("not an acceptable value", where=place, expected=self.text, found=repr(value)[:_SHOWN], hint=hint)


class Integer(Number):
    """A check of integers in a range."""

    kind, convert = Integral, int


def switch(value: Any, place: str, error: type[MinirtError], hint: str | None = None) -> bool:
    if not isinstance(value, bool):
        raise error("not an acceptable value", where=place, expected="True or False", found=quoted(value, 80), hint=hint)
    return value


def one_of(*choices: str) -> Callable[..., str]:
    """A check of a text that is one of `choices`."""

    def check(value: Any, place: str, error: type[MinirtError], hint: str | None = None) -> str:
        if value not in choices:
            raise error("not an acceptable value", where=place, expected=" or ".join(choices), found=quoted(value, 80), hint=hint)
        return value

    return check


def texts(what: str) -> Callable[..., tuple[str, ...]]:
    """A check of a text or several; `what` they are."""

    def check(value: Any, place: str, error: type[MinirtError], hint: str | None = None) -> tuple[str, ...]:
        several = (value,) if isinstance(value, str) else value
        if isinstance(several, list | tuple) and all(isinstance(text, str) and text for text in several):
            return tuple(several)
        expected = "a string, or a list or tuple of strings, none empty"
        raise error(f"not acceptable {what}", where=place, expected=expected, found=repr(value)[:_SHOWN], hint=hint)

    return check


def token_ids(value: Any, place: str, error: type[MinirtError], hint: str | None = None) -> tuple[int, ...]:
    """Different token ids, in their order. Whether the model has them is checked with the request."""
    if isinstance(value, list | tuple) and all(is_token_id(token) for token in value):
        return tuple(dict.fromkeys(map(int, value)))
    raise error("not token ids", where=place, expected="a list of integers >= 0", found=repr(value)[:_SHOWN], hint=hint)


def is_token_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0
