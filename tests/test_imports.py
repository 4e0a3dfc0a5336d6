"""Who may import whom, read from the syntax trees. Catches a floor that reaches up, a cycle, and slow or stray imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = [
    {"kernels", "batch", "errors", "usage", "progress", "staging", "garbage"},
    {"sampling", "config", "rope", "kv_cache", "quantize", "linear", "tokenizer", "hub"},
    {"sampler"},
    {"layers", "scheduler"},
    {"models", "graph"},
    {"cuda_graphs", "weights"},
    {"runner"},
    {"engine"},
    {"choose", "completion"},
    {"generator"},
    {"evaluation"},
    {"bench"},
    {"cli"},
]
# Files of one floor that build on each other, on purpose.
SAME_FLOOR = {("kernels", "errors"), ("batch", "errors"), ("rope", "config"), ("linear", "quantize"), ("kv_cache", "quantize")}
FORBIDDEN = {"transformers", "gguf", "scipy", "hypothesis", "pytest", "numpy", "accelerate"}


def runtime_files():
    for folder, package in (
        ("minirt", "minirt"),
        ("models", "minirt.models"),
        ("kernels", "minirt.kernels"),
        ("bench", "minirt.bench"),
    ):
        for path in (ROOT / folder).rglob("*.py"):
            if "recipe" in path.parts:  # a script that is not installed
                continue
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield path, ".".join((package, *parts)).removesuffix(".__init__")


def imports(path, module):
    """(imported module, whether at the top of the file) for every import outside `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(n)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for n in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            if node.module in ("minirt", "minirt.kernels", "minirt.models"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


def unit(module):
    """The part of the house that a module belongs to: minirt.layers.mlp → layers, minirt.cli_bench → cli."""
    part = module.split(".")[1] if "." in module else "minirt"
    return "cli" if part.startswith("cli_") else part


def test_floors():
    level = {name: i for i, floor in enumerate(FLOORS) for name in floor}
    for path, module in runtime_files():
        here = unit(module)
        if here == "minirt":
            continue
        assert here in level, f"{path} stands on no floor"
        for target in imports(path, module):
            if target.split(".")[0] != "minirt" or unit(target) in (here, "minirt"):
                continue
            there = unit(target) if unit(target) in level else "generator"  # a public name of the package itself
            below = level[there] < level[here] or (here, there) in SAME_FLOOR
            assert below, f"{module} imports {target}, which is not below it"


def test_outsiders():
    for path, module in runtime_files():
        names = {name.split(".")[0] for name in imports(path, module)}
        assert not names & FORBIDDEN, f"{path} imports {names & FORBIDDEN}"
        assert "tests" not in names
        if unit(module) != "kernels":
            assert "triton" not in names, f"{path} imports triton"


def test_models_are_small_and_files_readable():
    for path, module in runtime_files():
        lines = len(path.read_text().splitlines())
        assert lines <= 450, f"{path} has {lines} lines"
        if unit(module) == "models" and path.stem in ("llama", "qwen2", "qwen3", "mistral"):
            assert lines < 80


def test_no_guard_is_an_assert():
    """Under python -O an assert is gone; kernels may use tl.static_assert."""
    for path, _ in runtime_files():
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert), f"{path}:{node.lineno}"


@pytest.mark.parametrize("code", ["import minirt", "import minirt.models", "from minirt.cli import cli"])
def test_light_imports(code):
    """The import and --help must not pay for torch, Triton, tokenizers or the Hub client."""
    heavy = ["torch", "triton", "tokenizers", "huggingface_hub", "jinja2", "rich", "transformers"]
    script = f"import sys; {code}; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_eager_needs_no_triton():
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import json, torch; from minirt import models; from minirt.graph import Model\n"
        "config = models.preset('SmolLM2-135M').config\n"
        "print(len(Model(config, models.build(config)).layers))"
    )
    out = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert out.stdout.strip() == "63", out.stderr
