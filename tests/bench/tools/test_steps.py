"""`bench/tools/steps.py` on a small mixture with 4-bit experts, on the CPU, with made-up times of CUDA graphs."""

import argparse
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import minirt
import minirt.bench.ceiling
import minirt.bench.replay
import minirt.device
from minirt import models
from minirt.bench.ceiling import Ceiling
from minirt.bench.tools import steps, stored_format, tables
from minirt.errors import InputError


@pytest.mark.filterwarnings("ignore:on a CPU")
def test_experts_of_four_bits(monkeypatch, capsys):
    """Catches a limit that counts all experts, or experts in 16 bits: 4-bit weights have a word of 4 bytes for each row and 128
    columns, and a step reads the experts that its tokens choose."""
    preset = models.preset("Qwen3-30B-A3B")
    moe = replace(preset.config.moe, num_experts=8, experts_per_token=2, intermediate_size=128)
    sizes = {"num_layers": 2, "hidden_size": 256, "num_heads": 2, "num_kv_heads": 1, "head_dim": 128, "vocab_size": 1100}
    small = replace(preset, config=replace(preset.config, moe=moe, **sizes))
    monkeypatch.setattr(models, "preset", lambda name: small)
    options = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 1 << 24}
    monkeypatch.setattr(minirt.Generator, "from_pretrained", partial(minirt.Generator.from_pretrained, **options))
    monkeypatch.setattr(minirt.device, "pick_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(minirt.bench.ceiling, "read_ceiling", lambda device: Ceiling(1e9, "made up"))

    def replay_times(generator, batch, context):
        if batch == 256:
            raise InputError("not a step of this engine", where="replay_times")
        return [1.0, 2.0, 4.0]

    monkeypatch.setattr(minirt.bench.replay, "replay_times", replay_times)
    monkeypatch.setattr(steps, "BATCHES", (1, 3, 256))
    monkeypatch.setattr(steps, "PROMPTS", (40,))
    monkeypatch.setattr(steps, "REPEATS", 1)
    steps.main(["Qwen3-30B-A3B", "--quantize", "int4"])
    record = json.loads(capsys.readouterr().out)
    assert record["quantization"] == "int4"
    one, three, many, prompt = record["results"]
    assert (many["batch_size"], many["step_s"], many["share_of_limit"]) == (256, None, None)
    assert "not a step" in many["left_out"]
    assert "| – |" in tables.replays_table({"steps": record}), "a table says that it has no time"
    expert = 3 * 128 * 256 // 2 + 4 * (2 * 128 * 256 // 128 + 256)  # weights, and the scales of gate, up and down
    added = 8 * (1 - 0.75**3) - 2  # experts that three tokens use added than one, if all are equally likely
    cached = 2 * 2 * 128 * 4 * steps.CONTEXT  # keys and values of a sequence
    assert (three["limit_s"] - one["limit_s"]) * 1e9 == pytest.approx(2 * added * expert + 2 * cached, abs=2)
    assert three["share_of_limit"] == pytest.approx(three["limit_s"] / 2)
    assert prompt["time_to_first_token_s"]["median"] > 0


@pytest.mark.parametrize("words", [["--quantize", "gptq"], ["--quantize", "fp8", "--stored", "fp8-blocks"]])
def test_other_words_are_refused(words, capsys):
    """Catches a format that is ignored: the figures would be those of 16 bits."""
    with pytest.raises(SystemExit):
        steps.main(["Qwen3-30B-A3B", *words])
    assert re.search("invalid choice: 'gptq'|--stored weights are quantized already", capsys.readouterr().err)


def test_a_checkpoint_with_other_sizes(tmp_path):
    """Catches a field that is not changed, and two checkpoints with one name."""
    options = argparse.Namespace(model="Qwen2.5-0.5B", stored="fp8-blocks", set=["hidden_size=3456", "head_dim=128"])
    with stored_format.chosen_model(options) as folder:
        written = json.loads((Path(folder) / "config.json").read_text())
        assert Path(folder).name == "Qwen2.5-0.5B-fp8-blocks"
    assert (written["hidden_size"], written["head_dim"]) == (3456, 128)
    assert written["quantization_config"]["weight_block_size"] == [128, 128]
    with stored_format.chosen_model(argparse.Namespace(model="Qwen2.5-0.5B", stored=None, set=[])) as model:
        assert model == "Qwen2.5-0.5B"
