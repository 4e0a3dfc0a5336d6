"""`ModelConfig`: a model's shape, read from config.json and checked once, before anything is allocated.

Supports both dialects of Hugging Face transformers: the older one (`rope_theta`, `rope_scaling`, `torch_dtype`) and that
of version 5 (`rope_parameters`, `dtype`). A wrong value raises `ConfigError`; a value that minirt does not support raises
`UnsupportedError`. Both errors name the field, the expected value and the found value. `Fields` reads checked values;
`minirt.models` knows which fields an architecture has. Imports no torch.
"""

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from minirt.errors import ConfigError, UnsupportedError

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# The keys that each rope type accepts, besides its name, rope_theta and a partial_rotary_factor of 1. "dynamic" equals "default"
# up to max_position_embeddings tokens; its factor only stretches longer sequences, which are refused.
ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "dynamic": frozenset({"factor"}),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
        | {"mscale", "mscale_all_dim", "truncate"}
    ),
}
# Keys that enter no formula of any rope type: they record how a model was trained.
_ROPE_RECORDS = frozenset({"finetuned", "original_max_position_embeddings"})
# Keys of other runtimes' formulas, with the value that changes nothing.
_ROPE_NEUTRAL = {"factor": 1, "attn_factor": 1, "extrapolation_factor": 1, "llama_4_scaling_beta": 0}
# Bounds far above any existing model. They turn a damaged file into an error instead of a huge allocation.
MAX_HIDDEN, MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM = 65536, 1024, 1024, 1024
MAX_INTERMEDIATE, MAX_VOCAB, MAX_POSITIONS = 1 << 20, 4 << 20, 16 << 20
MAX_EXPERTS = 1024
MAX_THETA, MAX_FACTOR = 1e15, 1e6


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters. `attention_factor` multiplies cos and sin: the resolved value for yarn, else 1."""

    kind: str = "default"  # a key of ROPE_KEYS
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0  # llama3 and yarn; linear, which has no use for it: 0 if it is not stated
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's two ends to whole dimensions
    attention_factor: float = 1.0


@dataclass(frozen=True)
class MoEConfig:
    """Mixtures of experts: which layers have one instead of a dense MLP, and its shape.

    Attributes:
        num_experts: E, of which each token uses `experts_per_token`.
        intermediate_size: that of one expert. `shared_intermediate_size`: that of the expert that every token uses; 0: none.
        normalize: whether the weights of a token's experts are divided by their sum.
        sparse_step, dense_layers: layer i is a mixture if it is not in `dense_layers` and i + 1 is a multiple of `sparse_step`.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    normalize: bool = True
    sparse_step: int = 1
    dense_layers: frozenset[int] = frozenset()

    def covers(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts."""
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder model: Nq query heads, Nkv key/value heads, head size D, hidden size H, intermediate size I."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    hidden_act: str  # "silu", "gelu" (erf) or "gelu_tanh"
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str  # the checkpoint's dtype, one of DTYPES
    rope: RopeConfig
    moe: MoEConfig | None = None  # None: every MLP is dense
    # The model attends to no more than so many tokens in some layers; None: to all. No layer of `decoder_layers` has a window, so
    # longer sequences are refused.
    sliding_window: int | None = None

    @property
    def context_len(self) -> int:
        """Number of positions that the model supports. With yarn, at least the original positions times `factor`."""
        stretched = int(self.rope.factor * self.rope.original_max_position) if self.rope.kind == "yarn" else 0
        return max(self.max_position_embeddings, min(stretched, MAX_POSITIONS))

    @property
    def max_context_len(self) -> int:
        """Number of positions that may be asked for. With linear rope, the original positions times `factor`.

        Files differ in whether `max_position_embeddings` includes the factor: lmsys/vicuna-7b-v1.5-16k has 4,096 and 4,
        deepseek-ai/deepseek-coder-6.7b-instruct 16,384 and 4; both have 16,384 positions. So `context_len` does not grow.
        """
        original = self.rope.original_max_position or self.max_position_embeddings
        stretched = int(self.rope.factor * original) if self.rope.kind == "linear" else 0
        return max(self.context_len, min(stretched, MAX_POSITIONS))

    @property
    def num_parameters(self) -> int:
        """Number of weights and biases of the whole model. A tied LM head counts once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q + 2 * kv)
        attention += self.qkv_bias * (q + 2 * kv) + self.o_bias * self.hidden_size + self.qk_norm * 2 * self.head_dim
        mlps = sum(self.mlp_weights(i) for i in range(self.num_layers))
        biases = sum(not self.is_mixture(i) for i in range(self.num_layers)) if self.mlp_bias else 0
        mlps += biases * (2 * self.intermediate_size + self.hidden_size)
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return tables + mlps + self.num_layers * (attention + 2 * self.hidden_size) + self.hidden_size

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts instead of a dense MLP."""
        return self.moe is not None and self.moe.covers(layer)

    def mlp_weights(self, layer: int, *, of_one_token: bool = False) -> int:
        """Number of weights in the matrices of a layer's MLP or mixture; `of_one_token`: of those that one token uses."""
        if self.moe is None or not self.moe.covers(layer):
            return 3 * self.hidden_size * self.intermediate_size
        moe = self.moe
        experts = moe.experts_per_token if of_one_token else moe.num_experts
        channels = 3 * (experts * moe.intermediate_size + moe.shared_intermediate_size)
        return self.hidden_size * (channels + moe.num_experts + (moe.shared_intermediate_size > 0))


_REQUIRED: Any = object()


class Fields:
    """Reads and checks the fields of one JSON object. An invalid field raises a `ConfigError` that names it.

    An absent field takes `default`; without a default it is an error. Only the `*_or_none` methods accept null.
    """

    def __init__(self, raw: Any, where: str = "config.json", prefix: str = "") -> None:
        if not isinstance(raw, Mapping):
            place = f"{where}, field {prefix.rstrip('.')}" if prefix else where
            raise ConfigError("not a JSON object", where=place, expected="an object", found=shown(raw))
        self.raw, self.where, self.prefix = raw, where, prefix

    def place(self, name: str) -> str:
        """The name of a field in error messages."""
        return f"{self.where}, field {self.prefix}{name}"

    def integer(self, name: str, *, default: int = _REQUIRED, minimum: int = 1, maximum: int) -> int:
        value = self.raw.get(name, default)
        if type(value) is not int or not minimum <= value <= maximum:
            self._refuse(name, f"an integer from {minimum} to {maximum}", value)
        return value

    def integer_or_none(self, name: str, *, default: int | None = None, minimum: int = 1, maximum: int) -> int | None:
        """Like `integer`, but the field may be null and `default` may be None."""
        if self.raw.get(name, default) is None:
            return None
        return self.integer(name, default=_REQUIRED if default is None else default, minimum=minimum, maximum=maximum)

    def number(self, name: str, *, default: float = _REQUIRED, minimum: float, maximum: float) -> float:
        """A finite float. JSON integers are accepted; NaN and infinities are not."""
        value = self.raw.get(name, default)
        if type(value) not in (int, float) or not minimum <= value <= maximum:  # false for NaN
            self._refuse(name, f"a number from {minimum:g} to {maximum:g}", value)
        return float(value)

    def number_or_none(self, name: str, *, minimum: float, maximum: float) -> float | None:
        """Like `number`, but the field may be null or absent."""
        return None if self.raw.get(name) is None else self.number(name, minimum=minimum, maximum=maximum)

    def boolean(self, name: str, *, default: bool = _REQUIRED) -> bool:
        value = self.raw.get(name, default)
        if type(value) is not bool:
            self._refuse(name, "true or false", value)
        return value

    def string(self, name: str, *, default: str = _REQUIRED) -> str:
        value = self.raw.get(name, default)
        if type(value) is not str:
            self._refuse(name, "a string", value)
        return value

    def choice(self, name: str, known: Iterable[str], *, default: str = _REQUIRED) -> str:
        """One of the `known` strings. Any other string raises `UnsupportedError`."""
        value = self.string(name, default=default)
        if value not in known:
            wanted = " or ".join(known)
            raise UnsupportedError("not supported", where=self.place(name), expected=wanted, found=shown(value))
        return value

    def integers_or_none(self, name: str, *, minimum: int, maximum: int) -> list[int] | None:
        """A list of integers; the field may be null or absent."""
        value = self.raw.get(name)
        good = isinstance(value, list) and all(type(item) is int and minimum <= item <= maximum for item in value)
        if value is not None and not good:
            self._refuse(name, f"a list of integers from {minimum} to {maximum}", value)
        return value

    def strings_or_none(self, name: str) -> list[str] | None:
        """A list of strings; the field may be null or absent."""
        value = self.raw.get(name)
        if value is not None and not (isinstance(value, list) and all(type(item) is str for item in value)):
            self._refuse(name, "a list of strings", value)
        return value

    def nested(self, name: str) -> "Fields":
        """The fields of a nested object. Null or absent counts as an empty object."""
        value = self.raw.get(name)
        return Fields({} if value is None else value, self.where, f"{self.prefix}{name}.")

    def _refuse(self, name: str, expected: str, found: object) -> None:
        if found is _REQUIRED:
            raise ConfigError("the field is missing", where=self.place(name), expected=expected)
        raise ConfigError("the value is not acceptable", where=self.place(name), expected=expected, found=shown(found))


def check_token_ids(raw: Mapping[str, Any], where: str, vocab_size: int) -> None:
    """Check the special token ids that config.json or generation_config.json states.

    pad_token_id is not used: an id outside the vocabulary gives a warning, except -1 and the vocabulary's size, which are common
    values for "none".

    Raises:
        ConfigError: a value is not a token id, or bos_token_id or eos_token_id is outside the vocabulary.
    """
    fields = Fields(raw, where)
    eos = raw.get("eos_token_id")
    for token in eos if isinstance(eos, list) else [] if eos is None else [eos]:
        Fields({"eos_token_id": token}, where).integer("eos_token_id", minimum=0, maximum=vocab_size - 1)
    fields.integer_or_none("bos_token_id", minimum=0, maximum=vocab_size - 1)
    pad = fields.integer_or_none("pad_token_id", minimum=-1, maximum=MAX_VOCAB)
    if pad is not None and pad > vocab_size:
        warnings.warn(f"{fields.place('pad_token_id')}: {pad} is outside the vocabulary of {vocab_size}", stacklevel=2)


def shown(value: object) -> str:
    """A short form of a JSON value for error messages."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None or type(value) is bool:
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_rope(fields: Fields, max_positions: int) -> RopeConfig:
    """Read the rope parameters from either dialect. If a file has both, they must agree.

    The formulas and the location of each value follow transformers 5, with one exception: if there is a `rope_scaling`,
    transformers ignores `rope_parameters`; here a difference between the two is a `ConfigError`.
    """
    dialects = [fields.nested(name) for name in ("rope_scaling", "rope_parameters")]
    given = [rope for rope in dialects if rope.raw] or dialects[:1]
    ropes = [_read_one_rope(rope, fields, max_positions) for rope in given]
    if ropes[0] != ropes[-1]:
        raise ConfigError(
            "rope_scaling and rope_parameters contradict each other",
            where=fields.where,
            expected=ropes[-1],
            found=ropes[0],
            hint="remove the wrong one; one without a rope_theta takes the top-level rope_theta",
        )
    return ropes[0]


def _read_one_rope(rope: Fields, fields: Fields, max_positions: int) -> RopeConfig:
    kind = rope.choice("rope_type" if "rope_type" in rope.raw else "type", ROPE_KEYS, default="default")
    if {"type", "rope_type"} <= rope.raw.keys() and rope.raw["type"] != kind:
        what = "type and rope_type contradict each other"
        raise ConfigError(what, where=rope.place("type"), expected=kind, found=shown(rope.raw["type"]))
    for level in (fields, rope):
        partial = level.number_or_none("partial_rotary_factor", minimum=0, maximum=1)
        if partial not in (None, 1.0):
            place = level.place("partial_rotary_factor")
            raise UnsupportedError("partial rotary embedding is not supported", where=place, expected=1, found=partial)
    known = ROPE_KEYS[kind] | _ROPE_RECORDS | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    for name, value in rope.raw.items():
        neutral = type(value) in (int, float) and value == _ROPE_NEUTRAL.get(name)
        if name not in known and value is not None and not neutral:
            raise UnsupportedError(f"not a parameter of rope type {kind!r}", where=rope.place(name), found=shown(value))
    level = _stated_once("rope_theta", rope, fields)
    theta = level.number("rope_theta", default=10000.0, minimum=1.001, maximum=MAX_THETA)
    original = rope.integer_or_none("original_max_position_embeddings", maximum=MAX_POSITIONS) or 0
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = rope.number("factor", minimum=1, maximum=MAX_FACTOR)
    if kind == "dynamic":
        what = f"dynamic NTK scaling is not supported; it only changes sequences of more than {max_positions} tokens"
        warnings.warn(f"{rope.place('rope_type')}: {what}, which are refused", stacklevel=2)
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind, theta, factor, original)
    # As in transformers, max_position_embeddings is the default.
    name = "original_max_position_embeddings"
    level = _stated_once(name, fields, rope)
    original = level.integer(name, default=max_positions, maximum=MAX_POSITIONS)
    if kind == "llama3":
        low = rope.number("low_freq_factor", minimum=1e-6, maximum=MAX_FACTOR)
        high = rope.number("high_freq_factor", minimum=1e-6, maximum=MAX_FACTOR)
        _check_order(rope, "high_freq_factor", low < high, f"more than low_freq_factor ({low:g})", high)
        return RopeConfig(kind, theta, factor, original, low_freq_factor=low, high_freq_factor=high)
    fast = rope.number_or_none("beta_fast", minimum=1e-6, maximum=MAX_FACTOR) or 32.0
    slow = rope.number_or_none("beta_slow", minimum=1e-6, maximum=MAX_FACTOR) or 1.0
    _check_order(rope, "beta_fast", fast >= slow, f"beta_slow ({slow:g}) or more", fast)
    return RopeConfig(
        kind,
        theta,
        factor,
        original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.boolean("truncate", default=True),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _stated_once(name: str, first: Fields, second: Fields) -> Fields:
    """The level that states a field: `first` if it has it, else `second`. If both state it, they must agree."""
    if name not in first.raw:
        return second
    if second.raw.get(name) not in (None, first.raw[name]):
        raise ConfigError(
            "the value contradicts another one in the same file",
            where=second.place(name),
            expected=f"{shown(first.raw[name])}, as in {first.prefix}{name}",
            found=shown(second.raw[name]),
            hint="remove the wrong one",
        )
    return first


def _check_order(rope: Fields, name: str, good: bool, expected: str, found: float) -> None:
    if not good:
        raise ConfigError("the two bounds are reversed", where=rope.place(name), expected=expected, found=found)


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """The multiplier of cos and sin (YaRN, Peng et al. 2023, section 3.4): given, or computed as in transformers."""
    given = rope.number_or_none("attention_factor", minimum=1e-6, maximum=MAX_FACTOR)
    mscale = rope.number_or_none("mscale", minimum=0, maximum=MAX_FACTOR)
    mscale_all_dim = rope.number_or_none("mscale_all_dim", minimum=0, maximum=MAX_FACTOR)
    if given is not None:
        return given

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1)
