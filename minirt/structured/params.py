"""`StructuredOutputsParams`: what a request's text must be, as plain values. Names and meanings are vLLM's.

Imports neither torch nor llguidance. `minirt.structured.grammar` makes a grammar of it.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from json import dumps
from typing import Any

from minirt.errors import InputError, MinirtError, quoted, shortened
from minirt.settings import Settings, setting, settings_of, switch

KINDS = ("json", "regex", "choice", "grammar", "json_object")
# Characters. Checks of a schema take time in proportion; OpenAI allows 120,000 of names and values.
MAX_LENGTH = {"json": 1 << 17, "regex": 1 << 15, "choice": 1 << 18, "grammar": 1 << 18}
MAX_CHOICES = 4096
MAX_MARKER = 256  # characters of `reasoning_end`


def _schema_text(schema: Any, place: str, error: type[MinirtError]) -> str:
    """A schema as JSON text, whose properties keep their order."""
    if not isinstance(schema, Mapping | bool | str):
        raise error("not a JSON schema", where=place, expected="a dict, a bool or JSON text", found=quoted(schema))
    try:
        plain = dict(schema) if isinstance(schema, Mapping) else schema
        text = plain if isinstance(plain, str) else dumps(plain, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as cause:
        raise error(f"the schema is not JSON: {shortened(cause)}", where=place) from cause
    _check_text(text, place, error, limit=MAX_LENGTH["json"])
    from minirt.structured.schema import parse_schema  # here: most requests and commands need no schema

    parse_schema(text, place)
    return text


def _choices(choices: Any, place: str, error: type[MinirtError]) -> tuple[str, ...]:
    if not isinstance(choices, list | tuple) or not choices or not all(isinstance(c, str) and c for c in choices):
        expected = "a list of texts, at least one, none empty"
        raise error("not choices", where=place, expected=expected, found=quoted(choices))
    if len(choices) > MAX_CHOICES or sum(map(len, choices)) > MAX_LENGTH["choice"]:
        expected = f"at most {MAX_CHOICES} with {MAX_LENGTH['choice']} characters together"
        shown = f"{len(choices)} with {sum(map(len, choices))} characters"
        raise error("too many choices", where=place, expected=expected, found=shown)
    for choice in choices:
        _check_text(choice, place, error, limit=MAX_LENGTH["choice"])
    return tuple(dict.fromkeys(choices))


def _check_text(text: Any, place: str, error: type[MinirtError], limit: int) -> str:
    if not isinstance(text, str) or not text:
        raise error("not an acceptable value", where=place, expected="a text that is not empty", found=quoted(text))
    if len(text) > limit:
        raise error("too long", where=place, expected=f"at most {limit} characters", found=len(text))
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise error("the text is not valid Unicode (a lone surrogate)", where=place, found=ascii(text[:80]))
    return text


def _switch(value: Any, place: str, error: type[MinirtError]) -> bool:
    return switch(False if value is None else value, place, error)


class StructuredOutputsParams(Settings):
    """What the generated text must be: exactly one of the first five fields. Needs `minirt[structured]`.

    Raises:
        InputError: a value has the wrong type or is too long, or there is not exactly one kind.
    """

    _python = 'SamplingParams(structured_outputs={{"{}": …}})'

    # fmt: off
    json: str | Mapping[str, Any] | bool | None = setting(
        "The text is JSON that a JSON schema accepts.", check=_schema_text, option="--json-schema", metavar="FILE",
        option_help="The text is JSON that the JSON schema in a file accepts; - is stdin. A value that begins with { is the "
        "schema itself.",
        details="The schema is a dict, a bool or JSON text. It is stored as text.",
        elsewhere={"vLLM": "guided_json", "llama.cpp": "json_schema_file"})
    regex: str | None = setting(
        "The text is matched by a regular expression from its beginning to its end. \\d is any Unicode digit: write [0-9].",
        details="The syntax is that of Rust's `regex`.", check=partial(_check_text, limit=MAX_LENGTH["regex"]),
        elsewhere={"vLLM": "guided_regex"})
    choice: Sequence[str] | None = setting(
        "The text is one of these texts.", check=_choices, kind="several", elsewhere={"vLLM": "guided_choice"},
        option_help="The text is this one, or another --choice.", metavar="TEXT")
    grammar: str | None = setting(
        "The text follows a context-free grammar, in llguidance's Lark syntax.", metavar="FILE",
        check=partial(_check_text, limit=MAX_LENGTH["grammar"]),
        option_help="The text follows the grammar in a file, in llguidance's Lark syntax.", elsewhere={"vLLM": "guided_grammar"})
    json_object: bool = setting("The text is a JSON object.", False, check=_switch)
    disable_any_whitespace: bool = setting(
        "No white space between JSON tokens. Small models may waste tokens on it.", False, check=_switch,
        option_help="With --json-schema or --json-object: no white space between JSON tokens. Small models may waste tokens on "
        "it.")
    reasoning_end: str | None = setting(
        "Schema, regex, choice or grammar begin after this text, such as </think>.", metavar="TEXT",
        check=partial(_check_text, limit=MAX_MARKER),
        details="Until then, tokens are free, but the text does not end. If the prompt ends with it and white space, the grammar "
        "begins at once.")
    may_call: bool = setting(
        "A tool call of gpt-oss or Muse-Glimmer may come before `reasoning_end`, and end the text.", False,
        check=_switch, option="")

    def __post_init__(self) -> None:
        super().__post_init__()
        asked = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(asked) != 1:
            place, shown = "StructuredOutputsParams", " and ".join(asked) or "none"
            raise InputError("not one kind of output", where=place, expected=f"one of {', '.join(KINDS)}", found=shown)
        if self.disable_any_whitespace and asked[0] not in ("json", "json_object"):
            what, place = f"is about JSON, and this is {asked[0]}", self._place("disable_any_whitespace")
            raise InputError(what, where=place, expected="json or json_object", found=True)

    @classmethod
    def of(cls, value: object) -> "StructuredOutputsParams":
        """`value`, or what it says as a mapping of field names to values, as in JSON."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            expected = f"StructuredOutputsParams, or an object with {', '.join(settings_of(cls))}"
            raise InputError("not structured outputs", where=cls.__name__, expected=expected, found=quoted(value))
        return cls(**value)

    @property
    def kind(self) -> str:
        """Which of `KINDS` it is."""
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    def stated(self) -> dict[str, Any]:
        """The fields that are set, from which `of` makes an equal one."""
        names = (self.kind, "disable_any_whitespace", "reasoning_end", "may_call")
        return {name: getattr(self, name) for name in names if getattr(self, name) not in (None, False)}

    def __str__(self) -> str:
        return self.kind if self.json_object else f"{self.kind} {getattr(self, self.kind)}"
