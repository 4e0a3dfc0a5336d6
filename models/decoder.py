"""Shared by all Llama-like decoders: reading config.json, refusing what is not supported, the layers, and those of a draft."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from minirt.errors import ConfigError, UnsupportedError
from minirt.kernels.activations import OF_HIDDEN_ACT
from minirt.modeling import config as known
from minirt.modeling.config import AttentionSettings, Fields, ModelConfig, MoEConfig, MTPConfig, read_rope, shown
from minirt.modeling.quantization_config import read_quantization
from minirt.models.foreign_fields import refuse_foreign_fields, refuse_other_names
from minirt.wording import warn

if TYPE_CHECKING:
    from minirt.layers import Layer

FINAL_NORM = "model.norm"  # checkpoint prefix of the norm before the head
# Names of a block's norms: before and after attention, before and after the MLP; None: there is none.
Norms = tuple[str | None, str | None, str | None, str | None]
PRE_NORMS: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
POST_NORMS: Norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
SANDWICH_NORMS: Norms = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
EXPERT_FIELDS = ("num_experts", "num_local_experts")  # two names of one field


@dataclass(frozen=True)
class Window:
    """What absent fields of sliding windows mean in an architecture.

    Attributes:
        size: the default of `sliding_window`; None: no window.
        used: the default of `use_sliding_window`; None: there is no such field, and a window is always used, in all layers. Else
            `layer_types` decides which layers have one.
        first: the default of `max_window_layers`, the first layer with a window; None: there is no such field.
        layers: the layers with a window without `layer_types`; None: all from the first on.
    """

    size: int | None = None
    used: bool | None = True
    first: int | None = None
    layers: Collection[int] | None = None


NO_WINDOW = Window()
WINDOW_OFF_BY_DEFAULT = Window(4096, used=False, first=28)  # the last layers, if at all
MOE_WINDOW_OFF_BY_DEFAULT = Window(4096, used=False)


def decoder_config(
    fields: Fields, *, model_type: str, classes: Collection[str], max_positions: int, kv_heads: int | None = None,
    head_dim: int | None = None, attention_bias: bool | None = None, tie_word_embeddings: bool = False, theta: float = 10000.0,
    eps: float = 1e-6, partial_rotary: bool = False, rope_keys: Collection[str] = (), window: Window | None = NO_WINDOW,
    **fixed: Any,
) -> ModelConfig:  # fmt: skip
    """Read a `ModelConfig`. The sizes are required; other absent fields take the defaults of transformers.

    Fields that would change the model, and that neither a layer here computes nor the architecture has read before this call, are
    refused by name: see `foreign_fields`.

    Args:
        model_type: `model_type` of config.json, and the name of the file in `models/`.
        classes: the names that `architectures` may have, those of transformers' classes of this decoder with an LM head.
        max_positions: default of the field `max_position_embeddings`.
        kv_heads: default of the field `num_key_value_heads`; None: as many as `num_attention_heads`, as for null.
        head_dim: default of the field `head_dim`; None: `hidden_size // num_attention_heads`, as for null.
        attention_bias: default of the field `attention_bias`, biases of all four projections; None: it is not read.
        tie_word_embeddings: default of the field `tie_word_embeddings`.
        theta: default of the field `rope_theta`.
        eps: default of the field `rms_norm_eps`.
        partial_rotary: whether `partial_rotary_factor` may rotate a part of a head's channels; else a factor below 1 is refused.
        rope_keys: keys of the rope fields that are known besides those of `minirt.modeling.config.ROPE_KEYS`.
        window: what absent fields of a sliding window mean; None: the architecture reads these fields itself.
        fixed: other fields of `ModelConfig`, such as `qkv_bias`, `mlp_bias`, `qk_norm`, `no_rope_layers` and `moe`.
            `moe_config` reads `moe`; without it, fields of experts are refused.
    """
    refuse_unserved(fields)
    refuse_other_classes(fields, classes)
    if attention_bias is not None:
        fixed["qkv_bias"] = fixed["o_bias"] = fields.boolean("attention_bias", default=attention_bias)
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    kv = fields.integer_or_none("num_key_value_heads", default=kv_heads) or heads
    if heads % kv:
        what = "the query heads cannot be divided evenly among the key/value heads"
        raise fields.wrong("num_key_value_heads", what, f"a divisor of num_attention_heads ({heads})", found=kv)
    positions = fields.integer("max_position_embeddings", default=max_positions)
    head_size = _head_dim(fields, hidden, heads, head_dim)
    layers = fields.integer("num_hidden_layers")
    size, windows = (None, frozenset[int]()) if window is None else _windows(fields, layers, window)
    config = ModelConfig(
        model_type=model_type, hidden_size=hidden, intermediate_size=fields.integer("intermediate_size"), num_layers=layers,
        num_heads=heads, num_kv_heads=kv, head_dim=head_size, vocab_size=fields.integer("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps", default=eps), max_position_embeddings=positions,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=tie_word_embeddings),
        hidden_act=OF_HIDDEN_ACT[fields.choice("hidden_act", OF_HIDDEN_ACT, default="silu")], dtype=_dtype(fields),
        rope=read_rope(fields, positions, head_size, theta=theta, partial=partial_rotary, keys=rope_keys),
        sliding_window=size, window_layers=windows, **fixed,
    )  # fmt: skip
    refuse_foreign_fields(fields, config)
    refuse_other_names(fields)
    return config


def num_experts(fields: Fields) -> int:
    """The number of experts: the field has two names, which must agree."""
    given = {name: fields.integer(name) for name in EXPERT_FIELDS if fields.get(name) is not None}
    return _once(fields, given) or fields.integer(EXPERT_FIELDS[0])


def moe_config(fields: Fields, *, shared_expert: bool = False, normalize: bool = False) -> MoEConfig:
    """Read a `MoEConfig`. The sizes are required; other absent fields take the defaults of transformers.

    `normalize` is the default of `norm_topk_prob`.
    """
    experts = num_experts(fields)
    shared = fields.integer("shared_expert_intermediate_size") if shared_expert else 0
    dense, count = fields.integers_or_none("mlp_only_layers") or (), fields.integer("num_hidden_layers")
    if absent := [number for number in dense if number >= count]:
        what, expected = "the list names a layer that the model does not have", f"numbers from 0 to {count - 1}"
        raise fields.wrong("mlp_only_layers", what, expected, found=absent[0])
    return MoEConfig(
        experts, fields.integer("num_experts_per_tok", maximum=experts), fields.integer("moe_intermediate_size"), shared,
        fields.boolean("norm_topk_prob", default=normalize), fields.integer("decoder_sparse_step", default=1), frozenset(dense),
    )  # fmt: skip


def _once(fields: Fields, given: Mapping[str, Any]) -> Any:
    """The value of a field that has two names, from the names that the file has; None: it has neither."""
    if len(set(given.values())) > 1:
        what = f"{' and '.join(given)} contradict each other"
        raise ConfigError(what, where=fields.file, found=given, hint="remove the wrong one")
    return next(iter(given.values()), None)


def _dtype(fields: Fields) -> str:
    """The dtype, under its old or its new name: "bfloat16" or "torch.bfloat16". Null and "auto" count as absent."""
    given = {}
    for name in ("dtype", "torch_dtype"):
        if (value := fields.get(name)) not in (None, "auto"):
            plain = value.removeprefix("torch.") if isinstance(value, str) else value
            given[name] = fields.over({name: plain}).choice(name, known.DTYPES)
    return _once(fields, given) or "float32"


def _head_dim(fields: Fields, hidden: int, heads: int, default: int | None) -> int:
    if default is not None:  # as in transformers, a config class with its own default does not accept null
        value = fields.integer("head_dim", default=default)
    else:
        value = fields.integer_or_none("head_dim") or hidden // heads
        if fields.get("head_dim") is None and hidden % heads:
            what = "head_dim is missing, and it does not follow from the other sizes"
            raise fields.wrong("hidden_size", what, f"a multiple of num_attention_heads ({heads})")
    if value % 2 or value > known.MAX_HEAD_DIM:
        what = "the head size is not acceptable: rotary embedding rotates pairs of channels"
        raise fields.wrong("head_dim", what, f"an even number up to {known.MAX_HEAD_DIM}", found=value)
    return value


def refuse_unserved(fields: Fields) -> None:
    """Raise UnsupportedError for unknown formats of quantized weights.

    A setting that only matters beyond the trained context is warned about, and so is a model's own Python code, which is not run.
    """
    read_quantization(fields)  # refuses unknown formats
    name = "dual_chunk_attention_config"
    if original := fields.nested(name).integer_or_none("original_max_position_embeddings"):
        what = f"dual chunk attention is not supported; it improves the output of sequences of more than {original} tokens"
        warn(f"{fields.place(name)}: {what}")
    if "AutoModelForCausalLM" in fields.nested("auto_map").raw:
        what = f"the model's own code is not run; it is computed as model_type {fields.string('model_type')!r}"
        warn(f"{fields.place('auto_map')}: {what}")


def refuse_other_classes(fields: Fields, classes: Collection[str]) -> None:
    """Raise UnsupportedError if `architectures` names another class: a classifier, a reward or an embedding model."""
    for name in fields.strings_or_none("architectures") or ():
        if name.startswith("FSDP") and name.removeprefix("FSDP") in classes:  # PyTorch's FSDP2 renames the class that it shards
            warn(f"{fields.place('architectures')}: {name}: the prefix FSDP is ignored: it tells how the model was trained")
        elif name not in classes:
            what = f"not a class of model_type {fields.string('model_type')!r} that minirt computes"
            hint = "only decoders with a language-model head are supported; correct model_type if it is wrong"
            raise fields.unsupported("architectures", what, " or ".join(classes), found=shown(name), hint=hint)


def _windows(fields: Fields, num_layers: int, absent: Window) -> tuple[int | None, frozenset[int]]:
    """The sliding window, and the layers that have it; None: no layer has one."""
    kinds = read_layer_types(fields, num_layers, ("full_attention", "sliding_attention"), "full_attention")
    used = absent.used is None or fields.boolean("use_sliding_window", default=absent.used)
    # transformers saves a window that is not used as 0.
    if absent.size is None and fields.get("use_sliding_window") and "sliding_window" not in fields.raw:
        raise fields.missing("sliding_window", "a number of tokens, or null, if use_sliding_window is true")
    window = fields.integer_or_none("sliding_window", default=absent.size, minimum=0)
    first = 0 if absent.first is None else fields.integer("max_window_layers", default=absent.first)
    if kinds is not None and absent.used is not None:
        layers = frozenset(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
        if layers and (not used or not window):
            what, expected = "the layer type is not supported", "full_attention, or a sliding_window that is used"
            raise fields.unsupported("layer_types", what, expected, found="sliding_attention")
    else:
        among = range(first, num_layers) if absent.layers is None else absent.layers
        layers = frozenset(among if used and window is not None else ())
    return (window or fields.integer("sliding_window") if layers else None), layers  # 0 is refused


def read_layer_types(fields: Fields, num_layers: int, accepted: Collection[str], expected: str) -> list[str] | None:
    """`layer_types`: absent, null, or one of the `accepted` kinds for each layer. `expected`: for the error."""
    kinds = fields.strings_or_none("layer_types")
    for kind in kinds or ():
        if kind not in accepted:
            raise fields.unsupported("layer_types", "the layer type is not supported", expected, found=shown(kind))
    if kinds is not None:
        fields.check_count("layer_types", kinds, num_layers, "layer")
    return kinds


def read_no_rope_layers(fields: Fields) -> frozenset[int]:
    """The layers without rotary embedding: `no_rope_layers` has 0 for these and 1 for the others.

    An absent list means that of every `no_rope_layer_interval` layers the last one has none, as in transformers.
    """
    count = fields.integer("num_hidden_layers")
    interval = fields.integer("no_rope_layer_interval", default=4)
    flags = fields.integers_or_none("no_rope_layers")
    if flags is None:
        return frozenset(range(interval - 1, count, interval))
    fields.check_count("no_rope_layers", flags, count, "layer")
    return frozenset(i for i, flag in enumerate(flags) if not flag)


def decoder_layers(
    config: ModelConfig, attention: Callable[[int], AttentionSettings] | None = None, *, norms: Norms = PRE_NORMS,
    names: Mapping[str, str] | None = None,
) -> "list[Layer]":  # fmt: skip
    """Embedding, attention (or gated DeltaNet) and MLP (or mixture of experts) of each block, head.

    Weights are named by their checkpoint prefixes, without `.weight`.

    Args:
        attention: the settings of each block's attention, by its number; None: `config.attention`.
        norms: names of a block's norms: before and after attention, before and after the MLP; None: there is none.
        names: those of parts that the checkpoint calls differently, see `Attention`.
    """
    from minirt.layers import Embedding, Head  # imported here because it imports torch

    attention, linear = attention or config.attention, config.gated_delta_net
    table, multiplier = "model.embed_tokens", config.embedding_multiplier
    layers: list[Layer] = [Embedding(config, name="embedding", weight=table, multiplier=multiplier)]
    for i in range(config.num_layers):
        settings, mixture = None if linear is not None and i in linear.layers else attention(i), config.is_mixture(i)
        layers += block(config, f"layers.{i}", f"model.layers.{i}", settings, mixture=mixture, norms=norms, names=names)
    weight, multiplier, softcap = head_weight(config), config.logits_multiplier, config.logits_softcap
    layers.append(Head(config, name="head", norm=FINAL_NORM, weight=weight, multiplier=multiplier, softcap=softcap))
    return layers


def head_weight(config: ModelConfig) -> str:
    """Checkpoint prefix of the LM head."""
    return "model.embed_tokens" if config.tie_word_embeddings else "lm_head"


def block(
    config: ModelConfig, name: str, prefix: str, attention: AttentionSettings | None, *, mixture: bool, norms: Norms = PRE_NORMS,
    names: Mapping[str, str] | None = None,
) -> "list[Layer]":  # fmt: skip
    """The layers of one block: attention or gated DeltaNet, and an MLP or a mixture of experts.

    Args:
        name: how the names of the layers begin. `prefix`: how those of the checkpoint's tensors begin.
        attention: None: gated DeltaNet.
        norms, names: see `decoder_layers`.
    """
    from minirt.layers import MLP, Attention, GatedDeltaNet, MoE

    before, after, before_mlp, after_mlp = (norm and f"{prefix}.{norm}" for norm in norms)
    given = {"names": names, "post_norm_eps": config.post_norm_eps, "residual_multiplier": config.residual_multiplier}

    def made(kind: Any, norm: str | None, post_norm: str | None, part: str, **settings: Any) -> "Layer":
        # A layer that has no such setting refuses it.
        settings |= {key: value for key, value in {**given, "post_norm": post_norm}.items() if value not in (None, 1)}
        return kind(config, name=f"{name}.{kind.kind}", norm=norm, prefix=f"{prefix}.{part}", **settings)

    mlp = made(MoE if mixture else MLP, before_mlp, after_mlp, "mlp")
    if attention is None:
        return [made(GatedDeltaNet, before, after, "linear_attn"), mlp]
    return [made(Attention, before, after, "self_attn", settings=attention), mlp]


def read_mtp(fields: Fields) -> MTPConfig:
    """What config.json says of multi-token prediction in the format of Qwen3.5: a block that drafts tokens (`mtp.*`).

    What is not supported is refused only if drafts are asked for (`draft_layers`).
    """
    count = fields.integer_or_none("mtp_num_hidden_layers")
    intermediate = fields.integer_or_none("mtp_intermediate_size")
    return MTPConfig(count, fields.boolean("mtp_use_dedicated_embeddings", default=False), intermediate)


def draft_layers(config: ModelConfig, rows: int | None) -> "tuple[list[Layer], list[Layer]]":
    """`decoder_layers` with a `Tap` of the states after the final norm, and the layers of the draft model.

    Args:
        rows: how many ids the drafts may have; None: those of the whole vocabulary.
    Raises:
        UnsupportedError: the config states no such layers, another number of them, embeddings of their own, or an MLP that is no
            dense one.
    """
    from minirt.layers import DraftInput, Head, Select, Tap

    mtp = config.mtp
    if mtp is None:
        what, hint = "the model has no multi-token prediction", "--speculate ngram needs none"
        raise UnsupportedError(what, where="mtp_num_hidden_layers", expected="1", found="no such field", hint=hint)
    if mtp.num_layers not in (None, 1):
        what, expected = "this number of layers of multi-token prediction is not supported", "1"
        raise UnsupportedError(what, where="mtp_num_hidden_layers", expected=expected, found=mtp.num_layers)
    if mtp.own_embeddings:
        what = "multi-token prediction with embeddings of its own is not supported"
        raise UnsupportedError(what, where="mtp_use_dedicated_embeddings", expected="false", found="true")
    *before, head = decoder_layers(config)
    mixture = config.moe is not None  # also where some layers of the decoder have a dense MLP
    if mixture and mtp.intermediate_size is not None:
        what = "an MLP of its own size is not supported beside mixtures of experts"
        raise UnsupportedError(what, where="mtp_intermediate_size", expected="no such field", found=mtp.intermediate_size)
    sized = replace(config, intermediate_size=mtp.intermediate_size or config.intermediate_size)
    attention, mlp = block(sized, "mtp", "mtp.layers.0", config.attention(), mixture=mixture)
    names = {"norm_embedding": "mtp.pre_fc_norm_embedding", "norm_hidden": "mtp.pre_fc_norm_hidden", "fc": "mtp.fc"}
    draft: list[Layer] = [
        DraftInput(config, name="mtp.input", **names), attention, Select(config, name="mtp.select"), mlp,
        Tap(config, name="mtp.tap", norm="mtp.norm", every_row=False),
        Head(config, name="mtp.head", norm="mtp.norm", weight=head_weight(config), rows=rows),
    ]  # fmt: skip
    return [*before, Tap(config, norm=FINAL_NORM), head], draft
