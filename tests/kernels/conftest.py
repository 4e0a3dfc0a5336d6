"""Kernel tests: on a GPU where there is one, else in Triton's interpreter on the CPU. The one place for tolerances.

With MINIRT_TEST_REFERENCE=cpu what the kernels are compared with is computed on the CPU, where compute-sanitizer does not
follow: some of its tools fail in the library kernels that a GPU would run for it.
"""

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported, so before any kernel is

# The interpreter's bf16 tl.dot gives garbage (3.6 and 3.9): bf16 is for the GPU.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if HAS_GPU else [])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


WIDE = (torch.float64, torch.complex128)
PRODUCTS = {getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")}


class ReferencesOnCpu(TorchDispatchMode):
    """Computes matrix products on the CPU, and all that takes or gives fp64, of which nothing gets to the GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_gpu = any(x.is_cuda for x in tensors)
        wide = kwargs.get("dtype") in WIDE or any(x.dtype in WIDE for x in tensors)
        if not wide and not (on_gpu and func.overloadpacket in PRODUCTS):
            return func(*args, **kwargs)
        if func._schema.is_mutable and args[0].is_cuda:
            raise NotImplementedError(f"{func} would write to a copy")
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        args, kwargs = tree_map_only(Tensor, Tensor.cpu, (args, kwargs))
        return tree_map_only(Tensor, lambda x: x if x.dtype in WIDE else x.cuda(), func(*args, **kwargs))


@pytest.fixture(autouse=True)
def reference_device() -> Iterator[None]:
    device = os.environ.get("MINIRT_TEST_REFERENCE", "")
    if device not in ("", "cpu"):
        pytest.fail(f"MINIRT_TEST_REFERENCE={device}: expected cpu, or nothing")
    if not (device and HAS_GPU):
        yield
        return
    with sdpa_kernel(SDPBackend.MATH), ReferencesOnCpu():  # that form of attention consists of products
        yield


@pytest.fixture(params=DTYPES, ids=_name)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=_name)
def half_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """For large shapes, on the GPU only."""
    return request.param


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")


@pytest.fixture
def make(device: torch.device) -> Callable[..., Tensor]:
    """make(shape…, dtype, scale=1): seeded normal values; every call gives others."""
    generator = torch.Generator(device).manual_seed(1)

    def values(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

    return values


@pytest.fixture
def nan(device: torch.device) -> Callable[..., Tensor]:
    """nan(shape…, dtype): a buffer that shows what a kernel did not write, or should not have read."""

    def filled(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    return filled


class Cache(NamedTuple):
    """Pages [P, page_size, Nkv, D] of sequences, NaN wherever none has a token, and the same with zeros there."""

    k: Tensor
    v: Tensor
    clean_k: Tensor
    clean_v: Tensor
    tables: Tensor  # [B, pages] int32
    lens: Tensor  # [B] int32
    keys: list[Tensor]  # of each sequence, [length, Nkv, D]
    values: list[Tensor]


@pytest.fixture
def cache(make: Callable[..., Tensor], nan: Callable[..., Tensor], device: torch.device) -> Callable[..., Cache]:
    """cache(lengths, Nkv, D, page_size, dtype): sequences in pages dealt out at random; one page belongs to nobody."""

    def build(lengths: list[int], Nkv: int, D: int, page_size: int, dtype: torch.dtype) -> Cache:
        counts = [-(-n // page_size) for n in lengths]
        k = nan(sum(counts) + 1, page_size, Nkv, D, dtype=dtype)
        v = k.clone()
        order = iter(torch.randperm(len(k), generator=torch.Generator().manual_seed(2)).tolist())
        unused = next(order)
        tables = torch.full((len(lengths), max(counts) + 1), unused, dtype=torch.int32, device=device)
        keys, values = [], []
        for row, n, count in zip(tables, lengths, counts, strict=True):
            row[:count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)
            t = torch.arange(n, device=device)
            pages = row[t // page_size].long()
            keys.append(make(n, Nkv, D, dtype=dtype))
            values.append(make(n, Nkv, D, dtype=dtype))
            k[pages, t % page_size], v[pages, t % page_size] = keys[-1], values[-1]
        lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        return Cache(k, v, k.nan_to_num(0), v.nan_to_num(0), tables, lens, keys, values)

    return build


def floor(dtype: torch.dtype) -> float:
    """The error to allow where the reference happens to have none: one rounding of the output, half a unit in the last
    place (bf16 3.9e-3, fp16 4.9e-4), and in fp32, where sums in another order and the GPU's exp2 (2 units in the last place,
    on scores that are rounded themselves) matter more than rounding, 2e-6."""
    return max(torch.finfo(dtype).eps / 2, 2e-6)


def _errors(value: Tensor, truth: Tensor) -> tuple[float, float]:
    """Relative Frobenius error of the whole, and of the worst row."""
    difference, truth = value.double() - truth, truth.double()
    whole = difference.norm() / truth.norm().clamp_min(1e-300)
    row = difference.norm(dim=-1) / truth.norm(dim=-1).clamp_min(1e-300)
    return whole.item(), row.max().item()


@pytest.fixture
def agrees() -> Callable[[Tensor, Tensor, Tensor], None]:
    """agrees(out, reference, truth): out errs at most twice as much as PyTorch in the same dtype, plus `floor`.

    `truth` is the same mathematics in fp64 on the same inputs. The whole tensor and its worst row (last dimension) must
    both hold, so that neither a small bias everywhere nor one wrong token among many passes.
    """

    def check(out: Tensor, reference: Tensor, truth: Tensor) -> None:
        if out.shape != truth.shape:
            pytest.fail(f"shape {list(out.shape)}, expected {list(truth.shape)}")
        if not bool(torch.isfinite(out).all()):
            pytest.fail(f"{int((~torch.isfinite(out)).sum())} of {out.numel()} values are not finite")
        found, allowed = _errors(out, truth), _errors(reference, truth)
        for what, mine, theirs in zip(("whole", "worst row"), found, allowed, strict=True):
            limit = 2 * theirs + floor(reference.dtype)
            if not mine <= limit:
                pytest.fail(f"{what}: relative error {mine:.2e}, PyTorch's {theirs:.2e}, limit {limit:.2e}")

    return check
