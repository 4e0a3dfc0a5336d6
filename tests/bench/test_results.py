"""What is stored, and what README.md and docs/ say of it. Catches a figure that was typed, one of another run, a result that no
page shows, and one of which nobody can say where it comes from."""

import json
import math
import re
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from minirt.bench.tools import collect, results, tables
from minirt.bench.tools.results import RESULTS, format_of, load

GPUS = "h200", "h100-80gb-hbm3"  # those with stored results, whose names begin so
BESIDE_VLLM = "h100-80gb-hbm3-beside-vllm-default"
COMPARISONS = BESIDE_VLLM, "h100-80gb-hbm3-beside-vllm"
# Results of runs on a GPU. Those of loading have another form, and so have the comparisons with vLLM.
FILES = sorted(
    file for gpu in GPUS for file in RESULTS.glob(f"{gpu}-*.json")
    if not file.stem.startswith("h200-loading") and file.stem not in COMPARISONS
)  # fmt: skip
REQUIRED = {
    *(f"h200-decode-{kind}{context}" for kind in ("bf16", "fp8") for context in ("", "-8000", "-odd")),
    *(f"h200-decode-{m}-bf16" for m in ("llama-3.1-8b", "qwen3-4b", "qwen2.5-0.5b", "smollm2-1.7b")),
    *(f"h200-decode-{m}-fp8" for m in ("llama-3.1-8b", "qwen3-4b", "qwen2.5-0.5b", "smollm2-1.7b")),
    "h200-prefill-bf16", "h200-prefill-fp8", "h200-compare-embedded", "h200-ablation-bf16", "h200-ablation-fp8",
    *(f"h200-kernels-{name}" for name in ("rows", "linears", "mlp", "attention", "gemm", "others")),
    "h200-compare-7b-bf16", "h200-compare-7b-fp8", *(f"h200-chunking-{limit}" for limit in (8448, 2048, 512)),
    "h200-loading-bf16", "h200-loading-fp8", "h200-trace",
    "h200-tune-bf16", "h200-tune-fp8", "cpu-smollm2",
}  # fmt: skip
SCRIPTS = {
    "trace": "gpu_trace.py", "ablation": "ablation.py", "memory": "memory_cases.py",
    "mixture": "mixture.py", "steps": "steps.py", "served": "served.py", "sampling": "sampling_cost.py",
}  # fmt: skip
_BESIDE = ("trace", "memory", "served", "sampling", "start")
UNCHECKED = _BESIDE  # they time what runs beside the kernels: nothing in them is right or wrong
WITHOUT_CEILING = (*_BESIDE, "tune", "patch")  # these have no limit that they are compared with


DOCS = tables.README.parent / "docs"
BENCHMARKS = sorted(tables.BENCHMARKS.glob("*.md"))
# The pages whose prose is not about measurements, but might hold one. docs/design and docs/decisions have rules of their own.
OTHERS = [*sorted(DOCS.glob("*.md")), DOCS.parent / "CONTRIBUTING.md", DOCS.parent / "examples" / "README.md"]
# What README.md says of versions and hardware: Python, PyTorch, Triton, compute capabilities, model families, bytes and bits.
NOT_MEASURED = {"1", "2", "3", "4", "16", "32", "3.1", "3.2"}
NOT_MEASURED |= {"4090", "5090", "0.5", "1.5", "1.5B", "12B", "26B", "31B"}  # names of GPUs, sizes of models
NOT_MEASURED |= {"2.11", "2.13", "2.14", "3.6", "3.8", "3.11", "3.12", "8.0", "8.9", "10.0", "12.0"}


def lines_of(name):
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def without_blocks(text):
    return re.sub(r"<!-- (\S+) -->\n.*?<!-- end of \1 -->", "", text, flags=re.DOTALL)


def figures_outside(text):
    """Figures of a text that stand in no block: not those of names, such as Qwen2.5-7B, and not what stands in `code`."""
    text = re.sub(r"^```.*?^```$", "", without_blocks(text), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`|!?\[[^]]*\]\([^)]*\)", "", text)
    return re.findall(r"(?<![\w.-])[\d.,]*\d[\w%]*", text)


def measurements_outside(text):
    """Figures with a unit of speed, time, power or comparison that stand in no block, in code or not."""
    units = r"%|×|[mµn]?s|W|[kMG]Hz|[KMGT]?B/s|[GT]FLOP/s|tokens/s|tokens a second|times"
    return [match[0] for match in re.finditer(rf"(?<![\w.-])\d[\d.,]*\s?(?:{units})(?!\w)", without_blocks(text))]


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.name)
def test_the_blocks_are_those_of_the_stored_results(page):
    text = page.read_text()
    assert tables.render(text) == text, "run `python bench/tools/tables.py`"
    assert re.findall("<!-- end of (.*) -->", text) == re.findall("<!-- (?!end of )(.*) -->", text)
    made, final = ([name for name, block in blocks.items() if block.page == page] for blocks in (tables.BLOCKS, tables.FINAL))
    assert sorted(re.findall("<!-- end of (.*) -->", text)) == sorted(made + final)
    for name in final:
        content = re.search(f"<!-- {name} -->\n(.*?)<!-- end of", text, flags=re.DOTALL)[1]
        assert tables.digest(tables.FINAL[name].sources, content) == tables.FINAL[name].digest, f"{name} or its results changed"
    for name in made:
        made = tables.block(name)
        assert f"<!-- {name} -->\n{made}\n<!-- end of {name} -->" in text if made else True


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.name)
def test_another_figure_is_found(page):
    text = page.read_text()
    for name in (name for name, block in tables.BLOCKS.items() if block.page == page):
        first = re.search(f"<!-- {name} -->\n(.*?)<!-- end of", text, flags=re.DOTALL)
        digit = first.start(1) + re.search(r"\d", first[1]).start()
        changed = text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :]
        assert tables.render(changed) == text


def test_pages_of_benchmarks_say_what_made_them():
    assert {page.parent for page in tables.pages()} == {tables.README.parent, tables.BENCHMARKS, DOCS}
    for page in BENCHMARKS:
        assert page.read_text().partition("\n")[0] == tables.NOTICE


@pytest.mark.parametrize("page", BENCHMARKS, ids=lambda page: page.name)
def test_no_figure_is_typed(page):
    text = page.read_text()
    assert measurements_outside(text) == []
    typed = "\nIdle for 0.7% (batch 64), 1,356 TFLOP/s, Qwen2.5-7B in bf16, `-b 3`.\n<!-- a -->\n7 ms\n<!-- end of a -->\n"
    assert measurements_outside(text + typed) == ["0.7%", "1,356 TFLOP/s"]


def test_no_figure_is_typed_in_the_readme():
    text = tables.README.read_text()
    assert set(figures_outside(text)) <= NOT_MEASURED
    assert measurements_outside(text) == []
    section = re.search(r"^## Speed\n(.*?)^## ", text, flags=re.DOTALL | re.MULTILINE)[1]
    assert figures_outside(section) == []
    assert not {"3.37", "1.4"} & NOT_MEASURED
    assert figures_outside("decodes in 3.37 ms, 1.4 times as fast") == ["3.37", "1.4"]


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.name)
def test_no_measurement_is_typed_elsewhere(page):
    assert measurements_outside(page.read_text()) == []
    typed = "It takes 3.4 ms, 91% of 4.5 TB/s, `1.2 s` or 5 × as long; 12 layers of 64 heads.\n"
    assert measurements_outside(typed) == ["3.4 ms", "91%", "4.5 TB/s", "1.2 s", "5 ×"]


def test_all_that_is_stored_or_collected_is_shown():
    sources = [source for block in (*tables.BLOCKS.values(), *tables.FINAL.values()) for source in block.sources]
    stored = [file.stem for file in RESULTS.glob("h[0-9]*")]
    assert [name for name in stored if not any(fnmatchcase(name, source) for source in sources)] == []
    of_any = {name: [f"{gpu}-{name}" for gpu in GPUS] for name in collect.RUNS}
    assert [name for name, full in of_any.items() if not any(fnmatchcase(f, source) for f in full for source in sources)] == []


def test_a_block_without_results_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    before, after = "a\n<!-- trace -->\n", "<!-- end of trace -->\nb\n"
    text = tables.render(before + after)
    assert text.startswith(f"{before}No results are stored yet. ")
    assert text.endswith(f"`python bench/tools/collect.py FOLDER trace` makes them.\n{after}")
    assert tables.render(f"{before}| old | 1 |\n{after}") == tables.render(text) == text
    shutil.copy(RESULTS / "h200-trace.json", tmp_path)
    full = tables.render(text)
    assert full.startswith(f"{before}| decode step |")
    assert full.endswith(f").\n{after}")
    assert tables.render(full) == full


def test_every_required_result_is_stored():
    assert {file.stem for file in RESULTS.glob("*.json")} >= REQUIRED


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_result_says_where_it_comes_from(file):
    record = json.loads(Path(file).read_text())
    gpu = next(gpu for gpu in GPUS if file.stem.startswith(f"{gpu}-"))
    kind = file.stem.removeprefix(f"{gpu}-").split("-")[0]
    assert record["device"].removeprefix("NVIDIA ").lower().replace(" ", "-") == gpu
    others = {"transformers", "liger-kernel"} if kind == "patch" else set()
    assert set(record["versions"]) == {"python", "minirt", "torch", "triton"} | others
    assert record["date"]
    assert re.fullmatch("[0-9a-f]{7,40}", record["commit"]), "a commit, and no changes beside it"
    assert record["results"]
    assert record["benchmark"] == {"chunking": "prefill"}.get(kind, kind)
    if kind in UNCHECKED:
        assert "correctness" not in record
    else:
        assert record["correctness"]["checked"] or record["correctness"]["why"]
        assert not record.get("faults")
    if kind not in WITHOUT_CEILING:
        assert record["read_ceiling"] or record["matmul_ceiling"]
    if kind in SCRIPTS:
        script = next(i for i, word in enumerate(record["command"]) if word.endswith(".py"))
        # Results stored before the scripts moved to bench/tools were made with `python -P bench/NAME.py`.
        older, newer = ["python", "-P", f"bench/{SCRIPTS[kind]}"], ["python", f"bench/tools/{SCRIPTS[kind]}"]
        assert record["command"][: script + 1] in (older, newer)
        words = record["command"][script + 1 :]
    else:
        assert record["command"][0] == "minirt"
        assert record["benchmark"] in record["command"][1:3]
        words = record["command"]
    assert not any("/" in word for word in words), "a path of somebody's machine"
    if kind == "steps" and record["quantization"] is None:  # a stored format, in the name of the folder
        assert record["model"].startswith(record["command"][2])
        assert "-fp8-" in record["model"]
        return
    weights = set(file.stem.split("-")) & {"bf16", "fp8"}
    assert not weights or weights == {format_of(record).partition("-")[0]}  # fp8-blocks is FP8, too


@pytest.mark.parametrize("name", COMPARISONS)
def test_the_comparison_with_vllm_says_how_it_was_made(name):
    """Catches a point that one engine lacks, a stack without its versions or a process without its name, a protocol that was left
    out, a path of a machine, and figures that pretend to a check or to a limit."""
    record = load(name)
    assert record["device"].removeprefix("NVIDIA ").lower().replace(" ", "-") in GPUS
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
    assert {"order", "clock", "prompts", "decode step", "first token", "offline"} <= set(record["protocol"])
    for run in record["runs"] + record.get("drafts", []):
        assert set(run["versions"]) == {"torch", "triton"}
        build = {"minirt": ("commit", "[0-9a-f]{7,40}"), "vLLM": ("version", r"\d+\.\d+\.\d+")}[run["engine"]]
        assert re.fullmatch(build[1], run[build[0]])
        assert (run["engine"] == "vLLM") == ("process" in run)
    assert "/" not in re.sub(r"\(time of.*?\) / 128", "", json.dumps(record))
    assert record["correctness"] == {"checked": False, "why": "no correctness check is stored with these runs"}
    assert record["read_ceiling"] is record["matmul_ceiling"] is None


def factors(form, names=COMPARISONS):
    """From the files alone, without the code that makes the pages: {(batch or tokens, context): factors} by setting of vLLM."""

    def values(name, engine):
        run = next(r for r in load(name)["runs"] if r["engine"] == engine and r["quantization"] == {"bf16": None}.get(form, form))
        rows = {(r.get("batch_size", r.get("input_len")), r.get("context_len")): r for r in run["results"]}
        times = {key: r.get("step_s", r.get("time_to_first_token_s")) for key, r in rows.items()}
        return times | {"offline": 1 / run["output_tokens_per_s"]}

    ours = values(BESIDE_VLLM, "minirt")
    for name in names:
        theirs = values(name, "vLLM")
        both = {key: theirs[key] if isinstance(theirs[key], list) else [theirs[key]] for key in ours if key in theirs}
        yield {key: sorted(round(time / ours[key], 2) for time in times) for key, times in both.items()}


def test_the_readme_says_of_speed_what_the_results_say():
    """Catches a factor in README.md's first sentence or table that is typed, or of other figures than those that are stored: the
    extremes of a headline that leave out a point of vLLM's default setting, or take one of another or of batch 1, where minirt's
    FP8 has 16-bit activations, a point without a mark that
    was not measured in the default setting, and a claim of checked runs that are not stored."""
    text = tables.README.read_text()
    blocks = (re.search(f"<!-- {name} -->\n(.*?)<!-- end", text, flags=re.DOTALL) for name in ("headline", "vllm"))
    headline, shown = (block[1] for block in blocks)
    claims, offline = [], []
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if "×" in line]
    for column, form in enumerate(results.FORMATS):
        default, _ = factors(form)
        steps = [factor for key, each in default.items() if key != "offline" and key[1] and key[0] > 1 for factor in each]
        claims += [min(steps), max(steps)]
        offline += default["offline"]
        for name, *row in cells:
            counts = [int(count.replace(",", "")) for count in re.findall(r"[\d,]*\d", name)]
            kind = "offline" if "offline" in name else (counts[0], None if "prompt" in name else ([*counts, 128])[1])
            assert [float(x) for x in re.findall(r"\d+\.\d\d", row[3 * column + 2])] == default.get(kind, []), name
    assert [float(x) for x in re.findall(r"(?<![\w.])\d\.\d\d(?![.\w])", headline)] == [*offline, *claims, min(offline)]
    beside = load(BESIDE_VLLM)
    for form in results.FORMATS:
        record = load(f"h200-decode-{form}")
        assert record["model"] == beside["model"]
        assert record["correctness"]["checked"]
        assert "eager layers" in record["correctness"]["against"]
        assert record["date"][:10] != beside["date"]
        assert record["device"] != beside["device"]


def gpus_of_results():
    """The GPUs of all stored results: {"H100", "H200"}."""
    records = [json.loads(file.read_text()) for file in RESULTS.glob("*.json")]
    named = [record["device"] for record in records if isinstance(record, dict) and "device" in record]
    return {match[1] for device in named if (match := re.match(r"NVIDIA (\w+)", device))}


def test_the_readme_names_every_gpu_that_has_run():
    """Catches a GPU with stored results that README.md denies, and one that it claims without a result."""
    text = tables.README.read_text()
    claims = re.findall(r"\*\*([^*]*): run and measured\.\*\*", text)
    assert len(claims) == 1
    assert set(re.findall(r"\b[A-Z]+\d+\w*", claims[0])) == gpus_of_results() >= {"H200"}
    for page in [tables.README, *DOCS.glob("*.md"), *DOCS.glob("design/*.md")]:
        assert not re.search(r"\bonly (the )?[A-Z]\d{3}\b|[A-Z]\d{3} is the only\b", page.read_text(), re.IGNORECASE), page.name


def test_tests_of_pages_see_a_gpu_that_is_denied():
    assert re.search(r"\bonly (the )?[A-Z]\d{3}\b", "Only the H200 was used", re.IGNORECASE)


@pytest.mark.parametrize("name", ["bf16", "fp8", "w4a16"])
def test_a_load_says_where_it_ran(name):
    """The script reads a folder that is nobody else's: its result holds no command."""
    record = load(f"h200-loading-{name}")
    for run in record if isinstance(record, list) else [record]:
        assert "H200" in run["environment"]["cuda:0"]
        assert {"python", "minirt", "torch", "triton"} <= set(run["environment"])
        assert re.fullmatch("[0-9a-f]{7,40}", run["commit"])


def test_only_the_known_kinds_of_results_are_stored():
    """A page that was copied here by mistake would grow stale unseen."""
    assert {file.suffix for file in RESULTS.iterdir()} == {".json", ".jsonl", ".svg"}


def test_four_bits_cost_no_more_than_other_scales():
    """`--quantize int4`: a perplexity no worse than with the nearest symmetric levels, and within 0.5% of MSE observers."""
    lines = [line for line in lines_of("cpu-int4-quality") if "difference" in line]
    for model in {line["model"] for line in lines}:
        loss = {line["name"]: line["difference"] for line in lines if line["model"] == model}
        assert loss["int4"] <= loss["round to nearest"]
        for name in ("mse observer", "mse observer, zero points"):
            assert loss["int4"] <= loss[name] + math.log(1.005), (model, name)


def test_four_bits_of_a_file_are_computed_as_stored():
    """The loss of a 4-bit checkpoint is that of transformers with its dequantized weights; FP8 also rounds activations."""
    lines = [line for line in lines_of("cpu-format-quality") if "weights_only" in line]
    assert len(lines) == 8
    for line in lines:
        rounding = line["difference"] - line["weights_only"]
        assert (-1e-3 < rounding < 0.02) if line["name"].startswith("FP8") else abs(rounding) < 1e-5, line["name"]


@pytest.mark.parametrize("name", ["speed", *tables.drawable()])
def test_the_pictures_are_of_the_stored_results(name):
    text = (RESULTS / f"{name}.svg").read_text()
    made = tables.FINAL["headline"] if name == "speed" else tables.PICTURES[name]
    assert f"results {tables.digest(made.sources)}" in text, "run `python bench/tools/tables.py`"
    assert f"bench/results/{name}.svg)" in made.page.read_text()


@pytest.mark.parametrize("name", tables.drawable())
def test_the_pictures_can_be_drawn(name, tmp_path):
    tables.picture(name, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert f"results {tables.digest(tables.PICTURES[name].sources)}" in text
    assert load(tables.PICTURES[name].sources[0])["commit"] in text or "<use" in text  # words are drawn as shapes
