"""`minirt compare`: each layer's implementation against its eager implementation, then the whole model, then times on a GPU.

Errors are compared first. If one breaks its bound (`bounds`), nothing is timed: the speed of a wrong result means nothing.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from minirt.bench.bounds import Errors, Floor, floor
from minirt.bench.ceiling import Ceiling, MatmulCeiling, matmul_ceiling
from minirt.bench.compare import layers as compare_layers
from minirt.bench.compare import timing
from minirt.bench.compare.layers import Comparison, EagerStep, Place
from minirt.bench.compare.model import compare_text
from minirt.device import on_device
from minirt.errors import ContextLengthError, InputError, UnsupportedError
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.layers.base import has_implementation, implementation
from minirt.modeling.formats import FP8
from minirt.modeling.model import Model, some_names

Row = dict[str, Any]
DEFAULT_TEXT = Path(__file__).with_name("default_text.txt")  # a page with several kinds of writing, written for this purpose


@dataclass(frozen=True)
class Shape:
    """The sizes of a comparison.

    Attributes:
        prompt_len: tokens of the prefill step.
        batch_size: sequences of the decode step.
        context_len: tokens of each of these sequences, with the new one.
        text_len: tokens of text for the whole model; 0: do not compare the whole model.
    """

    prompt_len: int
    batch_size: int
    context_len: int
    text_len: int

    def check(self, model: Model, available: int) -> None:
        """Refuse lengths that exceed the model's positions or the `available` tokens of the text.

        Raises:
            ContextLengthError: a length exceeds the model's positions.
            InputError: the text is too short.
        """
        lengths = {"--prompt-len": self.prompt_len, "--context-len": self.context_len, "--num-tokens": self.text_len}
        for flag, length in lengths.items():
            if length > model.max_model_len:
                raise ContextLengthError(
                    "longer than the model allows", where=flag, expected=f"at most {model.max_model_len}", found=length
                )
        if self.text_len > available:
            hint = "choose a longer --text or a smaller --num-tokens"
            expected = f"at most {available}"
            raise InputError("the text is too short", where="--num-tokens", expected=expected, found=self.text_len, hint=hint)


@dataclass(frozen=True)
class Result:
    """The result of a comparison. `print(result)` shows it as a table.

    Attributes:
        rows: one for each step and layer, without times on a CPU.
        model: the comparison of the whole model, without times on a CPU; None if only some layers were compared.
        skipped: layers that Triton cannot run, with the reason.
        faults: broken bounds, each with its step and layer, the error and the limit.
        matmul: measured rates of matrix products (`matmul_ceiling`) that the limits use.
    """

    rows: list[Row]
    model: Row | None
    skipped: dict[str, str]
    faults: list[str]
    matmul: list[Row] = field(default_factory=list)

    def __str__(self) -> str:
        from minirt.bench.compare.report import as_table

        return as_table(self)


def bind(model: Model, impl: Sequence[str]) -> dict[str, str]:
    """Choose the implementations that are compared with eager: `impl`, or by default Triton for every layer that it can run.

    Returns:
        the layers that Triton cannot run, with the reason; they run eager. Empty if `impl` is given.
    """
    if impl:
        model.resolve(impl)
        return {}
    reasons: dict[str, str] = {}
    for layer in model.unique_layers():
        if not has_implementation(layer.kind, "triton"):
            reasons[layer.name] = "no triton implementation"
        elif (why := implementation(layer.kind, "triton").unsupported(layer, model.device)) is not None:
            reasons[layer.name] = why
    model.resolve(["triton", *(f"{name}=eager" for name in reasons)])
    return reasons


def select(sequence: Sequence[Place], pattern: str | None, skipped: dict[str, str]) -> list[Place]:
    """Return the places to compare: those whose layer name matches `pattern` (None: all) and whose candidate is not eager.

    Raises:
        UnsupportedError: no layer has such a name, or every layer with such a name runs its eager implementation.
    """
    named = [place for place in sequence if pattern is None or fnmatchcase(place.layer.name, pattern)]
    if not named:
        names, expected = some_names([place.layer for place in sequence]), "a name or glob such as 'layers.*.mlp'"
        raise UnsupportedError("matches no layer", where=f"--layer {pattern}", expected=expected, found=names)
    chosen = [place for place in named if place.differs]
    if not chosen:
        why = skipped.get(named[0].layer.name, "--impl says so")
        raise UnsupportedError("nothing to compare: the layer runs eager", where=named[0].layer.name, found=why)
    return chosen


def run(
    model: Model, tokens: Sequence[int], shape: Shape, *, impl: Sequence[str] = (), layer: str | None = None,
    ceiling: Ceiling | None = None, progress: Callable[[str], None] = lambda text: None,
) -> Result:  # fmt: skip
    """Compare layers, then the whole model, then times.

    Args:
        model: a model with allocated, filled weights. Its implementations are chosen anew.
        tokens: tokens of a text; repeated if a step needs more.
        impl: see `bind`.
        layer: name or glob of the layers to compare; None: all layers, then the whole model.
        ceiling: memory bandwidth, for the limits; only on a GPU.
    Raises:
        ContextLengthError, InputError: see `Shape.check`.
        UnsupportedError: nothing to compare.
    """
    shape.check(model, len(tokens))
    skipped = bind(model, impl)
    sequence = compare_layers.places(model)
    chosen = select(sequence, layer, skipped)
    model.reserve_splits(shape.batch_size * -(-shape.context_len // KV_SPLIT))
    cuda = model.device.type == "cuda"
    texts = [_cycled(tokens, 17 * i, shape.context_len) for i in range(shape.batch_size)]
    rows: list[Row] = []
    faults: list[str] = []
    whole: Row | None = None
    matmul: list[Row] = []
    ranks, arguments = model.ranks, (list(tokens), astuple(shape), list(impl), layer)
    with nullcontext() if ranks is None else ranks.step("call", (f"{__name__}:on_rank", arguments)), on_device(model.device):
        prompt = compare_layers.prefill(model, sequence, _cycled(tokens, 0, shape.prompt_len))
        decode = compare_layers.decode(model, sequence, texts)
        steps = [(step, [place for place in chosen if step.computes(place)]) for step in (prompt, decode)]
        if not any(places for _, places in steps):
            what = "nothing to compare: all rows need logits, so the layer returns its input"
            raise UnsupportedError(what, where=chosen[0].layer.name, hint="choose a --prompt-len above 1")
        if cuda:
            compare_layers.compile_kernels(steps)
        for step, places in steps:
            for place in places:
                row, broken = _compared(place, step)
                rows.append(row)
                faults += broken
            progress(f"{step.name}: {len(places)} layers compared")
        if layer is None:
            whole, broken = _over_text(model, sequence, list(tokens[: shape.text_len]), progress)
            faults += broken
            progress(f"whole model: {shape.text_len} tokens compared")
        if ranks is not None and (rank := ranks.first(bool(faults))) is not None and not faults:
            faults.append(f"rank {rank}: its heads or states exceed their bounds")
        timed = cuda and not faults
        if timed:
            progress("times of the layers")
            matmul = _time_layers(rows, sequence, steps, ceiling)
        if timed and whole is not None and steps[-1][1]:  # otherwise the decode step is all eager
            progress("times of decode steps")
            whole |= _decode_on_gpu(sequence, decode)
    return Result(rows, whole, skipped, faults, matmul)


def on_rank(model: Model, tokens: Sequence[int], shape: tuple[int, ...], impl: Sequence[str], layer: str | None) -> None:
    """What another rank does of `run`."""
    run(model, tokens, Shape(*shape), impl=impl, layer=layer)


def _over_text(
    model: Model, sequence: Sequence[Place], tokens: list[int], progress: Callable[[str], None]
) -> tuple[Row, list[str]]:
    """Compare the whole model over a text. Returns the row, without the times of the decode step, and the broken bounds."""
    quantized = model.kv_dtype == FP8 or any(compare_layers.rounds_activations(place.layer) for place in sequence)
    least = floor(model.dtype, quantized).worst_row  # a changed e4m3 code changes codes in later layers
    text = compare_text(model, sequence, tokens, Floor(least, least), lambda share: progress(f"whole model: {share:.0%}"))
    figures = {name: _number(value) for name, value in asdict(text).items() if name != "faults"}
    return {"text": figures, "decode": None, "fusion": {}}, [f"whole model, {len(tokens)} tokens: {f}" for f in text.faults]


def _cycled(tokens: Sequence[int], first: int, count: int) -> list[int]:
    return [tokens[(first + i) % len(tokens)] for i in range(count)]


_NO_TIME: Row = dict.fromkeys(("eager_s", "candidate_s", "speedup", "cold_l2", "limit_s", "share_of_limit"))


def _compared(place: Place, step: EagerStep) -> tuple[Row, list[str]]:
    """Compare one layer in one step. Returns its row, without times, and its broken bounds."""
    compared = compare_layers.compare(place, step)
    needed = compare_layers.cost(place, step)
    row = {
        "step": step.name, "layer": place.layer.name, "kind": place.layer.kind, "implementation": place.name,
        "tokens": step.batch.num_tokens, "rows": step.rows(place), "within_bounds": not compared.faults,
        "faults": compared.faults, **_error_columns(compared), "bytes": needed.bytes, "flops": needed.flops, **_NO_TIME,
    }
    return row, [f"{place.layer.name}, {step.name}: {fault}" for fault in compared.faults]


def _error_columns(compared: Comparison) -> Row:
    """Return, for each view, the candidate's errors, PyTorch's errors and the limit. Missing values are None."""
    columns: Row = {}
    for name in dict.fromkeys((*compare_layers.VIEWS, *compared.candidate)):
        most = compared.limits.get(name)
        columns[name] = {
            "error": _finite(compared.candidate.get(name)), "torch": _finite(compared.torch.get(name)),
            "limit": most._asdict() if most else dict.fromkeys(Floor._fields),
        }
    return columns


def _finite(errors: Errors | None) -> Row:
    return {name: _number(getattr(errors, name)) if errors else None for name in Errors._fields}


def _number(value: float) -> float | None:
    """Return None for NaN and infinity, which JSON lacks."""
    return value if math.isfinite(value) else None


def _group(place: Place, step: EagerStep) -> tuple[str, str, int]:
    return place.layer.kind, place.name, step.rows(place)


def _time_layers(
    rows: Sequence[Row], sequence: Sequence[Place], steps: Sequence[tuple[EagerStep, list[Place]]], ceiling: Ceiling | None
) -> list[Row]:
    """Fill in the times of `rows` on a GPU, and return the measured rates of matrix products that their limits use.

    All layers of the model with the same kind, implementation and number of rows are timed together, also those that are not
    compared: see `timing.layer_times`.
    """
    times: dict[tuple[Any, ...], tuple[float, float, bool]] = {}
    rates: dict[torch.dtype, MatmulCeiling] = {}
    pairs = [(step, place) for step, places in steps for place in places]
    for row, (step, place) in zip(rows, pairs, strict=True):
        key = step.name, *_group(place, step)
        if key not in times:
            group = [p for p in sequence if _group(p, step) == _group(place, step)]
            times[key] = timing.layer_times(group, step, row["bytes"] * len(group))
        dtype = FP8 if compare_layers.quantizes(place, step) else step.inputs[-1].dtype
        if dtype not in rates:
            rates[dtype] = matmul_ceiling(step.batch.device, dtype)
        least = max(row["flops"] / rates[dtype].flops_per_s, row["bytes"] / ceiling.bytes_per_s if ceiling else 0.0)
        eager, candidate, cold = times[key]
        row |= {"eager_s": eager, "candidate_s": candidate, "speedup": eager / candidate, "cold_l2": cold, "limit_s": least}
        row["share_of_limit"] = least / candidate
    return [vars(rate) for rate in rates.values()]


def _decode_on_gpu(sequence: Sequence[Place], step: EagerStep) -> Row:
    """Return the times of a decode step on a GPU as a row: all layers eager, all candidates, and one kind of layer eager."""
    variants = {"eager": [p.eager for p in sequence], "candidate": [p.candidate for p in sequence]}
    for kind in dict.fromkeys(place.layer.kind for place in sequence if place.differs and not place.layer.selects_rows):
        variants[kind] = [p.eager if p.layer.kind == kind else p.candidate for p in sequence]
    launched, seconds = timing.launched_time(variants["eager"], sequence, step), timing.step_times(variants, sequence, step)
    batch, eager, best = step.batch.num_seqs, seconds.pop("eager"), seconds.pop("candidate")
    decode = {
        "batch_size": batch, "context_len": step.batch.max_seq_len, "launched_s": launched, "eager_s": eager, "candidate_s": best,
        "launched_tokens_per_s": batch / launched, "eager_tokens_per_s": batch / eager, "candidate_tokens_per_s": batch / best,
        "speedup": eager / best,
    }  # fmt: skip
    fusion = {kind: {"step_s": s, "brings_s": s - best, "speedup": s / best} for kind, s in seconds.items()}
    return {"decode": decode, "fusion": fusion}
