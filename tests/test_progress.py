"""Progress on stderr. Catches a first start on a GPU that seems to hang while kernels are compiled, and a line for each."""

import io
import sys

import pytest

from minirt.progress import COMPILING, load_bars


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_compiling_is_said_once_with_the_place(stream, monkeypatch, tmp_path):
    from triton import knobs

    for name, value in (("TRITON_CACHE_DIR", None), ("TRITON_HOME", str(tmp_path / "home")), ("TRITON_CACHE_DIR", str(tmp_path))):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        knobs.refresh_knobs()
        monkeypatch.setattr(sys, "stderr", shown := stream())
        with load_bars() as progress:
            progress("weights", 5 << 20, 5 << 20)
            for stage in ("kernels", COMPILING, COMPILING):
                progress(stage, 1, 2)
        text = "".join(shown.getvalue().split())
        assert text.count("compilingthemodel'sTritonkernels:once") == 1
        assert "".join(knobs.cache.dir.split()) in text
    knobs.refresh_knobs()


def test_without_new_kernels_nothing_is_said(monkeypatch):
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    with load_bars() as progress:
        progress("weights", 1, 1)
        progress("kernels", 2, 2)
        progress("CUDA graphs", 2, 2)
    with load_bars(enabled=False) as progress:
        assert progress is None
    assert shown.getvalue() == ""


def test_sizes_of_weights_are_in_the_unit_of_messages(monkeypatch):
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with load_bars() as progress:
        progress("weights", 3 << 30, 4 << 30)
    assert "3GiB/4GiB" in shown.getvalue()
