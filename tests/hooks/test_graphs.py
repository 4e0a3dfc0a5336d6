"""Hooks in steps over static buffers, as in CUDA graphs. Catches a factor or a row that is read when a step is captured, not when
it is replayed, states that the next step overwrites, and padding that gets into them."""

import pytest
import torch
from engine.test_graph_steps import Graphs
from layers.test_triton_layers import FAMILIES, SIZES
from support.checkpoints import distance

from minirt import models
from minirt.engine.engine import Engine, Request
from minirt.engine.execute import step_buffers, step_graphs
from minirt.engine.limits import EngineLimits, EngineOptions
from minirt.hooks.layer import ablate, add, with_hooks
from minirt.loading.checkpoint import randomize
from minirt.modeling.model import Model
from minirt.sampling_params import SamplingParams, resolve
from minirt.step.kv_cache import KVCache

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has CUDA graphs")]
GREEDY = {"temperature": 0.0, "max_tokens": 5}
PARAMS = [
    SamplingParams(**GREEDY, capture=["layers.*"]), SamplingParams(**GREEDY, steer={"layers.0": 2.0}), SamplingParams(**GREEDY),
    SamplingParams(**GREEDY, capture=["layers.1"], steer={"embedding": 1.0, "layers.0": -1.0}), SamplingParams(**GREEDY),
]  # fmt: skip


def run(impl, graphs):
    config = models.parse_config({"model_type": "qwen2", **SIZES, **FAMILIES["qwen2"], "num_hidden_layers": 2})
    random = torch.Generator().manual_seed(4)
    vectors = [torch.randn(config.hidden_size, generator=random) for _ in range(2)]
    edits = {"embedding": ablate(vectors[0]), "layers.0": add(vectors[1])}
    model = Model(config, with_hooks(config, models.build(config), ["layers.*"], edits))
    model.allocate(torch.device("cpu"), torch.float32, 64)
    model.resolve(impl)
    randomize(model)
    cache = KVCache(model.cache_specs, 12, torch.device("cpu"), model.kv_dtype, page_size=16, num_slots=2)
    it = Engine(model, cache, EngineLimits(64, 2, 16), EngineOptions(cuda_graphs=graphs, lookahead=1), vocab_size=211)
    for number, params in enumerate(PARAMS):
        it.add(Request(number, [(7 * number + i) % 200 for i in range(2 + 5 * number)], resolve(params, None)))
    tokens, states = [[] for _ in PARAMS], [None] * len(PARAMS)
    while it.has_work:
        for output in it.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
            states[output.request_id] = output.captured or states[output.request_id]
    return tokens, states, it._runner.graphs.captured


def test_static_buffers_change_no_state_and_no_token(monkeypatch):
    expected, wanted, _ = run("eager", graphs=False)
    monkeypatch.setattr(step_graphs, "CudaGraphs", Graphs)
    monkeypatch.setattr(step_buffers, "is_nvidia", lambda device: True)
    tokens, states, graphs = run("triton", graphs=True)
    assert tokens == expected
    assert [state and sorted(state) for state in states] == [["layers.0", "layers.1"], None, None, ["layers.1"], None]
    for state, other in zip(states, wanted, strict=True):
        for name in state or ():
            assert distance(state[name], other[name]) < 1e-5
    buckets = list(graphs.captured)
    assert {bucket.hooked for bucket in buckets} == {True, False}, "requests that ask nothing have steps without hooks"
    assert {bucket.tokens > 0 for bucket in buckets if bucket.hooked} == {True, False}
