"""`minirt compare` on tiny models: correct layers pass, planted faults are reported by name, and the output can be parsed.

Each fault is a separate implementation (`compare_faults`), so faults do not hide each other.
"""

import csv
import io
import json
import math
import re
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from support import compare_faults  # noqa: F401  (registers the faults)
from support.cli import refused, succeeded

from minirt import Generator
from minirt.bench import bounds, picture
from minirt.bench.compare import compare
from minirt.bench.compare import layers as compare_layers
from minirt.bench.compare import report as compare_report
from minirt.bench.compare.model import compare_text as over_text
from minirt.bench.compare.report import draw
from minirt.bench.report import FORMATS, context
from minirt.errors import ContextLengthError, InputError
from minirt.parallel import ranks

CPU = ("--device", "cpu")
SHORT = ("--prompt-len", 9, "-c", 5)
TOKENS = [(7 * i * i + 3) % 211 for i in range(90)]


@pytest.fixture(scope="module")
def folder(hf_folder):
    """A model without a tokenizer. Its head size is 64, because the Triton attention kernels support only 64 and 128."""
    return hf_folder("Qwen2", seed=5, hidden_size=128, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2)


@pytest.fixture
def model(folder):
    with Generator.from_pretrained(folder, device="cpu", impl="eager", kv_cache_memory=1 << 22) as generator:
        yield generator._model


# ── correct layers ──


@pytest.fixture(scope="module")
def sound(folder):
    """The context and the result of a whole comparison with Triton."""
    with Generator.from_pretrained(folder, device="cpu", impl="eager", kv_cache_memory=1 << 22) as generator:
        result = compare.run(generator._model, TOKENS, compare.Shape(9, 2, 5, 20))
        correctness = {"checked": True, "against": "fp64"}
        shared = context("compare", generator, name="tiny", command=["minirt"], correctness=correctness, ceiling=None)
    return shared, result


def test_triton_holds_its_bounds(sound):
    _, result = sound
    assert result.faults == []
    first, last = ["embedding", "layers.0.attention", "layers.0.mlp", "layers.1.attention"], ["layers.1.mlp", "head"]
    assert [row["layer"] for row in result.rows] == [*first, "select", *last, *first, *last], "in decode all rows need logits"
    assert [row["step"] for row in result.rows] == 7 * ["prefill 9"] + 6 * ["decode b2 @ 5"]
    for row in result.rows:
        assert row["within_bounds"]
        assert row["implementation"] == "triton"
        assert row["out"]["error"]["relative"] <= row["out"]["limit"]["relative"] < 1e-5
        assert row["out"]["error"]["worst_row"] <= row["out"]["limit"]["worst_row"] < 1e-5
        assert row["out"]["error"]["cosine"] == pytest.approx(1)
        assert (row["k"]["error"]["relative"] is None) == (row["kind"] != "attention")
        times = ("eager_s", "candidate_s", "speedup", "limit_s", "share_of_limit", "cold_l2")
        assert [row[name] for name in times] == [None] * 6, "nothing is timed on a CPU"
    text = result.model["text"]
    assert text["tokens"] == text["agree"] == 20
    assert text["clear_agree"] == text["clear"] >= 15
    assert 0 <= text["kl_mean"] <= text["kl_max"] < 1e-9
    assert text["relative"] <= text["limit"] < 1e-5
    assert result.model["decode"] is None
    assert result.model["fusion"] == {}


FAULT = """
from minirt.bench.compare import compare
compared = compare._compared
compare._compared = lambda place, step: (compared(place, step)[0], ["rank 1 alone has this fault"])
"""


def test_ranks_compare_together(hf_folder, run, tmp_path, monkeypatch):
    """Catches a rank that waits for another, a truth of one rank's share, and errors of another rank's heads that nobody sees."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    folder = hf_folder("Qwen2", seed=5, intermediate_size=96, vocab_size=212, **sizes)
    base = ("compare", "-m", folder, *CPU, *SHORT, "--tensor-parallel", 2, "-q", "-o", "json")
    out, _ = succeeded(run(*base, "-n", 20))
    results = json.loads(out)["results"]
    assert {(row["layer"], row["implementation"]) for row in results} >= {("layers.1.attention", "triton"), ("head", "triton")}
    assert all(row["within_bounds"] for row in results)
    (tmp_path / "fault.py").write_text(FAULT)
    monkeypatch.setattr(ranks, "imported", [str(tmp_path / "fault.py")])
    code, _, err = run(*base, "--layer", "head")
    assert code == 1
    assert "rank 1: its heads or states exceed their bounds" in err


def test_formats_say_the_same_and_that_nothing_is_a_speed(sound, tmp_path):
    report = compare_report.report(*sound, cuda=False)
    texts = {form: report.render(form) for form in FORMATS}
    record = json.loads(texts["json"], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    lines = [json.loads(line) for line in texts["jsonl"].splitlines()]
    cells = list(csv.DictReader(io.StringIO(texts["csv"])))
    table = [line.split(" | ") for line in texts["md"].splitlines() if line.startswith(("| prefill", "| decode b"))]
    assert len(record["results"]) == len(lines) == len(cells) == len(table) == 13
    for row, line, cell, shown in zip(record["results"], lines, cells, table, strict=True):
        assert row["layer"] == line["layer"] == cell["layer"] == shown[1]
        assert cell["out.error.relative"] == str(row["out"]["error"]["relative"])
        assert shown[3] == str(row["rows"])
        assert f"{row['out']['error']['relative']:.1e} / " in shown[4]
    assert record["no_speed"] == lines[0]["no_speed"] == cells[0]["no_speed"] == compare_report.NO_SPEED
    assert f"**{compare_report.NO_SPEED}.**" in texts["md"]
    assert texts["md"].startswith("**CPU figures, no GPU:** ")
    assert "All bounds hold." in texts["md"]
    assert not re.search("speedup|µs|tokens/s|takes less", texts["md"])
    assert record["whole_model"] == sound[1].model
    assert record["implementations"] == ["triton"]


@pytest.mark.parametrize(("suffix", "timed"), [(".png", True), (".svg", False)])
def test_picture(suffix, timed, sound, tmp_path):
    shared, result = sound
    rows = [row | {"eager_s": 2e-3, "candidate_s": 1e-3, "speedup": 2.0} for row in result.rows] if timed else result.rows
    report = compare_report.report(shared, compare.Result(rows, None, {}, []), cuda=False)
    target = tmp_path / f"a{suffix}"
    draw(report.context, report.results, target)
    assert target.read_bytes().startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    assert target.stat().st_size > 5000
    with pytest.raises(Exception, match="cannot write the picture"):
        draw(report.context, report.results, tmp_path / "none" / "a.png")


def test_the_command(run, folder, tmp_path):
    target = tmp_path / "a.png"
    base = ("compare", "-m", folder, *CPU, *SHORT, "--layer", "layers.1.mlp", "--picture", target)
    code, out, err = run(*base, "-o", "json")
    record = json.loads(out)
    assert code == 0
    assert [row["layer"] for row in record["results"]] == 2 * ["layers.1.mlp"]
    assert record["whole_model"] is None
    assert record["faults"] == []
    assert record["command"][:2] == ["minirt", "compare"]
    assert compare_report.NO_SPEED in err
    assert target.stat().st_size > 5000


MINE = """
from minirt.layers import implementation, register

@register("mlp", "mine_{name}")
def mine(layer):
    return implementation("mlp", "eager").factory(layer)
"""


def test_an_implementation_of_a_file(run, folder, tmp_path):
    """Without --import, the name is not known. The file runs after Triton's interpreter is on, and may import Triton."""
    file, base = tmp_path / "mine_of_a_file.py", ("compare", "-m", folder, *CPU, *SHORT, "--impl", "*.mlp=mine_a")
    file.write_text("import triton\n" + MINE.format(name="a"))
    refused(run(*base, "-q"), "no implementation 'mine_a'", code=2)
    out, _ = succeeded(run(*base, "--import", file, "--layer", "*.mlp", "-o", "json"))
    assert {row["implementation"] for row in json.loads(out)["results"]} == {"mine_a"}


def test_a_result_prints_as_a_table(sound, monkeypatch):
    """Also on a narrow terminal, where it is several tables. It was the repr of nested dictionaries, or a list for each row."""
    monkeypatch.setenv("COLUMNS", "80")
    text = str(sound[1])
    assert "All bounds hold." in text
    lines = text[: text.index("Whole model")].splitlines()
    assert max(map(len, lines)) <= 80
    heads = [line.split()[:2] for line in lines if line.startswith("step ")]
    assert heads == [["step", "layer"]] * len(heads)
    assert len(heads) > 1
    assert sum(line.startswith("prefill 9") for line in lines) == 7 * len(heads)


@pytest.mark.parametrize("options", [("--fp8",), ("--kv-cache-dtype", "fp8")])
def test_fp8_is_sound_too(options, run, folder):
    """FP8 weights, activations and pages. The only differences are values between two codes that round to different sides."""
    out, err = succeeded(run("compare", "-m", folder, *CPU, *SHORT, *options, "--layer", "layers.0.*", "-q", "-o", "json"))
    record = json.loads(out)
    assert record["dtype"] == ("float32 · fp8" if options == ("--fp8",) else "float32")
    assert [row["kind"] for row in record["results"]] == ["attention", "mlp"] * 2
    keys = record["results"][0]["k"]  # a step may write a single head to FP8 pages, so their floor is that of one row
    least = 2**-7 if options == ("--fp8",) else 2**-4
    assert keys["limit"]["relative"] == pytest.approx(2 * keys["torch"]["relative"] + least, rel=1e-12)
    assert ("quantized weights save memory, not time" in err) == (options == ("--fp8",)), err
    assert err.count("\n") == (options == ("--fp8",)), err


# ── faults ──


FAULTS = {
    "layers.0.mlp=compare-swapped": ("layers.0.mlp, prefill 9: output: relative error", "layers.0.mlp, decode b1 @ 5: output"),
    "layers.1.attention=compare-backwards": ("layers.1.attention, prefill 9: K in the pages: relative error",),
    "layers.0.attention=compare-short": ("layers.0.attention, prefill 9: output: relative error",),
    "layers.1.attention=compare-no-bias": ("prefill 9: V in the pages", "decode b1 @ 5: V in the pages"),
    "layers.1.attention=compare-unwritten": ("prefill 9: K in the pages: relative error nan", "V in the pages: relative error"),
    "layers.0.attention=compare-stray": ("prefill 9: 1 values of the cache", "decode b1 @ 5: 1 values of the cache"),
    "layers.0.mlp=compare-nan": ("layers.0.mlp, prefill 9: output: relative error nan",),
    "select=compare-before": ("select, prefill 9: output: relative error",),
}


@pytest.mark.parametrize("impl", FAULTS)
def test_planted_faults_are_refused(impl, run, folder):
    layer = impl.partition("=")[0]
    code, out, err = run("compare", "-m", folder, *CPU, *SHORT, "--layer", layer, "--impl", impl, "-q", "-o", "json")
    record = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert code == 1
    assert err.splitlines()[-1].startswith("minirt: compare: exceeds its error bound")
    assert f"{layer}, prefill 9: " in err
    for words in FAULTS[impl]:
        assert any(words in fault for fault in record["faults"]), record["faults"]
    for fault in record["faults"]:
        assert "values of the cache" in fault or ("PyTorch's" in fault and "limit" in fault), "both errors are named"
    assert not record["results"][0]["within_bounds"]
    assert all(row["eager_s"] is row["speedup"] is None for row in record["results"]), "wrong results are not timed"


def test_a_fault_is_not_lost_in_a_large_residual_stream(model):
    """Trained models have a few huge values in the residual stream. Next to them, what a layer adds is as small as rounding."""
    model.layers[0].table.weight.mul_(1e6)
    impl = ["eager", "layers.0.mlp=compare-scaled"]
    result = compare.run(model, TOKENS, compare.Shape(9, 1, 5, 0), impl=impl, layer="layers.0.mlp")
    row = result.rows[0]
    assert row["out"]["error"]["relative"] < row["out"]["limit"]["relative"]
    assert row["added"]["error"]["relative"] == pytest.approx(0.05, rel=0.3)
    assert [fault.split(": ")[:2] for fault in result.faults] == [
        ["layers.0.mlp, prefill 9", "what it adds"], ["layers.0.mlp, decode b1 @ 5", "what it adds"]
    ]  # fmt: skip


def test_the_whole_model_reports_its_progress(model):
    sequence = compare_layers.places(model)
    shares = []
    text = over_text(model, sequence, TOKENS[:5], bounds.Floor(1e-6, 1e-6), shares.append)
    assert text.tokens == 5
    assert 5 <= len(shares) <= 9
    assert shares == sorted(shares)
    assert all(0.1 <= share < 1 for share in shares)
    assert min(b - a for a, b in pairwise(shares)) >= 0.1 - 1e-9


def test_select_alone(model):
    """Built-in `Select` does nothing in a decode step, so no step is timed. A user's implementation is compared there too."""
    shape = compare.Shape(9, 2, 5, 20)
    result = compare.run(model, TOKENS, shape, impl=["eager", "select=triton"])
    assert [(row["layer"], row["tokens"], row["rows"]) for row in result.rows] == [("select", 9, 1)]
    assert result.faults == []
    assert result.model["text"]["agree"] == 20
    assert result.model["decode"] is None
    result = compare.run(model, TOKENS, shape, impl=["eager", "select=compare-half"], layer="select")
    assert [row["step"] for row in result.rows] == ["prefill 9", "decode b2 @ 5"]
    assert len(result.faults) > 0
    assert all(fault.startswith("select, decode b2 @ 5: output") for fault in result.faults)


def test_a_stale_scale_is_refused(run, folder):
    options = ("--fp8", "--impl", "layers.1.mlp=compare-stale", "-q", "-o", "json")
    code, out, err = run("compare", "-m", folder, *CPU, *SHORT, "--layer", "layers.1.mlp", *options)
    assert code == 1
    record = json.loads(out)
    assert any(fault.startswith("layers.1.mlp, decode b1 @ 5: output") for fault in record["faults"])
    assert all(row["out"]["limit"]["relative"] < 1e-4 for row in record["results"]), "a single row is never quantized"
    assert "limit" in err


def test_a_broken_model_is_refused_and_its_table_says_so(run, folder):
    code, out, err = run("compare", "-m", folder, *CPU, *SHORT, "-n", 20, "--impl", "head=compare-doubled", "-o", "md")
    assert code == 1
    assert "bounds are broken**, so nothing was timed" in out
    assert "- whole model, 20 tokens: logits: relative error" in out
    assert "- head, decode b1 @ 5: output: relative error 1.00e+00, PyTorch's" in out
    assert "tokens/s" not in out
    assert err.splitlines()[-1].startswith("minirt: compare: ")


def test_divergence_and_agreement_against_their_definitions(model, folder):
    """Doubled logits have the same top tokens and a KL divergence that PyTorch also computes."""
    model.resolve(["eager", "head=compare-doubled"])
    places = compare_layers.places(model)
    compared = over_text(model, places, TOKENS, bounds.floor(torch.float32))
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=1 << 22) as generator:
        logits = generator.logits(TOKENS).double()
    expected, other = logits.log_softmax(-1), (2 * logits).log_softmax(-1)
    kl = torch.nn.functional.kl_div(other, expected, log_target=True, reduction="none").sum(-1)
    assert compared.kl_mean == pytest.approx(kl.mean().item(), rel=1e-5)
    assert compared.kl_max == pytest.approx(kl.max().item(), rel=1e-5)
    assert compared.kl_truth == pytest.approx(compared.kl_mean, rel=1e-4)
    assert compared.kl_truth_torch < 1e-9
    assert compared.agree == compared.tokens == len(TOKENS)
    assert compared.relative == pytest.approx(1, rel=1e-5)
    assert [fault.split(":")[0] for fault in compared.faults] == ["logits"]


# ── the truth, the inputs and the bounds ──


@pytest.mark.parametrize(("family", "options"), [("Qwen2", {}), ("Qwen3", {"head_dim": 32}), ("Llama", {})])
def test_the_truth_is_that_of_transformers_in_fp64(family, options, hf_folder):
    import transformers

    path = hf_folder(family, seed=6, **options)
    with Generator.from_pretrained(path, device="cpu", kv_cache_memory=1 << 22) as generator:
        model = generator._model
        places = compare_layers.places(model)
        step = compare_layers.prefill(model, places, TOKENS[:40])
        cache = compare_layers.empty_cache(model, step.cache.num_pages, wide=True)
        truth = compare_layers.stream([compare_layers.exact(p.layer) for p in places], places, step.batch, cache)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    for norm in (module for module in oracle.modules() if type(module).__name__.endswith("RMSNorm")):
        norm.forward = partial(F.rms_norm, normalized_shape=norm.weight.shape, weight=norm.weight, eps=norm.variance_epsilon)
    with torch.no_grad():
        expected = oracle(torch.tensor([TOKENS[:40]])).logits[0, -1:]
    error = ((truth - expected).norm() / expected.norm()).item()
    assert error < 1e-7, "the remaining error comes from fp32 rope tables and logits"


def test_inputs_are_those_of_the_running_model(model):
    """A decode step has the same inputs as a prefill of the same tokens, on any pages."""
    places = compare_layers.places(model)
    texts = [TOKENS[i : i + 70] for i in (0, 5)]
    step = compare_layers.decode(model, places, texts)
    assert step.name == "decode b2 @ 70"
    for row, text in enumerate(texts):
        whole = compare_layers.prefill(model, places, text)
        for mine, theirs in zip(step.inputs[1:], whole.inputs[1:], strict=True):
            torch.testing.assert_close(mine[row], theirs[-1], rtol=1e-4, atol=1e-5)


def test_bytes_and_operations(model):
    places = compare_layers.places(model)
    step = compare_layers.decode(model, places, [TOKENS[:11]] * 3)
    costs = [compare_layers.cost(place, step) for place in places if step.computes(place)]
    h, i, v, context_len, rows = 128, 97, 211, 11, 3
    residual = 4 * 2 * rows * h
    cached = 2 * rows * context_len * 2 * 64 * 4  # two layers, K and V of one head
    logits = 4 * rows * (h + v)
    assert sum(w.bytes for w in costs) == model.decode_read_bytes + 5 * residual + cached + logits
    assert costs[2].bytes == 4 * (3 * h * i + h) + residual
    assert costs[2].flops == 2 * rows * 3 * h * i
    assert costs[1].flops == 2 * rows * (h * 256 + 128 * h) + 4 * 2 * 64 * rows * context_len
    prompt = compare_layers.prefill(model, places, TOKENS[:10])
    costs = {place.layer.name: compare_layers.cost(place, prompt) for place in places}
    assert costs["layers.0.attention"].flops == 20 * 384 * h + 4 * 128 * 55
    assert costs["embedding"] == (4 * 2 * 10 * h, 0)
    assert costs["select"] == (4 * 2 * h, 0)
    assert costs["layers.0.mlp"] == (4 * (3 * h * i + h) + 4 * 2 * 10 * h, 20 * 3 * h * i)
    assert costs["layers.1.mlp"] == (4 * (3 * h * i + h) + 4 * 2 * h, 2 * 3 * h * i), "the last of ten rows"
    assert costs["head"] == (4 * (h * v + h) + 4 * (h + v), 2 * h * v)


def test_the_bounds():
    truth = torch.tensor([[3.0, 4.0], [0.0, 1e-3]], dtype=torch.float64)
    off = truth.clone()
    off[1, 0] = 1e-3
    error = bounds.errors(off, truth)
    assert error.relative == pytest.approx(1e-3 / math.sqrt(25 + 1e-6))
    assert error.worst_row == pytest.approx(1)
    assert error.largest == pytest.approx(1e-3 / 4)
    exact, floor = bounds.errors(truth, truth), bounds.floor(torch.bfloat16)
    assert exact == (0, 0, 0, pytest.approx(1))
    assert floor == (2**-8, 2**-8)
    assert bounds.floor(torch.float32) == (2e-6, 2e-6)
    assert bounds.floor(torch.float32, quantized_activations=True) == (2**-7, 2**-4)
    assert bounds.fault(exact, exact, floor) is None
    assert "worst row 1.00e+00, PyTorch's 0.00e+00, limit 3.91e-03" in bounds.fault(error, exact, floor)
    assert bounds.limits(bounds.Errors(0.25, 0.5, 0.0, 1.0), bounds.Floor(2**-7, 2**-4)) == (0.5 + 2**-7, 1.0 + 2**-4)
    edge = bounds.Errors(0.5, 0.5, 0.0, 1.0)
    assert bounds.fault(bounds.Errors(1.0 + 2**-8, 1.0, 9.0, 0.0), edge, floor) is None, "twice, and a rounding"
    assert bounds.fault(bounds.Errors(1.0 + 2**-7, 1.0, 9.0, 0.0), edge, floor).startswith("relative error 1.01e+00")
    assert bounds.fault(bounds.errors(off * torch.nan, truth), edge, floor) is not None


# ── wrong options and inputs ──


def test_what_triton_cannot_run_is_said(run, hf_folder):
    path = hf_folder("Llama", seed=3)  # heads of 16
    base = ("compare", "-m", path, *CPU, *SHORT, "-q", "-o", "md")
    refused(run(*base, "--layer", "layers.0.attention"), "nothing to compare", "layers.0.attention", "head_dim 16")
    out, _ = succeeded(run(*base, "--layer", "layers.0.*"))
    assert "Not compared: layers.0.attention: head_dim 16 is" in out
    assert "| layers.0.mlp | triton |" in out


def test_bad_input_is_refused(run, folder, tmp_path, monkeypatch):
    base = ("compare", "-m", folder, *CPU)
    refused(run(*base, "--layer", "layers.9.mlp", "-q"), "--layer layers.9.mlp: matches no layer", "'layers.*.mlp'", code=2)
    refused(run(*base, "--impl", "eager", "-q"), "nothing to compare", "--impl says so")
    refused(run(*base, "--layer", "select", "--prompt-len", 1, "-q"), "select: nothing to compare", "--prompt-len above 1")
    refused(run(*base, "--prompt-len", 257, "-q"), "--prompt-len", "at most 256", "found 257", code=2)
    refused(run(*base, "-c", 1000, "-q"), "--context-len", "at most 256", code=2)
    refused(run(*base, "--dtype", "bfloat16"), "--dtype bfloat16", "interpreter", "float16", code=2)
    refused(run(*base, "--text", tmp_path / "none"), "none: cannot be read")
    refused(run(*base, "--layer", "head", "--all"), " --help)", "exclude each other", code=2)
    refused(run(*base, "--layer", "head", "-n", 5), " --help)", "--num-tokens", code=2)
    refused(run(*base, "--picture", "a.jpeg"), " --help)", "none of .png", code=2)
    refused(run(*base, "--picture", tmp_path / "none" / "a.png"), " --help)", "the folder of", code=2)
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    refused(run(*base, "--picture", tmp_path / "a.png"), "needs matplotlib", "pip install matplotlib")
    monkeypatch.delenv("TRITON_INTERPRET")
    import triton  # noqa: F401

    refused(run(*base, "-q"), "run with TRITON_INTERPRET=1 set")


@pytest.mark.parametrize(("given", "expected"), [((), (30, 1, 24, 30)), (("--prompt-len", 31, "-c", 7), (31, 1, 7, 30))])
def test_default_lengths_fit_the_model(given, expected, run, hf_folder, monkeypatch):
    """A given length is refused later, not reduced. The defaults of a CPU."""
    shapes = []
    monkeypatch.setattr(compare, "run", lambda model, tokens, shape, **_: shapes.append(shape))
    run("compare", "-m", hf_folder("Qwen2", max_position_embeddings=30), *CPU, *given, "-q")
    assert shapes == [compare.Shape(*expected)]


def test_a_text_that_is_too_short(model):
    with pytest.raises(InputError, match=r"--num-tokens.*at most 90; found 91.*--text"):
        compare.run(model, TOKENS, compare.Shape(9, 1, 5, 91))
    with pytest.raises(ContextLengthError, match=r"--num-tokens.*at most 256; found 300"):
        compare.run(model, TOKENS * 4, compare.Shape(9, 1, 5, 300))


def test_the_text_of_its_own_is_long_enough():
    with Generator.from_pretrained(device="cpu", kv_cache_memory=1 << 24) as generator:
        assert len(generator.encode(compare.DEFAULT_TEXT.read_text())) >= 512


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("--fp8",)])
def test_on_a_gpu_everything_is_timed(options, run, folder):
    code, out, err = run("compare", "-m", folder, "--dtype", "bfloat16", "-b", 3, *options, "-q", "-o", "json")
    assert out, err
    record = json.loads(out)
    assert code == 0, err
    assert record["no_speed"] is None
    for row in record["results"]:
        assert min(row[name] for name in ("eager_s", "candidate_s", "limit_s", "share_of_limit")) > 0
        assert row["cold_l2"] is False
    decode = record["whole_model"]["decode"]
    assert decode["speedup"] == pytest.approx(decode["eager_s"] / decode["candidate_s"])
    assert decode["launched_s"] > decode["eager_s"] > 0
    assert all(part["step_s"] > 0 for part in record["whole_model"]["fusion"].values())
