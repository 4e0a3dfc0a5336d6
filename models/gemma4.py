"""Gemma 4 (31B, 12B, 26B-A4B): windows with other heads than the full layers, whose values are the keys before their norm.

Every head of V has an RMSNorm without weights, every block a factor of the whole residual stream. In the model with experts, each
block has them beside its MLP. Official files are those of a model that also sees images and hears. Only its text decoder is
computed.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from minirt.kernels.activations import OF_HIDDEN_ACT
from minirt.modeling.config import AttentionSettings, Fields, ModelConfig, MoEConfig, read_rope
from minirt.models.decoder import FINAL_NORM, SANDWICH_NORMS, Window, decoder_config, head_weight, read_layer_types
from minirt.models.vision import text_fields

if TYPE_CHECKING:
    from minirt.layers import Layer

CLASSES = tuple(f"Gemma4{name}" for name in (
    "ForConditionalGeneration", "ForCausalLM", "UnifiedForConditionalGeneration", "UnifiedForCausalLM",
))  # fmt: skip
decoder_fields = partial(text_fields, tied=True, flat=True)  # the decoder alone is `gemma4_text` or `gemma4_unified_text`
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES: dict[str, dict[str, Any]] = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
_E_MODELS = "the models with per-layer inputs (E2B, E4B) are not supported"


@dataclass(frozen=True)
class Gemma4Config(ModelConfig):
    """`full_head_dim`, `full_kv_heads`: the heads of layers without a window. `full_v_is_k`: see `AttentionSettings.v_is_k`."""

    full_head_dim: int = 512
    full_kv_heads: int = 1
    full_v_is_k: bool = False

    def attention(self, layer: int | None = None) -> AttentionSettings:
        settings = replace(super().attention(layer), normalize_v=True)
        if layer in self.window_layers:
            return settings
        return replace(
            settings, head_dim=self.full_head_dim, num_kv_heads=self.full_kv_heads, v_is_k=self.full_v_is_k,
        )  # fmt: skip


def config(fields: Fields) -> ModelConfig:
    """Absent fields take the defaults of transformers, which differ between `gemma4` and `gemma4_unified`."""
    unified = "unified" in fields.string("model_type")
    _refuse(fields, unified)
    count = fields.integer("num_hidden_layers")
    kinds = read_layer_types(fields, count, (_FULL, _SLIDING), _FULL)
    kinds = [_SLIDING if (i + 1) % 6 else _FULL for i in range(count)] if kinds is None else kinds
    kinds[-1] = _FULL  # as in transformers
    full = _full_heads(fields, [str(i) for i, kind in enumerate(kinds) if kind == _FULL])
    activation = fields.choice("hidden_activation", OF_HIDDEN_ACT, default="gelu_pytorch_tanh")
    whole, windowed = (
        fields.over({**fields.raw, "rope_parameters": rope, "layer_types": kinds, "hidden_act": activation})
        for rope in _ropes(fields.nested("rope_parameters"), kinds)
    )
    sliding, cap = frozenset(i for i, kind in enumerate(kinds) if kind == _SLIDING), "final_logit_softcapping"
    parsed = decoder_config(
        whole, model_type="gemma4", classes=CLASSES, max_positions=262144 if unified else 131072, kv_heads=4, head_dim=256,
        tie_word_embeddings=True, attention_bias=False, qk_norm=True, attention_scale=1.0,
        window=Window(1024 if unified else 512, layers=sliding),
        logits_softcap=0.0 if fields.get(cap) is None else fields.number(cap), moe=_moe(fields),
    )  # fmt: skip
    rope = read_rope(windowed, parsed.max_position_embeddings, parsed.head_dim)
    return Gemma4Config(**vars(parsed) | {"window_rope": rope}, **full)


def _refuse(fields: Fields, unified: bool) -> None:
    """Refuse what only models with per-layer inputs have, and attention to later tokens."""
    name = "hidden_size_per_layer_input"
    if (size := fields.get(name, 0 if unified else 256)) not in (0, None):
        raise fields.unsupported(name, _E_MODELS, 0, found=size)
    fields.only("num_kv_shared_layers", 0, what=_E_MODELS)
    fields.only("use_bidirectional_attention", "vision", what="only causal attention is supported, which text has")
    for name in ("vocab_size_per_layer_input", "use_double_wide_mlp"):  # of such models alone
        fields.get(name)


def _moe(fields: Fields) -> MoEConfig | None:
    if not fields.boolean("enable_moe_block", default=False):
        return None
    experts = fields.integer("num_experts")
    used = fields.integer("top_k_experts", maximum=experts)
    return MoEConfig(experts, used, fields.integer("moe_intermediate_size"))


def _ropes(stated: Fields, kinds: list[str]) -> list[Any]:
    """The rope parameters of full layers, and those of layers with a window."""
    for kind in {*kinds} if stated.raw else ():
        if not stated.nested(kind).raw:
            raise stated.missing(kind, "the parameters of these layers")
    return [stated.raw.get(kind) or default for kind, default in _ROPES.items()]


def _full_heads(fields: Fields, full: list[str]) -> dict[str, Any]:
    """The heads of full layers, from `global_head_dim` and `num_global_key_value_heads`, or from `per_layer_config`."""
    v_is_k, by_layer = fields.boolean("attention_k_eq_v", default=False), fields.nested("per_layer_config")
    heads = fields.integer("num_attention_heads")
    kv = fields.integer_or_none("num_key_value_heads", default=4) or heads
    size = fields.integer("global_head_dim", default=512)
    stated = fields.integer_or_none("num_global_key_value_heads", maximum=heads)
    kv = stated if stated is not None and v_is_k else kv
    if by_layer.raw:
        first, given = by_layer.nested(min(by_layer.raw)), {key.lstrip("0") or "0": value for key, value in by_layer.raw.items()}
        if given != dict.fromkeys(full, first.raw) or first.raw.keys() - {"head_dim", "num_key_value_heads"}:
            expected = "the same head_dim and num_key_value_heads for each full layer, and nothing for others"
            raise fields.unsupported("per_layer_config", "layers that differ in this way are not supported", expected)
        size, kv = first.integer("head_dim", default=size), first.integer("num_key_value_heads", default=kv)
    if size % 2 or heads % kv:
        what, expected = "the heads of full layers do not fit", f"an even size, and a divisor of num_attention_heads ({heads})"
        raise fields.wrong("global_head_dim", what, expected, found=f"{kv} KV heads of {size} channels")
    return {"full_head_dim": size, "full_kv_heads": kv, "full_v_is_k": v_is_k}


def layers(config: ModelConfig) -> "list[Layer]":
    from minirt.layers import MLP, Attention, Embedding, Head, MLPAndMoE  # imported here because it imports torch

    made: list[Layer] = [Embedding(config, multiplier=config.hidden_size**0.5, rounded=True)]
    for i in range(config.num_layers):
        name, prefix = f"layers.{i}", f"model.layers.{i}"
        before, after, before_mlp, after_mlp = (f"{prefix}.{norm}" for norm in SANDWICH_NORMS)
        made.append(Attention(
            config, name=f"{name}.attention", norm=before, prefix=f"{prefix}.self_attn", settings=config.attention(i),
            post_norm=after,
        ))  # fmt: skip
        if config.moe is not None:
            made.append(MLPAndMoE(config, name=f"{name}.mlp_and_moe", prefix=prefix))
            continue
        made.append(MLP(
            config, name=f"{name}.mlp", norm=before_mlp, prefix=f"{prefix}.mlp", post_norm=after_mlp,
            factor=f"{prefix}.layer_scalar",
        ))  # fmt: skip
    return [*made, Head(config, norm=FINAL_NORM, weight=head_weight(config), softcap=config.logits_softcap)]
