"""`stored_formats`: which linears of a checkpoint are quantized, and how.

The tensors decide whether a linear is quantized, since ignore lists in the wild are incomplete. config.json decides what the
tensors mean. Where the two contradict each other, loading is refused.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from minirt.errors import CheckpointError, ConfigError, UnsupportedError
from minirt.layers import Layer
from minirt.loading.checkpoint import MAX_SHOWN, Entry, attention_scales, some_names
from minirt.modeling.formats import (
    E4M3,
    FLOATS,
    INT32,
    FormatChoice,
    LinearFormat,
    StoredFp8,
    StoredFp8Blocks,
    StoredInt4,
)
from minirt.modeling.parameters import Parameter
from minirt.modeling.quantization_config import INT4_LAYOUTS, LOAD_UNQUANTIZED, Int4Scheme, QuantizationConfig, Scheme
from minirt.wording import warn

_SCALES = ("weight_scale", "weight_scale_inv")
_PACKED = tuple(dict.fromkeys(layout.value_name for layout in INT4_LAYOUTS.values()))  # the weights of 4 bits
_INT4_TENSORS = (*_PACKED, *(layout.zero_name for layout in INT4_LAYOUTS.values()))
_INPUT_SCALES = ("input_scale", "activation_scale")  # the second is transformers' name
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
    linears = [(layer, parameter) for layer in layers for parameter in layer.quantizable()]
    quantizable = {id(parameter) for _, parameter in linears}
    plain = [parameter for layer in layers for parameter in layer.parameters() if id(parameter) not in quantizable]
    for parameter in plain:
        search.refuse_quantized(parameter.expected())
    tables = {module for parameter in plain for module in parameter.modules}  # the embedding, also as a tied head
    for layer, parameter in linears:
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
        biases += search.biases(parameter, schemes)
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
    return StoredFormats(
        {module: search.format(module, scheme) for module, scheme in schemes.items()},
        f"{stated.method}: {'; '.join(sorted(set(map(str, schemes.values()))))}",
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


class _Search:
    """The scheme of each linear, from its tensors (`entries`, empty without files) and from config.json.

    Attributes:
        unlisted: linears that are not quantized though config.json does not list them so. The tensors are believed.
    """

    def __init__(self, entries: Mapping[str, Entry] | None, stated: QuantizationConfig | None) -> None:
        self.seen, self.entries, self.stated = entries is not None, entries or {}, stated
        self.unlisted: list[str] = []

    def format(self, module: str, scheme: Scheme | Int4Scheme) -> LinearFormat:
        """The format of a quantized linear."""
        if isinstance(scheme, Int4Scheme):
            return StoredInt4(scheme, scheme.layout == "gptq" and (scheme.ordered or f"{module}.g_idx" in self.entries))
        name = scheme.scale_name
        return StoredFp8Blocks(name) if scheme.scales == "block" else StoredFp8(scheme.scales == "tensor", name)

    def names(self, module: str, *ends: str) -> list[str]:
        """Which of these ends of names the tensors of a linear have."""
        return [end for end in ends if f"{module}.{end}" in self.entries]

    def scheme(self, module: str) -> Scheme | Int4Scheme | None:
        """How a linear is stored; None: not quantized."""
        said = self.stated.scheme(module, self.stored_name(module)) if self.stated else None
        silent = self.stated is not None and module in self.stated.silent
        if not self.seen:
            return None if silent else said
        if self.names(module, *_PACKED):
            return self.packed(module, said)
        weight, scales = self.entries.get(f"{module}.weight"), self.names(module, *_SCALES)
        if weight is None or weight.dtype in FLOATS:
            if scales:
                dtype = "no weight" if weight is None else f"a weight of dtype {weight.dtype}"
                place = self.entries[f"{module}.{scales[0]}"].place
                raise CheckpointError("a scale without a quantized weight", where=place, expected=E4M3, found=dtype)
            if weight is None:
                return said  # that a tensor is missing is found when the headers are compared with the model
            if said is not None and not silent:
                self.unlisted.append(module)
            return None
        if weight.dtype != E4M3:
            expected, hint = " or ".join((*FLOATS, E4M3) if self.stated else FLOATS), LOAD_UNQUANTIZED
            raise CheckpointError("wrong dtype", where=weight.place, expected=expected, found=weight.dtype, hint=hint)
        if self.stated is None:
            what, expected = "the weight is FP8, but config.json states no quantization", "a quantization_config"
            hint = "its numbers have a meaning only with their scales"
            raise CheckpointError(what, where=weight.place, expected=expected, hint=hint)
        if not scales:
            raise _no_scale(weight, module, said.scale_name if said else _SCALES[0])
        if said is None:
            what, hint = "the weight is quantized, but config.json says it is not", f"correct {self.stated.field}"
            raise ConfigError(what, where=weight.place, found=weight.dtype, hint=hint)
        if isinstance(said, Scheme) and said.scales == "tensor" and self.stated.method == "fp8" and len(scales) == 1:
            said = replace(said, scale_name=scales[0])  # vLLM's and transformers' names of it
        if isinstance(said, Int4Scheme) or scales != [said.scale_name]:
            what, expected = "the scale is not that of the stated format", f"{said.scale_name} ({said})"
            raise CheckpointError(what, where=weight.place, expected=expected, found=", ".join(scales))
        return said

    def stored_name(self, module: str) -> str | None:
        """The prefix of a linear's tensors in the files; None: as in the model."""
        weights = self.names(module, "weight", *_PACKED)
        stored = self.entries[f"{module}.{weights[0]}"].stored_name if weights else None
        return stored and stored.rpartition(".")[0]

    def packed(self, module: str, said: Scheme | Int4Scheme | None) -> Int4Scheme:
        """The scheme of a linear with 4-bit weights."""
        names = self.names(module, "weight", *_PACKED)
        weight = self.entries[f"{module}.{names[-1]}"]
        if len(names) > 1:
            raise CheckpointError("the weight is stored twice", where=weight.place, found=", ".join(names))
        if said is None:
            says, field = "states no quantization", "quantization_config"
            if self.stated:
                says, field = "says it is not quantized", self.stated.field
            raise ConfigError(f"the weight has 4 bits, but config.json {says}", where=weight.place, hint=f"correct {field}")
        if not isinstance(said, Int4Scheme) or said.value_name != names[0]:
            what, expected = "the weight is not that of the stated format", f"{said.value_name} ({said})"
            raise CheckpointError(what, where=weight.place, expected=expected, found=names[0])
        if not self.names(module, said.scale_name):
            raise _no_scale(weight, module, said.scale_name)
        zeros = self.entries.get(f"{module}.{said.tensors.zero_name}")
        if zeros is not None and said.symmetric and not said.tensors.symmetric_zeros:
            raise CheckpointError("zero points of symmetric weights", where=zeros.place, expected="none", found="a tensor")
        return said

    def refuse_quantized(self, specs: Iterable[Sequence]) -> None:
        """Refuse quantized tensors where no layer can compute with them: the embedding, norms."""
        for name, *_ in specs:
            module = name.rpartition(".")[0]
            weights = [name, *(f"{module}.{end}" for end in ("weight", *_PACKED))]
            entry = next((self.entries[weight] for weight in weights if weight in self.entries), None)
            scales = self.names(module, *_SCALES, "scales")
            if entry is not None and (entry.dtype in (E4M3, INT32) or scales):
                what, stored = "this weight cannot be quantized", " with ".join((entry.dtype, *scales))
                expected = f"{' or '.join(FLOATS)}, without scales"
                raise UnsupportedError(what, where=entry.place, expected=expected, found=stored, hint=LOAD_UNQUANTIZED)

    def refuse_tied_copy(self) -> None:
        """Refuse a quantized head if the model's head is tied to the embedding."""
        for name in self.names("lm_head", "weight", *_PACKED):
            entry = self.entries[f"lm_head.{name}"]
            if entry.dtype in (E4M3, INT32):
                what = "config.json ties the head to the embedding, but the checkpoint has a quantized head"
                raise ConfigError(what, where=entry.place, hint="set tie_word_embeddings to false in config.json")

    def biases(self, parameter: Parameter, quantized: Container[str]) -> list[str]:
        """Names of biases of quantized linears that have none. AutoGPTQ writes zeros: Qwen's releases have them."""
        used = {name for name, *_ in parameter.expected()}
        names = [f"{module}.bias" for module in parameter.modules if module in quantized]
        return [name for name in names if name in self.entries and name not in used]


def _no_scale(weight: Entry, module: str, name: str) -> CheckpointError:
    what, hint = "the quantized weight has no scale", "the checkpoint is incomplete"
    return CheckpointError(what, where=weight.place, expected=f"{module}.{name}", hint=hint)


def _refuse_foreign(entries: Mapping[str, Entry], stated: QuantizationConfig | None) -> None:
    """Refuse tensors of formats that minirt does not know, and those of 4-bit weights where none are stated."""
    four_bits = stated is not None and any(isinstance(scheme, Int4Scheme) for _, scheme in stated.groups)
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
        raise UnsupportedError(what, where=f"{entry.file}: {name[:MAX_SHOWN]}", hint=hint)
