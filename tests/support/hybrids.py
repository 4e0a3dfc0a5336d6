"""Tiny random models with gated DeltaNet layers and mixtures of experts, as transformers writes them."""

from pathlib import Path
from typing import Any

import torch
import transformers

from minirt.outputs import Completion

TEXT: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 211, "max_position_embeddings": 1024, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 8, "num_experts": 7, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "full_attention_interval": 2, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
# Name → transformers' config class and model class, and the settings beside TEXT.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {}),
    "qwen3_5_moe, 3 to 1": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {
        "linear_num_value_heads": 6, "attention_bias": True, "num_experts_per_tok": 1, "tie_word_embeddings": True,
    }),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {"intermediate_size": 56, "mlp_only_layers": [1]}),
    "qwen3_next, every second": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {
        "intermediate_size": 56, "decoder_sparse_step": 2, "norm_topk_prob": False, "linear_num_value_heads": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    }),
}  # fmt: skip


def randomize(model: torch.nn.Module) -> None:
    """Values that make each part of a hybrid model matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "linear_attn.norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "norm" in name:  # these are stored minus 1
                parameter.uniform_(-0.5, 0.5)
            elif name.endswith(("bias", "A_log")):
                parameter.normal_(0, 0.7)
            else:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)


def make(case: str, folder: Path, fused: bool = False, **changes: Any) -> Any:
    """Write a model, and return transformers' one.

    Args:
        fused: store the experts of a layer as transformers keeps them, in two tensors.
        changes: of the settings.
    """
    config_class, model_class, own = CASES[case]
    torch.manual_seed(len(case))
    config = getattr(transformers, config_class)(**TEXT | own | changes)
    model = getattr(transformers, model_class)(config).eval()
    randomize(model)
    model.save_pretrained(folder, **({"save_original_format": False} if fused else {}))
    return model


def prompts(*lengths: int, seed: int = 7) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 211, (n,), generator=random).tolist() for n in lengths]


@torch.inference_mode()
def truth(model: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' logits [T, V]."""
    return model(input_ids=torch.tensor([tokens])).logits[0]


def check(own: Completion, expected: Completion, tolerance: float = 2e-4) -> None:
    """The same tokens, and log-probabilities up to rounding, which show a state with a token too many or too few."""
    assert own.token_ids == expected.token_ids
    pairs = zip(own.logprobs or (), expected.logprobs or (), strict=True)
    assert all(abs(a.logprob - b.logprob) < tolerance for a, b in pairs)
