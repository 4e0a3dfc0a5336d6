"""Steps as on a GPU, without one: the static buffers of CUDA graphs, the kernels of the table and of the layers in Triton's
interpreter, and a stand-in for CUDA graphs that runs the captured work again at each replay.

Catches a value that is read when a step is captured and not when it is replayed, and padding that changes a token.
"""

import pytest
import torch
from layers.test_triton_layers import build

from minirt.engine import runner as runner_module
from minirt.engine import step_buffers
from minirt.engine.engine import Engine, Request
from minirt.engine.limits import EngineLimits
from minirt.sampling_params import SamplingParams, resolve
from minirt.step.kv_cache import KVCache

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has CUDA graphs")]


class Graphs:
    """Keeps what is captured."""

    def __init__(self, device):
        self.captured, self.replays = {}, 0

    def __contains__(self, key):
        return key in self.captured

    def capture(self, key, work):
        self.captured[key] = work

    def replay(self, key):
        self.replays += 1
        self.captured[key]()


PROMPTS = [[5, 6, 7, 8, 9], [11], [20] * 9]
PARAMS = [
    SamplingParams(max_tokens=4, temperature=0.0),
    SamplingParams(max_tokens=3, temperature=0.8, seed=3, top_p=0.9),
    SamplingParams(max_tokens=4, temperature=0.0, presence_penalty=2.0),
]


def run(model, graphs):
    cache = KVCache(model.cache_specs, 8, torch.device("cpu"), model.kv_dtype, page_size=16)
    it = Engine(model, cache, EngineLimits(64, 2, 16), vocab_size=211, lookahead=1, cuda_graphs=graphs)
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        it.add(Request(number, prompt, resolve(params, None)))
    tokens = [[] for _ in PROMPTS]
    while it.has_work:
        for output in it.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
    return tokens, it._runner._graphs


def test_steps_in_static_buffers_give_the_tokens_of_other_steps(monkeypatch):
    expected, _ = run(build("qwen2", "eager"), graphs=False)
    monkeypatch.setattr(runner_module, "CudaGraphs", Graphs)
    monkeypatch.setattr(step_buffers, "is_nvidia", lambda device: True)
    found, graphs = run(build("qwen2", "triton"), graphs=True)
    assert found == expected
    assert graphs.replays > 6
    assert {bucket.tokens > 0 for bucket in graphs.captured} == {True, False}
