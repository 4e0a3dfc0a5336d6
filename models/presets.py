"""Well-known models by name, with the shapes of their published config.json files."""

from collections.abc import Iterator
from typing import Any

COLUMNS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
# The fields that all models of a family share.
QWEN25 = {"model_type": "qwen2", "max_position_embeddings": 131072, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
QWEN3 = {"model_type": "qwen3", "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
LLAMA3 = {"model_type": "llama", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
LLAMA31 = LLAMA3 | {"rope_parameters": LLAMA3_ROPE | {"factor": 8.0}}
LLAMA32 = LLAMA3 | {"rope_parameters": LLAMA3_ROPE | {"factor": 32.0}}
SMOLLM2 = {"model_type": "llama", "max_position_embeddings": 8192, "rope_theta": 1e5, "rms_norm_eps": 1e-5}
HYBRID = {
    "max_position_embeddings": 262144, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip
QWEN35 = HYBRID | {
    "model_type": "qwen3_5_text", "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}  # fmt: skip
QWEN35_MOE = QWEN35 | {"model_type": "qwen3_5_moe_text", "num_experts": 256, "num_experts_per_tok": 8}
QWEN3_NEXT = QWEN3_MOE | HYBRID | {
    "model_type": "qwen3_next", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "num_experts": 512, "num_experts_per_tok": 10,
}  # fmt: skip
SMOLLM3 = {"model_type": "smollm3", "max_position_embeddings": 65536, "rope_theta": 5e6, "rms_norm_eps": 1e-6}
MISTRAL = {
    "model_type": "mistral", "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None,
}  # fmt: skip
MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
MINISTRAL3 = {
    "model_type": "ministral3", "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_parameters": MINISTRAL3_ROPE,
}  # fmt: skip

MOE_30B, MOE_235B = {"moe_intermediate_size": 768}, {"moe_intermediate_size": 1536}
MOE_512, MOE_1024 = ({"moe_intermediate_size": n, "shared_expert_intermediate_size": n} for n in (512, 1024))
CODER = {"max_position_embeddings": 262144, "rope_theta": 1e7}
SHORT = {"max_position_embeddings": 32768}
VALUES_16, VALUES_32, VALUES_48, VALUES_64 = ({"linear_num_value_heads": heads} for heads in (16, 32, 48, 64))
EPS5, EPS6 = {"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-6}
# Name, Hub owner, family, values of COLUMNS, overrides of the family's fields, further overrides of the -Instruct model (None:
# there is no such model).
ROWS: tuple[tuple[str, str, dict[str, Any], tuple[Any, ...], dict[str, Any], dict[str, Any] | None], ...] = (
    ("Qwen2.5-0.5B", "Qwen", QWEN25, (896, 24, 14, 2, 64, 4864, 151936, True), SHORT, SHORT),
    ("Qwen2.5-1.5B", "Qwen", QWEN25, (1536, 28, 12, 2, 128, 8960, 151936, True), {}, SHORT),
    ("Qwen2.5-3B", "Qwen", QWEN25, (2048, 36, 16, 2, 128, 11008, 151936, True), SHORT, SHORT),
    ("Qwen2.5-7B", "Qwen", QWEN25, (3584, 28, 28, 4, 128, 18944, 152064, False), {}, SHORT),
    ("Qwen2.5-14B", "Qwen", QWEN25, (5120, 48, 40, 8, 128, 13824, 152064, False), EPS5, SHORT | EPS6),
    ("Qwen2.5-32B", "Qwen", QWEN25, (5120, 64, 40, 8, 128, 27648, 152064, False), EPS5, SHORT | EPS6),
    ("Qwen2.5-72B", "Qwen", QWEN25, (8192, 80, 64, 8, 128, 29568, 152064, False), EPS5, SHORT | EPS6),
    ("Qwen3-0.6B", "Qwen", QWEN3, (1024, 28, 16, 8, 128, 3072, 151936, True), {}, None),
    ("Qwen3-1.7B", "Qwen", QWEN3, (2048, 28, 16, 8, 128, 6144, 151936, True), {}, None),
    ("Qwen3-4B", "Qwen", QWEN3, (2560, 36, 32, 8, 128, 9728, 151936, True), {}, None),
    ("Qwen3-8B", "Qwen", QWEN3, (4096, 36, 32, 8, 128, 12288, 151936, False), {}, None),
    ("Qwen3-14B", "Qwen", QWEN3, (5120, 40, 40, 8, 128, 17408, 151936, False), {}, None),
    ("Qwen3-32B", "Qwen", QWEN3, (5120, 64, 64, 8, 128, 25600, 151936, False), {}, None),
    ("Qwen3-30B-A3B", "Qwen", QWEN3_MOE, (2048, 48, 32, 4, 128, 6144, 151936, False), MOE_30B, None),
    ("Qwen3-Coder-30B-A3B-Instruct", "Qwen", QWEN3_MOE, (2048, 48, 32, 4, 128, 5472, 151936, False), MOE_30B | CODER, None),
    ("Qwen3-235B-A22B", "Qwen", QWEN3_MOE, (4096, 94, 64, 4, 128, 12288, 151936, False), MOE_235B, None),
    ("Llama-3.1-8B", "meta-llama", LLAMA31, (4096, 32, 32, 8, 128, 14336, 128256, False), {}, {}),
    ("Llama-3.1-70B", "meta-llama", LLAMA31, (8192, 80, 64, 8, 128, 28672, 128256, False), {}, {}),
    ("Llama-3.2-1B", "meta-llama", LLAMA32, (2048, 16, 32, 8, 64, 8192, 128256, True), {}, {}),
    ("Llama-3.2-3B", "meta-llama", LLAMA32, (3072, 28, 24, 8, 128, 8192, 128256, True), {}, {}),
    ("SmolLM2-135M", "HuggingFaceTB", SMOLLM2, (576, 30, 9, 3, 64, 1536, 49152, True), {}, {}),
    ("SmolLM2-360M", "HuggingFaceTB", SMOLLM2, (960, 32, 15, 5, 64, 2560, 49152, True), {}, {}),
    ("SmolLM2-1.7B", "HuggingFaceTB", SMOLLM2, (2048, 24, 32, 32, 64, 8192, 49152, True), {"rope_theta": 130000.0}, {}),
    ("Qwen3.5-0.8B", "Qwen", QWEN35, (1024, 24, 8, 2, 256, 3584, 248320, True), VALUES_16, None),
    ("Qwen3.5-4B", "Qwen", QWEN35, (2560, 32, 16, 4, 256, 9216, 248320, True), VALUES_32, None),
    ("Qwen3.5-9B", "Qwen", QWEN35, (4096, 32, 16, 4, 256, 12288, 248320, False), VALUES_32, None),
    ("Qwen3.5-27B", "Qwen", QWEN35, (5120, 64, 24, 4, 256, 17408, 248320, False), VALUES_48, None),
    ("Qwen3.5-35B-A3B", "Qwen", QWEN35_MOE, (2048, 40, 16, 2, 256, None, 248320, False), MOE_512 | VALUES_32, None),
    ("Qwen3.5-122B-A10B", "Qwen", QWEN35_MOE, (3072, 48, 32, 2, 256, None, 248320, False), MOE_1024 | VALUES_64, None),
    ("Qwen3-Next-80B-A3B", "Qwen", QWEN3_NEXT, (2048, 48, 16, 2, 256, 5120, 151936, False), MOE_512 | VALUES_32, None),
    ("SmolLM3-3B", "HuggingFaceTB", SMOLLM3, (2048, 36, 16, 4, 128, 11008, 128256, True), {}, None),
    ("Ministral-3-8B", "mistralai", MINISTRAL3, (4096, 34, 32, 8, 128, 14336, 131072, False), {}, {}),
    ("Mistral-7B", "mistralai", MISTRAL, (4096, 32, 32, 8, 128, 14336, 32768, False), {}, {}),
)
# Names on the Hub that differ from the preset's.
HUB_NAMES = {
    "Qwen3-Next-80B-A3B": "Qwen3-Next-80B-A3B-Instruct",
    "Ministral-3-8B": "Ministral-3-8B-Base-2512", "Ministral-3-8B-Instruct": "Ministral-3-8B-Instruct-2512",
    "Mistral-7B": "Mistral-7B-v0.3", "Mistral-7B-Instruct": "Mistral-7B-Instruct-v0.3",
}  # fmt: skip

# Models of Qwen with the fields of an earlier one.
SAME_FIELDS = {"Qwen3.6-27B": "Qwen3.5-27B", "Qwen3.6-35B-A3B": "Qwen3.5-35B-A3B", "Qwen3.8-27B": "Qwen3.5-27B"}
# Their owner also has them in FP8, as NAME-FP8.
FP8_RELEASES = (
    "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B", "Qwen3-235B-A22B", "Qwen3.5-27B", "Qwen3.5-35B-A3B",
    "Qwen3.6-27B", "Qwen3.6-35B-A3B", "Qwen3.8-27B",
)  # fmt: skip
FP8_BLOCKS = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}  # fmt: skip


def raw_configs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name, Hub id, config.json content) of every preset."""
    known: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, owner, family, values, differs, instruct in ROWS:
        raw = {"dtype": "bfloat16"} | family | dict(zip(COLUMNS, values, strict=True)) | differs
        variants = {name: raw} if instruct is None else {name: raw, f"{name}-Instruct": raw | instruct}
        known |= {variant: (f"{owner}/{HUB_NAMES.get(variant, variant)}", fields) for variant, fields in variants.items()}
        known |= {later: (f"{owner}/{later}", raw) for later, same in SAME_FIELDS.items() if same == name}
    for name, (hub_id, raw) in known.items():
        yield name, hub_id, raw
        if name in FP8_RELEASES:
            yield f"{name}-FP8", f"{hub_id}-FP8", raw | {"quantization_config": FP8_BLOCKS}
