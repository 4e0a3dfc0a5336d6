"""`InBlocks`: a choice of formats. `loads_alike`: whether a checkpoint gives the same weights on a GPU as on the CPU.

The CPU pins no buffer and runs no kernel.
"""

from pathlib import Path
from typing import Any

import torch

from minirt import LoadOptions
from minirt.loading.load import load
from minirt.modeling.formats import FormatChoice, StoredFp8Blocks


class InBlocks(FormatChoice):
    """Every linear but the head in FP8, with a scale for each block of 128 × 128."""

    def format_of(self, modules: Any, *, head: bool, tied: bool) -> StoredFp8Blocks | None:
        return None if head else StoredFp8Blocks()


def loads_alike(folder: Path, quantization: str | None = None) -> int:
    """Compare all weights bit for bit, NaN for NaN. Returns how many of them are quantized on both devices."""
    options = {"model": folder, "dtype": "bfloat16", "quantization": quantization}
    models = [load(LoadOptions(device=device, **options)).model for device in ("cpu", "cuda")]
    compared = 0
    for cpu, gpu in zip(*(model.parameters() for model in models), strict=True):
        if cpu.format != gpu.format:
            continue  # with --fp8, small weights stay in 16 bits on a GPU
        for name in ("weight", "scale", "bias"):
            expected, found = getattr(cpu, name, None), getattr(gpu, name, None)
            assert (expected is None) == (found is None)
            if expected is not None:
                exact = expected.float() if expected.dtype.is_floating_point else expected
                torch.testing.assert_close(found.cpu().to(exact.dtype), exact, rtol=0, atol=0, equal_nan=True)
        compared += cpu.format is not None
    return compared
