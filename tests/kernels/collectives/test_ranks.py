"""Ranks in processes that add up and gather at the same time: in Triton's interpreter on shared memory, or on two GPUs."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from minirt.kernels.collectives import all_reduce as kernel
from minirt.kernels.collectives import reference
from minirt.kernels.collectives.gather_maxima import gather_maxima
from minirt.kernels.collectives.peers import connect, peers_of

ROOT = str(Path(__file__).parents[3])


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Processes of a test import it by its name, as pytest does."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setattr(sys, "path", [ROOT, *sys.path])


HIDDEN, ROWS = 96, 5
BITS = {torch.float32: torch.int32, torch.float16: torch.int16}


def begin(rank, ranks, folder, backend):
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    return torch.Generator().manual_seed(rank), torch.Generator().manual_seed(97)  # of parts, of what all ranks have


def on_cpu(rank, ranks, folder):
    """Each rank makes some calls, and compares them with the reference, which has the parts from gloo."""
    generator, common = begin(rank, ranks, folder, "gloo")
    for dtype, bits in BITS.items():
        shape = (2, ranks, ROWS, HIDDEN)
        size = torch.Size(shape).numel()
        files = [f"{folder}/{dtype}-{peer}" for peer in range(ranks)]
        memories = [torch.from_file(file, shared=True, size=size, dtype=bits).view(shape) for file in files]
        peers = peers_of(rank, memories, dtype, 1 << 15, dist.group.WORLD)
        dist.barrier()
        for T in (1, ROWS, 3, 2, 1, ROWS, ROWS):
            x = torch.randn(T, HIDDEN, generator=generator).to(dtype)
            residual = torch.randn(T, HIDDEN, generator=common).to(dtype)
            expected = reference.all_reduce(x, peers, residual)  # no barrier: a rank's sum may begin before another's has ended
            assert torch.equal(kernel.all_reduce(x, peers, residual), expected)
        assert not peers.mailbox.failed.item()
    files = [f"{folder}/maxima-{peer}" for peer in range(ranks)]
    shape = (2, ranks, ROWS, 16)
    memories = [torch.from_file(file, shared=True, size=32 * ranks * ROWS, dtype=torch.int64).view(shape) for file in files]
    peers = peers_of(rank, memories, torch.int64, 1 << 15, dist.group.WORLD)
    dist.barrier()
    for R in (ROWS, 1, ROWS):  # memory that was never written, as before the first step
        gather_maxima(torch.zeros(R, 37, dtype=torch.int64), peers, 100 * rank)
    for R in (1, ROWS, 3, 2, 1, ROWS, ROWS):
        maxima = of_rank(R, 37, generator)
        expected = reference.gather_maxima(maxima, peers, 100 * rank)
        assert torch.equal(gather_maxima(maxima, peers, 100 * rank), expected)
    assert not peers.mailbox.failed.item()
    dist.destroy_process_group()


def of_rank(R, P, generator):
    """Packed maxima of random logits, of ids from 0 on."""
    keys = torch.randint(-(1 << 31) + 1, 1 << 31, (R, P), generator=generator)
    return (keys << 32) | ((1 << 31) - 1 - torch.arange(P))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs, the test below")
def test_in_the_interpreter(tmp_path):
    """Catches a row that is stored where another rank does not look, or before the place is empty; ranks with other sums."""
    multiprocessing.spawn(on_cpu, (3, str(tmp_path)), 3)


def on_gpus(rank, ranks, folder):
    torch.cuda.set_device(rank)
    generator, common = begin(rank, ranks, folder, "nccl")
    device, dtype, H, pdl = torch.device("cuda", rank), torch.bfloat16, 3584, torch.cuda.get_device_capability()[0] >= 9
    peers = connect(dist.group.WORLD, 64, H, dtype, device)
    sizes = (1, 64, 7)  # an odd number: each replay begins with the other place
    of_maxima = connect(dist.group.WORLD, 64, 1, torch.int64, device)
    maxima = [torch.zeros(T, 1188, dtype=torch.int64, device=device) for T in sizes]
    x, residual = ([torch.zeros(T, H, dtype=dtype, device=device) for T in sizes] for _ in range(2))

    def calls():
        outs = []
        for part, before in zip(x, residual, strict=True):
            part = part + 0.0  # a kernel before, which writes what the sum reads
            outs.append(kernel.all_reduce(part, peers, before, pdl=pdl))
        return outs, [gather_maxima(part + 0, of_maxima, 76_032 * rank) for part in maxima]

    calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs, largest = calls()
    for replay in range(100):
        for part, before in zip(x, residual, strict=True):
            part.copy_(torch.randn(part.shape, generator=generator))
            before.copy_(torch.randn(before.shape, generator=common))
        for part in maxima:
            part.copy_(of_rank(*part.shape, generator))
        if replay % 10 == rank:
            torch.cuda._sleep(3_000_000)  # this rank's GPU is late
        graph.replay()
        for part, before, out in zip(x, residual, outs, strict=True):
            assert torch.equal(out, reference.all_reduce(part, peers, before))
        for part, gathered in zip(maxima, largest, strict=True):
            assert torch.equal(gathered, reference.gather_maxima(part, of_maxima, 76_032 * rank))
    assert not peers.mailbox.failed.item()
    assert not of_maxima.mailbox.failed.item()
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_on_two_gpus(tmp_path):
    """Catches, in CUDA graphs: values of an older replay, a sum that reads before the kernel before it has ended, a place that
    is not empty when a fast rank stores its next row."""
    multiprocessing.spawn(on_gpus, (2, str(tmp_path)), 2)
