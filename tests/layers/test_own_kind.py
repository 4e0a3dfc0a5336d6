"""A layer kind of a user's own, with a state for each sequence: registered here, known nowhere in minirt.

Catches a switch on built-in classes or kinds, a state that leaks from a slot's earlier sequence, a slot that two sequences share,
a prefix cache that skips tokens which a state needs, and a comparison that starts with the state after the step.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minirt import Generator, SamplingParams
from minirt.bench import experts
from minirt.bench.compare import compare
from minirt.bench.compare import layers as compare_layers
from minirt.bench.compare import report as compare_report
from minirt.bench.compare.caches import CacheView, copy_tensor, view
from minirt.engine.engine import Engine, Request
from minirt.engine.limits import EngineLimits
from minirt.errors import ConfigError, InputError
from minirt.layers import Attention, Embedding, Head, Layer, Select, base, implementation, register
from minirt.modeling.parameters import NormWeight
from minirt.models import decoder
from minirt.sampling_params import resolve
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import CombinedSpec, KVCache, PagesSpec, StateSpec, page_bytes, state_bytes

DECAY = 0.75


class Memory(Layer):
    """x + gain · s, where s ← DECAY · s + x is the state of each sequence, [H] fp32 (an exponential moving sum)."""

    kind = "memory"

    def __init__(self, config, *, name, gain):
        super().__init__(config, name)
        self.gain = NormWeight(gain, config.hidden_size)
        self.cache_spec = StateSpec((("sum", (config.hidden_size,), torch.float32),))


class Both(Attention):
    """Attention, then `Memory`: a layer with pages and a state. Its gain is its norm weight."""

    kind = "both"

    def __init__(self, config, **names):
        super().__init__(config, **names)
        self.gain = NormWeight(names["norm"], config.hidden_size)
        self.cache_spec = CombinedSpec((self.cache_spec, StateSpec((("sum", (config.hidden_size,), torch.float32),))))


class Sums:
    """The cache of `Memory`, as a class that is no `LayerState`. Rows are slots."""

    def __init__(self, sums):
        self.sums = sums

    def __getitem__(self, name):
        return {"sum": self.sums}[name]

    def tensors(self):
        return [self.sums]


@view.register(Sums)
class SumsView(CacheView):
    """`Sums` as a comparison sees it."""

    def rows(self, batch):
        return [batch.seq_slots.long()]

    def clone(self, *, wide=False):
        return Sums(copy_tensor(self.cache.sums, wide))

    def written(self, batch):
        return {"running sum": self.cache.sums[batch.seq_slots.long()].double()}

    def read_bytes(self, batch):
        return batch.num_seqs * self.cache.sums[0].nbytes


@dataclass(frozen=True)
class SumsSpec:
    size: int

    def page_bytes(self, dtype, page_size):
        return 0

    @property
    def state_bytes(self):
        return 4 * self.size

    def allocate(self, room):
        return Sums(torch.empty(room.num_slots, self.size, device=room.device))


class LooseSpec(SumsSpec):
    """It defines equality, so Python makes it unhashable."""

    def __eq__(self, other):
        return self is other


def both(layer, name="eager"):
    attention, memory = implementation("attention", name).factory(layer), forward_of(layer)

    def forward(x, batch, kv):
        pages, state = kv
        return memory(attention(x, batch, pages), batch, state)

    return forward


class OwnEmbedding(Embedding):
    kind = "own-embedding"


class OwnSelect(Select):
    kind = "own-select"


class OwnHead(Head):
    kind = "own-head"


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
    for name, fault in FAULTS.items():
        register("memory", name)(fault)
    register("both", "eager")(both)
    register("both", "own")(both)
    register("both", "graphed", capturable=True)(lambda layer: both(layer, "triton"))
    for kind in ("embedding", "select", "head"):
        register(f"own-{kind}", "eager")(implementation(kind, "eager").factory)
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


def compose_both(config):
    layers = decoder.decoder_layers(config)
    for i, layer in enumerate(layers):
        if layer.kind == "attention":
            q, k, v = (part.name for part in layer.qkv.parts)
            layers[i] = Both(config, name=layer.name, norm=layer.norm.name, q=q, k=k, v=v, o=layer.o.parts[0].name)
    return layers


def compose_sums(config):
    layers = compose(config)
    for layer in layers:
        if layer.kind == "memory":
            layer.cache_spec = SumsSpec(config.hidden_size)
    return layers


def load(folder, layers=compose, **options):
    return Generator.from_pretrained(folder, device="cpu", kv_cache_memory=1 << 22, layers=layers, **options)


def unwritten(layer):
    """The output is right, but the states stay as they were."""
    forward = forward_of(layer)
    return lambda x, batch, state: forward(x, batch, {name: tensor.clone() for name, tensor in state.items()})


def not_reset(layer):
    """A sequence starts with what its slot holds."""
    forward = forward_of(layer)

    def carried(x, batch, state):
        batch.positions.add_(1)
        out = forward(x, batch, state)
        batch.positions.sub_(1)
        return out

    return carried


def beside(layer):
    """Writes one value of a slot that no sequence has."""
    forward = forward_of(layer)

    def straying(x, batch, state):
        state["sum"][-1, 3] = 5.0
        return forward(x, batch, state)

    return straying


FAULTS = {"unwritten": unwritten, "not-reset": not_reset, "beside": beside}


def solo(model, prompt, count):
    """The tokens of a sequence computed whole at each step: no state is kept."""
    tokens = list(prompt)
    for _ in range(count):
        cache = KVCache(model.cache_specs, 3, num_slots=1)
        for layer in cache.layers:
            for tensor in layer.tensors():
                tensor.fill_(float("nan"))
        tokens.append(int(model(Batch.build([Chunk(tokens, 0, [0, 1, 2], slot=0)], 64), cache).argmax()))
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
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        done = generator.generate([prompt(i) for i in range(5)], params)
        model = generator.model
        assert [c.token_ids for c in done] == [solo(model, prompt(i), 6) for i in range(5)]
        long = [*prompt(0), *range(3, 90)]
        again = [generator.generate(long, params) for _ in range(2)]
        assert [own.token_ids for own in again] == [solo(model, long, 6)] * 2
        assert again[1].cached_tokens == len(long) - 1, "its pages and its state"


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
    snapshots=st.integers(0, 4),
)
def test_states_stay_with_their_sequences(model, requests, aborts, pages, seqs, budget, lookahead, snapshots):
    """Chunks, preemption, slots that are used again, and states that are kept."""
    it, expected = model
    cache = KVCache(it.cache_specs, pages, page_size=4, num_slots=seqs, num_snapshots=snapshots)
    for layer in cache.layers:
        for tensor in layer.tensors():
            tensor.fill_(float("nan"))
    engine = Engine(it, cache, EngineLimits(48, seqs, budget), vocab_size=211, lookahead=lookahead)
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


def test_a_layer_may_have_pages_and_a_state(hf_folder):
    with load(hf_folder("Llama", seed=3), layers=compose_both) as generator:
        specs = generator.model.cache_specs
        assert page_bytes(specs, torch.float32) == 3 * 64 * 2 * 2 * 16 * 4
        assert state_bytes(specs) == 3 * 64 * 4
        assert generator.memory.pages > 0
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        done = generator.generate([prompt(i) for i in range(5)], params)
        model = generator.model
        assert [c.token_ids for c in done] == [solo(model, prompt(i), 6) for i in range(5)]
        long = [*prompt(0), *range(3, 90)]
        again = [generator.generate(long, params) for _ in range(2)]
        assert [own.token_ids for own in again] == [solo(model, long, 6)] * 2
        assert again[1].cached_tokens == len(long) - 1, "its pages and its state"


NOT_SPECS = {
    "another object": ((2, 16), r"not a cache spec.*PagesSpec.*found tuple"),
    "a class": (PagesSpec, r"not a cache spec.*PagesSpec.*found the class PagesSpec"),
    "an unhashable one": (LooseSpec(64), r"cannot be hashed.*frozen dataclass.*'LooseSpec'"),
    "one with an unhashable part": (CombinedSpec((PagesSpec(2, 16), LooseSpec(64))), r"cannot be hashed.*'LooseSpec'"),
}


@pytest.mark.parametrize("what", NOT_SPECS)
def test_only_a_cache_spec_is_one(what, hf_folder):
    spec, words = NOT_SPECS[what]

    def wrong(config):
        layers = compose(config)
        layers[3].cache_spec = spec
        return layers

    with pytest.raises(ConfigError, match=rf"layers\[3\], layers\.0\.mlp: .*{words}"):
        load(hf_folder("Llama", seed=3), layers=wrong)


def test_a_combined_spec_of_a_list_runs_dry(hf_folder):
    """The warm-up on a GPU runs one layer for each compile key, which the spec is part of."""

    def of_lists(config):
        layers = compose_both(config)
        for layer in layers:
            if layer.kind == "both":
                layer.cache_spec = CombinedSpec(list(layer.cache_spec.specs))
        return layers

    with load(hf_folder("Llama", seed=3), layers=of_lists) as generator:
        model, called = generator.model, []
        for layer in model.layers:
            layer._forward = lambda *given, layer=layer, forward=layer._forward: called.append(layer.kind) or forward(*given)
        cache = KVCache(model.cache_specs, 1, num_slots=1)
        model.dry_run(Batch.build([Chunk([3, 4], 0, [0], slot=0)], 64), cache)
    assert called.count("both") == 1


def test_the_first_the_last_and_the_selecting_layer_may_be_of_other_kinds(hf_folder):
    """What a layer states decides, not its kind."""

    def own(config):
        embedding, *blocks, head = decoder.decoder_layers(config)
        first = OwnEmbedding(config, weight=embedding.table.parts[0].name)
        last = OwnHead(config, norm=head.norm.name, weight=head.lm_head.parts[0].name)
        return [first, *blocks[:-1], OwnSelect(config), blocks[-1], last]

    folder, seen, dry = hf_folder("Llama", seed=3), [], []
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with load(folder, layers=None) as generator:
        expected = generator.generate([prompt(i) for i in range(4)], params)
    with load(folder, layers=own) as generator:
        assert [row.kind for row in generator.plan.rows if row.kind.startswith("own")] == [
            "own-embedding", "own-select", "own-head"
        ]  # fmt: skip
        assert len(generator.plan.rows) == 3 * 2 + 3, "no further select is inserted"
        found = generator.generate([prompt(i) for i in range(4)], params)
        model = generator.model
        cache = KVCache(model.cache_specs, 1)
        with experts.observing(generator, lambda layer, x: seen.append((layer.kind, len(x)))):
            generator.generate([3, 4], SamplingParams(max_tokens=1))
        for layer in model.layers:
            if layer.kind == "mlp":
                layer._forward = lambda x, batch, kv, forward=layer._forward: dry.append(len(x)) or forward(x, batch, kv)
        model.dry_run(Batch.build([Chunk([3, 4], 0, [0])], 64), cache)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert seen[0] == ("attention", 2), "an embedding has no input"
    assert seen[-3:] == [("own-select", 2), ("mlp", 1), ("own-head", 1)]
    assert dry == [2, 1], "layers after the select are run separately"
    wrong = (lambda config: own(config)[1:], lambda config: own(config)[:-1], lambda config: [own(config)[0], *own(config)])
    for layers in wrong:
        with pytest.raises(ConfigError, match=r"one embedding first.*reads_tokens.*makes_logits.*found "):
            load(folder, layers=layers)
    with pytest.raises(ConfigError, match="two select layers"):
        load(folder, layers=lambda config: [*own(config)[:-1], OwnSelect(config, name="again"), own(config)[-1]])


# ── in the benchmarks ──

TOKENS = [(7 * i * i + 3) % 211 for i in range(90)]
SHAPE = compare.Shape(9, 2, 5, 20)
IMPL = {"memory": "*.memory=own", "both": "*.attention=own"}


@pytest.mark.parametrize(("layers", "kind"), [(compose, "memory"), (compose_both, "both")])
def test_it_is_compared(hf_folder, layers, kind):
    with load(hf_folder("Llama", seed=3), layers=layers) as generator:
        result = compare.run(generator.model, TOKENS, SHAPE, impl=["eager", IMPL[kind]])
    assert result.faults == []
    assert [row["kind"] for row in result.rows] == [kind] * 6
    for row in result.rows:
        assert row["state.sum"]["error"]["relative"] <= row["state.sum"]["limit"]["relative"] < 1e-5
        assert (row["k"]["error"]["relative"] is None) == (kind == "memory")
        assert row["out"]["error"]["relative"] < 1e-5
    read = 2 * 2 * 64 * 4 + (2 * 5 * 2 * 2 * 16 * 4 if kind == "both" else 0)
    weights = 4 * (64 if kind == "memory" else 2 * 64 + 64 * 128 + 64 * 64)  # of `Both`, the norm weight is read twice
    assert result.rows[-1]["bytes"] == weights + 2 * 2 * 64 * 4 + read, "decode reads and writes two states, and reads ten tokens"
    assert result.model["text"]["agree"] == 20


def test_an_own_cache_runs_and_is_compared(hf_folder):
    """A spec and a cache of other classes than minirt's: what they state is enough."""
    with load(hf_folder("Llama", seed=3), layers=compose_sums) as generator:
        assert state_bytes(generator.model.cache_specs) == 3 * 64 * 4
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        done = generator.generate([prompt(i) for i in range(5)], params)
        model = generator.model
        assert [c.token_ids for c in done] == [solo(model, prompt(i), 6) for i in range(5)]
        result = compare.run(model, TOKENS, SHAPE, impl=["eager", "*.memory=own"])
        assert result.faults == []
        assert [row["kind"] for row in result.rows] == ["memory"] * 6
        for row in result.rows:
            own = row["running sum"]
            assert own["error"]["relative"] <= own["limit"]["relative"] < 1e-5
            shown = "{:.1e} / {:.1e}".format(*(own[side]["relative"] for side in ("error", "torch")))
            assert compare_report._cached(row) == shown
        faults = compare.run(model, TOKENS, SHAPE, impl=["eager", "layers.1.memory=beside"], layer="layers.1.memory").faults
    assert any("1 values of the cache" in fault for fault in faults), faults


FOUND = {
    "unwritten": ("layers.1.memory, prefill 9: state.sum: ", "layers.1.memory, decode b2 @ 5: state.sum: "),
    "not-reset": ("layers.1.memory, prefill 9: output: relative error nan",),
    "beside": ("layers.1.memory, prefill 9: 1 values of the cache", "layers.1.memory, decode b2 @ 5: 1 values of the cache"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_a_state_are_found(hf_folder, name):
    with load(hf_folder("Llama", seed=3)) as generator:
        impl = ["eager", f"layers.1.memory={name}"]
        result = compare.run(generator.model, TOKENS, SHAPE, impl=impl, layer="layers.1.memory")
    for words in FOUND[name]:
        assert any(fault.startswith(words) for fault in result.faults), result.faults


def test_a_comparison_starts_with_the_state_before_the_step(hf_folder):
    with load(hf_folder("Llama", seed=3)) as generator:
        places = compare_layers.places(generator.model)
        step = compare_layers.decode(generator.model, places, [TOKENS[:11], TOKENS[5:16]])
        for place in places[:-1]:
            out = compare_layers.run(place, place.eager, step).out
            assert torch.equal(out, step.inputs[place.index + 1]), place.layer.name


@pytest.mark.gpu
@pytest.mark.parametrize(("layers", "impl"), [(compose, "*.memory=own"), (compose_both, "*.attention=graphed")])
def test_it_runs_under_cuda_graphs(layers, impl, hf_folder):
    """The same tokens with graphs and without; with graphs, one decode step is one graph."""
    found = []
    for cuda_graphs in (True, False):
        options = {"impl": ["triton", impl], "dtype": "float32", "cuda_graphs": cuda_graphs}
        options |= {"max_num_batched_tokens": 24}
        folder = hf_folder("Llama", seed=3, head_dim=64, hidden_size=128)
        with Generator.from_pretrained(folder, device="cuda", kv_cache_memory=1 << 24, layers=layers, **options) as generator:
            assert generator.plan.not_capturable is None
            assert (generator._engine.engine._runner.buckets is not None) == cuda_graphs
            params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
            found.append([c.token_ids for c in generator.generate([prompt(i) for i in range(5)], params)])
    assert found[0] == found[1]
