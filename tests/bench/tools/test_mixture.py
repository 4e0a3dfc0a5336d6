"""`bench/tools/mixture.py` on a small mixture on the CPU: every row has what the tables show."""

from dataclasses import replace

from minirt import models
from minirt.bench.ceiling import Ceiling, MatmulCeiling
from minirt.bench.measure import Runs
from minirt.bench.tools import mixture, tables


def test_measure(monkeypatch):
    preset = models.preset("Qwen3-30B-A3B")
    moe = replace(preset.config.moe, num_experts=6, experts_per_token=2, intermediate_size=16)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "vocab_size": 300}
    small = replace(preset, config=replace(preset.config, moe=moe, **sizes))
    monkeypatch.setattr(models, "preset", lambda name: small)
    monkeypatch.setattr(mixture, "BATCHES", (1, 3))
    monkeypatch.setattr(mixture, "PROMPTS", (40,))
    monkeypatch.setattr(mixture, "CONTEXT", 9)
    monkeypatch.setattr(mixture, "read_ceiling", lambda device: Ceiling(1e9, "made up"))
    monkeypatch.setattr(mixture, "matmul_ceiling", lambda device, dtype: MatmulCeiling(1e12, "made up"))
    timed = Runs.timed  # on a busy machine more steps may take no more time
    monkeypatch.setattr(Runs, "timed", lambda *args: (args[3][0] / 100, timed(*args)[1]))
    load = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 4, "kv_cache_memory": 1 << 22, "dtype": "float32"}
    record = mixture.measure("Qwen3-30B-A3B", False, **load)
    assert [row["batch_size"] for row in record["results"]] == [1, 3]
    assert all(2 <= row["experts"]["touched"] <= 6 for row in record["results"] + record["prompts"])
    assert all(row["share_of_limit"] > 0 for row in record["prompts"])
    assert record["correctness"]["checked"]
    assert record["correctness"]["batch_sizes"] == [1, 3]
    skipped = mixture.measure("Qwen3-30B-A3B", False, True, **load)
    assert "not checked" in skipped["correctness"]["why"]
    table = tables.mixture_table({"a": record | {"dtype": "bf16"}})
    assert "decode step, batch 3" in table
    assert "prompt of 40 tokens" in table
