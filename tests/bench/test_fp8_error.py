"""The effect of FP8 on perplexity, with the embedded model and with damaged weights.

Catches rounding that is not to nearest, values that saturate, Inf that becomes a number, and a tied LM head that is quantized
without a request. `test_quantize.py` covers the scales.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cli import caller, refused
from support.package import ROOT

from minirt import Generator
from minirt.bench.fp8_error import format_errors, table
from minirt.bench.perplexity import perplexity
from minirt.errors import CheckpointError, ConfigError, InputError, NumericsError, UnsupportedError

EMBEDDED = ROOT / "models" / "embedded"
TEXT = (ROOT / "models" / "recipe" / "heldout.txt").read_text()[:10000]  # 2.5k tokens
TOKENS = list(range(3, 60))
WITHIN, WITHIN_KV = 1.01, 1.015  # limits, relative to the perplexity without FP8


def opened(folder, **options):
    return Generator.from_pretrained(folder, device="cpu", dtype="float32", kv_cache_memory=1 << 26, **options)


def score(folder, text=TEXT, **options):
    with opened(folder, **options) as generator:
        return perplexity(generator, text, stride=500).perplexity


def test_the_embedded_model_keeps_its_perplexity():
    plain = score(EMBEDDED)
    assert score(EMBEDDED, quantization="fp8") < WITHIN * plain
    assert score(EMBEDDED, quantization="fp8", kv_cache_dtype="fp8") < WITHIN_KV * plain


def damaged(tmp_path, name, change):
    """The embedded model with `change` applied to one tensor."""
    folder = shutil.copytree(EMBEDDED, tmp_path / "model")
    ((path, tensors),) = ((file, content) for file in folder.glob("*.safetensors") if name in (content := load_file(file)))
    change(tensors[name])
    save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinities_show(value, tmp_path):
    """Infinities and NaN must not become numbers."""

    def damage(weight):
        weight[5, 7] = value

    folder = damaged(tmp_path, "model.layers.4.self_attn.o_proj.weight", damage)
    with pytest.raises(NumericsError, match="a probability of 0 or NaN"):
        score(folder, TEXT[:500], quantization="fp8")
    with pytest.raises(CheckpointError, match=r"layers\.4\.self_attn\.o_proj\.weight.*NaN or Inf"):
        opened(folder, quantization="fp8", check_weights=True)


def test_format_errors_of_every_linear():
    """Rounding to 3 mantissa bits changes a value by at most 2^-4, and by 2.6% rms; rounding both factors gives √2 times that."""
    with opened(EMBEDDED) as one, opened(EMBEDDED, quantization="fp8") as other:
        before = one.logits(TOKENS)
        errors = format_errors(one._model, other._model, one.encode(TEXT)[:200])
        assert torch.equal(one.logits(TOKENS), before), "the measurement changed the model"
        assert [e.linear for e in errors] == ["qkv", "o", "gate_up", "down"] * 6 + ["lm_head"]
        head = one._model.layers[-1].lm_head.weight.double()
        twin = other._model.layers[-1].lm_head
        off = (twin.weight.double() * twin.scale.double().unsqueeze(1) - head).norm() / head.norm()
        assert errors[-1].weights == pytest.approx(float(off), rel=1e-6)
        for e in errors:
            assert 0.024 < e.weights < 0.029, e
            assert 0.005 < e.one < 0.029, e
            assert e.one < e.many < 0.045, e
            assert e.many <= e.worst < 0.1, e
        assert len(table(errors).splitlines()) == 2 + len(errors) + 5
        for tokens in ([1], [1] * 600):
            with pytest.raises(InputError, match="this many tokens"):
                format_errors(one._model, other._model, tokens)
        with pytest.raises(ConfigError, match="already quantized"):
            format_errors(other._model, one._model, TOKENS)


def test_format_errors_on_the_command_line(tmp_path, capfd, monkeypatch):
    run = caller(capfd, monkeypatch)
    (tmp_path / "text").write_text(TEXT[:1000])
    command = ("eval", "fp8", "--text", tmp_path / "text", "--device", "cpu", "-n", 20)
    code, out, err = run(*command, "-q", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, err, len(rows)) == (0, "", 25)
    assert rows[-1].keys() == {"layer", "linear", "shape", "weights", "one", "many", "worst"}
    code, out, err = run(*command)
    assert out.split()[:2] == ["layer", "linear"]
    assert "no --model" in err
    refused(run(*command, "--max-length", 5), "--max-length", code=2)
    assert run(*command[:-2], "-q")[0] == 0  # default: as many tokens as the model holds
    refused(run(*command[:-1], 513, "-q"), "--num-tokens", "expected 512", "found 513", code=2)
    (tmp_path / "text").write_text("a")
    refused(run(*command, "-q"), "text", "from 2 to 512", "found 1")


def test_experts_are_refused_by_name(hf_folder):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_hidden_layers": 1}
    folder = hf_folder("Qwen3Moe", **sizes)
    with (
        opened(folder) as one, opened(folder, quantization="fp8") as other,
        pytest.raises(UnsupportedError, match=r"^layers\.0\.moe\.gate_up: the FP8 error of experts"),
    ):  # fmt: skip
        format_errors(one.model, other.model, TOKENS)
