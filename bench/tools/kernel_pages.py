"""The generated tables of docs/kernels.md and docs/design/regimes.md, from the tables of operations and of regimes.

python bench/tools/kernel_pages.py     writes the pages; needs Triton, no GPU

A block is the text between `<!-- NAME -->` and `<!-- end of NAME -->`. A test compares the pages with the tables.
"""

from importlib import import_module
from pathlib import Path

from minirt.bench.tools.cells import table, with_blocks
from minirt.kernels.operations import EXPORTED, OPERATIONS
from minirt.kernels.regimes import TABLES, Regime

DOCS = Path(__file__).resolve().parents[2] / "docs"


def functions() -> str:
    """The operations that `minirt.kernels` exports."""
    rows = [
        (f"`{operation.name}`", operation.what, "–" if operation.no_op else "yes") for operation in OPERATIONS.values()
        if operation.name in EXPORTED
    ]  # fmt: skip
    return table(("function", "computes", "op"), rows, left=3)


def _sizes(regime: Regime) -> str:
    if regime.last == regime.first:
        return str(regime.first)
    return f"from {regime.first}" if regime.last is None else f"{regime.first} to {regime.last}"


def regimes() -> str:
    """For which sizes of a step, which GPU and which formats each kernel is chosen, by what it declares."""
    rows = []
    for module, name in TABLES:
        place = f"{module.removeprefix('minirt.kernels.').removesuffix('.dispatch')} {name.removeprefix('REGIMES')}".strip()
        for regime in getattr(import_module(module), name):
            if regime.limits is not None:
                formats = " ".join(form for form in regime.limits.formats if not form.endswith("_fp32"))
                gpu = f"sm_{regime.capability}" if regime.capability else "any"
                rows.append((place, f"`{regime.kernel}`", gpu, f"{regime.axis} {_sizes(regime)}", formats))
    return table(("table", "kernel", "GPU", "step", "formats"), list(dict.fromkeys(rows)), left=5)


# Name of a block → its page, and what makes it.
BLOCKS = {"functions": (DOCS / "kernels.md", functions), "regimes": (DOCS / "design" / "regimes.md", regimes)}


def render(text: str) -> str:
    """The text of a page with its blocks made again."""
    return with_blocks(text, dict.fromkeys(BLOCKS, lambda name: BLOCKS[name][1]()))


if __name__ == "__main__":
    for page, _ in BLOCKS.values():
        page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")
