"""The number of floating-point operations of a step or a prompt: two for each multiply-add."""

from collections.abc import Iterable
from functools import singledispatch

from minirt import models
from minirt.layers import Attention, Layer
from minirt.modeling.config import ModelConfig
from minirt.modeling.model import in_order


def linear_flops(config: ModelConfig, tokens: int, rows: int) -> int:
    """Count all layers except attention: for `tokens` tokens, but what comes after `Select` only for `rows` of them.

    In a mixture of experts, only the experts that a token uses are counted. The rule of recurrent layers counts.
    """
    return _linear_flops(_layers(config), tokens, rows)


def prompt_flops(config: ModelConfig, tokens: int) -> int:
    """Count a prompt: causal attention and the other layers for all tokens, but after `Select` for the last token."""
    layers = _layers(config)
    return _linear_flops(layers, tokens, 1) + sum(attention_flops(layer, [(tokens, tokens)]) for layer in layers)


@singledispatch
def attention_flops(layer: Layer, sequences: Iterable[tuple[int, int]]) -> int:
    """Operations of attention of the new tokens of sequences. Register a class of layers to count.

    Args:
        sequences: numbers of new and of cached tokens, the new ones included.
    """
    return 0


@attention_flops.register
def _attention(layer: Attention, sequences: Iterable[tuple[int, int]]) -> int:
    pairs = 0  # of a new token and a token that it sees
    for new, length in sequences:
        within = min(new, max(0, (layer.settings.window or length) - (length - new)))  # new tokens that see all before them
        pairs += within * (length - new) + within * (within + 1) // 2 + (new - within) * (layer.settings.window or 0)
    return 4 * layer.settings.num_heads * layer.settings.head_dim * pairs


def _layers(config: ModelConfig) -> list[Layer]:
    return in_order(config, models.build(config))


def _linear_flops(layers: list[Layer], tokens: int, rows: int) -> int:
    total, count = 0, tokens
    for layer in layers:
        count = rows if layer.selects_rows else count
        total += layer.flops(count)
    return total
