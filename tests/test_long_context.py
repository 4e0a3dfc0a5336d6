"""A chunked prompt that fills the model's context length, against transformers: 32,768 positions, and 131,072 with scaled RoPE.

Catches positions or scaled frequencies that lose precision far from zero, errors on pages past the first thousand, and KV splits
that are dropped or counted twice.
"""

import gc

import pytest
import torch
from support.package import transformers_logits

from minirt import Generator, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
NEW = 12  # tokens after the prompt; the last one is at the limit
LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
MODELS = {
    "qwen2": ("Qwen2", 32768, {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 896}),
    "llama31": ("Llama", 131072, {"num_key_value_heads": 1, "head_dim": 128, "rope_parameters": LLAMA31}),
}


@pytest.mark.parametrize("case", MODELS)
def test_the_models_own_limit(case, hf_folder):
    import transformers

    family, limit, options = MODELS[case]
    folder = hf_folder(family, max_position_embeddings=limit, num_hidden_layers=2, **options)
    prompt = torch.randint(3, 211, (limit - NEW,), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    logits_of, tokens = {}, []
    for dtype in ("float32", "bfloat16"):
        with Generator.from_pretrained(folder, dtype=dtype, impl="triton", kv_cache_memory=1 << 30) as generator:
            tokens = tokens or list(generator.generate([prompt], params)[0].token_ids)
            logits_of[dtype] = generator.logits(prompt + tokens)
        gc.collect()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    whole = prompt + tokens
    truth = transformers_logits(model, whole)
    rounded = transformers_logits(model.bfloat16(), whole)
    assert truth[-NEW - 1 : -1].argmax(-1).tolist() == tokens

    def error(logits: torch.Tensor) -> torch.Tensor:
        return (logits - truth).norm(dim=-1) / truth.norm(dim=-1)

    assert error(logits_of["float32"]).max() < 1e-4
    ours, theirs = error(logits_of["bfloat16"]), error(rounded)
    for part in (slice(0, 1024), slice(-1024, None)):
        assert ours[part].mean() < 1.2 * theirs[part].mean()
