"""The embedded model: files, shape, parity with transformers, stories that end, drafts of its layers, errors for damaged files.

MINIRT_TEST_EMBEDDED can name another folder, to test a new model before it is put into models/embedded.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.package import ROOT, transformers_perplexity

from minirt import Generator, SamplingParams
from minirt.bench.perplexity import perplexity
from minirt.errors import CheckpointError
from minirt.speculative.options import SpeculativeOptions

FOLDER = Path(os.environ.get("MINIRT_TEST_EMBEDDED", ROOT / "models" / "embedded"))
HELD_OUT = Path(os.environ.get("MINIRT_TEST_HELDOUT", ROOT / "models" / "recipe" / "heldout.txt"))
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
DRAFTS = "model-mtp.safetensors"
INDEX = "model.safetensors.index.json"
OTHERS = ("README.md", "config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json")
PROMPTS = [
    "Once upon a time", "Once upon a time, there was a little fox named Pip.", "One sunny day, Lily", "The", "A",
    "There once was", "In a small village, there lived a boy named Tom. Tom", "Long ago,", "The cat sat on the",
    '"Hello," said the bear. "', "Mia lost her red hat. She looked", "It was raining, and", "He was afraid of the dark",
    "Tom and Ben wanted to build a boat.", "The capital of France is", "import torch\n", "é€ 🦊", "From that day on,", "1 2 3 4",
    "One night, Anna could not sleep.\n\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def generator():
    with Generator.from_pretrained(FOLDER, device="cpu", dtype="float32", kv_cache_memory=1 << 27) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def drafting():
    """Each step verifies all drafts, also on a machine where that does not pay."""
    options = SpeculativeOptions(method="mtp", adaptive=False)
    with Generator.from_pretrained(
        FOLDER, device="cpu", dtype="float32", kv_cache_memory=1 << 27, speculative=options
    ) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def model():
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_files():
    """The folder holds no other files, and each file is small enough for a repository and a wheel."""
    assert {path.name for path in FOLDER.iterdir()} == {*SHARDS, DRAFTS, *OTHERS}
    assert all((FOLDER / name).stat().st_size <= 15 << 20 for name in SHARDS)
    assert (FOLDER / DRAFTS).stat().st_size <= 3_000_000
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 26 << 20
    tensors = json.loads((FOLDER / INDEX).read_text())["weight_map"]
    assert {file: name.startswith("mtp.") for name, file in tensors.items()} == dict.fromkeys(SHARDS, False) | {DRAFTS: True}


def test_shape():
    """The same options as Qwen2.5-7B, with smaller sizes."""
    config = json.loads((FOLDER / "config.json").read_text())
    tensors = json.loads((FOLDER / INDEX).read_text())["weight_map"]
    assert (config["model_type"], config["architectures"]) == ("qwen2", ["Qwen2ForCausalLM"])
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["hidden_size"]) == (7, 1, 448)
    assert config["tie_word_embeddings"] is False
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.bias"} <= tensors.keys()
    assert config["max_position_embeddings"] >= 512
    assert 2000 <= config["vocab_size"] <= 4096
    assert config["torch_dtype"] == "bfloat16"
    assert config["mtp_num_hidden_layers"] == 1


def test_loads_strictly(generator):
    assert generator.plan.num_parameters <= 12_000_000
    assert generator.config.qkv_bias
    assert len(generator.unused_tensors) == 16
    assert all(name.startswith("mtp.") for name in generator.unused_tensors), "drafts are not asked for"
    assert generator.tokenizer.vocab_size == generator.config.vocab_size
    assert generator.eos_token_ids == (generator.tokenizer.eos_token_id,)
    assert generator.tokenizer.decode(generator.eos_token_ids, skip_special_tokens=False) == "<|endoftext|>"


def test_perplexity_is_that_of_transformers(generator, model):
    """On a part of the held-out text, equal to 4 digits. It is also low, which only trained weights achieve."""
    tokens = generator.encode(HELD_OUT.read_text(encoding="utf-8"))
    assert 18_000 <= len(tokens) <= 26_000
    part = tokens[:2500]
    result = perplexity(generator, part, window=512, stride=256)
    assert result.perplexity == pytest.approx(transformers_perplexity(model, part, 512, 256), rel=5e-5)
    assert result.perplexity < 8


def test_greedy_tokens_are_those_of_transformers(generator, model):
    encoded = [generator.encode(prompt) for prompt in PROMPTS]
    assert len(encoded) == 20
    ours = generator.generate(encoded, SamplingParams(temperature=0, max_tokens=40))
    for prompt, completion in zip(encoded, ours, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
        assert completion.token_ids == out[0, len(prompt) :].tolist()


def test_stories_end_by_themselves(generator):
    """Greedy, and for three seeds with the model's own settings, a story has a reasonable length and then ends."""
    params = [SamplingParams(temperature=0), *(SamplingParams(seed=seed) for seed in range(3))]
    for completion in generator.generate(["Once upon a time"] * 4, params):
        assert completion.sampling.max_tokens == 300
        assert completion.finish_reason == "stop"
        words = completion.text.split()
        assert 50 <= len(words) <= 250
        assert completion.text.rstrip()[-1] in '.!?"'
        trigrams = list(zip(words, words[1:], words[2:], strict=False))
        assert len(set(trigrams)) > 0.8 * len(trigrams)


@pytest.mark.parametrize(("temperature", "least"), [(0, 2.0), (1, 1.8)])
def test_trained_drafts_are_accepted_and_change_no_text(temperature, least, generator, drafting):
    """The same tokens with drafts and without, and more of them in a step than with layers that were not trained (1.0)."""
    assert drafting.unused_tensors == ()
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=60) for seed in range(len(PROMPTS))]
    plain, drafted = (own.generate(PROMPTS, params) for own in (generator, drafting))
    assert [own.token_ids for own in drafted] == [own.token_ids for own in plain]
    tokens = sum(len(own.token_ids) for own in drafted)
    accepted = sum(own.num_accepted_tokens for own in drafted)
    assert accepted < sum(own.num_draft_tokens for own in drafted)
    assert tokens / (tokens - accepted) > least


@pytest.mark.gpu
def test_triton_in_bf16_has_the_perplexity_of_fp32():
    text, results = HELD_OUT.read_text(encoding="utf-8"), {}
    for dtype, impl in (("float32", "eager"), ("bfloat16", "triton")):
        with Generator.from_pretrained(FOLDER, device="cuda", dtype=dtype, impl=impl) as generator:
            results[dtype] = perplexity(generator, text).perplexity
    assert results["bfloat16"] == pytest.approx(results["float32"], rel=1e-3)


def truncated(folder):
    path = folder / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-1000])
    return SHARDS[1]


def truncated_drafts(folder):
    """Also if no drafts are asked for."""
    path = folder / DRAFTS
    path.write_bytes(path.read_bytes()[:-1000])
    return DRAFTS


def unlisted_tensor(folder):
    index = json.loads((folder / INDEX).read_text())
    file = index["weight_map"].pop("model.norm.weight")
    (folder / INDEX).write_text(json.dumps(index))
    return file


@pytest.mark.parametrize("damage", [truncated, truncated_drafts, unlisted_tensor])
def test_a_damaged_model_is_an_error_that_names_it(damage, tmp_path):
    """There is no fallback to another model, and no part of the damaged model is used."""
    folder = tmp_path / "embedded"
    shutil.copytree(FOLDER, folder)
    named = damage(folder)
    with pytest.raises(CheckpointError, match=named):
        Generator.from_pretrained(folder, device="cpu")
