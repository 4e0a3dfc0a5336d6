"""What the kernels for Hopper share, which are written in Gluon: names that changed between Triton's versions, and tiles."""

import functools

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Renamed after Triton 3.6.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
cta_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

CHANNELS = gl.constexpr(64)  # of 16 bits: 128 bytes, what one swizzle of TMA spans


@functools.cache
def _layout(rows: int, columns: int, itemsize: int) -> gl.NVMMASharedLayout:
    """Kept: Triton takes microseconds to make one, and a product needs five."""
    dtype = {1: gl.float8e4nv, 2: gl.float16, 4: gl.float32}[itemsize]  # only the width counts
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)


def tma_descriptor(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix as TMA knows it, which moves tiles of it of rows × columns."""
    return TensorDescriptor.from_tensor(tensor, [rows, columns], _layout(rows, columns, tensor.element_size()))


@gluon.jit
def zero_rows_from(tile, limit, STEP: gl.constexpr):
    """Zeros in the rows of a tile of V from `limit` on, STEP at a time: a page may hold NaN there, which a probability of zero
    would not stop."""
    ROWS: gl.constexpr = tile.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // tile.shape[1], tile.shape[1] // 8], [4, 1], [1, 0])
    row = gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT))[:, None]
    for i in gl.static_range(0, ROWS, STEP):
        if i + STEP > limit:
            part = tile.slice(i, STEP)
            x = part.load(LAYOUT)
            part.store(gl.where(i + row < limit, x, gl.zeros_like(x)))
