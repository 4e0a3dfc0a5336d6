"""`minirt bench kernels` on tiny shapes: correct kernels pass, planted faults are not timed, two runs are compared correctly.

Catches: an operation with a wrong truth, rows of the result that are never compared, costs that do not match the tensors, timing
of wrong results, noise reported as a regression.
"""

import copy
import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.cli import refused

from minirt.bench.ceiling import Ceiling, MatmulCeiling
from minirt.bench.kernels import attention_operations, operations, report
from minirt.bench.kernels import benchmark as bench
from minirt.bench.kernels.declared import declared
from minirt.bench.kernels.operations import Form, Problem, Step
from minirt.bench.measure import host_seconds
from minirt.bench.report import FORMATS, Report, machine
from minirt.errors import InputError, MinirtError
from minirt.kernels import norm
from minirt.kernels import quantize as quantize_kernel
from minirt.kernels.attention import dispatch as attention
from minirt.kernels.attention import prefill
from minirt.kernels.attention import rope_write as kv_write
from minirt.kernels.gated_delta import dispatch as gated_delta
from minirt.kernels.linear import dispatch as linear
from minirt.kernels.reference import quantize_fp8
from minirt.modeling.config import GatedDeltaNetConfig, ModelConfig, MoEConfig, RopeConfig

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests the interpreter; the command itself runs on the GPU")

CONFIG = ModelConfig(
    model_type="qwen2", hidden_size=80, intermediate_size=144, num_layers=1, num_heads=3, num_kv_heads=1, head_dim=64,
    vocab_size=211, rms_norm_eps=1e-6, max_position_embeddings=512, tie_word_embeddings=False, hidden_act="silu",
    qkv_bias=True, o_bias=False, mlp_bias=False, qk_norm=False, dtype="float32", rope=RopeConfig(),
    moe=MoEConfig(num_experts=7, experts_per_token=2, intermediate_size=24),
    gated_delta_net=GatedDeltaNetConfig(1, 3, 16, 32, frozenset()),
)  # fmt: skip
CPU = torch.device("cpu")
once = partial(bench.measure, roofline=None, clock=host_seconds, repeats=1, compiled=False)


def point(name: str, tokens: int = 5, context: int = 70, dtype: torch.dtype = torch.float32, **changes) -> bench.Point:
    return bench.Point(name, "tiny", Step(replace(CONFIG, **changes), tokens, context, dtype, CPU))


# ── correct kernels ──


@pytest.mark.slow
@pytest.mark.parametrize("name", bench.BENCHMARKS)
@pytest.mark.parametrize(("tokens", "context"), [(1, 1), (5, 70)])
def test_every_kernel_holds_its_bound(name, tokens, context):
    row = once(point(name, tokens, context))
    if name.startswith("gemm_") and ".fp8" in name and tokens == 1:
        assert "a single token is not quantized" in row["left_out"]["all"]
        assert not row["seconds"]
        return
    assert row["fault"] is None
    assert {"eager", "triton"} <= set(row["seconds"])
    assert all(math.isfinite(row["errors"][form]["relative"]) for form in ("eager", "triton"))
    assert not row["left_out"]
    assert row["context"] == (context if name.startswith("attention") else None)


@pytest.mark.parametrize(
    "name", ["qkv", "gate_up.fp8", "down.fp8_blocks", "gemm_down", "gemm_o.fp8", "attention_prefill", "qk_norm_rope_kv_write"],
)  # fmt: skip
def test_many_tokens_of_which_some_are_compared(name):
    """More tokens than the kernels for few tokens take, and more rows than are compared with the truth."""
    row = once(point(name, 200, 3, torch.float16))
    assert row["fault"] is None


def test_experts_count_those_that_are_used():
    """The bytes are those of distinct experts: of one token's 2, and of many tokens' 7, but never of more than there are."""
    one, many = once(point("experts", 1)), once(point("experts.fp8", 40, dtype=torch.float16))
    assert one["fault"] is many["fault"] is None
    assert one["bytes"] == 3 * 2 * 80 * 24 * 4 + 3 * 80 * 4
    assert many["bytes"] == 3 * 7 * 80 * 24 + 3 * 40 * 80 * 2
    assert once(point("experts.fp8_blocks", 9))["fault"] is None
    assert once(point("experts_route", 9))["fault"] is None
    assert "no mixtures" in once(point("experts", 1, moe=None))["left_out"]["all"]
    assert "no gated DeltaNet" in once(point("gated_delta_decode", 1, gated_delta_net=None))["left_out"]["all"]


def test_other_models():
    """Biases, QK-norm, as many KV heads as query heads, GELU."""
    row = once(point("attention_decode", 3, qk_norm=True, num_kv_heads=3))
    assert row["fault"] is None
    for name in ("o", "gate_up", "down", "mlp"):
        assert once(point(name, 2, o_bias=True, mlp_bias=True, hidden_act="gelu_tanh"))["fault"] is None
    assert once(point("attention_prefill", head_dim=80))["fault"] is None
    assert "256, 512; found 32" in once(point("attention_prefill", head_dim=32))["left_out"]["all"]


@pytest.mark.parametrize(("T", "rows"), [(1, 9), (9, 9), (10, 9), (1000, 9), (8192, 192)])
def test_rows_to_compare(T, rows):
    chosen = operations.sampled(T, rows, CPU).tolist()
    assert len(set(chosen)) == len(chosen) == min(T, rows)
    assert chosen == sorted(chosen)
    assert (chosen[0], chosen[-1]) == (0, T - 1)


# ── costs ──


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down"])
def test_cost_of_linears_is_their_tensors(name, quantization):
    """Costs leave out norms, biases and scales of FP8, which are one row each."""
    step = point(name).step
    operands = operations.Operands(step, operations.linears(CONFIG)[name], quantization)
    tensors = [operands.x, operands.weight, operands.out] + [operands.residual] * (operands.residual is not None)
    tensors += [operands.scale] * (quantization == "int4")
    rows, K = operands.weight.shape[0], operands.linear.K
    assert operands.cost() == (sum(t.nbytes for t in tensors), 2 * step.tokens * rows * K)


def test_cost_of_attention():
    """Compared with a count of visible pairs: two operations for each channel of K, and two for each channel of V."""
    queries, totals = (3, 1, 4), (10, 7, 4)
    nbytes, flops = prefill.cost(queries, totals, 6, 2, 64, 2)
    new_and_total = zip(queries, totals, strict=True)
    pairs = sum(k <= q for new, total in new_and_total for q in range(total - new, total) for k in range(total))
    assert flops == pairs * 6 * 64 * 4
    assert nbytes == 2 * 8 * 6 * 64 * 2 + 2 * 21 * 2 * 64 * 2
    assert prefill.cost(queries, totals, 6, 2, 64, 2, fp8=True)[0] == 2 * 8 * 6 * 64 * 2 + 2 * 21 * 2 * (64 + 4)


def test_cost_of_rows():
    x = torch.empty(7, 96, dtype=torch.float16)
    weight = torch.empty(96, dtype=torch.float16)
    assert norm.cost(7, 96, 2)[0] == 2 * x.nbytes + weight.nbytes
    assert norm.residual_cost(7, 96, 2)[0] == 3 * x.nbytes + weight.nbytes
    values, scales = quantize_fp8(torch.zeros_like(x))
    assert norm.quantized_cost(7, 96, 2)[0] == x.nbytes + weight.nbytes + values.nbytes
    assert quantize_kernel.cost(7, 96, 2)[0] == x.nbytes + values.nbytes + scales.nbytes
    qkv, kept = torch.empty(7, 5, 64, dtype=torch.float16), torch.empty(7, 2, 64, dtype=torch.float16)
    rest = 7 * (64 * 4 + 8 + 8)  # cosines and sines, position, slot
    assert kv_write.cost(7, 3, 1, 64, 2)[0] == 2 * qkv.nbytes + rest
    assert kv_write.cost(7, 3, 1, 64, 2, fp8=True)[0] == 2 * qkv.nbytes - kept.nbytes + 7 * 2 * (64 + 4) + rest


def test_cost_of_gated_delta():
    """The tensors of a layer: rows, weights, the matrices of the states, and rows of the convolution's inputs."""
    channels, values = 2 * 2 * 16 + 6 * 32, 6 * 32
    weights = (channels * 4 + 32) * 2 + 2 * 6 * 4
    matrix, row = 6 * 16 * 32 * 4, channels * 2
    rows = (channels + values + 2 * 6 + values) * 2
    assert gated_delta.cost(5, 5, 2, 6, 16, 32, 2)[0] == 5 * (rows + 2 * matrix + 4 * row) + weights
    assert gated_delta.cost(70, 1, 2, 6, 16, 32, 2, begins=True)[0] == 70 * rows + matrix + 4 * row + weights
    per_token = 6 * (2 + 2 + 2) * 16 * 32 + channels * 4 * 2  # S'k, the update, S'q; the convolution
    assert gated_delta.cost(70, 1, 2, 6, 16, 32, 2, begins=True)[1] == 70 * per_token


def test_what_sets_the_limit():
    roofline = bench.Roofline(Ceiling(100.0, ""), {torch.float32: MatmulCeiling(1000.0, "")})
    problem = Problem("", {}, lambda rows: rows, (200, 1000), torch.float32, operations.Floor(0, 0))
    assert roofline.seconds(problem) == (2.0, "memory")
    assert roofline.seconds(replace(problem, cost=(200, 5000))) == (5.0, "arithmetic")


# ── faults ──


def wrong(module, name, change):
    """Return arguments of `monkeypatch.setattr` that replace a kernel with `change` of the kernel."""
    original = getattr(module, name)
    return module, name, lambda *args, **options: change(original, list(args), options)


def swapped_halves(original, args, options):
    return original(*args, **options | {"weight": torch.cat(options["weight"].chunk(2)[::-1])})


def turned_backwards(original, args, options):
    cos, sin = args[1].chunk(2, dim=-1)
    args[1] = torch.cat((cos, -sin), -1)
    return original(*args, **options)


def short_sighted(original, args, options):
    args[5] = args[5] - 1
    return original(*args, **options)


def stale_scale(original, args, options):
    return original(*args, **options | {"scale": options["scale"].roll(1)})


def stale_result(original, args, options):
    values, scale = original(*args, **options)
    return values, scale.roll(1)


def one_row_missing(original, args, options):
    out = original(*args, **options)
    out[-1] = torch.nan
    return out


FAULTS = {
    "swapped gate and up": ("gate_up", wrong(linear, "norm_gate_up", swapped_halves)),
    "swapped gate and up in the MLP": ("mlp", wrong(linear, "norm_gate_up", swapped_halves)),
    "RoPE's sign": ("rope_kv_write", wrong(kv_write, "qk_norm_rope_kv_write", turned_backwards)),
    "RoPE's sign, decoding": ("attention_decode", wrong(attention, "rope_paged_attention_decode", turned_backwards)),
    "mask off by one": ("attention_prefill", wrong(attention, "paged_attention_prefill", short_sighted)),
    "mask off by one, decoding": ("attention_decode", wrong(attention, "rope_paged_attention_decode", short_sighted)),
    "stale scale of weights": ("qkv.fp8", wrong(linear, "norm_linear", stale_scale)),
    "stale scale of tokens": ("quantize", wrong(quantize_kernel, "quantize", stale_result)),
    "stale scale of normed tokens": ("rms_norm_quantize", wrong(norm, "rms_norm_quantize", stale_result)),
    "a row that nobody wrote": ("down", wrong(linear, "linear_residual", one_row_missing)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_get_no_figure(fault, monkeypatch):
    name, planted = FAULTS[fault]
    monkeypatch.setattr(*planted)
    row = once(point(name))
    assert row["fault"]
    assert row["seconds"] == {}
    assert row["share_of_limit"] is None


def test_pages_that_are_not_written_are_found(monkeypatch):
    """The output of attention does not depend on the written K, because the kernel has the new K in registers."""

    def forgets(original, args, options):
        args[2], args[3] = args[2].clone(), args[3].clone()
        return original(*args, **options)

    monkeypatch.setattr(*wrong(attention, "rope_paged_attention_decode", forgets))
    assert "not finite" in once(point("attention_decode"))["fault"]


def test_a_form_that_cannot_run_is_left_out_with_its_reason(monkeypatch):
    def built(step):
        problem = declared(step, "rms_norm")

        def fails():
            raise RuntimeError("no such kernel for this shape\nat line 3")

        return replace(problem, forms=problem.forms | {"library": Form(fails)})

    monkeypatch.setitem(bench.BENCHMARKS, "rms_norm", replace(bench.BENCHMARKS["rms_norm"], build=built))
    row = once(point("rms_norm"))
    assert row["left_out"] == {"library": "RuntimeError: no such kernel for this shape"}
    assert set(row["seconds"]) == {"eager", "triton"}


# ── two runs ──


def timed(median, stddev=0.0, **changes):
    row = {"kernel": "o", "model": "tiny", "tokens": 8, "context": None, "dtype": "bfloat16", "fault": None}
    return row | {"seconds": {"triton": {"median": median, "stddev": stddev}}} | changes


def test_regressions_and_noise():
    older = [timed(1.0), timed(1.0, 0.1, tokens=1), timed(1.0, None, tokens=2), timed(1.0, tokens=3), timed(1.0, tokens=4)]
    older += [timed(1.0, tokens=5, seconds={})]
    rows = [timed(1.2, 0.01), timed(1.2, 0.1, tokens=1), timed(1.02, None, tokens=2), timed(0.8, tokens=3)]
    rows += [timed(9.0, tokens=4, seconds={}), timed(9.0, tokens=5), timed(9.0, tokens=6)]
    slower = bench.compare(rows, older)
    assert slower == ["o tiny 8: 1000000.0 → 1200000.0 µs (+20.0%)"]
    assert [row["baseline"] and row["baseline"]["regressed"] for row in rows] == [True, False, False, False, None, None, None]
    assert rows[3]["baseline"]["ratio"] == pytest.approx(0.8)


# ── the command ──


@pytest.fixture(scope="module")
def folder(hf_folder):
    return hf_folder("Qwen2", seed=5, hidden_size=128, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2)


BASE = ("bench", "kernels", "--device", "cpu")


def test_the_command(run, folder, tmp_path):
    base = (*BASE, "rms_norm", "attention_*", "-m", folder, "-t", "2,3", "-c", 9)
    code, out, err = run(*base, "-o", "json", "--pictures", tmp_path)
    record = json.loads(out)
    assert code == 0, err
    assert [(row["kernel"], row["tokens"]) for row in record["results"]][:3] == [
        ("rms_norm", 2), ("rms_norm", 3), ("attention_prefill", 2),
    ]  # fmt: skip
    assert record["correctness"]["checked"]
    assert (record["faults"], record["slower"], record["backend"]) == ([], [], "CPU")
    assert record["commit"]
    assert record["versions"]["torch"] == torch.__version__
    assert "14/14" in err
    assert (tmp_path / "sweep.svg").stat().st_size > 5000
    assert not (tmp_path / "roofline.svg").exists()
    for row in record["results"]:
        row["seconds"]["triton"]["median"] = 1e-9
    (tmp_path / "old.json").write_text(json.dumps(record))
    code, out, err = run(*base, "--baseline", tmp_path / "old.json", "--quiet", "-o", "md")
    assert code == 1
    assert "bench kernels: slower than the baseline (and 13 more): rms_norm" in err
    assert "**No figure here is a speed" in out
    assert "since the baseline" in out
    assert "Every kernel is within its bound." in out


def test_a_fault_ends_the_command_with_1(run, folder, monkeypatch):
    monkeypatch.setattr(*wrong(linear, "norm_gate_up", swapped_halves))
    code, out, err = run(*BASE, "gate_up", "-m", folder, "-t", 2, "-o", "md")
    assert code == 1
    assert "exceeds its error bound: gate_up" in err
    assert "| **broken** |" in out
    assert "**1 checks failed; nothing was timed there:**" in out


def test_wrong_inputs(run, folder, tmp_path):
    refused(run(*BASE, "attentoin"), "attentoin: matches no kernel", "attention_decode", code=2)
    refused(run(*BASE, "o", "--dtype", "int8"), "--dtype", code=2)
    refused(run(*BASE, "o", "--dtype", "bfloat16"), "interpreter", "float16", code=2)
    refused(run(*BASE, "o", "-m", "nobodys-model"), "nobodys-model")
    refused(run(*BASE, "o", "-c", "7"), "--context-len: none of the named kernels has a context", code=2)
    refused(run(*BASE, "o", "-t", "0"), "positive integers", code=2)
    refused(run(*BASE, "o", "--pictures", tmp_path / "none"), "does not exist", code=2)
    refused(run(*BASE, "o", "--output-file", tmp_path / "none" / "a.md"), "does not exist", code=2)
    refused(run(*BASE, "o", "--baseline", tmp_path / "none.json"), "--baseline", "none.json: cannot be read", code=2)
    bad = tmp_path / "bad.json"
    for text in ("", "[]", "{}", '{"benchmark": "decode", "results": []}', '{"benchmark": "kernels", "results": [{}]}'):
        bad.write_text(text)
        refused(run(*BASE, "o", "--baseline", bad), "no results of `minirt bench kernels`")
    bad.write_text('{"benchmark": "kernels", "results": [], "device": "NVIDIA H200"}')
    refused(run(*BASE, "o", "--baseline", bad), "another device", "found NVIDIA H200", code=2)


def test_a_shape_that_does_not_fit_the_memory_is_left_out(run, folder):
    code, out, err = run(*BASE, "attention_decode", "rms_norm", "-m", folder, "-t", 2, "-c", 9 * 10**8, "-o", "json")
    second, first = json.loads(out)["results"]
    assert code == 0, err
    assert "allocate memory" in first["left_out"]["all"]
    assert (first["seconds"], first["fault"]) == ({}, None)
    assert second["seconds"]


# ── the report of a GPU ──


@pytest.fixture(scope="module")
def on_gpu():
    """A report as on a GPU, with simulated times."""
    rows = []
    for name, tokens in (("o", 1), ("o", 2000), ("attention_decode", 3), ("gemm_o.fp8", 64)):
        roofline = bench.Roofline(Ceiling(4e12, ""), dict.fromkeys((torch.float32, operations.FP8), MatmulCeiling(7e14, "")))
        calls = iter(range(1, 10**6))
        rows.append(bench.measure(point(name, min(tokens, 200)), roofline, lambda run, calls=calls: next(calls) * 1e-6, 3, False))
    shared = machine("kernels", CPU, ["minirt"], Ceiling(4e12, "read")) | {"backend": "CUDA", "device": "a GPU"}
    products = [{"flops_per_s": 7e14, "how": "product"}]
    return Report(report.context(shared, rows, [], products, 2e-6), rows, report.markdown)


def test_medians_shares_and_losses(on_gpu):
    row = on_gpu.results[0]
    times = row["seconds"]["triton"]  # eager, library and Triton take turns; two rounds are not counted
    assert times["all"] == pytest.approx([9e-6, 12e-6, 15e-6])
    assert row["share_of_limit"] == pytest.approx(row["limit_s"] / 12e-6)
    assert row["lost_s"] == pytest.approx(12e-6 - row["limit_s"])
    assert row["bytes_per_s"] == pytest.approx(row["bytes"] / 12e-6)


def test_what_is_printed(on_gpu):
    texts = {form: on_gpu.render(form) for form in FORMATS}
    assert texts["csv"].count("\n") == 5
    assert len(texts["jsonl"].splitlines()) == 4
    assert "| 12.0 ± 3.0 | 0.83 × eager |" in texts["md"]  # the library's product lacks the residual, so it does not compete
    assert "it lacks attention_decode: rotation, KV write, pages; o: residual." in texts["md"]
    assert "No figure here is a speed" not in texts["md"]


def test_pictures(on_gpu, tmp_path):
    report.draw(on_gpu.context, on_gpu.results, tmp_path)
    first = {name: (tmp_path / name).read_bytes() for name in ("roofline.svg", "sweep.svg")}
    report.draw(on_gpu.context, copy.deepcopy(on_gpu.results), tmp_path)
    assert all((tmp_path / name).read_bytes() == content for name, content in first.items())
    with pytest.raises(MinirtError, match="cannot write the picture"):
        report.draw(on_gpu.context, on_gpu.results, tmp_path / "none")


def test_names():
    assert bench.select(["gemm_*.fp8"]) == [f"gemm_{name}.fp8" for name in ("qkv", "o", "gate_up", "down")]
    assert bench.select([]) == list(bench.BENCHMARKS)
    with pytest.raises(InputError, match="matches no kernel"):
        bench.select(["qkv", "nothing"])


def test_points():
    points = bench.points(["qkv", "attention_decode"], {"a": CONFIG, "b": CONFIG}, torch.float32, CPU, (3, 4), (7,))
    assert [(p.name, p.model, p.step.tokens, p.step.context) for p in points][:4] == [
        ("qkv", "a", 3, 0), ("qkv", "a", 4, 0), ("attention_decode", "a", 3, 7), ("attention_decode", "a", 4, 7),
    ]  # fmt: skip
    assert len(points) == 8
    assert len(bench.points(["qkv"], {"a": CONFIG}, torch.float32, CPU)) == len(bench.BENCHMARKS["qkv"].points)


def test_pages_are_read_where_the_tables_say():
    pages = attention_operations.Pages(operations.Inputs(point("qkv").step), 2, 70, False)
    slots = pages.slots(0)
    assert slots.shape == (2, 70)
    assert len(set(slots.flatten().tolist())) == 140
    k, _ = pages.read(slots)
    assert torch.equal(k[1, 65], pages.k[pages.tables[1, 1], 1].double())
