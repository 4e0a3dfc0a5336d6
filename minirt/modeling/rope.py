"""Rotary position embedding (RoFormer, Su et al. 2021): inverse frequencies and the cos/sin table.

Implements linear (position interpolation, Chen et al. 2023), llama3 (Llama 3.1's wavelength bands) and yarn (Peng et al.
2023). Formulas and fp32 rounding order follow transformers' `modeling_rope_utils`, so the tables equal transformers'.
"""

import math

import torch
from torch import Tensor

from minirt.modeling.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """The angle per position of each channel pair, in radians: [head_dim / 2] fp32 on the CPU."""
    frequencies = 1.0 / _wavelengths(rope, head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, head_dim)
    return frequencies


def rope_table(rope: RopeConfig, head_dim: int, length: int, device: torch.device | str = "cpu") -> Tensor:
    """The cos | sin table of positions 0 … `length` - 1, times `rope.attention_factor`: [length, head_dim] fp32.

    The first head_dim / 2 columns hold the cosines of the channel pairs (d, d + head_dim / 2), the others hold the sines.
    The angle is the fp32 product of position and inverse frequency, as in transformers.
    """
    positions = torch.arange(length, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)
    # Always computed on the CPU, so that every device uses the same bits.
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor).to(device)


def _wavelengths(rope: RopeConfig, head_dim: int) -> Tensor:
    """theta^(2i / D) for each channel pair i: its unscaled wavelength divided by 2π."""
    return rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Keep short wavelengths, divide the frequencies of long ones by `factor`, and blend those in between."""
    wavelengths = 2 * math.pi / frequencies
    longest, shortest = (rope.original_max_position / f for f in (rope.low_freq_factor, rope.high_freq_factor))
    slowed = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    blend = rope.original_max_position / wavelengths - rope.low_freq_factor
    blend = blend / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * slowed / rope.factor + blend * slowed
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, blended, slowed)


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """NTK-by-parts: keep pairs that turn more than beta_fast times, slow those below beta_slow, and ramp in between."""

    def dimension(turns: float) -> float:
        """The (fractional) dimension that makes `turns` turns over the original context."""
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # transformers' guard against 0 / 0
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    wavelengths = _wavelengths(rope, head_dim)
    return 1.0 / (rope.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep
