"""Mistral 3: Ministral 3 or Mistral Small 3.1 in a model with a vision encoder. Computes text only."""

from functools import partial

from minirt.modeling.config import Fields, ModelConfig
from minirt.models import ministral3, mistral
from minirt.models.vision import text_fields

CLASSES = ("Mistral3ForConditionalGeneration",)
DECODERS = {"ministral3": ministral3, "mistral": mistral}
decoder_fields = partial(text_fields, tied=True)  # the head is tied unless the file says otherwise


def config(fields: Fields) -> ModelConfig:
    """The decoder's architecture is the `model_type` of `text_config`."""
    return DECODERS[fields.choice("model_type", DECODERS, default="mistral")].config(fields)
