"""Mistral 3: Ministral 3 or Mistral Small 3.1 in a model with a vision encoder. Computes text only."""

from minirt.modeling.config import Fields, ModelConfig
from minirt.models import ministral3, mistral
from minirt.models.vision import text_config, text_fields

DECODERS = {"ministral3": ministral3, "mistral": mistral}


def config(fields: Fields) -> ModelConfig:
    """The decoder's architecture is the `model_type` of `text_config`. The head is tied unless the file says otherwise."""
    text = decoder_fields(fields)
    decoder = DECODERS[text.choice("model_type", DECODERS, default="mistral")]
    return text_config(fields, text, ("Mistral3ForConditionalGeneration",), decoder.config)


def decoder_fields(fields: Fields) -> Fields:
    return text_fields(fields, tied=True)
