"""Tokens a second with drafts and without: `python bench/tools/speculation.py MODEL [--fp8] --synthetic RATE`.

`--method mtp`: drafts by the model's layers of multi-token prediction (3 in a step) in place of n-grams. With `--synthetic`, they
take their time, and are accepted with the probability. At 0.77, a step yields 2.8 tokens on average. `drafting_share` is the part
of the GPU's time in which they are made. With `--adaptive`, the engine chooses how many are verified.

`--synthetic RATE`: random weights, a preset. Each draft is accepted with this probability, whatever the sampler drew (vLLM's
`synthetic_acceptance_rates`). A step does all of its work, so the figures say how fast steps are, not how good drafts are. At
0.7415, a step with 4 drafts yields 3 tokens on average. The case `never` is n-gram matching where nothing matches, at
temperature 1.

`minirt bench speculate` measures how often drafts of real weights are right, as with `--chat --prompts
bench/tools/speculation_prompts.jsonl`.

Prints JSON. Plain decoding and drafts take turns: the median of all pairs, with a 95% confidence interval. With `--alone`, for
models of which the GPU holds one only, plain decoding runs first.
"""

import argparse
import gc
import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minirt import Generator, SamplingParams, SpeculativeOptions
from minirt.bench.tools.paired import interval
from minirt.bench.tools.results import print_record
from minirt.kernels.step.table import MATCHED, NEXT_TOKENS, NUM_NEXT, Columns, Rows
from minirt.step.batch import Batch

BATCHES, PROMPT, TOKENS, PAIRS, DRAFTS = (1, 8, 32), 100, 256, 8, 4


def force(generator: Generator, rate: float) -> None:
    """From now on, draws of this generator's engine are drafts with the probability `rate`, and other tokens otherwise."""
    runner: Any = generator._engine.engine._runner
    send, forward = runner.buffers.send, runner._forward  # no CUDA graph draws
    runner.buffers.send = lambda plan, **options: send(plan, **options | {"greedy": False})
    runner._forward = lambda plan: forward(plan)._replace(committed=False)
    sampler = runner.sampler
    draw = sampler.draw

    def forced(logits: Tensor, row_maxima: Any, view: Any, plan: Any, proposed: Tensor | None = None, process: Any = None) -> Any:
        drawn, packed = draw(logits, row_maxima, view, plan, proposed, process)
        if proposed is not None and plan.sequences.total_draws > len(plan.sequences.slots):
            counts = plan.sequences.num_draws
            slots = np.repeat(plan.sequences.slots, counts)
            place = np.arange(plan.sequences.total_draws) - np.repeat(counts.cumsum() - counts, counts)  # of a row's draft
            at = torch.from_numpy(np.stack((slots, place.clip(max=proposed.shape[1] - 1))).astype(np.int64))
            if drawn.is_cuda:  # from pageable memory, the host would wait for the step
                at = at.pin_memory().to(drawn.device, non_blocking=True)
            draft = proposed[at[0], at[1]]
            right = torch.rand(len(drawn), device=drawn.device) < rate
            drawn.copy_(torch.where(right, draft, (draft + 1) % logits.shape[1]))
        return drawn, packed

    sampler.draw = forced  # type: ignore[method-assign]


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


class Drafting:
    """The GPU's time of proposing drafts, and the time from one proposal to the next, from events around each proposal."""

    def __init__(self, generator: Generator) -> None:
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        runner = generator._engine.engine._runner
        propose = runner._propose

        def observed(*step: Any) -> None:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            propose(*step)
            events[1].record()
            self.events.append(events)

        if generator.device.type == "cuda":
            runner._propose = observed  # type: ignore[method-assign, assignment]

    def share(self) -> float | None:
        """Of drafting in a step: the median of all steps since the last call; None on a CPU."""
        if not self.events:
            return None
        torch.cuda.synchronize()
        shares = [events[0].elapsed_time(events[1]) / events[0].elapsed_time(after[0]) for events, after in pairwise(self.events)]
        self.events.clear()
        return statistics.median(shares)


def timed(generator: Generator, prompts: Sequence[Any], tokens: int, temperature: float) -> tuple[float, list[Any]]:
    """Seconds of a token, from when all prompts have their first token to the last token, and the completions."""
    params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True)
    completions = generator.generate(list(prompts), params)
    times = [completion.token_times_s for completion in completions]
    first, last = max(stamps[0] for stamps in times), max(stamps[-1] for stamps in times)
    return (last - first) / sum(time > first for stamps in times for time in stamps), completions


def synthetic(
    model: str, quantization: str | None, rate: float, method: str, adaptive: bool, alone: bool
) -> list[dict[str, Any]]:
    kinds: dict[str, Any] = {"plain": None}
    if method == "mtp":  # its drafts take their time, and are right with the probability
        kinds["synthetic"] = SpeculativeOptions(method="mtp", adaptive=adaptive)
    else:
        kinds |= {"never": SpeculativeOptions(), "synthetic": Synthetic(DRAFTS)}
    # Greedy text of random weights repeats itself, so what never matches is drawn at temperature 1.
    cases = {"plain": {"plain": 0.0}, "synthetic": {"synthetic": 0.0}, "never": {"never": 1.0}}
    if "never" in kinds:
        cases["plain"]["sampled"] = 1.0
    options: dict[str, Any] = {"random_weights": True, "quantization": quantization, "max_model_len": PROMPT + TOKENS}
    options |= {"max_num_seqs": max(BATCHES), "kv_cache_memory": "2GiB", "warm_up": "full"}
    runs, shares = defaultdict[tuple[int, str], list[Any]](list), dict[int, float | None]()  # by batch and case; by batch
    for names in [[name] for name in kinds] if alone else [list(kinds)]:
        generators = {name: Generator.from_pretrained(model, speculative=kinds[name], **options) for name in names}
        vocab = generators[names[0]].config.vocab_size - 1000
        if "synthetic" in generators:
            force(generators["synthetic"], rate)
            drafting = Drafting(generators["synthetic"])
        for batch, pair in product(BATCHES, range(PAIRS + 1)):
            serial = 1000 * batch + pair
            for name in names[:: 1 if pair % 2 else -1]:
                for case, temperature in cases[name].items():
                    prompts = [[(serial * 7919 + i * 104729 + t * 31) % vocab for t in range(PROMPT)] for i in range(batch)]
                    runs[batch, case].append(timed(generators[name], prompts, TOKENS, temperature))
            if "synthetic" in generators and pair == PAIRS:
                shares[batch] = drafting.share()
        for name in names:
            generators.pop(name).close()
        gc.collect()
        torch.cuda.empty_cache()
    rows = []
    for batch in BATCHES:
        for name, beside in (("synthetic", "plain"), ("never", "sampled"))[: len(kinds) - 1]:
            drafts, plain = ([seconds for seconds, _ in runs[batch, case][1:]] for case in (name, beside))  # after a warm-up
            ratios = [b / a for a, b in zip(drafts, plain, strict=True)]
            low, high = interval(ratios)
            row = {"batch_size": batch, "case": name, "speedup": statistics.median(ratios), "low": low, "high": high}
            row |= {"plain_tokens_per_s": 1 / statistics.median(plain), "tokens_per_s": 1 / statistics.median(drafts)}
            done = [one for _, completions in runs[batch, name][1:] for one in completions]
            row["acceptance_length"] = statistics.mean(one.acceptance_length for one in done) if name == "synthetic" else 1.0
            if name == "synthetic":
                steps = (one.num_draft_tokens * one.acceptance_length / len(one.token_ids) for one in done)
                row |= {"drafts_a_step": statistics.mean(steps), "drafting_share": shares[batch]}
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--method", choices=("ngram", "mtp"), default="ngram")
    parser.add_argument("--adaptive", action="store_true", help="with --method mtp")
    parser.add_argument("--alone", action="store_true", help="one after the other, if two do not fit")
    parser.add_argument("--synthetic", type=float, required=True, metavar="RATE")
    options = parser.parse_args()
    quantization = "fp8" if options.fp8 else None
    if options.adaptive and options.method != "mtp":
        parser.error("--adaptive is for --method mtp")
    rows = synthetic(options.model, quantization, options.synthetic, options.method, options.adaptive, options.alone)
    about = {"model": options.model, "quantization": quantization, "method": options.method, "adaptive": options.adaptive}
    print_record("speculation", **about, results=rows)


if __name__ == "__main__":
    main()
