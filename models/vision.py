"""The text decoder of a model with a vision encoder: its fields in config.json. Images are not supported, so only text is served.

The tensors of the vision encoder are not loaded, and a warning says so (`minirt.loading.checkpoint`).
"""

from types import ModuleType
from typing import Any

from minirt.modeling.config import Fields, ModelConfig, shown
from minirt.models.decoder import refuse_other_classes
from minirt.models.foreign_fields import refuse_foreign_fields

# Fields of the whole model: those of the top level count.
_OF_BOTH = ("dtype", "torch_dtype", "quantization_config", "compression_config")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size",
)  # fmt: skip


def text_fields(fields: Fields, *, tied: bool = False, flat: bool = False) -> Fields:
    """The fields of the decoder: those of `text_config`, with what the top level states for the whole model.

    Args:
        tied: what it means if neither level has `tie_word_embeddings`.
        flat: whether files without `text_config` have the decoder's fields at the top level.
    Raises:
        ConfigError: `text_config` is missing, or a size is stated twice and differs.
    """
    inner, tie = fields.nested("text_config"), "tie_word_embeddings"
    if not inner.raw:
        if flat:
            return fields
        raise fields.missing("text_config", "the decoder's fields")
    for name in _SIZES:
        if (outer := fields.get(name)) is not None and inner.raw.get(name) not in (None, outer):
            raise fields.wrong(name, "the value contradicts text_config", shown(inner.raw[name]), hint="remove the wrong one")
    taken = [name for name in _OF_BOTH if fields.get(name) is not None]
    left_out = {"architectures"} | ({"dtype", "torch_dtype"} if {"dtype", "torch_dtype"} & set(taken) else set())
    raw: dict[str, Any] = {name: value for name, value in inner.raw.items() if name not in left_out}
    taken += [name for name in _TOKENS if name not in raw and name in fields.raw]
    stated = [level.boolean(tie) for level in (fields, inner) if level.get(tie) is not None]
    raw |= {name: fields.raw[name] for name in taken} | {tie: any(stated) if stated else tied}
    return Fields(raw, fields.file, "text_config.", frozenset(taken), fields.read)


def text_config(fields: Fields, text: Fields, module: ModuleType) -> ModelConfig:
    """The config of the decoder. `fields`: those of the top level, `text`: from `text_fields`.

    `module`: the architecture, with the names in CLASSES that `architectures` may have, and the `config` of the decoder.
    """
    refuse_other_classes(fields, module.CLASSES)
    if text is fields:
        wrapper = ("architectures", "text_config")
        return module.config(fields.over({name: value for name, value in fields.raw.items() if name not in wrapper}))
    parsed: ModelConfig = module.config(text)
    refuse_foreign_fields(fields, parsed)
    return parsed
