"""Masks, biases, penalties and log-probabilities against transformers' processors, or formulas in fp64; and draws from them.

Catches: counts that include the prompt where they should not, a penalty with the wrong sign for negative logits, a bad word that
is forbidden one token early or late, stop tokens that are allowed one token early.
"""


import numpy as np
import pytest
import torch
from transformers import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from minirt.engine.execute.logits_processors import LogitsProcessors
from minirt.sampling_params import SamplingParams, resolve
from minirt.step.rules import Rules

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
