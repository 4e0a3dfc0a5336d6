"""Copies between global and shared memory: the functions under names that Triton 3.6 to 3.9 have, and TMA descriptors."""

import functools

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from minirt.kernels.prepared import Tile, Tiled

# Triton renamed these after 3.6.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

CHANNELS = gl.constexpr(64)  # of 16 bits each: the 128 bytes of one TMA swizzle span


@functools.cache
def tma_tile(rows: int, columns: int, itemsize: int, width: int | None = None) -> Tile:
    """Tiles of rows × columns. Cached, because Triton takes microseconds to build a layout and a product needs five.

    `width`: see `Tile`.
    """
    dtype = {1: gl.float8e4nv, 2: gl.float16, 4: gl.float32}[itemsize]  # only the item size matters
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return Tile(TensorDescriptor.from_tensor, [rows, columns], layout, width=width)


def tma_descriptor(tensor: Tensor, rows: int, columns: int, width: int | None = None) -> Tiled:
    """A matrix that a kernel gets as a TMA descriptor, for tiles of rows × columns. `width`: of the matrix, see `Tile`."""
    return Tiled(tensor, tma_tile(rows, columns, tensor.element_size(), width))
