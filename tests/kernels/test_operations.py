"""The table of operations.

Catches an entry that names nothing, a public function that is missing or has another name for type
checkers, an operation that `minirt bench kernels` leaves out, and a page that is older than the table.
"""

import ast
import subprocess
import sys
from importlib import import_module

import pytest
from support.package import ROOT

from minirt import kernels
from minirt.bench.kernels.benchmark import BENCHMARKS
from minirt.bench.tools import kernel_pages
from minirt.kernels.operations import EXPORTED, HELPERS, OPERATIONS

PARTS = {"rope_paged_attention_decode": {"paged_attention_decode"}, "route": {"router_logits"}}  # measured with, or as, the other


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_place_exists(name):
    operation = OPERATIONS[name]
    assert callable(operation.function)
    assert callable(operation.eager)
    assert operation.cases is None or operation.find(operation.cases)
    for place in (operation.cost, operation.check, operation.launch, operation.fake):
        assert place is None or callable(operation.find(place))


def test_a_reference_is_in_the_nearest_file_of_that_name():
    """Unless the table says where it is."""
    for name, module in {
        "rms_norm": "reference", "norm_linear": "reference", "mixture_residual": "reference",
        "paged_attention_decode": "attention.reference", "draft_input": "speculative.reference", "derive": "step.table",
    }.items():  # fmt: skip
        assert OPERATIONS[name].eager.__module__ == f"minirt.kernels.{module}"


def test_the_package_exports_the_table():
    """At run time, and for type checkers."""
    assert kernels.__all__ == sorted(EXPORTED)
    for name, module in EXPORTED.items():
        assert getattr(kernels, name) is getattr(import_module(f"minirt.kernels.{module}"), name)
    assert not set(HELPERS) & set(OPERATIONS)
    with pytest.raises(AttributeError, match=r"'minirt\.kernels' has no attribute 'gemm'"):
        _ = kernels.gemm
    block = next(node for node in ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body if isinstance(node, ast.If))
    typed = {alias.asname: node.module for node in block.body for alias in node.names if alias.asname == alias.name}
    assert {*HELPERS, "norm_linear"} <= set(typed)
    assert typed.items() <= {name: f"minirt.kernels.{module}" for name, module in EXPORTED.items()}.items()


def test_an_operation_is_not_named_like_its_module():
    """`from minirt.kernels import norm` must be the module, also after the function was imported."""
    assert [name for name in EXPORTED if (ROOT / "kernels" / f"{name}.py").exists()] == []


def test_importing_the_table_imports_neither_triton_nor_torch():
    done = subprocess.run(
        [sys.executable, "-c", "import sys, minirt.kernels.operations; print({'torch', 'triton'} & set(sys.modules))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "set()\n"


def test_every_operation_with_a_cost_is_measured():
    measured = {benchmark.operation for benchmark in BENCHMARKS.values()}
    assert measured <= set(OPERATIONS)
    assert measured | set().union(*PARTS.values()) == {name for name, entry in OPERATIONS.items() if entry.cost is not None}
    assert set(PARTS) <= measured


def test_the_pages_are_those_of_the_tables():
    """`python bench/tools/kernel_pages.py` writes them."""
    for name, (page, _) in kernel_pages.BLOCKS.items():
        text = page.read_text(encoding="utf-8")
        assert kernel_pages.render(text) == text
        assert f"<!-- end of {name} -->" in text
