"""The GEMM of `gemm.py` for Hopper (compute capability 9.0): persistent programs whose warps have different roles.

One warp fetches tiles by TMA, two or three groups of four warps multiply, each 64 rows of a tile: fetching goes on while the
groups scale, activate and store. It takes Gluon, since Triton's own pipeline lets all warps wait for each other at every step.

A tile has 128 or 192 rows (up to 192 tokens then take one pass over the weights, up to 384 two) and a pair of strips of columns:
neighbours or, for a gated activation, a strip of gate and the same strip of up. A second pair of narrower strips gives the widths
between powers of two with which whole rounds of tiles come out even.

Where few tiles would leave processors idle, or be so narrow that reading from L2 takes longer than multiplying, K is split in two
parts: both programs of a tile write their sums to the workspace, and the second to arrive adds the first one's to its own.

Hopper's tensor cores add fp8 products in about 14 bits. So every 1024 or 2048 of K the sums are set aside: in fp32, or, where
registers do not suffice, in fp16, divided by what keeps the largest possible sum finite.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels import gemm_hopper_epilogue, gemm_hopper_kernel
from minirt.kernels.common import Peaks, Workspace, capability, cdiv, launch_options, processors, shared_limit
from minirt.kernels.hopper import described
from minirt.kernels.tuning import Tunable, bucket, remembered

_ROWS = 128  # of a tile of two groups of warps: 64 for each
_ROWS_OF_THREE = 192
_ROW_BYTES = 128  # of K in a step: what one swizzle of TMA spans
_LARGEST = 448  # of float8_e4m3fn
_FINE = 512  # tokens up to which every number of tiles of rows has a configuration of its own
_LONGEST_WHOLE = 24  # steps in K: fewer are not worth splitting
# Linear layers of fewer tokens are for `gemm_small`. Such a bound is one of the regimes that warm-up knows: 64 or 128, plus 1.
LEAST_TOKENS = 65
# Columns of the two pairs of strips; with a gated activation, half of them are of gate.
WIDTHS = ((256, 0), (128, 64), (128, 16), (128, 0), (64, 32), (64, 16), (64, 0))
WIDTHS_OF_THREE = ((128, 128), *WIDTHS[1:])  # for three groups: sums of a single pair of 256 do not fit in their registers


@dataclass(frozen=True)
class HopperConfig:
    """Columns of both pairs of strips of a tile (`more` may be 0), tiles on their way, steps in K before sums are set aside
    (0: never), how many programs share the tiles, the parts of K, 1 or 2, and the groups of warps, 2 or, with K whole, 3."""

    width: int
    more: int
    num_stages: int
    promote: int
    programs: int
    split: int = 1
    groups: int = 2


TUNABLE = Tunable("gemm_hopper", HopperConfig, (__file__, gemm_hopper_kernel.__file__, gemm_hopper_epilogue.__file__))


def _pieces(width: int, more: int, groups: int, itemsize: int, residual: bool) -> tuple[int, int]:
    """Columns of outputs of either pair that are stored at once: in fp32 no more than one swizzle of TMA spans, which leaves room
    for tiles, and as few where the tiles are largest; of a residual, which comes in the same places, whole strips."""
    narrow = itemsize == 4 or (groups == 3 and width + more > 144 and not residual)
    most = _ROW_BYTES // 4 if narrow else width
    return min(width // 2, most), min(more // 2, most)


def config_for(
    width: int, more: int, K: int, itemsize: int, residual: bool, programs: int, out_itemsize: int = 2, split: int = 1,
    groups: int = 2,
) -> HopperConfig:  # fmt: skip
    """What follows from the columns of both pairs of strips, the parts of K and the groups of warps."""
    columns = width + more
    pieces = sum(_pieces(width, more, groups, out_itemsize, residual))
    buffers = groups * 64 * out_itemsize * pieces * (2 if residual or out_itemsize == 4 else 1)
    stages = (shared_limit(90) - 512 - buffers) // ((64 * groups + columns) * _ROW_BYTES)
    steps = cdiv(K * itemsize, _ROW_BYTES)
    split = min(split, steps)  # no part is empty
    steps, most = cdiv(steps, split), 8 if columns <= 192 else 16
    promote = cdiv(steps, cdiv(steps, most)) if itemsize == 1 and steps > most else 0
    return HopperConfig(width, more, min(8, stages), promote, programs, split, groups)


def token_regime(T: int) -> int:
    """T as the configurations know it: padded to whole tiles up to 512, like the buckets of CUDA graphs, or to powers of two."""
    if T > _FINE:
        return 1 << (T - 1).bit_length()
    return _ROWS_OF_THREE if _ROWS < T <= _ROWS_OF_THREE else cdiv(T, _ROWS) * _ROWS


def may_split(T: int, width: int, more: int, N: int, K: int, itemsize: int, gated: bool, num_processors: int) -> bool:
    """Whether two programs a tile run at once, with enough of K each to pay, and the sums fit in registers and the workspace."""
    tiles, columns = cdiv(T, _ROWS) * cdiv(N, width + more), 144 if itemsize == 1 else 192
    long = K * itemsize >= _LONGEST_WHOLE * _ROW_BYTES
    return not gated and long and width + more <= columns and 2 * tiles <= num_processors


def candidates(
    T: int, N: int, K: int, itemsize: int, gated: bool, residual: bool, num_processors: int, out_itemsize: int = 2,
    splits: bool = False,
) -> list[HopperConfig]:  # fmt: skip
    """The configurations worth a thought for a shape with T tokens, a regime. N counts the outputs. `splits`: K may be split.

    Three groups of warps: for regimes that their tiles fill, where there is room for three tiles on their way; and for 16-bit
    values, because sums of fp8 products that are set aside leave no registers for a third group.
    """
    def config(widths: tuple[int, int], split: int, groups: int) -> HopperConfig:
        return config_for(*widths, K, itemsize, residual, num_processors, out_itemsize, split, groups)

    found = [config(widths, 1, 2) for widths in WIDTHS]
    if splits:
        able = [widths for widths in WIDTHS if may_split(T, *widths, N, K, itemsize, gated, num_processors)]
        found += [config(widths, 2, 2) for widths in able]
    if T % _ROWS_OF_THREE == 0 and itemsize == out_itemsize == 2:
        of_three = [config(widths, 1, 3) for widths in WIDTHS_OF_THREE]
        found += [c for c in of_three if c.num_stages >= 3]
    return found


def predicted(c: HopperConfig, T: int, N: int, K: int, itemsize: int, gated: bool) -> float:
    """Microseconds, in a model fitted to measurements on an H200 (bench/LOG.md): of a step in K, a round of tiles, and a split.

    What splits gained and lost put their price at 5.5 to 8. Steps of three groups: from what these took, in proportion to two.
    """
    columns = c.width + c.more
    tiles = cdiv(T, 64 * c.groups) * cdiv(N, columns // (2 if gated else 1))
    step = 0.08 + 0.002 * c.width + (0.065 + 0.0013 * c.more if c.more else 0.0)
    step = step if c.groups == 2 else 1.7 * step - 0.055
    steps, rounds = cdiv(K * itemsize, _ROW_BYTES), cdiv(tiles * c.split, c.programs)
    round_price, split_price = 1.5 if columns <= 192 else 3.0, 0.0 if c.split == 1 else 7.0
    return rounds * (cdiv(steps, c.split) * step + round_price) + split_price


def choose_config(
    T: int, N: int, K: int, itemsize: int, gated: bool, residual: bool, num_processors: int, out_itemsize: int = 2,
    splits: bool = False,
) -> HopperConfig:  # fmt: skip
    """The candidate that is predicted to take the least time: of T only its regime counts."""
    T = token_regime(T)
    found = candidates(T, N, K, itemsize, gated, residual, num_processors, out_itemsize, splits)
    return min(found, key=lambda c: predicted(c, T, N, K, itemsize, gated))


@remembered
def configured(
    device: torch.device, tokens: int, N: int, K: int, itemsize: int, gated: bool, residual: bool, out_itemsize: int,
    splits: bool,
) -> HopperConfig:  # fmt: skip
    """The configuration that was tuned for a shape with `tokens`, a regime, or else the rule's."""
    facts = {"N": N, "K": K, "itemsize": itemsize, "gated": gated, "residual": residual}
    tuned = TUNABLE.find(device, bucket(T=tokens, **facts)) if out_itemsize == 2 else None
    if tuned is not None and (splits or tuned.split == 1):
        return tuned
    return choose_config(tokens, N, K, itemsize, gated, residual, processors(device), out_itemsize, splits)


def suits(x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor) -> bool:
    """Whether TMA can move the operands: rows and addresses aligned to 16 bytes; a residual of 16 bits, like the output."""
    ends = [out] if residual is None else [out, residual]
    aligned = all(t.data_ptr() % 16 == 0 and t.shape[1] * t.element_size() % 16 == 0 for t in (x, weight, *ends))
    fits = residual is None or (residual.dtype == out.dtype and out.element_size() == 2)
    return aligned and x.element_size() <= 2 and fits


def takes(x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor) -> bool:
    """Whether this is the kernel for a linear layer: LEAST_TOKENS or more, on Hopper, and operands that `suits`."""
    return x.shape[0] >= LEAST_TOKENS and capability(x.device) == 90 and suits(x, weight, residual, out)


def gemm_hopper(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    activation: str | None,
    scale: Tensor | None,
    x_scale: Tensor | None,
    config: HopperConfig | None = None,
    workspace: Workspace | None = None,
    pdl: bool = False,
    peaks: Peaks | None = None,
) -> None:
    """`gemm`, or `gemm_gated` with an activation, of operands that `suits` and that fit each other; T is at least 1.

    Without a workspace K is not split. `peaks`: each row's largest value of every tile goes there, without a residual, an
    activation and a split.
    """
    (T, K), N = x.shape, out.shape[1]
    gated = activation is not None
    facts = (N, K, x.element_size(), gated, residual is not None, out.element_size(), workspace is not None and peaks is None)
    c = config or configured(x.device, token_regime(T), *facts)
    tiles_n = cdiv(N, (c.width + c.more) // (2 if gated else 1))
    tiles = cdiv(T, 64 * c.groups) * tiles_n
    sums, counters, values, needed = None, None, None, None
    if peaks is not None:
        if gated or residual is not None or c.split > 1 or peaks.values.shape[1] < tiles_n:
            expected, found = f"a plain product, {tiles_n} places", f"{c}, {peaks.values.shape[1]} places"
            raise InputError("no peaks of this product", where="peaks", expected=expected, found=found)
        values, needed, peaks.parts = peaks.values, peaks.logits_needed, tiles_n
    if c.split > 1:
        if c.groups > 2:
            raise InputError("K is split for two groups of warps only", where="config", found=c)
        if workspace is None:
            raise InputError("missing", where="workspace", expected="room for the sums of a split K")
        sums, counters = workspace.sums(tiles * 2 * _ROWS * (c.width + c.more)), workspace.counters(2 * tiles)
    block_k = _ROW_BYTES // x.element_size()
    operands = [described(weight, n // 2, block_k) if n else None for n in (c.width, c.more)]
    pieces = _pieces(c.width, c.more, c.groups, out.element_size(), residual is not None)
    for tensor in (residual, out):
        operands += [described(tensor, 64, n) if n and tensor is not None else None for n in pieces]
    in_place = residual is not None and residual.data_ptr() == out.data_ptr()  # then no row may be computed twice
    # Sums of fp8 products are at most _LARGEST² · K, and fp16 holds 65504.
    halvings = max(0, math.ceil(math.log2(_LARGEST**2 * K / 65504))) if c.width + c.more > 192 else 0
    gemm_hopper_kernel._hopper_kernel[(min(tiles * c.split, c.programs),)](
        described(x, _ROWS if T > _ROWS and c.groups == 2 else 64, block_k), *operands, x_scale, scale, bias, sums, counters,
        values, needed, 0 if peaks is None else peaks.values.stride(0), T, N, tiles, tiles_n, K=K, ACTIVATION=activation,
        STAGES=c.num_stages, SHIFT=not in_place, PROMOTE=c.promote, SCALE=2.0**halvings, SPLIT=c.split, GROUPS=c.groups,
        **launch_options(4, 1, pdl),
    )  # fmt: skip
