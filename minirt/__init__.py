"""minirt: a layer-composable inference micro-runtime for decoder models.

The public names are imported on first use, so that `import minirt` and `minirt --help` stay fast.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minirt.async_generator import AsyncGenerator
    from minirt.errors import MinirtError
    from minirt.generator import Generator
    from minirt.loading.options import LoadOptions
    from minirt.outputs import Completion, Piece, Samples, Score
    from minirt.patching.model import patch, unpatch
    from minirt.sampling_params import SamplingParams
    from minirt.speculative.options import SpeculativeOptions
    from minirt.structured.params import StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "AsyncGenerator", "Completion", "Generator", "LoadOptions", "MinirtError", "Piece", "Samples", "SamplingParams", "Score",
    "SpeculativeOptions", "StructuredOutputsParams", "__version__", "patch", "unpatch",
]  # fmt: skip

# Module → what it has of these.
_HOMES = {
    "async_generator": "AsyncGenerator", "errors": "MinirtError", "generator": "Generator", "loading.options": "LoadOptions",
    "outputs": "Completion Piece Samples Score", "patching.model": "patch unpatch", "sampling_params": "SamplingParams",
    "speculative.options": "SpeculativeOptions", "structured.params": "StructuredOutputsParams",
}  # fmt: skip

# In a checkout these three are symbolic links to folders next to this one. In an installed package they are real folders.
for _part in ("kernels", "models", "bench"):
    if find_spec(f"minirt.{_part}") is None:
        raise ImportError(
            f"{__path__[0]}/{_part} is missing or is not a folder: in a checkout it is a link to ../{_part}. "
            "Restore the links with `git checkout -- minirt/kernels minirt/models minirt/bench` (on Windows first "
            "`git config core.symlinks true`), or install the package with `pip install -e .`"
        )


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names.split()), None)
    if home is None:
        from minirt.foreign_names import python_hint

        if (hint := python_hint(name)) is not None and name[:1].isupper():  # `from minirt import LLM`
            raise ImportError(f"minirt has no {name} ({hint})", name=__name__)
        raise AttributeError(f"module 'minirt' has no attribute {name!r}")
    from minirt.threads import limit_spinning

    limit_spinning()  # before PyTorch is imported, which has an effect only then
    return getattr(import_module(f"minirt.{home}"), name)
