"""FP8 weights: `float8_e4m3fn` values with one fp32 scale for each output channel (a row of the weight)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from minirt.errors import ConfigError

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # the largest finite value; the format has NaN and no infinity
CHUNK = 1 << 22  # weights quantized at once: what this needs besides is 9 bytes a weight


@dataclass(frozen=True)
class Quantization:
    """Which weights are quantized: every linear of the attention and MLP layers, and the LM head unless `head` is False."""

    format: str
    head: bool = True

    def __post_init__(self) -> None:
        if self.format != "fp8":
            raise ConfigError("unknown quantization", where="quantization", expected="fp8", found=repr(self.format))


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of `weight` [N, K], any float → values [N, K] e4m3 and scales [N] fp32, so that values · scale ≈ weight.

    The scale maps a row's largest finite magnitude to 448 and is 1 for a row of zeros. NaN and infinities become NaN (and do not
    count for the scale), so that they show in the logits instead of turning into numbers. Nothing syncs.
    """
    wide = weight.float()
    finite = torch.isfinite(wide)
    peak = torch.where(finite, wide, 0).abs().amax(1)
    scale = torch.where(peak > 0, peak / FP8_MAX, 1.0).clamp(min=torch.finfo(torch.float32).tiny)
    # Rounding may carry the quotient past 448, which the cast would turn into NaN.
    values = (wide / scale.unsqueeze(1)).clamp(-FP8_MAX, FP8_MAX)
    return torch.where(finite, values, torch.nan).to(FP8), scale
