"""The network: Qwen2 of transformers, and the parts of its attention that the draft layers use."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, apply_rotary_pos_emb

CONTEXT = 512  # positions
# 7 query heads of 64 share one KV head, the ratio of Qwen2.5-7B (28 on 4).
SIZES = {
    "vocab_size": 2048, "hidden_size": 448, "num_hidden_layers": 6, "intermediate_size": 896, "num_attention_heads": 7,
    "num_key_value_heads": 1, "max_position_embeddings": CONTEXT, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
}  # fmt: skip


def qwen2(**sizes: Any) -> Qwen2ForCausalLM:
    """A model with new weights. `sizes`: those that are not those of `SIZES`."""
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES | sizes, tie_word_embeddings=False))
    initialize(model, model.config.num_hidden_layers)
    return model


def initialize(module: nn.Module, layers: int) -> None:
    """Draw weights with a standard deviation of 0.02, less for projections into the residual stream (GPT-2); zero biases."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim == 2:
            scale = (2 * layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            nn.init.normal_(parameter, std=0.02 * scale)


def states_of(model: Qwen2ForCausalLM, tokens: Tensor) -> Tensor:
    """The hidden states [B, T, H] of tokens [B, T], after the final norm."""
    return model.model(tokens, use_cache=False).last_hidden_state


def rotation(model: Qwen2ForCausalLM, count: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [1, count, D] of the first positions."""
    return model.model.rotary_emb(model.lm_head.weight, torch.arange(count, device=model.device)[None])


def project(attention: Qwen2Attention, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, heads, T, D], rotated."""
    linears = attention.q_proj, attention.k_proj, attention.v_proj
    q, k, v = (linear(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for linear in linears)
    return *(part.to(v.dtype) for part in apply_rotary_pos_emb(q, k, cos, sin)), v
