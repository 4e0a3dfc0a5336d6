"""`QuantizationConfig`: what config.json and hf_quant_config.json say about quantized weights. Imports no torch.

Three producers state FP8 in their own ways: Qwen's and DeepSeek's releases ("fp8"), llm-compressor ("compressed-tensors") and
NVIDIA's ModelOpt ("modelopt"). 4-bit weights are stated by llm-compressor too, by GPTQModel ("gptq"), AutoAWQ ("awq") and
AutoRound ("auto-round"). What minirt cannot compute is refused here by name. Whether a weight is quantized is decided by its
tensors, see `minirt.loading.stored_formats`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from minirt.errors import ConfigError, inside
from minirt.modeling.config import Fields, shown
from minirt.modeling.patterns import matches, parsed
from minirt.wording import warn

BLOCK = 128
LOAD_UNQUANTIZED = "load the unquantized checkpoint; minirt quantizes while loading, with --quantize fp8, int4 or mxfp4"
_PLANNED = f"planned; until then, {LOAD_UNQUANTIZED}"
# Methods that are refused, with the hint.
_REFUSED = {
    "modelopt_fp4": _PLANNED, "bitsandbytes": f"bitsandbytes is not planned; {LOAD_UNQUANTIZED}",
    "gguf": f"GGUF is not planned; {LOAD_UNQUANTIZED}",
}  # fmt: skip
# ModelOpt's names of what the weights are.
_ALGORITHMS = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel", "FP8_PB_WO": "block", "FP8_BLOCK_SCALES": "block"}
_MAX_PATTERNS = 256  # of one list; each is tried on every linear


class Layout(NamedTuple):
    """How a producer names and packs the tensors of a linear. The default is FP8, which is not packed.

    4-bit weights are int32 words of eight neighbouring values, with scales and zero points of groups.

    Attributes:
        value_name, scale_name, zero_name: the last components of the tensors' names.
        transposed: whether the tensors are [columns, rows] instead of [rows, columns].
        by_rows: whether a word has eight rows of one column of the weight; otherwise it has eight columns of one row. A word of
            zero points always has those of eight rows.
        nibbles: the nibbles of a word that hold its values in order; None: the lowest bits first.
        shape_name: of a tensor with the shape of the weight; None: there is none.
        symmetric_zeros: whether symmetric weights have zero points, too.
        indices_name: of a tensor that may hold the group of each column; None: there is none.
    """

    value_name: str = "weight"
    scale_name: str = "weight_scale"
    zero_name: str = ""
    transposed: bool = True
    by_rows: bool = False
    nibbles: tuple[int, ...] | None = None
    shape_name: str | None = None
    symmetric_zeros: bool = True
    indices_name: str | None = None


INT4_LAYOUTS = {
    "packed": Layout(  # `pack-quantized` of compressed-tensors
        "weight_packed", "weight_scale", "weight_zero_point", transposed=False, shape_name="weight_shape", symmetric_zeros=False
    ),
    "gptq": Layout("qweight", "scales", "qzeros", indices_name="g_idx"),
    "awq": Layout("qweight", "scales", "qzeros", by_rows=True, nibbles=(0, 4, 1, 5, 2, 6, 3, 7)),  # its version "gemm"
}


MXFP4 = Layout("_blocks", "_scales", transposed=False)  # of all experts of a layer: ends of names, not components


@dataclass(frozen=True)
class Scheme:
    """How the weights of a linear are stored: 4 bits in groups of columns, or e4m3. Scales multiply.

    Attributes:
        group: columns of a group; None: one group is a whole row.
        symmetric: whether all zero points are 8.
        zero_offset: what is added to a stored zero point: 1 in GPTQ's files of version 1.
        ordered: whether the columns may be in another order (`desc_act`). Then there must be a tensor of `indices_name`, and it
            decides.
        scales: of e4m3, one for each "tensor", "channel" (row), or "block" of 128 × 128; else "group", one for each row of each.
        activations: what the producer's runtime does with the linear's input: "dynamic" (scales computed at run time), "static"
            (a stored scale), or "16-bit".
    """

    layout: Layout
    group: int | None = BLOCK
    symmetric: bool = True
    zero_offset: int = 0
    ordered: bool = False
    scales: str = "group"
    activations: str = "16-bit"

    def __str__(self) -> str:
        if self.scales != "group":
            return f"FP8, one scale for each {'block of 128x128' if self.scales == 'block' else self.scales}"
        if self.layout is MXFP4:
            return "MXFP4"
        groups = "one group a row" if self.group is None else f"groups of {self.group}"
        return f"4 bits, {groups}, {'symmetric' if self.symmetric else 'with zero points'}"


def fp8_scheme(scales: str, activations: str, scale_name: str = "weight_scale") -> Scheme:
    return Scheme(Layout(scale_name=scale_name), scales=scales, activations=activations)


@dataclass(frozen=True)
class Modules:
    """A list of modules, as producers write it.

    Attributes:
        names: full names, such as "model.layers.0.mlp.down_proj".
        patterns: "re:" and a regular expression, which matches a beginning of the name; or a name with the wildcard "*".
        linears: whether "Linear", the class of all of them, is listed.
    """

    names: frozenset[str]
    patterns: tuple[str, ...] = ()
    linears: bool = False

    def rank(self, module: str, stored: str) -> int | None:
        """How specific the entry is that matches a module, 0 being most specific; None: there is none.

        `stored` is its name in the files, for which patterns are meant. Full names may be of either kind.
        """
        if module in self.names or stored in self.names:
            return 0
        if any(matches(p[3:], stored) if p.startswith("re:") else fnmatchcase(stored, p) for p in self.patterns):
            return 1
        return 2 if self.linears else None


@dataclass(frozen=True)
class QuantizationConfig:
    """The stated quantization of a checkpoint.

    Attributes:
        method: one of METHODS.
        place: file and field, for messages.
        groups: which linears have which scheme. The most specific entry counts.
        ignore: linears that are not quantized.
    """

    method: str
    place: str
    groups: tuple[tuple[Modules, Scheme], ...]
    ignore: Modules

    def scheme(self, module: str, stored: str | None = None) -> Scheme | None:
        """The stated scheme of a linear, by its checkpoint prefix; None: not quantized.

        `stored`: the prefix in the files, if it is another: in a model with a vision encoder, they say where the decoder is.
        """
        stored = stored or module
        if self.ignore.rank(module, stored) is not None:
            return None
        ranked = [(rank, scheme) for modules, scheme in self.groups if (rank := modules.rank(module, stored)) is not None]
        return min(ranked, key=lambda pair: pair[0])[1] if ranked else None

    def may_be_plain(self, module: str) -> bool:
        """Whether a linear is usually not quantized, without being listed."""
        return module == "lm_head" and self.method not in ("compressed-tensors", "modelopt")

    @property
    def field(self) -> str:
        """The field that holds all of it, for hints: "config.json, field quantization_config"."""
        return self.place.rpartition(".")[0]

    @property
    def listed(self) -> str:
        return "; ".join(str(scheme) for _, scheme in self.groups) or "no quantized weights"


def _of_all(method: str, fields: Fields, scheme: Scheme, ignore: Modules, field: str = "quant_method") -> QuantizationConfig:
    """The quantization of a method with one scheme for all linears. `field`: the one that states it."""
    return QuantizationConfig(method, fields.place(field), ((Modules(frozenset(), linears=True), scheme),), ignore)


def read_quantization(config: Fields, hf_quant_config: Fields | None = None) -> QuantizationConfig | None:
    """The stated quantization, or None if there is none.

    Args:
        config: config.json. `hf_quant_config`: ModelOpt's own file, if there is one.
    Raises:
        ConfigError: a value is wrong, or the two files contradict each other.
        UnsupportedError: minirt cannot compute this format.
    """
    if config.get("compression_config") is not None:
        method = config.nested("compression_config").string("quant_method", default="unnamed")
        what = "an older name of quantization_config that is not supported"
        raise config.unsupported("compression_config", what, found=f"quant_method {method[:60]!r}", hint=LOAD_UNQUANTIZED)
    stated = None
    if config.get("quantization_config") is not None:
        fields = _stated(config, "quantization_config")
        method = fields.string("quant_method", default="unnamed")
        if method not in METHODS:
            what, hint = "checkpoints quantized with this method are not supported", _REFUSED.get(method, LOAD_UNQUANTIZED)
            raise fields.unsupported("quant_method", what, " or ".join(METHODS), found=repr(method)[:60], hint=hint)
        for name, what in _CHANGES.items():
            if fields.get(name):
                raise fields.unsupported(name, f"{what} are not supported", hint=LOAD_UNQUANTIZED)
        stated = METHODS[method](fields)
    second = None if hf_quant_config is None else _read_modelopt(hf_quant_config)
    if stated is None or second is None:
        return stated or second
    if stated.method != "modelopt" or {scheme for _, scheme in stated.groups} != {scheme for _, scheme in second.groups}:
        raise ConfigError(
            "the quantization contradicts that of hf_quant_config.json", where=stated.place,
            expected=f"modelopt, {second.listed}", found=f"{stated.method}, {stated.listed}", hint="remove the wrong one",
        )  # fmt: skip
    return stated


# What these settings of quantization would add to a model, in any method.
_CHANGES = {
    "adapter": "adapters (EoRA)", "rotation": "rotations of weights",
    "transform_config": "transforms of weights (Hadamard rotations)",
    "rotation_config": "transforms of weights (Hadamard rotations)",
}  # fmt: skip


def _warn_of_the_cache(fields: Fields, name: str) -> None:
    """Warn of a checkpoint whose KV cache alone is quantized: its weights are plain."""
    what = "the FP8 scales of the KV cache are not used: --kv-cache-dtype fp8 has a scale for each token and head"
    warn(f"{fields.place(name)}: {what}")


def _stated(fields: Fields, name: str) -> Fields:
    """The fields of a nested object, except those that are null: producers write null for what they leave out."""
    nested = fields.nested(name)
    return Fields({name: value for name, value in nested.raw.items() if value is not None}, nested.file, nested.prefix)


def _modules(fields: Fields, *names: str) -> Modules:
    """The lists of modules under any of these names, as one."""
    return _listed(fields, names[0], (entry for name in names for entry in fields.strings_or_none(name) or ()))


def _listed(fields: Fields, name: str, listed: Iterable[str]) -> Modules:
    """The modules of a list. `name`: the field, for messages."""
    entries = dict.fromkeys(listed)
    patterns = tuple(entry for entry in entries if entry.startswith("re:") or "*" in entry)
    if len(patterns) > _MAX_PATTERNS:
        raise fields.unsupported(name, "too many patterns", f"at most {_MAX_PATTERNS}", found=len(patterns))
    for pattern in patterns:
        if pattern.startswith("re:"):
            with inside(fields.place(name)):
                parsed(pattern[3:], lookaheads=True)
    return Modules(frozenset(entries) - frozenset(patterns), patterns, "Linear" in entries)


def _read_fp8(fields: Fields) -> QuantizationConfig:
    """Qwen's and DeepSeek's releases, and transformers' own FP8."""
    fields.choice("fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
    activations = fields.choice("activation_scheme", ("dynamic", "static"), default="dynamic")
    scheme = fp8_scheme("tensor", activations)
    if fields.get("weight_block_size") is not None:
        _check_block(fields, "weight_block_size")
        scheme = fp8_scheme("block", activations, "weight_scale_inv")
    return _of_all("fp8", fields, scheme, _modules(fields, "modules_to_not_convert", "ignored_layers"))


def _check_block(fields: Fields, name: str) -> None:
    block = fields.get(name)
    if block != [BLOCK, BLOCK] and block != f"{BLOCK}x{BLOCK}":
        size = str(block)[:60] if isinstance(block, list) else shown(block)
        what = "only blocks of 128 by 128 are supported"
        raise fields.unsupported(name, what, [BLOCK, BLOCK], found=size, hint=LOAD_UNQUANTIZED)


def _read_compressed_tensors(fields: Fields) -> QuantizationConfig | None:
    """llm-compressor: groups of linears, each with its own scheme. None: only the KV cache is quantized."""
    _check_format(fields)
    if (sparsity := fields.nested("sparsity_config")).raw:
        sparsity.only("format", "dense", what="sparse weights are not supported", hint=LOAD_UNQUANTIZED)
    fields.only("quantization_status", "compressed", "frozen", what="the checkpoint is not compressed")
    groups = []
    for name in fields.nested("config_groups").raw:
        group = _stated(fields.nested("config_groups"), name)
        targets = _modules(group, "targets")
        if "weights" in group.raw:
            _check_format(group)
            groups.append((targets, _read_scheme(group, group.get("format", fields.get("format")) == "pack-quantized")))
    if not groups and fields.nested("kv_cache_scheme").raw:
        _warn_of_the_cache(fields, "kv_cache_scheme")
        return None
    if not groups:
        hint = "remove quantization_config if no weight is quantized"
        raise fields.unsupported("config_groups", "no group has quantized weights", found=None, hint=hint)
    return QuantizationConfig("compressed-tensors", fields.place("quant_method"), tuple(groups), _modules(fields, "ignore"))


def _check_format(fields: Fields) -> None:
    hint = _PLANNED if fields.get("format") in ("nvfp4-pack-quantized", "mxfp4-pack-quantized") else LOAD_UNQUANTIZED
    known = ("float-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
    fields.only("format", *known, what="the format is not supported", hint=hint)


def _read_scheme(group: Fields, packed: bool) -> Scheme:
    """The scheme of a group. `packed`: its format is pack-quantized."""
    weights = _stated(group, "weights")
    kind = _kind(weights)
    if (kind, packed) == ("int of 4 bits", True):
        return _read_packed(group, weights)
    if (kind, packed) != ("float of 8 bits", False):
        hint = _PLANNED if kind == "float of 4 bits" else LOAD_UNQUANTIZED
        what = "only FP8 weights and pack-quantized weights of 4 bits are supported"
        raise weights.unsupported("type", what, found=f"{kind}{', pack-quantized' * packed}", hint=hint)
    strategy = weights.get("strategy", "channel" if weights.get("group_size") == -1 else "tensor")
    weights.only("strategy", "tensor", "channel", "block", what="not supported for FP8 weights", hint=LOAD_UNQUANTIZED)
    if strategy == "block":
        _check_block(weights, "block_structure")
    weights.only("symmetric", True, hint=LOAD_UNQUANTIZED)
    weights.only("dynamic", False, hint=LOAD_UNQUANTIZED)
    group.only("output_activations", what="quantized outputs are not supported", hint=LOAD_UNQUANTIZED)
    inputs, activations = group.nested("input_activations"), "16-bit"
    if inputs.raw:
        if (kind := _kind(inputs)) != "float of 8 bits":
            raise inputs.unsupported("type", "only FP8 or 16-bit activations are supported", found=kind, hint=LOAD_UNQUANTIZED)
        activations = "dynamic" if inputs.get("dynamic") else "static"
    return fp8_scheme(strategy, activations)


def _kind(fields: Fields) -> str:
    """Type and bits of quantized values: "float of 8 bits"."""
    return f"{fields.string('type', default='int')[:20]} of {fields.integer('num_bits', default=8, maximum=64)} bits"


def _read_packed(group: Fields, weights: Fields) -> Scheme:
    """4-bit integers of compressed-tensors (W4A16)."""
    strategy = weights.choice("strategy", ("group", "channel"), default="channel" if weights.get("group_size") == -1 else "group")
    size = _read_group_size(weights, "group_size") if strategy == "group" else None
    what = "groups of columns in the order of their activations are not supported"
    weights.only("actorder", "weight", "static", False, what=what, hint="quantize with actorder: weight or static")
    weights.only("dynamic", False, hint=LOAD_UNQUANTIZED)
    for name in ("input_activations", "output_activations"):
        group.only(name, what="only 16-bit activations are supported with 4-bit weights", hint=LOAD_UNQUANTIZED)
    return Scheme(INT4_LAYOUTS["packed"], size, weights.boolean("symmetric", default=True))


def _read_group_size(fields: Fields, name: str, bits: str | None = None) -> int | None:
    """Columns of a group: 32, 64 or a multiple of 128; -1, which is None, is a whole row. `bits`: a field that must be 4."""
    if bits is not None and fields.integer(bits, maximum=64) != 4:
        raise fields.unsupported(bits, "only weights of 4 bits are supported", 4, hint=LOAD_UNQUANTIZED)
    size = fields.integer(name, minimum=-1, maximum=1 << 20)
    if size not in (-1, 32, 64) and (size < 1 or size % BLOCK):
        raise fields.unsupported(name, "not supported", "32, 64, a multiple of 128, or -1", hint=LOAD_UNQUANTIZED)
    return None if size == -1 else size


def _read_gptq(fields: Fields) -> QuantizationConfig:
    """AutoGPTQ and GPTQModel."""
    group = _read_group_size(fields, "group_size", "bits")
    # With static groups, the columns are in their own order in spite of desc_act: g_idx tells.
    ordered = fields.boolean("desc_act", default=False) and group is not None
    # AutoGPTQ's older way to state a format.
    fields.only("is_marlin_format", False, what="this order of weights is not supported", hint=LOAD_UNQUANTIZED)
    # Version 1 stores a zero point minus 1. With 4 bits, "gptq_p" has the words of version 2.
    versions = {"gptq": 1, "gptq_v2": 0, "gptq_p": 0}
    version = fields.choice("checkpoint_format" if "checkpoint_format" in fields.raw else "format", versions, default="gptq")
    fields.only("pack_dtype", "int32")
    skipped = []
    for pattern, settings in fields.nested("dynamic").raw.items():
        if pattern.startswith("-:"):
            skipped.append(f"re:{pattern[2:]}")
        elif settings != {}:  # an entry without settings changes nothing: Qwen's releases have some
            what, hint = "settings of single modules are not supported", "only '-:' entries, which exclude modules, are supported"
            raise fields.unsupported("dynamic", what, found=shown(pattern), hint=hint)
    scheme = Scheme(INT4_LAYOUTS["gptq"], group, fields.boolean("sym", default=True), versions[version], ordered)
    return _of_all("gptq", fields, scheme, _listed(fields, "dynamic", skipped))


def _read_awq(fields: Fields) -> QuantizationConfig:
    """AutoAWQ. `modules_to_not_convert` lists parts of names."""

    def name_of(name: str, older: str) -> str:
        return older if name not in fields.raw and older in fields.raw else name

    group = _read_group_size(fields, name_of("group_size", "q_group_size"), name_of("bits", "w_bit"))
    version = name_of("version", "format")
    if fields.string(version, default="gemm").lower() != "gemm":
        raise fields.unsupported(version, "this order of weights is not supported", "gemm", hint=LOAD_UNQUANTIZED)
    if not fields.boolean("zero_point", default=True):
        what = "AWQ without zero points is not supported: producers differ in what it means"
        raise fields.unsupported("zero_point", what, "true", hint=LOAD_UNQUANTIZED)
    parts = fields.strings_or_none(name := "modules_to_not_convert") or ()
    scheme = Scheme(INT4_LAYOUTS["awq"], group, False)
    return _of_all("awq", fields, scheme, _listed(fields, name, (f"*{part}*" for part in parts)))


# Layout, and what is added to a stored zero point, of each packing_format of AutoRound.
_AUTO_ROUND = {
    "auto_round:auto_gptq": ("gptq", 1), "auto_round:gptq": ("gptq", 1), "auto_round": ("gptq", 0),
    "auto_round:gptqmodel": ("gptq", 0), "auto_round:auto_awq": ("awq", 0), "auto_round:awq": ("awq", 0),
}  # fmt: skip


def _read_auto_round(fields: Fields) -> QuantizationConfig:
    """AutoRound: the tensors of GPTQ or AWQ. `extra_config` has the settings of single modules, by name or regular expression."""
    group = _read_group_size(fields, "group_size", "bits")
    fields.only("data_type", "int")
    layout, zero_offset = _AUTO_ROUND[fields.choice("packing_format", _AUTO_ROUND, default="auto_round:gptq")]
    fields.only("act_bits", 16, what="quantized activations are not supported", hint=LOAD_UNQUANTIZED)
    skipped, extra = [], fields.nested("extra_config")
    for name in extra.raw:
        module = extra.nested(name)
        if module.integer("bits", default=4, maximum=64) < 16:
            what, expected = "settings of single modules are not supported", "bits: 16, which excludes a module"
            raise module.unsupported("bits", what, expected, found=", ".join(module.raw)[:60], hint=LOAD_UNQUANTIZED)
        skipped.append(name if name.replace(".", "").replace("_", "").isalnum() else f"re:{name}")
    scheme = Scheme(INT4_LAYOUTS[layout], group, fields.boolean("sym", default=True) and layout == "gptq", zero_offset)
    return _of_all("auto-round", fields, scheme, _listed(fields, "extra_config", skipped))


def _read_modelopt(fields: Fields) -> QuantizationConfig | None:
    """NVIDIA ModelOpt: in config.json, or nested as "quantization" in hf_quant_config.json. None: only of the KV cache."""
    if fields.get("quantization") is not None:
        fields = fields.nested("quantization")
    stated = fields.get("quant_algo") is not None
    if not stated and fields.get("kv_cache_quant_algo") is not None:
        _warn_of_the_cache(fields, "kv_cache_quant_algo")
        return None
    name = fields.string("quant_algo") if stated else "none"
    if (scales := _ALGORITHMS.get(name.upper())) is None:
        hint = _PLANNED if "FP4" in name.upper() or name.upper() == "MIXED_PRECISION" else LOAD_UNQUANTIZED
        raise fields.unsupported("quant_algo", "not supported", " or ".join(_ALGORITHMS), found=shown(name), hint=hint)
    scheme = fp8_scheme(scales, "static" if scales == "tensor" else "dynamic")
    return _of_all("modelopt", fields, scheme, _modules(fields, "exclude_modules", "ignore"), "quant_algo")


def _read_mxfp4(fields: Fields) -> QuantizationConfig:
    """gpt-oss: the experts. Lists name other modules."""
    groups = ((Modules(frozenset(), ("*.experts.*",)), Scheme(MXFP4, 32)),)
    return QuantizationConfig("mxfp4", fields.place("quant_method"), groups, _modules(fields, "modules_to_not_convert"))


METHODS = {
    "fp8": _read_fp8, "compressed-tensors": _read_compressed_tensors, "modelopt": _read_modelopt, "gptq": _read_gptq,
    "awq": _read_awq, "auto-round": _read_auto_round, "mxfp4": _read_mxfp4,
}  # fmt: skip
