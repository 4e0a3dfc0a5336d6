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
import json
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
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
    runner: Any = generator._engine.engine._runner
    send, forward = runner._buffers.send, runner._forward  # no CUDA graph draws
    runner._buffers.send = lambda plan, **options: send(plan, **options | {"greedy": False})
    runner._forward = lambda plan: forward(plan)._replace(committed=False)
    stages = runner._stages
    draw = stages.draw

    def forced(logits: Tensor, row_maxima: Any, step: Any, settings: Any, plan: Any, proposed: Tensor | None = None) -> Any:
        drawn, packed = draw(logits, row_maxima, step, settings, plan, proposed)
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


class Timed:
    """Times of a generator's cases. Several generators take turns, so that a turn is a pair with the same turn of the others."""

    def __init__(self, generator: Generator, cases: dict[str, float], synthetic: bool) -> None:
        self.generator, self.cases = generator, cases  # name → temperature
        self.times: dict[tuple[int, str], list[float]] = {}  # (batch, case) → seconds of a token
        self.lengths: dict[int, list[float]] = {}
        self.verified: dict[int, list[float]] = {}  # drafts a step
        self.shares: dict[int, float | None] = {}
        self._drafting = Drafting(generator) if synthetic else None

    def turn(self, batch: int, serial: int) -> None:
        vocab = self.generator.config.vocab_size - 1000
        for name, temperature in self.cases.items():
            prompts = [[(serial * 7919 + i * 104729 + t * 31) % vocab for t in range(PROMPT)] for i in range(batch)]
            seconds, completions = timed(self.generator, prompts, TOKENS, temperature)
            self.times.setdefault((batch, name), []).append(seconds)
            if name == "synthetic":
                self.lengths.setdefault(batch, []).extend(completion.acceptance_length for completion in completions)
                self.verified.setdefault(batch, []).extend(
                    done.num_draft_tokens * done.acceptance_length / len(done.token_ids) for done in completions
                )

    def end(self, batch: int) -> None:
        """After all turns of a batch size."""
        for (size, _), seconds in self.times.items():
            if size == batch:
                del seconds[0]  # a warm-up
        if self._drafting is not None:
            self.shares[batch] = self._drafting.share()


def synthetic(
    model: str, quantization: str | None, rate: float, method: str, adaptive: bool, alone: bool
) -> tuple[torch.device, list[dict[str, Any]]]:
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
    options |= {"max_num_seqs": max(BATCHES), "kv_cache_memory": "2GiB"}
    timed_kinds: dict[str, Timed] = {}
    for names in [[name] for name in kinds] if alone else [list(kinds)]:
        for name in names:
            generator = Generator.from_pretrained(model, speculative=kinds[name], **options)
            if name == "synthetic":
                force(generator, rate)
            timed_kinds[name] = Timed(generator, cases[name], name == "synthetic")
        for batch in BATCHES:
            for pair in range(PAIRS + 1):
                for name in names[:: 1 if pair % 2 else -1]:
                    timed_kinds[name].turn(batch, 1000 * batch + pair)
            for name in names:
                timed_kinds[name].end(batch)
        device = timed_kinds[names[0]].generator.device
        for name in names:
            timed_kinds[name].generator.close()
            del timed_kinds[name].generator
        del generator
        gc.collect()
        torch.cuda.empty_cache()
    times = {case: seconds for kind in timed_kinds.values() for case, seconds in kind.times.items()}
    rows, drafted = [], timed_kinds["synthetic"]
    for batch in BATCHES:
        for name, beside in (("synthetic", "plain"), ("never", "sampled"))[: len(kinds) - 1]:
            ratios = [plain / drafts for plain, drafts in zip(times[batch, beside], times[batch, name], strict=True)]
            low, high = interval(ratios)
            row = {"batch_size": batch, "case": name, "speedup": statistics.median(ratios), "low": low, "high": high}
            row |= {"plain_tokens_per_s": 1 / statistics.median(times[batch, beside])}
            row |= {"tokens_per_s": 1 / statistics.median(times[batch, name])}
            row["acceptance_length"] = statistics.mean(drafted.lengths[batch]) if name == "synthetic" else 1.0
            if name == "synthetic":
                row |= {"drafts_a_step": statistics.mean(drafted.verified[batch]), "drafting_share": drafted.shares[batch]}
            rows.append(row)
    return device, rows


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
    device, rows = synthetic(options.model, quantization, options.synthetic, options.method, options.adaptive, options.alone)
    shared = machine("speculation", device, ["python", "bench/tools/speculation.py", *sys.argv[1:]], None)
    given = {"model": options.model, "quantization": quantization, "method": options.method, "adaptive": options.adaptive}
    print(json.dumps(shared | given | {"results": rows}, indent=1))


if __name__ == "__main__":
    main()
