"""The gain of each fusion and each other trick of the Triton layers: decode steps with all tricks, and without one of them.

python bench/tools/ablation.py MODEL [--fp8] [BATCH …]     random weights; needs a GPU; prints JSON

A variant is the model with one function of `minirt.kernels` replaced by code that does the same without the trick. Its
logits must agree with those of the unchanged step. Steps are CUDA graphs that take turns. They have no sampler, except for the
trick that concerns sampling. Tricks that a step does not use are not listed.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minirt import Generator
from minirt.bench.ceiling import read_ceiling
from minirt.bench.compare import compare, timing
from minirt.bench.compare import layers as compare_layers
from minirt.bench.compare.layers import Place, Step
from minirt.bench.report import machine
from minirt.device import on_device
from minirt.engine.sampler import SamplingBatch, sample
from minirt.errors import MinirtError, NumericsError
from minirt.kernels import reference
from minirt.kernels.attention.limits import KV_SPLIT
from minirt.layers import Forward, implementation
from minirt.modeling.model import Model
from minirt.sampling_params import SamplingParams, resolve
from minirt.step.batch import Batch
from minirt.step.kv_cache import LayerKV

CONTEXT = 128
_TOLERANCE = {torch.bfloat16: 8 * 2**-7, torch.float16: 8 * 2**-10, torch.float32: 1e-4}  # the same as in `bench/check.py`
_FP8_NOISE = 0.2

Replacement = Callable[..., Any]  # called with the original function and its arguments


class Trick(NamedTuple):
    """A trick, and how to leave it out.

    Attributes:
        what: a description for the reader of a result.
        where, name: the module and the function that is replaced.
        without: computes the same without the trick. Raises Untouched if the function does not use the trick for its arguments.
    """

    what: str
    where: str
    name: str
    without: Replacement


class Untouched(Exception):
    """The original function does not use the trick for these arguments."""


def _norm_apart(original: Replacement, product: Any) -> Any:
    from minirt.kernels.norm import rms_norm

    own = original(product)
    if own.kernel != "gemv" or product.norm is None:
        raise Untouched

    def launch(product: Any) -> None:
        x, norm, pdl = product.x, product.norm, product.pdl
        x = rms_norm(x, norm.weight, norm.eps, early=True, pdl=pdl, check=False)
        own.launch(product._replace(x=x, norm=None))

    return replace(own, launch=launch)


def _quantization_apart(original: Replacement, x: Tensor, norm_weight: Tensor, eps: float, **options: Any) -> Any:
    from minirt.kernels.norm import rms_norm
    from minirt.kernels.quantize import quantize

    norm = {name: value for name, value in options.items() if name != "blocks"}  # which scales the values get
    return quantize(rms_norm(x, norm_weight, eps, **norm), **options)


def _residual_apart(
    original: Replacement, x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None, **options: Any
) -> Tensor:
    from minirt.kernels.linear.dispatch import norm_linear

    return norm_linear(x, None, 0.0, weight, bias, **options) + residual


def _activation_apart(
    original: Replacement, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, activation: str, **options: Any
) -> Tensor:
    from minirt.kernels.linear.dispatch import norm_linear

    return reference.gated(norm_linear(x, norm_weight, eps, weight, options.pop("bias"), **options), activation)


def _rope_apart(original: Replacement, a: Any) -> Tensor:
    from minirt.kernels.attention.rope_write import launch

    q = torch.empty_like(a.out)
    launch(a.heads, a.rope, a.pages, a.positions, a.slots, q, a.pdl)
    return original(a._replace(heads=q, rope=None))


def _combined(original: Replacement, a: Any) -> Tensor:
    if a.max_seq_len > a.split:
        raise Untouched
    return original(a._replace(max_seq_len=None))


def _tensor_cores(original: Replacement, product: Any) -> Any:
    from minirt.kernels.linear.gemm_small import gemm_small
    from minirt.kernels.norm import rms_norm
    from minirt.kernels.quantize import quantize

    own = original(product)
    if own.kernel != "gemv":
        raise Untouched

    def launch(product: Any) -> None:
        x, norm, ep, pdl, x_scale = product.x, product.norm, product.epilogue, product.pdl, None
        if norm is not None:
            x = rms_norm(x, norm.weight, norm.eps, early=True, pdl=pdl, check=False)
        if ep.scale is not None:
            x, x_scale = quantize(x, blocks=ep.scale.ndim == 2, early=True, pdl=pdl, check=False)
        gemm_small(product._replace(x=x, norm=None, epilogue=ep._replace(x_scale=x_scale), workspace=None))

    return replace(own, launch=launch)


def _k_whole(original: Replacement, product: Any) -> Any:
    own = original(product)
    if own.kernel != "gemm_small" or product.workspace is None:
        raise Untouched
    return replace(own, launch=lambda product: own.launch(product._replace(workspace=None)))


def _no_tma(original: Replacement, product: Any) -> Any:
    from minirt.kernels.linear.gemm_small import FAMILY, token_block

    own = original(product)
    if own.kernel != "gemm_small":
        raise Untouched
    config = FAMILY.lookup(product.x.device, product.facts(token_block(product.x.shape[0])))
    if not config.tma:
        raise Untouched
    return replace(own, launch=partial(own.launch, config=replace(config, tma=False)))


def _without_gemm_sm90(original: Replacement, product: Any) -> Any:
    from minirt.kernels.linear.dispatch import REGIMES
    from minirt.kernels.regimes import covering

    if original(product).kernel != "gemm_sm90":
        raise Untouched
    found = covering(REGIMES, product.x.shape[0], 90, product.format)
    return next(own for own in found if own.kernel != "gemm_sm90" and own.accepts(product))


def _without_decode_sm90(original: Replacement, operands: Any) -> Any:
    from minirt.kernels.attention.dispatch import DECODE

    if original(operands).kernel != "decode_sm90":
        raise Untouched
    return DECODE[-1]


_KERNELS = "minirt.kernels"
TRICKS = {
    "norm": Trick("the norm in the product's kernel (one token)", f"{_KERNELS}.linear.dispatch", "regime", _norm_apart),
    "quantize": Trick(
        "norm and quantization in one kernel", f"{_KERNELS}.linear.dispatch", "rms_norm_quantize", _quantization_apart
    ),
    "residual": Trick(
        "the residual in the product's epilogue", f"{_KERNELS}.linear.dispatch", "linear_residual", _residual_apart
    ),
    "activation": Trick("SwiGLU in the product's epilogue", f"{_KERNELS}.linear.dispatch", "norm_gate_up", _activation_apart),
    "rope": Trick("rotation and KV write inside attention", f"{_KERNELS}.attention.dispatch", "attention", _rope_apart),
    "combine": Trick(
        "nothing combined where no sequence is split", f"{_KERNELS}.attention.dispatch", "attention", _combined
    ),
    "fma": Trick("products of one token by FMA, not tensor cores", f"{_KERNELS}.linear.dispatch", "regime", _tensor_cores),
    "split_k": Trick("K split where there are few tiles", f"{_KERNELS}.linear.dispatch", "regime", _k_whole),
    "tma": Trick("weights fetched by TMA", f"{_KERNELS}.linear.dispatch", "regime", _no_tma),
    "hopper": Trick("the warp-specialized GEMM", f"{_KERNELS}.linear.dispatch", "regime", _without_gemm_sm90),
    "fetching": Trick(
        "pages fetched by a warp of their own", f"{_KERNELS}.attention.dispatch", "decode_regime", _without_decode_sm90
    ),
}


@contextmanager
def without(trick: Trick, used: list[str]) -> Iterator[None]:
    """Context manager that leaves out a trick. Every call of the replacement appends to `used`."""
    module = import_module(trick.where)
    original = getattr(module, trick.name)

    def call(*args: Any, **options: Any) -> Any:
        try:
            result = trick.without(original, *args, **options)
        except Untouched:
            return original(*args, **options)
        used.append(trick.name)
        return result

    setattr(module, trick.name, call)
    try:
        yield
    finally:
        setattr(module, trick.name, original)


def forwards(sequence: Sequence[Place], trick: Trick) -> tuple[list[Forward], list[str]]:
    """Return a forward for each place without the trick, and a list that grows with every call of the replacement."""
    used: list[str] = []

    def bound(place: Place) -> Forward:
        with without(trick, used):
            own = implementation(place.layer.kind, "triton").factory(place.layer)

        def forward(x: Tensor, batch: Batch, kv: LayerKV | None) -> Tensor:
            with without(trick, used):
                return own(x, batch, kv)

        return forward

    return [bound(place) for place in sequence], used


@contextmanager
def _launches_in_turn(model: Model) -> Iterator[None]:
    """Context manager: layers whose implementations are made within it do not use PDL."""
    shared = model.layers[0].context
    before = shared.pdl
    shared.__dict__["pdl"] = False
    try:
        yield
    finally:
        shared.__dict__["pdl"] = before


def variants(model: Model, sequence: Sequence[Place], step: Step) -> dict[str, list[Forward]]:
    """Return the unchanged step ("all") and one variant without each trick that it uses, after comparing their logits.

    Raises:
        NumericsError: the logits of a variant differ.
    """
    result = {"all": [place.candidate for place in sequence]}
    expected = compare_layers.stream(result["all"], sequence, step.batch, step.cache).float()
    found: dict[str, list[Forward]] = {}
    for name, trick in TRICKS.items():
        own, used = forwards(sequence, trick)
        logits = compare_layers.stream(own, sequence, step.batch, step.cache)
        if used:
            found[name] = own
            _agree(name, logits, expected, model)
    if model.layers[0].context.pdl:
        with _launches_in_turn(model):
            found["pdl"] = [implementation(place.layer.kind, "triton").factory(place.layer) for place in sequence]
        _agree("pdl", compare_layers.stream(found["pdl"], sequence, step.batch, step.cache), expected, model)
    return result | found


def greedy(model: Model, sequence: Sequence[Place], step: Step) -> dict[str, list[Forward]]:
    """Return two variants of the step with the greedy sampler: it reads the "logits", or the "row_maxima" of the LM head.

    The result is empty if the head stores no row maxima.

    Raises:
        NumericsError: the variants sample different tokens.
    """
    from minirt.kernels.linear.product import RowMaxima
    from minirt.kernels.sampling.sample import SamplingWorkspace

    *others, head = [place.candidate for place in sequence]
    B, V = compare_layers.stream([*others, head], sequence, step.batch, step.cache).shape
    device, tiles = step.batch.device, model.row_maxima_tiles(B)
    if not tiles:
        return {}
    values = torch.zeros(B, tiles, dtype=torch.int64, device=device)
    row_maxima = RowMaxima(values, torch.zeros(1, dtype=torch.int32, device=device))
    settings = SamplingBatch.build([(resolve(SamplingParams(temperature=0.0), None), 0)] * B, device)
    workspace = SamplingWorkspace(B, V, device)

    def over_logits(x: Tensor, batch: Batch, kv: LayerKV | None) -> Tensor:
        return sample(head(x, batch, kv), settings, "triton", workspace)

    def over_row_maxima(x: Tensor, batch: Batch, kv: LayerKV | None) -> Tensor:
        logits = head(x, replace(batch, row_maxima=row_maxima), kv)
        return sample(logits, settings, "triton", workspace, row_maxima=values)

    found = {"logits": [*others, over_logits], "row_maxima": [*others, over_row_maxima]}
    tokens = [compare_layers.stream(own, sequence, step.batch, step.cache) for own in found.values()]
    if not torch.equal(*tokens):
        raise NumericsError("the tokens differ", where="row_maxima", expected=tokens[0].tolist(), found=tokens[1].tolist())
    return found


def _agree(name: str, logits: Tensor, expected: Tensor, model: Model) -> None:
    error = ((logits.float() - expected).norm() / expected.norm()).item()
    fp8 = any(weights.format for layer in model.layers for weights in layer.quantizable())
    most = _FP8_NOISE if fp8 else _TOLERANCE[model.dtype]
    if not error <= most:
        raise NumericsError("the logits of a variant differ", where=name, expected=f"at most {most:.1e}", found=f"{error:.1e}")


@torch.inference_mode()
def measure(model: Model, tokens: Sequence[int], batch: int) -> dict[str, Any]:
    """Measure a decode step of `batch` sequences with CONTEXT tokens in every variant, on a GPU."""
    sequence = compare_layers.places(model)
    model.reserve_splits(batch * -(-CONTEXT // KV_SPLIT))
    texts = [[tokens[(17 * i + j) % len(tokens)] for j in range(CONTEXT)] for i in range(batch)]
    with on_device(model.device):
        step = compare_layers.decode(model, sequence, texts)
        own = variants(model, sequence, step) | greedy(model, sequence, step)
        seconds = timing.step_times(own, sequence, step)
        launched = timing.launched_time(own["all"], sequence, step)
    best, row_maxima, logits = seconds.pop("all"), seconds.pop("row_maxima", None), seconds.pop("logits", None)
    rows = {name: {"without_s": s, "brings_s": s - best} for name, s in seconds.items()}
    rows["graph"] = {"without_s": launched, "brings_s": launched - best}
    if row_maxima and logits:
        rows["row_maxima"] = {"without_s": logits, "brings_s": logits - row_maxima}
    return {"batch_size": batch, "context_len": CONTEXT, "step_s": best, "tricks": rows}


def main(words: list[str]) -> None:
    names = [word for word in words if not word.isdecimal() and word != "--fp8"]
    if len(names) != 1:
        raise MinirtError("expected one model", found=" ".join(names) or "none", hint="ablation.py MODEL [--fp8] [BATCH …]")
    batches = [int(word) for word in words if word.isdecimal()] or [1, 8, 64, 256]
    load = partial(Generator.from_pretrained, names[0], device="cuda", impl="eager", random_weights=True, warmup=False)
    with load(quantization="fp8" if "--fp8" in words else None, max_num_seqs=1, kv_cache_memory=256 << 20) as generator:
        model: Any = generator.model
        ceiling = read_ceiling(model.device)
        compare.bind(model, ())
        tokens = torch.randint(model.config.vocab_size, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
        results = [measure(model, tokens, batch) for batch in batches]
        shared = machine("ablation", model.device, ["python", "bench/tools/ablation.py", *words], ceiling)
    what = {name: trick.what for name, trick in TRICKS.items()}
    what |= {"pdl": "programmatic dependent launch", "graph": "the CUDA graph"}
    what |= {"row_maxima": "the LM head stores each tile's largest logit for the greedy sampler (both steps have a sampler)"}
    correctness = {"checked": True, "against": "the logits of the unchanged step"}
    own = {"model": names[0], "quantization": "fp8" if "--fp8" in words else None, "what": what, "correctness": correctness}
    print(json.dumps(shared | own | {"results": results}, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main(sys.argv[1:])
