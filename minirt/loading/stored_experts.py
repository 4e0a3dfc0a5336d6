"""`fuse_experts`: whether a checkpoint stores the experts of a layer one by one, or all of them in one tensor.

transformers keeps experts in fused tensors (`….mlp.experts.gate_up_proj`) since its version 5, and some files have them. Names of
tensors decide, layer by layer, before anything is allocated.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from minirt.errors import CheckpointError, UnsupportedError
from minirt.layers import Layer
from minirt.loading.checkpoint import MAX_SHOWN, Entry
from minirt.modeling.formats import FLOATS

_BOTH = "keep one form: remove the others from the files, and from the index"
_QUANTIZED = "load the unquantized checkpoint, with --quantize fp8, or one that stores quantized experts one by one"


def fuse_experts(layers: Iterable[Layer], entries: Mapping[str, Entry] | None) -> None:
    """Set the parameters whose checkpoint tensors are fused to that form.

    Args:
        layers: those of the model, before it is allocated.
        entries: the headers of the checkpoint's files; None: there are none, and nothing is set.
    Raises:
        CheckpointError: a layer has fused tensors, and tensors of single experts.
        UnsupportedError: a fused tensor is quantized, or has a scale or a bias beside it.
    """
    entries = entries or {}
    names = sorted(entries)
    for layer in layers:
        fusible = [(parameter, parameter.fused_tensor) for parameter in layer.parameters() if parameter.fused_tensor]
        stored = [entries[name] for _, fused in fusible for name in _beginning(names, fused)]
        if not stored:
            continue
        single = next((n for p, _ in fusible for module in p.modules for n in _beginning(names, f"{module}.")), None)
        if single is not None:
            what, place = f"{layer.name} has fused experts and single ones", f"{entries[single].file}: {single[:MAX_SHOWN]}"
            fused = stored[0].name[:MAX_SHOWN]
            raise CheckpointError(what, where=place, expected="one of the two forms", found=fused, hint=_BOTH)
        _refuse_quantized(stored, [fused for _, fused in fusible])
        for parameter, _ in fusible:
            parameter.fuse()


def _refuse_quantized(entries: Sequence[Entry], fused: Sequence[str]) -> None:
    for entry in entries:
        what, expected = "quantized experts in one tensor are not supported", " or ".join(FLOATS)
        if entry.name not in fused:
            what, expected = "beside fused experts, this tensor has no known meaning", f"only {' and '.join(fused)}"
        if entry.name not in fused or entry.dtype not in FLOATS:
            place = f"{entry.file}: {entry.name[:MAX_SHOWN]}"
            raise UnsupportedError(what, where=place, expected=expected, found=entry.dtype, hint=_QUANTIZED)


def _beginning(names: Sequence[str], prefix: str) -> Iterator[str]:
    """Those of the sorted names that begin with `prefix`."""
    for place in range(bisect_left(names, prefix), len(names)):
        if not names[place].startswith(prefix):
            return
        yield names[place]
