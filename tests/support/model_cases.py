"""Tiny random models whose layers differ or that are inside a model with a vision encoder, as transformers writes them."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

TEXT = {
    "hidden_size": 64, "intermediate_size": 97, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 211, "max_position_embeddings": 512, "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.6, "max_position_embeddings": 512,
}  # fmt: skip
MROPE = {"rope_type": "default", "type": "mrope", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
PIXTRAL = {"model_type": "pixtral", "num_attention_heads": 2, "head_dim": 16, "image_size": 28, "patch_size": 14}
PIXTRAL |= {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
QWEN3_VISION = QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
MUSE_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA = {
    "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "sliding_window": 33, "final_logit_softcapping": 3.0,
}  # fmt: skip
GEMMA_VISION = MUSE_VISION | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}
GEMMA_AUDIO = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 64}
MUSE_PROJECTOR = {"out_hidden_size": 128, "projector_hidden_size": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 8.0,
    "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.0 + i * i / 3 for i in range(8)],
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
FACTORS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.11, "logits_scaling": 1.7}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
GPT_OSS = {
    "num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 32, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip


def wrapped(text, vision, **options):
    return {"text_config": TEXT | text, "vision_config": vision, **options}


# Name → transformers' config class and model class without their endings, and the settings.
CASES = {
    "smollm3": ("SmolLM3", "ForCausalLM", TEXT),
    "smollm3, listed": ("SmolLM3", "ForCausalLM", TEXT | {
        "no_rope_layers": [0, 1, 0, 1, 1], "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
        "rope_parameters": LINEAR,
    }),
    "smollm3, every second": ("SmolLM3", "ForCausalLM", TEXT | {"no_rope_layer_interval": 2}),
    "ministral3": ("Ministral3", "ForCausalLM", TEXT | {"rope_parameters": YARN}),
    "mistral3 with ministral3": ("Mistral3", "ForConditionalGeneration", wrapped(
        {"model_type": "ministral3", "rope_parameters": YARN}, PIXTRAL, tie_word_embeddings=False
    )),
    "mistral3 with mistral, tied": ("Mistral3", "ForConditionalGeneration", wrapped(
        {"model_type": "mistral", "sliding_window": None}, PIXTRAL
    )),
    "qwen2.5-vl": ("Qwen2_5_VL", "ForConditionalGeneration", wrapped({"rope_parameters": MROPE}, QWEN_VISION)),
    "qwen2.5-vl, tied": ("Qwen2_5_VL", "ForConditionalGeneration", wrapped(
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [8, 0, 0]}}, QWEN_VISION,
        tie_word_embeddings=True,
    )),
    "qwen3-vl": ("Qwen3VL", "ForConditionalGeneration", wrapped(
        {"rope_parameters": {**MROPE, "type": "default", "mrope_interleaved": True}, "attention_bias": True}, QWEN3_VISION
    )),
    "qwen3-vl, tied": ("Qwen3VL", "ForConditionalGeneration", wrapped(
        {"rope_parameters": {**MROPE, "type": "default", "mrope_interleaved": True}}, QWEN3_VISION, tie_word_embeddings=True
    )),
    "llama with longrope": ("Llama", "ForCausalLM", TEXT | {"rope_parameters": LONG}),
    "granite": ("Granite", "ForCausalLM", TEXT | FACTORS | {"attention_bias": True, "mlp_bias": True}),
    "granite, tied": ("Granite", "ForCausalLM", TEXT | FACTORS | {"tie_word_embeddings": True}),
    "phi3": ("Phi3", "ForCausalLM", TEXT | {"sliding_window": 33, "tie_word_embeddings": True}),
    "phi3 with longrope": ("Phi3", "ForCausalLM", TEXT | {
        "head_dim": 16, "original_max_position_embeddings": 64, "rope_parameters": LONG | {
            "partial_rotary_factor": 0.75, "short_factor": LONG["short_factor"][:6], "long_factor": LONG["long_factor"][:6],
        },
    }),
    "seed_oss": ("SeedOss", "ForCausalLM", TEXT | {"head_dim": 12, "attention_out_bias": True, "mlp_bias": True}),
    "hunyuan": ("HunYuanDenseV1", "ForCausalLM", TEXT | {"attention_bias": True, "rope_parameters": LINEAR}),
    "hunyuan with alpha": ("HunYuanDenseV1", "ForCausalLM", TEXT | {
        "tie_word_embeddings": True, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 30.0, "factor": 1.0},
    }),
    "olmo3": ("Olmo3", "ForCausalLM", TEXT | {"sliding_window": 33, "attention_bias": True, "rope_parameters": {
        FULL: {name: value for name, value in YARN.items() if name not in ("llama_4_scaling_beta", "max_position_embeddings")},
        SLIDING: {"rope_type": "default", "rope_theta": 777.0},
    }}),
    "olmo3, listed": ("Olmo3", "ForCausalLM", TEXT | {
        "sliding_window": 64, "tie_word_embeddings": True, "layer_types": [SLIDING, SLIDING, FULL, FULL, SLIDING],
    }),
    "exaone4": ("Exaone4", "ForCausalLM", TEXT | {"sliding_window": 17, "sliding_window_pattern": 3, "rope_parameters": LINEAR}),
    "exaone4 without windows": ("Exaone4", "ForCausalLM", TEXT | {
        "sliding_window": None, "layer_types": [FULL] * 5, "tie_word_embeddings": True,
    }),
    "muse_glimmer": ("MuseGlimmer", "ForConditionalGeneration", wrapped(
        {"sliding_window": 33, "rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}, MUSE_VISION, **MUSE_PROJECTOR
    )),
    "muse_glimmer, listed": ("MuseGlimmer", "ForConditionalGeneration", wrapped(
        {"sliding_window": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "post_norm_eps": 0.1,
         "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL], "layer_rope_theta": [0.0, 1e4, 1e4, 1e4, 0.0],
         "qk_scale_factor": 2.5, "final_logit_softcapping": 3.0, "output_multiplier": 1.5},
        MUSE_VISION, **MUSE_PROJECTOR,
    )),
    "gemma4": ("Gemma4", "ForConditionalGeneration", wrapped(GEMMA, GEMMA_VISION, audio_config=GEMMA_AUDIO)),
    "gemma4, text alone": ("Gemma4Text", "ForCausalLM", TEXT | GEMMA | {
        "attention_k_eq_v": False, "num_hidden_layers": 5, "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL], "head_dim": 24,
        "sliding_window": 64, "final_logit_softcapping": None, "attention_bias": True, "tie_word_embeddings": False,
        "rope_parameters": {FULL: {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.6},
                            SLIDING: {"rope_type": "default", "rope_theta": 777.0}},
    }),
    "gemma4 with experts": ("Gemma4", "ForConditionalGeneration", wrapped(
        GEMMA | {"enable_moe_block": True, "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 24}, None,
    )),
    "gemma4_unified": ("Gemma4Unified", "ForConditionalGeneration", wrapped(
        {name: value for name, value in GEMMA.items() if name != "hidden_size_per_layer_input"},
        {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 64},
    )),
    "gpt_oss": ("GptOss", "ForCausalLM", TEXT | GPT_OSS | {"sliding_window": 33, "tie_word_embeddings": True}),
    "gpt_oss, listed": ("GptOss", "ForCausalLM", TEXT | GPT_OSS | {
        "sliding_window": 64, "layer_types": [FULL, SLIDING, SLIDING, FULL, FULL], "swiglu_limit": 0.5, "swiglu_alpha": 3.0,
        "num_experts_per_tok": 1, "attention_bias": False, "intermediate_size": 100, "head_dim": 24,
    }),
    "mistral with a window": ("Mistral", "ForCausalLM", TEXT | {"sliding_window": 17}),
    "qwen2 with windows": ("Qwen2", "ForCausalLM", TEXT | {
        "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2,
    }),
    "qwen3 with windows": ("Qwen3", "ForCausalLM", TEXT | {
        "use_sliding_window": True, "sliding_window": 65, "layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING],
    }),
    "smollm3 with windows": ("SmolLM3", "ForCausalLM", TEXT | {"use_sliding_window": True, "sliding_window": 33}),
    "qwen2_moe with windows": ("Qwen2Moe", "ForCausalLM", TEXT | EXPERTS | {
        "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 4,
    }),
}  # fmt: skip


def make(case: str, folder: Path, **changes: Any) -> Any:
    """Write a tiny random model, and return transformers' model. `changes`: of its settings."""
    family, ending, options = CASES[case]
    options = options | changes
    torch.manual_seed(len(case))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{family}Config")(**json.loads(json.dumps(options)))
        model = getattr(transformers, family.removesuffix("Text") + ending)(config).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.6, 1.2)
        for name, parameter in model.named_parameters():
            if ("norm" in name or "scale" in name) and parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("sinks"):
                parameter.normal_(0, 2)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif parameter.ndim >= 2:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
            elif parameter.ndim == 3 and family == "GptOss":
                parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5)
    model.save_pretrained(folder)
    return model
