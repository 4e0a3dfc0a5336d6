"""Runs the cases of a fuzz test in processes of their own, so that a crash or a hang is a finding and not the end of the run."""

import contextlib
import os
import queue
import resource
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from minirt.errors import MinirtError

PROCESSES = 2
MEMORY = 4 << 30  # bytes of address space: an allocation that a file's number asks for fails at once


def run(case: str, count: int, *, seconds: float = 60, start: int = 0) -> tuple[Counter[str], list[str]]:
    """Run `count` cases: how often each outcome came, and the faults.

    Args:
        case: "module:function". The function takes a `random.Random` of the case's seed and an empty folder. It returns how the
            case ended, or raises: a `MinirtError` is an outcome like any other, everything else is a fault.
        seconds: a case that takes longer is a fault.
    """
    seeds: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seed in range(start, start + count):
        seeds.put(seed)
    outcomes: Counter[str] = Counter()
    faults: list[str] = []

    def work() -> None:
        process = None
        with contextlib.suppress(queue.Empty):
            while True:
                seed = seeds.get_nowait()
                process = process or _start(case)
                watch = threading.Timer(seconds, process.kill)
                watch.start()
                try:
                    process.stdin.write(f"{seed}\n")  # type: ignore[union-attr]
                    process.stdin.flush()  # type: ignore[union-attr]
                    answer = process.stdout.readline()  # type: ignore[union-attr]
                except OSError:
                    answer = ""
                slow = watch.finished.is_set()
                watch.cancel()
                kind, _, text = answer.strip().partition(" ")
                if kind == "ok":
                    outcomes[text] += 1
                elif kind == "fault":
                    faults.append(f"seed {seed}: {text}")
                else:
                    code = process.wait()
                    faults.append(f"seed {seed}: {'hang' if slow else 'crash'}, exit code {code}")
                    process = None
        if process is not None:
            process.stdin.close()  # type: ignore[union-attr]
            process.wait()

    threads = [threading.Thread(target=work) for _ in range(PROCESSES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes, faults


def _start(case: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", f"from support.fuzz import serve; serve({case!r})"]
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    return subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )


def serve(name: str) -> None:
    """Body of a process: one case for each seed on stdin, one line for each on stdout."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    module, _, function = name.partition(":")
    case: Callable[[Random, Path], Any] = getattr(import_module(module), function)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            print(outcome(case, int(line), Path(folder)), file=answers, flush=True)


def outcome(case: Callable[[Random, Path], Any], seed: int, folder: Path) -> str:
    """The line for one case: "ok" and how it ended, or "fault" and the exception with its last lines of traceback."""
    try:
        try:
            return f"ok {case(Random(seed), folder)}"
        except MinirtError as error:
            text = str(error)
            if not text.isprintable() or len(text) > 5000:
                raise AssertionError(f"a message of {len(text)} characters: {text[:200]!r}") from error
            return f"ok {type(error).__name__}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
        return f"fault {type(error).__name__}: {ascii(str(error))[:300]} at {where}"
