"""Tests whether models run with default options on a GPU with little free memory. Another process holds the rest.

python bench/tools/memory_cases.py [--cases 23.5:Qwen2.5-7B:bf16 …] [--kv-cache-dtypes auto fp8]

Random weights; prints a line of JSON for each case.

A case is GB free:model:weights, where weights are bf16 or fp8. Each runs twice: with KV pages in the model's dtype and in FP8.
The workloads are one prompt of 8,000 tokens, three of 16,000, 64 of 500 with top-p, and the logits of 2,000 tokens, each cut to
the model's context. `least_free` is the lowest amount of free memory during the run, as a share of the free memory at the start.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

CASES = ("23.5:Qwen2.5-7B:bf16", "23.5:Qwen2.5-7B:fp8", "15.5:Qwen2.5-7B:fp8", "15.5:Qwen2.5-7B:bf16", "11.5:Qwen2.5-7B:fp8",
         "11.5:Qwen3-4B:bf16")  # fmt: skip
GB = 10**9
POLL_S = 0.005


def hold(free_gb: float) -> None:
    """Allocate until `free_gb` GB are free, print a line, and keep the memory until stdin is closed."""
    torch.cuda.init()
    kept = []
    while (over := torch.cuda.mem_get_info()[0] - int(free_gb * GB)) > 32 << 20:
        kept.append(torch.empty(min(over, 4 << 30), dtype=torch.uint8, device="cuda"))
    print("held", flush=True)
    sys.stdin.read()
    del kept


class Watch:
    """Context that records the lowest amount of free memory, in bytes."""

    def __enter__(self) -> "Watch":
        self.start = self.least = torch.cuda.mem_get_info()[0]
        self._open, self._thread = True, threading.Thread(target=self._poll, daemon=True)
        self._thread.start()
        return self

    def _poll(self) -> None:
        while self._open:
            self.least = min(self.least, torch.cuda.mem_get_info()[0])
            time.sleep(POLL_S)

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._thread.join()


def run(model: str, weights: str, kv_cache_dtype: str) -> dict[str, Any]:
    """Load a model and run the workloads. Returns the row of the case."""
    from minirt import Generator, MinirtError, SamplingParams

    row: dict[str, Any] = {"model": model, "weights": weights, "kv_cache_dtype": kv_cache_dtype}
    options: dict[str, Any] = {"quantization": "fp8"} if weights == "fp8" else {}
    with Watch() as watch:
        try:
            generator = Generator.from_pretrained(model, random_weights=True, kv_cache_dtype=kv_cache_dtype, **options)
        except MinirtError as error:
            return row | {"refused": str(error)}
        with generator:
            vocab, longest = generator.config.vocab_size, generator.max_len
            row |= {"pages_gb": generator.kv_cache_bytes / GB, "steps_gb": generator.memory.step / GB, "max_len": longest}
            row["max_num_batched_tokens"] = generator.max_num_batched_tokens
            row["free_when_ready_gb"] = torch.cuda.mem_get_info()[0] / GB

            def prompts(count: int, length: int) -> list[list[int]]:
                length = min(length, longest - 8)
                return [[(i * 104729 + t * 7919) % vocab for t in range(length)] for i in range(count)]

            greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
            drawn = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.95, seed=0, ignore_eos=True)
            workloads: dict[str, Callable[[], Any]] = {
                "1 x 8,000": lambda: generator.generate(prompts(1, 8000), greedy),
                "3 x 16,000": lambda: generator.generate(prompts(3, 16000), greedy),
                "64 x 500, top-p": lambda: generator.generate(prompts(64, 500), drawn),
                "logits of 2,000": lambda: generator.logits(prompts(1, 2000)[0]),
            }
            for name, workload in workloads.items():
                started = time.perf_counter()
                try:
                    workload()
                    row[name] = round(time.perf_counter() - started, 3)
                except MinirtError as error:
                    row[name] = str(error)
    return row | {"free_at_start_gb": watch.start / GB, "least_free": watch.least / watch.start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--kv-cache-dtypes", nargs="+", default=("auto", "fp8"))
    parser.add_argument("--hold", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold is not None:
        hold(options.hold)
        return
    if options.run is not None:
        print(json.dumps(run(*options.run)), flush=True)
        return
    for case in options.cases:
        free_gb, model, weights = case.split(":")
        holder = subprocess.Popen(
            [sys.executable, __file__, "--hold", free_gb], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if holder.stdout is None or not holder.stdout.readline():
            sys.exit("the memory cannot be held")
        for pages in options.kv_cache_dtypes:
            command = [sys.executable, __file__, "--run", model, weights, pages]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = done.stdout.splitlines()
            row = json.loads(lines[-1]) if lines else {"failed": done.stderr[-2000:]}
            print(json.dumps({"free_gb": float(free_gb)} | row), flush=True)
        holder.communicate()


if __name__ == "__main__":
    main()
