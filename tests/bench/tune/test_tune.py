"""The choice of configurations, with simulated times.

Catches a choice by a lucky first run; a wrong or failing candidate that is chosen or that stops the tuning; a candidate that is
fastest in a chain of one kernel but makes steps longer.
"""

import json
import random
from dataclasses import asdict, dataclass, fields, replace

import pytest
import torch
from support.cli import caller, refused

from minirt.bench.tune import tune, whole_steps
from minirt.cli.tune import fixed_kernels, linear_shapes
from minirt.errors import NumericsError
from minirt.kernels.compile import tuning
from minirt.kernels.compile.tuning import Case, Family, LinearShape
from minirt.kernels.launch import Gpu
from minirt.kernels.linear import tuning as tuning_cases
from minirt.loading.load import plan_model
from minirt.loading.options import LoadOptions


@dataclass(frozen=True)
class Config:
    us: float
    fails: str = ""


class Bench:
    """Simulates launches. A launch takes the configuration's time multiplied by the noise of the run."""

    def __init__(self, default, candidates, noise=lambda config, count: 1.0):
        self.now, self.counts, self.noise = 0.0, {}, noise
        self.case = Case(None, "a bucket", default, tuple(candidates), lambda: (self.launch, self.check))

    def launch(self, config):
        if config.fails == "compile":
            raise type("OutOfResources", (Exception,), {})("out of resource: shared memory\nmore")
        self.counts[config] = self.counts.get(config, 0) + 1
        self.now += config.us * self.noise(config, self.counts[config])

    def check(self, config):
        if config.fails == "check":
            raise NumericsError("wrong")

    def time(self, run):
        before = self.now
        run()
        return (self.now - before) / 1e6

    def tune(self):
        return tune.tune(self.case, self.time)

    def tune_in_steps(self, *runs):
        """Tune with steps. `runs` has a dictionary for each run: the configuration's `us` → milliseconds of a step."""
        self.asked, left = [], list(runs)

        def step(case, configs):
            assert case.tokens == 8
            self.asked.append(list(configs))
            times = left.pop(0)
            return [times[config.us] / 1e3 for config in configs]

        return tune.tune(replace(self.case, tokens=8), self.time, step)


def test_the_fastest_is_chosen():
    outcome = Bench(Config(10), [Config(9), Config(7), Config(12), Config(10), Config(7)]).tune()
    assert (outcome.config, outcome.rule_s, outcome.best_s, outcome.tried) == (Config(7), 1e-5, pytest.approx(7e-6), 3)
    assert outcome.failed == {}


def test_little_is_not_worth_it():
    outcome = Bench(Config(10), [Config(9.9)]).tune()
    assert (outcome.config, outcome.best_s) == (None, 1e-5)


def test_what_fails_is_out():
    outcome = Bench(Config(10), [Config(1, "compile"), Config(2, "check"), Config(8)]).tune()
    assert outcome.config == Config(8)
    assert outcome.failed[repr(Config(1, "compile"))] == "OutOfResources: out of resource: shared memory"
    assert "wrong" in outcome.failed[repr(Config(2, "check"))]


def test_a_lucky_run_is_not_believed():
    """Thirty equal configurations, with noise that is constant during a run. The luckiest is 20% faster in the first run."""
    draw = random.Random(5)
    luck = {}

    def noise(config, count):
        again = count > tune.REPEATS * tune.CHAIN + 1
        return luck.setdefault((config, again), draw.uniform(0.8, 1.2) if config.us != 10 else 1.0)

    outcome = Bench(Config(10), [Config(10 + i / 1e6) for i in range(1, 31)], noise).tune()
    lucky = min(luck, key=luck.get)
    assert luck[lucky] < 0.85, "the test needs a lucky one"
    assert outcome.config is None, f"{luck}"


def test_steps_choose_among_the_fastest_of_chains():
    bench = Bench(Config(10), [Config(7), Config(8), Config(9), Config(9.5), Config(11)])
    outcome = bench.tune_in_steps({10: 4.0, 7: 4.1, 8: 3.9, 9: 3.95}, {10: 4.02, 8: 3.92})
    assert bench.asked == [[Config(10), Config(7), Config(8), Config(9)], [Config(10), Config(8)]]
    assert (outcome.config, outcome.rule_step_s, outcome.best_step_s) == (Config(8), pytest.approx(4.02e-3), 3.92e-3)
    assert (outcome.rule_s, outcome.best_s) == (1e-5, pytest.approx(7e-6))


@pytest.mark.parametrize("second", [{10: 4.0, 7: 4.0}, {10: 4.0, 7: 3.995}, {10: 4.0, 7: 4.2}])
def test_what_makes_steps_longer_is_not_kept(second):
    """A step must be shorter in both runs, because equal CUDA graphs differ in speed."""
    outcome = Bench(Config(10), [Config(7)]).tune_in_steps({10: 4.0, 7: 3.9}, second)
    assert (outcome.config, outcome.best_s) == (None, pytest.approx(7e-6))
    assert (outcome.rule_step_s, outcome.best_step_s) == (4e-3, second[7] / 1e3)


def test_steps_are_not_asked_for_nothing():
    bench = Bench(Config(10), [Config(9.9), Config(11)])
    outcome = bench.tune_in_steps()
    assert (bench.asked, outcome.config, outcome.best_step_s) == ([], None, None)


def test_what_no_step_runs_is_chosen_in_chains():
    bench = Bench(Config(10), [Config(7)])
    assert tune.tune(bench.case, bench.time, lambda case, configs: pytest.fail("there is no such step")).config == Config(7)


def test_a_broken_rule_is_an_error():
    with pytest.raises(NumericsError):
        Bench(Config(10, "check"), [Config(1)]).tune()
    assert Bench(Config(10), []).tune().config is None


def test_shapes_of_a_model():
    """Each shape appears once, with its fused operations."""
    graph = plan_model(LoadOptions(model="Qwen2.5-7B", device="cpu", dtype="bfloat16"))
    shapes = {(s.N, s.K, s.gated, s.residual, s.fp8) for s in linear_shapes(graph)}
    assert shapes == {
        (4608, 3584, False, False, False), (3584, 3584, False, True, False), (18944, 3584, True, False, False),
        (3584, 18944, False, True, False), (152064, 3584, False, False, False),
    }  # fmt: skip
    assert {s.dtype for s in linear_shapes(graph)} == {torch.bfloat16}
    assert [s.N for s in linear_shapes(graph) if s.logits] == [152064]
    assert len(linear_shapes(graph)) == 5


def test_cases_are_of_the_kernels_that_launches_choose(monkeypatch):
    """On Hopper, a step of one token runs `gemv_int4_sm90` for large 4-bit weights and `gemm_int4_small_sm90` for small ones.

    Catches a case whose steps do not run its kernel. FP32 activations, which Hopper's kernels refuse, run the portable ones.
    """
    monkeypatch.setattr(tuning_cases, "capability", lambda device: 90)
    monkeypatch.setattr(tuning, "gpu_of", lambda device: Gpu(90, 132))
    shapes = [LinearShape(N, 3584, False, False, torch.bfloat16, False, int4=True) for N in (18944, 512)]
    shapes += [LinearShape(512, 96, False, False, torch.float32, False, int4=four) for four in (False, True)]
    tuned = {}
    for name, (family, cases) in tuning.registered().items():
        for case in cases(shapes, (1, 8, 100), torch.device("cpu")):
            tuned.setdefault(name, []).append((case.bucket.split("K=")[0], case.tokens))
            assert case.family is family
    assert tuned == {
        "gemv_int4_sm90": [("N=18944 ", 1)], "gemm_int4_small_sm90": [("N=512 ", 1), ("N=18944 ", 8)],
        "gemm_int4_sm90": [("T=128 N=18944 ", 128), ("T=128 N=512 ", 128)], "gemv_int4": [("N=512 ", 1)],
        "gemm_int4": [("T=16 N=512 ", 16), ("T=128 N=512 ", 128)], "gemv": [("N=512 ", 1)],
        "gemm_small": [("T=16 N=512 ", 16), ("T=128 N=512 ", 128)],
    }  # fmt: skip


@pytest.mark.parametrize("stored", [{}, {"fp8": True}, {"fp8": True, "blocks": True}, {"int4": True}], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_facts_of_a_case_are_those_of_the_launch(stored, gated, monkeypatch):
    """The bucket that is tuned is the one that launches look up, and a wrong result is noticed."""
    monkeypatch.setattr(tuning_cases, "_COLD", 1)
    shape = LinearShape(24, 136, gated, not gated, torch.float16, **({"fp8": False} | stored))
    asked = []
    original = tuning.Family.lookup
    monkeypatch.setattr(
        tuning.Family, "lookup", lambda self, device, facts: asked.append((self, facts)) or original(self, device, facts)
    )
    names = {}
    for name, (_, cases) in tuning.registered().items():
        for case in cases([shape], (1, 9), torch.device("cpu")):
            launch, check = case.prepare()
            launch(None)  # looks up its configuration
            check(case.default)
            family, facts = asked[-1]
            assert (family, family.bucket(facts)) == (case.family, case.bucket)
            assert facts == tuning_cases.shape_facts(shape, facts.T)
            names[name] = case.tokens
    assert names == ({"gemv_int4": 1, "gemm_int4": 16} if shape.int4 else {"gemv": 1, "gemm_small": 16})


@pytest.mark.parametrize(("tokens", "counts", "context"), [(1, [1], 128), (100, [1] * 100, 128), (257, [257], 257)])
def test_the_steps_of_so_many_tokens(tokens, counts, context):
    """Each sequence has its own pages and a cached context."""
    chunks = whole_steps.chunks(tokens, 48)
    assert [len(chunk.tokens) for chunk in chunks] == counts
    assert {chunk.start + len(chunk.tokens) for chunk in chunks} == {context}
    pages = [page for chunk in chunks for page in chunk.pages]
    assert sorted(pages) == list(range(len(counts) * -(-context // 48)))


def test_a_step_is_captured_with_the_configuration_that_is_tried(monkeypatch):
    """On a CPU the captured "graph" is the configuration looked up during the capture. Catches stale cached look-ups."""
    from minirt import Generator
    family, seen = Family("mine", Config, (), (), lambda facts, gpu: None), []

    def override():
        return family.lookup(torch.device("cpu"), ())

    def captured(work, device):
        logits = work()
        seen.append((override(), tuple(logits.shape)))
        return override()

    monkeypatch.setattr(whole_steps, "captured", captured)
    monkeypatch.setattr(whole_steps, "replays", lambda graphs: [graph.us * len(seen) for graph in graphs])
    case = replace(Bench(Config(10), []).case, family=family, bucket="", tokens=3)
    with Generator.from_pretrained(device="cpu", random_weights=True, max_num_seqs=1, max_model_len=256) as generator:
        times = whole_steps.Steps(generator.model).seconds(case, [Config(10), Config(7)])
    vocabulary = generator.config.vocab_size
    assert seen == [(Config(10), (3, vocabulary)), (Config(7), (3, vocabulary))] * whole_steps.CAPTURES
    assert times == [10 * 4, 7 * 4]  # the median of three rounds, after two, four and six captures
    assert override() is None


@pytest.fixture
def call(capfd, monkeypatch):
    return caller(capfd, monkeypatch)


def test_no_gpu_is_an_error(call):
    refused(call("tune", "--device", "cpu"), "tuning needs a GPU")


@pytest.mark.parametrize("option", [("-o", "csv"), ("--output-file", "x")])
def test_what_is_stored_has_two_forms(call, option):
    refused(call("tune", "--show", *option), "--show prints text, or JSON", code=2)


def test_what_is_stored_is_listed_without_a_gpu(call, tmp_path, monkeypatch):
    monkeypatch.setenv("MINIRT_CACHE", str(tmp_path / "none"))
    show = ("tune", "--show", "--device", "cpu")
    assert call(*show) == (0, f"nothing is stored in {tmp_path / 'none'}\n", "")
    monkeypatch.setenv("MINIRT_CACHE", str(tmp_path))
    first, second = tmp_path / "tuned-a-triton-3.json", tmp_path / "tuned-b-triton-3.json"
    family = tuning_cases.FAMILIES[0]
    config = family.config(**{field.name: 8 for field in fields(family.config)})
    tuning.store(family, first, {"N=3 K=64": config})
    second.write_text(json.dumps({"schema": 1, "kernels": {family.name: {"source": "older", "configs": {"x": {}}}}}))
    (tmp_path / "other.json").write_text("{")
    code, out, err = call(*show)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        str(first), f"  {family.name} N=3 K=64: {config}", str(second), "  nothing for the current source of the kernels",
    ]  # fmt: skip
    record = json.loads(call(*show, "--json")[1])
    assert [(file["path"], file["this_gpu"]) for file in record["files"]] == [(str(first), False), (str(second), False)]
    assert record["files"][0]["kernels"][family.name] == {"N=3 K=64": asdict(config)}


@pytest.mark.gpu
def test_tuning_a_model(tmp_path, monkeypatch, call):
    """End to end: launches look up the stored configurations."""
    from minirt.kernels.compile import tuning
    from minirt.kernels.linear import gemv

    monkeypatch.setenv("MINIRT_CACHE", str(tmp_path))
    tuning.clear_config_caches()
    code, out, progress = call("tune", "-t", "1,20,200", "--dtype", "bfloat16", "-o", "json")
    assert code == 0, progress
    rows = json.loads(out)["results"]
    assert {row["kernel"] for row in rows} >= {"gemv", "gemm_small"}
    _, shown, _ = call("tune", "--show")
    device = torch.device("cuda", 0)
    stored = tuning.load(gemv.FAMILY, tuning.path(device))
    assert all(config == gemv.FAMILY.find(device, bucket) for bucket, config in stored.items())
    assert shown.count("gemv N=") == len(stored)


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_a_hybrid_model(quantization):
    """Qwen3.5's projections are tuned, a and b with them unless they alone keep 16 bits. The rest is named: nothing to tune."""
    model = plan_model(LoadOptions(model="Qwen3.5-0.8B", random_weights=True, quantization=quantization))
    widths = {shape.N for shape in linear_shapes(model) if not shape.residual and not shape.gated and not shape.logits}
    projections, both, attention = 4 * 16 * 128, 2 * 16, {(2 * 8 + 2 * 2) * 256}  # q and the gate, k and v
    assert widths == attention | ({projections + both} if quantization is None else {projections, both})
    fixed = fixed_kernels(model)
    assert {"gated_delta_decode", "gated_delta_chunk", "decode", "prefill", "rope_write"} <= set(fixed)
    assert not set(fixed) & set(tuning.registered())
    plain = fixed_kernels(plan_model(LoadOptions(model="Qwen2.5-0.5B", random_weights=True)))
    assert not any(name.startswith("gated_delta") for name in plain)
