"""Triton's interpreter as the tests use it (`support/interpreter.py`). Catches: a kernel that computes something else than with
Triton's own patches; patches that stay after a launch, or are missing in the next one; searches that come back."""

import inspect

import pytest
import torch
import triton
import triton.language as tl
from triton.language.core import is_builtin
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled on a GPU")


@triton.jit
def _largest(x, y):
    return tl.maximum(tl.max(x), tl.max(tl.where(y > 0, y, -y)))


@triton.jit
def _kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    sums = tl.cumsum(x, 0)
    for _ in tl.static_range(2):
        sums += tl.program_id(0) * _largest(x, sums)
    tl.store(out_ptr + tl.program_id(0) * n + at, tl.exp(-tl.abs(sums)), mask=at < n)


def run():
    x = torch.randn(13, generator=torch.Generator().manual_seed(0))
    out = torch.full((3, 13), torch.nan)
    _kernel[(3,)](x, out, 13, BLOCK=16)
    return x, out


def expected(x):
    sums, rows, largest = x.cumsum(0), [], x.max()
    for program in range(3):
        y = sums
        for _ in range(2):
            y = y + program * torch.maximum(largest, y.abs().max())
        rows.append((-y.abs()).exp())
    return torch.stack(rows)


def test_launches_compute_what_they_do_with_tritons_own_patches(monkeypatch):
    for _ in range(2):
        x, out = run()
        torch.testing.assert_close(out, expected(x))
    monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions())
    monkeypatch.setattr(interpreter, "_patch_lang", interpreter._patch_lang.__globals__["patch_lang"])
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda owner, builder, scope: [
        interpreter._patch_attr(owner, name, member, builder, scope)
        for name, member in inspect.getmembers(owner) if is_builtin(member)
    ])  # fmt: skip
    assert interpreter.interpreter_builder.options.sanitize_overflow
    assert not interpreter.interpreter_builder.options.debug, "overflows are found, and `shorten` must leave that on"
    assert torch.equal(run()[1], out)


def test_after_a_launch_triton_is_as_it_was():
    before = dict(vars(tl)), dict(vars(tl.math)), dict(vars(tl.tensor))
    run()
    assert (dict(vars(tl)), dict(vars(tl.math)), dict(vars(tl.tensor))) == before
    assert is_builtin(tl.load)


def test_nothing_is_searched_again(monkeypatch):
    run()
    monkeypatch.setattr(inspect, "getmembers", lambda *_: pytest.fail("the interpreter searches"))
    run()
