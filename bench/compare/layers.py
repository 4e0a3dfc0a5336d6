"""Both implementations of a layer on the same real activations and on clones of the same KV pages, against the truth in fp64.

A `Step` is what the eager model does with real tokens, stopped before each layer: the residual stream that flows into it, and the
pages with what earlier steps have cached. A `Place` is a layer at its place in the model, with both of its implementations.
"""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minirt.bench.bounds import Errors, Floor, errors, fault, floor, limits
from minirt.device import on_device
from minirt.engine.kv_cache import PAGE_SIZE, KVCache, LayerKV
from minirt.engine.step_input import Batch, Chunk
from minirt.layers import BUILT_IN, Attention, Embedding, Forward, Head, Layer, implementation
from minirt.modeling.formats import FP8
from minirt.modeling.model import Model
from minirt.modeling.parameters import NormWeight, PackedLinear

VIEWS = {"out": "output", "added": "what it adds", "k": "K in the pages", "v": "V in the pages"}  # that errors are taken of
CHUNK = 512  # tokens of a prompt that are computed at once


@dataclass(frozen=True)
class Place:
    """A layer at its place in the model; `pages` is the number of its KV pages among those of all attention layers.

    `candidate` is what is compared with `eager`, and `name` what it is called.
    """

    index: int
    layer: Layer
    pages: int | None
    name: str
    eager: Forward
    candidate: Forward

    @property
    def differs(self) -> bool:
        """Whether there is anything to compare: the candidate is not the eager form itself."""
        return self.name != "eager"


@dataclass(frozen=True)
class Step:
    """One step of the eager model on real tokens: `inputs[i]` [T, H], behind `Select` [R, H], flows into place i; `cache` holds
    what was cached before it (and, by now, what the step itself wrote: see `run`)."""

    name: str
    batch: Batch
    inputs: list[Tensor]
    cache: KVCache

    def rows(self, place: Place) -> int:
        """How many rows the layer at a place computes: as many as flow into the next."""
        return self.inputs[min(place.index + 1, len(self.inputs) - 1)].shape[0]

    def computes(self, place: Place) -> bool:
        """Whether the layer at a place does anything: our forms of `Select` return their input where that is every row."""
        return not (place.layer.kind == "select" and place.name in BUILT_IN and self.batch.every_row)


class Outcome(NamedTuple):
    """What a layer computed: its output and, of an attention layer, what it wrote to the pages for the step's tokens, K and V
    [T, Nkv, D] fp64; `strays` counts the values of the pages that it changed beside them."""

    out: Tensor
    k: Tensor | None
    v: Tensor | None
    strays: int


class Comparison(NamedTuple):
    """The errors of a candidate and of same-dtype PyTorch, by VIEWS (those that the layer has), and what breaks a bound."""

    found: dict[str, Errors]
    torch: dict[str, Errors]
    limits: dict[str, Floor]
    faults: list[str]


def places(model: Model) -> list[Place]:
    """Every layer of a resolved model with its eager form and the one it is bound to."""
    result: list[Place] = []
    pages = 0
    for index, (layer, row) in enumerate(zip(model.layers, model.plan.rows, strict=True)):
        own = pages if isinstance(layer, Attention) else None
        pages += isinstance(layer, Attention)
        eager = implementation(layer.kind, "eager").factory(layer)
        candidate = eager if row.implementation == "eager" else layer
        result.append(Place(index, layer, own, row.implementation, eager, candidate))
    return result


def empty_cache(model: Model, num_pages: int, dtype: torch.dtype | None = None) -> KVCache:
    """Pages that hold NaN, so that reading what nobody wrote shows."""
    cache = KVCache(model.kv_shapes, num_pages, model.device, dtype or model.kv_dtype)
    for layer in cache.layers:
        for tensor in layer:
            if tensor is not None:
                _poison(tensor, slice(None))
    return cache


def _poison(tensor: Tensor, slots: Any) -> None:
    """NaN at `slots` of the first dimension."""
    if tensor.dtype == FP8:
        tensor.view(torch.uint8)[slots] = 0x7F  # not every operation knows the type
    else:
        tensor[slots] = torch.nan


def pages_for_prompt(cache: KVCache, lengths: Sequence[int]) -> list[list[int]]:
    """Pages for sequences of these lengths, in no order, so that a block table that is not followed shows."""
    counts = [cache.pages_for(n) for n in lengths]
    pages = cache.allocator.allocate(sum(counts))
    random.Random(0).shuffle(pages)
    ends = iter(pages)
    return [[next(ends) for _ in range(count)] for count in counts]


def stream(
    forwards: Sequence[Forward], sequence: Sequence[Place], batch: Batch, cache: KVCache, inputs: list[Tensor] | None = None
) -> Tensor:
    """Run the model with one forward a place → logits [R, V]; what flows into each is added to `inputs`."""
    x = torch.empty(0, device=batch.flat.device)
    for forward, place in zip(forwards, sequence, strict=True):
        if inputs is not None:
            inputs.append(x)
        x = forward(x, batch, _pages(place, cache))
    return x


def _pages(place: Place, cache: KVCache) -> LayerKV | None:
    return None if place.pages is None else cache.layers[place.pages]


@torch.inference_mode()
def prefill(model: Model, sequence: Sequence[Place], tokens: Sequence[int]) -> Step:
    """The step that computes a whole prompt and wants the logits of its last token."""
    cache = empty_cache(model, -(-len(tokens) // PAGE_SIZE) + 1)
    (pages,) = pages_for_prompt(cache, [len(tokens)])
    batch = Batch.build([Chunk(list(tokens), 0, pages)], cache.page_size).to(model.device)
    inputs: list[Tensor] = []
    stream([place.eager for place in sequence], sequence, batch, cache, inputs)
    return Step(f"prefill {len(tokens)}", batch, inputs, cache)


@torch.inference_mode()
def decode(model: Model, sequence: Sequence[Place], texts: Sequence[Sequence[int]]) -> Step:
    """The step that computes the last token of each text, all before it being cached. The texts are of one length."""
    length = len(texts[0])
    cache = empty_cache(model, len(texts) * -(-length // PAGE_SIZE) + 1)
    pages = pages_for_prompt(cache, [length] * len(texts))
    forwards = [place.eager for place in sequence]
    for text, own in zip(texts, pages, strict=True):
        for start in range(0, length - 1, CHUNK):
            part = list(text[start : min(start + CHUNK, length - 1)])
            batch = Batch.build([Chunk(part, start, own, wants_logits=False)], cache.page_size).to(model.device)
            stream(forwards[:-1], sequence[:-1], batch, cache)
    chunks = [Chunk([text[-1]], length - 1, own) for text, own in zip(texts, pages, strict=True)]
    batch = Batch.build(chunks, cache.page_size).to(model.device)
    inputs: list[Tensor] = []
    stream(forwards, sequence, batch, cache, inputs)
    return Step(f"decode b{len(texts)} @ {length}", batch, inputs, cache)


def exact(layer: Layer) -> Forward:
    """The truth: the layer's eager form in fp64, its weights widened (those of fp8 are what they are). It wants x in fp64 and
    pages of fp64 or fp8. A gather is exact as it is."""
    eager = implementation(layer.kind, "eager")
    if isinstance(layer, Embedding):
        gather = eager.factory(layer)
        return lambda x, batch, kv: gather(x, batch, kv).double()
    twin = copy.copy(layer)
    for name, holder in vars(layer).items():
        if isinstance(holder, PackedLinear | NormWeight):
            wide = copy.copy(holder)
            if isinstance(holder, NormWeight) or holder.format is None:
                wide.weight = holder.weight.double()
            if isinstance(wide, PackedLinear) and wide.bias is not None:
                wide.bias = wide.bias.double()
            setattr(twin, name, wide)
    return eager.factory(twin)


def run(place: Place, forward: Forward, step: Step, wide: bool = False) -> Outcome:
    """Run one layer on the step's input from clones of its pages, in which the step's own tokens are NaN again.

    Args:
        wide: hand over x, and pages that are not fp8, in fp64.
    """
    batch, x = step.batch, step.inputs[place.index]
    x = x.double() if wide else x.clone()
    pages = _pages(place, step.cache)
    if pages is None:
        return Outcome(forward(x, batch, None), None, None, 0)
    widen = wide and pages.k.dtype != FP8
    clones = [None if t is None else t.double() if widen else t.clone() for t in pages]
    for tensor in clones:
        if tensor is not None:
            _poison(tensor.flatten(0, 1), batch.slots)
    before = [None if t is None else t.clone() for t in clones]
    own = LayerKV._make(clones)
    out = forward(x, batch, own)
    strays = sum(_strays(a, b, batch.slots) for a, b in zip(own, before, strict=True) if a is not None and b is not None)
    return Outcome(out, _written(own.k, own.k_scale, batch.slots), _written(own.v, own.v_scale, batch.slots), strays)


@torch.inference_mode()
def compile_kernels(steps: Sequence[tuple[Step, list[Place]]]) -> None:
    """On a GPU: compile what a candidate of each kind and number of rows launches in each step, side by side."""
    from minirt.kernels.compile.ahead_of_time import compile_ahead

    device = steps[0][0].batch.flat.device
    with on_device(device), compile_ahead(device):
        for step, places in steps:
            for place in {(place.layer.kind, place.name, step.rows(place)): place for place in places}.values():
                run(place, place.candidate, step)


def _written(pages: Tensor, scales: Tensor | None, slots: Tensor) -> Tensor:
    """What pages [P, page_size, Nkv, D] hold at `slots` [T], in fp64 → [T, Nkv, D]."""
    values = pages.flatten(0, 1)
    if scales is None:
        return values[slots].double()
    values = values.view(torch.uint8)[slots].view(FP8).double()
    return values * scales.flatten(0, 1)[slots].double().unsqueeze(-1)


def _strays(after: Tensor, before: Tensor, slots: Tensor) -> int:
    """Values beside `slots` that are not what they were, bit for bit."""
    bits = (tensor.contiguous().view(torch.uint8).unflatten(-1, (-1, tensor.itemsize)) for tensor in (after, before))
    changed = torch.ne(*bits).any(-1).flatten(0, 1)
    changed[slots] = False
    return int(changed.sum())


@torch.inference_mode()
def compare(place: Place, step: Step) -> Comparison:
    """Compare a place's candidate with PyTorch in the same dtype, by their errors against the truth."""
    x = step.inputs[place.index]
    outcomes = run(place, place.candidate, step), run(place, place.eager, step), run(place, exact(place.layer), step, wide=True)
    least = floors(place, step)
    found: dict[str, Errors] = {}
    reference: dict[str, Errors] = {}
    most: dict[str, Floor] = {}
    faults: list[str] = []
    if outcomes[0].out.shape != outcomes[1].out.shape:
        shapes = [list(outcome.out.shape) for outcome in outcomes[:2]]
        return Comparison(found, reference, {}, [f"output: shape {shapes[0]}, PyTorch's {shapes[1]}"])
    views = {name: [getattr(outcome, name) for outcome in outcomes] for name in ("out", "k", "v")}
    if place.layer.kind in ("attention", "mlp"):
        views["added"] = _added(views["out"], x)
    for name, what in VIEWS.items():
        mine, theirs, truth = views.get(name, (None, None, None))
        if mine is None or theirs is None or truth is None:
            continue
        found[name], reference[name] = errors(mine, truth), errors(theirs, truth)
        most[name] = limits(reference[name], least[name])
        broken = fault(found[name], reference[name], least[name])
        if broken is not None:
            faults.append(f"{what}: {broken}")
    if outcomes[0].strays:
        faults.append(f"{outcomes[0].strays} values in the pages changed that are not of the step's tokens")
    return Comparison(found, reference, most, faults)


def _added(outputs: Sequence[Tensor], x: Tensor) -> list[Tensor | None]:
    """What each of the outputs [T, H], the last of them the truth, adds to x [T, H], in fp64: beside a residual stream of many
    times its size, a fault in it would pass for rounding. Rows in which it nearly is no more than that (of tokens with a few huge
    values) are left out; None: there are no others."""
    added = outputs[-1] - x.double()
    rounding = torch.finfo(x.dtype).eps / 2 * outputs[-1].norm(dim=-1)
    rows = rounding < added.norm(dim=-1) / 4
    if not bool(rows.any()):
        return [None] * len(outputs)
    return [(out.double() - x.double())[rows] for out in outputs]


def floors(place: Place, step: Step) -> dict[str, Floor]:
    """The floor of each view: higher where values take codes of e4m3. In pages of fp8 a single code counts, since what a step
    writes to them may be a single head."""
    pages = _pages(place, step.cache)
    coded = pages is not None and pages.k.dtype == FP8
    dtype = step.inputs[-1].dtype  # of the activations: logits are fp32
    plain = floor(dtype, coded or quantizes(place, step))
    written = Floor(plain.worst_row, plain.worst_row) if coded else plain
    return {"out": plain, "added": plain, "k": written, "v": written}


def quantizes(place: Place, step: Step) -> bool:
    """Whether the layer quantizes its activations: with fp8 weights, where it computes more than one row."""
    return step.rows(place) > 1 and any(linear.format for linear in place.layer.linears())


class Work(NamedTuple):
    """What a layer must read and write at least, in bytes, and its floating-point operations."""

    bytes: int
    flops: int


def work(place: Place, step: Step) -> Work:
    """Weights once, each cached token that is seen, x in and out; the products of the linears and of attention."""
    layer, batch, rows = place.layer, step.batch, step.rows(place)
    dtype = step.inputs[-1].dtype  # of the activations: logits are fp32
    row = layer.config.hidden_size * dtype.itemsize
    if layer.kind in ("embedding", "select"):
        return Work(2 * rows * row, 0)
    weights = sum(p.nbytes(dtype) for p in layer.parameters())
    flops = sum(2 * rows * linear.out_features * linear.in_features for linear in layer.linears())
    nbytes = weights + rows * (row + (layer.config.vocab_size * 4 if isinstance(layer, Head) else row))
    kv = _pages(place, step.cache)
    if kv is None:
        return Work(nbytes, flops)
    token = sum(t[0, 0].nbytes for t in kv if t is not None)
    pairs = sum(n * (s - n) + n * (n + 1) // 2 for n, s in zip(batch.query_lens, batch.seq_lens, strict=True))
    flops += 4 * layer.config.num_heads * layer.config.head_dim * pairs
    return Work(nbytes + token * sum(batch.seq_lens), flops)
