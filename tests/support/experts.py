"""Routings and 4-bit weights of experts, for tests of their kernels, and model folders in MXFP4."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from minirt.kernels import reference
from minirt.kernels.moe.route import Routing, most_tiles
from support.checkpoints import restate, rewrite

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
STATED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]}


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

    group: columns; with a dtype, of symmetric weights whose scale words have it; "mx": MXFP4.
    """
    if group == "mx":
        words, scales = reference.quantize_weight(weight.flatten(0, 1), "mxfp4")
        exact = reference.dequantize_mxfp4(words, scales, weight.shape[2], torch.float64)
    else:
        group, symmetric = group if isinstance(group, tuple) else (group, None)
        codes, scale, zero = reference.quantize_int4(weight.flatten(0, 1), group, symmetric)
        words, scales = reference.pack_int4(codes), reference.pack_int4_scale(scale, zero)
        scales = scales if symmetric is None else scale.to(symmetric).T.contiguous()
        exact = reference.dequantize_int4(words, scales, weight.shape[2], torch.float64)
    E_N = weight.shape[:2]
    return words.unflatten(0, E_N), scales.unflatten(1, E_N).movedim(1, 0), exact.view(weight.shape)


def decoded(blocks, scales):
    """What blocks [E, N, G, 16] and scales [E, N, G] of MXFP4 stand for, byte by byte: [E, N, 32G] fp64."""
    E, N, G, _ = blocks.shape
    values = torch.zeros(E, N, G, 32, dtype=torch.float64)
    for byte in range(16):
        for half in range(2):
            code = (blocks[..., byte].int() >> 4 * half) & 15
            magnitude = torch.tensor(LEVELS, dtype=torch.float64)[code & 7]
            values[..., 2 * byte + half] = torch.where(code >= 8, -magnitude, magnitude) * 2.0 ** (scales.double() - 127)
    return values.flatten(2)


def in_mxfp4(plain: Path, folder: Path, exponents: range) -> None:
    """Write a gpt-oss of `plain` with random experts in MXFP4 to `folder`, and the same numbers in fp32 to `plain`."""
    generator, stored = torch.Generator().manual_seed(5), {}

    def quantize(tensors):
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            E, K, N = tensors[name].shape
            blocks = torch.randint(0, 256, (E, N, K // 32, 16), generator=generator, dtype=torch.uint8)
            scales = 127 + torch.randint(exponents.start, exponents.stop, (E, N, K // 32), generator=generator)
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales.to(torch.uint8)
            tensors[name] = decoded(blocks, scales).float().transpose(1, 2)
        rest = {name: tensor for name, tensor in tensors.items() if not name.endswith(("gate_up_proj", "down_proj"))}
        folder.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in (rest | stored).items()}, folder / "model.safetensors")
        shutil.copy(plain / "config.json", folder)
        restate(folder, quantization_config=STATED)

    rewrite(plain, quantize)
