"""`batch_invariant`: a request's tokens and log-probabilities, bit for bit, in any company. On a GPU.

Catches a kernel, a launch configuration or a path of the engine that depends on how many tokens a step has: of mates, chunks,
cached prefixes, drafts, preemption, CUDA graphs; and `score` that computes what was generated in another way.
"""

import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from minirt import Generator, SamplingParams
from minirt.models import raw_configs

pytestmark = pytest.mark.gpu
FORMS = {  # "kept": of a large model, so many layers
    "Qwen2.5-0.5B": {}, "Qwen3-0.6B": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "Qwen2.5-1.5B": {"quantization": "fp8"}, "embedded": {"dtype": "bfloat16", "max_model_len": 512},
    "SmolLM2-135M": {"quantization": "int4"},
    "Qwen3-30B-A3B": {"quantization": "fp8", "kept": 4}, "gpt-oss-20b": {"kept": 4},
    "Qwen3.5-0.8B": {"kv_cache_memory": 8 << 30}, "Qwen3.5-35B-A3B": {"quantization": "fp8", "kept": 4},
}  # fmt: skip
LENGTHS, NEW = (3, 70, 257, 700, 64, 1, 300, 1030), 40
PARAMS = [
    SamplingParams(
        max_tokens=NEW, temperature=0.0 if i % 2 else 0.8, top_p=1.0 if i % 3 else 0.9, seed=i, logprobs=3, ignore_eos=True
    )
    for i in range(len(LENGTHS) + 3)
]  # fmt: skip


def prompts_of(form):
    """Of `LENGTHS` tokens or the most that the model takes, then three with prefixes of others."""
    draw, longest = random.Random(5), FORMS[form].get("max_model_len", 1200) - NEW
    prompts = [[draw.randrange(500) for _ in range(min(n, longest))] for n in LENGTHS]
    long = prompts[3]
    return [*prompts, long[:-50], [*long[: (len(long) - 100) // 256 * 256], 7, 8], [*prompts[1], 5]]


def generator(form, **options):
    form_options = {"random_weights": form != "embedded", "max_model_len": 1200, "max_num_seqs": 80, **FORMS[form]}
    options = {"kv_cache_memory": 2 << 30, "batch_invariant": True, "warm_up": "lazy", **form_options, **options}
    kept = options.pop("kept", None)
    if kept is None:
        return Generator.from_pretrained(form, **options)
    (raw,) = (raw for name, _, raw in raw_configs() if name == form)
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(raw | {"num_hidden_layers": kept}))
        return Generator.from_pretrained(folder, **options)


def outcome(completion):
    """Token ids, and the log-probabilities of these and of the most probable ones."""
    return completion.token_ids, completion.logprobs


@pytest.fixture(scope="module", params=FORMS)
def alone(request):
    """A model's name, prompts, and the outcome of each alone."""
    prompts = prompts_of(request.param)
    with generator(request.param, max_num_seqs=1) as one:
        expected = [outcome(one.generate([p], s)[0]) for p, s in zip(prompts, PARAMS, strict=True)]
    return request.param, prompts, expected


COMPANIES = {
    "together": {}, "chunks of 17": {"max_num_batched_tokens": 97}, "chunks of 512": {"max_num_batched_tokens": 512},
    "no graphs": {"cuda_graphs": False}, "drafts": {"speculative": "ngram"}, "preempted": {},
    "256 sequences": {"max_num_seqs": 256},
}  # fmt: skip
MEMORY = {  # for some of the sequences
    "Qwen2.5-0.5B": 1 << 26, "Qwen3-0.6B": 1 << 27, "Qwen2.5-1.5B": 1 << 26, "SmolLM2-135M": 1 << 26, "Qwen3-30B-A3B": 1 << 26,
}  # fmt: skip


@pytest.mark.parametrize("company", COMPANIES)
def test_the_same_bits(alone, company):
    form, requests, expected = alone
    draw = random.Random(company)
    count = 245 if "256" in company else 50
    mates = [[draw.randrange(500) for _ in range(draw.randrange(1, 300))] for _ in range(count)]
    settings = [SamplingParams(max_tokens=draw.randrange(1, 60), temperature=0.7, seed=i) for i in range(count)]
    options = dict(COMPANIES[company])
    if company == "preempted" and form in MEMORY:
        options["kv_cache_memory"] = MEMORY[form]
    with generator(form, **options) as many:
        for _ in range(2):  # then with cached prefixes
            order = list(range(len(requests) + count))
            draw.shuffle(order)
            prompts, params = [*requests, *mates], [*PARAMS, *settings]
            done = dict(zip(order, many.generate([prompts[i] for i in order], [params[i] for i in order]), strict=True))
            for i, wanted in enumerate(expected):
                tokens, logprobs = outcome(done[i])
                assert tokens == wanted[0], f"request {i}"
                assert logprobs == wanted[1], f"request {i}"


def test_scores_are_what_was_generated(alone):
    """The difference is exactly zero."""
    form, prompts, expected = alone
    greedy = [i for i, p in enumerate(PARAMS) if p.temperature == 0]
    with generator(form) as scorer:
        scores = scorer.score([prompts[i] for i in greedy], [expected[i][0] for i in greedy])
    for i, score in zip(greedy, scores, strict=True):
        given = [one.logprob for one in expected[i][1]]
        assert [one.logprob for one in score.logprobs] == given


@pytest.mark.parametrize("form", FORMS)
def test_scores_of_10_000_sampled_tokens(form):
    """Of a batch, in prompts of other lengths than the steps that made them. The difference is exactly zero."""
    draw = random.Random(form)
    prompts = [[draw.randrange(500) for _ in range(draw.randrange(1, 200))] for _ in range(40)]
    params = [SamplingParams(max_tokens=250, temperature=1.0, seed=i, logprobs=0, ignore_eos=True) for i in range(40)]
    with generator(form) as one:
        done = one.generate(prompts, params)
        scores = one.score(prompts, [each.token_ids for each in done])
    assert sum(len(each.token_ids) for each in done) == 10_000
    for each, score in zip(done, scores, strict=True):
        assert [row.logprob for row in score.logprobs] == [row.logprob for row in each.logprobs]
