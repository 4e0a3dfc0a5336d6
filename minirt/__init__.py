"""minirt: a layer-composable inference micro-runtime for decoder models.

The public names are imported on first use, so that `import minirt` and `minirt --help` stay fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minirt.completion import Completion, Piece
    from minirt.errors import MinirtError
    from minirt.generator import Generator
    from minirt.sampling import SamplingParams

__all__ = ["Completion", "Generator", "MinirtError", "Piece", "SamplingParams"]

_HOMES = {
    "Completion": "minirt.completion",
    "Generator": "minirt.generator",
    "MinirtError": "minirt.errors",
    "Piece": "minirt.completion",
    "SamplingParams": "minirt.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'minirt' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
