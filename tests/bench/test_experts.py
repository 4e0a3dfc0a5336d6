"""The experts that a run uses: counted from the layers' own choices, and the bytes that follow from them."""

import pytest

from minirt import SamplingParams
from minirt.bench import decode, experts, prefill
from minirt.bench.ceiling import Ceiling, MatmulCeiling
from minirt.bench.measure import Runs
from minirt.generator import Generator
from minirt.kernels import reference
from minirt.profiling.read_bytes import step_read_bytes

E, K = 8, 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def generator(hf_folder):
    sizes = {"num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
    folder = hf_folder("Qwen3Moe", **sizes, head_dim=16)
    with Generator.from_pretrained(folder, device="cpu", max_num_seqs=4, kv_cache_memory=1 << 22) as made:
        yield made


def test_counts_are_those_of_the_router(generator):
    seen = []

    def note(layer, x):
        seen.append((layer.name, x.clone(), experts.expert_counts(layer, x)))

    with experts.observing(generator, note):
        generator.generate([[1, 2, 3, 4, 5]], GREEDY)
    assert {tuple(x.shape) for _, x, _ in seen} == {(5, 64), (1, 64)}  # the prompt, then a token; `Select` before the last layer
    layers = {layer.name: layer for layer in generator.model.layers}
    mixtures = [(name, x, counts) for name, x, counts in seen if counts is not None]
    assert {name for name, _, _ in mixtures} == {name for name, layer in layers.items() if layer.kind == "moe"}
    assert len(mixtures) == 2 * 2  # two of three layers, two steps
    for name, x, counts in mixtures:
        layer = layers[name]
        h = reference.rms_norm(x, layer.norm.weight, generator.config.rms_norm_eps)
        chosen = (h @ layer.router.weight.T).topk(K).indices
        assert counts.tolist() == [int((chosen == e).sum()) for e in range(E)]
    before = len(seen)
    generator.generate([[1, 2]], GREEDY)
    assert len(seen) == before


def test_use_of_decode_steps(generator):
    """Only steps of the whole batch count; the bytes are those of the experts that they used."""
    use = experts.in_decode(generator, 3, 7, seed=0)
    touched = use.touched()
    assert len(touched) == 2
    assert all(K <= n <= 3 * K for n in touched.values())
    summary = use.summary(experts.expected(generator.config, 3))
    assert summary["experts"] == E
    assert summary["expected"] == pytest.approx(E * (1 - (1 - K / E) ** 3))
    assert summary["least"] <= summary["touched"] <= summary["most"]
    assert summary["share"]["p10"] <= summary["share"]["p50"] <= summary["share"]["max"] <= E
    one = 3 * 24 * 64 * 4  # bytes of an expert
    nothing = step_read_bytes(generator.model, 3, dict.fromkeys(touched, 0.0))
    assert step_read_bytes(generator.model, 3, touched) == pytest.approx(nothing + one * sum(touched.values()), abs=2)


def test_results_name_the_experts(generator):
    read, products = Ceiling(1e9, "made up"), MatmulCeiling(1e9, "made up")
    runs = Runs(generator, 1, {"temperature": 0.0})
    (row,) = decode.run(runs, [3], [4], read, products)
    assert row["experts"]["touched"] > K - 1
    assert row["weight_bytes_read"] != row["weight_bytes_if_uniform"]
    (row,) = prefill.run(runs, [9], products)
    assert row["experts"]["most"] <= E


def test_other_models_have_no_experts():
    class Dense:  # it generates nothing
        class config:
            moe = None

    assert experts.in_decode(Dense(), 1, 5, seed=0) is None
