"""`OPERATIONS`: every operation that has a Triton kernel: its function, its kernels, its reference, its cost and its test cases.

`minirt.kernels` exports the functions of this table, `minirt bench kernels` measures them, and docs/kernels.md lists them. The
table is plain text, so that importing it imports no Triton. Places are "module:name", the module below `minirt.kernels`.
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
    """

    name: str
    module: str
    what: str
    kernels: tuple[str, ...]
    reference: tuple[str, ...]
    cost: str | None = None
    cases: str | None = None
    exported: bool = True

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
        ),
        Operation("rms_norm", "norm", "RMSNorm", ("norm:_rms_norm_kernel",), ("rms_norm",), "norm:cost", "norm:CASES"),
        Operation(
            "rms_norm_quantize", "norm", "RMSNorm and FP8 quantization", ("norm:_rms_norm_kernel",),
            ("rms_norm", "quantize_fp8", "quantize_fp8_blocks"), "norm:cost", "norm:CASES",
        ),
        Operation(
            "quantize", "quantize", "FP8 quantization with one scale per token, or per token and 128 columns",
            ("quantize:REGIMES",), ("quantize_fp8", "quantize_fp8_blocks"), "quantize:cost", "quantize:CASES", exported=False,
        ),
        Operation(
            "norm_linear", "linear.dispatch", "RMSNorm, linear layer", _LINEAR, ("rms_norm", "linear"), "linear.dispatch:cost",
            "linear.dispatch:CASES",
        ),
        Operation(
            "norm_gate_up", "linear.dispatch", "RMSNorm, gate and up projection, gated activation", _LINEAR,
            ("rms_norm", "linear", "gated"), "linear.dispatch:cost", "linear.dispatch:CASES",
        ),
        Operation(
            "linear_residual", "linear.dispatch", "linear layer and residual", _LINEAR, ("linear",), "linear.dispatch:cost",
            "linear.dispatch:CASES",
        ),
        Operation(
            "qk_norm_rope_kv_write", "attention.rope_write", "RMSNorm of q and k, RoPE, KV write",
            ("attention.rope_write:REGIMES",), ("rms_norm", "rope", "write_kv"), "attention.rope_write:cost",
            "attention.rope_write:CASES",
        ),
        Operation(
            "paged_attention_prefill", "attention.dispatch", "causal attention of new tokens on KV pages",
            ("attention.dispatch:PREFILL", "attention.dispatch:PARTIAL"), ("paged_attention",), _PAGED, "attention.prefill:CASES",
        ),
        Operation(
            "paged_attention_decode", "attention.dispatch", "attention of one new token per sequence on KV pages",
            ("attention.dispatch:DECODE",), ("paged_attention",), _PAGED, "attention.decode:CASES",
        ),
        Operation(
            "rope_paged_attention_decode", "attention.dispatch", "RoPE, KV write and attention of one new token per sequence",
            ("attention.dispatch:DECODE",), ("rms_norm", "rope", "write_kv", "paged_attention"), _PAGED, "attention.decode:CASES",
        ),
        Operation(
            "router_logits", "moe.dispatch", "RMSNorm and the logits of a mixture's router", ("moe.dispatch:ROUTER",),
            ("rms_norm", "linear"), "moe.router:cost", "moe.router:CASES", exported=False,
        ),
        Operation(
            "route", "moe.route", "a mixture's choice of experts; tokens sorted by expert",
            ("moe.route:_choose_kernel", "moe.route:_place_kernel"), ("route", "expert_tiles"), "moe.route:cost",
            "moe.route:CASES", exported=False,
        ),
        Operation(
            "mixture_residual", "moe.dispatch", "a mixture's chosen experts and the residual", ("moe.dispatch:REGIMES",),
            ("route", "mixture"), "moe.dispatch:cost", "moe.products:CASES",
        ),
        Operation(
            "sample", "sampling.sample", "a token for each row of logits: temperature, top-k, top-p, min-p, draw",
            ("sampling.sample:_race_kernel", "sampling.filters:_select_kernel", "sampling.sample:_token_kernel"),
            ("minirt.engine.sampler:sample",), "sampling.sample:cost", "sampling.sample:CASES",
        ),
        Operation(
            "process", "sampling.process", "masks, biases and penalties of logits", ("sampling.process:_process_kernel",),
            ("minirt.engine.logits_processors:process",), exported=False,
        ),
        Operation(
            "token_logprobs", "sampling.logprobs", "log-probabilities and ranks of tokens, and the most probable tokens",
            ("sampling.logprobs:_parts_kernel", "sampling.logprobs:_combine_kernel"), ("minirt.engine.logprobs:token_logprobs",),
            exported=False,
        ),
        Operation(
            "edit_table", "step.kernels", "the host's edits of the table of slots", ("step.kernels:_edit_kernel",),
            ("minirt.kernels.step.table:edit_table",), exported=False,
        ),
        Operation(
            "derive", "step.kernels", "a step's input, from the table of slots", ("step.kernels:_derive_kernel",),
            ("minirt.kernels.step.table:derive",), exported=False,
        ),
        Operation(
            "commit", "step.kernels", "a step's tokens into the table of slots", ("step.kernels:_commit_kernel",),
            ("minirt.kernels.step.table:commit",), exported=False,
        ),
    )
}  # fmt: skip
# What `minirt.kernels` exports besides the functions of `OPERATIONS`.
HELPERS = {"RowMaxima": "linear.product", "Workspace": "launch", "row_maxima_tiles": "linear.dispatch"}
EXPORTED = {name: operation.module for name, operation in OPERATIONS.items() if operation.exported} | HELPERS
