"""How a checkpoint stores linears: `stored_formats`, which of them are quantized, and how; `fuse_experts`, in which tensors.

The tensors decide whether a linear is quantized, since ignore lists in the wild are incomplete. config.json decides what the
tensors mean. Where the two contradict each other, loading is refused. transformers keeps experts in fused tensors
(`….mlp.experts.gate_up_proj`) since its version 5, and some files have them: names of tensors decide, layer by layer.
"""

import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from minirt.errors import CheckpointError, ConfigError, UnsupportedError
from minirt.layers import Layer
from minirt.loading.checkpoint import MAX_SHOWN, Entries, Entry, attention_scales, some_names
from minirt.modeling import formats
from minirt.modeling.formats import E4M3, FLOATS, INT32, LinearFormat
from minirt.modeling.quantization_config import INT4_LAYOUTS, LOAD_UNQUANTIZED, MXFP4, QuantizationConfig, Scheme, fp8_scheme
from minirt.wording import warn

_BOTH = "keep one form: remove the others from the files, and from the index"
_FUSED_QUANTIZED = "load the unquantized checkpoint, with --quantize fp8, or one that stores quantized experts one by one"
_SCALES = ("weight_scale", "weight_scale_inv", "scales")
_PACKED = tuple(dict.fromkeys(layout.value_name for layout in INT4_LAYOUTS.values()))  # the weights of 4 bits
_WEIGHTS = ("weight", *_PACKED)
_INT4_TENSORS = (*_PACKED, *(layout.zero_name for layout in INT4_LAYOUTS.values()))
_INPUT_SCALES = ("input_scale", "activation_scale")  # the second is transformers' name
# Ends of tensor names that only these formats have.
_FOREIGN = {
    name: what
    for what, names in {
        "AWQ or GPTQ weights": "qweight qzeros", "4-bit weights of compressed-tensors": "weight_packed",
        "NVFP4 weights": "weight_scale_2 weight_global_scale", "weights with zero points": "weight_zero_point",
        "weights whose groups are columns in the order of their activations": "weight_g_idx",
        "8-bit weights of bitsandbytes": "SCB", "4-bit weights of bitsandbytes": "absmax quant_map", "sparse weights": "bitmask",
    }.items()
    for name in names.split()
}  # fmt: skip


@dataclass(frozen=True)
class StoredFormats(formats.FormatChoice):
    """The formats found in a checkpoint, by the checkpoint prefix of each quantized linear."""

    formats: Mapping[str, LinearFormat]

    def format_of(self, modules: Sequence[str], *, head: bool, tied: bool) -> LinearFormat | None:
        return self.formats.get(modules[0]) if modules else None


def stored_formats(layers: Iterable[Layer], entries: Entries | None, stated: QuantizationConfig | None) -> StoredFormats | None:
    """The formats of a checkpoint's linears, or None if none is quantized.

    Args:
        layers: those of the model.
        entries: the headers of the checkpoint's files. None: there are none, and what is stated is believed.
        stated: what config.json says.
    Raises:
        CheckpointError: a quantized weight has no scale, a scale no quantized weight, or a dtype is not the stated format's.
        ConfigError: tensors and config.json contradict each other.
        UnsupportedError: the parts of a packed linear differ in format, or the format is not supported.
    """
    search = _Search(entries, stated)
    if entries is not None:
        _refuse_foreign(entries, stated)
    schemes: dict[str, Scheme] = {}
    modules: list[str] = []
    parameters = [(layer, parameter) for layer in layers for parameter in layer.parameters()]
    plain = [parameter for _, parameter in parameters if not parameter.quantizable]
    for parameter in plain:
        search.refuse_quantized(parameter.expected())
    tables = {module for parameter in plain for module in parameter.modules}  # the embedding, also as a tied head
    for layer, parameter in parameters:
        if not parameter.quantizable:
            continue
        if tables.intersection(parameter.modules):
            search.refuse_tied_copy()
            continue
        modules += parameter.modules
        parts = {module: search.scheme(module) for module in parameter.modules}
        if len(set(parts.values())) > 1:
            first = {scheme: module for module, scheme in reversed(parts.items())}  # a packed linear may have many modules
            different = ", ".join(f"{first[s]}.weight: {s or 'not quantized'}" for s in dict.fromkeys(parts.values()))
            what = "these weights are computed together and must have one format"
            raise UnsupportedError(what, where=layer.name, found=different, hint=LOAD_UNQUANTIZED)
        schemes |= {module: scheme for module, scheme in parts.items() if scheme is not None}
    if stated is None:
        return None
    if not schemes:
        hint = "remove quantization_config if the weights are not quantized"
        raise ConfigError("no weight of the checkpoint is quantized", where=stated.place, hint=hint)
    if search.unlisted:
        warn(f"{stated.place}: not quantized, though not listed so: {some_names(search.unlisted)}")
    ends = [(name, *name.rpartition(".")[::2]) for name in entries or ()]
    inputs = [name for name, module, last in ends if last in _INPUT_SCALES and module in schemes]
    kv = attention_scales(entries or (), modules)
    method = f"{stated.method}: {'; '.join(sorted(set(map(str, schemes.values()))))}"
    notes, unused = _notes(schemes.values(), inputs, kv, entries is None), (*inputs, *kv)
    scale_dtype = search.scale_dtype(schemes)
    chosen = {module: search.format(module, scheme, scale_dtype) for module, scheme in schemes.items()}
    return StoredFormats(chosen, checkpoint=method, notes=notes, unused_scales=unused)


def _notes(schemes: Iterable[Scheme], inputs: Sequence[str], kv: Sequence[str], unseen: bool) -> tuple[str, ...]:
    stated = {scheme.activations for scheme in schemes if scheme.scales != "group"}
    count = f"{len(inputs)} input scales are not used: " if inputs else ""
    kv_user = "attention" if any(name.endswith((".q_scale", ".prob_scale")) for name in kv) else "the KV cache"
    notes = {
        "the weight files could not be looked at: the formats are those that config.json states": unseen,
        f"{count}activations have a scale for each token, which is more exact than a stored one": inputs or "static" in stated,
        "config.json states 16-bit activations; steps of several tokens round them to FP8": "16-bit" in stated,
        f"{len(kv)} scales of {kv_user} are not used: FP8 pages have a scale for each token and head": kv,
        "config.json states desc_act; loading checks that each g_idx has the columns in their own order":
            any(scheme.ordered for scheme in schemes),
    }  # fmt: skip
    return tuple(note for note, holds in notes.items() if holds)


class _Search:
    """The scheme of each linear, from its tensors (`entries`, empty without files) and from config.json.

    Attributes:
        unlisted: linears that are not quantized though config.json does not list them so. The tensors are believed.
    """

    def __init__(self, entries: Entries | None, stated: QuantizationConfig | None) -> None:
        self.seen, self.entries, self.stated = entries is not None, entries or {}, stated
        self.unlisted: list[str] = []

    def scale_dtype(self, schemes: Mapping[str, Scheme]) -> torch.dtype:
        """The dtype of the scale words of symmetric 4-bit weights: that of all their scales, if it has 16 bits."""
        of_groups = [f"{module}.{s.layout.scale_name}" for module, s in schemes.items() if s.scales == "group" and s.symmetric]
        dtypes = {self.entries[name].dtype for name in of_groups if name in self.entries} if self.seen else {"BF16"}
        return {frozenset(["BF16"]): torch.bfloat16, frozenset(["F16"]): torch.float16}.get(frozenset(dtypes), torch.int32)

    def format(self, module: str, scheme: Scheme, scale_dtype: torch.dtype) -> LinearFormat:
        """The format of a quantized linear. scale_dtype: of all symmetric 4-bit weights."""
        layout = scheme.layout
        if layout is MXFP4:
            return formats.StoredMxfp4()
        if scheme.scales == "block":
            return formats.StoredFp8Blocks(layout.scale_name)
        if scheme.scales != "group":
            return formats.StoredFp8(scheme.scales == "tensor", layout.scale_name)
        has_indices = scheme.ordered or bool(self.names(module, layout.indices_name or ""))
        return formats.StoredInt4(scheme, has_indices, scale_dtype if scheme.symmetric else torch.int32)

    def names(self, module: str, *ends: str) -> list[str]:
        """Which of these ends of names the tensors of a linear have."""
        return [end for end in ends if f"{module}.{end}" in self.entries]

    def scheme(self, module: str) -> Scheme | None:
        """How a linear is stored; None: not quantized."""
        stated, names, scales = self.stated, self.names(module, *_WEIGHTS), self.names(module, *_SCALES)
        weight = self.entries[f"{module}.{names[-1]}"] if names else None
        stored_name = weight.stored_name if weight else None
        scheme = stated.scheme(module, stored_name and stored_name.rpartition(".")[0]) if stated else None
        may_be_plain = stated is not None and stated.may_be_plain(module)
        if not self.seen:
            return None if may_be_plain else scheme
        blocks = self.entries.get(f"{module}{MXFP4.value_name}")
        if module in self.entries or blocks is not None:
            return self._of_experts(module, blocks, scheme)
        if weight is None or (names == ["weight"] and weight.dtype in FLOATS):
            if scales:
                dtype = "no weight" if weight is None else f"a weight of dtype {weight.dtype}"
                place = self.entries[f"{module}.{scales[0]}"].place
                raise CheckpointError("a scale without a quantized weight", where=place, expected=E4M3, found=dtype)
            if weight is None:
                return scheme  # that a tensor is missing is found when the headers are compared with the model
            if scheme is not None and not may_be_plain:
                self.unlisted.append(module)
            return None
        if len(names) > 1:
            raise CheckpointError("the weight is stored twice", where=weight.place, found=", ".join(names))
        four_bits = names[0] in _PACKED
        if weight.dtype != E4M3 and not four_bits:
            expected, hint = " or ".join((*FLOATS, E4M3) if stated else FLOATS), LOAD_UNQUANTIZED
            raise CheckpointError("wrong dtype", where=weight.place, expected=expected, found=weight.dtype, hint=hint)
        if stated is None:  # weights of 4 bits are refused before
            what, expected = "the weight is FP8, but config.json states no quantization", "a quantization_config"
            hint = "its numbers have a meaning only with their scales"
            raise CheckpointError(what, where=weight.place, expected=expected, hint=hint)
        if not scales:
            name, hint = scheme.layout.scale_name if scheme else _SCALES[0], "the checkpoint is incomplete"
            raise CheckpointError("the quantized weight has no scale", where=weight.place, expected=f"{module}.{name}", hint=hint)
        if scheme is None:
            what = f"the weight {'has 4 bits' if four_bits else 'is quantized'}, but config.json says it is not"
            raise ConfigError(what, where=weight.place, found=weight.dtype, hint=f"correct {stated.field}")
        if scheme.scales == "tensor" and stated.method == "fp8" and len(scales) == 1:
            scheme = fp8_scheme("tensor", scheme.activations, scales[0])  # vLLM's and transformers' names of it
        layout = scheme.layout
        for what, name, stored in (("weight", layout.value_name, names), ("scale", layout.scale_name, scales)):
            if stored != [name]:
                what, expected = f"the {what} is not that of the stated format", f"{name} ({scheme})"
                raise CheckpointError(what, where=weight.place, expected=expected, found=", ".join(stored))
        if four_bits and scheme.symmetric and not layout.symmetric_zeros and self.names(module, layout.zero_name):
            place = self.entries[f"{module}.{layout.zero_name}"].place
            raise CheckpointError("zero points of symmetric weights", where=place, expected="none", found="a tensor")
        return scheme

    def _of_experts(self, module: str, blocks: Entry | None, scheme: Scheme | None) -> Scheme | None:
        """How the experts of a layer are stored in one tensor, which has their biases beside it (`PackedExperts`)."""
        if blocks is None:
            if scheme is not None:
                self.unlisted.append(module)
            return None
        if module in self.entries:
            raise CheckpointError("the weight is stored twice", where=blocks.place, found=f"{module} and its blocks")
        if f"{module}{MXFP4.scale_name}" not in self.entries:
            what, hint = "the quantized weight has no scale", "the checkpoint is incomplete"
            raise CheckpointError(what, where=blocks.place, expected=f"{module}{MXFP4.scale_name}", hint=hint)
        if scheme is None or scheme.layout is not MXFP4:
            what, expected = "the weight is in MXFP4, but config.json does not say so", "quant_method mxfp4"
            if self.stated is not None and self.stated.method == "mxfp4":
                what, expected = "only experts can be in MXFP4, without those that config.json lists", " or ".join(FLOATS)
            raise ConfigError(what, where=blocks.place, expected=expected, found=scheme and str(scheme))
        return scheme

    def refuse_quantized(self, specs: Iterable[Sequence]) -> None:
        """Refuse quantized tensors where no layer can compute with them: the embedding, norms."""
        for name, *_ in specs:
            module = name.rpartition(".")[0]
            weights = [name, *(f"{module}.{end}" for end in _WEIGHTS)]
            entry = next((self.entries[weight] for weight in weights if weight in self.entries), None)
            scales = self.names(module, *_SCALES)
            if entry is not None and (entry.dtype in (E4M3, INT32) or scales):
                what, stored = "this weight cannot be quantized", " with ".join((entry.dtype, *scales))
                expected = f"{' or '.join(FLOATS)}, without scales"
                raise UnsupportedError(what, where=entry.place, expected=expected, found=stored, hint=LOAD_UNQUANTIZED)

    def refuse_tied_copy(self) -> None:
        """Refuse a quantized head if the model's head is tied to the embedding."""
        for entry in (self.entries[f"lm_head.{name}"] for name in self.names("lm_head", *_WEIGHTS)):
            if entry.dtype in (E4M3, INT32):
                what = "config.json ties the head to the embedding, but the checkpoint has a quantized head"
                raise ConfigError(what, where=entry.place, hint="set tie_word_embeddings to false in config.json")


def _refuse_foreign(entries: Entries, stated: QuantizationConfig | None) -> None:
    """Refuse tensors of formats that minirt does not know, and those of 4-bit weights where none are stated."""
    four_bits = stated is not None and any(scheme.scales == "group" for _, scheme in stated.groups)
    for name, entry in entries.items():
        last = name.rpartition(".")[2]
        if last not in _FOREIGN or (four_bits and last in _INT4_TENSORS):
            continue
        what, hint = f"{_FOREIGN[last]} are not supported", LOAD_UNQUANTIZED
        if last in _INT4_TENSORS:
            what = f"{_FOREIGN[last]}, but config.json does not state them"
            hint = "the quantization_config of config.json is missing; older releases have it in quantize_config.json"
            if stated is not None:
                hint = f"{stated.place} states {stated.method}"
        raise UnsupportedError(what, where=entry.place, hint=hint)


def fuse_experts(layers: Iterable[Layer], entries: Entries | None) -> None:
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
        fusible = [parameter for parameter in layer.parameters() if parameter.fused_tensor]
        fused = [parameter.fused_tensor or "" for parameter in fusible]
        stored = [entries[name] for start in fused for name in _beginning(names, start)]
        if not stored:
            continue
        single = next((n for p in fusible for module in p.modules for n in _beginning(names, f"{module}.")), None)
        if single is not None:
            what, first = f"{layer.name} has fused experts and single ones", stored[0].name[:MAX_SHOWN]
            raise CheckpointError(what, where=entries[single].place, expected="one of the two forms", found=first, hint=_BOTH)
        for entry in stored:
            what, expected = "quantized experts in one tensor are not supported", " or ".join(FLOATS)
            if entry.name not in fused:
                what, expected = "beside fused experts, this tensor has no known meaning", f"only {' and '.join(fused)}"
            if entry.name not in fused or entry.dtype not in FLOATS:
                raise UnsupportedError(what, where=entry.place, expected=expected, found=entry.dtype, hint=_FUSED_QUANTIZED)
        for parameter in fusible:
            parameter.fuse()


def _beginning(names: list[str], prefix: str) -> list[str]:
    """Those of the sorted names that begin with `prefix`."""
    return names[bisect_left(names, prefix) : bisect_left(names, prefix + chr(sys.maxunicode))]
