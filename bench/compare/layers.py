"""Both implementations of a layer on the same activations and on clones of the same KV pages, against the truth in fp64.

A `Step` records one step of the eager model on real tokens: the input of each layer, and the KV pages. A `Place` is a layer at
its position in the model, with both of its implementations.
"""

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minirt.bench.bounds import Errors, Floor, errors, fault, floor, limits
from minirt.device import on_device
from minirt.engine.kv_cache import PAGE_SIZE, KVCache, LayerKV, LayerState
from minirt.engine.step_input import Batch, Chunk
from minirt.errors import UnsupportedError
from minirt.layers import BUILT_IN, Forward, Layer, implementation
from minirt.modeling.formats import FP8
from minirt.modeling.model import Model
from minirt.modeling.parameters import Parameter

VIEWS = {"out": "output", "added": "what it adds", "k": "K in the pages", "v": "V in the pages"}  # what errors are measured of
CHUNK = 512  # tokens of a text computed in one step


@dataclass(frozen=True)
class Place:
    """A layer at its position in the model.

    Attributes:
        index: position in the list of layers.
        pages: index of the layer's KV pages in the cache; None without attention.
        name: name of the candidate's implementation.
        eager: the eager implementation.
        candidate: the implementation that is compared with `eager`.
    """

    index: int
    layer: Layer
    pages: int | None
    name: str
    eager: Forward
    candidate: Forward

    @property
    def differs(self) -> bool:
        """Whether the candidate is an implementation other than eager."""
        return self.name != "eager"


@dataclass(frozen=True)
class Step:
    """One step of the eager model on real tokens.

    Attributes:
        inputs: the input of each place: [T, H], after `Select` [R, H].
        cache: the KV pages after the step. `run` clones them and removes what the step wrote.
    """

    name: str
    batch: Batch
    inputs: list[Tensor]
    cache: KVCache

    def rows(self, place: Place) -> int:
        """Return the number of rows that the layer at a place computes, which is the input size of the next layer."""
        return self.inputs[min(place.index + 1, len(self.inputs) - 1)].shape[0]

    def computes(self, place: Place) -> bool:
        """Whether the layer at a place computes anything.

        Built-in implementations of `Select` do not if all rows need logits: they return their input.
        """
        return not (place.layer.kind == "select" and place.name in BUILT_IN and self.batch.every_row)


class Outcome(NamedTuple):
    """The results of one layer.

    Attributes:
        out: the output.
        k, v: what an attention layer wrote to the pages for the step's tokens, [T, Nkv, D] fp64; None for other layers.
        strays: number of page values changed outside the step's slots.
    """

    out: Tensor
    k: Tensor | None
    v: Tensor | None
    strays: int


class Comparison(NamedTuple):
    """The errors of the candidate (`found`) and of PyTorch in the same dtype (`torch`), their limits, and the broken bounds.

    Errors and limits have the keys of VIEWS that apply to the layer.
    """

    found: dict[str, Errors]
    torch: dict[str, Errors]
    limits: dict[str, Floor]
    faults: list[str]


def places(model: Model) -> list[Place]:
    """Return every layer of a model with its eager implementation and the one that the plan chose."""
    result: list[Place] = []
    pages = 0
    for index, (layer, row) in enumerate(zip(model.layers, model.plan.rows, strict=True)):
        own = None if layer.cache_spec is None else pages
        pages += layer.cache_spec is not None
        eager = implementation(layer.kind, "eager").factory(layer)
        candidate = eager if row.implementation == "eager" else layer
        result.append(Place(index, layer, own, row.implementation, eager, candidate))
    return result


def empty_cache(model: Model, num_pages: int, dtype: torch.dtype | None = None) -> KVCache:
    """Return a cache filled with NaN. A kernel that reads an unwritten slot then gives NaN."""
    cache = KVCache(model.cache_specs, num_pages, model.device, dtype or model.kv_dtype)
    for layer in cache.layers:
        if isinstance(layer, LayerState):
            what, hint = "layers with a state of their own cannot be compared yet", "compare a model with attention layers only"
            raise UnsupportedError(what, where="compare", hint=hint)
        for tensor in layer:
            if tensor is not None:
                _poison(tensor, slice(None))
    return cache


def _poison(tensor: Tensor, slots: Any) -> None:
    """Write NaN to `slots` of the first dimension."""
    if tensor.dtype == FP8:
        tensor.view(torch.uint8)[slots] = 0x7F  # PyTorch lacks some operations for FP8
    else:
        tensor[slots] = torch.nan


def pages_for_prompt(cache: KVCache, lengths: Sequence[int]) -> list[list[int]]:
    """Allocate pages for sequences of these lengths, in random order. A kernel that ignores the block table then fails."""
    counts = [cache.pages_for(n) for n in lengths]
    pages = cache.allocator.allocate(sum(counts))
    random.Random(0).shuffle(pages)
    ends = iter(pages)
    return [[next(ends) for _ in range(count)] for count in counts]


def stream(
    forwards: Sequence[Forward], sequence: Sequence[Place], batch: Batch, cache: KVCache, inputs: list[Tensor] | None = None
) -> Tensor:
    """Run the model with one forward for each place and return the logits [R, V]. Appends the input of each place to `inputs`."""
    x = torch.empty(0, device=batch.flat.device)
    for forward, place in zip(forwards, sequence, strict=True):
        if inputs is not None:
            inputs.append(x)
        x = forward(x, batch, _pages(place, cache))
    return x


def _pages(place: Place, cache: KVCache) -> LayerKV | None:
    kept = None if place.pages is None else cache.layers[place.pages]
    return kept if isinstance(kept, LayerKV) else None


@torch.inference_mode()
def prefill(model: Model, sequence: Sequence[Place], tokens: Sequence[int]) -> Step:
    """Run a step that computes a whole prompt and the logits of its last token."""
    cache = empty_cache(model, -(-len(tokens) // PAGE_SIZE) + 1)
    (pages,) = pages_for_prompt(cache, [len(tokens)])
    batch = Batch.build([Chunk(list(tokens), 0, pages)], cache.page_size).to(model.device)
    inputs: list[Tensor] = []
    stream([place.eager for place in sequence], sequence, batch, cache, inputs)
    return Step(f"prefill {len(tokens)}", batch, inputs, cache)


@torch.inference_mode()
def decode(model: Model, sequence: Sequence[Place], texts: Sequence[Sequence[int]]) -> Step:
    """Run a step that computes the last token of each text; the tokens before it are cached. All texts have the same length."""
    length = len(texts[0])
    cache = empty_cache(model, len(texts) * -(-length // PAGE_SIZE) + 1)
    pages = pages_for_prompt(cache, [length] * len(texts))
    forwards = [place.eager for place in sequence]
    for text, own in zip(texts, pages, strict=True):
        for start in range(0, length - 1, CHUNK):
            part = list(text[start : min(start + CHUNK, length - 1)])
            batch = Batch.build([Chunk(part, start, own, num_logits=0)], cache.page_size).to(model.device)
            stream(forwards[:-1], sequence[:-1], batch, cache)
    chunks = [Chunk([text[-1]], length - 1, own) for text, own in zip(texts, pages, strict=True)]
    batch = Batch.build(chunks, cache.page_size).to(model.device)
    inputs: list[Tensor] = []
    stream(forwards, sequence, batch, cache, inputs)
    return Step(f"decode b{len(texts)} @ {length}", batch, inputs, cache)


def exact(layer: Layer) -> Forward:
    """Return the truth for a layer: its eager implementation with weights converted to fp64, except quantized weights.

    The returned forward needs x in fp64, and KV pages in fp64 or FP8. A layer that only copies values is exact in any dtype; its
    output is converted.
    """
    eager = implementation(layer.kind, "eager")
    if layer.copies:
        gather = eager.factory(layer)
        return lambda x, batch, kv: gather(x, batch, kv).double()
    twin = copy.copy(layer)
    for name, holder in vars(layer).items():
        if isinstance(holder, Parameter):
            setattr(twin, name, holder.to_double())
    return eager.factory(twin)


def run(place: Place, forward: Forward, step: Step, wide: bool = False) -> Outcome:
    """Run one layer on the step's input and on clones of its pages, where the slots of the step's tokens hold NaN.

    Args:
        wide: convert x, and pages that are not FP8, to fp64.
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
    """Compile the candidates' kernels in parallel, for each kind of layer and number of rows in each step. Only on a GPU."""
    from minirt.kernels.compile.ahead_of_time import compile_ahead

    device = steps[0][0].batch.flat.device
    with on_device(device), compile_ahead(device):
        for step, places in steps:
            for place in {(place.layer.kind, place.name, step.rows(place)): place for place in places}.values():
                run(place, place.candidate, step)


def _written(pages: Tensor, scales: Tensor | None, slots: Tensor) -> Tensor:
    """Return what pages [P, page_size, Nkv, D] hold at `slots` [T]: [T, Nkv, D] fp64."""
    values = pages.flatten(0, 1)
    if scales is None:
        return values[slots].double()
    values = values.view(torch.uint8)[slots].view(FP8).double()
    return values * scales.flatten(0, 1)[slots].double().unsqueeze(-1)


def _strays(after: Tensor, before: Tensor, slots: Tensor) -> int:
    """Count the values outside `slots` that have changed, bit for bit."""
    bits = (tensor.contiguous().view(torch.uint8).unflatten(-1, (-1, tensor.itemsize)) for tensor in (after, before))
    changed = torch.ne(*bits).any(-1).flatten(0, 1)
    changed[slots] = False
    return int(changed.sum())


@torch.inference_mode()
def compare(place: Place, step: Step) -> Comparison:
    """Compare a place's candidate with the eager implementation in the same dtype, by their errors against the truth.

    Rows whose result depends on a near-tie (`Layer.settled`) only have to be finite.
    """
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
    settled = place.layer.settled(x)
    if settled is not None:
        unsettled = outcomes[0].out[~settled]
        if not bool(torch.isfinite(unsettled).all()) and bool(torch.isfinite(outcomes[1].out[~settled]).all()):
            faults.append("output: values that are not finite")
        x = x[settled]
        views["out"] = [outcome.out[settled] if bool(settled.any()) else None for outcome in outcomes]
    if place.layer.residual and views["out"][0] is not None:
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
        faults.append(f"{outcomes[0].strays} values in the pages changed outside the slots of the step's tokens")
    return Comparison(found, reference, most, faults)


def _added(outputs: Sequence[Tensor], x: Tensor) -> list[Tensor | None]:
    """Return what each output [T, H] adds to the residual stream x [T, H], in fp64. The last output is the truth.

    The residual stream can be many times larger than what a layer adds. In the output, an error of the layer would then look like
    rounding. Rows in which the added values are close to the rounding of the output (tokens with a few huge values) are left out.
    All results are None if no row remains.
    """
    added = outputs[-1] - x.double()
    rounding = torch.finfo(x.dtype).eps / 2 * outputs[-1].norm(dim=-1)
    rows = rounding < added.norm(dim=-1) / 4
    if not bool(rows.any()):
        return [None] * len(outputs)
    return [(out.double() - x.double())[rows] for out in outputs]


def floors(place: Place, step: Step) -> dict[str, Floor]:
    """Return the floor of each of VIEWS. It is higher where values are rounded to e4m3.

    For K and V in FP8 pages, the floor of the whole tensor is that of one row, because a step may write a single head.
    """
    pages = _pages(place, step.cache)
    coded = pages is not None and pages.k.dtype == FP8
    dtype = step.inputs[-1].dtype  # dtype of activations; outputs of the head are fp32
    plain = floor(dtype, coded or quantizes(place, step))
    written = Floor(plain.worst_row, plain.worst_row) if coded else plain
    return {"out": plain, "added": plain, "k": written, "v": written}


def quantizes(place: Place, step: Step) -> bool:
    """Whether the layer quantizes its activations: it does so with FP8 weights and more than one row."""
    return step.rows(place) > 1 and rounds_activations(place.layer)


def rounds_activations(layer: Layer) -> bool:
    """Whether a weight of the layer has a format with which steps of several tokens round activations to e4m3."""
    return any(weights.format is not None and weights.format.rounds_activations for weights in layer.quantizable())


class Work(NamedTuple):
    """The least bytes that a layer must read and write, and its floating-point operations."""

    bytes: int
    flops: int


def work(place: Place, step: Step) -> Work:
    """Count the work of a layer.

    Bytes: the weights once, the K and V of every sequence, the input and the output. Operations: the products of the linears and
    of attention.
    """
    layer, batch, rows = place.layer, step.batch, step.rows(place)
    dtype = step.inputs[-1].dtype  # dtype of activations; outputs of the head are fp32
    row = layer.config.hidden_size * dtype.itemsize
    shape, out_dtype = layer.returns(step.inputs[place.index], batch)
    flops = layer.flops(rows)
    nbytes = layer.decode_read_bytes(dtype, rows) + rows * (row + math.prod(shape[1:]) * out_dtype.itemsize)
    kv = _pages(place, step.cache)
    if kv is None:
        return Work(nbytes, flops)
    token = sum(t[0, 0].nbytes for t in kv if t is not None)
    pairs = sum(n * (s - n) + n * (n + 1) // 2 for n, s in zip(batch.query_lens, batch.seq_lens, strict=True))
    flops += 4 * layer.config.num_heads * layer.config.head_dim * pairs
    return Work(nbytes + token * sum(batch.seq_lens), flops)
