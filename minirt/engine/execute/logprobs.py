"""`token_logprobs`: the log-probabilities of tokens and of the most probable ones, from the model's logits.

Its result is one int32 tensor, so that it reaches the host in one copy; `unpack` reads it there. This eager form defines what
the kernels of `minirt.kernels.sampling.logprobs` compute.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minirt.device import is_nvidia
from minirt.engine.request import TokenLogprobs
from minirt.errors import InputError

if TYPE_CHECKING:
    from minirt.kernels.sampling.logprobs import LogprobsWorkspace

MAX_TOP = 20  # the most tokens that the kernels list for each row


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
    if impl not in ("auto", "eager", "triton"):
        raise InputError("unknown implementation", where="token_logprobs", expected="auto, eager or triton", found=impl)
    room = max(num_top, MAX_TOP)
    if out is None:
        out = torch.zeros(len(tokens), columns(num_top), dtype=torch.int32, device=logits.device)
    logits = logits.to(torch.float32)
    if num_top <= MAX_TOP and (impl == "triton" or (impl == "auto" and is_nvidia(logits.device))):
        from minirt.kernels.sampling import logprobs as kernels

        return kernels.token_logprobs(logits, tokens, wanted, out, workspace)
    token = tokens.clamp(min=0).unsqueeze(1)
    logprobs = logits.log_softmax(-1)
    out[:, :1] = logprobs.gather(1, token).view(torch.int32)
    out[:, 1] = 1 + (logits > logits.gather(1, token)).sum(-1)
    ids = _keys(logits).topk(num_top).indices
    out[:, 2 : 2 + num_top] = ids
    out[:, 2 + room : 2 + room + num_top] = logprobs.gather(1, ids).view(torch.int32)
    return out


def _keys(logits: Tensor) -> Tensor:
    """int64 keys in the order of the logits, all different: among equal logits the lower index has the larger key."""
    bits = (logits + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return (ordered << 32) | (0x7FFFFFFF - torch.arange(logits.shape[1], device=logits.device))


def unpack(packed: Tensor, tokens: Sequence[int], wanted: Sequence[int]) -> list[TokenLogprobs | None]:
    """The rows of a result of `token_logprobs` on the host, each with the number of most probable tokens that it wants."""
    room = (packed.shape[1] - 2) // 2
    floats = packed.view(torch.float32)
    logprobs, ranks = floats[:, 0].tolist(), packed[:, 1].tolist()
    ids, tops = packed[:, 2 : 2 + room].tolist(), floats[:, 2 + room :].tolist()
    rows = zip(tokens, wanted, logprobs, ranks, ids, tops, strict=True)
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(top[:count], values[:count], strict=True))) if count >= 0 else None
        for token, count, logprob, rank, top, values in rows
    ]
