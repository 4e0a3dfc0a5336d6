"""What is stored and what the README says of it. Catches a figure that was typed, one of another run, and a result of which
nobody can say where it comes from."""

import json
import re
from pathlib import Path

import pytest

from minirt.bench import readme

KINDS = ("decode", "prefill", "compare", "kernels")
FILES = [file for kind in KINDS for file in sorted(readme.RESULTS.glob(f"h200-{kind}-*.json"))]


def test_the_tables_are_those_of_the_stored_results():
    text = readme.README.read_text()
    assert readme.render(text) == text, "run `python -P bench/readme.py`"
    for name, table in readme.TABLES.items():
        assert f"<!-- {name} -->\n{table()}\n<!-- end of {name} -->" in text


def test_another_figure_is_found():
    text = readme.README.read_text()
    changed = re.sub(r"(\| batch 1, context 128 \| )\d", r"\g<1>1", text)
    assert changed != text
    assert readme.render(changed) == text


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_result_says_where_it_comes_from(file):
    record = json.loads(Path(file).read_text())
    assert "H200" in record["device"]
    assert set(record["versions"]) == {"python", "minirt", "torch", "triton"}
    assert re.fullmatch("[0-9a-f]{7,40}", record["commit"]), "a commit, and no changes beside it"
    assert record["correctness"]["checked"] or record["correctness"]["why"]
    assert not record.get("faults")
    assert record["read_ceiling"] or record["matmul_ceiling"]
    assert record["benchmark"] == file.stem.split("-")[1]
    assert record["command"][0] == "minirt"
    assert record["benchmark"] in record["command"][1:3]
    assert not any("/" in word for word in record["command"]), "a path of somebody's machine"


def test_there_are_results():
    assert len(FILES) == 7


@pytest.mark.parametrize("name", readme.PICTURES)
def test_the_pictures_are_of_the_stored_results(name):
    text = (readme.RESULTS / f"{name}.svg").read_text()
    assert readme.digest(name) in text, "run `python -P bench/readme.py`"
    assert f"(bench/results/{name}.svg)" in readme.README.read_text()


@pytest.mark.parametrize("name", readme.PICTURES)
def test_the_pictures_can_be_drawn(name, tmp_path):
    getattr(readme, name)(tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert readme.digest(name) in text
    assert load(readme.PICTURES[name][0])["commit"] in text or "<use" in text  # words are drawn as shapes


def load(name):
    return json.loads((readme.RESULTS / f"{name}.json").read_text())
