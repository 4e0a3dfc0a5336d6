"""The effect of a GPU's power limit on decode steps and prompts: sustained runs, with their watts, clock and energy.

python bench/tools/power.py MODEL     random weights, bf16; all visible GPUs at once, one process for each; prints JSON

A GPU at its power limit lowers its clock. Then energy determines time, and a change that does not save energy saves no time. (The
energies of reading alone and of multiplying alone, each at its own clock, do not add up to a lower bound: products run at a lower
clock and voltage, where reading takes less energy.) In the last run, one engine for each GPU shares the host with the others.
"""

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from minirt.errors import MinirtError

SECONDS = 2.0  # least counted time of a sustained run, after WARM_UP
WARM_UP = 1.0
BATCHES = (1, 8, 64, 256)
CONTEXT = 192
PROMPT = 8192
_SM_CLOCK = 1  # NVML_CLOCK_SM


class Meter:
    """Energy, clock and power limit of one GPU, from the driver's library NVML."""

    def __init__(self, device: torch.device) -> None:
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise MinirtError("cannot load NVML, a library of NVIDIA's driver", where="libnvidia-ml.so.1", found=error) from None
        self._call("Init_v2")
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._handle = ctypes.c_void_p()
        self._call("DeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._nvml, f"nvml{name}")(*args)
        if code:
            raise MinirtError("NVML returned an error", where=f"nvml{name}", expected="code 0", found=code)

    def _read(self, name: str, kind: Any, *args: Any) -> int:
        value = kind()
        self._call(name, self._handle, *args, ctypes.byref(value))
        return value.value

    def joules(self) -> float:
        """Return the energy since the driver was loaded. The driver updates it about ten times per second."""
        return self._read("DeviceGetTotalEnergyConsumption", ctypes.c_ulonglong) / 1e3

    def sm_clock_mhz(self) -> int:
        return self._read("DeviceGetClockInfo", ctypes.c_uint, _SM_CLOCK)

    def most_sm_clock_mhz(self) -> int:
        return self._read("DeviceGetMaxClockInfo", ctypes.c_uint, _SM_CLOCK)

    def limit_w(self) -> float:
        return self._read("DeviceGetEnforcedPowerLimit", ctypes.c_uint) / 1e3


class Sustained(NamedTuple):
    """Means over the counted time; of the clock, the median."""

    seconds: float  # of a run
    watts: float
    sm_clock_mhz: float


def sustained(
    run: Callable[[], object], meter: Meter, seconds: float = SECONDS, clock: Callable[[], float] = time.perf_counter
) -> Sustained:
    """Call `run`, which must wait for the GPU, repeatedly. Counting starts and ends at updates of the energy counter."""
    began = clock()
    while clock() - began < WARM_UP:
        run()
    marks: list[tuple[float, float, int]] = []
    clocks, runs, seen = [], 0, meter.joules()
    while len(marks) < 2 or marks[-1][0] - marks[0][0] < seconds:
        run()
        runs += 1
        clocks.append(meter.sm_clock_mhz())
        now = meter.joules()
        if now != seen:
            marks.append((clock(), now, runs))
            seen = now
    (start, before, first), (end, after, last) = marks[0], marks[-1]
    return Sustained((end - start) / (last - first), (after - before) / (end - start), statistics.median(clocks))


def _row(what: str, run: Sustained, **facts: Any) -> dict[str, Any]:
    return {"what": what, **facts, **run._asdict(), "joules": run.watts * run.seconds}


def ceilings(meter: Meter) -> list[dict[str, Any]]:
    """Measure a GPU that waits at its full clock, a kernel that only reads memory, and a large matrix product."""
    from minirt.kernels.bandwidth import read_sums

    def waiting(run: Callable[[], object], times: int = 1) -> Callable[[], None]:
        def call() -> None:
            for _ in range(times):
                run()
            torch.cuda.synchronize()

        return call

    buffer = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    out = read_sums(buffer)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return [
        _row("awake", sustained(waiting(lambda: torch.cuda._sleep(20_000_000)), meter)),
        _row("reading", sustained(waiting(lambda: read_sums(buffer, out, check=False), 20), meter), bytes=20 * buffer.nbytes),
        _row("product", sustained(waiting(lambda: torch.mm(a, b.t()), 10), meter), flops=10 * 2 * 8192**3),
    ]


def measure(model: str) -> list[dict[str, Any]]:
    """Return all rows of the current GPU: ceilings, CUDA graphs of steps, a prompt, and the largest batch through `Generator`."""
    from minirt import Generator, SamplingParams
    from minirt.bench.decode import step_times
    from minirt.bench.flops import linear_flops, prompt_flops
    from minirt.bench.read_bytes import step_read_bytes
    from minirt.bench.replay import replay_times

    meter = Meter(torch.device("cuda", 0))
    rows = ceilings(meter)
    torch.cuda.empty_cache()
    load = {"device": "cuda", "random_weights": True, "max_num_seqs": max(BATCHES), "max_model_len": PROMPT + 256}
    load["prefix_cache"] = False  # repeats would measure the cache
    with Generator.from_pretrained(model, **load) as generator:  # type: ignore[arg-type]
        for batch in BATCHES:
            times: list[float] = []

            def step(batch: int = batch, times: list[float] = times) -> None:
                times += replay_times(generator, batch, CONTEXT)

            run = sustained(step, meter)._replace(seconds=statistics.median(times[len(times) // 2 :]))
            flops = linear_flops(generator.config, batch, batch)
            own = CONTEXT * generator.kv_bytes_per_token + generator.step_state_bytes  # of one sequence
            nbytes = step_read_bytes(generator.model, batch) + batch * own
            rows.append(_row("step", run, batch_size=batch, context_len=CONTEXT, bytes=nbytes, flops=flops))
        prompt = [(7919 * i) % generator.config.vocab_size for i in range(PROMPT)]
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        run = sustained(lambda: generator.generate([prompt], [params]), meter)
        rows.append(_row("prompt", run, input_len=PROMPT, flops=prompt_flops(generator.config, PROMPT)))
        steps, _, _ = step_times(generator, max(BATCHES), 128, repeats=3, sampling={"temperature": 0.0})
    median = statistics.median(steps)
    rows.append({"what": "generator", "batch_size": max(BATCHES), "context_len": 128, "seconds": median, "all": steps})
    return [{"limit_w": meter.limit_w(), "most_sm_clock_mhz": meter.most_sm_clock_mhz()} | row for row in rows]


def child(model: str, gpu: str) -> "subprocess.Popen[str]":
    """Start `measure` in a process that sees only this GPU."""
    command = [sys.executable, __file__, "--child", model]
    return subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu}, stdout=subprocess.PIPE, text=True)


def main(words: list[str]) -> None:
    if len(words) != 1:
        raise MinirtError("expected one model", found=" ".join(words) or "none", hint="power.py MODEL")
    from minirt.bench.report import machine
    from minirt.device import pick_device

    shared = machine("power", pick_device("cuda"), ["python", "bench/tools/power.py", *words], None)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    processes = [child(words[0], gpu) for gpu in gpus]
    printed = [process.communicate()[0] for process in processes]  # waits for all, even if one fails
    results = []
    for index, process in enumerate(processes):
        if process.returncode:
            raise MinirtError("a GPU's process failed", where=f"GPU {gpus[index]}", found=f"exit code {process.returncode}")
        results += [{"gpu": index} | row for row in json.loads(printed[index])]
    print(json.dumps(shared | {"model": words[0], "results": results}, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(sys.argv[2])))
    else:
        main(sys.argv[1:])
