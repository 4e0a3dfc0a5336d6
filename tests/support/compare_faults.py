"""Implementations of layers for `--impl`, each with a planted fault: gate and up swapped, RoPE rotating backwards, a mask off by
one, a missing bias, a stale fp8 scale, K and V not written, another slot overwritten, the row before the right one, NaN, a result
that is too large.
"""

import copy

import torch

from minirt import layers
from minirt.layers import implementation
from minirt.step.kv_cache import LayerKV


def altered(layer, **attributes):
    """A shallow copy of the layer with some attributes replaced. The original and the shared attributes do not change."""
    twin = copy.copy(layer)
    vars(twin).update(attributes)
    return twin


def holder(linear, **tensors):
    twin = copy.copy(linear)
    vars(twin).update(tensors)
    return twin


@layers.register("mlp", "compare-swapped")
def swapped(layer):
    own = layer.gate_up
    scale = None if own.scale is None else own.scale.roll(own.scale.shape[0] // 2)
    weight = torch.cat(own.weight.view(torch.uint8).chunk(2)[::-1]).view(own.weight.dtype)
    return implementation("mlp", "triton").factory(altered(layer, gate_up=holder(own, weight=weight, scale=scale)))


@layers.register("mlp", "compare-stale")
def stale(layer):
    """One channel's scale does not belong to its current weights."""
    scale = layer.down.scale.clone()
    scale[3] *= 1.5
    return implementation("mlp", "triton").factory(altered(layer, down=holder(layer.down, scale=scale)))


@layers.register("attention", "compare-backwards")
def backwards(layer):
    class Backwards(layers.Attention):
        @property
        def cos_sin(self):
            table = super().cos_sin.clone()
            table[:, table.shape[1] // 2 :].neg_()
            return table

    twin = altered(layer)
    twin.__class__ = Backwards
    return implementation("attention", "triton").factory(twin)


@layers.register("attention", "compare-short")
def short(layer):
    """Attention sees one token too few, as with a mask that is off by one."""
    forward = implementation("attention", "triton").factory(layer)

    def shifted(x, batch, kv):
        true = batch.seq_lens_device.clone()
        batch.seq_lens_device.sub_(1)
        out = forward(x, batch, kv)
        batch.seq_lens_device.copy_(true)
        return out

    return shifted


@layers.register("attention", "compare-no-bias")
def no_bias(layer):
    own = layer.qkv
    return implementation("attention", "triton").factory(altered(layer, qkv=holder(own, bias=torch.zeros_like(own.bias))))


@layers.register("attention", "compare-unwritten")
def unwritten(layer):
    """The output is right, but K and V are not written to the cache."""
    forward = implementation("attention", "eager").factory(layer)
    return lambda x, batch, kv: forward(x, batch, LayerKV(kv.k.clone(), kv.v.clone()))


@layers.register("attention", "compare-stray")
def stray(layer):
    """Overwrites one value in a slot that is free or holds another token."""
    forward = implementation("attention", "eager").factory(layer)

    def straying(x, batch, kv):
        out = forward(x, batch, kv)
        kv.v.flatten(0, 1)[int(batch.slot_mapping[-1]) ^ 1, 0, 0] = 0.5
        return out

    return straying


@layers.register("mlp", "compare-nan")
def not_a_number(layer):
    return lambda x, batch, kv: torch.full_like(x, torch.nan)


@layers.register("select", "compare-before")
def before(layer):
    return lambda x, batch, kv: x[batch.logits_indices - 1]


@layers.register("select", "compare-half")
def half(layer):
    return lambda x, batch, kv: x / 2 if batch.every_row else x[batch.logits_indices]


@layers.register("head", "compare-doubled")
def doubled(layer):
    forward = implementation("head", "eager").factory(layer)
    return lambda x, batch, kv: 2 * forward(x, batch, kv)


@layers.register("mlp", "compare-scaled")
def scaled(layer):
    forward = implementation("mlp", "eager").factory(layer)
    return lambda x, batch, kv: x + 1.05 * (forward(x, batch, kv) - x)
