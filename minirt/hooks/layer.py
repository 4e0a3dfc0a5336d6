"""`Hook`: a layer that copies the residual stream, or edits it; `with_hooks`: puts them behind other layers, or within.

Edits are functions of the user: `edit(x, factor) -> x`, x [T, N] of the model's dtype, factor [T, 1] of the same, a number for
each token by its request. They must work in a CUDA graph: no value may be read on the host. The functions below make some.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minirt.errors import InputError
from minirt.hooks.capture import LOGITS, matching
from minirt.layers.base import Forward, Layer, register
from minirt.modeling.config import ModelConfig
from minirt.step.batch import Batch
from minirt.user_code import named

Edit = Callable[[Tensor, Tensor], Tensor]


class Hook(Layer):
    """Behind a layer, or before the last product within one: edits the values there of requests that ask, then copies them. Does
    nothing in other steps.

    Args:
        width: channels of the values.
        names: those of the place.
        captures: whether requests may ask for the values.
        edits: functions by name, in their order.
    """

    kind = "hook"
    residual = False
    needs_every_row = True

    def __init__(
        self, config: ModelConfig, width: int, names: Sequence[str], *, captures: bool, edits: Mapping[str, Edit]
    ) -> None:  # fmt: skip
        super().__init__(config, f"hook.{names[-1]}")
        self.width, self.names, self.captures, self.edits = width, tuple(names), captures, dict(edits)

    def compile_key(self) -> tuple[Any, ...]:
        return type(self), self.captures, *map(id, self.edits.values())


def _forward(layer: Hook) -> Forward:
    def forward(x: Tensor, batch: Batch, kv: None) -> Tensor:
        return x if batch.hooks is None else batch.hooks.at(layer, x, batch)

    return forward


register("hook", "eager")(_forward)
register("hook", "triton", capturable=True)(_forward)  # not a kernel, but CUDA graphs may contain it


def with_hooks(
    config: ModelConfig, layers: Sequence[Layer], capture: Sequence[str], edits: Mapping[str, Edit | str]
) -> list[Layer]:  # fmt: skip
    """The layers, with hooks behind those of the places.

    Raises:
        InputError: a pattern matches no place, or an edit is no function.
    """
    places = _places(layers)
    captured = set(matching([name for name in capture if name != LOGITS], list(places), "capture"))
    edited: dict[_Place, dict[str, Edit]] = {}
    for pattern, function in edits.items():
        function = named(function, f"edits {pattern!r}")
        if not callable(function):
            expected = "a function (x, factor) → x"
            raise InputError("not an edit", where=f"edits {pattern!r}", expected=expected, found=type(function).__name__)
        for place in dict.fromkeys(places[name] for name in matching([pattern], list(places), "edits")):
            edited.setdefault(place, {})[pattern] = function
    hooks: dict[_Place, Hook] = {}
    for place in dict.fromkeys(places.values()):
        names = [name for name, other in places.items() if other == place]
        if captured.intersection(names) or place in edited:
            captures = [name for name in names if name in captured]
            inner = layers[place.number].inner if place.inner else None
            width = config.hidden_size if inner is None else inner[1]
            hooks[place] = Hook(config, width, captures or names, captures=bool(captures), edits=edited.get(place, {}))
    hooked = list[Layer]()
    for index, layer in enumerate(layers):
        if (within := hooks.get(_Place(index, inner=True))) is not None:
            layer.hook, layer.needs_every_row = within, True
        behind = hooks.get(_Place(index, inner=False))
        hooked += [layer] if behind is None else [layer, behind]
    return hooked


class _Place(NamedTuple):
    """Behind the layer with this number, or within it."""

    number: int
    inner: bool


def _places(layers: Sequence[Layer]) -> dict[str, _Place]:
    """The places by name: behind each layer but the head, and behind each block; within attention and MLPs."""
    places = dict[str, _Place]()
    for index, layer in enumerate(layers):
        if not layer.makes_logits and not layer.selects_rows:
            block = layer.name.rpartition(".")[0]
            if block:
                places[block] = _Place(index, inner=False)  # of the last one
            places[layer.name] = _Place(index, inner=False)
            if layer.inner is not None:
                places[f"{layer.name}.{layer.inner[0]}"] = _Place(index, inner=True)
    return places


def add(vector: Tensor) -> Edit:
    """Adds factor · vector [H]: activation steering (Turner et al. 2023, "Activation Addition")."""
    of = _there(vector)
    return lambda x, factor: x + factor * of(x)


def ablate(direction: Tensor) -> Edit:
    """Takes away factor times the part along `direction` [H] (Arditi et al. 2024, "Refusal in Language Models")."""
    of = _there(direction / direction.norm())
    return lambda x, factor: x - factor * (x @ of(x)).unsqueeze(-1) * of(x)


def replace(values: Tensor) -> Edit:
    """Moves the stream to `values` [H], such as that of another run: x + factor · (values − x)."""
    of = _there(values)
    return lambda x, factor: x + factor * (of(x) - x)


def silence(channels: Tensor) -> Edit:
    """Takes away factor times the values of some channels, [N] of True and False: those of neurons, or of heads."""
    of = _there(channels.float())
    return lambda x, factor: x - factor * of(x) * x


def _there(vector: Tensor) -> Callable[[Tensor], Tensor]:
    """x → the vector on its device and of its dtype: one tensor for good, which CUDA graphs read."""
    moved = dict[tuple[torch.device, torch.dtype], Tensor]()

    def of(x: Tensor) -> Tensor:
        key = x.device, x.dtype
        if key not in moved:
            moved[key] = vector.to(*key)
        return moved[key]

    return of
