"""`Adapters`: those that requests may name, and the places on the device that hold the ones in use.

Every adapter is on the host. A request that starts takes a place for its adapter until it ends or is preempted; several requests
share it. Without a free place, the adapter that was used least recently, and that no running request uses, is overwritten. Steps
run in order, so a step in flight has read its weights before the copies of a later step overwrite them.
"""

import secrets
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minirt.adapters.files import Adapter, Linear, read_adapter, shapes_of
from minirt.adapters.rows import LinearAdapters
from minirt.device import is_gpu
from minirt.errors import CheckpointError, InputError, UnsupportedError
from minirt.kernels.adapters.operands import AdapterWeights, most_steps
from minirt.kernels.linear.product import LOW_RANK_BLOCK
from minirt.layers.base import BUILT_IN
from minirt.modeling.model import Model
from minirt.modeling.parameters import PackedLinear
from minirt.sampling_params import adapter_name


@dataclass(eq=False, slots=True)  # without a `__dict__`: no guard of CUDA graphs looks at its tensors, which are on the host
class Known:
    """An adapter that requests may use. `salt`: of keys of the prefix cache; no other adapter has it, and no caller knows it."""

    name: str
    adapter: Adapter
    salt: str
    requests: int = 0


class _Place(NamedTuple):
    """A linear with adapters. `first`: of its modules, among those of all linears."""

    linear: PackedLinear
    selected: bool
    layer: str
    first: int


class Adapters:
    """The adapters of one model.

    Args:
        model: without weights.
        folders: of the adapters, by name.
        places: how many are on the device at once.
        rank: the largest rank of adapters that come later, of any linear. None: that of `folders`, and their linears.

    Attributes:
        known: by name; only the engine's thread changes it.
        rank, places: see above.
    """

    def __init__(self, model: Model, folders: Mapping[str, str | Path], places: int, rank: int | None = None) -> None:
        self.places, self.known, self._model = places, dict[str, Known](), model
        linears = _adaptable(model)
        self._shapes = shapes_of(place.linear for place in linears)
        read = {name: read_adapter(folder, self._shapes) for name, folder in folders.items()}
        used = {module for adapter in read.values() for module in adapter.linears}
        self.rank = -(-max(rank or 1, *(adapter.rank for adapter in read.values()), 1) // 16) * 16
        if rank is None:
            linears = [place for place in linears if used.intersection(place.linear.modules)]
        self._linears, count = list[_Place](), 0
        for place in linears:
            self._linears.append(place._replace(first=count))
            count += len(place.linear.modules)
        self._modules = {module for place in self._linears for module in place.linear.modules}
        self._scales = torch.zeros(0)
        self._count = count
        for name, adapter in read.items():
            self.add(name, adapter)
        self.reset()

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes on the device."""
        sizes = (len(p.linear.modules) * (p.linear.in_features + p.linear.out_features) for p in self._linears)
        return self.places * (sum(sizes) * self.rank * dtype.itemsize + 4 * self._count)

    @property
    def most_modules(self) -> int:
        """The most modules of a linear."""
        return max((len(place.linear.modules) for place in self._linears), default=0)

    def activation_values(self) -> int:
        """Values of a token's y."""
        return most_steps(self.most_modules, self.rank, self.places) * LOW_RANK_BLOCK

    def allocate(self) -> None:
        """Reserve memory on the model's device, and attach it to the linears. Their layers have implementations."""
        model, places, rank = self._model, self.places, self.rank
        device, dtype = model.device, model.dtype
        layers = {layer.name: layer for layer in model.layers}
        self._scales = torch.zeros(places, self._count, dtype=torch.float32, device=device)
        for linear, selected, layer, first in self._linears:
            if (implementation := layers[layer].implementation) not in BUILT_IN:
                what, hint = f"implementation {implementation!r} applies no adapters", "use --merge, or another --impl"
                raise UnsupportedError(what, where=layer, expected=" or ".join(sorted(BUILT_IN)), hint=hint)
            P, context = len(linear.modules), layers[layer].context
            weights = AdapterWeights(
                torch.zeros(places, P, rank, linear.in_features, dtype=dtype, device=device),
                torch.zeros(linear.out_features, places * P * rank, dtype=dtype, device=device),
                self._scales[:, first : first + P],
            )  # fmt: skip
            workspace = context.workspace if implementation == "triton" else None
            linear.adapters = LinearAdapters(weights, selected, workspace, is_gpu(device) and context.pdl)

    def read(self, folder: str | Path) -> Adapter:
        """Read an adapter that comes later. Any thread may call it."""
        adapter = read_adapter(folder, self._shapes)
        if adapter.rank > self.rank:
            what, hint = "the rank is too large", "raise --max-lora-rank"
            raise UnsupportedError(what, where=adapter.folder, expected=f"at most {self.rank}", found=adapter.rank, hint=hint)
        if unknown := adapter.linears.keys() - self._modules:
            what, hint = "there is no room for adapters of this linear", "set --max-lora-rank, with which every linear has room"
            raise UnsupportedError(what, where=adapter.folder, found=min(unknown), hint=hint)
        return adapter

    def add(self, name: str, adapter: Adapter) -> None:
        """Requests may name it from now on; one of the same name is replaced, for requests that come later.

        Raises:
            InputError: it is no name.
            CheckpointError: a weight is infinite or NaN, in the model's dtype. It would change rows of other adapters.
        """
        adapter_name(name, "name")
        linears = {
            module: linear._replace(a=self._on_host(linear.a), b=self._on_host(linear.b))
            for module, linear in adapter.linears.items()
        }
        for module, linear in linears.items():
            if not (linear.a.isfinite().all() and linear.b.isfinite().all()):
                what, expected = "a weight of the adapter is infinite or NaN", f"finite numbers in {self._model.dtype}"
                raise CheckpointError(what, where=f"{adapter.folder}: {module}", expected=expected)
        kept = Adapter(adapter.folder, adapter.base, linears)
        self.known[name] = Known(name, kept, f"lora {secrets.token_hex(16)}")

    def _on_host(self, tensor: Tensor) -> Tensor:
        tensor, device = tensor.to(self._model.dtype), self._model.device
        return tensor.pin_memory() if isinstance(device, torch.device) and device.type == "cuda" else tensor

    def remove(self, name: str) -> None:
        """Requests may not name it any more. Those that do already go on.

        Raises:
            InputError: there is none of this name.
        """
        self.get(name)
        del self.known[name]

    def get(self, name: str) -> Known:
        """Raises InputError if there is no adapter of this name."""
        if (known := self.known.get(name)) is None:
            expected = ", ".join(list(self.known)[:8]) or "none is loaded"
            raise InputError("not an adapter of this model", where="lora", expected=expected, found=name[:80])
        return known

    def request_counts(self) -> dict[str, int]:
        """How many requests have named each adapter."""
        return {name: known.requests for name, known in self.known.items()}

    # --- places on the device; in the engine's thread ---

    def reset(self) -> None:
        """No place is in use or has known content."""
        self._places: OrderedDict[Known, int] = OrderedDict()  # the least recently used comes first
        self._free, self._users = list(range(self.places))[::-1], Counter[Known]()
        self._loads: dict[int, Known] = {}

    def fits(self, known: Known) -> bool:
        """Whether a request with this adapter can start now."""
        return known in self._places or bool(self._free) or any(not self._users[other] for other in self._places)

    def take(self, known: Known) -> int:
        """The place of an adapter that `fits`, for a request that starts."""
        if known not in self._places:
            if not self._free:
                oldest = next(other for other in self._places if not self._users[other])
                self._free.append(self._places.pop(oldest))
            place = self._places[known] = self._free.pop()
            self._loads[place] = known
        self._places.move_to_end(known)
        self._users[known] += 1
        return self._places[known]

    def release(self, known: Known) -> None:
        """A request with this adapter has ended, or was preempted."""
        self._users[known] -= 1

    def load(self) -> None:
        """Queue the copies of the adapters that have got a place since the last step."""
        while self._loads:
            place, known = next(iter(self._loads.items()))
            self._copy(place, known.adapter.linears)
            del self._loads[place]

    def _copy(self, to: int, linears: Mapping[str, Linear]) -> None:
        scales = torch.zeros(self._count)
        for linear, _, _, first in self._linears:
            weights: AdapterWeights = linear.adapters.weights
            b = weights.b.view(linear.out_features, self.places, -1, self.rank)[:, to]
            for number, module in enumerate(linear.modules):
                if (adapter := linears.get(module)) is None:
                    continue
                scales[first + number], rank = adapter.scaling, adapter.rank
                weights.a[to, number, :rank].copy_(adapter.a, non_blocking=True)
                weights.a[to, number, rank:].zero_()
                start = 0
                for part in linear.parts:
                    if part.name == module:
                        rows = adapter.b if part.of is None else part.of.take(adapter.b, part.stored_rows, 0, module)
                        b[start : start + part.rows, number, :rank].copy_(rows, non_blocking=True)
                        b[start : start + part.rows, number, rank:].zero_()
                    start += part.rows
        self._scales[to].copy_(scales, non_blocking=True)


def _adaptable(model: Model) -> list[_Place]:
    """The linears that may have adapters, each once.

    Raises:
        UnsupportedError: a layer is used both before and after `Select`.
    """
    places, selected = dict[int, _Place](), False
    for layer in model.layers:
        for linear in filter(None, (getattr(layer, name) for name in layer.adaptable)):
            place = _Place(linear, selected, layer.name, 0)
            if places.setdefault(id(linear), place).selected != selected:
                raise UnsupportedError("a layer with adapters is used before and after `Select`", where=layer.name)
        selected = selected or layer.selects_rows
    return list(places.values())
