"""What is kept as FP8: `float8_e4m3fn` weights with an fp32 scale for each output channel, KV pages with one for each token
and head."""

from dataclasses import dataclass

import torch

from minirt.errors import ConfigError

FP8 = torch.float8_e4m3fn
CHUNK = 1 << 22  # weights quantized at once: what this needs besides is 9 bytes a weight


@dataclass(frozen=True)
class Quantization:
    """Which weights are quantized: every linear of the attention and MLP layers, and the LM head.

    `head` None quantizes a head of its own and leaves a tied one in 16 bits: small models tie theirs, and rounding it costs
    SmolLM2-135M more than rounding all other linears; its copy would take memory, too (bench/results/cpu-fp8-quality.jsonl).

    The scale of a row is its largest magnitude over 448. Searching for one that minimizes the error of the weights changed the
    error of the outputs by about 2%, since e4m3 errs relative to each value; only knowing the inputs would help.
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
        """Whether the head is quantized; `tied`: its weights are the embedding's."""
        return not tied if self.head is None else self.head
