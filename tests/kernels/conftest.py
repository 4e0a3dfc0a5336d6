"""Fixtures of the kernel tests, which run on a GPU or else in Triton's interpreter. Tolerances: minirt.bench.bounds."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from minirt.bench import bounds
from minirt.kernels import reference

HAS_GPU = torch.cuda.is_available()
EMULATES = "MINIRT_EMULATE" in os.environ  # see tests/emulate
if EMULATES:
    import emulate.launch  # noqa: F401 (replaces Triton's launches)
elif not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when first imported, so set it before kernels are imported

# bf16 only on a GPU: bf16 tl.dot gives wrong results in the interpreter (Triton 3.6 and 3.9).
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if HAS_GPU or EMULATES else [])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def pytest_runtest_setup() -> None:
    """Exits cleanly once MINIRT_TEST_END has passed, so that the tests that have run count (`tests/tools/sanitize.py`)."""
    if time.time() > float(os.environ.get("MINIRT_TEST_END", "inf")):
        pytest.exit("MINIRT_TEST_END has passed", returncode=0)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """probe(name, …): runs a script of tests/kernels/compile with its own Triton cache and returns the JSON that it prints."""

    def run(name: str, *arguments: str) -> Any:
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
        command = [sys.executable, str(Path(__file__).parent / "compile" / name), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(params=DTYPES, ids=_name)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=_name)
def half_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The 16-bit dtypes, for GPU tests of large shapes."""
    return request.param


@pytest.fixture
def on_hopper() -> None:
    """Skips the test on other GPUs. Without a GPU, the tests that have it can be emulated."""
    if not EMULATES and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for Hopper")


@pytest.fixture
def with_pdl() -> None:
    """Skips the test on GPUs without programmatic dependent launch."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("PDL needs sm_90")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")


@pytest.fixture
def repeats() -> Callable[[int], int]:
    """repeats(n): n, or 1 if MINIRT_TEST_REPEATS=few, for tools that trace every launch and take minutes for many."""
    few = os.environ.get("MINIRT_TEST_REPEATS") == "few"
    return lambda n: 1 if few else n


@pytest.fixture
def make(device: torch.device) -> Callable[..., Tensor]:
    """make(shape…, dtype, scale=1): seeded normal values, different in each call."""
    generator = torch.Generator(device).manual_seed(1)

    def values(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

    return values


@pytest.fixture
def nan(device: torch.device) -> Callable[..., Tensor]:
    """nan(shape…, dtype): a buffer of NaN, which shows values that a kernel did not write or should not have read."""

    def filled(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    return filled


class Cache(NamedTuple):
    """KV pages [P, page_size, Nkv, D] with NaN in slots without a token, and copies with zeros in these slots."""

    k: Tensor
    v: Tensor
    clean_k: Tensor
    clean_v: Tensor
    tables: Tensor  # [B, pages] int32
    lens: Tensor  # [B] int32
    keys: list[Tensor]  # for each sequence, [length, Nkv, D]
    values: list[Tensor]


@pytest.fixture
def cache(make: Callable[..., Tensor], nan: Callable[..., Tensor], device: torch.device) -> Callable[..., Cache]:
    """cache(lengths, Nkv, D, page_size, dtype): sequences on pages in random order; one page is unused."""

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


class Cache8(NamedTuple):
    """FP8 pages and their scales with NaN in slots without a token, and copies with zeros in these slots."""

    pages: dict[str, Tensor]  # k_pages, v_pages, k_scales, v_scales
    clean: tuple[Tensor, Tensor, Tensor, Tensor]  # in the same order
    tables: Tensor
    lens: Tensor
    keys: list[Tensor]  # fp64
    values: list[Tensor]


@pytest.fixture
def cache8(cache: Callable[..., Cache]) -> Callable[..., Cache8]:
    """cache8(lengths, Nkv, D, page_size): like `cache`, with FP8 pages.

    One rotary pair of K is multiplied by 64. In each page, every fifth slot has a V of zeros, and the next slot's V is multiplied
    by 1000.
    """

    def build(lengths: list[int], Nkv: int, D: int, page_size: int) -> Cache8:
        wide = cache(lengths, Nkv, D, page_size, torch.float32)
        wide.k[..., [3, 3 + D // 2]] *= 64
        wide.v[:, ::5] *= 0
        wide.v[:, 1::5] *= 1000
        unused = wide.k[..., 0].isnan()
        quantized, clean, exact = [], [], []
        for x in (wide.k, wide.v):
            values, scales = reference.quantize_fp8(x)
            quantized.append((values, scales.masked_fill(unused, torch.nan)))
            clean.append((values.float().nan_to_num(0).to(values.dtype), scales.masked_fill(unused, 0)))
            exact.append((clean[-1][0].double() * scales.unsqueeze(-1)).flatten(0, 1))
        keys, values = [], []
        for n, table in zip(lengths, wide.tables.long(), strict=True):
            t = torch.arange(n, device=table.device)
            slots = table[t // page_size] * page_size + t % page_size
            keys.append(exact[0][slots])
            values.append(exact[1][slots])
        (k, k_scales), (v, v_scales) = quantized
        pages = {"k_pages": k, "v_pages": v, "k_scales": k_scales, "v_scales": v_scales}
        codes = (clean[0][0], clean[1][0], clean[0][1], clean[1][1])
        return Cache8(pages, codes, wide.tables, wide.lens, keys, values)

    return build


@pytest.fixture
def agrees() -> Callable[[Tensor, Tensor, Tensor], None]:
    """agrees(out, reference, truth): out's error is at most twice that of PyTorch in the same dtype, plus a floor (`bounds`).

    `truth` is the fp64 result for the same inputs. Both the whole tensor and its worst row (last dimension) must pass, so neither
    a small bias everywhere nor one wrong token among many goes unnoticed.
    """

    def check(out: Tensor, reference: Tensor, truth: Tensor) -> None:
        if out.shape != truth.shape:
            pytest.fail(f"shape {list(out.shape)}, expected {list(truth.shape)}")
        if not bool(torch.isfinite(out).all()):
            pytest.fail(f"{int((~torch.isfinite(out)).sum())} of {out.numel()} values are not finite")
        fault = bounds.fault(bounds.errors(out, truth), bounds.errors(reference, truth), bounds.floor(reference.dtype))
        if fault is not None:
            pytest.fail(fault)

    return check
