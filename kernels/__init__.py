"""The Triton kernels as functions on plain tensors, each usable on its own.

`reference` defines what each kernel must compute, in eager PyTorch. The first access to a kernel imports Triton, so the eager
layers work without it. Every function checks its arguments and names the wrong one; `check=False` skips the checks in a hot loop.
`out=` is a tensor for the result. `cost(...)`, where a file has it, returns the bytes and operations that the work needs.
A function with the name of its file is imported from that file: `from minirt.kernels.embedding import embedding`,
`from minirt.kernels.quantize import quantize`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minirt.kernels.attention.dispatch import (
        paged_attention_decode,
        paged_attention_prefill,
        rope_paged_attention_decode,
    )
    from minirt.kernels.attention.rope_write import qk_norm_rope_kv_write
    from minirt.kernels.launch import Workspace
    from minirt.kernels.linear.dispatch import linear_residual, norm_gate_up, norm_linear, row_maxima_tiles
    from minirt.kernels.linear.product import RowMaxima
    from minirt.kernels.moe.dispatch import mixture_residual
    from minirt.kernels.norm import rms_norm, rms_norm_quantize
    from minirt.kernels.sampling.sample import sample

_HOMES = {
    "RowMaxima": "linear.product",
    "Workspace": "launch",
    "linear_residual": "linear.dispatch",
    "mixture_residual": "moe.dispatch",
    "norm_gate_up": "linear.dispatch",
    "norm_linear": "linear.dispatch",
    "paged_attention_decode": "attention.dispatch",
    "paged_attention_prefill": "attention.dispatch",
    "qk_norm_rope_kv_write": "attention.rope_write",
    "rms_norm": "norm",
    "rms_norm_quantize": "norm",
    "row_maxima_tiles": "linear.dispatch",
    "rope_paged_attention_decode": "attention.dispatch",
    "sample": "sampling.sample",
}
__all__ = [
    "RowMaxima",
    "Workspace",
    "linear_residual",
    "mixture_residual",
    "norm_gate_up",
    "norm_linear",
    "paged_attention_decode",
    "paged_attention_prefill",
    "qk_norm_rope_kv_write",
    "rms_norm",
    "rms_norm_quantize",
    "rope_paged_attention_decode",
    "row_maxima_tiles",
    "sample",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'minirt.kernels' has no attribute {name!r}")
    try:
        return getattr(import_module(f"minirt.kernels.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("triton", "numpy"):  # Triton's interpreter needs NumPy
            raise
        what = f"minirt.kernels.{name} is a Triton kernel, and {error.name} is missing: pip install {error.name}"
        raise ModuleNotFoundError(what, name=error.name) from error
