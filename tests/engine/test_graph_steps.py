"""Steps as on a GPU, without one: the static buffers of CUDA graphs, the kernels of the table and of the layers in Triton's
interpreter, and a stand-in for CUDA graphs that runs the captured work again at each replay.

Catches a value that is read when a step is captured and not when it is replayed, and padding that changes a token or a draft.
"""

import pytest
import torch
from layers.test_triton_layers import SIZES, build

from minirt import models
from minirt.engine.buckets import Bucket
from minirt.engine.engine import Engine, Request
from minirt.engine.execute import step_buffers, step_graphs
from minirt.engine.execute.sampler import Sampler
from minirt.engine.limits import EngineLimits, EngineOptions
from minirt.kernels.speculative import draft_model as kernels
from minirt.kernels.step.table import NEXT_TOKENS, NUM_CACHED, NUM_NEXT, PROMPT_LEN
from minirt.loading.checkpoint import randomize
from minirt.modeling.model import Model
from minirt.sampling_params import SamplingParams, resolve
from minirt.speculative import draft_model
from minirt.speculative.draft_model import DraftModelProposer
from minirt.step.kv_cache import KVCache

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has CUDA graphs")]


class Graphs:
    """Keeps what is captured."""

    def __init__(self, device):
        self.captured, self.replays = {}, 0

    def __contains__(self, key):
        return key in self.captured

    def capture(self, key, work, roots):
        self.captured[key] = work

    def replay(self, key):
        self.replays += 1
        self.captured[key]()


PROMPTS = [[5, 6, 7, 8, 9], [11], [20] * 9, [3, 1, 4]]
PARAMS = [
    SamplingParams(max_tokens=4, temperature=0.0), SamplingParams(max_tokens=3, temperature=0.8, seed=3, top_p=0.9),
    SamplingParams(max_tokens=4, temperature=0.0, presence_penalty=2.0), SamplingParams(max_tokens=9, temperature=0.0),
]  # fmt: skip


def run(model, graphs, proposer=None, requests=4):
    model.keep_undo(4 if proposer else 0)
    cache = KVCache(model.cache_specs, 8, torch.device("cpu"), model.kv_dtype, page_size=16, num_slots=2)
    it = Engine(
        model, cache, EngineLimits(64, 2, 16), EngineOptions(cuda_graphs=graphs, lookahead=1, adaptive_drafts=False),
        vocab_size=211, proposer=None if proposer is None else proposer(model, cache),
    )  # fmt: skip
    for number, (prompt, params) in enumerate(zip(PROMPTS[:requests], PARAMS, strict=False)):
        it.add(Request(number, prompt, resolve(params, None)))
    tokens = [[] for _ in range(requests)]
    while it.has_work:
        for output in it.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
    return tokens, it._runner.graphs.captured


def test_steps_in_static_buffers_give_the_tokens_of_other_steps(monkeypatch):
    expected, _ = run(build("qwen2", "eager"), graphs=False)
    monkeypatch.setattr(step_graphs, "CudaGraphs", Graphs)
    monkeypatch.setattr(step_buffers, "is_nvidia", lambda device: True)
    drawn, draw = [], Sampler.draw
    monkeypatch.setattr(Sampler, "draw", lambda *args: drawn.append(args[4].sampling) or draw(*args))
    found, graphs = run(build("qwen2", "triton"), graphs=True)
    assert found == expected
    assert drawn
    assert not [own for own in drawn if own.all_greedy and not own.any_rules]  # CUDA graphs draw these
    assert graphs.replays > 6
    assert {bucket.tokens > 0 for bucket in graphs.captured} == {True, False}


class Watched(DraftModelProposer):
    """Notes all drafts, by the next token before them."""

    def __init__(self, model, cache):
        super().__init__(model, cache, 3)
        self.drafts = set()

    def propose(self, table, columns, rows, batch, wanted):
        super().propose(table, columns, rows, batch, wanted)
        for slot in rows.slots.tolist():
            if slot >= 0 and (count := int(table[slot, NUM_NEXT])) > 0:
                own = table[slot].tolist()
                self.drafts.add((own[PROMPT_LEN], own[NUM_CACHED], *own[NEXT_TOKENS : NEXT_TOKENS + count]))


def drafting(impl):
    """A model with a recurrent layer, and with layers of multi-token prediction."""
    fields = {
        **SIZES, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip
    config = models.parse_config({"model_type": "qwen3_5_text", **fields})
    layers, draft = models.build_with_drafts(config, 150)
    model = Model(config, layers, draft_layers=draft)
    model.allocate(torch.device("cpu"), torch.float32, 64)
    model.resolve(impl)
    randomize(model)
    return model


def test_drafts_in_static_buffers_are_those_of_other_steps(monkeypatch):
    made = []

    def proposer(model, cache):
        made.append(Watched(model, cache))
        return made[-1]

    plain, _ = run(drafting("eager"), graphs=False, requests=3)
    expected, _ = run(drafting("eager"), graphs=False, proposer=proposer, requests=3)
    monkeypatch.setattr(step_graphs, "CudaGraphs", Graphs)
    monkeypatch.setattr(step_buffers, "is_nvidia", lambda device: True)
    monkeypatch.setattr(draft_model, "_forms", lambda device: kernels)
    found, graphs = run(drafting("triton"), graphs=True, proposer=proposer, requests=3)
    assert plain == expected == found
    assert len(made[0].drafts) > 6
    assert made[0].drafts == made[1].drafts
    kinds = {(bucket.tokens > 0, bucket.drafts) for bucket in graphs.captured if isinstance(bucket, Bucket)}
    assert {(True, 0), (False, 1)} <= kinds
    assert sum(not isinstance(key, Bucket) for key in graphs.captured) == len(graphs.captured) / 2
