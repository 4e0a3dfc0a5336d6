"""Triton's interpreter without work that it repeats or whose result it drops, which is more than half of the interpreted tests,
and with products whose bits are the same on each processor.

The interpreter replaces the builtins of `triton.language` by its own for a launch, and again in each call of a device function.
Each time it goes through all members of the modules and classes concerned. It computes each sum and product of integers a second
time in 64 bits, and compares them only if its option `debug` is on, which nothing turns on.
"""

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from triton import language
from triton.language.core import is_builtin
from triton.runtime import interpreter

patch_lang = interpreter._patch_lang


@cache
def builtins(owner: Any) -> tuple[str, ...]:
    """The names of the builtins of a module or class, as they are before it is patched for the first time."""
    return tuple(name for name, member in inspect.getmembers(owner) if is_builtin(member))


@cache
def languages(fn: Any) -> tuple[Any, ...]:
    """The modules that the interpreter patches for a function."""
    return tuple(value for value in fn.__globals__.values() if value is language or value is language.core)


def patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
    for name in builtins(owner):
        member = getattr(owner, name)
        if is_builtin(member):
            interpreter._patch_attr(owner, name, member, builder, scope)


def patch_lang_once(fn: Any) -> Any:
    """Patches nothing in a device function whose modules the launch has patched already."""
    if languages(fn) and not any(is_builtin(module.load) for module in languages(fn)):
        return interpreter._LangPatchScope()
    return patch_lang(fn)


dot = interpreter.InterpreterBuilder.create_dot


def stable_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """A product whose bits depend on its rows and columns alone. NumPy's in fp32 depend on the number of them on some processors.
    It is added up in fp64 and rounded, before `d` is added."""
    if d.data.dtype != np.float32:
        return dot(self, a, b, d, *options)
    product = dot(self, a, b, interpreter.TensorHandle(np.zeros(d.data.shape), language.float64), *options)
    return interpreter.TensorHandle(product.data.astype(np.float32) + d.data, d.dtype.scalar)


def shorten() -> None:
    """From now on, the interpreter remembers what it has to replace, and leaves out what it does not use."""
    interpreter.InterpreterBuilder.create_dot = stable_dot
    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_lang_once
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
