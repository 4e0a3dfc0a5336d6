"""Routings and 4-bit weights of experts, for tests of their kernels."""

import torch

from minirt.kernels import reference
from minirt.kernels.moe.route import Routing, most_tiles


def lists(experts, weights, E, block_t):
    """The `Routing` of given choices, by the reference. Its unused tiles name an expert that there is not."""
    order, tiles = reference.expert_tiles(experts, E, block_t)
    every = torch.full((3, most_tiles(order.numel(), E, block_t)), 1 << 20, dtype=torch.int32, device=order.device)
    every[:, : tiles.shape[1]] = tiles
    used = torch.tensor([tiles.shape[1]], dtype=torch.int32, device=order.device)
    places = torch.empty_like(order)
    places[order.long()] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return Routing(weights, experts.int(), order, places, every, used, block_t)


def four_bits(weight, group):
    """Experts [E, N, K] → words, scale words as `PackedExperts.stacked` views them, and what both stand for in fp64.

    group: "mx" for MXFP4.
    """
    if group == "mx":
        words, scales = reference.quantize_weight(weight.flatten(0, 1), "mxfp4")
        exact = reference.dequantize_mxfp4(words, scales, weight.shape[2], torch.float64)
    else:
        codes, scale, zero = reference.quantize_int4(weight.flatten(0, 1), group)
        words, scales = reference.pack_int4(codes), reference.pack_int4_scale(scale, zero)
        exact = reference.dequantize_int4(words, scales, weight.shape[2], torch.float64)
    E_N = weight.shape[:2]
    return words.unflatten(0, E_N), scales.unflatten(1, E_N).movedim(1, 0), exact.view(weight.shape)
