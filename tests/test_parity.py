"""Parity with transformers in fp32: tiny random models of every family and option, and SmolLM2-135M.

On a CPU with the eager layers; on a GPU with the eager layers and with "auto", which selects Triton for every supported layer.

Catches any error in a layer's math, packing, rope variant, page handling or batching.
"""

import gc

import pytest
import torch
from support import hybrids
from support.checkpoints import distance
from support.hybrids import check_greedy, truth

from minirt import Generator, SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ["eager", "auto"] if DEVICE == "cuda" else ["eager"]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 64}
WIDE = {"hidden_size": 128}
CASES = {
    "llama": ("Llama", {}), "llama-tied-mha": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-d64": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 64, **WIDE}),
    "llama-linear-8to1": ("Llama", {"rope_parameters": LINEAR, "num_attention_heads": 8, "num_key_value_heads": 1}),
    "llama-yarn-d128": ("Llama", {"rope_parameters": YARN, "head_dim": 128}),
    "llama-gelu-tanh": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-gelu": ("Llama", {"hidden_act": "gelu", "head_dim": 80}),
    "qwen2-7to1": ("Qwen2", {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
    "qwen3-bias-yarn": ("Qwen3", {"head_dim": 128, "attention_bias": True, "rope_parameters": YARN}),
    "mistral": ("Mistral", {}),
}  # fmt: skip
MOE = {"num_experts": 13, "num_experts_per_tok": 3, "moe_intermediate_size": 41}
CASES |= {
    "qwen3-moe": ("Qwen3Moe", {**MOE, "norm_topk_prob": True, "head_dim": 64}),
    "qwen3-moe-some-layers-top1": (
        "Qwen3Moe", {**MOE, "num_experts_per_tok": 1, "decoder_sparse_step": 2, "num_hidden_layers": 4, "attention_bias": True},
    ),
    "qwen2-moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 53}),
    "qwen2-moe-dense-layer-top8": (
        "Qwen2Moe",
        {**MOE, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 31, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3-moe-fused": ("Qwen3Moe", {**MOE, "norm_topk_prob": True, "mlp_only_layers": [0], "fused": True}),
    "qwen2-moe-fused": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 53, "fused": True}),
}  # fmt: skip
LENGTHS = (1, 7, 50, 64, 65, 130)  # one token; a prime; a page that fills while decoding; a full one; one token more; three pages
NEW = 20  # hundreds: `test_parity_of_models.py` in tests/models


def reference(folder):
    import transformers

    # Experts one by one: PyTorch's grouped product needs aligned sizes.
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).to(DEVICE).eval()


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", CASES)
def test_tiny_models(case, impl, hf_folder):
    family, options = CASES[case]
    folder = hf_folder(family, seed=len(case), **options)
    model = reference(folder)
    prompts, params = hybrids.prompts(*LENGTHS), SamplingParams(max_tokens=NEW, ignore_eos=True)
    options = {"device": DEVICE, "dtype": "float32", "impl": impl, "kv_cache_memory": 1 << 26}
    with Generator.from_pretrained(folder, **options) as generator:
        for prompt in prompts:
            assert distance(generator.logits(prompt), truth(model, prompt)) < 1e-4, f"prompt of {len(prompt)} tokens"
        alone = [generator.generate(prompt, params).token_ids for prompt in prompts]
        assert [c.token_ids for c in generator.generate(prompts, params)] == alone
    for prompt, tokens in zip(prompts, alone, strict=True):
        check_greedy(model, prompt, tokens, NEW)


CHATS = (
    "What is the capital of France? Tell me a short story about it.",
    "Write a Python function that returns the n-th Fibonacci number.", "请用中文介绍一下长城。",
    "Reply only with emoji: 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷", "a", "List three primes between 10 and 20.", "¿Cuál es la capital de España?",
)  # fmt: skip
TEXTS = (
    "Once upon a time", "def quicksort(xs):\n    if len(xs) <= 1:\n        return xs\n",
    "  two leading spaces and a trailing newline\n", "The quick brown fox", "1, 1, 2, 3, 5, 8, 13,",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
def test_smollm2(impl, smollm2):
    """At least 12 prompts (chat, code, Chinese, emoji, one character, 400 tokens in chunks) in one batch, three alone, too."""
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
    with Generator.from_pretrained(
        smollm2, device=DEVICE, dtype="float32", impl=impl, kv_cache_memory=1 << 28, max_num_batched_tokens=250
    ) as generator:
        prompts = [generator.encode_chat([{"role": "user", "content": text}]) for text in CHATS]
        prompts += [generator.encode(text) for text in TEXTS]
        prompts.append(generator.encode(" ".join(f"Line {i}: the number is {i * i % 97}." for i in range(100)))[:400])
        assert len(prompts) >= 12
        assert len(prompts[-1]) == 400
        alone = [generator.generate(prompt, params) for prompt in prompts[:3]]
        together = [c.token_ids for c in generator.generate(prompts, params)]
    gc.collect()
    model = reference(smollm2)
    assert [c.token_ids for c in alone] == together[:3]
    for prompt, tokens in zip(prompts, together, strict=True):
        check_greedy(model, prompt, tokens, 8)
    assert alone[0].text.startswith("The capital of France is Paris.")
