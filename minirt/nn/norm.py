"""`RMSNorm`, and `RMSNormLinear`: a norm and the linear layer after it as one module."""

from typing import Self

import torch
from torch import Tensor, nn

from minirt.errors import InputError
from minirt.kernels.checks import DTYPES, check_tensor
from minirt.nn import functional


class RMSNorm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019) over the last dimension, with the parameter `weight` [H] of transformers' norms.

    Args:
        weight: [H], bf16, fp16 or fp32. A parameter is kept, and not copied.
        eps: added to the mean square, under the root.
    Raises:
        InputError: `weight` has another shape or dtype.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        check_weight("weight", weight, (None,))
        self.weight, self.eps = parameter(weight), float(eps)

    @classmethod
    def from_module(cls, module: nn.Module) -> Self:
        """The norm of transformers' `LlamaRMSNorm` (also Mistral, Qwen2, Qwen3) or `torch.nn.RMSNorm`; shares its parameter.

        Only the attributes are looked at, `weight` and `variance_epsilon` or `eps`: a norm that computes something else from
        them, such as Gemma's with 1 + weight, must not be given.

        Raises:
            InputError: `module` has no such weight or epsilon.
        """
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(weight, Tensor):
            raise InputError("not an RMSNorm with a weight", where="module", found=type(module).__name__)
        if eps is None and isinstance(module, nn.RMSNorm):
            eps = torch.finfo(weight.dtype).eps
        if not isinstance(eps, float | int):
            raise InputError("no epsilon", where="module", expected="variance_epsilon or eps", found=type(module).__name__)
        return cls(weight, eps)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] of the weight's dtype → [..., H]. Errors: see `minirt.nn.functional`."""
        return functional.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class RMSNormLinear(nn.Module):
    """linear(rms_norm(x)) as one operation: one kernel for a single token, two kernels for more.

    Its state dict has `norm_weight`, `weight` and, if there is one, `bias`.

    Args:
        norm_weight: [K]. `eps`: as in `RMSNorm`.
        weight: [N, K] of the same dtype. `bias`: [N], or None. Parameters are kept, and not copied.
    Raises:
        InputError: a tensor has another shape, dtype or device.
    """

    def __init__(self, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        check_weight("weight", weight, (None, None))
        check_weight("norm_weight", norm_weight, (weight.shape[1],), weight)
        if bias is not None:
            check_weight("bias", bias, (weight.shape[0],), weight)
        self.norm_weight, self.eps, self.weight = parameter(norm_weight), float(eps), parameter(weight)
        self.bias = None if bias is None else parameter(bias)

    @classmethod
    def from_modules(cls, norm: nn.Module, linear: nn.Linear) -> Self:
        """The norm (see `RMSNorm.from_module`) and the linear layer after it; shares their parameters."""
        own = RMSNorm.from_module(norm)
        return cls(own.weight, own.eps, linear.weight, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] of the weight's dtype → [..., N]. Errors: see `minirt.nn.functional`."""
        return functional.norm_linear(x, self.norm_weight, self.eps, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"


def parameter(tensor: Tensor) -> nn.Parameter:
    """The tensor as a parameter: itself if it is one, else one that needs no gradient and shares its memory."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


def check_weight(name: str, weight: Tensor, shape: tuple[int | None, ...], like: Tensor | None = None) -> None:
    """Raise InputError unless `weight` is contiguous, of this shape (None: any size) and bf16, fp16 or fp32, or like `like`."""
    if like is None and weight.dtype not in DTYPES:
        raise InputError("unsupported dtype", where=name, expected="bfloat16, float16 or float32", found=weight.dtype)
    other = weight if like is None else like
    check_tensor(name, weight, shape, other.dtype, other.device)
