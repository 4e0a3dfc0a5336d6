"""The stored results, and what scripts of this folder print."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from minirt.bench.ceiling import Ceiling

Result = Any  # the content of a file: a dictionary, or (older results of loading) a list of dictionaries
Records = Mapping[str, Result]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
GPUS = "h200", "h100-80gb-hbm3"  # those with stored results; the names of these begin so, see `collect.prefix`

FORMATS = ("bf16", "fp8")


def mark(record: Result) -> str:
    """What marks a figure whose result was not checked in the run that timed it."""
    return "" if record.get("correctness", {"checked": True})["checked"] else "†"


# minirt and vLLM, whose engine is a process of its own, as is its default. They ran on two cards of one type.
BESIDE_VLLM = "h100-80gb-hbm3-beside-vllm-default"
IN_PROCESS = "h100-80gb-hbm3-beside-vllm"  # earlier, vLLM's engine in the caller's process; on one card

Key = tuple[Any, ...]  # ("step", batch, context), ("prompt", tokens) or `OFFLINE`
OFFLINE: Key = ("offline",)


class Run(NamedTuple):
    """One run of an engine in `BESIDE_VLLM` or `IN_PROCESS`.

    Attributes:
        engine: "minirt" or "vLLM".
        build: its commit or its version.
        versions: of torch and Triton.
        note: what the engine lacked, or an empty text.
        values: seconds of a step or prompt, output tokens per second offline: all measurements, ascending.
    """

    engine: str
    build: str
    versions: dict[str, str]
    note: str
    values: dict[Key, tuple[float, ...]]


def _run(run: Result) -> Run:
    values: dict[Key, Any] = {}
    for row in run["results"]:
        if "input_len" in row:
            values["prompt", row["input_len"]] = row["time_to_first_token_s"]
        else:
            values["step", row["batch_size"], row["context_len"]] = row["step_s"]
    if run["output_tokens_per_s"] is not None:
        values[OFFLINE] = run["output_tokens_per_s"]
    several = {key: tuple(sorted(value)) if isinstance(value, list) else (value,) for key, value in values.items()}
    return Run(run["engine"], run.get("commit") or run["version"], run["versions"], run.get("note", ""), several)


def run_of(record: Result, engine: str, form: str) -> Run:
    """The first run of an engine in a format."""
    return _run(next(run for run in record["runs"] if (run["engine"], format_of(run)) == (engine, form)))


def latest(record: Result) -> Run:
    """The last run of minirt."""
    return _run([run for run in record["runs"] if run["engine"] == "minirt"][-1])


class Point(NamedTuple):
    """A point of a comparison.

    Attributes:
        ours, theirs: minirt's and vLLM's measurements, ascending; empty if there are none.
        in_process: vLLM was measured in the caller's process only.
    """

    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    in_process: bool


def points_of(records: Records, form: str) -> dict[Key, Point]:
    """All points of a format: steps by context and batch, prompts, offline. vLLM's default setting is preferred."""
    ours, theirs = (run_of(records[BESIDE_VLLM], engine, form).values for engine in ("minirt", "vLLM"))
    older = run_of(records[IN_PROCESS], "vLLM", form).values
    kinds = "step", "prompt", "offline"
    keys = sorted({*ours, *theirs, *older}, key=lambda key: (kinds.index(key[0]), key[2:], key[1:]))
    return {key: Point(ours.get(key, ()), theirs.get(key) or older.get(key, ()), key not in theirs) for key in keys}


def stack_of(run: Run) -> str:
    """An engine with the versions below it."""
    build = f"`{run.build}`" if run.engine == "minirt" else run.build  # a commit, or a version
    return f"{run.engine} {build} with torch {run.versions['torch']} and Triton {run.versions['triton']}"


def format_of(record: Result) -> str:
    """The format of a checkpoint that is quantized, else one of `FORMATS`."""
    if record.get("stored"):
        return record["stored"]
    return "fp8" if record.get("quantization") or "fp8" in record.get("dtype", "") else "bf16"


def title_of(form: str) -> str:
    return "`--fp8`" if form == "fp8" else form


def load(name: str) -> Result:
    """The content of a stored result; for a .jsonl file, a list with its lines."""
    lines = RESULTS / f"{name}.jsonl"
    if lines.exists():
        return [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def files_of(sources: tuple[str, ...]) -> list[Path]:
    """The files of the stored results that match `sources`, each once, in the order of the sources."""
    return list(dict.fromkeys(file for source in sources for file in sorted(RESULTS.glob(f"{source}.json*"))))


def stored(sources: tuple[str, ...]) -> dict[str, Result]:
    """The stored results that match `sources`, by name."""
    return {file.stem: load(file.stem) for file in files_of(sources)}


def print_record(benchmark: str, device: str = "auto", ceiling: "Ceiling | None" = None, **facts: Any) -> None:
    """Print what a script of this folder has measured as JSON, after the machine, the versions and the script's command line."""
    from minirt.bench.report import machine
    from minirt.device import pick_device

    command = ["python", f"bench/tools/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    print(json.dumps(machine(benchmark, pick_device(device), command, ceiling) | facts, indent=1, ensure_ascii=False))
