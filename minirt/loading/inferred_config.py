"""`inferred_config`: what config.json leaves open, and the tensors of the checkpoint decide. A default is no statement."""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from minirt import models
from minirt.errors import ConfigError, UnsupportedError
from minirt.loading.checkpoint import Entry, shows_tied
from minirt.modeling.config import ModelConfig

_QKV, _MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")


def inferred_config(raw: Mapping[str, Any], config: ModelConfig, entries: Mapping[str, Entry]) -> tuple[ModelConfig, str | None]:
    """The config with the values that the tensors show, for fields that the file does not state, or states twice and differently.

    Fields that the architecture does not have stay open. What the file states is not changed, so tensors that contradict it are
    refused later.

    Args:
        raw: config.json, from which `config` was read.
        entries: see `checkpoint.read_headers`.
    Returns:
        The config, and a note that names the fields; None: the defaults are right.
    """
    inner, changed = raw.get("text_config") or {}, dict[str, Any]()
    for name, value in _shown(config, entries).items():
        stated = [level[name] for level in (raw, inner) if level.get(name) is not None]
        if stated and all(statement == stated[0] for statement in stated):
            continue
        fields = changed | {name: value}
        candidate = {**raw, **fields}
        if inner:  # the head's tie may stand at both levels, and other fields of the decoder only there
            tie = {key: fields[key] for key in ("tie_word_embeddings",) if key in fields}
            candidate = {**raw, **tie, "text_config": inner | fields}
        with suppress(ConfigError, UnsupportedError):
            if (parsed := models.parse_config(candidate)) != config:
                config, changed = parsed, fields
    if not changed:
        return config, None
    values = ", ".join(f"{name} is {str(value).lower()}" for name, value in changed.items())
    return config, f"config.json does not say it clearly; by the tensors, {values}"


def _shown(config: ModelConfig, entries: Mapping[str, Entry]) -> dict[str, Any]:
    """The values that differ from `config`, by the names of their fields in config.json."""
    values: dict[str, Any] = {}
    if (tied := shows_tied(entries, config.tie_word_embeddings)) != config.tie_word_embeddings:
        values["tie_word_embeddings"] = tied
    attention, mlp = (_modules(entries, name) for name in ("self_attn.q_proj", "mlp.gate_proj"))
    if attention:
        query, key, norm = (entries.get(f"{attention[0]}.{name}.weight") for name in ("q_proj", "k_proj", "q_norm"))
        if query is not None and key is not None and min(len(query.shape), len(key.shape)) == 2:
            size = query.shape[0] // config.num_heads if norm is None else math.prod(norm.shape)
            heads = key.shape[0] // max(1, size)
            values |= {"head_dim": size} if size != config.head_dim else {}
            values |= {"num_key_value_heads": heads} if heads != config.num_kv_heads else {}
    for field, prefixes, names, expected in (
        ("qkv_bias", attention, _QKV, config.qkv_bias),
        ("attention_bias", attention, (*_QKV, "o_proj"), config.qkv_bias and config.o_bias),
        ("mlp_bias", mlp, _MLP, config.mlp_bias),
    ):
        biased = {f"{prefix}.{name}.bias" in entries for prefix in prefixes for name in names}
        if len(biased) == 1 and expected not in biased:
            values[field] = not expected
    if config.moe is not None:
        dense = [i for i in range(config.num_layers) if f"model.layers.{i}.mlp" in mlp]
        if dense != [i for i in range(config.num_layers) if not config.is_mixture(i)]:
            values["mlp_only_layers"] = dense
    return values


def _modules(entries: Mapping[str, Entry], part: str) -> list[str]:
    """The modules of the decoder's layers that have a weight or a packed weight of `part`, in the order of the files."""
    weight = re.compile(rf"(model\.layers\.\d+\.{re.escape(part.rpartition('.')[0])})\.{part.rpartition('.')[2]}\.q?weight")
    return [match[1] for match in map(weight.fullmatch, entries) if match is not None]
