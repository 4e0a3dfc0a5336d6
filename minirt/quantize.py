"""What is kept as FP8: `float8_e4m3fn` weights with an fp32 scale for each output channel, KV pages with one for each token
and head."""

from dataclasses import dataclass

import torch

from minirt.errors import ConfigError

FP8 = torch.float8_e4m3fn
CHUNK = 1 << 22  # weights quantized at once: what this needs besides is 9 bytes a weight


@dataclass(frozen=True)
class Quantization:
    """Which weights are quantized: every linear of the attention and MLP layers, and the LM head unless `head` is False."""

    format: str
    head: bool = True

    def __post_init__(self) -> None:
        if self.format != "fp8":
            raise ConfigError("unknown quantization", where="quantization", expected="fp8", found=repr(self.format))
