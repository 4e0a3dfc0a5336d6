"""`ACTIVATIONS`: the activations that gated layers may have, with their names elsewhere. Everything else derives from this table.

A new one needs its formula in `reference.ACTIVATE` and in `linear.epilogue.activate`, which refuse names that they do not know.
This file imports neither PyTorch nor Triton.
"""

from typing import NamedTuple

from minirt.errors import InputError


class Activation(NamedTuple):
    """Names of an activation: `hidden_act` in config.json, and the classes of PyTorch and transformers."""

    hidden_act: tuple[str, ...]
    classes: tuple[str, ...]


ACTIVATIONS = {
    "silu": Activation(("silu", "swish"), ("SiLU", "SiLUActivation")),
    "gelu": Activation(("gelu",), ("GELUActivation",)),  # with erf
    "gelu_tanh": Activation(("gelu_new", "gelu_pytorch_tanh"), ("GELUTanh", "NewGELUActivation")),
}
OF_HIDDEN_ACT = {name: activation for activation, names in ACTIVATIONS.items() for name in names.hidden_act}
OF_CLASS = {name: activation for activation, names in ACTIVATIONS.items() for name in names.classes}


def check_activation(name: str) -> None:
    """Raise InputError unless `name` is in the table."""
    if name not in ACTIVATIONS:
        raise InputError("unknown activation", where="activation", expected=" or ".join(ACTIVATIONS), found=name)
