"""The eager PyTorch definition of sums and row maxima over ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

from minirt.kernels.collectives.peers import Peers


def all_reduce(x: Tensor, peers: Peers, residual: Tensor | None = None) -> Tensor:
    """residual + the sum over the ranks of x [T, H], in fp32 and in their order, rounded once. All ranks call it together."""
    parts = [torch.empty_like(x) for _ in range(peers.ranks)]
    dist.all_gather(parts, x, group=peers.group)
    return sum_of(parts, residual)


def sum_of(parts: list[Tensor], residual: Tensor | None = None) -> Tensor:
    """`all_reduce` of parts that are known."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return (total if residual is None else total + residual).to(parts[0].dtype)


def gather_maxima(maxima: Tensor, peers: Peers, first: int) -> Tensor:
    """Of each rank, the largest of its row maxima [R, P] → [R, N], with ids of the whole vocabulary."""
    largest = maxima.amax(1) - first  # the lower half of a packed maximum is MAX_INT - id
    parts = [torch.empty_like(largest) for _ in range(peers.ranks)]
    dist.all_gather(parts, largest, group=peers.group)
    return torch.stack(parts, 1)
