"""Both implementations of a layer on the same activations and on clones of the same cache, against the truth in fp64.

An `EagerStep` records one step of the eager model on real tokens: the input of each layer, and its cache before the step. A
`Place` is a layer at its position in the model, with both of its implementations.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from minirt.bench.bounds import Errors, Floor, errors, fault, floor, limits
from minirt.bench.compare.caches import indexable, view
from minirt.bench.compare.truth import exact, settled
from minirt.bench.flops import attention_flops
from minirt.device import on_device
from minirt.layers.base import BUILT_IN, Forward, Layer, implementation
from minirt.modeling.formats import FP8
from minirt.modeling.model import Model
from minirt.profiling.read_bytes import layer_read_bytes
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import PAGE_SIZE, KVCache, LayerCache

# What errors are measured of. Layers have further views for what else they keep, such as "state.<name>".
VIEWS = {"out": "output", "added": "what it adds", "k": "K in the pages", "v": "V in the pages"}
CHUNK = 512  # tokens of a text computed in one step


@dataclass(frozen=True)
class Place:
    """A layer at its position in the model.

    Attributes:
        index: position in the list of layers.
        cached: index of what the layer keeps in the cache; None: it keeps nothing.
        name: name of the candidate's implementation.
        eager: the eager implementation.
        candidate: the implementation that is compared with `eager`.
    """

    index: int
    layer: Layer
    cached: int | None
    name: str
    eager: Forward
    candidate: Forward

    @property
    def differs(self) -> bool:
        """Whether the candidate is an implementation other than eager."""
        return self.name != "eager"


@dataclass(frozen=True)
class EagerStep:
    """One step of the eager model on real tokens.

    Attributes:
        inputs: the input of each place: [T, H], after `Select` [R, H].
        cache: the cache after the step.
        before: for each place, the rows of its cache that the step wrote, as they were before the step. `run` puts them back.
    """

    name: str
    batch: Batch
    inputs: list[Tensor]
    cache: KVCache
    before: list[list[Tensor]]

    def rows(self, place: Place) -> int:
        """Return the number of rows that the layer at a place computes, which is the input size of the next layer."""
        return self.inputs[min(place.index + 1, len(self.inputs) - 1)].shape[0]

    def computes(self, place: Place) -> bool:
        """Whether the layer at a place computes anything.

        Built-in implementations of `Select` do not if all rows need logits: they return their input.
        """
        return not (place.layer.selects_rows and place.name in BUILT_IN and self.batch.every_row)


class LayerResult(NamedTuple):
    """The results of one layer.

    Attributes:
        out: the output.
        written: what the layer wrote to its cache, in fp64, by the name of the view.
        strays: number of other values of the cache that it changed.
    """

    out: Tensor
    written: dict[str, Tensor]
    strays: int


class Comparison(NamedTuple):
    """The errors of the candidate (`candidate`) and of PyTorch in the same dtype (`torch`), their limits, and the broken bounds.

    Errors and limits have the views that apply to the layer.
    """

    candidate: dict[str, Errors]
    torch: dict[str, Errors]
    limits: dict[str, Floor]
    faults: list[str]


def places(model: Model) -> list[Place]:
    """Return every layer of a model with its eager implementation and the one that the plan chose."""
    result: list[Place] = []
    cached = 0
    for index, (layer, row) in enumerate(zip(model.layers, model.plan.rows, strict=True)):
        kept = None if layer.cache_spec is None else cached
        cached += layer.cache_spec is not None
        eager = implementation(layer.kind, "eager").factory(layer)
        candidate = eager if row.implementation == "eager" else layer
        result.append(Place(index, layer, kept, row.implementation, eager, candidate))
    return result


def empty_cache(model: Model, num_pages: int, num_slots: int = 1, wide: bool = False) -> KVCache:
    """Return a cache filled with NaN. A kernel that reads an unwritten slot then gives NaN. `wide`: in fp64, except FP8."""
    cache = KVCache(model.cache_specs, num_pages, model.device, model.kv_dtype, num_slots=num_slots)
    if wide:
        cache.layers = [view(layer).clone(wide=True) for layer in cache.layers]
    for layer in cache.layers:
        for tensor in layer.tensors():
            indexable(tensor).fill_(0x7F if tensor.dtype == FP8 else torch.nan if tensor.is_floating_point() else 1)
    return cache


def pages_for_prompt(cache: KVCache, lengths: Sequence[int]) -> list[list[int]]:
    """Allocate pages for sequences of these lengths, in random order. A kernel that ignores the block table then fails."""
    counts = [cache.pages_for(n) for n in lengths]
    pages = cache.allocator.allocate(sum(counts))
    random.Random(0).shuffle(pages)
    ends = iter(pages)
    return [[next(ends) for _ in range(count)] for count in counts]


def stream(
    forwards: Sequence[Forward], sequence: Sequence[Place], batch: Batch, cache: KVCache, record: EagerStep | None = None
) -> Tensor:
    """Run the model with one forward for each place and return the logits [R, V]. `record`: a step that gets its inputs."""
    x = torch.empty(0, device=batch.device)
    for forward, place in zip(forwards, sequence, strict=True):
        kept = cached(place, cache)
        if record is not None:
            record.inputs.append(x)
            rows = [] if kept is None else zip(kept.tensors(), view(kept).rows(batch), strict=True)
            record.before.append([indexable(tensor)[index] for tensor, index in rows])
        x = forward(x, batch, kept)
    return x


def cached(place: Place, cache: KVCache) -> LayerCache | None:
    """What the layer at a place keeps."""
    return None if place.cached is None else cache.layers[place.cached]


@torch.inference_mode()
def prefill(model: Model, sequence: Sequence[Place], tokens: Sequence[int]) -> EagerStep:
    """Run a step that computes a whole prompt and the logits of its last token."""
    cache = empty_cache(model, -(-len(tokens) // PAGE_SIZE) + 1, num_slots=2)
    (pages,) = pages_for_prompt(cache, [len(tokens)])
    batch = Batch.build([Chunk(list(tokens), 0, pages, slot=0)], cache.page_size).to(model.device)
    return _recorded(f"prefill {len(tokens)}", sequence, batch, cache)


@torch.inference_mode()
def decode(model: Model, sequence: Sequence[Place], texts: Sequence[Sequence[int]]) -> EagerStep:
    """Run a step that computes the last token of each text; the tokens before it are cached. All texts have the same length."""
    length = len(texts[0])
    cache = empty_cache(model, len(texts) * -(-length // PAGE_SIZE) + 1, num_slots=len(texts) + 1)
    pages = pages_for_prompt(cache, [length] * len(texts))
    forwards = [place.eager for place in sequence]
    for slot, (text, block_table) in enumerate(zip(texts, pages, strict=True)):
        for start in range(0, length - 1, CHUNK):
            part = list(text[start : min(start + CHUNK, length - 1)])
            batch = Batch.build([Chunk(part, start, block_table, num_logits=0, slot=slot)], cache.page_size).to(model.device)
            stream(forwards[:-1], sequence[:-1], batch, cache)
    pairs = enumerate(zip(texts, pages, strict=True))
    chunks = [Chunk([text[-1]], length - 1, block_table, slot=slot) for slot, (text, block_table) in pairs]
    batch = Batch.build(chunks, cache.page_size).to(model.device)
    return _recorded(f"decode b{len(texts)} @ {length}", sequence, batch, cache)


def _recorded(name: str, sequence: Sequence[Place], batch: Batch, cache: KVCache) -> EagerStep:
    step = EagerStep(name, batch, [], cache, [])
    stream([place.eager for place in sequence], sequence, batch, cache, step)
    return step


def run(place: Place, forward: Forward, step: EagerStep, wide: bool = False) -> LayerResult:
    """Run one layer on the step's input and on a clone of its cache as it was before the step: new tokens' slots hold NaN.

    Args:
        wide: convert x, and a cache that is not FP8, to fp64.
    """
    batch, x = step.batch, step.inputs[place.index]
    x = x.double() if wide else x.clone()
    after = cached(place, step.cache)
    if after is None:
        return LayerResult(forward(x, batch, None), {}, 0)
    copied = view(after).clone(wide=wide)
    rows = view(copied).rows(batch)
    for tensor, index, before in zip(copied.tensors(), rows, step.before[place.index], strict=True):
        indexable(tensor)[index] = before.to(indexable(tensor).dtype)
    clones = [tensor.clone() for tensor in copied.tensors()]
    out = forward(x, batch, copied)
    strays = sum(map(_strays, copied.tensors(), clones, rows))
    return LayerResult(out, view(copied).written(batch), strays)


@torch.inference_mode()
def compile_kernels(steps: Sequence[tuple[EagerStep, list[Place]]]) -> None:
    """Compile the candidates' kernels in parallel, for each kind of layer and number of rows in each step. Only on a GPU."""
    from minirt.kernels.compile.ahead_of_time import AheadOfTime

    device = steps[0][0].batch.device
    with on_device(device), AheadOfTime(device) as compiler:
        for step, places in steps:
            for place in {(place.layer.kind, place.name, step.rows(place)): place for place in places}.values():
                compiler.add(partial(run, place, place.candidate, step))
        compiler.wait()


def _strays(after: Tensor, before: Tensor, rows: Tensor) -> int:
    """Count the values outside `rows` that have changed, bit for bit."""
    bits = (tensor.reshape(len(tensor), -1).view(torch.uint8).unflatten(-1, (-1, tensor.itemsize)) for tensor in (after, before))
    changed = torch.ne(*bits).any(-1)
    changed[rows] = False
    return int(changed.sum())


@torch.inference_mode()
def compare(place: Place, step: EagerStep) -> Comparison:
    """Compare a place's candidate with the eager implementation in the same dtype, by their errors against the truth.

    Rows whose result depends on a near-tie (`settled`) only have to be finite.
    """
    x = step.inputs[place.index]
    outcomes = run(place, place.candidate, step), run(place, place.eager, step), run(place, exact(place.layer), step, wide=True)
    least = floors(place, step)
    candidate: dict[str, Errors] = {}
    reference: dict[str, Errors] = {}
    most: dict[str, Floor] = {}
    faults: list[str] = []
    if outcomes[0].out.shape != outcomes[1].out.shape:
        shapes = [list(outcome.out.shape) for outcome in outcomes[:2]]
        return Comparison(candidate, reference, {}, [f"output: shape {shapes[0]}, PyTorch's {shapes[1]}"])
    views: dict[str, Sequence[Tensor | None]] = {"out": [outcome.out for outcome in outcomes]}
    rows = settled(place.layer, x)
    if rows is not None:
        unsettled = outcomes[0].out[~rows]
        if not bool(torch.isfinite(unsettled).all()) and bool(torch.isfinite(outcomes[1].out[~rows]).all()):
            faults.append("output: values that are not finite")
        x = x[rows]
        views["out"] = [outcome.out[rows] if bool(rows.any()) else None for outcome in outcomes]
    if place.layer.residual:
        views["added"] = _added(views["out"], x)
    views |= {name: [outcome.written[name] for outcome in outcomes] for name in outcomes[0].written}
    for name, (mine, theirs, truth) in views.items():
        if mine is None or theirs is None or truth is None:
            continue
        candidate[name], reference[name] = errors(mine, truth), errors(theirs, truth)
        lowest = least["out" if name in ("out", "added") else "written"]
        most[name] = limits(reference[name], lowest)
        broken = fault(candidate[name], reference[name], lowest)
        if broken is not None:
            faults.append(f"{VIEWS.get(name, name)}: {broken}")
    if outcomes[0].strays:
        faults.append(f"{outcomes[0].strays} values of the cache changed outside the slots of the step's tokens and sequences")
    return Comparison(candidate, reference, most, faults)


def _added(outputs: Sequence[Tensor | None], x: Tensor) -> list[Tensor | None]:
    """Return what each output [T, H] adds to the residual stream x [T, H], in fp64. The last output is the truth.

    The residual stream can be many times larger than what a layer adds. In the output, an error of the layer would then look like
    rounding. Rows in which the added values are close to the rounding of the output (tokens with a few huge values) are left out.
    All results are None if no row remains.
    """
    given = [out for out in outputs if out is not None]
    if not given:
        return [None] * len(outputs)
    added = given[-1] - x.double()
    rounding = torch.finfo(x.dtype).eps / 2 * given[-1].norm(dim=-1)
    rows = rounding < added.norm(dim=-1) / 4
    if not bool(rows.any()):
        return [None] * len(outputs)
    return [(out.double() - x.double())[rows] for out in given]


def floors(place: Place, step: EagerStep) -> dict[str, Floor]:
    """Return the floors of outputs ("out") and of what the layer writes to its cache ("written").

    They are higher where values are rounded to e4m3. For FP8 pages, the floor of all written values is that of one row, because a
    step may write a single head.
    """
    kept = cached(place, step.cache)
    coded = kept is not None and any(tensor.dtype == FP8 for tensor in kept.tensors())
    dtype = step.inputs[-1].dtype  # dtype of activations; outputs of the head are fp32
    plain = floor(dtype, coded or quantizes(place, step))
    return {"out": plain, "written": Floor(plain.worst_row, plain.worst_row) if coded else plain}


def quantizes(place: Place, step: EagerStep) -> bool:
    """Whether the layer quantizes its activations: it does so with FP8 weights and more than one row."""
    return step.rows(place) > 1 and rounds_activations(place.layer)


def rounds_activations(layer: Layer) -> bool:
    """Whether a weight of the layer has a format with which steps of several tokens round activations to e4m3."""
    return any(weights.format is not None and weights.format.rounds_activations for weights in layer.quantizable())


class LayerCost(NamedTuple):
    """The least bytes that a layer must read and write, and its floating-point operations."""

    bytes: int
    flops: int


def cost(place: Place, step: EagerStep) -> LayerCost:
    """Count the work of a layer.

    Bytes: the weights once, what the layer keeps of every sequence (a state is also written), the input and the output.
    Operations: the products of the linears and of attention.
    """
    layer, batch, rows = place.layer, step.batch, step.rows(place)
    dtype = step.inputs[-1].dtype  # dtype of activations; outputs of the head are fp32
    row = layer.config.hidden_size * dtype.itemsize
    shape, out_dtype = layer.returns(step.inputs[place.index], batch)
    flops = layer.flops(rows)
    nbytes = layer_read_bytes(layer, dtype, rows) + rows * (row + math.prod(shape[1:]) * out_dtype.itemsize)
    kept = cached(place, step.cache)
    if kept is not None and layer.cache_spec is not None:
        nbytes += view(kept).read_bytes(batch) + batch.num_seqs * max(0, layer.step_state_bytes - layer.cache_spec.state_bytes)
    return LayerCost(nbytes, flops + attention_flops(layer, zip(batch.query_lens, batch.seq_lens, strict=True)))
