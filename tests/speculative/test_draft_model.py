"""Drafts by multi-token prediction: equal to the format's public description, and without effect on any token, in fp32.

Catches halves of `fc` that are exchanged, the target's state before the final norm, norms without the 1, a row of another
position, pages that a prompt or a chunk of it leaves empty, rows of wrong drafts that are read again, and a slot that keeps the
state of an earlier sequence. `support/mtp.py` has the reference.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_drafts import PARAMS
from support.hybrids import prompts
from support.mtp import Reference, agree, make
from support.tiny import add_tokenizer

from minirt import Generator, SamplingParams, StructuredOutputsParams
from minirt.kernels.step.table import NEXT_TOKENS, NUM_CACHED, NUM_NEXT
from minirt.speculative.options import SpeculativeOptions

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4}
MEMORY = 1 << 25
ALL_ATTENTION = {"layer_types": ["full_attention"] * 3}


def mtp(drafts: int = 3, **options: Any) -> SpeculativeOptions:
    return SpeculativeOptions(method="mtp", num_speculative_tokens=drafts, **{"adaptive": False, **options})


def load(folder: Path, speculative: Any = None, lookahead: int = 0, **options: Any) -> Generator:
    generator = Generator.from_pretrained(folder, speculative=speculative, **{"kv_cache_memory": MEMORY, **OPTIONS, **options})
    generator._engine.engine._lookahead = lookahead
    return generator


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, temperature=0)


def watch(generator: Generator) -> list[tuple[int, int, int, list[int]]]:
    """From now on, each proposal: (prompt length, cached tokens, next token, drafts)."""
    proposer, seen = generator._engine.engine._runner.proposer, list[tuple[int, int, int, list[int]]]()
    propose = proposer.propose

    def spy(table: Any, columns: Any, rows: Any, *rest: Any) -> None:
        propose(table, columns, rows, *rest)
        for slot in rows.slots.tolist():
            if slot >= 0 and (count := int(table[slot, NUM_NEXT])) > 0:
                row = table[slot].tolist()
                seen.append((row[3], row[NUM_CACHED], row[NEXT_TOKENS], row[NEXT_TOKENS + 1 : NEXT_TOKENS + count]))

    proposer.propose = spy  # type: ignore[method-assign]
    return seen


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose drafts are right now and then: a hybrid, and one with attention alone."""
    made = {}
    for name, changes in (("hybrid", {}), ("attention", ALL_ATTENTION)):
        made[name] = tmp_path_factory.mktemp(name)
        make(made[name], **changes)
        agree(made[name], 0.12)
    return made


# Case of `make`, its changes, drafts, tokens of the largest step, ids of drafts, share of `agree` (0: drafts are seldom right).
PARITY = {
    "one draft": ("dense", {}, 1, 512, 0, 0.0),
    "two drafts, tied, long chunks": ("dense", {"tie_word_embeddings": True}, 2, 64, 0, 0.0),
    "three drafts, chunks of a few tokens": ("dense", {"num_key_value_heads": 4}, 3, 7, 0, 0.1),
    "four drafts of 150 ids, with attention alone": ("dense", ALL_ATTENTION, 4, 31, 150, 0.1),
    "mixtures": ("qwen3_5_moe", {}, 3, 40, 0, 0.0), "mixtures of another packing": ("qwen3_next", {}, 2, 512, 97, 0.1),
}  # fmt: skip


@pytest.mark.parametrize("case", PARITY)
def test_drafts_are_the_reference_s(case: str, tmp_path: Path) -> None:
    """Ragged batches, prompts in one step and in chunks, texts over several pages; right and wrong drafts before them."""
    kind, changes, drafts, budget, vocab, share = PARITY[case]
    model, texts = make(tmp_path, kind, **changes), prompts(1, 2, 61, 30, 130)
    model = agree(tmp_path, share) if share else model
    reference = Reference(tmp_path, model, list(range(vocab or 211)))
    counts, last = [20, 30, 12, 25, 9], dict[int, int]()
    with load(tmp_path, mtp(drafts, draft_vocab_size=vocab), max_num_batched_tokens=budget) as generator:
        seen = watch(generator)
        done = generator.generate(texts, [greedy(count) for count in counts])
        stats = generator.draft_stats
        assert not share or 5 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert {length for length, *_ in seen} == {len(text) for text in texts}
    for prompt_len, cached, token, proposed in seen:
        i = next(i for i, text in enumerate(texts) if len(text) == prompt_len)
        tokens = texts[i] + done[i].token_ids
        assert tokens[cached] == token
        room = len(texts[i]) + counts[i] - 2 - cached
        assert len(proposed) == max(0, min(drafts, room, 1 + -cached % 64))
        last[i] = max(last.get(i, 0), cached)
        if proposed and (cached < prompt_len + 8 or cached % 64 in (0, 1, 62, 63)):  # transformers takes most of the time
            reference.check(tokens[: cached + 1], proposed)
    assert share or last == {i: len(text) + count - 2 for i, (text, count) in enumerate(zip(texts, counts, strict=True))}


KINDS = ["greedy", "sampled", "hot", "frequency", "bias", "min_tokens", "stops", "logprobs"]


@pytest.mark.parametrize(("kind", "lookahead"), [(kind, i % 2) for i, kind in enumerate(KINDS)])
def test_the_same_text_with_drafts_and_without(kind: str, lookahead: int, folders: dict[str, Path]) -> None:
    """Five sequences in four slots. Some drafts are right, and some are not."""
    bias = {"logit_bias": {3: 4.0, 90: 3.0, 210: 2.0}} if kind == "bias" else {}
    given = {"max_tokens": 30, "seed": 11, "ignore_eos": "stop_token_ids" not in PARAMS[kind], **PARAMS[kind], **bias}
    params, texts = SamplingParams(**given), prompts(9, 30, 64, 1, 100)
    answers = []
    for speculative in (None, mtp()):
        with load(folders["hybrid"], speculative, lookahead) as generator:
            done = generator.generate(texts, params)
            answers.append([(one.token_ids, one.finish_reason, [row.token_id for row in one.logprobs or ()]) for one in done])
            if speculative is not None:
                stats = generator.draft_stats
                assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert answers[0] == answers[1]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_right_drafts_are_accepted_more_often_at_a_temperature(lookahead: int, folders: dict[str, Path]) -> None:
    """Drafts with the noise of their verification. Catches drafts that are the most probable tokens, of which few are drawn."""
    params, texts = SamplingParams(max_tokens=60, ignore_eos=True, temperature=2.0, seed=3), prompts(5, 9, 20, 31)
    lengths = []
    for noisy in (True, False):
        with load(folders["hybrid"], mtp(2), lookahead) as generator:
            if not noisy:
                proposer = generator._engine.engine._runner.proposer
                propose = proposer.propose

                def cold(table: Any, *rest: Any, propose: Any = propose) -> None:
                    kept = table[:, 6].clone()
                    table[:, 6] = 0
                    propose(table, *rest)
                    table[:, 6] = kept

                proposer.propose = cold  # type: ignore[method-assign]
            done = generator.generate(texts, params)
            stats = generator.draft_stats
            lengths.append((stats.num_accepted_tokens / stats.num_draft_tokens, done))
    (with_noise, first), (without, second) = lengths
    assert [done.token_ids for done in first] == [done.token_ids for done in second]
    assert with_noise > without + 0.15


@pytest.mark.parametrize("kind", ["hybrid", "attention"])
def test_a_draft_model_without_memory(kind: str, folders: dict[str, Path]) -> None:
    """Some passes run out of memory, those over prompts among them. The requests go on, with fewer drafts or none."""
    texts = prompts(50, 3, 64)
    with load(folders[kind]) as generator:
        expected = [generator.generate(text, greedy(40)).token_ids for text in texts]
    with load(folders[kind], mtp()) as generator:
        proposer, passes = generator._engine.engine._runner.proposer, iter(range(10_000))
        model = proposer._model

        def scarce(*arguments: Any) -> torch.Tensor:
            if next(passes) % 5 in (0, 3):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return model(*arguments)

        proposer._model = scarce
        proposer._states = lambda count: torch.empty(count, model.config.hidden_size, dtype=model.dtype)
        with pytest.warns(RuntimeWarning, match="no memory left for drafts"):
            assert [done.token_ids for done in generator.generate(texts, greedy(40))] == expected
        assert generator.draft_stats.num_draft_tokens > 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_end_of_a_prompt_has_as_many_tokens_as_a_step_with_drafts(lookahead: int, folders: dict[str, Path]) -> None:
    """vllm#55766: a prompt's last chunk of 1 + k tokens went to the CUDA graph that verifies drafts, with stale buffers.

    Chunks of 4, 5 and 6 tokens remain of prompts, alone and beside sequences with drafts.
    """
    texts = [prompts(length, seed=length)[0] for length in (20, 35, 36, 37, 50, 66)]
    with load(folders["hybrid"]) as generator:
        expected = [generator.generate(text, greedy(25)).token_ids for text in texts]
    with load(folders["hybrid"], mtp(4), lookahead, max_num_batched_tokens=16) as generator:
        assert [generator.generate(text, greedy(25)).token_ids for text in texts] == expected
        assert [done.token_ids for done in generator.generate(texts, greedy(25))] == expected


@pytest.mark.parametrize("lookahead", [0, 1])
def test_slots_change_hands(lookahead: int, folders: dict[str, Path]) -> None:
    """vllm PR 53919: a state was taken back by another request's number of accepted tokens.

    Many short requests come and go in three slots; each has other drafts that are right.
    """
    texts = prompts(*([3, 17, 64, 5, 33] * 5), seed=2)
    params = [SamplingParams(max_tokens=3 + 5 * i % 17, ignore_eos=True, temperature=i % 2, seed=i) for i in range(len(texts))]
    with load(folders["hybrid"], max_num_seqs=1) as generator:
        expected = [generator.generate(text, each).token_ids for text, each in zip(texts, params, strict=True)]
    with load(folders["hybrid"], mtp(), lookahead, max_num_seqs=3) as generator:
        assert [done.token_ids for done in generator.generate(texts, params)] == expected
        assert generator.draft_stats.num_accepted_tokens > 0


def test_a_grammar_beside_drafts(folders: dict[str, Path], tmp_path: Path) -> None:
    """Masks change the draws; drafts do not know them."""
    folder = tmp_path / "model"
    make(folder)
    agree(folder, 0.12)
    add_tokenizer(folder)
    word = SamplingParams(max_tokens=24, seed=1, structured_outputs=StructuredOutputsParams(regex="[abc]{3,9}x"))
    texts = prompts(5, 40, 66)
    with load(folder) as generator:
        expected = [generator.generate(text, word).text for text in texts]
    with load(folder, mtp()) as generator:
        assert [done.text for done in generator.generate(texts, word)] == expected


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_on_a_gpu(graphs: bool, tmp_path: Path) -> None:
    """The same text in fp32, with CUDA graphs and without; drafts are the reference's."""
    make(tmp_path, head_dim=64, linear_key_head_dim=64, linear_value_head_dim=64)
    reference, texts, params = Reference(tmp_path, agree(tmp_path, 0.12)), prompts(9, 64, 1, 100), greedy(40)
    options: dict[str, Any] = {"device": "cuda", "impl": "triton", "cuda_graphs": graphs, "warm_up": "full" if graphs else "none"}
    with load(tmp_path, lookahead=1, **options) as generator:
        expected = [done.token_ids for done in generator.generate(texts, params)]
    with load(tmp_path, mtp(), lookahead=1, **options) as generator:
        seen = watch(generator)  # with CUDA graphs, only steps that have none
        assert [done.token_ids for done in generator.generate(texts, params)] == expected
        assert 0 < generator.draft_stats.num_accepted_tokens < generator._engine.engine.stats.drafts.num_draft_tokens
    for prompt_len, cached, token, drafts in seen:
        i = next(i for i, text in enumerate(texts) if len(text) == prompt_len)
        tokens = texts[i] + expected[i]
        if tokens[cached] == token:  # the host reads the table one step later
            reference.check(tokens[: cached + 1], drafts)


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_nothing_but_numbers_of_its_own_pages(kv: str, folders: dict[str, Path]) -> None:
    """Pages hold NaN first. Catches a draft that reads a row which was not written."""
    with load(folders["hybrid"], mtp(), kv_cache_dtype=kv) as generator:
        for layer in generator._cache.layers:
            for tensor in layer.tensors():
                if tensor.is_floating_point():
                    tensor.copy_(torch.full_like(tensor, torch.nan, dtype=torch.float32))
        proposer = generator._engine.engine._runner.proposer
        model, finite = proposer._model, list[bool]()

        def call(batch: Any, cache: Any) -> Any:
            logits = model(batch, cache)
            finite.append(bool(logits.isfinite().all()))
            return logits

        call.config, call.dtype, call.device = model.config, model.dtype, model.device  # type: ignore[attr-defined]
        proposer._model = call
        generator.generate(prompts(3, 64, 70), greedy(40))
    assert finite
    assert all(finite)
