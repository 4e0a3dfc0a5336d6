"""`bench/tools/compiled_code.py`. Catches: changed machine code that goes unnoticed, unchanged code that is reported because a
signature changed, variants that are lost between listing, compiling and pairing."""

import json
import os
import subprocess
import sys

import pytest

from minirt.bench.tools import compiled_code
from minirt.bench.tools.compiled_code import DIFFERENT, ONLY_NEW, ONLY_OLD, RENAMED, SAME

CALLS = """
import torch, triton, triton.language as tl

@triton.jit
def scale({parameters}):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(target + i, tl.load(source + i, i < n) * 2, i < n)

@triton.jit
def add(x, y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(y + i, {term} + tl.load(y + i))

def every_kernel(cc, dtype):
    x, y = torch.empty(256, dtype=dtype), torch.empty(256, dtype=dtype)
    scale[(1,)]({arguments}, SIZE=64)
    add[(1,)](x, y, SIZE=64)
    add[(1,)](x, y, SIZE=128)
"""
OLD = {"parameters": "source, target, n, SIZE: tl.constexpr", "arguments": "x, y, 300", "term": "tl.load(x + i)"}
MOVED = {"parameters": "n, source, SIZE: tl.constexpr, target, BIAS: tl.constexpr = None", "arguments": "300, x, target=y"}
NEW = OLD | MOVED | {"term": "tl.exp(tl.load(x + i).to(tl.float32))"}


def tool(*words):
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # as in the tests' process: the tool must compile all the same
    command = [sys.executable, compiled_code.__file__, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_a_change_is_found_and_a_new_signature_is_none(tmp_path):
    """`scale` has its parameters in another order, and one more that is None; `add` computes something else."""
    running = []
    for name, numbers in (("old", OLD), ("new", NEW)):
        script = tmp_path / name / "calls.py"
        script.parent.mkdir()
        script.write_text(CALLS.format(**numbers))
        running.append(tool("compile", tmp_path / f"{name}.json", "--model", "--calls", script, "--processes", 1))
    for process in running:
        said, complaint = process.communicate()
        assert process.returncode == 0, complaint[-4000:]
        assert "sm_90 add" in said
    old, new = (json.loads((tmp_path / f"{name}.json").read_text())["variants"] for name in ("old", "new"))
    verdicts = [(pair.old["kernel"], pair.verdict) for pair in compiled_code.compare(old, new)]
    assert sorted(verdicts) == [("add", DIFFERENT), ("add", DIFFERENT), ("scale", SAME)]
    assert all(variant["registers"] > 0 and variant["opcodes"]["EXIT"] >= 1 for variant in old + new)
    process = tool("compare", tmp_path / "old.json", tmp_path / "new.json")
    said, complaint = process.communicate()
    assert process.returncode == 1, complaint
    assert "MUFU.EX2 +" in said
    assert tool("compare", tmp_path / "old.json", tmp_path / "old.json").wait() == 0


def variant(kernel="k", key="64", registers=10, uses=("m, 1 tokens",), **opcodes):
    return {
        "gpu": 90, "kernel": kernel, "key": key, "registers": registers, "stack": 0, "shared": 0, "warps": 4, "uses": list(uses),
        "opcodes": {"EXIT": 1} | opcodes,
    }  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), [
    ([variant(FADD=1), variant(FADD=2)], [variant(FADD=2), variant(FADD=1)], [SAME] * 2),  # two variants of one key
    ([variant(FADD=1), variant(FADD=9)], [variant(FADD=8), variant(FADD=1)], [SAME, DIFFERENT]),
    ([variant(key="1", FADD=1)], [variant(key="2", FADD=1)], [RENAMED]),
    ([variant("a", FADD=1)], [variant("b", FADD=1)], [RENAMED]),
    ([variant(key="1", FADD=1)], [variant(key="2", FADD=2)], [DIFFERENT]),  # launched by the same steps
    ([variant(key="1", FADD=1)], [variant(key="2", uses=["other"], FADD=2)], [ONLY_OLD, ONLY_NEW]),
    ([variant(registers=10)], [variant(registers=11)], [DIFFERENT]),
    ([variant()], [variant(), variant()], [SAME, ONLY_NEW]),  # a variant is paired once
    ([variant(), variant("b", "9")], [variant()], [SAME, ONLY_OLD]),
    ([variant()], [variant() | {"gpu": 80}], [ONLY_OLD, ONLY_NEW]),
])  # fmt: skip
def test_pairs(old, new, expected):
    pairs = compiled_code.compare(old, new)
    assert [pair.verdict for pair in pairs] == expected
    left, right = ([variant for pair in pairs if (variant := getattr(pair, side)) is not None] for side in ("old", "new"))
    assert sorted(map(repr, left)) == sorted(map(repr, old))
    assert sorted(map(repr, right)) == sorted(map(repr, new))


def test_report_says_what_differs():
    pairs = compiled_code.compare([variant(FADD=1, LDC=2)], [variant(registers=12, FADD=4, LDC=1)])
    said = compiled_code.report(pairs)
    assert "registers 10 → 12; instructions 4 → 6: FADD +3, LDC -1" in said
    only_loads = compiled_code.report(compiled_code.compare([variant(LDC=2)], [variant(**{"LDC": 1, "ULDC.64": 1})]))
    assert "only loads of parameters" in only_loads
