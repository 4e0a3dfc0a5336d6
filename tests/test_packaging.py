"""The built wheel and the editable install.

Catches files that are missing from the wheel or do not belong there, and imports that only work in the source tree.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from tests_support import ROOT

PACKAGES = {"minirt": "minirt", "models": "minirt/models", "kernels": "minirt/kernels", "bench": "minirt/bench"}


def run(*command, **options):
    """The finished process, its stdout and stderr as text; a failure shows both."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def source_files():
    """Where each Python file of the runtime must lie in the wheel."""
    return {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, target in PACKAGES.items()
        for path in (ROOT / folder).rglob("*.py")
        if "recipe" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, as the build leaves folders behind."""
    source, target = tmp_path_factory.mktemp("source") / "minirt", tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, source, ignore=left_out)
    run(sys.executable, "-m", "pip", "wheel", source, "-q", "--no-deps", "--no-build-isolation", "-w", target)
    (path,) = target.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, wheel)
    return target


@pytest.mark.slow
def test_the_wheel_holds_the_runtime_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        described = archive.read(metadata).decode()
    content = {name for name in names if ".dist-info/" not in name}
    embedded = {f"minirt/models/embedded/{path.name}" for path in (ROOT / "models" / "embedded").iterdir()}
    assert content == source_files() | embedded | {"minirt/py.typed"}
    assert wheel.stat().st_size <= 28_000_000
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in described
    needed = {line for line in described.splitlines() if line.startswith("Requires-Dist:") and "extra" not in line}
    assert not any("transformers" in line or "pytest" in line for line in needed)
    assert any("torch" in line for line in needed)


@pytest.mark.slow
def test_the_wheel_works_elsewhere(installed, tmp_path):
    """-P and another folder: nothing of the source tree is in reach."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    modules = ("minirt", "minirt.cli", "minirt.models", "minirt.kernels", "minirt.bench", "minirt.layers")
    script = "; ".join(f"import {module} as m; print(m.__file__)" for module in modules)
    files = run(sys.executable, "-P", "-c", script, cwd=tmp_path, env=environment).stdout.split()
    assert len(files) == len(modules)
    assert all(Path(file).is_relative_to(installed) for file in files), files
    plan = ("-P", "-m", "minirt.cli", "plan", "--model", "SmolLM2-135M", "--device", "cpu")
    out = run(sys.executable, *plan, cwd=tmp_path, env=environment).stdout
    rows = [line.split()[1] for line in out.splitlines() if " eager " in line]
    assert len(rows) == 63
    assert (rows[0], rows[1], *rows[60:]) == ("embedding", "layers.0.attention", "select", "layers.29.mlp", "head")
    # The embedded model, without a network.
    environment |= {"HF_HUB_OFFLINE": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    story = ("-P", "-m", "minirt.cli", "generate", "--quiet", "--device", "cpu", "--temperature", "0", "Once upon a time")
    text = run(sys.executable, *story, cwd=tmp_path, env=environment).stdout
    assert 50 <= len(text.split()) <= 250


@pytest.mark.slow
def test_the_console_script(tmp_path):
    """Of the install that runs these tests; it must be an editable one, or they test something else."""
    script = Path(sys.executable).with_name("minirt")
    assert run(script, "--version", cwd=tmp_path).stdout == f"minirt, version {version('minirt')}\n"
    assert "generate" in run(script, "--help", cwd=tmp_path).stdout
    where = run(sys.executable, "-P", "-c", "import minirt; print(minirt.__file__)", cwd=tmp_path).stdout.strip()
    assert Path(where) == ROOT / "minirt" / "__init__.py"
