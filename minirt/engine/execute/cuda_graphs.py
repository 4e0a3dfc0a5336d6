"""`CudaGraphs`: captured kernels by key, and `GraphGuard`, which finds tensors that were replaced since."""

import gc
import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from minirt.errors import EngineError

GUARDED = os.environ.get("MINIRT_CHECK_GRAPHS", "") not in ("", "0")  # for debugging: each replay is checked


class GraphGuard:
    """The identity of each tensor that a CUDA graph reads or writes: a graph has addresses, and goes on using them when a tensor
    was replaced.

    Args:
        roots: returns, by name, the objects that hold these tensors. Their attributes, and the members of lists, tuples and
            dictionaries, are followed as far as they are minirt's objects.
    """

    def __init__(self, roots: Callable[[], dict[str, Any]]) -> None:
        self._roots = roots
        self._identities = dict(self._found())

    def check(self) -> None:
        """Raise EngineError if a tensor was replaced since the guard was made."""
        now = dict(self._found())
        for name, identity in self._identities.items():
            if now.get(name) != identity:
                what, hint = "a tensor of a CUDA graph was replaced", "write its values in place, or capture the graph again"
                raise EngineError(what, where=name, expected=identity, found=now.get(name, "no tensor"), hint=hint)

    def _found(self) -> Iterator[tuple[str, str]]:
        seen, todo = set[int](), list(self._roots().items())
        while todo:
            name, value = todo.pop()
            if isinstance(value, Tensor):
                yield name, f"{value.dtype}, shape {list(value.shape)}, strides {value.stride()}, at {value.data_ptr():#x}"
            elif id(value) not in seen:
                seen.add(id(value))
                todo += [(f"{name}{step}", member) for step, member in _members(value)]


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", member) for key, member in value.items())
    elif isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        yield from ((f"[{i}]", member) for i, member in enumerate(value))
    elif hasattr(value, "_fields"):  # a NamedTuple
        yield from ((f".{name}", getattr(value, name)) for name in value._fields)
    elif type(value).__module__.startswith("minirt.") and not isinstance(value, type):
        yield from ((f".{name}", member) for name, member in getattr(value, "__dict__", {}).items())


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Context without garbage collection, which might free another engine's CUDA graphs: that ends a capture with an error."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class CudaGraphs:
    """CUDA graphs by key. They share one memory pool, because they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._guards: dict[Hashable, GraphGuard] = {}
        self._pool: Any = None
        # The stream for captures. PyTorch's default capture stream belongs to the device that captured first.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def clear(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()
        self._guards.clear()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def capture(self, key: Hashable, work: Callable[[], Any], roots: Callable[[], dict[str, Any]] | None = None) -> None:
        """Capture the kernels that `work` launches. They must have been compiled, and use memory that stays.

        `roots`: of the tensors that they use, for `GraphGuard`.
        """
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which waits for the GPU and frees cached memory: steps may be running. Other threads may use
        # other streams during the capture.
        with torch.cuda.stream(self._stream), _nothing_collected():
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph
        if GUARDED and roots is not None:
            self._guards[key] = GraphGuard(roots)

    def replay(self, key: Hashable) -> None:
        """Queue a captured graph."""
        if GUARDED and key in self._guards:
            self._guards[key].check()
        self._graphs[key].replay()
