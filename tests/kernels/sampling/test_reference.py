"""Draws have the right distribution, filters keep the right tokens, and neither depends on the rest of the batch."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scipy import stats

from minirt.errors import InputError
from minirt.kernels.sampling.batch import SamplingBatch
from minirt.kernels.sampling.dispatch import sample
from minirt.kernels.sampling.philox import philox, uniform
from minirt.kernels.sampling.reference import exponential_noise, filtered_weights
from minirt.sampling_params import EffectiveSampling, SamplingParams, resolve

INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The tests run thousands of small operations. On a busy machine, threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def settings(temperature: float = 1.0, seed: int = 0, **options) -> EffectiveSampling:
    return resolve(SamplingParams(temperature=temperature, seed=seed, **options), None)


def batch_of(*requests: EffectiveSampling, step: int = 0) -> SamplingBatch:
    return SamplingBatch.build([(request, step) for request in requests])


def draws(logits, count: int, first_step: int = 0, rows: int = 250, **options) -> np.ndarray:
    """`count` draws from one distribution, at successive steps of one request, `rows` draws at a time."""
    request, steps = settings(**options), range(first_step, first_step + count)
    logits = torch.as_tensor(logits, dtype=torch.float32).expand(rows, -1)
    batches = [SamplingBatch.build([(request, i) for i in steps[at : at + rows]]) for at in range(0, count, rows)]
    return torch.cat([sample(logits[: len(batch.step)], batch) for batch in batches]).numpy()


@pytest.mark.parametrize("vocab", [1, 4, 17])
def test_noise_follows_the_documented_counters(vocab: int) -> None:
    """A Triton kernel that follows the documentation (key, counter, word, logarithm) must get these numbers."""
    for seed, bits, step in ((0, 0, 0), (2**64 - 1, -1, 3), (5 << 32 | 7, 5 << 32 | 7, 2**20)):
        batch = batch_of(settings(seed=seed), step=step)
        noise = exponential_noise(batch.seed, batch.step, vocab)
        assert noise.shape == (1, vocab)
        for v in range(vocab):
            words = philox(*(torch.tensor([c]) for c in (bits, v // 4, step, 0, 0)))
            assert noise[0, v].item() == pytest.approx(-math.log1p(-uniform(words[v % 4]).item()), rel=1e-6)


def test_noise_is_exponential_and_uncorrelated() -> None:
    batch = SamplingBatch.build([(settings(seed=s), t) for s in (0, 1) for t in range(100)])
    noise = exponential_noise(batch.seed, batch.step, 1031).double().numpy().reshape(2, 100, 1031)
    assert stats.kstest(noise.ravel()[::3], "expon").pvalue > 1e-3
    neighbours = {"seeds": (noise[0], noise[1]), "steps": (noise[:, :-1], noise[:, 1:])}
    neighbours |= {"tokens": (noise[..., :-1], noise[..., 1:]), "counters": (noise[..., :-4], noise[..., 4:])}
    for name, (one, other) in neighbours.items():
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4 / math.sqrt(one.size), name


def reference(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The distribution in fp64, computed by sorting and adding one token after the other."""
    logits = np.asarray(logits, np.float64)
    p = np.exp((logits - logits.max()) / temperature)
    if top_k:
        p[logits < np.sort(logits)[::-1][min(top_k, len(logits)) - 1]] = 0
    p /= p.sum()
    if top_p < 1:
        mass = 0.0
        for last in np.sort(p)[::-1]:
            mass += last
            if mass >= float(np.float32(top_p)):
                break
        p[p < last] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


ALL = {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.05}
FILTERS = [{}, {"temperature": 0.5}, {"temperature": 1.7}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, ALL]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_draws_have_the_exact_distribution(options: dict) -> None:
    logits = np.random.default_rng(1).normal(size=17).astype(np.float32) * 1.5
    wanted = reference(logits, **options) * 20_000
    counts = np.bincount(draws(logits, 20_000, seed=11, **options), minlength=17)
    assert counts[wanted == 0].sum() == 0
    frequent = wanted >= 5  # chi-square needs 5 expected draws per cell; all rarer tokens share one cell
    cells = [*zip(counts[frequent], wanted[frequent], strict=True), (counts[~frequent].sum(), wanted[~frequent].sum())]
    observed, expected = zip(*(cell for cell in cells if cell[1] > 0), strict=True)
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_a_flat_large_vocabulary_is_drawn_evenly() -> None:
    assert stats.chisquare(np.bincount(draws(np.zeros(1031), 20_000, seed=3), minlength=1031)).pvalue > 1e-3


@pytest.mark.parametrize("seeds", [False, True], ids=["steps", "seeds"])
def test_successive_draws_are_independent(seeds: bool) -> None:
    requests = [(settings(seed=i), 0) if seeds else (settings(seed=5), i) for i in range(20_000)]
    tokens = sample(torch.tensor([0.5, 0.0, -0.5, 0.2]).expand(20_000, -1), SamplingBatch.build(requests)).numpy()
    table = np.zeros((4, 4))
    np.add.at(table, (tokens[:-1], tokens[1:]), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3


RNG = np.random.default_rng(2)
AWKWARD = {
    "one token": [0.3], "two": [1.0, -1.0], "flat": [0.25] * 17, "masked": [1.0, -INF, 0.5, -INF, -0.5, 0.25, -INF],
    "ties": [3, 1, 2, 2, 2, 1, 0, 3, -1, 2, 0.0, -0.0, 0], "many ties": RNG.integers(-4, 4, 523),
    "one-hot": [-INF] * 6 + [2.0] + [-INF] * 4, "steep": [0, -200, -90, -40, -20, -1e30, -3.4e38],
    "large": [3e38, -3e38, 2.9e38, 0], "negative": -100 - RNG.random(31) * 5, "prime": RNG.normal(size=1031) * 3,
    "fine": 1 + np.arange(257) * 2.0**-23,
}  # fmt: skip
KEEP: list[dict] = [{"top_k": k} for k in (1, 2, 3, 7, 10, 10**12)]
KEEP += [{"top_p": p} for p in (1e-50, 1e-6, 0.3, 0.77, 0.999)] + [{"min_p": m} for m in (1e-9, 0.02, 0.5, 1.0)]
KEEP += [{"temperature": 0.6, "top_k": 5, "top_p": 0.7}, {"temperature": 2.5, "top_k": 40, "min_p": 0.13}]
KEEP += [{"temperature": 0.9, "top_k": 11, "top_p": 0.93, "min_p": 0.03}, {"top_k": 1, "top_p": 1.0, "min_p": 0.0}]


@pytest.mark.parametrize("name", AWKWARD)
def test_kept_set_and_weights(name: str) -> None:
    """One batch with all filters, so that neighbouring rows have different filters or none."""
    logits = np.asarray(AWKWARD[name], np.float32)
    batch = batch_of(*(settings(**options) for options in KEEP))
    weights = filtered_weights(torch.from_numpy(logits).expand(len(KEEP), -1), batch).double().numpy()
    for options, found in zip(KEEP, weights, strict=True):
        expected = reference(logits, **options)
        visible = expected >= 1e-30 * expected.max()  # fp32 has no smaller weights, and draws could not reveal them
        assert (found[visible] > 0).all(), options
        assert (found[expected == 0] == 0).all(), options
        np.testing.assert_allclose(found / found.sum(), expected, rtol=2e-5, atol=1e-30, err_msg=str(options))


@pytest.mark.parametrize("vocab", [17, 1031])
def test_kept_set_is_transformers(vocab: int) -> None:
    from transformers.generation import logits_process as hf

    logits = torch.from_numpy(np.random.default_rng(vocab).normal(size=(6, vocab)) * 3).float()
    assert all(len(row.unique()) == vocab for row in logits)  # transformers breaks ties by position
    for t, k, p, m in ((0.7, 8, 0.9, 0.02), (1.0, vocab, 0.95, 0.0), (1.8, 12, 1.0, 0.2), (1.0, 1, 0.5, 0.5)):
        expected = logits
        for warper in (hf.TemperatureLogitsWarper(t), hf.TopKLogitsWarper(k), hf.TopPLogitsWarper(p)):
            expected = warper(None, expected)
        expected = hf.MinPLogitsWarper(m)(None, expected)
        weights = filtered_weights(logits, batch_of(*[settings(t, top_k=k, top_p=p, min_p=m)] * 6))
        assert torch.equal(weights > 0, expected > -INF)
        torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), expected.softmax(-1), rtol=1e-5, atol=1e-9)


def test_extreme_temperatures() -> None:
    logits = [1.0, 5.0, 5.0, 4.9999995, -INF]
    assert all(set(draws(logits, 250, temperature=t)) == {1} for t in (1e-300, 1e-45, 1e-39))  # below normal fp32: greedy
    for options, tokens in (({}, {0, 1, 2, 3}), ({"top_k": 2}, {1, 2}), ({"top_k": 3}, {1, 2, 3})):
        assert set(draws(logits, 250, temperature=1e300, **options)) == tokens
    assert set(draws(logits, 250, temperature=1.2e-38)) == {1, 2}


@pytest.mark.parametrize("vocab", [1, 17, 1031])
def test_a_request_draws_the_same_in_any_company(vocab: int) -> None:
    """A row's token and the bits of its weights are the same alone and in a batch, whatever the settings of the other rows."""
    rng = np.random.default_rng(vocab)
    options = [{"temperature": 0}, *FILTERS, {"top_k": 3, "seed": 2**63 + 9}, {"temperature": 0.01}, {"top_p": 0.2}]
    requests = [(settings(**{"seed": int(rng.integers(2**63)), **o}), int(rng.integers(1000))) for o in options]
    logits = torch.from_numpy(rng.normal(size=(len(requests), vocab)) * 2).float()
    singles = [SamplingBatch.build([request]) for request in requests]
    alone = [sample(logits[i : i + 1], single).item() for i, single in enumerate(singles)]
    for _ in range(10):
        pick = rng.permutation(len(requests))[: rng.integers(1, len(requests) + 1)].tolist()
        together = SamplingBatch.build([requests[i] for i in pick])
        assert sample(logits[pick], together).tolist() == [alone[i] for i in pick]
        for row, i in () if pick == [0] else zip(filtered_weights(logits[pick], together), pick, strict=True):
            if i > 0:  # request 0 is greedy and has no weights
                assert torch.equal(row, filtered_weights(logits[i : i + 1], singles[i])[0])


def test_seed_and_step_decide() -> None:
    first = draws(np.zeros(1031), 50, seed=1)
    np.testing.assert_array_equal(first[20:], draws(np.zeros(1031), 30, first_step=20, seed=1))
    for other in (0, 2, 1 + 2**32, 1 + 2**63):  # every bit of the seed counts
        assert (first != draws(np.zeros(1031), 50, seed=other)).sum() > 40


def test_build() -> None:
    def flags(*requests: EffectiveSampling) -> tuple[bool, ...]:
        b = batch_of(*requests)
        return b.temperature is None, b.top_k is not None, b.top_p is not None, b.min_p is not None

    greedy = settings(0, top_k=5, top_p=0.5, min_p=0.5)
    assert flags() == flags(greedy, greedy) == (True, False, False, False)
    assert flags(greedy, settings()) == (False, False, False, False)
    assert flags(settings(top_k=5), greedy) == (False, True, False, False)
    assert flags(settings(), settings(top_p=0.5), settings(min_p=0.1)) == (False, False, True, True)
    b = batch_of(settings(0.5, seed=2**64 - 1, top_k=2**40, top_p=0.5, min_p=0.1), greedy, step=4)
    assert {t.dtype for t in (b.temperature, b.top_p, b.min_p)} == {torch.float32}
    assert (b.top_k.dtype, b.seed.dtype, b.step.dtype) == (torch.int32, torch.int64, torch.int64)
    assert (b.seed.tolist(), b.top_k.tolist(), b.step.tolist()) == ([-1, 0], [2**31 - 1, 5], [4, 4])


ROWS = {  # logits, the greedy token, the tokens that may be drawn
    "nan": ([1.0, NAN, 3.0, 0.0, 0.0], -1, {-1}),
    "nan and inf": ([INF, 0.0, 1.0, -NAN, INF], -1, {-1}),
    "all -inf": ([-INF] * 5, -1, {-1}),
    "two infs": ([0.0, INF, 1.0, INF, -INF], -1, {-1}),
    "ties": ([1.0, 7.0, 7.0, 0.0, 7.0], 1, {1, 2, 4}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROWS)
def test_rows_without_a_distribution(name: str, dtype: torch.dtype) -> None:
    row, greedy, drawn = ROWS[name]
    mixed = torch.tensor([row, [-INF, -INF, -INF, 4.0, -INF]] * 50, dtype=dtype)
    assert sample(mixed, batch_of(*[settings(0)] * 100)).tolist() == [greedy, 3] * 50
    for options in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.2}, {"top_k": 3, "top_p": 0.99, "min_p": 0.1}):
        request = settings(0.4, **options)
        tokens = sample(mixed, SamplingBatch.build([(request, i) for i in range(100)])).tolist()
        assert (set(tokens[::2]), set(tokens[1::2])) == (drawn, {3})  # a bad row does not affect its neighbour
        assert sample(mixed[:2], batch_of(settings(0), request)).tolist() == [greedy, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_any_dtype_and_stride_are_left_alone(dtype: torch.dtype) -> None:
    storage = torch.from_numpy(np.random.default_rng(4).normal(size=(514, 40)) * 4).to(dtype)
    before, logits = storage.clone(), storage.t()[:, ::2]
    batch = SamplingBatch.build([(settings(0.8, top_k=99, top_p=0.9) if i % 3 else settings(0), i) for i in range(40)])
    tokens = sample(logits, batch)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, sample(logits.float().contiguous(), batch))
    assert torch.equal(storage, before)


@pytest.mark.parametrize("options", [{"temperature": 0}, *FILTERS], ids=str)
def test_sampling_never_reads_the_device(options: dict) -> None:
    """Meta tensors have no data, so an .item(), a tensor in an `if` or a value-dependent shape raises."""
    batch = SamplingBatch.build([(settings(**options), 0)] * 2, device="meta")
    assert sample(torch.empty(2, 17, device="meta"), batch).shape == (2,)


def test_an_empty_batch_and_a_wrong_shape() -> None:
    assert sample(torch.empty(0, 17), batch_of()).shape == (0,)
    for shape in ((17,), (3, 17), (2, 1, 17)):
        with pytest.raises(InputError, match=r"\(2, V\)"):
            sample(torch.zeros(shape), batch_of(settings(), settings()))
