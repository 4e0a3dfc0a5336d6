"""The tables of README.md and docs/ on small records of awkward values. Catches a wrong unit or sign, a swapped column, a
quotient upside down, a missing value that is shown as one, and a form that computes less counted as one that computes as much."""


import pytest

from minirt.bench import picture
from minirt.bench.kernels import benchmark as kernels
from minirt.bench.tools import tables


def rows(text):
    """The cells of a table's rows, without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def median(seconds):
    return {"median": seconds}


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
        ["2048 tokens", "–", "–", "48.0", "29.4", "25%", "29.4"], ["8192 tokens", "–", "–", "195.0", "129.9", "25%", "129.0"],
    ]  # fmt: skip


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
    monkeypatch.setattr(tables, "_MOST_KERNELS", 2)

    def record(dtype, *traces):
        rows = [{"batch": 8**i, "step_ms": 1.5, "us_a_step_by_kernel": us} for i, us in enumerate(traces)]
        return {"dtype": dtype, "traces": rows, "model": "M", "device": "X", "commit": "c"}

    bf16 = record("bfloat16", {"_a": 60.0, "b": 30.0, "c": 10.0}, {"c": 20.0, "b": 180.0})
    tables.draw_mixture({"x": bf16, "y": record("fp8", {"_a": 50.0, "d": 50.0})}, tmp_path, "")
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
        ["decode, mlp", "200.0", "20.0", "20%", "6.0e-02 / 5.0e-02"], ["decode, head", "–", "–", "–", "1.0e-03 / 2.0e-03"],
    ]  # fmt: skip


def kernel(name, tokens, triton, context=None, model="Qwen2.5-7B", lacks=(), **others):
    seconds = {form: median(s) for form, s in (others | {"triton": triton}).items()} if triton else {}
    return {
        "kernel": name, "tokens": tokens, "context": context, "model": model, "seconds": seconds,
        "lacks": dict.fromkeys(lacks, "x"), "share_of_limit": 0.004 if tokens == 1 else 1.02,
    }  # fmt: skip


def test_kernels():
    measured = [
        kernel("qkv", 1, 1e-5, eager=3e-5, compiled=0.9e-5, library=0.5e-5, lacks=["library"]),
        kernel("qkv", 64, 1e-5, eager=1e-5), kernel("qkv", 2048, 1.2345e-3, eager=2e-3), kernel("o", 1, None),
        kernel("attention_decode", 64, 2e-5, context=1000, eager=4e-5, library=3e-5),
        kernel("o", 2048, 1e-5, model="Other", eager=0.5e-5),
    ]  # fmt: skip
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


@pytest.mark.parametrize("name", kernels.BENCHMARKS)
def test_what_the_table_of_kernels_shows_is_measured(name):
    operation = kernels.BENCHMARKS[name]
    points = {(tokens, context if operation.context else None) for tokens, context in operation.points}
    assert set(tables.shown_points(name)) <= points
