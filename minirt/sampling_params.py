"""`SamplingParams`: the sampling settings of a request. `resolve` combines them with the model's generation_config.json.

Imports no torch, so that `from minirt import SamplingParams` is fast.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from minirt.errors import ConfigError, InputError, MinirtError
from minirt.foreign_names import check_names
from minirt.structured.params import StructuredOutputsParams

DEFAULT_MAX_TOKENS = 256
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 16_000_000  # listed tokens of one prompt; each takes about 145 bytes on the host
_FILE = "generation_config.json"


@dataclass(frozen=True)
class _Range:
    low: float
    high: float
    text: str
    integer: bool = False
    open_low: bool = False

    def check(self, value: Any, where: str, error: type[MinirtError], hint: str | None = None) -> Any:
        """Return `value` as an int or a float. Raise `error` if its type is wrong or it is out of range."""
        kind = Integral if self.integer else Real
        if not isinstance(value, bool) and isinstance(value, kind):
            try:
                number: float = int(value) if isinstance(value, Integral) and self.integer else float(value)
            except OverflowError:  # an int beyond the range of float
                number = math.inf
            inside = self.low < number if self.open_low else self.low <= number
            if inside and number <= self.high and number != math.inf:
                return number
        raise error("not an acceptable value", where=where, expected=self.text, found=repr(value)[:500], hint=hint)


_RANGES = {
    "temperature": _Range(0, math.inf, "a finite number >= 0 (0 is greedy)"),
    "top_k": _Range(-1, math.inf, "an integer >= 0 (0 or -1 is off)", integer=True),
    "top_p": _Range(0, 1, "a number above 0 and at most 1 (1 is off)", open_low=True),
    "min_p": _Range(0, 1, "a number from 0 to 1 (0 is off)"),
    "seed": _Range(0, 2**64 - 1, "an integer from 0 to 2**64 - 1", integer=True),
    "presence_penalty": _Range(-2, 2, "a number from -2 to 2 (0 is off)"),
    "frequency_penalty": _Range(-2, 2, "a number from -2 to 2 (0 is off)"),
    "repetition_penalty": _Range(1e-3, 1e3, "a number from 0.001 to 1,000 (1 is off)"),
    "max_tokens": _Range(0, math.inf, "an integer >= 1, or 0 with prompt_logprobs", integer=True),
    "min_tokens": _Range(0, math.inf, "an integer >= 0", integer=True),
    "truncate_prompt_tokens": _Range(-1, math.inf, "an integer >= 1, or -1 for what the model can take", integer=True),
    "logprobs": _Range(-1, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}, or -1 for all tokens", integer=True),
    "prompt_logprobs": _Range(-1, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}, or -1 for all tokens", integer=True),
    "n": _Range(1, 16384, "an integer from 1 to 16384", integer=True),
}
_BIAS = _Range(-100, 100, "token ids with numbers from -100 to 100")
_OFF: dict[str, float] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
_PENALTIES: dict[str, float] = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
_SWITCHES = {"ignore_eos": False, "include_stop_str_in_output": False, "skip_special_tokens": True, "detokenize": True}
# Settings that only the user can set, with their defaults.
_USERS: dict[str, Any] = {
    "logit_bias": {}, "allowed_token_ids": None, "bad_words": (), "min_tokens": 0, "stop_token_ids": (),
    "truncate_prompt_tokens": None, "logprobs": None, "prompt_logprobs": None, "structured_outputs": None,
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {**_OFF, "seed": 0, "max_tokens": DEFAULT_MAX_TOKENS, "stop": (), **_PENALTIES, **_USERS, **_SWITCHES}
_IN_FILE = {"max_tokens": "max_new_tokens", "stop": "stop_strings"}  # settings with another name in generation_config.json
# Setting → its name in the file, for those that the file can have.
_FILE_KEYS = {name: _IN_FILE.get(name, name) for name in (*_OFF, "max_tokens", "stop", "repetition_penalty")}

# Settings of generation_config.json that change the output of transformers and that minirt does not support, with the
# values that mean "off" (null and empty always do). `resolve` reports those that are set.
_NOT_SUPPORTED: dict[str, tuple] = {
    **dict.fromkeys(("encoder_repetition_penalty", "typical_p", "guidance_scale"), (1,)),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "diversity_penalty"), (0,)),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "constraints", "sequence_bias", "watermarking_config"), ()),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids", "suppress_tokens"), ()),
    **dict.fromkeys(("begin_suppress_tokens", "exponential_decay_length_penalty", "dola_layers", "top_h"), ()),
    **dict.fromkeys(("max_length", "max_time", "token_healing"), ()),
}


def _strings(value: object, where: str, error: type[MinirtError], what: str = "stop strings") -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if isinstance(strings, list | tuple) and all(isinstance(s, str) and s for s in strings):
        return tuple(strings)
    raise error(
        f"not acceptable {what}",
        where=where,
        expected="a string, or a list or tuple of strings, none empty",
        found=repr(value)[:500],
    )


def _token_ids(value: object, where: str) -> tuple[int, ...]:
    """Different token ids, in their order. Whether the model has them is checked with the request."""
    if isinstance(value, list | tuple) and all(_is_id(v) for v in value):
        return tuple(dict.fromkeys(map(int, value)))
    raise InputError("not token ids", where=where, expected="a list of integers >= 0", found=repr(value)[:500])


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _biases(value: object, where: str) -> dict[int, float]:
    """Token id → bias. Ids may be decimal strings, as they are in JSON."""
    if not isinstance(value, Mapping):
        raise InputError("not biases", where=where, expected=_BIAS.text, found=repr(value)[:500])
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 19 else key
        if not _is_id(token) or int(token) in biases:
            what = "not a token id" if not _is_id(token) else "a token id appears twice"
            raise InputError(what, where=where, expected=_BIAS.text, found=repr(key)[:500])
        biases[int(token)] = _BIAS.check(bias, where, InputError)
    return biases


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. None means "not set": generation_config.json or a default decides.

    Args:
        temperature: divisor of the logits; 0 is greedy decoding.
        top_k: keep the k most probable tokens; 0 (or -1) is off.
        top_p: keep the most probable tokens whose total probability reaches top_p; 1 is off.
        min_p: keep tokens with at least min_p times the probability of the most probable token; 0 is off.
        seed: seed of the random draws, 0 to 2**64 - 1. The same seed, prompt and settings give the same draws.
        max_tokens: maximum number of new tokens. 0, with `prompt_logprobs`: none, the prompt is only scored.
        min_tokens: before this number of new tokens, neither an end-of-sequence token nor one of `stop_token_ids` is drawn, and
            no stop string ends the text.
        stop: a string or several strings; generation ends where one of them appears. A special token is a stop token.
        stop_token_ids: tokens that end the generation, in addition to the model's end-of-sequence tokens.
        include_stop_str_in_output: whether the text includes the stop string, or the text of the token that ended it.
        ignore_eos: continue past the model's end-of-sequence tokens.
        presence_penalty: subtracted from the logits of tokens that were generated; -2 to 2.
        frequency_penalty: subtracted from a token's logit for each time it was generated; -2 to 2.
        repetition_penalty: positive logits of tokens in the prompt or the generated tokens are divided by it, negative ones are
            multiplied; 1 is off.
        logit_bias: token id → a number from -100 to 100 that is added to its logit. An engine takes up to 4,096, and as many
            of `bad_words` after they are split, with as many tokens before their last ones.
        allowed_token_ids: the only tokens that may be drawn.
        bad_words: texts that are not generated: the token that would complete one is never drawn. They are forbidden as the
            tokenizer splits them in a text, within a word and after a space; other tokens with the same text are not.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: False: make no text, only token ids.
        truncate_prompt_tokens: keep only so many of the prompt's last tokens; -1: as many as the model can take.
        logprobs: return the log-probability and the rank of each new token, and so many of the most probable tokens, 0 to 20;
            -1: all tokens. They are those of the model, before temperature, penalties, biases and masks.
        prompt_logprobs: the same for each token of the prompt but the first. A request that would list more than
            `MAX_PROMPT_LOGPROBS` tokens in all is refused.
        structured_outputs: what the text must be, such as JSON that a schema accepts: a `StructuredOutputsParams`, or its fields
            as a mapping.
        n: number of samples for the prompt, which is computed once. Sample i has the seed `seed` + i (modulo 2**64).

    Raises:
        InputError: a value has the wrong type or is out of range, or values contradict each other.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    n: int = 1

    def __new__(cls, *unnamed: Any, **given: Any) -> "SamplingParams":
        check_names(given, tuple(cls.__dataclass_fields__), cls.__name__, unnamed=unnamed)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, accepted in _RANGES.items():
            value = getattr(self, name)
            if value is not None:
                value = accepted.check(value, f"SamplingParams.{name}", InputError)
                object.__setattr__(self, name, max(value, 0) if name == "top_k" else value)  # top_k = -1 becomes 0
        for name, what in (("stop", "stop strings"), ("bad_words", "bad words")):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _strings(getattr(self, name), f"SamplingParams.{name}", InputError, what))
        for name in ("stop_token_ids", "allowed_token_ids"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _token_ids(getattr(self, name), f"SamplingParams.{name}"))
        if self.n is None:
            object.__setattr__(self, "n", 1)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias, "SamplingParams.logit_bias"))
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", _structured(self.structured_outputs))
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                found = repr(getattr(self, name))
                raise InputError("not an acceptable value", where=f"SamplingParams.{name}", expected="True or False", found=found)
        self._check_contradictions()

    def _check_contradictions(self) -> None:
        if self.n > 1 and self.temperature == 0:
            where, expected = "SamplingParams.n", "1 with temperature 0: all samples would be equal"
            raise InputError("greedy decoding has one sample", where=where, expected=expected, found=self.n)
        if self.max_tokens == 0:
            expected = _RANGES["max_tokens"].text
            if self.prompt_logprobs is None:
                _contradiction("max_tokens", "asks for nothing without prompt_logprobs", expected, 0)
            for name, unset in (("n", 1), ("structured_outputs", None)):
                if (value := getattr(self, name)) != unset:
                    _contradiction(name, "is about new tokens, and max_tokens is 0", "max_tokens of 1 or more", value)
        if self.truncate_prompt_tokens == 0:
            _contradiction("truncate_prompt_tokens", "leaves no token of the prompt", _RANGES["truncate_prompt_tokens"].text, 0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            _contradiction("allowed_token_ids", "allows no token", "at least one token id, or None for all", "none")
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _contradiction("min_tokens", "is above max_tokens", f"at most {self.max_tokens}", self.min_tokens)
        if self.structured_outputs is not None and self.ignore_eos:
            expected = "False: a text with structured_outputs ends with an end-of-sequence token"
            _contradiction("ignore_eos", "leaves no token after the end of the grammar", expected, True)
        if not self.detokenize:
            for name in ("stop", "include_stop_str_in_output"):
                if getattr(self, name):
                    _contradiction(name, "needs the text, and detokenize is False", "detokenize=True", getattr(self, name))
            if not self.skip_special_tokens:
                _contradiction("skip_special_tokens", "is about the text, and detokenize is False", "detokenize=True", False)


# For whom gives a field as an argument of its own.
OF_SAMPLING = {own.name: f"params=SamplingParams({own.name}=…)" for own in fields(SamplingParams)}



def _structured(value: object) -> StructuredOutputsParams:
    try:
        return StructuredOutputsParams.of(value)
    except InputError as error:
        field = str(error.where).removeprefix("StructuredOutputsParams")
        raise error.at(f"SamplingParams.structured_outputs{field}") from error


def _contradiction(name: str, what: str, expected: str, found: object) -> None:
    raise InputError(f"{name} {what}", where=f"SamplingParams.{name}", expected=expected, found=found)


@dataclass(frozen=True)
class EffectiveSampling:
    """The settings that a request runs with. `sources` names the origin of each field's value.

    `not_applied` lists the settings of generation_config.json that minirt does not support, as "name=value", for display.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    stop: tuple[str, ...]
    ignore_eos: bool
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    sources: dict[str, str] = field(default_factory=dict)
    not_applied: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line with the settings that decide the choice of tokens, each with its source."""
        names = [n for n in ("temperature", "top_k", "top_p", "min_p", "seed") if getattr(self, n) != _OFF.get(n)]
        if self.temperature == 0:
            names = []
        names += [n for n, off in _PENALTIES.items() if getattr(self, n) != off]
        others = ("min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "structured_outputs")
        names += [n for n in others if getattr(self, n) not in (0, {}, None, ())]
        parts = [f"{name} {_shortened(getattr(self, name))} ({self.sources[name]})" for name in names]
        return " · ".join([f"greedy ({self.sources['temperature']})", *parts] if self.temperature == 0 else parts)


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
    for name, key in _FILE_KEYS.items() if config else ():
        stated = config.get(key)
        if stated is not None and getattr(params, name) is None:
            value = _from_file(name, stated)  # also if it is not used: a malformed value is an error
            if sampling or name not in _OFF:
                values[name], sources[name] = value, _FILE
    for name, value in vars(params).items():
        if value is not None and name in values:
            values[name] = value
            if name not in _SWITCHES or value != _SWITCHES[name]:
                sources[name] = "user"
    if sampling and sources["temperature"] == "default":
        values["temperature"], sources["temperature"] = 1.0, _FILE
    implied = [n for n in ("top_k", "top_p", "min_p", "seed") if getattr(params, n) is not None]
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

    there = _NOT_SUPPORTED.keys() & config.keys()
    stated = [(n, config[n]) for n in _NOT_SUPPORTED if n in there] if there else []
    not_applied = tuple(f"{n}={value}" for n, value in stated if value not in (None, [], {}, False, *_NOT_SUPPORTED[n]))
    effective = object.__new__(EffectiveSampling)  # its __init__ sets one field after the other, which takes as long as all else
    vars(effective).update(values, sources=sources, not_applied=not_applied)
    return effective


def _checked_file(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise ConfigError("not a JSON object", where=_FILE, found=repr(config))
    do_sample = config.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ConfigError(
            "not an acceptable value", where=f"{_FILE}: do_sample", expected="true or false", found=repr(do_sample)[:500]
        )
    return config


def _from_file(name: str, value: object) -> Any:
    where = f"{_FILE}: {_IN_FILE.get(name, name)}"
    if name == "stop":
        return _strings(value, where, ConfigError)
    accepted = _Range(1, math.inf, "an integer >= 1", integer=True) if name == "max_tokens" else _RANGES[name]
    number = accepted.check(value, where, ConfigError, f"correct the file, or set {name} yourself")
    return max(number, 0) if name == "top_k" else number
