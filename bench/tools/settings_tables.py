"""The tables of settings in docs/python-api.md, from the records of `minirt.settings`.

python bench/tools/settings_tables.py     writes the page; needs no PyTorch, no Triton and no GPU

A table is the text between `<!-- CLASS -->` and `<!-- end of CLASS -->`. A test compares the page with the records.
"""

from pathlib import Path

from minirt import LoadOptions, SamplingParams, StructuredOutputsParams
from minirt.bench.tools.cells import table, with_blocks
from minirt.settings import settings_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python-api.md"


def settings(kind: type) -> str:
    """Names, defaults and meanings of a class's settings."""
    rows = []
    for name, record in settings_of(kind).items():
        default = f'"{record.default}"' if isinstance(record.default, str) else record.default
        rows.append((f"`{name}`", f"`{default}`", record.text.replace("|", "\\|")))
    return table(("field", "default", "meaning"), rows, left=3)


def render(text: str) -> str:
    """The text of the page with its tables made again."""
    kinds = {kind.__name__: kind for kind in (LoadOptions, SamplingParams, StructuredOutputsParams)}
    return with_blocks(text, dict.fromkeys(kinds, lambda name: settings(kinds[name])))


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
