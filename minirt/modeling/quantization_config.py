"""`QuantizationConfig`: what config.json and hf_quant_config.json say about quantized weights. Imports no torch.

Three producers state FP8 in their own ways: Qwen's and DeepSeek's releases ("fp8"), llm-compressor ("compressed-tensors") and
NVIDIA's ModelOpt ("modelopt"). 4-bit weights are stated by llm-compressor too, by GPTQModel ("gptq"), AutoAWQ ("awq") and
AutoRound ("auto-round"). What minirt cannot compute is refused here by name. Whether a weight is quantized is decided by its
tensors, see `minirt.loading.stored_formats`.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from minirt.errors import ConfigError, UnsupportedError, inside
from minirt.modeling.config import Fields, shown
from minirt.modeling.patterns import check, matches
from minirt.wording import warn

BLOCK = 128
METHODS = ("fp8", "compressed-tensors", "modelopt", "gptq", "awq", "auto-round")
_HINT = "load the unquantized checkpoint; minirt quantizes while loading, with --quantize fp8 or --quantize int4"
_PLANNED = f"planned; until then, {_HINT}"
# Methods that are refused, with the hint.
_REFUSED = {
    **dict.fromkeys(("mxfp4", "modelopt_fp4"), _PLANNED),
    "bitsandbytes": f"bitsandbytes is not planned; {_HINT}",
    "gguf": f"GGUF is not planned; {_HINT}",
}
# ModelOpt's names of what the weights are.
_ALGORITHMS = {
    "FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel", "FP8_PB_WO": "block", "FP8_BLOCK_SCALES": "block",
}  # fmt: skip
_MAX_PATTERNS = 256  # of one list; each is tried on every linear


@dataclass(frozen=True)
class Scheme:
    """How the weights of a linear are stored: e4m3, with scales that multiply.

    Attributes:
        scales: one for each "tensor", "channel" (row), or "block" of 128 × 128.
        scale_name: the last component of the scale's name.
        activations: what the producer's runtime does with the linear's input: "dynamic" (scales computed at run time), "static"
            (a stored scale), or "16-bit".
    """

    scales: str
    scale_name: str
    activations: str
    value_name = "weight"

    def __str__(self) -> str:
        return f"FP8, one scale for each {'block of 128x128' if self.scales == 'block' else self.scales}"


@dataclass(frozen=True)
class Int4Scheme:
    """How the weights of a linear are stored: 4 bits, with a scale for each row and group of columns, and 16-bit activations.

    Attributes:
        layout: how words are packed: "packed" (compressed-tensors), "gptq" or "awq".
        group: columns of a group; None: one group is a whole row.
        symmetric: whether all zero points are 8.
        zero_offset: what is added to a stored zero point of GPTQ.
        ordered: whether the columns may be in another order (`desc_act`). Then there must be a `g_idx`, and it decides.
    """

    layout: str
    group: int | None
    symmetric: bool
    zero_offset: int = 0
    ordered: bool = False
    activations = "16-bit"

    @property
    def value_name(self) -> str:
        """The last component of the name of the packed weight."""
        return "weight_packed" if self.layout == "packed" else "qweight"

    @property
    def scale_name(self) -> str:
        return "weight_scale" if self.layout == "packed" else "scales"

    def __str__(self) -> str:
        groups = "one group a row" if self.group is None else f"groups of {self.group}"
        return f"4 bits, {groups}, {'symmetric' if self.symmetric else 'with zero points'}"


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
        where: file and field, for messages.
        groups: which linears have which scheme. The most specific entry counts.
        ignore: linears that are not quantized.
        silent: linears that are usually not quantized, without being listed.
    """

    method: str
    where: str
    groups: tuple[tuple[Modules, "Scheme | Int4Scheme"], ...]
    ignore: Modules
    silent: frozenset[str] = frozenset()

    def scheme(self, module: str, stored: str | None = None) -> "Scheme | Int4Scheme | None":
        """The stated scheme of a linear, by its checkpoint prefix; None: not quantized.

        `stored`: the prefix in the files, if it is another: in a model with a vision encoder, they say where the decoder is.
        """
        stored = stored or module
        if self.ignore.rank(module, stored) is not None:
            return None
        ranked = [(rank, scheme) for modules, scheme in self.groups if (rank := modules.rank(module, stored)) is not None]
        return min(ranked, key=lambda pair: pair[0])[1] if ranked else None


_ALL = Modules(frozenset(), linears=True)


def read_quantization(config: Fields, hf_quant_config: Fields | None = None) -> QuantizationConfig | None:
    """The stated quantization, or None if there is none.

    Args:
        config: config.json. `hf_quant_config`: ModelOpt's own file, if there is one.
    Raises:
        ConfigError: a value is wrong, or the two files contradict each other.
        UnsupportedError: minirt cannot compute this format.
    """
    if config.raw.get("compression_config") is not None:
        method = config.nested("compression_config").string("quant_method", default="unnamed")
        what = "an older name of quantization_config that is not supported"
        raise UnsupportedError(what, where=config.place("compression_config"), found=f"quant_method {method[:60]!r}", hint=_HINT)
    stated = None
    if config.raw.get("quantization_config") is not None:
        fields = _stated(config, "quantization_config")
        method = fields.string("quant_method", default="unnamed")
        if method not in METHODS:
            raise UnsupportedError(
                "checkpoints quantized with this method are not supported", where=fields.place("quant_method"),
                expected=" or ".join(METHODS), found=repr(method)[:60], hint=_REFUSED.get(method, _HINT),
            )  # fmt: skip
        _refuse_changes(fields)
        readers = {
            "fp8": _read_fp8, "compressed-tensors": _read_compressed_tensors, "modelopt": _read_modelopt, "gptq": _read_gptq,
            "awq": _read_awq, "auto-round": _read_auto_round,
        }  # fmt: skip
        stated = readers[method](fields)
    if hf_quant_config is None:
        return stated
    own = _read_modelopt(hf_quant_config)
    if stated is None or own is None:
        return stated or own
    if stated.method != "modelopt" or {scheme for _, scheme in stated.groups} != {scheme for _, scheme in own.groups}:
        raise ConfigError(
            "the quantization contradicts that of hf_quant_config.json", where=stated.where,
            expected=f"modelopt, {_listed(own)}", found=f"{stated.method}, {_listed(stated)}", hint="remove the wrong one",
        )  # fmt: skip
    return stated


# What these settings of quantization would add to a model, in any method.
_CHANGES = {
    "adapter": "adapters (EoRA)",
    "rotation": "rotations of weights",
    "transform_config": "transforms of weights (Hadamard rotations)",
    "rotation_config": "transforms of weights (Hadamard rotations)",
}


def _refuse_changes(fields: Fields) -> None:
    for name, what in _CHANGES.items():
        if value := fields.raw.get(name):
            raise UnsupportedError(f"{what} are not supported", where=fields.place(name), found=shown(value), hint=_HINT)


def _warn_of_the_cache(fields: Fields, name: str) -> None:
    """Warn of a checkpoint whose KV cache alone is quantized: its weights are plain."""
    what = "the FP8 scales of the KV cache are not used: --kv-cache-dtype fp8 has a scale for each token and head"
    warn(f"{fields.place(name)}: {what}")


def _stated(fields: Fields, name: str) -> Fields:
    """The fields of a nested object, except those that are null: producers write null for what they leave out."""
    nested = fields.nested(name)
    return Fields({name: value for name, value in nested.raw.items() if value is not None}, nested.where, nested.prefix)


def _listed(config: QuantizationConfig) -> str:
    return "; ".join(str(scheme) for _, scheme in config.groups) or "no quantized weights"


def _modules(fields: Fields, *names: str) -> Modules:
    """The lists under any of these names, as one."""
    found = dict.fromkeys(entry for name in names for entry in fields.strings_or_none(name) or ())
    patterns = tuple(entry for entry in found if entry.startswith("re:") or "*" in entry)
    if len(patterns) > _MAX_PATTERNS:
        where, most = fields.place(names[0]), f"at most {_MAX_PATTERNS}"
        raise UnsupportedError("too many patterns", where=where, expected=most, found=len(patterns))
    for pattern in patterns:
        if pattern.startswith("re:"):
            with inside(fields.place(names[0])):
                check(pattern[3:])
    return Modules(frozenset(found) - frozenset(patterns), patterns, "Linear" in found)


def _read_fp8(fields: Fields) -> QuantizationConfig:
    """Qwen's and DeepSeek's releases, and transformers' own FP8."""
    fields.choice("fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
    activations = fields.choice("activation_scheme", ("dynamic", "static"), default="dynamic")
    block = fields.raw.get("weight_block_size")
    if block is None:
        scheme = Scheme("tensor", "weight_scale", activations)
    else:
        _check_block(fields, "weight_block_size", block)
        scheme = Scheme("block", "weight_scale_inv", activations)
    ignore = _modules(fields, "modules_to_not_convert", "ignored_layers")
    return QuantizationConfig("fp8", fields.place("quant_method"), ((_ALL, scheme),), ignore, frozenset({"lm_head"}))


def _check_block(fields: Fields, name: str, block: Any) -> None:
    if block != [BLOCK, BLOCK] and block != f"{BLOCK}x{BLOCK}":
        found = str(block)[:60] if isinstance(block, list) else shown(block)
        what = "only blocks of 128 by 128 are supported"
        raise UnsupportedError(what, where=fields.place(name), expected=[BLOCK, BLOCK], found=found, hint=_HINT)


def _read_compressed_tensors(fields: Fields) -> QuantizationConfig | None:
    """llm-compressor: groups of linears, each with its own scheme. None: only the KV cache is quantized."""
    known = ("float-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
    planned = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
    _check_format(fields, known, planned)
    sparsity = fields.nested("sparsity_config")
    if sparsity.raw and sparsity.string("format", default="dense") != "dense":
        where, found = sparsity.place("format"), shown(sparsity.raw["format"])
        raise UnsupportedError("sparse weights are not supported", where=where, found=found, hint=_HINT)
    status = fields.string("quantization_status", default="compressed")
    if status not in ("compressed", "frozen"):
        where = fields.place("quantization_status")
        raise UnsupportedError("the checkpoint is not compressed", where=where, expected="compressed", found=shown(status))
    groups = []
    for name in fields.nested("config_groups").raw:
        group = _stated(fields.nested("config_groups"), name)
        targets = _modules(group, "targets")
        if "weights" in group.raw:
            _check_format(group, known, planned)
            packed = group.raw.get("format", fields.raw.get("format")) == "pack-quantized"
            groups.append((targets, _read_scheme(group, packed)))
    if not groups and fields.nested("kv_cache_scheme").raw:
        _warn_of_the_cache(fields, "kv_cache_scheme")
        return None
    if not groups:
        what, hint = "no group has quantized weights", "remove quantization_config if no weight is quantized"
        raise UnsupportedError(what, where=fields.place("config_groups"), hint=hint)
    return QuantizationConfig("compressed-tensors", fields.place("quant_method"), tuple(groups), _modules(fields, "ignore"))


def _check_format(fields: Fields, known: tuple[str, ...], planned: tuple[str, ...]) -> None:
    if fields.raw.get("format") is None:
        return
    name = fields.string("format")
    if name not in known:
        hint = _PLANNED if name in planned else _HINT
        where = fields.place("format")
        expected = " or ".join(known)
        raise UnsupportedError("the format is not supported", where=where, expected=expected, found=shown(name), hint=hint)


def _read_scheme(group: Fields, packed: bool) -> Scheme | Int4Scheme:
    """The scheme of a group. `packed`: its format is pack-quantized."""
    weights = _stated(group, "weights")
    bits = weights.integer("num_bits", default=8, maximum=64)
    kind = weights.string("type", default="int")
    if (kind, bits, packed) == ("int", 4, True):
        return _read_packed(group, weights)
    if (kind, bits, packed) != ("float", 8, False):
        hint = _PLANNED if (kind, bits) == ("float", 4) else _HINT
        found = f"{kind[:20]} of {bits} bits" + (", pack-quantized" if packed else "")
        what = "only FP8 weights and pack-quantized weights of 4 bits are supported"
        raise UnsupportedError(what, where=weights.place("type"), found=found, hint=hint)
    strategy = weights.raw.get("strategy")
    if strategy is None:
        strategy = "channel" if weights.raw.get("group_size") == -1 else "tensor"
    if strategy not in ("tensor", "channel", "block"):
        where, expected = weights.place("strategy"), "tensor, channel or block"
        raise UnsupportedError("not supported for FP8 weights", where=where, expected=expected, found=shown(strategy), hint=_HINT)
    if strategy == "block":
        _check_block(weights, "block_structure", weights.raw.get("block_structure"))
    for name, wanted in (("symmetric", True), ("dynamic", False)):
        if weights.raw.get(name) not in (None, wanted):
            where = weights.place(name)
            found = shown(weights.raw[name])
            raise UnsupportedError("not supported", where=where, expected=shown(wanted), found=found, hint=_HINT)
    if group.raw.get("output_activations") is not None:
        what = "quantized outputs are not supported"
        raise UnsupportedError(what, where=group.place("output_activations"), expected="null", hint=_HINT)
    inputs = group.nested("input_activations")
    activations = "16-bit"
    if inputs.raw:
        kind, bits = inputs.string("type", default="int"), inputs.integer("num_bits", default=8, maximum=64)
        if (kind, bits) != ("float", 8):
            found = f"{kind[:20]} of {bits} bits"
            what = "only FP8 or 16-bit activations are supported"
            raise UnsupportedError(what, where=inputs.place("type"), found=found, hint=_HINT)
        activations = "dynamic" if inputs.raw.get("dynamic") else "static"
    return Scheme(strategy, "weight_scale", activations)


def _read_packed(group: Fields, weights: Fields) -> Int4Scheme:
    """4-bit integers of compressed-tensors (W4A16)."""
    rows = weights.raw.get("group_size") == -1
    strategy = weights.choice("strategy", ("group", "channel"), default="channel" if rows else "group")
    size = _read_group_size(weights, "group_size") if strategy == "group" else None
    order = weights.raw.get("actorder")
    if order not in (None, "weight", "static", False):
        where, hint = weights.place("actorder"), "quantize with actorder: weight or static"
        what, found = "groups of columns in the order of their activations are not supported", shown(order)
        raise UnsupportedError(what, where=where, expected="null, weight or static", found=found, hint=hint)
    if weights.raw.get("dynamic") not in (None, False):
        found = shown(weights.raw["dynamic"])
        raise UnsupportedError("not supported", where=weights.place("dynamic"), expected="false", found=found, hint=_HINT)
    for name in ("input_activations", "output_activations"):
        if group.raw.get(name) is not None:
            what = "only 16-bit activations are supported with 4-bit weights"
            raise UnsupportedError(what, where=group.place(name), expected="null", hint=_HINT)
    return Int4Scheme("packed", size, weights.boolean("symmetric", default=True))


def _read_group_size(fields: Fields, name: str) -> int | None:
    """Columns of a group: 32, 64 or a multiple of 128; -1, which is None, is a whole row."""
    size = fields.integer(name, minimum=-1, maximum=1 << 20)
    if size == -1:
        return None
    if size not in (32, 64) and (size < 1 or size % BLOCK):
        expected = "32, 64, a multiple of 128, or -1"
        raise UnsupportedError("not supported", where=fields.place(name), expected=expected, found=size, hint=_HINT)
    return size


def _read_bits(fields: Fields, name: str) -> None:
    bits = fields.integer(name, maximum=64)
    if bits != 4:
        what = "only weights of 4 bits are supported"
        raise UnsupportedError(what, where=fields.place(name), expected=4, found=bits, hint=_HINT)


def _read_gptq(fields: Fields) -> QuantizationConfig:
    """AutoGPTQ and GPTQModel."""
    _read_bits(fields, "bits")
    group = _read_group_size(fields, "group_size")
    # With static groups, the columns are in their own order in spite of desc_act: g_idx tells.
    ordered = fields.boolean("desc_act", default=False) and group is not None
    if fields.boolean("is_marlin_format", default=False):  # AutoGPTQ's older way to state it
        where, expected = fields.place("is_marlin_format"), "false"
        raise UnsupportedError("this order of weights is not supported", where=where, expected=expected, found="true", hint=_HINT)
    # Version 1 stores a zero point minus 1. With 4 bits, "gptq_p" has the words of version 2.
    versions = {"gptq": 1, "gptq_v2": 0, "gptq_p": 0}
    version = fields.choice("checkpoint_format" if "checkpoint_format" in fields.raw else "format", versions, default="gptq")
    if fields.raw.get("pack_dtype") is not None:
        fields.choice("pack_dtype", ("int32",))
    skipped = []
    for pattern, settings in fields.nested("dynamic").raw.items():
        if pattern.startswith("-:"):
            skipped.append(f"re:{pattern[2:]}")
        elif settings != {}:  # an entry without settings changes nothing: Qwen's releases have some
            where, hint = fields.place("dynamic"), "only '-:' entries, which exclude modules, are supported"
            raise UnsupportedError("settings of single modules are not supported", where=where, found=shown(pattern), hint=hint)
    scheme = Int4Scheme("gptq", group, fields.boolean("sym", default=True), versions[version], ordered)
    ignore = _modules(Fields({"dynamic": skipped}, fields.where, fields.prefix), "dynamic")
    return QuantizationConfig("gptq", fields.place("quant_method"), ((_ALL, scheme),), ignore, frozenset({"lm_head"}))


def _read_awq(fields: Fields) -> QuantizationConfig:
    """AutoAWQ. `modules_to_not_convert` lists parts of names."""

    def name_of(name: str, older: str) -> str:
        return older if name not in fields.raw and older in fields.raw else name

    _read_bits(fields, name_of("bits", "w_bit"))
    group = _read_group_size(fields, name_of("group_size", "q_group_size"))
    version = name_of("version", "format")
    if fields.string(version, default="gemm").lower() != "gemm":
        where, found = fields.place(version), shown(fields.raw[version])
        raise UnsupportedError("this order of weights is not supported", where=where, expected="gemm", found=found, hint=_HINT)
    if not fields.boolean("zero_point", default=True):
        what = "AWQ without zero points is not supported: producers differ in what it means"
        raise UnsupportedError(what, where=fields.place("zero_point"), expected="true", found="false", hint=_HINT)
    parts = fields.strings_or_none("modules_to_not_convert") or []
    skipped = {"modules_to_not_convert": [f"*{part}*" for part in parts]}
    ignore = _modules(Fields(skipped, fields.where, fields.prefix), "modules_to_not_convert")
    scheme = Int4Scheme("awq", group, False)
    return QuantizationConfig("awq", fields.place("quant_method"), ((_ALL, scheme),), ignore, frozenset({"lm_head"}))


# Layout, and what is added to a stored zero point, of each packing_format of AutoRound.
_AUTO_ROUND = {
    "auto_round:auto_gptq": ("gptq", 1), "auto_round:gptq": ("gptq", 1), "auto_round": ("gptq", 0),
    "auto_round:gptqmodel": ("gptq", 0), "auto_round:auto_awq": ("awq", 0), "auto_round:awq": ("awq", 0),
}  # fmt: skip


def _read_auto_round(fields: Fields) -> QuantizationConfig:
    """AutoRound: the tensors of GPTQ or AWQ. `extra_config` has the settings of single modules, by name or regular expression."""
    _read_bits(fields, "bits")
    fields.choice("data_type", ("int",), default="int")
    group = _read_group_size(fields, "group_size")
    layout, zero_offset = _AUTO_ROUND[fields.choice("packing_format", _AUTO_ROUND, default="auto_round:gptq")]
    if fields.raw.get("act_bits") not in (None, 16):
        raise UnsupportedError("quantized activations are not supported", where=fields.place("act_bits"), hint=_HINT)
    skipped = []
    for name in fields.nested("extra_config").raw:
        own = fields.nested("extra_config").nested(name)
        if own.integer("bits", default=4, maximum=64) < 16:
            what, expected = "settings of single modules are not supported", "bits: 16, which excludes a module"
            raise UnsupportedError(what, where=own.place("bits"), expected=expected, found=", ".join(own.raw)[:60], hint=_HINT)
        skipped.append(name if name.replace(".", "").replace("_", "").isalnum() else f"re:{name}")
    ignore = _modules(Fields({"extra_config": skipped}, fields.where, fields.prefix), "extra_config")
    scheme = Int4Scheme(layout, group, fields.boolean("sym", default=True) and layout == "gptq", zero_offset)
    return QuantizationConfig("auto-round", fields.place("quant_method"), ((_ALL, scheme),), ignore, frozenset({"lm_head"}))


def _read_modelopt(fields: Fields) -> QuantizationConfig | None:
    """NVIDIA ModelOpt: in config.json, or nested as "quantization" in hf_quant_config.json. None: only of the KV cache."""
    nested = fields.raw.get("quantization") is not None
    fields = fields.nested("quantization") if nested else fields
    place = fields.place("quant_algo")
    algorithm = fields.raw.get("quant_algo")
    if algorithm is None and fields.raw.get("kv_cache_quant_algo") is not None:
        _warn_of_the_cache(fields, "kv_cache_quant_algo")
        return None
    name = "none" if algorithm is None else fields.string("quant_algo")
    if name.upper() not in _ALGORITHMS:
        hint = _PLANNED if "FP4" in name.upper() or name.upper() == "MIXED_PRECISION" else _HINT
        expected = " or ".join(_ALGORITHMS)
        raise UnsupportedError("not supported", where=place, expected=expected, found=shown(name), hint=hint)
    scales = _ALGORITHMS[name.upper()]
    ignore = _modules(fields, "exclude_modules", "ignore")
    scheme = Scheme(scales, "weight_scale", "static" if scales == "tensor" else "dynamic")
    return QuantizationConfig("modelopt", place, ((_ALL, scheme),), ignore)
