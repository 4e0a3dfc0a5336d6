"""The bytes of weights and KV that a step reads."""

from collections.abc import Mapping
from functools import partial, singledispatch

import torch

from minirt.layers import Layer
from minirt.layers.moe import MoE
from minirt.modeling.config import MAX_POSITIONS
from minirt.modeling.model import Model
from minirt.step.kv_cache import page_bytes, windows_of


def step_read_bytes(model: Model, tokens: int, experts: Mapping[str, float] | None = None) -> int:
    """Bytes of weights that a decode step of `tokens` tokens reads: those of each layer, once for each place in the list.

    Args:
        experts: layer name → number of distinct experts that the layer uses in the step. Of a layer that is not named: the
            expected number if all experts are equally likely.
    """
    used = experts or {}
    return sum(layer_read_bytes(layer, model.dtype, tokens, used.get(layer.name)) for layer in model.layers)


def kv_read_bytes(model: Model, length: float) -> int:
    """Bytes of KV that a decode step reads of a sequence of `length` tokens: with a window, of the last ones."""
    windows = [w for w in windows_of(model.cache_specs, MAX_POSITIONS) if w < length]
    lengths = {None: length} | {window: window for window in windows}
    count = partial(page_bytes, model.cache_specs, model.kv_dtype, 1, windows=windows)
    return round(sum(count(window=window) * seen for window, seen in lengths.items()))


@singledispatch
def layer_read_bytes(layer: Layer, dtype: torch.dtype, tokens: int, experts: float | None = None) -> int:
    """Bytes of a layer's weights that `tokens` tokens read, with `experts` distinct experts; None: the expected number.

    Register a class of layers whose tokens read different weights.
    """
    return layer.decode_read_bytes(dtype)


@layer_read_bytes.register
def _mixture(layer: MoE, dtype: torch.dtype, tokens: int, experts: float | None = None) -> int:
    many, used = layer.moe.num_experts, layer.moe.experts_per_token
    one = (layer.gate_up.nbytes(dtype) + layer.down.nbytes(dtype)) / many
    touched = expected_experts(many, used, tokens) if experts is None else experts
    return layer.decode_read_bytes(dtype) + round(one * (touched - used))


def expected_experts(num_experts: int, experts_per_token: int, tokens: int) -> float:
    """The expected number of distinct experts that `tokens` tokens use, if each token's are equally likely and independent."""
    return num_experts * (1 - (1 - experts_per_token / num_experts) ** tokens)
