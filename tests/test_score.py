"""`Generator.score` and prompts that are only scored, compared with transformers in fp32 and the tokenizers library.

Catches a completion that is tokenized apart from its prompt, scores that are off by one token or belong to another pair, a
completion that counts as greedy because two logits are nearly equal, and scores that depend on batch, chunks or prefix cache.
"""

import asyncio
import math
import warnings

import pytest
import torch

from minirt import AsyncGenerator, Generator, SamplingParams, Score
from minirt.engine.request import TokenLogprobs
from minirt.errors import ContextLengthError, InputError, NumericsError

CACHE = 1 << 22
LONG = "the quick brown fox jumps over the lazy dog. " * 6
PAIRS = [
    ("the quick brown", " fox jumps"), ("the quick brown ", "fox jumps"), ("hello", "!"), ("", "the fox"), ("  ", "the fox"),
    ("the capital of France is", " Paris; what"), (LONG, "the cat"), (LONG, "a"), (LONG + "\n\n", "and the dog"),
    ("2 + 2 =", " 4"), ("über", " straße"),
]  # fmt: skip


@pytest.fixture(scope="module")
def generator(folder):
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=CACHE) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def reference(folder):
    """(prompt tokens, completion tokens) → log-probabilities of the completion, and whether each is the argmax."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def score(prompt, completion):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0].double()
        rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        return [row[token].item() for row, token in zip(rows, completion, strict=True)], rows.argmax(-1).tolist() == completion

    return score


@pytest.fixture(scope="module")
def encode(folder):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids


def test_scores_are_those_of_transformers(generator, reference, encode):
    scores = generator.score([prompt for prompt, _ in PAIRS], [completion for _, completion in PAIRS])
    for score, (prompt, completion) in zip(scores, PAIRS, strict=True):
        count, whole = len(encode(prompt.rstrip())), encode(prompt + completion)
        assert (score.prompt_token_ids, score.token_ids) == (whole[:count], whole[count:]), (prompt, completion)
        exact, greedy = reference(whole[:count], whole[count:])
        assert [row.token_id for row in score.logprobs] == whole[count:]
        assert [row.logprob for row in score.logprobs] == pytest.approx(exact, abs=1e-4)
        assert score.logprob == pytest.approx(math.fsum(exact), abs=1e-3)
        assert score.is_greedy == greedy
        alone = generator.score(prompt, completion)
        assert (alone.token_ids, alone.logprob) == (score.token_ids, pytest.approx(score.logprob, abs=1e-4))


def test_texts_are_encoded_together(generator, encode):
    """The tokens of the parts are not those of the whole: a beginning-of-sequence token, and a space at the end of the prompt."""
    prompt, completion = "the quick brown ", "fox jumps"
    assert encode(prompt) + encode(completion) != encode(prompt + completion)
    score = generator.score(prompt, completion)
    assert score.prompt_token_ids + score.token_ids == encode(prompt + completion)
    assert generator.tokenizer.decode(score.token_ids) == " fox jumps"


def test_a_token_that_spans_both_is_said(generator, encode):
    """It is none of the completion alone, and none of the prompt alone."""
    prompt, completion = "the qui", "ck brown fox"
    count, whole = len(encode(prompt)), encode(prompt + completion)
    assert whole[:count] != encode(prompt)
    with pytest.warns(UserWarning, match="joins the end of the prompt.*'the qui' and 'ck brown fox'"):
        score = generator.score(prompt, completion)
    assert (score.prompt_token_ids, score.token_ids) == (whole[:count], whole[count:])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generator.score("the quick", " brown fox")


def test_what_greedy_decoding_gives_is_greedy(generator):
    for prompt in ("hello", LONG):
        done = generator.generate(prompt, SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, logprobs=0))
        score = generator.score(done.prompt_token_ids, done.token_ids)
        assert score.is_greedy
        assert score.logprob == pytest.approx(done.cumulative_logprob, abs=1e-4)
        assert not generator.score(done.prompt_token_ids, [*done.token_ids[:-1], (done.token_ids[-1] + 1) % 211]).is_greedy
    tie = TokenLogprobs(7, -0.7, 1, ((5, -0.7),))  # of equal logits, greedy decoding takes the lowest id
    assert not Score([1], [7], [tie]).is_greedy


def test_forms_of_prompts(generator, folder):
    """One prompt for several completions shares its pages, in whatever order they come."""
    completions = [" fox", " dog and the", "x", " fox"]
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=CACHE) as own:
        shared = own.score(LONG, completions)
        assert [score.cached_tokens for score in shared] == [0] + [len(shared[0].prompt_token_ids) // 64 * 64] * 3
    alone = [generator.score(LONG, completion) for completion in completions]
    assert [score.logprob for score in shared] == pytest.approx([score.logprob for score in alone], abs=1e-4)
    assert [score.token_ids for score in shared] == [score.token_ids for score in alone]
    ids = generator.score([[5, 6], torch.tensor([7])], [[8], (9, 10)])
    assert [(score.prompt_token_ids, score.token_ids) for score in ids] == [([5, 6], [8]), ([7], [9, 10])]
    assert isinstance(generator.score([5, 6], [8]), Score)
    assert isinstance(generator.score([5, 6], [[8]]), list)
    assert generator.score("hello", []) == generator.score([], []) == []

    async def main():
        agen = AsyncGenerator(generator)
        return await asyncio.gather(agen.score("hello", "!"), agen.score(LONG, completions))

    one, many = asyncio.run(main())
    assert one.logprob == pytest.approx(generator.score("hello", "!").logprob, abs=1e-4)
    assert [score.token_ids for score in many] == [score.token_ids for score in alone]


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 7}, {"prefix_cache": False}, {"max_num_seqs": 1}])
def test_scores_do_not_depend_on_the_steps(folder, generator, options):
    prompts, completions = zip(*PAIRS, strict=True)
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=CACHE, **options) as own:
        scores = own.score(list(prompts), list(completions))
    expected = generator.score(list(prompts), list(completions))
    assert [score.logprob for score in scores] == pytest.approx([score.logprob for score in expected], abs=1e-4)


REFUSED = [
    (("hello", ""), r"no token of its own .*found .. \(give a completion that is not empty\)"),
    (("", ""), "no token of its own"), (([], [3]), "not a completion"),
    (("hello", [3]), "two texts, or token ids for both; found str and list"),
    (([3], "hello"), "two texts, or token ids for both"), (("hello", 5), "^completions: .*found int"),
    ((5, ["hello"]), "^prompts: .*found int"), ((["hello"], "x"), "^completions: "),
    ((["a", "b"], ["c"]), "^prompts: .*a list of 1.*found 2"),
    ((["a", "b"], ["c", ""]), r"^prompts\[1\]: .*no token of its own"), (([3], [211]), "prompt token 1: not a token id"),
    (([3], [[]]), "give a completion that is not empty"), (([3, 4], [5.5]), "not a token id"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_what_cannot_be_scored_is_refused(generator, arguments, words):
    with pytest.raises(InputError, match=words):
        generator.score(*arguments)


def test_the_whole_context_can_be_scored(generator, reference):
    """Nothing is generated, so no room is left for a new token."""
    tokens = [5 + i % 150 for i in range(256)]
    score = generator.score(tokens[:250], tokens[250:])
    assert [row.logprob for row in score.logprobs] == pytest.approx(reference(tokens[:250], tokens[250:])[0], abs=1e-4)
    with pytest.raises(ContextLengthError, match="at most 256 tokens; found 257"):
        generator.score(tokens, [8])
    only = SamplingParams(max_tokens=0, prompt_logprobs=2)
    done = generator.generate(tokens, only)
    assert (done.token_ids, done.text, done.finish_reason) == ([], "", "length")
    after = generator.generate(tokens[:255], SamplingParams(max_tokens=1, prompt_logprobs=2))
    for row, other in zip(done.prompt_logprobs[1:255], after.prompt_logprobs[1:], strict=True):
        assert (row.token_id, row.logprob) == (other.token_id, pytest.approx(other.logprob, abs=1e-4))
        assert len(row.top) == 2
    assert generator.generate([5], only).prompt_logprobs == [None]
    pieces = list(generator.stream("hello", only))
    assert [(piece.text, piece.token_ids, piece.finish_reason) for piece in pieces] == [("", (), "length")]


def test_max_tokens_0_is_for_prompts_that_are_scored():
    for wrong, words in (
        ({}, "max_tokens: max_tokens asks for nothing without prompt_logprobs"),
        ({"prompt_logprobs": 1, "n": 2}, "n: n is about new tokens"),
        ({"prompt_logprobs": 1, "structured_outputs": {"regex": "a"}}, "structured_outputs is about new tokens"),
        ({"prompt_logprobs": 1, "min_tokens": 1}, "min_tokens is above max_tokens"),
    ):
        with pytest.raises(InputError, match=words):
            SamplingParams(max_tokens=0, **wrong)


def test_scores_of_nan_logits(hf_folder, tmp_path):
    """A damaged model has no scores, rather than a NaN that is added up."""
    import shutil

    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(hf_folder("Llama", seed=3), tmp_path / "model")
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with Generator.from_pretrained(copy, device="cpu", kv_cache_memory=CACHE) as damaged, pytest.raises(NumericsError):
        damaged.score([3, 4], [5])
