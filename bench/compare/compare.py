"""`minirt compare`: each layer's implementation against its eager form, then the whole model, then their times.

Errors come first, and where one breaks its bound (`bounds`) nothing is timed: a speed of something else is none.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from minirt.bench.bounds import Errors, Floor, floor
from minirt.bench.ceiling import Ceiling, MatmulCeiling, matmul_ceiling
from minirt.bench.compare import layers as compare_layers
from minirt.bench.compare import timing
from minirt.bench.compare.layers import Comparison, Place, Step
from minirt.bench.compare.model import compare_text
from minirt.bench.compare.timing import LayerTime
from minirt.device import on_device
from minirt.errors import ContextLengthError, InputError, UnsupportedError
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.layers import KINDS, Forward, has_implementation, implementation
from minirt.modeling.formats import FP8
from minirt.modeling.model import Model, some_names

Row = dict[str, Any]
DECODED = tuple(kind for kind in KINDS if kind != "select")  # kinds that decode steps compute: there `Select` leaves every row


@dataclass(frozen=True)
class Shape:
    """What is run: a prompt of `prompt_len` tokens, a decode step of `batch_size` sequences that then have `context_len` tokens,
    and `text_len` tokens of text through the whole model (0: not)."""

    prompt_len: int
    batch_size: int
    context_len: int
    text_len: int

    def check(self, model: Model, available: int) -> None:
        """Refuse what the model has no positions for, or the text no tokens.

        Raises:
            ContextLengthError, InputError: with the option that is too large.
        """
        lengths = {"--prompt-len": self.prompt_len, "--context-len": self.context_len, "--num-tokens": self.text_len}
        for flag, length in lengths.items():
            if length > model.max_model_len:
                raise ContextLengthError(
                    "longer than the model allows", where=flag, expected=f"at most {model.max_model_len}", found=length
                )
        if self.text_len > available:
            hint = "give a longer --text, or a smaller --num-tokens"
            expected = f"at most {available}"
            raise InputError("the text is too short", where="--num-tokens", expected=expected, found=self.text_len, hint=hint)


@dataclass(frozen=True)
class Result:
    """`rows`: one for each step and layer; `model`: what the whole model came to, None where single layers were asked for;
    `skipped`: the layers that Triton cannot run, and why; `faults`: broken bounds, each with its place and both figures;
    `matmul`: the speeds of matrix products that limits were taken from, as `matmul_ceiling` found them."""

    rows: list[Row]
    model: Row | None
    skipped: dict[str, str]
    faults: list[str]
    matmul: list[Row] = field(default_factory=list)


def bind(model: Model, impl: Sequence[str]) -> dict[str, str]:
    """Bind the model's layers to what is compared with eager: `impl`, or else Triton wherever it can run.

    Returns:
        the layers that Triton cannot run, each with the reason; they are bound to eager.
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
    """The places to compare: those whose layer's name matches, or all.

    Raises:
        UnsupportedError: no layer has such a name, or all that do would be compared with themselves.
    """
    named = [place for place in sequence if pattern is None or fnmatchcase(place.layer.name, pattern)]
    if not named:
        found, expected = some_names([place.layer for place in sequence]), "a name or glob such as 'layers.*.mlp'"
        raise UnsupportedError(f"--layer {pattern} matches no layer", expected=expected, found=found)
    chosen = [place for place in named if place.differs]
    if not chosen:
        why = skipped.get(named[0].layer.name, "--impl says so")
        raise UnsupportedError("nothing to compare: it runs its eager form", where=named[0].layer.name, found=why)
    return chosen


def run(
    model: Model,
    tokens: Sequence[int],
    shape: Shape,
    *,
    impl: Sequence[str] = (),
    layer: str | None = None,
    ceiling: Ceiling | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Result:
    """Compare.

    Args:
        model: allocated and filled; it is bound anew.
        tokens: of a text; where a step needs more, they begin again.
        impl: see `bind`.
        layer: name or glob of the layers to compare; None: all, and the whole model after them.
        ceiling: what the memory can be read with; only on a GPU, where there are limits.
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
    with on_device(model.device):
        prompt = compare_layers.prefill(model, sequence, _cycled(tokens, 0, shape.prompt_len))
        decode = compare_layers.decode(model, sequence, texts)
        steps = [(step, [place for place in chosen if step.computes(place)]) for step in (prompt, decode)]
        if not any(places for _, places in steps):
            what = "nothing to compare: of a step all of whose rows need logits it returns its input"
            raise UnsupportedError(what, where=chosen[0].layer.name, hint="take a --prompt-len above 1")
        if cuda:
            compare_layers.compile_kernels(steps)
        for step, places in steps:
            for place in places:
                row, broken = _compared(place, step, cuda)
                rows.append(row)
                faults += broken
            progress(f"{step.name}: {len(places)} layers compared")
        if layer is None:
            whole, broken = _over_text(model, sequence, list(tokens[: shape.text_len]))
            faults += broken
            progress(f"whole model: {shape.text_len} tokens compared")
        if faults:
            return Result([row | _NO_TIME for row in rows], whole, skipped, faults)
        if cuda:
            matmul = _time_layers(rows, sequence, steps, ceiling)
        if whole is not None and steps[-1][1]:  # else every layer of the decode step is as it was
            whole |= _decode_on_gpu(sequence, decode) if cuda else _decode_on_cpu(rows, sequence, decode)
    return Result(rows, whole, skipped, faults, matmul)


def _over_text(model: Model, sequence: Sequence[Place], tokens: list[int]) -> tuple[Row, list[str]]:
    """What the whole model is over a text, its decode step still to be timed; and what breaks a bound."""
    quantized = model.kv_dtype == FP8 or any(linear.format for place in sequence for linear in place.layer.linears())
    least = floor(model.dtype, quantized).worst_row  # a value that takes another code in one layer has others do so behind it
    text = compare_text(model, sequence, tokens, Floor(least, least))
    figures = {name: _number(value) for name, value in asdict(text).items() if name != "faults"}
    return {"text": figures, "decode": None, "fusion": {}}, [f"whole model, {len(tokens)} tokens: {f}" for f in text.faults]


def _cycled(tokens: Sequence[int], first: int, count: int) -> list[int]:
    return [tokens[(first + i) % len(tokens)] for i in range(count)]


_NO_TIME: Row = dict.fromkeys(("eager_s", "candidate_s", "speedup", "cold_l2", "limit_s", "share_of_limit"))


def _compared(place: Place, step: Step, cuda: bool) -> tuple[Row, list[str]]:
    """The row of one layer in one step, and its faults. On a CPU the calls that are compared are the ones that are timed: the
    interpreter takes a minute for some of them."""
    if cuda:
        compared = compare_layers.compare(place, step)
        time = _NO_TIME
    else:
        watched, eager, candidate = timing.timed(place)
        compared = compare_layers.compare(watched, step)
        time = _NO_TIME | _times(eager.seconds, candidate.seconds)
    needed = compare_layers.work(place, step)
    row = {
        "step": step.name,
        "layer": place.layer.name,
        "kind": place.layer.kind,
        "implementation": place.name,
        "tokens": step.batch.num_tokens,
        "rows": step.rows(place),
        "within_bounds": not compared.faults,
        "faults": compared.faults,
        **_error_columns(compared),
        "bytes": needed.bytes,
        "flops": needed.flops,
        **time,
    }
    return row, [f"{place.layer.name}, {step.name}: {fault}" for fault in compared.faults]


def _error_columns(compared: Comparison) -> Row:
    """For each of the views: the candidate's errors, PyTorch's, and the limit; None where there is no such thing."""
    columns: Row = {}
    for name in compare_layers.VIEWS:
        most = compared.limits.get(name)
        columns[name] = {
            "error": _finite(compared.found.get(name)),
            "torch": _finite(compared.torch.get(name)),
            "limit": most._asdict() if most else dict.fromkeys(Floor._fields),
        }
    return columns


def _finite(errors: Errors | None) -> Row:
    return {name: _number(getattr(errors, name)) if errors else None for name in Errors._fields}


def _number(value: float) -> float | None:
    """As JSON has it: no NaN, no infinity."""
    return value if math.isfinite(value) else None


def _group(place: Place, step: Step) -> tuple[str, str, int]:
    return place.layer.kind, place.name, step.rows(place)


def _time_layers(
    rows: Sequence[Row], sequence: Sequence[Place], steps: Sequence[tuple[Step, list[Place]]], ceiling: Ceiling | None
) -> list[Row]:
    """Fill in the times of `rows`, on a GPU. Layers of one kind with as many rows are timed together, all that the model has,
    whichever are shown: see `timing.layer_times`. → the ceilings of matrix products that their limits come from."""
    times: dict[tuple[Any, ...], LayerTime] = {}
    rates: dict[torch.dtype, MatmulCeiling] = {}
    pairs = [(step, place) for step, places in steps for place in places]
    for row, (step, place) in zip(rows, pairs, strict=True):
        key = step.name, *_group(place, step)
        if key not in times:
            group = [p for p in sequence if _group(p, step) == _group(place, step)]
            times[key] = timing.layer_times(group, step, row["bytes"] * len(group))
        dtype = FP8 if compare_layers.quantizes(place, step) else step.inputs[-1].dtype
        if dtype not in rates:
            rates[dtype] = matmul_ceiling(step.batch.flat.device, dtype)
        least = max(row["flops"] / rates[dtype].flops_per_s, row["bytes"] / ceiling.bytes_per_s if ceiling else 0.0)
        row |= _times(times[key].eager_s, times[key].candidate_s) | {
            "cold_l2": times[key].cold, "limit_s": least, "share_of_limit": least / times[key].candidate_s
        }  # fmt: skip
    return [vars(rate) for rate in rates.values()]


def _times(eager: float, candidate: float) -> Row:
    return {"eager_s": eager, "candidate_s": candidate, "speedup": eager / candidate}


def _variants(sequence: Sequence[Place]) -> dict[str, list[Forward]]:
    """The model all eager, with the candidates, and with the candidates but for one kind of layer: a forward a place."""
    variants = {"eager": [p.eager for p in sequence], "candidate": [p.candidate for p in sequence]}
    kinds = {place.layer.kind for place in sequence if place.differs}
    for kind in (kind for kind in DECODED if kind in kinds):
        variants[kind] = [p.eager if p.layer.kind == kind else p.candidate for p in sequence]
    return variants


def _decode_on_gpu(sequence: Sequence[Place], step: Step) -> Row:
    variants = _variants(sequence)
    seconds = timing.step_times(variants, sequence, step)
    return _decode(step, seconds, timing.launched_time(variants["eager"], sequence, step))


def _decode_on_cpu(rows: Sequence[Row], sequence: Sequence[Place], step: Step) -> Row:
    """The sums of the layers' times: the interpreter's whole steps take minutes, and would say no more."""
    own = [row for row in rows if row["step"] == step.name]
    eager, candidate = (sum(row[side] for row in own) for side in ("eager_s", "candidate_s"))
    seconds = {"eager": eager, "candidate": candidate}
    for kind in list(_variants(sequence))[2:]:
        of_kind = [row for row in own if row["kind"] == kind]
        seconds[kind] = candidate + sum(row["eager_s"] - row["candidate_s"] for row in of_kind)
    return _decode(step, seconds, None)


def _decode(step: Step, seconds: dict[str, float], launched: float | None) -> Row:
    """`seconds` of a decode step by variant, see `_variants`: under CUDA graphs on a GPU, where `launched` is the eager step as
    Python launches it."""
    batch, best = step.batch.num_seqs, seconds["candidate"]
    decode = {
        "batch_size": batch,
        "context_len": step.batch.max_seq_len,
        "launched_s": launched,
        "eager_s": seconds["eager"],
        "candidate_s": best,
        "launched_tokens_per_s": batch / launched if launched else None,
        "eager_tokens_per_s": batch / seconds["eager"],
        "candidate_tokens_per_s": batch / best,
        "speedup": seconds["eager"] / best,
    }
    fusion = {
        kind: {"step_s": seconds[kind], "brings_s": seconds[kind] - best, "speedup": seconds[kind] / best}
        for kind in seconds
        if kind in DECODED
    }
    return {"decode": decode, "fusion": fusion}
