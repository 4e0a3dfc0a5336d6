"""`OPERATIONS`: every operation that has a Triton kernel, declared once: arguments, kernels, reference, cost and test cases.

From a declaration follow the argument checks (`checks.check_arguments`), `torch.ops.minirt.NAME` with its fake results, its CPU
implementation and its refusal of gradients (`ops`), `minirt.nn.functional.NAME`, the function that `minirt.kernels` exports, its
row in docs/kernels.md, and cases of tests and benchmarks (`minirt.bench.kernels.declared`). `norm_residual` is a good example.

The table is plain text, so that importing it imports neither PyTorch nor Triton. Places are "module:name", the module below
`minirt.kernels` unless it begins with "minirt.".
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

from minirt.kernels.declaration import Declaration


@dataclass(frozen=True)
class Operation:
    """An operation on plain tensors.

    Attributes:
        name: of its function.
        module: where the function is, below `minirt.kernels`.
        what: a short description, for tables.
        kernels: the tables of regimes that choose its kernels, and other kernels that it may run.
        reference: functions of `minirt.kernels.reference` (or of the place named) that together define the result. Of an op it is
            one function, with the arguments of the declaration.
        cost: the function that returns (bytes, floating-point operations) of the work; its arguments are sizes of axes and
            `itemsize`, of an activation. None: the work is too small to be measured.
        cases: the shapes that its tests have in common; of an op, sizes of axes.
        exported: whether `minirt.kernels` has the function, as it has those of ops. It cannot have one named like its module.
        arguments: and results, as `minirt.kernels.declaration` describes them. Names are those of the function's parameters.
        check: a function that checks what the declaration cannot say, see `minirt.kernels.checks`.
        launch: of an op, a function that returns further arguments of the operation's function on a GPU, by name.
        fake: of an op, a function that returns results of the right shapes and dtypes, if the declaration cannot say them.
        no_op: why there is no `torch.ops.minirt.NAME`; None if there is one.
    """

    name: str
    module: str
    what: str
    kernels: tuple[str, ...]
    reference: tuple[str, ...]
    cost: str | None = None
    cases: str | None = None
    exported: bool = False
    arguments: str | None = None
    check: str | None = None
    launch: str | None = None
    fake: str | None = None
    no_op: str | None = None

    @property
    def function(self) -> Callable[..., Any]:
        """The public function. The first access imports Triton."""
        return find(f"{self.module}:{self.name}")

    @cached_property
    def declaration(self) -> Declaration:
        return Declaration(self.arguments or "")

    def work(self, *args: Any, **options: Any) -> tuple[int, int]:
        """(bytes read and written, floating-point operations), by the function `cost`."""
        return find(self.cost or "")(*args, **options)


def find(place: str) -> Any:
    """The object at a place of the table. Without a module, it is in `reference`."""
    module, _, name = place.rpartition(":")
    module = module or "reference"
    return getattr(import_module(module if module.startswith("minirt.") else f"minirt.kernels.{module}"), name)


_LINEAR = ("linear.dispatch:REGIMES", "norm:_rms_norm_kernel", "quantize:REGIMES")
_TABLE = "the table of slots is minirt's, for its steps"
_PAGED = "attention.prefill:cost"
_PAGES = (
    "k_pages: [P, page_size: page, Nkv, D] of q or fp8 with k_scales, v_pages: [P, page_size, Nkv, D] of k_pages, "
    "block_tables: [B, pages] int32"
)
_SCALES = "k_scales?: [P, page_size, Nkv] fp32 together with v_scales = None, v_scales?: [P, page_size, Nkv] fp32 = None"
_WRITTEN_SCALES = _SCALES.replace("?:", "?!:")
_QK_NORM = "q_norm?: [D] of qkv = None, k_norm?: [D] of qkv = None, eps: float = 1e-6"
_NORMED = "x: [T, K] activations, norm_weight?: [K: norm] of x, eps: float"
_BIAS = "bias?: [N] of x = None, scale?: [...] any dtype = None"
OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            "embedding", "embedding", "rows of the embedding table", ("embedding:_embedding_kernel",), ("embedding",),
            "embedding:cost", "embedding:CASES",
            arguments="tokens: [T] int64, table: [V, H] activations -> out: [T, H] of table",
        ),
        Operation(
            "rms_norm", "norm", "RMSNorm", ("norm:_rms_norm_kernel",), ("rms_norm",), "norm:cost", "norm:CASES",
            arguments="x: [T, H] activations, weight: [H: norm] of x, eps: float -> out: [T, H] of x",
        ),
        Operation(
            "norm_residual", "norm", "RMSNorm and residual", ("norm:_rms_norm_kernel",), ("norm_residual",),
            "norm:residual_cost", "norm:CASES",
            arguments="y: [T, H] activations, weight: [H: norm] of y, eps: float, residual: [T, H] of y -> out: [T, H] of y",
        ),
        Operation(
            "rms_norm_quantize", "norm", "RMSNorm and FP8 quantization", ("norm:_rms_norm_kernel",),
            ("rms_norm_quantize",), "norm:quantized_cost", "norm:CASES",
            arguments="x: [T, H] activations, weight: [H: norm] of x, eps: float, *, blocks: bool = False "
            "-> out: [T, H] fp8, scale: [T, ...] fp32",
            fake="reference:empty_quantized",
        ),
        Operation(
            "quantize", "quantize", "FP8 quantization with one scale per token, or per token and 128 columns",
            ("quantize:REGIMES",), ("quantize",), "quantize:cost", "quantize:CASES",
            arguments="x: [T, K] activations, *, blocks: bool = False -> out: [T, K] fp8, scale: [T, ...] fp32",
            fake="reference:empty_quantized",
        ),
        Operation(
            "norm_linear", "linear.dispatch", "RMSNorm, linear layer", _LINEAR, ("norm_linear",), "linear.dispatch:cost",
            "linear.dispatch:CASES",
            arguments=f"{_NORMED}, weight: [N, ...] any dtype, {_BIAS} -> out: [T, N] of x",
            check="checks:check_linear", launch="ops:scratch",
        ),
        Operation(
            "norm_gate_up", "linear.dispatch", "RMSNorm, gate and up projection, gated activation", _LINEAR,
            ("norm_gate_up",), "linear.dispatch:cost", "linear.dispatch:CASES",
            arguments=f"{_NORMED}, weight: [N: gate and up, ...] any dtype, activation: activation, {_BIAS} "
            "-> out: [T, N // 2] of x",
            check="checks:check_linear", launch="ops:scratch",
        ),
        Operation(
            "linear_residual", "linear.dispatch", "linear layer and residual", _LINEAR, ("linear_residual",),
            "linear.dispatch:cost", "linear.dispatch:CASES",
            arguments=f"x: [T, K] activations, weight: [N, ...] any dtype, residual: [T, N] of x, {_BIAS} -> out: [T, N] of x",
            check="checks:check_linear", launch="ops:scratch",
        ),
        Operation(
            "qk_norm_rope_kv_write", "attention.rope_write", "RMSNorm of q and k, RoPE, KV write",
            ("attention.rope_write:REGIMES",), ("attention.reference:qk_norm_rope_kv_write",), "attention.rope_write:cost",
            "attention.rope_write:CASES",
            arguments="qkv: [T, (Nq + 2 * Nkv) * D] activations rows apart, cos_sin: [L, R] fp32, positions: [T] int64, "
            "slots: [T] int64, k_pages!: [P, page_size, Nkv, D: head] of qkv or fp8 with k_scales, "
            f"v_pages!: [P, page_size, Nkv, D] of k_pages, Nq: int, Nkv: int, {_QK_NORM}, *, {_WRITTEN_SCALES} "
            "-> q_out: [T, Nq, D] of qkv",
            check="attention.checks:check_write",
        ),
        Operation(
            "norm_rope", "rope", "RMSNorm of heads, RoPE", ("rope:_norm_rope_kernel",), ("norm_rope",), cases="rope:CASES",
            arguments="x: [B, N, T, D: rotated head] activations any strides, cos: [C, T, D] of x or fp32, "
            "sin: [C, T, D] of cos, norm_weight?: [D] of x = None, eps: float = 1e-6 -> out: like x",
            check="checks:check_rotary",
        ),
        Operation(
            "qk_norm_rope", "rope", "RMSNorm of the heads of q and k, RoPE", ("rope:_norm_rope_kernel",), ("qk_norm_rope",),
            cases="rope:CASES",
            arguments="q: [B, Nq, T, D: rotated head] activations any strides, k: [B, Nk, T, D] of q any strides, "
            "cos: [C, T, D] of q or fp32, sin: [C, T, D] of cos, q_norm?: [D] of q together with k_norm = None, "
            "k_norm?: [D] of q = None, eps: float = 1e-6 -> q_out: like q, k_out: like k",
            check="checks:check_rotary",
        ),
        Operation(
            "paged_attention_prefill", "attention.dispatch", "causal attention of new tokens on KV pages",
            ("attention.dispatch:PREFILL", "attention.dispatch:PARTIAL"), ("attention.reference:paged_attention_prefill",),
            _PAGED, "attention.prefill:CASES",
            arguments=f"q: [T, Nq, D: head] activations, {_PAGES}, query_starts: [B + 1] int32, seq_lens: [B] int32, "
            f"scale: float, *, {_SCALES} -> out: [T, Nq, D] of q",
            check="attention.checks:check_settings", launch="ops:zeros",
        ),
        Operation(
            "paged_attention_decode", "attention.dispatch", "attention of one new token per sequence on KV pages",
            ("attention.dispatch:DECODE",), ("attention.reference:paged_attention_decode",), _PAGED, "attention.decode:CASES",
            arguments=f"q: [B, Nq, D: head] activations, {_PAGES}, seq_lens: [B] int32, scale: float, *, {_SCALES} "
            "-> out: [B, Nq, D] of q",
            check="attention.checks:check_settings", launch="ops:splits",
        ),
        Operation(
            "paged_attention_decode_few", "attention.dispatch", "causal attention of up to 8 new tokens per sequence on KV pages",
            ("attention.dispatch:FEW",), ("paged_attention",), _PAGED, "attention.decode_few:CASES", exported=True,
            no_op="`paged_attention_prefill` is the op for several new tokens",
        ),
        Operation(
            "rope_paged_attention_decode", "attention.dispatch", "RoPE, KV write and attention of one new token per sequence",
            ("attention.dispatch:DECODE",), ("attention.reference:rope_paged_attention_decode",), _PAGED,
            "attention.decode:CASES",
            arguments="qkv: [B, (Nq + 2 * Nkv) * D] activations rows apart, cos_sin: [L, R] fp32, "
            "k_pages!: [P, page_size: page, Nkv, D: head] of qkv or fp8 with k_scales, "
            "v_pages!: [P, page_size, Nkv, D] of k_pages, block_tables: [B, pages] int32, seq_lens: [B] int32, scale: float, "
            f"Nq: int, {_QK_NORM}, *, {_WRITTEN_SCALES} -> out: [B, Nq, D] of qkv",
            check="attention.checks:check_settings", launch="ops:splits",
        ),
        Operation(
            "gated_delta_net", "gated_delta.dispatch", "gated DeltaNet after its projections: convolution, rule, gated norm",
            ("gated_delta.dispatch:DECODE", "gated_delta.dispatch:CHUNK"), ("gated_delta.reference:gated_delta_net",),
            "gated_delta.dispatch:cost", "gated_delta.dispatch:CASES", no_op="it reads and writes the states of minirt's slots",
        ),
        Operation(
            "router_logits", "moe.dispatch", "RMSNorm and the logits of a mixture's router", ("moe.dispatch:ROUTER",),
            ("rms_norm", "linear"), "moe.router:cost", "moe.router:CASES",
            no_op="with more than few tokens, its result is partial sums for `mixture_residual`",
        ),
        Operation(
            "route", "moe.route", "a mixture's choice of experts; tokens sorted by expert",
            ("moe.route:_choose_kernel", "moe.route:_place_kernel"), ("route", "expert_tiles"), "moe.route:cost",
            "moe.route:CASES", no_op="its result is tiles for the kernels of experts",
        ),
        Operation(
            "mixture_residual", "moe.dispatch", "a mixture's chosen experts and the residual", ("moe.dispatch:REGIMES",),
            ("mixture_residual",), "moe.dispatch:cost", "moe.products:CASES",
            arguments="h: [T, H] activations, logits: [T, E] of h, gate_up: [E, any, any] any dtype, "
            "down: [E, any, any] any dtype, residual: [T, H] of h, top_k: int, normalize: bool, activation: activation, "
            "norm_weight?: [H: norm] of h = None, eps: float = 0.0, "
            "gate_up_scale?: [E, ...] any dtype together with down_scale = None, down_scale?: [E, ...] any dtype = None "
            "-> out: [T, H] of h",
            check="checks:check_mixture",
        ),
        Operation(
            "sample", "sampling.sample", "a token for each row of logits: temperature, top-k, top-p, min-p, draw",
            ("sampling.sample:_race_kernel", "sampling.sample:_check_kernel", "sampling.filters:_select_kernel"),
            ("sampling.reference:sample",), "sampling.sample:cost", "sampling.sample:CASES", exported=True,
            no_op="it draws with the records of minirt's sampler",
        ),
        Operation(
            "process", "sampling.process", "masks, biases and penalties of logits", ("sampling.process:_process_kernel",),
            ("sampling.reference:process",), no_op="it reads and counts in buffers of minirt's sampler",
        ),
        Operation(
            "token_logprobs", "sampling.logprobs", "log-probabilities and ranks of tokens, and the most probable tokens",
            ("sampling.logprobs:_parts_kernel", "sampling.logprobs:_combine_kernel"),
            ("sampling.reference:token_logprobs",),
            no_op="its result is packed for minirt's sampler",
        ),
        Operation(
            "edit_table", "step.kernels", "the host's edits of the table of slots", ("step.kernels:_edit_kernel",),
            ("step.table:edit_table",), no_op=_TABLE,
        ),
        Operation(
            "derive", "step.kernels", "a step's input, from the table of slots", ("step.kernels:_derive_kernel",),
            ("step.table:derive",), no_op="it fills the buffers of minirt's step",
        ),
        Operation(
            "commit", "step.kernels", "a step's tokens into the table of slots", ("step.kernels:_commit_kernel",),
            ("step.table:commit",), no_op=_TABLE,
        ),
        Operation(
            "report", "step.kernels", "a step's drafts, for the host", ("step.kernels:_report_kernel",), ("step.table:report",),
            no_op=_TABLE,
        ),
        Operation(
            "copy_rows", "step.copies", "a row of many tensors to another row", ("step.copies:_copy_rows_kernel",),
            ("step.rows:copy_rows",), no_op="it copies states and pages of minirt's KV cache",
        ),
        Operation(
            "propose", "speculative.ngram", "drafts by n-gram matching", ("speculative.ngram:_ngram_kernel",),
            ("speculative.reference:propose",), no_op=_TABLE,
        ),
        Operation(
            "draft_input", "speculative.draft_input", "the input of a draft model: a token's embedding and a hidden state",
            ("speculative.draft_input:_draft_input_kernel",), ("embedding", "rms_norm"),
            cases="speculative.draft_input:CASES",
            arguments="tokens: [T] int64, table: [V, H] of hidden, hidden: [T, H] activations, token_norm: [H: norm] of hidden, "
            "hidden_norm: [H: norm] of hidden, eps: float -> out: [T, 2 * H] of hidden",
            no_op="only the layers of a draft model have it",
        ),
        Operation(
            "first_pass", "speculative.draft_model", "the tokens of a draft model's first pass",
            ("speculative.draft_model:_first_pass_kernel",), ("speculative.draft_model_reference:first_pass",), no_op=_TABLE,
        ),
        Operation(
            "draw", "speculative.draft_model", "a draft of each sequence, and the input of the next pass",
            ("speculative.draft_model:_race_kernel", "speculative.draft_model:_draw_kernel"),
            ("speculative.draft_model_reference:draw",), no_op=_TABLE,
        ),
    )
}  # fmt: skip
# What `minirt.kernels` exports besides the functions of `OPERATIONS`.
HELPERS = {"RowMaxima": "linear.product", "Workspace": "launch", "row_maxima_tiles": "linear.dispatch"}
EXPORTED = {
    name: operation.module for name, operation in OPERATIONS.items()
    if operation.exported or (operation.no_op is None and name != operation.module)
} | HELPERS  # fmt: skip
