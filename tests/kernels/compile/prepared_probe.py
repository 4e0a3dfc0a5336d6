"""Launch every kernel by Triton and prepared, on a fake driver, and print where the two differ, as JSON.

test_prepared.py runs this in its own process, without TRITON_INTERPRET. Nothing is compiled: each specialization gets a number.
A launch is described by the number of its kernel and by all that Triton passes to its C function.
"""

import json
import pkgutil
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from compile_all import CompileOnly, every_kernel
from triton import jit, knobs
from triton.backends.nvidia import driver as nvidia
from triton.compiler import compiler
from triton.runtime import JITFunction, driver

from minirt import kernels
from minirt.kernels import bandwidth, launch, prepared
from minirt.kernels.compile.ahead_of_time import AheadOfTime, without_launches
from minirt.kernels.linear import dispatch as linear

CC = 90
calls: list[tuple[Any, ...]] = []  # what the C function was called with
encoded: list[tuple[Any, ...]] = []  # the TMA descriptors
numbers: dict[str, int] = {}


def c_function(*arguments: Any) -> None:
    calls.append(arguments)


class Launcher(nvidia.CudaLauncher):
    """Triton's launcher, with a C function that only records."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.launch = nvidia.wrap_handle_tensordesc(c_function, dict(src.signature), metadata.tensordesc_meta)
        self.num_ctas, self.gsan_enabled, self.launch_cooperative_grid = 1, False, False
        self.launch_pdl = metadata.launch_pdl
        self.global_scratch_size, self.profile_scratch_size = metadata.scratch, 0
        self.global_scratch_align = self.profile_scratch_align = 1
        self.arg_annotations, self.kernel_signature = ["annotations"], b"signature"


class Device(CompileOnly):
    def __init__(self) -> None:
        super().__init__(CC)
        self.current, self.launcher_cls = 0, Launcher
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20}, unload_module=lambda module: None,
            load_binary=lambda name, kernel, size, device: (1, kernel, 3, 0, 1024), fill_tma_descriptor=self.encode,
            fill_tma_descriptor_tiled=self.encode,
        )  # fmt: skip

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int) -> int:
        return 700 + device

    def encode(self, *facts: Any) -> tuple[Any, ...]:
        encoded.append(facts)
        return "map", *(tuple(fact) if isinstance(fact, list | tuple) else fact for fact in facts)


class Numbered(compiler.CompiledKernel):
    """A compiled kernel that is only a number, the same for equal specializations."""

    def __init__(self, src: Any, options: Any) -> None:
        facts = (src.fn.__name__, src.signature, src.constants, src.attrs, options.__dict__)
        self.kernel = numbers.setdefault(repr(facts), len(numbers))
        self.src, self.name, self.hash, self.metadata_group = src, src.fn.__name__, str(self.kernel), {}
        kinds = [kind for kind in src.signature.values() if isinstance(kind, str) and kind.startswith("tensordesc")]
        meta = {"swizzle": 3, "elem_size": 2, "elem_type": 1, "block_size": (8, 8), "fp4_padded": False}
        self.metadata = SimpleNamespace(
            name=self.name, shared=100, num_warps=options.num_warps, warp_size=32, num_ctas=1, launch_pdl=options.launch_pdl,
            tensordesc_meta=[meta | {"number": self.kernel, "at": at} for at, _ in enumerate(kinds)], tmem_size=None,
            scratch=64 * (self.name == "scratch"),
        )  # fmt: skip
        self.packed_metadata = (options.num_warps, 1, self.kernel)
        self.module = self.function = self._run = self._module_pid = None

    def __del__(self) -> None:
        pass


def number(src: Any, target: Any = None, options: Any = None, **rest: Any) -> Numbered:
    return Numbered(src, compiler.make_backend(target).parse_options(dict(options)))


@prepared.prepared
@jit(do_not_specialize=["n"])
def several(x, y, n, m, scale, SIZE: tl.constexpr, FLAG: tl.constexpr = False):
    pass


@prepared.prepared
@jit
def scratch(x):
    pass


@prepared.compile_time
class Sizes(NamedTuple):
    a: int
    b: int
    c: int


@prepared.prepared
@jit
def constants_last(x, C):
    pass


class Tensor(torch.Tensor):
    pass


def launched(work: Callable[[], object]) -> list[tuple[Any, ...]]:
    """The C function's calls, with addresses instead of tensors, and without the hooks, which Triton passes even if empty."""
    calls.clear()
    work()
    return [tuple(plain(argument) for argument in call) for call in calls]


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, knobs.HookChain | compiler.LazyDict):
        return None
    return tuple(map(plain, value)) if isinstance(value, tuple | list) else value


def compared(kernel: Any, grid: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> list[str]:
    """Launches once by Triton and twice prepared, and says what differs."""
    token = prepared.by_triton.set(True)
    wanted = launched(lambda: kernel[grid](*arguments, **options))
    prepared.by_triton.reset(token)
    first, second = (launched(lambda: kernel[grid](*arguments, **options)) for _ in range(2))
    results = (("first", first), ("second", second))
    return [f"{kernel.fn.__name__} {name}: {result} instead of {wanted}"[:2000] for name, result in results if result != wanted]


def changed(value: Any, constexpr: bool) -> list[Any]:
    """Other values of an argument, which Triton may specialize differently."""
    if isinstance(value, prepared.Tiled):
        flat, rows, row = value.tensor.reshape(-1), len(value.tensor), value.tensor[:1].numel()
        other = torch.empty_like(value.tensor, dtype={1: torch.int8, 2: torch.float16}.get(value.tensor.element_size()))
        moved = flat[16 * row :].view(-1, *value.tensor.shape[1:]) if rows > 16 else other
        half, strided = value.tensor[: rows // 2], value.tensor[: rows // 2 * 2 : 2]  # they differ only in the stride
        tile, tensors = value.tile, [moved, other, half, *([strided] if value.tensor.ndim == 2 else [])]
        narrow = () if tile._width is None else (prepared.Tile(tile._make, tile._block, *tile._layout, width=tile._width // 2),)
        return [*(value._replace(tensor=t) for t in tensors if len(t)), *(value._replace(tile=t) for t in narrow), None]
    if isinstance(value, tuple) and not hasattr(value, "_asdict"):  # numbers of a constant
        return [(*value, 7)]
    if isinstance(value, tuple):  # a record
        constant = type(value) in prepared._CONSTANTS
        fields = value._asdict().items()
        return [value._replace(**{name: new}) for name, field in fields for new in changed(field, constexpr or constant)]
    if isinstance(value, str):
        return [value + "_"]
    if isinstance(value, torch.Tensor):
        other = {1: torch.int8, 2: torch.int16, 4: torch.float32, 8: torch.float64}[value.element_size()]
        return [value.reshape(-1)[1:], value.view(other), None]
    if isinstance(value, bool):
        return [not value]
    if constexpr:
        return [value + 1] if isinstance(value, int) else []
    if isinstance(value, int):
        return [1, 16, 17, 0, -16, 2**31 - 1, 2**31, 2**40, 2**63, True, 1.5]
    return [value + 1.0, 3] if isinstance(value, float) else []


def kind(value: Any) -> Any:
    """The type of an argument; of a record, those of its fields."""
    record = isinstance(value, tuple) and not isinstance(value, prepared.Tiled)
    return (type(value), *map(type, value)) if record else type(value)


def variants(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> list[tuple[tuple, dict[str, Any]]]:
    constexprs = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    others: list[tuple[tuple, dict[str, Any]]] = []
    for at, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        others += [((*arguments[:at], new, *arguments[at + 1 :]), options) for new in changed(value, name in constexprs)]
    for name, value in options.items():
        other = not value if isinstance(value, bool) else 2 * value if isinstance(value, int) else value
        others += [(arguments, options | {name: other})]
    return others


def other_kernels() -> None:
    """Kernels that compile_all leaves out."""

    def ints(*shape: int, like: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=like)

    bandwidth.read_sums(torch.zeros(70000))
    # On Hopper, `gemv_int4` is left with activations of 32 bits.
    linear.norm_linear(torch.zeros(1, 577), torch.zeros(577), 1e-6, ints(131, 160, like=torch.int16), scale=ints(5, 131))


def names(kind: type) -> list[str]:
    """The names of all kernels of minirt that are launched by the host and are of this kind."""
    modules = [import_module(module.name) for module in pkgutil.walk_packages(kernels.__path__, "minirt.kernels.")]
    values = (value for module in modules for value in vars(module).values() if isinstance(value, kind))
    return sorted({value.fn.__name__ for value in values if value.fn.__name__.endswith("_kernel")})


def everything(differences: list[str], seen: set[str]) -> None:
    """Every kernel of compile_all, as it is called there and, the first time with these types, with each argument changed."""
    shapes: set[Any] = set()
    real = prepared.PreparedKernel.__getitem__

    def getitem(kernel: Any, grid: Any) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            prepared.PreparedKernel.__getitem__ = real
            seen.add(kernel.fn.__name__)
            kinds = (kernel.fn, *map(kind, arguments), *options)
            others = variants(kernel, arguments, options) if kinds not in shapes else []
            shapes.add(kinds)
            for operands, settings in [(arguments, options), *others, (arguments, options)]:
                differences.extend(compared(kernel, grid, operands, settings))
            prepared.PreparedKernel.__getitem__ = getitem

        return call

    prepared.PreparedKernel.__getitem__ = getitem
    every_kernel(CC, torch.bfloat16)
    other_kernels()
    prepared.PreparedKernel.__getitem__ = real


def special_cases(device: Device) -> dict[str, Any]:
    """Launches that are not prepared, and what takes part in the key besides arguments."""
    x, y, seen = torch.zeros(64), torch.zeros(64), dict[str, Any]()
    real, mine = JITFunction.run, []

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        mine.append(self.fn.__name__)
        return real(self, *arguments, **options)

    def count(*works: Callable[[], object]) -> list[int]:
        """For each piece of work, how many launches reached the C function, and how many of them went through Triton."""
        JITFunction.run = run
        counts = []
        for work in works:
            mine.clear()
            counts.append([len(launched(work)), len(mine)])
        JITFunction.run = real
        return counts

    def plainly(n: int = 7, m: int = 8) -> None:
        several[(3,)](x, y, n, m, 0.5, SIZE=4, num_warps=2)

    def on_another_device() -> None:
        device.current = 1
        plainly()
        device.current = 0

    def hooked() -> None:
        knobs.runtime.launch_enter_hook.add(print)
        plainly()
        knobs.runtime.launch_enter_hook.remove(print)

    def ahead() -> None:
        with AheadOfTime(torch.device("cuda", 0)) as compiler:
            compiler.add(plainly)
            compiler.wait(ignore_errors=True)

    def skipped() -> None:
        with without_launches(torch.device("cuda", 0)):
            plainly()

    torch.cuda.device = lambda device: warnings.catch_warnings()
    seen["again"] = count(plainly, plainly, plainly)
    seen["keywords"] = count(lambda: several[(3,)](x, n=7, y=y, scale=0.5, m=8, SIZE=4, FLAG=False, num_warps=2))
    seen["device"] = count(on_another_device, on_another_device, plainly)
    seen["hook"] = count(hooked, plainly)
    seen["large"] = count(*[lambda: plainly(2**31)] * 2)
    seen["subclass"] = count(*[lambda: several[(3,)](x.as_subclass(Tensor), y, 7, 8, 0.5, SIZE=4)] * 2)
    seen["ahead"] = count(ahead, plainly)
    seen["skipped"] = count(skipped, plainly)
    matrix, before = prepared.tiled(torch.zeros(8, 8), 8, 8), [len(encoded)]
    for _ in range(5):
        several[(1,)](matrix, y, 7, 8, 0.5, SIZE=4)
        before.append(len(encoded))
    seen["encoded"] = [after - early for early, after in pairwise(before)]
    call = Launcher.__call__
    Launcher.__call__ = lambda self, *rest: self.launch(*rest)  # as Triton 3.6: arguments one by one, not as a tuple
    seen["constants last"] = count(*[lambda: constants_last[(1,)](x, Sizes(1, 2, 3))] * 2)
    Launcher.__call__ = call
    seen["scratch"] = count(*[lambda: scratch[(1,)](x)] * 3)
    grids = ((5,), (5, 6), (5, 6, 7), [8, 9])
    works = [lambda grid=grid: several[grid](x, y, 7, 8, 0.5, SIZE=4, num_warps=2) for grid in grids]
    seen["grids"] = [call[:4] for work in works for call in launched(work)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call, Launcher.__call__ = Launcher.__call__, lambda self, *rest: self.launch(*reversed(rest))
        seen["other"] = count(*[lambda: plainly(m=16)] * 3, *[lambda: plainly(m=1)] * 2, plainly)
        Launcher.__call__ = call
    seen["said"] = [str(warning.message) for warning in caught if "launched by Triton" in str(warning.message)]
    return seen


def main() -> None:
    device = Device()
    driver.set_active(device)
    triton.compiler.compile = number
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8))
    launch._INTERPRETER, launch._INTERPRETER_SMS = CC, 132
    launch.capability.cache_clear()
    prepared._MOST_MAPS = 9  # so that they are forgotten now and then
    result: dict[str, Any] = {"prepared": names(prepared.PreparedKernel), "all": names(JITFunction)}
    if sys.argv[1:]:  # every kernel, which takes half a minute
        differences, seen = list[str](), set[str]()
        everything(differences, seen)
        result |= {"differences": differences[:5], "seen": sorted(seen)}
    print(json.dumps(result | special_cases(device)))


if __name__ == "__main__":
    main()
