"""The stored results, and what scripts of this folder print."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minirt.bench.ceiling import Ceiling

Result = Any  # the content of a file: a dictionary
Records = Mapping[str, Result]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"

FORMATS = ("bf16", "fp8")


def mark(record: Result) -> str:
    """What marks a figure whose result was not checked in the run that timed it."""
    return "" if record.get("correctness", {"checked": True})["checked"] else "†"


def format_of(record: Result) -> str:
    """The format of a checkpoint that is quantized, else one of `FORMATS`."""
    if record.get("stored"):
        return record["stored"]
    return "fp8" if record.get("quantization") or "fp8" in record.get("dtype", "") else "bf16"


def title_of(form: str) -> str:
    return "`--fp8`" if form == "fp8" else form


def load(name: str) -> Result:
    """The content of a stored result."""
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
