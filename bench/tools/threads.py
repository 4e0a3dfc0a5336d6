"""Decode speed on a CPU for each spin count and number of threads, on an idle and on a loaded machine.

python bench/tools/threads.py [--model embedded] [--threads 1,2] [--spins default,10000] [--runs 5] [--tokens 300] [--busy 6]

Prints JSON. Run it on a machine that does nothing else. Each run is a new process: OpenMP reads its variables once. "loaded"
means that BUSY processes compute beside it. The settings take turns, so that a change of the machine's state reaches all of them.
"default" is OpenMP's own behaviour, "passive" its policy OMP_WAIT_POLICY=passive, "minirt" what minirt sets; numbers are
GOMP_SPINCOUNT. The choice: the largest loaded speed among the settings that keep 95% of the idle speed of "default".
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SPINS = ("default", "passive", "0", "300", "1000", "3000", "10000", "30000", "100000", "minirt")
SECONDS = 20.0  # a run ends then at the latest
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def child(model: str, threads: int, tokens: int, spin: str) -> None:
    """Load a model, generate, and print tokens per second."""
    import time

    if spin == "default":
        import torch  # noqa: F401 (before minirt, which then leaves the spin count alone)

    from minirt import Generator, SamplingParams

    with Generator.from_pretrained(model, device="cpu", threads=threads, kv_cache_memory=64 << 20) as generator:
        prompt = [1, 2, 3]
        generator.generate(prompt, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        pieces = generator.stream(prompt, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))
        next(pieces)
        started, count = time.perf_counter(), 0
        for piece in pieces:
            count += len(piece.token_ids)
            if time.perf_counter() - started > SECONDS:
                break
        print(count / (time.perf_counter() - started))


def measure(model: str, threads: int, tokens: int, spin: str) -> float:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    if spin == "passive":
        environment["OMP_WAIT_POLICY"] = "passive"
    elif spin not in ("default", "minirt"):
        environment["GOMP_SPINCOUNT"] = spin
    command = [sys.executable, __file__, "--child", model, str(threads), str(tokens), spin]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{spin}, {threads} threads: exit code {done.returncode}: {done.stderr.strip()[-1000:]}")
    return float(done.stdout)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Context in which `count` processes compute."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--threads", default=f"1,{os.cpu_count()}")
    parser.add_argument("--spins", default=",".join(SPINS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--busy", type=int, default=3 * (os.cpu_count() or 1))
    asked = parser.parse_args()
    threads = sorted({int(word) for word in asked.threads.split(",")})
    spins = asked.spins.split(",")
    settings = [(spin, count) for count in threads for spin in (spins if count > 1 else ["default"])]
    speeds: dict[tuple[str, str, int], list[float]] = {}
    for state, load in (("idle", 0), ("loaded", asked.busy)):
        with busy(load):
            for _ in range(asked.runs):
                for spin, count in settings:
                    speeds.setdefault((state, spin, count), []).append(measure(asked.model, count, asked.tokens, spin))
    from minirt.bench.report import machine
    from minirt.device import pick_device

    shared = machine("threads", pick_device("cpu"), ["python", "bench/tools/threads.py", *sys.argv[1:]], None)
    results = [
        {"state": state, "spin": spin, "threads": count, "tokens_per_s": runs, "median": statistics.median(runs)}
        for (state, spin, count), runs in speeds.items()
    ]
    print(json.dumps(shared | {"model": asked.model, "busy_processes": asked.busy, "results": results}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    else:
        main()
