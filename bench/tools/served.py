"""`minirt serve` beside the same engine without a server: `python bench/tools/served.py PRESET [--fp8]`. Prints JSON.

Random weights, and a tokenizer with as many made-up tokens as the model's, because detokenizing costs the server time. Measured:

- the output tokens per second of 1,000 requests with 256 in flight, offline (`minirt bench throughput`) and streamed;
- the time between the tokens of a single request, from `Generator.stream` and streamed;
- the time to the first token of single requests, and of requests that arrive at half the rate of the first measurement.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from minirt.bench.tools.results import print_record
from minirt.bench.tools.stored_format import raw_config

PORT = 8123
LENGTHS = ["--input-len-range", "32:512", "--output-len-range", "32:256"]
IN_FLIGHT, REQUESTS = "256", "1000"
ONE_PROMPT, ONE_OUTPUT, ONE_REQUESTS = 200, 200, 6


def write_model(folder: Path, preset: str) -> None:
    """Write the preset's config.json, and a tokenizer of its size.

    Its made-up tokens have lengths and common beginnings like those of real tokenizers: with 49,152 tokens, SmolLM2's have 2.0
    different beginnings a token and a median of 6 letters, these 2.2 and 7. What a grammar's mask costs depends on that.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    raw = raw_config(preset)
    draw, letters = random.Random(0), "etaoinshrdlucmfwypvbgkqjxz"
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words: dict[int, list[str]] = {0: [""]}  # by length
    while len(vocab) < raw["vocab_size"] - 1:  # a token without a text would be streamed as nothing, and look like a failure
        length = min(16, max(1, round(draw.lognormvariate(1.85, 0.5))))
        start = draw.choice(words.get(max(0, length - draw.choice((2, 3))), [""]))
        word = start + "".join(draw.choices(letters, k=length - len(start)))
        words.setdefault(length, []).append(word)
        for space in ("Ġ", "")[: raw["vocab_size"] - 1 - len(vocab)]:
            vocab.setdefault(space + word, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}), encoding="utf-8")
    end = tokenizer.token_to_id("<|endoftext|>")
    (folder / "config.json").write_text(json.dumps(raw | {"eos_token_id": end}), encoding="utf-8")


def minirt(*words: str) -> dict[str, Any]:
    """Run a benchmark command and return its first result."""
    command = [sys.executable, "-m", "minirt", "bench", *words, "-o", "json", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()[-1000:]}")
    return json.loads(done.stdout)["results"][0]


def load(*words: str) -> dict[str, Any]:
    """Measure the running server."""
    return minirt("serve", "--base-url", f"http://127.0.0.1:{PORT}", *words)


def stream_alone(model: list[str]) -> list[float]:
    """Seconds between the tokens of `Generator.stream`, in this process."""
    from minirt import Generator, SamplingParams

    gaps: list[float] = []
    draw = random.Random(0)
    quantization = "fp8" if "--fp8" in model else None
    load: dict[str, Any] = {"quantization": quantization, "max_num_seqs": 256, "warm_up": "full"}
    with Generator.from_pretrained(model[1], random_weights=True, **load) as generator:
        for _ in range(ONE_REQUESTS):
            prompt = [draw.randrange(1000, generator.config.vocab_size - 1000) for _ in range(ONE_PROMPT)]
            last = None
            for _ in generator.stream(prompt, SamplingParams(max_tokens=ONE_OUTPUT, temperature=0.0, ignore_eos=True)):
                now = time.perf_counter()
                gaps += [] if last is None else [now - last]
                last = now
    return gaps


def wait_until_ready(server: subprocess.Popen, port: int, pause: float = 0.1) -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60):
                return
        except (urllib.error.URLError, OSError):  # it does not listen yet, or answers 503
            time.sleep(pause)
    sys.exit(f"the server ended with exit code {server.returncode}")


def served(model: list[str], processes: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "minirt", "serve", *model, "--max-num-seqs", IN_FLIGHT, "--port", str(PORT), "-q"]
    one = ["--max-concurrency", "1", "--input-len-range"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(server, PORT)
        loads = {"busy": load("-n", REQUESTS, *LENGTHS, "--max-concurrency", IN_FLIGHT, "--processes", processes)}
        alone = [*one, f"{ONE_PROMPT}:{ONE_PROMPT}", "--output-len-range", f"{ONE_OUTPUT}:{ONE_OUTPUT}"]
        loads["one"] = load("-n", str(ONE_REQUESTS), *alone)
        loads["unloaded"] = load("-n", "40", *one, "32:512", "--output-len-range", "8:8")
        half = f"{loads['busy']['request_throughput'] / 2:.2f}"
        loads["half"] = load("-n", "300", *LENGTHS, "--request-rate", half, "--processes", processes)
    finally:
        server.terminate()
        code = server.wait()
    if code:
        sys.exit(f"the server ended with exit code {code}")
    return loads


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", metavar="PRESET")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--processes", default="6", help="processes that send requests")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), options.model)
        model = ["--model", name, "--random-weights", *(["--fp8"] if options.fp8 else [])]
        engine = [*model, "--max-num-seqs", IN_FLIGHT, "--skip-check", "--repeats", "1"]
        offline = minirt("throughput", *engine, "-n", REQUESTS, *LENGTHS)
        loads = served(model, options.processes)
        gaps = stream_alone(model)
    alone = {"median_itl_ms": statistics.median(gaps) * 1e3}
    results = [{"offline": offline, "stream": alone} | loads]
    print_record("served", model=options.model, quantization="fp8" if options.fp8 else None, results=results)


if __name__ == "__main__":
    main()
