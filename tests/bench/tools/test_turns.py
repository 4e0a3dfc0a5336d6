"""`bench/tools/turns.py` on a small model on the CPU. Catches turns that find nothing, so that something else is measured."""

from minirt.bench.tools import turns


def test_measure(monkeypatch):
    """Pages of 64 tokens are found of all that the turn before had, without its generation prompt."""
    for name, value in {"TURNS": 3, "REPEATS": 2, "SYSTEM": 100, "QUESTION": 20, "ANSWER": 60, "REASONING": 3}.items():
        monkeypatch.setattr(turns, name, value)
    rows = turns.measure("embedded", device="cpu", max_model_len=512, kv_cache_memory=1 << 22)
    assert [row["prompt_tokens"] for row in rows] == [125, 209, 293]
    assert [row["cached_tokens"] for row in rows] == [[0, 0], [64, 64], [192, 192]]
    assert all(row["first_token_s"] > 0 and row["step_s"] > 0 for row in rows)
