"""`GraphGuard` names a tensor that was replaced after a CUDA graph was captured: the graph would go on using its address."""

import pytest
import torch

from minirt import Generator, SamplingParams
from minirt.engine.execute.cuda_graphs import GraphGuard
from minirt.errors import EngineError
from minirt.kernels.launch import Workspace

PARAMS = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture
def runner():
    with Generator.from_pretrained(device="cpu", kv_cache_memory=8 << 20, max_num_seqs=2) as generator:
        runner = generator._engine.engine._runner
        yield runner, lambda: generator.generate([5, 6, 7], PARAMS)


def guard(runner):
    return GraphGuard(lambda: {"model": runner.model, "cache": runner.cache} | runner.buffers.of_graphs())


def test_steps_replace_none(runner):
    runner, step = runner
    watched = guard(runner)
    step()
    watched.check()


def test_a_workspace_keeps_its_views_until_it_grows():
    workspace = Workspace("cpu", num_floats=64)
    _, stats = workspace.sums_and_stats(16, 8)
    watched = GraphGuard(lambda: {"workspace": workspace})
    _, others = workspace.sums_and_stats(32, 8)  # as a step of another size does
    assert others.data_ptr() == stats.data_ptr() + 16 * 4
    watched.check()
    workspace.reserve(65)
    with pytest.raises(EngineError, match="workspace"):
        watched.check()


def weight(runner):
    layer = next(layer for layer in runner.model.layers if layer.kind == "mlp")
    attribute, parameter = next((name, value) for name, value in vars(layer).items() if name == "gate_up")
    parameter.weight = parameter.weight.clone()
    return f"{attribute}.weight"


def pages(runner):
    layer = runner.cache.layers[0]
    runner.cache.layers[0] = layer._replace(k=layer.k.clone())
    return r"cache\.layers\[0\]\.k"


def table(runner):
    runner.buffers.table = runner.buffers.table.clone()
    return "table"


def strides(runner):
    runner.buffers.logits = torch.zeros(3, 4).t()
    return "logits"


@pytest.mark.parametrize("replace", [weight, pages, table, strides])
def test_a_tensor_that_was_replaced_is_named(runner, replace):
    runner, _ = runner
    watched = guard(runner)
    name = replace(runner)
    with pytest.raises(EngineError, match=f"{name}: a tensor of a CUDA graph was replaced"):
        watched.check()
