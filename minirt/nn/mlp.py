"""`GatedMLP`: the gated feed-forward layer of Llama and its relatives (SwiGLU, GeGLU: Shazeer 2020)."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from minirt.errors import InputError
from minirt.kernels.activations import check_activation
from minirt.nn import functional
from minirt.nn.linear import pack_linears
from minirt.nn.norm import Device, RMSNorm, check_linear, check_sizes, check_weight, parameter

_PACKED = ("gate_proj", "up_proj")


class GatedMLP(nn.Module):
    """down(act(gate(x)) · up(x)), with the weights of gate and up in one matrix: two kernels, or with a norm of x up to three.

    Its parameters are `gate_up_weight` and `down_weight` (and `gate_up_bias`, `down_bias`). Its state dict has the names of the
    modules that it replaces, `gate_proj.weight`, `up_proj.weight` and `down_proj.weight`, whose tensors are views.

    Args:
        hidden_size, intermediate_size: K, which is also the output's size, and N. The weights begin as in `torch.nn.Linear`.
        activation: "silu" or another name in `kernels/activations.py`.
        norm: of x, before both; None: x is not normalized.
        bias: whether gate, up and down have one. `device`, `dtype`: of the parameters; bf16, fp16 or fp32.
    Raises:
        InputError: the norm has another size, dtype or device, or the activation is unknown.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str = "silu", norm: RMSNorm | None = None, *,
        bias: bool = False, device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_sizes(hidden_size=hidden_size, intermediate_size=intermediate_size)
        gate_up = nn.Linear(hidden_size, 2 * intermediate_size, bias, device, dtype).requires_grad_(False)
        down = nn.Linear(intermediate_size, hidden_size, bias, device, dtype).requires_grad_(False)
        _check(gate_up, down, intermediate_size, activation, norm)
        self.activation, self.norm = activation, norm
        self.gate_up_weight, self.down_weight = gate_up.weight, down.weight
        self.gate_up_bias: nn.Parameter | None = gate_up.bias
        self.down_bias: nn.Parameter | None = down.bias
        self.register_state_dict_post_hook(_split)
        self.register_load_state_dict_pre_hook(_join)

    @classmethod
    def from_linears(cls, gate: nn.Linear, up: nn.Linear, down: nn.Linear, activation: str, norm: RMSNorm | None = None) -> Self:
        """The layer of three linear layers. Gate and up are packed once, see `pack_linears`; the parameters of down are shared.

        Raises:
            InputError: the layers do not fit each other. Then nothing has changed.
        """
        if gate.out_features != up.out_features:
            raise InputError("wrong number of rows", where="up.weight", expected=gate.out_features, found=up.out_features)
        _check(gate, down, gate.out_features, activation, norm)
        weight, bias = pack_linears([gate, up])
        mlp = cls(gate.in_features, gate.out_features, activation, device="meta")
        mlp.norm, mlp.down_weight, mlp.down_bias = norm, down.weight, down.bias
        mlp.gate_up_weight, mlp.gate_up_bias = parameter(weight), None if bias is None else parameter(bias)
        return mlp

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., K] of the weights' dtype → [..., H], plus `residual` [..., H] if given. Errors: see `minirt.nn.functional`."""
        norm, eps = (None, 0.0) if self.norm is None else (self.norm.weight, self.norm.eps)
        h = functional.norm_gate_up(x, norm, eps, self.gate_up_weight, self.activation, self.gate_up_bias)
        if residual is None:
            return functional.linear(h, self.down_weight, self.down_bias)
        return functional.linear_residual(h, self.down_weight, residual, self.down_bias)

    def extra_repr(self) -> str:
        (rows, K), H = self.gate_up_weight.shape, self.down_weight.shape[0]
        return f"{K}, {rows // 2}, {H}, {self.activation}"


def _check(gate: nn.Linear, down: nn.Linear, N: int, activation: str, norm: RMSNorm | None) -> None:
    """Raise InputError unless down [H, N], its bias [H], the norm [K] and the activation fit gate, of K columns."""
    check_activation(activation)
    check_weight("gate.weight", gate.weight, (None, None))
    check_linear("down.", down, N, gate.weight)
    if norm is not None:
        check_weight("norm.weight", norm.weight, (gate.in_features,), gate.weight)


def _split(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any]) -> None:
    """Give the state dict the names of the replaced modules."""
    for what in ("weight", "bias"):
        if f"{prefix}gate_up_{what}" in state_dict:
            parts = state_dict.pop(f"{prefix}gate_up_{what}").chunk(2)
            state_dict |= {f"{prefix}{name}.{what}": part for name, part in zip(_PACKED, parts, strict=True)}
        if f"{prefix}down_{what}" in state_dict:
            state_dict[f"{prefix}down_proj.{what}"] = state_dict.pop(f"{prefix}down_{what}")


def _join(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Take the names of the replaced modules in a state dict. What is incomplete stays as it is, so that PyTorch refuses it."""
    for what in ("weight", "bias"):
        names = [f"{prefix}{name}.{what}" for name in _PACKED]
        if all(name in state_dict for name in names):
            gate, up = (state_dict.pop(name) for name in names)
            if gate.shape != up.shape:
                raise InputError("wrong shape", where=names[1], expected=list(gate.shape), found=list(up.shape))
            state_dict[f"{prefix}gate_up_{what}"] = torch.cat((gate, up))
        if f"{prefix}down_proj.{what}" in state_dict:
            state_dict[f"{prefix}down_{what}"] = state_dict.pop(f"{prefix}down_proj.{what}")
