"""Emulated kernel launches: `install` replaces Triton's launches by them."""

import ctypes
import itertools
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from emulate.translate import Kernel
from minirt.kernels import launch

HOPPER = 90
COMPILER = ("g++", "-Og", "-w", "-std=c++17", "-fwrapv", "-fno-strict-aliasing", "-shared", "-fPIC")
FORMATS = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u32": "I", "u64": "Q", "fp32": "f"}
_folder = tempfile.TemporaryDirectory(prefix="emulate-")
_count = itertools.count()


class EmulationError(AssertionError):
    """A kernel did what it must not do. The message lists the findings with their PTX lines, and names the PTX file."""


class _Hopper:
    """The part of a Triton driver that compilation needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", HOPPER, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def install(seed: int, without: Sequence[str] = ()) -> None:
    """Compile all kernels for Hopper and emulate them from now on. `without`: prefixes of instructions to leave out."""
    if shutil.which(COMPILER[0]) is None:
        raise RuntimeError(f"{COMPILER[0]} is needed to emulate kernels")
    driver.set_active(_Hopper())
    modules = [module for name, module in sys.modules.items() if name.startswith("minirt.kernels")]
    for module in modules:
        if hasattr(module, "capability"):
            module.capability = lambda device: HOPPER  # type: ignore[attr-defined]
    launch.capability = lambda device: HOPPER  # type: ignore[assignment]  # for modules imported later
    compile_ = jit.JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        compiled = compile_(self, *args, grid=(1,), warmup=True, **kwargs)
        values = dict(zip(self.arg_names, args, strict=False)) | {name: kwargs[name] for name in self.arg_names if name in kwargs}
        sizes = tuple(grid(values) if callable(grid) else grid)
        _launch(compiled, values, (*sizes, 1, 1)[:3], seed + next(_count), tuple(without))

    jit.JITFunction.run = run


@cache
def _program(ptx: str, without: tuple[str, ...]) -> tuple[Kernel, Callable[..., bytes], Path]:
    kernel = Kernel(ptx, without)
    path = Path(_folder.name) / f"{next(_count)}.ptx"
    path.write_text(ptx)
    path.with_suffix(".cpp").write_text(kernel.source)
    library = path.with_suffix(".so")
    subprocess.run([*COMPILER, str(path.with_suffix(".cpp")), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).run
    function.restype = ctypes.c_char_p
    return kernel, function, path


def _launch(compiled: Any, values: dict[str, Any], grid: tuple[int, ...], seed: int, without: tuple[str, ...]) -> None:
    kernel, function, path = _program(compiled.asm["ptx"], without)
    packed, memory = [], []
    for value, kind in _flat(values, compiled.src.signature):
        if kind != "constexpr":
            bytes_, tensor = _packed(value, kind)
            packed += bytes_
            memory += [tensor.untyped_storage()] if tensor is not None else []
    packed += [bytes(size) for _, size in kernel.parameters[len(packed) :]]  # Triton's scratch pointers, which no kernel uses
    end = sum(kernel.parameters[-1])
    buffer = ctypes.create_string_buffer(end + 64)
    start = -ctypes.addressof(buffer) % 64
    for (offset, size), value in zip(kernel.parameters, packed, strict=True):
        if len(value) != size:
            raise EmulationError(f"{compiled.name}: wrong size of a parameter; expected {size} bytes; found {len(value)}")
        buffer[start + offset : start + offset + size] = value
    ranges = [edge for storage in memory for edge in (storage.data_ptr(), storage.data_ptr() + storage.nbytes())]
    findings = function(
        ctypes.c_void_p(ctypes.addressof(buffer) + start), (ctypes.c_uint32 * 3)(*grid), kernel.threads, ctypes.c_uint64(seed),
        (ctypes.c_uint64 * len(ranges))(*ranges), len(memory),
    ).decode()  # fmt: skip
    if findings:
        kept = Path(tempfile.gettempdir()) / f"{compiled.name}.ptx"
        shutil.copy(path, kept)
        raise EmulationError(f"{compiled.name}, grid {grid}, {kept}:\n{findings}")


def _flat(values: dict[str, Any], signature: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    """Each argument with its type; of a record, each field."""
    for name, kind in signature.items():
        if isinstance(kind, tuple):
            yield from zip(values[name], kind, strict=True)
        else:
            yield values.get(name), kind


def _packed(value: Any, kind: str) -> tuple[list[bytes], torch.Tensor | None]:
    """An argument as bytes of the kernel's parameters, and the tensor it refers to."""
    if kind.startswith("tensordesc"):  # block.h's Descriptor, then shape and strides
        tensor, (rows, columns) = value.base, value.shape
        size, swizzle = tensor.element_size(), value.layout.swizzle_byte_width
        box = (min(value.block_shape[0], 256), min(value.block_shape[1], swizzle // size))
        descriptor = struct.pack("Qqqqiiii", tensor.data_ptr(), rows, columns, value.strides[0], *box, size, swizzle)
        sizes = [*(struct.pack("i", n) for n in value.shape), *(struct.pack("q", n) for n in value.strides)]
        return [descriptor.ljust(128, b"\0"), *sizes], tensor
    if kind.startswith("*"):
        tensor = getattr(value, "base", value)
        return [struct.pack("Q", tensor.data_ptr())], tensor
    return [struct.pack(FORMATS[kind], value)], None


if "MINIRT_EMULATE" in os.environ:
    install(int(os.environ["MINIRT_EMULATE"]), tuple(filter(None, os.environ.get("MINIRT_EMULATE_WITHOUT", "").split(","))))
