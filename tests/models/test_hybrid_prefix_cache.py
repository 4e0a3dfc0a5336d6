"""The prefix cache of a hybrid (Qwen3.5, tiny and random): what is found of a prompt changes nothing that follows.

Each case runs with the cache and without it: the same greedy tokens, and log-probabilities up to rounding. Catches states that
are copied in part, such as without the inputs of the convolution; labels off by one at pages and at chunks of 64; drafts that
stay in a kept state. The last cases are reports of other servers: prompts of 561 tokens that are never found, a prefix that is
shorter than the only kept state, conversations whose template rewrites them.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine.test_drafts import Mixed
from support.hybrids import check, prompts, randomize
from support.mtp import DENSE
from support.tiny import add_tokenizer

from minirt import Generator, SamplingParams
from minirt.errors import ContextLengthError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEXT: dict[str, Any] = DENSE | {"num_hidden_layers": 4, "max_position_embeddings": 4096}
OPTIONS: dict[str, Any] = {"device": DEVICE, "dtype": "float32", "kv_cache_memory": 1 << 24, "impl": "eager", "max_num_seqs": 8}
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=0)
THINKS = (  # reasoning is shown since the last question only, as in Qwen3.5's template
    "{% set last = namespace(at=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and loop.index0 > last.at %}"
    "<t>{{ m.reasoning }}</t>{% endif %}{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}[assistant]<t>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**TEXT))
    randomize(model)
    path = tmp_path_factory.mktemp("hybrid")
    model.save_pretrained(path)
    return add_tokenizer(path, THINKS)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Generator]:
    with Generator.from_pretrained(folder, prefix_cache=False, **OPTIONS) as generator:
        yield generator


@pytest.mark.parametrize("budget", [512, 96])
def test_prompts_that_end_around_pages_and_chunks(folder: Path, plain: Generator, budget: int) -> None:
    """The same prompt, a longer one, and one that leaves it at its end."""
    (text, tail) = prompts(200, 70)
    with Generator.from_pretrained(folder, max_num_batched_tokens=budget, state_cache_memory="64MiB", **OPTIONS) as generator:
        for length in (63, 64, 65, 66, 127, 128, 129, 130, 191, 192, 193, 200)[:: 1 if budget == 512 else 3]:
            whole = [random.Random(length).randrange(3, 211), *text[: length - 1]]
            for i, prompt in enumerate((whole, whole, whole + tail, whole[:-1] + tail)):
                done = generator.generate(prompt, GREEDY)
                check(done, plain.generate(prompt, GREEDY))
                if i == 1 and budget == 512:  # the prompt is one step
                    assert done.cached_tokens == (length - 1) // 64 * 64
                elif i == 1:  # the end of a step, or 64 tokens within one
                    assert length - 65 < done.cached_tokens < length


def test_scores_begin_from_the_state_of_their_prompt(folder: Path, plain: Generator) -> None:
    """The first of four completions computes the prompt for all. The logits of the prompt's last token score the first one."""
    context, *tails = prompts(139, 5, 90, 1, 70)
    with Generator.from_pretrained(folder, **OPTIONS) as generator:
        scores, expected = (model.score(context, tails) for model in (generator, plain))
        stats = generator.prefix_cache_stats
    assert sorted(score.cached_tokens for score in scores) == [0, 128, 128, 128]
    for score, other in zip(scores, expected, strict=True):
        assert [row.token_id for row in score.logprobs] == [row.token_id for row in other.logprobs]
        assert all(abs(a.logprob - b.logprob) < 2e-4 for a, b in zip(score.logprobs, other.logprobs, strict=True))
    assert stats is not None
    assert stats.snapshots == 1, "nothing is kept of completions"


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 2])
def test_triton(folder: Path, drafts: int) -> None:
    """The kernels read states that were copied, in slots that are used again; with drafts, also states that can be undone."""
    (text, tail) = prompts(68, 3)
    params, answers = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0), []
    for impl, cached in (("eager", False), (["eager", "layers.[01].gated_delta_net=triton"], True)):
        options = OPTIONS | {"impl": impl, "max_num_seqs": 2, "prefix_cache": cached}
        proposer: Any = Mixed(most=drafts, right=0.5) if drafts and cached else None
        if proposer is not None:
            proposer.known = {68: answers[0][0].token_ids, 71: answers[0][3].token_ids}
        with Generator.from_pretrained(folder, speculative=proposer, **options) as generator:
            answers.append([generator.generate(prompt, params) for prompt in (text, tail, text, text + tail)])
    assert [done.cached_tokens for done in answers[1]] == [0, 0, 64, 64]
    assert [done.token_ids for done in answers[0]] == [done.token_ids for done in answers[1]]


def test_warm_prompts_keep_their_state(folder: Path, plain: Generator) -> None:
    """Other prompts take all pages and all other states in turn."""
    warm, tail, second, *others = prompts(150, 7, 70, *[200] * 12)
    options = OPTIONS | {"kv_cache_memory": 12 * 64 * plain.kv_bytes_per_token, "max_model_len": 400}
    with Generator.from_pretrained(folder, state_cache_memory=3 * plain.memory.state, **options) as generator:
        assert generator.warm_prompt(warm) == 128
        with pytest.raises(ContextLengthError, match=r"pinned prompts take too many snapshots of states.*half of 3"):
            generator.warm_prompt(second)
        generator.generate(others, GREEDY)
        done = generator.generate(warm + tail, GREEDY)
    assert done.cached_tokens == 128
    check(done, plain.generate(warm + tail, GREEDY))


@pytest.mark.parametrize("shift", [0, 100, 300])
def test_a_shorter_shared_beginning_is_found_by_64_of_64(folder: Path, shift: int) -> None:
    """vllm#45238: the only kept state lay in what prompts did not share, and 52 of 64 hits became none."""
    shared, *tails = prompts(661, *[40 + i % 9 for i in range(65)])
    one = SamplingParams(max_tokens=1, temperature=0)
    with Generator.from_pretrained(folder, max_num_batched_tokens=512, **OPTIONS) as generator:
        first, *others = ([*shared[: 661 - shift], *tail] for tail in tails)
        generator.generate(first, one)
        counts = [generator.generate(prompt, one).cached_tokens for prompt in others]
    shared_pages = (661 - shift) // 64 * 64
    assert all(count >= shared_pages for count in counts[1:]), "all after the first that leaves the known path"
    assert (counts[0] >= 512) == (shift <= 100), "the end of the first chunk"
