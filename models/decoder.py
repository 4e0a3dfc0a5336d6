"""Shared by all Llama-like decoders: reading config.json, refusing unsupported features, and the list of layers."""

import warnings
from collections.abc import Collection
from typing import TYPE_CHECKING

from minirt.errors import ConfigError, UnsupportedError
from minirt.modeling.config import (
    ACTIVATIONS,
    DTYPES,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    Fields,
    ModelConfig,
    MoEConfig,
    read_rope,
    shown,
)
from minirt.modeling.quantization_config import read_quantization

if TYPE_CHECKING:
    from minirt.layers import Layer

EXPERT_FIELDS = ("num_experts", "num_local_experts")  # two names of one field


def decoder_config(
    fields: Fields,
    *,
    model_type: str,
    classes: Collection[str],
    max_positions: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    moe: MoEConfig | None = None,
) -> ModelConfig:
    """Read a `ModelConfig`. The sizes are required; other absent fields take the defaults of transformers.

    `classes` are the names that `architectures` may hold: those of transformers' class of this decoder with an LM head.
    `max_positions`, `kv_heads` and `head_dim` are the defaults of the architecture's config class in transformers. If
    `kv_heads` or `head_dim` is None, an absent field takes the same value as null: num_attention_heads, or
    hidden_size // num_attention_heads. `moe` is what `moe_config` has read; None: fields of experts are refused.
    """
    refuse_unserved(fields)
    if moe is None:
        refuse_experts(fields)
    refuse_other_classes(fields, classes)
    hidden = fields.integer("hidden_size", maximum=MAX_HIDDEN)
    heads = fields.integer("num_attention_heads", maximum=MAX_HEADS)
    kv = fields.integer_or_none("num_key_value_heads", default=kv_heads, maximum=MAX_HEADS) or heads
    if heads % kv:
        raise ConfigError(
            "the query heads cannot be divided evenly among the key/value heads",
            where=fields.place("num_key_value_heads"),
            expected=f"a divisor of num_attention_heads ({heads})",
            found=kv,
        )
    positions = fields.integer("max_position_embeddings", default=max_positions, maximum=MAX_POSITIONS)
    layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    check_layer_types(fields, layers)
    return ModelConfig(
        model_type=model_type,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", maximum=MAX_INTERMEDIATE),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=_head_dim(fields, hidden, heads, head_dim),
        vocab_size=fields.integer("vocab_size", maximum=MAX_VOCAB),
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6, minimum=1e-20, maximum=0.1),
        max_position_embeddings=positions,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        hidden_act=ACTIVATIONS[fields.choice("hidden_act", ACTIVATIONS, default="silu")],
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        dtype=_dtype(fields),
        rope=read_rope(fields, positions),
        moe=moe,
    )


def moe_config(fields: Fields, *, shared_expert: bool = False) -> MoEConfig:
    """Read a `MoEConfig`. The sizes are required; other absent fields take the defaults of transformers.

    The number of experts is `num_experts` or `num_local_experts`, which must agree.
    """
    given = {name: fields.integer(name, maximum=MAX_EXPERTS) for name in EXPERT_FIELDS if fields.raw.get(name) is not None}
    if len(set(given.values())) > 1:
        what = "num_experts and num_local_experts contradict each other"
        raise ConfigError(what, where=fields.where, found=given, hint="remove the wrong one")
    experts = next(iter(given.values())) if given else fields.integer(EXPERT_FIELDS[0], maximum=MAX_EXPERTS)
    shared = fields.integer("shared_expert_intermediate_size", maximum=MAX_INTERMEDIATE) if shared_expert else 0
    return MoEConfig(
        num_experts=experts,
        experts_per_token=fields.integer("num_experts_per_tok", maximum=experts),
        intermediate_size=fields.integer("moe_intermediate_size", maximum=MAX_INTERMEDIATE),
        shared_intermediate_size=shared,
        normalize=fields.boolean("norm_topk_prob", default=False),
        sparse_step=fields.integer("decoder_sparse_step", default=1, maximum=MAX_LAYERS),
        dense_layers=frozenset(fields.integers_or_none("mlp_only_layers", minimum=0, maximum=MAX_LAYERS) or ()),
    )


def _dtype(fields: Fields) -> str:
    """The dtype, under its old or its new name. As in transformers, null counts as absent."""
    given = {n: fields.choice(n, DTYPES) for n in ("dtype", "torch_dtype") if fields.raw.get(n) is not None}
    if len(set(given.values())) > 1:
        what = "dtype and torch_dtype contradict each other"
        raise ConfigError(what, where=fields.where, found=given, hint="remove the wrong one")
    return next(iter(given.values()), "float32")


def _head_dim(fields: Fields, hidden: int, heads: int, default: int | None) -> int:
    if default is not None:  # as in transformers, a config class with its own default does not accept null
        value = fields.integer("head_dim", default=default, maximum=MAX_HEAD_DIM)
    else:
        value = fields.integer_or_none("head_dim", maximum=MAX_HEAD_DIM) or hidden // heads
        if fields.raw.get("head_dim") is None and hidden % heads:
            raise ConfigError(
                "head_dim is missing, and it does not follow from the other sizes",
                where=fields.place("hidden_size"),
                expected=f"a multiple of num_attention_heads ({heads})",
                found=hidden,
            )
    if value % 2 or value > MAX_HEAD_DIM:
        raise ConfigError(
            "the head size is not acceptable: rotary embedding rotates pairs of channels",
            where=fields.place("head_dim"),
            expected=f"an even number up to {MAX_HEAD_DIM}",
            found=value,
        )
    return value


def refuse_unserved(fields: Fields) -> None:
    """Raise UnsupportedError for unknown formats of quantized weights and bidirectional attention.

    A setting that only matters beyond the trained context is warned about.
    """
    read_quantization(fields)  # refuses unknown formats
    if not fields.boolean("is_causal", default=True):
        what = "attention to later tokens is not supported: this is an embedding model"
        raise UnsupportedError(what, where=fields.place("is_causal"), expected="true", found="false")
    name = "dual_chunk_attention_config"
    if original := fields.nested(name).integer_or_none("original_max_position_embeddings", maximum=MAX_POSITIONS):
        what = f"dual chunk attention is not supported; it improves the output of sequences of more than {original} tokens"
        warnings.warn(f"{fields.place(name)}: {what}", stacklevel=2)


def refuse_experts(fields: Fields) -> None:
    """Raise UnsupportedError for a mixture of experts under the model_type of a dense model."""
    for name in EXPERT_FIELDS:
        if experts := fields.integer_or_none(name, minimum=0, maximum=1 << 20):
            what = f"mixtures of experts are not supported for model_type {fields.string('model_type')!r}"
            raise UnsupportedError(what, where=fields.place(name), expected="no field, or 0", found=experts)


def refuse_other_classes(fields: Fields, classes: Collection[str]) -> None:
    """Raise UnsupportedError if `architectures` names another class: a classifier, a reward or an embedding model."""
    for name in fields.strings_or_none("architectures") or ():
        if name not in classes:
            raise UnsupportedError(
                f"not a class of model_type {fields.string('model_type')!r} that minirt computes",
                where=fields.place("architectures"),
                expected=" or ".join(classes),
                found=shown(name),
                hint="only decoders with a language-model head are supported; correct model_type if it is wrong",
            )


def check_layer_types(fields: Fields, num_layers: int) -> None:
    """Check `layer_types`: absent, null, or full attention in every layer."""
    kinds = fields.strings_or_none("layer_types")
    for kind in kinds or ():
        if kind != "full_attention":
            what, where = "the layer type is not supported", fields.place("layer_types")
            raise UnsupportedError(what, where=where, expected="full_attention", found=shown(kind))
    if kinds is not None and len(kinds) != num_layers:
        raise ConfigError(
            "the list does not have one entry for each layer",
            where=fields.place("layer_types"),
            expected=f"{num_layers} (num_hidden_layers)",
            found=len(kinds),
        )


def refuse_used_window(fields: Fields, num_layers: int) -> None:
    """Raise UnsupportedError if a layer would use sliding-window attention.

    In Qwen models with `use_sliding_window`, these are the layers from `max_window_layers` on.
    """
    used = fields.boolean("use_sliding_window", default=False)
    window = fields.integer_or_none("sliding_window", default=4096, maximum=MAX_POSITIONS)
    first = fields.integer("max_window_layers", default=28, minimum=0, maximum=MAX_LAYERS)
    listed = fields.raw.get("layer_types") is not None  # overrides max_window_layers; checked in check_layer_types
    if used and window is not None and first < num_layers and not listed:
        raise UnsupportedError(
            "sliding-window attention is not supported",
            where=fields.place("use_sliding_window"),
            expected=f"false, or a max_window_layers of {num_layers} or more",
            found=f"a window of {window} tokens from layer {first} on",
        )


def refuse_any_window(fields: Fields) -> None:
    """Raise UnsupportedError if `use_sliding_window` gives the first layer a window, whatever `max_window_layers` says."""
    used = fields.boolean("use_sliding_window", default=False)
    # transformers saves a window that is not used as 0.
    window = fields.integer_or_none("sliding_window", default=4096, minimum=0, maximum=MAX_POSITIONS)
    if used and window is not None and fields.raw.get("layer_types") is None:
        place = fields.place("use_sliding_window")
        found = f"true, with a window of {window} tokens"
        raise UnsupportedError("sliding-window attention is not supported", where=place, expected="false", found=found)


def decoder_layers(config: ModelConfig) -> "list[Layer]":
    """Embedding, attention and MLP or mixture of experts of each block, head.

    Weights are named by their checkpoint prefixes, without `.weight`.
    """
    from minirt.layers import MLP, Attention, Embedding, Head, MoE  # imported here because it imports torch

    layers: list[Layer] = [Embedding(config, name="embedding", weight="model.embed_tokens")]
    for i in range(config.num_layers):
        block = f"model.layers.{i}"
        layers.append(
            Attention(
                config,
                name=f"layers.{i}.attention",
                norm=f"{block}.input_layernorm",
                q=f"{block}.self_attn.q_proj",
                k=f"{block}.self_attn.k_proj",
                v=f"{block}.self_attn.v_proj",
                o=f"{block}.self_attn.o_proj",
                q_norm=f"{block}.self_attn.q_norm" if config.qk_norm else None,
                k_norm=f"{block}.self_attn.k_norm" if config.qk_norm else None,
            )
        )
        norm = f"{block}.post_attention_layernorm"
        if config.moe is not None and config.moe.covers(i):
            shared = f"{block}.mlp.shared_expert" if config.moe.shared_intermediate_size else None
            layers.append(
                MoE(
                    config,
                    name=f"layers.{i}.moe",
                    norm=norm,
                    router=f"{block}.mlp.gate",
                    experts=f"{block}.mlp.experts",
                    shared=shared,
                    shared_gate=None if shared is None else f"{shared}_gate",
                )
            )
            continue
        layers.append(
            MLP(
                config,
                name=f"layers.{i}.mlp",
                norm=norm,
                gate=f"{block}.mlp.gate_proj",
                up=f"{block}.mlp.up_proj",
                down=f"{block}.mlp.down_proj",
            )
        )
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    layers.append(Head(config, name="head", norm="model.norm", weight=head))
    return layers
