"""`add_adapters`: adapters of a linear whose product takes none (of FP8 and 4-bit weights, or into a part of a wider output)."""

import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.adapters.operands import AdapterRows, AdapterWeights
from minirt.kernels.adapters.shrink import low_rank
from minirt.kernels.checks import check_arguments
from minirt.kernels.launch import Workspace, cdiv, launch_options
from minirt.kernels.linear.epilogue import activate, low_rank_step
from minirt.kernels.linear.product import LOW_RANK_BLOCK
from minirt.kernels.norm import rms_norm
from minirt.kernels.pdl import wait_for_input
from minirt.kernels.prepared import prepared


@prepared
@triton.jit(do_not_specialize=["T"])
def _expand_kernel(added, base_ptr, out_ptr, T, N, base_stride, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr,
                   BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """A tile of the output. N: columns of it, of which a gated base has twice as many."""
    GATED: tl.constexpr = ACTIVATION is not None
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    stored = (t < T)[:, None] & (n < N)[None, :]
    base_ptrs = base_ptr + t.to(tl.int64)[:, None] * base_stride + n[None, :]
    acc = tl.load(base_ptrs, mask=stored, other=0.0).to(tl.float32)
    acc_up = tl.load(base_ptrs + N, mask=stored, other=0.0).to(tl.float32) if GATED else acc
    if PDL:
        wait_for_input(False)
    for i in tl.range(0, tl.load(added.steps), num_stages=1):
        y, b = low_rank_step(added, i, t, n, T, N, 0, COLUMNS)
        acc = tl.dot(y, b.T, acc, input_precision="ieee")
        if GATED:
            _, b = low_rank_step(added, i, t, n, T, N, N, COLUMNS)
            acc_up = tl.dot(y, b.T, acc_up, input_precision="ieee")
    if GATED:
        out_ptrs = out_ptr + t.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out_ptrs, (activate(acc, ACTIVATION) * acc_up).to(out_ptr.dtype.element_ty), mask=stored)
    else:
        tl.store(base_ptrs, acc.to(base_ptr.dtype.element_ty), mask=stored)


def add_adapters(
    x: Tensor, weights: AdapterWeights, rows: AdapterRows, out: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0,
    activation: str | None = None, *, workspace: Workspace, pdl: bool = False, check: bool = True,
) -> Tensor:  # fmt: skip
    """`reference.add_adapters`: x [T, K] with any row stride, as `out` [T, N], to which rows with an adapter are added.

    Returns `out`, or with an activation a new tensor [T, N / 2].
    """
    if check:
        fields = {f"weights.{name}": tensor for name, tensor in weights._asdict().items()} | {"rows.adapters": rows.adapters}
        check_arguments("add_adapters", x=x, out=out, norm_weight=norm_weight, **fields)
    T, N = out.shape
    N, result = (N, out) if activation is None else (N // 2, out.new_empty(T, N // 2))
    if T:
        h = x if norm_weight is None else rms_norm(x, norm_weight, eps, pdl=pdl, check=False)
        added = low_rank(h, weights=weights, rows=rows, workspace=workspace, pdl=pdl)
        block_t, block_n = (16, 128) if T <= 16 else (64, 128)
        _expand_kernel[(cdiv(N, block_n), cdiv(T, block_t))](
            added, out, result, T, N, out.stride(0), ACTIVATION=activation, COLUMNS=LOW_RANK_BLOCK, BLOCK_T=block_t,
            BLOCK_N=block_n, **launch_options(4, 1, pdl),
        )  # fmt: skip
    return result
