"""Granite 3 and 4 (dense): Llama with factors of the embedding, of the scores, of what layers add, and of the logits."""

from minirt.modeling.config import Fields, ModelConfig
from minirt.models.decoder import decoder_config


def config(fields: Fields) -> ModelConfig:
    """An absent factor means 1, also `attention_multiplier`. `logits_scaling` divides the logits."""
    embedding, residual, attention, logits = (
        fields.number(name, default=1.0)
        for name in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    )
    return decoder_config(
        fields, model_type="granite", classes=("GraniteForCausalLM",), max_positions=2048, attention_bias=False,
        mlp_bias=fields.boolean("mlp_bias", default=False), embedding_multiplier=embedding, residual_multiplier=residual,
        attention_scale=attention, logits_multiplier=1 / logits,
    )  # fmt: skip
