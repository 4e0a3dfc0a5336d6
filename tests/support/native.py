"""Errors as PyTorch and Triton raise them from native code."""

import torch


def native_error(message: str) -> RuntimeError:
    """A RuntimeError that native code raised, with its traceback."""
    try:
        torch._assert_scalar(0, message)
    except RuntimeError as error:
        return error
    raise AssertionError("torch._assert_scalar(0, …) raises")
