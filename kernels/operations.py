"""`OPERATIONS`: every operation that has a Triton kernel: its function, its kernels, its reference, its cost and its test cases.

`minirt.kernels` exports the functions of this table, `minirt bench kernels` measures them, and docs/kernels.md lists the exported
ones. The table is plain text, so that importing it imports no Triton. Places are "module:name", the module below
`minirt.kernels`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Operation:
    """An operation on plain tensors.

    Attributes:
        name: of its function.
        module: where the function is, below `minirt.kernels`.
        what: a short description, for tables.
        kernels: the tables of regimes that choose its kernels, and other kernels that it may run.
        reference: functions of `minirt.kernels.reference` (or of the place named) that together define the result.
        cost: the function that returns (bytes, floating-point operations) of the work. None: it is too small to be measured.
        cases: the shapes that its tests have in common.
        exported: whether `minirt.kernels` has the function. It cannot have one whose name is that of its module.
        schema: of `torch.ops.minirt.NAME`, see `minirt.kernels.ops`. The names are those of the function's parameters.
        no_op: why there is no such op; None if there is one.
    """

    name: str
    module: str
    what: str
    kernels: tuple[str, ...]
    reference: tuple[str, ...]
    cost: str | None = None
    cases: str | None = None
    exported: bool = True
    schema: str | None = None
    no_op: str | None = None

    @property
    def function(self) -> Callable[..., Any]:
        """The public function. The first access imports Triton."""
        return find(f"{self.module}:{self.name}")

    def work(self, *args: Any, **options: Any) -> tuple[int, int]:
        """(bytes read and written, floating-point operations), by the function `cost`."""
        return find(self.cost or "")(*args, **options)


def find(place: str) -> Any:
    """The object at a place of the table."""
    module, _, name = place.partition(":")
    return getattr(import_module(f"minirt.kernels.{module}"), name)


_LINEAR = ("linear.dispatch:REGIMES", "norm:_rms_norm_kernel", "quantize:REGIMES")
_PAGED = "attention.prefill:cost"
OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            "embedding", "embedding", "rows of the embedding table", ("embedding:_embedding_kernel",), ("embedding",),
            "embedding:cost", "embedding:CASES", exported=False,
            schema="(Tensor tokens, Tensor table) -> Tensor",
        ),
        Operation(
            "rms_norm", "norm", "RMSNorm", ("norm:_rms_norm_kernel",), ("rms_norm",), "norm:cost", "norm:CASES",
            schema="(Tensor x, Tensor weight, float eps) -> Tensor",
        ),
        Operation(
            "norm_residual", "norm", "RMSNorm and residual", ("norm:_rms_norm_kernel",), ("norm_residual",),
            "norm:cost", "norm:CASES",
            schema="(Tensor y, Tensor weight, float eps, Tensor residual) -> Tensor",
        ),
        Operation(
            "rms_norm_quantize", "norm", "RMSNorm and FP8 quantization", ("norm:_rms_norm_kernel",),
            ("rms_norm", "quantize_fp8", "quantize_fp8_blocks"), "norm:cost", "norm:CASES",
            schema="(Tensor x, Tensor weight, float eps, *, bool blocks=False) -> (Tensor, Tensor)",
        ),
        Operation(
            "quantize", "quantize", "FP8 quantization with one scale per token, or per token and 128 columns",
            ("quantize:REGIMES",), ("quantize_fp8", "quantize_fp8_blocks"), "quantize:cost", "quantize:CASES", exported=False,
            schema="(Tensor x, *, bool blocks=False) -> (Tensor, Tensor)",
        ),
        Operation(
            "norm_linear", "linear.dispatch", "RMSNorm, linear layer", _LINEAR, ("rms_norm", "linear"), "linear.dispatch:cost",
            "linear.dispatch:CASES",
            schema="(Tensor x, Tensor? norm_weight, float eps, Tensor weight, Tensor? bias=None, Tensor? scale=None) -> Tensor",
        ),
        Operation(
            "norm_gate_up", "linear.dispatch", "RMSNorm, gate and up projection, gated activation", _LINEAR,
            ("rms_norm", "linear", "gated"), "linear.dispatch:cost", "linear.dispatch:CASES",
            schema="(Tensor x, Tensor? norm_weight, float eps, Tensor weight, str activation, Tensor? bias=None, "
            "Tensor? scale=None) -> Tensor",
        ),
        Operation(
            "linear_residual", "linear.dispatch", "linear layer and residual", _LINEAR, ("linear",), "linear.dispatch:cost",
            "linear.dispatch:CASES",
            schema="(Tensor x, Tensor weight, Tensor residual, Tensor? bias=None, Tensor? scale=None) -> Tensor",
        ),
        Operation(
            "qk_norm_rope_kv_write", "attention.rope_write", "RMSNorm of q and k, RoPE, KV write",
            ("attention.rope_write:REGIMES",), ("rms_norm", "rope", "write_kv"), "attention.rope_write:cost",
            "attention.rope_write:CASES",
            schema="(Tensor qkv, Tensor cos_sin, Tensor positions, Tensor slots, Tensor(a!) k_pages, Tensor(b!) v_pages, int Nq, "
            "int Nkv, Tensor? q_norm=None, Tensor? k_norm=None, float eps=1e-6, *, Tensor(c!)? k_scales=None, "
            "Tensor(d!)? v_scales=None) -> Tensor",
        ),
        Operation(
            "norm_rope", "rope", "RMSNorm of heads, RoPE", ("rope:_norm_rope_kernel",), ("norm_rope",), cases="rope:CASES",
            schema="(Tensor x, Tensor cos, Tensor sin, Tensor? norm_weight=None, float eps=1e-6) -> Tensor",
        ),
        Operation(
            "qk_norm_rope", "rope", "RMSNorm of the heads of q and k, RoPE", ("rope:_norm_rope_kernel",), ("norm_rope",),
            cases="rope:CASES",
            schema="(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? q_norm=None, Tensor? k_norm=None, float eps=1e-6) "
            "-> (Tensor, Tensor)",
        ),
        Operation(
            "paged_attention_prefill", "attention.dispatch", "causal attention of new tokens on KV pages",
            ("attention.dispatch:PREFILL", "attention.dispatch:PARTIAL"), ("paged_attention",), _PAGED, "attention.prefill:CASES",
            schema="(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_tables, Tensor query_starts, Tensor seq_lens, "
            "float scale, *, Tensor? k_scales=None, Tensor? v_scales=None) -> Tensor",
        ),
        Operation(
            "paged_attention_decode", "attention.dispatch", "attention of one new token per sequence on KV pages",
            ("attention.dispatch:DECODE",), ("paged_attention",), _PAGED, "attention.decode:CASES",
            schema="(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_tables, Tensor seq_lens, float scale, "
            "*, Tensor? k_scales=None, Tensor? v_scales=None) -> Tensor",
        ),
        Operation(
            "paged_attention_decode_few", "attention.dispatch", "causal attention of up to 8 new tokens per sequence on KV pages",
            ("attention.dispatch:FEW",), ("paged_attention",), _PAGED, "attention.decode_few:CASES",
            no_op="`paged_attention_prefill` is the op for several new tokens",
        ),
        Operation(
            "rope_paged_attention_decode", "attention.dispatch", "RoPE, KV write and attention of one new token per sequence",
            ("attention.dispatch:DECODE",), ("rms_norm", "rope", "write_kv", "paged_attention"), _PAGED, "attention.decode:CASES",
            schema="(Tensor qkv, Tensor cos_sin, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor block_tables, Tensor seq_lens, "
            "float scale, int Nq, Tensor? q_norm=None, Tensor? k_norm=None, float eps=1e-6, *, "
            "Tensor(c!)? k_scales=None, Tensor(d!)? v_scales=None) -> Tensor",
        ),
        Operation(
            "gated_delta_net", "gated_delta.dispatch", "gated DeltaNet after its projections: convolution, rule, gated norm",
            ("gated_delta.dispatch:DECODE", "gated_delta.dispatch:CHUNK"),
            ("minirt.kernels.gated_delta.reference:gated_delta_net",), "gated_delta.dispatch:cost", "gated_delta.dispatch:CASES",
            exported=False,
            no_op="it reads and writes the states of minirt's slots",
        ),
        Operation(
            "router_logits", "moe.dispatch", "RMSNorm and the logits of a mixture's router", ("moe.dispatch:ROUTER",),
            ("rms_norm", "linear"), "moe.router:cost", "moe.router:CASES", exported=False,
            no_op="with more than few tokens, its result is partial sums for `mixture_residual`",
        ),
        Operation(
            "route", "moe.route", "a mixture's choice of experts; tokens sorted by expert",
            ("moe.route:_choose_kernel", "moe.route:_place_kernel"), ("route", "expert_tiles"), "moe.route:cost",
            "moe.route:CASES", exported=False,
            no_op="its result is tiles for the kernels of experts",
        ),
        Operation(
            "mixture_residual", "moe.dispatch", "a mixture's chosen experts and the residual", ("moe.dispatch:REGIMES",),
            ("route", "mixture"), "moe.dispatch:cost", "moe.products:CASES",
            schema="(Tensor h, Tensor logits, Tensor gate_up, Tensor down, Tensor residual, int top_k, bool normalize, "
            "str activation, Tensor? norm_weight=None, float eps=0.0, Tensor? gate_up_scale=None, "
            "Tensor? down_scale=None) -> Tensor",
        ),
        Operation(
            "sample", "sampling.sample", "a token for each row of logits: temperature, top-k, top-p, min-p, draw",
            ("sampling.sample:_race_kernel", "sampling.sample:_check_kernel", "sampling.filters:_select_kernel"),
            ("minirt.engine.execute.sampler:sample",), "sampling.sample:cost", "sampling.sample:CASES",
            no_op="its reference is the engine's sampler, which `kernels` may not import",
        ),
        Operation(
            "process", "sampling.process", "masks, biases and penalties of logits", ("sampling.process:_process_kernel",),
            ("minirt.engine.execute.logits_processors:process",), exported=False,
            no_op="it reads and counts in buffers of minirt's sampler",
        ),
        Operation(
            "token_logprobs", "sampling.logprobs", "log-probabilities and ranks of tokens, and the most probable tokens",
            ("sampling.logprobs:_parts_kernel", "sampling.logprobs:_combine_kernel"),
            ("minirt.engine.execute.logprobs:token_logprobs",), exported=False,
            no_op="its result is packed for minirt's sampler",
        ),
        Operation(
            "edit_table", "step.kernels", "the host's edits of the table of slots", ("step.kernels:_edit_kernel",),
            ("minirt.kernels.step.table:edit_table",), exported=False,
            no_op="it changes the table of slots, which only minirt's step has",
        ),
        Operation(
            "derive", "step.kernels", "a step's input, from the table of slots", ("step.kernels:_derive_kernel",),
            ("minirt.kernels.step.table:derive",), exported=False,
            no_op="it fills the buffers of minirt's step",
        ),
        Operation(
            "commit", "step.kernels", "a step's tokens into the table of slots", ("step.kernels:_commit_kernel",),
            ("minirt.kernels.step.table:commit",), exported=False,
            no_op="it changes the table of slots, which only minirt's step has",
        ),
        Operation(
            "report", "step.kernels", "a step's drafts, for the host", ("step.kernels:_report_kernel",),
            ("minirt.kernels.step.table:report",), exported=False,
            no_op="it reads the table of slots, which only minirt's step has",
        ),
        Operation(
            "copy_rows", "step.copies", "a row of many tensors to another row", ("step.copies:_copy_rows_kernel",),
            ("minirt.kernels.step.rows:copy_rows",), exported=False,
            no_op="it copies states and pages of minirt's KV cache",
        ),
        Operation(
            "propose", "speculative.ngram", "drafts by n-gram matching", ("speculative.ngram:_ngram_kernel",),
            ("minirt.kernels.speculative.reference:propose",), exported=False,
            no_op="it changes the table of slots, which only minirt's step has",
        ),
        Operation(
            "draft_input", "speculative.draft_input", "the input of a draft model: a token's embedding and a hidden state",
            ("speculative.draft_input:_draft_input_kernel",), ("embedding", "rms_norm"),
            cases="speculative.draft_input:CASES", exported=False,
            no_op="only the layers of a draft model have it",
        ),
        Operation(
            "first_pass", "speculative.draft_model", "the tokens of a draft model's first pass",
            ("speculative.draft_model:_first_pass_kernel",), ("minirt.kernels.speculative.draft_model_reference:first_pass",),
            exported=False, no_op="it reads the table of slots, which only minirt's step has",
        ),
        Operation(
            "draw", "speculative.draft_model", "a draft of each sequence, and the input of the next pass",
            ("speculative.draft_model:_race_kernel", "speculative.draft_model:_draw_kernel"),
            ("minirt.kernels.speculative.draft_model_reference:draw",), exported=False,
            no_op="it changes the table of slots, which only minirt's step has",
        ),
    )
}  # fmt: skip
# What `minirt.kernels` exports besides the functions of `OPERATIONS`.
HELPERS = {"RowMaxima": "linear.product", "Workspace": "launch", "row_maxima_tiles": "linear.dispatch"}
EXPORTED = {name: operation.module for name, operation in OPERATIONS.items() if operation.exported} | HELPERS
