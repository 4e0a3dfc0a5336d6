"""Token embedding: rows of a table."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.checks import check_arguments
from minirt.kernels.launch import cdiv
from minirt.kernels.prepared import prepared

CASES = [{"T": 1, "V": 7, "H": 16}, {"T": 3, "V": 101, "H": 96}, {"T": 17, "V": 33, "H": 577}, {"T": 129, "V": 50, "H": 1536}]
_BLOCK_H = 1024


@prepared
@triton.jit
def _embedding_kernel(tokens_ptr, table_ptr, out_ptr, H, BLOCK_H: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    row = tl.load(tokens_ptr + t).to(tl.int64)  # int64: V · H may exceed 2³¹
    values = tl.load(table_ptr + row * H + h, mask=h < H, other=0.0)
    tl.store(out_ptr + t * H + h, values, mask=h < H)


def embedding(tokens: Tensor, table: Tensor, out: Tensor | None = None, *, check: bool = True) -> Tensor:
    """Rows of `table` [V, H] for `tokens` [T] int64 → [T, H].

    Every token must be in [0, V); this is not checked.
    """
    if check:
        check_arguments("embedding", tokens=tokens, table=table, out=out)
    T, H = tokens.shape[0], table.shape[1]
    out = torch.empty(T, H, dtype=table.dtype, device=table.device) if out is None else out
    if T:
        _embedding_kernel[(T, cdiv(H, _BLOCK_H))](tokens, table, out, H, BLOCK_H=_BLOCK_H, num_warps=4)
    return out


def cost(T: int, V: int, H: int, itemsize: int) -> tuple[int, int]:
    """(bytes read and written, floating-point operations)."""
    return T * (8 + 2 * H * itemsize), 0
