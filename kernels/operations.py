"""`OPERATIONS`: every operation that has a Triton kernel, declared once: arguments, reference, cost and test cases.

From a declaration follow the argument checks (`checks.check_arguments`), `torch.ops.minirt.NAME` with its fake results, its CPU
implementation and its refusal of gradients (`ops`), `minirt.nn.functional.NAME`, the function that `minirt.kernels` exports, its
row in docs/kernels.md, and cases of tests and benchmarks (`minirt.bench.kernels.declared`). `norm_residual` is a good example.

The table is plain text, so that importing it imports neither PyTorch nor Triton. Places are "module:name", the module below
`minirt.kernels` unless it begins with "minirt."; a name alone is in the module of the operation's function.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from minirt.kernels.declaration import Declaration


@dataclass(frozen=True)
class Operation:
    """An operation on plain tensors.

    Attributes:
        place: of its function, which has the operation's name.
        what: a short description, for tables.
        arguments: and results, as `minirt.kernels.declaration` describes them. Names are those of the function's parameters.
        check: a function that checks what `arguments` cannot say, see `minirt.kernels.checks`.
        reference: the function that defines the result in eager PyTorch, with the arguments of the declaration. None: it has the
            operation's name, in the `reference.py` of its folder or, if the folder has none, in `kernels/reference.py`.
        cost: the function that returns (bytes, floating-point operations) of the work; its arguments are sizes of axes and
            `itemsize`, of an activation. None: the work is too small to be measured.
        cases: the shapes that its tests have in common; of an op, sizes of axes.
        no_op: why there is no `torch.ops.minirt.NAME`; None if there is one.
        launch: of an op, a function that returns further arguments of the operation's function on a GPU, by name.
        fake: of an op, a function that returns results of the right shapes and dtypes, if `arguments` cannot say them.
        exported: whether `minirt.kernels` has the function, as it has those of ops. It cannot have one named like its module.
    """

    place: str
    what: str
    arguments: str = ""
    check: str | None = None
    reference: str | None = None
    cost: str | None = None
    cases: str | None = None
    no_op: str | None = None
    launch: str | None = None
    fake: str | None = None
    exported: bool = False

    @property
    def module(self) -> str:
        """Where its function is, below `minirt.kernels`."""
        return self.place.partition(":")[0]

    @property
    def name(self) -> str:
        return self.place.partition(":")[2]

    @property
    def function(self) -> Callable[..., Any]:
        """The public function. The first access imports Triton."""
        return self.find(self.place)

    @cached_property
    def eager(self) -> Callable[..., Any]:
        """The reference."""
        if self.reference is not None:
            return self.find(self.reference)
        nearest = f"{self.module.rpartition('.')[0]}.reference".lstrip(".")
        there = find_spec(f"minirt.kernels.{nearest}") and hasattr(import_module(f"minirt.kernels.{nearest}"), self.name)
        return self.find(f"{nearest if there else 'reference'}:{self.name}")

    @cached_property
    def declaration(self) -> Declaration:
        return Declaration(self.arguments)

    def work(self, *args: Any, **options: Any) -> tuple[int, int]:
        """(bytes read and written, floating-point operations), by the function `cost`."""
        return self.find(self.cost or "")(*args, **options)

    def find(self, place: str) -> Any:
        """The object at a place of the table."""
        module, _, name = place.rpartition(":")
        module = module or self.module
        return getattr(import_module(module if module.startswith("minirt.") else f"minirt.kernels.{module}"), name)


_TABLE = "the table of slots is minirt's, for its steps"
_RANKS = "it takes the memory of other GPUs"
_PAGED = "attention.prefill:cost"
_PAGES = (
    "k_pages: [P, page_size: page, Nkv, D] of q or fp8 with k_scales, v_pages: [P, page_size, Nkv, D] of k_pages, "
    "block_tables: [B, pages] int32"
)
_SCALES = "k_scales?: [P, page_size, Nkv] fp32 together with v_scales = None, v_scales?: [P, page_size, Nkv] fp32 = None"
_WRITTEN_SCALES = _SCALES.replace("?:", "?!:")
_WINDOW = "window?: int = None"
_QK_NORM = "q_norm?: [D] of qkv = None, k_norm?: [D] of qkv = None, eps: float = 1e-6"
_NORMED = "x: [T, K] activations, norm_weight?: [K: norm] of x, eps: float"
_BIAS = "bias?: [N] of x = None, scale?: [...] any dtype = None"
OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            "embedding:embedding", what="rows of the embedding table", cost="cost", cases="CASES",
            arguments="tokens: [T] int64, table: [V, H] activations -> out: [T, H] of table",
        ),
        Operation(
            "norm:rms_norm", what="RMSNorm", cost="cost", cases="CASES",
            arguments="x: [T, H] activations, weight: [H: norm] of x, eps: float -> out: [T, H] of x",
        ),
        Operation(
            "norm:norm_residual", what="RMSNorm and residual", cost="residual_cost", cases="CASES",
            arguments="y: [T, H] activations, weight: [H: norm] of y, eps: float, residual: [T, H] of y -> out: [T, H] of y",
        ),
        Operation(
            "norm:rms_norm_quantize", what="RMSNorm and FP8 quantization", cost="quantized_cost", cases="CASES",
            arguments="x: [T, H] activations, weight: [H: norm] of x, eps: float, *, blocks: bool = False "
            "-> out: [T, H] fp8, scale: [T, ...] fp32",
            fake="reference:empty_quantized",
        ),
        Operation(
            "quantize:quantize", what="FP8 quantization with one scale per token, or per token and 128 columns",
            arguments="x: [T, K] activations, *, blocks: bool = False -> out: [T, K] fp8, scale: [T, ...] fp32",
            cost="cost", cases="CASES", fake="reference:empty_quantized",
        ),
        Operation(
            "linear.dispatch:norm_linear", what="RMSNorm, linear layer",
            arguments=f"{_NORMED}, weight: [N, ...] any dtype, {_BIAS} -> out: [T, N] of x",
            check="checks:check_linear", cost="cost", cases="CASES", launch="ops:scratch",
        ),
        Operation(
            "linear.dispatch:norm_gate_up", what="RMSNorm, gate and up projection, gated activation",
            arguments=f"{_NORMED}, weight: [N: gate and up, ...] any dtype, activation: activation, {_BIAS} "
            "-> out: [T, N // 2] of x",
            check="checks:check_linear", cost="cost", cases="CASES", launch="ops:scratch",
        ),
        Operation(
            "linear.dispatch:linear_residual", what="linear layer and residual",
            arguments=f"x: [T, K] activations, weight: [N, ...] any dtype, residual: [T, N] of x, {_BIAS} -> out: [T, N] of x",
            check="checks:check_linear", cost="cost", cases="CASES", launch="ops:scratch",
        ),
        Operation(
            "attention.rope_write:qk_norm_rope_kv_write", what="RMSNorm of q and k, RoPE, KV write",
            arguments="qkv: [T, (Nq + 2 * Nkv) * D] activations rows apart, cos_sin: [L, R] fp32, positions: [T] int64, "
            "slots: [T] int64, k_pages!: [P, page_size, Nkv, D: head] of qkv or fp8 with k_scales, "
            f"v_pages!: [P, page_size, Nkv, D] of k_pages, Nq: int, Nkv: int, {_QK_NORM}, *, {_WRITTEN_SCALES} "
            "-> q_out: [T, Nq, D] of qkv",
            check="attention.checks:check_write", cost="cost", cases="CASES",
        ),
        Operation(
            "rope:norm_rope", what="RMSNorm of heads, RoPE", check="checks:check_rotary", cases="CASES",
            arguments="x: [B, N, T, D: rotated head] activations any strides, cos: [C, T, D] of x or fp32, "
            "sin: [C, T, D] of cos, norm_weight?: [D] of x = None, eps: float = 1e-6 -> out: like x",
        ),
        Operation(
            "rope:qk_norm_rope", what="RMSNorm of the heads of q and k, RoPE", check="checks:check_rotary", cases="CASES",
            arguments="q: [B, Nq, T, D: rotated head] activations any strides, k: [B, Nk, T, D] of q any strides, "
            "cos: [C, T, D] of q or fp32, sin: [C, T, D] of cos, q_norm?: [D] of q together with k_norm = None, "
            "k_norm?: [D] of q = None, eps: float = 1e-6 -> q_out: like q, k_out: like k",
        ),
        Operation(
            "attention.dispatch:paged_attention_prefill", what="causal attention of new tokens on KV pages",
            arguments=f"q: [T, Nq, D: head] activations, {_PAGES}, query_starts: [B + 1] int32, seq_lens: [B] int32, "
            f"scale: float, *, {_SCALES}, {_WINDOW} -> out: [T, Nq, D] of q",
            check="attention.checks:check_settings", cost=_PAGED, cases="attention.prefill:CASES", launch="ops:zeros",
        ),
        Operation(
            "attention.dispatch:paged_attention_decode", what="attention of one new token per sequence on KV pages",
            arguments=f"q: [B, Nq, D: head] activations, {_PAGES}, seq_lens: [B] int32, scale: float, *, {_SCALES}, "
            f"{_WINDOW} -> out: [B, Nq, D] of q",
            check="attention.checks:check_settings", cost=_PAGED, cases="attention.decode:CASES", launch="ops:splits",
        ),
        Operation(
            "attention.dispatch:paged_attention_decode_few", exported=True,
            what="causal attention of up to 8 new tokens per sequence on KV pages",
            reference="reference:paged_attention", cost=_PAGED, cases="attention.decode_few:CASES",
            no_op="`paged_attention_prefill` is the op for several new tokens",
        ),
        Operation(
            "attention.dispatch:rope_paged_attention_decode",
            what="RoPE, KV write and attention of one new token per sequence",
            arguments="qkv: [B, (Nq + 2 * Nkv) * D] activations rows apart, cos_sin: [L, R] fp32, "
            "k_pages!: [P, page_size: page, Nkv, D: head] of qkv or fp8 with k_scales, "
            "v_pages!: [P, page_size, Nkv, D] of k_pages, block_tables: [B, pages] int32, seq_lens: [B] int32, scale: float, "
            f"Nq: int, {_QK_NORM}, *, {_WRITTEN_SCALES}, {_WINDOW} -> out: [B, Nq, D] of qkv",
            check="attention.checks:check_settings", cost=_PAGED, cases="attention.decode:CASES", launch="ops:splits",
        ),
        Operation(
            "gated_delta.dispatch:gated_delta_net", what="gated DeltaNet after its projections: convolution, rule, gated norm",
            arguments="qkvz: [T, C + Hv * Dv] activations rows apart, ba: [T, 2 * Hv] of qkvz rows apart, "
            "state.recurrent!: [S, Hv, Dk: state head, Dv: state head] fp32, state.conv!: [S, R, C] of qkvz, "
            "state.gates?!: [S, R, 2, Hv] fp32 together with state.folded, state.folded?!: [S, Hv] int32, "
            "weights.conv: [C, 4] of qkvz, weights.A_log: [Hv] fp32, weights.dt_bias: [Hv] fp32, weights.norm: [Dv] of qkvz, "
            "sequences.slots: [B] int32, sequences.query_starts: [B + 1] int32, sequences.seq_lens: [B] int32, "
            "sequences.snapshots?: [B, 2, 2] int32 -> out: [T, Hv * Dv] of qkvz",
            check="gated_delta.dispatch:check_channels", cost="cost", cases="CASES",
            no_op="it reads and writes the states of minirt's slots",
        ),
        Operation(
            "moe.dispatch:router_logits", what="RMSNorm and the logits of a mixture's router", reference="reference:norm_linear",
            cost="moe.router:cost", cases="moe.router:CASES",
            no_op="with more than few tokens, its result is partial sums for `mixture_residual`",
        ),
        Operation(
            "moe.route:route", what="a mixture's choice of experts; tokens sorted by expert", cost="cost", cases="CASES",
            no_op="its result is tiles for the kernels of experts",
        ),
        Operation(
            "moe.dispatch:mixture_residual", what="a mixture's chosen experts and the residual",
            arguments="h: [T, H] activations, logits: [T, E] of h, gate_up: [E, any, any] any dtype, "
            "down: [E, any, any] any dtype, residual: [T, H] of h, top_k: int, normalize: bool, activation: activation, "
            "norm_weight?: [H: norm] of h = None, eps: float = 0.0, "
            "gate_up_scale?: [E, ...] any dtype together with down_scale = None, down_scale?: [E, ...] any dtype = None, "
            "gate_up_bias?: [E, any] of h = None, down_bias?: [E, H] of h = None, limit: float = 0.0, alpha: float = 1.0 "
            "-> out: [T, H] of h",
            check="checks:check_mixture", cost="cost", cases="moe.products:CASES",
        ),
        Operation(
            "adapters.expand:add_adapters", what="LoRA adapters of a linear layer, by row: B · A · x, added to its output",
            arguments="x: [T, K] activations rows apart, weights.a: [S, P, R, K] of x, weights.b: [N, any] of x, "
            "weights.scales: [S, P] fp32 rows apart, rows.adapters: [T] int32, "
            "out!: [T, N] of x rows apart, norm_weight?: [K: norm] of x = None",
            no_op="it takes minirt's table of adapters",
        ),
        Operation(
            "collectives.all_reduce:all_reduce", what="the sum of all ranks' parts, and the residual", no_op=_RANKS,
            cases="CASES", arguments="x: [T, H] activations, residual?: [T, H] of x = None -> out: [T, H] of x",
        ),
        Operation(
            "collectives.gather_maxima:gather_maxima", what="the row maxima of all ranks' logits", no_op=_RANKS, cases="CASES",
            arguments="maxima: [R, P] int64 -> out: [R, any] int64",
        ),
        Operation("adapters.rows:adapters_of", what="the adapter of each token of a step", no_op=_TABLE),
        Operation("adapters.rows:used_steps", what="which adapters a step has", no_op="its result is of `add_adapters`"),
        Operation(
            "sampling.sample:sample", what="a token for each row of logits: temperature, top-k, top-p, min-p, draw", cost="cost",
            cases="CASES", exported=True, no_op="it draws with the records of minirt's sampler",
        ),
        Operation(
            "sampling.process:process", what="masks, biases and penalties of logits",
            no_op="it reads and counts in buffers of minirt's sampler",
        ),
        Operation(
            "sampling.logprobs:token_logprobs", what="log-probabilities and ranks of tokens, and the most probable tokens",
            no_op="its result is packed for minirt's sampler",
        ),
        Operation(
            "step.kernels:edit_table", what="the host's edits of the table of slots", reference="step.table:edit_table",
            no_op=_TABLE,
        ),
        Operation(
            "step.kernels:derive", what="a step's input, from the table of slots", reference="step.table:derive",
            no_op="it fills the buffers of minirt's step",
        ),
        Operation(
            "step.kernels:commit", what="a step's tokens into the table of slots", reference="step.table:commit", no_op=_TABLE
        ),
        Operation("step.kernels:report", what="a step's drafts, for the host", reference="step.table:report", no_op=_TABLE),
        Operation(
            "step.copies:copy_rows", what="a row of many tensors to another row", reference="step.rows:copy_rows",
            no_op="it copies states and pages of minirt's KV cache",
        ),
        Operation("speculative.ngram:propose", what="drafts by n-gram matching", no_op=_TABLE),
        Operation(
            "speculative.draft_input:draft_input", what="the input of a draft model: a token's embedding and a hidden state",
            arguments="tokens: [T] int64, table: [V, H] of hidden, hidden: [T, H] activations, token_norm: [H: norm] of hidden, "
            "hidden_norm: [H: norm] of hidden, eps: float -> out: [T, 2 * H] of hidden",
            cases="CASES", no_op="only the layers of a draft model have it",
        ),
        Operation("speculative.draft_model:first_pass", what="the tokens of a draft model's first pass", no_op=_TABLE),
        Operation(
            "speculative.draft_model:draw", what="a draft of each sequence, and the input of the next pass", no_op=_TABLE
        ),
    )
}  # fmt: skip
# What `minirt.kernels` exports besides the functions of `OPERATIONS`.
HELPERS = {"RowMaxima": "linear.product", "Workspace": "launch", "row_maxima_tiles": "linear.dispatch"}
EXPORTED = {
    name: operation.module for name, operation in OPERATIONS.items()
    if operation.exported or (operation.no_op is None and name != operation.module)
} | HELPERS  # fmt: skip
