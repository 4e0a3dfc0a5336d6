"""`bench/tools/long_prompts.py` on a small model on the CPU: every row has what the table shows."""

from minirt.bench.tools import long_prompts, tables


def test_measure(monkeypatch):
    """Catches prompts that hit a cache or end early, and a table that lacks a row."""
    asked = []
    monkeypatch.setattr(long_prompts, "PROMPTS", (40, 90))
    monkeypatch.setattr(long_prompts, "REPEATS", 3)
    monkeypatch.setattr(long_prompts, "step_seconds", lambda generator, start, new: asked.append((start, new)) or new * 1e-4)
    rows = long_prompts.measure("embedded", device="cpu", max_model_len=128, kv_cache_memory=1 << 22)
    assert asked == [(0, 40), (0, 90)]
    for row in rows:
        assert len(row["all"]) == 3
        assert row["of_gpu"] == row["first_token_s"] / row["gpu_s"]
    record = {"model": "a model", "quantization": None, "results": rows}
    shown = tables.long_prompts_table({"a": record, "b": record | {"quantization": "fp8"}})
    assert shown.count("40 tokens, bf16") == shown.count("90 tokens, `--fp8`") == 1
