"""The kernels of masks, biases, penalties and log-probabilities give what their eager forms give, bit for bit where they can.

Catches: a row that uses its neighbour's slot or list, entries beyond a list's end, counts of another slot, an id in the last,
partial block, a bias applied twice, the short way of a row without rules changing its logits.
"""

import math

import numpy as np
import pytest
import torch
from support.raising import raises

from minirt.engine.execute.logits_processors import LogitsProcessors
from minirt.engine.execute.sampler import unpack
from minirt.errors import InputError
from minirt.kernels.sampling import logprobs as logprob_kernels
from minirt.kernels.sampling import process as kernels
from minirt.kernels.sampling.dispatch import columns, token_logprobs
from minirt.kernels.sampling.limits import MAX_TOP, MOST_ENTRIES
from minirt.kernels.sampling.slots import Drafts
from minirt.step.rules import Rules

INF, ALL = math.inf, {"any_bias": True, "any_ban": True}


def some_rules(V: int, rng: np.random.Generator) -> list[Rules | None]:
    """Every rule alone and together, with lists of 1 to 300 entries."""

    def ids(count: int) -> list[int]:
        return rng.choice(V, min(count, V), replace=False).tolist()

    bias = {token: float(value) for token, value in zip(ids(300), rng.normal(size=300) * 3, strict=False)}
    allowed = tuple(sorted({*ids(V // 2), V - 1}))
    words = ((3,), (1, 2), (2, 2, 5 % V), (1, 2, 0, V - 1), tuple(ids(9)))
    return [
        None, Rules(presence=0.7), Rules(frequency=-1.3), Rules(repetition=1.7), Rules(-2.0, 0.11, 0.3),
        Rules(bias={V - 1: 5.0}), Rules(bias=bias), Rules(allowed=allowed), Rules(bad_words=words),
        Rules(min_tokens=4, end_ids=(V - 1, 0)), Rules(0.1, 0.2, 1.3, bias, allowed, words, 3, (2,)),
    ]  # fmt: skip


def filled(V: int, device: torch.device, impl: str, seed: int = 0):
    """Processors whose slots are in another order than the rows. → them, the rows' slots, and steps"""
    rng = np.random.default_rng(seed)
    rules = some_rules(V, rng)
    longest = 40 if V > 1000 else 2**15 + 1  # counts of 16 and of 32 bits
    processors = LogitsProcessors(len(rules) + 3, V, longest, device, impl)
    slots = rng.permutation(len(rules) + 3)[: len(rules)].tolist()
    steps = [int(rng.integers(2, 9)) for _ in rules]
    for slot, rule, step in zip(slots, rules, steps, strict=True):
        stale = Rules(1.0, 1.0, 2.0, {0: 9.0, 1: 9.0}, (0,), ((1,), (2, 3)), 30, (0, 1, 2))
        processors.fill(slot, stale, [0, 1, 2], [2, 2])
        if rule is not None:
            tokens = rng.integers(0, 6, 40).tolist()
            processors.fill(slot, rule, tokens[20:], [*[1, 2, 0, 1, 2, 2, 1, 2, 0][: step - 2], 1, 2])
    rows = [-1 if rule is None else slot for slot, rule in zip(slots, rules, strict=True)]
    at = torch.tensor(rows, dtype=torch.int32, device=device)
    return processors, at, torch.tensor(steps, device=device)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("V", [7, 33, 1031, 4099])
def test_process_is_the_eager_form(V, masked, make, device):
    logits = make(11, V, dtype=torch.float32, scale=4.0)
    logits[3, 0], logits[4, V - 1] = -INF, 0.0
    before = logits.clone()
    mask = torch.randint(-(2**31), 2**31 - 1, (11, -(-V // 32)), generator=torch.Generator().manual_seed(V)).int().to(device)
    out = []
    for impl in ("eager", "triton"):
        processors, rows, step = filled(V, device, impl)
        for _ in range(3):  # the counts and the history grow by what is drawn
            out.append(processors.process(logits, rows, step, mask if masked else None, **ALL).clone())
            tokens = out[-1].argmax(-1)
            tokens[5] = -1
            processors.record(tokens, rows, step)
            step = step + 1
        assert torch.equal(logits, before)
    for one, other in zip(out[:3], out[3:], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)
        assert torch.equal(one.isinf(), other.isinf())
        if not masked:
            assert torch.equal(one[0], logits[0])


def test_a_row_does_not_depend_on_the_others(make, device):
    logits = make(11, 1031, dtype=torch.float32, scale=4.0)
    processors, rows, step = filled(1031, device, "triton")
    together = processors.process(logits, rows, step, **ALL).clone()
    for i in range(11):
        alone = processors.process(logits[i : i + 1], rows[i : i + 1], step[i : i + 1], **ALL)
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_drafts_count_as_generated_tokens(impl, make, device):
    """Rows behind drafts are as if the drafts had been drawn before: in counts, biases, and the words that they complete."""
    V, drafts = 1031, torch.tensor([[3, 3, 7], [2, 1, 2], [5, 6, 5]], dtype=torch.int32)
    rules = [
        Rules(presence=0.3, frequency=0.7, repetition=1.7, bias={3: 2.0, 900: -1.0}, bad_words=((3, 3, 4), (9, 3, 3, 8))),
        Rules(bad_words=((1, 2, 1), (2, 1, 2, 5), (2, 6)), min_tokens=4, end_ids=(11,)),
        Rules(repetition=0.5, allowed=tuple(range(0, V, 5))),
    ]
    known = [[9], [4, 1], [5, 5, 5]]  # generated before
    logits = make(4, V, dtype=torch.float32, scale=4.0)
    processors = LogitsProcessors(3, V, 64, device, impl)
    for slot, rule in enumerate(rules):
        processors.fill(slot, rule, [1, 900], known[slot])
    one_by_one = []
    for slot in range(3):
        row = torch.tensor([slot], dtype=torch.int32, device=device)
        for j in range(4):
            step = torch.tensor([len(known[slot]) + j], device=device)
            one_by_one.append(processors.process(logits[j : j + 1], row, step, **ALL).clone())
            if j < 3:
                processors.record(drafts[slot, j : j + 1].long().to(device), row, step)
        processors.fill(slot, rules[slot], [1, 900], known[slot])
    rows, counts = torch.arange(3).repeat_interleave(4).int().to(device), torch.arange(4).repeat(3).int().to(device)
    step = torch.tensor([len(known[slot]) + j for slot in range(3) for j in range(4)], device=device)
    table = torch.full((3, 9), -7, dtype=torch.int32)  # a view of rows with other words around
    table[:, 2:5] = drafts
    rule = Drafts(table.to(device)[:, 2:5], counts)
    together = processors.process(logits.repeat(3, 1), rows, step, drafts=rule, **ALL)
    assert torch.equal(together, torch.cat(one_by_one))
    assert not torch.equal(together[0], together[3]), "the drafts make a difference"


@pytest.mark.parametrize("longest", [16, 2**16])
@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_a_step_counts_a_token_as_often_as_it_is_drawn(impl, longest, device):
    """Several draws of a step belong to one slot; a load and a store for each would lose some of them."""
    processors = LogitsProcessors(1, 33, longest, device, impl)
    processors.fill(0, Rules(frequency=1.0), [], [])
    rows, step = torch.zeros(6, dtype=torch.int32, device=device), torch.arange(6, device=device)
    processors.record(torch.tensor([4, 4, -1, 4, 6, 7], device=device), rows, step)
    assert processors.slots.counts[0].tolist() == [0] * 4 + [6, 0, 2, 2] + [0] * 26


@pytest.mark.parametrize("longest", [2**15, 2**15 + 1])
@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_a_sequence_of_one_token_is_counted_exactly(impl, longest, device):
    """As long as it can be. Catches a count of 16 bits that turns negative, and one that flows over into its neighbor's."""
    processors, row = LogitsProcessors(2, 4, longest, device, impl), torch.tensor([1], dtype=torch.int32, device=device)
    processors.fill(1, Rules(frequency=2.0**-8), [2], [2] * (longest - 3))
    for step in (longest - 3, longest - 2):
        processors.record(torch.tensor([2], device=device), row, torch.tensor([step], device=device))
    logits = torch.zeros(1, 4, device=device)
    result = processors.process(logits, row, torch.tensor([longest - 1], device=device), any_bias=False, any_ban=False)
    assert result.tolist() == [[0, 0, -(longest - 1) / 256, 0]]


@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_the_longest_lists_in_a_long_text(impl, device):
    """Catches a list of which only the beginning counts, and a history of the last tokens that is read or filled at a wrong
    place: the generated tokens are more than it holds, and a bad word has as many as it holds."""
    V, rng = 5000, np.random.default_rng(3)
    generated = rng.integers(0, V, MOST_ENTRIES + 900).tolist()
    known, last = len(generated) - 2, tuple(generated[-MOST_ENTRIES:])
    almost = (*last[:-1], (last[-1] + 1) % V)
    bias = dict.fromkeys(range(MOST_ENTRIES), 1.5)
    rules = {
        "longest": (Rules(bad_words=((*last, 7),)), [7]), "almost": (Rules(bad_words=((*almost, 7),)), []),
        "many": (Rules(bad_words=tuple((token,) for token in range(MOST_ENTRIES))), list(range(MOST_ENTRIES))),
        "two": (Rules(bad_words=((*last[-2:], 9),)), [9]), "bias": (Rules(bias=bias), []),
    }  # fmt: skip
    processors = LogitsProcessors(3, V, 8192, device, impl)
    for rule, expected in rules.values():
        rule.check_sizes()
        processors.fill(2, rule, [], generated[:known])
        row = torch.tensor([2], dtype=torch.int32, device=device)
        for step in range(known, len(generated)):
            processors.record(torch.tensor([generated[step]], device=device), row, torch.tensor([step], device=device))
        step = torch.tensor([len(generated)], device=device)
        result = processors.process(torch.zeros(1, V, device=device), row, step, **ALL)[0]
        assert result.isinf().nonzero().flatten().tolist() == expected
        assert (result == 1.5).nonzero().flatten().tolist() == list(rule.bias)


@pytest.mark.parametrize("rules", [
    Rules(bias=dict.fromkeys(range(MOST_ENTRIES + 1), 1.0)), Rules(bad_words=((1,),) * (MOST_ENTRIES + 1)),
    Rules(bad_words=((1,) * (MOST_ENTRIES + 2),)), Rules(min_tokens=1, end_ids=tuple(range(MOST_ENTRIES + 1))),
])  # fmt: skip
def test_lists_that_are_too_long_are_refused(rules):
    raises(r"too many .* at most 4,096; found 4,097", rules.check_sizes)


@pytest.mark.parametrize("V", [1, 20, 1031, 5000])
def test_logprobs_are_the_eager_form(V, make, device):
    logits = make(6, V, dtype=torch.float32, scale=3.0)
    logits[1] = logits[1].round()  # ties
    logits[2, : V // 2] = -INF
    logits[3] = 0.25
    logits[4] *= 20
    tokens = torch.tensor([0, V - 1, V // 2, 0, int(logits[4].argmax()), -1], device=device)
    wanted = [min(V, n) for n in (20, 7, 1)] + [0, min(V, 20), -1]
    counts = torch.tensor(wanted, dtype=torch.int32, device=device)
    results = {}
    for impl in ("eager", "triton"):
        out = torch.full((6, columns(MAX_TOP)), 77, dtype=torch.int32, device=device)
        assert token_logprobs(logits, tokens, counts, min(V, MAX_TOP), impl=impl, out=out) is out
        results[impl] = unpack(out[:5].cpu(), tokens[:5].tolist(), wanted[:5])
    exact = logits.double().log_softmax(-1)
    for row, (one, other) in enumerate(zip(results["eager"], results["triton"], strict=True)):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.rank == 1 + int((logits[row] > logits[row, one.token_id]).sum())
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert len(one.top) == wanted[row]
        for result in (one, other):
            pairs = [(result.token_id, result.logprob), *result.top]
            for token, logprob in pairs:
                wanted_value = float(exact[row, token])
                assert logprob == pytest.approx(wanted_value, rel=1e-6, abs=1e-5) or wanted_value == -INF == logprob
        order = sorted(range(V), key=lambda v: (-float(logits[row, v]), v))
        assert [token for token, _ in one.top] == order[: wanted[row]]


def test_all_logprobs(make, device):
    logits = make(2, 131, dtype=torch.float32)
    tokens, wanted = torch.tensor([5, 130], device=device), torch.tensor([131, 3], dtype=torch.int32, device=device)
    rows = unpack(token_logprobs(logits, tokens, wanted, 131).cpu(), [5, 130], [131, 3])
    assert [len(row.top) for row in rows] == [131, 3]
    assert math.fsum(math.exp(value) for _, value in rows[0].top) == pytest.approx(1, abs=1e-5)


def test_faulty_arguments_are_refused(make, device):
    processors, rows, step = filled(33, device, "triton")
    logits = make(11, 33, dtype=torch.float32)
    with pytest.raises(InputError, match="out: must not be the logits"):
        kernels.process(logits, logits, rows, step, processors.slots, any_bias=True, any_ban=True)
    with pytest.raises(InputError, match="mask: wrong shape"):
        processors.process(logits, rows, step, torch.zeros(11, 1, dtype=torch.int32, device=device), **ALL)
    small = logprob_kernels.LogprobsWorkspace(1, 33, device)
    raises("workspace: too small", token_logprobs, logits, step, rows, 5, impl="triton", workspace=small)
    raises("unknown implementation", token_logprobs, logits, step, rows, 5, impl="fast")

