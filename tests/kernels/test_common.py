"""Catches: launchers that threads import at the same time (a kernel then runs with another's), or a driver left changed."""

import threading
from types import SimpleNamespace

from minirt.kernels import common


def test_launchers_are_imported_one_at_a_time(monkeypatch):
    busy, built = threading.Lock(), []

    def build(src, metadata):
        alone = busy.acquire(blocking=False)
        total = sum(range(20_000))  # long enough for other threads to run
        built.append((src, metadata, alone, total))
        if alone:
            busy.release()
        return src

    driver = SimpleNamespace(launcher_cls=build)
    fake = SimpleNamespace(runtime=SimpleNamespace(driver=SimpleNamespace(active=driver)))
    monkeypatch.setattr(common, "triton", fake)
    monkeypatch.setattr(common.torch.cuda, "is_available", lambda: True)
    with common.compiling_threads() as pool:
        results = list(pool.map(lambda i: driver.launcher_cls(i, "metadata"), range(300)))
    assert results == list(range(300))
    assert all(alone for _, _, alone, _ in built)
    assert driver.launcher_cls is build
