"""The eager PyTorch definition of adapters."""

import torch
from torch import Tensor

from minirt.kernels.adapters.operands import AdapterWeights, Groups
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


def group_rows(adapters: Tensor, places: int, block: int) -> Groups:
    """The rows of adapters [T] int32 in `places` places, in as many tiles as there are at most (`most_tiles`)."""
    rows = len(adapters)
    counts, tiles, first = torch.bincount(adapters + 1, minlength=places + 1).tolist(), list[tuple[int, int, int]](), 0
    for adapter, count in enumerate(counts, -1):
        tiles += [(adapter, first + i, min(block, count - i)) for i in range(0, count, block)]
        first += count
    tiles += [(0, 0, 0)] * (min(rows, rows // block + places + 1) - len(tiles))
    order = torch.argsort(adapters, stable=True).to(torch.int32)
    return Groups(order, torch.tensor(tiles, dtype=torch.int32, device=adapters.device).view(-1, 3), block)


def add_adapters(
    x: Tensor, weights: AdapterWeights, groups: Groups, out: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0,
    activation: str | None = None,
) -> Tensor:  # fmt: skip
    """Add scaling · B · A · rms_norm(x) of each row's adapter to `out` [T, N], which is written; x [T, K].

    With an activation, `out` has the rows of gate and up, and the result is another tensor: act(gate) · up, [T, N / 2].
    """
    h = x if norm_weight is None else rms_norm(x, norm_weight, eps)
    parts = _joined(weights.tiles.tolist())
    for adapter, first, count in groups.tiles.tolist():
        rows = groups.order[first : first + count].long()
        for module in {module for _, _, module in parts} if adapter >= 0 and count else ():
            if rank := int(weights.ranks[adapter, module]):
                y = h[rows].float() @ weights.a[adapter, module, :rank].float().T * weights.scales[adapter, module]
                for start, end, of in parts:
                    if of == module:
                        out[rows, start:end] += (y @ weights.b[adapter, start:end, :rank].float().T).to(out.dtype)
    if activation is None:
        return out
    gate, up = out.chunk(2, 1)
    return ACTIVATE[activation](gate) * up


def _joined(tiles: list[list[int]]) -> list[tuple[int, int, int]]:
    """(first row, end, module) of tiles, those of one module next to each other as one."""
    joined = list[tuple[int, int, int]]()
    for first, end, module, _ in tiles:
        if joined and joined[-1][1:] == (first, module):
            joined[-1] = joined[-1][0], end, module
        else:
            joined.append((first, end, module))
    return joined
