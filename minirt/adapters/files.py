"""`read_adapter`: a LoRA adapter in PEFT's format, a folder with adapter_config.json and adapter_model.safetensors.

The files are untrusted and strictly checked: every field and every tensor is known, and everything else is refused by name. A
change of a linear layer is scaling · B · A (LoRA, Hu et al. 2021; scaling with the root of the rank, Kalajdzievski 2023).
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minirt.errors import CheckpointError, ConfigError, UnsupportedError, quoted
from minirt.files import read_json
from minirt.loading.checkpoint import EMBEDDING, HEAD, MAX_SHOWN, Entry, read_header, read_tensors, text_name
from minirt.modeling.formats import FLOATS
from minirt.modeling.parameters import PackedLinear, Parameter
from minirt.wording import warn

MAX_RANK = 256
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG = 4 << 20  # bytes
_PREFIX = "base_model.model."
# Fields that change the result, and that are not supported: what they are.
_REFUSED = {
    "use_dora": "DoRA", "target_parameters": "adapters of single parameters", "layers_to_transform": "adapters of some layers",
    "fan_in_fan_out": "transposed weights", "lora_bias": "biases of adapters", "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "repeated layers", "use_qalora": "QA-LoRA", "trainable_token_indices": "trained tokens",
    "megatron_config": "Megatron's linears", "arrow_config": "Arrow's choice of adapters", "use_bdlora": "block-diagonal LoRA",
    "monteclora_config": "MonteCLoRA",
}  # fmt: skip
# Fields of how it was trained.
_UNUSED = {
    "auto_mapping", "peft_version", "revision", "inference_mode", "exclude_modules", "lora_dropout",
    "layers_pattern", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config",
    "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip
_USED = {
    "peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
    "target_modules", "bias", "modules_to_save", "init_lora_weights",
}  # fmt: skip
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")  # beginnings of the training that keep the model's weights
_REPEATS = 3  # of a pattern: with more, or with repeated groups, matching may take forever


class Linear(NamedTuple):
    """An adapter of one linear: it adds scaling · B · A to the weight [N, K]. `a` [r, K], `b` [N, r], on the CPU."""

    a: Tensor
    b: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter's weights.

    Attributes:
        folder: its files. `base`: the model that it was trained for, as it names it.
        linears: by the checkpoint's name of the module.
        saved: tensors that replace those of the checkpoint, by name: the embedding, the head.
    """

    folder: Path
    base: str | None
    linears: Mapping[str, Linear]
    saved: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The largest one."""
        return max((linear.rank for linear in self.linears.values()), default=1)


def shapes_of(parameters: Iterable[Parameter]) -> dict[str, tuple[int, int]]:
    """The linears of the checkpoint among these weights, by module: (rows, columns)."""
    linears = [parameter for parameter in parameters if isinstance(parameter, PackedLinear)]
    return {part.name: (part.stored_rows, linear.in_features) for linear in linears for part in linear.parts if linear.modules}


def read_adapter(folder: str | Path, shapes: Mapping[str, tuple[int, int]], saved: Mapping[str, Any] | None = None) -> Adapter:
    """Read an adapter for a model.

    Args:
        shapes: (rows, columns) of the linears that may have one, by module.
        saved: shapes of the tensors that it may replace, by name. None: none.
    Raises:
        ConfigError, UnsupportedError: its config.
        CheckpointError: a tensor is missing, unexpected, misshapen or damaged.
    """
    if not isinstance(folder, str | Path):
        raise ConfigError("not a folder", where="adapter", expected="a text or a Path", found=quoted(folder, 80))
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        what, hint = "there is no such folder of an adapter", "adapters are not downloaded: a name of the Hub is not taken"
        raise ConfigError(what, where=str(folder), expected=f"a folder with {CONFIG} and {WEIGHTS}", hint=hint)
    file, entries = folder / WEIGHTS, dict[str, Entry]()
    config = read_json(folder / CONFIG, limit=_MAX_CONFIG, error=ConfigError)
    place = str(folder / CONFIG)
    _check_config(config, place)
    if saved is None and config.get("modules_to_save"):
        what, hint = "whole modules of an adapter cannot be applied per request", "use --merge"
        raise UnsupportedError(what, where=f"{place}: modules_to_save", found=quoted(config["modules_to_save"], 80), hint=hint)
    pairs = dict[str, dict[str, Entry]]()
    for entry in read_header(file):
        module, kind = _module(entry, shapes, saved)
        if kind in pairs.setdefault(module, {}):
            raise CheckpointError("the tensor is there twice", where=entry.place)
        pairs[module][kind] = entries[entry.name] = entry
    replaced = {module: kinds["saved"] for module, kinds in pairs.items() if "saved" in kinds}
    changed = {module: kinds for module, kinds in pairs.items() if kinds.keys() != {"saved"}}
    if not changed:
        raise CheckpointError("there is no adapter of a linear", where=file, expected=f"{_PREFIX}….lora_A.weight")
    _check_targets(config, changed, place)
    scalings = {module: _check_pair(config, module, kinds, shapes[module], file) for module, kinds in changed.items()}
    _warn_of_patterns(config, [_stored(kinds["lora_A"]) for kinds in changed.values()], place)
    for name, entry in replaced.items():
        if saved is not None and entry.shape != tuple(saved[name]):
            raise CheckpointError("wrong shape", where=entry.place, expected=list(saved[name]), found=list(entry.shape))
    tensors = dict[str, Tensor]()

    def take(entry: Entry, tensor: Tensor) -> None:
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError("NaN or Inf values", where=entry.place)
        tensors[entry.name] = tensor.clone()

    read_tensors(entries.values(), take)
    linears = {
        module: Linear(tensors[kinds["lora_A"].name], tensors[kinds["lora_B"].name], scalings[module])
        for module, kinds in changed.items()
    }
    base = config.get("base_model_name_or_path")
    return Adapter(folder, base, linears, {name: tensors[entry.name] for name, entry in replaced.items()})


def warn_of_base(adapter: Adapter, model: str | Path) -> None:
    """Warn if an adapter names another model than the one it is used with."""
    names = [str(name).rstrip("/").rpartition("/")[2].lower() for name in (adapter.base, model)]
    if adapter.base and names[0] != names[1]:
        warn(f"{adapter.folder}: the adapter was trained for {quoted(adapter.base, 80)}, and the model is {model}")


def _check_config(config: Mapping[str, Any], place: str) -> None:
    for name, value in config.items():
        if name in _REFUSED and value not in (None, False, [], {}):
            raise UnsupportedError(f"{_REFUSED[name]}: not supported", where=f"{place}: {name}", found=quoted(value, 80))
        if name not in _REFUSED and name not in _UNUSED | _USED and value not in (None, False, [], {}):
            hint = "it may change the result; leave it out if it does not"
            raise UnsupportedError("an unknown field", where=f"{place}: {name[:MAX_SHOWN]}", found=quoted(value, 80), hint=hint)
    _expect(config.get("peft_type") == "LORA", place, "peft_type", '"LORA"', config.get("peft_type"))
    task = config.get("task_type")
    _expect(task in (None, "CAUSAL_LM", "FEATURE_EXTRACTION"), place, "task_type", '"CAUSAL_LM"', task)
    _expect(config.get("bias", "none") == "none", place, "bias", '"none"', config.get("bias"))
    initial = config.get("init_lora_weights")
    known = any(initial is one or (isinstance(one, str) and initial == one) for one in _INITIAL)
    hint = "the training has changed the model's weights: convert the adapter to a plain one when it is saved"
    _expect(known, place, "init_lora_weights", "an initialization that keeps the model's weights", initial, hint)
    rank, alpha = config.get("r"), config.get("lora_alpha", 8)
    _expect(type(rank) is int and 1 <= rank <= MAX_RANK, place, "r", f"a rank from 1 to {MAX_RANK}", rank)
    _expect(_is_number(alpha), place, "lora_alpha", "a finite number", alpha)
    _expect(isinstance(config.get("use_rslora", False), bool), place, "use_rslora", "true or false", config.get("use_rslora"))
    base = config.get("base_model_name_or_path")
    _expect(isinstance(base, str | None), place, "base_model_name_or_path", "a text", base)
    for name in ("target_modules", "modules_to_save"):
        value = config.get(name)
        texts = value is None or isinstance(value, str) or (isinstance(value, list) and all(isinstance(x, str) for x in value))
        _expect(texts, place, name, "a list of names", value)
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(name) or {}
        _expect(isinstance(patterns, dict), place, name, "an object", patterns)
        for pattern, value in patterns.items():
            good = type(value) is int and 1 <= value <= MAX_RANK if name == "rank_pattern" else _is_number(value)
            _expect(good, place, f"{name}.{pattern[:MAX_SHOWN]}", f"a rank from 1 to {MAX_RANK}, or a finite alpha", value)
            _pattern(pattern, place, name)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _expect(good: bool, place: str, name: str, expected: str, value: object, hint: str | None = None) -> None:
    if not good:
        raise UnsupportedError("not supported", where=f"{place}: {name}", expected=expected, found=quoted(value, 80), hint=hint)


def _pattern(pattern: str, place: str, name: str) -> re.Pattern[str]:
    """A module pattern as PEFT matches it: all of a name, or its end after a dot."""
    repeats = len(re.findall(r"(?<!\\)[*+?{]", pattern))
    if len(pattern) > MAX_SHOWN or repeats > _REPEATS or re.search(r"\)[*+{]|\\[1-9]|\(\?", pattern):
        expected = f"at most {MAX_SHOWN} characters and {_REPEATS} repetitions, none of a group"
        raise UnsupportedError("too complex a pattern", where=f"{place}: {name}", expected=expected, found=quoted(pattern, 80))
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError("not a pattern", where=f"{place}: {name}", found=quoted(pattern, 80)) from error


def _of_pattern(config: Mapping[str, Any], name: str, module: str, default: Any) -> Any:
    for pattern, value in (config.get(name) or {}).items():
        if _pattern(pattern, CONFIG, name).match(module):
            return value
    return default


def _module(entry: Entry, shapes: Mapping[str, Any], saved: Mapping[str, Any] | None) -> tuple[str, str]:
    """The module of a tensor, by the checkpoint's name, and what it is: lora_A, lora_B or saved."""
    if entry.dtype not in FLOATS:
        raise CheckpointError("wrong dtype", where=entry.place, expected=" or ".join(FLOATS), found=entry.dtype)
    inner = entry.name.removeprefix(_PREFIX)
    module, dot, kind = inner.removesuffix(".weight").rpartition(".")
    if inner != entry.name and inner.endswith(".weight") and dot and kind in ("lora_A", "lora_B"):
        for name in (module, text_name(module)):
            if name in shapes:
                return name, kind
        what = "the model has no linear here that can have an adapter"
        hint = "use --merge for experts and the head" if saved is None else "adapter and model do not belong together"
        raise UnsupportedError(what, where=entry.place, expected="a module such as " + next(iter(shapes), "none"), hint=hint)
    whole = text_name(inner)
    if inner != entry.name and whole in (EMBEDDING, HEAD):
        if saved is not None and whole in saved:
            return whole, "saved"
        hint = "use --merge" if saved is None else "the model has no such weight of its own: its head is the embedding"
        raise UnsupportedError("a whole weight of the model cannot be replaced here", where=entry.place, hint=hint)
    kinds = {"lora_magnitude_vector": "DoRA", "lora_embedding_A": "adapters of embeddings", "lora_embedding_B":
             "adapters of embeddings", "bias": "biases"}  # fmt: skip
    named = next((what for part, what in kinds.items() if part in entry.name.split(".")), None)
    expected = f"{_PREFIX}<module>.lora_A.weight and lora_B.weight"
    what = f"{named}: not supported" if named else "an unexpected tensor"
    raise UnsupportedError(what, where=entry.place, expected=expected)


def _check_targets(config: Mapping[str, Any], modules: Iterable[str], place: str) -> None:
    """Each target that the config lists has tensors."""
    targets = config.get("target_modules")
    for target in targets if isinstance(targets, list) else ():
        plain = text_name(target)
        if not any(module == plain or module.endswith(f".{plain}") for module in modules):
            what, hint = "no tensor of this target", f"{WEIGHTS} is incomplete, or of another training"
            raise CheckpointError(what, where=f"{place}: target_modules", expected=quoted(target, 80), hint=hint)


def _warn_of_patterns(config: Mapping[str, Any], modules: Collection[str], place: str) -> None:
    """Warn of patterns that no module matches, as PEFT does."""
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern in config.get(name) or ():
            if not any(_pattern(pattern, place, name).match(module) for module in modules):
                warn(f"{place}: {name}: no module of the adapter matches {quoted(pattern, 80)}, which changes nothing")


def _stored(entry: Entry) -> str:
    """The module of a tensor lora_A, as PEFT names it."""
    return entry.name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")


def _check_pair(
    config: Mapping[str, Any], module: str, kinds: Mapping[str, Entry], shape: tuple[int, int], file: Path
) -> float:
    """Check the two tensors of a module. Returns its scaling."""
    missing = [kind for kind in ("lora_A", "lora_B") if kind not in kinds]
    if missing:
        raise CheckpointError("a tensor is missing", where=file, expected=f"{_PREFIX}{module[:MAX_SHOWN]}.{missing[0]}.weight")
    stored = _stored(kinds["lora_A"])
    rank = _of_pattern(config, "rank_pattern", stored, config["r"])
    for kind, expected in (("lora_A", (rank, shape[1])), ("lora_B", (shape[0], rank))):
        if kinds[kind].shape != expected:
            hint = "r or rank_pattern of adapter_config.json is another, or the adapter is of another model"
            shown = list(kinds[kind].shape)
            raise CheckpointError("wrong shape", where=kinds[kind].place, expected=list(expected), found=shown, hint=hint)
    alpha = _of_pattern(config, "alpha_pattern", stored, config.get("lora_alpha", 8))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
