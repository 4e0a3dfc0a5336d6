"""The README's tables of measurements, made from the stored results: `python -P bench/readme.py` writes them anew.

A table stands between `<!-- NAME -->` and `<!-- end of NAME -->`. What stands there is checked by a test.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

README, RESULTS = Path(__file__).parents[1] / "README.md", Path(__file__).parent / "results"
# vLLM 0.24.0 (CUDA graphs, torch.compile, FlashAttention 3), ms, measured apart on the same GPU model with the same torch: not
# among the stored results.
VLLM_STEPS = {
    (1, 128): (4.78, 3.41), (1, 8000): (4.91, 3.61), (8, 128): (4.93, 3.47), (64, 128): (5.22, 3.99), (256, 128): (9.08, 7.29)
}  # fmt: skip
VLLM_PROMPTS = {128: (7.83, 5.71), 512: (13.9, 9.25), 2048: (48.0, 29.4), 8192: (195.0, 129.0)}

Result = dict[str, Any]


def load(name: str) -> Result:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _rows(*names: str) -> Iterator[Result]:
    for name in names:
        yield from load(name)["results"]


def _digits(ms: float) -> str:
    """Three significant digits, at most two decimals."""
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}"


def decode() -> str:
    """Milliseconds of a decode step, and the share of the read ceiling."""
    found = [
        {(row["batch_size"], row["context_len"]): row for row in _rows(f"h200-decode-{kind}", f"h200-decode-{kind}-8000")}
        for kind in ("bf16", "fp8")
    ]
    cells = []
    for key, peers in VLLM_STEPS.items():
        own = [f"batch {key[0]}, context {key[1]}"]
        for rows, peer in zip(found, peers, strict=True):
            own += [_digits(rows[key]["step_s"]["median"] * 1e3), f"{rows[key]['share_of_read_ceiling']:.0%}", f"{peer:.2f}"]
        cells.append(own)
    return _table("ms a step", cells)


def prefill() -> str:
    """Milliseconds to the first token of one prompt, and the share of the rate of PyTorch's matrix product."""
    found = [{row["input_len"]: row for row in _rows(f"h200-prefill-{kind}")} for kind in ("bf16", "fp8")]
    cells = []
    for length, peers in VLLM_PROMPTS.items():
        own = [f"{length} tokens"]
        for rows, peer in zip(found, peers, strict=True):
            row = rows[length]
            own += [_digits(row["time_to_first_token_s"]["median"] * 1e3), f"{row['share_of_matmul_ceiling']:.0%}", _digits(peer)]
        cells.append(own)
    return _table("ms to the first token", cells)


def _table(title: str, cells: list[list[str]]) -> str:
    columns = [title, *(name for kind in ("bf16", "`--fp8`") for name in (kind, "of the ceiling", "vLLM 0.24"))]
    lines = [columns, ["---", *["---:"] * 6], *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TABLES: dict[str, Callable[[], str]] = {"decode": decode, "prefill": prefill}


def render(text: str) -> str:
    """`text`, a README, with every table made anew."""

    def anew(match: re.Match[str]) -> str:
        return match["start"] + TABLES[match["name"]]() + match["end"]

    names = "|".join(TABLES)
    return re.sub(rf"(?P<start><!-- (?P<name>{names}) -->\n).*?(?P<end>\n<!-- end of (?P=name) -->)", anew, text, flags=re.DOTALL)


if __name__ == "__main__":
    README.write_text(render(README.read_text()))
