"""The tables of README.md and docs/ on small records of awkward values. Catches a wrong unit or sign, a swapped column, a
quotient upside down, a missing value that is shown as one, and a form that computes less counted as one that computes as much."""

import re

import pytest

from minirt.bench import picture
from minirt.bench.kernels import benchmark as kernels
from minirt.bench.tools import beside_vllm, cells, pictures, results, tables
from minirt.bench.tools.tables import origin


def rows(text):
    """The cells of a table's rows, without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def median(seconds):
    return {"median": seconds}


def test_milliseconds():
    assert [cells.milliseconds(ms) for ms in (0.004, 3.495, 9.994, 9.996, 1234.56)] == [
        "0.00", "3.50", "9.99", "10.0", "1,234.6"
    ]  # fmt: skip


def test_signs():
    texts = [cells.signed(value, 2) for value in (0.004, -0.004, 0.0, -0.0058, 1.5)]
    assert texts == ["0.00", "0.00", "0.00", "−0.01", "+1.50"]


def test_a_small_share_is_not_none():
    assert [cells.percent(share) for share in (None, 0.0, 0.0004, 0.01, 1.02)] == ["–", "0%", "< 1%", "1%", "102%"]


def step(batch, context, seconds, share=0.5):
    shares = dict.fromkeys(("share_of_limit", "share_of_read_ceiling"), share)
    return {"batch_size": batch, "context_len": context, "step_s": median(seconds)} | shares


def prompt(length, seconds):
    return {"input_len": length, "time_to_first_token_s": median(seconds), "share_of_matmul_ceiling": 0.25}


STEPS = {
    "a": {"benchmark": "decode", "dtype": "bf", "model": "M", "results": [step(1, 128, 4.78e-3), step(256, 128, 0.0123, 1)]},
    "b": {"benchmark": "decode", "dtype": "bfloat16 · fp8", "model": "M", "results": [step(1, 8000, 0.005)]},
}
PROMPTS = {"c": {"benchmark": "prefill", "dtype": "fp8", "results": [prompt(2048, 0.0294), prompt(8192, 0.1299)]}}


def test_decode_with_gaps():
    shown = rows(tables.decode_table(STEPS))
    assert shown[0] == ["batch 1, context 128", "4.78", "50%", "4.78", "–", "–", "3.41"]
    assert shown[1] == ["batch 1, context 8000", "–", "–", "4.91", "5.00", "50%", "3.61"]
    assert shown[4] == ["batch 256, context 128", "12.3", "100%", "9.08", "–", "–", "7.29"]


def test_prefill_with_gaps():
    assert rows(tables.prefill_table(PROMPTS))[2:] == [
        ["2048 tokens", "–", "–", "48.0", "29.4", "25%", "29.4"],
        ["8192 tokens", "–", "–", "195.0", "129.9", "25%", "129.0"],
    ]


def beside(prompt=(0.1965, 0.1981)):
    """Records of both engines, with times that differ by point and format: vLLM in a process of its own (all points but the first
    and the prompts; two measurements of one) and, slower, in the caller's. `prompt`: minirt's and vLLM's in bf16."""

    def run(engine, form, factor, rate, torch="2", lacks=(), **facts):
        steps = [(1, 128, 0.004), (64, 128, 0.008), (256, 128, 0.0123), (1, 8000, 0.005)]
        prompts = [(512, 0.02), (8192, prompt[engine == "vLLM"] / factor if form == "bf16" else 0.2)]
        rows = [{"batch_size": n, "context_len": c, "step_s": s * factor} for n, c, s in steps if n not in lacks]
        rows += [{"input_len": n, "time_to_first_token_s": s * factor} for n, s in prompts if n not in lacks]
        versions = {"torch": torch, "triton": "3"}
        facts |= {"engine": engine, "quantization": {"bf16": None, "fp8": "fp8"}[form]}
        return facts | {"versions": versions, "output_tokens_per_s": rate, "results": rows}

    vllm, in_process = {"version": "7", "note": "N"}, (1, 512, 8192)
    runs = [
        run("minirt", "bf16", 1.0, 12000.4, commit="c"), run("vLLM", "bf16", 1.5, 10000, lacks=in_process, **vllm),
        run("minirt", "fp8", 0.5, 20000, commit="c"), run("vLLM", "fp8", 1.25, 10000, lacks=in_process, **vllm),
    ]  # fmt: skip
    runs[2]["sampled_output_tokens_per_s"] = 19000
    runs[3]["results"][1]["step_s"] = [0.016, 0.0154]
    older = [
        run("minirt", "bf16", 1.0, 12000, commit="d"), run("vLLM", "bf16", 1.75, 9000, **vllm),
        run("minirt", "fp8", 0.5, 20000, commit="d"), run("vLLM", "fp8", 1.5, 9000, **vllm),
        run("minirt", "bf16", 0.9, None, torch="9", commit="d"),
    ]  # fmt: skip
    protocol = dict.fromkeys(("prompts", "first token", "offline"), "-") | {"order": "O", "clock": "C"}
    protocol["decode step"] = "D; the least of 3 runs; two values: E"
    correctness = {"checked": False, "why": "no check"}
    shared = {"model": "M", "device": "NVIDIA X 1", "protocol": protocol, "correctness": correctness}
    default = shared | {"runs": runs, "date": "2026-01-02"}
    return {results.BESIDE_VLLM: default, results.IN_PROCESS: shared | {"runs": older, "date": "2026-01-01"}}


def test_both_engines_in_the_readme():
    """Catches columns that are swapped, a quotient upside down (offline is a rate, others are times), the better one of two
    measurements, a figure of another setting of vLLM, figures without their store, and the change by another PyTorch."""
    shown, told, details, origin, missing, end = tables.readme_table(beside()).split("\n\n")
    assert (details, end) == ("<details><summary>Versions, cards and method</summary>", "</details>")
    assert shown.splitlines()[0] == "| M | minirt bf16 | vLLM bf16 | faster | minirt `--fp8` | vLLM fp8 | faster |"
    assert rows(shown) == [
        ["decode step, batch 1, ms", "4.00", "–", "–", "2.00", "–", "–"],
        ["decode step, batch 64, ms", "8.00", "12.0", "1.50 ×", "4.00", "10.0", "2.50 ×"],
        ["decode step, batch 128, ms", "–", "–", "–", "–", "–", "–"],
        ["decode step, batch 256, ms", "12.3", "18.5", "1.50 ×", "6.15", "15.4 to 16.0", "2.50 to 2.60 ×"],
        ["offline, output tokens/s", "12,000", "10,000", "1.20 ×", "20,000", "10,000", "2.00 ×"],
    ]
    all_points = "(docs/benchmarks/models.md#beside-vllm)"
    assert told.startswith("vLLM ran with its default options (")
    assert "asynchronous scheduling), but N, which" in told
    assert f"[Other points]{all_points}" in told
    assert origin.startswith("minirt `c` with torch 2 and Triton 3, on one NVIDIA X 1; vLLM 7 with torch 2 and Triton 3, on an")
    assert f"With torch 9 and Triton 3, minirt's bf16 times [differ by at most 10%]{all_points}." in origin
    assert "2026-01-02" in origin
    assert " A decode step is the least of 3 runs. Offline: -. From [`" in origin, "and not of as many for both engines"
    assert re.findall(r"\]\(bench/results/(.*?)\.json\)", origin) == [results.BESIDE_VLLM]
    assert missing.startswith("This comparison falls short of [how minirt measures](docs/measuring.md#the-comparison-with-")
    assert "outputs were not checked" in missing
    assert "](docs/benchmarks/models.md#an-earlier-vllm-on-an-h200)" in missing


def test_all_points_of_both_engines():
    """Catches a figure of another setting of vLLM without its mark or in place of the default's, and a tie or loss not told."""
    shown, lacking, told, *_ = tables.engines_table(beside()).split("\n\n")
    step = ["decode step, batch 1, context 8,000, ms", "5.00", "8.75‡", "1.75 ×", "2.50", "7.50‡", "3.00 ×"]
    prompt = ["first token, prompt of 8,192 tokens, ms", "196.5", "198.1‡", "1.01 ×, tie", "100.0", "300.0‡", "3.00 ×"]
    assert all(row in rows(shown) for row in (step, prompt))
    assert lacking.startswith("vLLM ran N. ‡ Measured on 2026-01")
    assert lacking.endswith("the default was 1.11 to 1.20 times as fast, so leads at ‡ may shrink.")
    tie = "bf16, first token, prompt of 8,192 tokens (minirt 196.5 ms, vLLM 198.1 ms)"
    assert told.startswith("Against vLLM's default, minirt is faster at 6 of 6 points; against ‡, at 7 of 8. One is a tie (less ")
    assert tie in told
    slow = beside(prompt=(0.3, 0.2))
    slow[results.BESIDE_VLLM]["runs"][3]["results"][1]["step_s"] = [0.0061, 0.007]
    text = beside_vllm.ties(slow)
    assert text.startswith("Against vLLM's default, minirt is faster at 5 of 6 points; against ‡, at 7 of 8. ")
    assert "One is a tie (less than 2% apart): fp8, decode step, batch 256 (minirt 6.15 ms, vLLM 6.10 to 7.00 ms)." in text
    assert "vLLM is faster: bf16, first token, prompt of 8,192 tokens (minirt 300.0 ms, vLLM 200.0 ms)." in text


def test_the_headline_is_about_what_vllm_does_by_default():
    """Catches the factors of other settings (1.75 and 3.00), and the worse one of two measurements left out."""
    text = tables.headline(beside())
    bf16, fp8 = "1.50 times as fast in bf16 (batch 64 and 256)", "2.50 to 2.60 times as fast in `--fp8` (batch 64 and 256)"
    offline = "offline throughput is 1.20 times vLLM's in bf16 and 2.00 times vLLM's in `--fp8`"
    assert text.startswith(f"**M on an X, beside vLLM 7: {offline}; decode steps are {bf16} and {fp8}.** ")
    assert "Weights were random" in text, "beside the first figure, not far below it"


def test_both_engines_with_the_protocol_and_a_later_pytorch():
    """Catches a point that one engine or the later run lacks shown as a number or left out, and runs that are mixed up."""
    both = beside()
    both[results.BESIDE_VLLM]["runs"][3]["results"].append({"batch_size": 192, "context_len": 128, "step_s": 0.014})
    text = tables.engines_table(both)
    assert rows(text.partition("\n\n")[0])[2] == ["decode step, batch 192, ms", "–", "–", "–", "–", "14.0", "–"]
    assert "\n- Clock: C.\n" in text
    assert "19,000 output tokens/s" in text
    assert "(docs/" not in text, "a link from README.md"
    assert "(#beside-vllm)" not in text, "a link to where it stands"
    later = text.rpartition("\n\n")[2]
    assert later.splitlines()[0] == "| bf16 | torch 2 | torch 9 |"
    assert rows(later)[0] == ["decode step, batch 1, ms", "4.00", "3.60"]
    assert rows(later)[3] == ["decode step, batch 1, context 8,000, ms", "5.00", "4.50"]
    assert rows(later)[-1] == ["offline, output tokens/s", "12,000", "–"]


def test_drafts_and_the_first_token():
    """Catches another model's rates of vLLM, a quotient upside down, and a part that was not measured shown as 0."""

    def drafts(model, method, **changed):
        shared = {"model": model, "quantization": None, "method": method, "num_drafts": 3, "tokens_per_step": 2.5}
        return shared | {"engine": "minirt", "results": [{"batch_size": 8, "tokens_per_s": 1200.0, "speedup": 1.75}]} | changed

    peer = {"engine": "vLLM", "version": "7", "note": "N", "results": [{"batch_size": 8, "tokens_per_s": 800.0}]}
    record = {"commit": "c", "protocol": {"drafts": "p", "start": "s"}, "model": "M", "device": "X", "date": "d"}
    record["drafts"] = [drafts("M", "synthetic"), drafts("N", "mtp"), drafts("N", "mtp", **peer)]
    shown = tables.drafts_table({"a": record}).partition("\n\n")[0]
    assert rows(shown) == [
        ["M bf16, 3 synthetic drafts, batch 8", "2.50", "1,200.0", "1.75 ×", "–", "–"],
        ["N bf16, 3 MTP drafts, batch 8", "2.50", "1,200.0", "1.75 ×", "800.0", "1.50 ×"],
    ]
    parts = {"import_torch_s": None, "cuda_s": 1.0, "load_s": 2.0, "warm_up_s": 3.0, "first_token_s": 9.04}
    record["start"] = [{"quantization": "fp8", "caches": "of bf16", "kernels_compiled": 5} | parts]
    shown = tables.first_token_table({"a": record}).partition("\n\n")[0]
    assert rows(shown) == [["`--fp8`, kernel caches of bf16", "–", "1.0", "2.0", "3.0", "9.0", "5"]]


def test_the_picture_of_both_engines(monkeypatch, tmp_path):
    """Catches bars of the other engine or the slower measurement, ratios upside down (rates are not times), and points of another
    setting of vLLM than its default."""
    drawn = []
    monkeypatch.setattr(picture, "save", lambda figure, target, note: drawn.append(figure))
    pictures.engines(beside(), tmp_path, "")
    steps, fast, offline = drawn[0].axes
    assert [[round(bar.get_height(), 2) for bar in bars] for bars in steps.containers] == [[8, 12.3], [12, 18.45]]
    assert [[int(bar.get_height()) for bar in bars] for bars in offline.containers] == [[12000, 20000], [10000, 10000]]
    assert [text.get_text() for text in fast.texts] == ["2.50 ×", "2.50 ×"]
    assert [text.get_text() for text in offline.texts] == ["1.20 ×", "2.00 ×"]
    assert [text.get_text() for text in steps.get_xticklabels()] == ["batch 64", "batch 256"]
    assert {"minirt", "vLLM 7"} == {text.get_text() for text in steps.get_legend().get_texts()}
    title = drawn[0].get_suptitle()
    assert "NVIDIA X 1, a card for each · 2026-01-02" in title
    assert title.endswith(" · no check")


def test_what_was_not_checked_is_marked_where_it_is_shown():
    """Catches figures of `--skip-check` that look like those of a checked run. What was checked has no mark."""
    skipped = {"correctness": {"checked": False, "why": "not checked (--skip-check)"}}
    records = {"a": STEPS["a"] | {"correctness": {"checked": True}}, "b": STEPS["b"] | skipped, "c": PROMPTS["c"] | skipped}
    steps = {name: records[name] for name in "ab"}
    assert [row[0] for row in rows(tables.decode_table(steps))][:3] == [
        "batch 1, context 128", "batch 1, context 8000†", "batch 8, context 128"
    ]  # fmt: skip
    assert [row[0] for row in rows(tables.prefill_table({"c": records["c"]}))] == [
        "128 tokens", "512 tokens", "2048 tokens†", "8192 tokens†"
    ]  # fmt: skip
    assert [row[0] for row in rows(tables.others_table(steps))] == [
        "M, batch 1, context 128", "M, batch 256, context 128", "M, batch 1, context 8000†"
    ]  # fmt: skip
    assert tables.unchecked(records.values()) == "† Not checked in the run that timed it: `--skip-check`."
    assert tables.unchecked([records["a"], STEPS["a"]]) == ""


def test_other_shapes():
    records = {"a": STEPS["a"], "b": STEPS["b"] | {"results": [step(256, 128, 0.01, 0.333), step(3, 128, 0.002)]}}
    assert rows(tables.others_table(records)) == [
        ["M, batch 1, context 128", "4.78", "50%", "–", "–"],
        ["M, batch 256, context 128", "12.3", "100%", "10.0", "33%"],
        ["M, batch 3, context 128", "–", "–", "2.00", "50%"],
    ]


def test_checks():
    unchecked = {"checked": False, "why": "no time"}
    checks = [{"checked": True, "against": "the truth"}, unchecked, unchecked]
    text = tables.checks_table({name: {"correctness": one} for name, one in zip("abc", checks, strict=True)})
    assert text == "Checks before timing:\n\n- `a`: compared with the truth.\n- `b`, `c`: no time."


def test_about_tells_every_machine_and_the_range_of_ceilings():
    def record(device, read, product, dtype="bfloat16"):
        return {
            "device": device, "versions": {"torch": "2", "triton": "3"}, "model": "M", "dtype": dtype,
            "read_ceiling": read and {"bytes_per_s": read}, "matmul_ceiling": product and {"flops_per_s": product},
        }  # fmt: skip

    records = {"a": record("X", 4.514e12, None), "b": record("X", 4.516e12, None), "c": record("Y", None, 1.2345e15, "fp8")}
    text = tables.about_table(records)
    assert text.startswith("One X, torch 2, Triton 3; one Y, torch 2, Triton 3. M shapes")
    assert "4.51 to 4.52 TB/s for a kernel that only reads" in text
    assert "not measured in bf16 and 1,23" in text
    assert " TFLOP/s in fp8. " in text


def test_mixture():
    """Each format has its own columns, also where the other one has no such row."""

    def record(form, batches, factor):
        steps = [
            {"batch_size": n, "step_s": {"median": n * factor * 1e-3}, "share_of_limit": 0.5, "experts": {"touched": 8.25 * n}}
            for n in batches
        ]
        prompt = {"input_len": 2048, "time_to_first_token_s": {"median": 0.02}, "share_of_limit": 0.25, "experts": None}
        trace = {"batch": 8, "step_ms": 1.25, "us_a_step_by_kernel": {f"{form}_kernel": 12.0, "other": 3.4}}
        return {"dtype": form, "results": steps, "prompts": [prompt], "traces": [trace]}

    records = {"a": record("bfloat16", (1, 3), 1), "b": record("fp8", (1,), 2)}
    assert rows(tables.mixture_table(records)) == [
        ["decode step, batch 1", "1.00", "50%", "8.2", "4.27", "2.00", "50%", "8.2", "4.49"],
        ["decode step, batch 3", "3.00", "50%", "24.8", "–", "–", "–", "–", "–"],
        ["prompt of 2,048 tokens", "20.0", "25%", "–", "78.6", "20.0", "25%", "–", "92.5"],
    ]
    picture, kernels = tables.mixture_kernels_table(records).split("\n\n")
    assert picture.endswith("(../../bench/results/mixture.svg)")
    assert rows(kernels) == [
        ["the step", "1,250", "1,250"], ["`bfloat16_kernel`", "12", "–"], ["`other`", "3", "3"], ["`fp8_kernel`", "–", "12"],
    ]  # fmt: skip


def test_picture_of_a_mixture(monkeypatch, tmp_path):
    """Shares of each bar sum up to 100%, with what has no color of its own as "others", and colors are those of the kernel."""
    drawn = []
    monkeypatch.setattr(picture, "save", lambda figure, target, note: drawn.append(figure))
    monkeypatch.setattr(pictures, "_MOST_KERNELS", 2)

    def record(dtype, *traces):
        rows = [{"batch": 8**i, "step_ms": 1.5, "us_a_step_by_kernel": us} for i, us in enumerate(traces)]
        return {"dtype": dtype, "traces": rows, "model": "M", "device": "X", "commit": "c"}

    bf16 = record("bfloat16", {"_a": 60.0, "b": 30.0, "c": 10.0}, {"c": 20.0, "b": 180.0})
    pictures.mixture({"x": bf16, "y": record("fp8", {"_a": 50.0, "d": 50.0})}, tmp_path, "")
    left, right = drawn[0].axes

    def bars(axes):
        return {bars.get_label(): [round(bar.get_height()) for bar in bars] for bars in reversed(axes.containers)}

    assert bars(left) == {"b": [30, 90], "a": [60, 0], "others": [10, 10]}
    assert bars(right) == {"b": [0], "a": [50], "others": [50]}
    assert [bar.get_y() for bar in left.containers[1]] == [30, 90]
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["others", "a", "b"]
    tones = [[bars[0].get_facecolor() for bars in axes.containers] for axes in (left, right)]
    assert tones[0] == tones[1]
    assert [text.get_text() for text in left.get_xticklabels()] == ["batch 1\n1.50 ms", "batch 8\n1.50 ms"]


def test_trace():
    def row(batch, temperature, ms, idle):
        return {"batch": batch, "context": 128, "temperature": temperature, "step_ms": ms, "idle": idle}

    measured = [row(64, 0.0, 4.0, 0.0049), row(1, 0.0, 2.0, 0.031), row(64, 0.8, 3.9, 0.01)]
    assert rows(tables.trace_table({"a": {"results": measured}})) == [
        ["batch 1, context 128", "2.00", "3.1%", "–", "–", "–"],
        ["batch 64, context 128", "4.00", "0.5%", "3.90", "1.0%", "−2.5%"],
    ]


def test_startup():
    def start(caches, first):
        stages = {name: median(i + 0.04) for i, name in enumerate(("imported_s", "loaded_s", "ready_s"))}
        return {"caches": caches, **stages, "first_token_s": median(first)}

    record = {"quantization": "fp8", "results": [start("empty", 20.96), start("warm", 6.5)]}
    assert rows(tables.startup_table({"a": record})) == [
        ["`--fp8`, warm kernel caches", "0.0", "1.0", "2.0", "6.5"],
        ["`--fp8`, empty kernel caches", "0.0", "1.0", "2.0", "21.0"],
    ]


def test_chunking_leaves_out_what_ran_alone():
    def beside(limit, p99):
        gaps = {"p50": 0.0041, "p99": p99, "max": 0.2}
        return {"inter_token_s": gaps, "max_num_batched_tokens": limit, "tokens_per_s": 31234.5}

    records = {
        "a": {"results": [{"inter_token_s": None}, beside(512, 0.018)]}, "b": {"results": [beside(8192, 0.1996)]}
    }  # fmt: skip
    assert rows(tables.chunking_table(records)) == [
        ["8,192", "4.10", "199.6", "200.0", "31,234"],
        ["512", "4.10", "18.0", "200.0", "31,234"],
    ]


def whole(best, **fusion):
    decode = {"batch_size": 2, "context_len": 9, "launched_s": 0.01, "eager_s": 0.004, "candidate_s": best}
    return {"decode": decode, "fusion": {name: {"step_s": seconds} for name, seconds in fusion.items()}}


def test_fusion_of_two_records():
    records = {
        "a": {"model": "M", "dtype": "bfloat16", "whole_model": whole(0.002, mlp=0.003)},
        "b": {"model": "M", "dtype": "bfloat16 · fp8", "whole_model": whole(0.001, head=0.001)},
        "c": {"model": "M", "dtype": "bfloat16", "whole_model": None},
    }
    assert rows(tables.fusion_table(records)) == [
        ["eager, launched from Python", "10.000", "5.00 ×", "10.000", "10.00 ×"],
        ["eager in a CUDA graph", "4.000", "2.00 ×", "4.000", "4.00 ×"],
        ["Triton", "2.000", "", "1.000", ""],
        ["Triton, but mlp eager", "3.000", "1.50 ×", "–", "–"],
        ["Triton, but head eager", "–", "–", "1.000", "1.00 ×"],
    ]
    assert tables.fusion_table({"c": records["c"]}) == ""
    assert "| bf16, ms | over Triton | `--fp8`, ms |" in tables.fusion_table(records)
    records["b"]["model"] = "N"
    assert "| M, bf16, ms | over Triton | N, `--fp8`, ms |" in tables.fusion_table(records)


def layer(kind, eager, triton, added, out, share=0.5):
    def part(pair):
        return {"error": {"relative": pair[0]}, "torch": {"relative": pair[1]}}

    return {
        "step": "decode", "kind": kind, "eager_s": eager, "candidate_s": triton, "share_of_limit": share, "added": part(added),
        "out": part(out),
    }  # fmt: skip


def test_layers_take_medians_and_the_largest_error():
    measured = [layer("mlp", 1e-4 * i, 1e-5 * i, (0.01 * i, 0.05), (9, 9), 0.1 * i) for i in (1, 2, 6)]
    measured += [layer("head", None, None, (None, None), (0.001, 0.002), None)]
    record = {"dtype": "bfloat16", "results": measured, "whole_model": None}
    assert rows(tables.layers_table({"a": record})) == [
        ["decode, mlp", "200.0", "20.0", "20%", "6.0e-02 / 5.0e-02"],
        ["decode, head", "–", "–", "–", "1.0e-03 / 2.0e-03"],
    ]


def kernel(name, tokens, triton, context=None, model="Qwen2.5-7B", lacks=(), **others):
    seconds = {form: median(s) for form, s in (others | {"triton": triton}).items()} if triton else {}
    return {
        "kernel": name, "tokens": tokens, "context": context, "model": model, "seconds": seconds,
        "lacks": dict.fromkeys(lacks, "x"), "share_of_limit": 0.004 if tokens == 1 else 1.02,
    }  # fmt: skip


def test_kernels():
    measured = [
        kernel("qkv", 1, 1e-5, eager=3e-5, compiled=0.9e-5, library=0.5e-5, lacks=["library"]),
        kernel("qkv", 64, 1e-5, eager=1e-5),
        kernel("qkv", 2048, 1.2345e-3, eager=2e-3),
        kernel("o", 1, None),
        kernel("attention_decode", 64, 2e-5, context=1000, eager=4e-5, library=3e-5),
        kernel("o", 2048, 1e-5, model="Other", eager=0.5e-5),
    ]
    first, second = tables.kernels_table({"a": {"results": measured[:3]}, "b": {"results": measured[3:]}}).split("\n\n")
    assert rows(first) == [
        ["`qkv`", "1", "10.0", "< 1%", "3.0 · 0.90 · 0.50\\*", "2,048", "1,234.5", "102%", "1.62 · – · –"],
        ["`o`", "1", "not timed", "–", "–", "–", "–", "–", "–"],
        ["`attention_decode`", "–", "–", "–", "–", "64 @ 1,000", "20.0", "102%", "2.0 · – · 1.50"],
    ]
    assert rows(second) == [
        ["eager PyTorch", "5", "3", "1.62 ×", "0.50 × (`o`, 2,048, Other)"],
        ["torch.compile", "1", "0", "0.90 ×", "0.90 × (`qkv`, 1)"],
        ["PyTorch's own kernel", "1", "1", "1.50 ×", "1.50 × (`attention_decode`, 64 @ 1,000)"],
        ["PyTorch's own kernel, which computes less\\*", "1", "0", "0.50 ×", "0.50 × (`qkv`, 1)"],
    ]


def test_products_beside_both_of_cublas_sums():
    def product(name, tokens, triton, lacks=(), **others):
        row = kernel(name, tokens, triton, lacks=lacks, **others)
        return row | {"errors": {form: {"relative": 1e-3 * tokens} for form in row["seconds"] if form not in lacks}}

    measured = [
        product("gemm_o", 129, 1e-5, eager=9e-5, library=0.79e-5), product("gemm_o", 2, 2e-5, library=4e-5),
        product("gemm_o.fp8", 2, 1e-5, library=2e-5, library_fast=1e-5),
        product("gemm_gate_up", 2, 1e-3, library=1e-3, lacks=["library"]), product("gemm_down", 2, None),
    ]  # fmt: skip
    text = tables.gemms_table({"a": {"results": measured}})
    assert text.splitlines()[0] == "| GEMM, model | 2 tokens | 129 tokens | largest error |"
    assert rows(text) == [
        ["`gemm_o`, Qwen2.5-7B", "20.0 · 2.00", "10.0 · 0.79", "1.3e-01 · 1.3e-01"],
        ["`gemm_o.fp8`, Qwen2.5-7B", "10.0 · 2.00 · 1.00", "–", "2.0e-03 · 2.0e-03 · 2.0e-03"],
        ["`gemm_gate_up`, Qwen2.5-7B", "1,000.0 · 1.00\\*", "–", "2.0e-03"],
    ]


def test_attention_of_prompts_on_pages_of_both_kinds():
    def point(name, tokens, context, **facts):
        return kernel(name, tokens, 1e-5, context=context, **facts) | {"flops_per_s": 2.5e14, "bytes_per_s": 7.1e10}

    measured = [
        point("attention_prefill", 2048, 0, library=1.05e-5), point("attention_prefill", 2, 30000),
        point("attention_prefill.fp8", 2048, 0, library=0.5e-5), point("attention_decode", 1, 8000),
        point("attention_prefill", 512, 0, model="Other"),
    ]  # fmt: skip
    assert rows(tables.attention_table({"a": {"results": measured}})) == [
        ["2,048 @ 0", "10.0", "250", "71", "1.05 ×", "10.0", "250", "71", "0.50 ×"],
        ["2 @ 30,000", "10.0", "250", "71", "–", "–", "–", "–", "–"],
    ]


def test_what_tuning_finds():
    def bucket(kernel, best=1e-5, step=None):
        facts = {"kernel": kernel, "config": "x" if step and step < 4e-3 else None, "rule_s": 1e-5, "best_s": best, "tried": 7}
        return facts | {"rule_step_s": step and 4e-3, "best_step_s": step}

    measured = [bucket("gemv"), bucket("gemv", 9e-6, 3.96e-3), bucket("gemv", 5e-6, 4.1e-3), bucket("gemm")]
    records = {"a": {"quantization": None, "results": measured}, "b": {"quantization": "fp8", "results": measured[3:]}}
    assert rows(tables.tuned_table(records)) == [
        ["`gemv`, bf16", "3", "21", "2", "30.0%", "50.0%", "1", "1.0%", "1.0%"],
        ["`gemm`, bf16", "1", "7", "0", "–", "–", "0", "–", "–"],
        ["`gemm`, `--fp8`", "1", "7", "0", "–", "–", "0", "–", "–"],
    ]


@pytest.mark.parametrize("name", kernels.BENCHMARKS)
def test_what_the_table_of_kernels_shows_is_measured(name):
    operation = kernels.BENCHMARKS[name]
    points = {(tokens, context if operation.context else None) for tokens, context in operation.points}
    assert set(tables.shown_points(name)) <= points


def test_the_cpu():
    record = {
        "threads": 2, "ratio": 1.0508, "peak_mb": 844.009, "weights_mb": 538.06, "first_token_s_after_process_start": 1.37
    }  # fmt: skip
    text = tables.cpu_table({"a": record})
    assert "On 2 CPU threads" in text
    assert "1.05 times" in text
    assert "805 MiB, of which 513 MiB are weights" in text
    assert "1.4 s after" in text


def test_results_are_named_by_their_commits():
    records = {"a": {"commit": "1"}, "b": [{"commit": "2"}, {"commit": "2"}], "c": {"commit": "1-dirty"}, "d": {"commit": "1"}}
    assert origin(records) == "From `a`, `d` (commit 1); `b` (commit 2); `c` (commit 1-dirty)."
