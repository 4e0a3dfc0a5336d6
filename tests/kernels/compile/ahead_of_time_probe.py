"""Launch kernels in `AheadOfTime` on a fake driver that only counts, and print the counts as JSON.

test_ahead_of_time.py runs this in its own process, without TRITON_INTERPRET.
"""

import json
import threading
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from compile_all import CompileOnly
from triton.runtime import JITFunction, OutOfResources, build, driver

from minirt.kernels.compile.ahead_of_time import AheadOfTime

GPU = torch.device("cuda", 1)
shared = ModuleType("launcher")
on, loaded, launched, compiled, modules = threading.local(), [], [], [], []


@triton.jit
def small(x, n, SCALE: tl.constexpr):
    i = tl.program_id(0)
    tl.store(x + i, SCALE * n)


@triton.jit
def large(x, out):
    a = tl.load(x + tl.arange(0, 128)[:, None] * 128 + tl.arange(0, 128)[None, :])
    tl.store(out + tl.arange(0, 128)[:, None] * 128 + tl.arange(0, 128)[None, :], tl.dot(a, a))


class Launcher:
    """Calls `launch` like Triton's launcher calls its C function, which here only records."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, name: str) -> None:
        modules.append(build._load_module_from_path("launcher", f"{name} {len(modules)}"))
        self.launch = lambda *arguments: launched.append(name)

    def __call__(self, *arguments: Any) -> None:
        self.launch(*arguments)


class Counting(CompileOnly):
    """A fake GPU with little shared memory. It records loads and launches and runs nothing."""

    def __init__(self) -> None:
        super().__init__(90)
        build._load_module_from_path = import_again
        properties = {"max_shared_mem": 16384}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties, load_binary=self.load, unload_module=lambda module: None
        )  # fmt: skip

    def load(self, name: str, kernel: bytes, size: int, device: int) -> tuple[int, int, int, int, int]:
        loaded.append([name, getattr(on, "device", None)])
        return 1, 2, 3, 0, 1024

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        return Launcher(metadata.name)


@contextmanager
def current(device: torch.device):
    on.device = str(device)
    yield
    on.device = None


def import_again(name: str, path: str) -> ModuleType:
    """Like Python's import of extension modules of one name: all share the contents of the last import."""
    shared.launch = path
    return shared


def attempt(action, kind=OutOfResources) -> str | None:
    try:
        action()
    except kind as error:
        return type(error).__name__
    return None


def interrupt() -> None:
    raise KeyboardInterrupt


def ahead(*actions, ignore_errors=False, **options) -> None:
    with AheadOfTime(GPU, **options) as compiler:
        for action in actions:
            compiler.add(action)
        compiler.wait(ignore_errors=ignore_errors)


def elsewhere(action) -> None:
    """Run `action` in another thread and wait for it."""
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def overlapping(action) -> list[int]:
    """Numbers of launches that ran in four situations.

    In another thread while this one compiles ahead; in this thread while another compiles ahead; then in this and in another
    thread while no thread compiles ahead.
    """
    counts, left, entered = [], threading.Event(), threading.Event()

    def count(run=lambda work: work()) -> None:
        before = len(launched)
        run(action)
        counts.append(len(launched) - before)

    def other() -> None:
        ahead(lambda: (entered.set(), left.wait()))

    def inside() -> None:
        count(elsewhere)
        second.start()
        entered.wait()

    second = threading.Thread(target=other)
    ahead(inside)
    count()
    left.set()
    second.join()
    count()
    count(elsewhere)
    return counts


def main() -> None:
    driver.set_active(Counting())
    torch.cuda.device = current
    triton.knobs.compilation.listener = lambda *, src, **rest: compiled.append(src.fn.__name__)
    run, progress, x, wide = JITFunction.run, [], torch.empty(16), torch.empty(128, 128, dtype=torch.bfloat16)

    def launch(scale: int):
        small[1,](x, 7, scale)

    def too_large():
        large[1,](wide, wide)

    actions = [partial(launch, scale) for scale in (2, 3, 2, 3, 2)]
    ahead(*actions, progress=lambda *step: progress.append(step))
    first = {"compiled": list(compiled), "loaded": list(loaded), "launched": list(launched), "progress": progress}
    launch(2), launch(3)
    then = {"compiled": list(compiled), "loaded": list(loaded), "launched": list(launched)}
    known = len(compiled)
    with AheadOfTime(GPU) as compiler:
        compiler.add(lambda: launch(20))
        launch(20)
    early = len(compiled) - known
    raised = attempt(lambda: ahead(too_large, lambda: launch(4)))
    ahead(too_large, lambda: launch(5), ignore_errors=True)
    ended = attempt(lambda: ahead(*[partial(launch, scale) for scale in range(6, 12)], interrupt), KeyboardInterrupt)
    before = len(launched)
    left = attempt(too_large)
    launch(5), launch(11)
    both = overlapping(lambda: launch(5))
    after = len(launched) - before - sum(both)
    results = {
        "first": first, "then": then, "early": early, "raised": raised, "left": left, "ended": ended, "after": after,
        "both": both, "modules": [module.launch for module in modules],
        "restored": JITFunction.run is run,
    }  # fmt: skip
    print(json.dumps(results))


if __name__ == "__main__":
    main()
