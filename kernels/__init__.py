"""The Triton kernels as functions on plain tensors, each usable on its own.

`reference` defines what each kernel must compute, in eager PyTorch. The first access to a kernel imports Triton, so the eager
layers work without it. Every function checks its arguments and names the wrong one; `check=False` skips the checks in a hot loop.
`out=` is a tensor for the result. `cost(...)`, where a file has it, returns the bytes and operations that the work needs.
A function with the name of its file is imported from that file: `from minirt.kernels.embedding import embedding`,
`from minirt.kernels.quantize import quantize`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minirt.kernels.operations import EXPORTED

if TYPE_CHECKING:  # for type checkers; other names of EXPORTED are Any to them
    from minirt.kernels.attention.dispatch import paged_attention_decode as paged_attention_decode
    from minirt.kernels.attention.dispatch import paged_attention_decode_few as paged_attention_decode_few
    from minirt.kernels.attention.dispatch import paged_attention_prefill as paged_attention_prefill
    from minirt.kernels.attention.dispatch import rope_paged_attention_decode as rope_paged_attention_decode
    from minirt.kernels.attention.rope_write import qk_norm_rope_kv_write as qk_norm_rope_kv_write
    from minirt.kernels.launch import Workspace as Workspace
    from minirt.kernels.linear.dispatch import linear_residual as linear_residual
    from minirt.kernels.linear.dispatch import norm_gate_up as norm_gate_up
    from minirt.kernels.linear.dispatch import norm_linear as norm_linear
    from minirt.kernels.linear.dispatch import row_maxima_tiles as row_maxima_tiles
    from minirt.kernels.linear.product import RowMaxima as RowMaxima
    from minirt.kernels.moe.dispatch import mixture_residual as mixture_residual
    from minirt.kernels.norm import norm_residual as norm_residual
    from minirt.kernels.norm import rms_norm as rms_norm
    from minirt.kernels.norm import rms_norm_quantize as rms_norm_quantize
    from minirt.kernels.rope import norm_rope as norm_rope
    from minirt.kernels.rope import qk_norm_rope as qk_norm_rope
    from minirt.kernels.sampling.sample import sample as sample

__all__ = sorted(EXPORTED)


def __getattr__(name: str) -> Any:
    if name not in EXPORTED:
        raise AttributeError(f"module 'minirt.kernels' has no attribute {name!r}")
    try:
        return getattr(import_module(f"minirt.kernels.{EXPORTED[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        what = f"minirt.kernels.{name} is a Triton kernel, and {error.name} is missing: pip install {error.name}"
        raise ModuleNotFoundError(what, name=error.name) from error
