"""Tokens a second with drafts and without: `python bench/tools/speculation.py MODEL [--fp8] [--synthetic RATE | --text FILE …]`.

`--method mtp`: drafts by the model's layers of multi-token prediction (3 in a step) in place of n-grams. With `--synthetic`, they
take their time, and are accepted with the probability. At 0.77, a step yields 2.8 tokens on average.

`--synthetic RATE`: random weights, a preset. Each draft is accepted with this probability, whatever the sampler drew (vLLM's
`synthetic_acceptance_rates`). A step does all of its work, so the figures say how fast steps are, not how good drafts are. At
0.7415, a step with 4 drafts yields 3 tokens on average. The case `never` is n-gram matching where nothing matches, at
temperature 1.

`--text FILE`: real weights, a folder. A JSON list of chat prompts (speculation_prompts.json); n-gram matching beside plain
decoding, greedy. Both yield the same text in fp32. The acceptance is that of these texts.

Prints JSON. Plain decoding and drafts take turns: the median of all pairs, with a 95% confidence interval.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minirt import Generator, SamplingParams, SpeculativeOptions
from minirt.bench.report import machine
from minirt.bench.tools.paired import interval
from minirt.kernels.step.table import MATCHED, NEXT_TOKENS, NUM_NEXT, Columns, Rows
from minirt.step.batch import Batch

BATCHES, PROMPT, TOKENS, PAIRS, DRAFTS = (1, 8, 32), 100, 256, 8, 4


def force(generator: Generator, rate: float) -> None:
    """From now on, draws of this generator's engine are drafts with the probability `rate`, and other tokens otherwise."""
    runner = generator._engine.engine._runner
    runner._draws_in_graphs = False
    stages = runner._stages
    draw = stages.draw

    def forced(logits: Tensor, row_maxima: Any, step: Any, plan: Any, proposed: Tensor | None = None) -> Any:
        drawn, packed = draw(logits, row_maxima, step, plan, proposed)
        if proposed is not None and plan.num_draws > len(plan.sequences):
            counts = plan.sequences.num_draws
            slots = np.repeat(plan.sequences.slots, counts)
            place = np.arange(plan.num_draws) - np.repeat(counts.cumsum() - counts, counts)  # of a row's draft
            at = torch.from_numpy(np.stack((slots, place.clip(max=proposed.shape[1] - 1))).astype(np.int64))
            if drawn.is_cuda:  # from pageable memory, the host would wait for the step
                at = at.pin_memory().to(drawn.device, non_blocking=True)
            draft = proposed[at[0], at[1]]
            right = torch.rand(len(drawn), device=drawn.device) < rate
            drawn.copy_(torch.where(right, draft, (draft + 1) % logits.shape[1]))
        return drawn, packed

    stages.draw = forced  # type: ignore[method-assign]


class Synthetic:
    """Proposes the next token, repeated."""

    needs_history, adaptive = False, False

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts

    def propose(self, table: Tensor, columns: Columns, rows: Rows, batch: Batch, wanted: int) -> None:
        slots = rows.slots.clamp(min=0).long()
        going_on = (table[slots, NUM_NEXT] > 0) & (rows.slots >= 0)
        drafts = NEXT_TOKENS + 1 + torch.arange(columns.drafts, device=table.device)
        table[slots.unsqueeze(1), drafts] = table[slots, NEXT_TOKENS].unsqueeze(1).expand(-1, columns.drafts)
        table[slots, NUM_NEXT] = torch.where(going_on, 1 + columns.drafts, table[slots, NUM_NEXT])
        table[slots, MATCHED] = going_on.int()


def timed(generator: Generator, prompts: Sequence[Any], tokens: int, temperature: float) -> tuple[float, list[Any]]:
    """Seconds between the first tokens and the last, of all prompts together, and the completions."""
    params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True)
    found = generator.generate(list(prompts), params)
    first = max(own.token_times_s[0] for own in found)
    last = max(own.token_times_s[-1] for own in found)
    return last - first, found


def synthetic(
    model: str, quantization: str | None, rate: float, method: str
) -> tuple[torch.device, list[dict[str, Any]]]:
    kinds: dict[str, Any] = {"plain": None}
    if method == "mtp":  # its drafts take their time, and are right with the probability
        kinds["synthetic"] = SpeculativeOptions(method="mtp", adaptive=False)
    else:
        kinds |= {"never": SpeculativeOptions(), "synthetic": Synthetic(DRAFTS)}
    times: dict[tuple[int, str], list[float]] = {}
    lengths: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    options: dict[str, Any] = {"random_weights": True, "quantization": quantization, "max_model_len": PROMPT + TOKENS}
    options |= {"max_num_seqs": max(BATCHES), "kv_cache_memory": "2GiB"}
    generators = {name: Generator.from_pretrained(model, speculative=own, **options) for name, own in kinds.items()}
    force(generators["synthetic"], rate)
    # Greedy text of random weights repeats itself, so what never matches is drawn at temperature 1.
    cases = {"plain": ("plain", 0.0), "synthetic": ("synthetic", 0.0)}
    cases |= {"sampled": ("plain", 1.0), "never": ("never", 1.0)} if "never" in kinds else {}
    vocab, serial = generators["plain"].config.vocab_size - 1000, 0
    for batch in BATCHES:
        for pair in range(-1, PAIRS):
            for name, (kind, temperature) in list(cases.items())[:: 1 if pair % 2 else -1]:
                serial += 1
                prompts = [[(serial * 7919 + i * 104729 + t * 31) % vocab for t in range(PROMPT)] for i in range(batch)]
                seconds, found = timed(generators[kind], prompts, TOKENS, temperature)
                if pair >= 0:  # the first turn is a warm-up
                    tokens = sum(len(own.token_ids) - 1 for own in found)
                    times.setdefault((batch, name), []).append(seconds / tokens)
                    if name == "synthetic":
                        lengths[batch] += [own.acceptance_length for own in found]
    rows = []
    for batch in BATCHES:
        for name, beside in (("synthetic", "plain"), ("never", "sampled"))[: len(cases) // 2]:
            ratios = [plain / own for plain, own in zip(times[batch, beside], times[batch, name], strict=True)]
            low, high = interval(ratios)
            row = {"batch_size": batch, "case": name, "speedup": statistics.median(ratios), "low": low, "high": high}
            row |= {"plain_tokens_per_s": 1 / statistics.median(times[batch, beside])}
            row |= {"tokens_per_s": 1 / statistics.median(times[batch, name])}
            row["acceptance_length"] = statistics.mean(lengths[batch]) if name == "synthetic" else 1.0
            rows.append(row)
    return generators["plain"].device, rows


def texts(
    model: str, dtype: str, files: Sequence[Path], max_tokens: int, method: str
) -> tuple[torch.device, list[dict[str, Any]]]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    prompts = [prompt for file in files for prompt in json.loads(file.read_text())]
    kinds: dict[str, Any] = {"plain": None, "drafts": SpeculativeOptions(method=method)}
    generators = {name: Generator.from_pretrained(model, dtype=dtype, speculative=own) for name, own in kinds.items()}
    rows = []
    for number, prompt in enumerate(prompts):
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        found: dict[str, Any] = {}
        for pair in range(2):
            for name in list(kinds)[:: 1 if pair % 2 else -1]:
                found[name] = generators[name].chat([{"role": "user", "content": prompt["content"]}], params)
                own = found[name].token_times_s
                seconds[name].append((own[-1] - own[0]) / max(1, len(own) - 1))
        same, drafts = found["plain"].token_ids == found["drafts"].token_ids, found["drafts"]
        rows.append({
            "prompt": number, "kind": prompt["kind"], "tokens": len(drafts.token_ids), "same_text": same,
            "num_draft_tokens": drafts.num_draft_tokens, "num_accepted_tokens": drafts.num_accepted_tokens,
            "acceptance_length": drafts.acceptance_length,
            "speedup": statistics.median(seconds["plain"]) / statistics.median(seconds["drafts"]),
            "tokens_per_s": 1 / statistics.median(seconds["drafts"]),
        })  # fmt: skip
    return generators["plain"].device, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--method", choices=("ngram", "mtp"), default="ngram")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--synthetic", type=float, metavar="RATE")
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--max-tokens", type=int, default=80, help="of each text")
    options = parser.parse_args()
    quantization = "fp8" if options.fp8 else None
    if (options.synthetic is None) == (options.text is None):
        parser.error("give either --synthetic or --text")
    if options.text:
        device, rows = texts(options.model, options.dtype, options.text, options.max_tokens, options.method)
    else:
        device, rows = synthetic(options.model, quantization, options.synthetic, options.method)
    shared = machine("speculation", device, ["python", "bench/tools/speculation.py", *sys.argv[1:]], None)
    given = {"model": options.model, "quantization": quantization, "method": options.method}
    print(json.dumps(shared | given | {"results": rows}, indent=1))


if __name__ == "__main__":
    main()
