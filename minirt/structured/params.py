"""`StructuredOutputsParams`: what a request's text must be, as plain values. Names and meanings are vLLM's.

Imports neither torch nor llguidance. `minirt.structured.grammar` makes a grammar of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json import dumps
from typing import Any

from minirt.errors import InputError, quoted, shortened
from minirt.settings import Settings, documented, setting, settings_of, switch

KINDS = ("json", "regex", "choice", "grammar", "json_object")
# Characters. Checks of a schema take time in proportion; OpenAI allows 120,000 of names and values.
MAX_LENGTH = {"json": 1 << 17, "regex": 1 << 15, "choice": 1 << 18, "grammar": 1 << 18}
MAX_CHOICES = 4096
MAX_MARKER = 256  # characters of `reasoning_end`


@documented
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams(Settings):
    """What the generated text must be: exactly one of the first five fields. Needs `minirt[structured]`.

    Raises:
        InputError: a value has the wrong type or is too long, or there is not exactly one kind.
    """

    _python = 'SamplingParams(structured_outputs={{"{}": …}})'

    # fmt: off
    json: str | Mapping[str, Any] | bool | None = setting(
        "The text is JSON that a JSON schema accepts.", option="--json-schema", metavar="FILE",
        option_help="The text is JSON that the JSON schema in a file accepts; - is stdin. A value that begins with { is the "
        "schema itself.",
        details="The schema is a dict, a bool or JSON text. It is stored as text.",
        elsewhere={"vLLM": "guided_json", "llama.cpp": "json_schema_file"})
    regex: str | None = setting(
        "The text is matched by a regular expression from its beginning to its end. \\d is any Unicode digit: write [0-9].",
        details="The syntax is that of Rust's `regex`.", elsewhere={"vLLM": "guided_regex"})
    choice: Sequence[str] | None = setting(
        "The text is one of these texts.", kind="several", elsewhere={"vLLM": "guided_choice"},
        option_help="The text is this one, or another --choice.", metavar="TEXT")
    grammar: str | None = setting(
        "The text follows a context-free grammar, in llguidance's Lark syntax.", metavar="FILE",
        option_help="The text follows the grammar in a file, in llguidance's Lark syntax.", elsewhere={"vLLM": "guided_grammar"})
    json_object: bool = setting("The text is a JSON object.", False)
    disable_any_whitespace: bool = setting(
        "No white space between JSON tokens. Small models may waste tokens on it.", False,
        option_help="With --json-schema or --json-object: no white space between JSON tokens. Small models may waste tokens on "
        "it.")
    reasoning_end: str | None = setting(
        "Schema, regex, choice or grammar begin after this text, such as </think>.", metavar="TEXT",
        details="Until then, tokens are free, but the text does not end. If the prompt ends with it and white space, the grammar "
        "begins at once.")

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            self._set(name, False if getattr(self, name) is None else switch(getattr(self, name), self._place(name), InputError))
        asked = [kind for kind in KINDS if getattr(self, kind) is not None and getattr(self, kind) is not False]
        if self.json is False:
            raise _wrong("json", "the schema false accepts nothing", "a JSON schema", False)
        if len(asked) != 1:
            place, shown = "StructuredOutputsParams", " and ".join(asked) or "none"
            raise InputError("not one kind of output", where=place, expected=f"one of {', '.join(KINDS)}", found=shown)
        if self.disable_any_whitespace and self.json is None and not self.json_object:
            raise _wrong("disable_any_whitespace", f"is about JSON, and this is {asked[0]}", "json or json_object", True)
        if self.json is not None:
            self._set("json", _schema_text(self.json))
        if self.choice is not None:
            self._set("choice", _choices(self.choice))
        for name, limit in (("regex", MAX_LENGTH["regex"]), ("grammar", MAX_LENGTH["grammar"]), ("reasoning_end", MAX_MARKER)):
            if (value := getattr(self, name)) is not None:
                _check_text(name, value, limit)

    @classmethod
    def of(cls, value: object) -> "StructuredOutputsParams":
        """`value`, or what it says as a mapping of field names to values, as in JSON."""
        if isinstance(value, cls):
            return value
        names = tuple(settings_of(cls))
        if not isinstance(value, Mapping):
            expected = f"StructuredOutputsParams, or an object with {', '.join(names)}"
            raise InputError("not structured outputs", where=cls.__name__, expected=expected, found=quoted(value))
        for name in value:
            if name not in names:
                raise InputError("unknown key", where=cls.__name__, expected=f"one of {', '.join(names)}", found=quoted(name))
        return cls(**value)

    @property
    def kind(self) -> str:
        """Which of `KINDS` it is."""
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    def stated(self) -> dict[str, Any]:
        """The fields that are set, from which `of` makes an equal one."""
        names = (self.kind, "disable_any_whitespace", "reasoning_end")
        return {name: getattr(self, name) for name in names if getattr(self, name) not in (None, False)}

    def __str__(self) -> str:
        return self.kind if self.json_object else f"{self.kind} {getattr(self, self.kind)}"


def _schema_text(schema: object) -> str:
    """A schema as JSON text, whose properties keep their order."""
    if isinstance(schema, Mapping | bool):
        try:
            text = dumps(dict(schema) if isinstance(schema, Mapping) else schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"the schema is not JSON: {shortened(error)}", where="StructuredOutputsParams.json") from error
    elif isinstance(schema, str):
        text = schema
    else:
        raise _wrong("json", "not a JSON schema", "a dict, a bool or JSON text", schema)
    _check_text("json", text, MAX_LENGTH["json"])
    from minirt.structured.schema import parse_schema  # here: most requests and commands need no schema

    parse_schema(text, "StructuredOutputsParams.json")
    return text


def _choices(choices: object) -> tuple[str, ...]:
    if not isinstance(choices, list | tuple) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise _wrong("choice", "not choices", "a list of texts, at least one, none empty", choices)
    if len(choices) > MAX_CHOICES or sum(map(len, choices)) > MAX_LENGTH["choice"]:
        expected = f"at most {MAX_CHOICES} with {MAX_LENGTH['choice']} characters together"
        shown = f"{len(choices)} with {sum(map(len, choices))} characters"
        raise InputError("too many choices", where="StructuredOutputsParams.choice", expected=expected, found=shown)
    for choice in choices:
        _check_text("choice", choice, MAX_LENGTH["choice"])
    return tuple(dict.fromkeys(choices))


def _check_text(name: str, text: object, limit: int) -> None:
    if not isinstance(text, str) or not text:
        raise _wrong(name, "not an acceptable value", "a text that is not empty", text)
    place = f"StructuredOutputsParams.{name}"
    if len(text) > limit:
        raise InputError("too long", where=place, expected=f"at most {limit} characters", found=len(text))
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise InputError("the text is not valid Unicode (a lone surrogate)", where=place, found=ascii(text[:80]))


def _wrong(name: str, what: str, expected: str, shown: object) -> InputError:
    return InputError(what, where=f"StructuredOutputsParams.{name}", expected=expected, found=quoted(shown))
