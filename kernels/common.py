"""What the Triton kernels share: argument checks, device facts, the workspace of split sums, and the activations."""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.errors import InputError, UnsupportedError

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


def require_fp8(device: torch.device) -> None:
    """Raise UnsupportedError on a GPU on which Triton has no 8-bit floats. (Its interpreter has them.)"""
    if device.type == "cuda" and capability(device) < 89:
        raise UnsupportedError(
            "no fp8 weights on this GPU", expected="compute capability 8.9 or later",
            found=capability(device) / 10, hint="use bf16 weights",
        )  # fmt: skip


def shared_limit(cc: int) -> int:
    """Bytes of shared memory that one program may use on capability `cc` (CUDA programming guide)."""
    return _SHARED_LIMITS.get(cc, 99) * 1024


def fit_stages(stage_bytes: int, budget: int, most: int = 4) -> int:
    """Pipeline stages of `stage_bytes` each that fit in `budget` bytes: 1 … `most`."""
    return max(1, min(most, budget // stage_bytes))


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. (Triton's own, which kernels share, takes microseconds.)"""
    return -(-a // b)


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
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
    activation: str | None,
    scale: Tensor | None = None,
) -> None:
    """Raise InputError unless x [T, K], weight [N, K], bias [N], residual and out [T, N] fit (gated: N/2).

    With `scale` [N] fp32 the weight must be float8_e4m3fn, without it of x's dtype.
    """
    check_activations("x", x)
    T, K = x.shape
    check_tensor("weight", weight, (None, K), x.dtype if scale is None else torch.float8_e4m3fn, x.device)
    N = rows = weight.shape[0]
    if scale is not None:
        check_tensor("scale", scale, (rows,), torch.float32, x.device)
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


@dataclass
class Peaks:
    """Where an LM head leaves, beside its logits, the largest of each tile of columns: `values` [T, P] int64, packed as by
    `sampling_select.pack`. `parts`: how many of a row it has left, 0 if its kernel does not. Then it writes logits only if
    `logits_needed` [1] int32, on the device, is not 0."""

    values: Tensor
    logits_needed: Tensor
    parts: int = 0

    def left(self) -> Tensor | None:
        """[T, parts], or None if nothing has been left."""
        return self.values[:, : self.parts] if self.parts else None


def _large_enough(buffer: Tensor, need: int, name: str) -> Tensor:
    if buffer.numel() < need:
        raise InputError("too small", where=f"Workspace.{name}", expected=f"at least {need}", found=buffer.numel())
    return buffer


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
