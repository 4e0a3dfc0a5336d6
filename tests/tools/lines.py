"""Lines of Python by room: code (no blank lines, comments or docstrings) and all.

python tests/tools/lines.py [REVISION]    prints a table of the working tree; with a git revision, beside that revision's

`tests/test_budget.py` bounds the code of each room.
"""

import ast
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TOP = ("minirt", "models", "kernels", "bench", "examples", "tests")
# The core: what one reads to know how a token is made. `minirt` stands for the files of that folder alone.
CORE = (
    "minirt", "minirt/engine", "minirt/step", "minirt/layers", "minirt/modeling", "minirt/loading", "minirt/speculative",
    "models",
)  # fmt: skip
ROOMS = (
    *CORE, "kernels", "minirt/adapters", "minirt/hooks", "minirt/parallel", "minirt/precompile", "minirt/profiling",
    "minirt/server", "minirt/text", "minirt/structured", "minirt/cli", "minirt/nn", "minirt/patching", "bench", "models/recipe",
    "examples", "tests",
)  # fmt: skip
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Lines(NamedTuple):
    code: int
    all: int


def count(source: str) -> Lines:
    """Lines of one module. A string over several lines is code, whatever its lines look like, unless it is a docstring."""
    lines = source.split("\n")
    code = {number for number, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")}
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            code.update(_lines(node))
        elif isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            documentation.update(_lines(node.body[0]))
    return Lines(len(code - documentation), len(lines) - 1)


def _lines(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def room(path: str) -> str:
    """The room of a module: its innermost folder that is one."""
    folder = path.rpartition("/")[0]
    while folder and folder not in ROOMS:
        folder = folder.rpartition("/")[0]
    if folder == "minirt" and path.count("/") > 1:  # a folder that is no room of its own
        raise ValueError(f"{path} is in no room of {Path(__file__).name}")
    return folder or "the top level"


def rooms(sources: dict[str, str]) -> dict[str, Lines]:
    counted = dict.fromkeys(ROOMS, Lines(0, 0))
    for path, source in sources.items():
        name, lines = room(path), count(source)
        before = counted.get(name, Lines(0, 0))
        counted[name] = Lines(before.code + lines.code, before.all + lines.all)
    return counted


def working_tree() -> dict[str, str]:
    """Text of each module by its path."""
    folders = [ROOT, *(Path(folder) for top in TOP for folder, _, _ in os.walk(ROOT / top))]  # links are not followed
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for folder in folders for file in folder.glob("*.py")}


def revision(name: str) -> dict[str, str]:
    archive = subprocess.run(["git", "archive", name], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        modules = [member for member in members if member.isfile() and member.name.endswith(".py")]
        return {module.name: members.extractfile(module).read().decode() for module in modules}


def table(columns: list[dict[str, Lines]]) -> str:
    def row(name: str, chosen: list[Lines]) -> str:
        return f"{name:24}" + "".join(f"{lines.code:9,}{lines.all:9,}" for lines in chosen)

    def total(names: tuple[str, ...]) -> list[Lines]:
        return [Lines(sum(c[n].code for n in names if n in c), sum(c[n].all for n in names if n in c)) for c in columns]

    names = tuple(columns[-1])
    lines = [" " * 24 + "     code      all" * len(columns)]
    lines += [row(name, [column.get(name, Lines(0, 0)) for column in columns]) for name in names]
    lines.append(row("the core", total(CORE)))
    lines.append(row("all but tests", total(tuple(name for name in names if name != "tests"))))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table([rooms(revision(name)) for name in sys.argv[1:]] + [rooms(working_tree())]))
