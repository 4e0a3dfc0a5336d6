"""Messages name options on the command line, and arguments in Python.

The other tests read messages as the command line prints them: see `conftest.py`.
"""

import ast
import os
import re
import subprocess
import sys
import warnings
from dataclasses import fields

import pytest
from support.package import ROOT

from minirt import wording
from minirt.errors import ConfigError
from minirt.loading.options import LoadOptions
from minirt.wording import warn, worded, worded_place

# Arguments of other functions than `Generator.from_pretrained` with the same name as the option.
OTHERS = {"gpu"}
# Files whose messages only commands show.
COMMANDS = (
    "minirt/cli/", "minirt/server/", "minirt/wording.py", "minirt/foreign_names.py", "minirt/user_code.py",
    "bench/", "models/recipe/",
)  # fmt: skip
FILES = {
    path.relative_to(ROOT).as_posix(): path
    for folder in ("minirt", "models", "kernels", "bench")  # in a checkout, the last three are links in the first
    for path in sorted((ROOT / folder).rglob("*.py"))
}


@pytest.fixture
def python(monkeypatch):
    monkeypatch.setattr(wording, "_readers", ["Python"])


@pytest.mark.parametrize(("text", "expected"), [
    ("use --dtype bfloat16 --fp8", 'use dtype="bfloat16", quantization="fp8"'),
    ("use --max-model-len 1408 or --kv-cache-memory 360MiB", 'use max_model_len=1408 or kv_cache_memory="360MiB"'),
    ("raise --gpu-memory-utilization, or free memory", "raise gpu_memory_utilization, or free memory"),
    ("12 sequences run at once (--max-num-seqs)", "12 sequences run at once (max_num_seqs)"),
    ("--speculate mtp makes drafts", 'speculative="mtp" makes drafts'), ("use --max-model-len 8.", "use max_model_len=8."),
    ("use --device cuda:1; or not", 'use device="cuda:1"; or not'),
    ("--model Qwen3-4B --random-weights measures", 'model="Qwen3-4B", random_weights=True measures'),
    ("with --no-cuda-graphs or --no-prefix-cache", "with cuda_graphs=False or prefix_cache=False"),
    ("a name such as --impl 'layers.*.mlp=plain'", 'a name such as impl="layers.*.mlp=plain"'),
    ("here minirt generate --prompts FILE", "here minirt generate --prompts FILE"),
    ("/hub/models--Qwen--Qwen3-4B/config.json", "/hub/models--Qwen--Qwen3-4B/config.json"),
])  # fmt: skip
def test_sentences(python, text, expected):
    assert worded(text) == expected
    with wording.command_line():
        assert worded(text) == text


def test_places(python):
    """The place of an error is an option with any value; what was found stays as the user wrote it."""
    assert worded_place("--impl mine") == 'impl="mine"'
    assert worded_place("config.json") == "config.json"
    error = ConfigError("not acceptable", where="--max-model-len 0", expected="--fp8", found="--fp8", hint="lower --max-num-seqs")
    assert str(error) == 'max_model_len=0: not acceptable; expected quantization="fp8"; found --fp8 (lower max_num_seqs)'
    assert error.is_usage
    with wording.command_line():
        assert str(error) == "--max-model-len 0: not acceptable; expected --fp8; found --fp8 (lower --max-num-seqs)"


def texts(tree):
    """All texts of a module but docstrings and the options of settings, with a number in the place of values."""
    declared = ("option", "option_help", "short")
    options = [word.value for word in ast.walk(tree) if isinstance(word, ast.keyword) and word.arg in declared]
    docs = {id(part) for value in options for part in ast.walk(value)}
    docs |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "8" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs | parts:
            yield node.value


def test_every_message_of_the_package(python):
    """Catches a new message whose option is no argument of `LoadOptions`, so that Python callers cannot follow it."""
    known = {field.name for field in fields(LoadOptions)} | OTHERS
    unknown = {}
    for name, path in FILES.items():
        if name.startswith(COMMANDS):
            continue
        for text in texts(ast.parse(path.read_text(encoding="utf-8"))):
            options = re.findall(r"(?<![\w/-])--[a-z][a-z0-9-]*", text)
            if options and "minirt " not in text:
                said = worded_place(text) if re.fullmatch(r"--\S+( \S+)?", text) else worded(text)
                arguments = {worded_place(option).partition("=")[0] for option in options}
                if "--" in said or not arguments <= known:
                    unknown[f"{name}: {text}"] = said
    assert unknown == {}


def test_the_package_warns_by_warn():
    """Catches `warnings.warn`, whose stacklevel names a line of the package, and whose options Python callers do not have."""
    found = {name for name, path in FILES.items() if "warnings.warn(" in path.read_text(encoding="utf-8")}
    assert {name for name in found if not name.startswith("minirt/cli/")} == {"minirt/wording.py"}


def test_warnings_name_the_callers_line(tmp_path):
    """Catches a warning that points into the package: a user can neither find nor filter it by module."""
    script = tmp_path / "script.py"
    script.write_text("from minirt import Generator\nGenerator.from_pretrained(quantization='fp8', device='cpu').close()\n")
    command, environment = [sys.executable, "-W", "default", str(script)], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    assert f"{script}:2: UserWarning: on a CPU" in done.stderr


def test_a_warning_is_worded(python):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn("lower --max-num-seqs", RuntimeWarning)
    found = [(str(one.message), one.category, one.filename) for one in caught]
    assert found == [("lower max_num_seqs", RuntimeWarning, __file__)]
