"""`ModelConfig`: a model's shape, read from config.json and checked once, before anything is allocated.

Supports both dialects of Hugging Face transformers: the older one (`rope_theta`, `rope_scaling`, `torch_dtype`) and that
of version 5 (`rope_parameters`, `dtype`). A wrong value raises `ConfigError`; a value that minirt does not support raises
`UnsupportedError`. Both errors name the field, the expected value and the found value. `Fields` reads checked values;
`minirt.models` knows which fields an architecture has. Imports no torch.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minirt.errors import ConfigError, MinirtError, UnsupportedError
from minirt.wording import warn

DTYPES = ("float32", "bfloat16", "float16")
# The keys that each rope type accepts besides _ROPE_COMMON.
ROPE_KEYS = {
    "default": "", "dynamic": "factor", "linear": "factor", "longrope": "factor short_factor long_factor attention_factor",
    "llama3": "factor low_freq_factor high_freq_factor",
    "proportional": "",
    "yarn": "factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate",
}  # fmt: skip
_ORIGINAL = "original_max_position_embeddings"
# Keys that every rope type accepts. Where they are in no formula, they record how the model was trained.
_ROPE_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned", _ORIGINAL})
# Keys of single architectures, see `read_rope`. M-RoPE has three positions for each token: of text, all are the same.
MROPE_KEYS = frozenset({"mrope_section", "mrope_interleaved"})
_REVERSED = "the two bounds are reversed"
# Keys of other runtimes' formulas, with the value that changes nothing.
_ROPE_NEUTRAL = {"factor": 1, "attn_factor": 1, "extrapolation_factor": 1, "llama_4_scaling_beta": 0}
QK_NORMS = ("weighted", "plain", "weighted_all", "weighted_after_rope")
MAX_HEAD_DIM, MAX_VOCAB, MAX_POSITIONS = 1024, 4 << 20, 16 << 20
# Names of fields → their least and greatest values. The bounds lie far above any existing model: a damaged file gives an error
# instead of a huge allocation. Null, where a field may be null, is no value.
_BOUNDS: dict[str, tuple[float, float]] = {
    "hidden_size": (1, 65536),
    "intermediate_size moe_intermediate_size shared_expert_intermediate_size mtp_intermediate_size": (1, 1 << 20),
    "num_hidden_layers decoder_sparse_step full_attention_interval no_rope_layer_interval": (1, 1024),
    "max_window_layers mlp_only_layers mtp_num_hidden_layers": (0, 1024),
    "num_attention_heads num_key_value_heads linear_num_key_heads linear_num_value_heads": (1, 1024),
    "head_dim global_head_dim linear_key_head_dim linear_value_head_dim": (1, MAX_HEAD_DIM),
    "num_experts num_local_experts": (1, 1024), "vocab_size": (1, MAX_VOCAB), "pad_token_id": (-1, MAX_VOCAB),
    f"max_position_embeddings {_ORIGINAL} sliding_window": (1, MAX_POSITIONS),
    "rms_norm_eps": (1e-20, 0.1), "rope_theta": (1.001, 1e15), "factor": (1, 1e6),
    "mscale mscale_all_dim llama_4_scaling_beta": (0, 1e6),
    "attention_factor beta_fast beta_slow low_freq_factor high_freq_factor short_factor long_factor": (1e-6, 1e6),
    "partial_rotary_factor no_rope_layers": (0, 1),
    "embedding_multiplier residual_multiplier attention_multiplier logits_scaling alpha qk_scale_factor": (1e-6, 1e6),
    "output_multiplier final_logit_softcapping swiglu_limit swiglu_alpha": (1e-6, 1e6), "post_norm_eps": (1e-20, 0.1),
    "layer_rope_theta": (0, 1e15),
}  # fmt: skip
BOUNDS = {name: bounds for names, bounds in _BOUNDS.items() for name in names.split()}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters. `attention_factor` multiplies cos and sin: the resolved value for yarn and longrope, else 1.

    The frequencies of dynamic and longrope depend on the served length: those of all positions are the ones that transformers
    uses for a sequence of that length.
    """

    kind: str = "default"  # a key of ROPE_KEYS
    theta: float = 10000.0
    factor: float = 1.0
    # llama3, yarn, longrope; dynamic: the positions up to which it is default; linear, which has no use for it: 0 if not stated
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's two ends to whole dimensions
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()  # longrope: of each channel pair, up to `original_max_position` served positions
    long_factor: tuple[float, ...] = ()  # longrope: for more
    partial_rotary_factor: float = 1.0  # the share of a head's channels that is rotated
    # q at position p is multiplied by 1 + beta · log(1 + ⌊p / original_max_position⌋) after rotation (`llama_4_scaling_beta`).
    query_scaling_beta: float = 0.0

    def rotary_dim(self, head_dim: int) -> int:
        """How many channels of a head are rotated: the first ones. "proportional" turns pairs of all, the others by 0."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.partial_rotary_factor)


@dataclass(frozen=True)
class AttentionSettings:
    """What one attention layer computes: grouped-query attention of Nq query heads and Nkv key/value heads of D channels.

    Attributes:
        rope: the rotary embedding; None: there is none.
        scale: factor of the scores, positive.
        qkv_bias, o_bias: whether q, k and v, and the output projection have biases.
        qk_norm: RMSNorm of each head of q and k, before the rotation: "weighted", or "plain", without weights; None: none.
            "weighted_all": of all heads of q together, and of k; "weighted_after_rope": of each head, after the rotation.
        gate: the output of attention is multiplied by sigmoid(gate) of the same shape. "q_proj": q_proj has twice the rows, for
            each head those of q, then those of the gate; "gate_proj": a separate linear; None: there is no gate.
        normalize_v: whether the heads of v have an RMSNorm without weights.
        v_is_k: v is made from the output of k's projection, before the norm and the rotation of k. There is no projection of v.
        window: a token sees itself and at most window − 1 tokens before it (sliding-window attention, Beltagy et al. 2020); None:
            all tokens before it.
        sinks: whether each head has one more score, a weight, of a token whose V is 0.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str | None = None
    gate: str | None = None
    window: int | None = None
    sinks: bool = False
    normalize_v: bool = False
    v_is_k: bool = False

    def __post_init__(self) -> None:
        for name, usable, expected in (
            ("qk_norm", self.qk_norm in (None, *QK_NORMS), f"None or {' or '.join(QK_NORMS)}"),
            ("gate", self.gate in (None, "q_proj", "gate_proj"), "None or q_proj or gate_proj"),
            ("qkv_bias", not (self.qkv_bias and self.gate == "gate_proj"), "False, as gate_proj has no bias"),
            ("scale", 0 < self.scale < math.inf, "a finite number above 0"),
            ("window", self.window is None or self.window >= 1, "1 token or more, or None"),
        ):
            if not usable:
                what, value = f"unusable {name} of attention", shown(getattr(self, name))
                raise ConfigError(what, where="AttentionSettings", expected=expected, found=value)

    @property
    def rotary_dim(self) -> int:
        """How many channels of a head are rotated: the first ones."""
        return 0 if self.rope is None else self.rope.rotary_dim(self.head_dim)


@dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Layers of linear attention with a recurrent state: which layers have it instead of attention, and its heads.

    `grouped`: the checkpoint has one linear for q, k, v and z, and one for b and a, each with the rows of one key head after the
    other.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    layers: frozenset[int]
    grouped: bool = False


@dataclass(frozen=True)
class MoEConfig:
    """Mixtures of experts: which layers have one instead of a dense MLP, and its shape.

    Attributes:
        num_experts: E, of which each token uses `experts_per_token`.
        intermediate_size: that of one expert. `shared_intermediate_size`: that of the expert that every token uses; 0: none.
        normalize: whether the weights of a token's experts are divided by their sum.
        sparse_step, dense_layers: layer i is a mixture if it is not in `dense_layers` and i + 1 is a multiple of `sparse_step`.
        bias: whether the router and the experts have biases.
        limit, alpha: of a clamped SwiGLU (`reference.gated`) in the place of the activation; 0: there is none.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    normalize: bool = True
    sparse_step: int = 1
    dense_layers: frozenset[int] = frozenset()
    bias: bool = False
    limit: float = 0.0
    alpha: float = 1.0


@dataclass(frozen=True)
class MTPConfig:
    """Multi-token prediction: layers in the checkpoint that draft tokens from the hidden states of the decoder.

    Attributes:
        num_layers: None: not stated.
        own_embeddings: whether they have a separate embedding and head.
        intermediate_size: of their MLP; None: that of the decoder's.
    """

    num_layers: int | None = None
    own_embeddings: bool = False
    intermediate_size: int | None = None


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
    hidden_act: str  # a name in `kernels/activations.py`
    dtype: str  # the checkpoint's dtype, one of DTYPES
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    moe: MoEConfig | None = None  # None: every MLP is dense
    sliding_window: int | None = None  # of the `window_layers`: see `AttentionSettings.window`; None: no layer has one
    window_layers: frozenset[int] = frozenset()
    window_rope: RopeConfig | None = None  # that of `window_layers`; None: `rope`
    no_rope_layers: frozenset[int] = frozenset()  # layers without rotary embedding
    attention_gate: str | None = None  # see `AttentionSettings.gate`
    attention_sinks: bool = False  # see `AttentionSettings.sinks`
    zero_centered_norms: bool = False  # the checkpoint stores norm weights minus 1
    post_norm_eps: float | None = None  # see `MLP`; None: rms_norm_eps
    attention_scale: float | None = None  # see `AttentionSettings.scale`; None: head_dim^(-1/2)
    residual_multiplier: float = 1.0  # see `MLP`
    embedding_multiplier: float = 1.0  # see `Embedding`
    logits_multiplier: float = 1.0  # see `Head`
    logits_softcap: float = 0.0
    gated_delta_net: GatedDeltaNetConfig | None = None  # None: every layer has attention
    mtp: MTPConfig | None = None  # None: the architecture has no multi-token prediction

    def attention(self, layer: int | None = None) -> AttentionSettings:
        """The settings of a layer's attention; None: those of layers with rotary embedding and without a window."""
        rope = self.window_rope if self.window_rope and layer in self.window_layers else self.rope
        return AttentionSettings(
            self.num_heads, self.num_kv_heads, self.head_dim, None if layer in self.no_rope_layers else rope,
            self.attention_scale or self.head_dim**-0.5, self.qkv_bias, self.o_bias,
            "weighted" if self.qk_norm else None, self.attention_gate,
            self.sliding_window if layer in self.window_layers else None, self.attention_sinks,
        )  # fmt: skip

    def within(self, length: int) -> "ModelConfig":
        """The same model for sequences of at most `length` tokens, in which a window of that many changes nothing."""
        unused = self.sliding_window is not None and self.sliding_window >= length
        return replace(self, sliding_window=None) if unused else self

    @property
    def context_len(self) -> int:
        """Number of positions that the model supports. With yarn, at least the original positions times `factor`."""
        stretched = int(self.rope.factor * self.rope.original_max_position) if self.rope.kind == "yarn" else 0
        return max(self.max_position_embeddings, min(stretched, MAX_POSITIONS))

    @property
    def max_context_len(self) -> int:
        """Number of positions that may be asked for. With linear and dynamic rope, the original positions times `factor`.

        Files differ in whether `max_position_embeddings` includes the factor: lmsys/vicuna-7b-v1.5-16k has 4,096 and 4,
        deepseek-ai/deepseek-coder-6.7b-instruct 16,384 and 4; both have 16,384 positions. So `context_len` does not grow.
        """
        original = self.rope.original_max_position or self.max_position_embeddings
        stretched = int(self.rope.factor * original) if self.rope.kind in ("linear", "dynamic") else 0
        return max(self.context_len, min(stretched, MAX_POSITIONS))

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts instead of a dense MLP."""
        moe = self.moe
        return moe is not None and layer not in moe.dense_layers and (layer + 1) % moe.sparse_step == 0


_UNSET: Any = object()


class Fields:
    """Reads and checks the fields of one JSON object. An invalid field raises a `ConfigError` that names it.

    An absent field takes `default`; without a default it is an error. Only the `*_or_none` methods accept null.

    Args:
        raw: the object. What is taken from it directly does not count as looked at.
        file: for messages. `prefix`: the place of the object in it, `outer`: fields that are not there but at the top.
        read: where the names of the fields that are looked at are added, with their prefix.
    """

    def __init__(
        self, raw: Any, file: str = "config.json", prefix: str = "", outer: Collection[str] = frozenset(),
        read: set[str] | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(raw, Mapping):
            place = f"{file}, field {prefix.rstrip('.')}" if prefix else file
            raise ConfigError("not a JSON object", where=place, expected="an object", found=shown(raw))
        self.raw, self.file, self.prefix, self.outer, self.read = raw, file, prefix, outer, set() if read is None else read

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field as it is."""
        self.read.add(self._path(name))
        return self.raw.get(name, default)

    def over(self, raw: Mapping[str, Any]) -> "Fields":
        """Other content at the same place."""
        return Fields(raw, self.file, self.prefix, self.outer, self.read)

    def has_read(self, name: str) -> bool:
        """Whether a field has been looked at."""
        return self._path(name) in self.read

    def place(self, name: str) -> str:
        """The name of a field in error messages."""
        return f"{self.file}, field {self._path(name)}"

    def wrong(
        self, name: str, what: str, expected: object = None, *, error: type[MinirtError] = ConfigError, **message: Any
    ) -> MinirtError:
        """The error for a field with a wrong value. `message`: its `hint`, and a `found` other than that value."""
        return error(what, where=self.place(name), expected=expected, **{"found": shown(self.raw.get(name))} | message)

    def unsupported(self, name: str, what: str, expected: object = None, **message: Any) -> MinirtError:
        """The same for a value that minirt does not support. `message`: see `wrong`."""
        return self.wrong(name, what, expected, error=UnsupportedError, **message)

    def only(self, name: str, *values: Any, what: str = "not supported", hint: str | None = None) -> None:
        """Refuse a field with another value than these and null."""
        value = self.get(name)
        if value is not None and not any(same(value, one) for one in values):
            raise self.unsupported(name, what, " or ".join(map(shown, values)) or "null", hint=hint)

    def _path(self, name: str) -> str:
        return f"{'' if name in self.outer else self.prefix}{name}"

    def integer(self, name: str, *, default: Any = _UNSET, **bounds: float) -> int:
        """An integer. `bounds`: `minimum` and `maximum`, if they are not those of `BOUNDS`; the minimum of other fields is 1."""
        least, most = _bounds(name, **bounds)
        return self._read(name, default, f"an integer from {least} to {most}", lambda value: _within(value, least, most, int))

    def integer_or_none(self, name: str, *, default: int | None = None, **bounds: float) -> int | None:
        """Like `integer`, but the field may be null and `default` may be None."""
        return None if self.get(name, default) is None else self.integer(name, default=default, **bounds)

    def number(self, name: str, *, default: float = _UNSET) -> float:
        """A finite float, with the bounds of `BOUNDS`. JSON integers are accepted; NaN and infinities are not."""
        least, most = BOUNDS[name]
        expected = f"a number from {least:g} to {most:g}"
        return float(self._read(name, default, expected, lambda value: _within(value, least, most, int, float)))

    def number_or_none(self, name: str) -> float | None:
        """Like `number`, but the field may be null or absent."""
        return None if self.get(name) is None else self.number(name)

    def boolean(self, name: str, *, default: bool = _UNSET) -> bool:
        return self._read(name, default, "true or false", lambda value: type(value) is bool)

    def string(self, name: str, *, default: str = _UNSET) -> str:
        return self._read(name, default, "a string", lambda value: type(value) is str)

    def choice(self, name: str, known: Iterable[str], *, default: str = _UNSET) -> str:
        """One of the `known` strings. Any other string raises `UnsupportedError`."""
        value = self.string(name, default=default)
        if value not in known:
            raise self.unsupported(name, "not supported", " or ".join(known))
        return value

    def integers_or_none(self, name: str, **bounds: float) -> list[int] | None:
        """A list of integers, each with the bounds of `integer`; the field may be null or absent."""
        least, most = _bounds(name, **bounds)
        expected = f"a list of integers from {least} to {most}"
        return self._read(name, None, expected, lambda value: value is None or _all(value, _within, least, most, int))

    def numbers(self, name: str, *, count: int, what: str = "channel pair") -> tuple[float, ...]:
        """A list of `count` finite numbers, one for each `what`, with the bounds of `BOUNDS`."""
        least, most = BOUNDS[name]
        expected = f"a list of {count} numbers from {least:g} to {most:g}"
        value = self._read(name, _UNSET, expected, lambda value: _all(value, _within, least, most, int, float))
        self.check_count(name, value, count, what)
        return tuple(map(float, value))

    def strings_or_none(self, name: str) -> list[str] | None:
        """A list of strings; the field may be null or absent."""
        return self._read(name, None, "a list of strings", lambda value: value is None or _all(value, isinstance, str))

    def check_count(self, name: str, value: Sequence[object], count: int, what: str) -> None:
        """Raise `ConfigError` unless a list has `count` entries: one for each `what`."""
        if len(value) != count:
            raise self.wrong(name, "the list has another length", f"{count}, one for each {what}", found=len(value))

    def nested(self, name: str) -> "Fields":
        """The fields of a nested object. Null or absent counts as an empty object."""
        value = self.get(name)
        return Fields({} if value is None else value, self.file, f"{self._path(name)}.", read=self.read)

    def missing(self, name: str, expected: str) -> MinirtError:
        """The error for a field that must be there."""
        return self.wrong(name, "the field is missing", expected, found=None)

    def _read(self, name: str, default: Any, expected: str, accepts: Callable[[Any], bool]) -> Any:
        value = self.get(name, default)
        if value is _UNSET:
            raise self.missing(name, expected)
        if not accepts(value):
            raise self.wrong(name, "the value is not acceptable", expected, found=shown(value))
        return value


def _bounds(name: str, minimum: float | None = None, maximum: Any = None) -> tuple[float, float]:
    least, most = BOUNDS.get(name, (1, maximum))
    return least if minimum is None else minimum, most if maximum is None else maximum


def _within(value: Any, least: float, most: float, *types: type) -> bool:
    return type(value) in types and least <= value <= most  # false for NaN


def _all(value: Any, accepts: Callable[..., bool], *arguments: Any) -> bool:
    return isinstance(value, list) and all(accepts(entry, *arguments) for entry in value)


def same(value: object, other: object) -> bool:
    """Whether two JSON values are the same: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def check_token_ids(raw: Mapping[str, Any], file: str, vocab_size: int) -> None:
    """Check the special token ids that config.json or generation_config.json states.

    pad_token_id is not used: an id outside the vocabulary gives a warning, except -1 and the vocabulary's size, which are common
    values for "none".

    Raises:
        ConfigError: a value is not a token id, or bos_token_id or eos_token_id is outside the vocabulary.
    """
    fields, ends = Fields(raw, file), raw.get("eos_token_id")
    for token in ends if isinstance(ends, list) else [] if ends is None else [ends]:
        fields.over({"eos_token_id": token}).integer("eos_token_id", minimum=0, maximum=vocab_size - 1)
    fields.integer_or_none("bos_token_id", minimum=0, maximum=vocab_size - 1)
    pad = fields.integer_or_none("pad_token_id")
    if pad is not None and pad > vocab_size:
        warn(f"{fields.place('pad_token_id')}: {pad} is outside the vocabulary of {vocab_size}")


def shown(value: object) -> str:
    """A short form of a JSON value for error messages."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    if value is None or type(value) is bool:
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_rope(
    fields: Fields, max_positions: int, head_dim: int, *, theta: float = 10000.0, partial: bool = False,
    keys: Collection[str] = (),
) -> RopeConfig:  # fmt: skip
    """Read the rope parameters from either dialect. If a file has both, they must agree.

    The formulas and the location of each value follow transformers 5, with one exception: if there is a `rope_scaling`,
    transformers ignores `rope_parameters`; here a difference between the two is a `ConfigError`.

    Args:
        theta: what an absent `rope_theta` means.
        partial: whether the architecture may rotate a part of a head's channels.
        keys: parameters of this architecture: MROPE_KEYS, "llama_4_scaling_beta" (required), "max_position_embeddings" (of no
            use).
    """
    dialects = [fields.nested(name) for name in ("rope_scaling", "rope_parameters")]
    given = [rope for rope in dialects if rope.raw] or dialects[:1]
    ropes = [_read_dialect(rope, fields, max_positions, head_dim, theta, partial, frozenset(keys)) for rope in given]
    if ropes[0] != ropes[-1]:
        what = "rope_scaling and rope_parameters contradict each other"
        hint = "remove the wrong one; one without a rope_theta takes the top-level rope_theta"
        raise ConfigError(what, where=fields.file, expected=ropes[-1], found=ropes[0], hint=hint)
    return ropes[0]


def _read_dialect(
    rope: Fields, fields: Fields, max_positions: int, head_dim: int, theta: float, partial: bool, keys: frozenset[str]
) -> RopeConfig:
    """Read the parameters of one dialect. `fields`: those of the top level; the others: see `read_rope`."""
    kinds = (*ROPE_KEYS, "mrope") if keys >= MROPE_KEYS else ROPE_KEYS
    kind = rope.choice("rope_type" if "rope_type" in rope.raw else "type", kinds, default="default")
    alike = ("default", "mrope") if "mrope" in kinds else (kind,)  # transformers writes both names for M-RoPE
    if (other := rope.raw.get("type", kind)) != kind and not (kind in alike and other in alike):
        raise rope.wrong("type", "type and rope_type contradict each other", kind)
    kind = "default" if kind == "mrope" else kind
    share = _rotated_share(kind, rope, fields, head_dim, partial)
    rotary_dim = int(head_dim * share)
    _check_keys(kind, rope, keys, rotary_dim)
    theta = _stated_once("rope_theta", rope, fields).number("rope_theta", default=theta)
    beta, stated = 0.0, rope.integer_or_none(_ORIGINAL) or 0
    if "llama_4_scaling_beta" in keys and (beta := rope.number("llama_4_scaling_beta")) and not stated:
        raise rope.missing(_ORIGINAL, "a number of positions, for llama_4_scaling_beta")
    if kind in ("default", "proportional"):
        return RopeConfig(kind, theta, 1.0, stated if beta else 0, partial_rotary_factor=share, query_scaling_beta=beta)
    original = stated
    if kind == "dynamic":  # _ORIGINAL is a record here, as in linear
        original = max_positions
    elif kind != "linear":  # as in transformers, max_position_embeddings is the default
        original = _stated_once(_ORIGINAL, fields, rope).integer(_ORIGINAL, default=max_positions)
    values = _read_scaling(kind, rope, original, max_positions, rotary_dim)
    return RopeConfig(kind, theta, original_max_position=original, partial_rotary_factor=share, query_scaling_beta=beta, **values)


def _read_scaling(kind: str, rope: Fields, original: int, max_positions: int, rotary_dim: int) -> dict[str, Any]:
    """The fields of `RopeConfig` that only some types have."""
    implied = max_positions / max(original, 1)  # transformers: yarn may have null as its factor, and longrope none
    if kind == "longrope":
        factor = max(implied, 1.0) if rope.raw.get("factor") is None else rope.number("factor")
        short, long = (rope.numbers(name, count=rotary_dim // 2) for name in ("short_factor", "long_factor"))
        attention = rope.number_or_none("attention_factor")
        if attention is None and factor > 1 and original < 2:
            raise rope.wrong(_ORIGINAL, "its logarithm is 0", "at least 2, or an attention_factor", found=original)
        if attention is None:
            attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return {"factor": factor, "short_factor": short, "long_factor": long, "attention_factor": attention}
    unstated = kind == "yarn" and rope.raw.get("factor", 0) is None and 1 <= implied <= BOUNDS["factor"][1]
    factor = implied if unstated else rope.number("factor")
    if kind == "llama3":
        low, high = (rope.number(f"{end}_freq_factor") for end in ("low", "high"))
        if low >= high:
            raise rope.wrong("high_freq_factor", _REVERSED, f"more than low_freq_factor ({low:g})", found=high)
        return {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    if kind == "yarn":
        fast, slow = rope.number_or_none("beta_fast") or 32.0, rope.number_or_none("beta_slow") or 1.0
        if fast < slow:
            raise rope.wrong("beta_fast", _REVERSED, f"beta_slow ({slow:g}) or more", found=fast)
        attention, truncate = _yarn_attention_factor(rope, factor), rope.boolean("truncate", default=True)
        return {"factor": factor, "beta_fast": fast, "beta_slow": slow, "truncate": truncate, "attention_factor": attention}
    if kind == "dynamic" and rotary_dim < 4:
        what = "dynamic rope needs at least two pairs of channels"
        raise rope.wrong("rope_type", what, "4 rotated channels or more", found=rotary_dim)
    return {"factor": factor}


def _rotated_share(kind: str, rope: Fields, fields: Fields, head_dim: int, partial: bool) -> float:
    """The share of a head's channels that is rotated."""
    level = _stated_once(name := "partial_rotary_factor", rope, fields)
    share = level.number_or_none(name)
    if share in (None, 1.0):
        return 1.0
    if kind == "proportional":  # of the pairs of whole heads
        return share
    if not partial:
        hint = "an architecture that computes it passes partial_rotary=True to decoder_config"
        raise level.unsupported(name, "partial rotary embedding is not supported", 1, hint=hint)
    rotated = int(head_dim * share)
    if rotated % 2 or not rotated:
        what = f"rotary embedding rotates pairs of channels, and this is {rotated} of {head_dim}"
        raise level.wrong(name, what, "an even number of channels")
    return share


def _check_keys(kind: str, rope: Fields, keys: frozenset[str], rotary_dim: int) -> None:
    """Refuse parameters of other types and architectures."""
    known = _ROPE_COMMON.union(ROPE_KEYS[kind].split(), keys)
    for name, value in rope.raw.items():
        neutral = type(value) in (int, float) and value == _ROPE_NEUTRAL.get(name)
        if name not in known and value is not None and not neutral:
            raise rope.unsupported(name, f"not a parameter of rope type {kind!r}")
    if keys >= MROPE_KEYS:
        rope.boolean("mrope_interleaved", default=False)
        sections = rope.integers_or_none("mrope_section", minimum=0, maximum=rotary_dim)
        if sections is not None and (len(sections) != 3 or 2 * sum(sections) != rotary_dim):
            expected = f"three numbers of channel pairs with the sum {rotary_dim // 2}"
            raise rope.wrong("mrope_section", "the sections do not fit", expected, found=sections)


def _stated_once(name: str, first: Fields, second: Fields) -> Fields:
    """The level that states a field: `first` if it has it, else `second`. If both state it, they must agree."""
    if name not in first.raw:
        return second
    if second.get(name) not in (None, first.raw[name]):
        what, expected = "the value contradicts another one in the same file", shown(first.raw[name])
        raise second.wrong(name, what, f"{expected}, as in {first.prefix}{name}", hint="remove the wrong one")
    return first


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """The multiplier of cos and sin (YaRN, Peng et al. 2023, section 3.4): given, or computed as in transformers."""
    mscale, all_dim, given = (rope.number_or_none(name) for name in ("mscale", "mscale_all_dim", "attention_factor"))
    if given is not None:
        return given
    if not mscale or not all_dim:
        mscale, all_dim = 1.0, 0.0
    return (0.1 * mscale * math.log(factor) + 1.0) / (0.1 * all_dim * math.log(factor) + 1.0)
