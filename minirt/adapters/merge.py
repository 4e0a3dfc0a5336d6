"""`merging`: adds an adapter to the weights of a checkpoint while they are loaded, before they are rounded or quantized."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from minirt.adapters.files import Adapter, read_adapter, shapes_of
from minirt.errors import UnsupportedError
from minirt.loading.checkpoint import EMBEDDING, HEAD
from minirt.modeling.model import Model

Merge = Callable[[str, Tensor, int], Tensor]
"""(name of a tensor, its rows from a first one on, the first one) → the rows with the adapter."""


def merging(folder: str | Path, model: Model) -> tuple[Adapter, Merge]:
    """An adapter for a model without weights, and the function that adds it.

    Raises:
        UnsupportedError: the checkpoint stores a weight of the adapter quantized. Further errors: see `read_adapter`.
    """
    parameters = list(model.parameters())
    whole = {spec[0]: spec[1] for each in parameters for spec in each.expected() if spec[0] in (EMBEDDING, HEAD)}
    adapter = read_adapter(folder, shapes_of(parameters), whole)
    if model.formats is not None and model.formats.checkpoint is not None:
        stored = {module for each in parameters if each.format is not None for module in each.modules}
        if quantized := stored.intersection(adapter.linears):
            what, hint = "an adapter is added to weights of 16 or 32 bits", "without --merge, it is applied per request"
            raise UnsupportedError(what, where=min(quantized), found=model.formats.checkpoint, hint=hint)

    def merge(name: str, rows: Tensor, first: int) -> Tensor:
        linear = adapter.linears.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if name in adapter.saved:
            return adapter.saved[name][first : first + len(rows)]
        if linear is None:
            return rows
        return rows.float().addmm(linear.b[first : first + len(rows)].float(), linear.a.float(), alpha=linear.scaling)

    return adapter, merge
