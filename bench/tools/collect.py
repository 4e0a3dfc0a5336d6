"""Repeats the measurements of bench/results on this GPU: `python bench/tools/collect.py FOLDER [NAME or glob …]` (default: all).

Each run is a command line in its own process and writes FOLDER/GPU-NAME.json. A run that fails writes no file, and the exit code
is 1. `bench/tools/tables.py` makes tables and pictures from the stored results.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from minirt.errors import InputError, MinirtError

# A line for each run: its name, and the arguments of `minirt`, or a script of this folder with its arguments. A line with KIND
# stands for two runs: in bf16, and with `--fp8` in place of KIND.
_RUNS = """
decode-KIND bench speed -p 0 7B --max-num-seqs 256 --max-model-len 8448 -b 1,8,64,256 -c 128 KIND
decode-KIND-8000 bench speed -p 0 7B --max-num-seqs 256 --max-model-len 8448 -b 1 -c 8000 --skip-check KIND
decode-KIND-odd bench speed -p 0 7B --max-num-seqs 256 --max-model-len 8448 -b 3,24,100 -c 128,3000 --skip-check KIND
prefill-KIND bench speed -n 0 7B --max-model-len 8448 -p 128,512,2048,8192 --repeats 7 --skip-check KIND
compare-7b-KIND compare 7B KIND
tune-KIND tune --model Qwen2.5-7B KIND
startup-KIND startup.py Qwen2.5-7B KIND
mixture-KIND mixture.py Qwen3-30B-A3B KIND
served-KIND served.py Qwen2.5-7B KIND
decode-llama-3.1-8b-KIND bench speed -p 0 --model Llama-3.1-8B --random-weights --max-model-len 4096 -b 1,8,64 -c 128 KIND
decode-qwen3-4b-KIND bench speed -p 0 --model Qwen3-4B --random-weights --max-model-len 4096 -b 1,8,64 -c 128 KIND
decode-qwen2.5-0.5b-KIND bench speed -p 0 --model Qwen2.5-0.5B --random-weights --max-model-len 4096 -b 1,8,64 -c 128 KIND
decode-smollm2-1.7b-KIND bench speed -p 0 --model SmolLM2-1.7B --random-weights --max-model-len 4096 -b 1,8,64 -c 128 KIND
steps-int4-qwen2.5-7b steps.py Qwen2.5-7B --quantize int4
steps-int4-llama-3.1-8b steps.py Llama-3.1-8B --quantize int4
steps-int4-qwen3-4b steps.py Qwen3-4B --quantize int4
steps-int4-qwen3-30b-a3b steps.py Qwen3-30B-A3B --quantize int4
steps-fp8-qwen3-30b-a3b steps.py Qwen3-30B-A3B --quantize fp8
steps-fp8-qwen3.5-35b-a3b steps.py Qwen3.5-35B-A3B --quantize fp8
steps-fp8-blocks steps.py Qwen2.5-7B --stored fp8-blocks
steps-fp8-channels steps.py Qwen2.5-7B --stored fp8-channels
steps-fp8-odd-tiles steps.py Qwen2.5-7B --stored fp8-blocks --set hidden_size=3456 intermediate_size=18816 head_dim=128
steps-fp8-odd-widths steps.py Qwen2.5-7B --stored fp8-blocks --set hidden_size=3472 intermediate_size=18720 head_dim=128
chunking-8448 bench speed -n 0 7B --max-model-len 8448 -p 8192 --beside 32 --repeats 3 --skip-check --max-num-batched-tokens 8448
chunking-2048 bench speed -n 0 7B --max-model-len 8448 -p 8192 --beside 32 --repeats 3 --skip-check --max-num-batched-tokens 2048
chunking-512 bench speed -n 0 7B --max-model-len 8448 -p 8192 --beside 32 --repeats 3 --skip-check --max-num-batched-tokens 512
mixture-odd-bf16 mixture.py Qwen3-30B-A3B --set num_experts=120 moe_intermediate_size=752
mixture-fp8-blocks mixture.py Qwen3-30B-A3B --stored fp8-blocks
patch-7b-compiled bench patch 7B --compile -p 2048 -b 1,8 --variants 'minirt,minirt fp8'
patch-7b bench patch 7B --no-compile -p 128,2048,8192 -b 1,8
trace gpu_trace.py Qwen2.5-7B
compare-embedded compare --dtype bfloat16 -b 3
compare-smollm2 compare --model SmolLM2-135M-Instruct --dtype bfloat16 -b 3
kernels-rows bench kernels embedding *norm norm_residual rms_norm_quantize quantize *rope_kv_write* sample_* --model Qwen2.5-7B
kernels-attention bench kernels attention_* --model Qwen2.5-7B
kernels-linears bench kernels LINEARS --model Qwen2.5-7B
kernels-mlp bench kernels mlp* --model Qwen2.5-7B
kernels-experts bench kernels experts* --model Qwen3-30B-A3B
kernels-gated-delta bench kernels gated_delta_* --model Qwen3.5-27B
kernels-gemm bench kernels gemm_* --model Qwen2.5-7B --model Llama-3.1-8B --no-compile
kernels-others bench kernels LINEARS OTHERS -t 1,3,24,100 --no-compile
kernels-others-attention bench kernels attention_decode* OTHERS -t 1,3,24,100 -c 128,3000 --no-compile
"""
_WORDS = {
    "7B": "--model Qwen2.5-7B --random-weights",
    "LINEARS": "qkv* o o.fp8 o.fp8_blocks o.int4 gate_up* down* lm_head*",
    # Models with other shapes than the one to which the kernels' rules were fitted.
    "OTHERS": "--model Qwen2.5-7B --model Llama-3.1-8B --model Qwen3-4B --model Qwen2.5-0.5B --model SmolLM2-1.7B",
}


def _runs() -> dict[str, list[str]]:
    """The arguments by name of the result."""
    runs = {}
    for line in _RUNS.split("\n")[1:-1]:
        for kind, flag in (("bf16", ""), ("fp8", "--fp8")) if "KIND" in line else (("", ""),):
            name, _, text = line.partition(" ")
            words = [_WORDS.get(word, flag if word == "KIND" else word) for word in text.split(" ")]
            runs[name.replace("KIND", kind)] = shlex.split(" ".join(words))
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
        raise MinirtError("expected a folder to write to", found="".join(words[:1]) or "none", hint="collect.py FOLDER [NAME …]")
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
