"""`minirt bench` on a tiny random model: its tables, records and files can be read, and bad input is refused before any work.

Catches CPU figures that look like GPU figures, output formats that disagree, and a benchmark of layers with wrong results.
"""

import csv
import dataclasses
import io
import json
import re
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from support.cli import CACHE, caller, printed, refused, succeeded

from minirt import SamplingParams, SpeculativeOptions, layers
from minirt.bench import ceiling, report, speculate
from minirt.bench.report import FORMATS
from minirt.bench.start import PHASES, markdown
from minirt.cli import app as cli
from minirt.cli.bench import bench
from minirt.generator import Generator


@pytest.fixture(scope="module")
def folder(hf_folder):
    return hf_folder("Llama", seed=3)  # no tokenizer


@pytest.fixture
def run(capfd, monkeypatch):
    monkeypatch.setattr(ceiling, "BUFFER_BYTES", {"cpu": 1 << 20})
    monkeypatch.setenv("COLUMNS", "1000")  # else a table of long numbers, on a slow machine, is split into two
    return caller(capfd, monkeypatch)


def table(text):
    """Parse the Markdown table of an output → a list of {column: cell}."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert set("".join(cells[1])) <= set("-:")
    assert all(len(row) == len(cells[0]) for row in cells)
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def test_decode_steps_are_a_table(run, folder):
    sizes = ("-p", 0, "-b", "1,3", "-c", "16", "--repeats", 2)
    out, err = succeeded(run("bench", "speed", "-m", folder, *CACHE, *sizes, "-o", "md"))
    first, _, second, _, products, _, third, *_ = out.splitlines()
    assert first.startswith("**CPU figures, no GPU:** CPU ")
    assert all(word in first for word in (f"torch {torch.__version__}", "triton", "minirt"))
    assert second.startswith("Memory bandwidth, same run: ")
    assert "torch.sum" in second
    assert "datasheet" not in second
    assert products.startswith("Matrix product, same run: ")
    assert third.startswith("Correctness: not checked: every layer is eager")
    rows = table(out)
    assert [row["test"] for row in rows] == ["tg128 b1 @ d16", "tg128 b3 @ d16"]
    for row in rows:
        assert row["model"] == f"{folder.name} float32"
        assert row["backend"] == "CPU eager"
        assert not {"CUDA graph ms", "of datasheet", "TFLOP/s"} & set(row), "columns without values"
        median, plus, spread = row["t/s"].split()
        assert float(median.replace(",", "")) > 0
        assert plus == "±"
        assert float(spread.replace(",", "")) >= 0
        assert float(row["ms per prompt or step"].split()[0]) >= float(row["min ms"]) > 0
        assert row["of bandwidth"].endswith(" %")
        assert row["of the limit"].endswith(" %")
    assert err.count(" ms a step") == 2
    assert run("bench", "speed", "-m", folder, *CACHE, "-q", "-p", 0, "-c", 1, "--repeats", 1)[2] == ""


ONE = ("-n", 1, "--input-len-range", 2, "--output-len-range", 2, "--repeats", 1)
SHARED = {
    *("schema", "benchmark", "model", "model_type", "weight_bytes", "parameters", "dtype", "kv_bytes_per_token"),
    *("implementations", "backend", "device", "versions", "commit", "date", "command", "environment", "correctness"),
    *("read_ceiling", "matmul_ceiling", "datasheet_bytes_per_s", "sampling"),
}


def test_the_number_of_steps_is_an_option(run, folder):
    """128 steps, several times, take minutes on a CPU. The room that is checked follows the option."""
    base = ("bench", "speed", "-m", folder, *CACHE, "-p", 0, "-c", 8, "--repeats", 1, "--max-model-len", 69)
    assert "tg60 b1 @ d8" in succeeded(run(*base, "-n", 60))[0]
    refused(run(*base, "-n", 61), "too long")


def test_json_holds_all_that_a_figure_needs(run, folder):
    arguments = ("bench", "speed", "-m", folder, *CACHE, "-p", 0, "-b", "1,2", "-c", "8", "--repeats", 2, "-q", "-o", "json")
    record = json.loads(succeeded(run(*arguments))[0])
    assert set(record) == SHARED | {"results"}
    assert record["command"] == ["minirt", *map(str, arguments)]
    assert (record["schema"], record["benchmark"], record["backend"]) == (1, "speed", "CPU")
    with Generator.from_pretrained(folder, device="cpu", kv_cache_memory=8 << 20) as generator:
        assert record["weight_bytes"] == 4 * record["parameters"] == generator.plan.weight_bytes
        assert record["results"][0]["weight_bytes_read"] == generator.decode_read_bytes
        assert record["results"][1]["kv_bytes_read"] == 2 * generator.kv_bytes_per_token * (8 + 1 + 63.5)
    for row in record["results"]:
        assert len(row["step_s"]["all"]) == 2
        assert row["tokens_per_s"]["all"] == pytest.approx([row["batch_size"] / step for step in row["step_s"]["all"]])
        share = row["read_bytes_per_s"] / record["read_ceiling"]["bytes_per_s"]
        assert row["share_of_read_ceiling"] == pytest.approx(share)
        assert row["graph_replay_s"] is row["share_of_datasheet"] is None


def test_formats_say_the_same(run, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("minirt.bench.report.commit", lambda: "abc")
    options = ("-n", 5, "--input-len-range", "4:9", "--output-len-range", 3)
    base = ("bench", "throughput", "-m", folder, *CACHE, *options, "--repeats", 2, "-q", "--max-num-seqs", 2)
    target = tmp_path / "out"
    texts = {}
    for form in FORMATS:
        assert run(*base, "-o", form, "--output-file", target) == (0, "", "")
        texts[form] = target.read_text()
    record, line = json.loads(texts["json"]), json.loads(texts["jsonl"])
    (cells,) = csv.DictReader(io.StringIO(texts["csv"]))
    (row,) = table(texts["md"])
    assert set(line) == set(record) - {"results"} | set(record["results"][0])
    assert {key.partition(".")[0] for key in cells} == set(line)
    for one in (record["results"][0], line, cells, row):
        assert one["test"] == "throughput n5 in4:9 out3"
    assert cells["versions.torch"] == line["versions"]["torch"] == torch.__version__
    assert cells["commit"] == "abc"
    assert record["read_ceiling"] is None
    names = ("avg s", "p10 s", "p99 s", "requests/s", "total t/s", "output t/s")
    assert all(float(row[name].replace(",", "")) > 0 for name in names)
    assert (cells["num_prompts"], cells["output_tokens"]) == ("5", "15")
    assert row["first token p50 / p99 ms"].count("/") == 1


def test_a_model_as_random_weights_and_with_draws(run):
    options = ("--random-weights", "--kv-cache-memory", "64MiB", "--device", "cpu", "--max-model-len", 64)
    base = ("bench", "throughput", "-m", "SmolLM2-135M", *options, *ONE)
    out, _ = succeeded(run(*base, "--temperature", 0.8, "--top-k", 9, "-o", "json"))
    assert json.loads(out)["parameters"] == 134_515_008
    assert json.loads(out)["sampling"] == {"temperature": 0.8, "top_k": 9, "seed": 0}


@pytest.mark.parametrize(("options", "temperature"), [((), 0), (("--top-p", 0.5), 1), (("--top-p", 0.5, "--temperature", 0), 0)])
def test_a_filter_alone_means_draws(run, folder, options, temperature, monkeypatch):
    """As in `generate`. Greedy decoding would be faster than the requested sampling."""
    asked, generate = [], Generator.generate

    def noted(self, prompts, params):
        asked.extend(params)
        return generate(self, prompts, params)

    monkeypatch.setattr(Generator, "generate", noted)
    base = ("bench", "throughput", "-m", folder, *CACHE, *ONE)
    out, _ = succeeded(run(*base, *options, "-o", "json"))
    assert {params.temperature for params in asked} == {temperature}
    assert json.loads(out)["sampling"]["temperature"] == temperature


def test_speed_measures_a_prompt_and_decode_steps(run, folder):
    """What llama-bench prints. The model has 256 positions, so the default prompt is shorter than 512. Catches a row that is
    missing in a format, or a table that wants a Markdown viewer."""
    base = ("bench", "speed", "-m", folder, *CACHE, "-n", 40, "-c", "1,20", "--repeats", 2, "-q")
    rows = json.loads(printed(run(*base, "-o", "json")))["results"]
    assert [row["test"] for row in rows] == ["pp255", "tg40 b1 @ d1", "tg40 b1 @ d20"]
    assert all(row["peak_memory_bytes"] > 0 for row in rows)
    out = printed(run(*base, "-p", 9))
    assert "|" not in out
    assert re.search(r"^model +\w+ float32$", out, re.MULTILINE)
    assert re.search(r"^test +t/s +ms per prompt or step", out, re.MULTILINE)
    assert re.search(r"^ppN: a prompt of N tokens, .*^of the limit: the least time that ", out, re.MULTILINE | re.DOTALL)
    assert "the prompt has 255 tokens, not 512: the model has 256 positions" in run(*base[:-1])[2]
    assert [line.split()[0] for line in out.splitlines() if re.match("(pp|tg)[0-9]", line)] == ["pp9", "tg40", "tg40"]
    assert len(re.findall(r"^(?:pp9|tg40 b1 @ d\d+) +[0-9.,]+ ± [0-9.,]+ ", out, re.MULTILINE)) == 3, "llama-bench's ± of t/s"
    wrong = ("at most 256 tokens", "found 257", "shorter prompts or outputs: the model itself takes at most 256 tokens")
    refused(run(*base, "-p", 256), *wrong)


def test_speed_leaves_out_what_is_0(run, folder):
    """llama-bench's `-p 0` and `-n 0` were refused as wrong numbers. Nothing else that is given is ignored. (So many
    steps, since a measurement refuses times that do not grow with them.)"""
    base = ("bench", "speed", "-m", folder, *CACHE, "--repeats", 1, "-q", "-o", "json")
    for options, tests in ((("-p", 0, "-n", 60, "-c", 4), ["tg60 b1 @ d4"]), (("-p", "9,5", "-n", 0), ["pp9", "pp5"])):
        out = printed(run(*base, *options))
        assert [row["test"] for row in json.loads(out)["results"]] == tests
    refused(run(*base, "-p", 0, "-n", 0), "--input-len 0 and --output-len 0 leave nothing to measure", code=2)
    refused(run(*base, "-n", 0, "-c", 4), "--context-len is of decode steps", code=2)
    refused(run(*base, "-n", 0, "-b", 4), "--batch-size is of decode steps", code=2)
    refused(run(*base, "-p", 0, "--beside", 4), "--beside is of prompts", code=2)
    refused(run(*base, "-p", "0,9"), "--input-len: '0,9' is not a list of positive integers", code=2)


def test_the_spread_of_a_prompts_rate():
    """Of the rates themselves: that of the times, scaled, is another number. One run has none."""
    row = {"input_len": 12, "time_to_first_token_s": {"all": [1.0, 3.0, 2.0]}, "tokens_per_s": 6.0}
    cell = dict(report._COLUMNS["speed"])["t/s"]
    assert cell(row) == "6.00 ± 4.16", "12, 4 and 6"
    assert cell(row | {"time_to_first_token_s": {"all": [2.0]}}) == "6.00"


def test_bad_input_is_refused_before_anything_runs(run, folder, tmp_path, monkeypatch):
    for name in ("generate", "completions"):
        monkeypatch.setattr(Generator, name, lambda *_, **__: pytest.fail("it runs"))
    decode, throughput = ("bench", "speed", "-m", folder, *CACHE, "-p", 0), ("bench", "throughput", "-m", folder, *CACHE)
    refused(run(*decode, "-b", "1,65"), "--batch-size 65", "--max-num-seqs", "expected 64", code=2)
    refused(run(*decode, "-b", 3, "--max-num-seqs", 2), "--batch-size 3", "raise --max-num-seqs to 3", code=2)
    refused(run(*decode, "-c", "8,128"), "at most 256 tokens", "found 257", "model itself takes at most 256")
    refused(run(*throughput, "--input-len-range", "1:200", "--output-len-range", "2:57"), "at most 256", "found 257")
    pool = ("--kv-cache-memory", "200kB")
    refused(run(*decode, *pool, "-b", 4, "-c", 8), "does not fit the KV cache", "pages of 64 tokens", "--kv-cache-memory ")
    refused(run(*decode, "--temperature", -1), "--temperature", "found -1.0", code=2)
    refused(run(*decode, "--top-p", 2), "--top-p", code=2)
    refused(run(*decode, "--device", "tpu"), "--device", code=2)
    refused(run(*decode, "--impl", "foo"), "foo", code=2)
    for arguments in (
        (*decode, "-b", "0"), (*decode, "-b", "1,,2"), (*decode, "-b", "1.5"), (*decode, "-c", "٣"), (*decode, "-c", ""),
        (*decode, "--repeats", 0), (*decode, "-o", "xml"), (*decode, "--output-file", tmp_path),
        (*throughput, "--input-len-range", "9:4"), (*throughput, "--input-len-range", "1:2:3"),
        (*throughput, "-n", "0"), (*throughput, "--output-file", tmp_path / "none" / "x"), ("bench", "fly"),
    ):  # fmt: skip
        refused(run(*arguments), " --help)", code=2)


def test_a_full_disk_or_a_folder_without_rights(run, folder, tmp_path):
    target = tmp_path / "a" / "x"
    target.parent.mkdir()
    target.symlink_to(tmp_path / "b" / "x")
    base = ("bench", "throughput", "-m", folder, *CACHE, *ONE, "-q")
    refused(run(*base, "--output-file", target), "cannot write the results", str(target))


def plain(layer, factor=1.0):
    """The MLP in plain PyTorch. A `factor` other than 1 makes it wrong."""

    def forward(x, batch, kv):
        h = torch.nn.functional.rms_norm(x, x.shape[-1:], layer.norm.weight, layer.config.rms_norm_eps)
        gate, up = (h @ layer.gate_up.weight.T).chunk(2, dim=-1)
        return x + factor * ((torch.nn.functional.silu(gate) * up) @ layer.down.weight.T)

    return forward


layers.register("mlp", "bench-plain")(plain)
layers.register("mlp", "bench-wrong")(lambda layer: plain(layer, 1.001))
TINY = ("-p", 0, "-b", "1,9", "-c", "4", "--repeats", 1, "-q", "-o", "json")


def test_what_is_measured_is_compared_with_the_eager_layers_first(run, folder):
    base = ("bench", "speed", "-m", folder, *CACHE, *TINY)
    record = json.loads(succeeded(run(*base, "--impl", "layers.*.mlp=bench-plain"))[0])
    correctness = record["correctness"]
    assert (correctness["checked"], correctness["batch_sizes"]) == (True, [1, 9])
    assert correctness["tokens_equal"] + 16 * correctness["near_ties"] >= 10 * 16
    assert correctness["near_ties"] <= 1
    assert correctness["logits_relative_error"] < 1e-4
    assert record["implementations"] == ["bench-plain", "eager"]
    refused(run(*base, "--impl", "layers.1.mlp=bench-wrong"), "nothing to time", "relative error")
    out = run(*base, "--impl", "layers.1.mlp=bench-wrong", "--skip-check")[1]
    assert json.loads(out)["correctness"] == {"checked": False, "why": "not checked (--skip-check)"}
    shown = run(*base[:-1], "md", "--impl", "layers.*.mlp=bench-plain")[1]
    assert "Correctness: agrees with the eager layers on the same weights" in shown
    assert table(shown)[0]["backend"] == "CPU bench-plain+eager"


def test_lists_and_ranges_as_options():
    from minirt.cli.options import NUMBERS, RANGE

    assert NUMBERS.convert("1, 8,064", None, None) == (1, 8, 64)
    assert RANGE.convert("32:512", None, None) == (32, 512)
    assert RANGE.convert("7", None, None) == (7, 7)
    (option,) = (p for p in bench.commands["speed"].params if p.name == "output_format")
    assert list(option.type.choices) == list(FORMATS)
    assert "bench" in cli.cli.commands
    assert "t(N + 1)" in CliRunner().invoke(cli.cli, ["bench", "speed", "--help"]).output


@pytest.mark.parametrize("method", ["ngram", "mtp:2"])
def test_what_drafts_bring_on_the_embedded_model(method, run, tmp_path, monkeypatch):
    """Catches a second run with drafts (or a first one without), counts that are not those of the requests, a request whose own
    limit or name is ignored, totals of one request, and texts of one run compared with themselves."""
    loaded, from_pretrained = [], Generator.from_pretrained

    def load(options, **settings):  # with all drafts: how many are verified depends on the time of steps
        loaded.append(options.speculative)
        drafts = options.speculative and dataclasses.replace(options.speculative, adaptive=False)
        return from_pretrained(dataclasses.replace(options, speculative=drafts), **settings)

    texts = ["no, no, no, no, no, no", "Once upon a time"]
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(texts[0]) + "\n" + json.dumps({"prompt": texts[1], "max_tokens": 5, "id": "short"}))
    monkeypatch.setattr(Generator, "from_pretrained", staticmethod(load))
    code, out, err = run("bench", "speculate", "--prompts", file, *CACHE, "--speculate", method, "--max-tokens", 16, "--json")
    assert (code, err.count(" with drafts: "), err.count(" without drafts: ")) == (0, 2, 2)
    record = json.loads(out)
    assert loaded == [SpeculativeOptions.parse(method), None]
    assert record["speculative"]["method"] == method.removesuffix(":2")
    with from_pretrained("embedded", device="cpu", kv_cache_memory=8 << 20) as generator:
        expected = generator.generate(texts, [SamplingParams(max_tokens=n, temperature=0) for n in (16, 5)])
    first, second, total = record["results"]
    assert [row["test"] for row in record["results"]] == ["line 1", "short", "all"]
    assert [row["output_tokens"] for row in (first, second)] == [len(one.token_ids) for one in expected] == [16, 5]
    assert 0 < first["num_accepted_tokens"] <= first["num_draft_tokens"] > second["num_draft_tokens"]
    for row in (first, second, total):
        assert row["acceptance_length"] == row["output_tokens"] / (row["output_tokens"] - row["num_accepted_tokens"])
        assert row["speedup"] == pytest.approx(row["plain_s"]["median"] / row["seconds"]["median"])
        assert row["same_texts"] == row["texts"]
    for name in ("output_tokens", "num_draft_tokens", "num_accepted_tokens", "texts", "same_texts"):
        assert total[name] == first[name] + second[name]
    shown = report.Report(record, record["results"]).render("md")
    assert table(shown)[2]["drafts right"] == f"{total['num_accepted_tokens']} of {total['num_draft_tokens']}"
    refused(run("bench", "speculate", "--prompts", file, *CACHE, "--system", "x"), "--system needs --chat", code=2)


def test_another_text_with_drafts_is_seen():
    def timed(*tokens):
        return [SimpleNamespace(token_ids=list(ids), num_draft_tokens=2, num_accepted_tokens=1) for ids in tokens], [1.0, 3.0]

    requests = [("a", [], None), ("b", [], None)]
    results = speculate.rows(requests, [timed((1, 2)), timed((3, 4))], [timed((1, 2)), timed((3, 5))])
    assert [(row["same_texts"], row["texts"]) for row in results] == [(1, 1), (0, 1), (1, 2)]
    assert results[2]["seconds"]["all"] == [2.0, 6.0], "the sum over requests, for each repeat"


# ── start ──


def test_a_start_is_timed_by_phase(run, monkeypatch, tmp_path):
    """Catches phases that are missing in the sum, starts that use the user's own kernel cache, and starts without `--import`."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    code = f"import os\nwith open({str(tmp_path / 'ran')!r}, 'a') as file: print(os.getpid(), file=file)"
    (tmp_path / "mine.py").write_text(code)
    options = ("--repeats", "1", "--import", str(tmp_path / "mine.py"))
    out, err = succeeded(run("bench", "start", "--device", "cpu", *CACHE, *options, "-o", "json"))
    assert len({*(tmp_path / "ran").read_text().split()}) == 3, "this process, and both starts"
    record = json.loads(out)
    assert [(row["caches"], row["kernels"]) for row in record["results"]] == [("empty", 0), ("warm", 0)]
    for row in record["results"]:
        seconds = [row[f"{phase}_s"]["median"] for phase in PHASES]
        assert all(second >= 0 for second in seconds)
        assert row["total_s"]["median"] == pytest.approx(sum(seconds))
        assert row["torch_s"]["median"] > 0
        assert row["first_token_s"]["median"] > 0
    assert "empty kernel cache: " in err
    assert not (tmp_path / "own").exists()
    heads = "| kernel cache | Python | import torch | CUDA | import minirt | load | warm-up | first token | all |"
    assert heads in markdown(record, record["results"])


def test_a_start_that_fails_says_why(run, tmp_path):
    result = run("bench", "start", "--model", str(tmp_path), "--device", "cpu", "-q")
    refused(result, str(tmp_path), "a start has failed", "config.json")
