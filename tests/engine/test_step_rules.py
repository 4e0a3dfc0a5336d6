"""Rules that hold from step to step: who may be in a step, what survives a preemption or a failure, and where drafts stop.

Catches a step with more KV splits than its kernels have room for, logits that come twice or never, a request that keeps all
others waiting, drafts that escape a penalty or a grammar, and a token that reaches another request.
"""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine.test_engine import IDS, PAGE, VOCAB, Drafts, add, drafting, engine, finish, following, undisturbed

from minirt.engine.engine import Engine, Request
from minirt.engine.limits import EngineLimits, EngineOptions, max_splits
from minirt.errors import UnsupportedError
from minirt.kernels.step.table import MATCHED, NEXT_TOKENS, NUM_CACHED, NUM_NEXT, PROMPT_LEN
from minirt.sampling_params import SamplingParams, resolve
from minirt.step.kv_cache import KVCache, PagesSpec, StateSpec
from minirt.structured.params import StructuredOutputsParams

NOTHING = replace(resolve(None, None), max_tokens=0)


def greedy(count, **options):
    return resolve(SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, **options), None)


def nine(batch, cache):
    return torch.zeros(len(batch.logits_indices), VOCAB).index_fill_(1, torch.tensor([9]), 1.0)


def test_sequences_that_share_pages_stay_within_the_bound_of_kv_splits():
    """The cache has 16 splits. Eight sequences of eight splits each, seven of them shared, would have 64 in one step."""
    cache, most = KVCache([PagesSpec(1, 1)], 64, page_size=64), []

    def model(batch, cache):
        most.append((batch.num_seqs, int(batch.split_starts_device[-1])))
        return nine(batch, cache)

    it = Engine(model, cache, EngineLimits(4096, 16, 4096), EngineOptions(lookahead=1), vocab_size=VOCAB)
    add(it, [3] * 2000, greedy(4))
    finish(it)
    ids = [add(it, [3] * 1990 + [i], greedy(4)) for i in range(16)]
    tokens = [output for _ in range(200) for output in it.step() for _ in output.token_ids]
    assert {output.request_id for output in tokens} == set(ids)
    assert len(tokens) == 4 * 16
    assert all(splits <= max_splits(count, 4096, cache.capacity) for count, splits in most)
    assert max(count for count, _ in most) > 2, "they still run together"


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("count", [14, 18, 21, 24, 29])
def test_logits_of_a_preempted_request_come_once(count, lookahead):
    it, _ = engine(pages=12, seqs=4, budget=4, length=48, lookahead=lookahead)
    for i in range(2):
        add(it, [50 + i] * 7, greedy(30))
    for _ in range(5):
        it.step()
    own = next(IDS)
    it.add(Request(own, list(range(count)), NOTHING, logits_only=True))
    outputs = [output for _ in range(300) for output in it.step()]
    assert not it.has_work
    (output,) = [output for output in outputs if output.request_id == own]
    assert output.logits.argmax(-1).tolist() == [following(range(i + 1)) for i in range(count)]
    assert it.stats.num_preemptions


def test_with_drafts_equal_sizes_do_not_mean_that_every_row_is_kept():
    """The device may have fewer tokens than the plan says. Its tokens are without gaps then, its rows of logits are not."""
    it, _ = drafting(0.5, seed=3, lookahead=1)
    runner, wrong, seen = it._runner, [], []
    eager = runner._without_cuda_graph

    def as_on_a_gpu(plan, **options):
        runner._cuda = True
        try:
            _, batch = eager(plan, **options)
        finally:
            runner._cuda = False
        seen.append(batch.every_row)
        if batch.every_row and batch.logits_indices.tolist() != list(range(batch.num_tokens)):
            wrong.append(plan)
        return eager(plan, **options)

    runner._without_cuda_graph = as_on_a_gpu
    for prompt in ([50, 51], [60, 61]):
        add(it, prompt, greedy(12))
    finish(it)
    assert not wrong
    assert len(seen) > 4


class Known(Drafts):
    """Proposes what the same request yields without drafts, then wrong tokens."""

    def __init__(self, tokens):
        super().__init__(1.0)
        self.tokens = tokens

    def propose(self, table, columns, rows, batch, wanted):
        for slot in rows.slots.tolist():
            if slot >= 0 and table[slot, NUM_NEXT]:
                at = int(table[slot, NUM_CACHED]) + 1 - int(table[slot, PROMPT_LEN])
                own = [token + (i > 1) for i, token in enumerate(self.tokens[at : at + 4])]
                table[slot, NEXT_TOKENS + 1 : NEXT_TOKENS + 1 + len(own)] = torch.tensor(own, dtype=torch.int32)
                table[slot, NUM_NEXT], table[slot, MATCHED] = 1 + len(own), len(own)


class Alternate:
    """Even and odd tokens in turn."""

    def __init__(self):
        self.count = 0

    def accept(self, tokens):
        for token in tokens:
            assert token % 2 == self.count % 2
            self.count += 1

    def compile(self, spec):
        pass

    def prepare(self, spec, ends, min_tokens):
        future = Future()
        future.set_result(Alternate())
        return future

    def fill(self, masks, rows):
        row = 0
        for own, num_rows, drafts in rows:
            masks[row : row + num_rows] = -1
            if own is not None:
                for i in range(min(len(drafts), num_rows - 1) + 1):
                    masks[row + i] = 0x55555555 if (own.count + i) % 2 == 0 else -0x55555556
                    if i < len(drafts) and drafts[i] % 2 != (own.count + i) % 2:  # forbidden, so nobody reads the rows after it
                        break
            row += num_rows
        assert row == len(masks)
        return {}


@pytest.mark.parametrize("proposed", [[0, 1] * 9, [0, 1, 1, 0, 0] * 4])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_grammar_sees_every_token(proposed, lookahead):
    """The masks of a step's rows are those behind its drafts. The model alone would draw token 1 each time."""
    it, cache = drafting(1.0)
    steps = []

    def model(batch, cache):
        steps.append(batch.num_tokens)
        return torch.tensor([1.0, 2.0] + [0.0] * (VOCAB - 2)).repeat(len(batch.logits_indices), 1)

    it = Engine(
        model, cache, it.limits, EngineOptions(lookahead=lookahead, adaptive_drafts=False), vocab_size=VOCAB,
        proposer=Known(proposed), constraints=Alternate(),
    )  # fmt: skip
    spec = StructuredOutputsParams(regex="a*")
    sampling = resolve(SamplingParams(max_tokens=9, temperature=0.0, structured_outputs=spec), None)
    it.add(Request(next(IDS), [50, 51], sampling))
    tokens = [token for _ in range(30) for output in it.step() for token in output.token_ids]
    assert tokens == [0, 1] * 4 + [0]
    assert it.stats.drafts.num_accepted_tokens > 0
    assert len(steps) < 9


def test_drafts_are_refused_where_states_cannot_be_taken_back():
    cache = KVCache([StateSpec((("s", (1,), torch.float32),))], 9, page_size=PAGE, num_slots=4)
    with pytest.raises(UnsupportedError, match="drafts need states that can be taken back"):
        Engine(nine, cache, EngineLimits(64, 4, 64), vocab_size=VOCAB, proposer=Drafts(1.0))


def test_an_id_that_is_used_again_gets_no_token_of_the_request_before():
    it, _ = engine(lookahead=1)
    it.add(Request(77, [50, 51, 52], greedy(5)))
    it.step()
    it.abort(77)
    it.add(Request(77, [60, 61], greedy(5)))
    tokens = [token for _ in range(20) for output in it.step() for token in output.token_ids]
    assert tokens == undisturbed([60, 61], 5)


def test_the_tokens_of_a_request_are_32_bits_wide():
    """Prompts may be arrays of any width."""
    it, _ = engine()
    add(it, [2, 3, 4], greedy(2))
    assert next(iter(it._requests.values())).tokens.dtype == np.int32
