"""minirt: a layer-composable inference micro-runtime for decoder models.

The public names are imported on first use, so that `import minirt` and `minirt --help` stay fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minirt.errors import MinirtError
    from minirt.generator import Completion, Generator, Piece
    from minirt.sampling import SamplingParams

__all__ = ["Completion", "Generator", "MinirtError", "Piece", "SamplingParams"]

_HOMES = {
    "Completion": "minirt.generator",
    "Generator": "minirt.generator",
    "MinirtError": "minirt.errors",
    "Piece": "minirt.generator",
    "SamplingParams": "minirt.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'minirt' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
