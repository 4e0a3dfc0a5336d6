"""`bench/tools/collect.py` without a GPU: every run is a valid command line, and failures are reported.

Catches: a renamed option, a model without a preset, a renamed kernel, a failed run that leaves a file.
"""

import sys
from fnmatch import fnmatchcase

import click
import pytest

from minirt import models
from minirt.bench.kernels import benchmark as kernels
from minirt.bench.tools import collect, stored_format
from minirt.cli import app as cli
from minirt.errors import InputError, MinirtError
from minirt.loading.options import EMBEDDED


def parsed(words):
    """Return the name of the command and its options, parsed by click."""
    command, context = cli.cli, click.Context(cli.cli)
    while isinstance(command, click.Group):
        command, words = command.get_command(context, words[0]), words[1:]
    return command.name, command.make_context(command.name, list(words)).params


@pytest.mark.parametrize("name", collect.RUNS)
def test_every_run_is_a_command(name):
    words = collect.RUNS[name]
    if words[0].endswith(".py"):
        assert collect.command(name)[-len(words)].endswith(f"bench/tools/{words[0]}")
        assert models.preset(words[1]) is not None
        assert "--stored" not in words or words[words.index("--stored") + 1] in stored_format.FORMATS
        return
    command, options = parsed(words)
    kind = name.split("-")[0]
    assert ("speed" if kind in ("decode", "prefill", "chunking") else kind) == command
    chosen = options.get("models") or [options["model"]]
    assert all(model in (None, EMBEDDED) or models.preset(model) is not None for model in chosen)
    if command == "kernels":
        assert kernels.select(options["names"])


def test_every_kernel_is_measured():
    runs = [words for name, words in collect.RUNS.items() if words[:2] == ["bench", "kernels"] and "others" not in name]
    measured = [name for words in runs for name in kernels.select(parsed(words)[1]["names"])]
    assert sorted(measured) == sorted(kernels.BENCHMARKS)


def test_what_pages_show_is_collected():
    """Catches a block of results that nothing makes again: such blocks are final."""
    from minirt.bench.tools import tables

    shown = {source for block in tables.BLOCKS.values() for source in block.sources}
    shown |= {source for picture in tables.PICTURES.values() for source in picture.sources}
    runs = [f"{gpu}-{name}" for name in collect.RUNS for gpu in ("h200", "h100-80gb-hbm3")]
    assert [source for source in shown if not any(fnmatchcase(run, source) for run in runs)] == []


@pytest.mark.parametrize("limit", [8448, 2048, 512])
def test_prompts_arrive_beside_requests(limit):
    """The run has the limit of its name, and there is room for the prompts and the decoding requests."""
    options = parsed(collect.RUNS[f"chunking-{limit}"])[1]
    assert (options["max_num_batched_tokens"], options["beside"], options["input_len"]) == (limit, 32, (8192,))
    assert options["max_num_seqs"] > options["beside"]
    assert options["max_model_len"] > options["input_len"][0]
    assert options["skip_check"]
    assert not options["fp8"]


def test_a_failed_run_leaves_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(collect, "prefix", lambda: "gpu")
    scripts = {"good": "print('{}')", "bad": "import sys; print('{}'); sys.exit('no such model')"}
    monkeypatch.setattr(collect, "RUNS", {name: ["x"] for name in scripts})
    monkeypatch.setattr(collect, "command", lambda name: [sys.executable, "-c", scripts[name]])
    assert collect.main([str(tmp_path)]) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["gpu-good.json"]
    assert "exit code 1: no such model" in capsys.readouterr().out
    assert collect.main([str(tmp_path), "g*"]) == 0


def test_wrong_words(tmp_path):
    with pytest.raises(MinirtError, match="expected a folder"):
        collect.main([str(tmp_path / "none")])
    with pytest.raises(InputError, match="nothing: matches no run"):
        collect.select(["nothing"])
