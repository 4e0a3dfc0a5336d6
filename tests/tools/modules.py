"""The tree of modules, each with the first line of its docstring: `python tests/tools/modules.py [FOLDER …]`."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("minirt", "models", "kernels", "bench")


def modules(*folders: str) -> list[Path]:
    return [path for folder in folders or FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def summary(path: Path) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    for module in modules(*sys.argv[1:]):
        print(f"{module.relative_to(ROOT).as_posix():45} {summary(module)}")
