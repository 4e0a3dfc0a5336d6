"""Muse-Glimmer (30B): windows and rotary embedding in three of four layers, a normalized embedding, and norms around sublayers.

The other layers have neither a window nor rotary embedding. Queries have a factor, and the output of attention has a gate.
Official files are those of a model that also sees images. Only its text decoder is computed.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from minirt.modeling.config import Fields, ModelConfig
from minirt.models.decoder import SANDWICH_NORMS, Window, decoder_config, decoder_layers, head_weight
from minirt.models.vision import text_fields

if TYPE_CHECKING:
    from minirt.layers import Layer

CLASSES = ("MuseGlimmerForConditionalGeneration", "MuseGlimmerForCausalLM")
decoder_fields = partial(text_fields, flat=True)  # the decoder alone is `muse_glimmer_text`


def config(fields: Fields) -> ModelConfig:
    """`layer_rope_theta` has 0 for layers without rotary embedding; the others must have the theta of `rope_parameters`.

    Without it and `layer_types`, every fourth layer has neither, counted from the last.
    """
    count = fields.integer("num_hidden_layers")
    full, name = frozenset(range(count - 1, -1, -4)), "layer_rope_theta"
    thetas = None if fields.get(name) is None else fields.numbers(name, count=count, what="layer")
    scale, output, cap, eps = (
        fields.number(name, default=default)
        for name, default in (
            ("qk_scale_factor", 3.87),
            ("output_multiplier", 0.19611613513818404),
            ("final_logit_softcapping", 20.0),
            ("post_norm_eps", 1e-8),
        )
    )
    parsed = decoder_config(
        fields, model_type="muse_glimmer", classes=(), max_positions=131072, kv_heads=2, head_dim=128, eps=1e-5,
        qk_norm=True, attention_gate="gate_proj", zero_centered_norms=True, post_norm_eps=eps,
        logits_multiplier=output, logits_softcap=cap, window=Window(2048, layers=frozenset(range(count)) - full),
    )  # fmt: skip
    if thetas is not None:
        full = frozenset(i for i, theta in enumerate(thetas) if not theta)
        if other := {*thetas} - {0, parsed.rope.theta}:
            expected = f"0 or {parsed.rope.theta:g}, as in rope_parameters"
            raise fields.unsupported(name, "another theta is not supported", expected, found=min(other))
    return replace(parsed, no_rope_layers=full, attention_scale=scale * parsed.head_dim**-0.5)  # the same scores as of q · scale


def layers(config: ModelConfig) -> "list[Layer]":
    from minirt.layers import Embedding, Head  # imported here because it imports torch

    _, *blocks, _ = decoder_layers(config, lambda i: replace(config.attention(i), qk_norm="plain"), norms=SANDWICH_NORMS)
    weight, multiplier, softcap = head_weight(config), config.logits_multiplier, config.logits_softcap
    head = Head(config, weight=weight, multiplier=multiplier, softcap=softcap, centered=False)
    return [Embedding(config, normalized=True), *blocks, head]
