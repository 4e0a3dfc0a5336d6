"""Qwen2 in plain PyTorch, for training. Parameters have Hugging Face's names, so the state dict is the checkpoint."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The model's shape. 7 query heads of 64 share one KV head, the ratio of Qwen2.5-7B (28 on 4)."""

    vocab_size: int = 2048
    hidden_size: int = 448
    num_hidden_layers: int = 6
    intermediate_size: int = 896
    num_attention_heads: int = 7
    num_key_value_heads: int = 1
    max_position_embeddings: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class Norm(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden_size))
        self.eps = shape.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, self.heads * self.dim)
        self.k_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.dim)
        self.v_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.dim)
        self.o_proj = nn.Linear(self.heads * self.dim, shape.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, heads, T, D], rotated."""

        def split(y: Tensor, heads: int) -> Tensor:
            return y.unflatten(-1, (heads, self.dim)).transpose(1, 2)

        q = rotate(split(self.q_proj(x), self.heads), cos, sin)
        k = rotate(split(self.k_proj(x), self.kv_heads), cos, sin)
        return q, k, split(self.v_proj(x), self.kv_heads)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        # Expanded, because not every fused kernel supports enable_gqa.
        k, v = (t.expand(-1, self.heads, -1, -1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(shape), Attention(shape)
        self.post_attention_layernorm, self.mlp = Norm(shape), MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen2(nn.Module):
    """`forward(tokens [B, T])` → logits [B, T, V]. Needs a single KV head, because k and v are expanded to all query heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(shape.vocab_size, shape.hidden_size),
                "layers": nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers)),
                "norm": Norm(shape),
            }
        )
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        inverse = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_position_embeddings), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        initialize(self, shape.num_hidden_layers)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.states(tokens))

    def states(self, tokens: Tensor) -> Tensor:
        """The hidden states [B, T, H] after the final norm."""
        count = tokens.shape[1]
        x = self.model["embed_tokens"](tokens)
        for block in self.model["layers"]:
            x = block(x, self.cos[:count], self.sin[:count])
        return self.model["norm"](x)


def initialize(module: nn.Module, layers: int) -> None:
    """Draw weights with a standard deviation of 0.02, less for projections into the residual stream (GPT-2); zero biases."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim == 2:
            scale = (2 * layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            nn.init.normal_(parameter, std=0.02 * scale)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, heads, T, D], half-split as in Hugging Face's models."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
