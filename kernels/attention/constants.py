"""`Constants`: what a launch of an attention kernel compiles in."""

from typing import NamedTuple

from minirt.kernels.attention.operands import AttentionInput
from minirt.kernels.launch import next_power_of_2
from minirt.kernels.prepared import compile_time


@compile_time
class Constants(NamedTuple):
    """Sizes of heads and pages, and those of the following that a kernel needs; 0: it does not.

    Args:
        BLOCK_D: D, padded to a power of two. Channels from D on are zeros in registers, and are neither loaded nor stored.
        RAW: whether `heads` are raw. ROW: the distance of their rows. R: `Rope.channels`.
        BLOCK_M: rows of a tile: tokens, heads of a token, or both. BLOCK_N: tokens of K and V in a step.
        BLOCK_B: sequences that are searched at once.
        SPLIT: tokens of a KV split of decode attention. QUERIES: the most new tokens of a sequence there, so the partial results
            of a split.
        SHORTEST, PARTIAL: `shortest` and `partial` of an `AttentionInput`.
        GROUP: query heads that share a KV head.
        STEP: tokens of a step in an invariant step, of which a block of `prefill_sm90` may have two.
        INVARIANT: whether the order of sums is that of `AttentionInput.invariant`.
    """

    NQ: int
    NKV: int
    D: int
    PAGE_SIZE: int
    BLOCK_D: int
    RAW: bool = False
    ROW: int = 0
    R: int = 0
    BLOCK_M: int = 0
    BLOCK_N: int = 0
    BLOCK_B: int = 0
    SPLIT: int = 0
    SHORTEST: int = 0
    PARTIAL: int = 0
    QUERIES: int = 1
    GROUP: int = 1
    INVARIANT: bool = False
    STEP: int = 0

    @classmethod
    def of(
        cls, a: AttentionInput, BLOCK_M: int = 0, BLOCK_N: int = 0, BLOCK_B: int = 0, SPLIT: int = 0, SHORTEST: int = 0,
        PARTIAL: int = 0, QUERIES: int = 1, STEP: int = 0,
    ) -> "Constants":  # fmt: skip
        """The constants of a launch on these operands."""
        (_, Nq, D), (_, page_size, Nkv, _), raw, row, R = a.out.shape, a.pages.k.shape, False, 0, 0
        if a.rope is not None:
            raw, row, R = True, a.heads.stride(0), a.rope.channels
        return cls(
            Nq, Nkv, D, page_size, next_power_of_2(D), raw, row, R, BLOCK_M, BLOCK_N, BLOCK_B, SPLIT, SHORTEST, PARTIAL,
            QUERIES, Nq // Nkv, a.invariant, STEP,
        )  # fmt: skip
