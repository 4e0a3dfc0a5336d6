"""The generated blocks of docs/kernels.md, from the tables of operations and of regimes.

python bench/tools/kernel_pages.py     writes the page; needs Triton, no GPU

A block is the text between `<!-- NAME -->` and `<!-- end of NAME -->`. A test compares the page with the tables.
"""

import inspect
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from minirt.bench.tools.cells import with_blocks
from minirt.kernels import quantize
from minirt.kernels.attention import dispatch as attention
from minirt.kernels.attention import rope_write
from minirt.kernels.linear import dispatch as linear
from minirt.kernels.moe import dispatch as moe
from minirt.kernels.operations import OPERATIONS, Operation
from minirt.kernels.regimes import AttentionLimits, Limits, Regime

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _codes(places: tuple[str, ...]) -> str:
    """Places of the table as code; references of `kernels.reference` by their name only."""
    return ", ".join(f"`{place.removeprefix('minirt.').replace(':', '.')}`" for place in places)


def _home(operation: Operation) -> str:
    return f"`{operation.name}`" if operation.exported else f"`{operation.module}.{operation.name}`"


def operations() -> str:
    """The table of operations."""
    rows = [
        _row(_home(one), one.what, _codes(one.kernels), _codes(one.reference), "yes" if one.cost else "–")
        for one in OPERATIONS.values()
    ]
    return "\n".join([_row("operation", "what", "kernels", "reference", "measured"), _row(*["---"] * 5), *rows])


def _parameter(one: inspect.Parameter) -> str:
    return one.name if one.default is inspect.Parameter.empty else f"{one.name}={one.default!r}"


def signatures() -> str:
    """The functions with their parameters, without types."""
    lines = []
    for operation in OPERATIONS.values():
        names, starred = [], False
        for one in inspect.signature(operation.function).parameters.values():
            if one.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
                names.append("*")
                starred = True
            names.append(_parameter(one))
        lines.append(f"{operation.name}({', '.join(names)})")
    return "\n".join(["```text", *lines, "```"])


def _sizes(regime: Regime) -> str:
    if regime.last is None:
        return f"from {regime.first}"
    return str(regime.first) if regime.first == regime.last else f"{regime.first} to {regime.last}"


def _names(formats: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in formats)


def _yes(value: bool) -> str:
    return "yes" if value else "–"


_ORDER = ("K by", "K is split", "order by tokens", "sums")


def _order(regime: Regime) -> tuple[str, ...]:
    sums = regime.sums
    return ("–",) * 4 if sums is None else (sums.k, _yes(sums.splits), _yes(sums.by_tokens), sums.accumulator)


def _table(head: tuple[str, ...], rows: Iterable[tuple[Regime, tuple[str, ...]]]) -> str:
    """A row for each kernel: where it runs, its limits, and the order of its sums."""
    head = ("kernel", "capability", *head, *_ORDER)
    lines = [
        _row(f"`{regime.kernel}`", f"{regime.capability / 10}" if regime.capability else "any", *cells, *_order(regime))
        for regime, cells in rows
    ]
    return "\n".join([_row(*head), _row(*["---"] * len(head)), *lines])


def _products(*tables: Sequence[Regime]) -> str:
    rows = []
    for regime in itertools.chain(*tables):
        limits = cast(Limits, regime.limits)
        cells = _sizes(regime), _names(limits.formats), _yes(limits.norm), _yes(limits.row_maxima), str(limits.alignment)
        rows.append((regime, cells))
    return _table(("tokens", "formats", "norm", "row maxima", "alignment"), rows)


def linear_kernels() -> str:
    """What the kernels of the linear layers declare."""
    return _products(linear.REGIMES)


def expert_kernels() -> str:
    """What the kernels of mixtures of experts declare, and the one that quantizes activations."""
    return _products(moe.REGIMES, moe.ROUTER, quantize.REGIMES)


def attention_kernels() -> str:
    """What the kernels of attention declare."""
    rows = []
    for regime in itertools.chain(attention.DECODE, attention.FEW, attention.PREFILL, attention.PARTIAL, rope_write.REGIMES):
        limits = cast(AttentionLimits, regime.limits)
        takes = "q or raw" if limits.raw is None else "raw" if limits.raw else "q"
        numbers = (limits.group, limits.tile_queries, limits.split)
        cells = (
            f"{regime.axis} {_sizes(regime)}", takes, _names(limits.formats), ", ".join(map(str, limits.head_dims)),
            str(limits.page_size), *("any" if number is None else str(number) for number in numbers), str(limits.alignment),
        )  # fmt: skip
        rows.append((regime, cells))
    head = ("step", "heads", "pages", "head sizes", "page from", "group", "queries of a tile", "split", "alignment")
    return _table(head, rows)


def ops() -> str:
    """The schemas of the ops, and why an operation has none."""
    schemas = [f"{one.name}{one.schema}" for one in OPERATIONS.values() if one.schema is not None]
    others = [f"- `{one.name}`: {one.no_op}" for one in OPERATIONS.values() if one.no_op is not None]
    return "\n".join(["```text", *schemas, "```", "", "Operations without an op:", "", *others])


BLOCKS = {
    "operations": operations, "signatures": signatures, "ops": ops, "linear kernels": linear_kernels,
    "expert kernels": expert_kernels, "attention kernels": attention_kernels,
}  # fmt: skip


def render(text: str) -> str:
    """The text of a page with its blocks made again."""
    return with_blocks(text, {name: lambda _, make=make: make() for name, make in BLOCKS.items()})  # type: ignore[misc]


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
