"""The text of declarations: its schema, its checks in words, functions and inputs made of it.

Catches: a rule of the text that checks nothing, an error that names the wrong tensor or another size, an activation that one of
its places does not know.
"""

import inspect
import re

import pytest
import torch
from support.raising import raises
from torch.nn import functional as F

from minirt.kernels import norm_gate_up, reference
from minirt.kernels.activations import ACTIVATIONS, OF_CLASS, OF_HIDDEN_ACT
from minirt.kernels.checks import tensor_checker
from minirt.kernels.declaration import Declaration
from minirt.kernels.operations import OPERATIONS
from minirt.nn import functional

TEXT = (
    "x: [T, K: gate and up] activations rows apart, pages!: [P, 4, any] of x or fp8 with scales, starts: [T + 1] int32, n: int, "
    "scales?!: [P, ...] fp32 together with bias = None, bias?: [n * K] of x or fp32 any strides = None, *, flag: bool = False "
    "-> out: [T, K // 2] of x, other: like x"
)


def test_schema():
    schema = Declaration(TEXT).schema
    assert schema == (
        "(Tensor x, Tensor(a!) pages, Tensor starts, int n, Tensor(b!)? scales=None, Tensor? bias=None, *, bool flag=False) "
        "-> (Tensor, Tensor)"
    )
    torch._C.parse_schema(f"name{schema}")
    for wrong in ("x [T]", "x: [T] of x,y: int", "x: [T", "x: int = "):
        with pytest.raises(ValueError, match="not an argument"):
            _ = Declaration(wrong).arguments


def given(**changed):
    values = {"x": torch.zeros(3, 6), "pages": torch.zeros(2, 4, 9), "starts": torch.zeros(4, dtype=torch.int32), "n": 2}
    return values | changed


def test_what_the_text_says_is_checked():
    check = tensor_checker(Declaration(TEXT))
    scales, bias = torch.zeros(2, 5, 1), torch.zeros(12, dtype=torch.float32)
    eight = torch.zeros(2, 4, 9).to(torch.float8_e4m3fn)
    assert check(given()) == {"n": 2, "T": 3, "K": 6, "P": 2}
    check(given(x=torch.zeros(3, 8)[:, :6], out=torch.zeros(3, 3)))
    check(given(pages=eight, scales=scales, bias=torch.zeros(24)[::2]))
    check(given(x=torch.zeros(3, 6).half(), pages=eight, scales=scales, bias=bias))
    for changed, words in (
        ({"x": torch.zeros(3)}, r"^x: wrong shape; expected \[any, any\]; found \[3\]"),
        ({"x": torch.zeros(3, 5)}, r"^x: odd number of rows for gate and up; expected an even number; found 5"),
        ({"x": torch.zeros(3, 6).long()}, "^x: unsupported dtype; expected bfloat16, float16 or float32; found torch.int64"),
        ({"x": torch.zeros(6, 3).t()}, "^x: not contiguous"),
        ({"pages": torch.zeros(2, 3, 9)}, r"^pages: wrong shape; expected \[any, 4, any\]; found \[2, 3, 9\]"),
        ({"pages": torch.zeros(2, 9, 4).mT}, "^pages: not contiguous"),
        ({"pages": torch.zeros(2, 4, 9).half()}, "^pages: wrong dtype; expected torch.float32; found torch.float16"),
        ({"scales": scales, "bias": bias}, "^pages: wrong dtype; expected torch.float8_e4m3fn"),
        ({"pages": eight, "scales": scales}, "^scales, bias: only one of both is given; expected both or none"),
        ({"pages": eight, "scales": scales[1:], "bias": bias}, r"^scales: wrong shape; expected \[2, ...\]; found \[1, 5, 1\]"),
        ({"pages": eight, "scales": scales, "bias": bias[1:]}, r"^bias: wrong shape; expected \[12\]; found \[11\]"),
        ({"pages": eight, "scales": scales, "bias": bias.half()}, "^bias: wrong dtype; expected torch.float32 or torch.float32"),
        ({"starts": torch.zeros(3, dtype=torch.int32)}, r"^starts: wrong shape; expected \[4\]; found \[3\]"),
        ({"starts": torch.zeros(4)}, "^starts: wrong dtype; expected torch.int32"),
        ({"starts": torch.zeros(4, dtype=torch.int32, device="meta")}, "^starts: wrong device; expected cpu; found meta"),
        ({"starts": None}, "^starts: missing; expected a tensor"),
        ({"out": torch.zeros(3, 6)}, r"^out: wrong shape; expected \[3, 3\]; found \[3, 6\]"),
    ):  # fmt: skip
        raises(words, check, given(**changed))


def test_a_declared_function_is_the_op_with_leading_dimensions():
    """Its signature is that of the declaration; arguments by name or by position."""
    x, weight, residual = torch.randn(2, 3, 8), torch.randn(8), torch.randn(2, 3, 8)
    expected = reference.norm_residual(x, weight, 1e-5, residual)
    with torch.no_grad():
        assert torch.equal(functional.norm_residual(x, weight, 1e-5, residual), expected)
        strided = x.transpose(0, 1).contiguous().transpose(0, 1)
        assert torch.equal(functional.norm_residual(strided, weight, residual=residual, eps=1e-5), expected)
        raises(r"residual: wrong shape; expected the leading dimensions \[2, 3\] of y", functional.norm_residual, x, weight, 1e-5,
               residual[0])  # fmt: skip
        raises(r"rms_norm_quantize\(\) has no argument 'weight'", functional.rms_norm_quantize, x=x, error=TypeError)
        tokens = torch.tensor([1, 0])
        assert torch.equal(functional.embedding(table=x[0], tokens=tokens), x[0][tokens])
        values, scale = functional.quantize(x, blocks=True)
        assert (values.shape, scale.shape) == ((2, 3, 8), (2, 3, 1))
    raises("^weight: needs a gradient", functional.norm_residual, x, weight.requires_grad_(), 1e-5, residual)
    assert str(inspect.signature(functional.rms_norm_quantize)) == "(x, weight, eps, *, blocks=False)"
    assert "residual: [T, H] of y" in functional.norm_residual.__doc__


def test_every_op_has_a_function():
    assert [name for name, operation in OPERATIONS.items() if not operation.no_op and name != "norm_rope"] == [
        name for name in OPERATIONS if name != "norm_rope" and callable(getattr(functional, name, None))
    ]


def test_every_activation_is_known_everywhere():
    """Names of config.json and of classes give the formula of PyTorch, and no other name is taken for one of them."""
    x = torch.linspace(-3, 3, 64).view(1, 64)
    assert set(ACTIVATIONS) == set(reference.ACTIVATE) == set(OF_HIDDEN_ACT.values()) == set(OF_CLASS.values())
    theirs = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
    for name, function in theirs.items():
        assert torch.equal(reference.gated(x, name), function(x[:, :32]) * x[:, 32:])
    with pytest.raises(KeyError):
        reference.gated(x, "relu")


def test_an_unknown_activation_is_not_compiled(make):
    """Catches a kernel that takes any other name for one form of GELU."""
    x, weight = make(1, 16, dtype=torch.float32), make(8, 16, dtype=torch.float32)
    with pytest.raises(Exception, match="unknown activation"):
        norm_gate_up(x, None, 0.0, weight, "relu", check=False)


@pytest.mark.parametrize("name", [name for name, operation in OPERATIONS.items() if operation.arguments])
def test_every_name_of_a_declaration_is_bound(name):
    """Catches an expression of an axis, a dtype or a scale that no argument has."""
    declaration = OPERATIONS[name].declaration
    tensors = [argument for argument in (*declaration.arguments, *declaration.results) if argument.axes is not None]
    axes = [axis.partition(":")[0] for argument in tensors for axis in argument.axes]
    sizes = {axis for axis in axes if axis.isidentifier()} | {one.name for one in declaration.arguments if one.type == "int"}
    for axis in axes:
        assert set(compile(axis, "axis", "eval").co_names) <= sizes
    arguments = {argument.name for argument in declaration.arguments}
    for argument in tensors:
        named = {*re.findall(r"(?:of|with) ([\w.]+)", argument.type), argument.together or declaration.first}
        assert named <= arguments
