"""Penalties, biases, masks and schemas beside plain requests on a GPU with little memory: no request fails, no step shrinks.

python tests/tools/small_card.py [PRESET] [--free-gb 11.5] [--streams 64] [--no-fp8]

Other tensors occupy the GPU until `--free-gb` are free, then the preset is loaded with random weights. The same requests run
plain, then twice with every other one asking for something (first to compile grammars), then plain again, each time with a
prompt that fills the largest step at the end. Prints JSON, and ends with code 1 if a check fails. Without a GPU, the embedded
model runs, and nothing is occupied.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

PROMPT, STEPS, LEAST_STEPS = 48, 128, 16
# It never ends within a test.
_ITEM = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}}}
_JSON = {"type": "array", "minItems": 1000, "items": _ITEM | {"required": ["name", "age"], "additionalProperties": False}}
SCHEMAS: list[dict[str, Any]] = [{"json": _JSON}, {"regex": "[a-z ]{2000}"}]


def requests(vocab: int) -> list[dict[str, Any]]:
    """What every other request asks for, in turn."""
    return [
        {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
        {"logit_bias": dict.fromkeys(range(300, min(vocab, 1300)), -1.0)},
        {"allowed_token_ids": list(range(0, vocab, 2))},
        {"bad_words": [f"{chr(97 + i % 26)}{i} word" for i in range(100)]},
        {"repetition_penalty": 1.2, "logprobs": 5, "temperature": 1.0, "top_k": 20, "top_p": 0.9},
        {"min_tokens": 20, "logit_bias": {vocab - 2: 5.0}},
        *({"structured_outputs": schema, "ignore_eos": False} for schema in SCHEMAS),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", metavar="PRESET", nargs="?", default="Qwen2.5-7B")
    parser.add_argument("--free-gb", type=float, default=11.5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--no-fp8", action="store_true")
    options = parser.parse_args()
    import torch

    from minirt import Generator
    from minirt.bench.tools.served import write_model

    started, blocker, settings = time.perf_counter(), None, dict[str, Any](max_num_seqs=options.streams)
    with tempfile.TemporaryDirectory() as folder:
        if torch.cuda.is_available():
            free = torch.cuda.mem_get_info()[0]
            if (excess := free - int(options.free_gb * 1e9)) < 0:
                sys.exit(f"only {free / 1e9:.1f} GB are free")
            blocker = torch.empty(excess, dtype=torch.uint8, device="cuda")
            write_model(Path(folder), options.model)
            settings |= {"model": folder, "random_weights": True, "quantization": None if options.no_fp8 else "fp8"}
        with Generator.from_pretrained(**settings) as generator:
            summary = measure(generator, options.streams)
    if blocker is not None:
        del blocker
    summary["seconds"] = round(time.perf_counter() - started)
    print(json.dumps(summary, indent=1))
    return int(bool(summary["failed"]))


def measure(generator: Any, streams: int) -> dict[str, Any]:
    """The steps of the three runs, and which checks have failed."""
    import torch

    from minirt import SamplingParams
    from minirt.engine.engine import Engine
    from minirt.engine.scheduler import Scheduler

    plan, vocab, sizes, lowered = generator.memory, generator.config.vocab_size, list[int](), list[int]()
    start, limit = Engine._start, Scheduler.limit_tokens

    def counted(self: Engine, work: Any, *rest: Any) -> Any:
        sizes.append(int(work.planned.num_tokens.sum()))
        return start(self, work, *rest)

    def limited(self: Scheduler, most: int) -> None:
        lowered.append(most)
        limit(self, most)

    Engine._start, Scheduler.limit_tokens = counted, limited  # type: ignore[method-assign]
    room = min(plan.pages * 64 // streams - 64, plan.context) - PROMPT
    count = min(STEPS, room)
    if count < LEAST_STEPS:
        sys.exit(f"the KV cache holds {plan.tokens} tokens, which is too few for {streams} streams")
    longest = min(plan.max_num_batched_tokens, plan.context - 1, plan.tokens - 64)
    kinds, failed, runs = requests(vocab), list[str](), dict[str, Any]()
    for name in ("plain", "first with features", "with features", "plain again"):
        own = [kinds[i // 2 % len(kinds)] if i % 2 and "features" in name else {} for i in range(streams)]
        params = [SamplingParams(**{"max_tokens": count, "ignore_eos": True, "temperature": 0.0, "seed": 0, **o}) for o in own]
        offset = len(runs) * 7919  # new prompts in each run
        prompts = [[(offset + i * 104729 + j * 31) % (vocab - 1000) for j in range(PROMPT)] for i in range(streams)]
        sizes.clear()
        results = [result for _, result in sorted(generator.completions(prompts, params), key=lambda pair: pair[0])]
        steps = list(sizes)
        large = [(offset + j * 17) % (vocab - 1000) for j in range(longest)]
        sizes.clear()
        last = generator.generate([large], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))[0]
        reasons = Counter(result.finish_reason for result in results)
        runs[name] = {
            "reasons": reasons, "errors": [str(result.error)[:200] for result in results if result.error][:3],
            "steps": len(steps), "full_steps": steps.count(streams), "largest_step": max(steps),
            "largest_prompt_step": max(sizes),
        }  # fmt: skip
        if set(reasons) - {"length", "stop"} or last.finish_reason != "length":
            failed.append(f"{name}: a request has not ended as it should")
        if [len(result.token_ids) for result in results] != [count] * streams:
            failed.append(f"{name}: a request ended early")
    plain, _, *others = runs.values()
    for run in others:  # matchers are made beside the first steps, so their streams may begin some steps later
        if run["steps"] > 1.5 * plain["steps"] or run["full_steps"] < plain["full_steps"] / 2:
            failed.append("the steps have changed")
    if len({run["largest_prompt_step"] for run in runs.values()}) > 1:
        failed.append("the largest step has changed")
    if lowered:
        failed.append(f"the limit of tokens was lowered to {lowered}")
    memory = {what: size for what, size, _ in plan.rows()} | {"free": plan.free, "budget": plan.budget}
    if torch.cuda.is_available():
        memory |= {"free now": torch.cuda.mem_get_info()[0], "reserved": torch.cuda.memory_reserved()}
    return {
        "failed": failed, "device": str(generator.device), "streams": streams, "tokens_each": count, "runs": runs,
        "max_num_batched_tokens": plan.max_num_batched_tokens, "kv_tokens": plan.tokens, "bytes": memory,
        "preemptions": generator._engine.engine.stats.num_preemptions,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
