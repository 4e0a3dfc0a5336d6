"""Requests: from the bytes of a body to checked fields, and from fields to `SamplingParams`.

A field is one of three kinds: a field of the request's class, which works or has no effect here; a name in `REFUSED`, which is
an error unless its value is neutral (`NEUTRAL`); or unknown, which is ignored and named once in the log, because routers add
fields of their own.
"""

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from minirt.errors import InputError
from minirt.sampling_params import MAX_LOGPROBS, SamplingParams
from minirt.server.errors import HTTPError, bad_field, check_choice, shown
from minirt.server.exchange import Exchange
from minirt.server.front import Front
from minirt.settings import settings_of
from minirt.text.messages import object_at

MAX_N = 128
MAX_STOP_LENGTH = 1000
MAX_VARIABLES = 64  # of a chat template
MAX_NESTING = 64  # of values that have no fixed form
MAX_COPIES = 16 << 20  # bytes of what every completion of a request gets a copy of
MAX_GRAMMAR = 1 << 20  # bytes of JSON; a smaller one that is too long is refused with the name of its part

Int = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Listed = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Body = TypeVar("Body", bound=msgspec.Struct)

# The settings of `SamplingParams` that are fields of every API under the same name, and the types of their values.
SETTINGS = {name: record for name, record in settings_of(SamplingParams).items() if record.request}
_TYPES_OF: dict[Any, Any] = {
    int | None: Int | None, float | None: float | None, bool: bool | None, Sequence[int] | None: list[Int] | None,
    str | Sequence[str] | None: str | list[str] | None,
    Mapping[int, float] | Mapping[str, float] | None: dict[str, float] | None,
}  # fmt: skip
# Fields without effect here: they are about the service of others.
_WITHOUT_EFFECT = {
    **dict.fromkeys(("user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), str | None),
    **dict.fromkeys(("metadata", "prompt_cache_options"), Any), "store": bool | None,
}  # fmt: skip
_TYPED = {name: _TYPES_OF[record.type] for name, record in SETTINGS.items()} | _WITHOUT_EFFECT
_FIELDS: Any = msgspec.defstruct("CommonFields", [(name, kind, None) for name, kind in _TYPED.items()], kw_only=True)


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI's padding of chunks; there is none


class Common(_FIELDS, msgspec.Struct, kw_only=True):
    """The fields that mean the same in every API that generates. `prompt_fields`: those that have the prompt."""

    prompt_fields: ClassVar[tuple[str, ...]]
    model: str | None = None  # after `decode` that of an adapter, or None
    stream: bool | None = None
    seed: int | None = None  # see `_seed`; `SamplingParams` checks the upper limit
    priority: Int | None = None
    cache_salt: str | None = None
    structured_outputs: Any = None


class SamplingRequest(Common, kw_only=True):
    """The fields of both APIs whose answers have choices."""

    stream_options: StreamOptions | None = None
    max_tokens: Int | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    prompt_logprobs: Listed | None = None
    response_format: Any = None

    @property
    def grammar(self) -> Any:
        """See `answer_form`."""
        return answer_form(self.response_format, self.structured_outputs, "response_format", schema_field="json_schema.schema")


_NO_TEMPLATE = "a request cannot bring its own chat template"
_GUIDED = "is not supported under this name: use response_format or structured_outputs"
Refused = Mapping[str, str]
# Known fields that are not supported → why.
REFUSED: Refused = {
    "chat_template": _NO_TEMPLATE, "documents": "documents are not supported",
    "suffix": "text between two texts is not supported", "best_of": "is not supported: n asks for several answers",
    **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), "is named max_tokens here"),
    "stop_sequences": "is named stop here",
    **dict.fromkeys(("use_beam_search", "length_penalty", "early_stopping"), "beam search is not supported"),
    "logits_processors": "code from requests is not run", "mm_processor_kwargs": "the models read text only",
    "spaces_between_special_tokens": "only true is supported",
    **dict.fromkeys(("audio", "modalities"), "the models write text only"), "prediction": "predicted outputs are not supported",
    "moderation": "there is no moderation", "functions": "is replaced by tools", "function_call": "is replaced by tool_choice",
    "web_search_options": "there is no web search",
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), "token ids are not returned"),
    "return_hidden_states": "hidden states are not returned",
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"), _GUIDED),
    "guided_whitespace_pattern": _GUIDED,
}  # fmt: skip
NO_LOGPROBS = "there are no log-probabilities here: use /v1/chat/completions"
NO_CHOICES: Refused = {  # by the APIs whose answers have no choices
    **REFUSED, **dict.fromkeys(("n", "best_of"), "there is one answer"),
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), NO_LOGPROBS),
}  # fmt: skip
# Values with which a field that an API does not support asks for nothing, so that it is accepted. Null is one for every field.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("documents", "logits_processors", "functions", "tools", "context_management", "mcp_servers"), ([],)),
    **dict.fromkeys(("mm_processor_kwargs", "chat_template_kwargs"), ({},)),
    **dict.fromkeys(("use_beam_search", "early_stopping", "return_token_ids", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("return_hidden_states", "background", "continue_final_message", "echo", "logprobs"), (False,)),
    **dict.fromkeys(("parallel_tool_calls", "add_generation_prompt"), (True, False)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("n", "best_of", "length_penalty"), (1,)), "spaces_between_special_tokens": (True,), "suffix": ("",),
    "modalities": (["text"], []), "top_logprobs": (0,), "truncation": ("disabled",), "reasoning_effort": ("none",),
}  # fmt: skip
_PROMPTS = ("prompt", "input", "messages", "tokens")  # are checked as what they are
_LIMITS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}


def _is_neutral(name: str, value: Any) -> bool:
    """Whether a value of an unsupported field asks for nothing. `false` is not 0, although they are equal in Python."""
    neutral = NEUTRAL.get(name, ())
    return value is None or any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


def decode(front: Front, exchange: Exchange, body: bytes, kind: type[Body], refused: Refused = REFUSED) -> Body:
    """A body as a request of this kind for this model, with checked types and limits. `refused`: the fields that are refused."""
    try:
        value = object_at(msgspec.json.decode(body), "body", "not a JSON object")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HTTPError(400, f"the body is not JSON: {error}", param="body") from None
    known = _fields(kind)
    for name in (value.keys() & refused.keys()) - known.keys():
        if not _is_neutral(name, value[name]):
            raise bad_field(name, refused[name], found=shown(value[name]))
    front.note_unknown(list(value.keys() - known.keys() - refused.keys()))
    for name in known.keys() & _LIMITS & value.keys():
        if value[name] == -1:  # no limit, as for other servers
            value[name] = front.check_ready()[1].max_len
    request = convert(value, kind)
    for name in (known.keys() & value.keys()).difference(_PROMPTS):
        check_nesting(name, value[name])
    if isinstance(request, Common):
        _check_limits(request)
    front.check_model(value.get("model"))
    if isinstance(request, Common) and request.model not in front.loras:
        request.model = None
    if prompts := getattr(kind, "prompt_fields", ()):
        exchange.prompt_field = prompts[0]
        exchange.log |= {name: getattr(request, name) for name in prompts if front.options.log_prompts}
    return request


def convert(value: dict[str, Any], kind: type[Body]) -> Body:
    """A JSON object as a struct. Integral floats become integers where those are meant."""
    for name, types in _fields(kind).items():
        given = value.get(name)
        if int in types and float not in types:
            value |= {} if given is None else {name: _as_integer(given)}
        elif list[int] in types and type(given) is list and float in set(map(type, given)):
            value[name] = list(map(_as_integer, given))
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        missing = re.fullmatch("Object missing required field `(.*)`", what)
        field = ".".join(filter(None, (path.rstrip("`").lstrip("."), missing and missing[1]))) or "body"
        if missing:
            raise bad_field(field[:100], "is missing") from None
        if got := re.fullmatch("Expected `(.*)`, got `(.*)`", what):
            raise bad_field(field[:100], "wrong type", expected=_in_words(got[1]), found=_in_words(got[2])) from None
        if bound := re.fullmatch("Expected `int` ([<>]= .*)", what):
            given = shown(value[field]) if field in value else None
            raise bad_field(field[:100], "not an acceptable value", expected=f"an integer {bound[1]}", found=given) from None
        raise HTTPError(400, what[:300], param=field[:100]) from None


def _as_integer(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


_TYPES = {"int": "an integer", "float": "a number", "str": "a string", "bool": "true or false"}
_TYPES |= {"array": "a list", "object": "an object"}


def _in_words(types: str) -> str:
    """msgspec's names of types, such as "float | null", in the words of JSON."""
    return " or ".join(_TYPES.get(name, name) for name in types.split(" | "))


@functools.cache
def _fields(kind: type) -> dict[str, set[Any]]:
    """The types of each field."""
    return {name: {hint, *(() if get_origin(hint) is list else get_args(hint))} for name, hint in get_type_hints(kind).items()}


def _check_limits(request: Common) -> None:
    for name, record in SETTINGS.items():
        if record.most is not None and (entries := getattr(request, name)):
            check_texts(name, entries, record.most)
    for name in ("structured_outputs", "response_format"):
        if (size := len(msgspec.json.encode(getattr(request, name, None)))) > MAX_GRAMMAR:
            raise bad_field(name, "is too large", expected=f"at most {MAX_GRAMMAR:,} bytes", found=f"{size:,}")
    if isinstance(request, SamplingRequest):
        if request.prompt_logprobs is not None and request.stream:
            raise bad_field("prompt_logprobs", "is not for streams", expected="stream: false")
        check_copies(request, request.n or 1)


def check_texts(name: str, entries: str | Collection[Any], limit: int) -> None:
    """Raise 400 if a field has more entries than `limit`, or a text that is too long."""
    entries = [entries] if isinstance(entries, str) else entries
    if len(entries) > limit:
        raise bad_field(name, "has too many entries", expected=f"at most {limit}", found=len(entries))
    longest = max((len(text) for text in entries if isinstance(text, str)), default=0)
    if longest > MAX_STOP_LENGTH:
        raise bad_field(name, "has too long a text", expected=f"at most {MAX_STOP_LENGTH} characters", found=longest)


def check_copies(request: SamplingRequest, completions: int) -> None:
    """Raise 400 if the messages to the engine's process would be too large: each completion has all lists and the grammar."""
    sizes = {name: _size(getattr(request, name)) for name in (*SETTINGS, "structured_outputs", "response_format")}
    if sum(sizes.values()) * completions > MAX_COPIES:
        expected = f"at most {MAX_COPIES // completions:,} bytes of lists, texts and grammars for {completions} completions"
        largest = max(sizes, key=sizes.__getitem__)
        raise bad_field(largest, "is too large for so many completions", expected=expected, found=f"{sum(sizes.values()):,}")


def _size(value: Any) -> int:
    """The bytes of a list of numbers, a text, or any other JSON value."""
    numbers = isinstance(value, list | dict) and not any(isinstance(entry, str | list | dict) for entry in value)
    return 8 * len(value) if numbers else len(msgspec.json.encode(value))


def check_nesting(name: str, value: Any) -> None:
    """Raise 400 if a JSON value has too many levels."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        nested = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = [child for children in nested for child in children]
        if not level:
            return
    raise bad_field(name, "is nested too deeply", expected=f"at most {MAX_NESTING} levels")


def sampling_params(request: Common, renamed: Mapping[str, str] = {}, **changes: Any) -> SamplingParams:
    """The sampling parameters of a request.

    Args:
        renamed: names of parameters → names of the fields that they come from, for messages.
        changes: parameters, which replace those of the request.
    """
    given = {name: value for name in SETTINGS if (value := getattr(request, name)) is not None}
    given |= {"seed": _seed(request.seed), "lora": request.model}
    try:
        return SamplingParams(**given | changes)
    except InputError as error:
        name = str(error.where).removeprefix("SamplingParams.")
        raise error.at(renamed.get(name, name)) from error


def _seed(seed: int | None) -> int | None:
    """A seed of a request as one of `SamplingParams`. -1 means none, as for vLLM; OpenAI's are signed 64-bit integers."""
    if seed is None or seed == -1:
        return None
    return seed % 2**64 if -(2**63) <= seed < 0 else seed


_KINDS = ("text", "json_object", "json_schema")


def answer_form(form: Any, stated: Any, name: str, *, schema_field: str = "schema", kinds: Sequence[str] = _KINDS) -> Any:
    """The form of answers that a request asks for, as `structured_outputs` of `SamplingParams`; None: any text.

    Args:
        form: OpenAI's: an object of one of `kinds`.
        stated: `structured_outputs` of the request, which is vLLM's.
        name: of the field that has the form.
        schema_field: of the form, where the JSON schema is.
    """
    kind = None
    if form is not None and object_at(form, name):
        check_choice(f"{name}.type", kind := form.get("type"), kinds)
    if kind in (None, "text"):
        return None if stated == {} else stated
    if stated not in (None, {}):
        raise bad_field("structured_outputs", f"excludes {name}", found=shown(stated))
    if kind == "json_object":
        if form.get("schema") is not None:  # of other servers
            raise bad_field(f"{name}.schema", "not a field of json_object", expected=f'"type": "json_schema", and {schema_field}')
        return {"json_object": True}
    schema: Any = form
    for part in schema_field.split("."):
        schema = schema.get(part) if isinstance(schema, dict) else None
    if not isinstance(schema, dict | bool):
        raise bad_field(f"{name}.{schema_field}", "not a JSON schema", expected="an object", found=shown(schema))
    return {"json": schema}
