"""The generated blocks of docs/kernels.md, from the tables of operations and of the linear layers' kernels.

python bench/tools/kernel_pages.py     writes the page; needs Triton, no GPU

A block is the text between `<!-- NAME -->` and `<!-- end of NAME -->`. A test compares the page with the tables.
"""

import inspect
import re
from pathlib import Path

from minirt.kernels.linear.dispatch import REGIMES
from minirt.kernels.operations import OPERATIONS, Operation
from minirt.kernels.regimes import Regime

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
        _row(_home(own), own.what, _codes(own.kernels), _codes(own.reference), "yes" if own.cost else "–")
        for own in OPERATIONS.values()
    ]
    return "\n".join([_row("operation", "what", "kernels", "reference", "measured"), _row(*["---"] * 5), *rows])


def _parameter(own: inspect.Parameter) -> str:
    return own.name if own.default is inspect.Parameter.empty else f"{own.name}={own.default!r}"


def signatures() -> str:
    """The functions with their parameters, without types."""
    lines = []
    for operation in OPERATIONS.values():
        found = inspect.signature(operation.function).parameters.values()
        names, starred = [], False
        for own in found:
            if own.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
                names.append("*")
                starred = True
            names.append(_parameter(own))
        lines.append(f"{operation.name}({', '.join(names)})")
    return "\n".join(["```text", *lines, "```"])


def _sizes(regime: Regime) -> str:
    if regime.last is None:
        return f"from {regime.first}"
    return str(regime.first) if regime.first == regime.last else f"{regime.first} to {regime.last}"


def linear_kernels() -> str:
    """What the kernels of the linear layers declare."""
    rows = []
    for own in REGIMES:
        limits, sums = own.limits, own.sums
        if limits is not None and sums is not None:
            formats = ", ".join(f"`{name}`" for name in limits.formats)
            limited = f"{own.capability / 10}" if own.capability else "any"
            yes = ["yes" if own else "–" for own in (limits.norm, limits.row_maxima, sums.splits, sums.by_tokens)]
            cells = (limited, _sizes(own), formats, *yes[:2], str(limits.alignment), sums.k, *yes[2:], sums.accumulator)
            rows.append(_row(f"`{own.kernel}`", *cells))
    head = (
        "kernel", "capability", "tokens", "formats", "norm", "row maxima", "alignment", "K by", "K is split", "order by tokens",
        "sums",
    )  # fmt: skip
    return "\n".join([_row(*head), _row(*["---"] * len(head)), *rows])


def ops() -> str:
    """The schemas of the ops, and why an operation has none."""
    schemas = [f"{own.name}{own.schema}" for own in OPERATIONS.values() if own.schema is not None]
    others = [f"- `{own.name}`: {own.no_op}" for own in OPERATIONS.values() if own.no_op is not None]
    return "\n".join(["```text", *schemas, "```", "", "Operations without an op:", "", *others])


BLOCKS = {"operations": operations, "signatures": signatures, "ops": ops, "linear kernels": linear_kernels}


def render(text: str) -> str:
    """The text of a page with its blocks made again."""

    def anew(match: re.Match[str]) -> str:
        return f"{match['start']}{BLOCKS[match['name']]()}\n{match['end']}"

    pattern = rf"(?P<start><!-- (?P<name>{'|'.join(BLOCKS)}) -->\n)(?:.*?\n)??(?P<end><!-- end of (?P=name) -->)"
    return re.sub(pattern, anew, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
