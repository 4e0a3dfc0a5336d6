"""Compiling ahead of the first launch. Catches: a kernel that runs anyway, is compiled once for each launch, or is loaded only by
its launch, on another device or not at all; an error that is lost, or is raised in spite of `ignore_errors`; launches of other
threads that do not run; launchers of one name, loaded by several threads, that get each other's contents; launches that stay
patched."""

import pytest
import torch
from triton.runtime import JITFunction

from minirt.kernels.compile.ahead_of_time import AheadOfTime


@pytest.fixture(scope="module")
def seen(probe):
    return probe("ahead_of_time_probe.py")


def test_each_kernel_is_compiled_and_loaded_once_and_runs_when_launched_again(seen):
    first, then = seen["first"], seen["then"]
    assert first["compiled"] == ["small"] * 2
    assert first["loaded"] == [["small", "cuda:1"]] * 2
    assert first["launched"] == []
    assert first["progress"] == [[1, 2, False], [2, 2, False]]
    assert (then["compiled"], then["loaded"]) == (first["compiled"], first["loaded"])
    assert then["launched"] == ["small"] * 2
    assert seen["early"] == 1, "a launch waits for what is being compiled"


def test_what_else_launches_is_as_ever(seen):
    """What cannot be loaded raises, or is left to its launch; after an interruption, in other threads, and of one name."""
    assert (seen["raised"], seen["left"]) == ("OutOfResources", "OutOfResources")
    assert (seen["ended"], seen["after"]) == ("KeyboardInterrupt", 2)
    assert seen["both"] == [1, 1, 1, 1]
    assert len({*seen["modules"]}) == len(seen["modules"]) > 2, "launchers of one name keep their contents"
    assert seen["restored"], "Triton is as it was"


def test_without_a_gpu_nothing_changes():
    run, seen = JITFunction.run, []
    with AheadOfTime(torch.device("cpu"), lambda *_: pytest.fail("nothing is compiled")) as compiler:
        compiler.add(lambda: seen.append(JITFunction.run is run))
        compiler.wait()
    assert seen == [True]
