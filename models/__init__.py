"""The architectures, one file each, and the lookup by `model_type` and by preset name. Imports no torch."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from minirt.errors import UnsupportedError
from minirt.modeling.config import Fields, ModelConfig, shown
from minirt.modeling.quantization_config import QuantizationConfig, read_quantization
from minirt.models.decoder import decoder_layers
from minirt.models.foreign_fields import warn_of_unread_fields
from minirt.models.vision import text_config

if TYPE_CHECKING:
    from minirt.layers import Layer

_TYPES = (
    "exaone4", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "gpt_oss", "granite", "hunyuan_v1_dense",
    "llama", "ministral3", "mistral", "mistral3", "muse_glimmer", "muse_glimmer_text", "olmo3", "phi3", "qwen2", "qwen2_5_vl",
    "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl",
    "seed_oss", "smollm3",
)  # fmt: skip
# `model_type` → the architecture's module. NAME_text: config.json describes the decoder of NAME alone. NAME_unified: NAME without
# encoders of images and sound.
ARCHITECTURES: dict[str, ModuleType] = {
    name: import_module(f"minirt.models.{name.removesuffix('_text').removesuffix('_unified')}") for name in _TYPES
}


@dataclass(frozen=True)
class Preset:
    """A well-known model: its shape, the Hub repository that holds its weights, and their stated quantization, if any."""

    name: str
    hub_id: str
    config: ModelConfig
    quantization: QuantizationConfig | None = None


def embedded() -> Path:
    """The folder of the small model that is part of the package."""
    return Path(__file__).parent / "embedded"


def parse_config(raw: Any, file: str = "config.json") -> ModelConfig:
    """Parse and check the content of a config.json. `file`: for messages. A warning lists unknown fields.

    Raises:
        ConfigError: a value is wrong or missing.
        UnsupportedError: minirt does not support a value.
    """
    fields = Fields(raw, file)
    model_type = fields.string("model_type")
    if model_type not in ARCHITECTURES:
        what, expected = f"architecture {shown(model_type)} is not supported", f"one of {', '.join(ARCHITECTURES)}"
        hint = "take a model of one of these architectures; minirt models lists some"
        raise fields.unsupported("model_type", what, expected, found=None, hint=hint)
    module = ARCHITECTURES[model_type]
    find = getattr(module, "decoder_fields", None)
    config: ModelConfig = module.config(fields) if find is None else text_config(fields, find(fields), module)
    warn_of_unread_fields(fields)
    return config


def decoder_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The decoder's fields of a config.json that `parse_config` accepts. With a vision encoder, they are in `text_config`."""
    find = getattr(ARCHITECTURES[raw["model_type"]], "decoder_fields", None)
    return raw if find is None else find(Fields(raw)).raw


def build(config: ModelConfig) -> "list[Layer]":
    """The layers of a model in execution order, without weights."""
    return getattr(ARCHITECTURES[config.model_type], "layers", decoder_layers)(config)


def build_with_drafts(config: ModelConfig, rows: int | None = None) -> "tuple[list[Layer], list[Layer]]":
    """`build`, with a `Tap`, and the layers of the draft model that the checkpoint has beside the decoder.

    Args:
        rows: how many ids the drafts may have; None: those of the whole vocabulary.
    Raises:
        UnsupportedError: the architecture has none, or not these.
    """
    make = getattr(ARCHITECTURES[config.model_type], "draft_layers", None)
    if make is None:
        having = ", ".join(name for name, module in ARCHITECTURES.items() if hasattr(module, "draft_layers"))
        what, hint = "this architecture has no multi-token prediction", "--speculate ngram needs none"
        raise UnsupportedError(what, where=f"model_type {config.model_type}", expected=having, hint=hint)
    return make(config, rows)


def preset(name: str) -> Preset | None:
    """The preset with this name (case-insensitive), or None."""
    return next((entry for entry in presets() if entry.name.lower() == name.lower()), None)


@cache
def presets() -> tuple[Preset, ...]:
    """All presets."""
    return tuple(
        Preset(name, hub_id, parse_config(raw, f"preset {name}"), read_quantization(Fields(raw, f"preset {name}")))
        for name, hub_id, raw in raw_configs()
    )


@cache
def preset_table() -> dict[str, Any]:
    """The content of presets.json: well-known models, with the shapes of their published config.json files.

    A row of its `models` has the name, the Hub owner, the family, the values of `columns`, what differs from the family, and what
    differs in the -Instruct model. Without the last entry there is no such model. A family begins with the fields of those it is
    `like`.
    """
    return json.loads((Path(__file__).parent / "presets.json").read_text(encoding="utf-8"))


def raw_configs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name, Hub id, config.json content) of every preset."""
    table, known = preset_table(), dict[str, tuple[str, dict[str, Any]]]()
    for name, owner, family, values, differs, *instruct in table["models"]:
        raw = {"dtype": "bfloat16"} | _family(family) | dict(zip(table["columns"], values, strict=True)) | differs
        for variant, fields in ((name, {}), *((f"{name}-Instruct", fields) for fields in instruct)):
            known[variant] = f"{owner}/{table['hub_names'].get(variant, variant)}", raw | fields
        known |= {later: (f"{owner}/{later}", raw) for later, same in table["same_fields"].items() if same == name}
    for name, (hub_id, raw) in known.items():
        yield name, hub_id, raw
        if name in table["fp8_releases"]:
            yield f"{name}-FP8", f"{hub_id}-FP8", raw | table["fp8_fields"]


def _family(name: str) -> dict[str, Any]:
    family, fields = preset_table()["families"][name], dict[str, Any]()
    for like in family.get("like", "").split():
        fields |= _family(like)
    return fields | {key: value for key, value in family.items() if key != "like"}
