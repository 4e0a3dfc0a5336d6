"""`Select`, the gather after the last attention layer: alone and in whole models, eager and Triton (interpreter or GPU).

Catches rows off by one, a gather that is skipped or comes too early, later layers that compute unneeded rows or fail on zero
rows, and kernels for the kept rows that are not compiled.
"""

from dataclasses import replace

import pytest
import torch

from minirt import models
from minirt.errors import ConfigError
from minirt.layers import Layer, Select, implementation
from minirt.loading import checkpoint as weights
from minirt.modeling.formats import Quantization
from minirt.modeling.model import Model
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import PAGE_SIZE, KVCache

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
CONFIG = models.parse_config({
    "model_type": "qwen2", "hidden_size": 96, "intermediate_size": 131, "num_hidden_layers": 2, "vocab_size": 211,
    "max_position_embeddings": 512, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
})  # fmt: skip
FORMS = ["eager", pytest.param("triton", marks=pytest.mark.slow)]
TOKENS = [(7 * i * i + 3) % 211 for i in range(60)]


def build(impl="eager", layers=None, quantization=None):
    model = Model(CONFIG, models.build(CONFIG) if layers is None else layers, quantization)
    model.allocate(DEVICE, torch.float32, 512)
    model.resolve(impl)
    weights.randomize(model)
    return model


def watch(layer):
    """A list that records the number of rows of each later call of `layer`."""
    rows, forward = [], layer._forward

    def watched(x, batch, kv):
        rows.append(len(x))
        return forward(x, batch, kv)

    layer._forward = watched
    return rows


# ── alone ──


@pytest.fixture(params=["eager", "triton"])
def gather(request):
    return implementation("select", request.param).factory(Select(CONFIG))


def test_rows_that_want_logits(gather):
    x = torch.arange(7.0, device=DEVICE).unsqueeze(1).repeat(1, 96)
    chunks = [Chunk([1, 2, 3], 0, [0]), Chunk([4], 5, [1], num_logits=0), Chunk([5, 6], 0, [2], num_logits=2),
              Chunk([7], 8, [3])]  # fmt: skip
    out = gather(x, Batch.build(chunks, PAGE_SIZE).to(DEVICE), None)
    assert out.shape == (4, 96)
    assert out[:, 0].tolist() == out[:, 95].tolist() == [2, 4, 5, 6]


@pytest.mark.parametrize("chunks", [[Chunk([1], 5, [0]), Chunk([2], 9, [1])], [Chunk([1, 2, 3], 0, [0], num_logits=3)]])
def test_every_row_is_no_copy(chunks, gather):
    x = torch.ones(sum(len(c.tokens) for c in chunks), 96, device=DEVICE)
    assert gather(x, Batch.build(chunks, PAGE_SIZE).to(DEVICE), None) is x


def test_as_many_rows_as_tokens_in_another_order(gather):
    """A static batch with room for as many sequences as tokens."""
    batch = Batch.build([Chunk([5, 6, 7], 0, [0]), Chunk([8], 3, [1])], PAGE_SIZE)
    batch = replace(batch, logits_indices=torch.tensor([2, 3, 2, 3])).to(DEVICE)
    x = torch.arange(4.0, device=DEVICE).unsqueeze(1).repeat(1, 96)
    assert gather(x, batch, None)[:, 0].tolist() == [2, 3, 2, 3]


# ── its place ──


def test_it_stands_behind_the_last_attention():
    embedding, a0, m0, a1, m1, head = models.build(CONFIG)
    for before, behind in (
        ([embedding, a0, m0, a1], [m1, head]), ([embedding, a0, a1, a0], [m0, m1, m0, head]), ([embedding], [m0, m1, head]),
        ([embedding], [head]),
    ):  # fmt: skip
        given = [*before, *behind]
        layers = Model(CONFIG, given).layers
        assert layers == [*before, layers[len(before)], *behind]
        assert (layers[len(before)].kind, layers[len(before)].name) == ("select", "select")
        assert given == [*before, *behind], "the caller's list must not change"


def test_a_place_of_ones_own():
    embedding, a0, m0, a1, m1, head = models.build(CONFIG)
    select = Select(CONFIG, name="mine")
    places = ([embedding, a0, m0, a1, m1, select], [embedding, a0, a1, select, m0, m1], [embedding, select])
    for given in ([*place, head] for place in places):
        assert Model(CONFIG, given).layers == given


def test_a_wrong_place_is_refused():
    embedding, a0, m0, a1, m1, head = models.build(CONFIG)
    select = Select(CONFIG)
    for wrong, last in (([embedding, a0, select, m0, a1, m1, head], 4), ([embedding, a0, select, a0, m0, head], 3)):
        with pytest.raises(ConfigError, match=rf"layers\[2\]: attention .* lack rows; expected .* after layers\[{last}\] .lea"):
            Model(CONFIG, wrong)
    for wrong in ([embedding, a0, m0, select, select, head], [embedding, a0, m0, select, Select(CONFIG), a0, head]):
        with pytest.raises(ConfigError, match=r"layers\[4\]: there are two select layers; layers\[3\] is the first .leave"):
            Model(CONFIG, wrong)
    for wrong in ([select, embedding, head], [embedding, a0, head, select]):
        with pytest.raises(ConfigError, match="one embedding"):
            Model(CONFIG, wrong)


# ── in a model ──


def steps(model):
    """The logits of five steps, on unordered pages that hold NaN before they are written.

    The steps: a prompt; an unfinished prompt (no logits); a mixed step of a prompt, an unfinished prompt, a single token and a
    prompt with all logits; one single token; two single tokens.
    """
    cache = KVCache(model.cache_specs, 6, DEVICE)
    for layer in cache.layers:
        layer.k.fill_(torch.nan), layer.v.fill_(torch.nan)

    def logits(*chunks):
        return model(Batch.build(chunks, PAGE_SIZE), cache).cpu()

    return [
        logits(Chunk(TOKENS[:9], 0, [4])),
        logits(Chunk(TOKENS[10:30], 0, [2], num_logits=0)),
        logits(
            Chunk(TOKENS[20:27], 0, [0]),  # a whole prompt
            Chunk(TOKENS[30:40], 20, [2], num_logits=0),  # the middle of a prompt
            Chunk(TOKENS[9:10], 9, [4]),  # a single token
            Chunk(TOKENS[:3], 0, [5], num_logits=3),
        ),
        logits(Chunk(TOKENS[40:41], 30, [2])),
        logits(Chunk(TOKENS[27:28], 7, [0]), Chunk(TOKENS[41:42], 31, [2])),
    ]


def expected():
    """The same rows, computed for each sequence alone with logits for every token, so that nothing is gathered."""
    model = build()

    def rows(tokens, *wanted):
        cache = KVCache(model.cache_specs, 1, DEVICE)
        out = model(Batch.build([Chunk(tokens, 0, [0], num_logits=len(tokens))], PAGE_SIZE), cache).cpu()
        return out[list(wanted)]

    first, middle, short = rows(TOKENS[:10], 8, 9), rows(TOKENS[10:42], 30, 31), rows(TOKENS[20:28], 6, 7)
    whole = rows(TOKENS[:3], 0, 1, 2)
    return [first[:1], torch.empty(0, 211), torch.cat((short[:1], first[1:], whole)), middle[:1],
            torch.cat((short[1:], middle[1:]))]  # fmt: skip


@pytest.mark.parametrize("impl", FORMS)
def test_logits_are_those_of_sequences_alone(impl):
    for result, truth in zip(steps(build(impl)), expected(), strict=True):
        torch.testing.assert_close(result, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("impl", FORMS)
def test_a_step_without_logits(impl, quantization):
    """After the gather it has zero rows, with any weight format. The next step uses the KV values that it has written."""
    model = build(impl, quantization=quantization and Quantization(quantization, head=True))
    results = []
    for sizes in ((30,), (12, 18)):
        cache, start = KVCache(model.cache_specs, 1, DEVICE), 0
        for size in sizes:
            last = start + size == 30
            out = model(Batch.build([Chunk(TOKENS[start : start + size], start, [0], num_logits=int(last))], PAGE_SIZE), cache)
            assert out.shape == (last, 211)
            start += size
        results.append(out.cpu())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


class Gather(Layer):
    """A custom class with the kind of `Select`, and what it states."""

    kind = "select"
    selects_rows = True
    returns = Select.returns


@pytest.mark.parametrize("kind", [Select, Gather])
def test_a_layer_on_both_sides_runs_on_both_in_a_dry_run(kind):
    """Otherwise its kernels for few rows would be compiled during a step, or during the capture of a CUDA graph."""
    embedding, attention, mlp, *_, head = models.build(CONFIG)
    model = build(layers=[embedding, attention, mlp, attention, kind(CONFIG, name="gather"), mlp, mlp, head])
    rows = {layer.kind: watch(layer) for layer in model.unique_layers()}
    model.dry_run(Batch.build([Chunk(TOKENS[:5], 0, [0])], PAGE_SIZE), KVCache(model.cache_specs, 1, DEVICE))
    assert rows == {"embedding": [0], "attention": [5], "mlp": [5, 1], "select": [5], "head": [1]}
