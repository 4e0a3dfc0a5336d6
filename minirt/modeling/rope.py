"""Rotary position embedding (RoFormer, Su et al. 2021): inverse frequencies and the cos/sin table.

Implements linear (position interpolation, Chen et al. 2023), dynamic (NTK scaling by the length), llama3 (Llama 3.1's
wavelength bands), yarn (Peng et al. 2023), longrope (Ding et al. 2024) and proportional (Gemma 4). Formulas and fp32 rounding
order follow transformers' `modeling_rope_utils`, so the tables equal transformers'. Where frequencies depend on a sequence's
length, transformers changes those of later tokens while the sequence grows; here they are those of the served length, for all
tokens, as in vLLM.
"""

import math

import torch
from torch import Tensor

from minirt.modeling.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, rotary_dim: int, length: int = 0) -> Tensor:
    """The angle per position of each channel pair, in radians: [rotary_dim / 2] fp32 on the CPU.

    Args:
        rotary_dim: rotated channels of a head.
        length: number of positions that are served. Only the types dynamic and longrope depend on it.
    """
    if rope.kind == "dynamic" and length > rope.original_max_position:
        stretched = rope.factor * length / rope.original_max_position - (rope.factor - 1)
        return 1.0 / _wavelengths(rope.theta * stretched ** (rotary_dim / (rotary_dim - 2)), rotary_dim)
    wavelengths = _wavelengths(rope.theta, rotary_dim)
    if rope.kind == "longrope":
        factors = rope.long_factor if length > rope.original_max_position else rope.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelengths)
    if rope.kind == "proportional":  # the frequencies of whole heads, 0 for all but the first pairs
        turned = int(rotary_dim * rope.partial_rotary_factor) // 2
        return torch.where(torch.arange(rotary_dim // 2) < turned, 1.0 / wavelengths, 0.0)
    if rope.kind == "linear":
        return 1.0 / wavelengths / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / wavelengths)
    return _yarn(rope, rotary_dim) if rope.kind == "yarn" else 1.0 / wavelengths


def rope_table(rope: RopeConfig, rotary_dim: int, length: int, device: torch.device | str = "cpu") -> Tensor:
    """The cos | sin table of positions 0 … `length` - 1, times `rope.attention_factor`: [length, rotary_dim] fp32.

    The first rotary_dim / 2 columns hold the cosines of the channel pairs (d, d + rotary_dim / 2), the others hold the sines.
    The angle is the fp32 product of position and inverse frequency, as in transformers.
    """
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse_frequencies(rope, rotary_dim, length)
    # Always computed on the CPU, so that every device uses the same bits.
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor).to(device)


def query_scales(rope: RopeConfig, length: int, device: torch.device | str = "cpu") -> Tensor:
    """The factors of q at positions 0 … `length` - 1 (`llama_4_scaling_beta`, as in Ministral 3): [length] fp32."""
    chunks = torch.arange(length) // rope.original_max_position
    return (1 + rope.query_scaling_beta * torch.log(1 + chunks.float())).to(device)


def _wavelengths(theta: float, rotary_dim: int) -> Tensor:
    """theta^(2i / R) for each of R / 2 channel pairs i: its unscaled wavelength divided by 2π."""
    return theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Keep short wavelengths, divide the frequencies of long ones by `factor`, and blend those in between."""
    wavelengths = 2 * math.pi / frequencies
    longest, shortest = (rope.original_max_position / f for f in (rope.low_freq_factor, rope.high_freq_factor))
    slowed = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    blend = rope.original_max_position / wavelengths - rope.low_freq_factor
    blend = blend / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * slowed / rope.factor + blend * slowed
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), blended, slowed)


def _yarn(rope: RopeConfig, rotary_dim: int) -> Tensor:
    """NTK-by-parts: keep pairs that turn more than beta_fast times, slow those below beta_slow, and ramp in between."""

    def dimension(turns: float) -> float:
        """The (fractional) dimension that makes `turns` turns over the original context."""
        return rotary_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # transformers' guard against 0 / 0
    keep = 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wavelengths = _wavelengths(rope.theta, rotary_dim)
    return 1.0 / (rope.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep
