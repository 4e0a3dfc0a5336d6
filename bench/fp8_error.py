"""The error that FP8 rounding alone causes in each linear layer, on real activations.

This error belongs to the format, not to a kernel. `minirt compare --fp8` measures the error of kernels: it compares them on the
same FP8 weights.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minirt.bench.report import markdown_table
from minirt.errors import ConfigError, InputError, UnsupportedError
from minirt.kernels.reference import linear_fp8
from minirt.layers import Forward, Layer, implementation
from minirt.modeling.formats import CHUNK
from minirt.modeling.model import Model
from minirt.modeling.parameters import PackedLinear
from minirt.step.batch import Batch, Chunk
from minirt.step.kv_cache import PAGE_SIZE, KVCache


class FormatError(NamedTuple):
    """Errors of one quantized linear against the same linear in 16 or 32 bits. All are relative, in the Frobenius norm.

    Attributes:
        layer, linear, shape: for example `layers.3.mlp`, `gate_up`, (N, K).
        weights: error of the weights.
        one: error of the outputs in steps of one token, whose activations are not quantized.
        many: error of the outputs in steps of several tokens, whose activations are quantized too.
        worst: as `many`, but of the single token with the largest error.
    """

    layer: str
    linear: str
    shape: tuple[int, int]
    weights: float
    one: float
    many: float
    worst: float


class _Probe(Tensor):
    """Weights that store in `seen` the input of the last linear they were used in."""

    seen: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            args[1].seen = args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@torch.inference_mode()
def format_errors(plain: Model, quantized: Model, tokens: Sequence[int]) -> list[FormatError]:
    """Measure the FP8 error of every linear that is FP8 in `quantized` but not in `plain`, the same model.

    All activations come from the eager layers of `plain`, so errors do not accumulate over layers. The exact results are in fp64.

    Args:
        plain, quantized: models with allocated, filled weights on one device. Their implementations do not matter.
        tokens: tokens of a text; at least two, because a single token's activations are never quantized.
    Returns:
        the errors, in order of layers.
    Raises:
        InputError: fewer than two tokens, or more than the plain model has positions for.
        ConfigError: the models have different layers, or the plain one is quantized too.
    """
    if not 2 <= len(tokens) <= plain.max_model_len:
        expected = f"from 2 to {plain.max_model_len} tokens"
        raise InputError("cannot measure on this many tokens", where="text", expected=expected, found=len(tokens))
    if [layer.name for layer in plain.layers] != [layer.name for layer in quantized.layers]:
        raise ConfigError("not the same layers", where="format_errors", expected="one model in two formats")
    if any(weights.format for layer in plain.layers for weights in layer.quantizable()):
        raise ConfigError("already quantized", where="format_errors", expected="the first model in its own dtype")
    cache = KVCache(plain.cache_specs, -(-len(tokens) // PAGE_SIZE), plain.device, plain.dtype, num_slots=1)
    pages = cache.allocator.allocate(cache.num_pages)
    batch = Batch.build([Chunk(list(tokens), 0, pages, num_logits=len(tokens), slot=0)], cache.page_size).to(plain.device)
    kept = iter(cache.layers)
    x, results = torch.empty(0, device=plain.device), []
    for layer, other in zip(plain.layers, quantized.layers, strict=True):
        forward, probed = _probed(layer)
        x = forward(x, batch, None if layer.cache_spec is None else next(kept))
        for name, probe in probed.items():
            twin = getattr(other, name)
            if twin.scale is not None:
                results.append(_errors(layer.name, name, probe, twin))
    return results


def _probed(layer: Layer) -> tuple[Forward, dict[str, _Probe]]:
    """Return the layer's eager implementation with probes as the weights of its linears, and the probes by name."""
    twin, probed = copy.copy(layer), {}
    for name, holder in vars(layer).items():
        if isinstance(holder, PackedLinear):
            linear, probed[name] = copy.copy(holder), holder.weight.as_subclass(_Probe)
            linear.weight = probed[name]
            setattr(twin, name, linear)
    return implementation(layer.kind, "eager").factory(twin), probed


def _errors(layer: str, name: str, probe: _Probe, quantized: PackedLinear) -> FormatError:
    if not hasattr(probe, "seen"):
        what, hint = "the FP8 error of experts cannot be measured yet", "minirt eval perplexity measures the whole model"
        raise UnsupportedError(what, where=f"{layer}.{name}", hint=hint)
    x, weight, scale = probe.seen, probe.as_subclass(Tensor), quantized.scale
    if scale is None:
        raise ConfigError("not quantized", where=f"{layer}.{name}")
    wide = x.double()
    # Squared norms of each token: truth, one, many.
    sums = [torch.zeros(len(x), device=x.device, dtype=torch.float64) for _ in range(3)]
    difference = size = 0.0
    for rows in _chunks(weight):
        exact, e4m3 = weight[rows].double(), quantized.weight[rows]
        delta = e4m3.double() * scale[rows].double().unsqueeze(1) - exact
        difference, size = difference + float(delta.square().sum()), size + float(exact.square().sum())
        truth = wide @ exact.T
        for total, y in zip(sums, (truth, wide @ delta.T, linear_fp8(x, e4m3, scale[rows]).double() - truth), strict=True):
            total += y.square().sum(1)
    truth, one, many = sums
    return FormatError(
        layer, name, (weight.shape[0], weight.shape[1]), _root(difference, size), _root(float(one.sum()), float(truth.sum())),
        _root(float(many.sum()), float(truth.sum())), max(map(_root, many.tolist(), truth.tolist())),
    )  # fmt: skip


def _chunks(weight: Tensor) -> Iterator[slice]:
    """Yield slices of rows with at most CHUNK weights each, which limits the memory for fp64 copies."""
    step = max(1, CHUNK // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        yield slice(start, start + step)


def _root(error: float, size: float) -> float:
    """Return sqrt(error / size), and 0 if both are 0."""
    return (error / size) ** 0.5 if size else (0.0 if error == 0 else float("inf"))


def table(errors: Sequence[FormatError]) -> str:
    """Return the errors as a Markdown table in percent. The last rows are root mean squares over all linears of one name."""
    rows = [[e.layer, e.linear, *map(_percent, (e.weights, e.one, e.many, e.worst))] for e in errors]
    for name in dict.fromkeys(e.linear for e in errors):
        same = [e for e in errors if e.linear == name]
        means = [(sum(v * v for v in column) / len(same)) ** 0.5 for column in zip(*(e[3:6] for e in same), strict=True)]
        rows.append([f"all {len(same)}", name, *map(_percent, (*means, max(e.worst for e in same)))])
    heads = ("layer", "linear", "weights", "1 token", "more tokens", "worst token")
    return "\n".join(markdown_table(heads, rows, left=2)) + "\n"


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"
