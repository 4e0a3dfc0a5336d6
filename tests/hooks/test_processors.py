"""Logits processors of requests. Catches one that sees other tokens or logits than its own row's, that changes another row or the
model's log-probabilities, that overrules a mask, that is not asked for a draft, and an error that ends more than its request."""

import pytest
import torch

from minirt import Generator, SamplingParams
from minirt.errors import InputError

PROMPTS = [[1, 5, 9], [2] * 40, [3, 4], [7, 8, 7, 8, 7, 8, 7]]


@pytest.fixture(scope="module")
def plain():
    with Generator.from_pretrained(dtype="float32", prefix_cache=False) as generator:
        yield generator


def hashed(ids, logits):
    """Forbids a fifth of all tokens, which others for each sequence."""
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(int((ids * torch.arange(1, len(ids) + 1)).sum())))
    return logits.index_fill(0, order[: len(logits) // 5], float("-inf"))


def by_hand(generator, prompt, count, function):
    """Greedy decoding from the logits of the whole sequence, without the engine's draws."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(function(torch.tensor(ids), generator.logits(ids)[-1].float()).argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("options", [
    {}, {"speculative": "ngram:3"}, {"max_num_seqs": 2, "max_num_batched_tokens": 16}, {"impl": "eager", "max_num_seqs": 3},
], ids=["plain", "drafts", "chunks", "eager"])  # fmt: skip
def test_tokens_are_those_of_the_changed_logits(options, plain):
    """Beside requests without processors, whose tokens stay."""
    greedy = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    expected = [by_hand(plain, prompt, 12, hashed) for prompt in PROMPTS]
    unchanged = [by_hand(plain, prompt, 12, lambda ids, logits: logits) for prompt in PROMPTS]
    assert all(a != b for a, b in zip(expected, unchanged, strict=True)), "the function changes something"
    with Generator.from_pretrained(dtype="float32", **options) as generator:
        params = [SamplingParams(**greedy, logits_processors=hashed), SamplingParams(**greedy)] * len(PROMPTS)
        completions = generator.generate([prompt for prompt in PROMPTS for _ in range(2)], params)
    assert [completion.token_ids for completion in completions[::2]] == expected
    assert [completion.token_ids for completion in completions[1::2]] == unchanged


def test_several_are_applied_in_order_and_masks_and_biases_come_after(plain):
    calls = []

    def zero(ids, logits):
        calls.append(ids.tolist())
        return logits.zero_()  # in place, too

    def prefer(ids, logits):
        logits[[11, 12]] = torch.tensor([5.0, 50.0])
        return logits

    options = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, "logprobs": 0}
    first = plain.generate([1, 2, 3], SamplingParams(**options, logits_processors=[zero, prefer]))
    assert first.token_ids == [12] * 3
    assert calls == [[1, 2, 3], [1, 2, 3, 12], [1, 2, 3, 12, 12]]
    expected = plain.logits([1, 2, 3, 12, 12])[2:].float().log_softmax(-1)[:, 12]
    assert torch.allclose(torch.tensor([entry.logprob for entry in first.logprobs]), expected, atol=1e-4), "those of the model"
    masked = SamplingParams(**options, logits_processors=[zero, prefer], allowed_token_ids=[11, 30])
    assert plain.generate([1, 2, 3], masked).token_ids == [11] * 3
    biased = SamplingParams(**options, logits_processors=[prefer, zero], logit_bias={40: 1.0})
    assert plain.generate([1, 2, 3], biased).token_ids == [40] * 3


def test_with_a_grammar_and_several_samples(plain):
    seen = []

    def note(ids, logits):
        seen.append(len(ids))
        return logits

    spec = {"choice": ["yes", "no"]}
    choice = SamplingParams(max_tokens=20, structured_outputs=spec, logits_processors=note, temperature=1.0, n=3)
    texts = [sample.text for sample in plain.generate("Is it?", choice)]
    assert set(texts) <= {"yes", "no"}
    assert len(seen) >= 2 * len(texts)


def broken(ids, logits):
    if len(ids) > 5:
        raise ValueError("a user's fault")
    return logits


@pytest.mark.parametrize(("function", "message"), [
    (broken, "raised an exception.*ValueError: a user's fault"), (lambda ids, logits: logits[:-1], "returned something else"),
    (lambda ids, logits: None, "returned something else.*NoneType"),
])  # fmt: skip
def test_an_error_ends_its_request_only(function, message, plain):
    greedy = {"temperature": 0.0, "max_tokens": 9, "ignore_eos": True}
    params = [SamplingParams(**greedy), SamplingParams(**greedy, logits_processors=function), SamplingParams(**greedy)]
    results = dict(plain.completions(PROMPTS[:3], params))
    with pytest.raises(InputError, match=message):
        raise results[1].error
    for place in (0, 2):
        assert results[place].token_ids == by_hand(plain, PROMPTS[place], 9, lambda ids, logits: logits)


def test_nan_from_a_processor_ends_its_request(plain):
    params = SamplingParams(max_tokens=2, logits_processors=lambda ids, logits: logits * float("nan"))
    with pytest.raises(Exception, match="NaN"):
        plain.generate([1, 2], params)


@pytest.mark.parametrize("value", [3, "argmax", [hashed, None]])
def test_what_is_no_function_is_refused(value):
    with pytest.raises(InputError, match=r"SamplingParams\.logits_processors.*expected (functions|module:name)"):
        SamplingParams(logits_processors=value)
    with pytest.raises(InputError, match="max_tokens of 1 or more"):
        SamplingParams(max_tokens=0, prompt_logprobs=1, logits_processors=hashed)
