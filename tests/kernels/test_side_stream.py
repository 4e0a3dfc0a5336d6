"""`SideStream`: in a CUDA graph, kernels of a branch run between what was launched before `fork` and what follows `join`."""

import pytest
import torch

from minirt.kernels.side_stream import SideStream


def work(side: SideStream, x: torch.Tensor, out: torch.Tensor) -> None:
    """out = (2x)² + 2x, its square in the branch. Each part takes long, so that a missing edge shows."""
    doubled = x + x
    for _ in range(8):
        doubled = doubled.sort(1).values  # x is sorted: it stays
    with side.fork():
        squared = doubled * doubled
        for _ in range(8):
            squared = squared.sort(1).values
    side.join()
    torch.add(squared, doubled, out=out)


def test_outside_of_a_capture_kernels_run_in_order(device):
    """Catches: a branch that is not joined where no CUDA graph is captured."""
    x = torch.arange(6.0, device=device).repeat(3, 1)
    out = torch.full_like(x, torch.nan)
    work(SideStream(device), x, out)
    assert torch.equal(out, 4 * x * x + 2 * x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_in_a_cuda_graph_a_branch_has_its_inputs_and_is_waited_for():
    """Catches: a missing edge to or from the branch, and a branch that stays outside of the CUDA graph."""
    device = torch.device("cuda")
    side, x = SideStream(device), torch.arange(1e5, device=device).repeat(20, 1)
    out = torch.full_like(x, torch.nan)
    work(side, x, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work(side, x, out)
    for factor in (1.0, 3.0, 0.5):
        x.copy_(factor * torch.arange(1e5, device=device))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, 4 * x * x + 2 * x)
