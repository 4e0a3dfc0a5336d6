"""Fields of other architectures that would change what a model computes. Every architecture refuses them by name.

A field that nobody reads gives a wrong result without an error: a Llama with `no_rope_layers`, for example, is a SmolLM3. The
table was made from the configuration classes of decoders in transformers, and from fields of other runtimes. It has no fields
of training, of token ids, and of sizes that a decoder reads. A warning lists fields that are in no table and that no code reads.
"""

import json
import re
from collections.abc import Mapping
from fnmatch import translate
from pathlib import Path
from typing import Any

from minirt.errors import printable, shortened
from minirt.kernels.activations import OF_HIDDEN_ACT
from minirt.modeling.config import Fields, ModelConfig, same, shown
from minirt.wording import warn

_TABLES = json.loads((Path(__file__).parent / "foreign_fields.json").read_text(encoding="utf-8"))
_NEUTRAL: dict[str, tuple[Any, ...]] = {"": (False, 0), "true": (True, 1), "1": (1,), "null": ()}
# What fields would do → their names, each with the values that change nothing. In the file, NAME is neutral if it is false or 0,
# NAME=true if it is true or 1. Null, an empty list, an empty object, and a list of such values change nothing in any field, and
# with NAME=null no other value does. Fields whose neutral value depends on the model: `_stated`.
FOREIGN_FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    what: {
        name: _NEUTRAL.get(value, tuple(value.split("|")))
        for name, _, value in (field.partition("=") for field in " ".join(lines).split())
    }
    for what, lines in _TABLES["foreign"].items()
}
# Fields that no code reads, and that do not change logits: where a file comes from, how its model was trained, what a call of
# transformers returns, and all that belongs to images. Names with a leading underscore are transformers' own notes.
_HARMLESS = re.compile("|".join(map(translate, " ".join(_TABLES["harmless"]).split())))
# Settings of `generate` that older versions of transformers wrote here, with the value that changes nothing.
_GENERATION: dict[str, Any] = _TABLES["generation"]
# Other names of fields that have a default: a file with such a name and without ours does not mean the default.
_OTHER_NAMES: dict[str, str] = _TABLES["other_names"]


def refuse_other_names(fields: Fields) -> None:
    """Raise ConfigError if a field that is absent stands in the file under the name of another runtime."""
    ropes = [fields.nested(name).raw for name in ("rope_parameters", "rope_scaling")]
    for name, others in _OTHER_NAMES.items():
        levels = (fields.raw, *ropes) if name == "rope_theta" else (fields.raw,)
        present = sorted(fields.raw.keys() & others.split())
        if present and all(level.get(name) is None for level in levels):
            raise fields.wrong(present[0], "the field has another name here", name, hint=f"rename it to {name}")


def warn_of_unread_fields(fields: Fields) -> None:
    """Warn of fields of a config.json that nobody has read, unless they are known to change nothing.

    `fields`: those of the top level, after an architecture has read them.
    """
    inner = fields.get("text_config")
    levels = {"": fields.raw, "text_config.": inner if isinstance(inner, Mapping) else {}}
    unread = [
        f"{prefix}{name}" for prefix, level in levels.items() for name, value in level.items()
        if f"{prefix}{name}" not in fields.read and value not in (None, [], {}, _GENERATION.get(name))
        and not _HARMLESS.fullmatch(name)
    ]  # fmt: skip
    if unread:
        names = printable(shortened(", ".join(unread)))
        what = f"fields {names} are" if len(unread) > 1 else f"field {names} is"
        warn(f"{fields.file}: {what} unknown, and ignored: if it changes what the model computes, the output is wrong")


def refuse_foreign_fields(fields: Fields, config: ModelConfig) -> None:
    """Raise UnsupportedError for a field of FOREIGN_FIELDS, or of `_stated`, with a value that would change the model.

    What the architecture has read before is not foreign.
    """
    stated = _stated(config)
    tables: dict[str, Mapping[str, tuple[Any, ...]]] = {**FOREIGN_FIELDS, "another value than that of the architecture": stated}
    for what, table in tables.items():
        for name in (name for name in fields.raw.keys() & table.keys() if not fields.has_read(name)):
            value, neutral = fields.get(name), stated.get(name, table[name])
            if not _is_neutral(value, neutral):
                meaning = f"the field means {what}, which model_type {config.model_type!r} does not compute"
                expected = " or ".join(["no field", *dict.fromkeys(map(shown, neutral))])
                raise fields.unsupported(name, meaning, expected, hint="correct model_type if it is wrong")


def _stated(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
    """Fields whose neutral value depends on the model, with the values that mean the same.

    Qwen2 has biases on q, k and v and none on o: for `attention_bias`, which is all four, transformers takes either value.
    """
    shared = config.moe.shared_intermediate_size if config.moe is not None else 0
    values: dict[str, tuple[Any, ...]] = {
        "attention_bias": (config.qkv_bias, config.o_bias), "mlp_bias": (config.mlp_bias,),
        "qkv_bias use_qkv_bias add_qkv_bias attention_qkv_bias": (config.qkv_bias,), "attention_out_bias": (config.o_bias,),
        "qk_norm use_qk_norm qk_layernorm use_qk_layernorm": (config.qk_norm,),
        "hidden_activation activation_function mlp_hidden_act":
            tuple(name for name, same in OF_HIDDEN_ACT.items() if same == config.hidden_act),
        "query_pre_attn_scalar rotary_dim kv_channels attention_head_dim": (config.head_dim,),
        "attention_multiplier": (config.head_dim**-0.5,), "dim_model_base": (config.hidden_size,),
        "unpadded_vocab_size": (config.vocab_size,), "rotary_emb_base": (config.rope.theta,),
        "shared_expert_intermediate_size" if shared else "": (shared,),
    }  # fmt: skip
    return {name: neutral for names, neutral in values.items() for name in names.split()}


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    if value is None or isinstance(value, Mapping):
        return not value
    if isinstance(value, list | tuple):
        return all(_is_neutral(item, neutral) for item in value)
    return any(same(value, one) for one in neutral)
