"""A layer kind of a user's own, with a state for each sequence: registered here, known nowhere in minirt.

Catches a switch on built-in classes, a state that leaks from a slot's earlier sequence, a slot that two sequences share, and a
prefix cache that skips tokens which a state needs.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minirt import Generator, SamplingParams
from minirt.engine.engine import Engine, Request
from minirt.engine.kv_cache import KVCache, StateSpec, state_bytes
from minirt.engine.step_input import Batch, Chunk
from minirt.errors import InputError
from minirt.layers import Layer, base, implementation, register
from minirt.modeling.parameters import NormWeight
from minirt.models import decoder
from minirt.sampling_params import resolve

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
DECAY = 0.75


class Memory(Layer):
    """x + gain · s, where s ← DECAY · s + x is the state of each sequence, [H] fp32 (an exponential moving sum)."""

    kind = "memory"

    def __init__(self, config, *, name, gain):
        super().__init__(config, name)
        self.gain = NormWeight(gain, config.hidden_size)
        self.cache_spec = StateSpec((("sum", (config.hidden_size,), torch.float32),))


def forward_of(layer):
    """One token after the other. All that differs between steps is read on the device, so a CUDA graph can hold it."""

    def forward(x, batch, state):
        sums, out = state["sum"], torch.empty_like(x)
        rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
        sequence = torch.searchsorted(batch.query_starts_device[1:].contiguous(), rows, right=True)
        slots = batch.seq_slots[sequence.clamp(max=batch.num_seqs - 1)].long()
        live = (sequence < batch.num_seqs) & (slots >= 0)  # not padding
        slots = slots.clamp(min=0)
        for t in range(x.shape[0]):
            slot = slots[t : t + 1]
            before = sums.index_select(0, slot)
            now = torch.where(batch.positions[t] == 0, 0, before) * DECAY + x[t]
            sums.index_copy_(0, slot, torch.where(live[t], now, before))
            out[t] = x[t] + layer.gain.weight * now[0]
        return out

    return forward


@pytest.fixture(autouse=True, scope="module")
def registered():
    before = dict(base._REGISTRY)
    register("memory", "eager")(forward_of)
    register("memory", "own", capturable=True)(forward_of)
    yield
    base._REGISTRY.clear()
    base._REGISTRY.update(before)


def compose(config):
    """The model with a `Memory` before each MLP; its gain is the MLP's norm weight, so that the checkpoint has it."""
    layers = []
    for layer in decoder.decoder_layers(config):
        if layer.kind == "mlp":
            layers.append(Memory(config, name=layer.name.replace("mlp", "memory"), gain=layer.norm.name))
        layers.append(layer)
    return layers


def load(folder, **options):
    return Generator.from_pretrained(folder, device="cpu", kv_cache_memory=1 << 22, layers=compose, **options)


def solo(model, prompt, count):
    """The tokens of a sequence computed whole at each step: no state is kept."""
    tokens = list(prompt)
    for _ in range(count):
        cache = KVCache(model.cache_specs, 2, num_slots=1)
        for layer in cache.layers:
            for tensor in layer.values() if isinstance(layer, dict) else layer[:2]:
                tensor.fill_(float("nan"))
        tokens.append(int(model(Batch.build([Chunk(tokens, 0, [0, 1], slot=0)], 64), cache).argmax()))
    return tokens[len(prompt) :]


def prompt(i):
    draw = torch.Generator().manual_seed(i)
    return torch.randint(0, 211, (int(torch.randint(1, 40, (1,), generator=draw)),), generator=draw).tolist()


def test_it_runs_from_plan_to_text(hf_folder):
    with load(hf_folder("Llama", seed=3)) as generator:
        rows = [row for row in generator.plan.rows if row.kind == "memory"]
        assert [row.implementation for row in rows] == ["eager"] * 3
        assert [row.bytes for row in rows] == [64 * 4] * 3
        assert state_bytes(generator.model.cache_specs) == 3 * 64 * 4
        assert generator.prefix_cache_stats is None
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        done = generator.generate([prompt(i) for i in range(5)], params)
        model = generator.model
        assert [c.token_ids for c in done] == [solo(model, prompt(i), 6) for i in range(5)]


@pytest.fixture(scope="module")
def model(hf_folder, registered):
    with load(hf_folder("Llama", seed=3, num_hidden_layers=1)) as generator:
        yield generator.model, [solo(generator.model, prompt(i), 8) for i in range(6)]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5), st.integers(1, 8)), min_size=2, max_size=8),
    aborts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 7)), max_size=3),
    pages=st.integers(12, 20),
    seqs=st.integers(1, 4),
    budget=st.sampled_from([3, 17, 512]),
    lookahead=st.integers(0, 1),
)
def test_states_stay_with_their_sequences(model, requests, aborts, pages, seqs, budget, lookahead):
    """Chunks, preemption and slots that are used again."""
    it, expected = model
    cache = KVCache(it.cache_specs, pages, page_size=4, num_slots=seqs)
    for layer in cache.layers:
        for tensor in layer.values() if isinstance(layer, dict) else layer[:2]:
            tensor.fill_(float("nan"))
    engine = Engine(
        it, cache, vocab_size=211, max_model_len=48, max_num_seqs=seqs, max_num_batched_tokens=budget, lookahead=lookahead
    )
    ids, tokens, ended = {}, [[] for _ in requests], set()
    for step in range(2000):
        for i, (arrival, which, count) in enumerate(requests):
            if arrival == step:
                sampling = resolve(SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True), None)
                engine.add(Request(i, prompt(which), sampling))
                ids[i] = which
        for when, which in aborts:
            if when == step:
                engine.abort(which)
                ended.add(which)
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
        if not engine.has_work and step > 8:
            break
    for i, (_, which, count) in enumerate(requests):
        wanted = expected[which][:count]
        assert tokens[i] == (wanted[: len(tokens[i])] if i in ended else wanted)


def test_a_kind_must_be_a_name():
    for kind in ("", None, "a=b", 3):
        with pytest.raises(InputError, match="kind"):
            register(kind, "own")


@pytest.mark.gpu
def test_it_runs_under_cuda_graphs(hf_folder):
    """The same tokens with graphs and without; with graphs, one decode step is one graph."""
    found = []
    for cuda_graphs in (True, False):
        options = {"impl": ["triton", "*.memory=own"], "dtype": "float32", "cuda_graphs": cuda_graphs}
        options |= {"max_num_batched_tokens": 24}
        folder = hf_folder("Llama", seed=3, head_dim=64, hidden_size=128)
        with Generator.from_pretrained(folder, device="cuda", kv_cache_memory=1 << 24, layers=compose, **options) as generator:
            assert generator.plan.not_capturable is None
            assert generator._engine.engine._runner.cuda_graphs == cuda_graphs
            params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
            found.append([c.token_ids for c in generator.generate([prompt(i) for i in range(5)], params)])
            assert implementation("memory", "own").capturable
    assert found[0] == found[1]
