"""`Regime`: the sizes for which an operation launches one kernel, declared once, in the operation's dispatch module.

A dispatch module has a table of regimes for each operation. Dispatch follows it, warm-up runs a step in every regime
(`representatives`), the buckets of CUDA graphs end where regimes and their padding end (`next_end`), and `minirt tune` and the
tests read it. A new regime in a table is therefore warmed up and captured without another edit.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Literal, TypeVar

Axis = Literal["tokens", "sequences", "prompts"]
_NAMES = {  # of each operation's table, in its dispatch module. All regimes of a table are on one axis.
    "linear.dispatch": ("REGIMES", "EARLY"),
    "quantize": ("REGIMES",),
    "attention.dispatch": ("DECODE", "FEW", "PREFILL", "PREFILL_SEQUENCES", "PARTIAL"),
    "attention.rope_write": ("REGIMES",),
    "gated_delta.dispatch": ("DECODE", "CHUNK", "CHUNK_PROMPTS"),
    "moe.dispatch": ("REGIMES", "ROUTER"),
}
TABLES = [(f"minirt.kernels.{module}", name) for module, names in _NAMES.items() for name in names]


@dataclass(frozen=True)
class Limits:
    """What a kernel computes. What is not declared goes to a later regime of the table.

    Args:
        formats: of the weight, or of x where there is no weight: "fp16" (16 bits, as x), "fp32", "fp8" with scales of rows,
            "fp8_blocks", "int4" with 16-bit activations, "int4_fp32" with 32-bit ones. Of experts also "fp8_fp32" and
            "fp8_blocks_fp32", with 32-bit activations; "fp8" and "fp8_blocks" are then with 16-bit ones.
        norm: whether it normalizes x itself.
        row_maxima: whether it stores row maxima of logits.
        alignment: bytes of which the addresses and the rows of x and of the weight must be multiples; 1: any.
    """

    formats: tuple[str, ...]
    norm: bool = False
    row_maxima: bool = False
    alignment: int = 1


@dataclass(frozen=True)
class AttentionLimits:
    """What a kernel of attention, or of RoPE and KV write, computes.

    Args:
        formats: of the KV pages: "fp16" (16 bits, as the heads), "fp32", "fp8" with 16-bit heads, "fp8_fp32" with 32-bit ones.
        raw: whether it takes raw heads, turns them and, in decode steps, writes K and V. If not, it takes q. None: either.
        head_dims: channels of a head.
        page_size: tokens of the smallest page. Larger ones have a power of two times as many.
        group: the most query heads that share a KV head; None: any number.
        tile_queries: the most query heads of 128 channels of K: of a head of 128, or of two of 64. None: any number.
        split: the most tokens of a KV split, which have a power of two times 64; None: any number.
        alignment: bytes of which the addresses of heads, pages, their scales and the output must be multiples; 1: any.
        turned_v: whether it normalizes raw v, or takes k for it.
    """

    formats: tuple[str, ...]
    head_dims: tuple[int, ...]
    raw: bool | None = None
    page_size: int = 1
    group: int | None = None
    tile_queries: int | None = None
    split: int | None = None
    alignment: int = 1
    turned_v: bool = True


@dataclass(frozen=True)
class SumOrder:
    """The order in which a kernel adds the products of one output.

    No kernel adds up values of two rows of x, so a row of the output does not depend on the values of other rows; in attention,
    not on those of other sequences.

    Args:
        k: how sums along K, in attention along the cached tokens, are added. "steps": one MMA after the other, in ascending
            order; "warps": each warp a part of K in such steps, then the parts; "threads": each thread the columns that it loads,
            then a tree of threads.
        splits: whether several programs may each compute a part of K. The parts are added in their order.
        by_tokens: whether the order depends on the number of tokens of the step, within the regime: through the split, or the
            length of a step in K. In attention: on the number of sequences, or of a sequence's new tokens.
        invariant: whether, with an invariant `Workspace`, it has the order that all kernels of the table have then, for any
            number of rows: products in ascending K, in parts of `product.part_of` elements, those of experts and of the router
            in parts of one length, attention in KV splits.
        accumulator: of the sums. "fp32"; "fp32 steps": for FP8, whose MMA keeps fewer bits, steps in K are added in fp32.
    """

    k: Literal["steps", "warps", "threads"]
    splits: bool = False
    by_tokens: bool = False
    accumulator: Literal["fp32", "fp32 steps"] = "fp32"
    invariant: bool = False


@dataclass(frozen=True, eq=False)  # equal only to itself, so that a table of regimes is hashed in no time
class Regime:
    """Sizes from `first` to `last` of a step for which an operation launches one kernel.

    Args:
        kernel: the kernel's name.
        axis: what `size` counts: the step's tokens, its sequences, or its prompts. The prompts are its tokens divided by
            `max_query_len`, rounded: as many prompts of equal length. In CUDA graphs, the bound of one prompt is all tokens.
        first, last: the smallest and the largest size; `last` None: no limit.
        variant: size → the largest size that launches the same compiled kernel (None: no limit). None: one kernel for the regime.
        padded: size → the size that the kernel pads it to, at the same cost. None: it does not pad.
        capability: the only compute capability that it is for, such as 90; None: any. Warm-up and buckets use it on every GPU.
        limits: what the kernel computes. None: not declared. Dispatch chooses by them: of linear layers, by the weight's format.
        sums: the order in which it adds. None: not declared, or it adds nothing.
    """

    kernel: str
    axis: Axis
    first: int
    last: int | None = None
    variant: Callable[[int], int | None] | None = None
    padded: Callable[[int], int] | None = None
    capability: int | None = None
    limits: Limits | AttentionLimits | None = None
    sums: SumOrder | None = None

    def covers(self, size: int, capability: int | None = None) -> bool:
        """Whether `size` is in the regime, and the regime is for this compute capability (None: any)."""
        fits = self.first <= size and (self.last is None or size <= self.last)
        return fits and (self.capability is None or capability is None or self.capability == capability)

    def variant_end(self, size: int) -> int | None:
        """The largest size that launches the same compiled kernel as `size`; None: no limit."""
        return self.variant(size) if self.variant is not None else self.last


def up_to(*ends: int) -> Callable[[int], int | None]:
    """size → the first of `ends` that is not smaller; None: all are. For `Regime.variant`."""
    return lambda size: next((end for end in ends if end >= size), None)


RegimeKind = TypeVar("RegimeKind", bound=Regime)


@lru_cache(4096)
def covering(
    table: tuple[RegimeKind, ...], size: int, capability: int, format: str | None = None, invariant: bool = False
) -> tuple[RegimeKind, ...]:
    """The regimes of a table that cover a size on a compute capability. Cached: every launch asks.

    format: of the weight, as in `Limits.formats`: regimes that declare others are left out. None: any.
    invariant: only those with `SumOrder.invariant`.
    """
    regimes = (r for r in table if r.covers(size, capability) and (not invariant or (r.sums is not None and r.sums.invariant)))
    return tuple(r for r in regimes if format is None or r.limits is None or format in r.limits.formats)


@lru_cache
def operations(axis: Axis, modules: tuple[str, ...] = tuple(_NAMES)) -> list[list[Regime]]:
    """The regimes of each operation on an axis. Cached: every bucket asks."""
    tables = (getattr(import_module(f"minirt.kernels.{module}"), name) for module in modules for name in _NAMES[module])
    return [list(table) for table in tables if table[0].axis == axis]


def paired_operations() -> list[tuple[list[list[Regime]], list[list[Regime]]]]:
    """(by tokens, by sequences) for each dispatch module whose kernels depend on both."""
    pairs = ((operations("tokens", (module,)), operations("sequences", (module,))) for module in _NAMES)
    return [(tokens, sequences) for tokens, sequences in pairs if tokens and sequences]


def next_end(size: int, regimes: Iterable[Regime]) -> int | None:
    """The smallest size, `size` or larger, at which a regime or its padding ends; None if no regime ends."""
    ends = [end for regime in regimes if regime.covers(size) for end in (regime.last, regime.padded and regime.padded(size))]
    return min((end for end in ends if end is not None), default=None)


def representatives(limit: int, operations: Iterable[Sequence[Regime]], pick: Callable[[int, int], int]) -> list[int]:
    """Sizes up to `limit` that together launch every compiled kernel of every operation.

    `pick(first, last)` chooses a size from an interval of sizes that launch the same compiled kernels of an operation, unless a
    size that was chosen for another operation is in it.
    """
    sizes: set[int] = set()
    for regimes in operations:
        size = 1
        while size <= limit:
            ends = [regime.variant_end(size) for regime in regimes if regime.covers(size)]
            ends += [regime.first - 1 for regime in regimes if regime.first > size]
            last = min([limit, *(end for end in ends if end is not None)])
            if not any(size <= chosen <= last for chosen in sizes):
                sizes.add(pick(size, last))
            size = last + 1
    return sorted(sizes)
