"""The operations of `minirt bench kernels` on a model's shapes, with their inputs and all implementations.

Each function makes a `Problem` for one model and step. A problem has up to four implementations: the eager code, PyTorch's own
kernel for the operation or for its core (matrix product, attention), the same with less precise FP8 accumulation, and the Triton
kernel that a layer uses. The truth is the eager code in fp64. The Triton kernel, and the bytes and operations of the work, come
from the table `minirt.kernels.operations`. Attention is in `attention_operations`, mixtures are
in `expert_operations`, gated DeltaNet is in `gated_delta_operations`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minirt.bench.bounds import Floor, floor
from minirt.errors import UnsupportedError
from minirt.kernels import reference
from minirt.kernels.operations import OPERATIONS
from minirt.kernels.sampling.batch import SamplingBatch
from minirt.kernels.sampling.dispatch import sample
from minirt.modeling.config import ModelConfig
from minirt.sampling_params import SamplingParams, resolve

_ROWS = 192  # rows of an output that are compared with the truth; all rows are checked for NaN and infinity
FP8 = torch.float8_e4m3fn


class Step(NamedTuple):
    """A model's shapes and the size of a step.

    Attributes:
        tokens: number of new tokens; in decode operations, the number of sequences.
        context: prefill: cached tokens before the new ones. Decode: tokens of each sequence, with the new one.
    """

    config: ModelConfig
    tokens: int
    context: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Form:
    """One implementation of an operation.

    Attributes:
        run: computes the operation.
        lacks: the parts of the operation that a library kernel does not compute. If not empty, its error is not compared.
    """

    run: Callable[[], Any]
    lacks: str = ""


@dataclass(frozen=True)
class Problem:
    """One operation with its inputs.

    Args:
        shape: the sizes, as text for a table.
        forms: the implementations by name: "eager", "triton", and library kernels if any.
        truth: row indices [R] int64 → those rows of the result in fp64.
        cost: bytes that must be read and written; floating-point operations.
        rate: dtype of the matrix product whose rate bounds the arithmetic.
        floor: the error that is allowed where PyTorch's is 0.
        view: converts what an implementation returns to [T, …, N], one token for each row of the first dimension.
        blank: fills outputs that are written in place with NaN.
        rows: number of rows to compare with the truth.
        compiles: whether to time the eager code under torch.compile.
    """

    shape: str
    forms: dict[str, Form]
    truth: Callable[[Tensor], Tensor]
    cost: tuple[int, int]
    rate: torch.dtype
    floor: Floor
    view: Callable[[Any], Tensor] = lambda out: out
    blank: Callable[[], Any] = lambda: None
    rows: int = _ROWS
    compiles: bool = True


EXACT = Floor(0.0, 0.0)  # the results are integers


def problem(
    step: Step, shape: str, eager: Callable[[], Any], triton: Callable[[], Any], truth: Callable[[Tensor], Tensor],
    cost: tuple[int, int], *, library: dict[str, Form] | None = None, rounded: bool = False, outputs: Iterable[Tensor] = (),
    **settings: Any,
) -> Problem:  # fmt: skip
    """A problem whose rate is that of the step's dtype.

    Args:
        library: PyTorch's own kernels.
        rounded: whether values are rounded to FP8.
        outputs: the tensors that `triton` writes.
        settings: other fields of `Problem`.
    """
    forms = {"eager": Form(eager), **(library or {}), "triton": Form(triton)}
    defaults: dict[str, Any] = {"rate": step.dtype, "floor": floor(step.dtype, rounded), "blank": partial(fill_nan, *outputs)}
    return Problem(shape, forms, truth, cost, **defaults | settings)


def operation(name: str) -> tuple[Callable[..., Any], Callable[..., tuple[int, int]]]:
    """The Triton kernel of an operation of `minirt.kernels.operations`, and its bytes and operations."""
    return OPERATIONS[name].function, OPERATIONS[name].work


class Inputs:
    """Makes random tensors from a seed, with the dtype and device of a step."""

    def __init__(self, step: Step, seed: int = 1) -> None:
        self.step = step
        self._random = torch.Generator(step.device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.empty(shape, dtype=dtype or self.step.dtype, device=self.step.device)
        return values.normal_(0.0, scale, generator=self._random)

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self._random, device=self.step.device)

    def order(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self._random, device=self.step.device)

    def norm(self, n: int) -> Tensor:
        return 1 + self.normal(n, scale=0.3)

    def nan(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype or self.step.dtype, device=self.step.device)


def fill_nan(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype == FP8:
            tensor.view(torch.uint8).fill_(0x7F)
        else:
            tensor.fill_(torch.nan)


def sampled(T: int, rows: int, device: torch.device) -> Tensor:
    """Return `rows` indices below T, ascending: a third from the start, a third from the end, the rest at random from between.

    Returns all indices if T is at most `rows`.
    """
    if rows >= T:
        return torch.arange(T, device=device)
    ends = rows // 3
    between = torch.randperm(T - 2 * ends, generator=torch.Generator().manual_seed(0))[: rows - 2 * ends] + ends
    chosen = torch.cat((torch.arange(ends), between.sort().values, torch.arange(T - ends, T)))
    return chosen.to(device)


def dequantized(pair: tuple[Tensor, Tensor]) -> Tensor:
    values, scale = pair
    return values.to(torch.float32) * scale.unsqueeze(-1)


def wide(*values: Any) -> list[Any]:
    """Convert tensors to fp64, except those of FP8 or integers. Other values stay as they are."""
    return [v.double() if isinstance(v, Tensor) and v.is_floating_point() and v.dtype != FP8 else v for v in values]


# --- sampling ---


def draw(step: Step, **settings: Any) -> Problem:
    """Sample one token from each of T rows of logits. All tokens must equal those of the eager sampler."""
    from minirt.kernels.sampling.sample import SamplingWorkspace

    inputs, (B, V) = Inputs(step), (step.tokens, step.config.vocab_size)
    logits, out = inputs.normal(B, V, scale=3.0, dtype=torch.float32), inputs.integers(1, B)
    requests = [(resolve(SamplingParams(seed=i, **settings), None), i) for i in range(B)]
    batch, workspace = SamplingBatch.build(requests, step.device), SamplingWorkspace(B, V, step.device)
    return problem(
        step, f"V={V}", lambda: sample(logits, batch, "eager"), lambda: sample(logits, batch, "triton", workspace, out),
        lambda rows: sample(logits, batch, "eager")[rows].double().unsqueeze(1), OPERATIONS["sample"].work(B, V),
        view=lambda tokens: tokens.double().unsqueeze(1), blank=lambda: out.fill_(-7), compiles=False, floor=EXACT,
    )  # fmt: skip


# --- linear layers with their fused operations ---


@dataclass(frozen=True)
class Linear:
    """x [T, K] times weight [N, K] (with an activation: [2N, K]), and the operations fused with the product."""

    N: int
    K: int
    norm: bool = False
    bias: bool = False
    activation: str | None = None
    residual: bool = False
    out_dtype: torch.dtype | None = None

    @property
    def operation(self) -> str:
        """The name of the operation that computes it."""
        return "linear_residual" if self.residual else "norm_linear" if self.activation is None else "norm_gate_up"


def linears(config: ModelConfig) -> dict[str, Linear]:
    """Return the linear layers of a model by name."""
    H, D, I = config.hidden_size, config.head_dim, config.intermediate_size  # noqa: E741
    return {
        "qkv": Linear((config.num_heads + 2 * config.num_kv_heads) * D, H, norm=True, bias=config.qkv_bias),
        "o": Linear(H, config.num_heads * D, residual=True, bias=config.o_bias),
        "gate_up": Linear(I, H, norm=True, activation=config.hidden_act, bias=config.mlp_bias),
        "down": Linear(H, I, residual=True, bias=config.mlp_bias),
        "lm_head": Linear(config.vocab_size, H, norm=True, out_dtype=torch.float32),
    }


class Operands:
    """The tensors of a linear layer.

    Args:
        quantization: of the weight: None; "fp8", a scale for each row; "fp8_blocks", a scale for each block; or "int4".
    """

    def __init__(self, step: Step, linear: Linear, quantization: str | None, seed: int = 1) -> None:
        inputs, self.linear, operation = Inputs(step, seed), linear, OPERATIONS[linear.operation]
        T, N, K = step.tokens, linear.N, linear.K
        rows = 2 * N if linear.activation else N
        self.x = inputs.normal(T, K, scale=2.0)
        norm = inputs.norm(K) if linear.norm else None
        self.bias = inputs.normal(rows) if linear.bias else None
        self.residual = inputs.normal(T, N) if linear.residual else None
        self.weight, self.scale = inputs.normal(rows, K, scale=K**-0.5), None
        if quantization is not None:
            self.weight, self.scale = reference.quantize_weight(self.weight, quantization, N if linear.activation else None)
        self.out = inputs.nan(T, N, dtype=linear.out_dtype)
        every = {
            "x": self.x, "norm_weight": norm, "eps": step.config.rms_norm_eps, "weight": self.weight, "bias": self.bias,
            "activation": linear.activation, "residual": self.residual, "scale": self.scale,
        }  # fmt: skip
        self.arguments: dict[str, Any] = {one.name: every[one.name] for one in operation.declaration.arguments}
        self._reference, self._kernel = operation.eager, operation.function

    def eager(self, **others: Any) -> Tensor:
        """The layer in eager PyTorch. `others`: arguments in place of the layer's."""
        return self._reference(**self.arguments | others).to(self.out.dtype)

    def triton(self, **others: Any) -> Tensor:
        """The layer's kernels, as the layers call them."""
        return self._kernel(**self.arguments | others, out=self.out, check=False)

    def truth(self, rows: Tensor, **others: Any) -> Tensor:
        """Some rows of the result, in fp64."""
        by_token = {name: self.arguments[name][rows] for name in ("x", "residual") if name in self.arguments}
        arguments = self.arguments | by_token | others
        return self._reference(**dict(zip(arguments, wide(*arguments.values()), strict=True)) | {"scale": self.scale})

    @property
    def lacks(self) -> str:
        """The fused operations that a matrix product alone does not compute."""
        linear = self.linear
        parts = ["norm"] * linear.norm + ["SwiGLU"] * (linear.activation is not None) + ["residual"] * linear.residual
        return ", ".join(parts)

    def products(self, quantized: bool) -> dict[str, Form]:
        """Return PyTorch's products: of 16-bit values, or of FP8 values, with precise and with fast accumulation.

        FP8 activations are quantized outside the timed product. `quantized` says whether the operation excludes that too. For
        weights in blocks PyTorch has no product.
        """
        if self.scale is None or self.scale.dtype in reference.WORDS:
            weight, lacks = self.weight, self.lacks
            if self.scale is not None:
                dequantize = reference.dequantize_int4 if self.scale.dtype == torch.int32 else reference.dequantize_mxfp4
                weight = dequantize(weight, self.scale, self.linear.K, self.x.dtype)
                lacks = ", ".join(filter(None, (lacks, "4-bit weights")))
            return {"library": Form(lambda: F.linear(self.x, weight, self.bias), lacks)}
        if self.scale.ndim == 2:
            return {}
        values, x_scale = reference.quantize_fp8(self.x)
        scales: dict[str, Any] = {"scale_a": x_scale.unsqueeze(1), "scale_b": self.scale.unsqueeze(0)}
        left = ", ".join(filter(None, (self.lacks, "" if quantized else "quantization", "bias" if self.linear.bias else "")))

        def product(fast: bool) -> Tensor:
            return torch._scaled_mm(values, self.weight.t(), out_dtype=torch.bfloat16, use_fast_accum=fast, **scales)

        return {"library": Form(partial(product, False), left), "library_fast": Form(partial(product, True), left)}

    def shape(self) -> str:
        linear = self.linear
        return f"N={linear.N}{' (gate, up)' if linear.activation else ''} K={linear.K}"

    def cost(self) -> tuple[int, int]:
        read = [self.x, self.weight, self.residual, self.scale if self.scale is not None and self.scale.ndim == 2 else None]
        nbytes = sum(tensor.nbytes for tensor in read if tensor is not None) + self.out.numel() * self.x.itemsize
        return nbytes, 2 * len(self.x) * len(self.weight) * self.linear.K


def fused_linear(step: Step, name: str, quantization: str | None) -> Problem:
    """Compute a linear layer as the layers call it: norm, quantization, product, activation, residual."""
    from minirt.kernels.launch import Workspace

    o, workspace = Operands(step, linears(step.config)[name], quantization), Workspace(step.device)
    triton = partial(o.triton, workspace=workspace)
    return _linear_problem(step, o, triton, o.products(False), quantization in ("fp8", "fp8_blocks"))


def gemm(step: Step, name: str, quantization: str | None) -> Problem:
    """Compute the product alone, with the activation in its epilogue. FP8 activations are quantized before the timing.

    Raises:
        UnsupportedError: FP8 with one token, whose activations are never quantized.
    """
    from minirt.kernels.launch import Workspace
    from minirt.kernels.linear.dispatch import launch
    from minirt.kernels.linear.product import Epilogue, Product

    if quantization is not None and step.tokens == 1:
        kernel = f"gemm_{name}.{quantization}"
        raise UnsupportedError("a single token is not quantized", where=kernel, expected="2 tokens or more")
    plain = replace(linears(step.config)[name], norm=False, bias=False, residual=False, out_dtype=None)
    o, workspace = Operands(step, plain, quantization), Workspace(step.device)
    values, x_scale = o.x, None
    if quantization is not None:
        values, x_scale = reference.quantize(o.x, quantization == "fp8_blocks")
    epilogue = Epilogue(o.scale, x_scale, activation=plain.activation)
    product = Product(values, o.weight, o.out, epilogue=epilogue, workspace=workspace)

    def triton() -> Tensor:
        launch(product)
        return o.out

    return _linear_problem(step, o, triton, o.products(True), quantization is not None)


def _linear_problem(step: Step, o: Operands, triton: Callable[[], Tensor], library: dict[str, Form], fp8: bool) -> Problem:
    rounded = fp8 and step.tokens > 1  # one token is not quantized
    return problem(
        step, o.shape(), o.eager, triton, o.truth, o.cost(), library=library, rounded=rounded, outputs=[o.out],
        rate=FP8 if rounded else step.dtype,
    )  # fmt: skip


def mlp(step: Step, activation: str | None = None) -> Problem:
    """Compute norm, gate/up, activation, down and residual in two fused kernels; `activation` None: the model's."""
    from minirt.kernels.launch import Workspace

    both = linears(step.config)
    first = Operands(step, replace(both["gate_up"], activation=activation or both["gate_up"].activation), None)
    second, workspace = Operands(step, both["down"], None, seed=2), Workspace(step.device)
    (a, b), (c, d) = first.cost(), second.cost()
    between = 2 * step.tokens * first.linear.N * first.x.itemsize  # can stay on the chip
    return problem(
        step, f"H={second.linear.N} I={second.linear.K} {first.linear.activation}",
        lambda: second.eager(x=first.eager(), residual=first.x),
        lambda: second.triton(x=first.triton(), residual=first.x, workspace=workspace),
        lambda rows: second.truth(rows, x=first.truth(rows), residual=first.x[rows]), (a + c - between, b + d),
        outputs=[first.out, second.out],
    )  # fmt: skip


def residual_norm(step: Step) -> Problem:
    """Compute the down projection with its residual, then the norm at the start of the next layer. Both are results."""
    from minirt.kernels.launch import Workspace
    from minirt.kernels.norm import rms_norm as norm_kernel

    o, workspace, eps = Operands(step, linears(step.config)["down"], None), Workspace(step.device), step.config.rms_norm_eps
    weight, normed = Inputs(step, seed=2).norm(o.linear.N), torch.empty_like(o.out)

    def both(y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return y, reference.rms_norm(y, weight, eps)

    def triton() -> tuple[Tensor, Tensor]:
        y = o.triton(workspace=workspace)
        return y, norm_kernel(y, weight, eps, normed, check=False)

    nbytes, flops = o.cost()
    return problem(
        step, o.shape(), lambda: both(o.eager(), weight), triton,
        lambda rows: torch.stack(both(o.truth(rows), weight.double()), 1), (nbytes + o.out.nbytes, flops),
        view=lambda pair: torch.stack(pair, 1), outputs=[o.out, normed],
    )  # fmt: skip
