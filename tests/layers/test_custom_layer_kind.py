"""A layer kind of a user's own, with a state for each sequence: registered here, known nowhere in minirt.

Catches a switch on built-in classes or kinds, a state that leaks from a slot's earlier sequence, a slot that two sequences share,
a prefix cache that skips tokens which a state needs, and a comparison that starts with the state after the step.
"""

from dataclasses import dataclass

import pytest
import torch
from support import checkpoints
from support.checkpoints import TOKENS, refused

from minirt import Generator, SamplingParams
from minirt.bench import experts
from minirt.bench.compare import compare
from minirt.bench.compare import layers as compare_layers
from minirt.bench.compare import report as compare_report
from minirt.bench.compare.caches import CacheView, copy_tensor, view
from minirt.errors import ConfigError, InputError
from minirt.layers import Attention, Embedding, Head, Layer, Select, base, implementation, register
from minirt.modeling.parameters import NormWeight
from minirt.models import decoder
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


def both_forward(layer, name="eager"):
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
    register("both", "eager")(both_forward)
    register("both", "own")(both_forward)
    register("both", "graphed", capturable=True)(lambda layer: both_forward(layer, "triton"))
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
            prefix = layer.o.parts[0].name.partition(".o_proj")[0]
            layers[i] = Both(config, name=layer.name, norm=layer.norm.name, prefix=prefix)
    return layers


def compose_sums(config):
    layers = compose(config)
    for layer in layers:
        if layer.kind == "memory":
            layer.cache_spec = SumsSpec(config.hidden_size)
    return layers


def load(folder, layers=compose, **options):
    return checkpoints.load(folder, layers=layers, **options)


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


SIX = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def check_texts(generator):
    model = generator.model
    assert state_bytes(model.cache_specs) == 3 * 64 * 4
    done = generator.generate([prompt(i) for i in range(5)], SIX)
    assert [c.token_ids for c in done] == [solo(model, prompt(i), 6) for i in range(5)]


@pytest.mark.parametrize("layers", [compose, compose_both])
def test_it_runs_from_plan_to_text(layers, hf_folder):
    """A layer with a state, and one with pages and a state. What is found of a prompt has both."""
    with load(hf_folder("Llama", seed=3), layers) as generator:
        rows = [row for row in generator.plan.rows if row.kind == "memory"]
        assert [(row.implementation, row.bytes) for row in rows] == [("eager", 64 * 4)] * (3 if layers is compose else 0)
        assert page_bytes(generator.model.cache_specs, torch.float32) == 3 * 64 * 2 * 2 * 16 * 4
        assert generator.memory.pages > 0
        check_texts(generator)
        long = [*prompt(0), *range(3, 90)]
        again = [generator.generate(long, SIX) for _ in range(2)]
        assert [done.token_ids for done in again] == [solo(generator.model, long, 6)] * 2
        assert again[1].cached_tokens == len(long) - 1, "its pages and its state"


NOT_SPECS = {
    "another object": ((2, 16), r"not a cache spec.*PagesSpec.*found tuple"),
    "a class": (PagesSpec, r"not a cache spec.*PagesSpec.*found the class PagesSpec"),
    "an unhashable one": (LooseSpec(64), r"cannot be hashed.*frozen dataclass.*'LooseSpec'"),
    "one with an unhashable part": (CombinedSpec((PagesSpec(2, 16), LooseSpec(64))), r"cannot be hashed.*'LooseSpec'"),
}


@pytest.mark.parametrize("what", NOT_SPECS)
def test_only_a_cache_spec_is_one(what, hf_folder):
    """Catches an error of Python, far from the layer in question, and a kind that is no name."""
    spec, words = NOT_SPECS[what]

    def wrong(config):
        layers = compose(config)
        layers[3].cache_spec = spec
        return layers

    refused(hf_folder("Llama", seed=3), rf"layers\[3\], layers\.0\.mlp: .*{words}", ConfigError, layers=wrong)
    for kind in ("", None, "a=b", 3):
        with pytest.raises(InputError, match="kind"):
            register(kind, "own")


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

    def other_kinds(config):
        embedding, *blocks, head = decoder.decoder_layers(config)
        first = OwnEmbedding(config, weight=embedding.table.parts[0].name)
        last = OwnHead(config, norm=head.norm.name, weight=head.lm_head.parts[0].name)
        return [first, *blocks[:-1], OwnSelect(config), blocks[-1], last]

    folder, seen, dry = hf_folder("Llama", seed=3), [], []
    with load(folder, layers=None) as generator:
        expected = generator.generate([prompt(i) for i in range(4)], SIX)
    with load(folder, layers=other_kinds) as generator:
        kinds = [row.kind for row in generator.plan.rows if row.kind.startswith("own")]
        assert kinds == ["own-embedding", "own-select", "own-head"]
        assert len(generator.plan.rows) == 3 * 2 + 3, "no further select is inserted"
        done = generator.generate([prompt(i) for i in range(4)], SIX)
        model = generator.model
        cache = KVCache(model.cache_specs, 1)
        with experts.observing(generator, lambda layer, x: seen.append((layer.kind, len(x)))):
            generator.generate([3, 4], SamplingParams(max_tokens=1))
        for layer in model.layers:
            if layer.kind == "mlp":
                layer._forward = lambda x, batch, kv, forward=layer._forward: dry.append(len(x)) or forward(x, batch, kv)
        model.dry_run(Batch.build([Chunk([3, 4], 0, [0])], 64), cache)
    assert [c.token_ids for c in done] == [c.token_ids for c in expected]
    assert seen[0] == ("attention", 2), "an embedding has no input"
    assert seen[-3:] == [("own-select", 2), ("mlp", 1), ("own-head", 1)]
    assert dry == [2, 1], "layers after the select are run separately"
    ends = r"one embedding first.*reads_tokens.*makes_logits.*found "
    for change, words in (
        (lambda layers: layers[1:], ends), (lambda layers: layers[:-1], ends), (lambda layers: [layers[0], *layers], ends),
        (lambda layers: [*layers[:-1], OwnSelect(layers[0].config, name="again"), layers[-1]], "two select layers"),
    ):  # fmt: skip
        refused(folder, words, ConfigError, layers=lambda config, change=change: change(other_kinds(config)))


# ── in the benchmarks ──

SHAPE = compare.Shape(9, 2, 5, 20)
IMPL = {"memory": "*.memory=own", "both": "*.attention=own"}


@pytest.mark.parametrize(("layers", "kind"), [(compose, "memory"), (compose_both, "both")])
def test_it_is_compared(hf_folder, layers, kind):
    """Catches a state that is not compared, and bytes of it that are not counted."""
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
        check_texts(generator)
        result = compare.run(generator.model, TOKENS, SHAPE, impl=["eager", "*.memory=own"])
        assert result.faults == []
        assert [row["kind"] for row in result.rows] == ["memory"] * 6
        for row in result.rows:
            sums = row["running sum"]
            assert sums["error"]["relative"] <= sums["limit"]["relative"] < 1e-5
            shown = "{:.1e} / {:.1e}".format(*(sums[side]["relative"] for side in ("error", "torch")))
            assert compare_report._cached(row) == shown
        options = {"impl": ["eager", "layers.1.memory=beside"], "layer": "layers.1.memory"}
        faults = compare.run(generator.model, TOKENS, SHAPE, **options).faults
    assert any("1 values of the cache" in fault for fault in faults), faults


FOUND = {
    "unwritten": ("layers.1.memory, prefill 9: state.sum: ", "layers.1.memory, decode b2 @ 5: state.sum: "),
    "not-reset": ("layers.1.memory, prefill 9: output: relative error nan",),
    "beside": ("layers.1.memory, prefill 9: 1 values of the cache", "layers.1.memory, decode b2 @ 5: 1 values of the cache"),
}


def test_faults_of_a_state_are_found(hf_folder):
    """Catches a comparison that looks at the output alone, or at the rows of the step alone."""
    with load(hf_folder("Llama", seed=3)) as generator:
        for name, places in FOUND.items():
            options = {"impl": ["eager", f"layers.1.memory={name}"], "layer": "layers.1.memory"}
            result = compare.run(generator.model, TOKENS, SHAPE, **options)
            for words in places:
                assert any(fault.startswith(words) for fault in result.faults), result.faults


def test_a_comparison_starts_with_the_state_before_the_step(hf_folder):
    """Catches a candidate that reads the state which the eager form has written."""
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
    texts = []
    for cuda_graphs in (True, False):
        options = {"impl": ["triton", impl], "dtype": "float32", "cuda_graphs": cuda_graphs}
        options |= {"max_num_batched_tokens": 24}
        folder = hf_folder("Llama", seed=3, head_dim=64, hidden_size=128)
        with Generator.from_pretrained(folder, device="cuda", kv_cache_memory=1 << 24, layers=layers, **options) as generator:
            assert (generator.plan.not_capturable is None) == cuda_graphs
            assert (generator._engine.engine._runner.graphs.buckets is not None) == cuda_graphs
            params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
            texts.append([c.token_ids for c in generator.generate([prompt(i) for i in range(5)], params)])
    assert texts[0] == texts[1]
