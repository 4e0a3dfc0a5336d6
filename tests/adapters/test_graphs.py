"""Steps with adapters as on a GPU, without one: see `engine/test_graph_steps.py`."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine import test_graph_steps as steps
from layers.test_triton_layers import build

from minirt.adapters import rows
from minirt.adapters.adapters import Adapters
from minirt.adapters.files import Adapter, Linear
from minirt.engine.execute import step_buffers, step_graphs
from minirt.engine.limits import EngineLimits, EngineOptions
from minirt.engine.request import Request
from minirt.kernels.adapters import reference
from minirt.kernels.step.table import ADAPTER
from minirt.sampling_params import SamplingParams, resolve
from minirt.step.kv_cache import KVCache

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has CUDA graphs")]


def model_with_adapters(impl):
    model = build("qwen2", impl)
    model.adapters = Adapters(model, {}, places=2, rank=16)
    model.adapters.allocate()
    for name, rank in (("a", 3), ("b", 16), ("c", 8)):
        random, linears = torch.Generator().manual_seed(rank), {}
        for module, (n, k) in model.adapters._shapes.items():
            a, b = (torch.randn(shape, generator=random) / shape[1] ** 0.5 for shape in ((rank, k), (n, rank)))
            linears[module] = Linear(a, b, 1.5)
        model.adapters.add(name, Adapter(Path(name), None, linears))
    return model


def run(model, graphs, names):
    """The tokens of each request, and the graphs."""
    cache = KVCache(model.cache_specs, 8, torch.device("cpu"), model.kv_dtype, page_size=16, num_slots=2)
    options = EngineOptions(cuda_graphs=graphs, lookahead=1, adaptive_drafts=False)
    it = steps.Engine(model, cache, EngineLimits(64, 2, 16), options, vocab_size=211)
    for number, name in enumerate(names):
        params = SamplingParams(max_tokens=4, temperature=0, lora=name)
        it.add(Request(number, steps.PROMPTS[number % len(steps.PROMPTS)], resolve(params, None)))
    tokens = [[] for _ in names]
    while it.has_work:
        for output in it.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
    return tokens, it._runner.graphs.captured


def test_static_buffers_give_the_tokens_of_other_steps(monkeypatch):
    """Catches adapters that a CUDA graph reads when it is captured and not when it is replayed, padding that takes an adapter, a
    step with adapters in the graph of one without, and a place that is overwritten too early."""
    names = ["a", None, "b", None, "c", "a", None, None]
    expected, _ = run(model_with_adapters("eager"), False, names)
    plain, _ = run(model_with_adapters("eager"), False, [None] * len(names))
    assert [one != other for one, other in zip(expected, plain, strict=True)] == [name is not None for name in names]
    monkeypatch.setattr(step_graphs, "CudaGraphs", steps.Graphs)
    for module in (step_buffers, rows):
        monkeypatch.setattr(module, "is_nvidia", lambda device: True)
    made, graphs = run(model_with_adapters("triton"), True, names)
    assert made == expected
    assert {bucket.adapted for bucket in graphs.captured} == {False, True}


@pytest.mark.parametrize("kernels", [False, True])
def test_rows_of_logits_have_steps_of_their_adapters(monkeypatch, kernels):
    """Catches rows after `Select` with blocks that only other tokens of the step use. Their y has no columns for these."""
    monkeypatch.setattr(rows, "is_nvidia", lambda device: kernels)
    table = torch.full((2, 8), -1, dtype=torch.int32)
    table[:, ADAPTER] = torch.tensor([0, 7])
    ints = partial(torch.tensor, dtype=torch.int32)
    step = SimpleNamespace(
        tokens=torch.zeros(3), seq_slots=ints([0, 1]), query_starts=ints([0, 2, 3]), logits_indices=torch.tensor([2])
    )
    adapters = rows.StepAdapters(SimpleNamespace(most_modules=2, rank=48, places=8), 4, 2, torch.device("cpu"))
    batch = adapters.begin(table, step)
    for made, wanted in ((batch.tokens, [0, 0, 7]), (batch.rows, [7])):
        assert made.adapters.tolist() == wanted
        for modules in (1, 2):
            steps = reference.used_steps(ints(wanted), modules, 48, 8)[: 1 + int(made.steps[modules][0])].tolist()
            assert made.steps[modules][: len(steps)].tolist() == steps
