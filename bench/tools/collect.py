"""Repeats the measurements of bench/results on this GPU: `python bench/tools/collect.py FOLDER [NAME or glob …]` (default: all).

Each run is a command line in its own process and writes FOLDER/GPU-NAME.json. A run that fails writes no file, and the exit code
is 1. `bench/tools/tables.py` makes tables and pictures from the stored results.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from minirt.errors import InputError, MinirtError

_MODEL = ["--model", "Qwen2.5-7B", "--random-weights"]
_DECODE = ["bench", "speed", "-p", "0", *_MODEL, "--max-num-seqs", "256", "--max-model-len", "8448"]
_PREFILL = [
    "bench", "speed", "-n", "0", *_MODEL, "--max-model-len", "8448", "-p", "128,512,2048,8192", "--repeats", "7", "--skip-check",
]  # fmt: skip
# Long prompts while other requests decode, with several limits on the tokens of a step. A whole prompt and all requests fit 8448.
_BESIDE = [*_MODEL, "--max-model-len", "8448", "-p", "8192", "--beside", "32", "--repeats", "3", "--skip-check"]
_STEP_LIMITS = (8448, 2048, 512)
# Models with other shapes than the one to which the kernels' rules were fitted.
_OTHERS = ("Llama-3.1-8B", "Qwen3-4B", "Qwen2.5-0.5B", "SmolLM2-1.7B")
_FOUR_BITS = ("Qwen2.5-7B", "Llama-3.1-8B", "Qwen3-4B", "Qwen3-30B-A3B")
_EIGHT_BITS = ("Qwen3-30B-A3B", "Qwen3.5-35B-A3B")  # of `steps.py`, which leaves out Python's part of a step
# Formats that only a checkpoint has.
_STORED_FORMATS = {
    "fp8-blocks": ["fp8-blocks", "Qwen2.5-7B"],
    "fp8-channels": ["fp8-channels", "Qwen2.5-7B"],
    "fp8-odd-tiles": [
        *("--set", "hidden_size=3456", "--set", "intermediate_size=18816", "--set", "head_dim=128"), "fp8-blocks", "Qwen2.5-7B",
    ],
    "fp8-odd-widths": [
        *("--set", "hidden_size=3472", "--set", "intermediate_size=18720", "--set", "head_dim=128"), "fp8-blocks", "Qwen2.5-7B",
    ],
}  # fmt: skip
# Several runs, because torch.compile takes seconds for each shape.
_KERNELS = {
    "rows": ("embedding", "*norm", "norm_residual", "rms_norm_quantize", "quantize", "*rope_kv_write*", "sample_*"),
    "attention": ("attention_*",),
    "linears": ("qkv*", "o", "o.fp8", "o.fp8_blocks", "o.int4", "gate_up*", "down*", "lm_head*"),
    "mlp": ("mlp*",),
}


def _runs() -> dict[str, list[str]]:
    """Return the arguments of `minirt` by name of the result. A first argument that ends with .py is a script of this folder."""
    runs = {}
    for kind, flags in (("bf16", []), ("fp8", ["--fp8"])):
        runs[f"decode-{kind}"] = [*_DECODE, "-b", "1,8,64,256", "-c", "128", *flags]
        runs[f"decode-{kind}-8000"] = [*_DECODE, "-b", "1", "-c", "8000", "--skip-check", *flags]
        runs[f"decode-{kind}-odd"] = [*_DECODE, "-b", "3,24,100", "-c", "128,3000", "--skip-check", *flags]
        runs[f"prefill-{kind}"] = [*_PREFILL, *flags]
        runs[f"compare-7b-{kind}"] = ["compare", *_MODEL, *flags]
        runs[f"tune-{kind}"] = ["tune", "--model", "Qwen2.5-7B", *flags]
        runs[f"startup-{kind}"] = ["startup.py", "Qwen2.5-7B", *flags]
        runs[f"mixture-{kind}"] = ["mixture.py", "Qwen3-30B-A3B", *flags]
        runs[f"served-{kind}"] = ["served.py", "Qwen2.5-7B", *flags]
        for model in _OTHERS:
            words = ["bench", "speed", "-p", "0", "--model", model, "--random-weights", "--max-model-len", "4096"]
            runs[f"decode-{model.lower()}-{kind}"] = [*words, "-b", "1,8,64", "-c", "128", *flags]
    for model in _FOUR_BITS:
        runs[f"steps-int4-{model.lower()}"] = ["steps.py", model, "int4"]
    for model in _EIGHT_BITS:
        runs[f"steps-fp8-{model.lower()}"] = ["steps.py", model, "fp8"]
    for name, words in _STORED_FORMATS.items():
        runs[f"steps-{name}"] = ["stored_format.py", *words, "steps"]
    for limit in _STEP_LIMITS:
        runs[f"chunking-{limit}"] = ["bench", "speed", "-n", "0", *_BESIDE, "--max-num-batched-tokens", str(limit)]
    runs["mixture-odd-bf16"] = ["mixture.py", "Qwen3-30B-A3B", "--set", "num_experts=120", "--set", "moe_intermediate_size=752"]
    runs["mixture-fp8-blocks"] = ["mixture.py", "--stored", "fp8-blocks", "Qwen3-30B-A3B"]
    compiled = ["--compile", "-p", "2048", "-b", "1,8", "--variants", "minirt,minirt fp8"]
    runs["patch-7b-compiled"] = ["bench", "patch", *_MODEL, *compiled]
    runs["patch-7b"] = ["bench", "patch", *_MODEL, "--no-compile", "-p", "128,2048,8192", "-b", "1,8"]
    runs["trace"] = ["gpu_trace.py", "Qwen2.5-7B"]
    # Real weights: the embedded model, and one that must be in the Hub's cache.
    runs["compare-embedded"] = ["compare", "--dtype", "bfloat16", "-b", "3"]
    runs["compare-smollm2"] = ["compare", "--model", "SmolLM2-135M-Instruct", "--dtype", "bfloat16", "-b", "3"]
    for name, kernels in _KERNELS.items():
        runs[f"kernels-{name}"] = ["bench", "kernels", *kernels, "--model", "Qwen2.5-7B"]
    runs["kernels-experts"] = ["bench", "kernels", "experts*", "--model", "Qwen3-30B-A3B"]
    runs["kernels-gated-delta"] = ["bench", "kernels", "gated_delta_*", "--model", "Qwen3.5-27B"]
    runs["kernels-gemm"] = ["bench", "kernels", "gemm_*", "--model", "Qwen2.5-7B", "--model", "Llama-3.1-8B", "--no-compile"]
    others = [word for model in ("Qwen2.5-7B", *_OTHERS) for word in ("--model", model)]
    linears = _KERNELS["linears"]
    runs["kernels-others"] = ["bench", "kernels", *linears, *others, "-t", "1,3,24,100", "--no-compile"]
    attention = ["attention_decode*", *others, "-t", "1,3,24,100", "-c", "128,3000", "--no-compile"]
    runs["kernels-others-attention"] = ["bench", "kernels", *attention]
    return runs


RUNS = _runs()


def select(patterns: Sequence[str]) -> list[str]:
    """Return the names of the runs that match any of the names or globs; without patterns, all names.

    Raises:
        InputError: a pattern matches no run.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in RUNS):
            raise InputError("matches no run", where=pattern, expected=", ".join(RUNS))
    return [name for name in RUNS if not patterns or any(fnmatchcase(name, p) for p in patterns)]


def command(name: str) -> list[str]:
    """Return the command line of a run, which prints JSON to stdout."""
    first, *rest = RUNS[name]
    if first.endswith(".py"):
        return [sys.executable, str(Path(__file__).parent / first), *rest]
    return [sys.executable, "-m", "minirt", first, *rest, "-o", "json", "--quiet"]


def prefix() -> str:
    """Return the prefix of file names for this GPU: "h200" for an "NVIDIA H200"."""
    import torch

    if not torch.cuda.is_available():
        raise MinirtError("there is no GPU to measure")
    return torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "-")


def main(words: list[str]) -> int:
    if not words or not Path(words[0]).is_dir():
        found = words[0] if words else "none"
        raise MinirtError("expected a folder to write to", found=found, hint="collect.py FOLDER [NAME or glob …]")
    names, gpu, failed = select(words[1:]), prefix(), 0
    for name in names:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:  # keeps tuning results away from other runs
            cache = {"MINIRT_CACHE": scratch} if name.startswith("tune-") else {}
            done = subprocess.run(command(name), capture_output=True, text=True, check=False, env=os.environ | cache)
        line = f"{name}: {time.monotonic() - started:.0f} s"
        if done.returncode == 0:
            (Path(words[0]) / f"{gpu}-{name}.json").write_text(done.stdout, encoding="utf-8")
        else:
            failed += 1
            line += f", exit code {done.returncode}: {done.stderr.strip()[-500:]}"
        print(line, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
