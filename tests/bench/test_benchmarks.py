"""The arithmetic of the benchmarks, with a simulated generator and clock, so every figure is known.

Catches: division by 129 steps, t(1) and t(129) swapped, prompt time counted as decoding, errors with prompts that do not fit one
step (sequences then start and end one after the other), a warm-up that counts, a mean instead of a median, runs that end early,
timing of wrong results.
"""

import json
import math
import statistics
import subprocess
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import minirt
from minirt import SamplingParams, device, models
from minirt.bench import ceiling, check, decode, flops, measure, prefill, report, summary, throughput
from minirt.errors import ContextLengthError, InputError, MinirtError, NumericsError, UnsupportedError
from minirt.outputs import Completion
from minirt.step.kv_cache import PagesSpec

QWEN = models.preset("Qwen2.5-7B").config


class Machine:
    """Simulates what the benchmarks use of a Generator, with its own clock: first come, first served, `budget` tokens per step.

    A step takes `slowness` · (2⁻¹⁰ s + 2⁻²⁰ s for each prompt token + 2⁻¹⁴ s for each sequence that decodes). With powers of two,
    sums are exact.
    """

    def __init__(self, budget=8192, slowness=(1.0,)):
        self.max_num_batched_tokens, self.max_num_seqs, self.max_len = budget, 64, 1 << 20
        self.decode_read_bytes, self.memory = 5_000_000, SimpleNamespace(page=64_000, pages=1 << 24)
        layer = SimpleNamespace(name="all", decode_read_bytes=lambda dtype: self.decode_read_bytes)
        specs = [PagesSpec(1, 125)]  # 1,000 bytes a token
        self.model = SimpleNamespace(layers=[layer], dtype=torch.float32, kv_dtype=torch.float32, cache_specs=specs)
        self.step_state_bytes = 700_000
        self.config, self.device = replace(QWEN, vocab_size=11), torch.device("cpu")
        self.now, self.slowness, self.calls, self.replays = 0.0, slowness, [], []

    def clock(self):
        return self.now

    def generate(self, prompts, params):
        slowness = self.slowness[len(self.calls) % len(self.slowness)]
        self.calls.append((prompts, params))
        started, left = self.now, [len(prompt) for prompt in prompts]
        tokens, arrived = [0] * len(prompts), [[] for _ in prompts]
        while any(tokens[i] < params[i].max_tokens for i in range(len(prompts))):
            budget, prefill, rows = self.max_num_batched_tokens, 0, []
            running = [i for i in range(len(prompts)) if tokens[i] < params[i].max_tokens][: self.max_num_seqs]
            for i in running:
                count = min(left[i] or 1, budget)
                budget -= count
                if count and left[i]:
                    left[i] -= count
                    prefill += count
                if count and not left[i]:
                    rows.append(i)
            decoding = sum(tokens[i] > 0 for i in rows)
            self.now += slowness * (2**-10 + prefill * 2**-20 + decoding * 2**-14)
            for i in rows:
                tokens[i] += 1
                arrived[i].append(self.now - started)
        return [
            Completion(prompt, [0] * n, "", "length", None, times)
            for prompt, n, times in zip(prompts, tokens, arrived, strict=True)
        ]

    def replay_times(self, batch_size, context_len):
        self.replays.append((batch_size, context_len))
        return [3.0, 1.0, 2.0, 9.0, 2.5]


def full_step(batch_size):
    return 2**-10 + batch_size * 2**-14


def runs(machine, repeats, seed=0, progress=measure.silent, **sampling):
    return measure.Runs(machine, repeats, sampling, seed, progress, machine.clock)


def times(machine, batch_size, context_len, repeats=2):
    return decode.step_times(runs(machine, repeats, temperature=0.0), batch_size, context_len)


@pytest.mark.parametrize(
    ("batch_size", "context_len", "budget", "first"),
    [(1, 128, 8192, 1), (64, 128, 8192, 1), (8, 1, 8, 1), (1, 8000, 8192, 1), (1, 8193, 8192, 2), (64, 129, 8192, 2),
     (8, 8000, 8192, 8), (64, 8000, 8192, 63), (3, 20, 7, 12), (5, 9, 5, 45)],
)  # fmt: skip
def test_a_step_is_exactly_one_full_batch_step(batch_size, context_len, budget, first):
    machine = Machine(budget)
    steps, first_tokens, before = times(machine, batch_size, context_len)
    assert steps == [full_step(batch_size)] * 2
    assert before == first
    short, long = (call[1][0].max_tokens for call in machine.calls[-2:])
    assert (short, long) == (before, before + 128)
    if before == 1:
        assert first_tokens == [2**-10 + batch_size * context_len * 2**-20] * 2
    assert all(value > 0 for value in first_tokens)


def test_the_warm_up_does_not_count_and_prompts_differ():
    machine = Machine(slowness=(1000.0, 1.0, 1.0, 1.0, 1.0))
    steps, _, _ = times(machine, 4, 16)
    assert steps == [full_step(4)] * 2
    prompts = [prompt for call in machine.calls for prompt in call[0]]
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) == 4 * 5
    assert all(len(prompt) == 16 and set(prompt) <= set(range(11)) for prompt in prompts)
    again = Machine()
    times(again, 4, 16)
    assert [call[0] for call in again.calls] == [call[0] for call in machine.calls], "the same seed, the same prompts"
    for _, params in machine.calls:
        assert all(p.ignore_eos and p.temperature == 0 for p in params)


def test_long_measurements_say_how_long():
    """`bench speed` wrote nothing for minutes. The estimate comes after the run that is not counted, and only if it is long."""
    slow, lines = Machine(slowness=(2.0**8,)), []
    decode.step_times(runs(slow, 3, progress=lines.append), 2, 16, count=40)
    throughput.run(runs(slow, 2, progress=lines.append), 3, (5, 5), (40, 40))
    prefill.run(runs(slow, 9, progress=lines.append), [4000], ceiling.MatmulCeiling(1e12, "made up"))
    assert [line.partition(":")[0] for line in lines[:3]] == ["tg40 b2 @ d16", "throughput n3 in5 out40", "pp4000"]
    seconds = 3 * (2.0**8) * (42 * 2**-10 + 40 * 2**-13 + 2 * 32 * 2**-20)  # 41 steps and one of the prompts, 3 times
    assert lines[0] == f"tg40 b2 @ d16: about {seconds:,.0f} s for 3 more runs"
    lines.clear()
    decode.step_times(runs(Machine(), 3, progress=lines.append), 2, 16, count=40)
    assert lines == []


def test_a_share_above_the_ceiling_is_not_shown():
    """It was printed as 155.3 %, after a ceiling that was measured while the machine was busy."""
    assert [report._share(value) for value in (None, 0.5, 1.0, 1.553)] == ["-", "50.0 %", "100.0 %", "-"]
    context = {
        "benchmark": "speed", "backend": "CPU", "device": "c", "versions": {"torch": "1", "triton": None}, "commit": "c",
        "date": "d", "read_ceiling": None, "datasheet_bytes_per_s": None, "matmul_ceiling": None, "model": "m", "dtype": "d",
        "weight_bytes": 1, "parameters": 1, "implementations": ["eager"], "correctness": {"checked": False, "why": "no"},
    }  # fmt: skip
    for rate, above in ((1e18, False), (1e18, True)):
        (row,) = result(Machine(), rate=rate)
        row |= {"share_of_read_ceiling": 1.2 if above else 0.2, "share_of_limit": 0.5}
        text = report.Report(context, [row]).render("md")
        assert ("the ceiling was measured too low" in text) == above
        assert "120.0 %" not in text


def test_a_report_as_text(monkeypatch):
    """Catches columns that are not aligned, values that are lost on the way from Markdown, and lines wider than the terminal."""
    rows = [{"a": "x | y", "b": "s", "n": 5, "m": 7, "none": "-"}, {"a": "**z**", "b": "s", "n": 1234, "m": 8, "none": ""}]
    names = {"what": "a", "same": "b", "number": "n", "m": "m", "none": "none"}
    columns = [(title, lambda row, key=key: str(row[key]).replace("|", "\\|")) for title, key in names.items()]
    page = "\n".join(["**Head:** `c` \\* d", "", *report.table(columns, rows, left=2), "", "- end"]) + "\n"
    monkeypatch.setenv("COLUMNS", "80")
    head, _, same, _, *table, _, end = report.as_text(page).splitlines()
    assert (head, same, end) == ("Head: c * d", "same  s", "- end")
    assert table == ["what   number  m", "────────────────", "x | y       5  7", "z        1234  8"]
    one = report.as_text("\n".join(report.table(columns, rows[:1], left=2)))
    assert one == "what    x | y\nsame    s\nnumber  5\nm       7\n"
    monkeypatch.setenv("COLUMNS", "13")
    assert report.as_text(page).splitlines()[2:-2] == [
        "same  s", "", "what   number", "─────────────", "x | y       5", "z        1234",
        "", "what   m", "────────", "x | y  7", "z      8",
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def _replays(monkeypatch):
    monkeypatch.setattr(decode, "replay_times", lambda machine, *step: machine.replay_times(*step))


def result(machine, batch_sizes=(2,), context_lens=(100,), repeats=3, datasheet=4e9, rate=1e18):
    lines, products = [], ceiling.MatmulCeiling(rate, "made up")
    measured, read = runs(machine, repeats, progress=lines.append, temperature=0.0), ceiling.Ceiling(2e9, "made up")
    with mock.patch.object(decode, "datasheet_bandwidth", return_value=datasheet):
        rows = decode.run(measured, batch_sizes, context_lens, read, products)
    assert len(lines) == len(rows)
    return rows


def test_figures_of_a_result():
    machine = Machine(slowness=(7, 1, 1, 1, 2, 1, 5))  # warm-up, then (short, long) three times: long steps × 1, 2, 5
    (row,) = result(machine)
    short = 2**-10 + 200 * 2**-20
    steps = [(scale * (short + 128 * full_step(2)) - short) / 128 for scale in (1, 2, 5)]
    assert row["step_s"]["all"] == pytest.approx(steps, rel=1e-12)
    assert row["step_s"]["median"] == pytest.approx(steps[1], rel=1e-12)
    assert row["step_s"]["min"] == pytest.approx(steps[0], rel=1e-12)
    assert row["step_s"]["stddev"] == pytest.approx(np.std(steps, ddof=1), rel=1e-12)
    assert row["tokens_per_s"]["median"] == pytest.approx(2 / steps[1], rel=1e-12)
    kv = round(2 * 1000 * statistics.mean(100 + n for n in range(1, 129)))  # steps attend to 101 … 228 positions
    assert row["kv_bytes_read"] == kv
    assert row["weight_bytes_read"] == 5_000_000
    assert row["state_bytes_moved"] == 2 * 700_000
    speed = (5_000_000 + kv + 2 * 700_000) / steps[1]
    assert row["read_bytes_per_s"] == pytest.approx(speed, rel=1e-12)
    assert row["share_of_read_ceiling"] == pytest.approx(speed / 2e9, rel=1e-12)
    assert row["share_of_datasheet"] == pytest.approx(speed / 4e9, rel=1e-12)
    assert row["share_of_limit"] == pytest.approx(row["share_of_read_ceiling"]), "arithmetic is fast here"
    assert row["graph_replay_s"] == 2.5
    assert machine.replays == [(2, round(100 + 64.5))]
    assert row["time_to_first_token_s"] == pytest.approx(short, rel=1e-12)
    assert row["test"] == "tg128 b2 @ d100"
    assert row["peak_memory_bytes"] > 0


def test_a_limit_of_arithmetic():
    machine = Machine()
    machine.config = QWEN
    (row,) = result(machine, batch_sizes=(3,), rate=1e9)
    linears = 28 * (4608 * 3584 + 3584 * 3584 + 3 * 18944 * 3584) + 152064 * 3584
    assert row["limit_s"] == pytest.approx(3 * 2 * linears / 1e9 + (row["kv_bytes_read"] + 3 * 700_000) / 2e9, rel=1e-12)
    assert row["share_of_limit"] == pytest.approx(row["limit_s"] / row["step_s"]["median"], rel=1e-12)


def test_what_there_is_none_of_is_none():
    machine = Machine()
    machine.replay_times = lambda *_: (_ for _ in ()).throw(UnsupportedError("no graph"))
    (row,) = result(machine, repeats=1, datasheet=None)
    assert row["graph_replay_s"] is row["share_of_datasheet"] is row["step_s"]["stddev"] is None


def test_each_context_and_batch():
    rows = result(Machine(), (1, 4), (8, 300), repeats=1)
    names = ["tg128 b1 @ d8", "tg128 b4 @ d8", "tg128 b1 @ d300", "tg128 b4 @ d300"]
    assert [row["test"] for row in rows] == names
    assert [row["step_s"]["median"] for row in rows] == [full_step(row["batch_size"]) for row in rows]


def test_runs_that_cannot_be_right():
    slow = Machine(slowness=(1, 1000, 1))
    with pytest.raises(MinirtError, match="128 more steps took no more time"):
        times(slow, 1, 8, repeats=1)
    short = Machine()
    complete = short.generate
    short.generate = lambda prompts, params: complete(prompts, [SamplingParams(max_tokens=5)] * len(prompts))
    with pytest.raises(MinirtError, match=r"ended early; expected 129 tokens; found 5 \(length\)"):
        times(short, 1, 8)


def test_room_is_checked_with_the_numbers():
    machine = Machine()
    machine.max_len = 300
    decode.check(machine, [1, 40], [1, 171])
    with pytest.raises(InputError, match=r"at most 64 sequences; found 65 .*--max-num-seqs to 65"):
        decode.check(machine, [1, 65], [8])
    with pytest.raises(ContextLengthError, match=r"1 sequence of 301 .* at most 300 tokens .*raise --max-model-len"):
        decode.check(machine, [1], [8, 172])
    machine.config = replace(QWEN, max_position_embeddings=300)
    with pytest.raises(ContextLengthError, match=r"\(choose shorter prompts or outputs: the model itself takes at most 300"):
        decode.check(machine, [1], [8, 172])
    machine.max_num_seqs = 9000
    with pytest.raises(InputError, match="at most 8192 sequences; found 8193"):
        decode.check(machine, [8193], [8])
    machine.memory.pages = 12
    measure.check_room(machine, (4, 192))
    with pytest.raises(ContextLengthError, match=r"at most 12 pages of 64 tokens; found 16 \(--kv-cache-memory 1000KiB "):
        measure.check_room(machine, (4, 193))
    machine.memory.page = 0  # a model without attention
    measure.check_room(machine, (64, 300))


@pytest.mark.parametrize("count", [1, 2, 5, 30])
def test_percentiles_are_numpys(count):
    values = torch.rand(count, generator=torch.Generator().manual_seed(count)).tolist()
    for percent in (0, 10, 25, 50, 75, 90, 99, 100):
        assert summary.percentiles(values, [percent])[0] == pytest.approx(np.percentile(values, percent), rel=1e-12)


def test_the_times_of_a_batch():
    machine = Machine(slowness=(100, 1, 4, 2))
    (row,) = throughput.run(runs(machine, 3, seed=1), 3, (10, 10), (5, 5))
    one = 2**-10 + 30 * 2**-20 + 4 * full_step(3)
    assert row["seconds"]["all"] == pytest.approx([one, 4 * one, 2 * one], rel=1e-12)
    assert row["seconds"]["mean"] == pytest.approx(7 / 3 * one, rel=1e-12)
    assert row["seconds"]["p50"] == pytest.approx(2 * one, rel=1e-12)
    assert row["seconds"]["p75"] == pytest.approx(3 * one, rel=1e-12)
    assert row["output_tokens_per_s"] == pytest.approx(15 / (2 * one), rel=1e-12)
    assert row["time_to_first_token_s"]["p50"] == pytest.approx(2 * (2**-10 + 30 * 2**-20), rel=1e-12)


def test_throughput():
    machine = Machine(slowness=(100, 1, 3, 2))
    (row,) = throughput.run(runs(machine, 3, seed=1), 40, (5, 20), (1, 9))
    prompts, params = machine.calls[0]
    inputs, outputs = [len(prompt) for prompt in prompts], [p.max_tokens for p in params]
    assert len(prompts) == 40
    assert (min(inputs), max(inputs)) == (5, 20), "both ends are drawn"
    assert (min(outputs), max(outputs)) == (1, 9)
    assert all([len(p) for p in call[0]] == inputs and call[1] == params for call in machine.calls)
    assert (row["input_tokens"], row["output_tokens"]) == (sum(inputs), sum(outputs))
    median = row["seconds"]["all"][2]
    assert row["seconds"]["median"] == median
    assert row["requests_per_s"] == pytest.approx(40 / median)
    assert row["total_tokens_per_s"] == pytest.approx((sum(inputs) + sum(outputs)) / median)
    assert row["output_tokens_per_s"] == pytest.approx(sum(outputs) / median)
    assert 0 < row["time_to_first_token_s"]["p50"] <= row["time_to_first_token_s"]["p99"] < row["seconds"]["all"][1]
    assert 2**-10 < row["time_per_output_token_s"]["p50"] <= row["time_per_output_token_s"]["p99"] <= 3 * full_step(40)
    (row,) = throughput.run(runs(Machine(), 1), 2, (5, 5), (1, 1))
    assert row["time_per_output_token_s"] is None, "no request has a second token"
    assert row["test"] == "throughput n2 in5 out1"


def test_prefill():
    machine = Machine(slowness=(100, 50, 1, 4, 2))
    machine.config = QWEN
    (row,) = prefill.run(runs(machine, 3, seed=1), [40], ceiling.MatmulCeiling(1e12, "made up"))
    one = 2**-10 + 40 * 2**-20
    assert row["time_to_first_token_s"]["all"] == pytest.approx([one, 4 * one, 2 * one], rel=1e-12)
    assert row["tokens_per_s"] == pytest.approx(40 / (2 * one), rel=1e-12)
    assert row["flops_per_s"] == pytest.approx(row["flops"] / (2 * one), rel=1e-12)
    assert row["share_of_matmul_ceiling"] == pytest.approx(row["flops_per_s"] / 1e12)
    assert all(params[0].max_tokens == 1 for _, params in machine.calls)


def test_prompt_flops():
    """Counted by hand for Qwen2.5-7B: 6.53 G weights in linear layers; 204 M of them in the last MLP, which computes only the
    last token; 545 M in the LM head; 28 heads of 128 in 28 layers."""
    attention, mlp, head = 4608 * 3584 + 3584 * 3584, 3 * 18944 * 3584, 152064 * 3584
    assert flops.prompt_flops(QWEN, 1) == 2 * (28 * attention + 28 * mlp + head) + 28 * 4 * 28 * 128
    assert flops.prompt_flops(QWEN, 3) == 6 * (28 * attention + 27 * mlp) + 2 * (mlp + head) + 28 * 4 * 28 * 128 * 6
    assert flops.linear_flops(QWEN, 7, 7) == 14 * (28 * attention + 28 * mlp + head)


@pytest.mark.parametrize("window", [1, 2, 5, 7, 9])
@pytest.mark.parametrize(("new", "length"), [(1, 1), (1, 7), (3, 7), (7, 7), (5, 9)])
def test_attention_flops_with_a_window(window, new, length):
    config = replace(QWEN, sliding_window=window, window_layers=frozenset({1}))
    _, full, _, windowed, *_ = models.build(config)
    pairs = sum(min(window, position + 1) for position in range(length - new, length))
    assert flops.attention_flops(windowed, [(new, length), (1, 1)]) == 4 * 28 * 128 * (pairs + 1)
    assert flops.attention_flops(full, [(new, length)]) == 4 * 28 * 128 * sum(range(length - new + 1, length + 1))


def test_flops_of_a_hybrid():
    """Counted by hand for Qwen3.5-0.8B. Catches attention that is counted in all layers, of which three of four are recurrent.

    18 of 24 layers have a state of 16 heads of 128 x 128; 6 have attention with a gate, 8 heads of 256, 2 of them for K and V.
    """
    config = models.preset("Qwen3.5-0.8B").config
    h, linear = 1024, 16 * 128
    recurrent = h * (5 * linear + 32) + 4 * 3 * linear + 3 * 16 * 128 * 128  # projections, convolution, rule
    attention, mlp, head = h * (3 * 2048 + 2 * 512), 3 * h * 3584, 248320 * h
    assert flops.linear_flops(config, 7, 7) == 14 * (18 * recurrent + 6 * attention + 24 * mlp + head)
    pairs = 4 * 8 * 256 * 6 * 6  # of three tokens
    once = 2 * (mlp + head)
    assert flops.prompt_flops(config, 3) == 6 * (18 * recurrent + 6 * attention + 23 * mlp) + once + pairs


@pytest.mark.parametrize(("budget", "largest"), [(8192, 8192), (108, 108)])
def test_prompts_beside_decoding_requests(budget, largest):
    """With chunked prompts steps are short. Without, every decoding request waits for whole prompts."""
    machine = Machine(budget)
    row = prefill.beside(runs(machine, 3), 2000, 8)
    assert row["inter_token_s"]["max"] == pytest.approx(2**-10 + 8 * 2**-14 + largest * 2**-20, rel=0.05)
    assert row["inter_token_s"]["p50"] <= row["inter_token_s"]["p99"] <= row["inter_token_s"]["max"]
    assert row["decoding"] == 8
    assert len(machine.calls) == 4
    assert len(row["time_to_first_token_s"]["all"]) == 3 * prefill.LONG_PROMPTS
    full = 1 / (2**-20 + (2**-10 + 8 * 2**-14) / largest)  # prompt tokens per second if every step is full
    assert 0.8 * full < row["tokens_per_s"] < full * 8192 / 8184


def test_prompts_that_would_keep_nobody_waiting():
    machine = Machine()
    prefill.check(machine, [2000], 63)
    prefill.check(machine, [20], 0)
    with pytest.raises(InputError, match="no sequence is left for a prompt beside the decoding requests"):
        prefill.check(machine, [2000], 64)
    with pytest.raises(InputError, match="too short to delay other requests"):
        prefill.check(machine, [2000, 20], 8)
    machine.memory.pages = 8 * 3 + 6 * 32  # 8 of 160 tokens, the prompts of a step, and partly computed ones
    prefill.check(machine, [2000], 8)
    machine.memory.pages -= 1
    with pytest.raises(ContextLengthError, match="does not fit the KV cache"):
        prefill.check(machine, [2000], 8)


# Checking before timing


class Answers:
    """Simulates a model that always gives the same tokens and logits for a prompt. The length identifies the prompt."""

    def __init__(self, change=None, logits_change=None, formats=(), kv_dtype=torch.bfloat16):
        generator = torch.Generator().manual_seed(4)
        self.config, self.plan = replace(QWEN, vocab_size=50), SimpleNamespace(formats=formats)
        self.max_len, self.model = 2048, SimpleNamespace(dtype=torch.bfloat16, kv_dtype=kv_dtype)
        self.change, self.logits_change = change, logits_change
        self.table = {n: torch.randn(check.NEW_TOKENS, 50, generator=generator) for n in (*check.LENGTHS, 301, check.LONG)}
        self.table[10][5, 7], self.table[10][5, 8] = 9.0, 5.0
        for length, share in ((9, 0.9), (11, 1.1)):  # a near-tie within 16 eps of bf16, 0.125 of the row's rms; and no near-tie
            row = self.table[length][3]
            row[7] = row[8] = 9.0
            row[8] -= share * 0.125 * row.square().mean().sqrt()

    def generate(self, prompts, params):
        assert params.temperature == 0
        assert params.ignore_eos
        tokens = [self.table[len(prompt)].argmax(-1).tolist() for prompt in prompts]
        if self.change:
            self.change(prompts, tokens)
        return [SimpleNamespace(token_ids=ids) for ids in tokens]

    def logits(self, ids):
        length = next(n for n in self.table if n == len(ids) - check.NEW_TOKENS + 1)
        logits = torch.cat([torch.full((length - 1, 50), 77.0), self.table[length]])
        return self.logits_change(logits) if self.logits_change else logits


def compared(change=None, logits_change=None, batch_sizes=(1, 8, 11), longest=300, **formats):
    return check.compare(Answers(change, logits_change, **formats), check.reference(Answers(), longest), batch_sizes)


def test_agreement_is_counted():
    agreement = compared()
    assert agreement["checked"]
    assert agreement["near_ties"] == 0
    assert agreement["tokens_equal"] == 20 * check.NEW_TOKENS
    assert agreement["logits_relative_error"] == 0
    assert agreement["batch_sizes"] == [1, 8, 11]
    json.dumps(agreement)


def planted(length, at, token, rest=0):
    def change(prompts, tokens):
        for prompt, ids in zip(prompts, tokens, strict=True):
            if len(prompt) == length:
                ids[at:] = [token] + [rest] * (len(ids) - at - 1)

    return change


def test_a_near_tie_is_none_and_ends_the_comparison():
    agreement = compared(planted(9, 3, 8), batch_sizes=[8])
    assert (agreement["near_ties"], agreement["tokens_equal"]) == (1, 7 * check.NEW_TOKENS + 3)


def test_wrong_answers_are_not_timed():
    with pytest.raises(NumericsError, match=r"generated token 5: .*token 7.*found token 8, 4.00e"):
        compared(planted(10, 5, 8), batch_sizes=[8])
    with pytest.raises(NumericsError, match="generated token 3: "):
        compared(planted(11, 3, 8), batch_sizes=[8])
    with pytest.raises(NumericsError, match="nothing to time"):
        compared(lambda prompts, tokens: tokens.reverse(), batch_sizes=[8])
    compared(planted(10, 5, 8), batch_sizes=[1])  # a batch without this prompt
    with pytest.raises(NumericsError, match="relative error"):
        compared(logits_change=lambda logits: logits * 1.07)
    with pytest.raises(NumericsError, match="relative error"):
        compared(logits_change=lambda logits: logits.roll(1, 0))
    with pytest.raises(NumericsError, match="found nan"):
        compared(logits_change=lambda logits: logits.clone().fill_(math.nan))
    compared(logits_change=lambda logits: logits * 1.05)  # within 8 eps of bf16
    compared(logits_change=lambda logits: logits * 1.18, formats=("fp8",))
    compared(logits_change=lambda logits: logits * 1.18, kv_dtype=torch.float8_e4m3fn)
    with pytest.raises(NumericsError, match="relative error"):
        compared(logits_change=lambda logits: logits * 1.2, formats=("fp8",))


def test_long_prompts_are_not_timed_unchecked():
    """Long prompts use other kernels, also when one request at a time is measured."""
    assert compared(longest=300)["prompt_lens"] == list(check.LENGTHS)
    assert compared(longest=301)["prompt_lens"][0] == 301
    assert compared(longest=8000)["prompt_lens"] == [check.LONG, *check.LENGTHS]
    with pytest.raises(NumericsError, match="generated token 5: "):
        compared(planted(check.LONG, 5, 8), batch_sizes=[1], longest=8000)


def test_a_context_without_room_for_the_check():
    short = Answers()
    short.max_len = check.NEW_TOKENS
    with pytest.raises(InputError, match=r"--max-model-len: .*expected 17 or more; found 16 \(raise it, or use --skip-check"):
        check.reference(short, 8)
    short.config = replace(short.config, max_position_embeddings=check.NEW_TOKENS)
    with pytest.raises(InputError, match=r"found 16 \(use --skip-check"):
        check.reference(short, 8)


# Ceilings and reports


def test_the_cpu_ceiling():
    measured = ceiling.read_ceiling(torch.device("cpu"), nbytes=8 << 20, repeats=3)
    assert measured.bytes_per_s > 1e7
    assert "torch.sum" in measured.how
    assert "0.01 GB" in measured.how
    assert ceiling.datasheet_bandwidth(torch.device("cpu")) is None
    assert ceiling.device_name(torch.device("cpu")).startswith("CPU ")


def test_datasheets_are_found_by_the_drivers_names(monkeypatch):
    for name, value in (("NVIDIA H200", 4.8e12), ("NVIDIA H100 80GB HBM3", 3.35e12), ("NVIDIA A100-SXM4-80GB", 2.039e12),
                        ("NVIDIA H200 MIG 1g.18gb", None), ("Some GPU", None)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert ceiling.datasheet_bandwidth(torch.device("cuda", 0)) == value


@pytest.mark.gpu
def test_the_gpu_ceiling():
    device = torch.device("cuda", 0)
    measured = ceiling.read_ceiling(device)
    sheet = ceiling.datasheet_bandwidth(device)
    assert "Triton" in measured.how
    if sheet:
        assert 0.5 < measured.bytes_per_s / sheet < 1, "a read faster than the datasheet comes from a cache"


def test_the_commit_is_of_this_source_and_no_other(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    file = tmp_path / "site" / "report.py"
    file.parent.mkdir()
    file.write_text("1")
    (tmp_path / "other").write_text("1")
    git("init")
    git("add", "other")
    git("commit", "-m", "x")
    monkeypatch.setattr(report, "__file__", str(file))
    assert report.commit() is None, "another project's repository around an installed minirt"
    git("add", ".")
    git("commit", "-m", "y")
    head = subprocess.run(["git", "-C", tmp_path, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert head.startswith(report.commit())
    assert len(report.commit()) >= 7
    file.write_text("2")
    assert report.commit().endswith("-dirty")
    monkeypatch.setenv("PATH", "")
    assert report.commit() is None, "no git"


def test_what_is_missing_is_null_and_no_sentence(monkeypatch):
    """The version of Triton was "not installed: layers run eager …", and the commit of an installed minirt its version."""
    monkeypatch.setattr(device, "triton_installed", lambda: False)
    monkeypatch.setattr(report, "commit", lambda: None)
    shared = report.machine("speed", torch.device("cpu"), ["minirt"], None)
    assert shared["versions"]["triton"] is shared["commit"] is None
    (line, _) = report.heading(shared)
    assert f" · torch {torch.__version__} · no triton · minirt {minirt.__version__} · 20" in line
