"""First tokens of prompts whose steps have few or no CUDA graphs: `python bench/tools/long_prompts.py PRESET [--fp8]`.

Random weights, greedy; prints JSON. Beside the time to the first token stands the GPU's own time for a step with the whole
prompt. What is above it is the host's, which launches kernels one by one.
"""

import argparse
import json
import statistics
import sys
from typing import Any

from minirt import Generator, SamplingParams
from minirt.bench.report import machine
from minirt.bench.tools.step_time import step_seconds

PROMPTS, REPEATS, WARM_UP = (3000, 8000), 15, 3


def measure(model: str, **options: Any) -> list[dict[str, Any]]:
    """A row for each of PROMPTS. options: further ones of the load."""
    one, rows = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), []
    sizes = {"max_model_len": max(PROMPTS) + 448, "prefix_cache": False}
    with Generator.from_pretrained(model, random_weights=True, **sizes | options) as generator:
        last = generator.config.vocab_size - 1
        for length in PROMPTS:
            prompts = [[(7919 * i + 31 * t) % last for t in range(length)] for i in range(WARM_UP + REPEATS)]
            times = [generator.generate(prompt, one).time_to_first_token_s for prompt in prompts][WARM_UP:]
            first, gpu = statistics.median(times), step_seconds(generator, 0, length)
            rows.append({"input_len": length, "first_token_s": first, "all": times, "gpu_s": gpu, "of_gpu": first / gpu})
            rows[-1]["warm_up_s"] = generator.warm_up_time_s or None
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", metavar="PRESET")
    parser.add_argument("--fp8", action="store_true")
    options = parser.parse_args()
    from minirt.device import pick_device

    quantization = "fp8" if options.fp8 else None
    rows = measure(options.model, quantization=quantization)
    command = ["python", "bench/tools/long_prompts.py", *sys.argv[1:]]
    record = machine("long-prompts", pick_device("auto"), command, None)
    print(json.dumps(record | {"model": options.model, "quantization": quantization, "results": rows}, indent=1))


if __name__ == "__main__":
    main()
