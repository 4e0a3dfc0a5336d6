"""Qwen3-Next and Qwen3-Coder-Next: the layers of Qwen3.5 with a mixture of experts. Projections are stored by key heads."""

from minirt.modeling.config import Fields, ModelConfig
from minirt.models.decoder import moe_config
from minirt.models.qwen3_5 import draft_layers as draft_layers
from minirt.models.qwen3_5 import hybrid_config


def config(fields: Fields) -> ModelConfig:
    """Layers that `mlp_only_layers` or `decoder_sparse_step` exclude have an MLP of `intermediate_size` instead of a mixture."""
    moe = moe_config(fields, shared_expert=True, normalize=True)
    return hybrid_config(fields, model_type="qwen3_next", classes=("Qwen3NextForCausalLM",), moe=moe, grouped=True)
