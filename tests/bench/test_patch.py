"""`minirt bench patch` on a tiny model: its rows, its report and picture, and what it refuses to time."""

import json

import pytest
import torch
from click.testing import CliRunner

from minirt import patching
from minirt.bench import patch as benchmark
from minirt.cli.bench import bench
from minirt.errors import NumericsError, OutOfMemoryError

SMALL = ("-p", "16,20", "-b", "1,3", "-c", "8", "-n", "4", "--repeats", "2", "--device", "cpu")


@pytest.fixture(scope="module")
def folder(hf_folder):
    return str(hf_folder("Qwen2", num_hidden_layers=1))


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(benchmark, "COMPILE", {"fullgraph": True, "dynamic": False, "backend": "aot_eager"})

    def call(*arguments):
        return CliRunner().invoke(bench, ["patch", *arguments], catch_exceptions=False)

    return call


def test_rows_and_picture(run, folder, tmp_path):
    """A variant without rows, a speed that is not the ratio of the times, figures of a CPU without a word."""
    picture = tmp_path / "speed.svg"
    sizes = (*SMALL, "-p", "16", "-b", "3")
    options = ("-m", folder, "--random-weights", *sizes, "--compile", "-o", "json", "-q", "--picture", str(picture))
    report = json.loads(run(*options).output)
    assert report["benchmark"] == "patch"
    assert report["backend"] == "CPU"
    assert report["versions"]["transformers"].startswith("5.")
    tests = {"pp16": 16, "tg4 b3 @ d8": 3}
    rows = [(row["variant"], row["mode"], row["test"]) for row in report["results"]]
    variants = ("transformers", "minirt", "minirt fp8")
    assert rows == [(variant, mode, test) for variant in variants for mode in ("eager", "compiled") for test in tests]
    times = {(row["mode"], row["test"]): row["seconds"]["median"] for row in report["results"][:4]}
    for row in report["results"]:
        assert len(row["seconds"]["all"]) == 2
        expected = None if row["variant"] == "transformers" else times[row["mode"], row["test"]] / row["seconds"]["median"]
        assert row["speedup"] == expected
        assert row["tokens_per_s"] == tests[row["test"]] / row["seconds"]["median"]
    assert list(report["left_out"]) == ["liger"]
    assert [check["variant"] for check in report["correctness"]["variants"]] == ["minirt", "minirt fp8"]
    assert report["patched"]["minirt fp8"]["fp8_bytes"] > 0
    assert picture.read_text().startswith("<?xml")


def test_the_table(run, folder):
    """A table that hides what was not measured, or that these are not figures of a GPU. Weights of the folder are used."""
    output = run("-m", folder, *SMALL, "--variants", "minirt,liger", "--parts", "norms,mlp", "-o", "md").output
    assert "**CPU figures, no GPU:**" in output
    assert "Not measured: liger: " in output
    assert "Correctness: minirt: relative error of the logits" in output
    rows = [line for line in output.splitlines() if line.startswith("| ")][2:]
    assert [("×" in row, row.split(" | ")[3]) for row in rows] == [(False, "transformers")] * 4 + [(True, "minirt")] * 4


def test_a_wrong_model_is_not_timed(run, folder, monkeypatch):
    """A speed of wrong results."""
    from minirt.nn import functional

    original = functional.norm_gate_up
    monkeypatch.setattr(functional, "norm_gate_up", lambda *args, **options: 1.01 * original(*args, **options))
    with pytest.raises(NumericsError, match=r"minirt: the logits differ .* so there is nothing to time"):
        run("-m", folder, "--random-weights", *SMALL)


@pytest.mark.parametrize(("options", "message"), [
    (("--variants", "vllm"), "'vllm' is none of minirt, minirt fp8, liger"),
    (("--parts", "norms,heads"), "'heads' is none of norms, attention, rope, mlp"),
    (("--dtype", "int8"), "'int8' is not one of 'bfloat16'"),
    (("--picture", "speed.txt"), "ends with none of"),
])  # fmt: skip
def test_bad_options(run, folder, options, message):
    """A value that is found out after a large model was built."""
    result = run("-m", folder, "--random-weights", *SMALL, *options)
    assert result.exit_code == 2
    assert message in result.output


def test_the_names_of_options_are_those_of_the_modules():
    """A part or a variant that the command does not know: its names are written twice, because --help imports no PyTorch."""
    from minirt.cli import bench_patch

    defaults = {option.name: option.default for option in bench_patch.patch.params}
    assert (benchmark.VARIANTS[1:], patching.PARTS) == (bench_patch._VARIANTS, bench_patch._PARTS)
    assert {name: defaults[name] for name in ("variants", "parts")} == {
        "variants": ",".join(benchmark.VARIANTS[1:]), "parts": ",".join(patching.PARTS)
    }  # fmt: skip


def test_random_weights_are_those_of_the_seed(folder):
    """Variants with different weights, whose logits differ for another reason than the kernels."""
    first, second, other = (
        benchmark.build(folder, True, torch.float32, torch.device("cpu"), seed).state_dict() for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert all(value.float().std() > 0 for name, value in first.items() if "norm" in name or "bias" in name)


def test_weights_that_do_not_fit_are_not_made(folder, monkeypatch):
    monkeypatch.setattr(benchmark, "free_memory", lambda device: 1000)
    with pytest.raises(OutOfMemoryError, match="cpu: the weights do not fit"):
        benchmark.build(folder, True, torch.float32, torch.device("cpu"), 0)


def test_presets_are_read_by_transformers():
    """A field of a preset that transformers ignores: rope, head_dim, tied embeddings."""
    config = benchmark.hf_config("Qwen2.5-7B")
    assert (config.hidden_size, config.num_key_value_heads, config.tie_word_embeddings) == (3584, 4, False)
    assert config.rope_parameters["rope_theta"] == 1e6
    assert benchmark.hf_config("Llama-3.1-8B").rope_parameters["rope_type"] == "llama3"
