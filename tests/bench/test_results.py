"""What is stored and what the README says of it. Catches a figure that was typed, one of another run, a result that nobody shows,
and one of which nobody can say where it comes from."""

import json
import re
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from minirt.bench.tools import collect, tables
from minirt.bench.tools.tables import format_of

FILES = sorted(file for file in tables.RESULTS.glob("h200-*.json") if not file.stem.startswith("h200-loading"))
REQUIRED = {
    *(f"h200-decode-{kind}{context}" for kind in ("bf16", "fp8") for context in ("", "-8000", "-odd")),
    *(f"h200-decode-{m}-bf16" for m in ("llama-3.1-8b", "qwen3-4b", "qwen2.5-0.5b", "smollm2-1.7b")),
    *(f"h200-decode-{m}-fp8" for m in ("llama-3.1-8b", "qwen3-4b", "qwen2.5-0.5b", "smollm2-1.7b")),
    "h200-prefill-bf16", "h200-prefill-fp8", "h200-compare-embedded", "h200-ablation-bf16", "h200-ablation-fp8",
    *(f"h200-kernels-{name}" for name in ("rows", "linears", "mlp", "attention", "gemm", "others")),
    "h200-compare-7b-bf16", "h200-compare-7b-fp8", *(f"h200-chunking-{limit}" for limit in (8448, 2048, 512)),
    "h200-loading-bf16", "h200-loading-fp8", "h200-startup-bf16", "h200-startup-fp8", "h200-trace", "h200-power",
    "h200-tune-bf16", "h200-tune-fp8", "cpu-smollm2",
}  # fmt: skip
SCRIPTS = {"trace": "gpu_trace.py", "startup": "startup.py", "ablation": "ablation.py", "power": "power.py"}
UNCHECKED = ("trace", "startup", "power")  # they time what runs beside the kernels: nothing in them is right or wrong
WITHOUT_CEILING = ("trace", "startup", "tune", "power")  # these have no limit that they are compared with


def measured(text):
    """The README's section of measurements."""
    return re.search(r"^## Measured\n(.*?)^## ", text, flags=re.DOTALL | re.MULTILINE)[1]


def figures_outside(text):
    """Figures of a section that stand in no block: not those of names, such as Qwen2.5-7B, and not what stands in `code`."""
    text = re.sub(r"<!-- (\S+) -->\n.*?<!-- end of \1 -->", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`|!?\[[^]]*\]\([^)]*\)", "", text)
    return re.findall(r"(?<![\w.-])[\d.,]*\d[\w%]*", text)


def test_the_blocks_are_those_of_the_stored_results():
    text = tables.README.read_text()
    assert tables.render(text) == text, "run `python bench/tools/tables.py`"
    assert re.findall("<!-- end of (.*) -->", text) == re.findall("<!-- (?!end of )(.*) -->", text)
    assert sorted(re.findall("<!-- end of (.*) -->", text)) == sorted(tables.BLOCKS)
    for name in tables.BLOCKS:
        made = tables.block(name)
        assert f"<!-- {name} -->\n{made}\n<!-- end of {name} -->" in text if made else True


def test_another_figure_is_found():
    text = tables.README.read_text()
    changed = re.sub(r"(\| batch 1, context 128 \| )\d", r"\g<1>1", text)
    assert changed != text
    assert tables.render(changed) == text


def test_no_figure_is_typed():
    section = measured(tables.README.read_text())
    assert figures_outside(section) == []
    typed = "\nIdle for 0.7% (batch 64), 1,356 TFLOP/s, Qwen2.5-7B in bf16, `-b 3`.\n<!-- a -->\n7 ms\n<!-- end of a -->\n"
    assert figures_outside(section + typed) == ["0.7%", "64", "1,356"]


def test_all_that_is_stored_or_collected_is_shown():
    sources = [source for block in tables.BLOCKS.values() for source in block.sources]
    names = [file.stem for file in tables.RESULTS.glob("h200-*")] + [f"h200-{name}" for name in collect.RUNS]
    assert [name for name in names if not any(fnmatchcase(name, source) for source in sources)] == []


def test_a_block_without_results_is_empty(tmp_path, monkeypatch):
    stored = tables.RESULTS
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    before, after = "a\n<!-- ablation -->\n", "<!-- end of ablation -->\nb\n"
    assert tables.render(f"{before}| old | 1 |\n{after}") == before + after
    text = tables.render(before + after)
    assert text == before + after
    shutil.copy(stored / "h200-ablation-bf16.json", tmp_path)
    full = tables.render(text)
    assert full.startswith(before + tables.BLOCKS["ablation"].says)
    assert full.endswith(f").\n{after}")
    assert tables.render(full) == full


def test_every_required_result_is_stored():
    assert {file.stem for file in tables.RESULTS.glob("*.json")} >= REQUIRED


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_result_says_where_it_comes_from(file):
    record = json.loads(Path(file).read_text())
    kind = file.stem.split("-")[1]
    assert "H200" in record["device"]
    assert set(record["versions"]) == {"python", "minirt", "torch", "triton"}
    assert record["date"]
    assert re.fullmatch("[0-9a-f]{7,40}", record["commit"]), "a commit, and no changes beside it"
    assert record["results"]
    assert record["benchmark"] == ("prefill" if kind == "chunking" else kind)
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
    weights = set(file.stem.split("-")) & {"bf16", "fp8"}
    assert not weights or weights == {format_of(record)}


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_a_load_says_where_it_ran(name):
    """`bench/tools/loading.py` reads a folder that is nobody else's: its result holds no command."""
    record = tables.load(f"h200-loading-{name}")
    for run in record if isinstance(record, list) else [record]:
        assert "H200" in run["environment"]["cuda:0"]
        assert {"python", "minirt", "torch", "triton"} <= set(run["environment"])
        assert re.fullmatch("[0-9a-f]{7,40}", run["commit"])


@pytest.mark.parametrize("name", tables.PICTURES)
def test_the_pictures_are_of_the_stored_results(name):
    text = (tables.RESULTS / f"{name}.svg").read_text()
    assert tables.digest(name) in text, "run `python bench/tools/tables.py`"
    assert f"(bench/results/{name}.svg)" in tables.README.read_text()


@pytest.mark.parametrize("name", tables.PICTURES)
def test_the_pictures_can_be_drawn(name, tmp_path):
    tables.picture(name, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert tables.digest(name) in text
    assert tables.load(tables.PICTURES[name][0])["commit"] in text or "<use" in text  # words are drawn as shapes
