"""Masks, biases, penalties and log-probabilities against transformers' processors, or formulas in fp64; and draws from them.

Catches: counts that include the prompt where they should not, a penalty with the wrong sign for negative logits, a bad word that
is forbidden one token early or late, stop tokens that are allowed one token early.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from minirt.engine.logits_processors import LogitsProcessors, Rules
from minirt.engine.sampler import SamplingBatch, sample
from minirt.sampling_params import SamplingParams, resolve

V, PROMPT, GENERATED = 37, [3, 5, 5, 36, 0], [7, 5, 7, 7, 9, 11]


def processed(logits, rules, generated=GENERATED, mask=None, known=None):
    """Processed logits of one row. Of `generated`, the slot is filled with `known`; the device counts the others."""
    known = len(generated) if known is None else known
    processors = LogitsProcessors(3, V, 100, torch.device("cpu"))
    processors.fill(2, rules, PROMPT, generated[:known])
    row = torch.tensor([2], dtype=torch.int32)
    for step in range(known, len(generated)):
        processors.record(torch.tensor([generated[step]]), row, torch.tensor([step]))
    return processors.process(logits[None], row, torch.tensor([len(generated)]), mask, any_bias=True, any_ban=True)[0]


def some_logits(seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=V).astype(np.float32) * 2)


@pytest.mark.parametrize("known", [0, 2, 6])
@pytest.mark.parametrize("penalty", [1.3, 0.4])
def test_repetition_is_that_of_transformers(penalty, known):
    logits = some_logits()
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([PROMPT + GENERATED]), logits[None].clone())[0]
    torch.testing.assert_close(processed(logits, Rules(repetition=penalty), known=known), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("known", [0, 3, 6])
def test_frequency_and_presence_count_generated_tokens(known):
    logits = some_logits()
    expected = logits.double()
    for token, count in ((7, 3), (5, 1), (9, 1), (11, 1)):
        expected[token] -= count * 0.3 - 0.8
    found = processed(logits, Rules(frequency=0.3, presence=-0.8), known=known)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_penalties_come_after_each_other_as_in_vllm():
    """Repetition divides or multiplies the biased logit; frequency and presence are subtracted from that."""
    logits = some_logits()
    expected = logits.double()
    expected[7] += 1.5
    for token in {*PROMPT, *GENERATED}:
        expected[token] = expected[token] / 1.7 if expected[token] > 0 else expected[token] * 1.7
    for token in set(GENERATED):
        expected[token] -= 0.4 * GENERATED.count(token) + 0.25
    found = processed(logits, Rules(0.25, 0.4, 1.7, {7: 1.5}))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_biases_are_those_of_transformers():
    logits, bias = some_logits(), {0: 2.5, 36: -100.0, 12: 1e-3}
    expected = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    expected = expected(torch.tensor([GENERATED]), logits[None].clone())[0]
    torch.testing.assert_close(processed(logits, Rules(bias=bias)), expected)


@pytest.mark.parametrize("known", [0, 5, 6])
@pytest.mark.parametrize("generated", [GENERATED, [], [9], [9, 11], [11, 9], [9, 11, 9, 11]], ids=str)
def test_bad_words_are_those_of_transformers(generated, known):
    """transformers looks at the prompt, too; given the generated tokens alone, it does what vLLM does."""
    words = [[4], [11, 2], [9, 11, 3], [7, 11, 8], [11, 9, 11, 36], [7, 7, 9, 11, 12], [0], [9, 11, 3]]
    logits = some_logits()
    ids = torch.tensor([generated], dtype=torch.int64)
    expected = NoBadWordsLogitsProcessor(words, eos_token_id=99)(ids, logits[None].clone())[0]
    rules = Rules(bad_words=tuple(map(tuple, words)))
    found = processed(logits, rules, generated, known=min(known, len(generated)))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("count", range(5))
def test_end_tokens_are_forbidden_before_min_tokens(count):
    logits, generated = some_logits(), GENERATED[:count]
    ids = torch.tensor([PROMPT + generated])
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, [2, 36], device="cpu")
    expected = processor(ids, logits[None].clone())[0]
    torch.testing.assert_close(processed(logits, Rules(min_tokens=3, end_ids=(2, 36)), generated), expected)


def test_allowed_tokens_and_a_grammars_mask():
    logits = some_logits()
    bits = np.zeros(64, dtype=np.uint8)
    bits[[0, 5, 31, 32, 36]] = 1
    mask = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32).copy())[None]
    both = processed(logits, Rules(allowed=(5, 6, 36)), mask=mask)
    assert torch.isfinite(both).nonzero().flatten().tolist() == [5, 36]
    assert torch.isfinite(processed(logits, Rules(bias={5: 1.0}), mask=mask)).nonzero().flatten().tolist() == [0, 5, 31, 32, 36]
    assert torch.isfinite(processed(logits, Rules(allowed=(31, 32)))).nonzero().flatten().tolist() == [31, 32]
    assert both[36] == logits[36]


def test_a_row_without_rules_is_unchanged_and_a_reused_slot_is_clean():
    processors = LogitsProcessors(2, V, 100, torch.device("cpu"))
    logits = torch.stack([some_logits(1), some_logits(2)])
    processors.fill(0, Rules(1.0, 1.0, 2.0, {1: 5.0}, (1, 2), ((3,), (7, 1)), 99, (5,)), PROMPT, GENERATED)
    processors.fill(0, Rules(presence=0.5), [1], [2])
    rows, step = torch.tensor([0, -1], dtype=torch.int32), torch.tensor([1, 1])
    found = processors.process(logits, rows, step, any_bias=False, any_ban=False)
    expected = logits.clone()
    expected[0, 2] -= 0.5
    torch.testing.assert_close(found, expected)


PARAMETERS = {
    "presence": Rules(presence=0.9), "frequency": Rules(frequency=0.5), "repetition": Rules(repetition=1.6),
    "bias": Rules(bias={0: 1.5, 8: -1.0}), "allowed": Rules(allowed=(0, 2, 5, 7, 9)),
    "bad words": Rules(bad_words=((3,), (11, 7))), "min tokens": Rules(min_tokens=9, end_ids=(1, 5)),
    "all": Rules(0.3, 0.2, 1.2, {7: 1.0}, tuple(range(20)), ((11, 2),), 9, (1,)),
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_draws_have_the_exact_distribution(name):
    """20,000 draws, against probabilities in fp64."""
    rules, logits = PARAMETERS[name], some_logits(5) * 0.5
    z = logits.double().numpy().copy()
    forbidden = {*(rules.end_ids if rules.min_tokens > len(GENERATED) else ())}
    forbidden |= {word[-1] for word in rules.bad_words if list(word[:-1]) == GENERATED[len(GENERATED) - len(word) + 1 :]}
    for token in range(V):
        z[token] += rules.bias.get(token, 0)
        if token in PROMPT or token in GENERATED:
            z[token] = z[token] / rules.repetition if z[token] > 0 else z[token] * rules.repetition
        z[token] -= rules.frequency * GENERATED.count(token) + rules.presence * (token in GENERATED)
        if token in forbidden or (rules.allowed is not None and token not in rules.allowed):
            z[token] = -math.inf
    p = np.exp((z - z.max()) / 0.8)
    wanted = 20_000 * p / p.sum()
    out = processed(logits, rules)
    effective = resolve(SamplingParams(temperature=0.8, seed=13), None)
    counts = np.zeros(V)
    for start in range(0, 20_000, 2000):
        batch = SamplingBatch.build([(effective, step) for step in range(start, start + 2000)])
        counts += np.bincount(sample(out.expand(2000, -1), batch).numpy(), minlength=V)
    assert counts[wanted == 0].sum() == 0
    frequent = wanted >= 5
    cells = [*zip(counts[frequent], wanted[frequent], strict=True), (counts[~frequent].sum(), wanted[~frequent].sum())]
    observed, expected = zip(*(cell for cell in cells if cell[1] > 0), strict=True)
    assert stats.chisquare(observed, expected).pvalue > 1e-3
    greedy = SamplingBatch.build([(resolve(SamplingParams(temperature=0), None), 0)])
    assert sample(out[None], greedy).item() == int(np.argmax(z))


def test_rules_of_a_request():
    """The end tokens are those of the model and of the request; without min_tokens nothing is asked of them."""

    def of(**options):
        return Rules.of(resolve(SamplingParams(**options), None), (2,), [[3, 4]] if "bad_words" in options else [])

    for nothing in ({}, {"temperature": 1.0, "top_k": 3}, {"stop_token_ids": [5]}, {"repetition_penalty": 1.0}, {"logprobs": 3}):
        assert of(**nothing) is None
    assert of(min_tokens=3, ignore_eos=True) == Rules(min_tokens=3, end_ids=(2,))
    assert set(of(min_tokens=3, stop_token_ids=[2, 9]).end_ids) == {2, 9}
    assert of(bad_words="x") == Rules(bad_words=((3, 4),))
    penalties = {"presence_penalty": 1, "frequency_penalty": 2, "repetition_penalty": 3}
    assert of(**penalties, logit_bias={1: 4}, allowed_token_ids=[1, 8]) == Rules(1, 2, 3, {1: 4}, (1, 8))
