"""The list of layers that Llama-like decoders share, with Hugging Face's checkpoint names."""

from typing import TYPE_CHECKING

from minirt.config import ModelConfig

if TYPE_CHECKING:
    from minirt.layers import Layer


def decoder_layers(config: ModelConfig) -> "list[Layer]":
    """Embedding, attention and MLP of each block, head; weights by their checkpoint prefixes, without `.weight`."""
    from minirt.layers import MLP, Attention, Embedding, Head  # here, for it imports torch

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
        layers.append(
            MLP(
                config,
                name=f"layers.{i}.mlp",
                norm=f"{block}.post_attention_layernorm",
                gate=f"{block}.mlp.gate_proj",
                up=f"{block}.mlp.up_proj",
                down=f"{block}.mlp.down_proj",
            )
        )
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    layers.append(Head(config, name="head", norm="model.norm", weight=head))
    return layers
