"""Qwen3.5-MoE and 3.6-MoE (35B-A3B, 122B-A10B): Qwen3.5 with a mixture of experts and a shared expert in every layer.

As in Qwen3.5, official files are those of a model that also sees images, with the decoder's fields in `text_config`.
"""

from minirt.modeling.config import Fields, ModelConfig
from minirt.models.decoder import moe_config
from minirt.models.qwen3_5 import decoder_fields as decoder_fields
from minirt.models.qwen3_5 import draft_layers as draft_layers
from minirt.models.qwen3_5 import hybrid_config

# Fields of other mixtures, with the only value that is computed: every layer is a mixture, and weights are normalized.
_ONLY = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
CLASSES = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")


def config(fields: Fields) -> ModelConfig:
    """No layer has a dense MLP, so files have no `intermediate_size`."""
    for name, value in _ONLY.items():
        fields.only(name, value, what="every layer of this architecture is a mixture whose weights are normalized")
    moe = moe_config(fields, shared_expert=True, normalize=True)
    if fields.get("intermediate_size") is None:
        fields = fields.over({**fields.raw, "intermediate_size": moe.intermediate_size})
    return hybrid_config(fields, model_type="qwen3_5_moe", moe=moe)
