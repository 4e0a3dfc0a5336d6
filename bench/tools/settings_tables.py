"""The tables of settings in docs/python-api.md, from the records of `minirt.settings`.

python bench/tools/settings_tables.py     writes the page; needs no PyTorch, no Triton and no GPU

A table is the text between `<!-- CLASS -->` and `<!-- end of CLASS -->`. A test compares the page with the records.
"""

from pathlib import Path

from minirt import LoadOptions, SamplingParams, StructuredOutputsParams
from minirt.settings import settings_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python-api.md"


def table(kind: type) -> str:
    """Names, defaults and meanings of a class's settings."""
    rows = [("field", "default", "meaning"), ("---", "---", "---")]
    for name, record in settings_of(kind).items():
        default = f'"{record.default}"' if isinstance(record.default, str) else record.default
        rows.append((f"`{name}`", f"`{default}`", record.text.replace("|", "\\|")))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def render(text: str) -> str:
    """The text of the page with its tables made again."""
    for kind in (LoadOptions, SamplingParams, StructuredOutputsParams):
        start, end = f"<!-- {kind.__name__} -->\n", f"<!-- end of {kind.__name__} -->"
        before, _, rest = text.partition(start)
        text = f"{before}{start}{table(kind)}{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
