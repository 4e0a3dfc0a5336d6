"""Send many deep and large requests to a real `minirt serve` of the embedded model, and report what they cost.

`python tests/tools/fuzz_requests.py COUNT [FIRST_SEED]`. It fails if a process ends or an answer is a 5xx. The times are seconds
of CPU of all processes of the server.
"""

import contextlib
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from fuzz.request_cases import case
from server.conftest import TEMPLATE
from support.server import Server

from minirt import models


def cpu(processes: list[psutil.Process]) -> float:
    """Seconds of CPU that the processes and their children have used, also those that have ended."""
    total = sum(sum(process.cpu_times()[:4]) for process in processes)
    for child in {child for process in processes for child in process.children()}.difference(processes):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:2])
    return total


def memory(processes: list[psutil.Process]) -> str:
    return ", ".join(f"{process.memory_info().rss >> 20} MiB" for process in processes)


def main(count: int, first: int = 0) -> int:
    folder = Path(tempfile.mkdtemp()) / "tiny"
    folder.mkdir()
    for file in Path(models.embedded()).iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").unlink()
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    server = Server(folder.parent / "log", "--model", folder, "--kv-cache-memory", "16MiB", "--max-model-len", 512).wait(600)
    processes = [psutil.Process(server.process.pid), server.engine]
    statuses, slow, bad = Counter[str](), list[tuple[float, int, str]](), list[str]()
    before = memory(processes)
    for seed in range(first, first + count):
        path, body = case(Random(seed))
        start = cpu(processes)
        try:
            status, _, answer = server.request("POST", path, body)
        except OSError as error:
            status, answer = 599, str(error).encode()
        statuses[f"{path} {status}"] += 1
        seconds = round(cpu(processes) - start, 2)
        slow = sorted([*slow, (seconds, seed, f"{path} {status} {answer[:300]!r}")])[-12:]
        if seconds > 1:
            print(f"{seconds} s, seed {seed}: {path} {status} {body[:120]!r} {answer[:200]!r}", flush=True)
        if status >= 500:
            bad.append(f"seed {seed}: {path} {status} {answer[:300]!r}")
            if not all(map(psutil.Process.is_running, processes)) or server.process.poll() is not None:
                break
        if seed % 200 == 0:
            figures = f"slowest {slow[-1][0]} s; front, engine {memory(processes)}; bad {len(bad)}"
            print(seed, dict(sum_of(statuses)), figures, flush=True)
    print(json.dumps(statuses, indent=1))
    print("\n".join(f"{seconds} s, seed {seed}: {text}" for seconds, seed, text in slow))
    print(f"memory of front, engine: {before}; afterwards {memory(processes)}")
    print("\n".join(bad) or "no process ended, no 5xx", f"exit code {server.stop()}", sep="\n")
    return bool(bad)


def sum_of(statuses: Counter[str]) -> Counter[str]:
    total = Counter[str]()
    for name, number in statuses.items():
        total[name.split()[1]] += number
    return total


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
