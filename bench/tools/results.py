"""The stored results, and vLLM's figures that tables and pictures show beside them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Result = Any  # the content of a file: a dictionary, or (older results of loading) a list of dictionaries
Records = Mapping[str, Result]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
GPUS = "h200", "h100-80gb-hbm3"  # those with stored results; the names of these begin so, see `collect.prefix`

# vLLM 0.24.0 (CUDA graphs, torch.compile, FlashAttention 3), ms, measured separately on the same GPU model with the same torch.
# These figures are not among the stored results.
VLLM_STEPS = {
    (1, 128): (4.78, 3.41), (1, 8000): (4.91, 3.61), (8, 128): (4.93, 3.47), (64, 128): (5.22, 3.99), (256, 128): (9.08, 7.29)
}  # fmt: skip
VLLM_PROMPTS = {128: (7.83, 5.71), 512: (13.9, 9.25), 2048: (48.0, 29.4), 8192: (195.0, 129.0)}
# The same of Qwen3-30B-A3B. vLLM's FP8 experts were fewer at 64 and 256 sequences, as its routing is less spread.
VLLM_MIXTURE_STEPS = {1: (4.27, 4.49), 8: (9.17, 4.93), 64: (17.7, 6.29), 256: (21.4, 9.75)}
VLLM_MIXTURE_PROMPTS = {512: (23.4, 12.8), 2048: (78.6, 92.5)}

FORMATS = ("bf16", "fp8")


def format_of(record: Result) -> str:
    """The format of a checkpoint that is quantized, else one of `FORMATS`."""
    if record.get("stored"):
        return record["stored"]
    return "fp8" if record.get("quantization") or "fp8" in record.get("dtype", "") else "bf16"


def title_of(form: str) -> str:
    return "`--fp8`" if form == "fp8" else form


def load(name: str) -> Result:
    """The content of a stored result; for a .jsonl file, a list with its lines."""
    lines = RESULTS / f"{name}.jsonl"
    if lines.exists():
        return [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def stored(sources: tuple[str, ...]) -> dict[str, Result]:
    """The stored results that match `sources`, each once, in the order of the sources."""
    found = (file for source in sources for file in sorted(RESULTS.glob(f"{source}.json*")))
    return {name: load(name) for name in dict.fromkeys(file.stem for file in found)}
