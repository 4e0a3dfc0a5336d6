"""The FP8 formats: `float8_e4m3fn` weights with one fp32 scale per output channel, and KV pages with one per token and head."""

from dataclasses import dataclass

import torch

from minirt.errors import ConfigError

FP8 = torch.float8_e4m3fn
CHUNK = 1 << 22  # weights quantized at a time; quantization needs 9 temporary bytes per weight


@dataclass(frozen=True)
class Quantization:
    """Which weights are quantized: every linear of the attention and MLP layers, and optionally the LM head.

    `head` None quantizes the head unless it is tied to the embedding; a tied head stays in 16 bits. Small models tie it, and
    rounding it harms SmolLM2-135M more than rounding all other linears (bench/results/cpu-fp8-quality.jsonl). A quantized
    copy of it would also take memory.

    The scale of a row is its largest magnitude divided by 448. Scales that minimize the error of the weights changed the error
    of the outputs by only about 2%, because the error of e4m3 is relative to each value. Only methods that use the layer's
    inputs could do better.
    """

    format: str
    head: bool | None = None

    def __post_init__(self) -> None:
        if self.format != "fp8":
            raise ConfigError("unknown quantization", where="quantization", expected="fp8", found=repr(self.format))
        if not isinstance(self.head, bool | None):
            expected = "True, False or None"
            raise ConfigError("not an acceptable value", where="quantize_head", expected=expected, found=repr(self.head))

    def covers_head(self, tied: bool) -> bool:
        """Whether the LM head is quantized. `tied`: the head uses the embedding's weights."""
        return not tied if self.head is None else self.head
