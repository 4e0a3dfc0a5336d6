"""Compile kernels ahead in other processes on a fake driver that only counts, and print the counts as JSON.

test_processes.py runs this in its own process, without TRITON_INTERPRET.
"""

import json
import os
import signal
import sys
import threading
import warnings

import torch
import triton
import triton.language as tl
from ahead_of_time_probe import GPU, Counting, current, launched, loaded
from triton.compiler.compiler import ASTSource
from triton.runtime import JITFunction, cache, driver

from minirt.kernels.compile import ahead_of_time
from minirt.kernels.compile.processes import CompileProcesses
from minirt.kernels.norm import rms_norm
from minirt.kernels.prepared import PreparedKernel
from minirt.kernels.sampling import sample

made: list[str] = []  # kernels whose compilation began in this process
servers: list[int] = []


@triton.jit
def script_kernel(x, SCALE: tl.constexpr):
    tl.store(x, SCALE)


class Ready(CompileProcesses):
    """One process, which is ready before the first request. With `end`, it is killed before the first request."""

    end = False

    def __init__(self, count: int) -> None:
        super().__init__(1)
        servers.append(self._server.pid)
        assert self._starting[0].poll(100), "no process in 100 s"
        if self.end:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()


def ahead(*actions) -> dict[str, list[str]]:
    made.clear()
    loaded.clear()
    steps: list[tuple[int, int, bool]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ahead_of_time.AheadOfTime(GPU, lambda *step: steps.append(step)) as compiler:
            for action in actions:
                compiler.add(action)
            compiler.wait()
    said = [str(warning.message) for warning in caught if "FP_FUSION" not in str(warning.message)]
    return {"made": sorted(made), "loaded": sorted(name for name, _ in loaded), "said": said, "steps": steps}


def norm(width: int):
    return lambda: rms_norm(torch.empty(3, width), torch.empty(width), 1e-6)


def depending_on_order() -> list[str]:
    """The sampler's kernels whose digest depends on which other kernels had one before."""
    functions = {name: value for name, value in vars(sample).items() if isinstance(value, JITFunction)}
    kernels = {name: value for name, value in functions.items() if isinstance(value, PreparedKernel)}

    def digests(names) -> dict[str, str]:
        for function in functions.values():
            function.hash, function.used_global_vals = None, {}
        return {name: kernels[name].cache_key for name in names}

    first, second = digests(kernels), digests(reversed(kernels))
    return [name for name in kernels if first[name] != second[name]]


def given_up() -> dict[str, object]:
    """A kernel that a process compiles when the compilers are closed, and its launch afterwards."""
    entered, never = threading.Event(), threading.Event()

    class Stuck(CompileProcesses):
        def compile(self, request):
            entered.set()
            never.wait()

        def close(self):
            never.set()
            super().close()

    def launch() -> None:
        rms_norm(torch.empty(3, 64, dtype=torch.bfloat16), torch.empty(64, dtype=torch.bfloat16), 1e-6)

    ahead_of_time.CompileProcesses, made[:] = Stuck, []
    with ahead_of_time.AheadOfTime(GPU) as compiler:
        compiler.add(launch)
        assert entered.wait(60), "the kernel is in Triton's cache"
    before = list(made)
    launched.clear()
    launch()
    return {"before": before, "made": list(made), "launched": len(launched)}


def main() -> None:
    digests = depending_on_order()
    driver.set_active(Counting())
    torch.cuda.device = current
    make_ir = ASTSource.make_ir

    def counted(self, *args, **options):
        made.append(self.fn.__name__)
        return make_ir(self, *args, **options)

    ASTSource.make_ir = counted
    ahead_of_time.CompileProcesses, ahead_of_time.compilers = Ready, lambda: 1  # one thread, so the process is always free
    seen = {"elsewhere": ahead(norm(64), norm(200)), "own": ahead(lambda: script_kernel[1,](torch.empty(16), 2), norm(600))}
    Ready.end = True
    seen["ended"] = ahead(norm(1100), norm(3000))
    python = sys.executable
    ahead_of_time.CompileProcesses, sys.executable = CompileProcesses, "/no/python"
    seen["none"] = ahead(norm(6000), norm(12000))
    servers.clear()
    seen["cached"] = ahead(norm(1100))
    count = len(servers)
    manager = cache.get_cache_manager
    del cache.get_cache_manager
    seen["missing"] = ahead(norm(100), norm(300))
    cache.get_cache_manager = lambda: "other arguments"
    seen["changed"] = ahead(norm(20))
    cache.get_cache_manager = manager
    sys.executable = python
    seen["given up"] = given_up()
    launched.clear()
    del triton.AsyncCompileMode
    seen["no mode"] = ahead(norm(10))
    triton.AsyncCompileMode = lambda pool: None
    seen["another mode"] = ahead(norm(16400))
    print(json.dumps(seen | {"servers": count, "launched": launched, "digests": digests}))


if __name__ == "__main__":
    main()
