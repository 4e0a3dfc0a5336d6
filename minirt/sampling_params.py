"""`SamplingParams`: the sampling settings of a request. `resolve` combines them with the model's generation_config.json.

Imports no torch, so that `from minirt import SamplingParams` is fast.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from minirt.errors import ConfigError, InputError, MinirtError, quoted, shortened
from minirt.foreign_names import table
from minirt.hooks.capture import Capture, capture, steering
from minirt.settings import Integer, Number, Settings, is_token_id, setting, settings_of, switch, texts, token_ids
from minirt.structured.params import StructuredOutputsParams
from minirt.user_code import named

DEFAULT_MAX_TOKENS = 256
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 16_000_000  # listed tokens of one prompt; each takes about 145 bytes on the host
_FILE = "generation_config.json"
_MAX_IDS, _MAX_STOPS = 1024, 16  # entries that a request of the server may list


_BIAS = Number(-100, 100, text="token ids with numbers from -100 to 100")
_TOP_K = Integer(-1, text="an integer >= 0 (0 or -1 is off)")
_COUNT = Integer(-1, MAX_LOGPROBS, text=f"an integer from 0 to {MAX_LOGPROBS}, or -1 for all tokens")
_PENALTY = Number(-2, 2, "0 is off")
_MAX_TOKENS = Integer(0, text="an integer >= 1, or 0 with prompt_logprobs")
_TRUNCATED = Integer(-1, text="an integer >= 1, or -1 for what the model can take")
_LENGTH_IN_FILE = Integer(1)  # of `max_new_tokens`


def _top_k(value: Any, place: str, error: type[MinirtError], hint: str | None = None) -> int:
    return max(_TOP_K(value, place, error, hint), 0)


def _biases(value: Any, place: str, error: type[MinirtError], hint: str | None = None) -> dict[int, float]:
    """Token id → bias. Ids may be decimal strings, as they are in JSON."""
    if not isinstance(value, Mapping):
        raise error("not biases", where=place, expected=_BIAS.text, found=repr(value)[:500], hint=hint)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 19 else key
        if not is_token_id(token) or int(token) in biases:
            what = "a token id appears twice" if is_token_id(token) else "not a token id"
            raise error(what, where=place, expected=_BIAS.text, found=repr(key)[:500], hint=hint)
        biases[int(token)] = _BIAS(bias, place, error, hint)
    return biases


def _functions(value: Any, place: str, error: type[MinirtError], hint: str | None = None) -> tuple[Callable[..., Any], ...]:
    several = value if isinstance(value, list | tuple) else (value,)
    functions = tuple(named(each, place) for each in several)
    if all(map(callable, functions)):
        return functions
    expected = "functions (token ids, logits) → logits, or their names as module:name"
    raise error("not logits processors", where=place, expected=expected, found=repr(value)[:500], hint=hint)


def _structured(value: Any, place: str, error: type[MinirtError], hint: str | None = None) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams.of(value)
    except InputError as refused:
        raise refused.at(f"{place}{str(refused.where).removeprefix('StructuredOutputsParams')}") from refused


def adapter_name(value: Any, place: str, error: type[MinirtError] = InputError, hint: str | None = None) -> str:
    """The name of a LoRA adapter, checked."""
    if not isinstance(value, str) or re.fullmatch(r"[\w.:@/ -]{1,200}", value) is None:
        expected = "up to 200 letters, digits, blanks and any of . : @ / _ -"
        raise error("not a name of an adapter", where=place, expected=expected, found=quoted(value, 80), hint=hint)
    return value


class SamplingParams(Settings):
    """How to choose tokens and when to stop. None means "not set": generation_config.json or a default decides.

    Raises:
        InputError: a value has the wrong type or is out of range, or values contradict each other.
    """

    _python = "SamplingParams({}=…)"

    # fmt: off
    max_tokens: int | None = setting(
        "Maximum number of new tokens; default: 256.", check=_MAX_TOKENS, file="max_new_tokens", unset=DEFAULT_MAX_TOKENS,
        details="0, with `prompt_logprobs`: none, the prompt is only scored. A number that the context has no room for is "
        'accepted: the text ends where the context ends, with the `finish_reason` "length".',
        elsewhere={"llama.cpp": "n_predict predict"}, request=False)
    temperature: float | None = setting(
        "Divisor of the logits; 0 is greedy.", check=Number(0, note="0 is greedy"), file="temperature", unset=0.0, acts="draws",
        elsewhere={"llama.cpp": "temp"})
    top_k: int | None = setting(
        "Keep the k most probable tokens; 0 (or -1) is off.", check=_top_k, file="top_k", unset=0, acts="draws", scope="filter",
        column=int)
    top_p: float | None = setting(
        "Keep the most probable tokens up to this probability mass; 1 is off.",
        check=Number(0, 1, "1 is off", open_low=True), file="top_p", unset=1.0, acts="draws", scope="filter",
        column=float)
    min_p: float | None = setting(
        "Keep tokens at least this probable, relative to the most probable token; 0 is off.",
        check=Number(0, 1, "0 is off"), file="min_p", unset=0.0, acts="draws", scope="filter", column=float)
    seed: int | None = setting(
        "Seed of the draws.", option_help="Seed of sampling (and of random weights).", unset=0, acts="draws",
        check=Integer(0, 2**64 - 1, text="an integer from 0 to 2**64 - 1"),
        details="The same seed, prompt and settings give the same draws. Without one, a seed is drawn.")
    stop: str | Sequence[str] | None = setting(
        "End the text before this string, or at this special token.", check=texts("stop strings"),
        file="stop_strings", unset=(), most=_MAX_STOPS,
        details="A string that holds a special token and other text is refused, unless `skip_special_tokens` is False.")
    ignore_eos: bool = setting("Continue after an end-of-sequence token.", False, check=switch)
    min_tokens: int | None = setting(
        "New tokens before an end token or a stop string may end the text.", check=Integer(0), unset=0, acts="logits",
        details="Until then, neither an end-of-sequence token nor one of `stop_token_ids` is drawn.")
    stop_token_ids: Sequence[int] | None = setting(
        "More tokens that end the text, beside the model's end-of-sequence tokens.", check=token_ids, unset=(), most=_MAX_IDS,
        elsewhere={"transformers": "eos_token_id"})
    include_stop_str_in_output: bool = setting(
        "Print also what ended the text: a stop string or a token.", False, check=switch,
        details="The text of a special token only if it is a stop string, or `skip_special_tokens` is False.")
    presence_penalty: float | None = setting(
        "Subtract this from the logits of generated tokens, -2 to 2; 0 is off.", check=_PENALTY, unset=0.0, acts="logits")
    frequency_penalty: float | None = setting(
        "Subtract this for each time a token was generated, -2 to 2; 0 is off.", check=_PENALTY, unset=0.0, acts="logits")
    repetition_penalty: float | None = setting(
        "Divide the positive logits of tokens seen by this, and multiply negative ones, 0.001 to 1,000; 1 is off.",
        check=Number(1e-3, 1e3, text="a number from 0.001 to 1,000 (1 is off)"), file="repetition_penalty", unset=1.0,
        acts="logits", elsewhere={"llama.cpp": "repeat_penalty"}, details="Tokens of the prompt and generated ones are seen.")
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = setting(
        "Add a number from -100 to 100 to a token's logit.", check=_biases, unset={}, acts="logits", most=_MAX_IDS,
        details="An engine takes up to 4,096, and as many of `bad_words` after they are split, with as many tokens before their "
        "last ones.")
    allowed_token_ids: Sequence[int] | None = setting("Draw no other tokens than these.", check=token_ids, acts="logits")
    bad_words: str | Sequence[str] | None = setting(
        "Never generate this text.", check=texts("bad words"), unset=(), acts="logits", most=_MAX_IDS,
        details="The token that would complete a text is never drawn. Texts are forbidden as the tokenizer splits them in a "
        "text, within a word and after a space; other tokens with the same text are not.")
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = setting(
        "What the text must be, such as JSON that a schema accepts: a `StructuredOutputsParams`, or its fields as a mapping.",
        check=_structured, acts="logits", option="", elsewhere={"vLLM": "guided_decoding"}, request=False)
    logits_processors: Callable[..., Any] | str | Sequence[Callable[..., Any] | str] | None = setting(
        "Functions of the user, (token ids, logits) → logits, that change the logits of each new token.", check=_functions,
        unset=(), acts="logits", option="", request=False,
        details="They get the prompt and what was generated, [n] int64, and a copy of the model's logits, [V] fp32, on the "
        "model's device, and come before masks, biases and penalties. An exception ends the request. A step with one of them "
        "waits for the tokens of the step before.")
    capture: Capture | Sequence[str] | None = setting(
        "Hidden states to return, of a model that was loaded with their places (`LoadOptions.capture`): a `Capture`, or names "
        "such as layers.12.", check=capture, option="", scope="detail", request=False)
    steer: Mapping[str, float] | None = setting(
        "Factors of the edits that the model was loaded with (`LoadOptions.edits`), by their names.", check=steering, unset={},
        acts="logits", option="", request=False)
    lora: str | None = setting(
        "Name of an adapter that the model was loaded with (`LoadOptions.loras`).", check=adapter_name, acts="logits",
        request=False, option="--adapter", option_help="Name of an adapter of --lora. Default: the model alone.")
    skip_special_tokens: bool = setting(
        "Leave special tokens out of the text.", True, check=switch, group="Output",
        option="--skip-special-tokens/--no-skip-special-tokens")
    n: int = setting(
        "Samples of each prompt, each with its own result.", 1, check=Integer(1, 16384, text="an integer from 1 to 16384"),
        details="The prompt is computed once. Sample i has the seed `seed` + i (modulo 2**64).", scope="detail", request=False,
        elsewhere={"transformers": "num_return_sequences"})
    truncate_prompt_tokens: int | None = setting(
        "Keep this many last tokens of a prompt; -1: as many as fit.", group="Prompts", scope="detail",
        check=_TRUNCATED)
    logprobs: int | None = setting(
        "Log-probabilities and ranks of new tokens, and of 0 to 20 of the most probable ones; -1: of all.", check=_COUNT,
        details="They are those of the model, before temperature, penalties, biases and masks.",
        option_help="With --json: log-probabilities of new tokens, and of 0 to 20 of the most probable ones; -1: of all.",
        group="Output", scope="detail", request=False)
    prompt_logprobs: int | None = setting(
        "The same for each token of the prompt but the first.", check=_COUNT,
        details=f"A request that would list more than {MAX_PROMPT_LOGPROBS:,} tokens in all is refused.",
        option_help="With --json: the same for the prompt. --max-tokens 0 generates nothing.",
        group="Output", scope="detail", request=False)
    detokenize: bool = setting(
        "Make a text. False: only token ids.", True, check=switch, option_help="Make no text: print token ids.", group="Output",
        scope="detail", request=False)

    def __post_init__(self) -> None:
        if self.n is None:
            self._set("n", 1)
        super().__post_init__()
        self._check_contradictions()

    def _check_contradictions(self) -> None:
        if self.n > 1 and self.temperature == 0:
            place, expected = "SamplingParams.n", "1 with temperature 0: all samples would be equal"
            raise InputError("greedy decoding has one sample", where=place, expected=expected, found=self.n)
        scored, silent = self.max_tokens == 0, not self.detokenize  # no new tokens; no text
        for wrong, name, what, expected in (
            (scored and self.prompt_logprobs is None, "max_tokens", "asks for nothing without prompt_logprobs", _MAX_TOKENS.text),
            (scored and self.n > 1, "n", "is about new tokens, and max_tokens is 0", "max_tokens of 1 or more"),
            (scored and self.logits_processors, "logits_processors", "is about new tokens, and max_tokens is 0",
             "max_tokens of 1 or more"),
            (scored and self.capture, "capture", "is of requests that draw, and max_tokens is 0", "max_tokens of 1 or more"),
            (scored and self.structured_outputs, "structured_outputs", "is about new tokens, and max_tokens is 0",
             "max_tokens of 1 or more"),
            (self.truncate_prompt_tokens == 0, "truncate_prompt_tokens", "leaves no token of the prompt", _TRUNCATED.text),
            (self.allowed_token_ids == (), "allowed_token_ids", "allows no token", "at least one token id, or None for all"),
            (self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens, "min_tokens", "is above max_tokens",
             f"at most {self.max_tokens}"),
            (self.structured_outputs and self.ignore_eos, "ignore_eos", "leaves no token after the end of the grammar",
             "False: a text with structured_outputs ends with an end-of-sequence token"),
            (silent and self.stop, "stop", "needs the text, and detokenize is False", "detokenize=True"),
            (silent and self.include_stop_str_in_output, "include_stop_str_in_output", "needs the text, and detokenize is False",
             "detokenize=True"),
            (silent and not self.skip_special_tokens, "skip_special_tokens", "is about the text, and detokenize is False",
             "detokenize=True"),
        ):  # fmt: skip
            if wrong:
                _contradiction(name, what, expected, getattr(self, name))


_SETTINGS = settings_of(SamplingParams)
# For whom gives a field as an argument of a call.
OF_SAMPLING = {name: f"params=SamplingParams({name}=…)" for name in _SETTINGS}
# Setting of a request → its value if it is not set. `n` belongs to the call.
_DEFAULTS = {name: r.unset if r.default is None else r.default for name, r in _SETTINGS.items() if name != "n"}
_IN_FILE = {name: record.file for name, record in _SETTINGS.items() if record.file}
_OF_DRAWS = [name for name, record in _SETTINGS.items() if record.acts == "draws"]
FILTERS = {name: record for name, record in _SETTINGS.items() if record.column is not None}  # of probabilities
_OF_LOGITS = [name for name, record in _SETTINGS.items() if record.acts == "logits"]


def _contradiction(name: str, what: str, expected: str, shown: object) -> None:
    raise InputError(f"{name} {what}", where=f"SamplingParams.{name}", expected=expected, found=shown)


def _with_settings(kind: Any) -> Any:
    """Class decorator: a field for each setting but `n`, of the type that its check returns; None only where `unset` is None."""
    types: dict[str, Any] = {}
    for name, unset in _DEFAULTS.items():
        check: Any = _SETTINGS[name].check
        kept = check.convert if isinstance(check, Number) else check.__annotations__["return"]
        types[name] = kept | None if unset is None else kept
    kind.__annotations__ = types | kind.__annotations__
    return kind


@dataclass(frozen=True)
@_with_settings
class EffectiveSampling:
    """The settings that a request runs with: a value for each field of `SamplingParams` but `n`.

    `sources` names the origin of each field's value. `not_applied` lists the settings of generation_config.json that minirt does
    not support, as "name=value", for display.
    """

    sources: dict[str, str] = field(default_factory=dict)
    not_applied: tuple[str, ...] = ()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def with_values(self, **values: Any) -> "EffectiveSampling":
        """A copy with other values of some fields."""
        return replace(self, **values)

    def describe(self) -> str:
        """One line with the settings that decide the choice of tokens, each with its source."""
        drawn = _OF_DRAWS if self.temperature > 0 else []
        names = [name for name in (*drawn, *_OF_LOGITS) if getattr(self, name) != _DEFAULTS[name] or name == "seed"]
        parts = [f"{name} {shortened(getattr(self, name), 60)} ({self.sources[name]})" for name in names]
        return " · ".join(parts if self.temperature > 0 else [f"greedy ({self.sources['temperature']})", *parts])


def resolve(params: SamplingParams | None, generation_config: Mapping[str, Any] | None) -> EffectiveSampling:
    """Determine every setting: the user's value, else that of generation_config.json, else a default.

    The file's temperature, top_k, top_p and min_p apply only if its do_sample is true, its repetition_penalty always, as in
    transformers. The default is greedy decoding without filters. A user who sets a filter, a seed or n > 1, but no temperature,
    wants random draws: if decoding would be greedy, the temperature becomes 1. A seed that is not set comes from the operating
    system's random numbers.

    Raises:
        ConfigError: generation_config.json holds a malformed value for a setting that the user has not set.
        InputError: a value contradicts one from the file, or a default.
    """
    params = params or SamplingParams()
    config = _checked_file(generation_config)
    sampling = config.get("do_sample", False)
    values, sources = dict(_DEFAULTS), dict.fromkeys(_DEFAULTS, "default")
    for name, key in _IN_FILE.items() if config else ():
        stated = config.get(key)
        if stated is not None and getattr(params, name) is None:
            check: Any = _LENGTH_IN_FILE if name == "max_tokens" else _SETTINGS[name].check
            # Also if it is not used: a malformed value is an error.
            value = check(stated, f"{_FILE}: {key}", ConfigError, f"correct the file, or set {name} yourself")
            if sampling or name not in _OF_DRAWS:
                values[name], sources[name] = value, _FILE
    for name, value in vars(params).items():
        if value is not None and name in values:
            values[name] = value
            if _SETTINGS[name].default != value:  # a switch always has a value
                sources[name] = "user"
    if sampling and sources["temperature"] == "default":
        values["temperature"], sources["temperature"] = 1.0, _FILE
    implied = [name for name in _OF_DRAWS if name != "temperature" and getattr(params, name) is not None]
    implied += ["n"] if params.n > 1 else []
    if implied and values["temperature"] == 0 and sources["temperature"] != "user":
        values["temperature"], sources["temperature"] = 1.0, f"implied by {implied[0]}"
    if sources["seed"] == "default" and values["temperature"] > 0:
        values["seed"], sources["seed"] = int.from_bytes(os.urandom(8), "little"), "random"
    if values["min_tokens"] > values["max_tokens"]:
        expected = f"at most {values['max_tokens']}, which is max_tokens ({sources['max_tokens']})"
        _contradiction("min_tokens", "is above max_tokens", expected, values["min_tokens"])
    if values["stop"] and not values["detokenize"]:
        expected = f"stop=[] beside the stop strings of {sources['stop']}"
        _contradiction("detokenize", "is False, and stop strings need the text", expected, values["stop"])

    if values["stop"] and values["capture"] is not None:
        expected = "stop=[] beside capture: a stop string ends a request before its states are handed over; use stop_token_ids"
        _contradiction("stop", f"is set ({sources['stop']}), and the request captures states", expected, values["stop"])

    off = table("generation_config")
    stated = [(name, config[name]) for name in off if name in config] if off.keys() & config.keys() else []
    not_applied = tuple(f"{name}={value}" for name, value in stated if value not in (None, [], {}, False, *off[name]))
    effective = object.__new__(EffectiveSampling)  # its __init__ sets one field after the other, which takes as long as all else
    vars(effective).update(values, sources=sources, not_applied=not_applied)
    return effective


def _checked_file(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise ConfigError("not a JSON object", where=_FILE, found=repr(config))
    if not isinstance(do_sample := config.get("do_sample"), bool | None):
        place = f"{_FILE}: do_sample"
        raise ConfigError("not an acceptable value", where=place, expected="true or false", found=quoted(do_sample))
    return config
