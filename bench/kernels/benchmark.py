"""`minirt bench kernels`: every kernel on a model's shapes, checked, then timed against the eager code and PyTorch's own kernels.

Each implementation is timed alone, with none of its inputs in the L2 cache. The implementations take turns, so that changes in
clock or load affect all of them. On a CPU the Triton kernel runs in Triton's interpreter: errors are valid there, times are not.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minirt.bench.bounds import Errors, errors, fault
from minirt.bench.ceiling import Ceiling, MatmulCeiling, matmul_ceiling, read_ceiling
from minirt.bench.kernels import attention_operations as attention
from minirt.bench.kernels import expert_operations as mixture
from minirt.bench.kernels import gated_delta_operations as gated_delta
from minirt.bench.kernels import operations as ops
from minirt.bench.kernels.declared import declared, is_declared
from minirt.bench.kernels.operations import FP8, Form, Problem, Step
from minirt.bench.measure import gpu_seconds
from minirt.bench.report import Row
from minirt.bench.summary import summarize
from minirt.device import is_out_of_memory
from minirt.errors import InputError, UnsupportedError
from minirt.kernels.operations import OPERATIONS
from minirt.modeling.config import ModelConfig

_WARM = 2
_RESULTS = ("shape", "bytes", "flops", "limit_s", "bound", "fault", "bytes_per_s", "flops_per_s", "share_of_limit", "lost_s")

_FEW, _ROWS = ((1, 0), (64, 0), (256, 0)), ((1, 0), (64, 0), (2048, 0), (8192, 0))
_LINEAR = ((1, 0), (8, 0), (64, 0), (256, 0), (2048, 0), (8192, 0))
_EXPERTS = tuple((tokens, 0) for tokens in (1, 3, 8, 24, 64, 100, 256, 512, 2048))
_PROMPTS = ((64, 0), (512, 0), (2048, 0), (8192, 0))
_MANY = ((129, 0), (300, 0), (512, 0), (2048, 0), (8192, 0))
_PREFILL = ((512, 0), (2048, 0), (8192, 0), (32768, 0), (2, 32766), (16, 32752), (512, 8192))
_DRAFTS = ((1, 1000), (1, 8000), (8, 1000), (8, 8000), (32, 1000), (32, 8000))
_DECODE = ((1, 128), (1, 1000), (1, 8000), (1, 32768), (8, 1000), (64, 128), (64, 1000), (64, 8000), (256, 128), (256, 1000))


@dataclass(frozen=True)
class Benchmark:
    """One entry of BENCHMARKS: an operation of `minirt.kernels.operations` in one form.

    Attributes:
        operation: its name there.
        build: makes the `Problem` for a `Step`, its only argument here.
        points: (tokens, context) to measure by default.
        form: what is special, for the reader of a result; "": nothing.
        context: what the context means; "": the operation has no context.
    """

    operation: str
    build: Callable[..., Problem]
    points: tuple[tuple[int, int], ...]
    form: str = ""
    context: str = ""

    @property
    def what(self) -> str:
        """A description for the reader of a result."""
        return self.form or OPERATIONS[self.operation].what


_FP8, _INT4, _BLOCKS = "FP8 weights, tokens quantized on the way", "4-bit weights", "FP8 weights in blocks of 128 x 128"
_FORMATS = (None, ""), ("fp8", _FP8), ("int4", _INT4), ("fp8_blocks", _BLOCKS)


def _benchmarks() -> dict[str, Benchmark]:
    write, prefill, decode = "qk_norm_rope_kv_write", "paged_attention_prefill", "rope_paged_attention_decode"
    few, drafts = "paged_attention_decode_few", "causal attention of 5 new tokens per sequence on KV pages"
    before, each = "cached before them", "tokens of each"
    prompt, token = partial(gated_delta.gated_delta_net, decode=False), partial(gated_delta.gated_delta_net, decode=True)
    normed = partial(declared, name="rms_norm", library=lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps))
    quantized = partial(declared, name="quantize", outlier=1000.0)
    rotated = partial(attention.rope_kv_write, normalize=False)
    table = {
        "rms_norm": Benchmark("rms_norm", normed, _ROWS),
        "quantize": Benchmark("quantize", quantized, _ROWS, "FP8 quantization with one scale per token"),
        "qk_norm_rope_kv_write": Benchmark(write, partial(attention.rope_kv_write, normalize=True), _ROWS),
        "mlp": Benchmark("norm_gate_up", ops.mlp, _LINEAR, "gated MLP: norm, gate/up, activation, down, residual"),
        "mlp_gelu": Benchmark("norm_gate_up", partial(ops.mlp, activation="gelu"), _LINEAR, "gated MLP with GELU"),
        "residual_norm": Benchmark("linear_residual", ops.residual_norm, _LINEAR, "down projection, residual, next norm"),
        "experts_route": Benchmark("route", mixture.route, _EXPERTS),
        "experts": Benchmark("mixture_residual", mixture.experts, _EXPERTS),
        "gated_delta_decode": Benchmark("gated_delta_net", token, _FEW, "gated DeltaNet of one token per sequence"),
        "gated_delta_prefill": Benchmark("gated_delta_net", prompt, _PROMPTS, "gated DeltaNet of a prompt"),
        "sample_greedy": Benchmark("sample", partial(ops.draw, temperature=0.0), _FEW, "argmax of the logits"),
        "sample_top_p": Benchmark("sample", partial(ops.draw, temperature=0.8, top_p=0.95), _FEW, "a draw from the nucleus"),
        "rope_kv_write": Benchmark(write, rotated, _ROWS, "RoPE and KV write"),
        "attention_prefill": Benchmark(prefill, attention.attention_prefill, _PREFILL, context=before),
        "attention_decode": Benchmark(decode, attention.attention_decode, _DECODE, context=each),
        "attention_few": Benchmark(few, attention.attention_few, _DRAFTS, drafts, each),
    }
    for name in ("rope_kv_write", "attention_prefill", "attention_decode", "attention_few"):
        plain = table[name]
        table[f"{name}.fp8"] = replace(plain, build=partial(plain.build, fp8=True), form="the same on FP8 pages")
    for kind, weights in (("fp8", _FP8), ("fp8_blocks", _BLOCKS)):
        experts = partial(mixture.experts, quantization=kind)
        table[f"experts.{kind}"] = replace(table["experts"], build=experts, form=f"the same with {weights}")
    fused = {
        "qkv": "RMSNorm and QKV projection", "o": "output projection and residual", "gate_up": "RMSNorm, gate/up, SwiGLU",
        "down": "down projection and residual", "lm_head": "RMSNorm and LM head, fp32 logits",
    }  # fmt: skip
    products = {
        None: "product of {} alone", "fp8": "FP8 product of {}, tokens quantized before",
        "fp8_blocks": "the same of {} in blocks of 128 x 128",
    }  # fmt: skip
    for name, what in fused.items():
        operation = "norm_linear" if name in ("qkv", "lm_head") else "norm_gate_up" if name == "gate_up" else "linear_residual"
        for quantization, form in _FORMATS:
            build = partial(ops.fused_linear, name=name, quantization=quantization)
            points, text = _FEW if name == "lm_head" else _LINEAR, f"{what}; {form}" if form else what
            table[f"{name}.{quantization}" if quantization else name] = Benchmark(operation, build, points, text)
        for quantization, form in products.items() if name != "lm_head" else ():
            build = partial(ops.gemm, name=name, quantization=quantization)
            key = f"gemm_{name}.{quantization}" if quantization else f"gemm_{name}"
            table[key] = Benchmark(operation, build, _MANY, form.format(name))
    for name, entry in OPERATIONS.items():  # the operations that only need their declarations
        if name not in table and entry.cost is not None and is_declared(entry, dict.fromkeys("THKV", 1)):
            table[name] = Benchmark(name, partial(declared, name=name), _ROWS)
    return table


BENCHMARKS = _benchmarks()


@dataclass(frozen=True)
class Point:
    """One operation on one model's shapes."""

    name: str
    model: str
    step: Step

    def __str__(self) -> str:
        context = f" @ {self.step.context}" if BENCHMARKS[self.name].context else ""
        return f"{self.name} {self.model} {self.step.tokens}{context}"


@dataclass(frozen=True)
class Roofline:
    """The measured speeds that set the roofline; `products` maps an operand dtype to its rate. A CPU has no roofline."""

    read: Ceiling
    products: dict[torch.dtype, MatmulCeiling]

    def seconds(self, problem: Problem) -> tuple[float, str]:
        """Return the least time in seconds and what determines it: "memory" or "arithmetic"."""
        nbytes, flops = problem.cost
        memory, arithmetic = nbytes / self.read.bytes_per_s, flops / self.products[problem.rate].flops_per_s
        return (memory, "memory") if memory >= arithmetic else (arithmetic, "arithmetic")


def measure_roofline(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Measure the roofline of a GPU, with FP8 products if the GPU supports them."""
    from minirt.kernels.launch import capability

    dtypes = [dtype, *([FP8] if capability(device) >= 89 else [])]
    return Roofline(read_ceiling(device), {kind: matmul_ceiling(device, kind) for kind in dtypes})


def select(patterns: Sequence[str]) -> list[str]:
    """Return the names of the operations that match any of the names or globs; without patterns, all names.

    Raises:
        InputError: a pattern matches no operation.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in BENCHMARKS):
            raise InputError("matches no kernel", where=pattern, expected=", ".join(BENCHMARKS))
    return [name for name in BENCHMARKS if not patterns or any(fnmatchcase(name, p) for p in patterns)]


def points(
    names: Sequence[str], models: dict[str, ModelConfig], dtype: torch.dtype, device: torch.device,
    tokens: Sequence[int] | None = None, contexts: Sequence[int] | None = None,
) -> list[Point]:
    """Return what to measure: each operation's default points, or every combination of `tokens` and (for attention) `contexts`.

    Raises:
        InputError: `contexts` is given, but no named operation has a context.
    """
    if contexts is not None and not any(BENCHMARKS[name].context for name in names):
        raise InputError("none of the named kernels has a context", where="--context-len", expected="attention_*")
    result = []
    for model, config in models.items():
        for name in names:
            sizes = BENCHMARKS[name].points
            if tokens is not None or contexts is not None:
                first = tokens or tuple(dict.fromkeys(t for t, _ in sizes))
                second = (contexts or tuple(dict.fromkeys(c for _, c in sizes))) if BENCHMARKS[name].context else (0,)
                sizes = tuple((t, c) for t in first for c in second)
            result += [Point(name, model, Step(config, t, c, dtype, device)) for t, c in sizes]
    return result


@torch.inference_mode()
def measure(point: Point, roofline: Roofline | None, clock: "Clock", repeats: int, compiled: bool) -> Row:
    """Check one point, then time it.

    Args:
        roofline: sets the limit of each time; None: a CPU.
        compiled: also time the eager code under torch.compile.
    Returns:
        a row. `fault` describes a broken bound; such a row has no times. `left_out` maps each implementation that PyTorch or the
        GPU does not support for this shape to the reason; the key "all" means that the Triton kernel itself is unsupported.
    """
    benchmark, step = BENCHMARKS[point.name], point.step
    row: Row = {
        "kernel": point.name, "what": benchmark.what, "model": point.model, "tokens": step.tokens,
        "context": step.context if benchmark.context else None, "dtype": str(step.dtype).removeprefix("torch."),
        **dict.fromkeys(_RESULTS), "errors": {}, "lacks": {}, "left_out": {}, "seconds": {},
    }  # fmt: skip
    try:
        problem = benchmark.build(step)
        forms = dict(problem.forms)
        if compiled and problem.compiles:
            torch._dynamo.reset()  # otherwise the recompilation limit makes later shapes run eagerly
            forms = {"eager": forms["eager"], "compiled": Form(torch.compile(forms["eager"].run, dynamic=False)), **forms}
        measured_errors, left_out, broken = _check(problem, forms)
    except (UnsupportedError, RuntimeError) as error:
        if not (isinstance(error, UnsupportedError) or is_out_of_memory(error)):
            raise
        return row | {"left_out": {"all": str(error).splitlines()[0]}}
    least, bound = roofline.seconds(problem) if roofline else (None, None)
    nbytes, flops = problem.cost
    row |= {
        "shape": problem.shape, "bytes": nbytes, "flops": flops, "limit_s": least, "bound": bound, "errors": measured_errors,
        "lacks": {name: form.lacks for name, form in problem.forms.items() if form.lacks}, "left_out": left_out,
        "fault": broken,
    }  # fmt: skip
    if broken is not None:
        return row
    times = _time({name: form.run for name, form in forms.items() if name not in left_out}, clock, repeats)
    best = times["triton"]["median"]
    row |= {"seconds": times} | ({"bytes_per_s": nbytes / best, "flops_per_s": flops / best} if roofline else {})
    return row | ({"share_of_limit": least / best, "lost_s": best - least} if least else {})


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
    as_rows = {name: result._asdict() for name, result in results.items()}
    return as_rows, left_out, broken or fault(results["triton"], results["eager"], problem.floor)


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
            context = f" @ {row['context']}" if row["context"] is not None else ""
            times = f"{before['median'] * 1e6:.1f} → {now['median'] * 1e6:.1f} µs"
            slower.append(f"{row['kernel']} {row['model']} {row['tokens']}{context}: {times} ({ratio - 1:+.1%})")
    return slower


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("kernel", "model", "tokens", "context", "dtype"))
