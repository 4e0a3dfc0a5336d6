"""The eager PyTorch definition of adapters."""

import torch
from torch import Tensor

from minirt.kernels.adapters.operands import AdapterRows, AdapterWeights, most_steps
from minirt.kernels.linear.product import LOW_RANK_BLOCK
from minirt.kernels.reference import ACTIVATE, rms_norm


def adapters_of(table: Tensor, column: int, seq_slots: Tensor, query_starts: Tensor, tokens: int) -> Tensor:
    """The adapter of each of T tokens, [T] int32, from a column of the table of slots; −1: none, and padding.

    Args:
        table: [S, words] int32. `seq_slots`: [B] int32, `query_starts`: [B + 1] int32, as in `StepTensors`.
    """
    adapters = torch.where(seq_slots >= 0, table[seq_slots.clamp(min=0).long(), column], -1)
    token = torch.arange(tokens, dtype=torch.int32, device=table.device)
    sequence = torch.searchsorted(query_starts[1:].contiguous(), token, right=True)
    return torch.where(sequence < len(adapters), adapters[sequence.clamp(max=len(adapters) - 1)], -1)


def used_steps(adapters: Tensor, modules: int, rank: int, places: int) -> Tensor:
    """`LowRank.steps` of rows with these adapters [T] int32: which blocks of columns they use, and before that how many."""
    used = {int(place) for place in adapters.tolist() if place >= 0}
    columns = (place * modules * rank + r for place in used for r in range(modules * rank))
    blocks = sorted({column // LOW_RANK_BLOCK for column in columns})
    unused = [0] * (most_steps(modules, rank, places) - len(blocks))
    return torch.tensor([len(blocks), *blocks, *unused], dtype=torch.int32, device=adapters.device)


def add_adapters(
    x: Tensor, weights: AdapterWeights, rows: AdapterRows, out: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0,
    activation: str | None = None,
) -> Tensor:  # fmt: skip
    """Add scaling · B · A · rms_norm(x) of each row's adapter to `out` [T, N], which is written; x [T, K].

    With an activation, `out` has the rows of gate and up, and the result is another tensor: act(gate) · up, [T, N / 2].
    """
    h = x if norm_weight is None else rms_norm(x, norm_weight, eps)
    b = weights.b.view(len(weights.b), *weights.a.shape[:3])
    for place in rows.adapters.unique().tolist():
        if place >= 0:
            chosen = rows.adapters == place
            a, scales = weights.a[place].float(), weights.scales[place, :, None]
            y = torch.where(scales != 0, torch.einsum("tk,prk->tpr", h[chosen].float(), a) * scales, 0.0)
            out[chosen] += (y.flatten(1) @ b[:, place].flatten(1).float().T).to(out.dtype)
    if activation is None:
        return out
    gate, up = out.chunk(2, 1)
    return ACTIVATE[activation](gate) * up
