"""Lines of Python by room: code (no blank lines, comments or docstrings) and all.

python tests/tools/lines.py [REVISION]    prints a table of the working tree; with a git revision, beside that revision's

`tests/test_budget.py` bounds the code of each room.
"""

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# The core: what one reads to know how a token is made. `minirt` stands for the files of that folder alone.
CORE = (
    "minirt", "minirt/engine", "minirt/step", "minirt/layers", "minirt/modeling", "minirt/loading", "minirt/speculative",
    "models",
)  # fmt: skip
ROOMS = (
    *CORE, "kernels", "minirt/server", "minirt/text", "minirt/structured", "minirt/cli", "minirt/nn", "minirt/patching", "bench",
    "models/recipe", "examples", "tests",
)  # fmt: skip


class Lines(NamedTuple):
    code: int
    all: int


def count(source: str) -> Lines:
    """Lines of one module."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, False) is not None:
            text = node.body[0]
            skipped.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    code: set[int] = set()
    quiet = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in quiet:
            code.update(range(token.start[0], token.end[0] + 1))
    return Lines(len(code - skipped), source.count("\n"))


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
    command = ["git", "ls-files", "-co", "--exclude-standard", "*.py"]
    paths = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    paths = [path for path in paths if (ROOT / path).is_file() and not (ROOT / path).is_symlink()]
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in paths}


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
