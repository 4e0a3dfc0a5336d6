"""`sample` and `token_logprobs`: the kernels on an NVIDIA GPU, `reference.py` elsewhere. Imports no Triton by itself."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minirt.device import is_nvidia
from minirt.errors import InputError
from minirt.kernels.sampling import reference
from minirt.kernels.sampling.batch import SamplingBatch
from minirt.kernels.sampling.limits import MAX_TOP

if TYPE_CHECKING:
    from minirt.kernels.sampling.logprobs import LogprobsWorkspace
    from minirt.kernels.sampling.sample import SamplingWorkspace


def _on_triton(impl: str, device: torch.device, place: str) -> bool:
    if impl not in ("auto", "eager", "triton"):
        raise InputError("unknown implementation", where=place, expected="auto, eager or triton", found=impl)
    return impl == "triton" or (impl == "auto" and is_nvidia(device))


def sample(
    logits: Tensor, batch: SamplingBatch, impl: str = "auto", workspace: "SamplingWorkspace | None" = None,
    out: Tensor | None = None, row_maxima: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sample one token for each row of `logits`.

    A greedy row takes its largest logit, the lowest index among equals. A row that contains NaN or +inf, or only -inf, gives -1,
    which is no token id. To raise an error here would cost a sync, so the caller, who reads the tokens anyway, turns -1 into an
    error.

    Args:
        logits: [B, V] fp32; fp16 and bf16 are computed in fp32.
        impl: "eager", "triton" or "auto" ("triton" on an NVIDIA GPU, "eager" elsewhere).
        workspace: scratch memory of the Triton kernels; None: the call allocates it.
        out: [B] int64; receives the tokens.
        row_maxima: [B, P] from the LM head (see `RowMaxima`). If all rows are greedy, the Triton kernels read only these.
    Returns:
        [B] int64.
    Raises:
        InputError: `logits` does not have one row per request, or `impl` is unknown.
    """
    rows = batch.step.shape[0]
    if logits.ndim != 2 or logits.shape[0] != rows:
        what, expected, shape = "logits must have one row per request", f"logits of shape ({rows}, V)", f"{tuple(logits.shape)}"
        raise InputError(what, where="sample", expected=expected, found=shape)
    if (impl != "auto" or not logits.is_cpu) and _on_triton(impl, logits.device, "sample"):
        from minirt.kernels.sampling import sample as kernels

        logits = logits.to(torch.float32).contiguous()
        return kernels.sample(logits, batch, workspace=workspace, out=out, row_maxima=row_maxima)
    tokens = reference.sample(logits, batch)
    return tokens if out is None else out.copy_(tokens)


def columns(num_top: int) -> int:
    """Columns of the result of `token_logprobs`: the kernels always have room for `MAX_TOP` tokens."""
    return 2 + 2 * max(num_top, MAX_TOP)


def token_logprobs(
    logits: Tensor, tokens: Tensor, wanted: Tensor, num_top: int, *, impl: str = "auto", out: Tensor | None = None,
    workspace: "LogprobsWorkspace | None" = None,
) -> Tensor:  # fmt: skip
    """Log-probability, rank and most probable tokens for each row.

    Args:
        logits: [R, V] fp32, as the model computes them.
        tokens: [R] int64; a row whose token is no id (-1) has values without a meaning.
        wanted: [R] int32: how many of the most probable tokens a row lists, at most `num_top`; -1: a row that wants nothing,
            whose result has no meaning.
        num_top: at most V. Above `MAX_TOP`, the eager form computes the result everywhere.
        out: [R, columns(num_top)] int32, for the result.
        workspace: scratch memory of the kernels; None: the call allocates it.
    Returns:
        [R, columns(num_top)] int32: the bits of the fp32 log-probability, the rank, token ids, and the bits of their
        log-probabilities.
    """
    triton = _on_triton(impl, logits.device, "token_logprobs")
    if out is None:
        out = torch.zeros(len(tokens), columns(num_top), dtype=torch.int32, device=logits.device)
    logits = logits.to(torch.float32)
    if num_top > MAX_TOP or not triton:
        return reference.token_logprobs(logits, tokens, num_top, out)
    from minirt.kernels.sampling import logprobs as kernels

    return kernels.token_logprobs(logits, tokens, wanted, out, workspace)
