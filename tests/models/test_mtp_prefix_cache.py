"""Multi-token prediction beside the prefix cache of a hybrid (tiny Qwen3.5, fp32): each of them changes nothing that follows.

Each case is compared with a model that has neither: the same tokens, and log-probabilities up to rounding, which show a state
with a token too many or too few. Catches copies of pages without the draft model's rows, snapshots without what undoes drafts
(`gates`, `folded`), a snapshot of a token that was only drafted, pages of drafts that another sequence has by then.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from speculative.test_draft_model import MEMORY, load, mtp, watch
from support.hybrids import check, prompts
from support.mtp import Reference, agree, make

from minirt import Generator, SamplingParams

COUNT = 8  # tokens of an answer


def params(count: int = COUNT, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": 0, **options})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp")
    make(path)
    agree(path, 0.1)
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Generator]:
    with load(folder, prefix_cache=False) as generator:
        yield generator


def both(folder: Path, lookahead: int, drafts: int = 3, **options: Any) -> Generator:
    """A model with drafts and a prefix cache, whose pages and states hold NaN first."""
    generator = load(folder, mtp(drafts), lookahead, **{"state_cache_memory": MEMORY, **options})
    for layer in generator._cache.layers:  # type: ignore[union-attr]
        for tensor in layer.tensors():
            tensor.fill_(torch.nan if tensor.is_floating_point() else 7)
    return generator


@pytest.mark.parametrize("lookahead", [0, 1])
def test_repeated_prompts_forks_and_a_conversation(lookahead: int, folder: Path, plain: Generator) -> None:
    """Prompts that end around a page, each twice, then forks of them; each answer is a part of the next turn's prompt."""
    (base, tail) = prompts(140, 9)
    with both(folder, lookahead, max_num_batched_tokens=96) as generator:
        for length in (64, 100, 129):
            prompt = [3 + length, *base[: length - 1]]
            for turn, tokens in enumerate((prompt, prompt, [*prompt[:-2], *tail], [*prompt, *tail])):
                done, expected = generator.generate(tokens, params()), plain.generate(tokens, params())
                check(done, expected)
                if turn == 1:
                    assert done.cached_tokens == {64: 0, 100: 96, 129: 96}[length], "the end of a step, or 64 tokens of one"
            for _ in range(2):
                tokens = [*tokens, *done.token_ids, *tail[:3]]
                done, expected = generator.generate(tokens, params()), plain.generate(tokens, params())
                check(done, expected)
                if len(tokens) > 140:
                    assert done.cached_tokens >= len(tokens) - 3 - COUNT - 64
        stats = generator.draft_stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_drafts_behind_copied_pages_are_the_reference_s(folder: Path) -> None:
    """The rows of the draft model come along: behind a hit in a page, and at its end, drafts are those without a hit."""
    reference = Reference(folder, agree_model(folder))
    with both(folder, 0) as generator:
        seen = watch(generator)
        for text in prompts(65, 100, 129):
            answer = generator.generate(text, params()).token_ids
            for asked in (text, [*text, *answer, 5, 6]):
                seen.clear()
                done = generator.generate(asked, params(3))
                assert done.cached_tokens >= 64
                tokens = [*asked, *done.token_ids]
                assert seen
                for _, cached, token, drafts in seen:
                    assert tokens[cached] == token
                    reference.check(tokens[: cached + 1], drafts)


def agree_model(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_few_pages_few_states_and_requests_that_are_dropped(lookahead: int, folder: Path, plain: Generator) -> None:
    """Preemptions, evictions of pages and of states, streams that are closed with drafts in flight, several samples."""
    texts = prompts(100, 90, 40, seed=4)
    many = [[*texts[i % 3], *texts[(i + 1) % 3][: 17 * i % 70], i + 3] for i in range(7)]
    expected = plain.generate(many, params(30))
    options = {"kv_cache_memory": 9 * 64 * (plain.kv_bytes_per_token * 3 // 2 + 1), "max_num_seqs": 3, "max_model_len": 256}
    with both(folder, lookahead, state_cache_memory=plain.memory.state * 7, **options) as generator:
        for _ in range(2):
            for i in (0, 5):
                with closing(generator.stream(many[i], params(40))) as pieces:
                    for _ in range(1 + i):
                        next(pieces)
            for done, wanted in zip(generator.generate(many, params(30)), expected, strict=True):
                check(done, wanted)
        stats = generator.prefix_cache_stats
        assert stats is not None
        assert min(stats.hits, stats.evictions, stats.snapshot_evictions, generator._engine.engine.stats.num_preemptions) > 0
        sampled = params(9, temperature=1.0, seed=4, n=3)
        for done, wanted in zip(*(model.generate([many[5]], sampled)[0].outputs for model in (generator, plain)), strict=True):
            check(done, wanted)


def test_the_memory_plan_counts_all_of_it(folder: Path, plain: Generator) -> None:
    """The pages of the draft model, and in each snapshot what undoes drafts."""
    with load(folder, mtp(), state_cache_memory="1MiB") as generator:
        memory, cache = generator.memory, generator._cache
        assert memory.page == plain.memory.page * 2, "one layer with pages, and the draft model's"
        assert memory.state > plain.memory.state
        assert memory.snapshots == (1 << 20) // memory.state
        assert cache is not None
        assert cache.nbytes == memory.pages * memory.page + (memory.max_num_seqs + memory.snapshots) * memory.state
        assert len(cache._states) == 2 * 4
        assert len(cache._pages) == 2 * 2
