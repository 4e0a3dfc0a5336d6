"""The layers that decoder models are made of, and the registry of their implementations."""

from minirt.layers.attention import Attention
from minirt.layers.base import Forward, Implementation, Layer, LayerContext, LinearOp, implementation, register
from minirt.layers.embedding import DraftInput, Embedding
from minirt.layers.gated_delta_net import GatedDeltaNet
from minirt.layers.head import Head
from minirt.layers.mlp import MLP
from minirt.layers.moe import MLPAndMoE, MoE
from minirt.layers.select import Select, Tap

__all__ = [
    "MLP", "Attention", "DraftInput", "Embedding", "Forward", "GatedDeltaNet", "Head", "Implementation", "Layer",
    "LayerContext", "LinearOp", "MLPAndMoE", "MoE", "Select", "Tap", "implementation", "register",
]  # fmt: skip
