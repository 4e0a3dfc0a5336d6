"""Multi-token prediction in the format of Qwen3.5: a block that drafts tokens from the hidden states of the decoder (`mtp.*`)."""

from dataclasses import replace
from typing import TYPE_CHECKING

from minirt.errors import UnsupportedError
from minirt.modeling.config import Fields, ModelConfig, MTPConfig
from minirt.models.decoder import FINAL_NORM, block, decoder_layers, head_weight

if TYPE_CHECKING:
    from minirt.layers import Layer


def read_mtp(fields: Fields) -> MTPConfig:
    """What config.json says of it. What is not supported is refused only if drafts are asked for (`draft_layers`)."""
    count = fields.integer_or_none("mtp_num_hidden_layers")
    intermediate = fields.integer_or_none("mtp_intermediate_size")
    return MTPConfig(count, fields.boolean("mtp_use_dedicated_embeddings", default=False), intermediate)


def draft_layers(config: ModelConfig, rows: int | None) -> "tuple[list[Layer], list[Layer]]":
    """`decoder_layers` with a `Tap` of the states after the final norm, and the layers of the draft model.

    Args:
        rows: how many ids the drafts may have; None: those of the whole vocabulary.
    Raises:
        UnsupportedError: the config states no such layers, another number of them, embeddings of their own, or an MLP that is no
            dense one.
    """
    from minirt.layers import DraftInput, Head, Select, Tap  # imported here because it imports torch

    mtp = config.mtp
    if mtp is None:
        what, hint = "the model has no multi-token prediction", "--speculate ngram needs none"
        raise UnsupportedError(what, where="mtp_num_hidden_layers", expected="1", found="no such field", hint=hint)
    if mtp.num_layers not in (None, 1):
        what, expected = "this number of layers of multi-token prediction is not supported", "1"
        raise UnsupportedError(what, where="mtp_num_hidden_layers", expected=expected, found=mtp.num_layers)
    if mtp.own_embeddings:
        what = "multi-token prediction with embeddings of its own is not supported"
        raise UnsupportedError(what, where="mtp_use_dedicated_embeddings", expected="false", found="true")
    *before, head = decoder_layers(config)
    mixture = config.moe is not None  # also where some layers of the decoder have a dense MLP
    if mixture and mtp.intermediate_size is not None:
        what = "an MLP of its own size is not supported beside mixtures of experts"
        raise UnsupportedError(what, where="mtp_intermediate_size", expected="no such field", found=mtp.intermediate_size)
    sized = replace(config, intermediate_size=mtp.intermediate_size or config.intermediate_size)
    attention, mlp = block(sized, "mtp", "mtp.layers.0", config.attention(), mixture=mixture)
    names = {"norm_embedding": "mtp.pre_fc_norm_embedding", "norm_hidden": "mtp.pre_fc_norm_hidden", "fc": "mtp.fc"}
    draft: list[Layer] = [
        DraftInput(config, name="mtp.input", **names), attention, Select(config, name="mtp.select"), mlp,
        Tap(config, name="mtp.tap", norm="mtp.norm", every_row=False),
        Head(config, name="mtp.head", norm="mtp.norm", weight=head_weight(config), rows=rows),
    ]  # fmt: skip
    return [*before, Tap(config, norm=FINAL_NORM), head], draft
