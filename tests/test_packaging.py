"""Builds and installs from every kind of source: checkout, sdist, zip, wheel, editable install.

Catches files that are missing from the wheel or do not belong there, a package that pyproject.toml does not list, imports that
work only inside or only outside the source tree, and an install without kernels because the symbolic links were lost.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from support.package import ROOT

import minirt

PACKAGES = {"minirt": "minirt", "models": "minirt/models", "kernels": "minirt/kernels", "bench": "minirt/bench"}
LINKS = ("bench", "kernels", "models")
NOT_INSTALLED = (ROOT / "models" / "recipe", ROOT / "bench" / "tools")
MODULES = ("minirt", "minirt.cli.app", "minirt.models", "minirt.kernels.linear", "minirt.bench.compare", "minirt.layers")


def run(*command, **options):
    """Run a command and return the finished process, with stdout and stderr as text. A failure shows both."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def source_files():
    """The path in the wheel of each Python file of the runtime."""
    return {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}" for folder, target in PACKAGES.items()
        for path in (ROOT / folder).rglob("*.py") if not any(path.is_relative_to(other) for other in NOT_INSTALLED)
    }  # fmt: skip


def copy_source(target):
    """Copy the source as in git, with symbolic links. Each build gets its own copy, because builds leave folders behind."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, target, ignore=left_out, symlinks=True)
    return target


def installed_files(*source, target):
    """The files that pip installs from a source, relative to the target folder."""
    options = ["--no-deps", "--no-build-isolation", "--no-compile", "--target", target]
    run(sys.executable, "-m", "pip", "install", "-q", *options, *source)
    found = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith("bin/") and ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source, target = copy_source(tmp_path_factory.mktemp("source") / "minirt"), tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", source, "-q", "--no-deps", "--no-build-isolation", "-w", target)
    (path,) = target.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def content(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_every_package_is_listed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted({name.rpartition("/")[0].replace("/", ".") for name in source_files()})


def test_the_links_are_relative():
    assert {name: os.readlink(ROOT / "minirt" / name) for name in LINKS} == {name: f"../{name}" for name in LINKS}


def test_one_version():
    assert minirt.__version__ == version("minirt")


@pytest.mark.slow
def test_the_wheel_holds_the_runtime_and_nothing_else(wheel, content):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        described = archive.read(metadata).decode()
    embedded = {f"minirt/models/embedded/{path.name}" for path in (ROOT / "models" / "embedded").iterdir()}
    tables = {f"minirt/models/{path.name}" for path in (ROOT / "models").glob("*.json")}
    others = {"minirt/py.typed", "minirt/foreign_names.toml", "minirt/server/page.html", "minirt/bench/compare/default_text.txt"}
    assert content == source_files() | embedded | tables | others
    assert wheel.stat().st_size <= 28_000_000
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in described
    needed = {line for line in described.splitlines() if line.startswith("Requires-Dist:") and "extra" not in line}
    assert not any("transformers" in line or "pytest" in line for line in needed)
    assert any("torch" in line for line in needed)


@pytest.mark.slow
def test_an_sdist_installs_the_same(content, tmp_path):
    source = copy_source(tmp_path / "source")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", tmp_path / "dist", source)
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as members:
        held = {name.partition("/")[2] for name in members.getnames()}
    wanted = [path for folder in ("docs", "examples", "bench/results") for path in (ROOT / folder).rglob("*.*")]
    wanted += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/test_docs.py")]
    assert {path.relative_to(ROOT).as_posix() for path in wanted if "__pycache__" not in path.parts} <= held
    assert installed_files(archive, target=tmp_path / "site") == content


@pytest.mark.slow
def test_a_zip_whose_links_became_text_files_installs_the_same(content, tmp_path):
    """git and most unpackers write links as text files if the file system has no links."""
    source = copy_source(tmp_path / "source")
    for name in LINKS:
        (source / "minirt" / name).unlink()
        (source / "minirt" / name).write_text(f"../{name}")
    assert installed_files(source, target=tmp_path / "site") == content


@pytest.mark.slow
def test_a_checkout_works_without_an_install_and_says_when_its_links_are_lost(tmp_path):
    source = copy_source(tmp_path / "source")
    script = "import minirt.kernels.reference, minirt.bench.compare, minirt.models; print(minirt.models.__file__)"
    command = [sys.executable, "-c", script]
    assert run(*command, cwd=source).stdout.strip() == str(source / "minirt" / "models" / "__init__.py")
    (source / "minirt" / "kernels").unlink()
    (source / "minirt" / "kernels").write_text("../kernels")
    failed = subprocess.run([sys.executable, "-S", "-c", "import minirt"], cwd=source, capture_output=True, text=True)
    assert failed.returncode == 1
    assert "ImportError" in failed.stderr
    assert "git checkout -- minirt/kernels" in failed.stderr


def test_a_clone_named_minirt_works_from_the_folder_around_it(tmp_path):
    """Catches the clone's folder as a namespace package `minirt`, which Python finds there before the editable install."""
    (tmp_path / "minirt").symlink_to(ROOT)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = "from minirt import SamplingParams, kernels, models; import minirt; print(minirt.__file__)"
    out = run(sys.executable, "-c", script, cwd=tmp_path, env=environment).stdout.strip()
    assert Path(out) == tmp_path / "minirt" / "minirt" / "__init__.py"
    assert version("minirt") in run(sys.executable, "-m", "minirt", "--version", cwd=tmp_path, env=environment).stdout


@pytest.mark.slow
def test_an_editable_install_sees_new_files(tmp_path):
    source = copy_source(tmp_path / "source")
    options = ["--no-deps", "--no-build-isolation", "--target", tmp_path / "site"]
    run(sys.executable, "-m", "pip", "install", "-q", *options, "-e", source)
    (source / "kernels" / "linear" / "added.py").write_text("found = 1\n")
    (source / "models" / "added.py").write_text("found = 2\n")
    script = (
        f"import site; site.addsitedir({str(tmp_path / 'site')!r}); "
        "import minirt.kernels.linear.added as a, minirt.models.added as b; print(a.found + b.found)"
    )
    assert run(sys.executable, "-S", "-P", "-c", script, cwd=tmp_path).stdout == "3\n"


@pytest.mark.slow
def test_the_wheel_works_elsewhere(wheel, tmp_path):
    """With -P and another working directory, Python cannot import from the source tree."""
    installed = tmp_path / "site"
    installed_files(wheel, target=installed)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    script = "; ".join(f"import {module} as m; print(m.__file__)" for module in MODULES)
    files = run(sys.executable, "-P", "-c", script, cwd=tmp_path, env=environment).stdout.split()
    assert len(files) == len(MODULES)
    assert all(Path(file).is_relative_to(installed) for file in files), files
    plan = ("-P", "-m", "minirt", "plan", "--model", "SmolLM2-135M", "--device", "cpu")
    out = run(sys.executable, *plan, cwd=tmp_path, env=environment).stdout
    rows = [line.split()[0] for line in out.splitlines() if " eager " in line]
    assert rows == ["embedding", "layers.0-29.attention", "layers.0-29.mlp", "select", "head"]
    # The embedded model must work without a network.
    environment |= {"HF_HUB_OFFLINE": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    story = ("-P", "-m", "minirt", "generate", "--quiet", "--device", "cpu", "--temperature", "0", "Once upon a time")
    text = run(sys.executable, *story, cwd=tmp_path, env=environment).stdout
    assert 50 <= len(text.split()) <= 250


@pytest.mark.slow
def test_the_console_script(tmp_path):
    """The script belongs to the install that runs these tests. It must be editable, or the tests run other code."""
    script = Path(sys.executable).with_name("minirt")
    assert run(script, "--version", cwd=tmp_path).stdout == f"minirt, version {version('minirt')}\n"
    assert "generate" in run(script, "--help", cwd=tmp_path).stdout
    where = run(sys.executable, "-P", "-c", "import minirt; print(minirt.__file__)", cwd=tmp_path).stdout.strip()
    assert Path(where) == ROOT / "minirt" / "__init__.py"


def test_no_install_command_needs_an_index_that_has_minirt():
    """Pages and messages say `pip install '.[serve]'`, a path, or the packages by name. Catches `pip install minirt`, which finds
    nothing: minirt is on no package index."""
    wrong = re.compile(r"pip install (?:[^`\n#,]*[ '\"])?minirt\b(?!\[[\w,]+\] @ file:)(?![./-])")
    assert wrong.search("pip install -q 'minirt[serve]'")
    assert wrong.search("pip install minirt\n")
    assert not wrong.search("pip install 'minirt[serve] @ file:///a/minirt' '.[plots]'")
    files = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*")]
    for folder in PACKAGES:
        files += [file for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".html")]
    found = [file for file in files if file.is_file() and wrong.search(file.read_text(encoding="utf-8"))]
    assert found == []


@pytest.fixture
def demo_folder(tmp_path):
    """What `make demo` needs of a clone, with a virtual environment whose pip only notes what it is asked for."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    site = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    tools = {
        "pip": 'echo "$@" >> pip.log', "uv": 'echo "uv $@" >> pip.log; exit ${NO_INDEX:-0}',
        "python": f'PYTHONPATH={site} exec {sys.executable} -S "$@"',
    }  # fmt: skip
    (tmp_path / ".venv" / "bin").mkdir()
    for name, command in tools.items():
        tool = tmp_path / ".venv" / "bin" / name
        tool.write_text(f"#!/bin/sh\n{command}\n")
        tool.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(("torch", "stays"), [(None, False), ("2.10.1", False), ("2.11.0", True), ("3.0.0+cu140", True)])
def test_make_keeps_a_torch_that_is_new_enough(torch, stays, demo_folder):
    """Catches `make demo` that replaces the CUDA build which a user has put into .venv."""
    if torch is not None:
        metadata = demo_folder / ".venv/lib/python3.11/site-packages" / f"torch-{torch}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")
    out = run("make", ".venv/runtime", cwd=demo_folder).stdout
    log = (demo_folder / "pip.log").read_text()
    assert ("torch==" not in log) == stays
    assert ("the PyTorch of .venv stays" in out) == stays
    assert "-e ." in log


@pytest.mark.parametrize(("gpu", "reachable"), [(True, True), (False, True), (False, False)])
def test_make_takes_the_cpu_build_of_torch_where_there_is_no_gpu(gpu, reachable, demo_folder, monkeypatch):
    """Without a GPU, `make demo` downloaded gigabytes of CUDA. pip does not find the CPU build; where uv does not either, pip
    takes what there is, and a line says so."""
    smi = demo_folder / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f"#!/bin/sh\nexit {0 if gpu else 9}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NO_INDEX", "0" if reachable else "2")
    out = run("make", ".venv/runtime", cwd=demo_folder).stdout
    log = (demo_folder / "pip.log").read_text()
    assert ("--torch-backend cpu torch==" in log) != gpu
    assert bool(re.search("^install .*torch==", log, re.MULTILINE)) == (gpu or not reachable)
    assert ("pip takes the default build" in out) == (not gpu and not reachable)
