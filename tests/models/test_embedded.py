"""The embedded model: files, shape, parity with transformers, stories that end, drafts of its layers, errors for damaged files.

MINIRT_TEST_EMBEDDED can name another folder, to test a new model before it is put into models/embedded.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.checkpoints import load, refused
from support.hybrids import check_greedy
from support.package import ROOT, transformers_perplexity

from minirt import Generator, SamplingParams
from minirt.bench.perplexity import perplexity
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
    with load(FOLDER, dtype="float32", kv_cache_memory=1 << 27) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def drafting():
    """Each step verifies all drafts, also on a machine where that does not pay."""
    options = SpeculativeOptions(method="mtp", adaptive=False)
    with load(FOLDER, dtype="float32", kv_cache_memory=1 << 27, speculative=options) as loaded:
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


def test_loads_strictly(generator):
    assert generator.plan.num_parameters <= 12_000_000
    assert generator.config.qkv_bias
    assert not generator.config.tie_word_embeddings, "as Qwen2.5-7B"
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
        check_greedy(model, prompt, completion.token_ids, 40)


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
    plain, drafted = (loaded.generate(PROMPTS, params) for loaded in (generator, drafting))
    assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
    tokens = sum(len(done.token_ids) for done in drafted)
    accepted = sum(done.num_accepted_tokens for done in drafted)
    assert accepted < sum(done.num_draft_tokens for done in drafted)
    assert tokens / (tokens - accepted) > least


@pytest.mark.gpu
def test_triton_in_bf16_has_the_perplexity_of_fp32():
    text, results = HELD_OUT.read_text(encoding="utf-8"), {}
    for dtype, impl in (("float32", "eager"), ("bfloat16", "triton")):
        with Generator.from_pretrained(FOLDER, device="cuda", dtype=dtype, impl=impl) as generator:
            results[dtype] = perplexity(generator, text).perplexity
    assert results["bfloat16"] == pytest.approx(results["float32"], rel=1e-3)


@pytest.mark.parametrize("name", [SHARDS[1], DRAFTS, INDEX])  # that of drafts also if no drafts are asked for
def test_a_damaged_model_is_an_error_that_names_it(name, tmp_path):
    """There is no fallback to another model, and no part of the damaged model is used."""
    path = shutil.copytree(FOLDER, tmp_path / "embedded") / name
    if name == INDEX:
        index = json.loads(path.read_text())
        name = index["weight_map"].pop("model.norm.weight")
        path.write_text(json.dumps(index))
    else:
        path.write_bytes(path.read_bytes()[:-1000])
    refused(path.parent, name)
