"""Gated DeltaNet: references against plain formulas in fp64, kernels against them, states, undone tokens, padding and NaN."""

import math
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from minirt.engine.limits import EngineLimits
from minirt.engine.warmup.steps import warm_up_steps
from minirt.errors import InputError
from minirt.kernels.gated_delta import chunk, dispatch, reference
from minirt.kernels.gated_delta.operands import CHUNK, GatedDeltaSequences, GatedDeltaState, GatedDeltaWeights

EPS = 1e-6


class Net(NamedTuple):
    """The sizes and weights of a layer, and a maker of inputs."""

    Hk: int
    Hv: int
    Dk: int
    Dv: int
    weights: GatedDeltaWeights

    @property
    def channels(self) -> int:
        return 2 * self.Hk * self.Dk + self.Hv * self.Dv

    def state(self, slots: int, dtype: torch.dtype, device: torch.device, drafts: int = 0) -> GatedDeltaState:
        """States of NaN, as an earlier sequence may have left them."""
        ring, nan = 3 + 2 * drafts if drafts else 4, float("nan")
        conv = torch.full((slots, ring, self.channels), nan, dtype=dtype, device=device)
        recurrent = torch.full((slots, self.Hv, self.Dk, self.Dv), nan, device=device)
        if not drafts:
            return GatedDeltaState(conv, recurrent)
        gates = torch.full((slots, ring, 2, self.Hv), nan, device=device)
        return GatedDeltaState(conv, recurrent, gates, torch.full((slots, self.Hv), 10**6, dtype=torch.int32, device=device))


def net(make, dtype, Hk=2, Hv=4, Dk=16, Dv=16, decay=0.0):
    """`decay` is added to A_log: large values forget at once, small ones never."""
    channels = 2 * Hk * Dk + Hv * Dv
    A_log, dt_bias = make(Hv, dtype=torch.float32) + decay, make(Hv, dtype=torch.float32)
    norm = 1 + make(Dv, dtype=dtype, scale=0.3)
    return Net(Hk, Hv, Dk, Dv, GatedDeltaWeights(make(channels, 4, dtype=dtype, scale=0.5), A_log, dt_bias, norm, EPS))


def inputs(make, layer, tokens, dtype):
    """qkvz [T, …] and ba [T, …], both with rows apart."""
    width = layer.channels + layer.Hv * layer.Dv
    both = make(tokens, width + 2 * layer.Hv + 3, dtype=dtype)
    return both[:, :width], both[:, width : width + 2 * layer.Hv]


def truth(layer: Net, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor]:
    """One whole sequence by plain formulas in fp64, token by token and head by head: outputs [T, Hv·Dv], last state."""
    w = layer.weights
    x, ba, conv, norm = qkvz.double(), ba.double(), w.conv.double(), w.norm.double()
    T, keys, rows = len(x), layer.Hk * layer.Dk, []
    S = torch.zeros(layer.Hv, layer.Dk, layer.Dv, dtype=torch.float64, device=x.device)
    inputs_, z = x[:, : layer.channels], x[:, layer.channels :]
    for t in range(T):
        y = sum(conv[:, 3 - j] * inputs_[t - j] for j in range(4) if t >= j)
        y = y / (1 + (-y).exp())
        heads = []
        for h in range(layer.Hv):
            own_key = h // (layer.Hv // layer.Hk) * layer.Dk
            q, k = y[own_key : own_key + layer.Dk], y[keys + own_key : keys + own_key + layer.Dk]
            v = y[2 * keys + h * layer.Dv : 2 * keys + (h + 1) * layer.Dv]
            q, k = (u / (u @ u + EPS).sqrt() for u in (q, k))
            beta = 1 / (1 + (-ba[t, h]).exp())
            s = ba[t, layer.Hv + h] + w.dt_bias[h].double()
            softplus = torch.log1p((-s.abs()).exp()) + s.clamp(min=0)
            S[h] = S[h] * (-w.A_log[h].double().exp() * softplus).exp()
            S[h] = S[h] + torch.outer(k, beta * (v - S[h].T @ k))
            o = S[h].T @ q / math.sqrt(layer.Dk)
            o = o / (o.square().mean() + EPS).sqrt() * norm
            gate = z[t, h * layer.Dv : (h + 1) * layer.Dv]
            heads.append(o * gate / (1 + (-gate).exp()))
        rows.append(torch.cat(heads))
    return torch.stack(rows), S


class Served:
    """Sequences that are computed in steps, by the reference or by the kernels."""

    def __init__(self, layer, dtype, device, slots, kernels, drafts=0, invariant=False):
        self.own, self.kernels, self.lengths, self.invariant = layer, kernels, {}, invariant
        self.state, self.device = layer.state(slots, dtype, device, drafts), device

    def step(self, members: list[tuple[int, Tensor, Tensor]], padding: int = 0, snapshots=None, longest=0) -> list[Tensor]:
        """(slot, qkvz, ba) of each sequence's new tokens → their outputs. The kernels' outputs are filled with NaN first.

        `snapshots`: of each sequence, a list of (row, offset). `longest`: the bound of new tokens of a sequence, if it is higher.
        """
        slots, counts = [m[0] for m in members], [len(m[1]) for m in members]
        starts = [self.lengths.get(slot, 0) for slot in slots]
        lens = [start + count for start, count in zip(starts, counts, strict=True)]
        width = members[0][1].shape[1]
        rows = [torch.cat(member[1:], 1) for member in members]
        both = torch.cat([*rows, *[torch.full_like(rows[0][:1], torch.nan)] * padding])
        qkvz, ba = both[:, :width], both[:, width:]
        if self.kernels:
            ints = lambda values: torch.tensor(values, dtype=torch.int32, device=self.device)  # noqa: E731
            sequences = GatedDeltaSequences(
                ints([sum(counts[:i]) for i in range(len(counts) + 1)] + [sum(counts)] * padding),
                ints(lens + [0] * padding), ints(slots + [-1] * padding),
                None if snapshots is None else ints([(each + [(-1, -1)] * 2)[:2] for each in snapshots + [[]] * padding]),
            )  # fmt: skip
            out = qkvz.new_full((len(qkvz), self.own.Hv * self.own.Dv), torch.nan)
            longest = max(*counts, longest)
            dispatch.gated_delta_net(
                qkvz, ba, self.own.weights, self.state, sequences, longest, out, invariant=self.invariant
            )
            assert out[sum(counts) :].isnan().all()
        else:
            out = reference.gated_delta_net(qkvz, ba, self.own.weights, self.state, counts, lens, slots, snapshots or ())
        self.lengths.update(zip(slots, lens, strict=True))
        return list(out[: sum(counts)].split(counts))

    def undo(self, slot: int, length: int) -> None:
        """The sequence has `length` tokens again."""
        self.lengths[slot] = length


def chunks_of(x, ba, sizes):
    start = 0
    for size in sizes:
        yield x[start : start + size], ba[start : start + size]
        start += size


@pytest.mark.parametrize("groups", [1, 2, 3, 4])
@pytest.mark.parametrize("sizes", [(200,), (1, 17, 63, 64, 65), (65, 1, 1, 2, 64, 1)], ids=str)
def test_references_agree_with_plain_formulas(make, device, groups, sizes):
    """Catches a wrong decay, sign, gate, order of the heads or of the taps, and a state that is not handed on between steps."""
    layer = net(make, torch.float64, Hv=2 * groups, Dk=8, Dv=5)
    A_log, dt_bias = layer.weights.A_log.double(), layer.weights.dt_bias.double()
    layer = layer._replace(weights=layer.weights._replace(A_log=A_log, dt_bias=dt_bias))
    x, ba = inputs(make, layer, sum(sizes), torch.float64)
    served = Served(layer, torch.float64, device, 3, kernels=False)
    served.state = GatedDeltaState(*(t.double() for t in served.state[:2]))
    out = torch.cat([served.step([(1, *part)])[0] for part in chunks_of(x, ba, sizes)])
    exact, S = truth(layer, x, ba)
    torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(served.state.recurrent[1], S, rtol=1e-9, atol=1e-9)
    assert served.state.recurrent[[0, 2]].isnan().all()


@pytest.mark.parametrize("decay", [-12.0, 0.0, 6.0])
def test_chunked_is_recurrent(make, decay):
    """Catches a factor that overflows at strong decays, and a chunk whose keys are all alike (powers of A are huge there)."""
    q, k, v = (reference.l2_norm(make(2, 150, 3, 8, dtype=torch.float64)) for _ in range(3))
    k[1] = k[1, 0, 0]
    g, beta = -make(2, 150, 3, dtype=torch.float64).exp() * math.exp(decay), make(2, 150, 3, dtype=torch.float64).sigmoid()
    beta[1] = 1
    state = make(2, 3, 8, 8, dtype=torch.float64)
    result, expected = (
        rule(q, k, v, g, beta, state) for rule in (reference.chunk_gated_delta_rule, reference.recurrent_gated_delta_rule)
    )
    for mine, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def both(layer, dtype, device, slots, drafts=0):
    return [Served(layer, dtype, device, slots, kernels, drafts) for kernels in (True, False)]


@pytest.mark.parametrize("case", dispatch.CASES, ids=str)
def test_kernels_against_reference(case, dtype, make, device, agrees):
    """Outputs and states of a ragged step, after a step of the contexts; slots in another order, one of them unused."""
    layer = net(make, dtype, *(case[name] for name in ("Hk", "Hv", "Dk", "Dv")))
    lens, contexts = case["lens"], case["contexts"]
    slots = [(3 * i + 1) % (len(lens) + 1) for i in range(len(lens))] if len(lens) % 2 else list(range(len(lens), 0, -1))
    data = [inputs(make, layer, context + count, dtype) for context, count in zip(contexts, lens, strict=True)]
    mine, theirs = both(layer, dtype, device, len(lens) + 1)
    results = []
    for served in (mine, theirs):
        before = [
            (slot, x[:context], ba[:context]) for slot, context, (x, ba) in zip(slots, contexts, data, strict=True) if context
        ]
        if before:
            served.step(before)
        results.append(served.step(
            [(slot, x[n:], ba[n:]) for slot, n, (x, ba) in zip(slots, contexts, data, strict=True)],
            padding=2 if served.kernels else 0,
        ))  # fmt: skip
    for i, (slot, context, (x, ba)) in enumerate(zip(slots, contexts, data, strict=True)):
        exact, S = truth(layer, x, ba)
        agrees(results[0][i], results[1][i], exact[context:])
        agrees(mine.state.recurrent[slot], theirs.state.recurrent[slot], S)
        last = torch.arange(max(0, len(x) - 3), len(x), device=device)
        assert torch.equal(mine.state.conv[slot, last % 4], x[last, : layer.channels])
    (unused,) = set(range(len(lens) + 1)) - set(slots)
    assert mine.state.recurrent[unused].isnan().all()
    assert mine.state.conv[unused].isnan().all()


@pytest.mark.parametrize("decay", [-14.0, 5.0])
def test_long_and_short_memories(decay, make, device, agrees):
    """g near 0 (log(1 + y) of a small y loses it), and g of −1000 and less: e^g is 0, and no difference of sums is NaN."""
    layer = net(make, torch.float32, decay=decay)
    x, ba = inputs(make, layer, 140, torch.float32)
    if decay > 0:
        ba[:, layer.Hv :] = 30 + ba[:, layer.Hv :]
    mine, theirs = both(layer, torch.float32, device, 1)
    result, expected = (
        torch.cat([served.step([(0, *part)])[0] for part in chunks_of(x, ba, (131, 1, 8))]) for served in (mine, theirs)
    )
    exact, S = truth(layer, x, ba)
    agrees(result, expected, exact)
    agrees(mine.state.recurrent[0], theirs.state.recurrent[0], S)


@pytest.mark.parametrize("a", [-17.0, -15.2])
def test_slow_decay_is_not_lost(a, make, device):
    """softplus of −17 is 4e-8, which 1 + y rounds away, and that of −15.2 it changes by a tenth. With A of e^14 it matters."""
    layer = net(make, torch.float32)
    layer.weights.A_log.fill_(14.0)
    layer.weights.dt_bias.zero_()
    x, ba = inputs(make, layer, 70, torch.float32)
    ba[:, layer.Hv :] = a
    for sizes in ((70,), (1,) * 5):
        served = Served(layer, torch.float32, device, 1, kernels=True)
        for part in chunks_of(x, ba, sizes):
            served.step([(0, *part)])
        exact = truth(layer, x[: sum(sizes)], ba[: sum(sizes)])[1]
        assert (served.state.recurrent[0] - exact).norm() < 2e-5 * exact.norm()


@pytest.mark.parametrize("count", [1, 70])
def test_nan_stays_in_its_sequence(count, make, device):
    """Neither NaN in the inputs of a neighbour, before or after, nor NaN in its state."""
    layer = net(make, torch.float32, Hk=1, Hv=2)
    data = [inputs(make, layer, n, torch.float32) for n in (count, count, 3, count)]
    clean = Served(layer, torch.float32, device, 4, kernels=True)
    expected = clean.step([(i, *part) for i, part in enumerate(data)])
    dirty = Served(layer, torch.float32, device, 4, kernels=True)
    for i in (0, 2):
        data[i][0].fill_(torch.nan)
        data[i][1].fill_(torch.nan)
    result = dirty.step([(i, *part) for i, part in enumerate(data)])
    for i in range(4):
        assert result[i].isnan().all() if i in (0, 2) else torch.equal(result[i], expected[i])
        assert dirty.state.recurrent[i].isnan().any() == (i in (0, 2))


def test_a_sequence_does_not_depend_on_its_step(make, device):
    """The same bits alone, beside prompts, beside single tokens, in another slot, at another row."""
    layer = net(make, torch.float32, Hk=1, Hv=2)
    (x, ba), (other, other_ba) = (inputs(make, layer, 80, torch.float32) for _ in range(2))
    alone, beside = (Served(layer, torch.float32, device, 3, kernels=True) for _ in range(2))
    for first, last in ((0, 66), (66, 67), (67, 78), (78, 79), (79, 80)):
        part = x[first:last], ba[first:last]
        (expected,) = alone.step([(0, *part)])
        result = beside.step([(0, other[first:80], other_ba[first:80]), (2, *part), (1, other[:1], other_ba[:1])])
        beside.lengths |= {0: last, 1: 0}
        assert torch.equal(result[1], expected)


@contextmanager
def deterministic_algorithms():
    """In which PyTorch fills uninitialized tensors, of integers with the largest one."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.exhaustive
@pytest.mark.parametrize("drafts", [0, 3])
def test_more_prompts_than_programs(drafts, make, device, dtype):
    """13 prompts, of more chunks than a grid has, among single tokens and padding: each has the bits that it has alone.

    Catches a chunk or a prompt that no program computes or two do, and one that is computed for a neighbour's slot.
    """
    layer, counts = net(make, dtype, Hk=1, Hv=2), (5, 70, 1, 6, 64, 65, 5, 1, 130, 7, 66, 5, 1, 9, 8, 64)
    data = [inputs(make, layer, count, dtype) for count in counts]
    assert sum(-(-count // CHUNK) for count in counts if count > 1) > sum(counts) // CHUNK + chunk._PROMPTS
    assert sum(count > 3 for count in counts) > chunk._PROMPTS
    together, alone = (Served(layer, dtype, device, len(counts), kernels=True, drafts=drafts) for _ in range(2))
    slots = [i * 7 % len(counts) for i in range(len(counts))]
    result = together.step([(slot, *part) for slot, part in zip(slots, data, strict=True)], padding=3)
    for slot, part, out in zip(slots, data, result, strict=True):
        (expected,) = alone.step([(slot, *part)])
        assert torch.equal(out, expected)
    for ours, theirs in zip(together.state[:2], alone.state[:2], strict=True):
        assert torch.equal(ours.nan_to_num(99), theirs.nan_to_num(99))


def test_a_step_without_prompts(make, device):
    """Of a CUDA graph in which there may be some: single tokens have the bits of a step of single tokens, others are not written.

    Catches a work list that is not written, so that what the memory held before is taken for one.
    """
    layer = net(make, torch.float32, Hk=1, Hv=2)
    data = [inputs(make, layer, 1, torch.float32) for _ in range(3)]
    steps = []
    for longest in (1, 70):
        served = Served(layer, torch.float32, device, 4, kernels=True)
        with deterministic_algorithms():  # fills new tensors
            steps.append((served.step([(i, *part) for i, part in enumerate(data)], padding=1, longest=longest), served.state))
    (result, state), (expected, other) = steps
    assert all(map(torch.equal, result, expected))
    for ours, theirs in zip(state[:2], other[:2], strict=True):
        assert torch.equal(ours.nan_to_num(99), theirs.nan_to_num(99))


@pytest.mark.exhaustive
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_width_of_programs_changes_no_bit(drafts, make, device, dtype, monkeypatch):
    """The number of prompts chooses it. Catches a channel or a snapshot that a program leaves to another one."""
    layer, results = net(make, dtype, Hk=1, Hv=2, Dk=64, Dv=64), []
    data = [inputs(make, layer, count, dtype) for count in (70, 1, 129, 64)]
    chosen = chunk._state_config

    for block_v, num_stages in ((None, None), (64, 1), (32, 3), (16, 1)):
        if block_v is not None:
            changes = {"block_v": block_v, "num_stages": num_stages}
            monkeypatch.setattr(chunk, "_state_config", lambda a, changes=changes: chosen(a)._replace(**changes))
        served = Served(layer, dtype, device, 6, kernels=True, drafts=drafts)
        rows = served.step([(slot, *both) for slot, both in enumerate(data)], snapshots=[[], [], [(5, 64)], []])
        results.append((rows, served.state.recurrent[[0, 2, 3, 5]]))
    for rows, states in results[1:]:
        assert all(map(torch.equal, rows, results[0][0]))
        assert torch.equal(states, results[0][1])


@pytest.mark.parametrize("seqs", [1, 5, 64])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("sms", [78, 114, 132])
@pytest.mark.parametrize("Hv", [4, 16, 24, 32, 48, 64])
def test_warm_up_launches_every_width_of_programs(Hv, sms, drafts, seqs, monkeypatch):
    """Catches a configuration that the first step of several prompts would compile while serving, one that changes within a
    variant, and one that goes by the number of sequences, which in a CUDA graph is the largest."""
    monkeypatch.setattr(chunk, "capability", lambda device: 90)
    monkeypatch.setattr(chunk, "sm_count", lambda device: sms)

    def config(tokens, longest):
        shape, x = (Hv // 4, Hv, 128, 128), torch.empty(tokens, 1, dtype=torch.bfloat16, device="meta")
        return chunk._state_config(SimpleNamespace(head_shape=shape, qkvz=x, max_query_len=longest))

    steps = [[len(c.tokens) for c in step] for step in warm_up_steps(EngineLimits(8192, seqs, 8192, max_drafts=drafts))]
    assert all(len(step) <= seqs or len(step) == 1 for step in steps)
    warm = {config(sum(step), max(step)) for step in steps if max(step) > max(1, 1 + drafts)}
    (variants,) = dispatch.CHUNK_PROMPTS
    for prompts in range(1, seqs + 1):
        assert config(prompts * 90, 90) in warm
        assert config(prompts * 90 + 30, 90) == config(prompts * 90, 90)  # beside single tokens
        assert variants.variant_end(prompts) >= prompts
    assert config(2048, 2048) == config(90, 90)  # of a CUDA graph
    assert (config(90, 90).num_stages == 3) == (2 * Hv <= sms)
    assert config(64 * 90, 90).num_stages == 1


@pytest.mark.parametrize("drafts", [0, 2, 5])
def test_an_invariant_step_has_one_form(drafts, make, device, agrees):
    """Outputs, states and kept states, bit for bit, of chunks of any length, and after drafts that are undone. Catches chunks for
    prompts, inputs that a program overwrites before another reads them, a kept state of another token."""
    dtype, layer = torch.float32, net(make, torch.float32, Hk=1, Hv=2, Dk=16, Dv=32)
    x, ba = inputs(make, layer, 70, dtype)
    other_x, other_ba = inputs(make, layer, 9, dtype)
    expected, _ = truth(layer, x, ba)
    results = []
    for sizes in ((70,), (1, 2, 3, 1, 5, 57, 1), (66, 1, 1, 1, 1)):
        served = Served(layer, dtype, device, 5, True, drafts, True)
        rows, done = [], 0
        for i, (part, gates) in enumerate(chunks_of(x, ba, sizes)):
            snapshots = [[(3, 64)]] if len(part) > 64 else None
            if drafts and i in (2, 4):  # tokens that are not kept
                served.step([(2, other_x[:drafts], other_ba[:drafts])])
                served.undo(2, done)
            members = [(2, part, gates)] + [(0, other_x, other_ba)] * (i == 3)
            rows.append(served.step(members, 1, None if snapshots is None else snapshots + [[]] * (i == 3))[0])
            done += len(part)
        served.step([(2, other_x, other_ba)])  # after which all is folded
        results.append((torch.cat(rows), served.state.recurrent[2].clone(), served.state.recurrent[3:].clone()))
    out, state, kept = results[0]
    assert ((out - expected).norm() / expected.norm()).item() < 1e-5
    assert all(torch.equal(other, out) and torch.equal(end, state) for other, end, _ in results)
    assert torch.equal(results[2][2][0], kept[0])
    served.lengths[3] = 64  # what follows a kept state is what follows the sequence
    (rest,) = served.step([(3, x[64:], ba[64:])])
    assert torch.equal(rest, out[64:])


@pytest.mark.parametrize("count", [1, 70])
def test_a_sequence_without_a_slot_is_not_touched(count, make, device):
    """Slot −1: nothing is written, neither outputs nor a state."""
    layer = net(make, torch.float32, Hk=1, Hv=1)
    x, ba = inputs(make, layer, count, torch.float32)
    served = Served(layer, torch.float32, device, 2, kernels=True)
    assert served.step([(-1, x, ba)])[0].isnan().all()
    assert all(tensor.isnan().all() for tensor in served.state[:2])


@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])
def test_drafts_are_undone(kernels, make, device):
    """Steps of 1 + 3 tokens of which 1 to 4 stay, also none of a step's: the others must leave no trace.

    The outputs equal those of the same tokens without drafts; then comes a part of a prompt, which folds what is left. Its slot
    is used again for another sequence. Catches a token that is folded twice or not at all, a row of the ring that a draft
    overwrites too early, and gates of the wrong token.
    """
    layer = net(make, torch.float32, Hk=1, Hv=2)
    served = Served(layer, torch.float32, device, 2, kernels, drafts=4)
    for kept_counts in ((1, 4, 2, 3, 0, 1, 1, 4, 0, 2), (2, 0, 3)):
        x, ba = inputs(make, layer, 80, torch.float32)
        wrong, wrong_ba = inputs(make, layer, 4, torch.float32)
        exact = truth(layer, x, ba)[0]
        (out,) = served.step([(1, x[:6], ba[:6])])
        torch.testing.assert_close(out.double(), exact[:6], rtol=1e-4, atol=2e-5)
        length, served.lengths[1] = 6, 6
        for step, kept in enumerate(kept_counts):
            size = 4 if step % 3 else max(kept, 1)
            here = slice(length, length + kept)
            tokens = torch.cat((x[here], wrong))[:size], torch.cat((ba[here], wrong_ba))[:size]
            (out,) = served.step([(1, *tokens)])
            torch.testing.assert_close(out[:kept].double(), exact[length : length + kept], rtol=1e-4, atol=2e-5)
            length += kept
            served.undo(1, length)
        (out,) = served.step([(1, x[length : length + 7], ba[length : length + 7])])
        torch.testing.assert_close(out.double(), exact[length : length + 7], rtol=1e-4, atol=2e-5)
        length += 7
        (out,) = served.step([(1, x[length : length + 1], ba[length : length + 1])])
        torch.testing.assert_close(out.double(), exact[length : length + 1], rtol=1e-4, atol=2e-5)
        served.undo(1, 0)
    assert served.state.recurrent[0].isnan().all()
    outs = served.step([(1, x[:4], ba[:4]), (0, x[:66], ba[:66])])  # beside a prompt
    for out, count in zip(outs, (4, 66), strict=True):
        torch.testing.assert_close(out.double(), exact[:count], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])
def test_snapshots_are_states_of_runs_that_end_there(kernels, drafts, make, device):
    """To the bit, as is what follows from them: after one chunk or several, two of a sequence, beside sequences without.

    Catches a state of another chunk, inputs of the sequence's end, a count of folded tokens that is the slot's, a row that
    belongs to another sequence, and tokens behind a snapshot that are left out or computed twice.
    """
    layer, contexts = net(make, torch.float32, Hk=1, Hv=2, Dv=32), (0, 5, 0, 70, 2)
    snapshots = [[(6, 64), (7, 128)], [(8, 64)], [], [(9, 128)], []]
    counts = (150, 65, 66, 193, 1)
    data = [inputs(make, layer, n + count, torch.float32) for n, count in zip(contexts, counts, strict=True)]
    before = [(i, x[:n], ba[:n]) for i, (n, (x, ba)) in enumerate(zip(contexts, data, strict=True)) if n]
    served, plain = (Served(layer, torch.float32, device, 11, kernels, drafts) for _ in range(2))
    outs = []
    for each, stored in ((served, snapshots), (plain, None)):
        each.step(before)
        new = [(i, x[n:], ba[n:]) for i, (n, (x, ba)) in enumerate(zip(contexts, data, strict=True))]
        outs.append(each.step(new, padding=1, snapshots=stored))
    if kernels:  # the reference computes other parts of a sequence
        for result, expected in zip(*outs, strict=True):
            assert torch.equal(result, expected)
        for i in range(5):
            for ours, theirs in zip(served.state[:2], plain.state[:2], strict=True):
                assert torch.equal(ours[i].nan_to_num(99), theirs[i].nan_to_num(99))
    for rows in (5, 10):
        assert served.state.recurrent[rows].isnan().all(), "a row that is nobody's"
        assert served.state.conv[rows].isnan().all()
    ring = served.state.conv.shape[1]
    for i, (context, stored) in enumerate(zip(contexts, snapshots, strict=True)):
        (x, ba), x_new = data[i], data[i][0][context:]
        for row, offset in stored:
            ends = Served(layer, torch.float32, device, 11, kernels, drafts)
            ends.step(before)
            ends.step([(i, x_new[:offset], ba[context : context + offset])])
            length = context + offset
            at = torch.arange(length - 3, length, device=device) % ring
            assert torch.equal(served.state.recurrent[row], ends.state.recurrent[i])
            assert torch.equal(served.state.conv[row][at], ends.state.conv[i][at])
            if drafts:
                assert torch.equal(served.state.folded[row], ends.state.folded[i])
            served.lengths[row] = length
            (result,), (expected,) = served.step([(row, x[length:], ba[length:])]), ends.step([(i, x[length:], ba[length:])])
            assert torch.equal(result, expected)
            if kernels and device.type == "cuda":  # on an H100, 2e-7 apart (docs/decisions/gated-delta.md)
                torch.testing.assert_close(result, outs[0][i][offset:], rtol=1e-5, atol=1e-6)
            elif not kernels or len(result) > 3:  # others are computed by another kernel
                assert torch.equal(result, outs[0][i][offset:])


def test_wrong_operands_are_named(make, device):
    """Each check has an operand that it refuses, by name."""
    layer = net(make, torch.float32)
    x, ba = inputs(make, layer, 3, torch.float32)
    state, w = layer.state(2, torch.float32, device), layer.weights
    ints = torch.tensor([0, 3], dtype=torch.int32, device=device)
    good = {
        "qkvz": x, "ba": ba, "weights": w, "state": state, "sequences": GatedDeltaSequences(ints, ints[1:], ints[:1]),
        "max_query_len": 3,
    }  # fmt: skip
    bad = {
        "qkvz: wrong shape": {"qkvz": x[:, 1:]}, "ba: wrong shape": {"ba": ba[:2]},
        "weights.conv: wrong shape": {"weights": w._replace(conv=w.conv[:, 1:])},
        "weights.A_log: wrong dtype": {"weights": w._replace(A_log=w.A_log.double())},
        "state.recurrent: wrong dtype": {"state": state._replace(recurrent=state.recurrent.double())},
        "state.conv: wrong shape": {"state": state._replace(conv=state.conv[:, :3].contiguous())},
        "recurrent: unsupported head size": {"state": state._replace(recurrent=torch.zeros(2, 4, 24, 16, device=device))},
        "state.gates, state.folded": {"state": state._replace(folded=torch.zeros(2, 4, dtype=torch.int32, device=device))},
        "sequences.seq_lens: wrong shape": {"sequences": GatedDeltaSequences(ints, ints, ints[:1])},
        "sequences.snapshots: wrong shape": {"sequences": GatedDeltaSequences(ints, ints[1:], ints[:1], ints)},
    }  # fmt: skip
    dispatch.gated_delta_net(**good)
    for message, change in bad.items():
        with pytest.raises(InputError, match=message):
            dispatch.gated_delta_net(**good | change)


FORMS = [pytest.param(False, marks=pytest.mark.exhaustive), pytest.param(True, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("kernels", FORMS, ids=["reference", "kernels"])
def test_a_state_over_100_000_tokens(kernels, make, device, agrees):
    """Prompts of 20,000 tokens, then single ones, with heads that never forget and heads that do: errors do not add up."""
    layer, size = net(make, torch.float32, Hk=1, Hv=2), 20_000
    layer.weights.A_log.copy_(torch.tensor([-9.0, 1.0], device=device))
    wide = layer._replace(weights=GatedDeltaWeights(*(w.double() for w in layer.weights[:4]), EPS))
    exact = Served(wide, torch.float64, device, 1, kernels=False)
    exact.state = GatedDeltaState(*(t.double() for t in exact.state[:2]))
    served = [Served(layer, torch.float32, device, 1, own_kernels) for own_kernels in {kernels, False}]
    sizes = [size] * 5 + [1] * 20
    for count in sizes:
        x, ba = inputs(make, layer, count, torch.float32)
        (truth_out,) = exact.step([(0, x.double(), ba.double())])
        outs = [each.step([(0, x, ba)])[0] for each in served]
        assert all((out - truth_out).norm() < 1e-4 * truth_out.norm() for out in outs)
    for each in served:
        assert (each.state.recurrent - exact.state.recurrent).norm() < 1e-4 * exact.state.recurrent.norm()
    if kernels:
        mine, theirs = sorted(served, key=lambda each: not each.kernels)
        agrees(mine.state.recurrent[0], theirs.state.recurrent[0], exact.state.recurrent[0])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 70])
def test_states_past_2_31(count, make, device):
    """The last slot of a state of more than 2³¹ values: the same bits as in a small one."""
    layer = net(make, torch.float32, Hk=1, Hv=1, Dk=128, Dv=128)
    slots = 2**31 // 128**2 + 2
    x, ba = inputs(make, layer, count, torch.float32)
    outs = []
    for many in (2, slots):
        served = Served(layer, torch.float32, device, many, kernels=True)
        outs.append(served.step([(many - 1, x, ba)])[0])
    assert torch.equal(*outs)
