"""`stored_formats`: which linears of a checkpoint are quantized, and how.

The tensors decide whether a linear is quantized, since ignore lists in the wild are incomplete. config.json decides what the
tensors mean. Where the two contradict each other, loading is refused.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from minirt.errors import CheckpointError, ConfigError, UnsupportedError
from minirt.layers import Layer
from minirt.loading.checkpoint import MAX_SHOWN, Entry, attention_scales, some_names
from minirt.modeling import formats
from minirt.modeling.formats import E4M3, FLOATS, INT32, LinearFormat
from minirt.modeling.parameters import Parameter
from minirt.modeling.quantization_config import INT4_LAYOUTS, LOAD_UNQUANTIZED, Int4Scheme, QuantizationConfig, Scheme
from minirt.wording import warn

_SCALES = ("weight_scale", "weight_scale_inv", "scales")
_PACKED = tuple(dict.fromkeys(layout.value_name for layout in INT4_LAYOUTS.values()))  # the weights of 4 bits
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
            indices = scheme.layout.indices_name
            has_indices = indices is not None and (scheme.ordered or f"{module}.{indices}" in self.entries)
            return formats.StoredInt4(scheme, has_indices)
        name = scheme.scale_name
        return formats.StoredFp8Blocks(name) if scheme.scales == "block" else formats.StoredFp8(scheme.scales == "tensor", name)

    def names(self, module: str, *ends: str) -> list[str]:
        """Which of these ends of names the tensors of a linear have."""
        return [end for end in ends if f"{module}.{end}" in self.entries]

    def scheme(self, module: str) -> Scheme | Int4Scheme | None:
        """How a linear is stored; None: not quantized."""
        scheme = self.stated.scheme(module, self.stored_name(module)) if self.stated else None
        ignored_by_default = self.stated is not None and module in self.stated.ignored_by_default
        if not self.seen:
            return None if ignored_by_default else scheme
        names, scales = self.names(module, "weight", *_PACKED), self.names(module, *_SCALES)
        weight = self.entries[f"{module}.{names[-1]}"] if names else None
        if weight is None or (names == ["weight"] and weight.dtype in FLOATS):
            if scales:
                dtype = "no weight" if weight is None else f"a weight of dtype {weight.dtype}"
                place = self.entries[f"{module}.{scales[0]}"].place
                raise CheckpointError("a scale without a quantized weight", where=place, expected=E4M3, found=dtype)
            if weight is None:
                return scheme  # that a tensor is missing is found when the headers are compared with the model
            if scheme is not None and not ignored_by_default:
                self.unlisted.append(module)
            return None
        if len(names) > 1:
            raise CheckpointError("the weight is stored twice", where=weight.place, found=", ".join(names))
        four_bits = names[0] in _PACKED
        if weight.dtype != E4M3 and not four_bits:
            expected, hint = " or ".join((*FLOATS, E4M3) if self.stated else FLOATS), LOAD_UNQUANTIZED
            raise CheckpointError("wrong dtype", where=weight.place, expected=expected, found=weight.dtype, hint=hint)
        if self.stated is None:  # weights of 4 bits are refused before
            what, expected = "the weight is FP8, but config.json states no quantization", "a quantization_config"
            hint = "its numbers have a meaning only with their scales"
            raise CheckpointError(what, where=weight.place, expected=expected, hint=hint)
        layout = scheme.layout if isinstance(scheme, Int4Scheme) else scheme
        if not scales:
            what, name = "the quantized weight has no scale", layout.scale_name if layout else _SCALES[0]
            hint = "the checkpoint is incomplete"
            raise CheckpointError(what, where=weight.place, expected=f"{module}.{name}", hint=hint)
        if scheme is None or layout is None:
            what = f"the weight {'has 4 bits' if four_bits else 'is quantized'}, but config.json says it is not"
            raise ConfigError(what, where=weight.place, found=weight.dtype, hint=f"correct {self.stated.field}")
        if isinstance(scheme, Scheme) and scheme.scales == "tensor" and self.stated.method == "fp8" and len(scales) == 1:
            scheme = layout = replace(scheme, scale_name=scales[0])  # vLLM's and transformers' names of it
        for what, name, stored in (("weight", layout.value_name, names), ("scale", layout.scale_name, scales)):
            if stored != [name]:
                what, expected = f"the {what} is not that of the stated format", f"{name} ({scheme})"
                raise CheckpointError(what, where=weight.place, expected=expected, found=", ".join(stored))
        packed = scheme.layout if isinstance(scheme, Int4Scheme) and scheme.symmetric else None
        if packed and not packed.symmetric_zeros and (zeros := self.entries.get(f"{module}.{packed.zero_name}")):
            raise CheckpointError("zero points of symmetric weights", where=zeros.place, expected="none", found="a tensor")
        return scheme

    def stored_name(self, module: str) -> str | None:
        """The prefix of a linear's tensors in the files; None: as in the model."""
        weights = self.names(module, "weight", *_PACKED)
        stored = self.entries[f"{module}.{weights[0]}"].stored_name if weights else None
        return stored and stored.rpartition(".")[0]

    def refuse_quantized(self, specs: Iterable[Sequence]) -> None:
        """Refuse quantized tensors where no layer can compute with them: the embedding, norms."""
        for name, *_ in specs:
            module = name.rpartition(".")[0]
            weights = [name, *(f"{module}.{end}" for end in ("weight", *_PACKED))]
            entry = next((self.entries[weight] for weight in weights if weight in self.entries), None)
            scales = self.names(module, *_SCALES)
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
