"""`GatedMLP`: the gated feed-forward layer of Llama and its relatives (SwiGLU, GeGLU: Shazeer 2020)."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from minirt.errors import InputError
from minirt.kernels.checks import ACTIVATIONS
from minirt.nn import functional
from minirt.nn.linear import pack_linears
from minirt.nn.norm import RMSNorm, check_weight, parameter

_PACKED = ("gate_proj", "up_proj")


class GatedMLP(nn.Module):
    """down(act(gate(x)) · up(x)), with the weights of gate and up in one matrix: two kernels, or with a norm of x up to three.

    Its parameters are `gate_up_weight` and `down_weight` (and `gate_up_bias`, `down_bias`). Its state dict has the names of the
    modules that it replaces, `gate_proj.weight`, `up_proj.weight` and `down_proj.weight`, whose tensors are views.

    Args:
        gate_up_weight: [2N, K], the rows of gate first. `down_weight`: [H, N], of the same dtype.
        activation: "silu", "gelu" or "gelu_tanh".
        norm: of x, before both; None: x is not normalized.
        gate_up_bias, down_bias: [2N] and [H], or None.
    Raises:
        InputError: a tensor has another shape, dtype or device, or the activation is unknown.
    """

    def __init__(
        self,
        gate_up_weight: Tensor,
        down_weight: Tensor,
        activation: str,
        norm: RMSNorm | None = None,
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        check_weight("gate_up_weight", gate_up_weight, (None, None))
        (rows, K), like = gate_up_weight.shape, gate_up_weight
        if rows % 2:
            raise InputError("odd number of rows for gate and up", where="gate_up_weight", found=rows)
        if gate_up_bias is not None:
            check_weight("gate_up_bias", gate_up_bias, (rows,), like)
        _check("down_weight", down_weight, "down_bias", down_bias, rows // 2, K, like, activation, norm)
        self.activation, self.norm = activation, norm
        self.gate_up_weight, self.down_weight = parameter(gate_up_weight), parameter(down_weight)
        self.gate_up_bias = None if gate_up_bias is None else parameter(gate_up_bias)
        self.down_bias = None if down_bias is None else parameter(down_bias)
        self.register_state_dict_post_hook(_split)
        self.register_load_state_dict_pre_hook(_join)

    @classmethod
    def from_linears(
        cls, gate: nn.Linear, up: nn.Linear, down: nn.Linear, activation: str, norm: RMSNorm | None = None
    ) -> Self:
        """The layer of three linear layers. Gate and up are packed once, see `pack_linears`; the parameters of down are shared.

        Raises:
            InputError: the layers do not fit each other. Then nothing has changed.
        """
        if gate.out_features != up.out_features:
            raise InputError("wrong number of rows", where="up.weight", expected=gate.out_features, found=up.out_features)
        names = "down.weight", down.weight, "down.bias", down.bias
        _check(*names, gate.out_features, gate.in_features, gate.weight, activation, norm)
        weight, bias = pack_linears([gate, up])
        return cls(weight, down.weight, activation, norm, gate_up_bias=bias, down_bias=down.bias)

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


def _check(
    weight_name: str, down_weight: Tensor, bias_name: str, down_bias: Tensor | None, N: int, K: int, like: Tensor,
    activation: str, norm: RMSNorm | None,
) -> None:  # fmt: skip
    """Raise InputError unless down [H, N], its bias [H], the norm [K] and the activation fit gate and up, of `like` dtype."""
    if activation not in ACTIVATIONS:
        raise InputError("unknown activation", where="activation", expected=" or ".join(ACTIVATIONS), found=activation)
    check_weight(weight_name, down_weight, (None, N), like)
    if down_bias is not None:
        check_weight(bias_name, down_bias, (down_weight.shape[0],), like)
    if norm is not None:
        check_weight("norm.weight", norm.weight, (K,), like)


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
