"""A new user's first minutes: installs a clone in a fresh environment, runs what README.md shows, and writes a transcript.

python tests/tools/first_minutes.py TRANSCRIPT.md [--page README.md] [--first COMMAND] [--make]

Each step is what the page shows, in a shell: `pip install .`, then every command and Python block that needs neither a GPU nor a
download. `--first` is a command before them, such as the installation of a CPU build of PyTorch. `--make` adds `make demo`, which
installs a second time. Home, caches and the virtual environment are new folders. pip's configuration stays, since it names the
package index. Takes minutes, and needs that index.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.pages import examples  # noqa: E402

_KEPT = ("PATH", "LANG", "LC_ALL", "TERM", "TMPDIR", "PIP_CONFIG_FILE", "PIP_INDEX_URL", "PIP_FIND_LINKS", "SSL_CERT_FILE")
_LINES = 40  # of a step's output


@dataclass(frozen=True)
class Step:
    """A command line, or a Python program that is given to `python`."""

    source: str
    python: bool = False


@dataclass(frozen=True)
class Done:
    step: Step
    seconds: float
    code: int
    output: str


def steps(page: str, make: bool = False) -> list[Step]:
    """What a page shows, without what needs a GPU, a download, or all tests: installations first, otherwise in order."""
    installs, others = [], []
    for example in examples(page):
        command = example.source.partition("#")[0].strip()
        if example.why == "install" and (command.startswith("pip ") or (make and command == "make demo")):
            installs.append(Step(command))
        elif example.why is None:
            others.append(Step(example.source, python=example.kind == "python"))
    return installs + others


def run(step: Step, folder: Path, environment: dict[str, str]) -> Done:
    words = ["python", "-"] if step.python else ["bash", "-c", step.source]
    started = time.perf_counter()
    done = subprocess.run(
        words, cwd=folder, env=environment, input=step.source if step.python else "", text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return Done(step, time.perf_counter() - started, done.returncode, done.stdout)


def transcript(done: list[Done], title: str) -> str:
    """The steps as Markdown: a table of times, then each with its output."""
    lines = [f"# {title}", "", "| step | seconds | exit code |", "| --- | ---: | ---: |"]
    lines += [f"| {_name(own).replace('|', '&#124;')} | {own.seconds:.1f} | {own.code} |" for own in done]
    for own in done:
        output = own.output.rstrip("\n").split("\n")
        if len(output) > _LINES:
            output = [*output[: _LINES // 2], f"… ({len(output) - _LINES} lines)", *output[-_LINES // 2 :]]
        shown = own.step.source.rstrip("\n").split("\n") if own.step.python else [f"$ {own.step.source}"]
        lines += ["", f"## {_name(own)}", "", f"{own.seconds:.1f} s, exit code {own.code}", ""]
        lines += ["````text", *shown, "", *output, "````"]
    return "\n".join(lines) + "\n"


def _name(done: Done) -> str:
    return "a Python block" if done.step.python else f"`{done.step.source}`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--page", type=Path, default=ROOT / "README.md")
    parser.add_argument("--first", metavar="COMMAND")
    parser.add_argument("--make", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        home, clone, venv = (Path(scratch) / name for name in ("home", "minirt", "venv"))
        home.mkdir()
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ} | {"HOME": str(home)}
        configuration = Path.home() / ".config" / "pip" / "pip.conf"
        if configuration.exists():
            environment.setdefault("PIP_CONFIG_FILE", str(configuration))
        done = [
            run(Step(f"git clone --quiet {ROOT} {clone}"), Path(scratch), environment),
            run(Step(f"{sys.executable} -m venv {venv}"), Path(scratch), environment),
        ]
        environment |= {"PATH": f"{venv / 'bin'}:{environment['PATH']}", "VIRTUAL_ENV": str(venv)}
        first = [Step(asked.first)] if asked.first else []
        for step in [*first, *steps(asked.page.read_text(encoding="utf-8"), asked.make)]:
            done.append(run(step, clone, environment))
            print(f"{done[-1].seconds:6.1f} s  exit code {done[-1].code}  {_name(done[-1])}", flush=True)
        commit = run(Step("git rev-parse --short=10 HEAD"), clone, environment).output.strip()
    title = f"The first minutes with minirt {commit}: Python {platform.python_version()}, {os.cpu_count()} cores"
    text = transcript(done, title).replace(scratch, "/tmp").replace(sys.executable, "python3").replace(str(ROOT), "minirt")
    asked.target.write_text(text, encoding="utf-8")
    sys.exit(any(own.code for own in done))


if __name__ == "__main__":
    main()
