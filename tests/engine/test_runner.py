"""What warming up runs. Catches prompts beyond the model's positions (the rope table ends there) or the cache's pages, a regime
of the kernels that no step of the warm-up reaches, and a layer of another form than the others that is not compiled."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from engine.test_engine import Mock

from minirt import models
from minirt.engine import buckets
from minirt.engine.buckets import (
    MAX_PROMPT_TOKENS,
    MAX_PROMPT_TOKENS_SMALL,
    SHORT_SEQS,
    Bucket,
    Buckets,
    batch_bucket,
    max_prompt_tokens,
    token_bucket,
)
from minirt.engine.execute.runner import Runner
from minirt.engine.limits import MAX_LOGITS_ROWS, EngineLimits
from minirt.engine.warmup import steps, warm_up
from minirt.engine.warmup.steps import _prompts, warm_up_steps
from minirt.kernels.attention import dispatch as attention
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.kernels.attention.operands import decode_lookup_size
from minirt.kernels.linear import dispatch
from minirt.kernels.linear.product import Product
from minirt.kernels.regimes import operations
from minirt.kernels.sampling.batch import SamplingBatch
from minirt.layers import base
from minirt.modeling.formats import QuantizedToFp8
from minirt.modeling.model import Model
from minirt.models import raw_configs
from minirt.sampling_params import FILTERS
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import KVCache, PagesSpec
from minirt.step.plan import PlannedSequences, Scored, StepPlan


@pytest.mark.parametrize(("count", "longest"), [(16, 512), (8192, 512), (8192, 500), (128, 1), (300, 299), (512, 512)])
def test_prompts_stay_within_the_model(count, longest):
    chunks = _prompts(count, longest)
    assert sum(len(c.tokens) for c in chunks) == count
    assert max(c.start + len(c.tokens) for c in chunks) == min(longest, count)
    assert [c.num_logits for c in chunks] == [1] + [0] * (len(chunks) - 1)


def test_prompts_fit_the_smallest_cache():
    cache = KVCache([PagesSpec(1, 1)], 3, page_size=4)
    for count in (1, 11, 12, 40):
        assert Mock()(Batch.build(_prompts(count, 12), 4), cache).shape == (1, 97)


def limits(seqs, tokens, longest=32768):
    return EngineLimits(longest, seqs, tokens)


def planned(*sequences):
    """The plan of sequences (number of new tokens, cached tokens after the step); each draws a token."""
    return StepPlan(PlannedSequences.of((0, -1, count, 1, 1, length) for count, length in sequences))


def token_counts(limit):
    """Of steps without single tokens beside prompts. The same sizes, up to a limit, come with logits of all tokens, too. What
    needs more memory comes first. A step with few tokens on a long context is left out."""
    steps = [step for step in warm_up_steps(limits(1, limit)) if step[0].start == 0]
    counts = [(sum(c.num_logits for c in step), sum(len(c.tokens) for c in step)) for step in steps]
    assert counts == sorted(counts, reverse=True)
    assert len(counts) == len(set(counts)) + 1, "one token has the logits of all tokens, or of the last"
    scored = {tokens for logits, tokens in counts if logits == tokens}
    own = sorted({tokens for logits, tokens in counts if logits == 1})
    assert max(scored) == min(limit, MAX_LOGITS_ROWS)
    assert {count for count in own if count <= MAX_LOGITS_ROWS} == scored
    return own


def test_token_counts():
    """A number for each regime of the products, small beyond 512, so that the steps take little memory."""
    assert token_counts(8192) == [1, 2, 3, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 640, 1152, 2176, 4224]
    assert token_counts(8193)[-1] == 8193
    assert token_counts(4300)[-2:] == [2176, 4224]
    assert token_counts(2100)[-2:] == [1152, 2100]
    assert token_counts(300) == [1, 2, 3, 4, 8, 16, 32, 64, 128, 192, 256, 300]
    assert token_counts(100) == [1, 2, 3, 4, 8, 16, 32, 64, 100]
    assert token_counts(7) == [1, 2, 3, 4, 7]


def test_a_regime_is_found_by_its_declaration_alone(monkeypatch):
    """Else a kernel for it would be compiled in the middle of serving."""
    own = dispatch.LinearRegime(
        "made_up", "tokens", 70, 90, padded=lambda tokens: 80 if tokens <= 80 else 90, launch=lambda product: None
    )
    for module in (buckets, steps):
        monkeypatch.setattr(module, "operations", operations.__wrapped__)  # without its cache
    before = token_counts(8192), token_bucket(75), batch_bucket(85)
    monkeypatch.setattr(dispatch, "REGIMES", (own, *dispatch.REGIMES))
    x, weight = torch.zeros(75, 16), torch.zeros(8, 16)
    assert dispatch.regime(Product(x, weight, torch.zeros(75, 8))) is own
    assert [tokens for tokens in token_counts(8192) if 70 <= tokens <= 90] == [90]
    assert set(token_counts(8192)) > set(before[0])
    assert before[1:] == (128, 96)
    assert [token_bucket(tokens) for tokens in (69, 75, 85, 91)] == [128, 80, 90, 128]
    assert [batch_bucket(seqs) for seqs in (69, 75, 85, 91)] == [80, 80, 90, 96]
    known = Buckets(limits(100, 8192)).all()
    assert {Bucket(80), Bucket(90), Bucket(1, 80), Bucket(1, 90)} <= set(known)
    monkeypatch.setattr(attention, "DECODE", (attention.AttentionRegime("made_up", "sequences", 3, 5), *attention.DECODE))
    assert [len(step) for step in warm_up_steps(limits(64, 8192)) if 3 <= len(step) <= 5]
    assert batch_bucket(5) == 5


@pytest.mark.parametrize("longest", [700, 32768])
@pytest.mark.parametrize("seqs", [1, 2, 20, 33, 40, 300, 1000])
@pytest.mark.parametrize("limit", [513, 600, 1024, 1500, 2048, 8192, 10_000])
def test_warm_up_runs_every_form_of_the_kernels(limit, seqs, longest):
    """By tokens, which the products depend on, and by tokens and sequences, as attention does."""

    def forms(tokens, count):
        regime = -(-tokens // 64) * 64 if tokens <= 256 else -(-tokens // 128) * 128
        regime = regime if tokens <= 512 else 1 << (tokens - 1).bit_length()
        block = max(256, 1 << (count - 1).bit_length())
        return regime, (tokens >= 512, tokens >= 1024, count > 1, count > 32, block)

    steps = warm_up_steps(limits(seqs, limit, longest))
    known = [forms(sum(len(c.tokens) for c in step), len(step)) for step in steps]
    products, attention = ({form[i] for form in known} for i in range(2))
    assert all(sum(len(c.tokens) for c in step) <= limit for step in steps)
    for tokens in (150, 200, 400, 513, 640, 700, 1024, 1025, 1500, 2048, 2049, 8192, 8193, 10_000):
        for count in (1, 2, 3, 32, 33, 34, 64, 256, 257, 300, 512, 513, 1000):
            if tokens <= min(limit, count * longest) and count <= min(seqs, tokens):
                product, wanted = forms(tokens, count)
                assert product in products
                assert wanted in attention, (tokens, count)


@pytest.mark.parametrize(("seqs", "limit", "longest"), [(1, 2, 700), (300, 8192, 32768), (40, 70, 2), (40, 1, 700), (40, 70, 1)])
def test_warm_up_runs_few_tokens_of_each_sequence(seqs, limit, longest):
    """Else their kernel, and the one that combines their KV splits, would be compiled at the first draft. Catches a size of the
    look-up of sequences without a step, and steps that are too large."""
    own = [step for step in warm_up_steps(limits(seqs, limit, longest)) if {len(c.tokens) for c in step} == {2}]
    own = [step for step in own if step[0].start + 2 == min(longest, KV_SPLIT + 1)]
    wanted = {decode_lookup_size(n) for n in range(1, min(seqs, limit // 2) + 1)} if longest > 1 else set()
    assert {decode_lookup_size(len(step)) for step in own} == wanted
    assert all(2 * len(step) <= limit for step in own)


def test_one_layer_of_each_compile_key_runs_in_a_dry_run(monkeypatch):
    raw = next(raw for name, _, raw in raw_configs() if name == "Qwen2.5-0.5B")
    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
    config = models.parse_config(raw | small | {"num_hidden_layers": 8})
    layers = models.build(config)
    blocks = [layers[i : i + 2] for i in range(1, 17, 2)]
    blocks[2][0].config = replace(config, num_heads=2)
    blocks[3][1].window = 5
    blocks[4][1].window = [5]  # not hashable: nobody knows what it does
    blocks[5][1].down.format = QuantizedToFp8()
    model = Model(config, layers)
    model.allocate(torch.device("cpu"), torch.float32, 64)
    monkeypatch.setitem(base._REGISTRY, ("mlp", "own"), replace(base.implementation("mlp", "eager"), name="own"))
    model.resolve(["eager", "layers.6.mlp=own", "layers.7.mlp=own"])
    ran = []

    def forward(layer):
        return lambda x, batch, kv: ran.append((layer.name, kv is not None)) or x

    for layer in model.layers:
        layer._forward = forward(layer)
    cache = KVCache(model.cache_specs, 4, page_size=4)
    model.dry_run(Batch.build([Chunk([1, 2], 0, [0])], 4), cache)
    attention = [f"layers.{i}.attention" for i in (0, 2)]
    mlp = [f"layers.{i}.mlp" for i in (0, 3, 4, 5, 6, 7)]
    assert {name for name, _ in ran} == {"embedding", *attention, *mlp, "select", "head"}
    assert len(ran) == 11
    assert [name for name, pages in ran if pages] == attention


@pytest.mark.parametrize("filters", [names for count in range(1, 4) for names in combinations(FILTERS, count)])
def test_filters_have_one_form_of_the_kernels(filters):
    """Else the first request with other filters would wait for a compilation."""
    every = SamplingBatch.variants(torch.device("cpu"))[-1]
    settings = every.needed(filters).with_all_filters(SamplingBatch.unfiltered(1, "cpu"))
    assert [(column.dtype, column.shape) for column in settings] == [(column.dtype, column.shape) for column in every]


def test_small_layers_have_graphs_for_more_tokens():
    """Else the host's launches take longer than the GPU. Larger ones gain nothing, and their graphs take memory."""
    def most(name):
        raw = next(raw for preset, _, raw in raw_configs() if preset == name)
        flops = [layer.flops(1) for layer in models.build(models.parse_config(raw)) if layer.residual]
        return max_prompt_tokens(sum(flops) / len(flops))

    assert {name: most(name) for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen2.5-7B")} == {
        "Qwen2.5-0.5B": 4096, "Qwen2.5-1.5B": 4096, "Qwen2.5-3B": 2048, "Qwen2.5-7B": 2048
    }  # fmt: skip


@pytest.mark.parametrize("seqs", [1, 3, 64, 100])
@pytest.mark.parametrize("budget", [8192, 100, 5])
@pytest.mark.parametrize("most", [MAX_PROMPT_TOKENS, MAX_PROMPT_TOKENS_SMALL])
def test_every_step_finds_its_graph(seqs, budget, most):
    """No step of decode rows, and no small one with prompts, may capture a graph after warm-up, or write past its layout."""
    buckets = Buckets(limits(seqs, budget), most)
    known = set(buckets.all())
    for count in range(1, seqs + 1):
        bucket = buckets.find(planned(*[(1, 6)] * count))
        assert bucket in known
        assert (bucket.tokens, bucket.seqs >= count) == (0, True)
        assert bucket.short == (bucket.seqs >= SHORT_SEQS)
        long = buckets.find(planned(*[(1, 6)] * (count - 1), (1, KV_SPLIT + 1)))
        assert long in known
        assert long == bucket._replace(short=False)
    for tokens in (2, 16, 17, 100, 128, 129, 192, 193, 511, 512, 513, 2047, 2048, 2049, 2305, 4096):
        alone = buckets.find(planned((tokens, tokens)))
        if tokens > min(budget, most):
            assert alone is None or alone in known
            continue
        others = min(seqs - 1, tokens - 2)
        together = buckets.find(planned((tokens - others, tokens - others), *[(1, 4)] * others))
        for bucket in (alone, together):
            assert bucket in known
            assert bucket.tokens >= tokens
        assert together.seqs > others
        assert alone == Bucket(1, token_bucket(tokens), short=tokens <= KV_SPLIT)
        assert buckets.find(planned((tokens, KV_SPLIT + tokens))) == Bucket(1, token_bucket(tokens))
    assert buckets.find(planned((most + 1, most + 1))) is None
    assert buckets.find(StepPlan(PlannedSequences.of([(0, -1, 2, 2, 1, 2)]))) is None
    middle = buckets.find(StepPlan(PlannedSequences.of([(0, -1, 1, 0, 0, 2)])))
    assert middle == Bucket(1, 16, short=True), "a chunk of one token that ends nothing is no decode row"
    scored = StepPlan(PlannedSequences.of([(0, -1, 2, 1, 0, 2)]), scored=(Scored(0, 1, None, 0),))
    assert buckets.find(scored) is None


@pytest.mark.parametrize(("seqs", "drafts"), [(1, 0), (3, 2), (5, 7)])
def test_steps_are_measured_with_tokens_that_differ(seqs, drafts):
    """Padding has equal tokens, so a mixture touched the experts of one, and steps with drafts seemed to cost next to nothing."""
    own = replace(EngineLimits(64, seqs, 64), max_drafts=drafts)
    cache = KVCache([PagesSpec(1, 1)], 8, page_size=16)
    runner = Runner(Mock(), cache, torch.device("cpu"), own, vocab_size=50_000)
    count = 1 + drafts
    plan, buffers = warm_up.measuring_step(runner, seqs, count), runner.buffers
    for _ in range(2):  # a replay applies the edits again
        buffers.send(plan)
        view = buffers.view(seqs * count, seqs, seqs * count, seqs * count)
        buffers.prepare(view, one_token=drafts == 0)
        step = view.tensors
        assert len(set(step.tokens.tolist())) == seqs * count
        assert step.positions.tolist() == list(range(count)) * seqs
        assert step.seq_lens.tolist() == [count] * seqs
        buffers.sent()
