"""What the kernels compute that only GPUs of one compute capability have. Imports neither PyTorch nor Triton.

The tables of regimes read it, and `minirt plan`, which runs without Triton, too.
"""

from dataclasses import replace
from typing import NamedTuple

from minirt.kernels.attention.limits import ANY, AttentionLimits
from minirt.kernels.regimes import Limits

LONGEST = 256  # most tokens of a KV split in decode attention, because all its scores are kept
TILE_QUERIES = 8  # the most queries of an item of `decode_fp8_sm90`, and so of a narrow item's tile
_DENSE = ("fp16", "fp8", "fp8_blocks")
_ATTENTION = replace(ANY, formats=("fp16",), head_dims=(64, 128, 256), alignment=16)
_DECODE = replace(_ATTENTION, raw=True, split=LONGEST)


class Special(NamedTuple):
    """The kernels of one compute capability, by operation and name."""

    attention: dict[str, AttentionLimits]
    experts: dict[str, Limits]
    linear: dict[str, Limits]


SPECIAL = {
    90: Special(
        attention={
            "decode_fp8_sm90": replace(_DECODE, formats=("fp8",), head_dims=(64, 128), tile_queries=TILE_QUERIES, turned_v=False),
            "decode_sm90": _DECODE,
            "prefill_sm90": replace(_ATTENTION, head_dims=(64, 128, 256, 512)),
        },
        experts={
            "experts_int4_sm90": Limits(("int4",), alignment=16),
            "experts_sm90": Limits(_DENSE, alignment=16),
        },
        linear={
            "gemm_int4_sm90": Limits(("int4",), alignment=16),
            "gemm_int4_small_sm90": Limits(("int4",), norm=True),
            "gemm_sm90": Limits(_DENSE, row_maxima=True, alignment=16),
            "gemv_int4_sm90": Limits(("int4",), norm=True, alignment=16),
        },
    ),
}
