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
        for length in (63, 64, 65, 66, 127, 128, 129, 130, 191, 192, 193, 200):
            own = [random.Random(length).randrange(3, 211), *text[: length - 1]]
            for i, prompt in enumerate((own, own, own + tail, own[:-1] + tail)):
                found, expected = generator.generate(prompt, GREEDY), plain.generate(prompt, GREEDY)
                check(found, expected)
                if i == 1 and budget == 512:  # the prompt is one step
                    assert found.cached_tokens == (length - 1) // 64 * 64
                elif i == 1:  # the end of a step, or 64 tokens within one
                    assert length - 65 < found.cached_tokens < length


def test_what_follows_is_the_same_to_the_bit_if_chunks_are(folder: Path) -> None:
    """A prompt that is computed in the chunks of one that begins from a kept state."""
    (prompt,) = prompts(150)
    with Generator.from_pretrained(folder, max_num_batched_tokens=128, **OPTIONS) as generator:
        first, second = (generator.generate(prompt, GREEDY) for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 128)
    assert first.logprobs == second.logprobs


def test_shorter_and_shorter_beginnings(folder: Path, plain: Generator) -> None:
    """Shifts of 1 to 200 tokens. What is found lies within a page of what is shared, once a prompt has left it there."""
    (shared, tail) = prompts(261, 9)
    with Generator.from_pretrained(folder, state_cache_memory="64MiB", **OPTIONS) as generator:
        generator.generate(shared, GREEDY)
        for shift in (1, 2, 3, 5, 61, 63, 64, 65, 66, 100, 127, 129, 150, 195, 200):
            for attempt in range(2):
                prompt = [*shared[: 261 - shift], 3 + attempt, *tail]
                found = generator.generate(prompt, GREEDY)
                check(found, plain.generate(prompt, GREEDY))
            assert found.cached_tokens >= (261 - shift) // 64 * 64 - 1


def test_scores_begin_from_the_state_of_their_prompt(folder: Path, plain: Generator) -> None:
    """The first of four completions computes the prompt for all. The logits of the prompt's last token score the first one."""
    context, *tails = prompts(139, 5, 90, 1, 70)
    with Generator.from_pretrained(folder, **OPTIONS) as generator:
        found, expected = (own.score(context, tails) for own in (generator, plain))
        stats = generator.prefix_cache_stats
    assert sorted(own.cached_tokens for own in found) == [0, 128, 128, 128]
    for own, other in zip(found, expected, strict=True):
        assert [row.token_id for row in own.logprobs] == [row.token_id for row in other.logprobs]
        assert all(abs(a.logprob - b.logprob) < 2e-4 for a, b in zip(own.logprobs, other.logprobs, strict=True))
    assert stats is not None
    assert stats.snapshots == 1, "nothing is kept of completions"


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 2])
def test_triton(folder: Path, drafts: int) -> None:
    """The kernels read states that were copied, in slots that are used again; with drafts, also states that can be undone."""
    (text, tail) = prompts(68, 3)
    params, found = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0), []
    for impl, cached in (("eager", False), (["eager", "layers.[01].gated_delta_net=triton"], True)):
        options = OPTIONS | {"impl": impl, "max_num_seqs": 2, "prefix_cache": cached}
        proposer: Any = Mixed(most=drafts, right=0.5) if drafts and cached else None
        if proposer is not None:
            proposer.adaptive, proposer.known = False, {68: found[0][0].token_ids, 71: found[0][3].token_ids}
        with Generator.from_pretrained(folder, speculative=proposer, **options) as generator:
            found.append([generator.generate(prompt, params) for prompt in (text, tail, text, text + tail)])
    assert [done.cached_tokens for done in found[1]] == [0, 0, 64, 64]
    assert [done.token_ids for done in found[0]] == [done.token_ids for done in found[1]]


def test_warm_prompts_keep_their_state(folder: Path, plain: Generator) -> None:
    """Other prompts take all pages and all other states in turn."""
    warm, tail, second, *others = prompts(150, 7, 70, *[200] * 12)
    options = OPTIONS | {"kv_cache_memory": 12 * 64 * plain.kv_bytes_per_token, "max_model_len": 400}
    with Generator.from_pretrained(folder, state_cache_memory=3 * plain.memory.state, **options) as generator:
        assert generator.warm_prompt(warm) == 128
        with pytest.raises(ContextLengthError, match=r"pinned prompts take too many snapshots of states.*half of 3"):
            generator.warm_prompt(second)
        generator.generate(others, GREEDY)
        found = generator.generate(warm + tail, GREEDY)
    assert found.cached_tokens == 128
    check(found, plain.generate(warm + tail, GREEDY))


def test_a_prompt_of_2048_tokens_is_one_step(folder: Path, plain: Generator) -> None:
    """It was two: the second read all weights again for the few tokens behind the kept state. The state is the same."""
    (prompt, tail) = prompts(2048, 9)
    with Generator.from_pretrained(folder, max_num_batched_tokens=2048, **OPTIONS) as generator:
        runner: Any = generator._engine.engine._runner
        started, start = list[Any](), runner.start
        runner.start = lambda plan: started.append(plan) or start(plan)
        generator.generate(prompt, GREEDY)
        assert [len(plan.tokens) for plan in started if len(plan.tokens)] == [2048]
        assert [(own.sequence, own.offset) for plan in started for own in plan.snapshots] == [(0, 1984)]
        found = generator.generate(prompt[:2047] + tail, GREEDY)
    assert found.cached_tokens == 1984
    check(found, plain.generate(prompt[:2047] + tail, GREEDY))


@pytest.mark.parametrize("shift", [0, 100, 300])
def test_a_shorter_shared_beginning_is_found_by_64_of_64(folder: Path, shift: int) -> None:
    """vllm#45238: the only kept state lay in what prompts did not share, and 52 of 64 hits became none."""
    shared, *tails = prompts(661, *[40 + i % 9 for i in range(65)])
    one = SamplingParams(max_tokens=1, temperature=0)
    with Generator.from_pretrained(folder, max_num_batched_tokens=512, **OPTIONS) as generator:
        first, *others = ([*shared[: 661 - shift], *tail] for tail in tails)
        generator.generate(first, one)
        found = [generator.generate(prompt, one).cached_tokens for prompt in others]
    shared_pages = (661 - shift) // 64 * 64
    assert all(count >= shared_pages for count in found[1:]), "all after the first that leaves the known path"
    assert (found[0] >= 512) == (shift <= 100), "the end of the first chunk"
