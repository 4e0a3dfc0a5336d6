"""Decode speed on a CPU for each spin count and number of threads, on an idle and on a loaded machine.

python bench/tools/threads.py [--model embedded] [--threads 1,2] [--spins default,10000] [--runs 5] [--seconds 1.5] [--busy 6]

Prints JSON. Takes about four minutes; the machine must do nothing else. Each setting has a process of its own, because OpenMP
reads its variables once. All processes load the model first. Then they take turns, so that a change of the machine's state
reaches all of them. A "loaded" machine has `--busy` other processes that compute; they run during its measurements only.
"default" is OpenMP's own behaviour, "passive" its policy OMP_WAIT_POLICY=passive, "minirt" what minirt sets; numbers are
GOMP_SPINCOUNT. The choice: the largest loaded speed among the settings that keep 95% of the idle speed of "default".

Every thread that starts parallel work has an OpenMP pool of its own. The engine's thread is the one that computes, so
`engine_threads` is the number that PyTorch states there.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

SPINS = ("default", "passive", "0", "1000", "3000", "10000", "30000", "100000")
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def child(model: str, threads: int, spin: str) -> None:
    """Load a model and print how many threads its engine has. Then generate for as many seconds as a line on stdin says, for each
    line, and print tokens per second."""
    if spin == "default":
        import torch  # before minirt, which then leaves the spin count alone

    from minirt import Generator, SamplingParams

    with Generator.from_pretrained(model, device="cpu", threads=threads, kv_cache_memory=64 << 20) as generator:
        import torch

        params = SamplingParams(max_tokens=generator.max_len - 8, temperature=0, ignore_eos=True)

        def speed(seconds: float) -> float:
            started, count = time.perf_counter(), 0
            while True:
                with closing(generator.stream_completion([1, 2, 3], params)) as pieces:
                    for piece, _ in pieces:
                        count += len(piece.token_ids)
                        taken = time.perf_counter() - started
                        if taken > seconds:
                            return count / taken

        speed(0.2)
        print(generator._engine.call(lambda engine: torch.get_num_threads()), flush=True)
        for line in sys.stdin:
            print(speed(float(line)), flush=True)


@contextmanager
def started(model: str, threads: int, spin: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A child that waits to be asked, and how many threads its engine has."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    if spin == "passive":
        environment["OMP_WAIT_POLICY"] = "passive"
    elif spin not in ("default", "minirt"):
        environment["GOMP_SPINCOUNT"] = spin
    command = [sys.executable, __file__, "--child", model, str(threads), spin]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process, int(_line(process))
    finally:
        process.kill()
        process.wait()


def measure(process: "subprocess.Popen[str]", seconds: float) -> float:
    print(seconds, file=process.stdin, flush=True)
    return float(_line(process))


def _line(process: "subprocess.Popen[str]") -> str:
    line = process.stdout.readline() if process.stdout else ""
    if not line:
        sys.exit(f"{process.args!r}: exit code {process.wait()}")
    return line


class Busy:
    """Processes that compute while they are not stopped."""

    def __init__(self, count: int) -> None:
        self._processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
        self._send(signal.SIGSTOP)

    def _send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._send(signal.SIGCONT)
        try:
            yield
        finally:
            self._send(signal.SIGSTOP)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--threads", default=f"1,{os.cpu_count()}")
    parser.add_argument("--spins", default=",".join(SPINS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one measurement; on the loaded machine twice as long")
    parser.add_argument("--busy", type=int, default=3 * (os.cpu_count() or 1))
    asked = parser.parse_args()
    threads = sorted({int(word) for word in asked.threads.split(",")})
    spins = asked.spins.split(",")
    settings = [(spin, count) for count in threads for spin in (spins if count > 1 else ["default"])]
    speeds: dict[tuple[str, str, int], list[float]] = {}
    with ExitStack() as stack:
        busy = Busy(asked.busy)
        stack.callback(busy.close)
        children = {setting: stack.enter_context(started(asked.model, setting[1], setting[0])) for setting in settings}
        for _ in range(asked.runs):
            for (spin, count), (process, _) in children.items():
                speeds.setdefault(("idle", spin, count), []).append(measure(process, asked.seconds))
                with busy.running():
                    speeds.setdefault(("loaded", spin, count), []).append(measure(process, 2 * asked.seconds))
    from minirt.bench.report import machine
    from minirt.device import pick_device

    shared = machine("threads", pick_device("cpu"), ["python", "bench/tools/threads.py", *sys.argv[1:]], None)
    results = [
        {"state": state, "spin": spin, "threads": count, "engine_threads": children[spin, count][1], "tokens_per_s": runs,
         "median": statistics.median(runs)}
        for (state, spin, count), runs in speeds.items()
    ]  # fmt: skip
    print(json.dumps(shared | {"model": asked.model, "busy_processes": asked.busy, "results": results}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main()
