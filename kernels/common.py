"""What the Triton kernels share: argument checks, device facts, the split-K workspace and a few device functions."""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.errors import InputError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

_SHARED_LIMITS = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
_INTERPRETER = 80  # the interpreter takes the configurations of the plainest target
_INTERPRETER_PROCESSORS = 132


@functools.lru_cache
def capability(device: torch.device) -> int:
    """Compute capability of `device` as one number, 90 for Hopper; what the configurations depend on."""
    if device.type != "cuda":
        return _INTERPRETER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.lru_cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of `device`."""
    if device.type != "cuda":
        return _INTERPRETER_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_limit(cc: int) -> int:
    """Bytes of shared memory that one program may use on capability `cc` (CUDA programming guide)."""
    return _SHARED_LIMITS.get(cc, 99) * 1024


def fit_stages(stage_bytes: int, budget: int, most: int = 4) -> int:
    """Pipeline stages of `stage_bytes` each that fit in `budget` bytes: 1 … `most`."""
    return max(1, min(most, budget // stage_bytes))


def launch_options(num_warps: int, num_stages: int, pdl: bool) -> dict:
    """Options of a launch. `launch_pdl` lets the kernel start before its predecessor in the stream has ended."""
    options = {"num_warps": num_warps, "num_stages": num_stages, "PDL": pdl}
    if pdl:
        options["launch_pdl"] = True
    return options


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise InputError unless `tensor` is contiguous with this shape (None: any size), dtype and device."""
    if tensor.ndim != len(shape) or any(
        want is not None and want != n for want, n in zip(shape, tensor.shape, strict=True)
    ):
        expected = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
        raise InputError("wrong shape", where=name, expected=expected, found=list(tensor.shape))
    if tensor.dtype != dtype:
        raise InputError("wrong dtype", where=name, expected=dtype, found=tensor.dtype)
    if tensor.device != device:
        raise InputError("wrong device", where=name, expected=device, found=tensor.device)
    if not tensor.is_contiguous():
        raise InputError("not contiguous", where=name, found=f"strides {tensor.stride()}", hint="call .contiguous()")


def check_activations(name: str, tensor: Tensor, ndim: int = 2) -> None:
    """Raise InputError unless `tensor` is a contiguous bf16, fp16 or fp32 tensor of `ndim` dimensions."""
    if tensor.dtype not in DTYPES:
        raise InputError("unsupported dtype", where=name, expected="bfloat16, float16 or float32", found=tensor.dtype)
    check_tensor(name, tensor, (None,) * ndim, tensor.dtype, tensor.device)


def check_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor | None, activation: str | None
) -> None:
    """Raise InputError unless x [T, K], weight [N, K], bias [N], residual and out [T, N] fit (gated: N/2)."""
    check_activations("x", x)
    T, K = x.shape
    check_tensor("weight", weight, (None, K), x.dtype, x.device)
    N = rows = weight.shape[0]
    if activation is not None:
        if activation not in ACTIVATIONS:
            expected = " or ".join(ACTIVATIONS)
            raise InputError("unknown activation", where="activation", expected=expected, found=activation)
        if rows % 2:
            raise InputError("odd number of rows for gate and up", where="weight", found=rows)
        N = rows // 2
    if bias is not None:
        check_tensor("bias", bias, (rows,), x.dtype, x.device)
    if residual is not None:
        check_tensor("residual", residual, (T, N), x.dtype, x.device)
    if out is not None:
        if out.dtype not in DTYPES:
            raise InputError("unsupported dtype", where="out", expected="bfloat16, float16 or float32", found=out.dtype)
        check_tensor("out", out, (T, N), out.dtype, x.device)


class Workspace:
    """Scratch for kernels whose programs share one result: fp32 partial results, and counters of who has arrived.

    Allocated once, before any CUDA graph is captured, and passed to the kernels of one stream: they run one after the
    other, so they can share it. Each kernel leaves the counters at zero, as it finds them.
    """

    def __init__(self, device: torch.device | str, num_floats: int = 1 << 22, num_counters: int = 1 << 14) -> None:
        self._sums = torch.empty(num_floats, dtype=torch.float32, device=device)
        self._counters = torch.zeros(num_counters, dtype=torch.int32, device=device)

    def reserve(self, num_floats: int) -> None:
        """Make room for `num_floats`. Graphs that were captured before keep the old buffer's address: call it before."""
        if self._sums.numel() < num_floats:
            self._sums = self._sums.new_empty(num_floats)

    def sums(self, need: int) -> Tensor:
        """The fp32 buffer; InputError if it holds less than `need` values."""
        return _large_enough(self._sums, need, "num_floats")

    def counters(self, need: int) -> Tensor:
        """The int32 counters, all zero between kernels; InputError if there are less than `need`."""
        return _large_enough(self._counters, need, "num_counters")


def _large_enough(buffer: Tensor, need: int, name: str) -> Tensor:
    if buffer.numel() < need:
        raise InputError("too small", where=f"Workspace.{name}", expected=f"at least {need}", found=buffer.numel())
    return buffer


@dataclass(frozen=True)
class LinearConfig:
    """How to cut one linear layer: tile of the weights [block_n, block_k], `split` parts of K."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    split: int = 1


def choose_split(tiles: int, enough: int, blocks: int, most: int) -> int:
    """Parts of K that make `enough` programs of `tiles`: a power of two up to `most`, with two blocks or more each."""
    split = 1
    while split < most and tiles * split < enough and blocks >= 4 * split:
        split *= 2
    return split


def split_parts(
    workspace: Workspace | None, config: LinearConfig, T: int, N: int, K: int
) -> tuple[int, Tensor | None, Tensor | None]:
    """The parts of K that are not empty (1 without a workspace), with room for their sums [parts, T, N] and counters."""
    blocks = triton.cdiv(K, config.block_k)
    parts = triton.cdiv(blocks, triton.cdiv(blocks, config.split))
    if parts == 1 or workspace is None:
        return 1, None, None
    return parts, workspace.sums(parts * T * N), workspace.counters(triton.cdiv(N, config.block_n))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """SiLU or GELU (erf or tanh form) of an fp32 tensor."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # 0.5 · (1 + tanh(y)) is sigmoid(2y)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def load_block(ptrs, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load `ptrs`; k [.., BLOCK_K] or broadcastable is checked against K only where K has a ragged end."""
    if K % BLOCK_K == 0:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=k < K, other=0.0)


@triton.jit
def _add_and_store(acc, n, at, valid, bias_ptr, residual_ptr, out_ptr):
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=valid, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + at, mask=valid, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit
def finish(acc, n, t, T, N, bias_ptr, residual_ptr, out_ptr, sums_ptr, counters_ptr, SPLIT: tl.constexpr):
    """Add up the parts of K, add bias and residual and store; n and t broadcast to acc's shape, T · N < 2³¹."""
    at = t * N + n
    valid = (n < N) & (t < T)
    n = n + t * 0
    if SPLIT == 1:
        _add_and_store(acc, n, at, valid, bias_ptr, residual_ptr, out_ptr)
    else:
        # Past L1 on both sides: the partial sums of the other programs come through L2.
        tl.store(sums_ptr + tl.program_id(1) * T * N + at, acc, mask=valid, cache_modifier=".cg")
        tl.debug_barrier()  # every thread's stores come before the one thread's release
        counter_ptr = counters_ptr + tl.program_id(0)
        arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            total = tl.zeros_like(acc)
            for part in tl.static_range(SPLIT):
                total += tl.load(sums_ptr + part * T * N + at, mask=valid, other=0.0, cache_modifier=".cg")
            _add_and_store(total, n, at, valid, bias_ptr, residual_ptr, out_ptr)
            tl.store(counter_ptr, 0)
