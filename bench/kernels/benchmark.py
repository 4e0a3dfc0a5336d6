"""`minirt bench kernels`: every kernel on a model's shapes, checked, then timed against the eager code and PyTorch's own kernels.

Each implementation is timed alone, with none of its inputs in the L2 cache. The implementations take turns, so that changes in
clock or load affect all of them. On a CPU the Triton kernel runs in Triton's interpreter: errors are valid there, times are not.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minirt.bench.bounds import Errors, errors, fault
from minirt.bench.ceiling import Ceiling, MatmulCeiling, matmul_ceiling, read_ceiling
from minirt.bench.kernels import attention_operations as attention
from minirt.bench.kernels import expert_operations as mixture
from minirt.bench.kernels import operations as ops
from minirt.bench.kernels.operations import FP8, Form, Problem, Step
from minirt.bench.measure import gpu_seconds
from minirt.bench.report import Row
from minirt.bench.summary import summarize
from minirt.device import is_out_of_memory
from minirt.errors import InputError, UnsupportedError
from minirt.modeling.config import ModelConfig

_WARM = 2

_FEW, _ROWS = ((1, 0), (64, 0), (256, 0)), ((1, 0), (64, 0), (2048, 0), (8192, 0))
_LINEAR = ((1, 0), (8, 0), (64, 0), (256, 0), (2048, 0), (8192, 0))
_EXPERTS = tuple((tokens, 0) for tokens in (1, 3, 8, 24, 64, 100, 256, 512, 2048))
_MANY = ((129, 0), (300, 0), (512, 0), (2048, 0), (8192, 0))
_PREFILL = ((512, 0), (2048, 0), (8192, 0), (32768, 0), (2, 32766), (16, 32752), (512, 8192))
_DECODE = ((1, 128), (1, 1000), (1, 8000), (1, 32768), (8, 1000), (64, 128), (64, 1000), (64, 8000), (256, 128), (256, 1000))


@dataclass(frozen=True)
class Operation:
    """One entry of OPERATIONS.

    Attributes:
        build: makes the operation's `Problem` for a step.
        what: a description for the reader of a result.
        points: (tokens, context) to measure by default.
        context: what the context means for this operation; "": it has none.
    """

    build: Callable[[Step], Problem]
    what: str
    points: tuple[tuple[int, int], ...]
    context: str = ""


def _operations() -> dict[str, Operation]:
    table = {
        "embedding": Operation(ops.embedding, "rows of the embedding table", _ROWS),
        "rms_norm": Operation(ops.rms_norm, "RMSNorm", _ROWS),
        "rms_norm_quantize": Operation(partial(ops.rms_norm, quantized=True), "RMSNorm and FP8 quantization", _ROWS),
        "quantize": Operation(ops.quantize, "FP8 quantization with one scale per token", _ROWS),
        "rope_kv_write": Operation(partial(attention.rope_kv_write, normalize=False), "RoPE and KV write", _ROWS),
        "rope_kv_write.fp8": Operation(
            partial(attention.rope_kv_write, normalize=False, fp8=True), "RoPE and KV write to FP8 pages", _ROWS
        ),
        "qk_norm_rope_kv_write": Operation(
            partial(attention.rope_kv_write, normalize=True), "RMSNorm of q and k, RoPE, KV write", _ROWS
        ),
        "mlp": Operation(ops.mlp, "gated MLP: norm, gate/up, activation, down, residual", _LINEAR),
        "mlp_gelu": Operation(partial(ops.mlp, activation="gelu"), "gated MLP with GELU", _LINEAR),
        "experts_route": Operation(mixture.route, "a mixture's choice of experts; tokens sorted by expert", _EXPERTS),
        "experts": Operation(mixture.experts, "a mixture's chosen experts and the residual", _EXPERTS),
        "experts.fp8": Operation(
            partial(mixture.experts, quantization="fp8"), "the same with FP8 weights, tokens quantized on the way", _EXPERTS
        ),
        "experts.fp8_blocks": Operation(
            partial(mixture.experts, quantization="fp8_blocks"), "the same with FP8 weights in blocks of 128 x 128", _EXPERTS
        ),
        "residual_norm": Operation(ops.residual_norm, "down projection, residual, next norm", _LINEAR),
        "attention_prefill": Operation(
            attention.attention_prefill, "causal attention of new tokens on the pages", _PREFILL, "cached before them"
        ),
        "attention_prefill.fp8": Operation(
            partial(attention.attention_prefill, fp8=True), "the same on FP8 pages", _PREFILL, "cached before them"
        ),
        "attention_decode": Operation(
            attention.attention_decode, "RoPE, KV write and attention of a new token each", _DECODE, "tokens of each"
        ),
        "attention_decode.fp8": Operation(
            partial(attention.attention_decode, fp8=True), "the same on FP8 pages", _DECODE, "tokens of each"
        ),
        "sample_greedy": Operation(partial(ops.draw, temperature=0.0), "argmax of the logits", _FEW),
        "sample_top_p": Operation(partial(ops.draw, temperature=0.8, top_p=0.95), "a draw from the nucleus", _FEW),
    }
    fused = {
        "qkv": "RMSNorm and QKV projection", "o": "output projection and residual", "gate_up": "RMSNorm, gate/up, SwiGLU",
        "down": "down projection and residual", "lm_head": "RMSNorm and LM head, fp32 logits",
    }  # fmt: skip
    for name, what in fused.items():
        points = _FEW if name == "lm_head" else _LINEAR
        table[name] = Operation(partial(ops.fused_linear, name=name, quantization=None), what, points)
        table[f"{name}.fp8"] = Operation(
            partial(ops.fused_linear, name=name, quantization="fp8"), f"{what}; FP8 weights, tokens quantized on the way", points
        )
        table[f"{name}.int4"] = Operation(
            partial(ops.fused_linear, name=name, quantization="int4"), f"{what}; 4-bit weights", points
        )
        table[f"{name}.fp8_blocks"] = Operation(
            partial(ops.fused_linear, name=name, quantization="fp8_blocks"), f"{what}; FP8 weights in blocks of 128 x 128", points
        )
        if name != "lm_head":
            table[f"gemm_{name}"] = Operation(partial(ops.gemm, name=name, quantization=None), f"product of {name} alone", _MANY)
            table[f"gemm_{name}.fp8"] = Operation(
                partial(ops.gemm, name=name, quantization="fp8"), f"FP8 product of {name}, tokens quantized before", _MANY
            )
            table[f"gemm_{name}.fp8_blocks"] = Operation(
                partial(ops.gemm, name=name, quantization="fp8_blocks"), f"the same of {name} in blocks of 128 x 128", _MANY
            )
    return table


OPERATIONS = _operations()


@dataclass(frozen=True)
class Point:
    """One operation on one model's shapes."""

    name: str
    model: str
    step: Step

    def __str__(self) -> str:
        context = f" @ {self.step.context}" if OPERATIONS[self.name].context else ""
        return f"{self.name} {self.model} {self.step.tokens}{context}"


@dataclass(frozen=True)
class Limits:
    """The measured speeds that set the roofline; `products` maps an operand dtype to its rate. A CPU has no limits."""

    read: Ceiling
    products: dict[torch.dtype, MatmulCeiling]

    def seconds(self, problem: Problem) -> tuple[float, str]:
        """Return the least time in seconds and what determines it: "memory" or "arithmetic"."""
        nbytes, flops = problem.cost
        memory, arithmetic = nbytes / self.read.bytes_per_s, flops / self.products[problem.rate].flops_per_s
        return (memory, "memory") if memory >= arithmetic else (arithmetic, "arithmetic")


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """Measure the limits of a GPU, with FP8 products if the GPU supports them."""
    from minirt.kernels.launch import capability

    dtypes = [dtype, *([FP8] if capability(device) >= 89 else [])]
    return Limits(read_ceiling(device), {own: matmul_ceiling(device, own) for own in dtypes})


def select(patterns: Sequence[str]) -> list[str]:
    """Return the names of the operations that match any of the names or globs; without patterns, all names.

    Raises:
        InputError: a pattern matches no operation.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in OPERATIONS):
            raise InputError("matches no kernel", where=pattern, expected=", ".join(OPERATIONS))
    return [name for name in OPERATIONS if not patterns or any(fnmatchcase(name, p) for p in patterns)]


def points(
    names: Sequence[str],
    models: dict[str, ModelConfig],
    dtype: torch.dtype,
    device: torch.device,
    tokens: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
) -> list[Point]:
    """Return what to measure: each operation's default points, or every combination of `tokens` and (for attention) `contexts`.

    Raises:
        InputError: `contexts` is given, but no named operation has a context.
    """
    if contexts is not None and not any(OPERATIONS[name].context for name in names):
        raise InputError("none of the named kernels has a context", where="--context-len", expected="attention_*")
    result = []
    for model, config in models.items():
        for name in names:
            own = OPERATIONS[name].points
            if tokens is not None or contexts is not None:
                first = tokens or tuple(dict.fromkeys(t for t, _ in own))
                second = (contexts or tuple(dict.fromkeys(c for _, c in own))) if OPERATIONS[name].context else (0,)
                own = tuple((t, c) for t in first for c in second)
            result += [Point(name, model, Step(config, t, c, dtype, device)) for t, c in own]
    return result


@torch.inference_mode()
def measure(point: Point, limits: Limits | None, clock: "Clock", repeats: int, compiled: bool) -> Row:
    """Check one point, then time it.

    Args:
        limits: sets the limit of each time; None: a CPU.
        compiled: also time the eager code under torch.compile.
    Returns:
        a row. `fault` describes a broken bound; such a row has no times. `left_out` maps each implementation that PyTorch or the
        GPU does not support for this shape to the reason; the key "all" means that the Triton kernel itself is unsupported.
    """
    operation, step = OPERATIONS[point.name], point.step
    row: Row = {
        "kernel": point.name, "what": operation.what, "model": point.model, "tokens": step.tokens,
        "context": step.context if operation.context else None, "dtype": str(step.dtype).removeprefix("torch."),
    }  # fmt: skip
    try:
        problem = operation.build(step)
        forms = dict(problem.forms)
        if compiled and problem.compiles:
            torch._dynamo.reset()  # otherwise the recompilation limit makes later shapes run eagerly
            forms = {"eager": forms["eager"], "compiled": Form(torch.compile(forms["eager"].run, dynamic=False)), **forms}
        found, left_out, broken = _check(problem, forms)
    except (UnsupportedError, RuntimeError) as error:
        if not (isinstance(error, UnsupportedError) or is_out_of_memory(error)):
            raise
        return row | _empty() | {"left_out": {"all": str(error).splitlines()[0]}}
    least, bound = limits.seconds(problem) if limits else (None, None)
    nbytes, flops = problem.cost
    row |= _empty() | {
        "shape": problem.shape, "bytes": nbytes, "flops": flops, "limit_s": least, "bound": bound, "errors": found,
        "lacks": {name: form.lacks for name, form in problem.forms.items() if form.lacks}, "left_out": left_out,
        "fault": broken,
    }  # fmt: skip
    if broken is not None:
        return row
    times = _time({name: form.run for name, form in forms.items() if name not in left_out}, clock, repeats)
    own = times["triton"]["median"]
    return row | {
        "seconds": times,
        "bytes_per_s": nbytes / own if limits else None,
        "flops_per_s": flops / own if limits else None,
        "share_of_limit": least / own if least else None,
        "lost_s": own - least if least else None,
    }


def _empty() -> Row:
    names = ("shape", "bytes", "flops", "limit_s", "bound", "fault", "bytes_per_s", "flops_per_s", "share_of_limit", "lost_s")
    return dict.fromkeys(names) | {"errors": {}, "lacks": {}, "left_out": {}, "seconds": {}}


def _check(problem: Problem, forms: dict[str, Form]) -> tuple[Row, dict[str, str], str | None]:
    """Run every implementation and compare with the truth.

    Returns:
        the errors of each implementation that computes the whole operation; the implementations that cannot run, with the reason;
        what is wrong with the Triton kernel, or None.
    """
    results: dict[str, Errors] = {}
    left_out: dict[str, str] = {}
    exact: tuple[Tensor, Tensor] | None = None  # sampled rows, and their true values
    broken = None
    for name, form in forms.items():
        problem.blank()
        try:
            out = form.run()
        except (RuntimeError, NotImplementedError, ValueError) as error:
            if name in ("eager", "triton") or is_out_of_memory(error):
                raise
            left_out[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            continue
        if form.lacks:
            continue
        value = problem.view(out)
        if exact is None:
            rows = ops.sampled(len(value), problem.rows, value.device)
            exact = rows, problem.truth(rows)
        if name == "triton" and not bool(torch.isfinite(value).all()):
            broken = f"{int((~torch.isfinite(value)).sum())} of {value.numel()} values are not finite"
        results[name] = errors(value[exact[0]], exact[1])
    found = {name: own._asdict() for name, own in results.items()}
    return found, left_out, broken or fault(results["triton"], results["eager"], problem.floor)


Clock = Callable[[Callable[[], Any]], float]


def _time(runs: dict[str, Callable[[], Any]], clock: Clock, repeats: int) -> Row:
    """Time each run `repeats` times and return `summary.summarize` of its seconds by name. The runs take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(_WARM + repeats if repeats > 1 else 1):
        for name, run in runs.items():
            seconds = clock(run)
            if turn >= _WARM or repeats == 1:
                times[name].append(seconds)
    return {name: summarize(values) for name, values in times.items()}


class ColdClock:
    """Measures one launch on the current GPU with a cold L2 cache: a read of twice the L2's size comes first."""

    def __init__(self, device: torch.device) -> None:
        from minirt.kernels.bandwidth import read_sums

        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._other = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        self._read = partial(read_sums, self._other, read_sums(self._other), check=False)

    def __call__(self, run: Callable[[], Any]) -> float:
        return gpu_seconds(run, self._read)

    def nothing(self, repeats: int = 20) -> float:
        """Return the seconds between two events with nothing between them. Every measured time includes them."""
        return statistics.median(self(lambda: None) for _ in range(repeats))


def host_clock(run: Callable[[], Any]) -> float:
    """Return the seconds of one call on a CPU."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


# --- comparing two runs ---

_SLOWER = 1.03  # a regression exceeds the older median by this factor, and by more than noise


def compare(rows: Sequence[Row], older: Sequence[Row]) -> list[str]:
    """Set each row's `baseline` from an older run that has the same point (else None) and describe the regressions.

    A regression is a median more than 3% above the older one, if the difference is also more than twice the combined standard
    deviation of both.
    """
    known = {_key(row): row["seconds"]["triton"] for row in older if row["seconds"]}
    slower = []
    for row in rows:
        before = known.get(_key(row))
        row["baseline"] = None
        if before is None or not row["seconds"]:
            continue
        now = row["seconds"]["triton"]
        ratio = now["median"] / before["median"]
        noise = 2 * ((now["stddev"] or 0) ** 2 + (before["stddev"] or 0) ** 2) ** 0.5
        regressed = ratio > _SLOWER and now["median"] - before["median"] > noise
        row["baseline"] = {"median": before["median"], "stddev": before["stddev"], "ratio": ratio, "regressed": regressed}
        if regressed:
            where = f" @ {row['context']}" if row["context"] is not None else ""
            times = f"{before['median'] * 1e6:.1f} → {now['median'] * 1e6:.1f} µs"
            slower.append(f"{row['kernel']} {row['model']} {row['tokens']}{where}: {times} ({ratio - 1:+.1%})")
    return slower


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("kernel", "model", "tokens", "context", "dtype"))
