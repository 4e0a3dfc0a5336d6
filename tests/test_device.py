"""Errors of a device are told apart by their types and by who raised them, not by words in a message.

Catches a custom layer's own RuntimeError that ends the engine, and an error of a driver that is taken for one of a layer. Also
checks what counts as memory of other processes.
"""

import pytest
import torch
from support.native import native_error

from minirt.cli.gpus import find_gpu
from minirt.device import held_by_others, is_device_failure, is_out_of_memory, total_memory


def raised(error: BaseException) -> BaseException:
    """`error` as Python code raises it."""
    try:
        raise error
    except BaseException as caught:
        return caught


def accelerator_error(code: int | None, message: str) -> BaseException:
    error = torch.AcceleratorError(message)
    if code is not None:
        error.error_code = code
    return raised(error)


OUT_OF_MEMORY = {
    "allocator": lambda: raised(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")),
    "python": lambda: raised(MemoryError()),
    "runtime code": lambda: accelerator_error(2, "CUDA error: out of memory\nCompile with …"),
    "runtime message": lambda: accelerator_error(None, "CUDA error: out of memory\nCompile with …"),
    "driver": lambda: native_error("CUDA driver error: out of memory"),
    "triton": lambda: native_error("Triton Error [CUDA]: out of memory"),
    "cublas": lambda: native_error("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}
FAILURE = {
    "runtime": lambda: accelerator_error(700, "CUDA error: an illegal memory access was encountered\nCompile with …"),
    "runtime without code": lambda: accelerator_error(None, "CUDA error: device-side assert triggered"),
    "memory in the advice": lambda: accelerator_error(719, "CUDA error: unspecified launch failure\nnot: out of memory"),
    "driver": lambda: native_error("CUDA driver error: unknown error"),
    "triton": lambda: native_error("Triton Error [CUDA]: an illegal memory access was encountered"),
    "cublas": lambda: native_error("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(out of memory)`"),
}
OTHER = {
    "a layer's own": lambda: raised(RuntimeError("CUDA error: x")),
    "a layer's own, as Triton's": lambda: raised(RuntimeError("Triton Error [CUDA]: out of memory")),
    "a layer's own, as PyTorch's": lambda: raised(RuntimeError("DefaultCPUAllocator: can't allocate memory")),
    "never raised": lambda: RuntimeError("CUDA error: x"),
    "a subclass": lambda: raised(type("E", (RuntimeError,), {})("CUDA error: out of memory")),
    "native, in the middle": lambda: native_error("expected no CUDA error: out of memory"),
    "another type": lambda: raised(ValueError("CUDA out of memory")),
}


@pytest.mark.parametrize("case", OUT_OF_MEMORY)
def test_out_of_memory(case):
    assert is_out_of_memory(OUT_OF_MEMORY[case]())
    assert not is_device_failure(OUT_OF_MEMORY[case]())


@pytest.mark.parametrize("case", FAILURE)
def test_device_failure(case):
    assert is_device_failure(FAILURE[case]())
    assert not is_out_of_memory(FAILURE[case]())


@pytest.mark.parametrize("case", OTHER)
def test_other_errors(case):
    assert not is_out_of_memory(OTHER[case]())
    assert not is_device_failure(OTHER[case]())


def test_the_host_allocator_of_pytorch():
    """PyTorch raises a plain RuntimeError. Its message differs between versions, so this one is real."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)


def test_frames_around_a_native_error_do_not_matter():
    """Raised in native code, then caught and raised again on its way through a layer."""

    def layer():
        try:
            torch._assert_scalar(0, "CUDA error: x")
        except RuntimeError as error:
            raise error

    with pytest.raises(RuntimeError) as caught:
        layer()
    assert is_device_failure(caught.value)


@pytest.mark.parametrize(
    ("free", "own", "others"), [(20, 0, 60), (20, 50, 10), (79, 0, 0), (20, 59, 0)],
    ids=["others", "this process too", "only the context of this process", "only this process"],
)  # fmt: skip
def test_memory_that_others_hold(monkeypatch, free, own, others):
    """All that is neither free nor this process's; up to 1 GiB is the CUDA context of this process."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: own << 30)
    assert (held_by_others(gpu), total_memory(gpu)) == (others << 30, 80 << 30)


def test_memory_that_others_hold_elsewhere():
    cpu, absent = torch.device("cpu"), find_gpu("24GiB")
    assert held_by_others(cpu) is None
    assert total_memory(cpu) > 1 << 28
    assert (held_by_others(absent), total_memory(absent)) == (0, 24 << 30)
