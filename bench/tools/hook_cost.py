"""What hooks cost a decode step, on one GPU: `python bench/tools/hook_cost.py MODEL [PAIRS]`, random weights; prints JSON.

One engine has no hooks, the other may capture the stream behind one block and steer there. Both stay on the GPU and run in turns.
A result is the median of the ratios of the times of a step to those without hooks, with a 95% confidence interval of the median.
Then transformers takes the same steps, with a hook there that copies the stream of all sequences to the host.
"""

import statistics
import sys
import time
from typing import Any

import torch

from minirt import Generator, SamplingParams
from minirt.bench.patch import build
from minirt.bench.tools.paired import interval
from minirt.bench.tools.results import print_record
from minirt.hooks.layer import add

BATCH, CONTEXT, STEPS = 64, 128, 128
MODES = {  # what each request of a batch asks for: the first one alone, or all
    "may capture, nobody asks": (), "one captures": ("capture", 1), "all capture": ("capture", BATCH),
    "one is steered": ("steer", 1),
}  # fmt: skip


def main() -> None:
    model, pairs = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 12
    options: dict[str, Any] = {"random_weights": True, "warm_up": "full", "kv_cache_memory": 4 << 30, "prefix_cache": False}
    plain = Generator.from_pretrained(model, **options)
    place = f"layers.{plain.config.num_layers // 2}"
    vector = torch.randn(plain.config.hidden_size, generator=torch.Generator().manual_seed(1))
    hooked = Generator.from_pretrained(model, capture=[place], edits={place: add(vector)}, **options)
    asks: dict[str, Any] = {"capture": [place], "steer": {place: 1.0}}
    serial = 0

    def seconds(generator: Generator, tokens: int, mode: tuple = ()) -> float:
        nonlocal serial
        serial += 1
        vocab = generator.config.vocab_size
        prompts = [[(serial * 7919 + i * 104729 + t * 31) % vocab for t in range(CONTEXT)] for i in range(BATCH)]
        shared: dict[str, Any] = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
        name, count = mode or ("capture", 0)
        params = [SamplingParams(**shared, **({name: asks[name]} if i < count else {})) for i in range(BATCH)]
        started = time.perf_counter()
        generator.generate(prompts, params)
        return time.perf_counter() - started

    def step(generator: Generator, mode: tuple = ()) -> float:
        return (seconds(generator, 8 + STEPS, mode) - seconds(generator, 8, mode)) / STEPS

    step(plain)
    for mode in MODES.values():
        step(hooked, mode)
    rows = []
    for name, mode in MODES.items():
        times = [(step(plain), step(hooked, mode)) for _ in range(pairs)]
        ratios = [b / a for a, b in times]
        low, high = interval(ratios)
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        ratio = {"ratio": statistics.median(ratios), "low": low, "high": high}
        rows.append({"what": name, "plain_s": medians[0], "hooked_s": medians[1], **ratio})
        print(rows[-1], file=sys.stderr, flush=True)
    beside = transformers_step(model, plain.config.num_layers // 2, plain.device)
    print_record("hooks", model=model, results=rows, transformers_step_s=beside)


@torch.inference_mode()
def transformers_step(name: str, layer: int, device: torch.device) -> float:
    """Seconds of a decode step of an eager model of transformers whose states behind a block are copied to the host."""
    model, states = build(name, True, torch.bfloat16, device, 0), list[torch.Tensor]()
    model.model.layers[layer].register_forward_hook(
        lambda module, arguments, output: states.append((output[0] if isinstance(output, tuple) else output).cpu())
    )
    ids = torch.arange(BATCH * CONTEXT, device=device).view(BATCH, CONTEXT)
    done = model(ids, use_cache=True, logits_to_keep=1)
    times = list[float]()
    for _ in range(STEPS):
        started = time.perf_counter()
        done = model(done.logits[:, -1:].argmax(-1), past_key_values=done.past_key_values, use_cache=True)
        times.append(time.perf_counter() - started)
    if len(states) != 1 + STEPS:
        raise AssertionError(f"{len(states)} states")
    return statistics.median(times[8:])


if __name__ == "__main__":
    main()
