"""Rotary position embedding (RoFormer, Su et al. 2021): inverse frequencies and the cos/sin table.

The variants follow transformers' `modeling_rope_utils` in formula and in fp32 rounding order, so that a table equals
the one that a model was run with there: linear (position interpolation, Chen et al. 2023), llama3 (Llama 3.1's
wavelength bands) and yarn (Peng et al. 2023).
"""

import math

import torch
from torch import Tensor

from minirt.modeling.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """The angle per position of each channel pair, [head_dim / 2] fp32 on the CPU."""
    frequencies = 1.0 / _wavelengths(rope, head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, head_dim)
    return frequencies


def rope_table(rope: RopeConfig, head_dim: int, length: int, device: torch.device | str = "cpu") -> Tensor:
    """cos | sin of every position below `length` → [length, head_dim] fp32, times `rope.attention_factor`.

    Columns up to head_dim / 2 hold the cosines of the channel pairs (d, d + head_dim / 2), the others their sines.
    The angle is the fp32 product of position and inverse frequency, as in transformers.
    """
    positions = torch.arange(length, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)
    # Computed on the CPU whatever the device: every device then reads the same bits.
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor).to(device)


def _wavelengths(rope: RopeConfig, head_dim: int) -> Tensor:
    """theta^(2i / D) of each channel pair i: its wavelength over 2π, unscaled."""
    return rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Short wavelengths stay, long ones are slowed by `factor`, those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    longest, shortest = (rope.original_max_position / f for f in (rope.low_freq_factor, rope.high_freq_factor))
    slowed = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    blend = rope.original_max_position / wavelengths - rope.low_freq_factor
    blend = blend / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * slowed / rope.factor + blend * slowed
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, blended, slowed)


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """NTK-by-parts: pairs that turn more than beta_fast times stay, fewer than beta_slow are slowed, a ramp between."""

    def dimension(turns: float) -> float:
        """The (fractional) dimension that turns so often over the original context."""
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
