"""The file format of `minirt generate --prompts`: JSON lines, one request per line.

A line is a JSON string (a text), or an object. An object has one of "prompt" (a text), "messages" (a conversation) and
"prompt_token_ids", any of `SAMPLING_KEYS`, and optionally an "id", which is copied to the result. null counts as absent. Empty
lines are skipped. `read_prompt_lines` checks everything that can be checked without the model.
"""

import json
import re
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from minirt.cli.options import encode_prompt, named_by_option, prompt_limit
from minirt.errors import InputError
from minirt.files import unique_keys
from minirt.foreign_names import command_line_hint, names, similar
from minirt.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minirt.generator import Generator

SAMPLING_KEYS = tuple(field.name for field in fields(SamplingParams))
_KINDS: dict[str, tuple[type, str]] = {
    "prompt": (str, "a text"), "messages": (list, "a list of messages"), "prompt_token_ids": (list, "a list of token ids"),
}  # fmt: skip

_CONVERT = 'write {"prompt": "a text"} for each prompt; "From CSV to JSON lines" in docs/python-api.md converts a table'


@dataclass(frozen=True)
class PromptLine:
    """One request. `place` names file and line for messages; `kind` is the key of the prompt and `content` its value; `keys` are
    the sampling fields that the line sets."""

    line: int
    place: str
    kind: str
    content: Any
    params: SamplingParams
    id: str | int | None = None
    keys: frozenset[str] = frozenset()

    def encode(
        self, generator: "Generator", chat: bool, system: str | None, variables: dict[str, Any] | None = None
    ) -> list[int]:
        """Token ids, checked against the model. With `chat`, a text is a user message, after the `system` message if any.
        `variables`: more variables of the chat template.

        Errors name file and line, unless they are about the value of an option.
        """
        with named_by_option(self.place, self.keys):
            if system is not None and self.kind != "prompt":
                what, hint = "--system is for prompts that are texts", "put the system message into the line's messages"
                raise InputError(what, expected='"prompt"', found=f'"{self.kind}"', hint=hint)
            if self.kind == "messages":
                tokens = generator.encode_chat(self.content, prompt_limit(generator, self.params), variables)
            elif self.kind == "prompt_token_ids":
                tokens = generator.encode(self.content)
            else:
                tokens = encode_prompt(generator, self.content, chat, self.params, system, variables)
            generator.check(tokens, self.params)
        return tokens

    def record(self) -> dict[str, Any]:
        """The fields of a JSON result that describe its request."""
        record: dict[str, Any] = {"line": self.line}
        if self.id is not None:
            record["id"] = self.id
        if self.kind != "prompt_token_ids":  # every result has the token ids anyway
            record[self.kind] = self.content
        return record


def read_prompt_lines(data: bytes, name: str, params: SamplingParams) -> list[PromptLine]:
    """Parse the bytes of a request file. A request's own sampling values override those in `params`.

    Raises:
        InputError: a line is not valid UTF-8, not valid JSON or not a valid request (the error names file, line and key); or
            the file contains no request.
    """
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")  # not splitlines: a JSON text may contain U+2028
    requests = [_request(line, n, f"{name} line {n}", params) for n, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise InputError("the file contains no request", where=name, expected="one JSON string or object per line")
    return requests


def _request(line: bytes, number: int, place: str, params: SamplingParams) -> PromptLine:
    value = _parse(line, place)
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise InputError("not a request", where=place, expected="a text or an object", found=_shown(value))
    known = (*_KINDS, *SAMPLING_KEYS, "id")
    for key in value:
        if key not in known:
            near = similar(key, known, 1)
            hint = _hint(key) or (f"did you mean {near[0]}?" if near else None)
            raise InputError("unknown key", where=f"{place}, {json.dumps(key)}", expected=f"one of {', '.join(known)}", hint=hint)
    value = {key: item for key, item in value.items() if item is not None}
    kinds = [kind for kind in _KINDS if kind in value]
    if len(kinds) != 1:
        several = " and ".join(kinds) or "none"
        raise InputError("not one prompt", where=place, expected=f"one of {', '.join(_KINDS)}", found=several)
    content, identifier = value[kinds[0]], value.get("id")
    kind, description = _KINDS[kinds[0]]
    if not isinstance(content, kind):
        raise _wrong(place, kinds[0], description, content)
    if isinstance(identifier, bool) or not isinstance(identifier, str | int | None):
        raise _wrong(place, "id", "a text or an integer", identifier)
    stated = {key: value[key] for key in SAMPLING_KEYS if key in value}
    try:
        params = replace(params, **stated)
    except InputError as error:
        key = str(error.where).removeprefix("SamplingParams.")
        if key.partition(".")[0] in stated:
            raise error.at(f'{place}, "{key}"') from error
        with named_by_option(place, stated):  # an option that contradicts the line
            raise
    return PromptLine(number, place, kinds[0], content, params, identifier, frozenset(stated))


def _hint(name: str) -> str | None:
    """What to write as a key, or as an option of the command, for another library's name; None: it is not known."""
    whose, _, python = entry if isinstance(entry := names().get(name), tuple) else (None, None, None)
    field = re.match(r"SamplingParams\((\w+)=(.*)\)(.*)$", python or "")
    if field is None:
        return command_line_hint(name)
    return f'{whose}; here "{field[1]}"' + (f": {field[2]}" if field[2] != "…" else "") + field[3]


def _parse(line: bytes, place: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"), object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        byte = f"byte 0x{line[error.start]:02x} at offset {error.start} of the line"
        raise InputError("not valid UTF-8", where=place, found=byte) from error
    except json.JSONDecodeError as error:
        what = f"not valid JSON: {error.msg} at column {error.colno}"
        raise InputError(what, where=place, expected="one JSON string or object", hint=_CONVERT) from error
    except (ValueError, RecursionError) as error:  # a repeated key, a number of thousands of digits, deep nesting
        raise InputError(f"not acceptable JSON: {error}", where=place) from error


def _wrong(place: str, key: str, expected: str, value: object) -> InputError:
    return InputError("wrong type", where=f'{place}, "{key}"', expected=expected, found=_shown(value))


def _shown(value: object) -> str:
    return json.dumps(value)[:80]
