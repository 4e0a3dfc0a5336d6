"""The input of a draft model that continues from hidden states: an embedding and a state, each normalized, side by side."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minirt.kernels.checks import check_arguments
from minirt.kernels.launch import next_power_of_2
from minirt.kernels.prepared import prepared

CASES = [{"T": 1, "V": 7, "H": 16}, {"T": 3, "V": 101, "H": 97}, {"T": 17, "V": 33, "H": 576}, {"T": 2, "V": 5, "H": 5120}]


@prepared
@triton.jit
def _draft_input_kernel(
    tokens_ptr, table_ptr, hidden_ptr, token_norm_ptr, hidden_norm_ptr, out_ptr, H, eps, BLOCK_H: tl.constexpr
):  # fmt: skip
    """A half of a row of out [T, 2H]: program (t, 0) has the embedding, (t, 1) the state."""
    t, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h = tl.arange(0, BLOCK_H)
    inside = h < H
    if half == 0:
        weight = tl.load(token_norm_ptr + h, mask=inside, other=0.0)
        row = tl.load(tokens_ptr + t).to(tl.int64)  # int64: V · H may exceed 2³¹
        x = tl.load(table_ptr + row * H + h, mask=inside, other=0.0)
    else:
        weight = tl.load(hidden_norm_ptr + h, mask=inside, other=0.0)
        x = tl.load(hidden_ptr + t * H + h, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    # Rounded to the activation dtype before it is multiplied by the weight, as in `rms_norm`.
    y = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)).to(x.dtype) * weight
    tl.store(out_ptr + (2 * t + half) * H + h, y, mask=inside)


def draft_input(
    tokens: Tensor, table: Tensor, hidden: Tensor, token_norm: Tensor, hidden_norm: Tensor, eps: float,
    out: Tensor | None = None, *, check: bool = True,
) -> Tensor:  # fmt: skip
    """[rms_norm(table[tokens], token_norm) | rms_norm(hidden, hidden_norm)]: [T] int64 and [T, H] → [T, 2H].

    Every token must be in [0, V) of table [V, H]; this is not checked.
    """
    if check:
        norms = {"token_norm": token_norm, "hidden_norm": hidden_norm}
        check_arguments("draft_input", tokens=tokens, table=table, hidden=hidden, out=out, **norms)
    T, H = hidden.shape
    out = torch.empty(T, 2 * H, dtype=hidden.dtype, device=hidden.device) if out is None else out
    if T:
        block = next_power_of_2(H)
        warps = min(16, max(1, block // 512))
        _draft_input_kernel[(T, 2)](tokens, table, hidden, token_norm, hidden_norm, out, H, eps, BLOCK_H=block, num_warps=warps)
    return out

