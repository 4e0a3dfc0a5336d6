"""Compare the eager layers with transformers on a CPU, and print JSON: `python tests/tools/compare_transformers.py FOLDER`.

This is not a test, and it asserts no time. One process measures the decode speed of both in turn. Memory and the time to the
first token come from a new process each.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

TOKENS = 64
REPEATS = 5
MEMORY = """
import json, sys
from minirt import Generator, SamplingParams
with Generator.from_pretrained(sys.argv[1], device="cpu", kv_cache_memory=64 << 20) as g:
    c = g.generate(list(range(100, 140)), SamplingParams(max_tokens=32, ignore_eos=True))
    print(json.dumps({
        "peak_mb": c.peak_memory_bytes / 1e6, "weights_mb": g.plan.weight_bytes / 1e6, "cache_mb": g.kv_cache_bytes / 1e6
    }))
"""


def decode_speeds(folder: Path) -> dict:
    """Tokens/s after the first token (medians of interleaved repeats), and whether the tokens agree."""
    import torch
    import transformers

    from minirt import Generator, SamplingParams

    prompt = list(range(100, 140))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])

    def theirs(count: int) -> tuple[float, list[int]]:
        started = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0)
        return time.perf_counter() - started, out[0, len(prompt) :].tolist()

    ours, hf = [], []
    with Generator.from_pretrained(folder, device="cpu", impl="eager", kv_cache_memory=1 << 28) as generator:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0)
        for _ in range(REPEATS + 1):
            completion = generator.generate(prompt, params)
            ours.append(completion.decode_tokens_per_s)
            first, (whole, tokens) = theirs(1)[0], theirs(TOKENS)
            hf.append((TOKENS - 1) / (whole - first))
    mine, other = statistics.median(ours[1:]), statistics.median(hf[1:])
    return {
        "minirt_tokens_per_s": mine, "transformers_tokens_per_s": other, "ratio": mine / other,
        "same_tokens": tokens == completion.token_ids, "torch": torch.__version__, "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def fresh_process(folder: Path) -> dict:
    """Peak memory, and the wall time from the start of the command to its first character."""
    probe = [sys.executable, "-P", "-c", MEMORY, folder]
    memory = json.loads(subprocess.run(probe, capture_output=True, text=True, check=True).stdout)
    arguments = ["generate", "--model", folder, "--quiet", "--max-tokens", "8", "Once upon a time"]
    command = [sys.executable, "-P", "-m", "minirt", *arguments]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.read(1)
        memory["first_token_s_after_process_start"] = time.perf_counter() - started
        process.stdout.read()
    return memory


if __name__ == "__main__":
    target = Path(sys.argv[1])
    print(json.dumps(fresh_process(target) | decode_speeds(target), indent=1))
