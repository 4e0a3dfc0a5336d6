"""`stored_formats`: which linears of a checkpoint are quantized, and how.

The tensors decide whether a linear is quantized, since ignore lists in the wild are incomplete. config.json decides what the
tensors mean. Where the two contradict each other, loading is refused.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from minirt.errors import CheckpointError, ConfigError, UnsupportedError
from minirt.layers import Layer
from minirt.loading.checkpoint import MAX_SHOWN, Entry, attention_scales
from minirt.modeling.formats import (
    E4M3,
    FLOATS,
    INT32,
    FormatChoice,
    LinearFormat,
    StoredFp8,
    StoredFp8Blocks,
    StoredInt4Awq,
    StoredInt4Gptq,
    StoredInt4Packed,
)
from minirt.modeling.parameters import Parameter
from minirt.modeling.quantization_config import Int4Scheme, QuantizationConfig, Scheme
from minirt.wording import warn

_SCALES = ("weight_scale", "weight_scale_inv")
_PACKED = ("weight_packed", "qweight")  # the last components of the names of 4-bit weights
_INPUT_SCALES = ("input_scale", "activation_scale")  # the second is transformers' name
_HINT = "load the unquantized checkpoint; minirt quantizes while loading, with --quantize fp8 or --quantize int4"
# Ends of tensor names that only these formats have.
_FOREIGN = {
    "qweight": "AWQ or GPTQ weights",
    "qzeros": "AWQ or GPTQ weights",
    "weight_packed": "4-bit weights of compressed-tensors",
    "weight_scale_2": "NVFP4 weights",
    "weight_global_scale": "NVFP4 weights",
    "weight_zero_point": "weights with zero points",
    "weight_g_idx": "weights whose groups are columns in the order of their activations",
    "SCB": "8-bit weights of bitsandbytes",
    "absmax": "4-bit weights of bitsandbytes",
    "quant_map": "4-bit weights of bitsandbytes",
    "bitmask": "sparse weights",
}
_INT4_TENSORS = ("qweight", "qzeros", "weight_packed", "weight_zero_point")


@dataclass(frozen=True)
class StoredFormats(FormatChoice):
    """The formats found in a checkpoint, by the checkpoint prefix of each quantized linear."""

    formats: Mapping[str, LinearFormat]
    checkpoint: str | None = None
    notes: tuple[str, ...] = ()
    unused_scales: tuple[str, ...] = ()

    def format_of(self, modules: Sequence[str], *, head: bool, tied: bool) -> LinearFormat | None:
        return self.formats.get(modules[0]) if modules else None


def stored_formats(
    layers: Iterable[Layer], entries: Mapping[str, Entry] | None, stated: QuantizationConfig | None
) -> StoredFormats | None:
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
    schemes: dict[str, Scheme | Int4Scheme] = {}
    modules: list[str] = []
    biases: list[str] = []
    layers = list(layers)
    plain = [p for layer in layers for p in layer.parameters() if not any(p is own for own in layer.quantizable())]
    for parameter in plain:
        search.refuse_quantized(parameter.expected())
    tables = {module for parameter in plain for module in parameter.modules}  # the embedding, also as a tied head
    for layer in layers:
        for parameter in layer.quantizable():
            if tables.intersection(parameter.modules):
                search.refuse_tied_copy()
                continue
            modules += parameter.modules
            found = {module: search.scheme(module) for module in parameter.modules}
            if len(set(found.values())) > 1:
                first = {scheme: module for module, scheme in reversed(found.items())}  # a packed linear may have many modules
                shown = ", ".join(f"{first[s]}.weight: {s or 'not quantized'}" for s in dict.fromkeys(found.values()))
                what = "these weights are computed together and must have one format"
                raise UnsupportedError(what, where=layer.name, found=shown, hint=_HINT)
            schemes |= {module: scheme for module, scheme in found.items() if scheme is not None}
            biases += search.biases(parameter, schemes)
    if stated is None:
        return None
    if not schemes:
        hint = "remove quantization_config if the weights are not quantized"
        raise ConfigError("no weight of the checkpoint is quantized", where=stated.where, hint=hint)
    search.warn_of_unlisted()
    inputs, kv = search.unused_scales(modules, schemes)
    kinds = sorted(set(map(str, schemes.values())))
    return StoredFormats(
        {module: search.format(module, scheme) for module, scheme in schemes.items()}, f"{stated.method}: {'; '.join(kinds)}",
        tuple(_notes(schemes.values(), inputs, kv, biases, entries is None)), (*inputs, *kv),
    )  # fmt: skip


def _notes(
    schemes: Iterable[Scheme | Int4Scheme], inputs: Sequence[str], kv: Sequence[str], biases: Sequence[str], unseen: bool
) -> Iterable[str]:
    kinds = {scheme.activations for scheme in schemes if isinstance(scheme, Scheme)}
    if unseen:
        yield "the weight files could not be looked at: the formats are those that config.json states"
    if inputs or "static" in kinds:
        count = f"{len(inputs)} input scales are not used: " if inputs else ""
        yield f"{count}activations have a scale for each token, which is more exact than a stored one"
    if "16-bit" in kinds:
        yield "config.json states 16-bit activations; steps of several tokens round them to FP8"
    if kv:
        what = "attention" if any(name.endswith((".q_scale", ".prob_scale")) for name in kv) else "the KV cache"
        yield f"{len(kv)} scales of {what} are not used: FP8 pages have a scale for each token and head"
    if any(isinstance(scheme, Int4Scheme) and scheme.ordered for scheme in schemes):
        yield "config.json states desc_act; loading checks that each g_idx has the columns in their own order"
    if biases:
        yield f"{len(biases)} biases of linear layers that have none are not used; loading checks that they are zero"


def _weights(module: str) -> list[str]:
    """The names that a linear's weight may have."""
    return [f"{module}.{last}" for last in ("weight", *_PACKED)]


class _Search:
    """The scheme of each linear, from its tensors and from config.json."""

    def __init__(self, entries: Mapping[str, Entry] | None, stated: QuantizationConfig | None) -> None:
        self.entries, self.stated = entries, stated
        self.unlisted: list[str] = []

    def format(self, module: str, scheme: Scheme | Int4Scheme) -> LinearFormat:
        """The format of a quantized linear."""
        if isinstance(scheme, Scheme):
            name = scheme.scale_name
            return StoredFp8Blocks(name) if scheme.scales == "block" else StoredFp8(scheme.scales == "tensor", name)
        if scheme.layout == "gptq":
            indices = scheme.ordered or (self.entries is not None and f"{module}.g_idx" in self.entries)
            return StoredInt4Gptq(scheme.group, scheme.symmetric, scheme.zero_offset, indices)
        return (StoredInt4Packed if scheme.layout == "packed" else StoredInt4Awq)(scheme.group, scheme.symmetric)

    def scheme(self, module: str) -> Scheme | Int4Scheme | None:
        """How a linear is stored; None: not quantized."""
        said = self.stated.scheme(module, self.stored_name(module)) if self.stated else None
        silent = self.stated is not None and module in self.stated.silent
        if self.entries is None:
            return None if silent else said
        if any(f"{module}.{name}" in self.entries for name in _PACKED):
            return self.packed(module, said, self.entries)
        weight = self.entries.get(f"{module}.weight")
        scales = [name for name in _SCALES if f"{module}.{name}" in self.entries]
        if weight is None or weight.dtype in FLOATS:
            if scales:
                found = "no weight" if weight is None else f"a weight of dtype {weight.dtype}"
                where = f"{self.entries[f'{module}.{scales[0]}'].file}: {module}.{scales[0]}"
                raise CheckpointError("a scale without a quantized weight", where=where, expected=E4M3, found=found)
            if weight is None:
                return said  # that a tensor is missing is found when the headers are compared with the model
            if said is not None and not silent:
                self.unlisted.append(module)
            return None
        where = f"{weight.file}: {weight.name}"
        if weight.dtype != E4M3:
            expected = " or ".join((*FLOATS, E4M3) if self.stated else FLOATS)
            raise CheckpointError("wrong dtype", where=where, expected=expected, found=weight.dtype, hint=_HINT)
        if self.stated is None:
            what, expected = "the weight is FP8, but config.json states no quantization", "a quantization_config"
            raise CheckpointError(what, where=where, expected=expected, hint="its numbers have a meaning only with their scales")
        if not scales:
            names = f"{module}.{said.scale_name if said else _SCALES[0]}"
            hint = "the checkpoint is incomplete"
            raise CheckpointError("the quantized weight has no scale", where=where, expected=names, hint=hint)
        if said is None:
            what = "the weight is quantized, but config.json says it is not"
            raise ConfigError(what, where=where, found=weight.dtype, hint=f"correct {self.stated.where.rpartition('.')[0]}")
        if isinstance(said, Scheme) and said.scales == "tensor" and self.stated.method == "fp8" and len(scales) == 1:
            said = replace(said, scale_name=scales[0])  # vLLM's and transformers' names of it
        if isinstance(said, Int4Scheme) or scales != [said.scale_name]:
            found, expected = ", ".join(scales), f"{said.scale_name} ({said})"
            raise CheckpointError("the scale is not that of the stated format", where=where, expected=expected, found=found)
        return said

    def stored_name(self, module: str) -> str | None:
        """The prefix of a linear's tensors in the files; None: as in the model."""
        found = (self.entries[name] for name in _weights(module) if name in self.entries) if self.entries else iter(())
        own = next(found, None)
        return None if own is None or own.stored_name is None else own.stored_name.rpartition(".")[0]

    def packed(self, module: str, said: Scheme | Int4Scheme | None, entries: Mapping[str, Entry]) -> Int4Scheme:
        """The scheme of a linear with 4-bit weights."""
        names = [name for name in ("weight", *_PACKED) if f"{module}.{name}" in entries]
        own = entries[f"{module}.{names[-1]}"]
        where = f"{own.file}: {own.name}"
        if len(names) > 1:
            raise CheckpointError("the weight is stored twice", where=where, found=", ".join(names))
        if said is None:
            what, states = "the weight has 4 bits", self.stated.where.rpartition(".")[0] if self.stated else "quantization_config"
            says = "config.json says it is not quantized" if self.stated else "config.json states no quantization"
            raise ConfigError(f"{what}, but {says}", where=where, hint=f"correct {states}")
        if not isinstance(said, Int4Scheme) or said.value_name != names[0]:
            expected = f"{said.value_name} ({said})"
            raise CheckpointError("the weight is not that of the stated format", where=where, expected=expected, found=names[0])
        if f"{module}.{said.scale_name}" not in entries:
            expected, hint = f"{module}.{said.scale_name}", "the checkpoint is incomplete"
            raise CheckpointError("the quantized weight has no scale", where=where, expected=expected, hint=hint)
        if said.symmetric and said.layout == "packed" and f"{module}.weight_zero_point" in entries:
            what = f"{entries[f'{module}.weight_zero_point'].file}: {module}.weight_zero_point"
            raise CheckpointError("zero points of symmetric weights", where=what, expected="none", found="a tensor")
        return said

    def refuse_quantized(self, expected: Iterable[Sequence]) -> None:
        """Refuse quantized tensors where no layer can compute with them: the embedding, norms."""
        for name, *_ in expected:
            prefix, entries = name.rpartition(".")[0], self.entries or {}
            entry = next((entries[own] for own in (name, *_weights(prefix)) if own in entries), None)
            scales = [scale for scale in (*_SCALES, "scales") if f"{prefix}.{scale}" in entries]
            if entry is not None and (entry.dtype in (E4M3, INT32) or scales):
                what, where = "this weight cannot be quantized", f"{entry.file}: {entry.name}"
                expected, found = f"{' or '.join(FLOATS)}, without scales", " with ".join((entry.dtype, *scales))
                raise UnsupportedError(what, where=where, expected=expected, found=found, hint=_HINT)

    def refuse_tied_copy(self) -> None:
        """Refuse a quantized head if the model's head is tied to the embedding."""
        for name in ("weight", *_PACKED):
            entry = (self.entries or {}).get(f"lm_head.{name}")
            if entry is not None and entry.dtype in (E4M3, INT32):
                what = "config.json ties the head to the embedding, but the checkpoint has a quantized head"
                hint = "set tie_word_embeddings to false in config.json"
                raise ConfigError(what, where=f"{entry.file}: {entry.name}", hint=hint)

    def biases(self, parameter: Parameter, quantized: Container[str]) -> list[str]:
        """Names of biases of quantized linears that have none. AutoGPTQ writes zeros: Qwen's releases have them."""
        own = {name for name, *_ in parameter.expected()}
        names = [f"{module}.bias" for module in parameter.modules if module in quantized]
        return [name for name in names if name in (self.entries or ()) and name not in own]

    def warn_of_unlisted(self) -> None:
        """Warn of linears that are not quantized though config.json does not list them so; the tensors are believed."""
        if self.unlisted and self.stated:
            some = ", ".join(name[:MAX_SHOWN] for name in self.unlisted[:4]) + (", …" if len(self.unlisted) > 4 else "")
            what = f"not quantized, though not listed so: {some} ({len(self.unlisted)} in total)"
            warn(f"{self.stated.where}: {what}")

    def unused_scales(self, modules: Sequence[str], quantized: Iterable[str]) -> tuple[list[str], list[str]]:
        """Names of tensors that are accepted and not used: scales of activations, and of FP8 attention."""
        inputs, found = set(quantized), [(name, *name.rpartition(".")[::2]) for name in self.entries or ()]
        of_inputs = [name for name, prefix, last in found if last in _INPUT_SCALES and prefix in inputs]
        return of_inputs, attention_scales(self.entries or (), modules)


def _refuse_foreign(entries: Mapping[str, Entry], stated: QuantizationConfig | None) -> None:
    """Refuse tensors of formats that minirt does not know, and those of 4-bit weights where none are stated."""
    four_bits = stated is not None and any(isinstance(scheme, Int4Scheme) for _, scheme in stated.groups)
    for name, entry in entries.items():
        last = name.rpartition(".")[2]
        kind = _FOREIGN.get(last)
        if kind is not None and not (four_bits and last in _INT4_TENSORS):
            what, hint = f"{kind} are not supported", _HINT
            if last in _INT4_TENSORS:
                what = f"{kind}, but config.json does not state them"
                hint = "the quantization_config of config.json is missing; older releases have it in quantize_config.json"
                if stated is not None:
                    hint = f"{stated.where} states {stated.method}"
            raise UnsupportedError(what, where=f"{entry.file}: {name[:MAX_SHOWN]}", hint=hint)
