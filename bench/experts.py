"""Which experts the steps of a run use: in a mixture, a step reads only the experts that its tokens choose."""

import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, singledispatch
from typing import Any

import torch
from torch import Tensor

from minirt.bench.measure import random_prompts
from minirt.bench.summary import named_percentiles
from minirt.engine.engine import Engine
from minirt.generator import Generator
from minirt.kernels import reference
from minirt.layers import Layer
from minirt.layers.base import Forward
from minirt.layers.moe import MoE
from minirt.modeling.config import ModelConfig
from minirt.profiling.read_bytes import expected_experts
from minirt.sampling_params import SamplingParams

_STEPS = 8  # decode steps that are observed


@singledispatch
def expert_counts(layer: Layer, x: Tensor) -> Tensor | None:
    """How many rows of x [T, H] use each expert of the layer: [E] int64; None: it has no experts. Register a class that has."""
    return None


@expert_counts.register
def _mixture(layer: MoE, x: Tensor) -> Tensor:
    logits = reference.linear(reference.rms_norm(x, layer.norm_of_router.weight, layer.config.rms_norm_eps), layer.router.weight)
    chosen = reference.route(logits, layer.moe.experts_per_token, layer.moe.normalize)[1]
    return torch.bincount(chosen.flatten(), minlength=layer.moe.num_experts)


@contextmanager
def observing(generator: Generator, observer: Callable[[Layer, Tensor], None]) -> Iterator[None]:
    """Context in which every step calls `observer(layer, x)` with the input x of each layer but the first, before it runs.

    No step is a CUDA graph meanwhile. The observer runs in the engine's thread and must not change x.
    """
    layers = [layer for layer in generator.model.unique_layers() if not layer.reads_tokens]
    forwards = {layer: layer._forward for layer in layers if layer._forward is not None}

    def begin(engine: Engine) -> Any:
        graphs, engine._runner.graphs.captured = engine._runner.graphs.captured, None
        for layer, forward in forwards.items():
            layer._forward = partial(_observed, observer, layer, forward)
        return graphs

    def end(engine: Engine) -> None:
        engine._runner.graphs.captured = graphs
        for layer, forward in forwards.items():
            layer._forward = forward

    graphs = generator._engine.call(begin)
    try:
        yield
    finally:
        generator._engine.call(end)


def _observed(observer: Callable[[Layer, Tensor], None], layer: Layer, forward: Forward, x: Tensor, *step: Any) -> Tensor:
    observer(layer, x)
    return forward(x, *step)


class ExpertUse:
    """Collects how many rows used each expert, from every mixture layer of the steps with a certain number of rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._counts: dict[str, list[Tensor]] = {}  # by layer, a tensor [E] for each step

    def note(self, layer: Layer, x: Tensor) -> None:
        """Note the experts that the rows of x, the layer's input, use. Other numbers of rows are not noted."""
        counts = expert_counts(layer, x) if x.shape[0] == self.rows else None
        if counts is not None:
            self._counts.setdefault(layer.name, []).append(counts)

    def touched(self) -> dict[str, float]:
        """Each layer's mean number of distinct experts in a step."""
        return {name: statistics.fmean(int((counts > 0).sum()) for counts in steps) for name, steps in self._counts.items()}

    def summary(self, expected: float) -> dict[str, Any]:
        """Distinct experts for each layer and step: mean, least and most; and how evenly the layers use their experts.

        Args:
            expected: the number of distinct experts if all are equally likely.
        Returns:
            with `share`: p10, p50, p90 and the largest of the rows of an expert over all steps, divided by an expert's mean.
        """
        each = [int((counts > 0).sum()) for steps in self._counts.values() for counts in steps]
        totals = [torch.stack(steps).sum(0).double() for steps in self._counts.values()]
        shares = [share for total in totals for share in (total / total.mean()).tolist()]
        return {
            "experts": len(totals[0]), "touched": statistics.fmean(each), "expected": expected, "least": min(each),
            "most": max(each), "share": named_percentiles(shares, 10, 50, 90) | {"max": max(shares)},
        }  # fmt: skip


def expected(config: ModelConfig, tokens: int) -> float:
    """The expected number of distinct experts of a layer in a step of `tokens` tokens, if all are equally likely."""
    moe = config.moe
    return 0.0 if moe is None else expected_experts(moe.num_experts, moe.experts_per_token, tokens)


def in_decode(generator: Generator, batch_size: int, context_len: int, seed: int) -> ExpertUse | None:
    """The experts used by decode steps like those that `bench speed` measures: random prompts, then greedy tokens."""
    return _in_run(generator, [context_len] * batch_size, _STEPS + 1, batch_size, seed)


def in_prompt(generator: Generator, length: int, seed: int) -> ExpertUse | None:
    """The experts used by a random prompt, if it is computed in one step. Its last layer has a single row and is left out."""
    return None if length > generator.max_num_batched_tokens else _in_run(generator, [length], 1, length, seed)


def _in_run(generator: Generator, lengths: list[int], new_tokens: int, rows: int, seed: int) -> ExpertUse | None:
    """Observe the steps of `rows` tokens of a run of random prompts. None: the model has no mixtures, or ranks,
    which would not observe.

    Observing takes time, so nothing of the run may be timed.
    """
    if generator.config.moe is None or generator.model.ranks is not None:
        return None
    prompts = random_prompts(random.Random(seed), lengths, generator.config.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, repetition_penalty=1.0)
    use = ExpertUse(rows)
    with observing(generator, use.note):
        generator.generate(prompts, params)
    return use
