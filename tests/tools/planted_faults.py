"""Plants the faults of planted_faults.toml in a copy of the project, one at a time, and says which of them the tests catch.

python tests/tools/planted_faults.py [ROOM or part of a name …]    plants these, or all; exits with 1 if one is missed
python tests/tools/planted_faults.py --check                       only looks for the texts that the faults replace
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900  # of one run of pytest
PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--tb=no")


class Fault(NamedTuple):
    """A mistake that a change could make.

    Args:
        room: of the project. `fault`: what is wrong.
        file: where `old`, which stands there once, becomes `new`.
        tests: files or tests that reach it; they run one after the other until one fails.
    """

    room: str
    fault: str
    file: str
    old: str
    new: str
    tests: str

    def __str__(self) -> str:
        return f"{self.room}: {self.fault}"


def faults() -> list[Fault]:
    rooms = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return [Fault(room, **fault) for room, members in rooms.items() for fault in members]


def problems() -> Iterator[str]:
    """What keeps faults from being planted."""
    for fault in faults():
        file = ROOT / fault.file
        count = file.read_text(encoding="utf-8").count(fault.old) if file.is_file() else 0
        if count != 1:
            yield f"{fault}: {fault.file} has this text {count} times: {fault.old}"
        missing = (test for test in fault.tests.split() if not (ROOT / test.partition("::")[0]).is_file())
        yield from (f"{fault}: there is no {test}" for test in missing)


def copy(target: Path) -> None:
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def plant(fault: Fault, folder: Path) -> tuple[str, str]:
    """Whether the tests catch a fault in the copy `folder`, and what pytest says at the end."""
    file, said = folder / fault.file, ""
    before = file.read_text(encoding="utf-8")
    options = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}, "timeout": SECONDS}

    def run(test: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*PYTEST, test], capture_output=True, text=True, check=False, **options)

    for test in fault.tests.split():
        file.write_text(before.replace(fault.old, fault.new), encoding="utf-8")
        try:
            done = run(test)
        finally:
            file.write_text(before, encoding="utf-8")
        lines = (done.stdout or done.stderr).strip().splitlines() or [""]
        said = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])
        if done.returncode < 0:  # interpreted kernels read any address
            return "caught" if run(test).returncode == 0 else "FAILS ANYWAY", f"{test} ends by signal {-done.returncode}"
        if done.returncode == 1:
            failed = said.removeprefix("FAILED ").partition(" - ")[0]
            return "caught" if run(failed).returncode == 0 else "FAILS ANYWAY", said
        if done.returncode:  # the tests did not run
            return "BROKEN", said
    return "MISSED", said


def main(chosen: list[str]) -> int:
    if wrong := list(problems()):
        print(*wrong, sep="\n")
        return 1
    results = []
    with tempfile.TemporaryDirectory() as folder:
        copy(Path(folder))
        for fault in faults() if chosen != ["--check"] else ():
            if not chosen or any(part in str(fault) for part in chosen):
                started = time.monotonic()
                result, said = plant(fault, Path(folder))
                results.append(result)
                seconds, said = time.monotonic() - started, re.sub(" - .*", "", said)
                print(f"{result} {seconds:5.0f} s  {fault} | {said}", flush=True)
    print(f"{results.count('caught')} of {len(results)} caught")
    return int(results.count("caught") < len(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
