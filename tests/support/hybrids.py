"""Tiny random models with gated DeltaNet layers and mixtures of experts, as transformers writes them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from minirt.outputs import Completion
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import KVCache

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
    config_class, model_class, settings = CASES[case]
    torch.manual_seed(len(case))
    config = getattr(transformers, config_class)(**TEXT | settings | changes)
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
    return model(input_ids=torch.tensor([tokens], device=model.device)).logits[0].cpu()


def check_greedy(model: Any, prompt: list[int], tokens: list[int], count: int) -> None:
    """The tokens are those of transformers' greedy decoding; one pass over all of them is enough to see it."""
    assert len(tokens) == count
    assert truth(model, prompt + tokens)[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


def last_logits(model: Any, prompt: list[int], starts: list[int]) -> torch.Tensor:
    """The logits after each chunk of a prompt; the chunks begin at `starts`."""
    cache, outs = KVCache(model.cache_specs, 4, model.device, model.kv_dtype, num_slots=3), []
    for start, stop in zip(starts, [*starts[1:], len(prompt)], strict=True):
        chunk = Chunk(prompt[start:stop], start, range(4), num_logits=1, slot=2)
        outs.append(model(Batch.build([chunk], cache.page_size).to(model.device), cache).cpu()[0])
    return torch.stack(outs)


def wrap(folder: Path, tensors: dict[str, torch.Tensor], kind: str, name: str, vision: dict[str, Any]) -> None:
    """Write a decoder as official files are: inside a model of this class that sees images, with MTP layers."""
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    renamed |= {"model.visual.patch_embed.proj.weight": torch.ones(3), "mtp.fc.weight": torch.ones(2)}
    save_file({name: tensor.contiguous() for name, tensor in renamed.items()}, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    outer = {"model_type": kind, "architectures": [name], "vision_config": vision, "image_token_id": 200}
    outer |= {name: text.pop(name) for name in ("dtype", "tie_word_embeddings", "quantization_config") if name in text}
    for name in ("architectures", "transformers_version"):
        text.pop(name, None)
    text |= {"mamba_ssm_dtype": "float32", "attn_output_gate": True, "mtp_num_hidden_layers": 1, "output_gate_type": "swish"}
    text |= {"mtp_use_dedicated_embeddings": False}
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": text}))


def check(completion: Completion, expected: Completion, tolerance: float = 2e-4) -> None:
    """The same tokens, and log-probabilities up to rounding, which show a state with a token too many or too few."""
    assert completion.token_ids == expected.token_ids
    pairs = zip(completion.logprobs or (), expected.logprobs or (), strict=True)
    assert all(abs(a.logprob - b.logprob) < tolerance for a, b in pairs)
