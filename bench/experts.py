"""Which experts the steps of a run use: in a mixture, a step reads only the experts that its tokens choose."""

import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minirt.bench.measure import random_prompts
from minirt.bench.summary import percentile
from minirt.generator import Generator
from minirt.layers.base import Layer
from minirt.layers.moe import expected_experts
from minirt.modeling.config import ModelConfig
from minirt.sampling_params import SamplingParams

_STEPS = 8  # decode steps that are observed


class ExpertUse:
    """Collects how many rows used each expert, from every mixture layer of the steps with a certain number of rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._counts: dict[str, list[Tensor]] = {}  # by layer, a tensor [E] for each step

    def note(self, layer: Layer, x: Tensor) -> None:
        """Note the experts that the rows of x, the layer's input, use. Other numbers of rows are not noted."""
        counts = layer.expert_counts(x) if x.shape[0] == self.rows else None
        if counts is not None:
            self._counts.setdefault(layer.name, []).append(counts)

    def touched(self) -> dict[str, float]:
        """Each layer's mean number of distinct experts in a step."""
        return {name: statistics.fmean(int((own > 0).sum()) for own in steps) for name, steps in self._counts.items()}

    def summary(self, expected: float) -> dict[str, Any]:
        """Distinct experts for each layer and step: mean, least and most; and how evenly the layers use their experts.

        Args:
            expected: the number of distinct experts if all are equally likely.
        Returns:
            with `share`: p10, p50, p90 and the largest of the rows of an expert over all steps, divided by an expert's mean.
        """
        each = [int((own > 0).sum()) for steps in self._counts.values() for own in steps]
        totals = [torch.stack(steps).sum(0).double() for steps in self._counts.values()]
        shares = [share for total in totals for share in (total / total.mean()).tolist()]
        return {
            "experts": len(totals[0]), "touched": statistics.fmean(each), "expected": expected, "least": min(each),
            "most": max(each), "share": {f"p{p}": percentile(shares, p) for p in (10, 50, 90)} | {"max": max(shares)},
        }  # fmt: skip


def expected(config: ModelConfig, tokens: int) -> float:
    """The expected number of distinct experts of a layer in a step of so many tokens, if all are equally likely."""
    moe = config.moe
    return 0.0 if moe is None else expected_experts(moe.num_experts, moe.experts_per_token, tokens)


def observe(generator: Generator, rows: int, run: Callable[[], Any]) -> ExpertUse | None:
    """Observe the steps of `rows` tokens in `run()`, which CUDA graphs do not replay meanwhile. None: the model has no mixtures.

    Observing takes time, so nothing of `run` may be timed.
    """
    if generator.config.moe is None:
        return None
    use = ExpertUse(rows)
    with generator.observing(use.note):
        run()
    return use


def in_decode(generator: Generator, batch_size: int, context_len: int, seed: int) -> ExpertUse | None:
    """The experts used by decode steps like those that `bench decode` measures: random prompts, then greedy tokens."""
    prompts = random_prompts(random.Random(seed), [context_len] * batch_size, generator.config.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=_STEPS + 1, ignore_eos=True, repetition_penalty=1.0)
    return observe(generator, batch_size, lambda: generator.generate(prompts, [params] * batch_size))


def in_prompt(generator: Generator, length: int, seed: int) -> ExpertUse | None:
    """The experts used by a random prompt, if it is computed in one step. Its last layer has a single row and is left out."""
    prompts = random_prompts(random.Random(seed), [length], generator.config.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, repetition_penalty=1.0)
    if length > generator.max_num_batched_tokens:
        return None
    return observe(generator, length, lambda: generator.generate(prompts, [params]))
