"""Models whose layers differ, or that are inside a model with a vision encoder: parity with transformers in fp32, on text.

Catches a layer with the rope of another one, queries that are scaled at a wrong position or before the rotation, M-RoPE that is not
RoPE for text, a decoder's tensor under a name of the wrapper that is not found, and any of these in chunks or after preemption.
"""

import json
import shutil
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from minirt import Generator, SamplingParams
from minirt.errors import CheckpointError, ConfigError, UnsupportedError
from minirt.models import parse_config

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
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 8.0,
    "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.0 + i * i / 3 for i in range(8)],
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
}  # fmt: skip
LENGTHS = (1, 17, 64, 65, 130)
CHUNKS = (1, 17, 64, 65)
GREEDY = 300


def make(case, folder):
    """Write a tiny random model, and return transformers' model."""
    family, ending, options = CASES[case]
    torch.manual_seed(len(case))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{family}Config")(**json.loads(json.dumps(options)))
        model = getattr(transformers, family + ending)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif parameter.ndim == 2:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return model


def prompts():
    random = torch.Generator().manual_seed(7)
    return [torch.randint(3, 211, (n,), generator=random).tolist() for n in LENGTHS]


@torch.inference_mode()
def truth(model, tokens):
    return model(input_ids=torch.tensor([tokens])).logits[0]


@pytest.mark.filterwarnings("ignore:.*a vision encoder is not supported", "ignore:.*longrope rope has other frequencies")
@pytest.mark.parametrize("case", CASES)
def test_against_transformers(case, tmp_path):
    """Logits in chunks of several sizes, and greedy tokens of a ragged batch that does not fit the cache at once."""
    model = make(case, tmp_path)
    longest = prompts()[-1]
    expected = truth(model, longest)
    for chunk in CHUNKS:
        options = {"max_num_batched_tokens": chunk, "max_num_seqs": 1, "kv_cache_memory": 1 << 22}
        with Generator.from_pretrained(tmp_path, device="cpu", **options) as generator:
            error = (generator.logits(longest) - expected).norm() / expected.norm()
            assert error < 1e-5, f"chunks of {chunk}"
    # Pages for about half of the tokens of all sequences.
    page = 5 * 64 * 2 * 2 * 16 * 4  # bytes: layers, tokens, K and V, heads, channels, fp32
    params = SamplingParams(max_tokens=GREEDY, ignore_eos=True, temperature=0)
    with Generator.from_pretrained(tmp_path, device="cpu", kv_cache_memory=16 * page) as generator:
        outputs = [completion.token_ids for completion in generator.generate(prompts(), params)]
        assert generator._live.stats.num_preemptions
    for prompt, tokens in zip(prompts(), outputs, strict=True):
        assert len(tokens) == GREEDY
        assert truth(model, prompt + tokens)[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
