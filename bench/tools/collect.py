"""Repeats the measurements of bench/results on this GPU: `python bench/tools/collect.py FOLDER [NAME or glob …]` (default: all).

Each run of runs.txt is a command line in its own process and writes FOLDER/GPU-NAME.json. A run that fails writes no file, and
the exit code is 1. `bench/tools/tables.py` makes tables and pictures from the stored results.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from minirt.errors import InputError, MinirtError

# What stands for several words in runs.txt.
_WORDS = {
    "7B": "--model Qwen2.5-7B --random-weights",
    "LINEARS": "qkv* o o.fp8 o.fp8_blocks o.int4 gate_up* down* lm_head*",
    # Models with other shapes than the one to which the kernels' rules were fitted.
    "OTHERS": "--model Qwen2.5-7B --model Llama-3.1-8B --model Qwen3-4B --model Qwen2.5-0.5B --model SmolLM2-1.7B",
}


def _runs() -> dict[str, list[str]]:
    """The arguments by name of the result."""
    runs = {}
    lines = (Path(__file__).parent / "runs.txt").read_text(encoding="utf-8").splitlines()
    for line in (line for line in lines if not line.startswith("#")):
        for kind, flag in (("bf16", ""), ("fp8", "--fp8")) if "KIND" in line else (("", ""),):
            name, *words = line.split(" ")
            text = " ".join(_WORDS.get(word, flag if word == "KIND" else word) for word in words)
            runs[name.replace("KIND", kind)] = shlex.split(text)
    return runs


RUNS = _runs()


def select(patterns: Sequence[str]) -> list[str]:
    """Return the names of the runs that match any of the names or globs; without patterns, all names.

    Raises:
        InputError: a pattern matches no run.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in RUNS):
            raise InputError("matches no run", where=pattern, expected=", ".join(RUNS))
    return [name for name in RUNS if not patterns or any(fnmatchcase(name, p) for p in patterns)]


def command(name: str) -> list[str]:
    """Return the command line of a run, which prints JSON to stdout."""
    first, *rest = RUNS[name]
    if first.endswith(".py"):
        return [sys.executable, str(Path(__file__).parent / first), *rest]
    return [sys.executable, "-m", "minirt", first, *rest, "-o", "json", "--quiet"]


def prefix() -> str:
    """Return the prefix of file names for this GPU: "h200" for an "NVIDIA H200"."""
    import torch

    if not torch.cuda.is_available():
        raise MinirtError("there is no GPU to measure")
    return torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "-")


def main(words: list[str]) -> int:
    if not words or not Path(words[0]).is_dir():
        raise MinirtError("expected a folder to write to", found="".join(words[:1]) or "none", hint="collect.py FOLDER [NAME …]")
    names, gpu, failed = select(words[1:]), prefix(), 0
    for name in names:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:  # keeps tuning results away from other runs
            cache = {"MINIRT_CACHE": scratch} if name.startswith("tune-") else {}
            done = subprocess.run(command(name), capture_output=True, text=True, check=False, env=os.environ | cache)
        line = f"{name}: {time.monotonic() - started:.0f} s"
        if done.returncode == 0:
            (Path(words[0]) / f"{gpu}-{name}.json").write_text(done.stdout, encoding="utf-8")
        else:
            failed += 1
            line += f", exit code {done.returncode}: {done.stderr.strip()[-500:]}"
        print(line, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
