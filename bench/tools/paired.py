"""Compares the speed of two installed builds: decode steps and prompts, in alternation on one GPU.

python bench/tools/paired.py OLD NEW [--model Qwen2.5-7B] [--quantize int4] [--pairs 12] [--repeats 5]   random weights; JSON

OLD and NEW are folders made by `pip install --target FOLDER`. Each build runs in its own process, and both keep their model on
the GPU. They measure in turns, and each goes first in every second pair. A result is NEW's time divided by OLD's: the median of
all pairs, with a 95% confidence interval of the median from order statistics. The ratios of each pair go to stderr, so that a run
that is cut leaves something.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BATCHES = ((1, 128), (8, 128), (64, 128), (256, 128), (1, 8000))  # (sequences, context)
PROMPTS = (128, 512, 2048, 8192)  # tokens
STEPS = 128
KV_BYTES = 4 << 30


def child(model: str, quantization: str | None, repeats: int) -> None:
    """Load a model, then measure once for each line on stdin and print a line of JSON."""
    import time

    from minirt import Generator, LoadOptions, SamplingParams

    options: dict[str, Any] = {"quantization": quantization, "kv_cache_memory": KV_BYTES}
    options |= {"warm_up": "full"} if hasattr(LoadOptions, "warm_up") else {}  # an older build
    generator = Generator.from_pretrained(model, random_weights=True, **options)
    vocab, serial = generator.config.vocab_size, 0

    def prompts(count: int, length: int) -> list[list[int]]:
        nonlocal serial
        serial += 1  # new tokens in each call
        return [[(serial * 7919 + i * 104729 + t * 31) % vocab for t in range(length)] for i in range(count)]

    def seconds(count: int, length: int, tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        asked, started = prompts(count, length), time.perf_counter()
        generator.generate(asked, params)
        return time.perf_counter() - started

    def measure() -> dict[str, float]:
        seconds_of = {}
        for count, context in BATCHES:
            pairs = [(seconds(count, context, 8), seconds(count, context, 8 + STEPS)) for _ in range(repeats)]
            seconds_of[f"decode step, batch {count} @ {context}"] = statistics.median(b - a for a, b in pairs) / STEPS
        for length in PROMPTS:
            seconds_of[f"first token, {length} tokens"] = statistics.median(seconds(1, length, 1) for _ in range(12 * repeats))
        return seconds_of

    measure()
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure()), flush=True)


def start(site: str, model: str, quantization: str | None, repeats: int) -> subprocess.Popen:
    command = [sys.executable, __file__, site, site, "--model", model, "--repeats", str(repeats), "--child"]
    command += ["--quantize", quantization] if quantization else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask(process: subprocess.Popen) -> dict[str, float]:
    process.stdin.write("\n")  # type: ignore[union-attr]
    process.stdin.flush()  # type: ignore[union-attr]
    return answer(process)


def answer(process: subprocess.Popen) -> Any:
    line = process.stdout.readline()  # type: ignore[union-attr]
    if not line:
        sys.exit(f"a build ended with exit code {process.wait()}")
    return json.loads(line)


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return a confidence interval of the median of at least 95%, from order statistics (Conover 1999, section 3.2).

    Needs at least six values.
    """
    n, ordered = len(ratios), sorted(ratios)
    outside, low = 0.0, 0
    while outside + math.comb(n, low) / 2**n <= 0.025:
        outside += math.comb(n, low) / 2**n
        low += 1
    return ordered[low - 1], ordered[n - low]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--model", default="Qwen2.5-7B")
    parser.add_argument("--quantize", choices=("fp8", "int4", "mxfp4"), dest="quantization")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5, help="decode runs in each measurement; prompts take 12 times as many")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.model, options.quantization, options.repeats)
        return
    if options.pairs < 6:
        parser.error(f"--pairs: a 95% confidence interval needs at least 6 pairs; found {options.pairs}")
    sites = {name: str(Path(getattr(options, name)).resolve()) for name in ("old", "new")}
    builds = {name: start(site, options.model, options.quantization, options.repeats) for name, site in sites.items()}
    for process in builds.values():
        answer(process)
    runs: list[dict[str, dict[str, float]]] = []
    for pair in range(options.pairs):
        order = ("old", "new") if pair % 2 == 0 else ("new", "old")
        runs.append({name: ask(builds[name]) for name in order})
        old, new = runs[-1]["old"], runs[-1]["new"]
        shown = {name: round(new[name] / old[name], 4) for name in old}
        print(f"pair {pair + 1} of {options.pairs}: {json.dumps(shown)}", file=sys.stderr, flush=True)
    for process in builds.values():
        process.stdin.close()  # type: ignore[union-attr]
    rows = []
    for name in runs[0]["old"]:
        ratios = [run["new"][name] / run["old"][name] for run in runs]
        low, high = interval(ratios)
        medians = {build: statistics.median(run[build][name] for run in runs) for build in builds}
        ratio = {"ratio": statistics.median(ratios), "low": low, "high": high}
        rows.append({"what": name, "old_s": medians["old"], "new_s": medians["new"], **ratio})
    about = {"model": options.model, "quantization": options.quantization, "pairs": options.pairs}
    print(json.dumps(about | {"results": rows}, indent=1))


if __name__ == "__main__":
    main()
