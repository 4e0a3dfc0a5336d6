"""The kernels draw the same tokens as the eager sampler, and their filters stop at the same token.

Catches: a bin's edge counted twice or not at all, a total that lacks a block, keys of tied or negative logits out of order, wrong
Philox words, state left over from the previous call, padding of the last block that wins or is counted.
"""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support.raising import raises

from minirt.kernels.sampling import filters
from minirt.kernels.sampling import sample as kernel
from minirt.kernels.sampling.batch import SamplingBatch
from minirt.kernels.sampling.dispatch import sample
from minirt.kernels.sampling.filters import LIGHTEST, divided, select, weights_of
from minirt.kernels.sampling.reference import exponential_noise, filtered_weights
from minirt.sampling_params import EffectiveSampling, SamplingParams, resolve

INF, NAN = math.inf, math.nan


def settings(temperature: float = 1.0, seed: int = 0, **options) -> EffectiveSampling:
    return resolve(SamplingParams(temperature=temperature, seed=seed, **options), None)


OPTIONS = [
    {"temperature": 0}, {}, {"temperature": 0.6}, {"temperature": 1.9}, {"top_k": 5}, {"top_k": 1}, {"top_k": 700},
    {"top_k": 10**12}, {"top_p": 0.95}, {"top_p": 0.1}, {"top_p": 1e-9}, {"top_p": 0.99999}, {"min_p": 0.1}, {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8}, {"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.2},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.05}, {"temperature": 1e300, "top_p": 0.5},
]  # fmt: skip


def mixed(count: int, device: torch.device, seed: int = 0) -> SamplingBatch:
    """`count` requests that cycle through OPTIONS, with large and small seeds and steps."""
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(count):
        options = {"seed": int(rng.integers(2**64, dtype=np.uint64)), **OPTIONS[i % len(OPTIONS)]}
        requests.append((settings(**options), int(rng.integers(3) * 1000 + i)))
    return SamplingBatch.build(requests, device)


def garbage(workspace: kernel.SamplingWorkspace, seed: int) -> kernel.SamplingWorkspace:
    """Fill every buffer but the counters with random bits."""
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in workspace.buffers._asdict().items():
        if name != "arrivals":
            words = buffer.view(torch.int32)
            words.copy_(torch.randint(-(2**31), 2**31, words.shape, generator=generator))
    return workspace


@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_tokens_are_the_eager_samplers(case, make, device):
    B, V = max(case["B"], len(OPTIONS)), case["V"]
    logits, batch = make(B, V, dtype=torch.float32, scale=3.0), mixed(B, device, seed=V)
    logits += make(B, 1, dtype=torch.float32, scale=60.0)  # shows a row that uses its neighbour's maximum
    out = torch.full((B,), -7, device=device)
    workspace = garbage(kernel.SamplingWorkspace(B + 2, V + 5, device), 1)
    assert kernel.sample(logits, batch, workspace=workspace, out=out) is out
    assert out.tolist() == sample(logits, batch, "eager").tolist()
    # Half of the rows, in the workspace as the first call left it.
    half = mixed(B // 2, device, seed=V + 1)
    assert kernel.sample(logits[: B // 2], half, workspace=workspace).tolist() == sample(logits[: B // 2], half, "eager").tolist()


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8}, {"top_k": 9}, {"top_p": 0.9}], ids=str)
def test_batches_of_one_kind(options, make, device):
    """These batches skip whole passes, and everything that those would clear or compute."""
    logits = make(4, 1031, dtype=torch.float32, scale=2.0)
    batch = SamplingBatch.build([(settings(seed=2**63 + 1, **options), i) for i in range(4)], device)
    workspace = kernel.SamplingWorkspace(4, 1031, device, greedy_only=batch.temperature is None)
    assert kernel.sample(logits, batch, workspace=garbage(workspace, 2)).tolist() == sample(logits, batch, "eager").tolist()


RNG = np.random.default_rng(2)
ROWS = {
    "one token": [0.3], "two": [1.0, -1.0], "flat": [0.25] * 17, "masked": [1.0, -INF, 0.5, -INF, -0.5, 0.25, -INF],
    "ties": [3, 1, 2, 2, 2, 1, 0, 3, -1, 2, 0.0, -0.0, 0, -0.0], "many ties": RNG.integers(-4, 4, 523),
    "one-hot": [-INF] * 6 + [2.0] + [-INF] * 4, "steep": [0, -200, -90, -40, -20, -1e30, -3.4e38],
    "large": [3e38, -3e38, 2.9e38, 0], "negative": -100 - RNG.random(31) * 5, "prime": RNG.normal(size=1031) * 3,
    "fine": 1 + np.arange(257) * 2.0**-23, "tiny": np.arange(-20, 20) * 1e-42,
    # Bins do not narrow these down: more candidates than one block. In "equal blocks", the mass of a block is 2⁵¹.
    "all equal": [1.5] * 4099, "equal blocks": [1.5] * 2048 + [1.0] * 2052,
    "masked parts": [-1e30] * 2100 + [0, 1, 2, 1] + [-1e30] * 2100,
    "far tail": np.r_[0.0, np.full(4500, -22.0) - RNG.random(4500)], "narrow": 5 + RNG.random(4500) * 1e-5,
}  # fmt: skip
KEEP: list[dict] = [{"top_k": k} for k in (1, 2, 3, 7, 12, 2500)]
KEEP += [{"top_p": p} for p in (1e-50, 0.3, 0.77, 0.999, 0.9999999)]
KEEP += [{"temperature": 0.6, "top_k": 5, "top_p": 0.7}, {"temperature": 2.5, "top_k": 40, "top_p": 0.93}]


@pytest.mark.parametrize("name", ROWS)
def test_filters_stop_where_eager_does(name, device):
    """The limits left in the workspace are the smallest logit, and the smallest weight, that the eager filters keep."""
    row = torch.tensor(np.asarray(ROWS[name], np.float32), device=device)
    logits = row.expand(len(KEEP), -1).contiguous()
    batch = SamplingBatch.build([(settings(seed=i, **options), i) for i, options in enumerate(KEEP)], device)
    workspace = garbage(kernel.SamplingWorkspace(len(KEEP), row.numel(), device), 3)
    tokens = kernel.sample(logits, batch, workspace=workspace)
    assert tokens.tolist() == sample(logits, batch, "eager").tolist()
    w = workspace.buffers
    w.sums.zero_()
    w.facts[:, LIGHTEST.value] = 0
    w.unsettled.copy_(torch.tensor([len(KEEP), *range(len(KEEP))]))  # no row is settled
    for by_mass in (False, True):
        select(logits, batch.needed(("top_k", "top_p")), w, by_mass)
    for options, limits in zip(KEEP, w.limits.cpu().numpy(), strict=True):
        only_k = {k: v for k, v in options.items() if k != "top_p"}
        for limit, used in zip(limits, (only_k, options), strict=True):
            weights = filtered_weights(row[None], SamplingBatch.build([(settings(**used), 0)], device))[0]
            if used is options and "top_p" in options:
                smallest = weights[weights > 0].min().item()
                assert np.int32(-limit).view(np.float32) == pytest.approx(smallest, rel=2e-6), options
            elif used is only_k and options.get("top_k", row.numel()) < row.numel():
                smallest = row.sort(descending=True).values[options["top_k"] - 1].cpu().numpy()
                key = ~limit
                assert np.int32(key ^ ((key >> 31) & 0x7FFFFFFF)).view(np.float32) == smallest, options


def test_rows_without_a_distribution(device):
    rows = [
        ([1.0, NAN, 3.0, 0.0, 0.0], -1, {-1}), ([INF, 0.0, 1.0, -NAN, INF], -1, {-1}), ([NAN] * 5, -1, {-1}),
        ([-INF] * 5, -1, {-1}), ([0.0, 1.0, INF, -INF, 2.0], -1, {-1}), ([0.0, INF, 1.0, INF, -INF], -1, {-1}),
        ([1.0, 7.0, 7.0, 0.0, 7.0], 1, {1, 2, 4}), ([-0.0, 0.0, -1.0, 0.0, -5.0], 0, {0, 1, 3}),
    ]  # fmt: skip
    logits = torch.tensor([row for row, _, _ in rows], device=device)
    greedy = SamplingBatch.build([(settings(0), 0)] * len(rows), device)
    assert kernel.sample(logits, greedy).tolist() == [token for _, token, _ in rows]
    logits = logits.repeat(4, 1)
    filters = {"temperature": 0.4, "top_k": 3, "top_p": 0.99, "min_p": 0.1}
    for options in ({"temperature": 0.05}, filters):
        batch = SamplingBatch.build([(settings(seed=i, **options), i) for i in range(len(logits))], device)
        tokens = kernel.sample(logits, batch, workspace=garbage(kernel.SamplingWorkspace(len(logits), 5, device), 4)).tolist()
        for token, (_, _, allowed) in zip(tokens, rows * 4, strict=True):
            assert token in allowed


def test_a_row_with_nan_in_a_later_part(make, device):
    logits = make(3, 4099, dtype=torch.float32)
    logits[0, 4098], logits[1, 2048], logits[2, 4098] = NAN, 100.0, 100.0
    for options in ({"temperature": 0}, {"top_p": 0.9}):
        batch = SamplingBatch.build([(settings(**options), 0)] * 3, device)
        assert kernel.sample(logits, batch).tolist() == [-1, 2048, 4098]


def test_greedy_from_an_lm_heads_row_maxima(make, device):
    """Tiles of unequal length, ties across tiles, NaN, +inf and -inf, garbage after the last tile; logits of other tokens."""
    B, V, parts = 6, 700, 37
    logits = (make(B, V, dtype=torch.float32) * 4).round()  # ties
    logits[1, 555], logits[2], logits[3, 20:], logits[4, 99] = NAN, -INF, -INF, INF
    ends = torch.arange(1, parts + 1) * V // parts
    buffer = torch.full((B, 64), 2**62, dtype=torch.int64, device=device)
    keys = torch.where(logits.isnan(), 2**31 - 1, logits.view(torch.int32) ^ ((logits.view(torch.int32) >> 31) & (2**31 - 1)))
    packed = (torch.where(logits == 0, 0, keys).long() << 32) | ((2**31 - 1) ^ torch.arange(V, device=device))
    for part in range(parts):
        buffer[:, part] = packed[:, (0 if part == 0 else int(ends[part - 1])) : int(ends[part])].amax(1)
    batch = SamplingBatch.build([(settings(temperature=0), 0)] * B, device)
    expected = sample(logits, batch, "eager").tolist()
    assert [row for row in range(B) if expected[row] == -1] == [1, 2, 4]
    assert kernel.sample(-logits, batch, row_maxima=buffer[:, :parts]).tolist() == expected
    sampled = SamplingBatch.build([(settings(seed=i), 0) for i in range(B)], device)
    assert kernel.sample(logits, sampled, row_maxima=buffer[:, :parts]).tolist() == kernel.sample(logits, sampled).tolist()
    raises("row_maxima: wrong shape", kernel.sample, logits, batch, row_maxima=buffer[1:])


@triton.jit
def _arithmetic_kernel(x_ptr, temperature_ptr, u_ptr, weights_ptr, quotients_ptr, noise_ptr, mass_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, temperature = tl.load(x_ptr + i), tl.load(temperature_ptr + tl.program_id(0))
    weights = weights_of(x, 0.0, temperature)
    tl.store(weights_ptr + i, weights)
    tl.store(quotients_ptr + i, divided(x, temperature))
    tl.store(noise_ptr + i, kernel.approximate_noise(tl.load(u_ptr + i)))
    units, rest = kernel.mass_parts(weights)
    tl.store(mass_ptr + i, (units.to(tl.int64) << 20) + rest)


def test_arithmetic(device):
    """Quotients without division, masses from two 32-bit numbers, noise without an accurate logarithm.

    Catches a quotient that is one unit off, also next to the middle of two numbers, a mass that is rounded and not truncated, and
    noise with a larger error than `_MARGIN` allows: small u, both sides of the change of formula, u next to 1.
    """
    rng, BLOCK = np.random.default_rng(8), 1024
    few = [1.0, 1e-3, 100.0, 0.6, 3.0, 1 / 3, float(np.nextafter(np.float32(2), np.float32(0))), 1e-20, 2.0**126, 1e30]
    temperatures = np.r_[few, rng.uniform(0.01, 2, 40), 10 ** rng.uniform(-19, 30, 14)].astype(np.float32)
    d = -(10.0 ** rng.uniform(-9, 2.1, (len(temperatures), BLOCK))) * temperatures[:, None]
    middles = (rng.integers(2**23, 2**24, (len(d), 500)) + 0.5) * 2.0**-24 * temperatures[:, None]
    d = d.astype(np.float32)
    d[:, 4:504] = -np.nextafter(middles.astype(np.float32), np.float32(rng.choice([-INF, INF])))
    d[:, :4] = 0, -INF, -3.4e38, -1e-45
    words = np.r_[0, 1, 2, 2**25 + np.arange(-300, 300) * 4, 2**32 - 1 - np.arange(400) * 128]
    words = np.r_[words, rng.integers(0, 2**32, BLOCK * len(d) - 2000), 2.0 ** rng.uniform(0, 32, 2000 - len(words))]
    u = np.minimum(words.astype(np.float32) * np.float32(2**-32) + np.float32(2**-33), np.float32(1 - 2**-24))
    inputs = [torch.from_numpy(values).to(device) for values in (d, temperatures, u)]
    weights, quotients, noise = (torch.full(d.shape, NAN, device=device) for _ in range(3))
    mass = torch.full(d.shape, -1, device=device)
    _arithmetic_kernel[(len(d),)](*inputs, weights, quotients, noise, mass, BLOCK)
    with np.errstate(over="ignore"):
        expected = d / temperatures[:, None]
    seen = np.isfinite(expected) & ((expected < -(2.0**-30)) | (expected == 0))  # others: weights of 1 and of 0
    assert np.array_equal(quotients.cpu().numpy()[seen], expected[seen])
    exact = np.exp(np.maximum(expected.astype(np.float64), -200))
    assert np.all(np.abs(weights.cpu().numpy() - exact) <= 2.0**-21 * exact + 2.0**-122)  # a GPU rounds smaller ones to 0
    assert torch.equal(mass, (weights * 2.0**40).long())
    error = np.log2(noise.cpu().numpy().ravel().astype(np.float64) / (-np.log1p(-u.astype(np.float64)) / math.log(2)))
    assert np.abs(error).max() <= 4e-5


@pytest.mark.parametrize("temperature", [1e-3, 0.7, 1.0, 100.0])
def test_the_winner_among_almost_equals(temperature, device):
    """All weights / E of a row are equal but for one, which is larger by 2⁻¹⁶. So only exact values tell which block has it.

    Catches a margin below the error of the approximate scores, which is largest for u just below 2⁻⁷: then the block with the
    winner is not looked at.
    """
    B, V = 3, 3 * 2048 + 5
    batch = SamplingBatch.build([(settings(temperature, seed=i), i) for i in range(B)], device)
    noise, winners = exponential_noise(batch.seed, batch.step, V).cpu().double(), torch.tensor([V - 1, 2048, 777])
    above = torch.zeros(B, V, dtype=torch.float64)
    above[torch.arange(B), winners] = 2.0**-16
    logits = (batch.temperature.cpu().double()[:, None] * (noise.log() + above)).float()
    race = logits.double() / batch.temperature.cpu().double()[:, None] - noise.log()
    assert (race.topk(2).values.diff(dim=1) < -(2.0**-17)).all()  # the rounding of logits has not hidden the winner
    tokens = kernel.sample(logits.to(device), batch)
    assert tokens.tolist() == winners.tolist() == sample(logits.to(device), batch, "eager").tolist()


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 1e300])
def test_equal_and_masked_logits(temperature, device):
    """Rows of one value, of few tokens that are not masked, and a row with a single token that has little chance."""
    V = 2048 + 3
    logits = torch.full((8, V), -INF, device=device)
    logits[0], logits[1], logits[2, -1], logits[3, [5, 2047, 2048]] = 7.0, -3e38, -4.0, 2.0
    logits[4, ::7], logits[5, 1], logits[5, 2050], logits[6, 0::2], logits[6, 1::2] = 0.0, 3e38, 2.9e38, 1.0, 1.0 - 2.0**-23
    logits[7], logits[7, 2047:2049] = 1e-42, 0.0
    for step, options in enumerate(({}, {"top_p": 0.4}, {"top_k": 2}, {"min_p": 0.9})):
        batch = SamplingBatch.build([(settings(temperature, seed=i, **options), step) for i in range(8)], device)
        assert kernel.sample(logits, batch).tolist() == sample(logits, batch, "eager").tolist()


@pytest.mark.exhaustive
def test_many_rows_are_left_for_the_selection(make, device, monkeypatch):
    """More listed rows than programs work on at a time, greedy rows and rows without a distribution between them.

    Catches rows of the list that no program takes, counters that a call does not leave at zero, and rows that are listed twice.
    """
    B, V, most = 24, 2050, 5
    for module in (kernel, filters):
        monkeypatch.setattr(module, "MOST_ROWS", most)
    logits = make(B, V, dtype=torch.float32, scale=1.0)
    logits[3::17] = NAN
    logits[:, 2049] = 1.0
    workspace = kernel.SamplingWorkspace(B, V, device)
    kinds = [
        {"top_p": 0.02}, {"top_k": 3}, {"min_p": 0.8}, {"top_k": 40, "top_p": 0.3}, {"temperature": 0},
        {"top_p": 0.1, "min_p": 0.5},
    ]  # fmt: skip
    for step in range(2):
        requests = [(settings(seed=i, **kinds[i % len(kinds)]), step) for i in range(B)]
        batch = SamplingBatch.build(requests, device)
        assert kernel.sample(logits, batch, workspace=workspace).tolist() == sample(logits, batch, "eager").tolist()
        assert not workspace.buffers.arrivals.any()
        count, *rows = workspace.buffers.unsettled.tolist()
        assert count > 2 * most
        assert len(set(rows[:count])) == count


@pytest.mark.exhaustive
@pytest.mark.parametrize("top_p", [0.3, 0.95])
def test_top_k_and_top_p_together_are_checked_without_a_selection(top_p, make, device):
    """Catches a row that is taken as settled though top-p drops its winner, and one that selects without need.

    The mass that top-k keeps is not known then. In rows of three tokens it is just the heavier ones' and the winner's, or more.
    """
    B, V = 96, 300
    logits = make(B, V, dtype=torch.float32, scale=3.0)
    logits[::3] = -INF
    logits[::3, [7, 100, 299]] = torch.tensor([1.0, 0.9, 0.8], device=device)
    batch = SamplingBatch.build([(settings(seed=i, top_k=(2, 3, 40)[i % 7 % 3], top_p=top_p), 3) for i in range(B)], device)
    workspace = kernel.SamplingWorkspace(B, V, device)
    assert kernel.sample(logits, batch, workspace=workspace).tolist() == sample(logits, batch, "eager").tolist()
    everything = SamplingBatch.build([(settings(seed=i), 3) for i in range(B)], device)
    winners, weights = sample(logits, everything, "eager"), filtered_weights(logits, batch)
    dropped = (weights[torch.arange(B, device=device), winners] == 0).sum().item()
    assert 0 < dropped <= workspace.buffers.unsettled[0].item() < dropped + B // 4


class Counting:
    """A kernel that notes its launches."""

    def __init__(self, name: str, kernel, launched: list[str]) -> None:
        self.name, self.own, self.launched = name, kernel, launched

    def __getitem__(self, grid):
        self.launched.append(self.name)
        return self.own[grid]


def test_launches(make, device, monkeypatch):
    """A pass over the logits that is not needed, or an additional launch, fails here."""
    launched = list[str]()
    for module, name in ((kernel, "race"), (kernel, "check"), (filters, "sum"), (filters, "collect"), (filters, "select")):
        monkeypatch.setattr(module, f"_{name}_kernel", Counting(name, getattr(module, f"_{name}_kernel"), launched))
    logits = make(2, 300, dtype=torch.float32)
    for options, expected in (
        ({"temperature": 0}, "race"), ({}, "race"), ({"min_p": 0.1}, "race check race"),
        ({"top_p": 0.9}, "race check sum sum collect select race"), ({"top_k": 9}, "race check sum sum collect select race"),
        ({"top_k": 9, "top_p": 0.9}, "race check sum sum collect select sum sum collect select race"),
    ):  # fmt: skip
        launched.clear()
        kernel.sample(logits, SamplingBatch.build([(settings(**options), 0)] * 2, device))
        assert " ".join(launched) == expected


def test_a_request_draws_the_same_in_any_company(make, device):
    logits, batch = make(len(OPTIONS), 2100, dtype=torch.float32, scale=2.0), mixed(len(OPTIONS), device)
    together = kernel.sample(logits, batch).tolist()
    assert kernel.sample(logits, batch).tolist() == together
    for i in range(0, len(OPTIONS), 3):
        assert kernel.sample(logits[i : i + 1], batch.part(slice(i, i + 1))).tolist() == together[i : i + 1]


def test_wrong_arguments_are_named(make, device):
    logits, batch = make(4, 8, dtype=torch.float32), mixed(4, device)
    for wrong, message in (
        (logits.half(), "logits: wrong dtype"), (make(8, 4, dtype=torch.float32).t(), "logits: not contiguous"),
        (make(5, 8, dtype=torch.float32), "temperature: wrong shape"), (logits[:, :0], "logits: wrong vocabulary"),
    ):  # fmt: skip
        raises(message, kernel.sample, wrong, batch)
    raises("out: wrong dtype", kernel.sample, logits, batch, out=torch.empty(4, dtype=torch.int32, device=device))
    for size, options in (((3, 8), {}), ((4, 7), {}), ((4, 8), {"greedy_only": True})):
        raises("workspace: too small", kernel.sample, logits, batch, workspace=kernel.SamplingWorkspace(*size, device, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 64, 256])
def test_large(B, make, device, repeats):
    """With a real vocabulary, at most one of 10⁴ draws may differ, because exp and log round differently from PyTorch's."""
    V, different, total = 152064, 0, 0
    rounds, each = max(len(OPTIONS) if B == 1 else 3, min(200, repeats(10240) // B)), repeats(8)
    workspace = garbage(kernel.SamplingWorkspace(B, V, device), 5)
    for i in range(rounds):
        if i % each == 0:
            logits = make(B, V, dtype=torch.float32, scale=(0.02, 1.0, 4.0)[i // each % 3])
        requests = [(settings(**OPTIONS[i % len(OPTIONS)]), i)]
        batch = mixed(B, device, seed=i) if B > 1 else SamplingBatch.build(requests, device)
        tokens = kernel.sample(logits, batch, workspace=workspace).cpu()
        expected = sample(logits, batch, "eager").cpu()
        different += int((tokens != expected).sum())
        total += B
    assert different <= max(1, total // 10_000), f"{different} of {total}"


@pytest.mark.gpu
def test_in_a_cuda_graph(make, device):
    V, B = 152064, 8
    logits, workspace = make(B, V, dtype=torch.float32), kernel.SamplingWorkspace(B, V, device)
    batch = SamplingBatch.build([(settings(0.9, seed=i, top_k=500, top_p=0.9), 0) for i in range(B)], device)
    out = torch.empty(B, dtype=torch.int64, device=device)
    kernel.sample(logits, batch, workspace=workspace, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.sample(logits, batch, workspace=workspace, out=out)
    for _ in range(5):
        logits.copy_(make(B, V, dtype=torch.float32, scale=2.0))
        batch.step.add_(1)
        out.fill_(-9)
        graph.replay()
        assert out.tolist() == kernel.sample(logits, batch).tolist()
        graph.replay()
        assert out.tolist() == kernel.sample(logits, batch).tolist()
