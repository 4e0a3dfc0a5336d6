"""`RMSNorm`, and `RMSNormLinear`: a norm and the linear layer after it as one module."""

from typing import Self

import torch
from torch import Tensor, nn

from minirt.errors import InputError
from minirt.kernels import reference
from minirt.kernels.checks import DTYPES, check_tensor
from minirt.nn import functional

Device = torch.device | str | int | None


class RMSNorm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019) over the last dimension, with the parameter `weight` [H] of transformers' norms.

    Args:
        normalized_shape: H. The weight begins as ones.
        eps: added to the mean square, under the root.
        dtype: bf16, fp16 or fp32; None: PyTorch's default. `device`: that of the weight.
    Raises:
        InputError: another dtype, or no positive number of columns.
    """

    def __init__(
        self, normalized_shape: int, eps: float = 1e-6, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        check_sizes(normalized_shape=normalized_shape)
        self.weight, self.eps = parameter(torch.ones(normalized_shape, device=device, dtype=dtype)), float(eps)
        check_weight("weight", self.weight, (None,))

    @classmethod
    def from_module(cls, module: nn.Module) -> Self:
        """The norm of transformers' `LlamaRMSNorm` (also Mistral, Qwen2, Qwen3) or `torch.nn.RMSNorm`; shares its parameter.

        The module computes one row, to see that it is this norm: Gemma's has the same attributes and multiplies by 1 + weight.
        A module on the meta device computes nothing, and is taken as it is.

        Args:
            module: with a `weight`, and `variance_epsilon` or `eps`.
        Raises:
            InputError: `module` has no such weight or epsilon, or is another norm.
        """
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(weight, Tensor):
            raise InputError("not an RMSNorm with a weight", where="module", found=type(module).__name__)
        if eps is None and isinstance(module, nn.RMSNorm):
            eps = torch.finfo(weight.dtype).eps
        if not isinstance(eps, float | int):
            raise InputError("no epsilon", where="module", expected="variance_epsilon or eps", found=type(module).__name__)
        check_weight("module.weight", weight, (None,))
        norm = cls(weight.shape[0], eps, device="meta")
        norm.weight = parameter(weight)
        if not weight.is_meta and not _agree(norm, module):
            what = "not an RMSNorm: its output is not that of the normalized input times its weight"
            raise InputError(what, where="module", found=type(module).__name__)
        return norm

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] of the weight's dtype → [..., H]. Errors: see `minirt.nn.functional`."""
        return functional.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


@torch.no_grad()
def _agree(norm: RMSNorm, module: nn.Module) -> bool:
    """Whether both compute the same for one row of values of both signs, with a mean that is not 0 (LayerNorm subtracts it)."""
    weight = norm.weight
    x = torch.linspace(-1.0, 2.0, weight.shape[0], dtype=torch.float32, device=weight.device).to(weight.dtype).unsqueeze(0)
    output, expected = module(x), reference.rms_norm(x, weight, norm.eps)
    far = 4 * torch.finfo(x.dtype).eps * expected.abs().amax().float() + 1e-6
    return output.shape == x.shape and bool((output.float() - expected.float()).abs().amax() <= far)


class RMSNormLinear(nn.Module):
    """linear(rms_norm(x)) as one operation: one kernel for a single token, two kernels for more.

    Its state dict has `norm_weight`, `weight` and, if there is one, `bias`.

    Args:
        in_features, out_features: K and N. The norm's weight begins as ones, the others as in `torch.nn.Linear`.
        bias: whether there is one. `eps`, `device`, `dtype`: as in `RMSNorm`.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, eps: float = 1e-6, *, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_sizes(in_features=in_features, out_features=out_features)
        norm = RMSNorm(in_features, eps, device=device, dtype=dtype)
        self._share(norm, nn.Linear(in_features, out_features, bias, device, dtype).requires_grad_(False))

    @classmethod
    def from_modules(cls, norm: nn.Module, linear: nn.Linear) -> Self:
        """The norm (see `RMSNorm.from_module`) and the linear layer after it; shares their parameters.

        Raises:
            InputError: a parameter has another shape, dtype or device than the others.
        """
        joined = cls(linear.in_features, linear.out_features, device="meta")
        joined._share(RMSNorm.from_module(norm), linear)
        return joined

    def _share(self, norm: RMSNorm, linear: nn.Linear) -> None:
        check_linear("", linear)
        check_weight("norm_weight", norm.weight, (linear.weight.shape[1],), linear.weight)
        self.norm_weight, self.eps, self.weight = norm.weight, norm.eps, linear.weight
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] of the weight's dtype → [..., N]. Errors: see `minirt.nn.functional`."""
        return functional.norm_linear(x, self.norm_weight, self.eps, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"


def parameter(tensor: Tensor) -> nn.Parameter:
    """The tensor as a parameter: itself if it is one, else one that needs no gradient and shares its memory."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


def check_sizes(**sizes: object) -> None:
    """Raise InputError unless all sizes of a constructor are positive integers."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            shown = type(size).__name__ if isinstance(size, Tensor) else size
            hint = "to take the weights of a module, use `from_module` or its relatives" if isinstance(size, Tensor) else None
            raise InputError("not a size", where=name, expected="a positive integer", found=shown, hint=hint)


def check_weight(name: str, weight: Tensor, shape: tuple[int | None, ...], like: Tensor | None = None) -> None:
    """Raise InputError unless `weight` is contiguous, of this shape (None: any size) and bf16, fp16 or fp32, or like `like`."""
    if like is None and weight.dtype not in DTYPES:
        raise InputError("unsupported dtype", where=name, expected="bfloat16, float16 or float32", found=weight.dtype)
    other = weight if like is None else like
    check_tensor(name, weight, shape, other.dtype, other.device)


def check_linear(name: str, linear: nn.Linear, columns: int | None = None, like: Tensor | None = None) -> None:
    """`check_weight` of the weight of a linear layer, with so many columns, and of its bias. `name`: in front of theirs."""
    check_weight(f"{name}weight", linear.weight, (None, columns), like)
    if linear.bias is not None:
        check_weight(f"{name}bias", linear.bias, (linear.weight.shape[0],), linear.weight)
