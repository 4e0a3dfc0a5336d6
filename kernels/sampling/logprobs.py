"""Log-probabilities of tokens and of the most probable ones: the same as by `reference.py`, which defines them.

Several programs share the vocabulary of a row. A second kernel combines their maxima, sums of exponentials, largest logits and
ranks with one program for each row, in a fixed order, so a row's result does not depend on the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.argmax import LOWEST, logit_of, pack, sortable, token_of
from minirt.kernels.checks import check_tensor
from minirt.kernels.launch import cdiv, next_power_of_2
from minirt.kernels.prepared import prepared
from minirt.kernels.sampling.filters import BLOCK_V, row_block
from minirt.kernels.sampling.limits import MAX_TOP

_MOST = tl.constexpr(MAX_TOP)


@triton.jit
def _token_logit(logits_ptr, tokens_ptr, b, V):
    """The logit of a row's token; of token 0 if it has none."""
    return tl.load(logits_ptr + b.to(tl.int64) * V + tl.maximum(tl.load(tokens_ptr + b), 0))


@prepared
@triton.jit
def _parts_kernel(logits_ptr, tokens_ptr, wanted_ptr, maxima_ptr, sums_ptr, larger_ptr, candidates_ptr, V, BLOCK: tl.constexpr):
    """Stores what the second kernel needs of one block of a row: its largest logits are packed with their indices."""
    b, at = tl.program_id(1), tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    count = tl.load(wanted_ptr + b)
    if count < 0:
        return
    v, valid, x = row_block(logits_ptr, b, tl.program_id(0), V, BLOCK)
    top = tl.max(x, 0)
    tl.store(maxima_ptr + at, top)
    tl.store(sums_ptr + at, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0))
    tl.store(larger_ptr + at, tl.sum((x > _token_logit(logits_ptr, tokens_ptr, b, V)).to(tl.int32), 0))
    packed = tl.where(valid, pack(sortable(x), v), LOWEST)
    for i in range(count):
        best = tl.max(packed, 0)
        tl.store(candidates_ptr + at.to(tl.int64) * _MOST + i, best)
        packed = tl.where(packed == best, LOWEST, packed)


@prepared
@triton.jit
def _combine_kernel(
    logits_ptr, tokens_ptr, wanted_ptr, maxima_ptr, sums_ptr, larger_ptr, candidates_ptr, out_ptr, V, SPLITS,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Stores a row's result."""
    b = tl.program_id(0)
    count = tl.load(wanted_ptr + b)
    if count < 0:
        return
    s = tl.arange(0, BLOCK_S)
    maxima = tl.load(maxima_ptr + b * SPLITS + s, mask=s < SPLITS, other=float("-inf"))
    sums = tl.load(sums_ptr + b * SPLITS + s, mask=s < SPLITS, other=0.0)
    top = tl.max(maxima, 0)
    log_sum = tl.log(tl.sum(tl.where(maxima == float("-inf"), 0.0, sums * tl.exp(maxima - top)), 0))
    out_ptr += b * (2 + 2 * _MOST)
    logprob = (_token_logit(logits_ptr, tokens_ptr, b, V) - top) - log_sum
    tl.store(out_ptr, logprob.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 1, 1 + tl.sum(tl.load(larger_ptr + b * SPLITS + s, mask=s < SPLITS, other=0), 0))
    c = tl.arange(0, BLOCK_C)
    inside = (c < SPLITS * _MOST) & (c % _MOST < count)
    packed = tl.load(candidates_ptr + b.to(tl.int64) * SPLITS * _MOST + c, mask=inside, other=LOWEST)
    for i in range(count):
        best = tl.max(packed, 0)
        tl.store(out_ptr + 2 + i, token_of(best).to(tl.int32))
        tl.store(out_ptr + 2 + _MOST + i, ((logit_of(best) - top) - log_sum).to(tl.int32, bitcast=True))
        packed = tl.where(packed == best, LOWEST, packed)


class LogprobsWorkspace:
    """Scratch memory of `token_logprobs` for up to `max_rows` rows of up to `vocab` logits."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device | str) -> None:
        count, f32 = max_rows * cdiv(vocab, BLOCK_V), torch.float32
        sizes = (count, f32), (count, f32), (count, torch.int32), (count * MAX_TOP, torch.int64)
        # Of each part: its maximum, its sum of exponentials, how many logits are larger than the token's, the largest logits.
        self.parts = tuple(torch.empty(size, dtype=dtype, device=device) for size, dtype in sizes)


def token_logprobs(
    logits: Tensor, tokens: Tensor, wanted: Tensor, out: Tensor, workspace: LogprobsWorkspace | None = None
) -> Tensor:
    """See `dispatch.token_logprobs`, for at most MAX_TOP tokens a row. 2 launches, no sync with the host.

    Raises:
        InputError: a wrong shape, dtype or device; a workspace that is too small.
    """
    check_tensor("logits", logits, (None, None), torch.float32, logits.device)
    R, V = logits.shape
    check_tensor("tokens", tokens, (R,), torch.int64, logits.device)
    check_tensor("wanted", wanted, (R,), torch.int32, logits.device)
    check_tensor("out", out, (R, 2 + 2 * MAX_TOP), torch.int32, logits.device)
    splits = cdiv(V, BLOCK_V)
    parts = (workspace or LogprobsWorkspace(R, V, logits.device)).parts
    if len(parts[0]) < R * splits:
        raise InputError("too small", where="workspace", expected=f"{R * splits} parts", found=len(parts[0]))
    if not R:
        return out
    _parts_kernel[(splits, R)](logits, tokens, wanted, *parts, V, BLOCK=BLOCK_V)
    sizes = {"BLOCK_S": next_power_of_2(splits), "BLOCK_C": next_power_of_2(splits * MAX_TOP)}
    _combine_kernel[(R,)](logits, tokens, wanted, *parts, out, V, splits, **sizes)
    return out
