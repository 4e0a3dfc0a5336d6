"""`SamplingParams`: the sampling settings of a request. `resolve` combines them with the model's generation_config.json.

Imports no torch, so that `from minirt import SamplingParams` is fast.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from minirt.errors import ConfigError, InputError, MinirtError

DEFAULT_MAX_TOKENS = 256
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
    "max_tokens": _Range(1, math.inf, "an integer >= 1", integer=True),
    "n": _Range(1, 16384, "an integer from 1 to 16384", integer=True),
}
_OFF: dict[str, float] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
_IN_FILE = {"max_tokens": "max_new_tokens", "stop": "stop_strings"}  # settings with another name in the file

# Settings of generation_config.json that change the output of transformers and that minirt does not support, with the
# values that mean "off" (null and empty always do). `resolve` reports those that are set.
_NOT_SUPPORTED: dict[str, tuple] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "typical_p", "guidance_scale"), (1,)),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "diversity_penalty"), (0,)),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "constraints", "sequence_bias", "watermarking_config"), ()),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids", "suppress_tokens"), ()),
    **dict.fromkeys(("begin_suppress_tokens", "exponential_decay_length_penalty", "dola_layers", "top_h"), ()),
    **dict.fromkeys(("max_length", "max_time"), ()),
}


def _stop_strings(value: object, where: str, error: type[MinirtError]) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if isinstance(strings, list | tuple) and all(isinstance(s, str) and s for s in strings):
        return tuple(strings)
    raise error(
        "not acceptable stop strings",
        where=where,
        expected="a string, or a list or tuple of strings, none empty",
        found=repr(value)[:500],
    )


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. None means "not set": generation_config.json or a default decides.

    Args:
        temperature: divisor of the logits; 0 is greedy decoding.
        top_k: keep the k most probable tokens; 0 (or -1) is off.
        top_p: keep the most probable tokens whose total probability reaches top_p; 1 is off.
        min_p: keep tokens with at least min_p times the probability of the most probable token; 0 is off.
        seed: seed of the random draws, 0 to 2**64 - 1. The same seed, prompt and settings give the same draws.
        max_tokens: maximum number of new tokens.
        stop: a string or several strings; generation ends where one of them appears.
        ignore_eos: continue past the model's end-of-sequence tokens.
        n: number of samples for the prompt, which is computed once. Sample i has the seed `seed` + i (modulo 2**64).

    Raises:
        InputError: a value has the wrong type or is out of range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    ignore_eos: bool = False
    n: int = 1

    def __post_init__(self) -> None:
        for name, accepted in _RANGES.items():
            value = getattr(self, name)
            if value is not None:
                value = accepted.check(value, f"SamplingParams.{name}", InputError)
                object.__setattr__(self, name, max(value, 0))  # top_k = -1 becomes 0
        if self.stop is not None:
            object.__setattr__(self, "stop", _stop_strings(self.stop, "SamplingParams.stop", InputError))
        if self.n is None:
            object.__setattr__(self, "n", 1)
        if self.n > 1 and self.temperature == 0:
            where, expected = "SamplingParams.n", "1 with temperature 0: all samples would be equal"
            raise InputError("greedy decoding has one sample", where=where, expected=expected, found=self.n)
        if not isinstance(self.ignore_eos, bool):
            raise InputError(
                "not an acceptable value",
                where="SamplingParams.ignore_eos",
                expected="True or False",
                found=repr(self.ignore_eos),
            )


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
    sources: dict[str, str] = field(default_factory=dict)
    not_applied: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line with the settings that decide the choice of tokens, each with its source."""
        if self.temperature == 0:
            return f"greedy ({self.sources['temperature']})"
        names = [n for n in ("temperature", "top_k", "top_p", "min_p", "seed") if getattr(self, n) != _OFF.get(n)]
        return " · ".join(f"{name} {getattr(self, name)} ({self.sources[name]})" for name in names)


def resolve(params: SamplingParams | None, generation_config: Mapping[str, Any] | None) -> EffectiveSampling:
    """Determine every setting: the user's value, else that of generation_config.json, else a default.

    The file's temperature, top_k, top_p and min_p apply only if its do_sample is true, as in transformers. The default is
    greedy decoding without filters. A user who sets a filter, a seed or n > 1, but no temperature, wants random draws: if
    decoding would be greedy, the temperature becomes 1. A seed that is not set comes from the operating system's random numbers.

    Raises:
        ConfigError: generation_config.json holds a malformed value for a setting that the user has not set.
    """
    params = params or SamplingParams()
    config = _checked_file(generation_config)
    sampling = config.get("do_sample", False)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def settle(name: str, default: object) -> None:
        stated = None if name == "seed" else config.get(_IN_FILE.get(name, name))
        if getattr(params, name) is not None:
            values[name], sources[name] = getattr(params, name), "user"
        elif stated is not None and (sampling or name not in _OFF):
            values[name], sources[name] = _from_file(name, stated), _FILE
        else:
            if stated is not None:
                _from_file(name, stated)  # not used, but a malformed value is an error
            values[name], sources[name] = default, "default"

    for name, off in _OFF.items():
        settle(name, off)
    if sampling and sources["temperature"] == "default":
        values["temperature"], sources["temperature"] = 1.0, _FILE
    implied = [n for n in ("top_k", "top_p", "min_p", "seed") if getattr(params, n) is not None]
    implied += ["n"] if params.n > 1 else []
    if implied and values["temperature"] == 0 and sources["temperature"] != "user":
        values["temperature"], sources["temperature"] = 1.0, f"implied by {implied[0]}"
    settle("seed", 0)
    if sources["seed"] == "default" and values["temperature"] > 0:
        values["seed"], sources["seed"] = int.from_bytes(os.urandom(8), "little"), "random"
    settle("max_tokens", DEFAULT_MAX_TOKENS)
    settle("stop", ())
    values["ignore_eos"], sources["ignore_eos"] = params.ignore_eos, "user" if params.ignore_eos else "default"

    set_here = [n for n, off in _NOT_SUPPORTED.items() if config.get(n) not in (None, [], {}, False, *off)]
    return EffectiveSampling(**values, sources=sources, not_applied=tuple(f"{n}={config[n]}" for n in set_here))


def _checked_file(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    config = {} if config is None else config
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
        return _stop_strings(value, where, ConfigError)
    return max(_RANGES[name].check(value, where, ConfigError, f"correct the file, or set {name} yourself"), 0)
