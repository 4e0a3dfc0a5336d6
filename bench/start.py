"""The time from the start of a process to the first token, by phase. Each start is a new process with its own kernel cache."""

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from minirt.bench.report import Row, markdown_table, number
from minirt.bench.report import heading as heading_of
from minirt.bench.summary import summarize
from minirt.errors import MinirtError

# The phases of a start in order, with their titles.
PHASES = {
    "python": "Python", "torch": "import torch", "device": "CUDA", "minirt": "import minirt", "load": "load",
    "warm_up": "warm-up", "first_token": "first token",
}  # fmt: skip


def child(began: float) -> None:
    """Body of the process that started at `began` (`time.time`): print the seconds of each phase as JSON.

    stdin, pickled: Python files to run first, and the arguments of `LoadOptions`.
    """
    stamps = {"python": time.time()}
    from minirt.head_start import head_start

    files, arguments = pickle.load(sys.stdin.buffer)
    with head_start(arguments):  # as in the commands
        import torch

        stamps["torch"] = time.time()
        if torch.cuda.is_available():
            torch.empty(1, device="cuda")
        stamps["device"] = time.time()
        from minirt import Generator, LoadOptions, SamplingParams
        from minirt.user_code import import_file

        stamps["minirt"] = time.time()
        for file in files:
            import_file(file)
        generator = Generator.from_pretrained(LoadOptions(**arguments))
    with generator:
        stamps["warm_up"] = time.time()
        stamps["load"] = stamps["warm_up"] - generator.warm_up_time_s
        stream = generator.stream_completion([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
        next(stream)
        stamps["first_token"] = time.time()
        stream.close()
    times = pairwise([began, *(stamps[name] for name in PHASES)])
    print(json.dumps({f"{name}_s": end - start for name, (start, end) in zip(PHASES, times, strict=True)}))


def run(arguments: dict[str, Any], files: Sequence[str], repeats: int, progress: Callable[[str], None]) -> list[Row]:
    """Start once with an empty kernel cache, then `repeats` times with what that has compiled.

    With `kernel_cache` among the arguments, the first start takes its kernels from there.

    Args:
        arguments: of `LoadOptions`.
        files: Python files that each start runs before it loads the model.
    Returns:
        A row for each kind of start: `caches`; `kernels`, the number that these starts have compiled; and a summary of the
        seconds of each phase (`torch_s` and so on) and of all (`total_s`).
    Raises:
        MinirtError: a start has failed.
    """
    with tempfile.TemporaryDirectory() as cache:
        taken = arguments.get("kernel_cache")
        kinds: list[tuple[str, int, list[dict[str, float]]]] = []
        before = _kernels(taken) if taken else 0
        for kind, count in (("taken" if taken else "empty", 1), ("warm", repeats)):
            starts = [_start(arguments, files, cache) for _ in range(count)]
            kinds.append((kind, _kernels(cache) - before, starts))
            before = _kernels(cache)
            progress(f"{kind} kernel cache: {starts[-1]['total_s']:.1f} s, {kinds[-1][1]} kernels compiled")
    return [
        {"caches": name, "kernels": count} | {phase: summarize([start[phase] for start in starts]) for phase in starts[0]}
        for name, count, starts in kinds
    ]


def _kernels(folder: str | Path) -> int:
    return sum(1 for _ in Path(folder).glob("*/*.cubin"))


def _start(arguments: dict[str, Any], files: Sequence[str], cache: str) -> dict[str, float]:
    command = [sys.executable, "-c", f"from {__name__} import child; child({time.time()!r})"]
    environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, input=pickle.dumps((files, arguments)), env=environment, capture_output=True, check=False)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise MinirtError("a start has failed", where=str(arguments.get("model")), found=last[-300:])
    phases = json.loads(done.stdout.splitlines()[-1])
    return phases | {"total_s": sum(phases.values())}


def markdown(shared: Row, results: list[Row]) -> str:
    """The report: a row for each kind of start, a column for each phase."""
    heads = ["kernel cache", *PHASES.values(), "all", "kernels compiled"]
    rows = [
        [row["caches"], *(number(row[f"{name}_s"]["median"]) for name in (*PHASES, "total")), str(row["kernels"])]
        for row in results
    ]
    note = "Seconds; medians of several starts. The operating system's file cache is warm."
    return "\n".join([*heading_of(shared), *markdown_table(heads, rows, 1), "", note]) + "\n"
