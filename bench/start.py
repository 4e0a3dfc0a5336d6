"""The time from the start of a process to the first token, by phase. Each start is a new process with its own kernel cache."""

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minirt.bench.report import Row, markdown_table, number
from minirt.bench.report import heading as heading_of
from minirt.bench.summary import summarize
from minirt.errors import MinirtError

# Of a start, in order. Each row has seconds of each, `<phase>_s`, and of all of them.
PHASES = {
    "python": "Python", "torch": "import torch", "device": "CUDA", "minirt": "import minirt", "load": "load",
    "warm_up": "warm-up", "first_token": "first token",
}  # fmt: skip


def child(began: float) -> None:
    """Body of the process that started at `began` (`time.time`): print the seconds of each phase as JSON. stdin: the arguments of
    `LoadOptions`, pickled."""
    stamps = {"python": time.time()}
    import torch

    stamps["torch"] = time.time()
    if torch.cuda.is_available():
        torch.empty(1, device="cuda")
    stamps["device"] = time.time()
    from minirt import Generator, LoadOptions, SamplingParams

    stamps["minirt"] = time.time()
    with Generator.from_pretrained(LoadOptions(**pickle.load(sys.stdin.buffer))) as generator:
        stamps["warm_up"] = time.time()
        stamps["load"] = stamps["warm_up"] - generator.warm_up_time_s
        stream = generator.stream_completion([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
        next(stream)
        stamps["first_token"] = time.time()
        stream.close()
    ends = [stamps[name] for name in PHASES]
    seconds = [end - start for start, end in zip([began, *ends], ends, strict=False)]
    print(json.dumps({f"{name}_s": value for name, value in zip(PHASES, seconds, strict=True)}))


def run(arguments: dict[str, Any], repeats: int, progress: Callable[[str], None]) -> list[Row]:
    """Start once with an empty kernel cache, then `repeats` times with what that has compiled.

    With `kernel_cache` among the arguments, the first start takes its kernels from there.

    Args:
        arguments: of `LoadOptions`.
    Returns:
        A row for each kind of start: `caches`, `kernels` (those compiled by the first of these starts), and for each of PHASES,
        and `total_s`, a summary of seconds.
    Raises:
        MinirtError: a start has failed.
    """
    with tempfile.TemporaryDirectory() as cache:
        taken = arguments.get("kernel_cache")
        before = sum(1 for _ in Path(taken).glob("*/*.cubin")) if taken else 0
        first = _start(arguments, cache)
        kernels = sum(1 for _ in Path(cache).glob("*/*.cubin")) - before
        kind = "taken" if taken else "empty"
        progress(f"{kind} kernel cache: {first['total_s']:.1f} s, {kernels} kernels compiled")
        warm = [_start(arguments, cache) for _ in range(repeats)]
    kinds: list[tuple[str, int, list[dict[str, float]]]] = [(kind, kernels, [first]), ("warm", 0, warm)]
    return [
        {"caches": name, "kernels": count} | {phase: summarize([start[phase] for start in starts]) for phase in first}
        for name, count, starts in kinds
    ]


def _start(arguments: dict[str, Any], cache: str) -> dict[str, float]:
    command = [sys.executable, "-c", f"from {__name__} import child; child({time.time()!r})"]
    environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, input=pickle.dumps(arguments), env=environment, capture_output=True, check=False)
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
