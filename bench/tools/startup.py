"""The time from the start of the process to the first token, with an empty and with a warm kernel cache.

python bench/tools/startup.py MODEL [--fp8] [--serve]     random weights, a new process for each start; prints JSON

With --serve, also the time until /health of `minirt serve` is 200, after each of the other starts.

Triton's cache is a temporary folder, empty at the first start. The operating system's file cache is warm.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time

WARM = 3  # starts with a warm cache; their median counts


def start(began: float, model: str, fp8: bool) -> dict[str, float]:
    """Start minirt and return the seconds from `began`, the start of this process, to each stage.

    The stages are the end of imports, of loading and of warm-up, and the first token.
    """
    from minirt import Generator, SamplingParams

    imported = time.time() - began
    quantization = "fp8" if fp8 else None
    with Generator.from_pretrained(model, random_weights=True, quantization=quantization) as generator:
        ready = time.time() - began
        stream = generator.stream_completion([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
        next(stream)
        first = time.time() - began
        stream.close()
        return {"imported_s": imported, "loaded_s": ready - generator.warm_up_time_s, "ready_s": ready, "first_token_s": first}


def child(words: list[str], cache: str) -> dict[str, float]:
    """Run `start` in a new process with the kernel cache in the folder `cache`."""
    command = [sys.executable, __file__, "--child", repr(time.time()), *words]
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()[-1000:]}")
    return json.loads(done.stdout)


def serve(words: list[str], cache: str) -> dict[str, float]:
    """Start `minirt serve`, and return the seconds until /health is 200."""
    from minirt.bench.tools.served import wait_until_ready

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.time()
    command = [sys.executable, "-m", "minirt", "serve", "-q", "--model", words[0], "--random-weights", "--port", str(port)]
    command += ["--fp8"] if "--fp8" in words else []
    server = subprocess.Popen(command, env=os.environ | {"TRITON_CACHE_DIR": cache})
    try:
        wait_until_ready(server, port, 0.01)
        return {"health_s": time.time() - began}
    finally:
        server.terminate()
        server.wait(60)


def both(words: list[str], cache: str) -> dict[str, float]:
    """One start of each kind."""
    return child(words, cache) | (serve(words, cache) if "--serve" in words else {})


def main(words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as cache:
        empty = both(words, cache)
        warm = [both(words, cache) for _ in range(WARM)]
    from minirt.bench.summary import summarize
    from minirt.bench.tools.results import print_record

    kinds = {"empty": [empty], "warm": warm}.items()
    results = [{"caches": kind} | {name: summarize([run[name] for run in runs]) for name in empty} for kind, runs in kinds]
    print_record("startup", model=words[0], quantization="fp8" if "--fp8" in words else None, results=results)


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        print(json.dumps(start(float(sys.argv[2]), sys.argv[3], "--fp8" in sys.argv)))
    else:
        main(sys.argv[1:])
