"""Captures of CUDA graphs beside other threads.

Catches a capture that the memory allocations of another thread end ("operation not permitted when stream is capturing"): with
"global", all threads are restricted. A capture that the garbage collector ends, which frees graphs of a closed engine.
"""

import gc
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from minirt.engine.execute.cuda_graphs import CudaGraphs

DEVICE = torch.device("cuda", 0)


def test_captures_restrict_only_their_own_thread(monkeypatch):
    """Each capture is on one stream of the model's device. All share the memory pool of the first one."""
    calls = []

    @contextmanager
    def on(stream):
        calls.append(stream)
        yield
        calls.append("off")

    def graph():
        return SimpleNamespace(
            pool=lambda: "the first pool", capture_end=lambda: calls.append("end"),
            capture_begin=lambda pool, capture_error_mode: calls.append((pool, capture_error_mode)),
        )  # fmt: skip

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("stream of", device))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    graphs = CudaGraphs(DEVICE)
    for size in (1, 2):
        graphs.capture(size, lambda: calls.append("collects" if gc.isenabled() else "work"))
    with pytest.raises(KeyError, match="of the work"):
        graphs.capture(3, lambda: {}["of the work"])
    stream, mode = ("stream of", DEVICE), "thread_local"
    captures = [[stream, (pool, mode), "work", "end", "off"] for pool in (None, "the first pool")]
    assert calls == [*captures[0], *captures[1], stream, ("the first pool", mode), "end"], "each ends, also after an error"
    assert (2 in graphs, 3 in graphs) == (True, False)
    assert gc.isenabled()


@pytest.mark.gpu
def test_another_thread_allocates_while_a_graph_is_captured():
    """256 MiB are more than PyTorch's allocator has at hand, so that it asks the driver, which refuses in a global capture."""
    stream, errors = torch.cuda.Stream(DEVICE), list[BaseException]()
    x = torch.zeros(3, device=DEVICE)
    x.add_(1)  # loads the kernel, which a capture may not do
    torch.cuda.synchronize()
    torch.cuda.empty_cache()

    def allocate():
        try:
            with torch.cuda.stream(stream):
                torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
        except BaseException as error:
            errors.append(error)

    def step():
        x.add_(1)
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()

    graphs = CudaGraphs(DEVICE)
    graphs.capture("step", step)
    graphs.replay("step")
    assert not errors
    assert x.tolist() == [2.0] * 3, "the capture itself computes nothing"
